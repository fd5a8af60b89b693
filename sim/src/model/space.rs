//! Extents: allocation, references, and when a dropped one counts (R4, R10); publishing a record.

use super::log::RING_MAX;
use super::map::{NONE, Record, RecordKind};
use super::mutation::Mutation;
use super::oracle::{Fault, FaultKind};
use super::parts::{CommitState, OpState, Pending, StructState};
use super::state::{World, ix};

impl World {
    /// Records a violation; the first one counts.
    pub fn fail(&mut self, kind: FaultKind, at: u8, cell: usize, found: u16) {
        if self.fault.is_none() {
            self.fault = Some(Fault { kind, at, cell, found });
        }
    }

    fn oldest_io(&self) -> u16 {
        let active = |s| matches!(s, OpState::CopyRead | OpState::Write | OpState::Read);
        self.ops.iter().filter(|o| active(o.state)).map(|o| o.start).min().unwrap_or(u16::MAX)
    }

    /// R4: whether `p` may be granted to another volume.
    fn is_free(&self, p: u8) -> bool {
        if self.refs[ix(p)] != 0 || self.reserved & (1 << p) != 0 {
            return false;
        }
        let captured = match self.commit.state {
            CommitState::Idle => self.durable,
            _ => self.durable.max(self.commit.cut),
        };
        let blocks = |d: &Pending| match self.mutation {
            Mutation::ReuseAtOnce => false,
            Mutation::ReuseWhenCaptured => d.lsn > captured,
            Mutation::ReuseUndrained => d.lsn > self.durable,
            _ => true,
        };
        !self.pending.all().iter().any(|d| d.p == p && blocks(d))
    }

    /// R10: may the one owner of `p` overwrite it in place?
    pub fn is_exclusive(&self, p: u8) -> bool {
        if self.refs[ix(p)] != 1 {
            return false;
        }
        let blocks = |d: &Pending| match self.mutation {
            Mutation::PendingIgnored => false,
            Mutation::ExclusiveUndrained => d.lsn > self.durable,
            _ => true,
        };
        !self.pending.all().iter().any(|d| d.p == p && blocks(d))
    }

    /// Takes a free extent; it is reserved until it is mapped or given back.
    pub fn allocate(&mut self) -> Option<u8> {
        let p = (0..self.cfg.extents).find(|p| self.is_free(*p))?;
        self.reserved |= 1 << p;
        Some(p)
    }

    /// The reclaimer forgets the drops that count now.
    pub fn reclaim(&mut self) -> bool {
        let (before, oldest, durable) = (self.pending.len(), self.oldest_io(), self.durable);
        self.pending.retain(|d| d.lsn > durable || oldest <= d.time);
        self.pending.len() != before
    }

    /// True if a record of queue `q` finds room in the ring and in the process.
    pub fn record_fits(&self, q: u8) -> bool {
        let coming = |on_q: bool| {
            let ops = self.ops.iter().filter(|o| o.state == OpState::HasLsn);
            let own = ops.filter(|o| !on_q || o.record.q == q).count();
            let structure = self.sop.state == StructState::HasLsn;
            own + usize::from(structure && (!on_q || self.sop.record.q == q))
        };
        let limit = self.cfg.ring.min(RING_MAX);
        let room = self.ring.queues[ix(q)].len() + coming(true) < limit;
        (room || self.is(Mutation::OverwriteFull))
            && self.dirty.fits(2 + coming(false))
            && self.pending.fits(10 + coming(false))
    }

    /// Record, then visible (R9): the record goes to the ring and the map changes.
    pub fn publish(&mut self, record: Record) {
        let left_out = match self.mutation {
            Mutation::NoDiscardRecords => record.kind == RecordKind::Unmap,
            Mutation::NoStructureRecords => record.is_structure(),
            _ => false,
        };
        if !left_out {
            let queue = &mut self.ring.queues[ix(record.q)];
            if queue.len() >= self.cfg.ring {
                queue.remove(0);
            }
            queue.push(record);
        }
        self.dirty.push(record);
        self.make_visible(&record, true);
    }

    /// Changes the map; dropped references become pending if `track`.
    pub fn make_visible(&mut self, record: &Record, track: bool) {
        let before = self.map.entries;
        self.map.apply(record, self.cfg.subs);
        let after = self.map.entries;
        if before == after {
            return;
        }
        for (old, new) in before.as_flattened().iter().zip(after.as_flattened()) {
            if old.p == new.p {
                continue;
            }
            if new.p != NONE {
                self.refs[ix(new.p)] += 1;
            }
            if old.p != NONE {
                self.refs[ix(old.p)] -= 1;
                if track {
                    self.pending.push(Pending { p: old.p, lsn: record.lsn, time: self.now });
                }
            }
        }
    }

    /// Checks the invariants of the extents in a pool at rest.
    pub fn check_rest(&mut self) {
        let counted = self.counted();
        self.checks += 1;
        for p in 0..self.cfg.extents {
            if counted[ix(p)] != self.refs[ix(p)] {
                self.fail(FaultKind::Refcount, p, 0, 0);
            }
            let free = self.is_free(p);
            if free && counted[ix(p)] > 0 {
                self.fail(FaultKind::DoubleUse, p, 0, 0);
            }
            if !free && counted[ix(p)] == 0 {
                self.fail(FaultKind::Leak, p, 0, 0);
            }
        }
    }

    /// Reference counts against a recount, and no allocated extent in the map of another volume.
    pub fn check_extents(&mut self) {
        let counted = self.counted();
        for p in 0..self.cfg.extents {
            if counted[ix(p)] != self.refs[ix(p)] {
                self.fail(FaultKind::Refcount, p, 0, 0);
            }
            if self.reserved & (1 << p) != 0 && counted[ix(p)] > 0 {
                self.fail(FaultKind::DoubleUse, p, 0, 0);
            }
        }
    }
}
