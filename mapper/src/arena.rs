//! The leaves of a pool, in blocks that never move and are never returned.
//!
//! A leaf is cleared when it is given back, not when it is taken: giving back is the pool
//! thread's work after every IO that could read the leaf has ended, while taking is on the path
//! of a volume's first write, under its stripe. So a free leaf always maps nothing.
//!
//! For the same reason a block is written with zeroes when it is made: its page faults, about a
//! millisecond, are taken by the pool thread and not by the first writers of its leaves.

use std::sync::OnceLock;

use crate::entry::Entry;
use crate::leaf::{LEAF_ENTRIES, Leaf};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, zeroed_slice};
use crate::units::LeafId;

/// Leaves that are made at once: 512 KiB of memory. The first block may have fewer: every pool has
/// it, and a daemon may have hundreds of pools.
pub const LEAVES_PER_BLOCK: u32 = if cfg!(loom) { 2 } else { 128 };

/// The pool's state of a leaf besides its entries: one cache line.
#[derive(Debug, Default)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
#[repr(C, align(64))]
pub struct LeafMeta {
    /// Directories that hold the leaf. Above 1, it is copied before it is changed.
    pub references: AtomicU32,
    /// Entries that are mapped.
    pub mapped: AtomicU32,
    /// LSN of the last change of an entry.
    pub last_lsn: AtomicU64,
    /// Address of the metadata page that holds, or held, the leaf; 0 for none.
    pub page: AtomicU64,
    /// Checksum of that page, for its parent.
    pub page_sum: AtomicU64,
    /// The page holds the present content.
    pub clean: AtomicBool,
    /// A checkpoint has yet to write the content as of its LSN.
    pub capture_pending: AtomicBool,
    /// The leaf with the bases of composite entries; 0 for none. It belongs to this leaf alone, and
    /// stays with it. Its own state has the page, and in `mapped` the number of bases.
    pub under: AtomicU32,
    /// The leaf that follows in the free list; 0 for none. Belongs to the list's mutex.
    next_free: AtomicU32,
}

impl LeafMeta {
    /// Resets the state to that of an unused leaf.
    fn reset(&self) {
        self.references.store(0, Ordering::Relaxed);
        self.mapped.store(0, Ordering::Relaxed);
        self.last_lsn.store(0, Ordering::Relaxed);
        self.page.store(0, Ordering::Relaxed);
        self.page_sum.store(0, Ordering::Relaxed);
        self.clean.store(false, Ordering::Relaxed);
        self.capture_pending.store(false, Ordering::Relaxed);
        self.under.store(0, Ordering::Relaxed);
    }
}

/// No further leaves: the arena's limit is reached, or the machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no memory for leaves beyond {leaves}, of {limit} allowed")]
pub struct ArenaFull {
    /// Leaves that exist.
    pub leaves: u32,
    /// Leaves that may exist.
    pub limit: u32,
}

/// Owns every leaf of a pool, in use or free.
pub struct Arena {
    blocks: Box<[OnceLock<Block>]>,
    /// First leaf of the free list, which runs through [`LeafMeta`] so that it needs no memory.
    free: Mutex<u32>,
    /// Length of the free list, for information.
    free_count: AtomicU32,
    /// Blocks made; held while one is added.
    made: Mutex<u32>,
    /// Leaves of the first block. They have the last ids of its range, so that those of all other
    /// blocks begin where they would without it.
    first_block: u32,
}

#[derive(Debug)]
struct Block {
    leaves: Box<[Leaf]>,
    metas: Box<[LeafMeta]>,
}

impl std::fmt::Debug for Arena {
    /// Counts, not the leaves: a pool has millions of entries.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (leaves, free) = (self.leaf_count(), self.free_count());
        f.debug_struct("Arena")
            .field("leaves", &leaves)
            .field("free", &free)
            .finish_non_exhaustive()
    }
}

