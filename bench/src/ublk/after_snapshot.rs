//! Writes to a volume that snapshots share everything with, ours beside dm-thin's with chunks of
//! the same size.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use nix::sys::signal::Signal;

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::peers::{Chunk, Device, Thin};
use super::{Bench, Mode};
use crate::after_snapshot::{self, BETWEEN, FIRST, RUNS, Round, Subject};
use crate::block::{Settings, Turn};
use crate::load::{self, Order, Pattern, exactly};
use crate::nbd::print::Claim;

/// Bytes of the volume, all of them written before; less on disks with limits, where that takes
/// long.
const FILLED: u64 = 512 << 20;
const FILLED_LIMITED: u64 = 256 << 20;
/// Reads before each run on disks with limits. They use up the requests that a disk has saved up in
/// a tenth of a second: without them a run of depth 32 is over before its disk limits it.
const READS_BEFORE: u64 = 2000;
/// Bytes of an operation.
const OPERATION: u64 = 4096;
/// One chunk in this many is written: more would often find one that is copied already, and the
/// ramdisks have no room for them.
const SPREAD: u64 = 4;
/// Our first writes after a snapshot, beside dm-thin's.
const OF_THIN: f64 = 5.0;

/// The results with one size of chunks at one depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes of the volume.
    pub filled: u64,
    /// Bytes of an extent or a chunk.
    pub chunk: u64,
    /// Operations in flight.
    pub depth: u32,
    /// Operations of a run.
    pub operations: u64,
    /// IOPS of the runs of each round, by device.
    pub rounds: BTreeMap<&'static str, Vec<Round>>,
}

impl Outcome {
    /// Returns the name for `--only` and in the tables.
    #[must_use]
    pub fn name(&self) -> String {
        name(self.chunk, self.depth)
    }

    /// The part of the writes that are the first of a chunk, on average: places are drawn.
    #[must_use]
    pub fn firsts(&self) -> f64 {
        let chunks = (self.filled / self.chunk) as f64;
        let drawn = self.operations as f64;
        chunks * (1.0 - (1.0 - 1.0 / chunks).powf(drawn)) / drawn
    }

    /// IOPS of each round, by device; ours first.
    #[must_use]
    pub fn iops(&self) -> Vec<(String, Vec<Round>)> {
        let of = |device: &str| Some((device.to_owned(), self.rounds.get(device)?.clone()));
        [OURS, THIN].into_iter().filter_map(of).collect()
    }

    /// Returns the claims of ours: first writes beside those before the snapshots, and beside
    /// dm-thin's.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let all = self.iops();
        let [(_, ours), (_, thin)] = all.as_slice() else { return Vec::new() };
        let before = after_snapshot::claim(ours)
            .map(|(claim, ratio)| (claim, ratio, after_snapshot::TARGET));
        let of_thin = FIRST.into_iter().filter_map(|run| {
            let claim = format!("IOPS, writes {}, ours / {THIN}", RUNS[run]);
            Some((claim, after_snapshot::beside(ours, thin, run)?, OF_THIN))
        });
        let (workload, pairs) = (self.name(), ours.len());
        let all = before.into_iter().chain(of_thin);
        all.map(|(claim, ratio, target)| {
            let workload = workload.clone();
            Claim { workload, claim, ratio, target, pairs }
        })
        .collect()
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
    let pools = [
        (Pool { name: "small", disk: Disk::First, extent: 64 << 10 }, Disk::ThinSmall),
        (Pool { name: "large", disk: Disk::Second, extent: 256 << 10 }, Disk::ThinLarge),
    ];
    let used = pools.iter().filter(|(pool, _)| wanted.iter().any(|case| case.0 == pool.extent));
    let filled = if bench.limits.is_some() { FILLED_LIMITED } else { FILLED };
    // Disks with limits are full of zeroes from the start.
    for (pool, thin) in used.filter(|_| bench.limits.is_none()) {
        // What the snapshots of a round keep is about as much again.
        pool.disk.warm(2 * filled)?;
        thin.warm(2 * filled)?;
    }
    let pools = pools.map(|(pool, _)| pool);
    let folder = bench.jobs.scratch.join("after-snapshot");
    let daemon = match &bench.blockd {
        Some(program) => Some(Daemon::start(program, &folder, Mode::ZeroCopy, &pools)?),
        None => None,
    };
    let mut outcomes = Vec::new();
    for (chunk, depth) in wanted {
        let pool = pools.iter().find(|pool| pool.extent == chunk).context("no such pool")?;
        let outcome = one(bench, daemon.as_ref(), pool, (filled, depth))?;
        show(&outcome);
        outcomes.push(outcome);
    }
    if let Some(mut daemon) = daemon {
        daemon.end(Signal::SIGTERM)?;
    }
    Ok(outcomes)
}

