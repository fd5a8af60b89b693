//! Lanes: they make a write of up to a block atomic on memory that is atomic only for eight bytes.
//!
//! A lane is a place of its own for one thread: some blocks, and for each of them a line that says
//! where it belongs. A write goes through these steps, for as many blocks at a time as a lane has:
//!
//! 1. the data is stored to the lane's blocks; fence;
//! 2. their lines are stored; fence: from here on a crash is followed by the new data;
//! 3. the data is stored to its place; fence;
//! 4. the lines are cleared; fence.
//!
//! When the lanes are opened, each line that is whole is carried out again, and cleared. So a line
//! must never outlast its write: it would overwrite later data at the same place, written through
//! another lane or none, possibly by another volume. The last step prevents this.
//!
//! A write stores the bytes that it was given and no others: sectors of one block that are written
//! at once do not touch each other. Writes of the same block wait for each other from the third
//! step on, so that the result is one of them and not a mixture.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Media, MediaError};

/// The largest unit that is written as a whole; a write never spans two of them.
pub const BLOCK: usize = 4096;
/// Blocks of a lane: a write of 32 KiB needs no more fences than one of 4 KiB.
const BLOCKS: usize = 8;
/// Bytes of a lane: its blocks, and a page with their lines.
pub const LANE_BYTES: u64 = (BLOCKS as u64 + 1) * BLOCK as u64;
/// Locks of blocks: many times as many as there are threads, so that those of different blocks
/// seldom meet.
const LOCKS: usize = 128;
/// "BLKDLANE".
const MAGIC: u64 = u64::from_be_bytes(*b"BLKDLANE");

/// Where a block of a lane belongs: one cache line, stored as a whole.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Line {
    magic: U64,
    /// Counts the writes of the lane, so that no two lines are the same.
    sequence: U64,
    target: U64,
    len: U32,
    reserved: [u8; 32],
    /// CRC-32C of the bytes in front of it.
    sum: U32,
}

/// Bytes of a line.
const LINE_BYTES: usize = size_of::<Line>();
/// Where the checksum begins.
const SUM_AT: usize = 60;
const _: () = assert!(LINE_BYTES == 64, "a line is one line of the cache");

impl Line {
    fn new(sequence: u64, target: u64, len: u32) -> Self {
        let mut line = Self {
            magic: MAGIC.into(),
            sequence: sequence.into(),
            target: target.into(),
            len: len.into(),
            reserved: [0; 32],
            sum: 0.into(),
        };
        line.sum = line.checksum().into();
        line
    }

    fn checksum(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..SUM_AT])
    }

    /// Parses the line if it is whole: an interrupted one is no line.
    fn parse(&self) -> Option<(u64, usize)> {
        let is_whole = self.magic.get() == MAGIC && self.sum.get() == self.checksum();
        let len = usize::try_from(self.len.get()).ok()?;
        let within = self.target.get() % BLOCK as u64 + len as u64;
        let fits = len > 0 && within <= BLOCK as u64;
        (is_whole && fits).then_some((self.target.get(), len))
    }
}

/// The findings of opening lanes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replayed {
    /// Writes that were carried out again.
    pub writes: usize,
    /// Where that was not possible, as the memory is bad there or in the lane: these bytes may be
    /// torn.
    pub failed: Vec<Range<u64>>,
    /// Lanes whose lines cannot be read, and that are not used: each may have had a write in flight
    /// at an unknown place.
    pub bad_lanes: usize,
}

/// Steps that a test leaves out, to see that it is missed.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    Nothing,
    FenceOfData,
    FenceOfLine,
    FenceOfPlace,
    Clearing,
    /// Only the mark of a line is cleared.
    RestOfClearing,
    FenceOfClearing,
    Lane,
}

