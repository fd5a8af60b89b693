//! The tables of each view.

use super::grid::{Cell, Column, Content, Grid, Kind};
use super::history::{History, Key};
use super::model::{ClientRow, PoolRow, Snapshot, VolumeRow};
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

/// Makes the cell of a row.
type CellOf<'a, R> = Box<dyn Fn(&R) -> Cell + 'a>;

/// The rows of a table, and its columns with their cells.
struct Columns<'a, R> {
    rows: &'a [R],
    columns: Vec<Described>,
    cells: Vec<CellOf<'a, R>>,
}

impl<'a, R> Columns<'a, R> {
    fn of(rows: &'a [R]) -> Self {
        Self { rows, columns: Vec::new(), cells: Vec::new() }
    }

    fn with(
        mut self,
        title: &'static str,
        kind: Kind,
        (rank, sort): (u8, Option<Sort>),
        cell: impl Fn(&R) -> Cell + 'a,
    ) -> Self {
        self.columns.push((title, kind, rank, sort));
        self.cells.push(Box::new(cell));
        self
    }

    fn grid(self) -> Grid {
        let row = |row: &R| self.cells.iter().map(|cell| cell(row)).collect();
        grid(&self.columns, self.rows.iter().map(row).collect())
    }
}

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

/// The used share of a pool.
fn full(pool: &PoolRow) -> Cell {
    bar(thousandths(pool.used_bytes, pool.size_bytes)).toned(space_tone(pool))
}

/// How full pools are, how fast they fill, and their load.
pub(super) fn pools(snapshot: &Snapshot, history: &History) -> Grid {
    Columns::of(&snapshot.pools)
        .with("POOL", Kind::Words, (0, Some(Sort::Name)), |pool| words(&pool.name))
        .with("STATE", Kind::Words, (2, None), state)
        .with("FULL", Kind::Drawing, (4, None), full)
        .with("USED", Kind::Number, (0, Some(Sort::Space)), |pool| size(pool.used_bytes))
        .with("SHARE", Kind::Number, (3, None), |pool| {
            number(values::share(pool.used_bytes, pool.size_bytes))
        })
        .with("FREE", Kind::Number, (1, None), |pool| size(pool.free_bytes))
        .with("SIZE", Kind::Number, (6, None), |pool| size(pool.size_bytes))
        .with("PROMISED", Kind::Number, (7, None), |pool| size(pool.promised_bytes))
        .with("FILLS/S", Kind::Number, (2, None), |pool| size(pool.write_rate_bytes))
        .with("FULL IN", Kind::Number, (1, None), |pool| {
            number(values::only(pool.full_in())).toned(space_tone(pool))
        })
        .with("IOPS", Kind::Number, (5, Some(Sort::Operations)), |pool| {
            count(pool.operations_per_second)
        })
        .with("BYTES/S", Kind::Number, (8, Some(Sort::Bytes)), |pool| size(pool.bytes_per_second))
        .with("LATELY", Kind::Drawing, (9, None), |pool| {
            series(history, &Key::Pool(pool.name.clone()))
        })
        .grid()
}

/// Marks of pools, and the volumes that a lack of space stops.
pub(super) fn marks(snapshot: &Snapshot) -> Grid {
    let stopped = |volumes: u32, tone| {
        count(volumes.into()).toned(if volumes > 0 { tone } else { Tone::Dim })
    };
    Columns::of(&snapshot.pools)
        .with("SPACE", Kind::Words, (0, Some(Sort::Name)), |pool| words(&pool.name))
        .with("LOW BELOW", Kind::Number, (1, None), |pool| size(pool.low_bytes))
        .with("VERY LOW", Kind::Number, (2, None), |pool| size(pool.very_low_bytes))
        .with("WAITING", Kind::Number, (0, None), |pool| stopped(pool.waiting_volumes, Tone::Bad))
        .with("SLOWED", Kind::Number, (0, None), |pool| stopped(pool.slowed_volumes, Tone::Warning))
        .with("TO RECLAIM", Kind::Number, (3, None), |pool| size(pool.releasing_bytes))
        .with("VOLUMES", Kind::Number, (4, None), |pool| {
            count(pool.volume_count.saturating_sub(pool.snapshot_count).into())
        })
        .with("SNAPSHOTS", Kind::Number, (5, None), |pool| count(pool.snapshot_count.into()))
        .grid()
}

