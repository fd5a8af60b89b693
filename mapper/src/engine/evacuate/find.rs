//! The search for extents that are to be moved, in bounded steps.

use std::sync::Arc;

use super::moving::MOST_HOLDERS;
use crate::engine::Engine;
use crate::leaf::LEAF_ENTRIES;
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::split;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, LeafId, PageAddress, SlotIndex, VolumeId};
use crate::volume::{OPEN, Volume};
use crate::volumes::Volumes;

/// Moves under way at a time: enough to overlap their waits for older IO.
const AT_ONCE: usize = 4;
/// Slots examined in one step: some ten microseconds.
const SLOTS_PER_STEP: u32 = 1024;
/// A leaf counts as this many slots: each of its entries is read.
const SLOTS_PER_LEAF: u32 = 32;

impl Engine {
    /// Examines entries, and begins moves, as far as there is room and allowance.
    pub(super) fn walk_leaving(&mut self) {
        if self.evacuation.is_full || self.rebalance.is_done() {
            if self.evacuation.running.is_empty() {
                self.end_walk();
            }
            return;
        }
        let mut left = SLOTS_PER_STEP;
        while left > 0
            && self.moves_may_begin()
            && let Some((id, slot, entry)) = self.evacuation.walk
        {
            let volumes = self.pool.volumes.read();
            let Some((&found, volume)) = volumes.range(id..).next() else {
                drop(volumes);
                if self.evacuation.running.is_empty() {
                    self.end_walk();
                }
                return;
            };
            let volume = Arc::clone(volume);
            drop(volumes);
            let (slot, entry) = if found == id { (slot, entry) } else { (SlotIndex(0), 0) };
            left -= 1;
            self.evacuation.walk = Some(self.examine_leaving(&volume, (slot, entry), &mut left));
        }
        if left == 0 || self.evacuation.is_full || self.rebalance.is_done() {
            self.pool.want_engine();
        }
    }

    fn moves_may_begin(&self) -> bool {
        let evacuation = &self.evacuation;
        evacuation.running.len() < AT_ONCE
            && evacuation.rate > 0
            && !evacuation.is_full
            && !self.rebalance.is_done()
            && !evacuation.pace.is_spent()
            && !evacuation.pace.is_paused(self.now_ns)
    }

    /// Begins moves in a slot, from an entry on. Returns the place to continue at.
    fn examine_leaving(
        &mut self,
        volume: &Arc<Volume>,
        (slot, first): (SlotIndex, usize),
        left: &mut u32,
    ) -> (VolumeId, SlotIndex, usize) {
        let id = volume.identity.id;
        let directory = volume.directory.load_full();
        if slot.0 >= directory.slot_count() {
            return (VolumeId(id.0.saturating_add(1)), SlotIndex(0), 0);
        }
        let next = (id, SlotIndex(slot.0 + 1), 0);
        let Some(leaf) = directory.load(slot) else { return next };
        *left = left.saturating_sub(SLOTS_PER_LEAF);
        if first == 0 {
            self.move_leaf_pages(volume, slot, leaf);
        }
        // A structure change is on its way: the next walk finds it.
        if volume.state.load(Ordering::SeqCst) != OPEN {
            return next;
        }
        let is_leaving = self.evacuation.leaving.is_some();
        let holders = self.pool.arena.meta(leaf).references.load(Ordering::Relaxed) as usize;
        if !is_leaving && holders > MOST_HOLDERS {
            return next;
        }
        // Whether an extent is to be moved is seen in the leaves of all relatives.
        let family = self.pool.volumes.read().family(volume.identity.lineage);
        let looks = if is_leaving { 0 } else { u32::try_from(family).unwrap_or(u32::MAX) };
        let home = self.pinned_to(volume);
        for entry in first..LEAF_ENTRIES {
            if entry > first && *left == 0 {
                return (id, slot, entry);
            }
            let extent = ExtentIndex(slot.first_extent().0 + entry as u64);
            let pool = Arc::clone(&self.pool);
            for physical in pool.arena.entry(leaf, entry).extents() {
                let is_at_home = home == Some(split(physical).0);
                let evens_out = !is_at_home && self.rebalance.moves_off(physical);
                let has_many = || pool.extra(physical) as usize >= MOST_HOLDERS;
                if !self.evacuation.is_leaving(physical) && (!evens_out || has_many()) {
                    continue;
                }
                if evens_out && !self.has_room_to_even_out() {
                    self.evacuation.wait_for_space();
                    return (id, slot, entry);
                }
                if !self.moves_may_begin() {
                    return (id, slot, entry);
                }
                self.begin_move(volume, extent, physical);
                *left = left.saturating_sub(looks);
            }
        }
        next
    }

