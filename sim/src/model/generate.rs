//! Random histories: sizes, steps and ending all follow from one seed.

use fastrand::Rng;

use super::mutation::Mutation;
use super::oracle::Fault;
use super::parts::{CkptState, CommitState, OpState, Phase};
use super::runner::{Counters, Subject};
use super::state::{Config, OPS, World};
use super::step::{KINDS, Step, kind_of};

#[derive(Clone, Copy)]
enum Draw {
    Write,
    Fua,
    Discard,
    Zeroes,
    Read,
    Flush,
    Op,
    Commit,
    Land,
    Ckpt,
    Reclaim,
    Copy,
    Group,
    Delete,
    Rollback,
    Resize,
    Retry,
    Structure,
    Check,
    Kill,
    Power,
    FlushError,
    Persist,
    Fold,
    FailFold,
}

const DRAWS: [Draw; 25] = [
    Draw::Write,
    Draw::Fua,
    Draw::Discard,
    Draw::Zeroes,
    Draw::Read,
    Draw::Flush,
    Draw::Op,
    Draw::Commit,
    Draw::Land,
    Draw::Ckpt,
    Draw::Reclaim,
    Draw::Copy,
    Draw::Group,
    Draw::Delete,
    Draw::Rollback,
    Draw::Resize,
    Draw::Retry,
    Draw::Structure,
    Draw::Check,
    Draw::Kill,
    Draw::Power,
    Draw::FlushError,
    Draw::Persist,
    Draw::Fold,
    Draw::FailFold,
];

// Profiles of histories whose first writes copy, and of those whose first writes redirect.
const COPYING: usize = 6;
const REDIRECTING: usize = 5;

// Weights in the order of DRAWS. Each history follows one of these, because a mixture of
// everything seldom gets deep into anything.
const PROFILES: [[u8; DRAWS.len()]; COPYING + REDIRECTING] = [
    // Of everything a little.
    [20, 5, 8, 3, 5, 8, 60, 45, 18, 10, 5, 2, 1, 1, 1, 1, 1, 6, 4, 2, 2, 2, 2, 0, 0],
    // Structure changes.
    [20, 4, 5, 1, 6, 5, 60, 40, 14, 8, 5, 8, 4, 4, 4, 5, 3, 24, 5, 2, 2, 1, 1, 0, 0],
    // Commits and crashes.
    [25, 5, 6, 1, 1, 8, 55, 60, 30, 2, 4, 1, 1, 0, 0, 0, 1, 3, 2, 6, 6, 1, 3, 0, 0],
    // Discards under slow writes and reads.
    [30, 2, 25, 6, 14, 3, 60, 30, 10, 1, 10, 2, 0, 0, 0, 0, 0, 6, 10, 1, 1, 0, 1, 0, 0],
    // Checkpoints.
    [22, 2, 6, 1, 2, 6, 50, 40, 18, 45, 4, 2, 1, 1, 1, 1, 0, 6, 3, 2, 3, 1, 2, 0, 0],
    // Many small writes, few commits: full rings and a full WAL.
    [60, 6, 20, 2, 1, 8, 90, 16, 8, 5, 2, 2, 1, 1, 1, 1, 1, 6, 2, 2, 1, 1, 1, 0, 0],
    // Composite entries: of everything a little.
    [26, 4, 8, 2, 6, 4, 80, 45, 18, 6, 6, 4, 0, 3, 2, 2, 0, 14, 5, 2, 3, 1, 2, 12, 1],
    // Snapshots that come and go.
    [24, 3, 4, 1, 6, 3, 80, 50, 18, 4, 8, 9, 1, 9, 3, 2, 0, 30, 5, 1, 3, 0, 2, 14, 1],
    // Folds under writes, reads and discards.
    [34, 3, 12, 3, 12, 2, 90, 40, 14, 2, 10, 3, 0, 4, 1, 1, 0, 10, 8, 1, 2, 0, 1, 30, 2],
    // Discards under redirects.
    [36, 2, 26, 6, 12, 2, 80, 26, 10, 1, 10, 3, 0, 2, 0, 1, 0, 8, 8, 1, 1, 0, 1, 6, 0],
    // Commits and crashes.
    [26, 6, 6, 1, 2, 6, 70, 70, 30, 4, 5, 3, 0, 5, 1, 0, 0, 12, 2, 5, 8, 1, 3, 14, 1],
];

const TABLE: usize = 256;

/// Spreads weights over a table that one random byte indexes.
pub(crate) fn spread<D: Copy, const N: usize>(draws: [D; N], weights: [u8; N]) -> [D; TABLE] {
    let total: usize = weights.iter().map(|w| usize::from(*w)).sum();
    std::array::from_fn(|at| {
        let mut rest = at * total / TABLE;
        for (draw, weight) in draws.iter().zip(weights) {
            if rest < usize::from(weight) {
                return *draw;
            }
            rest -= usize::from(weight);
        }
        draws[0]
    })
}

