//! Dropped references on their way to being free: first durable, then drained (R4, R10).

use std::collections::VecDeque;
use std::sync::Arc;

use crate::directory::Directory;
use crate::geometry::MAX_DEVICES;
use crate::io::IoOp;
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::{Pool, split};
use crate::stripe::stripe_index;
use crate::sync::Ordering;
use crate::units::{LeafId, Lsn, PageAddress, PhysicalExtent, SlotIndex, VolumeId};

use super::queue::{CommandQueue, Purpose};

/// Slots of a dropped directory that are examined in one step.
const SLOTS_PER_STEP: u32 = 1024;
/// Leaves released in one go: each may free 256 extents.
const LEAVES_PER_STEP: usize = 64;
/// Extents released in one go.
const EXTENTS_PER_STEP: usize = 4096;
/// Free extents passed down to the media at a time: they cannot be granted meanwhile, which is some
/// milliseconds for as many as a volume is granted at a time.
const SCRUBBED_AT_A_TIME: u64 = 64;

/// A reference that a change dropped.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Extent {
        physical: PhysicalExtent,
        stripe: usize,
    },
    Leaf {
        leaf: LeafId,
        stripe: usize,
    },
    /// A whole volume's leaves.
    Directory {
        directory: Arc<Directory>,
        lineage: VolumeId,
        of: Releasing,
    },
}

/// A deleted volume, or the former content of one that was rolled back, whose extents are being
/// reclaimed in the background.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Releasing {
    /// Which volume or snapshot it was.
    pub volume: VolumeId,
    /// Extents that it mapped.
    pub extents: u64,
    /// Of these, those still to be reclaimed. Shared ones count too, although they stay in use.
    pub left: u64,
}

/// A directory being taken apart.
#[derive(Debug)]
struct Walk {
    directory: Arc<Directory>,
    lineage: VolumeId,
    of: Releasing,
    next: u32,
}

/// The stages a dropped reference goes through.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    /// Until the LSN is durable. Rising.
    undurable: VecDeque<(Lsn, Item)>,
    /// Until every IO of the epoch has ended. Rising. Leaves apart, since they must stay while a
    /// checkpoint still has to write them.
    undrained: VecDeque<(u64, Item)>,
    undrained_leaves: VecDeque<(u64, Item)>,
    walks: VecDeque<Walk>,
    /// Extents freed since the engine last woke waiters.
    pub(crate) freed: u64,
    /// Whether any extent was released since the cut of the last checkpoint: the map as it was at
    /// the cut may name what is free by now.
    pub(crate) is_any_since_cut: bool,
    /// Something with composite entries, or an extent, has one holder left: it may be folded.
    pub(crate) unshared: bool,
    /// Pages that no tree to be written refers to any more.
    pub(crate) dead_pages: Vec<PageAddress>,
    /// Runs to be passed down to the media before they are free.
    passdown: Vec<(PhysicalExtent, u64)>,
    passing_down: u64,
    /// Free extents from here on are still to be passed down to the media, although they were free
    /// when the pool was opened.
    scrub: Option<PhysicalExtent>,
}

impl Releases {
    /// Records a reference that the change with this LSN drops.
    pub(crate) fn drop_at(&mut self, lsn: Lsn, item: Item) {
        self.undurable.push_back((lsn, item));
    }

    /// Advances the items that are durable by now.
    pub(crate) fn durable(&mut self, pool: &Pool, durable: Lsn) {
        // The epoch by now is no lower than at the time of the drop, so waiting for it waits for
        // every IO that started before.
        let tag = pool.epochs.current();
        while let Some((_, item)) = self.undurable.pop_front_if(|(lsn, _)| *lsn <= durable) {
            self.drain(tag, item);
        }
    }

