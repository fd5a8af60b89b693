//! The life of a request: planned, done on the media, answered; or parked, and tried again.
//!
//! Nothing here waits, and what is mapped already takes no lock and no memory. A completion goes
//! back to the front-end as a value.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoError;
use blockd_mapper::plan::{Answer, CommitTicket, ParkReason, Step};
use blockd_mapper::space::{OnFull, VolumeSettings};
use blockd_mapper::worker::Attachment;
use blockd_media::clock::Clock;

use super::cached::read_cached;
use super::copy::Copies;
use super::pools::PoolPart;
use super::slot::{MAX_SLOWED_NS, Slot, State, is_late};
use crate::backing::Ring;
use crate::block::{BlockError, Completion, Operation, Request};
use crate::schedule::{Capacity, Defences, Scheduler, TenantId, VolumeShare};
use crate::stats::{Op, Stage, VolumeStats};

/// Calls of the mapper for one request before others get their turn.
const STEPS_PER_TURN: usize = 2;
/// One request in this many has its planning measured.
const SAMPLE: u64 = 64;
/// Requests that an executor has places for from the start, and of connections at the most: the
/// scheduler divides these. Places are made when they are needed; one takes 5 KiB.
pub(super) const FIRST_SLOTS: usize = 256;
const MAX_REQUESTS: u64 = 8192;
/// Requests whose time on the media can be seen while they are there.
pub(super) const MARKED_REQUESTS: usize = 4096;
/// How long requests that are done in many steps may take of a turn: alone, and while others wait.
const LONG_WORK_NS: u64 = 250_000;
const SHARED_WORK_NS: u64 = 20_000;
/// How often a write that found no space below is tried again.
const SPACE_PAUSE_NS: u64 = 250_000_000;

/// Names a volume that an executor serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeRef(pub(super) usize);

/// A volume as this thread serves it.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) pool: usize,
    pub(super) attachment: Attachment,
    pub(super) stats: Arc<VolumeStats>,
    pub(super) users: usize,
    pub(super) in_flight: usize,
    /// The volume's settings, as of their version.
    pub(super) settings: VolumeSettings,
    pub(super) settings_version: u64,
    /// Shared with other workers that serve it.
    pub(super) share: Arc<VolumeShare>,
    /// The volume as the scheduler knows it.
    pub(super) tenant: TenantId,
    /// Slots to be planned, in order.
    pub(super) ready: VecDeque<usize>,
    /// Set if the volume is closing: requests no longer wait for the pool or for space.
    pub(super) doomed: bool,
}

/// Serves requests on one thread.
#[derive(Debug)]
pub struct Executor {
    pub(super) slots: Vec<Slot>,
    pub(super) free: Vec<usize>,
    /// Which request is taken when.
    pub(super) scheduler: Scheduler,
    pub(super) pools: Vec<PoolPart>,
    pub(super) volumes: Vec<Option<Attached>>,
    /// Volumes with slots to be planned, in order of service.
    pub(super) ready: VecDeque<usize>,
    /// Slots that wait for space below.
    pub(super) starved: VecDeque<usize>,
    retry_at: u64,
    pub(super) copies: Copies,
    pub(super) done: VecDeque<Completion>,
    pub(super) clock: Clock,
    pub(super) now: u64,
    planned: u64,
    /// Volumes that have been refused space in the present round of tries, or looks.
    pub(super) refused: Vec<usize>,
    /// The state of the pools at the last look at the waiting requests.
    pub(super) waits_looked_at: (u64, u64),
    /// Set if that look found a request waiting for space.
    pub(super) found_waiting: bool,
    /// The pool and device that were written to since the last fence.
    pub(super) unfenced: Option<(usize, u8)>,
}

