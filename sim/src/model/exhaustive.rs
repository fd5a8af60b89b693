//! Every history of a few steps, each ended by every outcome of a crash.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::mutation::Mutation;
use super::runner::now;
use super::state::{Config, World};
use super::step::Step;

/// One enumeration.
#[derive(Debug)]
pub struct Space<C, S: 'static> {
    /// The name of the enumeration.
    pub name: &'static str,
    /// Moves of a history before its ending, at most.
    pub depth: usize,
    /// The circumstances that it begins in.
    pub cfg: C,
    /// The moves to choose from, each one step or several; steps that are not possible are passed
    /// over.
    pub alphabet: &'static [&'static [S]],
}

/// The result of an enumeration.
#[derive(Clone, Debug)]
pub struct Found<S> {
    /// Histories, each with one ending.
    pub histories: u64,
    /// Values compared.
    pub checks: u64,
    /// Violations.
    pub violations: u64,
    /// Steps of the first violation, before its ending.
    pub first: Option<Vec<S>>,
    /// False if time ran out: then nothing was enumerated.
    pub complete: bool,
    /// How long it took.
    pub elapsed: Duration,
}

impl<S> Default for Found<S> {
    fn default() -> Self {
        let (histories, checks, violations) = (0, 0, 0);
        let elapsed = Duration::ZERO;
        Self { histories, checks, violations, first: None, complete: false, elapsed }
    }
}

const BASE: Config = Config {
    extents: 3,
    subs: 2,
    vol_extents: 1,
    volumes: 1,
    fill: 0,
    copy: 0,
    ring: 4,
    wal: 3,
    per_block: 1,
    recovery_commit: false,
    composite: false,
    overlay: 0,
    whole: false,
};

/// The enumerations of one run.
pub static SPACES: &[Space<Config, Step>] = &[
    Space {
        name: "empty volume: writes, request steps, commit steps",
        depth: 11,
        cfg: BASE,
        alphabet: &[
            &[Step::Write(0, 0, 0, 1, false)],
            &[Step::Write(0, 0, 0, 2, false)],
            &[Step::Op(0)],
            &[Step::Op(1)],
            &[Step::Commit],
            &[Step::Land(0)],
        ],
    },
    Space {
        name: "volume with a clone: all requests, commit, checkpoint, structure",
        depth: 7,
        cfg: Config { fill: 0b11, copy: 2, ..BASE },
        alphabet: EVERYTHING,
    },
    Space {
        name: "volume with a snapshot: all requests, commit, checkpoint, structure",
        depth: 7,
        cfg: Config { fill: 0b11, copy: 1, ..BASE },
        alphabet: EVERYTHING,
    },
    Space {
        name: "volume with a clone: discards and copy-on-write of one extent",
        depth: 12,
        cfg: Config { fill: 0b11, copy: 2, ..BASE },
        alphabet: &[
            &[Step::Write(0, 0, 0, 1, false)],
            &[Step::Discard(0, 0, 0, 2, false)],
            &[Step::Write(0, 1, 0, 1, false)],
            &[Step::Op(0)],
            &[Step::Op(1)],
        ],
    },
    Space {
        name: "composite entry with a snapshot: writes, reads, snapshots, folds, commits, kills",
        depth: 8,
        cfg: Config { overlay: 0b01, copy: 1, ..COMPOSITE },
        alphabet: &[
            &[Step::Write(0, 0, 0, 2, false)],
            &[Step::Read(0, 0, 1)],
            &[Step::Requests],
            &[Step::Copy(0, false), Step::Structure, Step::Structure],
            &[Step::Delete(1), Step::Structure, Step::Structure],
            &[Step::Fold(0, 0, true)],
            &[Step::Folds],
            COMMIT,
            &[Step::Kill, Step::Recover],
        ],
    },
    Space {
        name: "volume with a clone: redirects, discards, folds up, commits",
        depth: 7,
        cfg: Config { copy: 2, ..COMPOSITE },
        alphabet: &[
            &[Step::Write(0, 0, 0, 1, false)],
            &[Step::Write(0, 1, 0, 2, false), Step::Requests],
            &[Step::Discard(0, 0, 0, 3, false)],
            &[Step::Discard(0, 0, 0, 1, false)],
            &[Step::Op(0)],
            &[Step::Op(1)],
            &[Step::Requests],
            &[Step::Fold(0, 0, false)],
            &[Step::Folds],
            COMMIT,
        ],
    },
    Space {
        name: "composite entry alone: requests and a fold down in steps",
        depth: 10,
        cfg: Config { overlay: 0b01, ..COMPOSITE },
        alphabet: &[
            &[Step::Write(0, 0, 0, 1, false)],
            &[Step::Write(0, 0, 0, 2, false)],
            &[Step::Discard(0, 0, 0, 1, false)],
            &[Step::Fold(0, 0, true)],
            &[Step::Op(0)],
            &[Step::Op(1)],
        ],
    },
    Space {
        name: "composite entry alone, blocks kept whole: writes, a fold down, commits",
        depth: 9,
        cfg: Config { overlay: 0b01, whole: true, ..COMPOSITE },
        alphabet: &[
            &[Step::Write(0, 0, 0, 2, false)],
            &[Step::Write(0, 0, 0, 1, true)],
            &[Step::Requests],
            &[Step::Fold(0, 0, true)],
            &[Step::Fold(0, 0, false)],
            &[Step::Folds],
            COMMIT,
            &[Step::Kill, Step::Recover],
        ],
    },
];

