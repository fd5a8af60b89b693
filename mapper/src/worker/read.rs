//! Reads: runs of valid sub-blocks from the media, zeroes for the rest (R5a).

use super::{Attachment, Worker};
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::mapping::Mapping;
use crate::mutation::{Mutation, active};
use crate::plan::{OpKind, Plan, PlanKind, PlanOp, Step};
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{DeviceIndex, ExtentIndex};
use crate::volume::DELETED;

impl Worker {
    /// Plans a read of whole blocks. Adjacent pieces that lie adjacent on the media are one
    /// operation.
    pub fn read(
        &mut self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        plan.check_idle()?;
        plan.reset();
        let Some(parity) = self.begin_read(attachment, offset, len)? else {
            return Ok(Step::Done { covered: 0 });
        };
        let covered = fill(&self.pool, &attachment.directory(), offset, len, plan);
        plan.kind = PlanKind::Read;
        plan.parity = parity;
        plan.volume = attachment.id();
        Ok(Step::Issue { covered })
    }

    /// Enters the IO epoch before the map is read: extents that the read finds are not reused
    /// before it ends (R4). `None`: there is nothing to read.
    #[expect(clippy::inline_always, reason = "a call for each read costs 30 instructions")]
    #[inline(always)]
    pub(super) fn begin_read(
        &self,
        attachment: &Attachment,
        offset: u64,
        len: u64,
    ) -> Result<Option<u8>, MapperError> {
        let volume = &*attachment.volume;
        let parity = self.pool.epochs.enter(self.slot);
        let alive = match self.pool.check_alive() {
            Err(_) if active(Mutation::FlushErrorIgnored) => Ok(()),
            other => other,
        };
        let usable = alive.and_then(|()| match volume.state.load(Ordering::SeqCst) {
            DELETED => Err(MapperError::NoVolume(volume.identity.id.to_string())),
            _ => volume.check_range(offset, len),
        });
        if usable.is_err() || len == 0 {
            self.pool.epochs.leave(self.slot, parity);
            return usable.map(|()| None);
        }
        Ok(Some(parity))
    }
}

impl Worker {
    /// Prefetches the entry of a byte, so that it is in the cache when a request is planned there.
    /// For front-ends that take requests in batches: warmed first and planned then, the misses of a
    /// batch overlap.
    pub fn warm(&self, attachment: &Attachment, offset: u64) {
        // Leaves are never unmapped, so a stale one may be read; its result is not used.
        let extent = self.pool.geometry.extent_of(offset);
        let directory = attachment.directory();
        if let Some(leaf) = directory.load(extent.slot()) {
            std::hint::black_box(self.pool.arena.meta(leaf).references.load(Ordering::Relaxed));
            std::hint::black_box(self.pool.arena.leaf(leaf).load(extent.entry()));
        }
    }
}

/// The present entry of an extent, without a lock.
pub(super) fn lookup(pool: &Pool, directory: &Directory, extent: ExtentIndex) -> Entry {
    directory
        .load(extent.slot())
        .map_or(Entry::Unmapped, |leaf| pool.arena.entry(leaf, extent.entry()))
}

/// Plans until the request or the plan's room ends; returns the bytes planned.
fn fill(pool: &Pool, directory: &Directory, offset: u64, len: u64, plan: &mut Plan) -> u64 {
    let geometry = pool.geometry;
    let mut done = 0;
    while done < len {
        let at = offset + done;
        let from = geometry.within(at);
        let to = (from + (len - done)).min(geometry.extent_size());
        let index = geometry.extent_of(at);
        let leaf = directory.load(index.slot());
        let plain = leaf.map(|leaf| pool.arena.leaf(leaf).load_plain(index.entry()));
        let planned = match plain.unwrap_or(Some(Mapping::UNMAPPED)) {
            Some(mapping) => extent(pool, mapping, from, to, done, plan),
            None => composite(pool, lookup(pool, directory, index), from, to, done, plan),
        };
        done += planned;
        if planned < to - from {
            break;
        }
    }
    done
}

