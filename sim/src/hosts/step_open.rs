//! Opening a cell: lease, fence, flush, read, superblock of the new open.

use super::attachment::{Growth, Io, NO_RING, Phase, Progress, Ring};
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{
    ALL_DEVICES, CELL_UNITS, FenceKind, Lease, NONE, Payload, Superblock, UNIT_BLOCKS, UNITS,
    Waiter,
};
use super::state::{PATIENCE, World, number};
use super::step::Event;

impl World {
    /// Takes the opening or closing of a cell one step further; false if it waits.
    pub(super) fn advance(&mut self, h: usize, c: usize) -> bool {
        if !self.works(h) || !self.is_ready(h) {
            return false;
        }
        match self.hosts[h].cells[c].phase {
            Phase::Standby => self.want(h, c),
            Phase::Acquire => self.seek(h, c),
            Phase::Fence => self.fence(h, c),
            Phase::Flush => self.open_flush(h, c),
            Phase::Read => self.read_cell(h, c),
            Phase::Stamp => self.stamp(h, c),
            Phase::StampFlush => self.stamp_flush(h, c),
            Phase::Poisoned => !self.has_commands(h, c) && self.reopen(h, c),
            Phase::Lost => false,
            _ => self.advance_close(h, c),
        }
    }

    // Requests that wait open the cell. So does a host that asks for it, if the lease was left
    // here.
    fn want(&mut self, h: usize, c: usize) -> bool {
        let is_asked = self.asks[c] & !(1 << h) != 0 && self.holds(h, c);
        let cell = &mut self.hosts[h].cells[c];
        if !is_asked && !cell.is_declared && cell.request.progress == Progress::Idle {
            return false;
        }
        cell.phase = Phase::Acquire;
        cell.patience = if cell.is_declared { PATIENCE } else { 0 };
        true
    }

