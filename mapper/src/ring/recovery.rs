//! Reads a ring, and determines the state in which a former process left it.

use std::ops::Range;

use super::{DeltaRing, PAGE_WORDS, RingProblem, RingRecord, put};
use crate::format::record::{self, MAX_SINGLE_UNITS, MAX_UNITS, UNIT_SIZE};
use crate::format::ring::Dropped;
use crate::format::ring::{
    Body, HEADER_WORDS, MAGIC, MAGIC_MASK, MAX_CAPACITY, MAX_SLOTS, MIN_CAPACITY, R_DROPPED, R_LSN,
    R_POSITION, R_SUM, RECORD_WORDS, W_BOOT, W_CAPACITY, W_MAGIC, W_POISONED, W_POOL, W_SLOTS,
    W_SUM, identity_words, record_sum, words_needed,
};
use crate::format::{FormatError, Limits, Place, PoolId, Problem, Structure};
use crate::sync::{AtomicU64, Ordering};
use crate::units::Lsn;

/// The content at a position.
pub(super) enum Group {
    Whole(RingRecord),
    /// This many units of an incomplete change.
    Partial(u64),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Scan {
    /// Last position of the last whole change.
    pub(super) head: u64,
    /// Units behind it of a change that was cut off.
    pub(super) partial: u64,
}

impl DeltaRing {
    /// The record in the cell of a position, whatever its own position is, if its checksum fits.
    fn load(&self, slot: usize, position: u64) -> Option<Body> {
        let cell = &self.memory.words()[self.cell(slot, position)..][..RECORD_WORDS];
        // Acquire: with the checksum come the words that were stored before it.
        let sum = cell[R_SUM].load(Ordering::Acquire);
        let position = cell[R_POSITION].load(Ordering::Acquire);
        if position == 0 {
            return None;
        }
        let mut body = [0; R_SUM];
        for (value, word) in body.iter_mut().zip(cell).take(R_POSITION) {
            *value = word.load(Ordering::Relaxed);
        }
        body[R_POSITION] = position;
        (record_sum(&body, self.seed) == sum).then_some(body)
    }

    /// Reads the change at a position that ends before `end`.
    pub(super) fn group(&self, slot: usize, position: u64, end: u64) -> Result<Group, FormatError> {
        let fault = |problem: Problem| {
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            problem.of(Structure::RingRecord, Place::Ring { slot, position })
        };
        let Some(head) = self.load(slot, position).filter(|head| head[R_POSITION] == position)
        else {
            return Ok(Group::Partial(0));
        };
        let [_, units, ..] = head[0].to_le_bytes();
        let count = u64::from(units);
        if count == 0 || count > MAX_UNITS as u64 || position.saturating_add(count) > end {
            return Err(fault(Problem::field("units", count, "from 1 to 113, within the room")));
        }
        let (mut few, mut many) = ([0; MAX_SINGLE_UNITS * UNIT_SIZE], Vec::new());
        let bytes = if usize::from(units) <= MAX_SINGLE_UNITS {
            &mut few[..usize::from(units) * UNIT_SIZE]
        } else {
            // A group of snapshots: every commit reads all changes here, and few are one.
            many.resize(usize::from(units) * UNIT_SIZE, 0);
            &mut many[..]
        };
        for (unit, number) in bytes.chunks_exact_mut(UNIT_SIZE).zip(0..count) {
            let next = position + number;
            let loaded = if number == 0 { Some(head) } else { self.load(slot, next) };
            let Some(body) = loaded.filter(|body| body[R_POSITION] == next) else {
                return Ok(Group::Partial(number));
            };
            if body[R_LSN] != head[R_LSN] {
                let (field, found, expected) = ("LSN of a unit", body[R_LSN], head[R_LSN]);
                return Err(fault(Problem::Mismatch { field, found, expected }));
            }
            for (bytes, word) in unit.as_chunks_mut::<8>().0.iter_mut().zip(body) {
                *bytes = word.to_le_bytes();
            }
        }
        // A commit and a replay check the change against their pool.
        let limits = Limits::layout().with_composite(true);
        let (change, _, _) = record::try_decode(bytes, &limits).map_err(fault)?;
        let dropped = Dropped::from_word(head[R_DROPPED])
            .ok_or_else(|| fault(Problem::field("dropped", head[R_DROPPED], "extent or leaf")))?;
        let lsn = Lsn(head[R_LSN]);
        Ok(Group::Whole(RingRecord { slot, position, units: count, lsn, change, dropped }))
    }

    /// Visits every whole change of a slot, and checks that nothing lies beyond the last.
    pub(super) fn scan(
        &self,
        slot: usize,
        mut each: impl FnMut(RingRecord),
    ) -> Result<Scan, RingProblem> {
        let trim = self.first_needed(slot);
        if trim == 0 || trim > u64::MAX / 2 {
            return Err(corrupt(Problem::field("trim position", trim, "from 1 to 2^63"), slot, 0));
        }
        let mut next = trim;
        // A slot that was never used has no memory, and gets none.
        let is_unused = trim == 1 && !self.memory.holds(page_of(self.cell(slot, 1)));
        let partial = loop {
            if is_unused {
                break 0;
            }
            match self.group(slot, next, trim + self.capacity)? {
                Group::Whole(record) => {
                    next += record.units;
                    each(record);
                }
                Group::Partial(units) => break units,
            }
        };
        let scan = Scan { head: next - 1, partial };
        self.check_beyond(slot, trim, scan)?;
        Ok(scan)
    }

