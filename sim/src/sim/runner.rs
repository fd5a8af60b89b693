//! Many histories, on a few threads, until the time or their number is up.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::core::Trace;
use super::directed::{self, Script};
use super::marks::Marks;
use super::oracle::{Breach, Violation};
use super::profile::{Aim, Profile};
use super::world::World;

/// The result of one history.
#[derive(Debug)]
pub struct History {
    /// Its seed.
    pub seed: u64,
    /// The covered situations.
    pub marks: Marks,
    /// Units that the oracle compared.
    pub checks: u64,
    /// The violation.
    pub violation: Option<Violation>,
    /// Its events, if they were asked for.
    pub trace: Vec<String>,
}

/// Runs the history of a seed.
#[must_use]
pub fn history(seed: u64, aim: Aim, traced: bool) -> History {
    if let Some(script) = directed::of(seed, aim) {
        return scripted(seed, script, traced);
    }
    let mut random = fastrand::Rng::with_seed(seed ^ 0x5eed);
    let mut profile = Profile::draw(&mut random);
    match aim {
        Aim::Any => {}
        Aim::Rule(mutation) => profile.bend(mutation, &mut random),
        Aim::Snapshots => profile.bend_to_snapshots(&mut random),
        Aim::Evacuation => profile.bend_to_evacuation(&mut random),
    }
    let trace = if traced { Trace::kept() } else { Trace::default() };
    let made = std::panic::catch_unwind(AssertUnwindSafe(|| World::create(seed, profile, trace)));
    let world = match made {
        Ok(Ok(world)) => world,
        Ok(Err(violation)) => return failed(seed, violation),
        Err(_) => return failed(seed, panicked()),
    };
    finish(seed, world, World::run)
}

fn scripted(seed: u64, script: &Script, traced: bool) -> History {
    let trace = if traced { Trace::kept() } else { Trace::default() };
    let made = std::panic::catch_unwind(AssertUnwindSafe(|| {
        World::scripted(seed, script.profile(), trace)
    }));
    match made {
        Ok(Ok(world)) => finish(seed, world, |world| script.play(world)),
        Ok(Err(violation)) => failed(seed, violation),
        Err(_) => failed(seed, panicked()),
    }
}

/// Runs a history to its end, and drops the mapper.
fn finish(
    seed: u64,
    mut world: World,
    run: impl FnOnce(&mut World) -> Result<(), Violation>,
) -> History {
    let violation = match std::panic::catch_unwind(AssertUnwindSafe(|| run(&mut world))) {
        Ok(result) => result.err(),
        Err(_) => Some(panicked()),
    };
    blockd_mapper::ring::stores::stop_after(None);
    world.abandon();
    History {
        seed,
        marks: world.core.marks.clone(),
        checks: world.checks(),
        violation,
        trace: world.core.trace.lines().to_vec(),
    }
}

fn failed(seed: u64, violation: Violation) -> History {
    let (marks, trace) = (Marks::default(), Vec::new());
    History { seed, marks, checks: 0, violation: Some(violation), trace }
}

thread_local! {
    static PANIC: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

/// Keeps the message of a panic for the report, in place of printing it.
pub fn catch_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANIC.with(|text| *text.borrow_mut() = info.to_string());
    }));
}

fn panicked() -> Violation {
    let text = PANIC.with(|text| std::mem::take(&mut *text.borrow_mut()));
    Violation::new(Breach::Panic, text)
}

/// The seed of the history with this number.
#[must_use]
pub fn seed_of(seed: u64, number: u64) -> u64 {
    // Splitmix64: neighbouring numbers give unrelated seeds.
    let mut z = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How long to go on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Seconds at the most.
    pub seconds: f64,
    /// Histories at the most.
    pub histories: u64,
    /// Threads.
    pub threads: usize,
    /// Stop at the first violation.
    pub stop_at_first: bool,
    /// No scripts.
    pub by_chance: bool,
}

/// The result of many histories.
#[derive(Debug, Default)]
pub struct Total {
    /// Histories run.
    pub histories: u64,
    /// The covered situations.
    pub marks: Marks,
    /// Units that the oracle compared.
    pub checks: u64,
    /// Histories that went wrong, by number.
    pub violations: BTreeMap<u64, (u64, Violation)>,
    /// Seconds it took.
    pub seconds: f64,
}

/// The clock of the report; no history ever sees it.
#[expect(clippy::disallowed_methods, reason = "the driver at the edge: measures, decides nothing")]
#[must_use]
pub fn clock() -> Instant {
    Instant::now()
}

/// Runs the histories of a seed.
#[must_use]
pub fn run(seed: u64, aim: Aim, limits: Limits) -> Total {
    let start = clock();
    let deadline = start + Duration::from_secs_f64(limits.seconds);
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let total = Mutex::new(Total::default());
    std::thread::scope(|scope| {
        for _ in 0..limits.threads.max(1) {
            scope.spawn(|| {
                let mut own = Total::default();
                while !stop.load(Ordering::Relaxed) && clock() < deadline {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= limits.histories {
                        break;
                    }
                    // No odd seed is a script's.
                    let own_seed = seed_of(seed, number) | u64::from(limits.by_chance);
                    let history = history(own_seed, aim, false);
                    own.take(number, history);
                    if limits.stop_at_first && !own.violations.is_empty() {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                total.lock().unwrap_or_else(std::sync::PoisonError::into_inner).merge(own);
            });
        }
    });
    let mut total = total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    total.seconds = start.elapsed().as_secs_f64();
    total
}

impl Total {
    fn take(&mut self, number: u64, history: History) {
        self.histories += 1;
        self.marks.add(&history.marks);
        self.checks += history.checks;
        if let Some(violation) = history.violation {
            self.violations.insert(number, (history.seed, violation));
        }
    }

    fn merge(&mut self, other: Self) {
        self.histories += other.histories;
        self.marks.add(&other.marks);
        self.checks += other.checks;
        self.violations.extend(other.violations);
    }
}
