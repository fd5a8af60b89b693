//! The data path: one worker per thread, no lock and no record for mapped extents.

mod alone;
mod attach;
mod changes;
mod clear;
mod complete;
mod read;
mod read_cached;
mod status;
mod way;
mod write;

use std::sync::Arc;

pub use attach::Attachment;
pub use changes::Look;
pub use status::{Content, Stretch};

pub use crate::diff::{DiffRange, RangeState};

use crate::change::Spares;
use crate::error::MapperError;
use crate::geometry::MAX_DEVICES;
use crate::mutation::{Mutation, active};
use crate::plan::{CommitTicket, OpKind, ParkReason, Plan, PlanKind, PlanOp, Step};
use crate::pool::{MAX_WORKERS, Pool};
use crate::sync::Ordering;
use crate::units::DeviceIndex;
use crate::volume::{DELETED, OPEN, Volume};

/// One thread's access to a pool's volumes. Every request in flight belongs to the worker that
/// planned it, and is completed by it.
#[derive(Debug)]
pub struct Worker {
    pool: Arc<Pool>,
    slot: usize,
    spares: Spares,
    /// Slow pieces in flight: each may use leaves when it completes.
    slow_in_flight: usize,
    next_token: u64,
}

impl Pool {
    /// A new worker; there are as many as the pool was opened for.
    pub fn worker(self: &Arc<Self>) -> Result<Worker, MapperError> {
        let mut taken = self.workers.lock();
        let limit = self.tuning.workers.min(MAX_WORKERS);
        let slot = (0..limit)
            .find(|slot| *taken & (1 << slot) == 0)
            .ok_or(MapperError::Limit { what: "workers", limit: limit as u64 })?;
        if !self.ring.prepare(slot) {
            return Err(MapperError::NoRingMemory);
        }
        *taken |= 1 << slot;
        Ok(Worker {
            pool: Arc::clone(self),
            slot,
            spares: Spares::with_capacity(1024),
            slow_in_flight: 0,
            // The slot in the high bits makes tokens unique in the pool.
            next_token: (slot as u64) << 48,
        })
    }
}

