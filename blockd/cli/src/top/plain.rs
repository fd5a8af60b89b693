//! A snapshot as plain text, for logs and pipes.

use super::model::Snapshot;
use super::rates::STAGES;
use super::values;
use crate::holds::{REASONS, WHOLE};
use crate::output::table::{Side, Table};
use crate::output::{Output, percent};

/// Pools, their space, volumes, latencies, holds, devices and clients, a table each.
#[must_use]
pub(super) fn snapshot(snapshot: &Snapshot, output: &Output) -> String {
    let tables = [
        pools(snapshot, output),
        space(snapshot, output),
        volumes(snapshot, output),
        latencies(snapshot),
        held(snapshot),
        devices(snapshot, output),
        clients(snapshot),
    ];
    let texts = tables.map(|table| table.render(output.terminal()));
    texts.join("\n") + "\n"
}

fn pools(snapshot: &Snapshot, output: &Output) -> Table {
    let mut table = Table::new(&[
        ("pool", Side::Left),
        ("state", Side::Left),
        ("size", Side::Right),
        ("used", Side::Right),
        ("free", Side::Right),
        ("promised", Side::Right),
        ("volumes", Side::Right),
        ("snapshots", Side::Right),
        ("to let go", Side::Right),
    ]);
    for pool in &snapshot.pools {
        table.row([
            pool.name.as_str().into(),
            pool.state.into(),
            output.size(pool.size_bytes).into(),
            output.size(pool.used_bytes).into(),
            output.size(pool.free_bytes).into(),
            output.size(pool.promised_bytes).into(),
            pool.volume_count.saturating_sub(pool.snapshot_count).to_string().into(),
            pool.snapshot_count.to_string().into(),
            output.size(pool.releasing_bytes).into(),
        ]);
    }
    table
}

fn space(snapshot: &Snapshot, output: &Output) -> Table {
    let mut table = Table::new(&[
        ("space", Side::Left),
        ("state", Side::Left),
        ("written/s", Side::Right),
        ("full in", Side::Right),
        ("low below", Side::Right),
        ("very low", Side::Right),
        ("waiting", Side::Right),
        ("slowed", Side::Right),
    ]);
    for pool in &snapshot.pools {
        table.row([
            pool.name.as_str().into(),
            pool.space_state.unwrap_or("-").into(),
            output.size(pool.write_rate_bytes).into(),
            pool.full_in().into(),
            output.size(pool.low_bytes).into(),
            output.size(pool.very_low_bytes).into(),
            pool.waiting_volumes.to_string().into(),
            pool.slowed_volumes.to_string().into(),
        ]);
    }
    table
}

fn volumes(snapshot: &Snapshot, output: &Output) -> Table {
    let mut table = Table::new(&[
        ("volume", Side::Left),
        ("pool", Side::Left),
        ("size", Side::Right),
        ("mapped", Side::Right),
        ("read/s", Side::Right),
        ("write/s", Side::Right),
        ("read B/s", Side::Right),
        ("write B/s", Side::Right),
        ("conn", Side::Right),
        ("parked", Side::Right),
    ]);
    for volume in &snapshot.volumes {
        table.row([
            volume.label().into(),
            volume.pool.as_str().into(),
            output.size(volume.size_bytes).into(),
            output.size(volume.mapped_bytes).into(),
            volume.reads_per_second.to_string().into(),
            volume.writes_per_second.to_string().into(),
            output.size(volume.read_bytes_per_second).into(),
            output.size(volume.write_bytes_per_second).into(),
            volume.connections.to_string().into(),
            volume.parked.to_string().into(),
        ]);
    }
    table
}

fn latencies(snapshot: &Snapshot) -> Table {
    let mut columns = vec![("latency", Side::Left)];
    columns.extend(STAGES.iter().map(|&(_, name)| (name, Side::Right)));
    let mut table = Table::new(&columns);
    for volume in &snapshot.volumes {
        let stages =
            volume.latency.iter().map(|latency| times(latency.p50_ns, latency.p99_ns).into());
        table.row(std::iter::once(volume.label().into()).chain(stages));
    }
    table
}

/// The median and the 99th percentile in full.
fn times(p50_ns: u64, p99_ns: u64) -> String {
    values::times(p50_ns, p99_ns).swap_remove(0)
}

