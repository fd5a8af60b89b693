//! The tables of each view.

use super::grid::{Cell, Column, Content, Grid, Kind};
use super::history::{History, Key};
use super::model::{ClientRow, DeviceRow, PoolRow, Snapshot, VolumeRow};
use super::rates::{Latency, STAGES};
use super::sort::Sort;
use super::values::{self, Forms};
use crate::holds::{REASONS, WHOLE};
use crate::output::terminal::Tone;

/// From this share on, in thousandths, something is worth a look, or is nearly used up.
const MUCH: u64 = 750;
const NEARLY_ALL: u64 = 900;

/// A column: title, kind, rank and the order of which it is the key.
type Described = (&'static str, Kind, u8, Option<Sort>);

fn grid(columns: &[Described], rows: Vec<Vec<Cell>>) -> Grid {
    let column = |&(title, kind, rank, sort): &Described| Column { title, kind, rank, sort };
    Grid { columns: columns.iter().map(column).collect(), rows }
}

fn words(text: impl Into<String>) -> Cell {
    Cell { content: Content::Words(text.into()), tone: Tone::Plain }
}

fn number(forms: Forms) -> Cell {
    Cell { content: Content::Number(forms), tone: Tone::Plain }
}

fn count(count: u64) -> Cell {
    number(values::count(count)).dim_if(count == 0)
}

fn size(bytes: u64) -> Cell {
    number(values::size(bytes)).dim_if(bytes == 0)
}

/// Errors: none is of no interest, one is bad.
fn errors(errors: u64) -> Cell {
    count(errors).toned(if errors > 0 { Tone::Bad } else { Tone::Dim })
}

fn series(history: &History, key: &Key) -> Cell {
    Cell { content: Content::Series(history.of(key)), tone: Tone::Colour(0) }
}

/// A bar that is green, yellow or red by its length.
fn bar(thousandths: Option<u64>) -> Cell {
    let tone = match thousandths {
        Some(NEARLY_ALL..) => Tone::Bad,
        Some(MUCH..) => Tone::Warning,
        Some(_) => Tone::Good,
        None => Tone::Dim,
    };
    Cell { content: Content::Bar(thousandths), tone }
}

impl Cell {
    fn toned(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }

    fn dim_if(self, is_dim: bool) -> Self {
        if is_dim { self.toned(Tone::Dim) } else { self }
    }
}

/// `part` of `whole` in thousandths; nothing where there is no whole.
fn thousandths(part: u64, whole: u64) -> Option<u64> {
    let share = (u128::from(part) * 1000).checked_div(u128::from(whole))?;
    Some(u64::try_from(share).unwrap_or(u64::MAX))
}

/// The tone of a pool's space.
fn space_tone(pool: &PoolRow) -> Tone {
    match (pool.state, pool.space_state) {
        ("open", None | Some("normal")) => Tone::Good,
        ("open", Some("low")) => Tone::Warning,
        ("closed", _) => Tone::Dim,
        _ => Tone::Bad,
    }
}

/// A pool's state: of its space where it is open.
fn state(pool: &PoolRow) -> Cell {
    let state = match (pool.state, pool.space_state) {
        ("open", Some(space)) => space,
        (state, _) => state,
    };
    words(state).toned(space_tone(pool))
}

/// How full pools are, how fast they fill, and their load.
pub(super) fn pools(snapshot: &Snapshot, history: &History) -> Grid {
    let columns = [
        ("POOL", Kind::Words, 0, Some(Sort::Name)),
        ("STATE", Kind::Words, 2, None),
        ("FULL", Kind::Drawing, 4, None),
        ("USED", Kind::Number, 0, Some(Sort::Space)),
        ("SHARE", Kind::Number, 3, None),
        ("FREE", Kind::Number, 1, None),
        ("SIZE", Kind::Number, 6, None),
        ("PROMISED", Kind::Number, 7, None),
        ("FILLS/S", Kind::Number, 2, None),
        ("FULL IN", Kind::Number, 1, None),
        ("IOPS", Kind::Number, 5, Some(Sort::Operations)),
        ("BYTES/S", Kind::Number, 8, Some(Sort::Bytes)),
        ("LATELY", Kind::Drawing, 9, None),
    ];
    let row = |pool: &PoolRow| {
        let share = thousandths(pool.used_bytes, pool.size_bytes);
        let mut full = bar(share);
        full.tone = space_tone(pool);
        vec![
            words(&pool.name),
            state(pool),
            full,
            size(pool.used_bytes),
            number(values::share(pool.used_bytes, pool.size_bytes)),
            size(pool.free_bytes),
            size(pool.size_bytes),
            size(pool.promised_bytes),
            size(pool.write_rate_bytes),
            number(values::only(pool.full_in())).toned(space_tone(pool)),
            count(pool.operations_per_second),
            size(pool.bytes_per_second),
            series(history, &Key::Pool(pool.name.clone())),
        ]
    };
    grid(&columns, snapshot.pools.iter().map(row).collect())
}

/// Marks of pools, and the volumes that a lack of space stops.
pub(super) fn marks(snapshot: &Snapshot) -> Grid {
    let columns = [
        ("SPACE", Kind::Words, 0, Some(Sort::Name)),
        ("LOW BELOW", Kind::Number, 1, None),
        ("VERY LOW", Kind::Number, 2, None),
        ("WAITING", Kind::Number, 0, None),
        ("SLOWED", Kind::Number, 0, None),
        ("TO RECLAIM", Kind::Number, 3, None),
        ("VOLUMES", Kind::Number, 4, None),
        ("SNAPSHOTS", Kind::Number, 5, None),
    ];
    let row = |pool: &PoolRow| {
        let stopped = |volumes: u32, tone| {
            count(volumes.into()).toned(if volumes > 0 { tone } else { Tone::Dim })
        };
        vec![
            words(&pool.name),
            size(pool.low_bytes),
            size(pool.very_low_bytes),
            stopped(pool.waiting_volumes, Tone::Bad),
            stopped(pool.slowed_volumes, Tone::Warning),
            size(pool.releasing_bytes),
            count(pool.volume_count.saturating_sub(pool.snapshot_count).into()),
            count(pool.snapshot_count.into()),
        ]
    };
    grid(&columns, snapshot.pools.iter().map(row).collect())
}

/// The load of volumes.
pub(super) fn volumes(snapshot: &Snapshot, history: &History) -> Grid {
    let columns = [
        ("VOLUME", Kind::Words, 0, Some(Sort::Name)),
        ("POOL", Kind::Words, 5, None),
        ("IOPS", Kind::Number, 0, Some(Sort::Operations)),
        ("LATELY", Kind::Drawing, 7, None),
        ("READ/S", Kind::Number, 9, None),
        ("WRITE/S", Kind::Number, 9, None),
        ("R B/S", Kind::Number, 0, Some(Sort::Bytes)),
        ("W B/S", Kind::Number, 0, Some(Sort::Bytes)),
        ("P50", Kind::Number, 3, None),
        ("P99", Kind::Number, 1, Some(Sort::Latency)),
        ("HELD", Kind::Number, 2, None),
        ("LIMIT", Kind::Drawing, 8, None),
        ("MAPPED", Kind::Number, 4, Some(Sort::Space)),
        ("SIZE", Kind::Number, 10, None),
        ("CONN", Kind::Number, 11, None),
        ("PARKED", Kind::Number, 6, None),
        ("ERRORS", Kind::Number, 12, None),
    ];
    let row = |volume: &VolumeRow| {
        let total = volume.total();
        let (p50, p99) = total.map_or((0, 0), |total| (total.p50_ns, total.p99_ns));
        vec![
            words(volume.label()),
            words(&volume.pool),
            count(volume.operations_per_second),
            series(history, &Key::Volume(volume.pool.clone(), volume.name.clone())),
            count(volume.reads_per_second),
            count(volume.writes_per_second),
            size(volume.read_bytes_per_second),
            size(volume.write_bytes_per_second),
            time(p50),
            time(p99),
            held(volume.held_back().0),
            bar(volume.limit_thousandths()),
            size(volume.mapped_bytes),
            size(volume.size_bytes),
            count(volume.connections.into()),
            count(volume.parked).toned(if volume.parked > 0 { Tone::Warning } else { Tone::Dim }),
            errors(volume.errors),
        ]
    };
    grid(&columns, snapshot.volumes.iter().map(row).collect())
}

fn time(ns: u64) -> Cell {
    number(values::time(ns)).dim_if(ns == 0)
}

/// The share of the time for which connections and queues were held back; 100 % for each.
fn held(ns_per_second: u64) -> Cell {
    match ns_per_second {
        0 => number(values::only("-")).toned(Tone::Dim),
        ns if ns >= WHOLE / 2 => number(values::share(ns, WHOLE)).toned(Tone::Warning),
        ns => number(values::share(ns, WHOLE)),
    }
}

/// The way of a request: for how much of the time it is held back before it is taken, and why, then
/// the mean time in each stage. Those from map to other add up to the total.
pub(super) fn way(snapshot: &Snapshot) -> Grid {
    let mut columns =
        vec![("STAGES", Kind::Words, 0, Some(Sort::Name)), ("POOL", Kind::Words, 9, None)];
    let reasons = ["TURN", "LIMIT", "SPACE", "MEMORY"].into_iter().zip([4, 2, 3, 6]);
    columns.extend(reasons.map(|(title, rank)| (title, Kind::Number, rank, None)));
    columns.push(("NOW", Kind::Number, 7, None));
    let stages = ["MAP", "WAIT", "MEDIA", "COMMIT", "OTHER"].into_iter().zip([3, 1, 1, 1, 5]);
    columns.extend(stages.map(|(title, rank)| (title, Kind::Number, rank, None)));
    columns.push(("TOTAL", Kind::Number, 0, Some(Sort::Latency)));
    columns.push(("p w m c o", Kind::Drawing, 8, None));
    let row = |volume: &VolumeRow| {
        let mean = |stage: &str| {
            let find = |one: &&Latency| one.stage == stage;
            volume.latency.iter().find(find).map_or(0, |latency| latency.mean_ns)
        };
        let parts = ["map", "wait", "media", "commit"].map(mean);
        let total = mean("total");
        let other = total.saturating_sub(parts.iter().sum());
        let mut cells = vec![words(volume.label()), words(&volume.pool)];
        cells.extend(REASONS.iter().zip(&volume.held).map(|(_, one)| held(one.ns_per_second)));
        cells.push(count(volume.held_back().1));
        cells.extend(parts.map(time));
        cells.push(time(other));
        cells.push(time(total));
        let [map, wait, media, commit] = parts;
        let list = vec![
            ('p', Tone::Colour(0), map),
            ('w', Tone::Bad, wait),
            ('m', Tone::Good, media),
            ('c', Tone::Warning, commit),
            ('o', Tone::Dim, other),
        ];
        cells.push(Cell { content: Content::Parts(list), tone: Tone::Plain });
        cells
    };
    grid(&columns, snapshot.volumes.iter().map(row).collect())
}

/// The median and the 99th percentile of each stage, of the requests that were in it.
pub(super) fn stages(snapshot: &Snapshot) -> Grid {
    let mut columns =
        vec![("P50/P99", Kind::Words, 0, Some(Sort::Name)), ("POOL", Kind::Words, 5, None)];
    let titles = ["LIMIT", "MAP", "WAIT", "MEDIA", "COMMIT"].into_iter().zip([2, 4, 3, 1, 1]);
    columns.extend(titles.map(|(title, rank)| (title, Kind::Number, rank, None)));
    columns.push(("TOTAL", Kind::Number, 0, Some(Sort::Latency)));
    let row = |volume: &VolumeRow| {
        let mut cells = vec![words(volume.label()), words(&volume.pool)];
        cells.extend(STAGES.iter().zip(&volume.latency).map(|(_, latency)| {
            number(values::times(latency.p50_ns, latency.p99_ns)).dim_if(latency.p99_ns == 0)
        }));
        cells
    };
    grid(&columns, snapshot.volumes.iter().map(row).collect())
}

/// The devices of pools.
pub(super) fn devices(snapshot: &Snapshot, history: &History) -> Grid {
    let columns = [
        ("DEVICE", Kind::Words, 0, Some(Sort::Name)),
        ("POOL", Kind::Words, 3, None),
        ("OWN/S", Kind::Number, 0, Some(Sort::Operations)),
        ("LATELY", Kind::Drawing, 6, None),
        ("OWN R/S", Kind::Number, 7, None),
        ("OWN W/S", Kind::Number, 7, None),
        ("OWN F/S", Kind::Number, 5, None),
        ("OWN R B/S", Kind::Number, 0, Some(Sort::Bytes)),
        ("OWN W B/S", Kind::Number, 0, Some(Sort::Bytes)),
        ("P50", Kind::Number, 2, None),
        ("P99", Kind::Number, 1, Some(Sort::Latency)),
        ("NOW", Kind::Number, 4, None),
        ("QUEUE", Kind::Number, 2, None),
        ("SIZE", Kind::Number, 8, Some(Sort::Space)),
        ("ERRORS", Kind::Number, 1, None),
    ];
    let row = |device: &DeviceRow| {
        let rate = device.reads_per_second.saturating_add(device.writes_per_second);
        let name = if device.path.is_empty() { "memory" } else { &device.path };
        vec![
            words(name),
            words(&device.pool),
            count(rate),
            series(history, &Key::Device(device.pool.clone(), device.path.clone())),
            count(device.reads_per_second),
            count(device.writes_per_second),
            count(device.flushes_per_second),
            size(device.read_bytes_per_second),
            size(device.write_bytes_per_second),
            time(device.p50_ns),
            time(device.p99_ns),
            count(device.in_flight),
            number(values::thousandths(device.mean_in_flight_thousandths)),
            size(device.size_bytes),
            errors(device.errors),
        ]
    };
    grid(&columns, snapshot.devices.iter().map(row).collect())
}

/// The clients of volumes, with the load of the volume beside them.
pub(super) fn clients(snapshot: &Snapshot, history: &History) -> Grid {
    let columns = [
        ("CLIENT", Kind::Words, 0, Some(Sort::Name)),
        ("VOLUME", Kind::Words, 0, None),
        ("POOL", Kind::Words, 3, None),
        ("IN FLIGHT", Kind::Number, 0, Some(Sort::Operations)),
        ("LATELY", Kind::Drawing, 4, None),
        ("WORKER", Kind::Number, 2, None),
        ("MODE", Kind::Words, 1, None),
        ("TLS", Kind::Words, 5, None),
        ("VOL IOPS", Kind::Number, 6, None),
        ("VOL B/S", Kind::Number, 7, None),
        ("VOL HELD", Kind::Number, 2, None),
    ];
    let row = |client: &ClientRow| {
        let is_its =
            |volume: &&VolumeRow| (&volume.pool, &volume.name) == (&client.pool, &client.volume);
        let volume = snapshot.volumes.iter().find(is_its);
        let rate = |of: &dyn Fn(&VolumeRow) -> u64| volume.map_or(0, of);
        let known = |figure: Option<u32>| match figure {
            Some(figure) => count(figure.into()),
            None => number(values::only("-")).toned(Tone::Dim),
        };
        vec![
            words(&client.client),
            words(&client.volume),
            words(&client.pool),
            known(client.in_flight),
            match client.in_flight {
                Some(_) => series(history, &Key::Client(client.key())),
                None => bar(None),
            },
            known(client.worker),
            words(if client.read_only { "read-only" } else { "read-write" }),
            words(if client.tls { "yes" } else { "no" }),
            count(rate(&|volume| volume.operations_per_second)),
            size(rate(&|one| one.read_bytes_per_second + one.write_bytes_per_second)),
            held(rate(&|volume| volume.held_back().0)),
        ]
    };
    grid(&columns, snapshot.clients.iter().map(row).collect())
}