    // Takes the lease, or asks its holder for it, or fences the holder.
    fn seek(&mut self, h: usize, c: usize) -> bool {
        if self.has_commands(h, c) {
            return false;
        }
        let is_closed = self.array.superblocks[c].cached.is_clean;
        if self.without == Mutation::NoLease && is_closed {
            return self.enter(h, c);
        }
        let before = self.leases[c];
        let was_mine = usize::from(before.holder) == h && before.boot == self.hosts[h].boot;
        let had_fenced = self.has_fenced(h, c, &before);
        if self.acquire(h, c, c) {
            self.hosts[h].cells[c].was_free = before.holder == NONE;
            let owes = before.holder != NONE && !was_mine && !had_fenced;
            if owes {
                self.begin_fence(h, c, &before);
            }
            if owes && self.without == Mutation::AcquireThenFence {
                self.hosts[h].cells[c].phase = Phase::Fence;
                return true;
            }
            return self.enter(h, c);
        }
        if self.is_away {
            return false;
        }
        let is_first = self.hosts[h].cells[c].patience == 0;
        if !self.is_silent && (is_first || self.without != Mutation::AskedOnce) {
            self.asks[c] |= 1 << h;
            self.note(Event::Asked);
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.patience = PATIENCE.min(cell.patience + 1);
        // A watchdog resets only hosts that are dead already.
        let can_fence = self.cfg.fences_silent && self.cfg.fence != FenceKind::Watchdog;
        let is_over = cell.patience == PATIENCE && can_fence;
        if (is_over || self.is_dead(h, &before)) && !had_fenced {
            self.begin_fence(h, c, &before);
            self.hosts[h].cells[c].phase = Phase::Fence;
            return true;
        }
        is_first
    }

    fn is_dead(&self, h: usize, lease: &Lease) -> bool {
        lease.holder != NONE && self.is_expired(h, lease)
    }

    fn fence(&mut self, h: usize, c: usize) -> bool {
        let is_taken = self.holds(h, c);
        let target = self.hosts[h].cells[c].fence.target;
        let is_current = is_taken || target == self.leases[c];
        if is_current && !self.has_fenced(h, c, &target) {
            return self.advance_fence(h, c, &target);
        }
        if is_taken {
            return self.enter(h, c);
        }
        self.hosts[h].cells[c].phase = Phase::Acquire;
        true
    }

    // A new reign begins: no write of an older one may land from now on.
    fn enter(&mut self, h: usize, c: usize) -> bool {
        self.reigns[c] += 1;
        self.hosts[h].cells[c].reign = self.reigns[c];
        self.reopen(h, c)
    }

    /// Opens under the lease that is held already.
    pub(super) fn reopen(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        cell.io = Io::Idle;
        let is_cached = self.without == Mutation::CachedCell && cell.is_known;
        cell.phase = if is_cached { Phase::Stamp } else { Phase::Flush };
        true
    }

    // Before anything is read (H4, R12).
    fn open_flush(&mut self, h: usize, c: usize) -> bool {
        if self.without != Mutation::NoOpenFlush && !self.flush(h, c, ALL_DEVICES) {
            return false;
        }
        self.hosts[h].cells[c].phase = Phase::Read;
        true
    }

    fn read_cell(&mut self, h: usize, c: usize) -> bool {
        if !self.access(h, c, ALL_DEVICES, true) {
            return false;
        }
        let superblock = self.array.superblocks[c].cached;
        let (tree, log) = (self.array.trees[c].cached, self.array.logs[c].cached);
        let directory = self.array.directory.cached;
        let without = self.without;
        let cell = &mut self.hosts[h].cells[c];
        cell.superblock = superblock;
        cell.is_known = true;
        cell.units = superblock.units;
        let is_accepted = cell.ring.id == superblock.id || cell.ring.next == superblock.id;
        let is_kept = is_accepted && !superblock.is_clean;
        // The ring is of another open: another host has had the cell since (H7, H8).
        cell.owes_error |= !is_accepted && cell.ring.id != NO_RING.id;
        if !is_kept {
            cell.ring = Ring { id: superblock.id, next: superblock.id, mapped: 0 };
        }
        let is_replayed = !superblock.is_clean
            && without != Mutation::LogIgnored
            && !(without == Mutation::UnlockedUnreplayed && cell.is_declared);
        cell.mapped = if is_replayed { tree | log | cell.ring.mapped } else { tree };
        cell.phase = Phase::Stamp;
        let (mapped, units) = (cell.mapped, cell.units);
        if is_kept && cell.ring.mapped != 0 {
            self.note(Event::RingReplayed);
        }
        self.hosts[h].directory = directory;
        self.hosts[h].knows_directory = true;
        let granted = self.set_table(h, c, &directory);
        let was_free = std::mem::take(&mut self.hosts[h].cells[c].was_free);
        let has_space = usize::from(mapped) >> (usize::from(units) * UNIT_BLOCKS) == 0;
        // A host that was fenced meanwhile reads what its successor writes.
        if self.is_deposed(h, c) {
            return true;
        }
        if was_free && !superblock.is_clean {
            self.fail(FaultKind::Unclean, h, c, superblock.id);
        }
        if granted < units || !has_space {
            self.fail(FaultKind::Unreadable, h, c, units);
        }
        true
    }

    /// Takes the units of a cell from the directory; gives their number.
    pub(super) fn set_table(&mut self, h: usize, c: usize, directory: &[u8; UNITS]) -> u8 {
        let mut table = [NONE; CELL_UNITS];
        let owned = (0..UNITS).filter(|unit| usize::from(directory[*unit]) == c);
        let mut count = 0;
        for (place, unit) in table.iter_mut().zip(owned) {
            *place = number(unit);
            count += 1;
        }
        self.hosts[h].cells[c].table = table;
        count
    }

    // The next id goes into the ring before it goes into the superblock (R14).
    fn stamp(&mut self, h: usize, c: usize) -> bool {
        let cell = self.hosts[h].cells[c];
        match cell.io {
            Io::Pending => false,
            Io::Done => {
                self.hosts[h].cells[c].io = Io::Idle;
                self.hosts[h].cells[c].phase = Phase::StampFlush;
                true
            }
            Io::Idle => {
                let is_counter = self.without == Mutation::CounterId;
                let id = if is_counter { cell.superblock.id + 1 } else { self.draw() };
                let superblock = Superblock { id, is_clean: false, units: cell.superblock.units };
                self.hosts[h].cells[c].ring.next = id;
                self.hosts[h].cells[c].superblock = superblock;
                let payload = Payload::Superblock(number(c), superblock);
                self.submit(h, c, Waiter::Move, payload)
            }
        }
    }

    fn stamp_flush(&mut self, h: usize, c: usize) -> bool {
        if !self.flush(h, c, 1 << c) {
            return false;
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.ring.id = cell.ring.next;
        cell.phase = Phase::Serve;
        cell.has_served = false;
        cell.growth = Growth::Idle;
        self.note(Event::Opened);
        self.opened(h, c);
        true
    }

    // What an open shows stays there, whatever happens to the power; what only the ring knew, for
    // as long as the ring does.
    fn opened(&mut self, h: usize, c: usize) {
        if self.is_deposed(h, c) {
            return;
        }
        let ring = self.hosts[h].cells[c].ring.mapped;
        for block in 0..self.registers[c].len() {
            let version = self.version(h, c, number(block));
            self.checks += 1;
            let register = &mut self.registers[c][block];
            let is_loss = register.may == register.lossy;
            if !register.allows(version) {
                let kind = if is_loss { FaultKind::FlushedLost } else { FaultKind::AnsweredLost };
                self.fail(kind, h, c, version);
            } else if ring & 1 << block == 0 {
                register.settled(version);
            } else {
                register.found(version);
            }
        }
    }
}
