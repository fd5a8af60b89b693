//! Extents: allocation, references, and when a dropped one counts (R4, R10); publishing a record.

use super::log::RING_MAX;
use super::map::{NONE, Record, RecordKind};
use super::mutation::Mutation;
use super::oracle::{Fault, FaultKind};
use super::parts::{CommitState, Op, OpState, Pending, StructState};
use super::state::{PHYS, World, ix};
use super::step::Kind;

impl World {
    /// Records a violation; the first one counts.
    pub fn fail(&mut self, kind: FaultKind, at: u8, cell: usize, found: u16) {
        if self.fault.is_none() {
            self.fault = Some(Fault { kind, at, cell, found });
        }
    }

    fn oldest_io(&self) -> u16 {
        let active = |o: &&Op| match o.state {
            OpState::CopyRead | OpState::Write => true,
            // K4: a read of a base holds it like any other.
            OpState::Look => !self.is(Mutation::BaseReadUncounted),
            OpState::Read => o.base == NONE || !self.is(Mutation::BaseReadUncounted),
            _ => false,
        };
        self.ops.iter().filter(active).map(|o| o.start).min().unwrap_or(u16::MAX)
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

    /// Takes a free extent for an overlay (K1).
    pub fn allocate_overlay(&mut self) -> Option<u8> {
        if !self.is(Mutation::RedirectPendingTarget) {
            return self.allocate();
        }
        let unused = |p: &u8| self.refs[ix(*p)] == 0 && self.reserved & (1 << *p) == 0;
        let p = (0..self.cfg.extents).find(unused)?;
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
        let units = |o: &Op| o.record.units();
        let coming = |on_q: bool| {
            let ops = self.ops.iter().filter(|o| o.state == OpState::HasLsn);
            let own: usize = ops.filter(|o| !on_q || o.record.q == q).map(units).sum();
            let structure = self.sop.state == StructState::HasLsn;
            own + usize::from(structure && (!on_q || self.sop.record.q == q))
        };
        let limit = self.cfg.ring.min(RING_MAX);
        // The outcome may be composite.
        let most = 1 + usize::from(self.cfg.composite);
        let room = self.ring_units(q) + coming(true) + most <= limit;
        (room || self.is(Mutation::OverwriteFull))
            && self.dirty.fits(2 + coming(false))
            && self.pending.fits(10 + coming(false))
    }

    fn ring_units(&self, q: u8) -> usize {
        self.ring.queues[ix(q)].all().iter().map(Record::units).sum()
    }

    /// Record, then visible (R9): the record goes to the ring and the map changes.
    pub fn publish(&mut self, record: Record) {
        self.record(record);
        self.make_visible(&record, true);
    }

    /// The record goes to the ring.
    pub fn record(&mut self, record: Record) {
        let left_out = match self.mutation {
            Mutation::NoDiscardRecords => record.kind == RecordKind::Unmap,
            Mutation::NoStructureRecords => record.is_structure(),
            _ => false,
        };
        if !left_out {
            while self.ring_units(record.q) + record.units() > self.cfg.ring.min(RING_MAX) {
                self.ring.queues[ix(record.q)].remove(0);
            }
            self.ring.queues[ix(record.q)].push(record);
        }
        self.dirty.push(record);
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
            if (old.p, old.base) == (new.p, new.base) {
                continue;
            }
            for p in new.extents().filter(|p| !old.names(*p)) {
                self.refs[ix(p)] += 1;
            }
            let mut dropped = old.extents().filter(|p| !new.names(*p));
            while let Some(p) = dropped.next() {
                self.refs[ix(p)] -= 1;
                if track {
                    self.pending.push(Pending { p, lsn: record.lsn, time: self.now });
                }
                // A map record has one place for an extent that it drops (K8).
                if !record.is_structure()
                    && let Some(p) = dropped.next()
                {
                    self.refs[ix(p)] -= 1;
                }
            }
        }
    }

    /// Counts an event of a composite entry.
    pub fn tally(&mut self, kind: Kind, happened: bool) {
        self.tally[kind as usize] += u16::from(happened);
    }

    // An extent is in one place of one family, and once in each of its volumes.
    fn check_names(&mut self) {
        let mut places = [(NONE, NONE); PHYS];
        for v in 0..self.next_volume {
            let mut named = 0_u8;
            for e in 0..self.cfg.vol_extents {
                for p in self.map.entry(v, e).extents() {
                    let place = (self.root[ix(v)], e);
                    let elsewhere = places[ix(p)].0 != NONE && places[ix(p)] != place;
                    if named & (1 << p) != 0 || elsewhere {
                        self.fail(FaultKind::Aliased, p, ix(v), u16::from(e));
                    }
                    named |= 1 << p;
                    places[ix(p)] = place;
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
        self.check_names();
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
