//! Blocks that have been written before: the cost of a device compared with others on the same
//! ramdisk.

use anyhow::{Context, Result};

use super::peers::Device;
use super::{Bench, Mode};
use crate::block::{Sample, Settings, Turn};
use crate::stats::{Ratio, median};

/// Bytes that are used of each device: the mapped part of blockd's volumes.
pub const BYTES: u64 = 128 << 20;
/// Bytes that a device must give back as written before it is measured.
const VERIFIED: u64 = 8 << 20;
/// Runs of a device that no claim names.
const ROUNDS: usize = 3;
/// Rounds for each pair that was asked for: they are short, and cost no start of fio.
pub const ROUNDS_PER_PAIR: usize = 2;

/// One job file at one depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workload {
    /// The job file's name.
    pub job: &'static str,
    /// Operations in flight.
    pub depth: u32,
    /// In words.
    pub title: &'static str,
    /// Whether a quick run has it too.
    pub quick: bool,
}

const fn workload(job: &'static str, depth: u32, title: &'static str, quick: bool) -> Workload {
    Workload { job, depth, title, quick }
}

/// All of them.
pub const WORKLOADS: [Workload; 6] = [
    workload("randread", 1, "4 KiB random read, depth 1", false),
    workload("randwrite", 1, "4 KiB random write, depth 1", true),
    workload("randread", 32, "4 KiB random read, depth 32", true),
    workload("randwrite", 32, "4 KiB random write, depth 32", true),
    workload("read-seq", 8, "128 KiB sequential read, depth 8", true),
    workload("write-seq", 8, "128 KiB sequential write, depth 8", false),
];

impl Workload {
    /// Returns the name for `--only` and in the tables.
    #[must_use]
    pub fn name(&self) -> String {
        format!("mapped/{}-{}", self.job, self.depth)
    }
}

/// Ours and rublk's, serving requests in the same way.
#[derive(Clone, Debug)]
pub struct Pair {
    /// How.
    pub mode: Mode,
    /// Ours, if the daemon takes part.
    pub ours: Option<Device>,
    /// rublk's.
    pub peer: Device,
}

/// Everything that is measured.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The pairs with claims.
    pub pairs: Vec<Pair>,
    /// The devices that are compared with them.
    pub others: Vec<Device>,
}

impl Devices {
    fn all(&self) -> Vec<&Device> {
        let pairs = self.pairs.iter().flat_map(|pair| pair.ours.iter().chain([&pair.peer]));
        pairs.chain(&self.others).collect()
    }

    /// Writes each once, and verifies the written data.
    pub fn prepare(&self, bench: &Bench) -> Result<()> {
        let turns: Vec<Turn> = self.all().into_iter().map(turn).collect();
        let settings = Settings { size: BYTES.to_string(), ..Settings::default() };
        bench.jobs.run("fill", &settings, &turns)?;
        let settings = Settings { size: VERIFIED.to_string(), ..Settings::default() };
        bench
            .jobs
            .run("verify", &settings, &turns)
            .context("read data differs from written data")?;
        Ok(())
    }
}

/// The results of one device under one workload.
#[derive(Clone, Debug)]
pub struct Line {
    /// Which.
    pub name: String,
    /// Its runs.
    pub samples: Vec<Sample>,
}

impl Line {
    /// The median of a figure over its runs.
    #[must_use]
    pub fn median(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        let figures: Vec<f64> = self.samples.iter().map(figure).collect();
        median(&figures).unwrap_or(f64::NAN)
    }
}

/// Ours beside rublk's.
#[derive(Clone, Debug)]
pub struct Finding {
    /// In which way.
    pub mode: Mode,
    /// IOPS, ours by its.
    pub iops: Ratio,
    /// CPU of the server per operation, its by ours.
    pub cpu: Ratio,
    /// IOPS, ours by ours.
    pub control: Ratio,
}

/// Everything about one workload.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The devices.
    pub lines: Vec<Line>,
    /// The findings for the claims.
    pub findings: Vec<Finding>,
}

