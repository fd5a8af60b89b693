//! A plan's operations on the media: in memory at once, otherwise through the ring.

use std::sync::atomic::Ordering;

use blockd_mapper::io::IoError;
use blockd_mapper::plan::{OpKind, PlanOp};
use blockd_media::{Device, Gate, io_error};

use super::Token;
use super::executor::Executor;
use crate::backing::{Ended, IoDirection, Ring};
use crate::block::{Buffer, Operation};
use crate::stats::MediaOp;

/// A slot, a device, and what was done to it, where that is not what the request is.
pub(super) type Failed = (usize, u8, Option<MediaOp>);

/// The cost of a copy's IO in flight.
const COPY_COST: u64 = crate::schedule::cost(super::copy::PIECE);

/// Operations that a ring keeps back for clients, so that answers get out.
const KEPT_BACK: usize = 128;

impl Executor {
    /// Whether a slot's plan has operations of this stage.
    pub(super) fn has_stage(&self, at: usize, stage: u8) -> bool {
        self.slots[at].plan.ops().iter().any(|op| op.stage == stage)
    }

    /// Starts the operations of one stage. Gives whether all of them have ended already.
    pub(super) fn start_stage(&mut self, at: usize, stage: u8, ring: &mut Ring) -> bool {
        let slot = &mut self.slots[at];
        slot.stage = stage;
        // So that operations that end at once don't end the stage.
        slot.outstanding = 1;
        if let &[op] = self.slots[at].plan.ops() {
            if op.stage == stage {
                let is_at_once = self.is_at_once(at, &op, ring);
                self.start_op(at, op, is_at_once, ring);
            }
        } else {
            self.start_ops(at, stage, ring);
        }
        let slot = &mut self.slots[at];
        slot.outstanding -= 1;
        slot.outstanding == 0
    }

    /// Starts the operations of a stage of a plan that has several.
    #[inline(never)]
    fn start_ops(&mut self, at: usize, stage: u8, ring: &mut Ring) {
        // Operations in memory come first: they use the buffer while no other one does.
        for in_memory in [true, false] {
            for index in 0..self.slots[at].plan.ops().len() {
                let op = self.slots[at].plan.ops()[index];
                if op.stage == stage && self.is_at_once(at, &op, ring) == in_memory {
                    self.start_op(at, op, in_memory, ring);
                }
            }
        }
    }

    fn start_op(&mut self, at: usize, op: PlanOp, is_at_once: bool, ring: &mut Ring) {
        let mut op = op;
        // The plan covers the rest of the request, the buffer all of it.
        op.buffer_offset += self.slots[at].done;
        if is_at_once {
            let result = self.do_at_once(at, &op, ring);
            if let Err(IoError::Media | IoError::Gone) = result {
                let error = std::io::Error::from_raw_os_error(libc::EIO);
                self.failed(Some((at, op.device.0, None)), &error);
            }
            self.note(at, result);
        } else {
            self.start_or_wait(at, op, ring);
        }
    }

    /// Whether an operation needs no ring.
    fn is_at_once(&self, at: usize, op: &PlanOp, ring: &Ring) -> bool {
        let memory = |device: u8| {
            let media = &self.pool_of(at).map(|pool| &self.pools[pool].media);
            media.and_then(|media| media[usize::from(device)].device.memory())
        };
        match op.kind {
            OpKind::ReadZeroes => self.buffer_of(at).is_none_or(|buffer| ring.is_reachable(buffer)),
            OpKind::Copy { .. } => false,
            OpKind::Flush => memory(op.device.0).is_some_and(|memory| !memory.needs_sync()),
            _ => memory(op.device.0).is_some(),
        }
    }

    fn buffer_of(&self, at: usize) -> Option<&Buffer> {
        self.slots[at].request.as_ref().and_then(|request| request.buffer())
    }

    fn pool_of(&self, at: usize) -> Option<usize> {
        self.volumes[self.slots[at].volume].as_ref().map(|attached| attached.pool)
    }

    fn device_of(&self, at: usize, device: u8) -> Option<&Device> {
        let media = &self.pools[self.pool_of(at)?].media;
        media.get(usize::from(device)).map(|one| &*one.device)
    }

