//! Folds: a composite entry becomes a mapped one, from the overlay down or from the base up.

use super::map::{Entry, RecordKind};
use super::mutation::Mutation;
use super::parts::{Fold, NO_OP, Op, OpState, Phase};
use super::state::{World, ix};
use super::step::Kind;
use super::step_entry::Change;

impl World {
    /// True if a fold of the entry is in the table, which new writes wait for (K6).
    pub fn is_folded(&self, v: u8, e: u8) -> bool {
        let folds = |o: &Op| o.fold != Fold::No && (o.v, o.e) == (v, e);
        self.ops.iter().any(|o| o.state != OpState::Free && folds(o))
    }

    /// Puts a fold of a composite entry into the table.
    pub fn start_fold(&mut self, v: u8, e: u8, fold: Fold) -> bool {
        let Some(slot) = self.free_op() else { return false };
        let entry = self.map.entry(v, e);
        if self.phase != Phase::Serve
            || self.usable & !self.gate & (1 << v) == 0
            || !entry.is_composite()
            || self.is_folded(v, e)
            || self.is_locked(v, e)
        {
            return false;
        }
        let (state, start, need) = (OpState::FoldWait, self.now, entry.lsn);
        self.ops[slot] = Op { state, v, e, start, need, fold, unseen: true, ..NO_OP };
        true
    }

    /// Begins to copy, once the writes from before the fold have ended. If the entry may not be
    /// folded then, the fold is given up, since writes wait for it.
    pub fn begin_fold(&mut self, slot: usize) -> bool {
        let mut op = self.ops[slot];
        if !self.is_drained_for(&op) {
            return false;
        }
        let entry = self.map.entry(op.v, op.e);
        if !entry.is_composite() || !self.may_fold(&op, entry) {
            self.give_up(slot);
            return true;
        }
        op.state = OpState::CopyRead;
        if op.fold == Fold::Down {
            (op.source, op.p, op.copied) = (entry.p, entry.base, entry.bits);
        } else {
            (op.source, op.p, op.copied) = (entry.base, entry.p, entry.under & !entry.bits);
        }
        (op.old_bits, op.old_under) = (entry.bits, entry.under);
        self.ops[slot] = op;
        true
    }

    // K6: a write has ended when its change is visible, not when its IO has ended.
    fn is_drained_for(&self, fold: &Op) -> bool {
        let in_flight = |o: &Op| match o.state {
            _ if self.is(Mutation::FoldUndrained) => false,
            OpState::CopyRead | OpState::Write => true,
            OpState::Landed | OpState::HasLsn | OpState::Half => {
                !self.is(Mutation::FoldUnpublished)
            }
            _ => false,
        };
        let same = |o: &&Op| (o.v, o.e) == (fold.v, fold.e) && o.start < fold.start;
        !self.ops.iter().filter(same).any(in_flight)
    }

    // K5: no other map shows the base, neither now nor after a crash, and all durable maps of this
    // entry show the overlay where the base is overwritten. A fold up writes sub-blocks that no map
    // of the entry shows in the overlay.
    fn may_fold(&self, op: &Op, entry: Entry) -> bool {
        if op.fold == Fold::Up {
            return self.is_exclusive(entry.p);
        }
        let undone = |p: u8| self.pending.all().iter().any(|d| d.p == p && d.lsn > self.durable);
        let alone = self.refs[ix(entry.base)] == 1;
        let exclusive = match self.mutation {
            Mutation::FoldPendingBase => alone,
            Mutation::FoldUndrainedBase => alone && !undone(entry.base),
            _ => self.is_exclusive(entry.base),
        };
        let lsn = match self.mutation {
            Mutation::FoldEntryNotDurable => 0,
            Mutation::FoldLsnBeforeDrain => op.need,
            _ => entry.lsn,
        };
        exclusive && lsn <= self.durable
    }

    /// The change of a fold, from the entry as it is now; none if a discard emptied it.
    pub fn fold_change(&mut self, op: &Op, entry: Entry) -> Option<Change> {
        let (top, base) = if op.fold == Fold::Down { (op.source, op.p) } else { (op.p, op.source) };
        let (mut bits, mut under) = (entry.bits, entry.under);
        if self.is(Mutation::FoldNoReRead) {
            (bits, under) = (op.old_bits, op.old_under);
        } else if (entry.p, entry.base) != (top, base) {
            return None;
        }
        let bits = if op.fold == Fold::Down {
            under | (bits & op.copied)
        } else {
            bits | (under & op.copied)
        };
        Some((Entry::plain(op.p, bits), RecordKind::Map))
    }

    /// A fold is visible, and writes of its entry go on.
    pub fn end_fold(&mut self, slot: usize) {
        let op = self.ops[slot];
        let kind = if op.fold == Fold::Down { Kind::FoldedDown } else { Kind::FoldedUp };
        self.tally(kind, true);
        if self.is(Mutation::FoldRecordEarly) {
            self.ops[slot].state = OpState::Write;
        } else {
            self.ops[slot] = NO_OP;
        }
    }

    /// Takes each fold one step further.
    pub fn advance_folds(&mut self) -> bool {
        let mut moved = false;
        for slot in 0..self.ops.len() {
            moved |= self.ops[slot].fold != Fold::No && self.advance(slot);
        }
        moved
    }

    /// Takes all requests, apart from folds, as far as they go.
    pub fn finish_requests(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..12 {
            for slot in 0..self.ops.len() {
                moved |= self.ops[slot].fold == Fold::No && self.advance(slot);
            }
        }
        moved
    }

    /// The entry stays as it is.
    pub fn give_up(&mut self, slot: usize) {
        self.tally(Kind::FoldGivenUp, true);
        self.ops[slot] = NO_OP;
    }

    /// A fold fails, before, while or after it reads.
    pub fn fail_fold(&mut self, slot: usize) -> bool {
        let op = self.ops[slot];
        let stops = matches!(op.state, OpState::FoldWait | OpState::CopyRead | OpState::Landed);
        if op.fold == Fold::No || !stops || self.phase != Phase::Serve {
            return false;
        }
        self.ops[slot] = NO_OP;
        true
    }
}
