//! Grants of extents to volumes, of pages to dirty leaves, of leaves to all workers.

use std::sync::Arc;

use crate::mutation::{Mutation, Situation, active, met};
use crate::sync::Ordering;
use crate::volume::Volume;
use crate::volumes::Volumes;

use super::Engine;
use super::space::Waiting;

/// Metadata extents added in one go; more follow at the next poll if they are needed.
const EXTENTS_PER_STEP: u32 = 16;

/// How long a grant is left to the volume that it was made to, if nothing of it is used: a worker
/// that has been woken needs a moment.
const FRESH_NS: u64 = 100_000_000;

/// Slots beyond those dirty now that pages are kept ready for, if the pool has room.
const PAGES_AHEAD: u64 = 512;

/// The same where the free rest is set aside for volumes: enough to go on with.
pub(super) const PAGES_AT_HAND: u64 = 16;

impl Engine {
    pub(super) fn step_grants(&mut self) {
        if self.pool.arena.free_count() < self.pool.tuning.spare_leaves {
            // Out of memory shows as writes that park, not as a failure of the pool.
            let _ = self.pool.arena.refill(self.pool.tuning.spare_leaves);
        }
        // However they came: by now, for another purpose, or back from a worker.
        if self.pool.arena.free_count() > 0 && self.pool.wake.0.leaves.swap(false, Ordering::SeqCst)
        {
            self.pool.bump();
        }
        self.update_limits();
        self.grant_space();
    }

    /// Most extents granted at a time: the quantum, but less when many volumes share little.
    fn quantum(&self, volumes: usize) -> u64 {
        let free = self.pool.free_space.lock().free_count();
        let share = free / (8 * volumes.max(1) as u64);
        self.pool.quantum.load(Ordering::Relaxed).min(share).max(1)
    }

    fn grant_space(&mut self) {
        let mut waiting = std::mem::take(&mut self.space.waiting);
        let pool = Arc::clone(&self.pool);
        let volumes = pool.volumes.read();
        self.space.ask(&pool);
        self.space.asking.retain(|volume| {
            let is_there = volumes.contains_key(&volume.identity.id);
            let asks = Waiting::of(volume).filter(|_| is_there);
            let stays = asks.is_some();
            waiting.extend(asks);
            stays
        });
        if self.grant_to_all(&mut waiting, &volumes) {
            pool.bump();
        }
        drop(volumes);
        waiting.clear();
        // The memory goes back, so that the next time allocates nothing.
        self.space.waiting = waiting;
    }

    /// Grants extents to the waiting volumes. Returns whether any waiter has to be woken.
    fn grant_to_all(&mut self, waiting: &mut Vec<Waiting>, volumes: &Volumes) -> bool {
        if waiting.is_empty() {
            return self.note_stuck(waiting, false);
        }
        // Volumes that are blocked come first, in the order in which they blocked.
        waiting.sort_unstable_by_key(|one| one.order);
        let mut granted = self.grant_to(waiting, self.quantum(volumes.len()), volumes);
        let mut comes_later = false;
        let needs = |one: &Waiting| one.is_starving() && self.room(&one.volume, volumes) > 0;
        if !granted && waiting.iter().any(needs) {
            let (taken, kept) = self.take_reserves(volumes);
            comes_later = kept;
            if taken {
                waiting.retain(Waiting::is_starving);
                granted = self.grant_to(waiting, 1, volumes);
            }
        }
        self.note_stuck(waiting, comes_later) || granted
    }

    /// Grants to each what is next for it, up to a quantum, and leaves the space set aside for
    /// others.
    fn grant_to(&mut self, waiting: &[Waiting], quantum: u64, volumes: &Volumes) -> bool {
        let mut set_aside = self.set_aside_parts(volumes);
        let mut any = false;
        for Waiting { volume, .. } in waiting {
            let free = self.pool.free_space.lock().free_count();
            let own = volume.unmet();
            let available = set_aside.available(free, own);
            let room = self.room(volume, volumes);
            let granted = self.grant(volume, volume.next_grant(quantum).min(available).min(room));
            set_aside.extents = set_aside.extents.saturating_sub(granted.min(own));
            self.space.granted(granted);
            if granted > 0 {
                volume.fresh.store(true, Ordering::Relaxed);
                volume.granted_ns.store(self.now_ns, Ordering::Relaxed);
                volume.starves.store(0, Ordering::Release);
                volume.misses.clear();
                volume.drop_wait.end();
                volume.out_of_space.store(false, Ordering::Release);
            }
            if granted > 0 || room == 0 {
                volume.wants_space.store(false, Ordering::Release);
            }
            any |= granted > 0;
        }
        any
    }

