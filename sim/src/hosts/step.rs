//! The steps a history is made of, and the events that the runner counts.

use super::attachment::Kind;
use super::parts::{DEVICES, HOSTS, Stage};
use super::state::World;
use crate::model::state::ix;
use crate::model::step::kinds;

/// Steps of one attachment that `Step::Work` takes at most.
const WORK: usize = 6;

/// One step; a step that is not possible in a state changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A client submits a request: host, cell, kind, block.
    Submit(u8, u8, Kind, u8),
    /// The request of a host to a cell goes one step further.
    Serve(u8, u8),
    /// The opening or closing of a cell on a host goes one step further.
    Advance(u8, u8),
    /// The growth of a cell on a host goes one step further.
    Grow(u8, u8),
    /// Growth begins ahead of need.
    StartGrowth(u8, u8),
    /// All that a host can do for a cell in a while, with its commands.
    Work(u8, u8),
    /// The kernel sends command number n to the target.
    Send(u8),
    /// Command number n lands.
    Land(u8),
    /// A host closes a cell in order.
    Close(u8, u8),
    /// A host declares the holder of a cell dead.
    Declare(u8, u8),
    /// A host registers one more path.
    Register(u8),
    /// A host stands still.
    Freeze(u8),
    /// A host goes on.
    Wake(u8),
    /// The daemon of a host is killed.
    Kill(u8),
    /// The daemon of a host is started.
    Start(u8),
    /// A host loses power.
    PowerOff(u8),
    /// A host boots.
    Boot(u8),
    /// A fenced host comes back without a boot.
    Rejoin(u8),
    /// A path of a host goes down or comes back.
    Path(u8, u8),
    /// Time passes.
    Tick,
    /// The clock of a host runs ahead of all others.
    Drift(u8),
    /// The array loses power; a bit for each structure that it keeps.
    ArrayPower(u16),
    /// The array writes a structure back on its own.
    WriteBack(u8),
    /// A device of the array is reset.
    Reset(u8),
    /// The coordinator goes away or comes back.
    Away,
    /// Messages between hosts begin or cease to be lost.
    Silence,
    /// The power switch breaks or is repaired.
    Switch,
    /// Everything is repaired; all requests end.
    Settle(u8),
    /// Nothing is repaired, and the coordinator is away: open cells go on.
    SettleAway,
}

impl World {
    /// Takes a step; false if it is not possible now.
    pub fn apply(&mut self, step: Step) -> bool {
        match step {
            Step::Submit(h, c, kind, block) => self.submit_request(ix(h), ix(c), kind, block),
            Step::Serve(h, c) => self.serve(ix(h), ix(c)),
            Step::Advance(h, c) => self.advance(ix(h), ix(c)),
            Step::Grow(h, c) => self.grow(ix(h), ix(c)),
            Step::StartGrowth(h, c) => self.start_growth(ix(h), ix(c)),
            Step::Work(h, c) => self.work(ix(h), ix(c)),
            Step::Send(at) => self.send(ix(at)),
            Step::Land(at) => self.land(ix(at)),
            Step::Close(h, c) => self.works(ix(h)) && self.gate(ix(h), ix(c)),
            Step::Declare(h, c) => self.declare(ix(h), ix(c)),
            Step::Register(h) => self.register(ix(h)),
            Step::Freeze(h) => self.freeze(ix(h)),
            Step::Wake(h) => self.wake(ix(h)),
            Step::Kill(h) => self.kill(ix(h)),
            Step::Start(h) => self.start(ix(h)),
            Step::PowerOff(h) => self.power_off(ix(h)),
            Step::Boot(h) => self.boot(ix(h)),
            Step::Rejoin(h) => self.rejoin(ix(h)),
            Step::Drift(h) => self.drift(ix(h)),
            Step::Path(h, path) => {
                self.toggle_path(ix(h), path);
                true
            }
            _ => {
                self.happen(step);
                true
            }
        }
    }

    // What is possible at any time.
    fn happen(&mut self, step: Step) {
        match step {
            Step::Tick => self.tick(),
            Step::ArrayPower(outcome) => self.lose_array_power(outcome),
            Step::WriteBack(structure) => self.array.write_back(structure),
            Step::Reset(device) => {
                self.note(Event::TargetReset);
                self.abort(ix(device), |_| true);
            }
            Step::Away => self.is_away = !self.is_away,
            Step::Silence => self.is_silent = !self.is_silent,
            Step::Switch => self.is_switch_broken = !self.is_switch_broken,
            Step::Settle(blocks) => self.settle(blocks),
            _ => self.settle_away(),
        }
    }