/// Draw tables, made once.
#[derive(Clone)]
pub struct Tables {
    draws: [[Draw; TABLE]; PROFILES.len()],
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tables")
    }
}

impl Default for Tables {
    fn default() -> Self {
        Self::new()
    }
}

impl Tables {
    /// The tables of all profiles.
    pub fn new() -> Self {
        let draws = PROFILES.map(|weights| spread(DRAWS, weights));
        Self { draws }
    }
}

/// A number below `n`.
pub(crate) fn small(rng: &mut Rng, n: u8) -> u8 {
    ((rng.u32(..) >> 16) * u32::from(n)).to_le_bytes()[2]
}

fn sizes(rng: &mut Rng) -> Config {
    let vol_extents = 1 + small(rng, 2);
    Config {
        extents: 2 + small(rng, 6),
        subs: 2 + small(rng, 2),
        vol_extents,
        volumes: 1 + small(rng, 2),
        fill: if rng.bool() { rng.u16(..) | rng.u16(..) } else { 0 },
        copy: small(rng, 4) % 3,
        ring: usize::from(3 + small(rng, 6)),
        wal: 3 + small(rng, 4),
        per_block: usize::from(1 + small(rng, 3)),
        recovery_commit: rng.bool(),
        composite: false,
        overlay: 0,
        whole: false,
    }
}

// Few volumes with copies, and room for their overlays.
fn composite_sizes(rng: &mut Rng) -> Config {
    let sizes = sizes(rng);
    let few = small(rng, 4) > 0;
    Config {
        extents: 4 + small(rng, 4),
        vol_extents: if few { 1 } else { sizes.vol_extents },
        volumes: if few { 1 } else { sizes.volumes },
        fill: rng.u16(..) | rng.u16(..) | u16::from(few),
        copy: small(rng, 8) % 3,
        composite: true,
        overlay: if rng.bool() { rng.u8(..) } else { 0 },
        whole: rng.bool(),
        ..sizes
    }
}

// Half of the histories redirect, and all that look for a rule of composite entries.
fn config(rng: &mut Rng, seed: u64, mutation: Mutation) -> Config {
    let copies = seed >> 32 & 1 == 0 && !mutation.is_composite();
    if copies { sizes(rng) } else { composite_sizes(rng) }
}

/// The sizes that belong to a seed.
pub fn config_of(seed: u64, mutation: Mutation) -> Config {
    config(&mut Rng::with_seed(seed), seed, mutation)
}

fn draw(rng: &mut Rng, draw: Draw, world: &World) -> Step {
    let cfg = &world.cfg;
    let (v, q) = (small(rng, world.next_volume), small(rng, 2));
    let e = small(rng, cfg.vol_extents);
    let mask = 1 + small(rng, (1 << cfg.subs) - 1);
    match draw {
        Draw::Write => Step::Write(q, v, e, mask, false),
        Draw::Fua => Step::Write(q, v, e, mask, true),
        Draw::Discard => Step::Discard(q, v, e, mask, false),
        Draw::Zeroes => Step::Discard(q, v, e, mask, true),
        Draw::Read => Step::Read(v, e, small(rng, cfg.subs)),
        Draw::Flush => Step::Flush(q, v),
        Draw::Op => Step::Op(busy_slot(rng, world)),
        Draw::Commit => Step::Commit,
        Draw::Land => Step::Land(small(rng, 3)),
        Draw::Ckpt => Step::Ckpt,
        Draw::Reclaim => Step::Reclaim,
        Draw::Copy => Step::Copy(v, rng.bool()),
        Draw::Group => Step::Group(v, small(rng, world.next_volume)),
        Draw::Delete => Step::Delete(v),
        Draw::Rollback => Step::Rollback(v, small(rng, world.next_volume)),
        Draw::Resize => Step::Resize(v, 1 + small(rng, world.full_size())),
        Draw::Retry => Step::Retry(v),
        Draw::Structure => Step::Structure,
        Draw::Check => Step::Check,
        Draw::Kill => Step::Kill,
        Draw::Power => Step::Power(rng.u16(..)),
        Draw::FlushError => Step::FlushError(small(rng, 3), rng.u16(..)),
        Draw::Persist => Step::Persist(small(rng, 32)),
        Draw::Fold => fold(rng, world),
        Draw::FailFold => Step::FailFold(busy_slot(rng, world)),
    }
}

