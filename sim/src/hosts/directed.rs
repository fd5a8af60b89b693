//! Scripted histories for rules that random histories hit too seldom.

use super::attachment::Kind;
use super::mutation::Mutation;
use super::parts::{Config, FenceKind};
use super::state::World;
use super::step::Step;

/// A scripted history.
#[derive(Debug)]
pub struct Directed {
    /// The description of the history.
    pub story: &'static str,
    /// The mutations that it catches.
    pub catches: &'static [Mutation],
    /// The circumstances.
    pub cfg: Config,
    /// The steps.
    pub steps: &'static [Step],
}

impl Directed {
    /// Runs the history.
    pub fn run(&self, without: Mutation) -> World {
        replay(self.cfg, without, self.steps)
    }

    /// The histories that catch this mutation.
    pub fn of(mutation: Mutation) -> impl Iterator<Item = &'static Self> {
        Self::all().filter(move |d| d.catches.contains(&mutation))
    }

    /// Every scripted history.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        SCRIPTS.iter()
    }
}

/// Runs steps in order; those that are not possible are passed over.
pub fn replay(cfg: Config, without: Mutation, steps: &[Step]) -> World {
    let mut world = World::new(cfg, without);
    for step in steps {
        world.apply(*step);
        if world.fault.is_some() {
            break;
        }
    }
    world
}

// Host 0 has cell 0 open.
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

