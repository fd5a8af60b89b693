//! Requests of clients, and the commands that they become.

use super::attachment::{Growth, Io, Kind, NO_PAGE, NO_REQUEST, Page, Phase, Progress, Request};
use super::mutation::Mutation;
use super::oracle::{FaultKind, VERSIONS};
use super::parts::{ALL_DEVICES, BLOCKS, NONE, Payload, UNIT_BLOCKS, Waiter};
use super::state::{World, number};
use super::step::Event;

impl World {
    /// A client submits a request. Clients of different hosts do not write one block at once,
    /// unless the other host stands still.
    pub(super) fn submit_request(&mut self, h: usize, c: usize, kind: Kind, block: u8) -> bool {
        let host = &self.hosts[h];
        let cell = &host.cells[c];
        let is_lost = cell.phase == Phase::Lost;
        let can_ask = !is_lost || (self.without == Mutation::FencedReads && kind == Kind::Read);
        let is_idle = cell.request.progress == Progress::Idle;
        if !self.runs(h) || !host.has_daemon || !is_idle || !can_ask {
            return false;
        }
        let is_open = cell.phase == Phase::Serve;
        let page = cell.page;
        match kind {
            Kind::Read if page.block == block => {
                self.note(Event::PageRead);
                self.respond(h, c, block, page.version);
                return true;
            }
            Kind::Write => {
                let is_free = self.may_write(h, c, block);
                let is_over = self.registers[c][usize::from(block)].next >= VERSIONS;
                if !is_free || is_over || (page.block == block && !is_open) {
                    return false;
                }
                let has_space = usize::from(block) < usize::from(cell.units) * UNIT_BLOCKS;
                let is_in_page = page.block == block || !page.is_dirty;
                if self.cfg.buffered && is_open && has_space && is_in_page {
                    return self.write_page(h, c, block);
                }
            }
            _ => {}
        }
        let mut request = Request { kind, block, progress: Progress::Parked, ..NO_REQUEST };
        if kind == Kind::Write {
            request.version = self.registers[c][usize::from(block)].submit();
        }
        request.over = std::array::from_fn(|block| self.registers[c][block].over[h]);
        request.reign = self.reigns[c];
        self.hosts[h].cells[c].request = request;
        true
    }

    // No write of the block waits on a host that runs.
    fn may_write(&self, h: usize, c: usize, block: u8) -> bool {
        let writes = |other: usize| {
            let request = &self.hosts[other].cells[c].request;
            let is_write = request.kind == Kind::Write && request.progress != Progress::Idle;
            is_write && request.block == block && self.runs(other)
        };
        !(0..self.hosts.len()).any(|other| other != h && writes(other))
    }

    // The page cache answers at once.
    fn write_page(&mut self, h: usize, c: usize, block: u8) -> bool {
        if self.is_deposed(h, c) {
            return false;
        }
        let register = &mut self.registers[c][usize::from(block)];
        let version = register.submit();
        register.answer(version, h);
        self.hosts[h].cells[c].page = Page { block, version, is_dirty: true };
        self.note(Event::PageWritten);
        true
    }

    /// Takes the request of an attachment one step further; false if it waits.
    pub(super) fn serve(&mut self, h: usize, c: usize) -> bool {
        let cell = &self.hosts[h].cells[c];
        let request = cell.request;
        if self.without == Mutation::FencedReads && cell.phase == Phase::Lost {
            return self.runs(h) && request.progress == Progress::Parked && self.read(h, c);
        }
        let is_stopped = self.without == Mutation::AwayStops && self.is_away;
        if !self.works(h) || !cell.phase.serves() || is_stopped {
            return false;
        }
        let is_gated = cell.phase == Phase::Gate;
        match request.progress {
            Progress::Idle => false,
            Progress::Parked if is_gated => false,
            Progress::Parked => match request.kind {
                Kind::Write => self.begin_write(h, c),
                Kind::Read => self.read(h, c),
                Kind::Flush => self.begin_flush(h, c),
            },
            Progress::NoSpace => self.wait_for_space(h, c),
            _ if cell.request_io != Io::Done => false,
            Progress::Data => self.end_write(h, c),
            Progress::Page => {
                self.page_written(h, c);
                let cell = &mut self.hosts[h].cells[c];
                (cell.request.progress, cell.request_io) = (Progress::Parked, Io::Idle);
                true
            }
            Progress::Log => self.end_flush(h, c),
        }
    }

    fn begin_write(&mut self, h: usize, c: usize) -> bool {
        let Request { block, version, .. } = self.hosts[h].cells[c].request;
        let units = usize::from(self.hosts[h].cells[c].units);
        if usize::from(block) >= units * UNIT_BLOCKS {
            self.hosts[h].cells[c].request.progress = Progress::NoSpace;
            self.note(Event::SpaceAwaited);
            return true;
        }
        let done = self.submit_block(h, c, Waiter::Request, block, version);
        if done {
            self.hosts[h].cells[c].request.progress = Progress::Data;
        }
        done
    }

