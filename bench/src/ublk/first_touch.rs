//! Writes to chunks that no write has reached before, on fresh volumes: ours beside the same blocks
//! once more, and beside dm-thin.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::backing::Disk;
use super::daemon::{Daemon, Pool};
use super::peers::{Chunk, Device, Thin};
use super::{Bench, Mode};
use crate::block::{Sample, Settings, Turn};
use crate::stats::Ratio;

/// Bytes of a volume: far more than are written, so that nearly each write finds a new chunk.
pub const VOLUME: u64 = 16 << 30;
/// Bytes of an operation.
pub const OPERATION: u64 = 4096;
/// Bytes of chunks that a run takes at most, on a ramdisk of 2 GiB; of a quick run.
const TAKEN: u64 = 512 << 20;
const TAKEN_QUICK: u64 = 128 << 20;
/// Operations of a run at depth 1, where each takes longer.
const AT_DEPTH_1: u64 = 1536;
/// Rounds beside dm-thin without zeroing, of which nothing is claimed.
const UNCLAIMED: usize = 3;

/// The compared devices.
#[derive(Clone, PartialEq, Debug)]
pub struct Claimed {
    /// The name of the other.
    pub beside: String,
    /// How much was measured.
    pub ratio: Ratio,
    /// How much it has to be, if anything is claimed.
    pub target: Option<f64>,
}

/// The results with one size of chunks at one depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes of an extent or a chunk.
    pub chunk: u64,
    /// Operations in flight.
    pub depth: u32,
    /// Operations of a run.
    pub operations: u64,
    /// Our overwrite beside our overwrite.
    pub control: Option<Ratio>,
    /// Ours beside the others.
    pub claims: Vec<Claimed>,
    /// All runs, by name.
    pub samples: Vec<(String, Vec<Sample>)>,
}

impl Outcome {
    /// Returns the name for `--only` and in the tables.
    #[must_use]
    pub fn name(&self) -> String {
        name(self.chunk, self.depth)
    }

    /// The part of the writes that found a new chunk, on average: places are drawn.
    #[must_use]
    pub fn fresh(&self) -> f64 {
        let chunks = (VOLUME / self.chunk) as f64;
        let drawn = self.operations as f64;
        chunks * (1.0 - (1.0 - 1.0 / chunks).powf(drawn)) / drawn
    }
}

/// Returns the name for `--only` and in the tables.
#[must_use]
pub fn name(chunk: u64, depth: u32) -> String {
    format!("first-touch/{}k-{depth}", chunk >> 10)
}

/// How much first touch is claimed to be of our own overwrite.
const OF_OVERWRITE: f64 = 0.9;
/// The claims compared with dm-thin that zeroes, by chunk and depth.
const CLAIMS: [(u64, u32, f64); 4] =
    [(256 << 10, 1, 2.0), (256 << 10, 32, 2.0), (64 << 10, 1, 1.5), (64 << 10, 32, 2.5)];

/// Sizes of chunks and depths that are measured.
pub fn shapes() -> impl Iterator<Item = (u64, u32)> {
    CLAIMS.into_iter().map(|(chunk, depth, _)| (chunk, depth))
}

/// Operations of a run.
#[must_use]
pub fn operations(bench: &Bench, chunk: u64, depth: u32) -> u64 {
    let most = taken(bench) / chunk;
    if depth == 1 { most.min(AT_DEPTH_1) } else { most }
}

/// Bytes of chunks that a run takes at most.
#[must_use]
pub fn taken(bench: &Bench) -> u64 {
    if bench.quick { TAKEN_QUICK } else { TAKEN }
}

fn pools() -> [Pool; 2] {
    [
        Pool { name: "small", disk: Disk::First, extent: 64 << 10 },
        Pool { name: "large", disk: Disk::Second, extent: 256 << 10 },
    ]
}