    /// Extents that a volume could still use: none beyond its quota, and none beyond its size as
    /// long as it shares no extents and so never copies.
    fn room(&self, volume: &Volume, volumes: &Volumes) -> u64 {
        self.room_in_quota(volume).min(self.room_in_size(volume, volumes))
    }

    /// Extents that the volume's quota leaves it.
    pub(super) fn room_in_quota(&self, volume: &Volume) -> u64 {
        match volume.quota.load(Ordering::Relaxed) {
            0 => u64::MAX,
            quota => quota.saturating_sub(volume.held()),
        }
    }

    /// Extents that the volume's size leaves it: as many as there are while it shares with others.
    pub(super) fn room_in_size(&self, volume: &Volume, volumes: &Volumes) -> u64 {
        let held = volume.places();
        if volumes.family(volume.identity.lineage) > 1 {
            return u64::MAX;
        }
        let size = volume.size.load(Ordering::Acquire);
        let size = size.div_ceil(self.pool.geometry.extent_size());
        let starves = volume.starves.load(Ordering::Acquire) > 0;
        // Another worker of the volume may hold its extents: a starving worker gets one regardless.
        size.saturating_sub(held).max(u64::from(starves))
    }

    /// Grants up to this many extents, and leaves the space set aside for other volumes.
    pub(super) fn grant_available(&mut self, volume: &Volume, most: u64, volumes: &Volumes) -> u64 {
        let free = self.pool.free_space.lock().free_count();
        let available = self.set_aside_parts(volumes).available(free, volume.unmet());
        let granted = self.grant(volume, most.min(available));
        self.space.granted(granted);
        granted
    }

    fn grant(&mut self, volume: &Volume, most: u64) -> u64 {
        if most == 0 {
            return 0;
        }
        let mut reserve = volume.reserve.lock();
        let mut space = self.pool.free_space.lock();
        let before = reserve.total();
        while reserve.total() < before + most && reserve.has_room() {
            let missing = before + most - reserve.total();
            let Some((first, count)) = self.run_for(volume, &mut space, missing) else { break };
            reserve.add(first, count);
        }
        let granted = reserve.total() - before;
        if granted > 0 {
            volume.note_grant(granted);
            // Under the lock: a thread that sees the extents sees that they were granted.
            if volume.grants.fetch_add(1, Ordering::AcqRel) == 0 {
                self.space.note_holder(volume.identity.id);
            }
            self.pool.grants.fetch_add(1, Ordering::Relaxed);
        }
        granted
    }

    /// Space that volumes hold and have not used serves those that wait: all of it is taken back,
    /// since a volume may starve on one worker while another of its workers holds extents. But
    /// space set aside or kept stays, and so does for a moment a grant to a volume that waited for
    /// it, whose worker is on its way: else two that wait could take it from each other for ever.
    /// Whether anything was taken, and whether there may be more in a moment.
    pub(super) fn take_reserves(&mut self, volumes: &Volumes) -> (bool, bool) {
        let (mut taken, mut kept) = (0, false);
        for volume in self.space.holders(volumes) {
            if volume.spare() == 0 {
                continue;
            }
            let granted_ns = volume.granted_ns.load(Ordering::Relaxed);
            let is_new = self.now_ns.saturating_sub(granted_ns) < FRESH_NS;
            if volume.fresh.load(Ordering::Relaxed) && is_new {
                kept = true;
                continue;
            }
            volume.take_back(|first, count| {
                taken += count;
                met(Situation::ReservesTaken);
                self.pool.free_space.lock().free(first, count);
            });
        }
        self.space.returned(taken);
        (taken > 0, kept)
    }

    pub(super) fn has_more_than_set_aside(&self) -> bool {
        let set_aside = self.set_aside(&self.pool.volumes.read());
        self.pool.free_space.lock().free_count() > set_aside
    }

    /// Takes an extent of the pool for metadata pages. One that the map of the running checkpoint
    /// may name is for the next one: else it would be both data and pages of that map (R17e).
    pub(super) fn add_page_extent(&mut self) -> bool {
        let Some((extent, _)) = self.pool.free_space.lock().allocate(1) else { return false };
        let is_named = self.checkpoint.is_running() && self.releases.is_any_since_cut;
        if is_named && !active(Mutation::PagesOverCut) {
            met(Situation::PagesForNext);
            self.pages.add_for_next(extent);
        } else {
            self.pages.add_extent(extent, false);
        }
        true
    }

