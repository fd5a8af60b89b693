//! Structure changes: gate, drain, LSN, visible, answer (R16).

use super::map::{NO_RECORD, NONE, Record, RecordKind};
use super::mutation::Mutation;
use super::oracle::{Cell, EXISTS, FaultKind, SIZE};
use super::parts::{Fold, NO_OP, OpState, Phase, StructState};
use super::state::{SUBS, VOLS, World, ix};

impl World {
    fn may_change(&mut self, v: u8) -> bool {
        let oldest_read = self.oldest_read();
        self.phase == Phase::Serve
            && self.sop.state == StructState::Idle
            && self.usable & (1 << v) != 0
            && self.cells[ix(v)].iter_mut().all(|c| c.has_room(oldest_read))
    }

    fn shut_gate(&mut self, kind: RecordKind, v: u8, e: u8, bits: u8) -> bool {
        self.sop.state = StructState::Gated;
        self.sop.record = Record { kind, v, e, bits, ..NO_RECORD };
        self.gate |= 1 << v;
        true
    }

    /// Starts a snapshot or clone.
    pub fn start_copy(&mut self, v: u8, writable: bool) -> bool {
        if ix(self.next_volume) >= VOLS || !self.may_change(v) {
            return false;
        }
        let to = self.next_volume;
        self.next_volume += 1;
        self.root[ix(to)] = self.root[ix(v)];
        self.cells[ix(to)] = [Cell::settled(0, 0); super::oracle::VOLUME_CELLS];
        self.shut_gate(RecordKind::Copy, v, to, u8::from(writable))
    }

    /// Starts snapshots of two volumes in one cut.
    pub fn start_group(&mut self, v: u8, w: u8) -> bool {
        if ix(self.next_volume) + 1 >= VOLS || v == w || !self.may_change(v) || !self.may_change(w)
        {
            return false;
        }
        let to = (self.next_volume, self.next_volume + 1);
        self.next_volume += 2;
        for (from, to) in [(v, to.0), (w, to.1)] {
            self.root[ix(to)] = self.root[ix(from)];
            self.cells[ix(to)] = [Cell::settled(0, 0); super::oracle::VOLUME_CELLS];
        }
        self.group = to;
        self.shut_gate(RecordKind::Group, v, to.0, to.1);
        self.sop.record.p = w;
        self.gate |= 1 << w;
        true
    }

    /// Starts a deletion.
    pub fn start_delete(&mut self, v: u8) -> bool {
        let starts = self.may_change(v) && self.shut_gate(RecordKind::Delete, v, NONE, 0);
        if starts && (v == self.group.0 || v == self.group.1) {
            self.group = (NONE, NONE);
        }
        starts
    }

    /// Starts a rollback of `v` to snapshot `s`.
    pub fn start_rollback(&mut self, v: u8, s: u8) -> bool {
        let fits = v != s
            && self.usable & (1 << s) != 0
            && self.root[ix(v)] == self.root[ix(s)]
            && self.map.volumes[ix(s)].read_only
            && !self.map.volumes[ix(v)].read_only;
        fits && self.may_change(v) && self.shut_gate(RecordKind::Rollback, v, s, 0)
    }

    /// Starts a resize.
    pub fn start_resize(&mut self, v: u8, size: u8) -> bool {
        let volume = self.map.volumes[ix(v)];
        let fits = size > 0 && size <= self.full_size() && size != volume.size;
        fits && !volume.read_only
            && self.may_change(v)
            && self.shut_gate(RecordKind::Resize, v, NONE, size)
    }

    fn drained(&self, v: u8) -> bool {
        // Folds count as writes (K6).
        let skipped = |fold| fold != Fold::No && self.is(Mutation::StructureUnderFold);
        !self.ops.iter().any(|o| {
            o.v == v
                && !skipped(o.fold)
                && matches!(
                    o.state,
                    OpState::FoldWait
                        | OpState::CopyRead
                        | OpState::Write
                        | OpState::Landed
                        | OpState::Discard
                        | OpState::HasLsn
                        | OpState::Half
                )
        })
    }

    /// Takes the structure change one step further; its answer comes with the durable LSN.
    pub fn advance_structure(&mut self) -> bool {
        if self.phase != Phase::Serve {
            return false;
        }
        match self.sop.state {
            StructState::Idle | StructState::Visible => false,
            StructState::Gated => self.assign_structure(),
            StructState::HasLsn => {
                self.show_structure();
                true
            }
            StructState::Half => self.show_other_half(),
        }
    }

    fn assign_structure(&mut self) -> bool {
        let mut r = self.sop.record;
        let copies = matches!(r.kind, RecordKind::Copy | RecordKind::Group);
        let waits = match self.mutation {
            Mutation::SnapshotUndrained => !copies,
            Mutation::ChangeUndrained => copies,
            _ => true,
        };
        let whole = r.kind == RecordKind::Group;
        let drained = self.drained(r.v) && (!whole || self.drained(r.p));
        if (waits && !drained) || !self.record_fits(r.q) {
            return false;
        }
        if whole && !self.dirty.fits(4) {
            return false;
        }
        self.last_lsn += 1;
        r.lsn = self.last_lsn;
        if !whole {
            r.p = u8::from(r.kind == RecordKind::Resize && self.is(Mutation::ShrinkWholeExtents));
        }
        self.sop.record = r;
        self.sop.state = StructState::HasLsn;
        true
    }