/// The load of volumes.
pub(super) fn volumes(snapshot: &Snapshot, history: &History) -> Grid {
    let total = |volume: &VolumeRow, of: &dyn Fn(&Latency) -> u64| volume.total().map_or(0, of);
    Columns::of(&snapshot.volumes)
        .with("VOLUME", Kind::Words, (0, Some(Sort::Name)), |volume| words(volume.label()))
        .with("POOL", Kind::Words, (5, None), |volume| words(&volume.pool))
        .with("IOPS", Kind::Number, (0, Some(Sort::Operations)), |volume| {
            count(volume.operations_per_second)
        })
        .with("LATELY", Kind::Drawing, (7, None), |volume| {
            series(history, &Key::Volume(volume.pool.clone(), volume.name.clone()))
        })
        .with("READ/S", Kind::Number, (9, None), |volume| count(volume.reads_per_second))
        .with("WRITE/S", Kind::Number, (9, None), |volume| count(volume.writes_per_second))
        .with("R B/S", Kind::Number, (0, Some(Sort::Bytes)), |volume| {
            size(volume.read_bytes_per_second)
        })
        .with("W B/S", Kind::Number, (0, Some(Sort::Bytes)), |volume| {
            size(volume.write_bytes_per_second)
        })
        .with("P50", Kind::Number, (3, None), |volume| time(total(volume, &|one| one.p50_ns)))
        .with("P99", Kind::Number, (1, Some(Sort::Latency)), |volume| {
            time(total(volume, &|one| one.p99_ns))
        })
        .with("HELD", Kind::Number, (2, None), |volume| held(volume.held_back().0))
        .with("LIMIT", Kind::Drawing, (8, None), |volume| bar(volume.limit_thousandths()))
        .with("MAPPED", Kind::Number, (4, Some(Sort::Space)), |volume| size(volume.mapped_bytes))
        .with("SIZE", Kind::Number, (10, None), |volume| size(volume.size_bytes))
        .with("CONN", Kind::Number, (11, None), |volume| count(volume.connections.into()))
        .with("PARKED", Kind::Number, (6, None), |volume| {
            count(volume.parked).toned(if volume.parked > 0 { Tone::Warning } else { Tone::Dim })
        })
        .with("ERRORS", Kind::Number, (12, None), |volume| errors(volume.errors))
        .grid()
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
    Columns::of(&snapshot.devices)
        .with("DEVICE", Kind::Words, (0, Some(Sort::Name)), |device| {
            words(if device.path.is_empty() { "memory" } else { &device.path })
        })
        .with("POOL", Kind::Words, (3, None), |device| words(&device.pool))
        .with("OWN/S", Kind::Number, (0, Some(Sort::Operations)), |device| {
            count(device.reads_per_second.saturating_add(device.writes_per_second))
        })
        .with("LATELY", Kind::Drawing, (6, None), |device| {
            series(history, &Key::Device(device.pool.clone(), device.path.clone()))
        })
        .with("OWN R/S", Kind::Number, (7, None), |device| count(device.reads_per_second))
        .with("OWN W/S", Kind::Number, (7, None), |device| count(device.writes_per_second))
        .with("OWN F/S", Kind::Number, (5, None), |device| count(device.flushes_per_second))
        .with("OWN R B/S", Kind::Number, (0, Some(Sort::Bytes)), |device| {
            size(device.read_bytes_per_second)
        })
        .with("OWN W B/S", Kind::Number, (0, Some(Sort::Bytes)), |device| {
            size(device.write_bytes_per_second)
        })
        .with("P50", Kind::Number, (2, None), |device| time(device.p50_ns))
        .with("P99", Kind::Number, (1, Some(Sort::Latency)), |device| time(device.p99_ns))
        .with("NOW", Kind::Number, (4, None), |device| count(device.in_flight))
        .with("QUEUE", Kind::Number, (2, None), |device| {
            number(values::thousandths(device.mean_in_flight_thousandths))
        })
        .with("SIZE", Kind::Number, (8, Some(Sort::Space)), |device| size(device.size_bytes))
        .with("ERRORS", Kind::Number, (1, None), |device| errors(device.errors))
        .grid()
}

/// The clients of volumes, with the load of the volume beside them.
pub(super) fn clients(snapshot: &Snapshot, history: &History) -> Grid {
    let rate = |client: &ClientRow, of: &dyn Fn(&VolumeRow) -> u64| {
        let is_its =
            |volume: &&VolumeRow| (&volume.pool, &volume.name) == (&client.pool, &client.volume);
        snapshot.volumes.iter().find(is_its).map_or(0, of)
    };
    let known = |figure: Option<u32>| match figure {
        Some(figure) => count(figure.into()),
        None => number(values::only("-")).toned(Tone::Dim),
    };
    Columns::of(&snapshot.clients)
        .with("CLIENT", Kind::Words, (0, Some(Sort::Name)), |client| words(&client.client))
        .with("VOLUME", Kind::Words, (0, None), |client| words(&client.volume))
        .with("POOL", Kind::Words, (3, None), |client| words(&client.pool))
        .with("IN FLIGHT", Kind::Number, (0, Some(Sort::Operations)), |client| {
            known(client.in_flight)
        })
        .with("LATELY", Kind::Drawing, (4, None), |client| match client.in_flight {
            Some(_) => series(history, &Key::Client(client.key())),
            None => bar(None),
        })
        .with("WORKER", Kind::Number, (2, None), |client| known(client.worker))
        .with("MODE", Kind::Words, (1, None), |client| {
            words(if client.read_only { "read-only" } else { "read-write" })
        })
        .with("TLS", Kind::Words, (5, None), |client| words(if client.tls { "yes" } else { "no" }))
        .with("VOL IOPS", Kind::Number, (6, None), |client| {
            count(rate(client, &|volume| volume.operations_per_second))
        })
        .with("VOL B/S", Kind::Number, (7, None), |client| {
            size(rate(client, &|one| one.read_bytes_per_second + one.write_bytes_per_second))
        })
        .with("VOL HELD", Kind::Number, (2, None), |client| {
            held(rate(client, &|volume| volume.held_back().0))
        })
        .grid()
}