static SCRIPTS: &[Directed] = &[
    Directed {
        story: "a frozen host is fenced, loses its path, and gets the other one back",
        catches: &[Mutation::PathBack],
        cfg: Config { one_path: 0b001, ..BASE },
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Serve(0, 0),
            Step::Freeze(0),
            Step::Declare(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Wake(0),
            Step::Path(0, 0),
            Step::Path(0, 1),
            Step::Register(0),
            Step::Register(0),
            Step::Send(0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a host without paths has a write queued when its lease ends, and they come back",
        catches: &[Mutation::QueueKept],
        cfg: Config { fence: FenceKind::Watchdog, ..BASE },
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Serve(0, 0),
            Step::Path(0, 0),
            Step::Path(0, 1),
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Submit(1, 0, Kind::Read, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Path(0, 0),
            Step::Send(0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "the second host dies between the lease and the fence; the third knows of it only",
        catches: &[Mutation::AcquireThenFence],
        cfg: BASE,
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Serve(0, 0),
            Step::Freeze(0),
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Declare(1, 0),
            Step::Advance(1, 0),
            Step::Advance(1, 0),
            Step::PowerOff(1),
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Declare(2, 0),
            Step::Work(2, 0),
            Step::Work(2, 0),
            Step::Wake(0),
            Step::Send(0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "the mark of a clean cell is lost with the power, after the lease was given back",
        catches: &[Mutation::CleanNotFlushed],
        cfg: BASE,
        steps: &[
            Step::Close(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::ArrayPower(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a daemon dies between ring and superblock, and another host draws the same open id",
        catches: &[Mutation::CounterId],
        cfg: BASE,
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Work(0, 0),
            Step::Kill(0),
            Step::Start(0),
            Step::Submit(0, 0, Kind::Read, 0),
            Step::Advance(0, 0),
            Step::Advance(0, 0),
            Step::Advance(0, 0),
            Step::Advance(0, 0),
            Step::Advance(0, 0),
            Step::Kill(0),
            Step::Submit(1, 0, Kind::Read, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Send(0),
            Step::PowerOff(1),
            Step::Rejoin(0),
            Step::Start(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Tick,
            Step::Declare(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a block of a new unit is flushed, and the superblock never has the new size",
        catches: &[Mutation::UseEarly],
        cfg: BASE,
        steps: &[
            Step::StartGrowth(0, 0),
            Step::Grow(0, 0),
            Step::Grow(0, 0),
            Step::Send(0),
            Step::Land(0),
            Step::Grow(0, 0),
            Step::Grow(0, 0),
            Step::Grow(0, 0),
            Step::Submit(0, 0, Kind::Write, 2),
            Step::Serve(0, 0),
            Step::Send(0),
            Step::Land(0),
            Step::Serve(0, 0),
            Step::Submit(0, 0, Kind::Flush, 0),
            Step::Serve(0, 0),
            Step::Send(0),
            Step::Land(0),
            Step::Serve(0, 0),
            Step::PowerOff(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a host boots and registers; a write of its last boot is still in the target",
        catches: &[Mutation::OldCommandsKept],
        cfg: BASE,
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Serve(0, 0),
            Step::Send(0),
            Step::PowerOff(0),
            Step::Boot(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Register(0),
            Step::Declare(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a restart of the array is noticed by one cell while the daemon has the other closed",
        catches: &[Mutation::RestartOpenOnly],
        cfg: BASE,
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Flush, 0),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Work(0, 0),
            Step::ArrayPower(0),
            Step::Kill(0),
            Step::Start(0),
            Step::Submit(0, 1, Kind::Read, 0),
            Step::Work(0, 1),
            Step::Work(0, 1),
            Step::Work(0, 1),
            Step::Submit(0, 0, Kind::Flush, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "data on another device than the superblock is read, and lost with the power",
        catches: &[Mutation::NoOpenFlush],
        cfg: BASE,
        steps: &[
            Step::StartGrowth(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Write, 2),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Flush, 0),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Write, 2),
            Step::Work(0, 0),
            Step::PowerOff(0),
            Step::Submit(1, 0, Kind::Read, 2),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::ArrayPower(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a dead host has flushed a write, and its cell is closed by another",
        catches: &[Mutation::UnlockedUnreplayed],
        cfg: BASE,
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Work(0, 0),
            Step::Submit(0, 0, Kind::Flush, 0),
            Step::Work(0, 0),
            Step::PowerOff(0),
            Step::Declare(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a host boots and opens a cell; another has counted it as dead since before",
        catches: &[Mutation::NotJoined],
        cfg: Config { fence: FenceKind::Watchdog, open: 0, ..BASE },
        steps: &[
            Step::PowerOff(1),
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Boot(1),
            Step::Submit(1, 0, Kind::Write, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Submit(1, 0, Kind::Write, 0),
            Step::Serve(1, 0),
            Step::Submit(0, 0, Kind::Read, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Send(0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a host is switched off; the target holds a write of it",
        catches: &[Mutation::StopNoReset],
        cfg: Config { fence: FenceKind::PowerSwitch, ..BASE },
        steps: &[
            Step::Submit(0, 0, Kind::Write, 0),
            Step::Serve(0, 0),
            Step::Send(0),
            Step::Declare(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Land(0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "a page that was read stays above a cell that is handed over, written there, and read here",
        catches: &[Mutation::PagesKept],
        cfg: Config { buffered: true, ..BASE },
        steps: &[
            Step::Submit(0, 0, Kind::Read, 0),
            Step::Work(0, 0),
            Step::Close(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Work(0, 0),
            Step::Submit(1, 0, Kind::Write, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Work(1, 0),
            Step::Submit(0, 0, Kind::Read, 0),
            Step::Settle(0),
        ],
    },
    Directed {
        story: "the array restarts while a daemon is down, whose host comes back after a fence",
        catches: &[Mutation::RestartForgotten],
        cfg: Config { recovery: false, ..BASE },
        steps: &[
            Step::Submit(0, 0, Kind::Write, 1),
            Step::Work(0, 0),
            Step::Kill(0),
            Step::Submit(2, 0, Kind::Read, 0),
            Step::Work(2, 0),
            Step::Work(2, 0),
            Step::ArrayPower(0),
            Step::Rejoin(0),
            Step::Start(0),
            Step::Work(2, 0),
            Step::Submit(0, 0, Kind::Flush, 1),
            Step::Settle(95),
            Step::Settle(160),
        ],
    },
    Directed {
        story: "a host loses its lease and takes it again while another fences it for the old one",
        catches: &[Mutation::FenceOutlived],
        cfg: Config { fence: FenceKind::Watchdog, open: 0b10, one_path: 0b11, ..BASE },
        steps: &[
            Step::Path(1, 0),
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Tick,
            Step::Settle(29),
        ],
    },
];