    fn show_structure(&mut self) {
        let r = self.sop.record;
        self.observe_structure(&r);
        self.gate &= !(1 << r.v);
        self.sop.visible = self.now;
        self.sop.state = StructState::Visible;
        if r.kind == RecordKind::Group {
            self.gate &= !(1 << r.p);
            if matches!(self.mutation, Mutation::GroupInPieces | Mutation::GroupOneByOne) {
                self.publish(Record { kind: RecordKind::Copy, bits: 0, p: NONE, ..r });
                self.sop.state = StructState::Half;
                if self.is(Mutation::GroupInPieces) {
                    self.show_other_half();
                }
                return;
            }
        }
        self.publish(r);
        if r.kind == RecordKind::Delete {
            self.usable &= !(1 << r.v);
        }
        if self.is(Mutation::StructureEarly) {
            self.answer_structure();
        }
    }

    // A record of its own for the second snapshot of a group.
    fn show_other_half(&mut self) -> bool {
        let r = self.sop.record;
        let at_once = self.is(Mutation::GroupInPieces);
        if !at_once && (!self.drained(r.p) || !self.record_fits(r.q)) {
            return false;
        }
        self.last_lsn += 1;
        let (lsn, kind) = (self.last_lsn, RecordKind::Copy);
        self.publish(Record { kind, lsn, v: r.p, e: r.bits, bits: 0, p: NONE, ..r });
        self.sop.record.lsn = lsn;
        self.sop.state = StructState::Visible;
        true
    }

    fn observe_copy(&mut self, v: u8, to: u8) {
        let (to, now) = (ix(to), self.now);
        for (e, s) in self.places() {
            let value = self.peek(v, e, s);
            self.cells[to][ix(e) * SUBS + ix(s)] = Cell::settled(value, now);
        }
        let size = u16::from(self.map.volumes[ix(v)].size);
        self.cells[to][SIZE] = Cell::settled(size, now);
        self.cells[to][EXISTS].instant(1, now);
    }

    // Reports the new value of each cell to the oracle, in the moment the change becomes visible.
    fn observe_structure(&mut self, r: &Record) {
        let (v, now) = (ix(r.v), self.now);
        match r.kind {
            RecordKind::Map | RecordKind::Unmap => {}
            RecordKind::Copy => self.observe_copy(r.v, r.e),
            RecordKind::Group => {
                self.observe_copy(r.v, r.e);
                self.observe_copy(r.p, r.bits);
            }
            RecordKind::Delete => self.cells[v][EXISTS].instant(0, now),
            RecordKind::Rollback => {
                for (e, s) in self.places() {
                    let value = self.peek(r.e, e, s);
                    self.cells[v][ix(e) * SUBS + ix(s)].instant(value, now);
                }
                let size = u16::from(self.map.volumes[ix(r.e)].size);
                self.cells[v][SIZE].instant(size, now);
            }
            RecordKind::Resize => {
                for (e, s) in self.places() {
                    if e * self.cfg.subs + s >= r.bits {
                        self.cells[v][ix(e) * SUBS + ix(s)].instant(0, now);
                    }
                }
                self.cells[v][SIZE].instant(u16::from(r.bits), now);
            }
        }
    }

    /// Every (extent, sub-block) of a volume of full size.
    pub fn places(&self) -> impl Iterator<Item = (u8, u8)> + use<> {
        let subs = self.cfg.subs;
        (0..self.cfg.vol_extents).flat_map(move |e| (0..subs).map(move |s| (e, s)))
    }

    /// Answers the structure change.
    pub fn answer_structure(&mut self) {
        let (r, visible, now) = (self.sop.record, self.sop.visible, self.now);
        let (targets, made) = match r.kind {
            RecordKind::Group => ([r.e, r.bits], true),
            RecordKind::Copy => ([r.e; 2], true),
            _ => ([r.v; 2], false),
        };
        for target in targets {
            for cell in &mut self.cells[ix(target)] {
                cell.answer(visible, now, true);
            }
            if made {
                self.usable |= 1 << target;
            }
        }
        self.sop.state = StructState::Idle;
    }

    /// Answers repeated requests whose state is durable.
    pub fn answer_retries(&mut self) {
        for slot in 0..self.ops.len() {
            let op = self.ops[slot];
            let early = self.is(Mutation::IdempotentEarly);
            if op.state != OpState::AwaitDurable || (op.need > self.durable && !early) {
                continue;
            }
            let volume = self.map.volumes[ix(op.v)];
            if volume.lsn == op.need {
                let cell = &mut self.cells[ix(op.v)][EXISTS];
                let found = u16::from(volume.exists);
                if !cell.allows(found, super::oracle::Promise::Answered, self.now) {
                    self.fail(FaultKind::WrongExistence, op.v, EXISTS, found);
                }
                self.cells[ix(op.v)][EXISTS].promise_found(found, self.now);
            }
            self.ops[slot] = NO_OP;
        }
    }
}
