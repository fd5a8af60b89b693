//! Closing a cell in order: gate, drain, write back, tree, clean superblock, release (H6).

use super::attachment::{Growth, Io, NO_PAGE, NO_RING, Phase, Progress};
use super::mutation::Mutation;
use super::oracle::Register;
use super::parts::{ALL_DEVICES, FREE, NONE, Payload, Superblock, Waiter};
use super::state::{World, number};
use super::step::Event;

impl World {
    /// Takes the closing of an open cell one step further.
    pub(super) fn advance_close(&mut self, h: usize, c: usize) -> bool {
        match self.hosts[h].cells[c].phase {
            Phase::Serve => self.hand_on(h, c),
            Phase::Gate => self.drain(h, c),
            Phase::WriteBack => self.write_back(h, c),
            Phase::DataFlush => self.data_flush(h, c),
            Phase::Tree => {
                let mapped = self.hosts[h].cells[c].mapped;
                self.write_and(h, c, Payload::Tree(number(c), mapped), Phase::TreeFlush)
            }
            Phase::TreeFlush => self.flush_and(h, c, Phase::Clean),
            Phase::Clean => {
                let superblock = Superblock { is_clean: true, ..self.hosts[h].cells[c].superblock };
                let payload = Payload::Superblock(number(c), superblock);
                self.write_and(h, c, payload, Phase::CleanFlush)
            }
            Phase::CleanFlush => self.close(h, c),
            _ => self.give_back(h, c),
        }
    }

    // Hands the cell on if another host asks for it and the requests that waited here were served.
    fn hand_on(&mut self, h: usize, c: usize) -> bool {
        let is_asked = self.asks[c] & !(1 << h) != 0;
        let cell = &self.hosts[h].cells[c];
        let is_served = cell.has_served
            || cell.request.progress == Progress::Idle
            || self.without == Mutation::HandedUnserved;
        let goes = cell.is_declared || (is_asked && is_served);
        goes && self.gate(h, c)
    }

    /// New requests park from now on.
    pub(super) fn gate(&mut self, h: usize, c: usize) -> bool {
        let can = self.hosts[h].cells[c].phase == Phase::Serve;
        if can {
            self.hosts[h].cells[c].phase = Phase::Gate;
        }
        can
    }

    fn drain(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        if cell.request.progress == Progress::NoSpace {
            cell.request.progress = Progress::Parked;
        }
        if cell.growth == Growth::Acquire {
            cell.growth = Growth::Idle;
        }
        let is_drained = matches!(cell.request.progress, Progress::Idle | Progress::Parked)
            && cell.growth == Growth::Idle;
        if !is_drained && self.without != Mutation::CloseUndrained {
            return false;
        }
        cell.phase = Phase::WriteBack;
        true
    }

    // Pages that clients have written are part of what was answered (H14).
    fn write_back(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        let page = cell.page;
        if !page.is_dirty || self.without == Mutation::DirtyKept {
            cell.phase = Phase::DataFlush;
            return true;
        }
        match cell.io {
            Io::Pending => false,
            Io::Done => {
                cell.io = Io::Idle;
                self.page_written(h, c);
                true
            }
            Io::Idle => self.submit_block(h, c, Waiter::Move, page.block, page.version),
        }
    }

    fn data_flush(&mut self, h: usize, c: usize) -> bool {
        if !self.flush(h, c, ALL_DEVICES) {
            return false;
        }
        if self.without == Mutation::ReleaseEarly && !self.is_away {
            self.handed_over(h, c);
        }
        let is_skipped = self.without == Mutation::CloseNoTree;
        self.hosts[h].cells[c].phase = if is_skipped { Phase::Clean } else { Phase::Tree };
        true
    }

    // Writes, and goes on when the write has landed.
    fn write_and(&mut self, h: usize, c: usize, payload: Payload, next: Phase) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        match cell.io {
            Io::Pending => false,
            Io::Done => {
                cell.io = Io::Idle;
                cell.phase = next;
                true
            }
            Io::Idle => self.submit(h, c, Waiter::Move, payload),
        }
    }

    fn flush_and(&mut self, h: usize, c: usize, next: Phase) -> bool {
        let done = self.flush(h, c, 1 << c);
        if done {
            self.hosts[h].cells[c].phase = next;
        }
        done
    }

    // The device is closed: no page stays cached above it (H14), and the ring has no more use.
    fn close(&mut self, h: usize, c: usize) -> bool {
        let is_flushed = self.without != Mutation::CleanNotFlushed;
        if is_flushed && !self.flush(h, c, 1 << c) {
            return false;
        }
        let cell = &mut self.hosts[h].cells[c];
        if !matches!(self.without, Mutation::PagesKept | Mutation::DirtyKept) {
            cell.page = NO_PAGE;
        }
        cell.ring = NO_RING;
        cell.phase = Phase::Release;
        true
    }

    // Gives the lease back. While the coordinator is away it stays here, and the cell may open
    // again.
    fn give_back(&mut self, h: usize, c: usize) -> bool {
        let cell = &self.hosts[h].cells[c];
        if self.without == Mutation::FenceLast && cell.is_declared {
            let target = cell.fence.target;
            if target.holder != NONE && !self.has_fenced(h, c, &target) {
                return self.advance_fence(h, c, &target);
            }
        }
        if self.is_away {
            let is_wanted = self.hosts[h].cells[c].request.progress != Progress::Idle;
            if is_wanted && self.holds(h, c) {
                self.note(Event::WentBack);
                return self.reopen(h, c);
            }
            return false;
        }
        self.handed_over(h, c);
        let cell = &mut self.hosts[h].cells[c];
        cell.phase = Phase::Standby;
        cell.is_declared = false;
        true
    }

    // Everything answered is durable now, flushed or not.
    fn handed_over(&mut self, h: usize, c: usize) {
        if !self.holds(h, c) {
            return;
        }
        self.leases[c] = FREE;
        self.asks[c] = 0;
        self.registers[c].iter_mut().for_each(Register::hand_over);
        self.note(Event::HandedOver);
    }
}