    fn wait_for_space(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        if usize::from(cell.request.block) < usize::from(cell.units) * UNIT_BLOCKS {
            cell.request.progress = Progress::Parked;
            return true;
        }
        let begins = cell.growth == Growth::Idle && !cell.has_given_up;
        if begins {
            cell.growth = Growth::Acquire;
        }
        begins
    }

    /// Submits the write of a block.
    pub(super) fn submit_block(
        &mut self,
        h: usize,
        c: usize,
        waiter: Waiter,
        block: u8,
        version: u8,
    ) -> bool {
        let Some((unit, at)) = self.place(h, c, block) else {
            self.fail(FaultKind::Unreadable, h, c, block);
            return false;
        };
        self.submit(h, c, waiter, Payload::Data(unit, at, version))
    }

    // The write of a block has landed: it is mapped, and the ring has the record before the answer.
    fn map(&mut self, h: usize, c: usize, block: u8) {
        let cell = &mut self.hosts[h].cells[c];
        let new = 1 << block & !cell.mapped;
        cell.mapped |= new;
        cell.ring.mapped |= new;
    }

    fn end_write(&mut self, h: usize, c: usize) -> bool {
        let request = self.hosts[h].cells[c].request;
        self.map(h, c, request.block);
        if self.hosts[h].cells[c].page.block == request.block {
            self.hosts[h].cells[c].page = NO_PAGE;
        }
        if self.is_deposed(h, c) {
            if request.reign > self.hosts[h].cells[c].reign {
                self.fail(FaultKind::TwoWriters, h, c, request.version);
            }
            self.note(Event::LateAnswer);
        } else {
            self.registers[c][usize::from(request.block)].answer(request.version, h);
        }
        self.note(Event::WriteAnswered);
        self.done(h, c);
        true
    }

    /// The dirty page has landed.
    pub(super) fn page_written(&mut self, h: usize, c: usize) {
        let block = self.hosts[h].cells[c].page.block;
        if block == NONE {
            return;
        }
        self.map(h, c, block);
        self.hosts[h].cells[c].page.is_dirty = false;
        self.note(Event::PageFlushed);
    }

    fn read(&mut self, h: usize, c: usize) -> bool {
        let block = self.hosts[h].cells[c].request.block;
        let device = self.place(h, c, block).map_or(c, |(unit, _)| usize::from(unit));
        if !self.access(h, c, 1 << (device % super::parts::DEVICES), true) {
            return false;
        }
        let version = self.version(h, c, block);
        let cell = &mut self.hosts[h].cells[c];
        if self.cfg.buffered && !cell.page.is_dirty && cell.phase != Phase::Lost {
            cell.page = Page { block, version, is_dirty: false };
        }
        self.respond(h, c, block, version);
        self.done(h, c);
        true
    }

    // A client gets the version. A host that was fenced and has not met a conflict yet may read
    // what was there before; one that knows, or that has handed the cell over, may not.
    fn respond(&mut self, h: usize, c: usize, block: u8, version: u8) {
        self.checks += 1;
        let (deposed, host) = (self.is_deposed(h, c), &self.hosts[h]);
        let is_unaware = host.is_preempted && !host.is_fenced && host.cells[c].phase.is_open();
        let is_allowed = self.registers[c][usize::from(block)].allows(version);
        self.note(Event::Read);
        if is_allowed && !deposed {
            self.registers[c][usize::from(block)].found(version);
        } else if !is_allowed && deposed && is_unaware {
            self.note(Event::StaleTolerated);
        } else if !is_allowed {
            self.fail(FaultKind::StaleRead, h, c, version);
        }
    }

    fn begin_flush(&mut self, h: usize, c: usize) -> bool {
        if self.hosts[h].cells[c].owes_error && self.without != Mutation::LossUnreported {
            self.end_request(h, c);
            self.client_failed(h, c);
            self.note(Event::FlushFailed);
            return true;
        }
        let page = self.hosts[h].cells[c].page;
        if page.is_dirty {
            let done = self.submit_block(h, c, Waiter::Request, page.block, page.version);
            if done {
                self.hosts[h].cells[c].request.progress = Progress::Page;
            }
            return done;
        }
        // Records are taken before the data is flushed (R2), and written after it (R1).
        let mapped = self.hosts[h].cells[c].mapped;
        if !self.commands.fits(1) || !self.flush(h, c, ALL_DEVICES) {
            return false;
        }
        self.hosts[h].cells[c].captured = mapped;
        self.hosts[h].cells[c].request.progress = Progress::Log;
        self.submit(h, c, Waiter::Request, Payload::Log(number(c), mapped))
    }

    fn end_flush(&mut self, h: usize, c: usize) -> bool {
        if !self.flush(h, c, 1 << c) {
            return false;
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.ring.mapped &= !cell.captured;
        let over = cell.request.over;
        for (block, over) in (0..BLOCKS).zip(over) {
            if !self.registers[c][block].promise(over) {
                self.fail(FaultKind::FlushedLost, h, c, number(block));
            }
        }
        self.note(Event::FlushAnswered);
        self.done(h, c);
        true
    }

    fn done(&mut self, h: usize, c: usize) {
        let cell = &mut self.hosts[h].cells[c];
        (cell.request, cell.request_io) = (NO_REQUEST, Io::Idle);
        cell.has_served = true;
    }
}