    /// Has the next checkpoint write a leaf's pages, for all that share it, if one of them lies on
    /// such an extent. None of the holders may keep the reference to the old page (M7).
    fn move_leaf_pages(&mut self, volume: &Volume, slot: SlotIndex, leaf: LeafId) {
        let pool = Arc::clone(&self.pool);
        let lies_on_it = |id: &LeafId| {
            let page = PageAddress(pool.arena.meta(*id).page.load(Ordering::Relaxed));
            page.0 != 0 && self.evacuation.is_leaving(pool.geometry.page_place(page).0)
        };
        let under = pool.arena.under(leaf).filter(lies_on_it);
        if !lies_on_it(&leaf) && under.is_none() {
            return;
        }
        let meta = pool.arena.meta(leaf);
        // A running checkpoint has its own list, and a changed leaf is on the next one.
        let is_to_do = meta.clean.load(Ordering::Relaxed)
            || under.is_some_and(|id| pool.arena.meta(id).clean.load(Ordering::Relaxed));
        if self.checkpoint.is_running() || !is_to_do {
            self.evacuation.pages_moved = true;
            return;
        }
        let count = holders(&pool.volumes.read(), volume, slot, leaf).count() as u64;
        if self.make_pages(count) {
            self.mark_leaf(volume, slot, leaf);
            self.evacuation.pages_moved = true;
        } else {
            self.evacuation.wait_for_space();
        }
        self.update_limits();
    }

    /// Marks a leaf as changed for all volumes and snapshots that share it, if there is a page for
    /// each of them.
    fn mark_leaf(&self, volume: &Volume, slot: SlotIndex, leaf: LeafId) {
        let pool = &self.pool;
        let volumes = pool.volumes.read();
        let _gate = pool.gate.enter(pool.tuning.workers);
        let _stripe = pool.stripe(volume.identity.lineage, slot).lock();
        let is_one_of = |one: &&Arc<Volume>| {
            !active(Mutation::PageMovedForOne) || one.identity.id == volume.identity.id
        };
        let clean = holders(&volumes, volume, slot, leaf).filter(is_one_of);
        let clean: Vec<_> = clean.filter(|one| !one.directory.load().is_dirty(slot)).collect();
        let promised = clean.iter().take_while(|_| pool.promise_page(true)).count();
        if promised == clean.len() {
            for one in &clean {
                if one.directory.load().mark_dirty(slot) {
                    pool.note_dirty(one);
                }
            }
            let parts = [Some(leaf), pool.arena.under(leaf)];
            for part in parts.into_iter().flatten() {
                pool.arena.meta(part).clean.store(false, Ordering::Relaxed);
            }
            met(Situation::LeafPageMoved);
        }
        (0..promised).for_each(|_| pool.return_page());
    }

    /// Has the next checkpoint write all pages of indexes, labels and the catalogue that lie in
    /// leaving extents.
    pub(super) fn move_index_pages(&mut self) {
        let (geometry, Some(leaving)) = (self.pool.geometry, self.evacuation.leaving) else {
            return;
        };
        let lies_on_it =
            |address: PageAddress| address.0 != 0 && leaving.holds(geometry.page_place(address).0);
        let pages = self.trees.count_pages(lies_on_it);
        // Each with those above it.
        let needed = (pages * self.levels()).min(self.trees.most_pages());
        // Not once more while a checkpoint is to write those of a walk before.
        if pages > 0 && self.new_tree_pages == 0 {
            self.new_tree_pages = needed;
            if self.make_pages(0) {
                self.trees.rewrite(lies_on_it);
                self.evacuation.pages_moved = true;
                met(Situation::IndexPageMoved);
            } else {
                self.new_tree_pages = 0;
                self.evacuation.wait_for_space();
            }
            self.update_limits();
        }
        self.evacuation.pages_moved |= self.catalogue.rewrite(lies_on_it);
        match self.move_labels(lies_on_it) {
            Some(moved) => self.evacuation.pages_moved |= moved,
            None => self.evacuation.wait_for_space(),
        }
    }
}

/// The volumes and snapshots of a family that have this leaf in a slot.
fn holders<'a>(
    volumes: &'a Volumes,
    volume: &Volume,
    slot: SlotIndex,
    leaf: LeafId,
) -> impl Iterator<Item = &'a Arc<Volume>> {
    let holds = move |one: &&Arc<Volume>| one.directory.load().load(slot) == Some(leaf);
    volumes.relatives(volume.identity.lineage).filter(holds)
}
