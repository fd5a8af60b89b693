//! The one way a map changes: number it, record it in the delta ring, make it visible (R9).
//!
//! Everything here runs inside the mutation gate and under the stripe's mutex.

use crate::directory::Directory;
use crate::format::record::Change;
use crate::leaf::Leaf;
use crate::mapping::Mapping;
use crate::mutation::{Mutation, Situation, active, met, must_hold};
use crate::pool::{LeafDrop, Pool};
use crate::ring::Dropped;
use crate::stripe::stripe_index;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, LeafId, Lsn, PhysicalExtent, SlotIndex};
use crate::volume::Volume;

/// Leaves that one change may use up: a new or unshared leaf, and a copy for a checkpoint that has
/// not written the leaf yet.
pub(crate) const LEAVES_PER_CHANGE: usize = 2;

/// Leaves a worker or the engine holds ready, so that a completion never has to ask for one.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    leaves: Vec<LeafId>,
}

impl Spares {
    pub(crate) fn with_capacity(leaves: usize) -> Self {
        Self { leaves: Vec::with_capacity(leaves) }
    }

    /// Makes sure `changes` changes can be carried out.
    pub(crate) fn ensure(&mut self, pool: &Pool, changes: usize) -> bool {
        while self.leaves.len() < changes * LEAVES_PER_CHANGE {
            let Some(leaf) = pool.arena.take() else { return false };
            self.leaves.push(leaf);
        }
        true
    }

    fn pop(&mut self, pool: &Pool) -> LeafId {
        // `ensure` went before; the arena is the last resort and the id 0 leaf is never used.
        self.leaves.pop().or_else(|| pool.arena.take()).unwrap_or_default()
    }

    pub(crate) fn give_all_back(&mut self, pool: &Pool) {
        for leaf in self.leaves.drain(..) {
            pool.arena.give_back(leaf);
        }
    }
}

/// Where a change is made.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) volume: &'a Volume,
    pub(crate) directory: &'a Directory,
    /// The ring slot of the thread that makes the change; room for a record was reserved there.
    pub(crate) ring_slot: usize,
}

