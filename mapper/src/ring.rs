//! The delta ring: every change of the map in shared memory before it becomes visible, so that
//! the death of the process loses no answered write (rules R9, R13, R14).
//!
//! A slot has one producer, which publishes, and one consumer, the engine, which reads and trims.
//! A record counts when its checksum fits and its position continues the slot. The checksum is
//! stored last, with Release, and over an old record whose position was another one: so whatever
//! prefix of the stores a killed process left, the record is there as a whole or isn't there.

use std::ops::Range;
use std::sync::Arc;

use self::recovery::{Group, check_header, corrupt, header};
use crate::error::MapperError;
use crate::format::record::Change;
use crate::format::ring::{
    HEADER_WORDS, LINE_WORDS, MAGIC, MAX_CAPACITY, MIN_CAPACITY, R_POSITION, R_SUM, RECORD_WORDS,
    W_CURRENT, W_MAGIC, W_NEXT, W_POISONED, body, record_sum, seed,
};
use crate::format::{FormatError, PoolId, Problem};
use crate::sync::{AtomicU64, CachePadded, Ordering};
use crate::units::Lsn;

pub use crate::format::ring::{Dropped, MAX_SLOTS, words_needed};

/// Memory that outlives the process: the caller maps it and keeps it mapped. There may be none yet
/// behind slots that nothing was stored to; the words up to them are always there.
pub trait RingMemory: Send + Sync + std::fmt::Debug {
    /// All words of it, the same ones at each call.
    fn words(&self) -> &[AtomicU64];

    /// Makes zeroes of these words.
    fn clear(&self, words: Range<usize>) {
        self.words()[words].iter().for_each(|word| put(word, 0, Ordering::Relaxed));
    }

    /// Has memory behind these words, whatever they hold, so that they can be stored to. False if
    /// there is too little.
    fn prepare(&self, _words: Range<usize>) -> bool {
        true
    }

    /// Whether one of these words may be other than zero. Where none is, they need not be loaded.
    fn holds(&self, _words: Range<usize>) -> bool {
        true
    }
}

/// A ring's memory on the heap: for tests, and for pools that may lose unflushed data.
#[derive(Debug)]
pub struct VecRingMemory(Box<[AtomicU64]>);

