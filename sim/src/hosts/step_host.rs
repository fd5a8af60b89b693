//! Hosts: power, daemon, and the end of being an owner.

use super::attachment::{Growth, Io, Kind, NO_PAGE, NO_REQUEST, NO_RING, Phase, Progress, STANDBY};
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{CELLS, DEVICES, HOSTS, NONE, PATHS, Stage};
use super::state::{World, number};
use super::step::Event;

impl World {
    /// The machine stands still.
    pub(super) fn freeze(&mut self, h: usize) -> bool {
        let can = self.runs(h);
        self.hosts[h].is_frozen |= can;
        can
    }

    /// The machine goes on where it was.
    pub(super) fn wake(&mut self, h: usize) -> bool {
        let can = self.hosts[h].is_on && self.hosts[h].is_frozen;
        if can {
            self.hosts[h].is_frozen = false;
            self.note(Event::Woken);
        }
        can
    }

    /// A path goes down or comes back.
    pub(super) fn toggle_path(&mut self, h: usize, path: u8) {
        self.hosts[h].paths ^= 1 << path;
    }

    /// The daemon is killed. Its commands stay in the kernel; its rings stay in memory.
    pub(super) fn kill(&mut self, h: usize) -> bool {
        if !self.runs(h) || !self.hosts[h].has_daemon {
            return false;
        }
        self.hosts[h].has_daemon = false;
        self.hosts[h].process += 1;
        for c in 0..CELLS {
            self.leave(h, c, Phase::Standby);
            self.end_request(h, c);
        }
        true
    }

    /// The daemon is started. A key that is gone was removed by a fence in this boot (H5).
    pub(super) fn start(&mut self, h: usize) -> bool {
        if !self.runs(h) || self.hosts[h].has_daemon {
            return false;
        }
        self.hosts[h].has_daemon = true;
        self.hosts[h].probing = (NONE, NONE);
        let host = self.hosts[h];
        let is_gone = |device: usize| {
            let registered = (0..PATHS).filter(|p| host.registered[device] & 1 << p != 0);
            { registered }.any(|p| self.array.keys[device][h][p] != host.key)
        };
        if self.has_reservations() && host.is_preempted && (0..DEVICES).any(is_gone) {
            if self.without == Mutation::RestartRegisters {
                self.hosts[h].registered = [0; DEVICES];
            } else {
                self.conflict(h, 0);
            }
        }
        true
    }

    /// The machine loses power. Commands that the target has accepted stay there.
    pub(super) fn power_off(&mut self, h: usize) -> bool {
        if !self.hosts[h].is_on {
            return false;
        }
        for c in 0..CELLS {
            self.leave(h, c, Phase::Standby);
            self.end_request(h, c);
            self.client_failed(h, c);
            self.hosts[h].cells[c] = STANDBY;
        }
        self.drop_queue(h, None);
        let host = &mut self.hosts[h];
        (host.is_on, host.is_frozen, host.has_daemon) = (false, false, false);
        host.process += 1;
        true
    }

    /// The machine boots: a new incarnation.
    pub(super) fn boot(&mut self, h: usize) -> bool {
        if self.hosts[h].is_on {
            return false;
        }
        let host = &mut self.hosts[h];
        (host.is_on, host.has_daemon) = (true, true);
        host.cells = [STANDBY; CELLS];
        host.knows_directory = false;
        host.restarted = 0;
        self.incarnate(h);
        self.note(Event::Booted);
        true
    }

    /// A fenced host comes back without a boot: its cells are gone and none of its commands is
    /// left. Rings that its daemon did not drop, because it did not run, are still there.
    pub(super) fn rejoin(&mut self, h: usize) -> bool {
        let host = &self.hosts[h];
        let is_out = host.is_fenced || (host.is_preempted && !host.has_daemon);
        if !self.runs(h) || !is_out || self.commands.all().iter().any(|x| usize::from(x.host) == h)
        {
            return false;
        }
        for cell in &mut self.hosts[h].cells {
            cell.phase = Phase::Standby;
        }
        self.hosts[h].process += 1;
        if self.without == Mutation::RestartForgotten {
            self.hosts[h].restarted = 0;
        }
        self.incarnate(h);
        self.note(Event::Rejoined);
        true
    }

    fn incarnate(&mut self, h: usize) {
        let boot = self.draw();
        let is_same = self.without == Mutation::SameKey;
        let host = &mut self.hosts[h];
        (host.boot, host.membership) = (boot, boot);
        host.key = if is_same { number(h) + 1 } else { boot };
        host.registered = [0; DEVICES];
        host.probing = (NONE, NONE);
        // It has to join the lockspace before it takes a lease.
        (host.is_fenced, host.is_preempted) = (false, false);
        host.has_lapsed = self.without != Mutation::NotJoined;
        (host.age, host.watchdog) = (0, 0);
        host.seen = [0; HOSTS];
    }

