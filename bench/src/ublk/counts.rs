//! Counts that no noise touches: the cost of a mapped operation of 4 KiB in calls, backing IO,
//! allocations and wake-ups of other threads; ours beside rublk's, counted in the same way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;

use super::Bench;
use super::mapped::{BYTES, Devices, Pair};
use super::peers::Device;
use super::trace::{Counter, What};
use crate::block::{Settings, Turn};
use crate::nbd::counts::{Sleeps, since};
use crate::nbd::process::Tree;
use crate::report::{Budget, Row};
use crate::stats::{Ratio, median};

/// Operations in flight.
const DEPTH: u32 = 32;
/// The jobs under which counts are taken.
pub const JOBS: [&str; 2] = ["randread", "randwrite"];
/// Tolerance for work that runs once a second and is part of the counts.
const NEARLY_NONE: f64 = 0.001;

/// Counts of one device, for each operation.
#[derive(Clone, Debug, Default)]
struct Each {
    counted: BTreeMap<What, f64>,
    /// Sleeps of the thread that serves the device.
    serving: f64,
    /// The counts of all other threads of its process.
    others: f64,
    /// The counts of the kernel's threads for rings among them.
    kernels: f64,
}

/// The results of counting.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The counts of blockd, with their budgets.
    pub rows: Vec<Row>,
    /// Calls of `io_uring_enter` per operation, rublk's by ours: how many requests a call serves
    /// depends on scheduling, so this is a ratio of pairs like any other.
    pub enters: Vec<(String, Ratio)>,
}

/// Counts under all pairs of devices.
pub fn measure(bench: &Bench, devices: &Devices) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for job in JOBS {
        for pair in &devices.pairs {
            let name = format!("{job}-{DEPTH}, {}", pair.mode.name());
            enters(bench, job, pair, &name, &mut outcome)?;
            if let Some(ours) = &pair.ours {
                outcome.rows.extend(of_ours(bench, job, ours, &name)?);
            }
        }
    }
    Ok(outcome)
}

/// Pairs of runs with nothing else counted, since counting costs.
fn enters(bench: &Bench, job: &str, pair: &Pair, name: &str, outcome: &mut Outcome) -> Result<()> {
    let (mut ours, mut peers, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.pairs {
        let one = |device: &Device, all: &mut Vec<f64>| -> Result<f64> {
            let each = count(bench, job, device, &[What::Enters], bench.seconds)?;
            let each = each.counted.get(&What::Enters).copied().unwrap_or(f64::NAN);
            all.push(each);
            Ok(each)
        };
        let peer = one(&pair.peer, &mut peers)?;
        if let Some(device) = &pair.ours {
            ratios.push(peer / one(device, &mut ours)?);
        }
    }
    for (owner, all) in [("rublk's", peers), ("our", ours)] {
        if let Some(each) = median(&all) {
            let name = format!("{name}: {owner} io_uring_enter per operation, median");
            outcome.rows.push(Row::new(name, each, "", Budget::None));
        }
    }
    if let Some(ratio) = Ratio::of(&ratios) {
        outcome.enters.push((name.to_owned(), ratio));
    }
    Ok(())
}

fn of_ours(bench: &Bench, job: &str, device: &Device, name: &str) -> Result<Vec<Row>> {
    let each = count(bench, job, device, &What::ALL, bench.seconds.max(1.0))?;
    let mut rows = Vec::new();
    let mut row = |what: &str, figure: f64, budget| {
        rows.push(Row::new(format!("{name}: {what} per operation"), figure, "", budget));
    };
    for (what, counted) in &each.counted {
        let budget = match what {
            What::Backing => Budget::AtMost(1.0 + NEARLY_NONE),
            What::Allocations => Budget::AtMost(NEARLY_NONE),
            // With everything counted they say little; they are claimed elsewhere.
            What::Enters => continue,
            What::Calls => Budget::None,
        };
        row(what.name(), *counted, budget);
    }
    row("sleeps of the serving thread", each.serving, Budget::None);
    row("wake-ups of other threads", each.others, Budget::AtMost(NEARLY_NONE));
    row("sleeps of the kernel's threads for rings", each.kernels, Budget::None);
    Ok(rows)
}

/// Runs a job and counts, then counts for as long with nothing to do, and takes that off.
fn count(bench: &Bench, job: &str, device: &Device, wanted: &[What], seconds: f64) -> Result<Each> {
    let pid = device.server.with_context(|| format!("no server of {}", device.name))?;
    let settings =
        Settings { depth: DEPTH, seconds, size: BYTES.to_string(), ..Settings::default() };
    let turn = Turn::device(&device.path, device.server);
    let counter = Counter::start(wanted)?;
    let clock = Clock::start();
    let start = Reading::take(&counter, pid)?;
    let samples = bench.jobs.run(job, &settings, std::slice::from_ref(&turn));
    let end = Reading::take(&counter, pid)?;
    // Fewer calls are too few for a comparison.
    let idle = if wanted.len() > 1 {
        std::thread::sleep(Duration::from_secs_f64(clock.seconds()));
        Reading::take(&counter, pid)?
    } else {
        end.clone()
    };
    let operations = samples?.first().context("fio has shown nothing")?.operations;
    let mut each = Each::default();
    for (what, count) in &end.counts {
        let of = |reading: &Reading| reading.counts.get(what).copied().unwrap_or(0);
        let alone = of(&idle) - count;
        let counted = (count - of(&start)).saturating_sub(alone);
        each.counted.insert(*what, counted as f64 / operations);
    }
    let mut asleep = since(&end.asleep, &start.asleep);
    let alone = since(&idle.asleep, &end.asleep);
    for (thread, count) in &mut asleep {
        *count = count.saturating_sub(alone.get(thread).copied().unwrap_or(0));
    }
    each.take_sleeps(asleep, operations);
    Ok(each)
}

/// The counts of a process at one moment.
#[derive(Clone)]
struct Reading {
    counts: BTreeMap<What, u64>,
    asleep: BTreeMap<u32, (String, u64)>,
}

impl Reading {
    fn take(counter: &Counter, pid: u32) -> Result<Self> {
        let tree = Tree::new(pid);
        let threads = tree.threads()?;
        let counts = counter.read()?.into_iter().map(|(what, counts)| {
            (what, threads.iter().filter_map(|thread| counts.get(thread)).sum())
        });
        Ok(Self { counts: counts.collect(), asleep: tree.sleeps()? })
    }
}

impl Each {
    /// The thread that sleeps most serves the device.
    fn take_sleeps(&mut self, mut asleep: Sleeps, operations: f64) {
        let kernels = asleep.remove(crate::nbd::counts::KERNELS).unwrap_or(0);
        let serving = asleep.values().copied().max().unwrap_or(0);
        let others = asleep.values().sum::<u64>() - serving;
        self.serving = serving as f64 / operations;
        self.others = others as f64 / operations;
        self.kernels = kernels as f64 / operations;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_that_sleeps_most_serves() {
        let asleep = [("worker", 40), ("pool", 1), ("iou-wrk", 3)];
        let asleep = asleep.map(|(name, count)| (name.to_owned(), count));
        let mut each = Each::default();
        each.take_sleeps(asleep.into_iter().collect(), 10.0);
        assert_eq!((each.serving, each.others, each.kernels), (4.0, 0.1, 0.3));
    }
}
