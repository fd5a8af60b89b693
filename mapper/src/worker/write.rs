//! Writes: in place where all is mapped and exclusive, otherwise a slow write in the table.

use super::alone::extent_to_overwrite;
use super::read::push;
use super::way::Way;
use super::{Attachment, Begun, Worker};
use crate::change::Site;
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::mapping::Mapping;
use crate::mutation::{Mutation, active};
use crate::plan::{OpKind, ParkReason, Plan, PlanKind, PlanOp, SlowPiece, Step};
use crate::pool::{CHANGE_UNITS, Composites};
use crate::stripe::{SlowWrite, Stripe};
use crate::sync::Ordering;
use crate::units::{ExtentIndex, PhysicalExtent, VolumeId};
use crate::volume::Volume;

/// Where the bytes of a write come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Payload {
    /// The client's buffer.
    Client,
    /// Nowhere: they are zeroes.
    Zeroes,
}

/// A write request as it is planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) fua: bool,
    pub(super) payload: Payload,
}

/// One extent's part of a write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    extent: ExtentIndex,
    /// Bytes of the extent.
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) buffer_offset: u64,
    fua: bool,
    pub(super) payload: Payload,
    /// Sub-blocks touched, in whole or in part.
    touched: u64,
}

/// How planning a piece ended.
enum Planned {
    Yes,
    NoRoom,
    Park(ParkReason),
}

impl Worker {
    /// Plans a write of whole blocks. With `fua` it is durable when answered (R7).
    ///
    /// A plan may cover only the front of the request: where its operations fill up, or where a
    /// later part must wait. Nothing is held while waiting.
    pub fn write(
        &mut self,
        volume: &Attachment,
        offset: u64,
        len: u64,
        fua: bool,
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        self.plan_write(volume, Request { offset, len, fua, payload: Payload::Client }, plan)
    }

    pub(super) fn plan_write(
        &mut self,
        attachment: &Attachment,
        request: Request,
        plan: &mut Plan,
    ) -> Result<Step, MapperError> {
        plan.check_idle()?;
        let parity = match self.begin_write(attachment)? {
            Begun::Parity(parity) => parity,
            Begun::Not(step) => return Ok(step),
        };
        let checked = attachment.volume.check_range(request.offset, request.len);
        if checked.is_err() || request.len == 0 {
            self.end_write(attachment, parity);
            return checked.map(|()| Step::Done { covered: 0 });
        }
        plan.reset();
        plan.kind = PlanKind::Write;
        plan.volume = attachment.id();
        plan.parity = parity;
        let (covered, park) = self.plan_pieces(attachment, request, plan);
        if covered > 0 {
            return Ok(Step::Issue { covered });
        }
        plan.reset();
        self.end_write(attachment, parity);
        Ok(self.park(park.unwrap_or(ParkReason::InFlight)))
    }

    fn plan_pieces(
        &mut self,
        attachment: &Attachment,
        request: Request,
        plan: &mut Plan,
    ) -> (u64, Option<ParkReason>) {
        let geometry = self.pool.geometry;
        let directory = attachment.directory();
        let mut covered = 0;
        while covered < request.len {
            let at = request.offset + covered;
            let from = geometry.within(at);
            let to = (from + (request.len - covered)).min(geometry.extent_size());
            let piece = Piece {
                extent: geometry.extent_of(at),
                from,
                to,
                buffer_offset: covered,
                fua: request.fua,
                payload: request.payload,
                touched: geometry.touched(from, to),
            };
            match self.plan_piece(attachment, &directory, &piece, plan) {
                Planned::Yes => covered += to - from,
                Planned::NoRoom => break,
                Planned::Park(reason) => return (covered, Some(reason)),
            }
        }
        (covered, None)
    }

    fn plan_piece(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        piece: &Piece,
        plan: &mut Plan,
    ) -> Planned {
        match extent_to_overwrite(&self.pool, directory, piece.extent, piece.touched) {
            Some(physical) => self.plan_in_place(directory, piece, physical, plan),
            None => self.plan_slow(attachment, directory, piece, plan),
        }
    }

