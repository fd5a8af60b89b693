//! Lanes: what makes a write of up to a block atomic where the memory itself is so only for eight
//! bytes.
//!
//! A lane is a place of its own for one thread: a block, and a line that says where it belongs. A
//! write goes through five steps, each of which has to last before the next begins:
//!
//! 1. the data is stored to the lane's block;
//! 2. the line is stored: from here on a crash is followed by the new data;
//! 3. the data is stored to its place;
//! 4. the line is cleared;
//! 5. the write is answered, which is the caller's business, after a fence of its own.
//!
//! When the lanes are opened, each line that is whole is carried out again, and cleared. So a line
//! must never outlast the answer of its write: what was written to the same place later, through
//! another lane or none, would be lost to it. Two writes of the same bytes that are under way at
//! once may be carried out in any order, as on any disk.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Media, MediaError};

/// What is written as a whole, at the most, and never across two of them.
pub const BLOCK: usize = 4096;
/// Bytes of a lane: its block, and a page with its line.
pub const LANE_BYTES: u64 = 2 * BLOCK as u64;
/// "BLKDLANE".
const MAGIC: u64 = u64::from_be_bytes(*b"BLKDLANE");

/// Where the block of a lane belongs: one cache line, stored as a whole.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Line {
    magic: U64,
    /// Counts the writes of the lane, so that no two lines are the same.
    sequence: U64,
    target: U64,
    len: U32,
    reserved: [u8; 32],
    /// CRC-32C of what is in front of it.
    sum: U32,
}

/// Where the checksum begins.
const SUM_AT: usize = 60;
const _: () = assert!(size_of::<Line>() == 64, "a line is one line of the cache");

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

    /// What it says, if it is whole: one that was cut short is no line.
    fn parse(&self) -> Option<(u64, usize)> {
        let is_whole = self.magic.get() == MAGIC && self.sum.get() == self.checksum();
        let len = usize::try_from(self.len.get()).ok()?;
        let within = self.target.get() % BLOCK as u64 + len as u64;
        let fits = len > 0 && within <= BLOCK as u64;
        (is_whole && fits).then_some((self.target.get(), len))
    }
}

/// What was found in lanes that were opened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replayed {
    /// Writes that were carried out again.
    pub writes: usize,
    /// Where that was not possible, as the memory is bad there: these bytes may be torn.
    pub failed: Vec<Range<u64>>,
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
    /// The caller's.
    FenceOfAnswer,
    Lane,
}

/// Lanes in an area of the memory that they serve.
#[derive(Debug)]
pub struct Lanes<M> {
    media: M,
    area: Range<u64>,
    /// Writes of each so far. A lane is one thread's: the lock is there for those who err.
    sequences: Box<[Mutex<u64>]>,
    #[cfg(test)]
    pub(super) left: Left,
}

impl<M: Media> Lanes<M> {
    /// Makes lanes in an area, as many as fit there, and at least so many.
    ///
    /// # Errors
    /// The area is too small or misplaced, or bad.
    pub fn format(media: M, area: Range<u64>, at_least: usize) -> Result<Self, MediaError> {
        let lanes = Self::new(media, area)?;
        if lanes.count() < at_least {
            return Err(MediaError::Lanes { what: "their area holds fewer than are needed" });
        }
        for lane in 0..lanes.count() {
            lanes.media.zero(lanes.line_of(lane), size_of::<Line>() as u64)?;
        }
        lanes.media.fence();
        Ok(lanes)
    }

