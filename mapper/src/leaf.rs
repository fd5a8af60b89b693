//! A leaf: 256 entries of the map, read without a lock.
//!
//! An entry is two words. Word 0 holds the physical extent, a kind and a counter that changes with
//! every [`Leaf::replace`]; word 1 is the bitmap of valid sub-blocks. All writers of a leaf hold
//! the mutex of its stripe; readers hold nothing.
//!
//! # What a reader can see
//!
//! [`Leaf::load`] reads word 0, word 1 and word 0 again and starts over if word 0 changed. Every
//! store is a release and the first two loads are acquires, so a thread that sees a store also sees
//! all earlier stores of its writer. A reader gets exactly the old or exactly the new mapping of
//! each change. Case by case:
//!
//! * *Bits grow, same extent* ([`Leaf::grow`]): one store of word 1. Old or new bits.
//! * *Other bits, same extent* (a discard of part of it): one store of word 1, then the counter.
//!   Old or new bits, and both were right at some time during the read.
//! * *Unmapped to mapped*: word 1, then word 0. Before the second store the entry is unmapped, so
//!   that its bits are not read. A reader that sees the new word 0 sees the new bits.
//! * *Mapped to unmapped*: word 0, then word 1. A reader that pairs the old word 0 with the cleared
//!   bits finds word 0 changed when reading it again.
//! * *Mapped to another extent* (a copied extent is published, a rollback): word 0 becomes `BUSY`,
//!   then word 1, then word 0. With two stores in either order, some reader would pair one extent
//!   with the bits of the other and read sub-blocks there that hold another volume's data. A
//!   reader that meets `BUSY` waits for the writer's next two stores.
//!
//! # Composite entries
//!
//! A *composite* entry lies over a second extent, its base. Word 0 and 1 say where the overlay is
//! and which sub-blocks it has; the entry at the same index of the leaf's *under leaf* says the
//! same of the base. [`Leaf::load_entry`] reads word 0 and the overlay's bits, then the base, then
//! word 0 again.
//!
//! * *Plain to composite*: the base's entry, then word 0, through `BUSY`.
//! * *A discard*: the bits of the base, then those of the overlay. In the other order a reader
//!   finds the bit gone from the overlay and still in the base, and returns what the overlay had
//!   hidden.
//! * *Composite to plain*: word 0 first, then the base's entry is cleared. A reader that finds no
//!   base finds word 0 changed.
//!
//! A bit of a later tenancy is always stored after a change of word 0, so it is never paired with
//! the word 0 of an earlier one. The counter makes that hold when the same extent comes back. It
//! wraps after 65,536 replacements of one entry within one read of three words, and even then the
//! extent must have come back too, which the reader's IO epoch forbids for a freed extent.

use crate::entry::Entry as Whole;
use crate::mapping::Mapping;
use crate::sync::{AtomicU64, Backoff, Ordering};
use crate::units::PhysicalExtent;

/// Entries of a leaf. Loom explores few: each is two objects of its model.
pub const LEAF_ENTRIES: usize = if cfg!(loom) { 2 } else { 256 };

const PHYSICAL_BITS: u32 = 40;
const PHYSICAL_MASK: u64 = (1 << PHYSICAL_BITS) - 1;
const KIND_MASK: u64 = 0xff << PHYSICAL_BITS;
const MAPPED: u64 = 1 << PHYSICAL_BITS;
/// The extent lies over a base, which the entry of the under leaf names.
const COMPOSITE: u64 = 2 << PHYSICAL_BITS;
/// Word 1 is being changed.
const BUSY: u64 = 0xff << PHYSICAL_BITS;
const COUNTER_ONE: u64 = 1 << 48;
const COUNTER_MASK: u64 = 0xffff << 48;

/// Two words, aligned so that they never lie on two cache lines.
#[derive(Debug, Default)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
#[repr(C, align(16))]
struct Entry {
    word: AtomicU64,
    valid: AtomicU64,
}

/// The mappings of 256 consecutive extents of a volume, one page of memory.
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
#[repr(C, align(64))]
pub struct Leaf {
    entries: [Entry; LEAF_ENTRIES],
}