impl Executor {
    /// The executor of a worker with so much payload memory.
    #[must_use]
    pub fn new(worker: usize, memory: u64, clock: Clock) -> Self {
        let requests = FIRST_SLOTS;
        let capacity = Capacity { memory, requests: MAX_REQUESTS };
        Self {
            slots: (0..requests).map(|_| Slot::new()).collect(),
            free: (0..requests).rev().collect(),
            scheduler: Scheduler::new(worker, capacity, Defences::ALL),
            pools: Vec::new(),
            volumes: Vec::new(),
            ready: VecDeque::with_capacity(requests),
            starved: VecDeque::with_capacity(requests),
            retry_at: 0,
            copies: Copies::default(),
            done: VecDeque::with_capacity(requests),
            clock,
            now: 0,
            planned: 0,
            refused: Vec::with_capacity(requests),
            waits_looked_at: (0, 0),
            found_waiting: false,
            unfenced: None,
        }
    }

    /// The time, from now on.
    #[inline]
    pub fn set_now(&mut self, now: u64) {
        self.now = now;
        self.scheduler.begin_turn(now);
    }

    /// The time as it was set last.
    #[must_use]
    #[inline]
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// The next request that has ended.
    pub fn take_done(&mut self) -> Option<Completion> {
        // One for all that have ended since: none of them is reported yet.
        if self.unfenced.is_some() {
            self.fence();
        }
        self.done.pop_front()
    }

    /// Continues all requests that can continue: parked ones, committed ones, and those that may
    /// find space now.
    pub fn poll(&mut self, ring: &mut Ring) {
        self.start_waiting(ring);
        self.work_on(ring);
        for pool in 0..self.pools.len() {
            self.answer_commits(pool);
            let part = &mut self.pools[pool];
            let events = part.handle.mapper().events();
            let is_over = part.patience.is_some_and(|at| at <= self.now);
            if part.parked.is_empty() {
                // Those that were slowed down may have been cancelled.
                part.patience = None;
                continue;
            }
            if events == part.events && !is_over {
                continue;
            }
            part.events = events;
            self.retry_parked(pool, ring);
        }
        self.end_waits();
        self.follow_limits();
        if !self.starved.is_empty() && self.now >= self.retry_at {
            for _ in 0..self.starved.len() {
                if let Some(at) = self.starved.pop_front() {
                    self.slots[at].is_late = false;
                    self.enter_state(at, State::Ready);
                    self.advance(at, ring);
                }
            }
        }
    }

    /// Whether [`Self::poll`] has something to do at once.
    ///
    /// To be called before the thread sleeps: a change does not wake requests that were parked, or
    /// began to wait for a commit, after it.
    #[must_use]
    pub fn has_ready(&mut self) -> bool {
        (self.scheduler.has_holds() && self.scheduler.has_runnable())
            || !self.ready.is_empty()
            || !self.done.is_empty()
            || self.pools.iter().any(PoolPart::moved)
    }