    /// A record beyond the first gap was answered and can't be reached: that must not go unseen.
    fn check_beyond(&self, slot: usize, trim: u64, scan: Scan) -> Result<(), RingProblem> {
        let last = scan.head + scan.partial;
        let mut page = 0..0;
        let mut holds = false;
        for cell in 1..=self.capacity {
            let word = self.cell(slot, cell);
            if !page.contains(&word) {
                page = page_of(word);
                holds = self.memory.holds(page.clone());
            }
            let Some(body) = holds.then(|| self.load(slot, cell)).flatten() else { continue };
            let position = body[R_POSITION];
            if position > last {
                let problem = Problem::field("position", position, "without a gap before it");
                return Err(corrupt(problem, slot, position));
            }
        }
        // The last record trimmed still lies there, unless a publish that was cut off can have
        // reached its cell. If it doesn't, the trim position is wrong.
        let reached = scan.head + MAX_UNITS as u64 >= trim - 1 + self.capacity;
        let there = || self.load(slot, trim - 1).is_some_and(|body| body[R_POSITION] == trim - 1);
        if trim > 1 && !reached && !there() {
            let problem = Problem::field("trim position", trim, "behind a record");
            return Err(corrupt(problem, slot, trim));
        }
        Ok(())
    }

    /// Makes the units of a change that was cut off invalid: else the next change would be
    /// published over some of them, and the rest would follow it. Backwards, so that at each
    /// moment a shorter change is cut off there.
    pub(super) fn forget(&self, slot: usize, scan: Scan) {
        for position in (scan.head + 1..=scan.head + scan.partial).rev() {
            let sum = &self.memory.words()[self.cell(slot, position) + R_SUM];
            put(sum, !sum.load(Ordering::Relaxed), Ordering::Release);
        }
    }
}

/// The words of the page of 4 KiB that this one lies in. No record lies in two of them.
const fn page_of(word: usize) -> Range<usize> {
    let first = word / PAGE_WORDS * PAGE_WORDS;
    first..first + PAGE_WORDS
}

/// The words of the header that never change.
pub(super) fn header(
    pool_id: &PoolId,
    boot_id: &[u8; 16],
    slots: usize,
    capacity: u64,
) -> [u64; 8] {
    let mut header = [0; 8];
    header[W_MAGIC] = MAGIC;
    header[W_POOL..W_BOOT].copy_from_slice(&identity_words(pool_id));
    header[W_BOOT..W_SLOTS].copy_from_slice(&identity_words(boot_id));
    header[W_SLOTS] = slots as u64;
    header[W_CAPACITY] = capacity;
    header[W_SUM] = header_sum(&header);
    header
}

fn header_sum(header: &[u64; 8]) -> u64 {
    let mut body = [0; R_SUM];
    body.copy_from_slice(&header[..W_SUM]);
    record_sum(&body, 0)
}

pub(super) fn check_header(
    words: &[AtomicU64],
    pool_id: &PoolId,
    boot_id: &[u8; 16],
) -> Result<(usize, u64), RingProblem> {
    let mut found = [0; 8];
    if words.len() < HEADER_WORDS {
        return Err(RingProblem::Missing);
    }
    for (value, word) in found.iter_mut().zip(words) {
        *value = word.load(Ordering::Acquire);
    }
    if found[W_MAGIC] & MAGIC_MASK != MAGIC & MAGIC_MASK {
        return Err(RingProblem::Missing);
    }
    if found[W_MAGIC] != MAGIC {
        return Err(RingProblem::Unsupported { found: found[W_MAGIC] & !MAGIC_MASK });
    }
    let fault =
        |problem: Problem| RingProblem::Corrupt(problem.of(Structure::RingHeader, Place::Memory));
    let computed = header_sum(&found);
    if computed != found[W_SUM] {
        return Err(fault(Problem::Checksum { found: found[W_SUM], computed }));
    }
    if found[W_POOL..W_BOOT] != identity_words(pool_id) {
        return Err(RingProblem::Foreign);
    }
    if found[W_BOOT..W_SLOTS] != identity_words(boot_id) {
        return Err(RingProblem::OtherBoot);
    }
    if words[W_POISONED].load(Ordering::Acquire) != 0 {
        return Err(RingProblem::Poisoned);
    }
    let (slots, capacity) = (found[W_SLOTS], found[W_CAPACITY]);
    let count = usize::try_from(slots).ok().filter(|count| (1..=MAX_SLOTS).contains(count));
    let count = count.ok_or_else(|| fault(Problem::field("slots", slots, "from 1 to 64")))?;
    if !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
        return Err(fault(Problem::field("records per slot", capacity, "from 4 to 2^26")));
    }
    let expected = words_needed(count, capacity) as u64;
    if (words.len() as u64) < expected {
        return Err(fault(Problem::Length { found: words.len() as u64, expected }));
    }
    Ok((count, capacity))
}

pub(super) fn corrupt(problem: Problem, slot: usize, position: u64) -> RingProblem {
    let slot = u32::try_from(slot).unwrap_or(u32::MAX);
    RingProblem::Corrupt(problem.of(Structure::RingRecord, Place::Ring { slot, position }))
}