    // As much as a host can do for a cell in a while.
    fn work(&mut self, h: usize, c: usize) -> bool {
        let mut did = false;
        for _ in 0..WORK {
            let mut more = self.advance(h, c);
            more |= self.serve(h, c);
            more |= self.grow(h, c);
            more |= self.move_commands(|host, cell| (host, cell) == (h, c));
            did |= more;
            if !more || self.fault.is_some() {
                break;
            }
        }
        did
    }

    /// Sends and lands the commands of chosen hosts and cells; false if there was none to move.
    pub(super) fn move_commands(&mut self, chosen: impl Fn(usize, usize) -> bool) -> bool {
        let (mut at, mut did) = (0, false);
        while let Some(command) = self.commands.all().get(at).copied() {
            let count = self.commands.len();
            let is_chosen = chosen(ix(command.host), ix(command.cell));
            if is_chosen && command.stage == Stage::Kernel {
                did |= self.send(at);
            }
            if is_chosen && self.commands.len() == count {
                did |= self.land(at);
            }
            if self.commands.len() == count {
                at += 1;
            }
        }
        did
    }

    // An operator, or the manager of a cluster, says that the holder of a cell is dead.
    fn declare(&mut self, h: usize, c: usize) -> bool {
        let is_mine = ix(self.leases[c].holder) == h;
        let is_free = ix(self.leases[c].holder) >= HOSTS;
        let can = self.works(h) && !is_mine && !is_free;
        let cell = &mut self.hosts[h].cells[c];
        let begins = can && cell.phase == super::attachment::Phase::Standby && !cell.is_declared;
        if begins {
            cell.is_declared = true;
            self.note(Event::Declared);
        }
        begins
    }

    // The cache is lost, and so are commands in the target; registrations persist (H1).
    fn lose_array_power(&mut self, outcome: u16) {
        self.note(Event::ArrayPowerLost);
        self.array.lose_power(outcome);
        for device in 0..DEVICES {
            self.abort(device, |_| true);
        }
        for host in self.hosts.iter_mut().filter(|host| host.is_on) {
            host.restarted = super::parts::ALL_DEVICES;
        }
        for register in self.registers.iter_mut().flatten() {
            register.lose();
        }
        if self.without == super::mutation::Mutation::NotPersistent {
            self.array.keys = super::array::Array::new().keys;
            self.array.reserved = [false; DEVICES];
        }
    }
}

kinds! {
    Event;
    Opened = "cell opened",
    HandedOver = "cell handed over in order",
    WentBack = "hand-over that went back",
    Asked = "holder asked for a cell",
    Recovered = "lease taken from a fenced holder",
    DeviceFenced = "device fenced, or reset after a fence",
    HostStopped = "host stopped by its switch or watchdog",
    Declared = "holder declared dead",
    Registered = "path registered",
    PathVerified = "later path verified",
    PathRefused = "later path of a fenced host given up",
    Conflict = "reservation conflict",
    Woken = "frozen host woken",
    Booted = "host booted",
    Rejoined = "fenced host back without a boot",
    Lapsed = "lease in the lockspace lost",
    Drifted = "clock of one host ran ahead",
    WatchdogReset = "host reset by its watchdog",
    ArrayPowerLost = "power of the array lost",
    RestartNoticed = "restart of the array noticed",
    TargetReset = "device of the array reset",
    WriteAnswered = "write answered",
    LateAnswer = "write of before the fence answered after it",
    FlushAnswered = "flush answered",
    FlushFailed = "flush failed after a loss",
    Read = "read answered",
    StaleTolerated = "old data read by a fenced host that has met no conflict",
    PageRead = "read from a page cache",
    PageWritten = "write to a page cache",
    PageFlushed = "page written back",
    RingReplayed = "ring replayed",
    SpaceAwaited = "write parked for space",
    SpaceFound = "space of a growth that was cut off found",
    Grown = "cell grown",
    Settled = "history settled: all requests ended",
    SettledAway = "open cells served without the coordinator",
}