    fn plan_in_place(
        &self,
        directory: &Directory,
        piece: &Piece,
        physical: PhysicalExtent,
        plan: &mut Plan,
    ) -> Planned {
        // R7: the data's own FUA is enough only if the mapping that finds it is durable. The
        // leaf's last LSN stands for the entry's: never too low. Without the stripe's mutex, a
        // discard may have emptied the slot meanwhile: then a commit makes the write durable.
        let is_durable = |leaf| {
            let changed = self.pool.arena.meta(leaf).last_lsn.load(Ordering::Acquire);
            changed <= self.pool.progress.0.durable.load(Ordering::SeqCst)
        };
        let fua = piece.fua
            && self.pool.tuning.write_through
            && (active(Mutation::FuaWithoutCommit)
                || directory.load(piece.extent.slot()).is_some_and(is_durable));
        let (device, base) = self.pool.place(self.uncached(physical));
        let op = PlanOp {
            kind: piece.payload.kind(fua),
            stage: 0,
            device,
            offset: base + piece.from,
            len: piece.to - piece.from,
            buffer_offset: piece.buffer_offset,
            unseen: false,
        };
        if !push(plan, op) {
            return Planned::NoRoom;
        }
        plan.fua_commit |= piece.fua && !fua;
        Planned::Yes
    }

    /// Takes the resources of the completion, so that it cannot fail: leaves, a record's room in
    /// the ring, a page for the next checkpoint.
    fn plan_slow(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        piece: &Piece,
        plan: &mut Plan,
    ) -> Planned {
        if plan.room() < 3 || plan.slow.len() == plan.slow.capacity() {
            return Planned::NoRoom;
        }
        if !self.ensure_spares(1) {
            return Planned::Park(ParkReason::Leaves);
        }
        if !self.reserve_record() {
            return Planned::Park(ParkReason::Ring);
        }
        let pool = std::sync::Arc::clone(&self.pool);
        let mut stripe =
            pool.stripe(attachment.volume.identity.lineage, piece.extent.slot()).lock();
        let token = self.next_token;
        let planned = self.plan_locked(attachment, directory, piece, &mut stripe, plan);
        drop(stripe);
        if self.next_token == token {
            // It needs no slow write, or there is none yet.
            self.pool.ring.release(self.slot, CHANGE_UNITS);
            return planned;
        }
        self.slow_in_flight += 1;
        if active(Mutation::BitsAtSubmission) {
            self.publish_early(attachment, directory, piece.extent);
        }
        planned
    }

    fn reserve_record(&self) -> bool {
        let reserved = self.pool.ring.reserve(self.slot, CHANGE_UNITS);
        #[cfg(feature = "mutations")]
        if active(Mutation::OverwriteFullRing) && !reserved {
            self.pool.ring.force_reserve(self.slot, CHANGE_UNITS);
            return true;
        }
        reserved
    }

