//! The one way a map changes: number it, record it in the delta ring, make it visible (R9).
//!
//! Everything here runs inside the mutation gate and under the stripe's mutex.

use crate::arena::Arena;
use crate::directory::Directory;
use crate::entry::{Composite, Entry};
use crate::format::record::Change;
use crate::mutation::{Mutation, Situation, active, met, must_hold};
use crate::pool::{LeafDrop, Pool};
use crate::ring::Dropped;
use crate::stripe::stripe_index;
use crate::sync::{AtomicU64, Ordering};
use crate::units::{ExtentIndex, LeafId, Lsn, PhysicalExtent, SlotIndex};
use crate::volume::{Totals, Volume};

/// Leaves that one change may use up: a new, unshared or copied leaf (for a checkpoint that has not
/// written it yet), and its under leaf.
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
    /// The present entry of an extent.
    pub(crate) fn entry(&self, extent: ExtentIndex) -> Entry {
        self.directory
            .load(extent.slot())
            .map_or(Entry::Unmapped, |leaf| self.pool.arena.entry(leaf, extent.entry()))
    }

    /// Whether only this volume refers to an extent that it maps (R10: a dropped reference counts
    /// until it is durable and drained).
    pub(crate) fn is_exclusive(&self, extent: ExtentIndex, physical: PhysicalExtent) -> bool {
        self.directory.load(extent.slot()).is_some_and(|leaf| {
            self.pool.arena.meta(leaf).references.load(Ordering::Acquire) == 1
                && self.pool.extra(physical) == 0
        })
    }

    /// Changes one entry: takes an LSN by `take`, records, then shows it. Uses the ring's room that
    /// was reserved for it, or releases what it does not need of that.
    pub(crate) fn set(
        &self,
        spares: &mut Spares,
        take: impl FnOnce() -> Lsn,
        extent: ExtentIndex,
        (old, new): (Entry, Entry),
        reserved: u64,
    ) {
        let id = self.writable_leaf(spares, extent.slot());
        let dropped = self.dropped(old, new);
        let lsn = take();
        let volume = self.volume.identity.id;
        note(old, new);
        let change = match new {
            Entry::Mapped { physical, valid } => Change::Map { volume, extent, physical, valid },
            Entry::Unmapped => Change::Unmap { volume, extent },
            Entry::Composite(Composite { overlay, top, base, under }) => {
                Change::Composite { volume, extent, overlay, top, base, under }
            }
        };
        self.publish(lsn, &change, dropped, (old, new), reserved);
        self.show(spares, id, lsn, extent, (old, new));
    }

    /// Changes one entry as part of a structure change, whose record describes the whole change.
    /// Returns the dropped references.
    pub(crate) fn set_unrecorded(
        &self,
        spares: &mut Spares,
        lsn: Lsn,
        extent: ExtentIndex,
        old: Entry,
        new: Entry,
    ) -> impl Iterator<Item = PhysicalExtent> + use<> {
        let id = self.writable_leaf(spares, extent.slot());
        self.show(spares, id, lsn, extent, (old, new));
        old.without(&new)
    }

    fn show(
        &self,
        spares: &mut Spares,
        id: LeafId,
        lsn: Lsn,
        extent: ExtentIndex,
        (old, new): (Entry, Entry),
    ) {
        let arena = &self.pool.arena;
        let meta = arena.meta(id);
        let (was, is) = (old.top(), new.top());
        // Before the entry: a thread that sees the change must not take its LSN for durable (R7).
        meta.last_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        let cleared = was.valid & !is.valid != 0;
        // In the base too: a fold may make that the extent that writes go to.
        if was.physical == is.physical && old.valid() & !new.valid() != 0 {
            self.volume.cleared_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        }
        if was.physical == is.physical && old.base() == new.base() && !cleared {
            arena.leaf(id).grow(extent.entry(), is.valid);
        } else {
            if old.is_composite() || new.is_composite() {
                self.replace_composite(spares, id, extent, (old, new));
            } else {
                arena.leaf(id).replace(extent.entry(), is);
            }
        }
        meta.clean.store(false, Ordering::Relaxed);
        self.count(old, new, id);
        self.mark_dirty(extent.slot());
        if meta.mapped.load(Ordering::Relaxed) == 0 {
            // An empty leaf says no more than no leaf. Lookups may still be on it.
            met(Situation::LeafEmptied);
            self.directory.store(extent.slot(), None);
            self.drop_leaf(id, extent.slot());
        }
    }

    /// Replaces an entry of which one side, or both, is composite.
    #[cold]
    fn replace_composite(
        &self,
        spares: &mut Spares,
        id: LeafId,
        extent: ExtentIndex,
        (old, new): (Entry, Entry),
    ) {
        let arena = &self.pool.arena;
        let under = self.under(spares, id, new);
        let leaf = under.map(|under| arena.leaf(under));
        arena.leaf(id).replace_entry(extent.entry(), new, leaf);
        if let Some(under) = under
            && old.base() != new.base()
        {
            arena.meta(under).clean.store(false, Ordering::Relaxed);
        }
    }

    /// The under leaf of a leaf; one is added for its first composite entry.
    fn under(&self, spares: &mut Spares, id: LeafId, new: Entry) -> Option<LeafId> {
        let present = self.pool.arena.under(id);
        if present.is_some() || new.base().physical.is_none() {
            return present;
        }
        let under = spares.pop(self.pool);
        self.pool.arena.meta(id).under.store(under.0, Ordering::Release);
        Some(under)
    }

    /// Takes a whole slot out of the map with one record. Its leaf is dropped with the record. Uses
    /// the reserved room as [`Self::set`] does.
    pub(crate) fn unmap_slot(
        &self,
        take: impl FnOnce() -> Lsn,
        slot: SlotIndex,
        leaf: LeafId,
        reserved: u64,
    ) {
        met(Situation::SlotDropped);
        let totals = totals(&self.pool.arena, leaf);
        let lsn = take();
        let change = Change::UnmapLeaf { volume: self.volume.identity.id, slot };
        if active(Mutation::NoDiscardRecord) || active(Mutation::NoRecord) {
            self.pool.ring.release(self.ring_slot, reserved);
            self.drop_leaf(leaf, slot);
        } else {
            self.pool.publish(self.ring_slot, lsn, &change, Dropped::Leaf(leaf));
            self.pool.ring.release(self.ring_slot, reserved - change.units() as u64);
        }
        self.directory.store(slot, None);
        self.volume.count_less(totals);
        self.mark_dirty(slot);
    }

    fn publish(
        &self,
        lsn: Lsn,
        change: &Change,
        dropped: Dropped,
        (old, new): (Entry, Entry),
        reserved: u64,
    ) {
        let discard = old.valid() & !new.valid() != 0;
        let same = old.top().physical == new.top().physical;
        let unrecorded =
            active(Mutation::NoRecord) || (discard && active(Mutation::NoDiscardRecord) && same);
        if unrecorded {
            self.pool.ring.release(self.ring_slot, reserved);
            return;
        }
        if dropped != Dropped::Nothing {
            // The volume's next writes may have what it has dropped itself.
            self.volume.drop_wait.end();
        }
        self.pool.publish(self.ring_slot, lsn, change, dropped);
        let left = reserved - change.units() as u64;
        if left > 0 {
            self.pool.ring.release(self.ring_slot, left);
        }
        if self.pool.ring.half_full(self.ring_slot) {
            self.pool.want_commit();
        } else if !self.pool.wake.0.dirty_noted.load(Ordering::Relaxed) {
            // The engine starts the timer; once it has, it needs no word of every change.
            self.pool.want_engine();
        }
    }

    /// Returns the reference that the change drops. The engine drops the reference once that is
    /// durable and drained (R4, R10).
    fn dropped(&self, old: Entry, new: Entry) -> Dropped {
        if !old.is_mapped() || (old.top().physical == new.top().physical && !old.is_composite()) {
            return Dropped::Nothing;
        }
        let mut gone = old.without(&new);
        let Some(physical) = gone.next() else { return Dropped::Nothing };
        must_hold(gone.next().is_none(), "a change drops one reference at the most (K8)");
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

    fn count(&self, old: Entry, new: Entry, id: LeafId) {
        let meta = self.pool.arena.meta(id);
        match (old.is_mapped(), new.is_mapped()) {
            (false, true) => {
                meta.mapped.fetch_add(1, Ordering::Relaxed);
                self.volume.mapped.fetch_add(1, Ordering::Relaxed);
            }
            (true, false) => {
                meta.mapped.fetch_sub(1, Ordering::Relaxed);
                self.volume.mapped.fetch_sub(1, Ordering::Relaxed);
            }
            _ => {}
        }
        let (before, after) = (old.valid().count_ones(), new.valid().count_ones());
        if after > before {
            self.volume.valid.fetch_add(u64::from(after - before), Ordering::Relaxed);
        } else {
            self.volume.valid.fetch_sub(u64::from(before - after), Ordering::Relaxed);
        }
        if old.is_composite() != new.is_composite() {
            self.count_base(new.is_composite(), id);
        }
    }

    /// Counts the base of an entry that has become composite, or is it no longer.
    #[cold]
    fn count_base(&self, is_there: bool, id: LeafId) {
        let bases = self.pool.arena.under(id).map(|under| &self.pool.arena.meta(under).mapped);
        let change = |count: &AtomicU64| match is_there {
            true => count.fetch_add(1, Ordering::Relaxed),
            false => count.fetch_sub(1, Ordering::Relaxed),
        };
        change(&self.volume.mapped);
        change(&self.volume.composites);
        match (bases, is_there) {
            (Some(bases), true) => drop(bases.fetch_add(1, Ordering::Relaxed)),
            (Some(bases), false) => drop(bases.fetch_sub(1, Ordering::Relaxed)),
            (None, _) => {}
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
        if meta.capture_pending.load(Ordering::Relaxed) && !active(Mutation::FuzzyCheckpoint) {
            met(Situation::LeafCopied);
            let shadow = self.copy_of(spares, id);
            self.share_page(id, shadow);
            self.pool.shadows.lock().push((id, shadow));
            meta.capture_pending.store(false, Ordering::Relaxed);
        }
        id
    }

    /// A copy for a checkpoint has the page of its under leaf too, which may hold it already.
    fn share_page(&self, id: LeafId, shadow: LeafId) {
        let arena = &self.pool.arena;
        if let (Some(under), Some(copy)) = (arena.under(id), arena.under(shadow)) {
            let (from, to) = (arena.meta(under), arena.meta(copy));
            to.page.store(from.page.load(Ordering::Relaxed), Ordering::Relaxed);
            to.page_sum.store(from.page_sum.load(Ordering::Relaxed), Ordering::Relaxed);
            to.clean.store(from.clean.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// A copy of a leaf and of its under leaf.
    fn copy_of(&self, spares: &mut Spares, id: LeafId) -> LeafId {
        let arena = &self.pool.arena;
        let copy = spares.pop(self.pool);
        arena.leaf(copy).copy_from(arena.leaf(id));
        if let Some(under) = arena.under(id).filter(|_| arena.composites(id) > 0) {
            let own = spares.pop(self.pool);
            arena.leaf(own).copy_from(arena.leaf(under));
            let (from, to) = (arena.meta(under), arena.meta(own));
            to.mapped.store(from.mapped.load(Ordering::Relaxed), Ordering::Relaxed);
            arena.meta(copy).under.store(own.0, Ordering::Release);
        }
        copy
    }

    /// Adds a reference to each extent of a leaf. Most lie in rows, as they were allocated.
    fn share_extents(&self, leaf: LeafId) {
        let add = |(first, count)| {
            if let Some((counts, local)) = self.pool.counts_of(first) {
                counts.add_to_each(local, count);
            }
        };
        let mut row = (PhysicalExtent(0), 0);
        for extent in self.pool.arena.entries(leaf).flat_map(|entry| entry.extents()) {
            if extent.0 == row.0.0 + row.1 {
                row.1 += 1;
            } else {
                add(std::mem::replace(&mut row, (extent, 1)));
            }
        }
        add(row);
    }

    /// Gives the volume its own copy of a shared leaf: this is when sharing reaches the extents.
    fn unshare(&self, spares: &mut Spares, slot: SlotIndex, shared: LeafId) -> LeafId {
        met(Situation::LeafUnshared);
        let own = self.copy_of(spares, shared);
        self.share_extents(shared);
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

/// Counts the changes of composite entries.
fn note(old: Entry, new: Entry) {
    let same_top = old.top().physical == new.top().physical;
    match (old.base().is_mapped(), new.base().is_mapped()) {
        (false, true) => met(Situation::Redirected),
        (true, false) if old.valid() & !new.valid() != 0 => met(Situation::BaseDropped),
        (true, true) if !same_top => met(Situation::OverlayCopied),
        (true, true) if new.top().valid & !old.top().valid != 0 => met(Situation::OverlayGrew),
        _ => {}
    }
}

/// Counts the entries of a leaf.
pub(crate) fn totals(arena: &Arena, leaf: LeafId) -> Totals {
    arena.entries(leaf).fold(Totals::default(), |sum, entry| Totals {
        mapped: sum.mapped + entry.extents().count() as u64,
        valid: sum.valid + u64::from(entry.valid().count_ones()),
        composite: sum.composite + u64::from(entry.base().is_mapped()),
    })
}

/// Counts the entries of a directory's leaves.
pub(crate) fn totals_of(arena: &Arena, directory: &Directory) -> Totals {
    directory.iter().map(|(_, leaf)| totals(arena, leaf)).fold(Totals::default(), |a, b| Totals {
        mapped: a.mapped + b.mapped,
        valid: a.valid + b.valid,
        composite: a.composite + b.composite,
    })
}
