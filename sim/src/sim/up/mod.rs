//! An open pool with its clients: requests become plans, plans become device operations, answers
//! go to the oracle.

mod drive;
mod end;
mod ops;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blockd_mapper::engine::{ControlId, Engine};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoError;
use blockd_mapper::plan::{CommitTicket, ParkReason, Plan, Step};
use blockd_mapper::pool::Pool;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};

use crate::sim::content::{UNIT, Value, index};
use crate::sim::core::{Core, bytes};
use crate::sim::marks::Mark;
use crate::sim::oracle::{Breach, ChangeId, Intent, Payload, Reading, Time, Violation};

use ops::{put, read_cached};

/// A request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Read, checked against the oracle.
    Read,
    /// Part of reading a whole pool back after opening.
    Verify,
    /// Write.
    Write,
    /// Discard.
    Discard,
    /// Write zeroes: with unmap or keeping the space.
    Zeroes {
        /// Whether the space is given back.
        unmap: bool,
    },
    /// Flush.
    Flush,
}

#[derive(Debug)]
struct Request {
    worker: usize,
    volume: u32,
    kind: Kind,
    start: usize,
    len: usize,
    fua: bool,
    since: Time,
    change: Option<ChangeId>,
    reading: Option<Reading>,
    buffer: Vec<Value>,
    /// The bytes of what the cache has served, and of what is to come into it.
    bytes: Vec<u8>,
    parts: u32,
    /// Whether a part of it was planned or done.
    begun: bool,
    /// A device operation of it failed.
    io_failed: bool,
    /// Whether an answered discard or zeroing overlapped it meanwhile.
    overtaken: bool,
    error: Option<MapperError>,
}

#[derive(Debug)]
struct Part {
    request: usize,
    start: usize,
    len: usize,
    rest: usize,
    plan: Plan,
    stage: u8,
    outstanding: u32,
    error: Option<IoError>,
    ticket: Option<CommitTicket>,
    parked: Option<ParkReason>,
    /// Whether it has become the flush of a FUA request.
    flushing: bool,
}

/// A pool in service.
#[derive(Debug)]
pub struct Up {
    /// The control plane.
    pub engine: Engine,
    /// The shared state of the pool.
    pub pool: Arc<Pool>,
    /// The engine has to be polled.
    pub engine_due: bool,
    /// Structure changes under way: the state of each.
    pub controls: BTreeMap<ControlId, (u64, Option<Intent>, Mark)>,
    /// Pieces still to be read back: volume, first unit, units.
    pub verify: Vec<(u32, usize, usize)>,
    /// Reading back: whether the found state is durable.
    pub verifying: Option<bool>,
    /// The pool has been closed in order.
    pub closed: bool,
    /// The caller lets requests end and starts no new ones.
    pub draining: bool,
    /// Parked for space at some time since space was last freed.
    pub was_full: bool,
    workers: Vec<Worker>,
    attached: Vec<BTreeMap<u32, Attachment>>,
    requests: Vec<Option<Request>>,
    live: usize,
    parts: Vec<Option<Part>>,
    free_requests: Vec<usize>,
    free_parts: Vec<usize>,
    parked: Vec<BTreeSet<usize>>,
    retry: Vec<usize>,
    waiting: Vec<usize>,
    spare_plans: Vec<Plan>,
}

impl Up {
    /// Puts clients in front of a pool.
    pub fn new(engine: Engine, pool: Arc<Pool>, workers: usize) -> Result<Self, Violation> {
        let made: Result<Vec<Worker>, MapperError> = (0..workers).map(|_| pool.worker()).collect();
        let workers = made.map_err(|error| {
            Violation::new(Breach::Error, format!("no worker to be had: {error}"))
        })?;
        Ok(Self {
            engine,
            pool,
            engine_due: true,
            controls: BTreeMap::new(),
            verify: Vec::new(),
            verifying: None,
            closed: false,
            draining: false,
            was_full: false,
            attached: workers.iter().map(|_| BTreeMap::new()).collect(),
            parked: workers.iter().map(|_| BTreeSet::new()).collect(),
            workers,
            requests: Vec::new(),
            live: 0,
            parts: Vec::new(),
            free_requests: Vec::new(),
            free_parts: Vec::new(),
            retry: Vec::new(),
            waiting: Vec::new(),
            spare_plans: Vec::new(),
        })
    }