    fn plan_locked(
        &mut self,
        attachment: &Attachment,
        directory: &Directory,
        piece: &Piece,
        stripe: &mut Stripe,
        plan: &mut Plan,
    ) -> Planned {
        let volume = &*attachment.volume;
        let site = Site { pool: &self.pool, volume, directory, ring_slot: self.slot };
        let entry = site.entry(piece.extent);
        let top = entry.top();
        let shared = top.physical.filter(|&physical| !site.is_exclusive(piece.extent, physical));
        let is_own = top.is_mapped() && shared.is_none();
        if let Some(physical) = top.physical.filter(|_| is_own && piece.touched & !top.valid == 0) {
            return self.plan_in_place(directory, piece, physical, plan);
        }
        let whole = self.pool.geometry.covered(piece.from, piece.to);
        // Under the stripe's mutex, where the end of redirects is checked.
        let redirects = self.pool.composites() == Composites::On;
        let way = Way::of(redirects, entry, shared, piece.touched, whole);
        if stripe.is_full() {
            stripe.await_room();
            return Planned::Park(ParkReason::InFlight);
        }
        if self.conflicts(stripe, volume.identity.id, piece, &way) {
            return Planned::Park(ParkReason::InFlight);
        }
        if way.filled != 0 && is_own && !self.may_fill(volume) {
            return Planned::Park(ParkReason::InFlight);
        }
        if plan.room() < way.operations() {
            let is_first = plan.ops.is_empty();
            return if is_first { Planned::Park(ParkReason::InFlight) } else { Planned::NoRoom };
        }
        // Under the stripe's mutex, where a checkpoint's cut looks for writes without a promise.
        let page_promised = !directory.is_dirty(piece.extent.slot())
            || self.pool.pages.0.strict.load(Ordering::Relaxed);
        if page_promised && !self.pool.promise_page(false) {
            return Planned::Park(ParkReason::Metadata);
        }
        // Other first writes of the extent have a target already.
        let joins = !top.is_mapped() || way.redirects;
        let in_flight = stripe.on(volume.identity.id, piece.extent).next().map(|w| w.target);
        let present = if is_own { top.physical } else { in_flight.filter(|_| joins) };
        let allocated = present.is_none();
        let target = match self.target(attachment, present, plan.hurried) {
            Ok(target) => target,
            Err(reason) => {
                if page_promised {
                    self.pool.return_page();
                }
                return Planned::Park(reason);
            }
        };
        if let Some(source) = shared {
            self.hold(source, way.redirects);
        }
        self.next_token += 1;
        let write = SlowWrite {
            token: self.next_token,
            volume: volume.identity.id,
            extent: piece.extent,
            target,
            source: shared,
            redirects: way.redirects,
            own: piece.touched,
            copied: if way.redirects { top.valid } else { way.from_top },
            filled: way.partial(),
            cancelled: 0,
            awaited: false,
            page_promised,
            allocated,
        };
        attachment.shared.count_taken(i64::from(allocated));
        stripe.add(write);
        let unseen = !is_own || self.is_unseen(volume, piece, top);
        self.push_first_write(piece, entry, &way, (target, unseen), plan);
        plan.slow.push(SlowPiece { extent: piece.extent, token: self.next_token });
        plan.fua_commit |= piece.fua;
        Planned::Yes
    }

    /// The extent that a slow write goes to: the one that is there, or a free one.
    fn target(
        &self,
        attachment: &Attachment,
        present: Option<PhysicalExtent>,
        hurried: bool,
    ) -> Result<PhysicalExtent, ParkReason> {
        match present {
            Some(target) => Ok(self.uncached(target)),
            None => self.allocate(attachment, hurried),
        }
    }

    /// Drops what the cache has of an extent that a write goes to (C1). After the extent was found
    /// exclusive, and before the write is sent.
    #[inline]
    fn uncached(&self, extent: PhysicalExtent) -> PhysicalExtent {
        if !active(Mutation::CacheKeptAtWrite) {
            self.pool.drop_cached(extent);
        }
        extent
    }

    /// Whether no map shows the touched part of an extent that the volume has: it is not valid, and
    /// the change that made it so is durable. A crash would bring back a map from before a change
    /// that is not.
    fn is_unseen(&self, volume: &Volume, piece: &Piece, mapping: Mapping) -> bool {
        let cleared = volume.cleared_lsn.load(Ordering::Acquire);
        mapping.valid & piece.touched == 0
            && cleared <= self.pool.progress.0.durable.load(Ordering::SeqCst)
    }

    /// Whether the piece must wait for a slow write on the same extent: a copy excludes all others
    /// and waits for all of them; a sub-block that is being filled up belongs to one writer, and
    /// where blocks are to stay whole so does any.
    fn conflicts(&self, stripe: &mut Stripe, volume: VolumeId, piece: &Piece, way: &Way) -> bool {
        let whole_blocks = self.pool.tuning.whole_blocks;
        let mut any = false;
        for other in stripe.on_mut(volume, piece.extent) {
            let in_the_way = other.copies()
                || way.copies
                || other.filled & piece.touched != 0
                || way.partial() & other.own != 0
                || (whole_blocks && other.own & piece.touched != 0);
            // Its completion wakes the waiters; marked under the mutex, so that none is missed.
            other.awaited |= in_the_way;
            any |= in_the_way;
        }
        any
    }

    /// Whether zeroes can be written around a write's bytes in an extent that the volume has (R5f).
    /// Not while a write in place is in flight that found the sub-block valid, before a discard: it
    /// could land over the zeroes. It has no entry in the table that would wake the waiting one, so
    /// the engine does.
    fn may_fill(&self, volume: &Volume) -> bool {
        // Under the mutex of the stripe, as the discard that is meant.
        let until = volume.cleared_until.load(Ordering::Acquire);
        if self.pool.epochs.reached(until) || active(Mutation::FillUndrained) {
            return true;
        }
        self.pool.await_epoch(until);
        false
    }