impl Arena {
    /// An arena without leaves that may grow to `max_leaves`, rounded up to whole blocks. Its table
    /// has 40 bytes for each of them from the start.
    #[must_use]
    pub fn new(max_leaves: u32) -> Self {
        let blocks = max_leaves.div_ceil(LEAVES_PER_BLOCK).min(u32::MAX / LEAVES_PER_BLOCK);
        Self {
            blocks: (0..blocks).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(0),
            free_count: AtomicU32::new(0),
            made: Mutex::new(0),
            first_block: LEAVES_PER_BLOCK,
        }
    }

    /// The same with fewer leaves in its first block, from 1 to [`LEAVES_PER_BLOCK`].
    #[must_use]
    pub fn with_first_block(self, leaves: u32) -> Self {
        Self { first_block: leaves.clamp(1, LEAVES_PER_BLOCK), ..self }
    }

    /// The leaf with this id.
    ///
    /// # Panics
    ///
    /// If [`Arena::take`] never returned the id.
    #[must_use]
    #[inline]
    pub fn leaf(&self, id: LeafId) -> &Leaf {
        let (block, index) = self.place(id);
        &block.leaves[index]
    }

    /// Returns the state of the leaf with this id. Panics as [`Arena::leaf`] does.
    #[must_use]
    #[inline]
    pub fn meta(&self, id: LeafId) -> &LeafMeta {
        let (block, index) = self.place(id);
        &block.metas[index]
    }

    /// The leaf with the bases of this one's composite entries.
    #[must_use]
    #[inline]
    pub fn under(&self, id: LeafId) -> Option<LeafId> {
        let under = self.meta(id).under.load(Ordering::Acquire);
        (under != 0).then_some(LeafId(under))
    }

    /// The present entry of a leaf, with its base. Takes no lock.
    #[must_use]
    #[inline]
    pub fn entry(&self, id: LeafId, index: usize) -> Entry {
        self.leaf(id).load_entry(index, || self.under(id).map(|under| self.leaf(under)))
    }

    /// All entries of a leaf, with their bases.
    pub fn entries(&self, id: LeafId) -> impl Iterator<Item = Entry> {
        (0..LEAF_ENTRIES).map(move |index| self.entry(id, index))
    }

    /// Composite entries of a leaf.
    #[must_use]
    pub fn composites(&self, id: LeafId) -> u32 {
        self.under(id).map_or(0, |under| self.meta(under).mapped.load(Ordering::Relaxed))
    }

    /// A leaf that maps nothing, without references. `None` if none is free: the engine refills.
    pub fn take(&self) -> Option<LeafId> {
        let mut first = self.free.lock();
        if *first == 0 {
            return None;
        }
        let id = LeafId(*first);
        *first = self.meta(id).next_free.load(Ordering::Relaxed);
        self.free_count.fetch_sub(1, Ordering::Relaxed);
        drop(first);
        debug_assert!(self.leaf(id).is_empty(), "free leaves map nothing");
        Some(id)
    }

    /// Clears a leaf and makes it free, with its under leaf. No directory holds it, and no reader
    /// can have it (its IO epoch is drained).
    pub fn give_back(&self, id: LeafId) {
        if let Some(under) = self.under(id) {
            self.give_one_back(under);
        }
        self.give_one_back(id);
    }

    fn give_one_back(&self, id: LeafId) {
        let meta = self.meta(id);
        debug_assert_eq!(meta.references.load(Ordering::Relaxed), 0, "still in a directory");
        self.leaf(id).clear();
        meta.reset();
        let mut first = self.free.lock();
        meta.next_free.store(*first, Ordering::Relaxed);
        *first = id.0;
        self.free_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Free leaves, as of a moment ago.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.free_count.load(Ordering::Relaxed)
    }

    /// Leaves that exist, in use or free.
    #[must_use]
    pub fn leaf_count(&self) -> u32 {
        self.leaves_of(*self.made.lock())
    }

    /// Leaves of the first `blocks` blocks.
    fn leaves_of(&self, blocks: u32) -> u32 {
        (blocks * LEAVES_PER_BLOCK).saturating_sub(LEAVES_PER_BLOCK - self.first_block)
    }

