//! Discard and write zeroes: changes of the map, with no IO but at ragged edges.

use super::write::{Payload, Request};
use super::{Attachment, Begun, Worker};
use crate::change::Site;
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::mutation::{Mutation, active};
use crate::plan::{ParkReason, Plan, Step};
use crate::pool::CHANGE_UNITS;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, SlotIndex};

/// Records one call may make before it comes back to the caller, so that a huge discard doesn't
/// keep the worker from its other requests.
const RECORDS_PER_CALL: u32 = 256;

/// The treatment of an extent whose last valid sub-block is cleared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Emptied {
    /// The extent returns to the pool.
    Unmap,
    /// The extent stays mapped, and an unmapped one is mapped: space is kept for later writes.
    Keep {
        /// Whether the request was throttled long enough.
        hurried: bool,
    },
}

impl Worker {
    /// Discards a range. Whole sub-blocks read as zeroes at once and their space is free when all
    /// of an extent is; ragged edges keep their content. Durable at the next flush.
    pub fn discard(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
    ) -> Result<Step, MapperError> {
        attachment.volume.check_range(offset, len)?;
        self.clear(attachment, offset, len, Emptied::Unmap)
    }

    /// Makes a range read as zeroes. With `unmap` its space is given back, else every extent of
    /// the range is or stays mapped, so that later writes find room. Ragged edges are written;
    /// the call covers edges and middle in turn. `fua` applies to the edges: for the rest flush.
    pub fn write_zeroes(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        unmap: bool,
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        attachment.volume.check_range(offset, len)?;
        let sub_block = self.pool.geometry.sub_block_size();
        let end = offset + len;
        let inner = offset.next_multiple_of(sub_block);
        let inner_end = end - end % sub_block;
        if offset < inner || inner >= inner_end {
            let edge_end = inner.min(end).max(offset + u64::from(len > 0));
            let edge = if offset < inner { edge_end - offset } else { len };
            return self.zero_edge(attachment, offset, edge, plan);
        }
        let hurried = plan.hurried;
        let emptied = if unmap { Emptied::Unmap } else { Emptied::Keep { hurried } };
        self.clear(attachment, offset, inner_end - offset, emptied)
    }

    /// Part of one sub-block: zeroes to the media if it is valid, else it reads as zeroes already.
    fn zero_edge(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        if len == 0 {
            return Ok(Step::Done { covered: 0 });
        }
        let geometry = self.pool.geometry;
        // As a write of its own: gated, counted, and in an epoch that keeps the leaf.
        let parity = match self.begin_write(attachment)? {
            Begun::Parity(parity) => parity,
            Begun::Not(step) => return Ok(step),
        };
        let directory = attachment.directory();
        let entry = super::read::lookup(&self.pool, &directory, geometry.extent_of(offset));
        drop(directory);
        self.end_write(attachment, parity);
        let within = geometry.within(offset);
        if entry.valid() & geometry.touched(within, within + len) == 0 {
            return Ok(Step::Done { covered: len });
        }
        let request = Request { offset, len, fua: false, payload: Payload::Zeroes };
        self.plan_write(attachment, request, plan)
    }

    fn clear(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        emptied: Emptied,
    ) -> Result<Step, MapperError> {
        let parity = match self.begin_write(attachment)? {
            Begun::Parity(parity) => parity,
            Begun::Not(step) => return Ok(step),
        };
        let directory = attachment.directory();
        let (covered, park) = self.clear_range(attachment, &directory, offset, len, emptied);
        drop(directory);
        self.end_write(attachment, parity);
        match park {
            Some(reason) if covered == 0 && len > 0 => Ok(self.park(reason)),
            _ => Ok(Step::Done { covered }),
        }
    }

    fn clear_range(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        offset: u64,
        len: u64,
        emptied: Emptied,
    ) -> (u64, Option<ParkReason>) {
        let geometry = self.pool.geometry;
        let size = attachment.size();
        let mut covered = 0;
        for _ in 0..RECORDS_PER_CALL {
            if covered >= len {
                break;
            }
            let at = offset + covered;
            let slot = geometry.slot_of(at);
            let span_end = (at / geometry.leaf_span() + 1) * geometry.leaf_span();
            let to_end = (offset + len).min(span_end);
            let whole = at.is_multiple_of(geometry.leaf_span()) && to_end == span_end.min(size);
            if directory.load(slot).is_none() && emptied == Emptied::Unmap {
                // Nothing is mapped; writes in flight on it are still to be cancelled.
                if !active(Mutation::NoCancelWithoutLeaf) {
                    self.cancel_slot(attachment, at, to_end);
                }
                covered += to_end - at;
                continue;
            }
            if whole && emptied == Emptied::Unmap {
                match self.clear_slot(attachment, directory, slot) {
                    Ok(true) => {
                        covered += to_end - at;
                        continue;
                    }
                    Ok(false) => {}
                    Err(reason) => return (covered, Some(reason)),
                }
            }
            let from = geometry.within(at);
            let to = (from + (offset + len - at)).min(geometry.extent_size());
            let extent = geometry.extent_of(at);
            // A volume's last sub-block may be cut short: its end is the volume's.
            let cover_to = if at + (to - from) == size {
                to.next_multiple_of(geometry.sub_block_size())
            } else {
                to
            };
            let bits = geometry.covered(from, cover_to);
            if let Err(reason) = self.clear_extent(attachment, directory, extent, bits, emptied) {
                return (covered, Some(reason));
            }
            covered += to - from;
        }
        (covered, None)
    }

