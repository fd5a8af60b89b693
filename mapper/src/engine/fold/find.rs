//! The search for composite entries that are to be folded, in bounded steps.

use std::sync::Arc;

use super::{DRAIN_LIMIT_NS, Fold, Stage, is_durable};
use crate::change::Site;
use crate::engine::Engine;
use crate::engine::copy::Copy;
use crate::entry::{Composite, Entry};
use crate::leaf::LEAF_ENTRIES;
use crate::pool::{CHANGE_UNITS, Pool};
use crate::stripe::SlowWrite;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::{OPEN, Volume};

/// Folds under way at a time: enough to overlap their waits for older IO.
const AT_ONCE: usize = 4;
/// Slots examined in one step: some ten microseconds.
const SLOTS_PER_STEP: u32 = 1024;
/// A composite entry that is examined counts as this many slots: it is looked up in the table of
/// slow writes, and with its references.
const SLOTS_PER_ENTRY: u32 = 16;

impl Engine {
    /// Examines entries, and begins folds, as far as there is room and allowance.
    pub(super) fn look_for_folds(&mut self) {
        let mut left = SLOTS_PER_STEP;
        while !self.closing
            && left > 0
            && self.folds.running.len() < AT_ONCE
            && !self.folds.pace.is_spent()
            && !self.folds.pace.is_paused(self.now_ns)
            && let Some((id, slot, entry)) = self.folds.walk
        {
            let volumes = self.pool.volumes.read();
            let next = volumes.range(id..).find(|(_, v)| v.composites.load(Ordering::Relaxed) > 0);
            let Some((&found, volume)) = next else {
                self.folds.walk = None;
                break;
            };
            let volume = Arc::clone(volume);
            drop(volumes);
            let (slot, entry) = if found == id { (slot, entry) } else { (SlotIndex(0), 0) };
            left -= 1;
            self.folds.walk = Some(self.examine(&volume, (slot, entry), &mut left));
        }
        if left == 0 {
            self.pool.want_engine();
        }
    }

    /// Begins folds in a slot, from an entry on, while work is left in this step. Returns the place
    /// to go on at.
    fn examine(
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
        let arena = &self.pool.arena;
        let is_shared = arena.meta(leaf).references.load(Ordering::Acquire) != 1;
        if arena.composites(leaf) == 0 || (is_shared && !self.pool.is_leaving()) {
            return next;
        }
        let is_barred = self.folds.barred.contains(&volume.identity.lineage);
        if is_barred || volume.state.load(Ordering::SeqCst) != OPEN {
            self.folds.put_off(self.later());
            return next;
        }
        for entry in first..LEAF_ENTRIES {
            let is_enough = self.folds.running.len() >= AT_ONCE || self.folds.pace.is_spent();
            if is_enough || *left == 0 {
                return (id, slot, entry);
            }
            let extent = ExtentIndex(slot.first_extent().0 + entry as u64);
            if self.pool.arena.leaf(leaf).is_composite(entry) {
                *left = left.saturating_sub(SLOTS_PER_ENTRY);
                self.begin_fold(volume, extent);
            }
        }
        next
    }

    fn begin_fold(&mut self, volume: &Arc<Volume>, extent: ExtentIndex) {
        let pool = Arc::clone(&self.pool);
        let identity = &volume.identity;
        let directory = volume.directory.load_full();
        let site =
            Site { pool: &pool, volume, directory: &directory, ring_slot: pool.tuning.workers };
        let mut stripe = pool.stripe(identity.lineage, extent.slot()).lock();
        let Entry::Composite(it) = site.entry(extent) else { return };
        let Some((from, to, bits)) = direction(&site, extent, it) else { return };
        let leaf = directory.load(extent.slot()).unwrap_or_default();
        let is_durable = is_durable(&pool, leaf, self.folds.own);
        let is_busy = from == it.overlay && !is_durable
            || stripe.is_full()
            || self.folds.running.iter().any(|fold| fold.overlay == it.overlay)
            || [it.overlay, it.base].iter().any(|one| self.evacuation.moves(*one))
            || stripe.on(identity.id, extent).next().is_some();
        let strict = pool.pages.0.strict.load(Ordering::Relaxed);
        let page_promised = !directory.is_dirty(extent.slot()) || strict;
        // Room for its record from the start. At the end it could be waited for in vain: while a
        // structure change waits for the fold, no checkpoint makes room in the log, which a commit
        // needs to make room in the ring.
        let has_room = !is_busy && pool.ring.reserve(pool.tuning.workers, CHANGE_UNITS);
        if !has_room || (page_promised && !pool.promise_page(true)) {
            if has_room {
                pool.ring.release(pool.tuning.workers, CHANGE_UNITS);
            } else if !is_busy {
                pool.want_commit();
            }
            self.folds.put_off(self.later());
            return;
        }
        pool.hold_uncached(it.overlay);
        if let Some((counts, local)) = pool.counts_of(it.overlay) {
            counts.add(local, 1);
        }
        self.folds.next_token += 1;
        let token = (pool.tuning.workers as u64) << 48 | self.folds.next_token;
        let write = SlowWrite::of_engine(token, (identity.id, extent), (from, to), bits);
        stripe.add(SlowWrite { page_promised, ..write });
        let until = pool.epochs.drain_end();
        drop(stripe);
        let fold = Fold {
            token,
            volume: Arc::clone(volume),
            extent,
            copy: Copy::new(from, to, bits),
            overlay: it.overlay,
            late_ns: self.now_ns.saturating_add(DRAIN_LIMIT_NS << self.folds.doublings),
            bits,
            stage: Stage::Draining(until),
            parity: None,
        };
        self.folds.pace.take(fold.copy.bytes(pool.geometry));
        self.folds.running.push(fold);
        pool.await_epoch(until);
    }
}

/// From where to where a fold of this entry copies, and which sub-blocks; `None` where it may not
/// be folded, or is not worth it. One that has to go is folded up wherever it is shared: no map
/// shows the sub-blocks of an overlay that only the base has.
fn direction(
    site: &Site<'_>,
    extent: ExtentIndex,
    it: Composite,
) -> Option<(PhysicalExtent, PhysicalExtent, u64)> {
    let can_go_down = site.is_exclusive(extent, it.base);
    let can_go_up = site.is_exclusive(extent, it.overlay);
    let (down, up) = (it.top, it.under & !it.top);
    let is_crowded = Entry::Composite(it).is_crowded(site.pool.geometry.sub_blocks());
    if can_go_down && (!can_go_up || down.count_ones() <= up.count_ones()) {
        return Some((it.overlay, it.base, down));
    }
    let is_to_go = site.pool.is_leaving() || (can_go_up && (can_go_down || is_crowded));
    is_to_go.then_some((it.base, it.overlay, up))
}

/// Sub-blocks of a fold's overlay that another volume or snapshot of the family has already: each
/// of them is the same for all that have it, as the fold of one has copied it there. Under the
/// stripe's mutex, which is that of all of them.
pub(super) fn in_overlay(pool: &Pool, fold: &Fold) -> u64 {
    // One reference is that of the fold.
    if pool.extra(fold.overlay) <= 1 {
        return 0;
    }
    let mut found = 0;
    for volume in pool.volumes.read().relatives(fold.volume.identity.lineage) {
        let Some(leaf) = volume.directory.load().load(fold.extent.slot()) else { continue };
        let top = pool.arena.entry(leaf, fold.extent.entry()).top();
        if top.physical == Some(fold.overlay) {
            found |= top.valid;
        }
        if fold.bits & !found == 0 {
            break;
        }
    }
    found
}