    /// A reference whose drop is durable, or needs not be.
    pub(crate) fn drain(&mut self, tag: u64, item: Item) {
        match item {
            Item::Extent { .. } => self.undrained.push_back((tag, item)),
            Item::Leaf { .. } | Item::Directory { .. } => {
                self.undrained_leaves.push_back((tag, item));
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.undurable.is_empty() && !self.has_drains() && self.passing_down == 0
    }

    /// Begins to pass all free extents down to the media, piece by piece.
    pub(crate) fn begin_scrub(&mut self) {
        self.scrub = Some(PhysicalExtent(0));
    }

    /// Whether that is still under way.
    pub(crate) fn is_scrubbing(&self) -> bool {
        self.scrub.is_some()
    }

    /// Takes the next piece, when nothing else is on its way to the media.
    fn step_scrub(&mut self, pool: &Pool) {
        let Some(from) = self.scrub.filter(|_| self.passing_down == 0) else { return };
        let run = pool.free_space.lock().allocate_from(from, SCRUBBED_AT_A_TIME);
        self.scrub = run.map(|(first, count)| PhysicalExtent(first.0 + count));
        self.passdown.extend(run);
    }

    /// Whether something waits for a commit.
    pub(crate) fn awaits_commit(&self) -> bool {
        !self.undurable.is_empty()
    }

    /// Whether something waits for IO to end, or for its turn.
    pub(crate) fn has_drains(&self) -> bool {
        !self.undrained.is_empty()
            || !self.undrained_leaves.is_empty()
            || !self.walks.is_empty()
            || !self.passdown.is_empty()
    }

    /// Volumes whose extents are still to be reclaimed, in the order of reclaim.
    pub(crate) fn releasing(&self) -> impl Iterator<Item = Releasing> {
        let waiting = self.undrained_leaves.iter().map(|(_, item)| item);
        let waiting = waiting.chain(self.undurable.iter().map(|(_, item)| item));
        let waiting = waiting.filter_map(|item| match item {
            Item::Directory { of, .. } => Some(*of),
            _ => None,
        });
        self.walks.iter().map(|walk| walk.of).chain(waiting)
    }

    /// Whether extents of a deleted volume are still to be reclaimed.
    pub(crate) fn is_deleting(&self) -> bool {
        self.releasing().next().is_some()
    }

    /// Extents that will be free, as far as they are counted one by one.
    pub(crate) fn pending_extents(&self) -> u64 {
        let waiting = self.undurable.iter().map(|(_, item)| item);
        let waiting = waiting.chain(self.undrained.iter().map(|(_, item)| item));
        let extents = waiting.filter(|item| matches!(item, Item::Extent { .. })).count() as u64;
        extents + self.passing_down + self.passdown.iter().map(|run| run.1).sum::<u64>()
    }

    /// The same of each device. A shared extent counts where all of its references are to go.
    pub(crate) fn pending_by_device(&self, pool: &Pool) -> [u64; MAX_DEVICES] {
        let waiting = self.undurable.iter().map(|(_, item)| item);
        let waiting = waiting.chain(self.undrained.iter().map(|(_, item)| item));
        let dropped = waiting.filter_map(|item| match item {
            Item::Extent { physical, .. } => Some(*physical),
            _ => None,
        });
        let mut dropped: Vec<_> = dropped.collect();
        dropped.sort_unstable();
        let free = dropped
            .chunk_by(|a, b| a == b)
            .filter(|drops| drops.len() as u64 > u64::from(pool.extra(drops[0])))
            .map(|drops| (drops[0], 1));
        let mut counts = [0; MAX_DEVICES];
        for (first, count) in free.chain(self.passdown.iter().copied()) {
            if let Some(sum) = counts.get_mut(split(first).0) {
                *sum += count;
            }
        }
        counts
    }

    /// Does a bounded piece of work; `true` if there may be more to do at once. `hold_leaves`: a
    /// checkpoint has yet to write leaves.
    pub(crate) fn step(&mut self, pool: &Pool, hold_leaves: bool) -> bool {
        if self.has_drains() {
            pool.epochs.try_advance();
        }
        let mut worked = 0;
        while worked < EXTENTS_PER_STEP
            && let Some((_, item)) = self.undrained.pop_front_if(|(tag, _)| drained(pool, *tag))
        {
            if let Item::Extent { physical, stripe } = item {
                let _stripe = pool.stripes[stripe].lock();
                self.release_extent(pool, physical);
            }
            worked += 1;
        }
        if !hold_leaves {
            worked += self.step_leaves(pool);
        }
        worked > 0
    }

    fn step_leaves(&mut self, pool: &Pool) -> usize {
        let mut worked = 0;
        while worked < LEAVES_PER_STEP
            && let Some((_, item)) =
                self.undrained_leaves.pop_front_if(|(tag, _)| drained(pool, *tag))
        {
            match item {
                Item::Leaf { leaf, stripe } => self.release_leaf(pool, leaf, stripe),
                Item::Directory { directory, lineage, of } => {
                    self.walks.push_back(Walk { directory, lineage, of, next: 0 });
                }
                Item::Extent { .. } => {}
            }
            worked += 1;
        }
        let Some(mut walk) = self.walks.pop_front() else { return worked };
        let end = walk.next.saturating_add(SLOTS_PER_STEP).min(walk.directory.slot_count());
        let mut leaves = 0;
        while walk.next < end && leaves < LEAVES_PER_STEP {
            let slot = SlotIndex(walk.next);
            if let Some(leaf) = walk.directory.load(slot) {
                let mapped = pool.arena.meta(leaf).mapped.load(Ordering::Relaxed);
                let extents = u64::from(mapped) + u64::from(pool.arena.composites(leaf));
                walk.of.left = walk.of.left.saturating_sub(extents);
                self.release_leaf(pool, leaf, stripe_index(walk.lineage, slot));
                leaves += 1;
            }
            walk.next += 1;
        }
        if walk.next < walk.directory.slot_count() {
            self.walks.push_front(walk);
        }
        worked + 1
    }

    /// Frees everything at once, for replay: extents are counted out, and the free map is derived
    /// afterwards.
    pub(crate) fn settle(&mut self, pool: &Pool) {
        while let Some((_, item)) = self.undurable.pop_front() {
            match item {
                Item::Extent { physical, stripe } => {
                    let _stripe = pool.stripes[stripe].lock();
                    self.release_extent(pool, physical);
                }
                Item::Leaf { leaf, stripe } => self.release_leaf(pool, leaf, stripe),
                Item::Directory { directory, lineage, .. } => {
                    for (slot, leaf) in directory.iter() {
                        self.release_leaf(pool, leaf, stripe_index(lineage, slot));
                    }
                }
            }
        }
        for (first, count) in self.passdown.drain(..) {
            pool.free_space.lock().free(first, count);
        }
        self.freed = 0;
    }

    /// One directory fewer holds the leaf; with the last one its extents are freed too.
    pub(crate) fn release_leaf(&mut self, pool: &Pool, leaf: LeafId, stripe: usize) {
        let _stripe = pool.stripes[stripe].lock();
        let meta = pool.arena.meta(leaf);
        // Ordered as the drop of an extent's reference is.
        if meta.references.fetch_sub(1, Ordering::SeqCst) > 1 {
            self.unshared |= pool.arena.composites(leaf) > 0;
            return;
        }
        for physical in pool.arena.entries(leaf).flat_map(|entry| entry.extents()) {
            self.release_extent(pool, physical);
        }
        for id in std::iter::once(leaf).chain(pool.arena.under(leaf)) {
            let page = PageAddress(pool.arena.meta(id).page.load(Ordering::Relaxed));
            if page.0 != 0 {
                self.dead_pages.push(page);
            }
        }
        pool.arena.give_back(leaf);
    }

    /// One reference fewer; the last one makes the extent free. Under the stripe's mutex.
    pub(crate) fn release_extent(&mut self, pool: &Pool, physical: PhysicalExtent) {
        if let Some((counts, local)) = pool.counts_of(physical)
            && counts.extra(local) > 0
        {
            self.unshared |= counts.sub(local) == 0;
            return;
        }
        if !active(Mutation::CacheKeptAtReuse) {
            pool.drop_cached(physical);
        }
        self.freed += 1;
        self.is_any_since_cut = true;
        if pool.tuning.passdown {
            self.pass_down(physical);
        } else {
            pool.free_space.lock().free(physical, 1);
        }
    }

    /// Notes an extent that is free as soon as the media knows it.
    fn pass_down(&mut self, physical: PhysicalExtent) {
        match self.passdown.last_mut() {
            Some((first, count)) if first.0 + *count == physical.0 => *count += 1,
            _ => self.passdown.push((physical, 1)),
        }
    }

    /// Passes freed extents down to the media; it is free for reuse only afterwards.
    pub(crate) fn send_passdown(&mut self, pool: &Pool, io: &mut CommandQueue) {
        for extent in pool.unshown.lock().drain(..) {
            self.pass_down(extent);
        }
        self.step_scrub(pool);
        for (first, count) in self.passdown.drain(..) {
            let (device, offset) = pool.place(first);
            debug_assert_eq!(split(first).0, split(PhysicalExtent(first.0 + count - 1)).0);
            let len = count * pool.geometry.extent_size();
            self.passing_down += count;
            met(Situation::Passdown);
            io.push(device, IoOp::Discard { offset, len }, Purpose::Passdown { first, count });
        }
    }

    /// The media knows, or doesn't care; either way the run is free.
    pub(crate) fn passed_down(&mut self, pool: &Pool, first: PhysicalExtent, count: u64) {
        self.passing_down -= count;
        pool.free_space.lock().free(first, count);
    }
}

fn drained(pool: &Pool, tag: u64) -> bool {
    active(Mutation::ReuseUndrained)
        || pool.epochs.drained(tag)
        || (active(Mutation::DrainOneEpoch) && pool.epochs.current() > tag)
}