fn turn(device: &Device) -> Turn {
    Turn::device(&device.path, device.server)
}

/// Runs a workload on all of them. In each round ours stands before and after rublk's, so that a
/// drift of the machine falls on both, and beside itself.
pub fn measure(bench: &Bench, workload: &Workload, devices: &Devices) -> Result<Outcome> {
    let settings = |seed: usize| Settings {
        depth: workload.depth,
        seconds: bench.seconds,
        seed: seed as u64 + 1,
        size: BYTES.to_string(),
        bytes: 0,
    };
    // The first run of each device is not counted.
    let all: Vec<Turn> = devices.all().into_iter().map(turn).collect();
    let warm = Settings { seconds: 0.2, ..settings(0) };
    bench.jobs.run(workload.job, &warm, &all)?;
    let mut lines = Vec::new();
    let mut findings = Vec::new();
    for pair in &devices.pairs {
        let taken = Taken::run(bench, workload.job, &settings(0), pair)?;
        findings.extend(taken.finding(pair.mode));
        if let Some(ours) = &pair.ours {
            lines.push(Line { name: ours.name.clone(), samples: taken.ours });
        }
        lines.push(Line { name: pair.peer.name.clone(), samples: taken.peer });
    }
    let turns: Vec<Turn> = devices.others.iter().map(turn).collect();
    let mut others: Vec<Line> = devices
        .others
        .iter()
        .map(|device| Line { name: device.name.clone(), samples: Vec::new() })
        .collect();
    let rounds = if turns.is_empty() { 0 } else { ROUNDS.min(bench.pairs) };
    for round in 0..rounds {
        let samples = bench.jobs.run(workload.job, &settings(round), &turns)?;
        for (line, sample) in others.iter_mut().zip(samples) {
            line.samples.push(sample);
        }
    }
    lines.extend(others);
    Ok(Outcome { lines, findings })
}

/// The samples of a pair, round by round; of ours two for each of the other's.
#[derive(Default)]
struct Taken {
    ours: Vec<Sample>,
    again: Vec<Sample>,
    peer: Vec<Sample>,
}

impl Taken {
    /// All rounds in one run of fio. In each the other stands between two runs of ours, which
    /// change places from round to round: a turn's place counts.
    fn run(bench: &Bench, job: &str, settings: &Settings, pair: &Pair) -> Result<Self> {
        let rounds = bench.pairs * ROUNDS_PER_PAIR;
        let peer = turn(&pair.peer);
        let mut taken = Self::default();
        let Some(ours) = pair.ours.as_ref().map(turn) else {
            taken.peer = bench.jobs.run(job, settings, &vec![peer; rounds])?;
            return Ok(taken);
        };
        let round = [ours.clone(), peer, ours];
        let turns: Vec<Turn> = round.iter().cycle().take(3 * rounds).cloned().collect();
        let samples = bench.jobs.run(job, settings, &turns)?;
        for (number, three) in samples.chunks_exact(3).enumerate() {
            let (first, second) = if number % 2 == 0 { (0, 2) } else { (2, 0) };
            taken.ours.push(three[first]);
            taken.peer.push(three[1]);
            taken.again.push(three[second]);
        }
        Ok(taken)
    }

    fn finding(&self, mode: Mode) -> Option<Finding> {
        let cpu = |sample: &Sample| sample.cpu_us.unwrap_or(f64::NAN);
        let ratio = |figure: &dyn Fn(&Sample, &Sample) -> f64, others: &[Sample]| {
            let pairs = self.ours.iter().zip(others);
            Ratio::of(&pairs.map(|(ours, other)| figure(ours, other)).collect::<Vec<_>>())
        };
        let iops = |ours: &Sample, other: &Sample| ours.iops / other.iops;
        Some(Finding {
            mode,
            iops: ratio(&iops, &self.peer)?,
            cpu: ratio(&|ours, other| cpu(other) / cpu(ours), &self.peer)?,
            control: ratio(&iops, &self.again)?,
        })
    }
}