    fn cancel_slot(&self, attachment: &Attachment, from: u64, to: u64) {
        let geometry = self.pool.geometry;
        let volume = &*attachment.volume;
        let slot = geometry.slot_of(from);
        let mut stripe = self.pool.stripe(volume.identity.lineage, slot).lock();
        if !stripe.any_on_slot(volume.identity.id, slot) {
            return;
        }
        let mut at = from;
        while at < to {
            let within = geometry.within(at);
            let end = (within + (to - at)).min(geometry.extent_size());
            let bits = geometry.covered(within, end);
            stripe.cancel(volume.identity.id, geometry.extent_of(at), bits);
            at += end - within;
        }
    }

    /// Takes the resources of a map change besides the stripe. The record releases them, or the
    /// caller.
    fn prepare(&mut self) -> Result<(), ParkReason> {
        if !self.ensure_spares(1) {
            return Err(ParkReason::Leaves);
        }
        if !self.pool.ring.reserve(self.slot, CHANGE_UNITS) {
            return Err(ParkReason::Ring);
        }
        Ok(())
    }

    /// A page for the leaf of a slot. Inside the gate: no cut comes between this and the change.
    fn promise(&self, directory: &Directory, slot: SlotIndex) -> Result<bool, ParkReason> {
        let promised = !directory.is_dirty(slot);
        if promised && !self.pool.promise_page(true) {
            self.pool.ring.release(self.slot, CHANGE_UNITS);
            return Err(ParkReason::Metadata);
        }
        Ok(promised)
    }

    /// Drops a whole leaf with one record, if no slow write is in flight on it (R5e).
    fn clear_slot(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        slot: SlotIndex,
    ) -> Result<bool, ParkReason> {
        self.prepare()?;
        let pool = std::sync::Arc::clone(&self.pool);
        let volume = &*attachment.volume;
        let guard = pool.gate.enter(self.slot);
        let promised = self.promise(directory, slot)?;
        let stripe = pool.stripe(volume.identity.lineage, slot).lock();
        let busy = stripe.any_on_slot(volume.identity.id, slot);
        let leaf = directory.load(slot).filter(|_| !busy);
        if let Some(leaf) = leaf {
            let site = Site { pool: &pool, volume, directory, ring_slot: self.slot };
            site.unmap_slot(|| guard.take_lsn(1), slot, leaf, CHANGE_UNITS);
            self.pool.want_engine();
        } else {
            pool.ring.release(self.slot, CHANGE_UNITS);
        }
        drop(stripe);
        drop(guard);
        if promised {
            pool.return_page();
        }
        Ok(leaf.is_some())
    }

    fn clear_extent(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        extent: ExtentIndex,
        bits: u64,
        emptied: Emptied,
    ) -> Result<(), ParkReason> {
        self.prepare()?;
        let pool = std::sync::Arc::clone(&self.pool);
        let volume = &*attachment.volume;
        let guard = pool.gate.enter(self.slot);
        let promised = self.promise(directory, extent.slot())?;
        let mut stripe = pool.stripe(volume.identity.lineage, extent.slot()).lock();
        let site = Site { pool: &pool, volume, directory, ring_slot: self.slot };
        let now = site.entry(extent);
        let busy =
            stripe.cancel(volume.identity.id, extent, bits) && !active(Mutation::UnmapUnderWrite);
        let left = now.keep(!bits);
        let new = match (now.is_mapped(), emptied) {
            (false, Emptied::Unmap) => Ok(Entry::Unmapped),
            // Writes in flight have their extent already and will map it.
            (false, Emptied::Keep { .. }) if busy => Ok(Entry::Unmapped),
            (false, Emptied::Keep { hurried }) => self
                .allocate(attachment, hurried)
                .map(|physical| Entry::Mapped { physical, valid: 0 }),
            (true, Emptied::Unmap) if left.valid() == 0 && !busy && bits != 0 => {
                Ok(Entry::Unmapped)
            }
            (true, _) => Ok(left),
        };
        match new {
            Ok(new) if new != now => {
                let mut reserved = CHANGE_UNITS;
                let mut from = now;
                if now.base().is_mapped() && !new.is_mapped() {
                    // K8: each change drops one reference. The base is the first.
                    site.set(&mut self.spares, || guard.take_lsn(1), extent, (now, left), 1);
                    (from, reserved) = (left, reserved - 1);
                }
                let step = (from, new);
                site.set(&mut self.spares, || guard.take_lsn(1), extent, step, reserved);
                if new.top().physical == now.top().physical {
                    // R5f: a write in place that saw the bits may still land there.
                    let until = pool.epochs.drain_end();
                    volume.cleared_until.fetch_max(until, Ordering::AcqRel);
                }
            }
            _ => pool.ring.release(self.slot, CHANGE_UNITS),
        }
        drop(stripe);
        drop(guard);
        if promised {
            pool.return_page();
        }
        new.map(|_| ())
    }
}
