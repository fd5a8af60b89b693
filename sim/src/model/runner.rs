//! Drives random histories for a time, on one or two threads.

use std::time::{Duration, Instant};

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Wall clock.
    pub time: Duration,
    /// Histories on each thread.
    pub histories: u64,
    /// Violations on each thread.
    pub violations: u64,
    /// Threads.
    pub threads: u64,
}

/// A model that random histories explore.
pub trait Subject: Sync {
    /// A violation.
    type Fault: Copy + Send + std::fmt::Debug;
    /// Names of the kinds of steps or events that are counted.
    const KINDS: &'static [&'static str];

    /// Runs the history of a seed.
    fn run(&self, seed: u64, counters: &mut Counters) -> Option<Self::Fault>;
}

/// How often each kind of step was taken.
#[derive(Clone, Debug)]
pub struct Counters {
    /// Counts by kind.
    pub kinds: Vec<u64>,
    /// Values compared by the oracle.
    pub checks: u64,
}

impl Counters {
    /// All zero.
    pub fn new(kinds: usize) -> Self {
        Self { kinds: vec![0; kinds], checks: 0 }
    }

    /// Adds another thread's counters.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.kinds.iter_mut().zip(&other.kinds) {
            *sum += more;
        }
        self.checks += other.checks;
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report<F> {
    /// Histories run.
    pub histories: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Violations found.
    pub violations: u64,
    /// Seed and fault of the first violation.
    pub first: Option<(u64, F)>,
    /// Histories until the first violation, on its thread.
    pub until_first: u64,
    /// Counts of the steps in the histories.
    pub counters: Counters,
}

// Histories between two readings of the clock.
const BATCH: u64 = 256;

/// The seed of history `n` in a run: neighbours must not resemble each other.
pub fn seed_of(base: u64, n: u64) -> u64 {
    let mut x = base ^ n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 31)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

#[expect(clippy::disallowed_methods, reason = "the runner is the edge that measures time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

fn one_thread<S: Subject>(subject: &S, base: u64, limits: Limits, thread: u64) -> Report<S::Fault> {
    let start = now();
    let mut report = Report {
        histories: 0,
        elapsed: Duration::ZERO,
        violations: 0,
        first: None,
        until_first: 0,
        counters: Counters::new(S::KINDS.len()),
    };
    while report.histories < limits.histories && report.violations < limits.violations {
        let seed = seed_of(base, report.histories * limits.threads + thread);
        let fault = subject.run(seed, &mut report.counters);
        report.histories += 1;
        if let Some(fault) = fault {
            report.violations += 1;
            if report.first.is_none() {
                report.first = Some((seed, fault));
                report.until_first = report.histories;
            }
        }
        if report.histories.is_multiple_of(BATCH) && start.elapsed() >= limits.time {
            break;
        }
    }
    report.elapsed = start.elapsed();
    report
}

/// Runs random histories until a limit is reached.
pub fn run_random<S: Subject>(subject: &S, base: u64, limits: Limits) -> Report<S::Fault> {
    let reports: Vec<_> = std::thread::scope(|scope| {
        let start = |thread| scope.spawn(move || one_thread(subject, base, limits, thread));
        let threads: Vec<_> = (0..limits.threads).map(start).collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    assert_eq!(
        reports.len().to_le_bytes(),
        limits.threads.to_le_bytes(),
        "a model thread panicked"
    );
    let mut rest = reports.into_iter();
    let Some(mut sum) = rest.next() else { unreachable!("at least one thread runs") };
    for report in rest {
        sum.histories += report.histories;
        sum.violations += report.violations;
        sum.elapsed = sum.elapsed.max(report.elapsed);
        if sum.first.is_none() {
            sum.first = report.first;
            sum.until_first = report.until_first;
        }
        sum.counters.add(&report.counters);
    }
    sum
}