    fn do_at_once(&mut self, at: usize, op: &PlanOp, ring: &mut Ring) -> Result<(), IoError> {
        let buffer = self.buffer_of(at);
        let (from, len) = range(op)?;
        if op.kind == OpKind::ReadZeroes {
            ring.zero(buffer.ok_or(IoError::Gone)?, from, len);
            return Ok(());
        }
        let pool = self.pool_of(at).ok_or(IoError::Gone)?;
        let media = self.pools[pool].media.get(usize::from(op.device.0)).ok_or(IoError::Gone)?;
        let memory = media.device.memory().ok_or(IoError::Gone)?;
        let lane = self.pools[pool].lane();
        let result = match op.kind {
            OpKind::Read => {
                let bytes = ring.bytes_mut(buffer.ok_or(IoError::Gone)?);
                return memory.read(op.offset, &mut bytes[from..from + len]);
            }
            OpKind::Write { .. } => {
                let bytes = ring.bytes_mut(buffer.ok_or(IoError::Gone)?);
                memory.write(lane, op.offset, &bytes[from..from + len], op.unseen)
            }
            OpKind::WriteZeroes { .. } => memory.zero(lane, op.offset, op.len, op.unseen),
            OpKind::Flush => return Ok(()),
            OpKind::ReadZeroes | OpKind::Copy { .. } => return Err(IoError::Media),
        };
        if memory.is_fenced() {
            self.note_unfenced(pool, op.device.0);
        }
        result
    }

    /// Notes a write to a device that has to be fenced before the write is reported.
    pub(super) fn note_unfenced(&mut self, pool: usize, device: u8) {
        if self.unfenced.is_some_and(|other| other != (pool, device)) {
            self.fence();
        }
        self.unfenced = Some((pool, device));
    }

    /// Fences this thread's writes, which makes them as durable as possible without a sync. Called
    /// before the map shows them, as a commit may follow at once, and before they are answered.
    pub(super) fn fence(&mut self) {
        let Some((pool, device)) = self.unfenced.take() else { return };
        let media = self.pools.get(pool).and_then(|part| part.media.get(usize::from(device)));
        if let Some(memory) = media.and_then(|media| media.device.memory()) {
            memory.fence();
        }
    }

    /// Notes the end of an operation.
    pub(super) fn note(&mut self, at: usize, result: Result<(), IoError>) {
        let slot = &mut self.slots[at];
        if let Err(error) = result {
            // An error of the media takes precedence over a lack of space, which is retried.
            if slot.error.is_none_or(|first| first == IoError::NoSpace) {
                slot.error = Some(error);
            }
        }
    }

    fn start_or_wait(&mut self, at: usize, op: PlanOp, ring: &mut Ring) {
        self.slots[at].outstanding += 1;
        if matches!(op.kind, OpKind::Copy { .. }) {
            self.copies.queue(self.slots[at].volume, at, op);
            self.start_copies(ring);
        } else if self.copies.waiting.is_empty() && has_room(&op, ring) {
            self.start(at, op, ring);
        } else {
            self.copies.waiting.push_back((at, op));
        }
    }

    /// Starts operations that had to wait for room in the ring.
    pub(super) fn start_waiting(&mut self, ring: &mut Ring) {
        while let Some(&(at, op)) = self.copies.waiting.front() {
            if !has_room(&op, ring) {
                break;
            }
            self.copies.waiting.pop_front();
            self.start(at, op, ring);
        }
        self.start_copies(ring);
    }

    /// Starts copies that had to wait, volume after volume.
    fn start_copies(&mut self, ring: &mut Ring) {
        while self.copies.has_buffer()
            && let Some(&(at, op)) = self.copies.next()
            && has_room(&op, ring)
            && self.may_copy(at)
            && self.copies.take_next().is_some()
        {
            self.start_copy(at, op, ring);
        }
    }

    /// Whether the share of a slot's volume on the media allows for another copy. All copies of a
    /// worker count, as it makes few at a time.
    fn may_copy(&self, at: usize) -> bool {
        let Some(attached) = &self.volumes[self.slots[at].volume] else { return true };
        self.copies.under_way() as u64 <= self.scheduler.copies(attached.tenant, COPY_COST)
    }

    fn start(&mut self, at: usize, op: PlanOp, ring: &mut Ring) {
        let started = self.start_in_ring(at, &op, ring);
        if let Err(error) = started {
            self.slots[at].is_late |= Gate::refused(&error);
            let result = io_error(&error);
            if result != IoError::NoSpace {
                tracing::error!(%error, "an operation can't be started");
            }
            self.slots[at].outstanding -= 1;
            self.note(at, Err(result));
            if self.slots[at].outstanding == 0 && self.media_done(at, ring) {
                self.advance(at, ring);
            }
        }
    }