impl VecRingMemory {
    /// Zeroed memory for a ring.
    #[must_use]
    pub fn new(slots: usize, capacity: u64) -> Self {
        Self((0..words_needed(slots, capacity)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Returns a copy of another memory's present content: adopting a ring repairs it, and a reader
    /// must not change it.
    pub(crate) fn copy_of(memory: &dyn RingMemory) -> Self {
        let parts = memory.words().chunks(PAGE_WORDS).enumerate();
        let copies = parts.flat_map(|(number, part)| {
            let first = number * PAGE_WORDS;
            let holds = memory.holds(first..first + part.len());
            let copy = move |word: &AtomicU64| if holds { word.load(Ordering::Acquire) } else { 0 };
            part.iter().map(move |word| AtomicU64::new(copy(word)))
        });
        Self(copies.collect())
    }
}

impl RingMemory for VecRingMemory {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// Why the memory holds no ring that can be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingProblem {
    /// The memory has no ring.
    #[error("delta ring is missing")]
    Missing,
    /// Another version of this program wrote it.
    #[error("delta ring has version {found}, this build reads version 1")]
    Unsupported {
        /// Its version.
        found: u64,
    },
    /// The ring belongs to another pool.
    #[error("delta ring belongs to another pool")]
    Foreign,
    /// The host was started again since.
    #[error("delta ring is of an earlier boot of the host")]
    OtherBoot,
    /// A flush failed (rule R8): only data on the media may be used.
    #[error("delta ring is poisoned by a failed flush")]
    Poisoned,
    /// The ring has content that no sequence of stores leaves behind.
    #[error(transparent)]
    Corrupt(#[from] FormatError),
}

/// Words of a page of 4 KiB, in which memory is there or not.
const PAGE_WORDS: usize = 512;

/// A flush failed while requests were served.
const POISONED: u64 = 1;
/// A flush failed while the pool was being opened.
const POISONED_UNHEARD: u64 = 2;

/// A change found in the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingRecord {
    /// The slot that it was published in.
    pub slot: usize,
    /// Position of its first unit, counted from 1 over the life of the ring.
    pub position: u64,
    /// Units that it takes: the next record is at `position + units`.
    pub units: u64,
    /// When it happened.
    pub lsn: Lsn,
    /// The change.
    pub change: Change,
    /// The reference that it dropped.
    pub dropped: Dropped,
}

/// A ring in use by this process.
#[derive(Debug)]
pub struct DeltaRing {
    memory: Arc<dyn RingMemory>,
    slots: usize,
    capacity: u64,
    seed: u64,
    producers: Box<[CachePadded<Producer>]>,
}

/// The state of a slot's producer. Not in shared memory: adopting reconstructs it.
#[derive(Debug)]
struct Producer {
    /// Position of the last unit published.
    head: AtomicU64,
    /// Units promised to changes that are not published yet.
    reserved: AtomicU64,
}

impl DeltaRing {
    /// Makes an empty ring of the memory, whatever it held.
    pub fn format(
        memory: Arc<dyn RingMemory>,
        pool_id: &PoolId,
        boot_id: &[u8; 16],
        slots: usize,
        capacity: u64,
    ) -> Result<Self, MapperError> {
        Self::format_for(memory, pool_id, boot_id, (slots, capacity), None, None)
    }

    /// The same, with memory for one of its slots. Without it nothing changes. A ring that is
    /// ignored for the open `ignored` stays so at each moment, also if the process dies meanwhile.
    pub(crate) fn format_for(
        memory: Arc<dyn RingMemory>,
        pool_id: &PoolId,
        boot_id: &[u8; 16],
        (slots, capacity): (usize, u64),
        own: Option<usize>,
        ignored: Option<u64>,
    ) -> Result<Self, MapperError> {
        let invalid = |field, value, allowed| Err(MapperError::Invalid { field, value, allowed });
        if !(1..=MAX_SLOTS).contains(&slots) {
            return invalid("ring slots", slots as u64, "from 1 to 64");
        }
        if !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
            return invalid("ring records per slot", capacity, "from 4 to 2^26");
        }
        let words = memory.words();
        let needed = words_needed(slots, capacity);
        if words.len() < needed {
            return invalid("ring memory words", words.len() as u64, "what words_needed() gives");
        }
        let ring = Self::with(Arc::clone(&memory), pool_id, slots, capacity);
        if own.is_some_and(|slot| !ring.prepare(slot)) {
            return Err(MapperError::NoRingMemory);
        }
        if let Some(open_id) = ignored {
            // It may be this open's by its next id alone, which is cleared.
            ring.set_current(open_id);
        }
        // Without its magic it is no ring, until the last store makes it one.
        put(&words[W_MAGIC], 0, Ordering::Release);
        let cells = line(slots);
        let stays = |at: &usize| ignored.is_some() && [W_CURRENT, W_POISONED].contains(at);
        for at in (1..cells).filter(|at| !stays(at)) {
            put(&words[at], 0, Ordering::Relaxed);
        }
        let kept = own.map_or(needed..needed, |slot| ring.cells(slot));
        memory.clear(cells..kept.start);
        for word in &words[kept.clone()] {
            put(word, 0, Ordering::Relaxed);
        }
        memory.clear(kept.end..needed);
        for slot in 0..slots {
            put(&words[line(slot)], 1, Ordering::Relaxed);
        }
        let header = header(pool_id, boot_id, slots, capacity);
        for (word, value) in words.iter().zip(header).skip(1) {
            put(word, value, Ordering::Relaxed);
        }
        put(&words[W_MAGIC], MAGIC, Ordering::Release);
        Ok(ring)
    }

    /// Takes over the ring that a former process left.
    pub fn adopt(
        memory: Arc<dyn RingMemory>,
        pool_id: &PoolId,
        boot_id: &[u8; 16],
    ) -> Result<Self, RingProblem> {
        let (slots, capacity) = check_header(memory.words(), pool_id, boot_id)?;
        let ring = Self::with(memory, pool_id, slots, capacity);
        for (slot, producer) in ring.producers.iter().enumerate() {
            let scan = ring.scan(slot, |_| ())?;
            producer.0.head.store(scan.head, Ordering::Relaxed);
            ring.forget(slot, scan);
        }
        Ok(ring)
    }

    /// Has memory for a slot. False if there is too little: nothing may be published in it then.
    #[must_use]
    pub fn prepare(&self, slot: usize) -> bool {
        self.memory.prepare(self.cells(slot))
    }

    /// The open that the ring serves.
    #[must_use]
    pub fn current(&self) -> u64 {
        self.memory.words()[W_CURRENT].load(Ordering::Acquire)
    }

    /// The open that it is about to serve (rule R14).
    #[must_use]
    pub fn next(&self) -> u64 {
        self.memory.words()[W_NEXT].load(Ordering::Acquire)
    }

    /// Announces an open, before the superblock names it.
    pub fn set_next(&self, id: u64) {
        put(&self.memory.words()[W_NEXT], id, Ordering::SeqCst);
    }

    /// Makes an open the current one, once the superblock names it.
    pub fn set_current(&self, id: u64) {
        put(&self.memory.words()[W_CURRENT], id, Ordering::SeqCst);
    }

    /// Forbids every later process to adopt the ring (R8). Clients received errors.
    pub fn poison(&self) {
        put(&self.memory.words()[W_POISONED], POISONED, Ordering::SeqCst);
    }

    /// The same before the pool served clients, so that none received an error.
    pub(crate) fn poison_unreported(&self) {
        poison_unreported(&*self.memory);
    }

    /// Takes the poison back, before the first request: the ring has nothing in it that a failed
    /// flush could have made wrong.
    pub(crate) fn unpoison(&self) {
        put(&self.memory.words()[W_POISONED], 0, Ordering::SeqCst);
    }

    /// Whether it is poisoned.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory.words()[W_POISONED].load(Ordering::Acquire) != 0
    }

    /// Slots of the ring.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// Units that a slot can hold.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Position of the slot's last published unit; 0 before the first. Units up to here that are
    /// not trimmed can be [`read`](Self::read).
    #[must_use]
    pub fn head(&self, slot: usize) -> u64 {
        self.producers[slot].0.head.load(Ordering::Acquire)
    }

    /// Units of the slot that are published and not trimmed.
    #[must_use]
    pub fn used(&self, slot: usize) -> u64 {
        (self.head(slot) + 1).saturating_sub(self.first_needed(slot))
    }

    /// Whether half of the slot or more is in use or promised.
    #[must_use]
    pub fn half_full(&self, slot: usize) -> bool {
        let reserved = self.producers[slot].0.reserved.load(Ordering::Relaxed);
        (self.used(slot) + reserved) * 2 >= self.capacity
    }

    /// Reserves room for `units` units. For the slot's producer only.
    #[must_use]
    pub fn reserve(&self, slot: usize, units: u64) -> bool {
        let producer = &self.producers[slot].0;
        // Acquire of the trim position in used(): the engine no longer reads the freed room.
        let reserved = producer.reserved.load(Ordering::Relaxed).saturating_add(units);
        let fits = self.used(slot).saturating_add(reserved) <= self.capacity;
        if fits {
            producer.reserved.store(reserved, Ordering::Relaxed);
        }
        fits
    }

    /// The rule taken out: missing room is promised, and its records are lost (R9).
    #[cfg(feature = "mutations")]
    pub(crate) fn force_reserve(&self, slot: usize, units: u64) {
        let producer = &self.producers[slot].0;
        let reserved = producer.reserved.load(Ordering::Relaxed);
        producer.reserved.store(reserved + units, Ordering::Relaxed);
    }

    /// Releases reserved room that was not used. For the slot's producer only.
    pub fn release(&self, slot: usize, units: u64) {
        let producer = &self.producers[slot].0;
        let reserved = producer.reserved.load(Ordering::Relaxed);
        debug_assert!(units <= reserved, "more units given back than were reserved");
        producer.reserved.store(reserved.saturating_sub(units), Ordering::Relaxed);
    }

    /// Publishes a change into room that was reserved. Returns the position of its first unit, or
    /// `None`, with nothing stored, if there was no such room. For the slot's producer only.
    #[must_use]
    pub fn publish(&self, slot: usize, lsn: Lsn, change: &Change, dropped: Dropped) -> Option<u64> {
        let producer = &self.producers[slot].0;
        let reserved = producer.reserved.load(Ordering::Relaxed);
        let left = reserved.checked_sub(change.units() as u64)?;
        let first = producer.head.load(Ordering::Relaxed) + 1;
        let words = self.memory.words();
        let mut position = first;
        let mut dropped = dropped.to_word();
        change.for_each_unit(0, |unit| {
            let body = body(unit, lsn.0, dropped, position);
            let cell = &words[self.cell(slot, position)..][..RECORD_WORDS];
            for (word, value) in cell.iter().zip(body).take(R_POSITION) {
                put(word, value, Ordering::Relaxed);
            }
            // Release here too, so that a new position never stands over old words.
            put(&cell[R_POSITION], position, Ordering::Release);
            put(&cell[R_SUM], record_sum(&body, self.seed), Ordering::Release);
            position += 1;
            dropped = 0;
        });
        producer.reserved.store(left, Ordering::Relaxed);
        producer.head.store(position - 1, Ordering::Release);
        Some(first)
    }

    /// The change at a position. `None` if it isn't published yet, or not as a whole.
    ///
    /// Never `None` for the first position of a change up to [`head`](Self::head) that is not
    /// trimmed, unless another program wrote to the memory.
    #[must_use]
    pub fn read(&self, slot: usize, position: u64) -> Option<RingRecord> {
        // Most looks are at a slot without news, whose cell holds an old record.
        if position > self.head(slot) {
            return None;
        }
        match self.group(slot, position, u64::MAX) {
            Ok(Group::Whole(record)) => Some(record),
            _ => None,
        }
    }

    /// Frees everything before `first_needed`, which is the first position of a change or the one
    /// after the last. For the engine only.
    pub fn trim(&self, slot: usize, first_needed: u64) {
        if first_needed > self.first_needed(slot) {
            debug_assert!(first_needed <= self.head(slot) + 1, "trimming unpublished units");
            // Release: the engine's reads of the freed room happened before.
            put(&self.memory.words()[line(slot)], first_needed, Ordering::Release);
        }
    }

    /// The first position of the slot that isn't trimmed.
    #[must_use]
    pub fn first_needed(&self, slot: usize) -> u64 {
        self.memory.words()[line(slot)].load(Ordering::Acquire)
    }

    /// Every change that isn't trimmed, of all slots, in the order of their LSNs.
    pub fn recover(&self) -> Result<Vec<RingRecord>, RingProblem> {
        let mut records = Vec::new();
        for slot in 0..self.slots {
            self.scan(slot, |record| records.push(record))?;
        }
        records.sort_unstable_by_key(|record| record.lsn);
        if let Some(pair) = records.windows(2).find(|pair| pair[0].lsn == pair[1].lsn) {
            let problem = Problem::field("LSN", pair[1].lsn.0, "of one change only");
            return Err(corrupt(problem, pair[1].slot, pair[1].position));
        }
        Ok(records)
    }

    fn with(memory: Arc<dyn RingMemory>, pool_id: &PoolId, slots: usize, capacity: u64) -> Self {
        let producer =
            |_| CachePadded(Producer { head: AtomicU64::new(0), reserved: AtomicU64::new(0) });
        let producers = (0..slots).map(producer).collect();
        Self { memory, slots, capacity, seed: seed(pool_id), producers }
    }

    /// The words of a slot's records.
    fn cells(&self, slot: usize) -> Range<usize> {
        self.cell(slot, 1)..self.cell(slot, self.capacity) + RECORD_WORDS
    }

    /// First word of the record at a position.
    #[inline]
    fn cell(&self, slot: usize, position: u64) -> usize {
        let cell = slot as u64 * self.capacity + position.wrapping_sub(1) % self.capacity;
        #[expect(clippy::cast_possible_truncation, reason = "at most 2^32, and usize has 64 bits")]
        let cell = cell as usize;
        line(self.slots) + cell * RECORD_WORDS
    }
}

/// Whether the memory holds the ring of this open, and a flush failed while requests were served:
/// clients received errors, and the pool opens as after power loss.
pub fn is_ignored(memory: &dyn RingMemory, open_id: u64) -> bool {
    names(memory, open_id) && poison_was_reported(memory)
}

/// Whether the memory holds the ring of this open, going by its header alone.
fn names(memory: &dyn RingMemory, open_id: u64) -> bool {
    let word = |at: usize| memory.words().get(at).map(|word| word.load(Ordering::Acquire));
    word(W_CURRENT) == Some(open_id) || word(W_NEXT) == Some(open_id)
}

/// Forbids every later process to adopt this memory, although no client received an error: the next
/// opening must accept the loss. Unless clients have received errors of an earlier failure: nothing
/// was answered since, so nothing more can be lost.
pub(crate) fn poison_unreported(memory: &dyn RingMemory) {
    if let Some(word) = memory.words().get(W_POISONED)
        && !poison_was_reported(memory)
    {
        put(word, POISONED_UNHEARD, Ordering::SeqCst);
    }
}

/// Whether clients received errors of the failure that poisoned the ring.
fn poison_was_reported(memory: &dyn RingMemory) -> bool {
    memory.words().get(W_POISONED).is_some_and(|word| word.load(Ordering::Acquire) == POISONED)
}

/// Where a slot's trim position lies; that of one more than there are is where the records begin.
const fn line(slot: usize) -> usize {
    HEADER_WORDS + slot * LINE_WORDS
}

/// The one way into shared memory, so that tests can cut a process off after any store.
#[inline]
fn put(word: &AtomicU64, value: u64, ordering: Ordering) {
    if stores::allowed() {
        word.store(value, ordering);
    }
}

#[cfg(any(test, feature = "mutations"))]
pub mod stores;
#[cfg(not(any(test, feature = "mutations")))]
mod stores {
    pub(super) const fn allowed() -> bool {
        true
    }
}

mod recovery;
#[cfg(test)]
mod tests;
