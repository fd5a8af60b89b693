//! Grants of extents to volumes, of pages to dirty leaves, of leaves to everybody.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::mutation::{Situation, met};
use crate::sync::Ordering;
use crate::units::VolumeId;
use crate::volume::Volume;

use super::Engine;

/// Metadata extents added in one go; more follow at the next poll if they are needed.
const EXTENTS_PER_STEP: u32 = 16;

/// Slots beyond those dirty now that pages are kept ready for, if the pool has room.
const PAGES_AHEAD: u64 = 512;

impl Engine {
    pub(super) fn step_grants(&mut self) {
        if self.pool.arena.free_count() < self.pool.tuning.spare_leaves {
            // Out of memory shows as writes that park, not as a failure of the pool.
            let before = self.pool.arena.leaf_count();
            let _ = self.pool.arena.refill(self.pool.tuning.spare_leaves);
            if self.pool.arena.leaf_count() > before {
                self.pool.bump();
            }
        }
        self.update_limits();
        self.grant_space();
    }

    /// Most extents granted at a time: the quantum, but less when many volumes share little.
    fn quantum(&self, volumes: usize) -> u64 {
        let free = self.pool.free_space.lock().free_count();
        let share = free / (8 * volumes.max(1) as u64);
        self.pool.tuning.quantum.min(share).max(1)
    }

    fn grant_space(&mut self) {
        let pool = Arc::clone(&self.pool);
        let volumes = pool.volumes.read();
        let wants = |v: &&Arc<Volume>| v.wants_space.load(Ordering::Acquire);
        if !volumes.values().any(|v| wants(&v)) {
            return;
        }
        let quantum = self.quantum(volumes.len());
        let mut granted = false;
        for volume in volumes.values().filter(wants) {
            granted |= self.grant(volume, quantum);
        }
        let starving = |v: &&Arc<Volume>| v.starves.load(Ordering::Acquire);
        if !granted && volumes.values().any(|v| starving(&v)) && self.take_reserves(&volumes) {
            for volume in volumes.values().filter(starving) {
                granted |= self.grant(volume, 1);
            }
        }
        if granted {
            pool.bump();
        }
    }

    fn grant(&self, volume: &Volume, quantum: u64) -> bool {
        let mut reserve = volume.reserve.lock();
        let mut space = self.pool.free_space.lock();
        let before = reserve.total();
        while reserve.total() < before + quantum && reserve.has_room() {
            let missing = before + quantum - reserve.total();
            let Some((first, count)) = space.allocate(missing) else { break };
            reserve.add(first, count);
        }
        let any = reserve.total() > before;
        if any {
            volume.wants_space.store(false, Ordering::Release);
            volume.starves.store(false, Ordering::Release);
        }
        any
    }

    /// Space that volumes hold and have not used serves those that wait: all of it is taken back,
    /// since a volume may starve on one worker while another of its workers holds extents.
    fn take_reserves(&self, volumes: &BTreeMap<VolumeId, Arc<Volume>>) -> bool {
        let mut any = false;
        for volume in volumes.values() {
            volume.take_back(|first, count| {
                any = true;
                met(Situation::ReservesTaken);
                self.pool.free_space.lock().free(first, count);
            });
        }
        any
    }

    /// Takes an extent of the pool for metadata pages.
    pub(super) fn add_page_extent(&mut self) -> bool {
        let Some((extent, _)) = self.pool.free_space.lock().allocate(1) else { return false };
        self.pages.add_extent(extent, false);
        true
    }

    /// Pages that a checkpoint needs whatever is dirty: catalogue and new trees.
    fn fixed_pages(&self) -> u64 {
        self.new_tree_pages
            + self.catalogue.page_count()
            + self.catalogue.tree.most_pages()
            + self.checkpoint.pages_to_write()
            + 4
    }

    fn levels(&self) -> u64 {
        self.trees.values().map(|t| t.tree.level_count() as u64).max().unwrap_or(1)
    }

    /// Index pages that so many changed slots may touch.
    pub(super) fn index_pages(&self, dirty: u64) -> u64 {
        let all: u64 = self.trees.values().map(|t| t.tree.most_pages()).sum();
        all.min(dirty * self.levels())
    }