impl Site<'_> {
    /// The present mapping of an extent.
    pub(crate) fn mapping(&self, extent: ExtentIndex) -> Mapping {
        self.directory
            .load(extent.slot())
            .map_or(Mapping::UNMAPPED, |leaf| self.pool.arena.leaf(leaf).load(extent.entry()))
    }

    /// Whether only this volume refers to an extent that it maps (R10: a dropped reference counts
    /// until it is durable and drained).
    pub(crate) fn is_exclusive(&self, extent: ExtentIndex, physical: PhysicalExtent) -> bool {
        self.directory.load(extent.slot()).is_some_and(|leaf| {
            self.pool.arena.meta(leaf).references.load(Ordering::Acquire) == 1
                && self.pool.extra(physical) == 0
        })
    }

    /// Changes one entry: takes an LSN by `take`, records, then shows it.
    pub(crate) fn set(
        &self,
        spares: &mut Spares,
        take: impl FnOnce() -> Lsn,
        extent: ExtentIndex,
        old: Mapping,
        new: Mapping,
    ) {
        let id = self.writable_leaf(spares, extent.slot());
        let dropped = self.dropped(old, new);
        let lsn = take();
        let volume = self.volume.identity.id;
        let change = match new.physical {
            Some(physical) => Change::Map { volume, extent, physical, valid: new.valid },
            None => Change::Unmap { volume, extent },
        };
        self.publish(lsn, &change, dropped, old, new);
        self.show(id, lsn, extent, old, new);
    }

    /// Changes one entry as part of a structure change, whose record describes the whole change.
    /// Returns the dropped reference.
    pub(crate) fn set_unrecorded(
        &self,
        spares: &mut Spares,
        lsn: Lsn,
        extent: ExtentIndex,
        old: Mapping,
        new: Mapping,
    ) -> Option<PhysicalExtent> {
        let id = self.writable_leaf(spares, extent.slot());
        self.show(id, lsn, extent, old, new);
        old.physical.filter(|_| old.physical != new.physical)
    }

    fn show(&self, id: LeafId, lsn: Lsn, extent: ExtentIndex, old: Mapping, new: Mapping) {
        let meta = self.pool.arena.meta(id);
        let leaf = self.pool.arena.leaf(id);
        let entry = extent.entry();
        // Before the entry: a thread that sees the change must not take its LSN for durable (R7).
        meta.last_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        if old.physical == new.physical && old.valid & !new.valid == 0 {
            leaf.grow(entry, new.valid);
        } else {
            if old.physical == new.physical {
                self.volume.cleared_lsn.fetch_max(lsn.0, Ordering::AcqRel);
            }
            leaf.replace(entry, new);
        }
        meta.clean.store(false, Ordering::Relaxed);
        self.count(old, new, meta);
        self.mark_dirty(extent.slot());
        if meta.mapped.load(Ordering::Relaxed) == 0 {
            // An empty leaf says no more than no leaf. Lookups may still be on it.
            met(Situation::LeafEmptied);
            self.directory.store(extent.slot(), None);
            self.drop_leaf(id, extent.slot());
        }
    }

    /// Takes a whole slot out of the map with one record. Its leaf is dropped with the record.
    pub(crate) fn unmap_slot(&self, take: impl FnOnce() -> Lsn, slot: SlotIndex, leaf: LeafId) {
        met(Situation::SlotDropped);
        let (mapped, valid) = totals(self.pool.arena.leaf(leaf));
        let lsn = take();
        let change = Change::UnmapLeaf { volume: self.volume.identity.id, slot };
        if active(Mutation::NoDiscardRecord) || active(Mutation::NoRecord) {
            self.pool.ring.release(self.ring_slot, 1);
            self.drop_leaf(leaf, slot);
        } else {
            self.pool.publish(self.ring_slot, lsn, &change, Dropped::Leaf(leaf));
        }
        self.directory.store(slot, None);
        self.volume.mapped.fetch_sub(mapped, Ordering::Relaxed);
        self.volume.valid.fetch_sub(valid, Ordering::Relaxed);
        self.mark_dirty(slot);
    }

    fn publish(&self, lsn: Lsn, change: &Change, dropped: Dropped, old: Mapping, new: Mapping) {
        let discard = old.valid & !new.valid != 0;
        let unrecorded = active(Mutation::NoRecord)
            || (discard && active(Mutation::NoDiscardRecord) && old.physical == new.physical);
        if unrecorded {
            self.pool.ring.release(self.ring_slot, 1);
            return;
        }
        self.pool.publish(self.ring_slot, lsn, change, dropped);
        if self.pool.ring.half_full(self.ring_slot) {
            self.pool.want_commit();
        } else if !self.pool.wake.0.dirty_noted.load(Ordering::Relaxed) {
            // The engine starts the timer; once it has, it needs no word of every change.
            self.pool.want_engine();
        }
    }

    /// Returns the reference that the change drops. The engine drops the reference once that is
    /// durable and drained (R4, R10).
    fn dropped(&self, old: Mapping, new: Mapping) -> Dropped {
        let Some(physical) = old.physical else { return Dropped::Nothing };
        if new.physical == Some(physical) {
            return Dropped::Nothing;
        }
        if active(Mutation::ReuseAtOnce) && self.pool.extra(physical) == 0 {
            self.pool.free_space.lock().free(physical, 1);
            return Dropped::Nothing;
        }
        if active(Mutation::DecrementAtOnce)
            && let Some((counts, local)) = self.pool.counts_of(physical)
            && counts.extra(local) > 0
        {
            counts.sub(local);
            return Dropped::Nothing;
        }
        Dropped::Extent(physical)
    }

    fn count(&self, old: Mapping, new: Mapping, meta: &crate::arena::LeafMeta) {
        match (old.physical, new.physical) {
            (None, Some(_)) => {
                meta.mapped.fetch_add(1, Ordering::Relaxed);
                self.volume.mapped.fetch_add(1, Ordering::Relaxed);
            }
            (Some(_), None) => {
                meta.mapped.fetch_sub(1, Ordering::Relaxed);
                self.volume.mapped.fetch_sub(1, Ordering::Relaxed);
            }
            _ => {}
        }
        let (before, after) = (old.valid.count_ones(), new.valid.count_ones());
        if after > before {
            self.volume.valid.fetch_add(u64::from(after - before), Ordering::Relaxed);
        } else {
            self.volume.valid.fetch_sub(u64::from(before - after), Ordering::Relaxed);
        }
    }

    pub(crate) fn mark_dirty(&self, slot: SlotIndex) {
        if self.directory.mark_dirty(slot) {
            self.pool.note_dirty(self.volume);
        }
    }

    /// The leaf of a slot, made writable: there, unshared, and captured if a checkpoint under way
    /// has not written it yet.
    fn writable_leaf(&self, spares: &mut Spares, slot: SlotIndex) -> LeafId {
        let Some(id) = self.directory.load(slot) else {
            let id = spares.pop(self.pool);
            self.pool.arena.meta(id).references.store(1, Ordering::Release);
            self.directory.store(slot, Some(id));
            return id;
        };
        let meta = self.pool.arena.meta(id);
        if meta.references.load(Ordering::Acquire) > 1 {
            return self.unshare(spares, slot, id);
        }
        if meta.capture_pending.load(Ordering::Relaxed) {
            if !active(Mutation::FuzzyCheckpoint) {
                met(Situation::LeafCopied);
                let shadow = spares.pop(self.pool);
                self.pool.arena.leaf(shadow).copy_from(self.pool.arena.leaf(id));
                self.pool.shadows.lock().push((id, shadow));
            }
            if !active(Mutation::FuzzyCheckpoint) {
                meta.capture_pending.store(false, Ordering::Relaxed);
            }
        }
        id
    }

    /// Gives the volume its own copy of a shared leaf: this is when sharing reaches the extents.
    fn unshare(&self, spares: &mut Spares, slot: SlotIndex, shared: LeafId) -> LeafId {
        met(Situation::LeafUnshared);
        let own = spares.pop(self.pool);
        let from = self.pool.arena.leaf(shared);
        self.pool.arena.leaf(own).copy_from(from);
        for entry in 0..crate::leaf::LEAF_ENTRIES {
            if let Some(physical) = from.load(entry).physical
                && let Some((counts, local)) = self.pool.counts_of(physical)
            {
                counts.add(local, 1);
            }
        }
        let (old, new) = (self.pool.arena.meta(shared), self.pool.arena.meta(own));
        new.references.store(1, Ordering::Release);
        new.mapped.store(old.mapped.load(Ordering::Relaxed), Ordering::Relaxed);
        if !active(Mutation::LsnNotCarried) {
            new.last_lsn.store(old.last_lsn.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        new.clean.store(false, Ordering::Relaxed);
        self.directory.store(slot, Some(own));
        // R7: a FUA write that looks the new leaf up before the change's own LSN is on it.
        must_hold(
            new.last_lsn.load(Ordering::Relaxed) >= old.last_lsn.load(Ordering::Relaxed),
            "a leaf that stops being shared keeps its last LSN",
        );
        // Lookups of this volume may still be on the shared leaf: its last owner must not change it
        // before they have ended.
        self.drop_leaf(shared, slot);
        own
    }

    fn drop_leaf(&self, leaf: LeafId, slot: SlotIndex) {
        let stripe = stripe_index(self.volume.identity.lineage, slot);
        let tag = self.pool.epochs.current();
        self.pool.leaf_drops.lock().push(LeafDrop { leaf, stripe, tag });
        self.pool.want_engine();
    }
}

/// Mapped extents and valid sub-blocks of a leaf.
pub(crate) fn totals(leaf: &Leaf) -> (u64, u64) {
    (0..crate::leaf::LEAF_ENTRIES).map(|entry| leaf.load(entry)).fold(
        (0, 0),
        |(mapped, valid), m| {
            (mapped + u64::from(m.is_mapped()), valid + u64::from(m.valid.count_ones()))
        },
    )
}