    /// When [`Self::poll`] should be called at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let starved = (!self.starved.is_empty()).then_some(self.retry_at);
        let patience = self.pools.iter().filter_map(|part| part.patience);
        let limited = self.scheduler.next_deadline();
        // The end of the last wait has to be noticed, too.
        let look = self.found_waiting.then(|| self.next_look());
        patience.chain(limited).chain(starved).chain(look).min()
    }

    /// Wakes the pools' threads and other workers, where something was left to them.
    #[inline]
    pub fn pass_on(&self) {
        self.pools.iter().for_each(|part| part.handle.pass_on());
    }

    /// Plans a request, as far as that goes without waiting.
    pub(super) fn advance(&mut self, at: usize, ring: &mut Ring) {
        for _ in 0..STEPS_PER_TURN {
            let Some(request) = &self.slots[at].request else { return };
            let all_done = self.slots[at].done >= request.len
                && (request.operation != Operation::Flush || self.slots[at].flushing);
            if all_done && !self.needs_flush(at) {
                self.answer(at);
                return;
            }
            match self.plan(at, ring) {
                Ok(Step::Issue { covered }) => {
                    if self.slots[at].has_waited {
                        self.note_space(at);
                    }
                    // A copy is never alone.
                    if self.slots[at].plan.ops().len() > 1 {
                        self.begin_copies(at);
                    }
                    self.slots[at].covered = covered;
                    self.slots[at].error = None;
                    self.begin_media(at);
                    if !self.start_stage(at, 0, ring) {
                        return;
                    }
                    // It has ended already.
                    if !self.media_done(at, ring) {
                        return;
                    }
                }
                Ok(Step::Done { covered }) => {
                    if self.slots[at].has_waited {
                        self.note_space(at);
                    }
                    if self.is_flush(at) {
                        self.answer_flushed(at);
                        return;
                    }
                    self.slots[at].done += covered;
                }
                Ok(Step::Wait(ticket)) => {
                    self.wait_for_commit(at, ticket);
                    return;
                }
                Ok(Step::Park(_)) => return,
                Err(error) => {
                    self.finish(at, Err(BlockError::from(&error)));
                    return;
                }
            }
        }
        self.enter_state(at, State::Ready);
        self.work_later(at);
    }

    /// Goes on with requests that take many steps, such as zeroes over a TiB: volume after volume,
    /// and only for a while, so that others get their turn.
    fn work_on(&mut self, ring: &mut Ring) {
        if self.ready.is_empty() {
            return;
        }
        let is_alone = self.scheduler.active() < 2;
        let until = self.clock.ns() + if is_alone { LONG_WORK_NS } else { SHARED_WORK_NS };
        while let Some(volume) = self.ready.pop_front() {
            let Some(attached) = self.volumes[volume].as_mut() else { continue };
            let Some(at) = attached.ready.pop_front() else { continue };
            if !attached.ready.is_empty() {
                self.ready.push_back(volume);
            }
            self.advance(at, ring);
            if self.clock.ns() >= until {
                break;
            }
        }
    }

    fn work_later(&mut self, at: usize) {
        let volume = self.slots[at].volume;
        let Some(attached) = self.volumes[volume].as_mut() else { return };
        if attached.ready.is_empty() {
            self.ready.push_back(volume);
        }
        attached.ready.push_back(at);
    }

    /// Whether what a slot plans next is a flush.
    pub(super) fn is_flush(&self, at: usize) -> bool {
        let slot = &self.slots[at];
        let flush = |request: &Request| request.operation == Operation::Flush;
        slot.flushing || slot.request.as_ref().is_some_and(flush)
    }

    /// A discard or zeroes that must be durable are flushed when they are done.
    fn needs_flush(&mut self, at: usize) -> bool {
        let slot = &mut self.slots[at];
        let wanted = matches!(
            slot.request.as_ref().map(|request| request.operation),
            Some(Operation::Discard { fua: true } | Operation::WriteZeroes { fua: true, .. })
        );
        if wanted && !slot.flushing {
            slot.flushing = true;
            return true;
        }
        false
    }

    /// Requests the next step from the mapper. A request that it parks is in the queue afterwards.
    fn plan(&mut self, at: usize, ring: &mut Ring) -> Result<Step, MapperError> {
        let now = self.now;
        let slot = &mut self.slots[at];
        let (Some(request), Some(attached)) = (&slot.request, &self.volumes[slot.volume]) else {
            return Err(MapperError::Internal("a slot without a request"));
        };
        let part = &mut self.pools[attached.pool];
        let volume = &attached.attachment;
        // Before the attempt: a later change will be noticed.
        let events = part.handle.mapper().events();
        self.planned += 1;
        let started = self.planned.is_multiple_of(SAMPLE).then(|| self.clock.ns());
        let (offset, len) = (request.offset + slot.done, request.len - slot.done.min(request.len));
        let plan = &mut slot.plan;
        plan.hurry(slot.slowed_at > 0 && now.saturating_sub(slot.slowed_at) >= MAX_SLOWED_NS);
        let step = match request.operation {
            _ if slot.flushing => part.worker.flush(volume, plan),
            Operation::Flush => part.worker.flush(volume, plan),
            Operation::Read if part.worker.pool().caches_reads() => read_cached(
                part,
                volume,
                (request, slot.done),
                (plan, slot.doomed || is_late(slot.joined, slot.done, now)),
                ring,
            ),
            Operation::Read => part.worker.read(volume, offset, len, plan),
            Operation::Write { fua } => part.worker.write(volume, offset, len, fua, plan),
            Operation::Discard { .. } => part.worker.discard(volume, offset, len),
            Operation::WriteZeroes { unmap, .. } => {
                part.worker.write_zeroes(volume, offset, len, unmap, plan)
            }
        };
        if let Some(started) = started {
            let ns = self.clock.ns().saturating_sub(started);
            attached.stats.stage(Stage::Map).record(ns);
        }
        if let Ok(Step::Park(reason)) = step {
            let lacks_space = lacks_space(reason, volume);
            let has_left = slot.flow.is_some_and(|flow| self.scheduler.has_left(flow));
            if slot.doomed || (has_left && lacks_space) {
                return Err(MapperError::Closed);
            }
            slot.reason = reason;
            slot.has_waited |= lacks_space;
            if request.operation == Operation::Read {
                slot.note_join(now);
            }
            if lacks_space && attached.settings.on_full != OnFull::Error {
                self.scheduler.set_full(attached.tenant, true);
            }
            if reason == ParkReason::Slowed && slot.slowed_at == 0 {
                slot.slowed_at = now;
                attached.stats.slowed.add(1);
            }
            if let Some(hurries_at) = slot.hurries_at().filter(|at| *at > now) {
                part.patience = Some(part.patience.map_or(hurries_at, |at| at.min(hurries_at)));
            }
            let first = part.parked.is_empty();
            part.events = if first { events } else { part.events.min(events) };
            part.parked.push_back(at);
            if !std::mem::replace(&mut slot.was_parked, true) {
                attached.stats.parks.add(1);
            }
            self.enter_state(at, State::Parked);
        }
        step
    }

    /// All operations of a plan have ended. Gives whether the request goes on at once.
    pub(super) fn media_done(&mut self, at: usize, ring: &mut Ring) -> bool {
        let goes_on = self.slots[at].error.is_none() && self.slots[at].stage == 0;
        if goes_on && self.has_stage(at, 1) && !self.start_stage(at, 1, ring) {
            return false;
        }
        let flush = self.is_flush(at);
        if self.slots[at].plan.changes_map() {
            self.fence();
        }
        if self.slots[at].plan.fills_cache() {
            self.keep_read(at, ring);
        }
        let slot = &mut self.slots[at];
        let Some(attached) = &self.volumes[slot.volume] else { return false };
        let part = &mut self.pools[attached.pool];
        let result = slot.error.take().map_or(Ok(()), Err);
        let answer = part.worker.complete(&attached.attachment, &mut slot.plan, result);
        if let (Some(flow), 1..) = (slot.flow, slot.extra) {
            self.scheduler.end_extra(flow, std::mem::take(&mut slot.extra));
        }
        self.end_media(at);
        let slot = &mut self.slots[at];
        match answer {
            Ok(Answer::Done) => slot.done += slot.covered,
            Ok(Answer::Wait(ticket)) => {
                slot.done += slot.covered;
                slot.ticket = Some(ticket);
            }
            Err(MapperError::Io { operation: "write", error: IoError::NoSpace, .. }) => {
                self.starve(at);
                return false;
            }
            Err(error) => {
                self.finish(at, Err(BlockError::from(&error)));
                return false;
            }
        }
        if flush {
            self.answer_flushed(at);
            return false;
        }
        true
    }

    /// A write found no space below. It changed nothing, and is tried again.
    fn starve(&mut self, at: usize) {
        let slot = &self.slots[at];
        if slot.doomed || slot.flow.is_some_and(|flow| self.scheduler.has_left(flow)) {
            self.finish(at, Err(BlockError::Gone));
            return;
        }
        let slot = &mut self.slots[at];
        let is_late = slot.is_late;
        let is_counted = is_late || std::mem::replace(&mut slot.was_starved, true);
        if let Some(attached) = self.volumes[slot.volume].as_ref().filter(|_| !is_counted) {
            attached.stats.starved.add(1);
        }
        self.enter_state(at, State::Starved);
        if self.slots[at].stuck_at == 0 && !is_late {
            self.slots[at].stuck_at = self.now;
        }
        if self.starved.is_empty() {
            self.retry_at = self.now + SPACE_PAUSE_NS;
        }
        self.starved.push_back(at);
    }

    fn answer_flushed(&mut self, at: usize) {
        self.slots[at].flushing = true;
        self.answer(at);
    }

    /// The request is done; its answer may have to wait for a commit.
    fn answer(&mut self, at: usize) {
        match self.slots[at].ticket.take() {
            Some(ticket) => self.wait_for_commit(at, ticket),
            None => self.finish(at, Ok(())),
        }
    }

    fn wait_for_commit(&mut self, at: usize, ticket: CommitTicket) {
        self.slots[at].ticket = Some(ticket);
        self.enter_state(at, State::Committing);
        if let Some(attached) = &self.volumes[self.slots[at].volume] {
            self.pools[attached.pool].committing.push(at);
        }
    }

    fn answer_commits(&mut self, pool: usize) {
        if self.pools[pool].committing.is_empty() {
            return;
        }
        let part = &mut self.pools[pool];
        part.commits = part.handle.mapper().commits_finished();
        let mut next = 0;
        while let Some(&at) = self.pools[pool].committing.get(next) {
            let Some(ticket) = self.slots[at].ticket else {
                self.pools[pool].committing.swap_remove(next);
                continue;
            };
            match self.pools[pool].handle.mapper().commit_state(&ticket) {
                None => next += 1,
                Some(result) => {
                    self.pools[pool].committing.swap_remove(next);
                    self.slots[at].ticket = None;
                    self.finish(at, result.map_err(|error| BlockError::from(&error)));
                }
            }
        }
    }

    /// Ends a request.
    pub(super) fn finish(&mut self, at: usize, result: Result<(), BlockError>) {
        self.enter_state(at, State::Idle);
        let slot = &mut self.slots[at];
        let Some(request) = slot.request.take() else { return };
        slot.ticket = None;
        let total = self.now.saturating_sub(slot.arrived);
        if slot.waited_ns.is_some() {
            record_wait(slot, self.volumes[slot.volume].as_ref());
        }
        if let Some(flow) = slot.flow {
            if slot.extra > 0 {
                self.scheduler.end_extra(flow, std::mem::take(&mut slot.extra));
            }
            self.scheduler.complete(flow, slot.cost);
        }
        if let Some(attached) = self.volumes[slot.volume].as_mut() {
            attached.in_flight -= 1;
            count(&attached.stats, &request, result, total);
        }
        self.free.push(at);
        self.done.push_back(request.complete(result));
    }
}

