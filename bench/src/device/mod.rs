//! One disk by itself, and the same under a pool of ours: for real hardware, where ratios of a
//! virtual machine say little.

pub mod confirm;
pub mod disk;
pub mod pool;

use std::path::Path;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use serde_json::{Value, json};

use self::disk::Disk;
use crate::block::{Jobs, Place, Sample, Settings, Turn};
use crate::stats::median;

/// One job file at one depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workload {
    /// The job file's name.
    pub job: &'static str,
    /// Operations in flight.
    pub depth: u32,
    /// In words.
    pub title: &'static str,
}

const fn workload(job: &'static str, depth: u32, title: &'static str) -> Workload {
    Workload { job, depth, title }
}

/// All of them, in this order: reads find the data of the fill.
pub const WORKLOADS: [Workload; 6] = [
    workload("read-seq", 8, "128 KiB sequential read, depth 8"),
    workload("randread", 1, "4 KiB random read, depth 1"),
    workload("randread", 32, "4 KiB random read, depth 32"),
    workload("write-seq", 8, "128 KiB sequential write, depth 8"),
    workload("randwrite", 1, "4 KiB random write, depth 1"),
    workload("randwrite", 32, "4 KiB random write, depth 32"),
];

/// How much is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Effort {
    /// Seconds of a run.
    pub seconds: f64,
    /// Runs of each workload.
    pub runs: usize,
    /// Bytes that are used, at most.
    pub bytes: u64,
}

/// The results of one workload.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// Which.
    pub workload: Workload,
    /// On the disk by itself.
    pub raw: Vec<Sample>,
    /// On a volume of a pool on it.
    pub ours: Vec<Sample>,
}

impl Outcome {
    /// The median of the runs' IOPS: raw, ours.
    #[must_use]
    pub fn iops(&self) -> (f64, f64) {
        (of(&self.raw, |sample| sample.iops), of(&self.ours, |sample| sample.iops))
    }

    fn to_json(&self) -> Value {
        let side = |samples: &[Sample]| {
            json!({
                "iops": of(samples, |sample| sample.iops),
                "latency_us": of(samples, |sample| sample.latency_us),
                "cpu_us": samples.first().and_then(|sample| sample.cpu_us)
                    .map(|_| of(samples, |sample| sample.cpu_us.unwrap_or(f64::NAN))),
                "runs": samples.iter().map(|sample| sample.iops).collect::<Vec<_>>(),
            })
        };
        json!({
            "job": self.workload.job, "depth": self.workload.depth, "title": self.workload.title,
            "raw": side(&self.raw), "blockd": side(&self.ours),
        })
    }
}

fn of(samples: &[Sample], figure: impl Fn(&Sample) -> f64) -> f64 {
    median(&samples.iter().map(figure).collect::<Vec<_>>()).unwrap_or(f64::NAN)
}

/// All results, and the machine.
#[derive(Clone, Debug)]
pub struct Report {
    /// The disk.
    pub disk: Disk,
    /// How ours was reached: `ublk` or `NBD`.
    pub front_end: &'static str,
    /// The bytes that were used.
    pub bytes: u64,
    /// All workloads.
    pub outcomes: Vec<Outcome>,
}

/// Runs everything on the disk by itself, then on a pool. All data on the disk is lost.
///
/// # Errors
/// When fio or the daemon fails.
pub fn measure(jobs: &Jobs, disk: &Disk, blockd: &Path, effort: Effort) -> Result<Report> {
    let bytes = (disk.bytes / 2).min(effort.bytes) >> 20 << 20;
    let clock = Clock::start();
    let note = |what: &str| println!("{:>5.0} s  {what}", clock.seconds());
    note("the disk by itself: written once");
    let turn = Turn::device(&disk.path, None);
    let raw = series(jobs, &turn, effort, bytes).context("the disk by itself")?;
    note("a pool on the disk: its volume written once");
    disk.forget()?;
    let daemon = pool::Daemon::start(blockd, &jobs.scratch, disk)?;
    let place = daemon.add(bytes)?;
    let front_end = match place {
        Place::Device(_) => "ublk",
        Place::Nbd(_) => "NBD",
    };
    note(&format!("a volume over {front_end}"));
    let turn = Turn { place, server: daemon.pid() };
    let ours = series(jobs, &turn, effort, bytes).context("a pool on the disk")?;
    daemon.end()?;
    disk.forget()?;
    note("done; the pool's superblocks are gone from the disk again");
    let outcomes = WORKLOADS.into_iter().zip(raw).zip(ours);
    let outcomes = outcomes.map(|((workload, raw), ours)| Outcome { workload, raw, ours });
    Ok(Report { disk: disk.clone(), front_end, bytes, outcomes: outcomes.collect() })
}

/// All workloads on one place, which is written once before.
fn series(jobs: &Jobs, turn: &Turn, effort: Effort, bytes: u64) -> Result<Vec<Vec<Sample>>> {
    let settings =
        Settings { size: bytes.to_string(), seconds: effort.seconds, ..Settings::default() };
    jobs.run("fill", &settings, std::slice::from_ref(turn))?;
    let mut all = Vec::new();
    for workload in WORKLOADS {
        let mut samples = Vec::new();
        for seed in 0..effort.runs as u64 {
            let settings = Settings { depth: workload.depth, seed: seed + 1, ..settings.clone() };
            samples.extend(jobs.run(workload.job, &settings, std::slice::from_ref(turn))?);
        }
        all.push(samples);
    }
    Ok(all)
}

impl Report {
    /// Prints the table, in the form of Markdown.
    pub fn print(&self) {
        println!("\n| workload | raw IOPS | blockd IOPS over {} | blockd/raw |", self.front_end);
        println!("|---|---:|---:|---:|");
        for outcome in &self.outcomes {
            let (raw, ours) = outcome.iops();
            println!("| {} | {raw:.0} | {ours:.0} | {:.2} |", outcome.workload.title, ours / raw);
        }
    }

    /// Returns the results as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "machine": crate::facts::to_json(),
            "disk": self.disk.to_json(), "front_end": self.front_end, "bytes": self.bytes,
            "workloads": self.outcomes.iter().map(Outcome::to_json).collect::<Vec<_>>(),
        })
    }
}
