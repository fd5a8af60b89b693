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

    /// Notes that a slot, or an entry of its leaf, has changed. After the change.
    pub fn mark_dirty(&self, slot: SlotIndex) {
        if let Some(word) = self.dirty.get((slot.0 / SLOTS_PER_WORD) as usize) {
            // Never a look first and a write only if needed: the look could see a mark that is
            // being taken by somebody who doesn't see the change yet.
            word.fetch_or(1 << (slot.0 % SLOTS_PER_WORD), Ordering::AcqRel);
        }
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

    /// Copies slots and marks to a directory that nobody else uses yet, as far as it reaches.
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
