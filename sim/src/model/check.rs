//! Compares the contents of the pool with the oracle.

use super::device::GARBAGE;
use super::map::NONE;
use super::oracle::{Cell, EXISTS, FaultKind, Promise, SIZE};
use super::parts::{CkptState, CommitState, OpState, Phase, StructState};
use super::state::{SUBS, World, ix};

impl World {
    /// Compares one value; a read began at `began`.
    pub fn check_cell(&mut self, v: u8, cell: usize, found: u16, promise: Promise, began: u16) {
        self.checks += 1;
        if self.cells[ix(v)][cell].allows(found, promise, began) {
            return;
        }
        let kind = match cell {
            SIZE => FaultKind::WrongSize,
            EXISTS => FaultKind::WrongExistence,
            _ if self.is_foreign(v, found) => FaultKind::Foreign,
            _ if promise == Promise::Flushed => FaultKind::FlushedLost,
            _ => FaultKind::AnsweredLost,
        };
        self.fail(kind, v, cell, found);
    }

    fn is_foreign(&self, v: u8, value: u16) -> bool {
        if value == 0 {
            return false;
        }
        let writer = (value >> 10).wrapping_sub(1);
        let same_root = |root: &u8| *root == self.root[ix(v)];
        value & GARBAGE == GARBAGE || !self.root.get(usize::from(writer)).is_some_and(same_root)
    }

    // Every cell of a volume that a client could read now.
    fn readable(&self, v: u8) -> impl Iterator<Item = (usize, u16)> {
        let volume = self.map.volumes[ix(v)];
        let inside = self.places().filter(move |(e, s)| e * self.cfg.subs + s < volume.size);
        let cells = inside.map(move |(e, s)| (ix(e) * SUBS + ix(s), self.peek(v, e, s)));
        cells.chain([(SIZE, u16::from(volume.size))])
    }

    fn check_volume(&mut self, v: u8, promise: Promise) {
        let exists = self.map.volumes[ix(v)].exists;
        self.check_cell(v, EXISTS, u16::from(exists), promise, self.now);
        if !exists {
            return;
        }
        let mut found = [(0, 0); 8];
        let mut n = 0;
        for (at, item) in self.readable(v).enumerate() {
            found[at] = item;
            n = at + 1;
        }
        for (cell, value) in &found[..n] {
            self.check_cell(v, *cell, *value, promise, self.now);
            if promise == Promise::Answered {
                self.cells[ix(v)][*cell].found(*value, self.now);
            }
        }
    }

    /// A client reads everything in one moment.
    pub fn check_now(&mut self) -> bool {
        let serves = self.phase == Phase::Serve;
        let wrongly =
            self.phase == Phase::Failed && self.is(super::mutation::Mutation::FailedReadsServed);
        if !serves && !wrongly {
            return false;
        }
        for v in 0..self.next_volume {
            if self.usable & (1 << v) != 0 {
                self.check_volume(v, Promise::Answered);
            }
        }
        self.check_extents();
        true
    }

    /// The pool serves again: both promises, then the oracle adopts the found values.
    pub fn recovered(&mut self) {
        let own_ring = self.meta.ring_used && self.ring.life == self.life;
        let replayed = own_ring && self.promise == Promise::Answered;
        let promise = if self.doubt && !own_ring { Promise::Flushed } else { self.promise };
        for v in 0..self.next_volume {
            for cell in &mut self.cells[ix(v)] {
                cell.end_all(self.now);
            }
        }
        self.now += 1;
        for v in 0..self.next_volume {
            self.check_volume(v, promise);
            if replayed {
                self.keep_found(v);
            } else {
                self.settle_found(v);
            }
            if self.map.volumes[ix(v)].exists {
                self.usable |= 1 << v;
            }
        }
        let (one, other) = self.group;
        if one != NONE {
            let there = |v: u8| self.map.volumes[ix(v)].exists;
            self.checks += 1;
            if there(one) != there(other) {
                self.fail(FaultKind::TornGroup, one, EXISTS, u16::from(there(one)));
            }
        }
        self.promise = Promise::Answered;
        self.doubt = false;
        self.life = self.ring.life;
        self.check_extents();
    }

    // After a replay of the ring the older states may still come back with a power loss.
    fn keep_found(&mut self, v: u8) {
        let exists = u16::from(self.map.volumes[ix(v)].exists);
        self.cells[ix(v)][EXISTS].found(exists, self.now);
    }

    // Without a ring, all that was found came from the media, and nothing else can come back.
    fn settle_found(&mut self, v: u8) {
        let now = self.now;
        let volume = self.map.volumes[ix(v)];
        let cells = &mut self.cells[ix(v)];
        cells[EXISTS] = Cell::settled(u16::from(volume.exists), now);
        if !volume.exists {
            return;
        }
        cells[SIZE] = Cell::settled(u16::from(volume.size), now);
        for (e, s) in self.places() {
            let inside = e * self.cfg.subs + s < volume.size;
            let value = if inside { self.peek(v, e, s) } else { 0 };
            self.cells[ix(v)][ix(e) * SUBS + ix(s)] = Cell::settled(value, now);
        }
    }

    /// Ends everything that was begun, without new requests; a request that does not end is stuck.
    pub fn drain(&mut self) {
        for _ in 0..200 {
            self.now += 1;
            if !self.drain_round() {
                break;
            }
            if self.fault.is_some() || self.exhausted {
                return;
            }
        }
        if self.exhausted {
            return;
        }
        let idle = self.ops.iter().all(|o| o.state == OpState::Free)
            && self.sop.state == StructState::Idle
            && self.commit.state == CommitState::Idle
            && self.ckpt.state == CkptState::Idle
            && self.phase == Phase::Serve;
        self.checks += 1;
        if !idle {
            self.fail(FaultKind::Stuck, 0, 0, 0);
            return;
        }
        self.reclaim();
        self.check_now();
        self.check_rest();
    }

    /// Opens until requests are served.
    pub fn recover(&mut self) -> bool {
        for _ in 0..200 {
            if self.phase == Phase::Serve || self.fault.is_some() || self.exhausted {
                return true;
            }
            self.now += 1;
            self.drain_round();
        }
        self.fail(FaultKind::Stuck, 0, 0, 0);
        true
    }

    fn drain_round(&mut self) -> bool {
        let mut moved = self.reopen() | self.advance_open();
        for slot in 0..self.ops.len() {
            moved |= self.advance(slot);
        }
        moved |= self.advance_structure();
        for i in 0..6 {
            moved |= self.land_wal(i);
        }
        moved |= self.advance_commit();
        self.start_service();
        if self.ckpt.state != CkptState::Idle || self.wal_is_full() {
            moved |= self.advance_ckpt();
        }
        moved | self.reclaim()
    }
}