/// Measures all that is wanted.
pub fn measure(bench: &Bench, mut show: impl FnMut(&Outcome)) -> Result<Vec<Outcome>> {
    let wanted: Vec<(u64, u32, f64)> = CLAIMS
        .into_iter()
        .filter(|(chunk, depth, _)| bench.includes(&name(*chunk, *depth)))
        .filter(|(_, depth, _)| !bench.quick || *depth == 32 || bench.only.is_some())
        .collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    // Without it the kernel looks for memory in the runs.
    for disk in [Disk::First, Disk::Second, Disk::ThinSmall, Disk::ThinLarge] {
        disk.warm(taken(bench) / 2 * 3)?;
    }
    let mut outcomes = Vec::new();
    let folder = bench.jobs.scratch.join("first-touch");
    let daemon = match &bench.blockd {
        Some(program) => Some(Daemon::start(program, &folder, Mode::ZeroCopy, &pools())?),
        None => None,
    };
    for (chunk, depth, target) in wanted {
        let outcome = one(bench, daemon.as_ref(), chunk, depth, target)?;
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
    chunk: u64,
    depth: u32,
    target: f64,
) -> Result<Outcome> {
    let operations = operations(bench, chunk, depth);
    let (small, large) = ((Disk::ThinSmall, Disk::MetaSmall), (Disk::ThinLarge, Disk::MetaLarge));
    let (data, meta) = if chunk == 64 << 10 { small } else { large };
    let mut runs = Runs { bench, depth, operations, samples: BTreeMap::new() };
    let pool = pools().into_iter().find(|pool| pool.extent == chunk).context("no such pool")?;
    for zeroing in [true, false] {
        let chunk = Chunk { bytes: chunk, zeroing };
        let mut thin = Thin::start(chunk, data, meta)?;
        let rounds = if zeroing { bench.pairs } else { bench.pairs.min(UNCLAIMED) };
        // The first is a warm-up of all that takes part.
        for round in 0..=rounds {
            if round == 1 {
                runs.forget(zeroing);
            }
            // Both halves of the rounds have ours, so that each pair is of the same minute.
            if let Some(daemon) = daemon {
                runs.ours(daemon, pool.name, round, zeroing)?;
            }
            let device = thin.renew(VOLUME)?;
            let sample = runs.once(&device, round)?;
            runs.keep(&chunk.name(), sample);
        }
    }
    Ok(runs.outcome(chunk, target))
}

/// The samples of one size of chunks at one depth.
struct Runs<'a> {
    bench: &'a Bench,
    depth: u32,
    operations: u64,
    samples: BTreeMap<String, Vec<Sample>>,
}

const FIRST: &str = "blockd, first touch";
const SECOND: &str = "blockd, overwrite";
const THIRD: &str = "blockd, overwrite again";
/// The same beside dm-thin that does not zero.
const BESIDE_NO_ZEROING: &str = "blockd, first touch (beside no zeroing)";

impl Runs<'_> {
    fn keep(&mut self, name: &str, sample: Sample) {
        self.samples.entry(name.to_owned()).or_default().push(sample);
    }

    /// Takes the warm-up out again; the other half stays.
    fn forget(&mut self, zeroing: bool) {
        if zeroing {
            self.samples.clear();
        } else {
            self.samples
                .retain(|name, _| name != BESIDE_NO_ZEROING && !name.ends_with("no zeroing"));
        }
    }

    fn once(&self, device: &Device, round: usize) -> Result<Sample> {
        let settings = Settings {
            depth: self.depth,
            seed: round as u64 + 1,
            bytes: self.operations * OPERATION,
            ..Settings::default()
        };
        let turn = Turn::device(&device.path, device.server);
        let samples = self.bench.jobs.run("first-touch", &settings, &[turn])?;
        samples.first().copied().context("fio has shown nothing")
    }

    /// A fresh volume: first touch, and with it the same blocks again, twice.
    fn ours(&mut self, daemon: &Daemon, pool: &str, round: usize, zeroing: bool) -> Result<()> {
        const VOLUME_NAME: &str = "touched";
        let (device, _) = daemon.add(pool, VOLUME_NAME, VOLUME)?;
        let first = self.once(&device, round)?;
        if zeroing {
            self.keep(FIRST, first);
            for name in [SECOND, THIRD] {
                let sample = self.once(&device, round)?;
                self.keep(name, sample);
            }
        } else {
            self.keep(BESIDE_NO_ZEROING, first);
        }
        daemon.delete(pool, VOLUME_NAME)
    }

    fn ratio(&self, ours: &str, other: &str) -> Option<Ratio> {
        let (ours, other) = (self.samples.get(ours)?, self.samples.get(other)?);
        let ratios: Vec<f64> = ours.iter().zip(other).map(|(a, b)| a.iops / b.iops).collect();
        Ratio::of(&ratios)
    }

    fn outcome(self, chunk: u64, target: f64) -> Outcome {
        let thin = |zeroing| Chunk { bytes: chunk, zeroing }.name();
        let compared = [
            (FIRST, SECOND.to_owned(), Some(OF_OVERWRITE)),
            (FIRST, thin(true), Some(target)),
            (BESIDE_NO_ZEROING, thin(false), None),
        ];
        let claims = compared.into_iter().filter_map(|(ours, beside, target)| {
            let ratio = self.ratio(ours, &beside)?;
            Some(Claimed { beside, ratio, target })
        });
        let claims = claims.collect();
        Outcome {
            chunk,
            depth: self.depth,
            operations: self.operations,
            control: self.ratio(SECOND, THIRD),
            claims,
            samples: self.samples.into_iter().collect(),
        }
    }
}