impl Leaf {
    /// A leaf that maps nothing.
    #[must_use]
    pub fn new() -> Self {
        Self { entries: std::array::from_fn(|_| Entry::default()) }
    }

    /// The present mapping of an entry, without its base. Takes no lock; see the module for its
    /// possible values.
    #[must_use]
    #[inline]
    pub fn load(&self, index: usize) -> Mapping {
        let entry = &self.entries[index];
        let word = entry.word.load(Ordering::Acquire);
        let valid = entry.valid.load(Ordering::Acquire);
        if word & KIND_MASK != BUSY && entry.word.load(Ordering::Relaxed) == word {
            return mapping(word, valid);
        }
        entry.load_slowly()
    }

    /// The extent of an entry that has all touched sub-blocks, if it is not shared. Takes no lock.
    ///
    /// A fold or a move holds the extent that it copies from, publishes the copy and then lets go.
    /// A write that finds the hold gone, and had read the entry before, would go where nothing is
    /// read from any more: so the entry is looked at again after the counter. `extra` is `None` for
    /// an extent that never had more than one reference, and so no hold.
    #[must_use]
    #[inline]
    pub fn alone(
        &self,
        index: usize,
        touched: u64,
        extra: impl Fn(PhysicalExtent) -> Option<u32>,
    ) -> Option<PhysicalExtent> {
        let found = self.load(index);
        let physical = found.physical.filter(|_| touched & !found.valid == 0)?;
        match extra(physical) {
            None => return Some(physical),
            Some(0) => {}
            Some(_) => return None,
        }
        let word = self.entries[index].word.load(Ordering::Acquire);
        let is_there = word & KIND_MASK != BUSY && mapping(word, 0).physical == Some(physical);
        is_there.then_some(physical)
    }

    /// The present entry if it is plain, and not just being changed. Takes no lock.
    #[must_use]
    #[inline]
    pub fn load_plain(&self, index: usize) -> Option<Mapping> {
        let entry = &self.entries[index];
        let word = entry.word.load(Ordering::Acquire);
        let valid = entry.valid.load(Ordering::Acquire);
        // `BUSY` has the bit too.
        let is_plain = word & COMPOSITE == 0;
        (is_plain && entry.word.load(Ordering::Relaxed) == word).then(|| mapping(word, valid))
    }

