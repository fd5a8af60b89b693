//! Every history of a few moves, each ended by a loss of power and by repair.

use std::time::Duration;

use super::attachment::Kind;
use super::mutation::Mutation;
use super::parts::{Config, FenceKind};
use super::state::World;
use super::step::Step;
pub use crate::model::exhaustive::{Found, Space};
use crate::model::runner::now;

/// Host 0 has cell 0 open.
const BASE: Config = Config {
    fence: FenceKind::Reservations,
    exclusive: false,
    recovery: true,
    fences_silent: true,
    buffered: false,
    last_unit: true,
    open: 0b01,
    one_path: 0,
};

/// The enumerations of one run.
pub static SPACES: &[Space<Config, Step>] = &[
    Space {
        name: "hand-over between two hosts: writes, flushes, every step of both",
        depth: 13,
        cfg: BASE,
        alphabet: &[
            &[Step::Submit(0, 0, Kind::Write, 0), Step::Work(0, 0)],
            &[Step::Submit(1, 0, Kind::Write, 0)],
            &[Step::Advance(0, 0), Step::Send(0), Step::Land(0)],
            &[Step::Advance(1, 0), Step::Send(0), Step::Land(0)],
            &[Step::Work(0, 0)],
            &[Step::Work(1, 0)],
        ],
    },
    Space {
        name: "takeover: a host that stands still and wakes with commands queued, by steps",
        depth: 12,
        cfg: BASE,
        alphabet: &[
            &[Step::Submit(0, 0, Kind::Write, 0), Step::Serve(0, 0)],
            &[Step::Submit(0, 0, Kind::Flush, 0), Step::Serve(0, 0)],
            &[Step::Freeze(0)],
            &[Step::Wake(0)],
            &[Step::Send(0)],
            &[Step::Land(0)],
            &[Step::Declare(1, 0)],
            &[Step::Work(1, 0)],
        ],
    },
    Space {
        name: "two takeovers: the second host dies in the middle of the first one",
        depth: 9,
        cfg: BASE,
        alphabet: &[
            &[Step::Submit(0, 0, Kind::Write, 0), Step::Serve(0, 0)],
            &[Step::Send(0)],
            &[Step::Land(0)],
            &[Step::Declare(1, 0), Step::Advance(1, 0)],
            &[Step::Advance(1, 0)],
            &[Step::PowerOff(1)],
            &[Step::Declare(2, 0), Step::Work(2, 0)],
            &[Step::Work(2, 0)],
        ],
    },
    Space {
        name: "growth by steps on two hosts, one of which dies",
        depth: 15,
        cfg: Config { open: 0b11, ..BASE },
        alphabet: &[
            &[Step::StartGrowth(0, 0)],
            &[Step::StartGrowth(1, 1)],
            &[Step::Grow(0, 0)],
            &[Step::Grow(1, 1)],
            &[Step::Send(0), Step::Land(0)],
            &[Step::Submit(0, 0, Kind::Write, 2), Step::Serve(0, 0)],
            &[Step::PowerOff(0)],
        ],
    },
];

struct Walk<'a> {
    space: &'a Space<Config, Step>,
    deadline: std::time::Instant,
    is_late: bool,
    path: Vec<Step>,
    found: Found<Step>,
}

impl Walk<'_> {
    // The history ends with repair, or with a loss of power before it.
    fn end(&mut self, world: &World) {
        for ending in [&[Step::Settle(0)][..], &[Step::ArrayPower(0), Step::Settle(0)]] {
            let mut last = *world;
            last.checks = 0;
            for step in ending {
                last.apply(*step);
            }
            self.found.histories += 1;
            self.found.checks += last.checks;
            if last.fault.is_some() {
                self.found.violations += 1;
                if self.found.first.is_none() {
                    self.found.first = Some(self.path.clone());
                }
            }
        }
        self.is_late |= self.found.histories.is_multiple_of(4096) && now() > self.deadline;
    }

    fn visit(&mut self, world: &World, depth: usize) {
        if self.is_late {
            return;
        }
        self.end(world);
        if depth == 0 || world.fault.is_some() {
            return;
        }
        for steps in self.space.alphabet {
            let mut next = *world;
            let mut did = false;
            for step in *steps {
                did |= next.apply(*step);
            }
            if did {
                let len = self.path.len();
                self.path.extend_from_slice(steps);
                self.visit(&next, depth - 1);
                self.path.truncate(len);
            }
        }
    }
}

/// Runs one enumeration; `time` limits it.
pub fn enumerate(space: &Space<Config, Step>, without: Mutation, time: Duration) -> Found<Step> {
    let start = now();
    let (path, found) = (Vec::new(), Found::default());
    let mut walk = Walk { space, deadline: start + time, is_late: false, path, found };
    walk.visit(&World::new(space.cfg, without), space.depth);
    let mut found = walk.found;
    found.complete = !walk.is_late;
    found.elapsed = start.elapsed();
    found
}
