//! The end of a request: the result of its IO becomes visible.

use super::write::is_held;
use super::{Attachment, Worker};
use crate::change::Site;
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::geometry::MAX_DEVICES;
use crate::io::IoError;
use crate::mapping::Mapping;
use crate::mutation::{Mutation, Situation, active, met};
use crate::mutation_gate::MutationGuard;
use crate::plan::{Answer, CommitTicket, OpKind, Plan, PlanKind};
use crate::pool::{CHANGE_UNITS, Pool, split};
use crate::stripe::{SlowWrite, Stripe};
use crate::sync::Ordering;
use crate::units::PhysicalExtent;

impl Worker {
    /// Ends a request whose operations have all ended: with `Ok` if each succeeded. To be called
    /// exactly once per [`crate::plan::Step::Issue`], by the worker that planned it.
    ///
    /// A failed write changes nothing in the map. A failed flush stops the pool for good (R8).
    pub fn complete(
        &mut self,
        attachment: &Attachment,
        plan: &mut Plan,
        result: Result<(), IoError>,
    ) -> Result<Answer, MapperError> {
        if plan.kind != PlanKind::Idle
            && plan.kind != PlanKind::Flush
            && plan.volume != attachment.id()
        {
            return Err(MapperError::Internal("complete with another volume than planned"));
        }
        match plan.kind {
            PlanKind::Idle => Err(MapperError::Internal("complete without a request in flight")),
            PlanKind::Read => self.complete_read(plan, result),
            PlanKind::CachedRead => {
                self.give_up_fills(plan);
                self.complete_read(plan, result)
            }
            PlanKind::Flush => self.complete_flush(plan, result),
            PlanKind::Write => self.complete_write(attachment, plan, result),
        }
    }

    #[expect(clippy::inline_always, reason = "a call for each read costs 30 instructions")]
    #[inline(always)]
    fn complete_read(
        &self,
        plan: &mut Plan,
        result: Result<(), IoError>,
    ) -> Result<Answer, MapperError> {
        self.pool.epochs.leave(self.slot, plan.parity);
        if self.pool.has_stopped() {
            // It may be waiting for this read to end.
            self.pool.want_engine();
        }
        self.finish(plan, result, "read")
    }

    fn complete_flush(
        &mut self,
        plan: &mut Plan,
        result: Result<(), IoError>,
    ) -> Result<Answer, MapperError> {
        let failed_on = plan.ops.first().map_or(0, |op| op.device.0);
        if let Err(error) = result
            && !active(Mutation::FlushErrorIgnored)
        {
            self.pool.fail(MapperError::Io { operation: "flush", device: failed_on, error });
        } else {
            for device in 0..MAX_DEVICES {
                self.pool.note_flushed(device, plan.flushed[device]);
            }
        }
        self.pool.end_flush(
            plan.flushed
                .iter()
                .enumerate()
                .fold(0, |devices, (device, covered)| devices | u32::from(*covered > 0) << device),
        );
        plan.reset();
        self.pool.check_alive().map(|()| Answer::Done)
    }

    fn complete_write(
        &mut self,
        attachment: &Attachment,
        plan: &mut Plan,
        result: Result<(), IoError>,
    ) -> Result<Answer, MapperError> {
        // Also of a write that failed: blocks of it may have reached the device, and can be read.
        self.count_written(plan);
        self.check_written_through(plan, result);
        if !plan.slow.is_empty() {
            self.complete_slow(attachment, plan, result.is_ok());
        }
        let fua_commit = plan.fua_commit;
        self.end_write(attachment, plan.parity);
        let answer = self.finish(plan, result, "write")?;
        if !fua_commit || active(Mutation::FuaWithoutCommit) {
            return Ok(answer);
        }
        self.pool.check_alive()?;
        self.pool.want_commit();
        Ok(Answer::Wait(self.fua_ticket()))
    }