    /// The present entry, with its base, which is looked up in the leaf that `under` finds. Takes
    /// no lock.
    #[inline]
    pub fn load_entry<'a>(&self, index: usize, under: impl Fn() -> Option<&'a Self>) -> Whole {
        if let Some(plain) = self.load_plain(index) {
            return Whole::from(plain);
        }
        self.entries[index]
            .load_whole(|| under().map_or(Mapping::UNMAPPED, |under| under.load(index)))
    }

    /// Sets bits of a mapped entry. The caller holds the leaf's stripe.
    pub fn grow(&self, index: usize, bits: u64) {
        let entry = &self.entries[index];
        debug_assert!(
            matches!(entry.word.load(Ordering::Relaxed) & KIND_MASK, MAPPED | COMPOSITE),
            "bits belong to an extent"
        );
        entry.valid.fetch_or(bits, Ordering::Release);
    }

    /// Replaces the mapping of an entry, which is plain then. The caller holds the leaf's stripe.
    pub fn replace(&self, index: usize, new: Mapping) {
        self.put(index, new, MAPPED);
    }

    /// Replaces an entry of any kind by one of any kind. The base is that of the under leaf, which
    /// is there, and published, if one of the two is composite. The caller holds the stripe.
    pub fn replace_entry(&self, index: usize, new: Whole, under: Option<&Self>) {
        let Some(under) = under else {
            debug_assert!(!matches!(new, Whole::Composite(_)), "a base needs an under leaf");
            return self.replace(index, new.top());
        };
        let (top, base, below) = (new.top(), new.base(), under.load(index));
        if base.physical.is_some() {
            // The base first: a reader that sees a composite entry finds it, and one that no longer
            // finds a bit in the overlay does not find it there either.
            if base != below {
                under.replace(index, base);
            }
            return self.put(index, top, COMPOSITE);
        }
        if below.physical.is_some() && top.physical == self.load(index).physical {
            // Sub-blocks that a discard takes from both: from the base first.
            under.replace(index, Mapping { valid: below.valid & top.valid, ..below });
        }
        self.replace(index, top);
        if below.physical.is_some() {
            under.replace(index, Mapping::UNMAPPED);
        }
    }

    /// An entry as it is read from a page, whose base is read later. No thread reads the leaf yet.
    pub fn install(&self, index: usize, top: Mapping, is_composite: bool) {
        self.put(index, top, if is_composite { COMPOSITE } else { MAPPED });
    }

    /// Whether the entry lies over a base. For those that hold the leaf's stripe.
    #[must_use]
    pub fn is_composite(&self, index: usize) -> bool {
        self.entries[index].word.load(Ordering::Acquire) & KIND_MASK == COMPOSITE
    }

    fn put(&self, index: usize, new: Mapping, kind: u64) {
        let entry = &self.entries[index];
        let old = entry.word.load(Ordering::Relaxed);
        let counter = old.wrapping_add(COUNTER_ONE) & COUNTER_MASK;
        let Some(physical) = new.physical else {
            debug_assert_eq!(new.valid, 0, "bits belong to an extent");
            entry.word.store(counter, Ordering::Release);
            entry.valid.store(0, Ordering::Release);
            return;
        };
        debug_assert!(physical.0 <= PHYSICAL_MASK, "physical extents have 40 bits");
        let word = counter | kind | (physical.0 & PHYSICAL_MASK);
        if old & KIND_MASK != 0 && old & PHYSICAL_MASK != physical.0 {
            entry.word.store(counter | BUSY, Ordering::Release);
        }
        entry.valid.store(new.valid, Ordering::Release);
        entry.word.store(word, Ordering::Release);
    }

    /// Takes over every mapping of another leaf, without bases. The caller holds the stripe of
    /// both, and no thread reads `self` yet.
    pub fn copy_from(&self, other: &Self) {
        for index in 0..LEAF_ENTRIES {
            let (mapping, is_composite) = (other.load(index), other.is_composite(index));
            if mapping != self.load(index) || is_composite != self.is_composite(index) {
                self.install(index, mapping, is_composite);
            }
        }
    }

    /// Unmaps every entry. Writes only to those that were mapped.
    pub fn clear(&self) {
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.word.load(Ordering::Relaxed) & KIND_MASK != 0 {
                self.replace(index, Mapping::UNMAPPED);
            }
        }
    }

    /// Whether no entry is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.word.load(Ordering::Acquire) & KIND_MASK == 0)
    }
}

impl Default for Leaf {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Leaf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapped = (0..LEAF_ENTRIES).map(|i| (i, self.load(i))).filter(|(_, m)| m.is_mapped());
        f.debug_map().entries(mapped).finish()
    }
}

impl Entry {
    /// The entry changed while it was read: waits for its writer.
    #[cold]
    fn load_slowly(&self) -> Mapping {
        let mut backoff = Backoff::default();
        loop {
            let word = self.word.load(Ordering::Acquire);
            let valid = self.valid.load(Ordering::Acquire);
            if word & KIND_MASK != BUSY && self.word.load(Ordering::Relaxed) == word {
                return mapping(word, valid);
            }
            backoff.wait();
        }
    }

    /// The entry with its base. The bits are read before those of the base: a discard takes them
    /// from the base first.
    #[cold]
    fn load_whole(&self, base: impl Fn() -> Mapping) -> Whole {
        let mut backoff = Backoff::default();
        loop {
            let word = self.word.load(Ordering::Acquire);
            let valid = self.valid.load(Ordering::Acquire);
            let below = match word & KIND_MASK {
                COMPOSITE => base(),
                _ => Mapping::UNMAPPED,
            };
            // A composite entry has no base any more when its writer makes it plain.
            let is_whole = word & KIND_MASK != COMPOSITE || below.physical.is_some();
            let is_settled = word & KIND_MASK != BUSY && is_whole;
            if is_settled && self.word.load(Ordering::Relaxed) == word {
                return Whole::of(mapping(word, valid), below);
            }
            backoff.wait();
        }
    }
}