    /// Takes the pages that the next checkpoint needs, before its cut: an extent that is taken
    /// later may be one that it cannot use. Many new volumes at once need more than was made ahead
    /// of demand. Space that is set aside serves too: without the pages the pool would fail.
    pub(super) fn take_pages_to_write(&mut self) {
        loop {
            let free = self.pages.free_pages();
            let is_enough =
                free >= self.fixed_pages() && self.dirty_limit(free) >= self.dirty_or_promised();
            if is_enough || !self.add_page_extent() {
                return;
            }
        }
    }

    /// Pages that a checkpoint needs whatever is dirty: catalogue, labels and new trees.
    pub(super) fn fixed_pages(&self) -> u64 {
        self.new_tree_pages
            + self.catalogue.page_count()
            + self.catalogue.tree.most_pages()
            + self.labels.pages_to_write()
            + self.checkpoint.pages_to_write()
            + 4
    }

    pub(super) fn levels(&self) -> u64 {
        self.trees.levels()
    }

    /// Returns the number of index pages that `dirty` changed slots may touch.
    pub(super) fn index_pages(&self, dirty: u64) -> u64 {
        self.trees.most_pages().min(dirty * self.levels())
    }

    /// Returns the limit of dirty slots with `pages` free pages.
    pub(super) fn dirty_limit(&self, pages: u64) -> u64 {
        let left = pages.saturating_sub(self.fixed_pages());
        let leaf = self.pool.leaf_pages();
        (left / (leaf + self.levels())).max(left.saturating_sub(self.trees.most_pages()) / leaf)
    }

    /// Whether there are pages for the dirty slots and, at the next checkpoint, for the slots that
    /// writes in flight will dirty again. If not, those are waited for and no more are let in.
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

    /// Admits as many changes as there are pages for, and reserves more pages ahead of demand.
    pub(crate) fn update_limits(&mut self) {
        if self.pool.pages.0.strict.load(Ordering::Relaxed) {
            return;
        }
        let slots = self.trees.slots();
        let dirty = self.dirty_or_promised();
        let wanted = (2 * dirty + PAGES_AHEAD).min(slots.max(1));
        let reserve = self.pages.reserve_pages();
        for _ in 0..EXTENTS_PER_STEP {
            let limit = self.dirty_limit(self.pages.free_pages().saturating_sub(reserve));
            if limit >= wanted || self.pool.read_only {
                break;
            }
            // Grants ahead of demand are not taken from the space set aside.
            let is_ahead = limit >= (dirty + PAGES_AT_HAND).min(slots);
            if is_ahead && !self.has_more_than_set_aside() || !self.add_page_extent() {
                break;
            }
        }
        // As it was for the workers: a shrink in between does not wake them.
        let before = self.pool.pages.0.limit.load(Ordering::Relaxed);
        let given = self.shrink_pages(wanted, reserve);
        let free = self.pages.free_pages();
        let limits = &self.pool.pages.0;
        let limit = self.dirty_limit(free.saturating_sub(reserve));
        let freeing = self.dirty_limit(free);
        let rose = freeing > limits.limit_freeing.swap(freeing, Ordering::SeqCst);
        limits.limit.store(limit, Ordering::SeqCst);
        let rose = limit > before || rose;
        // A writer may have met the limit while it was lower for a moment.
        let met_it = limit > self.dirty_or_promised()
            && self.pool.pages.0.wanted.swap(false, Ordering::SeqCst);
        if rose || given || met_it {
            self.pool.bump();
        }
    }

    /// Returns metadata extents that are not needed soon. The limit is lowered first, and the
    /// promised pages are checked again, so that no promised page is returned.
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

    pub(super) fn dirty_or_promised(&self) -> u64 {
        let pages = &self.pool.pages.0;
        let promised = pages.promised.load(Ordering::Relaxed).max(0).unsigned_abs();
        pages.dirty.load(Ordering::Relaxed) + promised
    }

    /// Whether changes park, or soon will, for lack of pages that a checkpoint would free.
    pub(super) fn pages_are_short(&self) -> bool {
        let pages = &self.pool.pages.0;
        let dirty = pages.dirty.load(Ordering::Relaxed);
        let freeing = pages.limit_freeing.load(Ordering::Relaxed);
        let load = dirty + self.new_tree_pages;
        load > 0 && (pages.wanted.load(Ordering::Relaxed) || load * 4 > freeing * 3)
    }
}
