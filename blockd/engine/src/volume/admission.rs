//! How requests enter the executor: volumes and their connections, admission by the scheduler, and
//! the cancellation of requests that wait when a client or a volume goes away.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_mapper::error::MapperError;
use blockd_mapper::plan::{OpKind, ParkReason};
use blockd_mapper::space::VolumeSettings;
use blockd_mapper::units::VolumeId;

use super::executor::{Attached, Executor, VolumeRef, lacks_space};
use super::slot::{Slot, State, moved};
use crate::backing::Ring;
use crate::block::{BlockError, Operation, Request};
use crate::schedule::{DEFAULT_WEIGHT, Demand, FlowId, Hold, Owner, cost};
use crate::stats::VolumeStats;

impl Executor {
    /// Serves a volume from now on, for one more user.
    pub fn attach(
        &mut self,
        pool: [u8; 16],
        volume: VolumeId,
        stats: impl FnOnce() -> Arc<VolumeStats>,
    ) -> Result<VolumeRef, MapperError> {
        let known = self.pools.iter().position(|part| part.handle.id() == pool);
        let pool = known.ok_or(MapperError::Closed)?;
        let same = |one: &Attached| one.pool == pool && one.attachment.id() == volume;
        for (at, one) in self.volumes.iter_mut().enumerate() {
            if let Some(one) = one.as_mut().filter(|one| same(one)) {
                one.users += 1;
                return Ok(VolumeRef(at));
            }
        }
        let part = &mut self.pools[pool];
        let attachment = part.worker.attach(volume)?;
        let (share, stats) = (part.handle.share(volume), stats());
        let tenant = self.scheduler.add_tenant(
            part.handle.window(),
            Arc::clone(&share),
            DEFAULT_WEIGHT,
            Arc::clone(&stats),
        );
        let mut attached = Attached {
            pool,
            attachment,
            stats,
            users: 1,
            in_flight: 0,
            settings: VolumeSettings::default(),
            settings_version: 0,
            share,
            tenant,
            ready: VecDeque::new(),
            doomed: false,
        };
        attached.read_settings();
        self.scheduler.set_limited(tenant, attached.has_limits());
        let free = self.volumes.iter().position(Option::is_none);
        let at = free.unwrap_or(self.volumes.len());
        if at == self.volumes.len() {
            self.volumes.push(None);
        }
        self.volumes[at] = Some(attached);
        Ok(VolumeRef(at))
    }