// A composite entry, if there is one.
fn fold(rng: &mut Rng, world: &World) -> Step {
    let places =
        (0..world.next_volume).flat_map(|v| (0..world.cfg.vol_extents).map(move |e| (v, e)));
    let composite = places.filter(|(v, e)| world.map.entry(*v, *e).is_composite());
    let (v, e) = composite.take(1 + usize::from(small(rng, 2))).last().unwrap_or((0, 0));
    // The direction that is allowed more often than not.
    let alone = world.map.entry(v, e).extents().nth(1).is_some_and(|base| world.is_exclusive(base));
    Step::Fold(v, e, alone ^ (small(rng, 4) == 0))
}

fn busy_slot(rng: &mut Rng, world: &World) -> u8 {
    let slots = 0..OPS.to_le_bytes()[0];
    let first = small(rng, slots.end);
    let from_first = slots.clone().map(|n| (first + n) % slots.end);
    let mut busy = from_first.filter(|n| world.ops[usize::from(*n)].state != OpState::Free);
    busy.next().unwrap_or(first)
}

fn draw_open(rng: &mut Rng, world: &World) -> Step {
    let n = small(rng, 100);
    match world.phase {
        Phase::Failed if n < 50 => Step::Reopen,
        Phase::Failed if n < 85 => Step::Check,
        Phase::Open(0) if n < 12 => Step::Aside,
        Phase::Open(0) if n < 24 => Step::Back,
        Phase::Recover if n < 40 => Step::Commit,
        Phase::Recover if n < 70 => Step::Land(small(rng, 4)),
        Phase::Recover if n < 80 => Step::Ckpt,
        Phase::Recover if n < 84 => Step::FlushError(0, rng.u16(..)),
        _ if n < 86 => Step::Open,
        _ if n < 94 => Step::Late(small(rng, 4)),
        _ if n < 97 => Step::Kill,
        _ => Step::Power(rng.u16(..)),
    }
}

/// Random histories of the commit protocol, without one of its rules.
#[derive(Debug)]
pub struct Commits {
    tables: Tables,
    mutation: Mutation,
}

impl Commits {
    /// Histories without this rule.
    pub fn new(mutation: Mutation) -> Self {
        Self { tables: Tables::new(), mutation }
    }
}

impl Subject for Commits {
    type Fault = Fault;
    const KINDS: &'static [&'static str] = KINDS;

    fn run(&self, seed: u64, counters: &mut Counters) -> Option<Fault> {
        run(&self.tables, seed, self.mutation, counters, |_| {})
    }
}

/// Runs the history of one seed; `seen` gets every step that was possible.
pub fn run(
    tables: &Tables,
    seed: u64,
    mutation: Mutation,
    counters: &mut Counters,
    mut seen: impl FnMut(Step),
) -> Option<Fault> {
    let mut rng = Rng::with_seed(seed);
    let cfg = config(&mut rng, seed, mutation);
    let mut world = World::new(cfg, mutation);
    let profile = if cfg.composite {
        COPYING + usize::from(small(&mut rng, 5))
    } else {
        usize::from(small(&mut rng, 6))
    };
    let length = 24 + small(&mut rng, 72) + if cfg.composite { small(&mut rng, 40) } else { 0 };
    let mut take = |world: &mut World, step: Step| {
        let (phase, commit, ckpt) = (world.phase, world.commit.state, world.ckpt.state);
        if world.apply(step) {
            let idle = (commit == CommitState::Idle, ckpt == CkptState::Idle);
            counters.kinds[kind_of(step, phase, idle.0, idle.1) as usize] += 1;
            seen(step);
        }
        world.fault.is_some() || world.exhausted
    };
    let mut over = false;
    for _ in 0..length {
        let step = match world.phase {
            Phase::Serve => {
                let byte = usize::from(rng.u8(..));
                draw(&mut rng, tables.draws[profile][byte], &world)
            }
            _ => draw_open(&mut rng, &world),
        };
        if take(&mut world, step) {
            over = true;
            break;
        }
    }
    if !over {
        for step in ending(&mut rng) {
            if take(&mut world, *step) {
                break;
            }
        }
    }
    counters.checks += world.checks;
    for (sum, n) in counters.kinds.iter_mut().zip(world.tally) {
        *sum += u64::from(n);
    }
    world.fault
}

fn ending(rng: &mut Rng) -> &'static [Step] {
    match small(rng, 8) {
        0 | 1 => &[Step::Recover, Step::Drain],
        2 => &[Step::Kill, Step::Recover, Step::Power(0), Step::Recover],
        3 => &[Step::Kill, Step::Recover],
        4 => &[Step::Power(0), Step::Recover],
        5 => &[Step::Power(1), Step::Recover],
        6 => &[Step::Power(7), Step::Recover],
        _ => &[Step::Power(0x5A5A), Step::Recover, Step::Check],
    }
}