    /// Makes blocks of leaves until `at_least_free` are free. Allocates: not for the path of a
    /// request.
    pub fn refill(&self, at_least_free: u32) -> Result<(), ArenaFull> {
        let mut made = self.made.lock();
        while self.free_count() < at_least_free {
            let leaves = self.leaves_of(*made);
            self.add_block(*made).ok_or_else(|| ArenaFull { leaves, limit: self.limit() })?;
            *made += 1;
        }
        Ok(())
    }

    /// Makes the block with this number and puts its leaves into the free list.
    fn add_block(&self, number: u32) -> Option<()> {
        let cell = self.blocks.get(number as usize)?;
        let leaves = if number == 0 { self.first_block } else { LEAVES_PER_BLOCK };
        let count = leaves as usize;
        let block = Block { leaves: zeroed_slice(count)?, metas: zeroed_slice(count)? };
        let first_id = (number + 1) * LEAVES_PER_BLOCK - leaves + 1;
        for (meta, next) in block.metas.iter().zip(first_id + 1..) {
            meta.next_free.store(next, Ordering::Relaxed);
        }
        let block = cell.get_or_init(|| block);
        let last = block.metas.last()?;
        let mut first = self.free.lock();
        last.next_free.store(*first, Ordering::Relaxed);
        *first = first_id;
        self.free_count.fetch_add(leaves, Ordering::Relaxed);
        Some(())
    }

    fn limit(&self) -> u32 {
        // `new` saw to it that the product fits.
        u32::try_from(self.blocks.len()).map_or(u32::MAX, |blocks| self.leaves_of(blocks))
    }