    /// Opens lanes, and carries out what was cut short. Nobody else may use the memory yet.
    ///
    /// # Errors
    /// The area is too small or misplaced, or bad. Bad memory elsewhere is no error: see
    /// [`Replayed::failed`].
    pub fn open(media: M, area: Range<u64>) -> Result<(Self, Replayed), MediaError> {
        let lanes = Self::new(media, area)?;
        let mut replayed = Replayed::default();
        let mut block = [0; BLOCK];
        for lane in 0..lanes.count() {
            let mut line = Line::new_zeroed();
            lanes.media.read(lanes.line_of(lane), line.as_mut_bytes())?;
            let Some((target, len)) = line.parse() else { continue };
            lanes.media.read(lanes.block_of(lane), &mut block[..len])?;
            match lanes.media.write(target, &block[..len]) {
                Ok(()) => replayed.writes += 1,
                Err(_) => replayed.failed.push(target..target + len as u64),
            }
        }
        // In this order: a crash in between is followed by the same again.
        lanes.media.fence();
        for lane in 0..lanes.count() {
            lanes.clear(lane)?;
        }
        lanes.media.fence();
        Ok((lanes, replayed))
    }

    fn new(media: M, area: Range<u64>) -> Result<Self, MediaError> {
        let in_place = area.start.is_multiple_of(BLOCK as u64) && area.end <= media.len();
        if !in_place {
            return Err(MediaError::Lanes {
                what: "their area begins within a block, or is no memory",
            });
        }
        let count = area.end.saturating_sub(area.start) / LANE_BYTES;
        let sequences = (0..count).map(|_| Mutex::new(0)).collect();
        Ok(Self {
            media,
            area,
            sequences,
            #[cfg(test)]
            left: Left::Nothing,
        })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sequences.len()
    }

    /// The memory that they serve.
    #[must_use]
    pub const fn media(&self) -> &M {
        &self.media
    }

    const fn block_of(&self, lane: usize) -> u64 {
        self.area.start + lane as u64 * LANE_BYTES
    }

    const fn line_of(&self, lane: usize) -> u64 {
        self.block_of(lane) + BLOCK as u64
    }

    /// All of the line. Of one without its mark only, the next line to be cut short would make
    /// the old one whole again, with the new data in its block.
    fn clear(&self, lane: usize) -> Result<(), MediaError> {
        #[cfg(test)]
        if self.left == Left::RestOfClearing {
            return self.media.zero(self.line_of(lane), 8);
        }
        self.media.zero(self.line_of(lane), size_of::<Line>() as u64)
    }

    /// Writes `from` to this byte on, so that each block of it is the old or the new one whatever
    /// happens. It must be fenced before it is answered.
    ///
    /// # Errors
    /// There is no such lane, or as [`Media::write`]: blocks up to the one that is bad are written.
    pub fn write(&self, lane: usize, at: u64, from: &[u8]) -> Result<(), MediaError> {
        let Some(sequence) = self.sequences.get(lane) else {
            return Err(MediaError::Lanes { what: "there is none of this number" });
        };
        let mut sequence = sequence.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut rest) = (at, from);
        while !rest.is_empty() {
            let within = usize::try_from(at % BLOCK as u64).unwrap_or(0);
            let (part, more) = rest.split_at(rest.len().min(BLOCK - within));
            *sequence += 1;
            self.write_part(lane, *sequence, at, part)?;
            at += part.len() as u64;
            rest = more;
            if !rest.is_empty() {
                // The lane is used again: its line is to be gone first.
                self.media.fence();
            }
        }
        Ok(())
    }

    fn write_part(
        &self,
        lane: usize,
        sequence: u64,
        at: u64,
        part: &[u8],
    ) -> Result<(), MediaError> {
        #[cfg(test)]
        if self.left == Left::Lane {
            return self.media.write(at, part);
        }
        let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
        self.media.write(self.block_of(lane), part)?;
        self.fence_of(Step::Data);
        self.media.write(self.line_of(lane), Line::new(sequence, at, len).as_bytes())?;
        self.fence_of(Step::Line);
        let placed = self.media.write(at, part);
        self.fence_of(Step::Place);
        #[cfg(test)]
        if self.left == Left::Clearing {
            return placed;
        }
        // Also after a failure: the write is answered, if with an error.
        self.clear(lane)?;
        placed
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
        };
        if !is_left {
            self.media.fence();
        }
    }
}

/// What a fence makes last.
#[derive(Clone, Copy, Debug)]
enum Step {
    Data,
    Line,
    Place,
}

#[cfg(test)]
mod tests;