    /// A reservation conflict: the host is fenced, for all cells and for good (H5).
    pub(super) fn conflict(&mut self, h: usize, c: usize) {
        self.note(Event::Conflict);
        if !self.hosts[h].is_preempted {
            self.fail(FaultKind::ConflictUnfenced, h, c, 0);
        }
        if self.without == Mutation::ConflictRetried {
            let key = self.hosts[h].key;
            for keys in &mut self.array.keys {
                keys[h] = [key; PATHS];
            }
            return;
        }
        self.hosts[h].is_fenced = true;
        let is_one = self.without == Mutation::OneCellFenced;
        for other in (0..CELLS).filter(|other| !is_one || *other == c) {
            self.leave(h, other, Phase::Lost);
            self.end_request(h, other);
            self.client_failed(h, other);
            self.hosts[h].cells[other].ring = NO_RING;
            self.drop_queue(h, Some(other));
        }
    }

    /// The host lost its lease in the lockspace: it drops its cells without another write, and
    /// their devices become errors (H2). Requests that were not begun park.
    pub(super) fn lapse(&mut self, h: usize) {
        self.note(Event::Lapsed);
        self.hosts[h].has_lapsed = true;
        for c in 0..CELLS {
            if self.hosts[h].cells[c].phase != Phase::Lost {
                self.leave(h, c, Phase::Standby);
            }
        }
        if self.without != Mutation::QueueKept {
            self.drop_queue(h, None);
        }
    }

    /// A flush of the cell counts as failed: it opens again, as after a loss of power (R8).
    pub(super) fn poison(&mut self, h: usize, c: usize) {
        let cell = &self.hosts[h].cells[c];
        // A cell that was open before and will open again with its ring is meant as well.
        let has_ring = cell.ring.id != NO_RING.id && self.without != Mutation::RestartOpenOnly;
        if cell.phase == Phase::Poisoned || (!cell.phase.is_open() && !has_ring) {
            return;
        }
        if cell.phase.is_open() {
            self.leave(h, c, Phase::Poisoned);
        }
        self.hosts[h].cells[c].ring = NO_RING;
        self.hosts[h].cells[c].owes_error = true;
        if !self.is_deposed(h, c) {
            self.registers[c].iter_mut().for_each(super::oracle::Register::lose);
        }
    }

    // The cell is no longer open. Requests that were begun fail, others park.
    fn leave(&mut self, h: usize, c: usize, phase: Phase) {
        match self.hosts[h].cells[c].request.progress {
            Progress::Data | Progress::Page | Progress::Log => self.end_request(h, c),
            Progress::NoSpace => self.hosts[h].cells[c].request.progress = Progress::Parked,
            Progress::Idle | Progress::Parked => {}
        }
        self.drop_page(h, c);
        let cell = &mut self.hosts[h].cells[c];
        cell.phase = phase;
        (cell.io, cell.growth_io) = (Io::Idle, Io::Idle);
        cell.growth = Growth::Idle;
        cell.is_declared = false;
    }

    /// The request ends with an error, or with its client.
    pub(super) fn end_request(&mut self, h: usize, c: usize) {
        let cell = &mut self.hosts[h].cells[c];
        let request = cell.request;
        (cell.request, cell.request_io) = (NO_REQUEST, Io::Idle);
        if request.progress != Progress::Idle && request.kind == Kind::Write {
            self.registers[c][usize::from(request.block)].end(request.version);
        }
    }

    /// The client is gone, or knows that answered writes may be lost: it expects nothing any more.
    pub(super) fn client_failed(&mut self, h: usize, c: usize) {
        self.hosts[h].cells[c].owes_error = false;
        for register in &mut self.registers[c] {
            register.over[h] = 0;
        }
    }

    // The page above the device is gone; what was not written back is lost.
    fn drop_page(&mut self, h: usize, c: usize) {
        let page = self.hosts[h].cells[c].page;
        self.hosts[h].cells[c].page = NO_PAGE;
        self.hosts[h].cells[c].owes_error |= page.is_dirty;
        if page.is_dirty && !self.is_deposed(h, c) {
            self.registers[c][usize::from(page.block)].lose();
        }
    }

    // Commands in the kernel of the host end: the machine is off, or the devices became errors.
    fn drop_queue(&mut self, h: usize, cell: Option<usize>) {
        self.commands.retain(|x| {
            let is_of = usize::from(x.host) == h && cell.is_none_or(|c| usize::from(x.cell) == c);
            !is_of || x.stage != Stage::Kernel
        });
    }
}
