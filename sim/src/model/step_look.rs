//! Reads: the look-up of an entry, and the value at the end.

use super::device::data_cell;
use super::map::NONE;
use super::mutation::Mutation;
use super::oracle::Promise;
use super::parts::{NO_OP, Op, OpState, Phase};
use super::state::{SUBS, World, ix};

impl World {
    /// Submits a read of one sub-block.
    pub fn read(&mut self, v: u8, e: u8, s: u8) -> bool {
        let Some(slot) = self.free_op() else { return false };
        let inside = e * self.cfg.subs + s < self.map.volumes[ix(v)].size;
        if self.phase != Phase::Serve || self.usable & (1 << v) == 0 || !inside {
            return false;
        }
        self.ops[slot] = self.first_look(&Op { v, e, mask: 1 << s, start: self.now, ..NO_OP });
        true
    }

    // The top of the entry. A reader that finds no bit in the overlay goes on to the base.
    fn first_look(&self, op: &Op) -> Op {
        let entry = self.map.entry(op.v, op.e);
        let mut op = Op { state: OpState::Read, p: entry.p, base: NONE, ..*op };
        let under_first = self.is(Mutation::LookUnderFirst);
        if entry.is_composite() && (entry.bits & op.mask == 0 || under_first) {
            op.state = OpState::Look;
            op.base = entry.base;
            op.old_under = entry.under;
            return op;
        }
        let blind = self.is(Mutation::ClearBitReads) && entry.p != NONE;
        if entry.bits & op.mask == 0 && !blind {
            op.p = NONE;
        }
        op
    }

    /// The base's bitmap, then the top once more: if that has changed, from the beginning (K12).
    pub fn look(&mut self, slot: usize) {
        let mut op = self.ops[slot];
        if !self.map.volumes[ix(op.v)].exists {
            self.ops[slot] = NO_OP;
            return;
        }
        let entry = self.map.entry(op.v, op.e);
        let changed = (entry.p, entry.base) != (op.p, op.base);
        if changed && !self.is(Mutation::NoSecondLook) {
            self.ops[slot] = self.first_look(&op);
            return;
        }
        let under_first = self.is(Mutation::LookUnderFirst);
        let under = if under_first { op.old_under } else { entry.under };
        op.state = OpState::Read;
        if under_first && entry.bits & op.mask != 0 {
            op.base = NONE;
        } else {
            op.base = if under & op.mask != 0 { entry.base } else { NONE };
            op.p = op.base;
        }
        self.ops[slot] = op;
    }

    /// The data of a read arrives.
    pub fn end_read(&mut self, slot: usize) {
        let op = self.ops[slot];
        let s = op.mask.trailing_zeros().to_le_bytes()[0];
        let value = if op.p == NONE { 0 } else { self.dev.get(data_cell(op.p, s)) };
        self.ops[slot] = NO_OP;
        self.check_cell(op.v, ix(op.e) * SUBS + ix(s), value, Promise::Answered, op.start);
    }

    /// Returns the result of an atomic read.
    pub fn peek(&self, v: u8, e: u8, s: u8) -> u16 {
        let entry = self.map.entry(v, e);
        let mut p = entry.place(s);
        if p == NONE && self.is(Mutation::ClearBitReads) {
            p = entry.p;
        }
        if p == NONE { 0 } else { self.dev.get(data_cell(p, s)) }
    }
}