    /// Most slots that may be dirty when so many pages are free.
    fn dirty_limit(&self, pages: u64) -> u64 {
        let left = pages.saturating_sub(self.fixed_pages());
        let all: u64 = self.trees.values().map(|t| t.tree.most_pages()).sum();
        (left / (1 + self.levels())).max(left.saturating_sub(all))
    }

    /// Whether there are pages for what is dirty and, at the next checkpoint, for what writes in
    /// flight will dirty again. If not, those are waited for and no more are let in.
    pub(super) fn pages_suffice(&self) -> bool {
        let unpromised: usize = {
            let count = |stripe: &parking_lot::Mutex<crate::stripe::Stripe>| {
                stripe.lock().unpromised().count()
            };
            self.pool.stripes.iter().map(count).sum()
        };
        let needed = self.dirty_or_promised() + unpromised as u64;
        if unpromised == 0 || self.dirty_limit(self.pages.free_pages()) >= needed {
            return true;
        }
        let pages = &self.pool.pages.0;
        pages.strict.store(true, Ordering::SeqCst);
        pages.limit.store(0, Ordering::SeqCst);
        pages.limit_freeing.store(0, Ordering::SeqCst);
        false
    }

    /// Lets in as many changes as pages can be found for, and finds more ahead of need.
    pub(crate) fn update_limits(&mut self) {
        if self.pool.pages.0.strict.load(Ordering::Relaxed) {
            return;
        }
        let slots: u64 = {
            let volumes = self.pool.volumes.read();
            volumes.values().map(|v| u64::from(v.directory.load().slot_count())).sum()
        };
        let dirty = self.dirty_or_promised();
        let wanted = (2 * dirty + PAGES_AHEAD).min(slots.max(1));
        let reserve = self.pages.reserve_pages();
        for _ in 0..EXTENTS_PER_STEP {
            let limit = self.dirty_limit(self.pages.free_pages().saturating_sub(reserve));
            if limit >= wanted || self.pool.read_only || !self.add_page_extent() {
                break;
            }
        }
        // As it was for the workers: what a shrink does to it in between is no news to them.
        let before = self.pool.pages.0.limit.load(Ordering::Relaxed);
        let given = self.shrink_pages(wanted, reserve);
        let free = self.pages.free_pages();
        let limits = &self.pool.pages.0;
        let limit = self.dirty_limit(free.saturating_sub(reserve));
        let freeing = self.dirty_limit(free);
        let rose = freeing > limits.limit_freeing.swap(freeing, Ordering::SeqCst);
        limits.limit.store(limit, Ordering::SeqCst);
        let rose = limit > before || rose;
        // Somebody may have met the limit while it was lower for a moment.
        let met_it = limit > self.dirty_or_promised()
            && self.pool.pages.0.wanted.swap(false, Ordering::SeqCst);
        if rose || given || met_it {
            self.pool.bump();
        }
    }

    /// Gives metadata extents back that are far from being needed. The limit is lowered first, and
    /// what is promised by then looked at again: nobody is promised what is given away.
    fn shrink_pages(&mut self, wanted: u64, reserve: u64) -> bool {
        let free = self.pages.free_pages();
        let limit = self.dirty_limit(free.saturating_sub(reserve));
        let keep = 2 * wanted;
        if self.checkpoint.is_running() || limit <= keep {
            return false;
        }
        self.pool.pages.0.limit.store(keep, Ordering::SeqCst);
        crate::sync::fence(Ordering::SeqCst);
        if self.dirty_or_promised() > keep {
            return false;
        }
        let mut space = self.pool.free_space.lock();
        let given = self.pages.shrink(free - (limit - keep), &mut space) > 0;
        if given {
            met(Situation::PagesShrunk);
        }
        given
    }

    fn dirty_or_promised(&self) -> u64 {
        let pages = &self.pool.pages.0;
        let promised = pages.promised.load(Ordering::Relaxed).max(0).unsigned_abs();
        pages.dirty.load(Ordering::Relaxed) + promised
    }

    /// Whether changes park, or soon will, for want of pages that a checkpoint would free.
    pub(super) fn pages_are_short(&self) -> bool {
        let pages = &self.pool.pages.0;
        let dirty = pages.dirty.load(Ordering::Relaxed);
        let freeing = pages.limit_freeing.load(Ordering::Relaxed);
        let load = dirty + self.new_tree_pages;
        load > 0 && (pages.wanted.load(Ordering::Relaxed) || load * 4 > freeing * 3)
    }
}