    /// Requests not answered.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live
    }

    /// Workers of the pool.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Parked requests that may go on now.
    #[must_use]
    pub fn has_retries(&self) -> bool {
        !self.retry.is_empty()
    }

    /// Requests whose commit has finished.
    #[must_use]
    pub fn has_committed(&self) -> bool {
        self.waiting.iter().any(|at| self.is_committed(*at))
    }

    fn is_committed(&self, part: usize) -> bool {
        self.parts[part]
            .as_ref()
            .and_then(|part| part.ticket.as_ref())
            .is_some_and(|ticket| self.pool.commit_state(ticket).is_some())
    }

    /// Forgets everything, as the death of the process does.
    pub fn abandon(&mut self) {
        for part in self.parts.iter_mut().flatten() {
            part.plan.abandon();
        }
        for plan in &mut self.spare_plans {
            plan.abandon();
        }
    }

    /// A client asks for something. `len` in units.
    pub fn request(
        &mut self,
        core: &mut Core,
        kind: Kind,
        volume: u32,
        place: (usize, usize),
        fua: bool,
    ) -> Result<(), Violation> {
        let (start, len) = place;
        let worker = core.random.usize(..self.workers.len());
        let Some(known) = core.oracle.volumes().get(&volume) else { return Ok(()) };
        let ordinal = known.ordinal;
        let range = start..start + len;
        let mut request = Request {
            worker,
            volume,
            kind,
            start,
            len,
            fua,
            since: core.oracle.tick(),
            change: None,
            reading: None,
            buffer: Vec::new(),
            bytes: Vec::new(),
            parts: 0,
            begun: false,
            io_failed: false,
            overtaken: false,
            error: None,
        };
        match kind {
            Kind::Read => {
                request.reading = core.oracle.begin_read(volume, range);
                request.buffer = vec![Value::garbage(1); len];
            }
            Kind::Verify => request.buffer = vec![Value::garbage(1); len],
            Kind::Write => {
                let number = core.oracle.write_number();
                request.buffer =
                    range.clone().map(|unit| Value::data(number, ordinal, unit as u64)).collect();
                let payload = Payload::Tags(number);
                request.change = core.oracle.begin_change(volume, range, payload);
            }
            Kind::Discard => {
                let inner = self.inner(core, volume, start, len);
                request.change = core.oracle.begin_change(volume, range, Payload::Discard(inner));
                self.mark_discard(core, &request);
            }
            Kind::Zeroes { .. } => {
                request.change = core.oracle.begin_change(volume, range, Payload::Zeroes);
            }
            Kind::Flush => {}
        }
        core.trace.note(|| {
            let kind = request.kind;
            format!("client {kind:?} volume {volume} {start}+{len} fua {fua} worker {worker}")
        });
        if kind == Kind::Write {
            self.mark_concurrent(core, &request);
        }
        request.parts = 1;
        let request = put(&mut self.requests, &mut self.free_requests, request);
        self.live += 1;
        self.start_part(core, request, start, len)
    }

    /// The units of a discard that certainly become zero: those of sub-blocks covered in whole.
    fn inner(&self, core: &Core, volume: u32, start: usize, len: usize) -> std::ops::Range<usize> {
        let sub_block = self.sub_block_units();
        let end = start + len;
        let units = core.oracle.volumes().get(&volume).map_or(0, |volume| volume.units);
        let inner_end = if end == units { end } else { end / sub_block * sub_block };
        let inner_start = start.next_multiple_of(sub_block).min(end);
        inner_start..inner_end.max(inner_start)
    }

    fn mark_discard(&self, core: &mut Core, request: &Request) {
        let range = request.start..request.start + request.len;
        let hit = self.requests.iter().flatten().any(|other| {
            other.kind == Kind::Write
                && other.volume == request.volume
                && other.start < range.end
                && range.start < other.start + other.len
        });
        if hit {
            core.marks.hit(Mark::DiscardUnderWrite);
        }
    }

    fn mark_concurrent(&self, core: &mut Core, request: &Request) {
        let extent = index(self.pool.geometry().extent_size() / UNIT);
        let Some(volume) = core.oracle.volumes().get(&request.volume) else { return };
        if volume.live.value(request.start) != Value::ZERO {
            return;
        }
        let hit = self.requests.iter().flatten().any(|other| {
            other.kind == Kind::Write
                && other.volume == request.volume
                && other.start / extent == request.start / extent
        });
        if hit {
            core.marks.hit(Mark::ConcurrentFirst);
        }
    }

    fn touch(&mut self, at: usize) {
        if let Some(part) = &self.parts[at]
            && let Some(request) = self.requests[part.request].as_mut()
        {
            request.begun = true;
        }
    }

    /// The call of the worker that the part is at.
    fn ask(&mut self, core: &mut Core, at: usize) -> Result<Step, MapperError> {
        let no_part = MapperError::Closed;
        let Some(part) = self.parts[at].as_mut() else { return Err(no_part) };
        let Some(request) = self.requests[part.request].as_mut() else { return Err(no_part) };
        let worker = &mut self.workers[request.worker];
        let attachments = &mut self.attached[request.worker];
        if let std::collections::btree_map::Entry::Vacant(vacant) =
            attachments.entry(request.volume)
        {
            vacant.insert(worker.attach(VolumeId(request.volume))?);
        }
        let attachment = &attachments[&request.volume];
        let (offset, len) = (bytes(part.start), bytes(part.rest));
        if part.flushing {
            return worker.flush(attachment, &mut part.plan);
        }
        let step = match request.kind {
            // What a whole pool has is read when it has just been opened, and its cache is empty.
            Kind::Read if self.pool.caches_reads() => {
                let place = (part.start, part.rest);
                read_cached(core, worker, attachment, request, place, &mut part.plan)
            }
            Kind::Read | Kind::Verify => worker.read(attachment, offset, len, &mut part.plan),
            Kind::Write => worker.write(attachment, offset, len, request.fua, &mut part.plan),
            Kind::Discard => worker.discard(attachment, offset, len),
            Kind::Zeroes { unmap } => {
                worker.write_zeroes(attachment, offset, len, unmap, &mut part.plan)
            }
            Kind::Flush => worker.flush(attachment, &mut part.plan),
        };
        core.trace.note(|| {
            format!("part {at} {:?} {}+{}: {step:?}", request.kind, part.start, part.rest)
        });
        step
    }

    /// Detaches a volume that was deleted, or a random one.
    pub fn detach(&mut self, worker: usize, volume: u32) {
        let busy = self
            .requests
            .iter()
            .flatten()
            .any(|request| request.worker == worker && request.volume == volume);
        if !busy && let Some(attachment) = self.attached[worker].remove(&volume) {
            self.workers[worker].detach(attachment);
        }
    }

    /// Does the caller's work after every call of the mapper: wakes requests that may continue.
    pub fn after_call(&mut self, core: &mut Core) {
        self.engine_due |= self.pool.engine_wanted();
        let wakeups = self.pool.take_wakeups();
        if wakeups == 0 {
            return;
        }
        core.trace.note(|| format!("wake {wakeups:b}"));
        for worker in 0..self.workers.len() {
            if wakeups & (1 << self.workers[worker].slot()) != 0 {
                self.retry.extend(std::mem::take(&mut self.parked[worker]));
            }
        }
    }

    /// Abandons every parked request, as after a timeout of the client.
    pub fn give_up(&mut self, core: &mut Core) -> Result<usize, Violation> {
        let mut all: Vec<usize> = self.parked.iter_mut().flat_map(std::mem::take).collect();
        all.retain(|at| {
            let reason = self.parts[*at].as_ref().and_then(|part| part.parked);
            matches!(reason, Some(ParkReason::Space | ParkReason::Metadata))
        });
        for at in &all {
            core.marks.hit(Mark::GaveUpFull);
            self.fail_part(core, *at, MapperError::NoSpace { needed: 0, free: 0 })?;
        }
        Ok(all.len())
    }

    /// Why requests are parked, for a message.
    #[must_use]
    pub fn describe_stuck(&self) -> String {
        let parked: Vec<_> = self.parts.iter().flatten().filter_map(|part| part.parked).collect();
        format!(
            "{} requests, {} waiting for a commit, parked {parked:?}, {} controls, failure {:?}",
            self.live,
            self.waiting.len(),
            self.controls.len(),
            self.pool.failure()
        )
    }
}
