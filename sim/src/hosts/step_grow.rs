//! Growth: a unit from the directory, under its lease, then the superblock, then its use (H9).

use super::attachment::{Growth, Io};
use super::mutation::Mutation;
use super::parts::{CELLS, DIRECTORY, NONE, Payload, Superblock, UNITS, Waiter};
use super::state::{World, number};
use super::step::Event;

impl World {
    /// Takes the growth of a cell one step further; false if it waits.
    pub(super) fn grow(&mut self, h: usize, c: usize) -> bool {
        if !self.works(h) {
            return false;
        }
        let cell = &self.hosts[h].cells[c];
        if cell.growth == Growth::Idle || !cell.phase.serves() {
            return self.release_unused(h);
        }
        match cell.growth {
            Growth::Idle => false,
            Growth::Acquire => self.acquire_directory(h, c),
            Growth::Directory => self.write_directory(h, c),
            Growth::DirectoryFlush => self.flush_directory(h, c),
            Growth::Release => self.release_directory(h, c),
            Growth::Superblock => self.write_size(h, c),
            Growth::SuperblockFlush => self.flush_size(h, c),
        }
    }

    /// Growth begins ahead of need.
    pub(super) fn start_growth(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        let can = cell.phase == super::attachment::Phase::Serve
            && cell.growth == Growth::Idle
            && usize::from(cell.units) < super::parts::CELL_UNITS;
        if can {
            cell.growth = Growth::Acquire;
        }
        can && self.works(h)
    }

    // True if a cell of the host changes the directory.
    fn changes_directory(&self, h: usize) -> bool {
        let is_busy = |c: usize| {
            let growth = self.hosts[h].cells[c].growth;
            matches!(growth, Growth::Directory | Growth::DirectoryFlush | Growth::Release)
        };
        let mut commands = self.commands.all().iter();
        (0..CELLS).any(is_busy)
            || commands.any(|x| usize::from(x.host) == h && usize::from(x.object) == DIRECTORY)
    }

    // The lease of a growth that was cut off.
    fn release_unused(&mut self, h: usize) -> bool {
        self.holds(h, DIRECTORY) && !self.changes_directory(h) && self.release(h, DIRECTORY)
    }

    fn acquire_directory(&mut self, h: usize, c: usize) -> bool {
        if self.is_away && self.without == Mutation::AwayForgotten {
            let cell = &mut self.hosts[h].cells[c];
            (cell.growth, cell.has_given_up) = (Growth::Idle, true);
        }
        if self.is_away || self.changes_directory(h) {
            return false;
        }
        let (lease, was_mine) = (self.leases[DIRECTORY], self.holds(h, DIRECTORY));
        let is_left_out = self.without == Mutation::GrowthNoLease;
        if !is_left_out && !self.acquire(h, c, DIRECTORY) {
            let fences = self.is_expired(h, &lease) && !self.has_fenced(h, c, &lease);
            return fences && self.advance_fence(h, c, &lease);
        }
        if !was_mine && !is_left_out {
            self.reigns[DIRECTORY] += 1;
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.growth_reign = self.reigns[DIRECTORY];
        let is_size_first = self.without == Mutation::SizeFirst;
        cell.growth = if is_size_first { Growth::Superblock } else { Growth::Directory };
        true
    }

    fn write_directory(&mut self, h: usize, c: usize) -> bool {
        match self.hosts[h].cells[c].growth_io {
            Io::Pending => return false,
            Io::Done => {
                let cell = &mut self.hosts[h].cells[c];
                (cell.growth_io, cell.growth) = (Io::Idle, Growth::DirectoryFlush);
                return true;
            }
            Io::Idle => {}
        }
        // From the media, not from memory (H10).
        if !self.access(h, c, 1, true) {
            return false;
        }
        let is_cached = self.without == Mutation::CachedDirectory;
        let host = &mut self.hosts[h];
        if !is_cached || !host.knows_directory {
            host.directory = self.array.directory.cached;
            host.knows_directory = true;
        }
        let mut directory = host.directory;
        if self.set_table(h, c, &directory) > self.hosts[h].cells[c].units {
            // Granted to a growth that was cut off: it only has to be durable.
            self.note(Event::SpaceFound);
            self.hosts[h].cells[c].growth = Growth::DirectoryFlush;
            return true;
        }
        let mut free = (0..UNITS).filter(|unit| directory[*unit] == NONE);
        let unit = if self.cfg.last_unit { free.next_back() } else { free.next() };
        let Some(unit) = unit else { return false };
        directory[unit] = number(c);
        self.hosts[h].directory = directory;
        self.submit(h, c, Waiter::Growth, Payload::Directory(directory))
    }

    fn flush_directory(&mut self, h: usize, c: usize) -> bool {
        if self.without != Mutation::GrantNotFlushed && !self.flush(h, c, 1) {
            return false;
        }
        let directory = self.array.directory.cached;
        self.hosts[h].directory = directory;
        let granted = self.set_table(h, c, &directory);
        let is_trusted = self.without == Mutation::GrantUnchecked;
        let cell = &mut self.hosts[h].cells[c];
        // The array may have lost the grant before the flush, in a restart that another command
        // has met: then it is written again (H15).
        let is_there = is_trusted || granted > cell.units;
        cell.growth = if is_there { Growth::Release } else { Growth::Directory };
        true
    }

    fn release_directory(&mut self, h: usize, c: usize) -> bool {
        if self.without != Mutation::GrowthNoLease && !self.release(h, DIRECTORY) {
            return false;
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.growth = Growth::Superblock;
        match self.without {
            Mutation::SizeFirst => {
                cell.units = cell.superblock.units;
                cell.growth = Growth::Idle;
            }
            Mutation::UseEarly => cell.units += 1,
            _ => {}
        }
        true
    }

    fn write_size(&mut self, h: usize, c: usize) -> bool {
        let cell = &mut self.hosts[h].cells[c];
        match cell.growth_io {
            Io::Pending => false,
            Io::Done => {
                (cell.growth_io, cell.growth) = (Io::Idle, Growth::SuperblockFlush);
                true
            }
            Io::Idle => {
                let units = cell.superblock.units + 1;
                let superblock = Superblock { units, ..cell.superblock };
                self.submit(h, c, Waiter::Growth, Payload::Superblock(number(c), superblock))
            }
        }
    }

    fn flush_size(&mut self, h: usize, c: usize) -> bool {
        if !self.flush(h, c, 1 << c) {
            return false;
        }
        let cell = &mut self.hosts[h].cells[c];
        cell.superblock.units += 1;
        if self.without == Mutation::SizeFirst {
            cell.growth = Growth::Directory;
            return true;
        }
        cell.units = cell.superblock.units;
        cell.growth = Growth::Idle;
        self.note(Event::Grown);
        true
    }
}
