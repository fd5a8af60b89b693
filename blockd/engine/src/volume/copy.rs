//! Copies from one place of the media to another, through memory: a write to a shared extent needs
//! one first.

use std::collections::VecDeque;

use blockd_mapper::io::IoError;
use blockd_mapper::plan::{OpKind, PlanOp};
use blockd_media::{Gate, io_error};

use super::executor::Executor;
use super::media::Failed;
use crate::backing::{IoDirection, Ring};
use crate::block::Buffer;
use crate::stats::MediaOp;

/// Bytes copied at a time.
pub(super) const PIECE: u64 = 128 << 10;
/// Copies at a time: they take memory that clients have no share of.
const MAX_COPIES: usize = 8;

/// A copy on its way.
#[derive(Debug)]
struct Copy {
    at: usize,
    op: PlanOp,
    buffer: Buffer,
    /// Bytes done.
    moved: u64,
    /// Bytes of the piece on its way.
    piece: u64,
    writing: bool,
}

/// Copies, and operations that wait for room.
#[derive(Debug, Default)]
pub(super) struct Copies {
    jobs: Vec<Option<Copy>>,
    buffers: Vec<Buffer>,
    made: usize,
    /// Operations that wait for room in the ring, in order, with their slots.
    pub(super) waiting: VecDeque<(usize, PlanOp)>,
    /// Copies that wait for a buffer: of each volume in order, and the volumes in order of service.
    /// No other operation waits for them.
    pub(super) queued: VecDeque<(usize, VecDeque<(usize, PlanOp)>)>,
}

impl Copies {
    /// Takes memory for copies, kept for them from then on. Before there are clients, so that it
    /// lies together: taken here and there, it would leave no long piece whole for their requests.
    /// Gives the bytes that it took.
    pub(super) fn reserve(&mut self, ring: &mut Ring) -> u64 {
        let mut bytes = 0;
        while self.made < MAX_COPIES
            && let Some(buffer) = ring.allocate(PIECE)
        {
            self.made += 1;
            bytes += Ring::capacity(&buffer) as u64;
            self.buffers.push(buffer);
        }
        bytes
    }

    /// Adds a copy to those that wait.
    pub(super) fn queue(&mut self, volume: usize, at: usize, op: PlanOp) {
        match self.queued.iter_mut().find(|(one, _)| *one == volume) {
            Some((_, copies)) => copies.push_back((at, op)),
            None => self.queued.push_back((volume, VecDeque::from([(at, op)]))),
        }
    }

    /// The copy that is started next.
    pub(super) fn next(&self) -> Option<&(usize, PlanOp)> {
        self.queued.front().and_then(|(_, copies)| copies.front())
    }

    /// Copies that are under way.
    pub(super) const fn under_way(&self) -> usize {
        self.made - self.buffers.len()
    }

    /// Takes it, after which the next volume has its turn.
    pub(super) fn take_next(&mut self) -> Option<(usize, PlanOp)> {
        let (volume, mut copies) = self.queued.pop_front()?;
        let first = copies.pop_front();
        if !copies.is_empty() {
            self.queued.push_back((volume, copies));
        }
        first
    }

    /// Whether a copy can begin.
    pub(super) fn has_buffer(&self) -> bool {
        !self.buffers.is_empty()
    }
}

impl Executor {
    pub(super) fn start_copy(&mut self, at: usize, op: PlanOp, ring: &mut Ring) {
        let Some(buffer) = self.copies.buffers.pop() else {
            self.operation_ended(at, Err(IoError::Media), ring);
            return;
        };
        let copy = Copy { at, op, buffer, moved: 0, piece: 0, writing: true };
        let free = self.copies.jobs.iter().position(Option::is_none);
        let job = free.unwrap_or(self.copies.jobs.len());
        if job == self.copies.jobs.len() {
            self.copies.jobs.push(None);
        }
        self.copies.jobs[job] = Some(copy);
        self.copy_ended(job, Ok(()), ring);
    }

    /// The slot, device and kind of a copy's half that is on its way.
    pub(super) fn half_of(&self, job: usize) -> Option<Failed> {
        let copy = self.copies.jobs.get(job)?.as_ref()?;
        let OpKind::Copy { from_device, .. } = copy.op.kind else { return None };
        Some(match copy.writing {
            true => (copy.at, copy.op.device.0, Some(MediaOp::Write)),
            false => (copy.at, from_device.0, Some(MediaOp::Read)),
        })
    }

    /// A half of a piece has ended: goes on until something has to be waited for.
    pub(super) fn copy_ended(
        &mut self,
        job: usize,
        mut result: Result<(), IoError>,
        ring: &mut Ring,
    ) {
        loop {
            let Some(copy) = self.copies.jobs.get_mut(job).and_then(Option::as_mut) else {
                return;
            };
            if copy.writing {
                copy.moved += copy.piece;
                copy.piece = PIECE.min(copy.op.len - copy.moved);
            }
            if result.is_err() || copy.piece == 0 {
                if let Some(copy) = self.copies.jobs[job].take() {
                    self.copies.buffers.push(copy.buffer);
                    self.operation_ended(copy.at, result, ring);
                }
                return;
            }
            copy.writing = !copy.writing;
            match self.copy_half(job, ring) {
                Ok(true) => result = Ok(()),
                Ok(false) => return,
                Err(error) => result = Err(error),
            }
        }
    }

    /// Reads or writes a piece. Gives whether it has ended already.
    fn copy_half(&mut self, job: usize, ring: &mut Ring) -> Result<bool, IoError> {
        let copy = self.copies.jobs[job].as_ref().ok_or(IoError::Gone)?;
        let OpKind::Copy { from_device, from_offset } = copy.op.kind else {
            return Err(IoError::Media);
        };
        let volume = &self.volumes[self.slots[copy.at].volume];
        let pool = volume.as_ref().map(|attached| attached.pool).ok_or(IoError::Gone)?;
        let (device, offset) = if copy.writing {
            (copy.op.device, copy.op.offset)
        } else {
            (from_device, from_offset)
        };
        let media = self.pools[pool].media.get(usize::from(device.0)).ok_or(IoError::Gone)?;
        let len = u32::try_from(copy.piece).map_err(|_| IoError::Media)?;
        let offset = offset + copy.moved;
        if let Some(memory) = media.device.memory() {
            let bytes = &mut ring.bytes_mut(&copy.buffer)[..len as usize];
            if !copy.writing {
                memory.read(offset, bytes)?;
                return Ok(true);
            }
            memory.write(self.pools[pool].lane(), offset, bytes, copy.op.unseen)?;
            if memory.is_fenced() {
                self.note_unfenced(pool, device.0);
            }
            return Ok(true);
        }
        let direction =
            if copy.writing { IoDirection::Write { dsync: false } } else { IoDirection::Read };
        let token = super::Token::Copy { job }.encode();
        let started = ring.io(token, direction, media.file, offset, &copy.buffer, 0, len);
        started.map_err(|error| {
            self.slots[copy.at].is_late |= Gate::refused(&error);
            io_error(&error)
        })?;
        Ok(false)
    }
}