/// Decodes the two words. The bits of an unmapped entry may be those of its next tenancy.
#[inline]
fn mapping(word: u64, valid: u64) -> Mapping {
    if word & KIND_MASK == 0 {
        return Mapping::UNMAPPED;
    }
    Mapping { physical: Some(PhysicalExtent(word & PHYSICAL_MASK)), valid }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn at(physical: u64, valid: u64) -> Mapping {
        Mapping { physical: Some(PhysicalExtent(physical)), valid }
    }

    #[test]
    fn a_leaf_is_a_page_and_starts_unmapped() {
        assert_eq!((size_of::<Leaf>(), align_of::<Leaf>()), (4096, 64));
        let leaf = Leaf::new();
        assert!(leaf.is_empty());
        assert!((0..LEAF_ENTRIES).all(|index| leaf.load(index) == Mapping::UNMAPPED));
    }

    #[test]
    fn entries_keep_their_value_and_nothing_else_changes() {
        let leaf = Leaf::new();
        leaf.replace(0, at(0, 0));
        leaf.replace(255, at(PHYSICAL_MASK, u64::MAX));
        leaf.grow(0, 0b101);
        leaf.grow(0, 0b110);
        assert_eq!(leaf.load(0), at(0, 0b111));
        assert_eq!(leaf.load(255), at(PHYSICAL_MASK, u64::MAX));
        assert!((1..255).all(|index| leaf.load(index) == Mapping::UNMAPPED));
        leaf.replace(0, at(0, 0b001));
        assert_eq!(leaf.load(0), at(0, 0b001));
        leaf.replace(255, at(7, 0b10));
        assert_eq!(leaf.load(255), at(7, 0b10));
        leaf.replace(255, Mapping::UNMAPPED);
        assert_eq!(leaf.load(255), Mapping::UNMAPPED);
    }

    #[test]
    fn every_replacement_changes_word_0_even_when_the_counter_wraps() {
        let leaf = Leaf::new();
        for step in 0..=70_000u64 {
            let before = leaf.entries[3].word.load(Ordering::Relaxed);
            leaf.replace(3, if step % 3 == 0 { Mapping::UNMAPPED } else { at(5, step) });
            assert_ne!(leaf.entries[3].word.load(Ordering::Relaxed), before);
        }
        assert_eq!(leaf.load(3), at(5, 70_000));
    }

    #[test]
    fn a_copy_maps_the_same_also_over_older_content() {
        let (from, to) = (Leaf::new(), Leaf::new());
        from.replace(1, at(10, 1));
        from.replace(2, at(20, 2));
        to.replace(2, at(99, 4));
        to.replace(3, at(98, 4));
        to.copy_from(&from);
        assert!((0..LEAF_ENTRIES).all(|index| to.load(index) == from.load(index)));
        to.clear();
        assert!(to.is_empty() && !from.is_empty());
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use std::fmt::Debug;

    use loom::sync::Arc;

    use super::*;

    type Load = fn(&Leaf) -> Mapping;
    type Replace = fn(&Leaf, Mapping);

    const fn at(physical: u64, valid: u64) -> Mapping {
        Mapping { physical: Some(PhysicalExtent(physical)), valid }
    }

    fn load(leaf: &Leaf) -> Mapping {
        leaf.load(0)
    }

    fn replace(leaf: &Leaf, new: Mapping) {
        leaf.replace(0, new);
    }

    fn load_without_second_look(leaf: &Leaf) -> Mapping {
        let word = leaf.entries[0].word.load(Ordering::Acquire);
        let valid = leaf.entries[0].valid.load(Ordering::Acquire);
        mapping(word, valid)
    }

    fn replace_word_first(leaf: &Leaf, new: Mapping) {
        let entry = &leaf.entries[0];
        let counter = entry.word.load(Ordering::Relaxed).wrapping_add(COUNTER_ONE) & COUNTER_MASK;
        let word = new.physical.map_or(0, |physical| physical.0 | MAPPED);
        entry.word.store(counter | word, Ordering::Release);
        entry.valid.store(new.valid, Ordering::Release);
    }

    fn replace_bits_first(leaf: &Leaf, new: Mapping) {
        leaf.entries[0].valid.store(new.valid, Ordering::Release);
        replace_word_first(leaf, new);
    }

    fn replace_without_counter(leaf: &Leaf, new: Mapping) {
        let entry = &leaf.entries[0];
        entry.word.store(BUSY, Ordering::Release);
        entry.valid.store(new.valid, Ordering::Release);
        let word = new.physical.map_or(0, |physical| physical.0 | MAPPED);
        entry.word.store(word, Ordering::Release);
    }

    /// A reader sees the mappings of `states`, each as it was, and in their order.
    fn sees_only(states: &'static [Mapping], replace: Replace, load: Load) {
        loom::model(move || {
            let leaf = Arc::new(Leaf::new());
            replace(&leaf, states[0]);
            let writer = {
                let leaf = Arc::clone(&leaf);
                loom::thread::spawn(move || {
                    for (old, new) in states.iter().zip(&states[1..]) {
                        let grown = new.valid & old.valid == old.valid;
                        if old.physical == new.physical && grown {
                            leaf.grow(0, new.valid);
                        } else {
                            replace(&leaf, *new);
                        }
                    }
                })
            };
            let first = place_of(states, load(&leaf));
            let second = place_of(states, load(&leaf));
            assert!(first <= second, "went back from {first} to {second}");
            writer.join().unwrap();
            assert_eq!(leaf.load(0), *states.last().unwrap());
        });
    }

    fn place_of<T: PartialEq + Debug>(states: &[T], seen: T) -> usize {
        let place = states.iter().position(|state| *state == seen);
        place.unwrap_or_else(|| panic!("{seen:?} never was"))
    }

    const GROWN_THEN_MOVED: &[Mapping] = &[at(1, 0b1), at(1, 0b11), at(2, 0b100)];
    const UNMAPPED_THEN_REUSED: &[Mapping] =
        &[at(1, 0b11), Mapping::UNMAPPED, at(1, 0b100), at(1, 0b1100)];
    const DISCARDED: &[Mapping] = &[at(1, 0b11), at(1, 0b10), at(1, 0b110), Mapping::UNMAPPED];
    const MOVED: &[Mapping] = &[at(1, 0b1), at(2, 0b10)];
    const MOVED_AND_BACK: &[Mapping] = &[at(1, 0b1), at(2, 0b10), at(1, 0b100)];

    #[test]
    fn loom_leaf_grow_then_move() {
        sees_only(GROWN_THEN_MOVED, replace, load);
    }

    #[test]
    fn loom_leaf_unmap_then_reuse() {
        sees_only(UNMAPPED_THEN_REUSED, replace, load);
    }

    #[test]
    fn loom_leaf_discard_of_a_part() {
        sees_only(DISCARDED, replace, load);
    }

    #[test]
    fn loom_leaf_move_and_back() {
        sees_only(MOVED_AND_BACK, replace, load);
    }

    #[test]
    #[should_panic(expected = "never was")]
    fn loom_leaf_finds_a_missing_second_look() {
        sees_only(GROWN_THEN_MOVED, replace, load_without_second_look);
    }

    #[test]
    #[should_panic(expected = "never was")]
    fn loom_leaf_finds_two_stores_word_first() {
        sees_only(MOVED, replace_word_first, load);
    }

    #[test]
    #[should_panic(expected = "never was")]
    fn loom_leaf_finds_two_stores_bits_first() {
        sees_only(MOVED, replace_bits_first, load);
    }

    #[test]
    #[should_panic(expected = "never was")]
    fn loom_leaf_finds_a_missing_counter() {
        sees_only(MOVED_AND_BACK, replace_without_counter, load);
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_entry;
