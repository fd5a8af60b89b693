//! Client requests: submission, completion, answer.

use super::device::{FLUSH_SHORT, data_cell};
use super::map::{Entry, NONE, Record, RecordKind};
use super::mutation::Mutation;
use super::oracle::Promise;
use super::parts::{CommitState, NO_OP, Op, OpState, Phase};
use super::state::{SUBS, World, ix, tag};

impl World {
    fn free_op(&self) -> Option<usize> {
        self.ops.iter().position(|o| o.state == OpState::Free)
    }

    /// True if a record of this entry has its LSN and is not published: the leaf lock is held.
    fn is_locked(&self, v: u8, e: u8) -> bool {
        self.ops.iter().any(|o| o.state == OpState::HasLsn && o.v == v && o.e == e)
    }

    fn slow_in_flight(&self, v: u8, e: u8) -> impl Iterator<Item = &Op> {
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
        let reads = self.ops.iter().filter(|o| o.state == OpState::Read);
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
        // A copy-on-write in flight is waited for, also by a write that could go in place now: its
        // source may have become exclusive since, and the copied data would overwrite the write.
        let copying = self.ops.iter().any(|o| {
            let copies = o.source != NONE && (o.v, o.e) == (v, e);
            let visible = matches!(o.state, OpState::Published | OpState::AwaitCommit);
            copies && o.state != OpState::Free && !visible
        });
        if (copying && !self.is(Mutation::FastUnderCopy)) || self.overtakes(v, e, mask, entry.bits)
        {
            return false;
        }
        let start = self.now;
        let mut op = Op { q, v, e, mask, fua, start, p: entry.p, set: mask, ..NO_OP };
        op.old_bits = entry.bits;
        op.state = OpState::Write;
        let mapped = entry.p != NONE;
        let exclusive = mapped && self.is_exclusive(entry.p);
        if exclusive && entry.bits & mask == mask {
            let alone = entry.lsn <= self.durable || self.is(Mutation::FuaNoCommit);
            op.direct = fua && alone;
        } else {
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
        if self.is_locked(v, e) {
            return false;
        }
        if entry.p == NONE {
            // First writers of one extent share the allocation.
            let shared = self.slow_in_flight(v, e).map(|o| o.p).next();
            let Some(p) = shared.or_else(|| self.allocate()) else { return false };
            op.p = p;
        } else if !exclusive {
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

    // R5b removed: the map says the data is there before it is.
    fn bits_at_submit(&mut self, slot: usize, entry: Entry) {
        let mut op = self.ops[slot];
        if op.source != NONE {
            return;
        }
        self.last_lsn += 1;
        let bits = entry.bits | op.set;
        op.record = self.map_record(&op, op.p, bits, RecordKind::Map);
        op.slow = false;
        self.reserved &= !(1 << op.p);
        self.publish(op.record);
        self.ops[slot] = op;
    }

    fn map_record(&self, op: &Op, p: u8, bits: u8, kind: RecordKind) -> Record {
        Record { lsn: self.last_lsn, kind, v: op.v, e: op.e, p, bits, q: op.q }
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

    /// Submits a read of one sub-block.
    pub fn read(&mut self, v: u8, e: u8, s: u8) -> bool {
        let Some(slot) = self.free_op() else { return false };
        let inside = e * self.cfg.subs + s < self.map.volumes[ix(v)].size;
        if self.phase != Phase::Serve || self.usable & (1 << v) == 0 || !inside {
            return false;
        }
        let entry = self.map.entry(v, e);
        let (mask, start) = (1 << s, self.now);
        let mut op = Op { state: OpState::Read, v, e, mask, start, p: entry.p, ..NO_OP };
        let blind = self.is(Mutation::ClearBitReads) && entry.p != NONE;
        if entry.bits & op.mask == 0 && !blind {
            op.p = NONE;
        }
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
            OpState::CopyRead => {
                let op = &mut self.ops[slot];
                for s in 0..self.cfg.subs {
                    op.copy[ix(s)] = self.dev.get(data_cell(op.source, s));
                }
                op.state = OpState::Write;
            }
            OpState::Write => self.land(slot),
            OpState::Landed | OpState::Discard => return self.assign(slot),
            OpState::HasLsn => {
                let op = self.ops[slot];
                if op.record.p != NONE {
                    self.reserved &= !(1 << op.record.p);
                }
                self.publish(op.record);
                self.ops[slot].state = OpState::Published;
            }
            OpState::Published => self.complete(slot),
            OpState::ShortFlush => {
                self.dev.flush_done(FLUSH_SHORT);
                self.answer_flush(slot);
            }
            OpState::Read => self.end_read(slot),
        }
        true
    }

    fn land(&mut self, slot: usize) {
        let op = self.ops[slot];
        for s in 0..self.cfg.subs {
            let cell = data_cell(op.p, s);
            if op.mask & (1 << s) != 0 {
                self.dev.put(cell, op.value);
            } else if op.copied & (1 << s) != 0 {
                self.dev.put(cell, op.copy[ix(s)]);
            } else {
                continue;
            }
            let partial = op.fua && self.is(Mutation::FuaPartialCommit);
            if op.direct || partial {
                self.dev.persist(cell);
            }
        }
        if op.slow {
            self.ops[slot].state = OpState::Landed;
        } else {
            self.complete(slot);
        }
    }

    // The change is made: answer, or for FUA behave as a FLUSH that arrives now (R7).
    fn complete(&mut self, slot: usize) {
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

    fn promise(&mut self, op: &Op, now: u16) {
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

    fn end_read(&mut self, slot: usize) {
        let op = self.ops[slot];
        let s = op.mask.trailing_zeros().to_le_bytes()[0];
        let value = if op.p == NONE { 0 } else { self.dev.get(data_cell(op.p, s)) };
        self.ops[slot] = NO_OP;
        self.check_cell(op.v, ix(op.e) * SUBS + ix(s), value, Promise::Answered, op.start);
    }

    // Assigns the LSN under the leaf lock, from the entry as it is now (R5d).
    fn assign(&mut self, slot: usize) -> bool {
        let op = self.ops[slot];
        if self.is_locked(op.v, op.e) || !self.record_fits(op.q) {
            return false;
        }
        let entry = self.map.entry(op.v, op.e);
        let change = if op.state == OpState::Discard {
            self.discard_change(slot, entry)
        } else {
            self.write_change(slot, entry)
        };
        let Some((p, bits, kind)) = change else {
            self.complete(slot);
            return true;
        };
        self.last_lsn += 1;
        self.ops[slot].record = self.map_record(&op, p, bits, kind);
        self.ops[slot].state = OpState::HasLsn;
        if self.is(Mutation::AnswerFirst) && !op.fua {
            self.promise(&op, self.now);
        }
        true
    }

    fn discard_change(&mut self, slot: usize, entry: Entry) -> Option<(u8, u8, RecordKind)> {
        let op = self.ops[slot];
        let under_write = self.slow_in_flight(op.v, op.e).next().is_some();
        if !self.is(Mutation::NoCancel) {
            for other in &mut self.ops {
                let slow =
                    matches!(other.state, OpState::CopyRead | OpState::Write | OpState::Landed)
                        && other.slow;
                if slow && (other.v, other.e) == (op.v, op.e) {
                    other.set &= !op.mask;
                }
            }
        }
        let bits = entry.bits & !op.mask;
        let frees = bits == 0
            && entry.p != NONE
            && !op.keep
            && (!under_write || self.is(Mutation::UnmapUnderWrite));
        if bits == entry.bits && !frees {
            return None;
        }
        Some((if frees { NONE } else { entry.p }, bits, RecordKind::Unmap))
    }

    fn write_change(&mut self, slot: usize, entry: Entry) -> Option<(u8, u8, RecordKind)> {
        let op = self.ops[slot];
        let stale = self.is(Mutation::NoReRead);
        let base = if stale { op.old_bits } else { entry.bits };
        let bits = if op.source != NONE {
            (base & op.copied) | op.set
        } else if op.set == 0 {
            0
        } else if entry.p == op.p || stale {
            base | op.set
        } else {
            op.set
        };
        if bits != 0 {
            return Some((op.p, bits, RecordKind::Map));
        }
        // All bits were cancelled: an extent allocated for them goes straight back.
        let others = self.slow_in_flight(op.v, op.e).filter(|o| o.p == op.p).count() > 1;
        if !others && entry.p != op.p {
            self.reserved &= !(1 << op.p);
        }
        None
    }

    /// Returns the result of an atomic read.
    pub fn peek(&self, v: u8, e: u8, s: u8) -> u16 {
        let entry = self.map.entry(v, e);
        let blind = self.is(Mutation::ClearBitReads);
        if entry.p == NONE || (entry.bits & (1 << s) == 0 && !blind) {
            0
        } else {
            self.dev.get(data_cell(entry.p, s))
        }
    }
}