/// Why volumes are held back, and for how much of the time.
fn held(snapshot: &Snapshot) -> Table {
    let mut columns = vec![("held back", Side::Left)];
    columns.extend(REASONS.iter().map(|&(_, name)| (name, Side::Right)));
    columns.push(("now", Side::Right));
    let mut table = Table::new(&columns);
    for volume in &snapshot.volumes {
        let reasons = volume.held.iter().map(|held| match held.ns_per_second {
            0 => "-".into(),
            ns => percent(ns, WHOLE).into(),
        });
        let now = volume.held_back().1.to_string().into();
        table.row(std::iter::once(volume.label().into()).chain(reasons).chain([now]));
    }
    table
}

fn devices(snapshot: &Snapshot, output: &Output) -> Table {
    let mut table = Table::new(&[
        ("device", Side::Left),
        ("pool", Side::Left),
        ("own read/s", Side::Right),
        ("own write/s", Side::Right),
        ("own flush/s", Side::Right),
        ("own read B/s", Side::Right),
        ("own write B/s", Side::Right),
        ("latency", Side::Right),
        ("in flight", Side::Right),
        ("errors", Side::Right),
    ]);
    for device in &snapshot.devices {
        table.row([
            if device.path.is_empty() { "memory" } else { &device.path }.into(),
            device.pool.as_str().into(),
            device.reads_per_second.to_string().into(),
            device.writes_per_second.to_string().into(),
            device.flushes_per_second.to_string().into(),
            output.size(device.read_bytes_per_second).into(),
            output.size(device.write_bytes_per_second).into(),
            times(device.p50_ns, device.p99_ns).into(),
            device.in_flight.to_string().into(),
            device.errors.to_string().into(),
        ]);
    }
    table
}

fn clients(snapshot: &Snapshot) -> Table {
    let mut table = Table::new(&[
        ("client", Side::Left),
        ("volume", Side::Left),
        ("pool", Side::Left),
        ("worker", Side::Right),
        ("in flight", Side::Right),
        ("mode", Side::Left),
    ]);
    for client in &snapshot.clients {
        let known = |number: Option<u32>| {
            number.map_or_else(|| "-".to_owned(), |number| number.to_string())
        };
        table.row([
            client.client.as_str().into(),
            client.volume.as_str().into(),
            client.pool.as_str().into(),
            known(client.worker).into(),
            known(client.in_flight).into(),
            if client.read_only { "read-only" } else { "read-write" }.into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::answers;
    use super::*;
    use crate::output::terminal::Terminal;

    #[test]
    fn a_snapshot_is_a_table_for_each_kind() {
        let shown = Snapshot::between(Some(&answers(2)), &answers(4));
        let text = snapshot(&shown, &Output::with(false, false, Terminal::none()));
        let expected = "\
POOL     STATE    SIZE   USED    FREE  PROMISED  VOLUMES  SNAPSHOTS  TO LET GO
default  open   48 GiB  8 GiB  40 GiB    20 GiB        1          1      3 GiB

SPACE    STATE  WRITTEN/S  FULL IN  LOW BELOW  VERY LOW  WAITING  SLOWED
default  low      200 MiB    3 min     41 GiB     1 GiB        1       1

VOLUME              POOL       SIZE   MAPPED  READ/S  WRITE/S  READ B/S  WRITE B/S  CONN  PARKED
archive (snapshot)  default  10 GiB  900 MiB       0        0       0 B        0 B     0       0
data                default  10 GiB  512 MiB    1000     2000     4 MiB      8 MiB     2       3

LATENCY             LIMIT        MAP  WAIT        MEDIA  COMMIT         TOTAL
archive (snapshot)      -          -     -            -       -             -
data                    -  1 us/2 ms     -  40 us/80 ms       -  50 us/100 ms

HELD BACK           TURN   LIMIT  SPACE  MEMORY  NOW
archive (snapshot)     -       -      -       -    0
data                   -  90.0 %      -       -    1

DEVICE  POOL  OWN READ/S  OWN WRITE/S  OWN FLUSH/S  OWN READ B/S  OWN WRITE B/S  LATENCY  IN FLIGHT  \
         ERRORS

CLIENT  VOLUME  POOL  WORKER  IN FLIGHT  MODE

";
        assert_eq!(text, expected);
    }
}