    /// A copy holds one more reference to its source, so that the extent does not become exclusive
    /// meanwhile: a write in place would be lost when the copy is shown (R10c).
    fn hold(&self, source: PhysicalExtent, redirects: bool) {
        if !is_held(redirects) {
            return;
        }
        if let Some((counts, local)) = self.pool.counts_of(source) {
            counts.add(local, 1);
        }
    }

    /// An extent of the volume's reserve; asks the engine for more ahead of need.
    pub(super) fn allocate(
        &self,
        attachment: &Attachment,
        hurried: bool,
    ) -> Result<PhysicalExtent, ParkReason> {
        let volume = &attachment.volume;
        let slowed = self.pool.slows_down.load(Ordering::Relaxed) && !volume.lives_on_its_own();
        if slowed && !volume.take_allowance(hurried) {
            self.pool.queue_up(&volume.slowed);
            return Err(ParkReason::Slowed);
        }
        let grants = volume.grants.load(Ordering::Acquire);
        let (extent, low) = attachment.shared.allocate(volume, || self.low_mark(volume));
        let extent = extent.or_else(|| volume.take_from_slices());
        if extent.is_some() {
            // After the extent was taken: one extent too many is kept in between, never too few.
            volume.keep_less(1);
        } else {
            if slowed {
                volume.allowance.fetch_add(1, Ordering::AcqRel);
            }
            volume.misses.note(self.pool.events());
            if self.pool.queue_up(&volume.starves) {
                volume.count_grant_wait(grants);
                self.pool.ask_for_space(volume);
            }
        }
        if low && !volume.wants_space.swap(true, Ordering::AcqRel) {
            self.pool.ask_for_space(volume);
            self.pool.want_engine();
        }
        extent.ok_or(ParkReason::Space)
    }

    /// The rule taken out: bits become valid before the data is there (R5b).
    fn publish_early(&mut self, volume: &Attachment, directory: &Directory, extent: ExtentIndex) {
        let pool = std::sync::Arc::clone(&self.pool);
        if !pool.ring.reserve(self.slot, CHANGE_UNITS) {
            return;
        }
        let guard = pool.gate.enter(self.slot);
        let mut stripe = pool.stripe(volume.volume.identity.lineage, extent.slot()).lock();
        let Some(write) = stripe.remove(self.next_token) else { return };
        stripe.add(write);
        let site = Site { pool: &pool, volume: &volume.volume, directory, ring_slot: self.slot };
        let old = site.entry(extent);
        if write.source.is_some() || old.top().valid & write.own == write.own {
            pool.ring.release(self.slot, CHANGE_UNITS);
            return;
        }
        let valid = old.top().valid | write.own;
        let new = Entry::of(Mapping { physical: Some(write.target), valid }, old.base());
        site.set(&mut self.spares, || guard.take_lsn(1), extent, (old, new), CHANGE_UNITS);
    }
}

impl Payload {
    pub(super) const fn kind(self, fua: bool) -> OpKind {
        match self {
            Self::Client => OpKind::Write { fua },
            Self::Zeroes => OpKind::WriteZeroes { fua },
        }
    }
}

/// Whether a copy, or a redirect (K3), keeps one more reference to its source.
pub(super) fn is_held(redirects: bool) -> bool {
    let unheld = if redirects { Mutation::RedirectNotHeld } else { Mutation::FastUnderCopy };
    !active(unheld)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::engine::testing;

    #[test]
    fn a_fua_write_in_place_needs_a_commit_where_a_discard_has_emptied_the_slot() {
        let pool = testing::pool();
        let worker = pool.worker().unwrap();
        let emptied = Directory::new(1).unwrap();
        let piece = Piece {
            extent: ExtentIndex(0),
            from: 0,
            to: 4096,
            buffer_offset: 0,
            fua: true,
            payload: Payload::Client,
            touched: 1,
        };
        let mut plan = Plan::with_capacity(1);
        let planned = worker.plan_in_place(&emptied, &piece, PhysicalExtent(3), &mut plan);
        assert!(matches!(planned, Planned::Yes));
        assert_eq!(plan.ops()[0].kind, OpKind::Write { fua: false });
        assert!(plan.fua_commit);
    }
}