/// Parts of blocks that go through a lane at once, no two of them of the same block.
#[derive(Default)]
struct Batch<'a> {
    parts: [(u64, &'a [u8]); BLOCKS],
    count: usize,
}

impl<'a> Batch<'a> {
    fn parts(&self) -> &[(u64, &'a [u8])] {
        &self.parts[..self.count]
    }

    /// Whether there is room for one more, and its block is not among them.
    fn takes(&self, at: u64) -> bool {
        let block = |at: u64| at / BLOCK as u64;
        self.count < BLOCKS && self.parts().iter().all(|(other, _)| block(*other) != block(at))
    }

    fn push(&mut self, at: u64, part: &'a [u8]) {
        self.parts[self.count] = (at, part);
        self.count += 1;
    }
}

/// One thread's at a time, for as long as a write takes.
#[derive(Debug)]
struct Lane {
    /// Writes so far.
    sequence: Mutex<u64>,
    /// Its memory is bad.
    is_bad: AtomicBool,
}

/// On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Lock(Mutex<()>);

/// Lanes in an area of the memory that they serve.
#[derive(Debug)]
pub struct Lanes<M> {
    media: M,
    area: Range<u64>,
    lanes: Box<[Lane]>,
    /// Locks of blocks, by their numbers.
    locks: Box<[Lock]>,
    #[cfg(test)]
    pub(super) left: Left,
}

impl<M: Media> Lanes<M> {
    /// Makes lanes in an area, as many as fit, and at least `at_least`.
    ///
    /// # Errors
    /// The area is too small or misplaced, or bad.
    pub fn format(media: M, area: Range<u64>, at_least: usize) -> Result<Self, MediaError> {
        let lanes = Self::new(media, area)?;
        if lanes.count() < at_least {
            return Err(MediaError::Lanes { what: "their area holds fewer than are needed" });
        }
        for lane in 0..lanes.count() {
            lanes.clear(lane, BLOCKS)?;
        }
        lanes.media.fence();
        Ok(lanes)
    }

    /// Opens lanes, and completes interrupted writes. The memory must not be in use yet.
    ///
    /// # Errors
    /// The area is too small or misplaced, or all of it is bad, or a line can't be cleared that was
    /// carried out. Other bad memory is no error: see [`Replayed`].
    pub fn open(media: M, area: Range<u64>) -> Result<(Self, Replayed), MediaError> {
        Self::new(media, area)?.replay()
    }

    fn replay(self) -> Result<(Self, Replayed), MediaError> {
        let mut replayed = Replayed::default();
        for lane in 0..self.count() {
            let mut lines = [Line::new_zeroed(); BLOCKS];
            if self.media.read(self.line_of(lane, 0), lines.as_mut_bytes()).is_err() {
                self.lanes[lane].is_bad.store(true, Ordering::Release);
                replayed.bad_lanes += 1;
                continue;
            }
            for (index, line) in lines.iter().enumerate() {
                self.carry_out(lane, index, line, &mut replayed);
            }
        }
        // In this order: a crash in between is followed by the same again.
        self.media.fence();
        for lane in (0..self.count()).filter(|&lane| !self.is_bad(lane)) {
            self.clear(lane, BLOCKS)?;
        }
        self.media.fence();
        if self.count() == replayed.bad_lanes {
            return Err(MediaError::Lanes { what: "all of their memory is bad" });
        }
        Ok((self, replayed))
    }

    fn carry_out(&self, lane: usize, index: usize, line: &Line, replayed: &mut Replayed) {
        let Some((target, len)) = line.parse() else { return };
        let mut block = [0; BLOCK];
        let data = &mut block[..len];
        let read = self.media.read(self.block_of(lane, index), data);
        match read.and_then(|()| self.media.write(target, data)) {
            Ok(()) => replayed.writes += 1,
            Err(_) => replayed.failed.push(target..target + len as u64),
        }
    }

    fn new(media: M, area: Range<u64>) -> Result<Self, MediaError> {
        let in_place = area.start.is_multiple_of(BLOCK as u64) && area.end <= media.len();
        if !in_place {
            return Err(MediaError::Lanes {
                what: "their area begins within a block, or is no memory",
            });
        }
        let count = area.end.saturating_sub(area.start) / LANE_BYTES;
        let lane = |_| Lane { sequence: Mutex::new(0), is_bad: AtomicBool::new(false) };
        Ok(Self {
            media,
            area,
            lanes: (0..count).map(lane).collect(),
            locks: (0..LOCKS).map(|_| Lock::default()).collect(),
            #[cfg(test)]
            left: Left::Nothing,
        })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lanes.len()
    }

    /// The memory that they serve.
    #[must_use]
    pub const fn media(&self) -> &M {
        &self.media
    }

    fn is_bad(&self, lane: usize) -> bool {
        self.lanes.get(lane).is_none_or(|lane| lane.is_bad.load(Ordering::Acquire))
    }

    const fn block_of(&self, lane: usize, index: usize) -> u64 {
        self.area.start + lane as u64 * LANE_BYTES + index as u64 * BLOCK as u64
    }

    const fn line_of(&self, lane: usize, index: usize) -> u64 {
        self.block_of(lane, BLOCKS) + index as u64 * LINE_BYTES as u64
    }

    /// All of the first lines. Of one without its mark only, the next line to be cut short would
    /// make the old one whole again.
    fn clear(&self, lane: usize, lines: usize) -> Result<(), MediaError> {
        #[cfg(test)]
        match self.left {
            Left::RestOfClearing => {
                for index in 0..lines {
                    self.media.zero(self.line_of(lane, index), 8)?;
                }
                return Ok(());
            }
            Left::Clearing => return Ok(()),
            _ => {}
        }
        self.media.zero(self.line_of(lane, 0), lines as u64 * LINE_BYTES as u64)
    }

    /// Writes `from` to this byte on, so that each block of it is the old or the new one whatever
    /// happens. It is as durable as after a fence when this comes back.
    ///
    /// Threads with lanes of their own don't wait for each other. One that has no good lane shares
    /// another's.
    ///
    /// # Errors
    /// The lane does not exist, or as [`Media::write`]: each block is the old or the new one, but
    /// for those that are bad.
    pub fn write(&self, lane: usize, at: u64, from: &[u8]) -> Result<(), MediaError> {
        if lane >= self.count() {
            return Err(MediaError::Lanes { what: "there is none of this number" });
        }
        #[cfg(test)]
        if self.left == Left::Lane {
            return self.media.write(at, from).map(|()| self.media.fence());
        }
        self.write_each(lane, &[(at, from)])
    }

    /// The same of several at a time, which share fences: each block is the old or the new one, and
    /// any of them may be the new one alone until this comes back. Of bytes that are written by
    /// more than one of them, those of the last are left.
    ///
    /// # Errors
    /// As [`Lanes::write`]; others of the writes may be done.
    pub fn write_each(&self, lane: usize, writes: &[(u64, &[u8])]) -> Result<(), MediaError> {
        if lane >= self.count() {
            return Err(MediaError::Lanes { what: "there is none of this number" });
        }
        let len = self.media.len();
        for &(at, from) in writes {
            // Nothing is stored, not even to a lane, where a place is known to be none.
            let end = at.saturating_add(from.len() as u64);
            if end > len {
                return Err(MediaError::Range { at, end, len });
            }
        }
        let mut batch = Batch::default();
        let mut outcome = Ok(());
        for (at, part) in writes.iter().flat_map(|&(at, from)| in_blocks(at, from)) {
            if !batch.takes(at) {
                let one = self.write_batch(lane, &batch);
                outcome = outcome.and(one);
                batch = Batch::default();
            }
            batch.push(at, part);
        }
        if !batch.parts().is_empty() {
            let one = self.write_batch(lane, &batch);
            outcome = outcome.and(one);
        }
        outcome
    }

    /// Finds another lane where the memory of this one is bad.
    fn write_batch(&self, lane: usize, batch: &Batch<'_>) -> Result<(), MediaError> {
        let mut last = MediaError::Lanes { what: "all of their memory is bad" };
        for other in 0..self.count() {
            let lane = (lane + other) % self.count();
            if self.is_bad(lane) {
                continue;
            }
            let mut sequence = locked(&self.lanes[lane].sequence);
            match self.log(lane, &mut sequence, batch) {
                Ok(()) => return self.place(lane, batch),
                Err(error) => {
                    // Its lines have to be cleared before another lane does the same.
                    self.lanes[lane].is_bad.store(true, Ordering::Release);
                    let _ = self.clear(lane, BLOCKS);
                    self.media.fence();
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// The first two steps.
    fn log(&self, lane: usize, sequence: &mut u64, batch: &Batch<'_>) -> Result<(), MediaError> {
        for (index, (_, part)) in batch.parts().iter().enumerate() {
            self.media.write(self.block_of(lane, index), part)?;
        }
        self.fence_of(Step::Data);
        for (index, (target, part)) in batch.parts().iter().enumerate() {
            *sequence += 1;
            let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let line = Line::new(*sequence, *target, len);
            self.media.write(self.line_of(lane, index), line.as_bytes())?;
        }
        self.fence_of(Step::Line);
        Ok(())
    }

    /// The other two.
    fn place(&self, lane: usize, batch: &Batch<'_>) -> Result<(), MediaError> {
        let _locks = self.lock(batch);
        let mut placed = Ok(());
        for (target, part) in batch.parts() {
            // Those behind one that is bad are written all the same: their lines go as well.
            let one = self.media.write(*target, part);
            placed = placed.and(one);
        }
        self.fence_of(Step::Place);
        // Also after a failure: the write is answered, if with an error.
        let cleared = self.clear(lane, batch.parts().len());
        self.fence_of(Step::Clearing);
        if cleared.is_err() {
            self.lanes[lane].is_bad.store(true, Ordering::Release);
        }
        placed.and(cleared)
    }

    /// Excludes other stores to these blocks. Locks are taken in their order, so that no two
    /// threads wait for each other.
    fn lock(&self, batch: &Batch<'_>) -> [Option<MutexGuard<'_, ()>>; BLOCKS] {
        let mut order = [usize::MAX; BLOCKS];
        for ((target, _), index) in batch.parts().iter().zip(&mut order) {
            *index = usize::try_from(target / BLOCK as u64 % LOCKS as u64).unwrap_or(0);
        }
        if batch.parts().len() > 1 {
            order.sort_unstable();
        }
        let mut last = usize::MAX;
        order.map(|index| {
            // Two blocks may have the same lock.
            let again = std::mem::replace(&mut last, index) == index;
            self.locks.get(index).filter(|_| !again).map(|lock| locked(&lock.0))
        })
    }

    #[cfg(not(test))]
    fn fence_of(&self, _step: Step) {
        self.media.fence();
    }

    #[cfg(test)]
    fn fence_of(&self, step: Step) {
        let is_left = match step {
            Step::Data => self.left == Left::FenceOfData,
            Step::Line => self.left == Left::FenceOfLine,
            Step::Place => self.left == Left::FenceOfPlace,
            Step::Clearing => self.left == Left::FenceOfClearing,
        };
        if !is_left {
            self.media.fence();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range, cut at the borders of blocks.
fn in_blocks(at: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let (mut at, mut rest) = (at, bytes);
    std::iter::from_fn(move || {
        let within = usize::try_from(at % BLOCK as u64).unwrap_or(0);
        let (part, more) = rest.split_at(rest.len().min(BLOCK - within));
        let found = (at, part);
        at += part.len() as u64;
        rest = more;
        (!part.is_empty()).then_some(found)
    })
}

/// The stores that a fence makes durable.
#[derive(Clone, Copy, Debug)]
enum Step {
    Data,
    Line,
    Place,
    Clearing,
}

#[cfg(test)]
mod tests;