    #[inline]
    fn place(&self, id: LeafId) -> (&Block, usize) {
        // Id 0 wraps to the end of the table's range, where no block is.
        let index = id.0.wrapping_sub(1);
        let block = self.blocks[(index / LEAVES_PER_BLOCK) as usize]
            .get()
            .expect("leaf ids come from `take`, so their block was made");
        // The first block has the last ids of its range.
        let end = (LEAVES_PER_BLOCK - index % LEAVES_PER_BLOCK) as usize;
        (block, block.metas.len().wrapping_sub(end))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::mapping::Mapping;
    use crate::units::PhysicalExtent;

    #[test]
    fn metadata_of_a_leaf_is_a_cache_line() {
        assert_eq!((size_of::<LeafMeta>(), align_of::<LeafMeta>()), (64, 64));
    }

    #[test]
    fn an_arena_hands_out_every_leaf_once_and_then_none() {
        let arena = Arena::new(1024);
        assert_eq!(arena.take(), None);
        arena.refill(1024 - LEAVES_PER_BLOCK + 1).unwrap();
        assert_eq!((arena.free_count(), arena.leaf_count()), (1024, 1024));
        let taken: HashSet<_> = std::iter::from_fn(|| arena.take()).collect();
        assert_eq!((taken.len(), arena.free_count()), (1024, 0));
        assert!(taken.iter().all(|id| (1..=1024).contains(&id.0)));
        let full = arena.refill(1).unwrap_err();
        assert_eq!(full, ArenaFull { leaves: 1024, limit: 1024 });
    }

    #[test]
    fn a_smaller_first_block_has_the_last_ids_of_its_range() {
        let arena = Arena::new(1024).with_first_block(3);
        arena.refill(1).unwrap();
        assert_eq!((arena.free_count(), arena.leaf_count()), (3, 3));
        let taken: Vec<_> = std::iter::from_fn(|| arena.take()).map(|id| id.0).collect();
        assert_eq!(taken, [126, 127, 128]);
        arena.refill(1).unwrap();
        assert_eq!(arena.leaf_count(), 3 + LEAVES_PER_BLOCK);
        assert_eq!(arena.take(), Some(LeafId(129)));
        // Each id has memory of its own.
        for id in taken {
            let mapping = Mapping { physical: Some(PhysicalExtent(u64::from(id))), valid: 1 };
            arena.leaf(LeafId(id)).replace(0, mapping);
            arena.meta(LeafId(id)).last_lsn.store(u64::from(id), Ordering::Relaxed);
        }
        for id in 126..=128 {
            assert_eq!(arena.leaf(LeafId(id)).load(0).physical, Some(PhysicalExtent(id.into())));
            assert_eq!(arena.meta(LeafId(id)).last_lsn.load(Ordering::Relaxed), u64::from(id));
        }
        assert!(arena.leaf(LeafId(129)).is_empty());
        assert_eq!(arena.refill(u32::MAX).unwrap_err().limit, 1024 - LEAVES_PER_BLOCK + 3);
    }

    #[test]
    fn a_refill_does_nothing_while_enough_are_free() {
        let arena = Arena::new(1024);
        arena.refill(1).unwrap();
        arena.refill(LEAVES_PER_BLOCK).unwrap();
        assert_eq!(arena.leaf_count(), LEAVES_PER_BLOCK);
    }

    #[test]
    fn a_leaf_comes_back_as_if_never_used() {
        let arena = Arena::new(1);
        arena.refill(1).unwrap();
        let id = arena.take().unwrap();
        for index in 0..LEAF_ENTRIES {
            arena.leaf(id).replace(index, Mapping { physical: Some(PhysicalExtent(9)), valid: 1 });
        }
        arena.meta(id).last_lsn.store(7, Ordering::Relaxed);
        arena.meta(id).clean.store(true, Ordering::Relaxed);
        arena.give_back(id);
        assert_eq!(arena.take(), Some(id));
        assert!(arena.leaf(id).is_empty());
        assert_eq!(arena.meta(id).last_lsn.load(Ordering::Relaxed), 0);
        assert!(!arena.meta(id).clean.load(Ordering::Relaxed));
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn id_0_is_no_leaf() {
        let arena = Arena::new(1);
        arena.refill(1).unwrap();
        let _leaf = arena.leaf(LeafId(0));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_alone;
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;
    use crate::mapping::Mapping;
    use crate::units::PhysicalExtent;

    type Take = fn(&Arena) -> Option<LeafId>;
    /// An arena and a cell per leaf, whose accesses loom tracks.
    type Shared = (Arena, [UnsafeCell<()>; 2]);

    fn use_leaves(shared: &Shared, take: Take) {
        for _ in 0..2 {
            let id = take(&shared.0).expect("no leaf is lost");
            shared.1[id.0 as usize - 1].with_mut(|_| ());
            let mapping = Mapping { physical: Some(PhysicalExtent(3)), valid: 1 };
            shared.0.leaf(id).replace(0, mapping);
            shared.0.give_back(id);
        }
    }

    /// Two threads take and give back; a leaf belongs to one of them at a time.
    fn leaves_are_exclusive(take: Take) {
        loom::model(move || {
            let arena = Arena::new(2);
            arena.refill(2).unwrap();
            let shared = Arc::new((arena, [UnsafeCell::new(()), UnsafeCell::new(())]));
            let other = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || use_leaves(&shared, take))
            };
            use_leaves(&shared, take);
            other.join().unwrap();
            assert_eq!(shared.0.free_count(), 2);
            let left = [
                shared.0.take().expect("no leaf is lost"),
                shared.0.take().expect("no leaf is lost"),
            ];
            assert!(left[0] != left[1] && shared.0.take().is_none());
            assert!(left.iter().all(|&id| shared.0.leaf(id).is_empty()));
        });
    }

    fn take_in_two_steps(arena: &Arena) -> Option<LeafId> {
        let first = *arena.free.lock();
        let id = (first != 0).then_some(LeafId(first))?;
        *arena.free.lock() = arena.meta(id).next_free.load(Ordering::Relaxed);
        arena.free_count.fetch_sub(1, Ordering::Relaxed);
        Some(id)
    }

    #[test]
    fn loom_arena_leaves_are_exclusive() {
        leaves_are_exclusive(Arena::take);
    }

    #[test]
    #[should_panic(expected = "no leaf is lost")]
    fn loom_arena_finds_a_take_in_two_steps() {
        leaves_are_exclusive(take_in_two_steps);
    }
}