    /// R8: a write through that fails may have failed in its flush, which may have dropped data of
    /// any volume. If the error was a lack of space, nothing was written, so there was nothing to
    /// flush.
    fn check_written_through(&self, plan: &Plan, result: Result<(), IoError>) {
        let Err(error) = result else { return };
        let through =
            |kind| matches!(kind, OpKind::Write { fua: true } | OpKind::WriteZeroes { fua: true });
        let first = plan.ops.iter().find(|op| through(op.kind));
        if let Some(op) = first
            && error != IoError::NoSpace
            && !self.pool.tuning.synchronous
            && !active(Mutation::FlushErrorIgnored)
        {
            let operation = "write through";
            self.pool.fail(MapperError::Io { operation, device: op.device.0, error });
        }
    }

    /// R7: a FUA write that needs a commit is a flush that arrives now.
    fn fua_ticket(&self) -> CommitTicket {
        let ticket = self.ticket();
        let finished = self.pool.progress.0.finished.load(Ordering::SeqCst);
        if active(Mutation::FuaJoinsCommit) && finished < ticket.sequence {
            return CommitTicket { lsn: 0, sequence: ticket.sequence - 1 };
        }
        ticket
    }

    /// Counts on every device written to, before the answer: a flush that finds the count covered
    /// by an earlier one needs not be sent (the count is read before a flush is sent).
    fn count_written(&self, plan: &Plan) {
        for op in &plan.ops {
            let changes = matches!(
                op.kind,
                OpKind::Write { .. } | OpKind::WriteZeroes { .. } | OpKind::Copy { .. }
            );
            if changes {
                let device = self.table_index(op.device.0);
                let count = &self.pool.written[self.slot].0[device];
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
            }
        }
    }

    fn table_index(&self, handle: u8) -> usize {
        let handles = &self.pool.handles;
        handles.iter().position(|h| h.load(Ordering::Relaxed) == handle).unwrap_or(0)
    }

    fn complete_slow(&mut self, attachment: &Attachment, plan: &mut Plan, ok: bool) {
        let pool = std::sync::Arc::clone(&self.pool);
        let directory = attachment.directory();
        let mut others_may_wait = false;
        for piece in &plan.slow {
            let guard = pool.gate.enter(self.slot);
            let slot = piece.extent.slot();
            let mut stripe = pool.stripe(attachment.volume.identity.lineage, slot).lock();
            if let Some(write) = stripe.remove(piece.token) {
                others_may_wait |= write.awaited | stripe.take_awaited();
                let of = (&*pool, attachment, &*directory);
                self.finish_slow(of, &guard, &stripe, &write, ok);
                if write.page_promised {
                    pool.return_page();
                }
                if write.allocated {
                    attachment.shared.count_taken(-1);
                }
            }
            drop(stripe);
            drop(guard);
            self.slow_in_flight -= 1;
        }
        if others_may_wait {
            pool.bump();
        }
        if pool.pages.0.strict.load(Ordering::Relaxed) {
            pool.want_engine();
        }
    }

    /// Decides by the entry as it is *now* (R5d) which change the write makes.
    fn finish_slow(
        &mut self,
        (pool, attachment, directory): (&Pool, &Attachment, &Directory),
        guard: &MutationGuard<'_>,
        stripe: &Stripe,
        write: &SlowWrite,
        ok: bool,
    ) {
        let volume = &*attachment.volume;
        let site = Site { pool, volume, directory, ring_slot: self.slot };
        let now = site.entry(write.extent);
        let cancelled = if active(Mutation::NoCancel) { 0 } else { write.cancelled };
        let own = if ok { write.own & !cancelled } else { 0 };
        let alone = stripe.on(write.volume, write.extent).next().is_none();
        let new = match write.source {
            Some(source) if write.redirects => redirected(write, source, now, own, alone),
            Some(_) => copied(write, now, own, ok),
            None => in_place(write, now, own, alone),
        };
        let target = Some(write.target);
        if now.top().physical != target && new.top().physical != target && alone {
            // Never visible, and not the target of another write.
            give_back(pool, attachment, write.target);
        }
        if new == now {
            pool.ring.release(self.slot, CHANGE_UNITS);
        } else {
            let sub_blocks = pool.geometry.sub_blocks();
            if new.is_crowded(sub_blocks) && !now.is_crowded(sub_blocks) {
                pool.want_folds();
            }
            let step = (now, new);
            site.set(&mut self.spares, || guard.take_lsn(1), write.extent, step, CHANGE_UNITS);
        }
        // The copy is visible: lookups find its target, and the source may be released.
        if let Some(source) = write.source
            && is_held(write.redirects)
            && let Some((counts, local)) = pool.counts_of(source)
            && counts.sub(local) == 0
            && pool.has_composite()
        {
            // The last other holder went meanwhile: the entry may be folded.
            pool.want_folds();
        }
        if write.redirects && pool.is_leaving() {
            pool.want_folds();
        }
    }