// One volume that maps both sub-blocks of one extent; first writes redirect.
const COMPOSITE: Config =
    Config { composite: true, extents: 5, fill: 0b11, ring: 8, wal: 6, ..BASE };

// The rest of a commit, or a whole one.
const COMMIT: &[Step] = &[
    Step::Commit,
    Step::Commit,
    Step::Commit,
    Step::Commit,
    Step::Land(0),
    Step::Land(1),
    Step::Land(2),
    Step::Land(3),
    Step::Land(4),
    Step::Land(5),
    Step::Commit,
    Step::Commit,
    Step::Reclaim,
];

const EVERYTHING: &[&[Step]] = &[
    &[Step::Write(0, 0, 0, 1, false)],
    &[Step::Write(1, 1, 0, 1, true)],
    &[Step::Discard(0, 0, 0, 3, false)],
    &[Step::Discard(1, 0, 0, 1, true)],
    &[Step::Read(0, 0, 0)],
    &[Step::Flush(0, 0)],
    &[Step::Op(0)],
    &[Step::Op(1)],
    &[Step::Commit],
    &[Step::Land(0)],
    &[Step::Ckpt],
    &[Step::Reclaim],
    &[Step::Copy(0, true)],
    &[Step::Delete(1)],
    &[Step::Rollback(0, 1)],
    &[Step::Resize(0, 1)],
    &[Step::Structure],
    &[Step::FlushError(0, 0)],
    &[Step::Reopen],
];

struct Walk<'a> {
    space: &'a Space<Config, Step>,
    out_of_time: &'a AtomicBool,
    deadline: std::time::Instant,
    path: Vec<Step>,
    found: Found<Step>,
}

impl Walk<'_> {
    fn note(&mut self, world: &World) {
        self.found.histories += 1;
        self.found.checks += world.checks;
        if world.fault.is_some() {
            self.found.violations += 1;
            if self.found.first.is_none() {
                self.found.first = Some(self.path.clone());
            }
        }
        if self.found.histories.is_multiple_of(4096) && now() > self.deadline {
            self.out_of_time.store(true, Ordering::Relaxed);
        }
    }

    fn crash_ends(&mut self, world: &World) {
        let mut killed = *world;
        killed.checks = 0;
        killed.apply(Step::Kill);
        killed.apply(Step::Recover);
        self.note(&killed);
        // An odometer over the outcomes that the power loss asks for.
        let mut digits: Vec<(u8, u8)> = Vec::new();
        loop {
            let mut lost = *world;
            lost.checks = 0;
            let mut at = 0;
            lost.now += 1;
            lost.power_loss(|n| {
                if at == digits.len() {
                    digits.push((0, n));
                }
                at += 1;
                digits[at - 1].0
            });
            lost.apply(Step::Recover);
            self.note(&lost);
            while digits.last().is_some_and(|(digit, n)| digit + 1 == *n) {
                digits.pop();
            }
            match digits.last_mut() {
                Some((digit, _)) => *digit += 1,
                None => break,
            }
        }
    }

    fn visit(&mut self, world: &World, depth: usize) {
        if self.out_of_time.load(Ordering::Relaxed) {
            return;
        }
        self.crash_ends(world);
        if depth == 0 || world.fault.is_some() {
            return;
        }
        for steps in self.space.alphabet {
            let mut next = *world;
            if take(&mut next, steps) {
                let len = self.path.len();
                self.path.extend_from_slice(steps);
                self.visit(&next, depth - 1);
                self.path.truncate(len);
            }
        }
    }
}

// Takes a move; false if none of its steps is possible.
fn take(world: &mut World, steps: &[Step]) -> bool {
    let mut done = false;
    for step in steps {
        if world.fault.is_none() {
            done |= world.apply(*step);
        }
    }
    done
}

/// Runs one enumeration on two threads; `time` limits it.
pub fn enumerate(space: &Space<Config, Step>, mutation: Mutation, time: Duration) -> Found<Step> {
    let start = now();
    let root = World::new(space.cfg, mutation);
    let mut branches = Vec::new();
    for first in space.alphabet {
        let mut one = root;
        if take(&mut one, first) {
            branches.push((one, first.to_vec()));
        }
    }
    let (next, out_of_time) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let (found, deadline) = (Found::default(), start + time);
        let mut walk = Walk { space, out_of_time: &out_of_time, deadline, path: Vec::new(), found };
        while let Some((world, path)) = branches.get(next.fetch_add(1, Ordering::Relaxed)) {
            walk.path.clone_from(path);
            walk.visit(world, space.depth - 1);
        }
        walk.found
    };
    let mut sum = Found::default();
    std::thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        for found in threads.into_iter().filter_map(|t| t.join().ok()) {
            sum.histories += found.histories;
            sum.checks += found.checks;
            sum.violations += found.violations;
            sum.first = sum.first.take().or(found.first);
        }
    });
    sum.complete = !out_of_time.load(Ordering::Relaxed);
    sum.elapsed = start.elapsed();
    sum
}
