//! The directory of a volume: which leaf maps which part of it, and which parts changed.

use crate::sync::{AtomicU32, AtomicU64, Ordering, zeroed_slice};
use crate::units::{LeafId, SlotIndex};

/// Slots whose marks share a word of the dirty bitmap.
const SLOTS_PER_WORD: u32 = 64;

/// A leaf per slot, and a mark per slot that a checkpoint must write.
///
/// Lives in zeroed memory that is not touched before it is used: the directory of a volume of
/// 1 PiB costs address space at first, not memory.
#[derive(Debug)]
pub struct Directory {
    slots: Box<[AtomicU32]>,
    dirty: Box<[AtomicU64]>,
}

impl Directory {
    /// A directory of empty slots. `None` when there is no memory for it.
    #[must_use]
    pub fn new(slot_count: u32) -> Option<Self> {
        let words = slot_count.div_ceil(SLOTS_PER_WORD);
        Some(Self {
            slots: zeroed_slice(slot_count as usize)?,
            dirty: zeroed_slice(words as usize)?,
        })
    }

    /// Slots of the directory.
    #[must_use]
    pub fn slot_count(&self) -> u32 {
        u32::try_from(self.slots.len()).expect("made from a u32")
    }

    /// The leaf of a slot; none outside the directory.
    #[must_use]
    #[inline]
    pub fn load(&self, slot: SlotIndex) -> Option<LeafId> {
        let id = self.slots.get(slot.0 as usize)?.load(Ordering::Acquire);
        (id != 0).then_some(LeafId(id))
    }

    /// Sets the leaf of a slot. The caller holds the stripe, and the slot exists.
    pub fn store(&self, slot: SlotIndex, leaf: Option<LeafId>) {
        debug_assert!(slot.0 < self.slot_count(), "slot {slot} of {}", self.slot_count());
        if let Some(cell) = self.slots.get(slot.0 as usize) {
            cell.store(leaf.map_or(0, |leaf| leaf.0), Ordering::Release);
        }
    }

    /// The slots in use and their leaves, in order.
    pub fn iter(&self) -> impl Iterator<Item = (SlotIndex, LeafId)> {
        (0..self.slot_count())
            .filter_map(|slot| self.load(SlotIndex(slot)).map(|leaf| (SlotIndex(slot), leaf)))
    }

    /// Notes that a slot, or an entry of its leaf, has changed. After the change. `true` if it
    /// was not noted before.
    pub fn mark_dirty(&self, slot: SlotIndex) -> bool {
        let bit = 1 << (slot.0 % SLOTS_PER_WORD);
        self.dirty.get((slot.0 / SLOTS_PER_WORD) as usize).is_some_and(|word| {
            // Always writes, without a check before: the check could see a mark that another thread
            // is taking without having seen the change.
            word.fetch_or(bit, Ordering::AcqRel) & bit == 0
        })
    }

    /// Whether the slot has changed since its mark was taken.
    #[must_use]
    pub fn is_dirty(&self, slot: SlotIndex) -> bool {
        let word = self.dirty.get((slot.0 / SLOTS_PER_WORD) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (slot.0 % SLOTS_PER_WORD) & 1 == 1)
    }

    /// Words of 64 slots in the dirty bitmap.
    #[must_use]
    pub fn dirty_words(&self) -> usize {
        self.dirty.len()
    }