/// Plans bytes `from..to` of one extent; returns how many were planned.
fn extent(
    pool: &Pool,
    mapping: Mapping,
    from: u64,
    to: u64,
    buffer_offset: u64,
    plan: &mut Plan,
) -> u64 {
    let geometry = pool.geometry;
    let valid =
        if active(Mutation::ClearBitsRead) { geometry.full_bitmap() } else { mapping.valid };
    let Some(physical) = mapping.physical else {
        return if push(plan, zeroes(buffer_offset, to - from)) { to - from } else { 0 };
    };
    let (device, base) = pool.place(physical);
    let sub_block = geometry.sub_block_size();
    let mut at = from;
    while at < to {
        let bit = at / sub_block;
        let rest = valid >> bit;
        let (is_valid, bits) = match rest.trailing_ones() {
            0 => (false, rest.trailing_zeros()),
            ones => (true, ones),
        };
        let end = ((bit + u64::from(bits)) * sub_block).min(to);
        let op = if is_valid {
            let (offset, len, buffer_offset) = (base + at, end - at, buffer_offset + (at - from));
            let (kind, stage, unseen) = (OpKind::Read, 0, false);
            PlanOp { kind, stage, device, offset, len, buffer_offset, unseen }
        } else {
            zeroes(buffer_offset + (at - from), end - at)
        };
        if !push(plan, op) {
            return at - from;
        }
        at = end;
    }
    to - from
}

/// Reads where an entry may lie in two extents.
#[cold]
fn composite(
    pool: &Pool,
    entry: Entry,
    from: u64,
    to: u64,
    buffer_offset: u64,
    plan: &mut Plan,
) -> u64 {
    let geometry = pool.geometry;
    let (top, base) = (entry.top(), entry.base());
    let Some(physical) = top.physical else {
        return if push(plan, zeroes(buffer_offset, to - from)) { to - from } else { 0 };
    };
    let valid = if active(Mutation::ClearBitsRead) { geometry.full_bitmap() } else { top.valid };
    let over = (valid, pool.place(physical));
    // Bits that the overlay hides are not read from the base.
    let below = base.physical.map(|physical| (base.valid & !valid, pool.place(physical)));
    let sub_block = geometry.sub_block_size();
    let mut at = from;
    while at < to {
        let bit = at / sub_block;
        let parts = std::iter::once(over).chain(below);
        let (place, bits) = run_at(parts, bit);
        let end = ((bit + u64::from(bits)) * sub_block).min(to);
        let op = if let Some((device, start)) = place {
            let (offset, len, buffer_offset) = (start + at, end - at, buffer_offset + (at - from));
            let (kind, stage, unseen) = (OpKind::Read, 0, false);
            PlanOp { kind, stage, device, offset, len, buffer_offset, unseen }
        } else {
            zeroes(buffer_offset + (at - from), end - at)
        };
        if !push(plan, op) {
            return at - from;
        }
        at = end;
    }
    to - from
}

/// The run of sub-blocks from `bit` on that lie in the same extent, whose place is given, or in
/// none.
pub(super) fn run_at<P>(parts: impl Iterator<Item = (u64, P)>, bit: u64) -> (Option<P>, u32) {
    let (mut all, mut found) = (0, None);
    for (valid, place) in parts {
        let ones = (valid >> bit).trailing_ones();
        if ones > 0 {
            found = Some((Some(place), ones));
        }
        all |= valid;
    }
    found.unwrap_or_else(|| (None, (all >> bit).trailing_zeros()))
}

const fn zeroes(buffer_offset: u64, len: u64) -> PlanOp {
    let (kind, device) = (OpKind::ReadZeroes, DeviceIndex(0));
    PlanOp { kind, stage: 0, device, offset: 0, len, buffer_offset, unseen: false }
}

/// Adds an operation, joined to the last one where they adjoin. `false`: there is no room.
pub(super) fn push(plan: &mut Plan, op: PlanOp) -> bool {
    if let Some(last) = plan.ops.last_mut() {
        let joins = last.kind == op.kind
            && last.stage == op.stage
            && last.unseen == op.unseen
            && last.buffer_offset + last.len == op.buffer_offset
            && (op.kind == OpKind::ReadZeroes
                || (last.device == op.device && last.offset + last.len == op.offset));
        if joins {
            last.len += op.len;
            return true;
        }
    }
    if plan.room() == 0 {
        return false;
    }
    plan.push(op);
    true
}