    fn start_in_ring(&mut self, at: usize, op: &PlanOp, ring: &mut Ring) -> std::io::Result<()> {
        let gone = || std::io::Error::other("the volume is gone");
        let pool = self.pool_of(at).ok_or_else(gone)?;
        let file = self.pools[pool].media[usize::from(op.device.0)].file;
        let token = Token::Slot { at, device: op.device.0 }.encode();
        let request = self.slots[at].request.as_ref();
        let buffer = request.and_then(|request| request.buffer());
        let io = |ring: &mut Ring, direction| {
            let (from, len) = (short(op.buffer_offset)?, short(op.len)?);
            let buffer = buffer.ok_or_else(gone)?;
            ring.io(token, direction, file, op.offset, buffer, from, len)
        };
        match op.kind {
            OpKind::Read => io(ring, IoDirection::Read),
            OpKind::Write { fua } => io(ring, IoDirection::Write { dsync: fua }),
            OpKind::Flush => {
                self.pools[pool].handle.stats().flushes.fetch_add(1, Ordering::Relaxed);
                ring.sync(token, file)
            }
            OpKind::WriteZeroes { fua } => {
                let mut done = 0;
                while done < op.len {
                    let len = short((op.len - done).min(u64::from(Ring::MAX_ZEROES)))?;
                    ring.write_zeroes(token, file, op.offset + done, len, fua)?;
                    done += u64::from(len);
                    // The operation itself has been counted once.
                    self.slots[at].outstanding += u32::from(done < op.len);
                }
                Ok(())
            }
            OpKind::ReadZeroes => {
                let (from, len) = (short(op.buffer_offset)?, short(op.len)?);
                ring.read_zeroes(token, buffer.ok_or_else(gone)?, from, len)
            }
            OpKind::Copy { .. } => Ok(()),
        }
    }

    /// Takes what the ring has ended, if it is the executor's.
    pub fn ended(&mut self, ended: Ended, ring: &mut Ring) -> Option<Ended> {
        let Ended::Io(token, result) = ended else { return Some(ended) };
        match Token::decode(token) {
            Token::Slot { at, device } => {
                let result = self.io_result(Some((at, device, None)), result);
                self.operation_ended(at, result, ring);
            }
            Token::Copy { job } => {
                let result = self.io_result(self.half_of(job), result);
                self.copy_ended(job, result, ring);
            }
            Token::Connection { .. } | Token::Queue { .. } => {
                return Some(Ended::Io(token, result));
            }
        }
        None
    }

    /// The result of an operation as the mapper takes it. A failure is counted.
    fn io_result(
        &mut self,
        of: Option<Failed>,
        result: std::io::Result<()>,
    ) -> Result<(), IoError> {
        result.map_err(|error| {
            if let Some((at, _, _)) = of {
                self.slots[at].is_late |= Gate::refused(&error);
            }
            let device = of.and_then(|(at, device, _)| self.device_of(at, device));
            let mapped = device.map_or_else(|| io_error(&error), |one| one.meaning(&error));
            if mapped != IoError::NoSpace {
                self.failed(of, &error);
            }
            mapped
        })
    }

    /// Counts IO that failed, and says which: a slot's on a device, of a kind where it is not the
    /// request's own.
    pub(super) fn failed(&self, of: Option<Failed>, error: &std::io::Error) {
        let Some((at, device, op)) = of else { return };
        let slot = &self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return };
        let part = &self.pools[attached.pool];
        let op = op.unwrap_or_else(|| match slot.request.as_ref().map(|one| one.operation) {
            _ if self.is_flush(at) => MediaOp::Flush,
            Some(Operation::Read) => MediaOp::Read,
            _ => MediaOp::Write,
        });
        part.seen.failed(device, op, error.raw_os_error().unwrap_or(libc::EIO));
        let path = part.media.get(usize::from(device)).map(|one| one.device.info().path.display());
        let (pool, volume) = (&attached.stats.pool, &attached.stats.volume);
        let device = path.map(tracing::field::display);
        let operation = op.name();
        tracing::error!(%pool, %volume, device, operation, %error, "IO of a volume failed");
    }

    /// One operation of a slot has ended.
    pub(super) fn operation_ended(
        &mut self,
        at: usize,
        result: Result<(), IoError>,
        ring: &mut Ring,
    ) {
        self.note(at, result);
        self.slots[at].outstanding -= 1;
        if self.slots[at].outstanding == 0 && self.media_done(at, ring) {
            self.advance(at, ring);
        }
    }
}

/// Whether the ring has room for an operation.
fn has_room(op: &PlanOp, ring: &Ring) -> bool {
    let pieces = op.len / u64::from(Ring::MAX_ZEROES) + 1;
    ring.spare() as u64 >= KEPT_BACK as u64 + pieces
}

/// Where in the buffer an operation's bytes are.
fn range(op: &PlanOp) -> Result<(usize, usize), IoError> {
    match (usize::try_from(op.buffer_offset), usize::try_from(op.len)) {
        (Ok(from), Ok(len)) => Ok((from, len)),
        _ => Err(IoError::Media),
    }
}

fn short(bytes: u64) -> std::io::Result<u32> {
    u32::try_from(bytes).map_err(std::io::Error::other)
}
