//! Every crash of a short trace: at each boundary of device IO, with each choice of surviving cache
//! contents; and then every crash again while the pool is being opened.

use std::time::Instant;

use super::core::Trace;
use super::disk::Keep;
use super::oracle::Violation;
use super::profile::Profile;
use super::runner::clock;
use super::world::{Crash, Frozen, World};

/// Crashes of a kind that are also carried out while opening: death, nothing kept, all kept.
const NESTED_CRASHES: usize = 3;

/// How thoroughly to enumerate.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// Random subsets of the volatile writes at each boundary, besides none, all and each single.
    pub subsets: usize,
    /// Interval of boundaries at which the opening is itself crashed at each of its boundaries; 0:
    /// never.
    pub nested_every: u64,
}

/// The counts of an enumeration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Traces.
    pub traces: u64,
    /// Boundaries of device IO in them.
    pub boundaries: u64,
    /// Crashes carried out in the traces.
    pub crash_points: u64,
    /// Crashes carried out while opening after one of those.
    pub nested: u64,
    /// Openings that ended in a pool that was read back.
    pub recoveries: u64,
    /// Units that the oracle compared.
    pub checks: u64,
}

/// A violation, and its place.
#[derive(Clone, Debug)]
pub struct Found {
    /// The trace.
    pub seed: u64,
    /// The boundary.
    pub boundary: u64,
    /// The crash.
    pub crash: String,
    /// The promise that was broken.
    pub violation: Violation,
}

/// A short trace's profile: few requests on a small pool, no faults but the enumerated crashes.
#[must_use]
pub fn short_profile(seed: u64) -> Profile {
    let mut random = fastrand::Rng::with_seed(seed ^ 0xc0de);
    let mut profile = Profile::draw(&mut random);
    let devices = usize::from(random.u8(..4) == 0) + 1;
    profile.extent_size = 64 << 10;
    profile.devices = (0..devices).map(|_| random.u64(18..26)).collect();
    profile.wal_extents = 1;
    profile.reserve_extents = 2;
    profile.quantum = profile.quantum.min(2);
    profile.max_volumes = profile.max_volumes.min(3);
    profile.volume_extents = profile.volume_extents.min(3);
    profile.operations = random.u32(6..=14);
    profile.depth = profile.depth.min(4);
    profile.size_bits = profile.size_bits.min(6);
    profile.control = 0.1;
    profile.mix[4] = profile.mix[4].max(5);
    profile.crash = 0.0;
    profile.recovery_crash = 0.0;
    profile.wrong_ring = 0.0;
    profile.torn_ring = 0.0;
    profile.data_error = 0.0;
    profile.metadata_read_error = 0.0;
    profile.metadata_write_error = 0.0;
    profile.flush_error = 0.0;
    profile.silent = 0.0;
    // A device that leaves is much to enumerate.
    profile.controls[11] = 0;
    if random.u8(..3) == 0 {
        share(&mut profile, &mut random);
    }
    profile
}

/// A volume whose snapshots come and go while a few of its extents are written and discarded: first
/// writes of shared extents are redirected, and folds make the entries plain again.
fn share(profile: &mut Profile, random: &mut fastrand::Rng) {
    profile.bend_to_folds(random);
    profile.devices = vec![24];
    profile.max_volumes = 1;
    profile.operations = random.u32(25..=40);
    profile.depth = 2;
    profile.size_bits = 4;
    profile.control = 0.2;
    profile.controls = [2, 15, 0, 30, 3, 3, 5, 5, 0, 0, 0, 0, 0, 0];
    profile.mix = [2, 40, 5, 1, 3];
    profile.crash = 0.0;
    profile.commit_interval_ns = 100_000;
}

/// Enumerates the crashes of one seeded trace, however long it takes.
pub fn trace(seed: u64, depth: Depth, counts: &mut Counts) -> Result<(), Box<Found>> {
    let century = std::time::Duration::from_secs(100 * 365 * 24 * 3600);
    trace_until(seed, depth, clock() + century, counts).map(|_| ())
}