    /// Ends the service of a volume for one user, which has no request in flight.
    pub fn detach(&mut self, volume: VolumeRef) {
        let Some(attached) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) else {
            return;
        };
        attached.users = attached.users.saturating_sub(1);
        if attached.users == 0
            && attached.in_flight == 0
            && let Some(attached) = self.volumes[volume.0].take()
        {
            // The counters stay; no request of this volume waits here any longer.
            attached.stats.blocked.set(0);
            attached.stats.blocked_ns.set(0);
            self.scheduler.remove_tenant(attached.tenant);
            self.pools[attached.pool].worker.detach(attached.attachment);
        }
    }

    /// Serves a connection or queue of a volume; `None` when the volume is not served.
    #[inline]
    pub fn add_flow(&mut self, volume: VolumeRef, owner: Owner) -> Option<FlowId> {
        let tenant = self.volumes.get(volume.0).and_then(Option::as_ref)?.tenant;
        Some(self.scheduler.add_flow(tenant, owner))
    }

    /// Ends the service of a connection or queue that has nothing in flight.
    pub fn remove_flow(&mut self, flow: FlowId) {
        self.scheduler.remove_flow(flow);
    }

    /// The demand of a volume's request, without payload memory.
    #[must_use]
    #[inline]
    pub const fn demand(operation: Operation, len: u64) -> Demand {
        let counted = !matches!(operation, Operation::Flush);
        let allocates = match operation {
            Operation::Write { .. } => true,
            Operation::WriteZeroes { unmap, .. } => !unmap,
            Operation::Read | Operation::Flush | Operation::Discard { .. } => false,
        };
        Demand::new(moved(operation, len), counted, allocates)
    }

    /// Takes a request before it takes memory. Gives the bytes of memory that it may have.
    ///
    /// # Errors
    /// Why it is held back. [`Self::next_runnable`] names its owner when it may be tried again.
    pub fn admit(&mut self, volume: VolumeRef, flow: FlowId, demand: &Demand) -> Result<u64, Hold> {
        self.follow_settings(volume);
        self.scheduler.admit(flow, demand)
    }

    /// The same of a request for which other answers of its connection wait.
    /// [`Self::end_awaited`] has to follow.
    ///
    /// # Errors
    /// As [`Self::admit`].
    pub fn admit_awaited(
        &mut self,
        volume: VolumeRef,
        flow: FlowId,
        demand: &Demand,
    ) -> Result<u64, Hold> {
        self.follow_settings(volume);
        self.scheduler.admit_awaited(flow, demand)
    }

    #[inline]
    fn follow_settings(&mut self, volume: VolumeRef) {
        if let Some(attached) = self.volumes[volume.0].as_mut()
            && attached.follow_settings()
        {
            self.scheduler.set_limited(attached.tenant, attached.has_limits());
        }
    }

    /// The memory of such a request is free again.
    pub fn end_awaited(&mut self, flow: FlowId) {
        self.scheduler.end_awaited(flow);
    }

    /// A request was admitted, and answered without going through the executor.
    #[inline]
    pub fn end_admission(&mut self, flow: FlowId, demand: &Demand) {
        self.scheduler.complete(flow, cost(demand.bytes));
    }

    /// Gives back a part of what a request was admitted for.
    #[inline]
    pub fn shrink(&mut self, flow: FlowId, bytes: u64, memory: u64) {
        self.scheduler.shrink(flow, bytes, memory);
    }

    /// Takes an admission back, and holds the flow back for memory.
    pub fn revoke(&mut self, flow: FlowId, demand: &Demand, memory: u64) {
        self.scheduler.revoke(flow, demand, memory);
    }

    /// Payload memory of a connection is free again.
    #[inline]
    pub fn free_memory(&mut self, flow: FlowId, bytes: u64) {
        self.scheduler.free_memory(flow, bytes);
    }

    /// A connection that is held back takes no more requests.
    pub fn forget_hold(&mut self, flow: FlowId) {
        self.scheduler.forget_hold(flow);
    }

    /// The connection or queue that may go on next, of those that are held back.
    #[inline]
    pub fn next_runnable(&mut self) -> Option<Owner> {
        self.scheduler.next_runnable()
    }

    /// The one that was named last has gone on.
    #[inline]
    pub fn end_resuming(&mut self) {
        self.scheduler.end_grant();
    }

    /// Volumes that have asked lately.
    #[must_use]
    #[inline]
    pub const fn active(&self) -> usize {
        self.scheduler.active()
    }

    /// Whether some connection or queue is held back, whatever for, a client sends no more, or an
    /// awaited request has its memory.
    #[must_use]
    #[inline]
    pub const fn has_holds(&self) -> bool {
        self.scheduler.has_holds()
    }

    /// Counts the holds that last. To be called several times a second while there are any.
    #[inline]
    pub fn count_holds(&mut self) {
        self.scheduler.count_holds();
    }

    /// Finds volumes that are idle. To be called about once a second.
    pub fn sweep(&mut self) {
        self.scheduler.sweep();
    }

    /// Begins a request that was admitted.
    pub fn begin(&mut self, volume: VolumeRef, flow: FlowId, request: Request, ring: &mut Ring) {
        let mut request = request;
        let Some(attached) = self.volumes[volume.0].as_mut() else {
            let bytes = moved(request.operation, request.len);
            self.scheduler.complete(flow, cost(bytes));
            self.done.push_back(request.complete(Err(BlockError::Gone)));
            return;
        };
        attached.in_flight += 1;
        if self.pools[attached.pool].through {
            request.operation = request.operation.durable();
        }
        let doomed = attached.doomed;
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::new());
            self.slots.len() - 1
        });
        self.slots[at].begin(volume.0, flow, request, self.now);
        self.slots[at].doomed = doomed;
        self.retry_first(at, ring);
        self.advance(at, ring);
    }

    /// Takes over limits that were set while they held something back.
    pub(super) fn follow_limits(&mut self) {
        if !self.scheduler.has_limited() {
            return;
        }
        for attached in self.volumes.iter_mut().flatten() {
            if attached.follow_settings() {
                self.scheduler.set_limited(attached.tenant, attached.has_limits());
            }
        }
    }

    /// A request that waited for space goes on: there is some.
    pub(super) fn note_space(&mut self, at: usize) {
        self.slots[at].has_waited = false;
        if let Some(attached) = &self.volumes[self.slots[at].volume] {
            self.scheduler.set_full(attached.tenant, false);
        }
    }

    /// Charges the copies of a plan to the volume that needs them: each byte is read and written.
    pub(super) fn begin_copies(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let is_copy = |kind: OpKind| matches!(kind, OpKind::Copy { .. });
        let copies = slot.plan.ops().iter().filter(|op| is_copy(op.kind));
        let extra: u64 = copies.map(|op| 2 * op.len).sum();
        if let (Some(flow), 1..) = (slot.flow, extra) {
            slot.extra += extra;
            self.scheduler.begin_extra(flow, extra);
        }
    }

    /// Notifies the scheduler when a request starts or stops waiting for the pool.
    pub(super) fn note_wait(&mut self, at: usize, state: State) {
        let slot = &self.slots[at];
        let changes = slot.state.is_wait() != state.is_wait();
        let Some(flow) = slot.flow.filter(|_| changes) else { return };
        let bytes = slot.request.as_ref().and_then(Request::buffer).map_or(0, Ring::capacity);
        if state.is_wait() {
            self.scheduler.begin_wait(flow, slot.cost, bytes as u64);
        } else {
            self.scheduler.end_wait(flow, slot.cost, bytes as u64);
        }
    }

    /// Fails what of a volume waits for the pool or for space, and what would come to that later:
    /// the volume is going away.
    pub fn cancel_parked(&mut self, volume: VolumeRef) {
        if let Some(attached) = self.volumes[volume.0].as_mut() {
            attached.doomed = true;
            self.scheduler.release_tenant(attached.tenant);
        }
        for at in 0..self.slots.len() {
            if self.slots[at].volume != volume.0 || self.slots[at].request.is_none() {
                continue;
            }
            self.slots[at].doomed = true;
            // A read that waits for another client's is not to wait any more: it reads itself.
            if self.slots[at].is_joined() {
                let pool = self.volumes[volume.0].as_ref().map(|attached| attached.pool);
                if let Some(pool) = pool {
                    self.pools[pool].patience = Some(self.now);
                }
                continue;
            }
            if matches!(self.slots[at].state, State::Parked | State::Starved | State::Ready) {
                self.cancel(at);
            }
        }
    }

    /// Fails requests of a connection whose client sends no more: those that wait for space, and
    /// those that would come to that later. With `unread`, no client reads the answers,
    /// and other requests that wait or take many steps fail as well.
    pub fn cancel_flow(&mut self, flow: FlowId, unread: bool) {
        self.scheduler.set_left(flow);
        for at in 0..self.slots.len() {
            let slot = &self.slots[at];
            if slot.flow != Some(flow) || slot.request.is_none() {
                continue;
            }
            let attached = self.volumes[slot.volume].as_ref();
            let lacks = |reason: ParkReason| {
                attached.is_some_and(|one| lacks_space(reason, &one.attachment))
            };
            let ends = match slot.state {
                State::Parked => unread || lacks(slot.reason),
                State::Starved => true,
                State::Ready => unread,
                State::Idle | State::Media | State::Committing => false,
            };
            if ends {
                self.cancel(at);
            }
        }
    }

    /// Fails a request that waits.
    fn cancel(&mut self, at: usize) {
        self.pools.iter_mut().for_each(|part| part.parked.retain(|&other| other != at));
        self.starved.retain(|&other| other != at);
        if let Some(attached) = self.volumes[self.slots[at].volume].as_mut() {
            attached.ready.retain(|&other| other != at);
        }
        self.finish(at, Err(BlockError::Gone));
    }
}
