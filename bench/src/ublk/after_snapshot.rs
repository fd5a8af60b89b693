//! Writes to a volume that a snapshot shares everything with: before it, the first after it, and
//! the same blocks once more, ours beside dm-thin's. Nothing is claimed: a first write copies its
//! extent, as dm-thin does.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::peers::{Chunk, Device, Thin};
use super::{Bench, Mode};
use crate::block::{Sample, Settings, Turn};
use crate::stats::{Ratio, median};

/// Bytes of the volume, all of them written before.
const FILLED: u64 = 512 << 20;
/// Bytes of an operation.
const OPERATION: u64 = 4096;
/// One chunk in this many is written: more would often find one that is copied already.
const SPREAD: u64 = 4;
/// Rounds: nothing is claimed.
const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 2;

/// The three runs of a round, as the table has them.
pub const RUNS: [&str; 3] = ["before", "first write after", "again"];

/// The results with one size of chunks at one depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes of an extent or a chunk.
    pub chunk: u64,
    /// Operations in flight.
    pub depth: u32,
    /// Operations of a run.
    pub operations: u64,
    /// The three runs of each round, by device.
    pub samples: BTreeMap<String, Vec<[Sample; 3]>>,
}

impl Outcome {
    /// Returns the name for `--only` and in the tables.
    #[must_use]
    pub fn name(&self) -> String {
        name(self.chunk, self.depth)
    }

    /// The part of the writes that copy, on average: places are drawn.
    #[must_use]
    pub fn copying(&self) -> f64 {
        let chunks = (FILLED / self.chunk) as f64;
        let drawn = self.operations as f64;
        chunks * (1.0 - (1.0 - 1.0 / chunks).powf(drawn)) / drawn
    }

    /// Median operations per second of each run.
    #[must_use]
    pub fn iops(&self, device: &str) -> Option<[f64; 3]> {
        let rounds = self.samples.get(device)?;
        let of = |run: usize| median(&rounds.iter().map(|all| all[run].iops).collect::<Vec<_>>());
        Some([of(0)?, of(1)?, of(2)?])
    }

    /// Ours beside dm-thin's, in one of the runs.
    #[must_use]
    pub fn beside(&self, run: usize) -> Option<Ratio> {
        let (ours, thin) = (self.samples.get(OURS)?, self.samples.get(THIN)?);
        let pairs = ours.iter().zip(thin);
        Ratio::of(&pairs.map(|(a, b)| a[run].iops / b[run].iops).collect::<Vec<_>>())
    }
}

const OURS: &str = "blockd";
const THIN: &str = "dm-thin";
const CASES: [(u64, u32); 4] = [(64 << 10, 1), (64 << 10, 32), (256 << 10, 1), (256 << 10, 32)];

fn name(chunk: u64, depth: u32) -> String {
    format!("after-snapshot/{}k-{depth}", chunk >> 10)
}

/// Measures all that is wanted.
pub fn measure(bench: &Bench, mut show: impl FnMut(&Outcome)) -> Result<Vec<Outcome>> {
    let wanted: Vec<(u64, u32)> =
        CASES.into_iter().filter(|&(chunk, depth)| bench.includes(&name(chunk, depth))).collect();
    // Only when it is asked for, as `cargo ci bench snapshot` does.
    if wanted.is_empty() || bench.only.is_none() {
        return Ok(Vec::new());
    }
    for disk in [Disk::First, Disk::Second, Disk::ThinSmall, Disk::ThinLarge] {
        disk.warm(FILLED + FILLED / 2)?;
    }
    let pools = [
        Pool { name: "small", disk: Disk::First, extent: 64 << 10 },
        Pool { name: "large", disk: Disk::Second, extent: 256 << 10 },
    ];
    let folder = bench.jobs.scratch.join("after-snapshot");
    let daemon = match &bench.blockd {
        Some(program) => Some(Daemon::start(program, &folder, Mode::ZeroCopy, &pools)?),
        None => None,
    };
    let mut outcomes = Vec::new();
    for (chunk, depth) in wanted {
        let pool = pools.iter().find(|pool| pool.extent == chunk).context("no such pool")?;
        let outcome = one(bench, daemon.as_ref(), pool, depth)?;
        show(&outcome);
        outcomes.push(outcome);
    }
    if let Some(mut daemon) = daemon {
        daemon.end(Signal::SIGTERM)?;
    }
    Ok(outcomes)
}

fn one(bench: &Bench, daemon: Option<&Daemon>, pool: &Pool, depth: u32) -> Result<Outcome> {
    const VOLUME: &str = "written";
    const SNAPSHOT: &str = "kept";
    let chunk = pool.extent;
    let operations = FILLED / chunk / SPREAD;
    let small = chunk == 64 << 10;
    let (data, meta) =
        if small { (Disk::ThinSmall, Disk::MetaSmall) } else { (Disk::ThinLarge, Disk::MetaLarge) };
    let mut thin = Thin::start(Chunk { bytes: chunk, zeroing: true }, data, meta)?;
    let mut outcome = Outcome { chunk, depth, operations, samples: BTreeMap::new() };
    let rounds = if bench.quick { ROUNDS_QUICK } else { ROUNDS };
    // The first is a warm-up.
    for round in 0..=rounds {
        let runs = Runs { bench, depth, operations, seed: round as u64 + 1 };
        if let Some(daemon) = daemon {
            let (device, _) = daemon.add(pool.name, VOLUME, FILLED)?;
            let three = runs.three(&device, || daemon.snapshot(pool.name, VOLUME, SNAPSHOT))?;
            daemon.delete(pool.name, SNAPSHOT)?;
            daemon.delete(pool.name, VOLUME)?;
            outcome.samples.entry(OURS.to_owned()).or_default().push(three);
        }
        let device = thin.renew(FILLED)?;
        let three = runs.three(&device, || thin.snapshot())?;
        outcome.samples.entry(THIN.to_owned()).or_default().push(three);
    }
    for samples in outcome.samples.values_mut() {
        samples.remove(0);
    }
    Ok(outcome)
}

struct Runs<'a> {
    bench: &'a Bench,
    depth: u32,
    operations: u64,
    seed: u64,
}

impl Runs<'_> {
    fn three(&self, device: &Device, snapshot: impl FnOnce() -> Result<()>) -> Result<[Sample; 3]> {
        let turn = [Turn::device(&device.path, device.server)];
        self.bench.jobs.run("fill", &Settings::default(), &turn)?;
        let before = self.once(&turn)?;
        snapshot()?;
        Ok([before, self.once(&turn)?, self.once(&turn)?])
    }

    fn once(&self, turn: &[Turn]) -> Result<Sample> {
        let settings = Settings {
            depth: self.depth,
            seed: self.seed,
            bytes: self.operations * OPERATION,
            ..Settings::default()
        };
        let samples = self.bench.jobs.run("first-touch", &settings, turn)?;
        samples.first().copied().context("fio has shown nothing")
    }
}