/// Enumerates the crashes of one seeded trace. `false`: the time limit has cut it short.
pub fn trace_until(
    seed: u64,
    depth: Depth,
    until: Instant,
    counts: &mut Counts,
) -> Result<bool, Box<Found>> {
    let at_start =
        |violation| Box::new(Found { seed, boundary: 0, crash: "none".into(), violation });
    let mut world = World::create(seed, short_profile(seed), Trace::default()).map_err(at_start)?;
    counts.traces += 1;
    let mut boundary = world.core.boundaries;
    while !world.is_winding_up() {
        world.step().map_err(at_start)?;
        if world.core.boundaries == boundary {
            continue;
        }
        boundary = world.core.boundaries;
        counts.boundaries += 1;
        let nested = depth.nested_every > 0 && counts.boundaries.is_multiple_of(depth.nested_every);
        let frozen = world.freeze();
        for (number, crash) in crashes(&frozen, depth.subsets, seed ^ boundary).iter().enumerate() {
            if clock() > until {
                world.abandon();
                return Ok(false);
            }
            counts.crash_points += 1;
            // A death, nothing kept and everything kept stand for the rest.
            let nested = nested && number < NESTED_CRASHES;
            recover(&frozen, crash, seed ^ boundary, nested.then_some(until), counts).map_err(
                |violation| {
                    Box::new(Found { seed, boundary, crash: format!("{crash:?}"), violation })
                },
            )?;
        }
    }
    world.abandon();
    Ok(true)
}

/// The crashes that are tried at one moment.
fn crashes(frozen: &Frozen, subsets: usize, seed: u64) -> Vec<Crash> {
    let volatile = frozen.volatile();
    let total: usize = volatile.iter().sum();
    let mut random = fastrand::Rng::with_seed(seed);
    let power = |keep: &dyn Fn(usize) -> Vec<bool>, torn: Option<u8>| {
        let mut first = 0;
        let keeps = volatile.iter().map(|count| {
            let mask = (first..first + count).map(|at| keep(total)[at]).collect();
            first += count;
            torn.map_or_else(
                || Keep::Mask(Vec::clone(&mask)),
                |units| Keep::MaskTorn(Vec::clone(&mask), units),
            )
        });
        Crash::Power(keeps.collect())
    };
    let mut all = vec![Crash::Kill, power(&|total| vec![false; total], None)];
    if total == 0 {
        return all;
    }
    all.push(power(&|total| vec![true; total], None));
    for one in 0..total {
        let single = |total: usize| (0..total).map(|at| at == one).collect();
        all.push(power(&single, None));
        all.push(power(&single, Some(random.u8(1..255))));
    }
    if total > 1 {
        for _ in 0..subsets.min(1 << total.min(16)) {
            let mask: Vec<bool> = (0..total).map(|_| random.bool()).collect();
            let torn = if random.u8(..3) == 0 { Some(random.u8(1..255)) } else { None };
            all.push(power(&|_| mask.clone(), torn));
        }
    }
    all
}

/// Crashes, opens, reads everything back; with `nested` also crashes at each boundary of that, as
/// long as there is time.
fn recover(
    frozen: &Frozen,
    crash: &Crash,
    seed: u64,
    nested: Option<Instant>,
    counts: &mut Counts,
) -> Result<(), Violation> {
    let mark = frozen.mark();
    let mut world = World::thaw(frozen, seed);
    world.crash(crash);
    let mut boundary = world.core.boundaries;
    // A pool that is at rest when it has been read back ends the history in the same event.
    while !world.is_serving() && !world.is_finished() {
        world.step()?;
        let nested = nested.is_some_and(|until| clock() < until);
        if nested && world.is_opening() && world.core.boundaries != boundary {
            boundary = world.core.boundaries;
            let again = world.freeze();
            for second in crashes(&again, 0, seed ^ boundary).iter().take(NESTED_CRASHES) {
                counts.nested += 1;
                recover(&again, second, seed ^ boundary, None, counts)?;
            }
        }
    }
    counts.recoveries += 1;
    counts.checks += world.checks() - frozen.checks();
    world.abandon();
    drop(world);
    frozen.truncate(mark);
    Ok(())
}