    /// Takes the marks of 64 slots, lowest first. The caller sees every change that was marked.
    #[must_use]
    pub fn take_dirty_word(&self, word_index: usize) -> u64 {
        let Some(word) = self.dirty.get(word_index) else { return 0 };
        // Words of untouched memory are only read, so they stay untouched.
        if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::AcqRel) }
    }

    /// Copies slots and marks to a directory that is not shared yet, up to its length.
    pub fn copy_to(&self, other: &Self) {
        // Zeroes are not written: both sides may be memory that nothing has touched.
        for (from, to) in self.slots.iter().zip(&other.slots) {
            let leaf = from.load(Ordering::Acquire);
            if leaf != 0 {
                to.store(leaf, Ordering::Release);
            }
        }
        for (index, (from, to)) in self.dirty.iter().zip(&other.dirty).enumerate() {
            let marks = from.load(Ordering::Acquire) & other.existing_slots(index);
            if marks != 0 {
                to.fetch_or(marks, Ordering::AcqRel);
            }
        }
    }

    /// Bits of the slots of a word of the dirty bitmap that exist.
    fn existing_slots(&self, word_index: usize) -> u64 {
        let in_last = self.slot_count() % SLOTS_PER_WORD;
        if word_index + 1 == self.dirty.len() && in_last != 0 {
            (1 << in_last) - 1
        } else {
            u64::MAX
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn slots_hold_leaves_and_nothing_is_outside() {
        let directory = Directory::new(3).unwrap();
        assert_eq!((directory.slot_count(), directory.dirty_words()), (3, 1));
        directory.store(SlotIndex(2), Some(LeafId(9)));
        assert_eq!(directory.load(SlotIndex(2)), Some(LeafId(9)));
        assert_eq!(directory.load(SlotIndex(1)), None);
        assert_eq!(directory.load(SlotIndex(3)), None);
        assert_eq!(directory.load(SlotIndex(u32::MAX)), None);
        assert_eq!(directory.iter().collect::<Vec<_>>(), [(SlotIndex(2), LeafId(9))]);
        directory.store(SlotIndex(2), None);
        assert_eq!(directory.iter().count(), 0);
    }

    #[test]
    fn marks_are_taken_once() {
        let directory = Directory::new(65).unwrap();
        directory.mark_dirty(SlotIndex(1));
        directory.mark_dirty(SlotIndex(64));
        assert!(directory.is_dirty(SlotIndex(64)) && !directory.is_dirty(SlotIndex(63)));
        assert_eq!(directory.take_dirty_word(0), 0b10);
        assert_eq!(directory.take_dirty_word(0), 0);
        assert_eq!(directory.take_dirty_word(1), 1);
        assert_eq!(directory.take_dirty_word(2), 0);
    }

    #[test]
    fn a_copy_reaches_as_far_as_the_smaller_directory() {
        for (from_slots, to_slots) in [(70, 70), (70, 66), (70, 64), (3, 200)] {
            let from = Directory::new(from_slots).unwrap();
            let to = Directory::new(to_slots).unwrap();
            for slot in (0..from_slots).map(SlotIndex) {
                from.store(slot, Some(LeafId(slot.0 + 1)));
                from.mark_dirty(slot);
            }
            from.copy_to(&to);
            let common = from_slots.min(to_slots);
            assert_eq!(to.iter().map(|(slot, _)| slot.0).max(), Some(common - 1));
            let marked = (0..to.dirty_words()).map(|word| to.take_dirty_word(word).count_ones());
            assert_eq!(marked.sum::<u32>(), common);
        }
    }

    #[test]
    fn the_largest_volume_costs_no_memory_before_it_is_used() {
        let slots = crate::geometry::Geometry::new(64 << 10)
            .unwrap()
            .slots_for(crate::geometry::MAX_VOLUME_SIZE);
        let before = resident_pages();
        let directory = Directory::new(slots).unwrap();
        directory.store(SlotIndex(slots - 1), Some(LeafId(1)));
        directory.mark_dirty(SlotIndex(slots - 1));
        // 256 MiB of slots; other tests of the process may use a little at the same time.
        assert!(resident_pages() < before + (64 << 20) / 4096);
        assert_eq!(directory.load(SlotIndex(slots - 1)), Some(LeafId(1)));
    }

    fn resident_pages() -> u64 {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    /// A change was taken with its mark, or is still marked.
    fn no_change_is_lost(mark: fn(&Directory)) {
        loom::model(move || {
            let directory = Arc::new(Directory::new(1).unwrap());
            directory.mark_dirty(SlotIndex(0));
            let worker = {
                let directory = Arc::clone(&directory);
                thread::spawn(move || {
                    directory.store(SlotIndex(0), Some(LeafId(1)));
                    mark(&directory);
                })
            };
            assert_eq!(directory.take_dirty_word(0), 1);
            let seen = directory.load(SlotIndex(0));
            worker.join().unwrap();
            assert!(seen.is_some() || directory.is_dirty(SlotIndex(0)), "lost");
        });
    }

    #[test]
    fn loom_directory_no_change_is_lost() {
        no_change_is_lost(|directory| {
            let _ = directory.mark_dirty(SlotIndex(0));
        });
    }

    #[test]
    #[should_panic(expected = "lost")]
    fn loom_directory_finds_a_look_before_the_mark() {
        no_change_is_lost(|directory| {
            if !directory.is_dirty(SlotIndex(0)) {
                directory.mark_dirty(SlotIndex(0));
            }
        });
    }
}