fn one(
    bench: &Bench,
    daemon: Option<&Daemon>,
    pool: &Pool,
    (filled, depth): (u64, u32),
) -> Result<Outcome> {
    const VOLUME: &str = "written";
    let chunk = pool.extent;
    let operations = filled / chunk / SPREAD;
    let small = chunk == 64 << 10;
    let (data, meta) =
        if small { (Disk::ThinSmall, Disk::MetaSmall) } else { (Disk::ThinLarge, Disk::MetaLarge) };
    let mut thin = Thin::start(Chunk { bytes: chunk, zeroing: true }, data, meta)?;
    let mut outcome = Outcome { filled, chunk, depth, operations, rounds: BTreeMap::new() };
    // The first is a warm-up.
    for round in 0..=bench.pairs {
        let ours = daemon.map(|daemon| Ours { daemon, pool: pool.name, volume: VOLUME });
        let mut devices = Vec::new();
        if let Some(Ours { daemon, pool, volume }) = ours {
            devices.push((OURS, daemon.add(pool, volume, filled)?.0));
        }
        devices.push((THIN, thin.renew(filled)?));
        // Each is first in half of the rounds.
        if round % 2 == 1 {
            devices.reverse();
        }
        let mut both = Both { bench, filled, depth, operations, ours, thin: &mut thin, devices };
        both.fill()?;
        let runs = after_snapshot::round(&mut both, round)?;
        for (turn, (name, _)) in both.devices.iter().enumerate() {
            let runs = runs.iter().map(|all| all.get(turn).copied());
            let runs: Option<Vec<f64>> = runs.collect();
            let runs = runs.and_then(|all| Round::try_from(all).ok());
            let runs = runs.context("not each device was written to")?;
            outcome.rounds.entry(*name).or_default().push(runs);
        }
        if let Some(ours) = both.ours {
            ours.delete()?;
        }
    }
    for rounds in outcome.rounds.values_mut() {
        rounds.remove(0);
    }
    Ok(outcome)
}

/// Our volume.
#[derive(Clone, Copy)]
struct Ours<'a> {
    daemon: &'a Daemon,
    pool: &'a str,
    volume: &'a str,
}

impl Ours<'_> {
    fn snapshot(&self, number: u64) -> Result<()> {
        self.daemon.snapshot(self.pool, self.volume, &format!("kept{number}"))
    }

    /// Deletes it, then its snapshots, so that nothing is folded.
    fn delete(&self) -> Result<()> {
        self.daemon.delete(self.pool, self.volume)?;
        (1..=after_snapshot::SNAPSHOTS)
            .try_for_each(|number| self.daemon.delete(self.pool, &format!("kept{number}")))
    }
}

/// Our volume and dm-thin's, one after the other in each run.
struct Both<'a> {
    bench: &'a Bench,
    filled: u64,
    depth: u32,
    operations: u64,
    ours: Option<Ours<'a>>,
    thin: &'a mut Thin,
    devices: Vec<(&'static str, Device)>,
}

impl Both<'_> {
    fn fill(&self) -> Result<()> {
        let devices = self.devices.iter();
        let turns: Vec<Turn> =
            devices.map(|(_, device)| Turn::device(&device.path, device.server)).collect();
        self.bench.jobs.run("fill", &Settings::default(), &turns).map(|_| ())
    }

    fn writes(&self, depth: usize, seed: u64) -> Result<Pattern> {
        let (bytes, order) = (usize::try_from(OPERATION)?, Order::Random(seed));
        Ok(Pattern { write: true, bytes, depth, span: self.filled, order })
    }

    /// IOPS of one run. Runs are short, so that fio, which counts milliseconds, is too coarse.
    fn run(&self, path: &Path, seed: u64) -> Result<f64> {
        let pattern = self.writes(usize::try_from(self.depth)?, seed)?;
        let order = Order::Random(!seed);
        let reads = Pattern { write: false, depth: 32, order, ..pattern };
        // Both are open until after the run: the disk saves up again meanwhile.
        let mut reader = load::Device::open(path, &reads)?;
        let mut device = load::Device::open(path, &pattern)?;
        if self.bench.limits.is_some() {
            reader.run(&reads, exactly(READS_BEFORE))?;
        }
        let start = Clock::start();
        device.run(&pattern, exactly(self.operations))?;
        Ok(self.operations as f64 / start.elapsed().as_secs_f64())
    }

    fn write_some(&self, path: &Path, seed: u64) -> Result<()> {
        let pattern = self.writes(32, seed)?;
        load::Device::open(path, &pattern)?.run(&pattern, exactly(self.operations / BETWEEN))
    }
}

impl Subject for Both<'_> {
    type Sample = Vec<f64>;

    fn write(&mut self, seed: u64) -> Result<Vec<f64>> {
        self.devices.iter().map(|(_, device)| self.run(&device.path, seed)).collect()
    }

    fn write_between(&mut self, seed: u64) -> Result<()> {
        self.devices.iter().try_for_each(|(_, device)| self.write_some(&device.path, seed))
    }

    fn snapshot(&mut self, number: u64) -> Result<()> {
        if let Some(ours) = self.ours {
            ours.snapshot(number)?;
        }
        self.thin.snapshot()
    }
}
