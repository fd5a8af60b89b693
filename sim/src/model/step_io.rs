//! Client requests: submission, completion, answer.

use super::device::{FLUSH_SHORT, data_cell};
use super::map::{Entry, NONE, Record, RecordKind};
use super::mutation::Mutation;
use super::parts::{CommitState, Fold, NO_OP, Op, OpState, Phase};
use super::state::{SUBS, World, ix, tag};

impl World {
    /// The lowest free slot.
    pub fn free_op(&self) -> Option<usize> {
        self.ops.iter().position(|o| o.state == OpState::Free)
    }

    /// True if a record of this entry has its LSN and is not published: the leaf lock is held.
    pub fn is_locked(&self, v: u8, e: u8) -> bool {
        let holds = |o: &Op| matches!(o.state, OpState::HasLsn | OpState::Half);
        self.ops.iter().any(|o| holds(o) && o.v == v && o.e == e)
    }

    /// The writes of an entry that change it at their end.
    pub fn slow_in_flight(&self, v: u8, e: u8) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(move |o| {
            o.slow
                && (o.v, o.e) == (v, e)
                && matches!(o.state, OpState::CopyRead | OpState::Write | OpState::Landed)
        })
    }

    fn admits(&mut self, v: u8, e: u8, mask: u8) -> bool {
        let volume = self.map.volumes[ix(v)];
        if self.phase != Phase::Serve
            || self.usable & !self.gate & (1 << v) == 0
            || volume.read_only
            || mask == 0
        {
            return false;
        }
        let oldest_read = self.oldest_read();
        let last = e * self.cfg.subs + (7 - mask.leading_zeros().to_le_bytes()[0]);
        let first_cell = ix(e) * SUBS;
        last < volume.size
            && mask >> self.cfg.subs == 0
            && (0..SUBS).all(|s| {
                mask & (1 << s) == 0 || self.cells[ix(v)][first_cell + s].has_room(oldest_read)
            })
    }

    /// When the oldest read in flight began.
    pub fn oldest_read(&self) -> u16 {
        // One that is between the bitmaps of an overlay and its base (K12) is in flight too.
        let reading = |o: &&Op| matches!(o.state, OpState::Look | OpState::Read);
        let reads = self.ops.iter().filter(reading);
        reads.map(|o| o.start).min().unwrap_or(u16::MAX)
    }

    fn begin_versions(&mut self, op: &Op) {
        for s in 0..SUBS {
            if op.mask & (1 << s) != 0 {
                self.cells[ix(op.v)][ix(op.e) * SUBS + s].begin(op.value, self.now);
            }
        }
    }

    /// Submits a write.
    pub fn write(&mut self, q: u8, v: u8, e: u8, mask: u8, fua: bool) -> bool {
        let Some(slot) = self.free_op() else { return false };
        if !self.admits(v, e, mask) {
            return false;
        }
        let entry = self.map.entry(v, e);
        let copying = self.is_copied(v, e) && !self.is(Mutation::FastUnderCopy);
        let folding = self.is_folded(v, e) && !self.is(Mutation::FoldUnderWrites);
        if copying || folding || self.overtakes(v, e, mask, entry.valid()) {
            return false;
        }
        let start = self.now;
        let mut op = Op { q, v, e, mask, fua, start, p: entry.p, set: mask, ..NO_OP };
        op.old_bits = entry.bits;
        op.base = entry.base;
        op.old_under = entry.under;
        op.state = OpState::Write;
        let exclusive = self.may_write(v, e, entry);
        let shown = entry.bits & mask == mask;
        if shown && (exclusive || self.is_taken_for_own(entry, Mutation::OverlayWrittenShared)) {
            let alone = entry.lsn <= self.durable
                || self.is(Mutation::FuaNoCommit)
                || self.is_taken_for_own(entry, Mutation::FuaOnOverlay);
            op.direct = fua && alone;
        } else if self.is(Mutation::BaseWritten) && entry.under & !entry.bits & mask == mask {
            op.p = entry.base;
        } else {
            let exclusive = exclusive || self.is_taken_for_own(entry, Mutation::OverlayGrowsShared);
            op.slow = true;
            if !self.start_slow(&mut op, entry, exclusive) {
                return false;
            }
        }
        op.value = tag(v, self.next_value);
        self.next_value += 1;
        self.begin_versions(&op);
        self.ops[slot] = op;
        if op.slow && self.is(Mutation::BitsAtSubmit) && self.record_fits(q) {
            self.bits_at_submit(slot, entry);
        }
        true
    }

    // A copy-on-write in flight is waited for, also by a write that could go in place now: its
    // source may have become exclusive since, and the copied data would overwrite the write.
    fn is_copied(&self, v: u8, e: u8) -> bool {
        self.ops.iter().any(|o| {
            let copies = o.source != NONE && o.fold == Fold::No && (o.v, o.e) == (v, e);
            let visible = matches!(o.state, OpState::Published | OpState::AwaitCommit);
            copies && o.state != OpState::Free && !visible
        })
    }

    // Whether the extent that a write finds may be overwritten in place. A redirect in flight keeps
    // its base shared until it is visible (K3), as a copy-on-write does with its source.
    fn may_write(&self, v: u8, e: u8, entry: Entry) -> bool {
        if entry.p == NONE {
            return false;
        }
        let redirected = self.ops.iter().any(|o| {
            let unseen = matches!(o.state, OpState::Write | OpState::Landed | OpState::HasLsn);
            unseen && o.redirect && (o.v, o.e) == (v, e) && o.base == entry.p
        });
        if redirected && !self.is(Mutation::WriteUnderRedirect) {
            return false;
        }
        let careless = entry.is_composite() && self.is(Mutation::OverlayPendingIgnored);
        self.is_exclusive(entry.p) || (careless && self.refs[ix(entry.p)] == 1)
    }

    // K9 or K10 removed: an overlay is taken for the entry's own.
    fn is_taken_for_own(&self, entry: Entry, mutation: Mutation) -> bool {
        entry.is_composite() && self.is(mutation)
    }

    // A write is in flight to one of these sub-blocks, and a discard came after it. The media would
    // decide between that write and this one, and could show the older one after the discard was
    // seen. The client of the model does not do this: see docs/decisions.
    fn overtakes(&self, v: u8, e: u8, mask: u8, bits: u8) -> bool {
        let writes = |o: &&Op| o.state == OpState::Write && (o.v, o.e) == (v, e);
        let discarded = |o: &Op| o.mask & if o.slow { !o.set } else { !bits };
        self.ops.iter().filter(writes).any(|o| discarded(o) & mask != 0)
    }

    fn start_slow(&mut self, op: &mut Op, entry: Entry, exclusive: bool) -> bool {
        let (v, e) = (op.v, op.e);
        // Registering as a slow writer takes the leaf lock.
        if self.is_locked(v, e) || self.tears_another(op) {
            return false;
        }
        op.unseen = true;
        if entry.p == NONE {
            // First writers of one extent share the allocation.
            let shared = self.slow_in_flight(v, e).map(|o| o.p).next();
            let Some(p) = shared.or_else(|| self.allocate()) else { return false };
            op.p = p;
        } else if exclusive {
            // No durable map shows a clear bit, unless a discard may be undone.
            let undone = |r: &Record| {
                let clears =
                    matches!(r.kind, RecordKind::Unmap | RecordKind::Resize | RecordKind::Rollback);
                clears && r.v == v
            };
            op.unseen = entry.bits & op.mask == 0 && !self.dirty.all().iter().any(undone);
        } else if self.redirects(op, entry) {
            return self.start_redirect(op, entry);
        } else {
            if self.slow_in_flight(v, e).next().is_some() {
                return false;
            }
            let Some(p) = self.allocate() else { return false };
            op.source = entry.p;
            op.copied = entry.bits & !op.mask;
            op.p = p;
            op.state = OpState::CopyRead;
        }
        true
    }

    // Where writes keep blocks whole, the first of two slow writes of a block would show it while
    // the other one, which may be torn, is still in flight.
    fn tears_another(&self, op: &Op) -> bool {
        let overlaps = |o: &Op| o.mask & op.mask != 0;
        self.cfg.whole
            && !self.is(Mutation::OverlapWhole)
            && self.slow_in_flight(op.v, op.e).any(overlaps)
    }

    // The redirects in flight above the extent that the entry maps.
    fn redirects_above(&self, v: u8, e: u8, p: u8) -> impl Iterator<Item = &Op> {
        self.slow_in_flight(v, e).filter(move |o| o.redirect && o.base == p)
    }

    // An overlay has one base, so a composite entry copies its overlay instead. Nor is a redirect
    // worth it if the base would keep nothing, unless there is an overlay already.
    fn redirects(&self, op: &Op, entry: Entry) -> bool {
        let kept = entry.bits & !op.mask != 0;
        let joins = self.redirects_above(op.v, op.e, entry.p).next().is_some();
        self.cfg.composite && !entry.is_composite() && (kept || joins)
    }

    // Redirects of one extent share their overlay (K3). It is a free extent (K1), so that the data
    // may be written before its record is.
    fn start_redirect(&mut self, op: &mut Op, entry: Entry) -> bool {
        let joined = self.redirects_above(op.v, op.e, entry.p).map(|o| o.p).next();
        if joined.is_none() && self.slow_in_flight(op.v, op.e).next().is_some() {
            return false;
        }
        let joined = joined.filter(|_| !self.is(Mutation::RedirectOwnTarget));
        let Some(p) = joined.or_else(|| self.allocate_overlay()) else { return false };
        op.p = p;
        op.redirect = true;
        op.base = entry.p;
        op.old_under = entry.bits;
        true
    }

    // R5b removed: the map says the data is there before it is.
    fn bits_at_submit(&mut self, slot: usize, entry: Entry) {
        let mut op = self.ops[slot];
        if op.source != NONE || op.redirect {
            return;
        }
        self.last_lsn += 1;
        let after = Entry { p: op.p, bits: entry.bits | op.set, ..entry };
        op.record = self.map_record(&op, after, RecordKind::Map);
        op.slow = false;
        self.reserved &= !(1 << op.p);
        self.publish(op.record);
        self.ops[slot] = op;
    }

    /// Submits a discard, or a write-zeroes that keeps the extent.
    pub fn discard(&mut self, q: u8, v: u8, e: u8, mask: u8, keep: bool) -> bool {
        let Some(slot) = self.free_op() else { return false };
        if !self.admits(v, e, mask) {
            return false;
        }
        let start = self.now;
        let op = Op { state: OpState::Discard, q, v, e, mask, keep, start, ..NO_OP };
        self.begin_versions(&op);
        self.ops[slot] = op;
        true
    }

    /// Submits a FLUSH.
    pub fn flush(&mut self, q: u8, v: u8) -> bool {
        let Some(slot) = self.free_op() else { return false };
        if self.phase != Phase::Serve || self.usable & (1 << v) == 0 {
            return false;
        }
        let mut op = Op { state: OpState::AwaitCommit, q, v, start: self.now, ..NO_OP };
        op.need = self.last_lsn;
        let short_busy = self.ops.iter().any(|o| o.state == OpState::ShortFlush);
        if self.short_form_allowed() && !short_busy {
            op.state = OpState::ShortFlush;
            self.dev.flush_sent(FLUSH_SHORT);
        }
        self.ops[slot] = op;
        true
    }

    fn short_form_allowed(&self) -> bool {
        if self.is(Mutation::ShortFlushInCommit) {
            let captured = match self.commit.state {
                CommitState::Idle => self.durable,
                _ => self.commit.cut.max(self.durable),
            };
            return self.dirty.all().iter().all(|r| r.lsn <= captured);
        }
        self.durable == self.last_lsn
    }

    /// A repeated create or delete: answered from the state found, once that is durable (R16).
    pub fn retry(&mut self, v: u8) -> bool {
        let Some(slot) = self.free_op() else { return false };
        if self.phase != Phase::Serve || v >= self.next_volume {
            return false;
        }
        let start = self.now;
        let need = self.map.volumes[ix(v)].lsn;
        self.ops[slot] = Op { state: OpState::AwaitDurable, v, start, need, ..NO_OP };
        self.answer_retries();
        true
    }

    /// Takes a request one step further.
    pub fn advance(&mut self, slot: usize) -> bool {
        if !matches!(self.phase, Phase::Serve) {
            return false;
        }
        match self.ops[slot].state {
            OpState::Free | OpState::AwaitCommit | OpState::AwaitDurable => return false,
            OpState::FoldWait => return self.begin_fold(slot),
            OpState::CopyRead => {
                let early = self.is(Mutation::FoldRecordEarly);
                let op = &mut self.ops[slot];
                for s in 0..self.cfg.subs {
                    op.copy[ix(s)] = self.dev.get(data_cell(op.source, s));
                }
                let published_first = early && op.fold != Fold::No;
                op.state = if published_first { OpState::Landed } else { OpState::Write };
            }
            OpState::Write => self.land(slot),
            OpState::Landed | OpState::Discard => return self.assign(slot),
            OpState::HasLsn => self.show(slot),
            OpState::Half => self.show_rest(slot),
            OpState::Published if self.ops[slot].fold != Fold::No => self.end_fold(slot),
            OpState::Published => self.complete(slot),
            OpState::ShortFlush => {
                self.dev.flush_done(FLUSH_SHORT);
                self.answer_flush(slot);
            }
            OpState::Look => self.look(slot),
            OpState::Read => self.end_read(slot),
        }
        true
    }

    fn land(&mut self, slot: usize) {
        let op = self.ops[slot];
        for s in 0..self.cfg.subs {
            let cell = data_cell(op.p, s);
            let value = if op.mask & (1 << s) != 0 {
                op.value
            } else if op.copied & (1 << s) != 0 {
                op.copy[ix(s)]
            } else {
                continue;
            };
            if self.may_tear(&op) {
                self.dev.put_unseen(cell, value);
            } else {
                self.dev.put(cell, value);
            }
            let partial = op.fua && self.is(Mutation::FuaPartialCommit);
            if op.direct || partial {
                self.dev.persist(cell);
            }
        }
        if op.fold != Fold::No && self.is(Mutation::FoldRecordEarly) {
            self.ops[slot] = NO_OP;
        } else if op.slow || op.fold != Fold::No {
            self.ops[slot].state = OpState::Landed;
        } else {
            self.complete(slot);
        }
    }

    /// True if a power loss may tear the data of this write.
    pub fn may_tear(&self, op: &Op) -> bool {
        self.cfg.whole && op.unseen
    }

    // The change is made: answer, or for FUA behave as a FLUSH that arrives now (R7).
    pub(super) fn complete(&mut self, slot: usize) {
        let op = self.ops[slot];
        if !op.fua || op.direct || self.is(Mutation::FuaNoCommit) {
            self.answer(slot);
            return;
        }
        let running = self.commit.state != CommitState::Idle;
        let lsn = self.map.entry(op.v, op.e).lsn;
        let joins = self.is(Mutation::FuaJoinsCommit) && running && lsn <= self.commit.cut;
        let op = &mut self.ops[slot];
        op.state = OpState::AwaitCommit;
        op.need = self.last_lsn;
        op.served = joins;
    }

    /// Answers a write or discard.
    pub fn answer(&mut self, slot: usize) {
        let op = self.ops[slot];
        self.promise(&op, self.now);
        self.ops[slot] = NO_OP;
    }

    pub(super) fn promise(&mut self, op: &Op, now: u16) {
        for s in 0..SUBS {
            if op.mask & (1 << s) != 0 {
                self.cells[ix(op.v)][ix(op.e) * SUBS + s].answer(op.start, now, op.fua);
            }
        }
    }

    /// Answers a FLUSH, or a FUA write that became one.
    pub fn answer_flush(&mut self, slot: usize) {
        let op = self.ops[slot];
        if op.fua {
            self.answer(slot);
            return;
        }
        for cell in &mut self.cells[ix(op.v)] {
            cell.flushed(op.start);
        }
        self.ops[slot] = NO_OP;
    }
}