impl Worker {
    /// The worker's bit in [`Pool::take_wakeups`], counted from 0.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.slot
    }

    /// The pool it works on.
    #[must_use]
    pub const fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Makes every write answered before now durable, with the mapping that finds it (R2, R3).
    ///
    /// With nothing to commit it is a flush of each device written since its last one, done by
    /// this worker itself; otherwise it waits for a commit captured from now on. While a flush of
    /// one of these devices is under way the request parks, and with it all that ask meanwhile: the
    /// first of them that is tried again flushes for all. A request that is tried again needs no
    /// more than what was written when it was tried first; [`Plan::begin`] separates it from the
    /// plan's next request.
    pub fn flush(&mut self, _volume: &Attachment, plan: &mut Plan) -> Result<Step, MapperError> {
        self.pool.check_alive()?;
        plan.check_idle()?;
        if plan.joins {
            return Ok(self.start_flush(plan));
        }
        let ticket = self.ticket();
        let durable = self.pool.progress.0.durable.load(Ordering::SeqCst);
        let nothing_uncaptured = active(Mutation::ShortFlushDuringCommit)
            && self.pool.progress.0.finished.load(Ordering::SeqCst)
                < self.pool.progress.0.captured.load(Ordering::SeqCst);
        if durable != ticket.lsn && self.pool.read_only {
            // Writes that a former process answered were found in its ring, and stay there.
            return Err(MapperError::ReadOnly);
        }
        if durable != ticket.lsn && !nothing_uncaptured {
            self.pool.want_commit();
            return Ok(Step::Wait(ticket));
        }
        plan.reset();
        for device in 0..MAX_DEVICES {
            plan.flushed[device] = self.pool.written_on(device);
        }
        Ok(self.start_flush(plan))
    }

    /// Flushes the devices on which the plan needs more than has been flushed, if none of them is
    /// being flushed: such a flush may have been sent before a write that this request covers.
    fn start_flush(&self, plan: &mut Plan) -> Step {
        let mut devices = 0;
        for (device, needed) in plan.flushed.iter_mut().enumerate() {
            if *needed > self.pool.flushed.0[device].load(Ordering::SeqCst) {
                devices |= 1 << device;
            } else {
                *needed = 0;
            }
        }
        plan.joins = devices != 0 && !self.pool.begin_flush(devices);
        if plan.joins {
            if active(Mutation::FlushJoinsRunning) {
                plan.flushed = [0; MAX_DEVICES];
            }
            return self.park(ParkReason::InFlight);
        }
        if devices == 0 {
            return Step::Done { covered: 0 };
        }
        plan.kind = PlanKind::Flush;
        for device in (0..MAX_DEVICES).filter(|device| devices & (1 << device) != 0) {
            // Read before the flush is sent: it covers all of these.
            plan.flushed[device] = self.pool.written_on(device);
            let handle = self.pool.handles[device].load(Ordering::Relaxed);
            plan.push(PlanOp {
                kind: OpKind::Flush,
                stage: 0,
                device: DeviceIndex(handle),
                offset: 0,
                len: 0,
                buffer_offset: 0,
                unseen: false,
            });
        }
        Step::Issue { covered: 0 }
    }

    /// A flush that arrives now: the next commit to be captured, and everything numbered so far.
    fn ticket(&self) -> CommitTicket {
        let sequence = self.pool.progress.0.captured.load(Ordering::SeqCst);
        CommitTicket { lsn: self.pool.gate.last_assigned().0, sequence }
    }

    fn park(&self, reason: ParkReason) -> Step {
        self.pool.wake.0.parked.fetch_or(1 << self.slot, Ordering::SeqCst);
        match reason {
            ParkReason::Ring => self.pool.want_commit(),
            ParkReason::InFlight => {}
            ParkReason::Leaves => {
                self.pool.wake.0.leaves.store(true, Ordering::SeqCst);
                self.pool.want_engine();
            }
            ParkReason::Space | ParkReason::Slowed | ParkReason::Metadata | ParkReason::Gated => {
                self.pool.want_engine();
            }
        }
        Step::Park(reason)
    }

    /// Counts a write in before it reads the gate, so that a closing gate either sees it or stops
    /// it (R16), and enters the IO epoch, whose fence serves for both. Gives the parity.
    fn begin_write(&self, volume: &Attachment) -> Result<Begun, MapperError> {
        volume.check_writable(&self.pool)?;
        let writes = &volume.shared.writes.0;
        writes.store(writes.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let parity = self.pool.epochs.enter(self.slot);
        // After the epoch's fence: a pool that closes either sees this write or stops it.
        if let Err(stopped) = self.pool.check_alive() {
            self.end_write(volume, parity);
            return Err(stopped);
        }
        match volume.volume.state.load(Ordering::SeqCst) {
            OPEN => Ok(Begun::Parity(parity)),
            DELETED => {
                self.end_write(volume, parity);
                Err(MapperError::NoVolume(volume.volume.identity.id.to_string()))
            }
            _ => {
                self.end_write(volume, parity);
                Ok(Begun::Not(self.park(ParkReason::Gated)))
            }
        }
    }

    fn end_write(&self, volume: &Attachment, parity: u8) {
        self.pool.epochs.leave(self.slot, parity);
        let writes = &volume.shared.writes.0;
        writes.store(writes.load(Ordering::Relaxed) - 1, Ordering::SeqCst);
        let awaited = volume.volume.state.load(Ordering::SeqCst) != OPEN
            // Without the rule nothing is gated, and still the engine waits.
            || active(Mutation::GroupOneByOne);
        if awaited || self.pool.has_stopped() {
            self.pool.want_engine();
        }
    }

    fn ensure_spares(&mut self, more: usize) -> bool {
        let needed = self.slow_in_flight + more;
        self.spares.ensure(&self.pool, needed)
            || (self.slow_in_flight == 0 && self.spares.ensure(&self.pool, more))
    }

    /// A reserve of the volume below this asks for more.
    fn low_mark(&self, volume: &Volume) -> u64 {
        volume.low_mark(self.pool.quantum.load(Ordering::Relaxed))
    }
}

/// How a write begins.
enum Begun {
    /// In this parity of the IO epochs.
    Parity(u8),
    /// Not at all.
    Not(Step),
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.slow_in_flight > 0 {
            // Its writes are still in the table: the slot must not get another owner.
            return;
        }
        self.spares.give_all_back(&self.pool);
        // Another one may wait for these.
        self.pool.want_engine();
        *self.pool.workers.lock() &= !(1 << self.slot);
    }
}
