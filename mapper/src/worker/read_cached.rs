//! Reads through the pool's cache of shared blocks.

use super::read::{push, run_at};
use super::{Attachment, Worker};
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::mutation::{Mutation, active};
use crate::plan::{OpKind, ParkReason, Plan, PlanKind, PlanOp, Step};
use crate::pool::Pool;
use crate::read_cache::{Fill, Reached, Reader, Run};
use crate::sync::Ordering;
use crate::units::LeafId;

impl Worker {
    /// Plans a read of whole blocks as [`Self::read`] does, and serves from the cache what is
    /// there: `buffer`, of the read's length, has those bytes and zeroes afterwards, for which the
    /// plan has no operations. When the rest has been read, [`Self::keep`] is to be called, before
    /// `complete`.
    ///
    /// The read parks where another one brings in what it begins with; one that is to
    /// [hurry](Plan::hurry) does not.
    pub fn read_cached(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        buffer: &mut [u8],
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        plan.check_idle()?;
        plan.reset();
        let len = buffer.len() as u64;
        let Some(parity) = self.begin_read(attachment, offset, len)? else {
            return Ok(Step::Done { covered: 0 });
        };
        let directory = attachment.directory();
        let (covered, is_awaiting) = serve(&self.pool, &directory, offset, buffer, plan);
        if !plan.ops.is_empty() {
            let fills = !plan.fills.is_empty();
            plan.kind = if fills { PlanKind::CachedRead } else { PlanKind::Read };
            plan.parity = parity;
            plan.volume = attachment.id();
            return Ok(Step::Issue { covered });
        }
        self.pool.epochs.leave(self.slot, parity);
        if self.pool.has_stopped() {
            self.pool.want_engine();
        }
        if covered == 0 && is_awaiting {
            return Ok(self.park(ParkReason::InFlight));
        }
        Ok(Step::Done { covered })
    }

    /// Takes in what a read of [`Self::read_cached`] was to bring into the cache, when all of its
    /// operations have ended well. `buffer` is the part that the plan covers.
    pub fn keep(&self, plan: &mut Plan, buffer: &[u8]) {
        let mut is_awaited = false;
        for fill in plan.fills.drain(..) {
            let bytes = buffer.get(fill.buffer_offset..).unwrap_or_default();
            is_awaited |= self.pool.read_cache.keep(&fill, bytes);
        }
        if is_awaited {
            self.pool.bump();
        }
    }

    /// Ends what was not taken in, while the read is in its IO epoch: its extents are not free.
    pub(super) fn give_up_fills(&self, plan: &mut Plan) {
        let mut is_awaited = false;
        for fill in plan.fills.drain(..) {
            is_awaited |= self.pool.read_cache.give_up(&fill);
        }
        if is_awaited {
            self.pool.bump();
        }
    }
}

/// Serves and plans until the request or the plan's room ends, or another read is awaited; gives
/// the bytes served or planned, and whether one is.
fn serve(
    pool: &Pool,
    directory: &Directory,
    offset: u64,
    buffer: &mut [u8],
    plan: &mut Plan,
) -> (u64, bool) {
    let (geometry, len) = (pool.geometry, buffer.len() as u64);
    let mut fills = std::mem::take(&mut plan.fills);
    let (mut done, mut is_awaiting) = (0, false);
    while done < len && !is_awaiting {
        let at = offset + done;
        let from = geometry.within(at);
        let to = (from + (len - done)).min(geometry.extent_size());
        let index = geometry.extent_of(at);
        let part = Part { pool, leaf: directory.load(index.slot()), from, to, done };
        let entry = part.leaf.map_or(Entry::Unmapped, |leaf| pool.arena.entry(leaf, index.entry()));
        let (reached, awaits) = part.serve(entry, buffer, plan, &mut fills);
        (done, is_awaiting) = (done + (reached - from), awaits);
        if reached < to {
            break;
        }
    }
    plan.fills = fills;
    (done, is_awaiting)
}

/// A read's part of one extent of the volume.
#[derive(Clone, Copy)]
struct Part<'a> {
    pool: &'a Pool,
    leaf: Option<LeafId>,
    /// Bytes of the extent.
    from: u64,
    to: u64,
    /// Bytes of the request before it.
    done: u64,
}

impl Part<'_> {
    /// Gives the byte of the extent that it reached, and whether it awaits another read there.
    fn serve(
        &self,
        entry: Entry,
        buffer: &mut [u8],
        plan: &mut Plan,
        fills: &mut Vec<Fill>,
    ) -> (u64, bool) {
        let geometry = self.pool.geometry;
        let (top, base) = (entry.top(), entry.base());
        let valid =
            if active(Mutation::ClearBitsRead) { geometry.full_bitmap() } else { top.valid };
        let over = top.physical.map(|physical| (valid, physical));
        // Bits that the overlay hides are not read from the base.
        let below = base.physical.map(|physical| (base.valid & !valid, physical));
        let sub_block = geometry.sub_block_size();
        let mut at = self.from;
        while at < self.to {
            let bit = at / sub_block;
            let (extent, bits) = run_at(over.into_iter().chain(below), bit);
            let end = ((bit + u64::from(bits)) * sub_block).min(self.to);
            let (first, last) = (self.place(at), self.place(end));
            let out = &mut buffer[first..last];
            if let (Some(extent), Some(leaf)) = (extent, self.leaf) {
                let waits = !plan.hurried;
                let run = Run { extent, from: at, to: end, buffer_offset: first, waits };
                let buffer_offset = first as u64;
                let mut planner = Planner { pool: self.pool, leaf, run, buffer_offset, plan };
                match self.pool.read_cache.read(run, out, &mut planner, fills) {
                    Reached::End => {}
                    Reached::Full(at) => return (at, false),
                    Reached::Awaits(at) => return (at, true),
                }
            } else {
                out.fill(0);
            }
            at = end;
        }
        (self.to, false)
    }

    /// The place of a byte of the extent in the request's buffer, which is in memory.
    fn place(&self, at: u64) -> usize {
        usize::try_from(self.done + (at - self.from)).unwrap_or(usize::MAX)
    }
}

/// The planner as the cache sees it, for a run.
struct Planner<'a> {
    pool: &'a Pool,
    leaf: LeafId,
    run: Run,
    /// The place of the run in the request's buffer.
    buffer_offset: u64,
    plan: &'a mut Plan,
}

impl Reader for Planner<'_> {
    fn is_shared(&self) -> bool {
        let meta = self.pool.arena.meta(self.leaf);
        meta.references.load(Ordering::SeqCst) > 1 || self.pool.extra(self.run.extent) > 0
    }

    fn plan(&mut self, from: u64, to: u64) -> bool {
        let (device, start) = self.pool.place(self.run.extent);
        let op = PlanOp {
            kind: OpKind::Read,
            stage: 0,
            device,
            offset: start + from,
            len: to - from,
            buffer_offset: self.buffer_offset + (from - self.run.from),
            unseen: false,
        };
        push(self.plan, op)
    }
}