/// Records the wait of a request that ends, all tries together.
#[cold]
fn record_wait(slot: &mut Slot, attached: Option<&Attached>) {
    let waited_ns = slot.waited_ns.take();
    (slot.was_parked, slot.was_starved) = (false, false);
    if let (Some(ns), Some(attached)) = (waited_ns, attached) {
        attached.stats.stage(Stage::Wait).record(ns);
    }
}

/// Whether a request waits for space that is not on its way, or is slowed down as little is left.
pub(super) fn lacks_space(reason: ParkReason, volume: &Attachment) -> bool {
    match reason {
        ParkReason::Slowed => true,
        ParkReason::Space => volume.is_out_of_space(),
        _ => false,
    }
}

fn count(stats: &VolumeStats, request: &Request, result: Result<(), BlockError>, total_ns: u64) {
    let op = match request.operation {
        Operation::Read => Op::Read,
        Operation::Write { .. } => Op::Write,
        Operation::Flush => Op::Flush,
        Operation::Discard { .. } => Op::Discard,
        Operation::WriteZeroes { .. } => Op::WriteZeroes,
    };
    let (ops, bytes, errors) = stats.op(op);
    match result {
        Ok(()) => {
            ops.add(1);
            bytes.add(request.len);
        }
        Err(error) => {
            errors.add(1);
            if error == BlockError::Io {
                stats.faults[usize::from(op != Op::Read)].add(1);
            }
        }
    }
    stats.stage(Stage::Total).record(total_ns);
}