    fn finish(
        &self,
        plan: &mut Plan,
        result: Result<(), IoError>,
        operation: &'static str,
    ) -> Result<Answer, MapperError> {
        let device = plan.ops.first().map_or(0, |op| op.device.0);
        plan.reset();
        match result {
            Ok(()) => Ok(Answer::Done),
            Err(error) => Err(MapperError::Io { operation, device, error }),
        }
    }
}

/// A first write, or one that makes more of an exclusive extent valid. `alone`: no other slow
/// write is aimed at the extent.
fn in_place(write: &SlowWrite, now: Entry, own: u64, alone: bool) -> Entry {
    let top = now.top();
    if top.physical == Some(write.target) {
        let valid = top.valid | own;
        let is_empty = valid | now.base().valid == 0;
        // The last write over an extent that a discard has emptied meanwhile unmaps it (R5e).
        return if is_empty && alone && write.cancelled != 0 {
            met(Situation::EmptiedUnderWrite);
            Entry::Unmapped
        } else {
            Entry::over(Mapping { valid, ..top }, now.base())
        };
    }
    if !now.is_mapped() && own != 0 {
        return Entry::Mapped { physical: write.target, valid: own };
    }
    now
}

/// A copy-on-write: (bits still set now AND copied) OR (own bits not cancelled). What is below the
/// copied extent stays.
fn copied(write: &SlowWrite, now: Entry, own: u64, ok: bool) -> Entry {
    let (top, base) = (now.top(), now.base());
    let still = if active(Mutation::StaleCompletion) { u64::MAX } else { top.valid };
    let valid = if ok { (still & write.copied) | own } else { 0 };
    if valid != 0 {
        // Also where nothing is read from the base any more: K8.
        return Entry::of(Mapping { physical: Some(write.target), valid }, base);
    }
    if now.valid() == 0 && write.cancelled != 0 {
        met(Situation::CopyCancelled);
        return Entry::Unmapped;
    }
    now
}

/// A redirected write (K2): the first one of an extent makes the
/// entry composite, later ones find their target there.
fn redirected(
    write: &SlowWrite,
    source: PhysicalExtent,
    now: Entry,
    own: u64,
    alone: bool,
) -> Entry {
    let top = now.top();
    if own == 0 {
        // As in place: R5e.
        let is_left = now.valid() != 0 || !alone || write.cancelled == 0;
        return if is_left { now } else { Entry::Unmapped };
    }
    if top.physical == Some(write.target) {
        return Entry::over(Mapping { valid: top.valid | own, ..top }, now.base());
    }
    let over = Mapping { physical: Some(write.target), valid: own };
    if active(Mutation::RedirectStale) {
        return Entry::over(over, Mapping { physical: Some(source), valid: write.copied });
    }
    if top.physical == Some(source) {
        return Entry::over(over, top);
    }
    if now.is_mapped() { now } else { Entry::from(over) }
}

/// Returns an extent that was allocated and never shown. One that could not be written, as there is
/// no space below, is not tried again while another device has extents. Where freed extents are
/// passed down, the volume does not keep it: another one could get it later, with that write in it.
fn give_back(pool: &Pool, attachment: &Attachment, extent: PhysicalExtent) {
    if pool.tuning.passdown {
        pool.unshown.lock().push(extent);
        return pool.want_engine();
    }
    let is_of_use = !pool.free_space.lock().is_passed_over(split(extent).0);
    if !(is_of_use && attachment.shared.slice.lock().push_first(extent)) {
        pool.free_space.lock().free(extent, 1);
        pool.bump();
    }
}
