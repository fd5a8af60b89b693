//! A queue of a device, on its worker's ring: requests in, answers out. An answer fetches the next
//! request, so that both cost one entry of the ring, and all of a turn's one system call.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use blockd_engine::backing::{AreaId, QueueTag};
use blockd_engine::block::{BlockError, Buffer, Completion, Operation, Request};
use blockd_engine::schedule::{FlowId, Owner};
use blockd_engine::volume::{Executor, Step, Token, VolumeRef};

use super::descriptor::Descriptors;
use super::host::{QueueSpec, QueueStandby};
use super::request::{Wanted, answer};
use crate::Context;
use crate::demands::{Demands, Flushes};

/// One of a queue's requests.
#[derive(Debug)]
struct Tag {
    /// Its memory, while no request has it.
    buffer: Option<Buffer>,
    /// Its pages were made known by a command, and have to be taken out again.
    registered: bool,
    /// The answer, while they are.
    answer: i32,
}

/// Why requests fail on standby.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fails {
    /// Requests wait.
    No,
    /// The pool was not closed in order, or does not have the volume any more.
    OfPool,
    /// The device is being started, or is about to be removed.
    OfDevice,
}

/// A queue that is served.
#[derive(Debug)]
pub struct Queue {
    /// The served device and volume.
    pub spec: QueueSpec,
    /// The volume, as the worker and its scheduler know it; `None` on standby, when requests wait.
    served: Option<(VolumeRef, FlowId)>,
    /// The same on standby, until the last request that is with it has ended.
    leaving: Option<(VolumeRef, FlowId)>,
    flushes: Flushes,
    fails: Fails,
    /// Where a request is reported that waits for the volume.
    demands: Arc<Demands>,
    at: usize,
    area: AreaId,
    descriptors: Descriptors,
    tags: Vec<Tag>,
    /// Requests that the kernel may hand out.
    fetching: usize,
    /// Requests that are being served.
    in_flight: usize,
    /// Requests that the scheduler holds back, or that wait for the volume, in order.
    held: VecDeque<u16>,
    /// Requests are left to the next process.
    draining: bool,
    /// The kernel's answer to a fetch, where it was not a request.
    refused: Option<i32>,
}

impl Queue {
    /// Takes a queue over and fetches its requests; without a volume, on standby.
    pub fn start(
        spec: QueueSpec,
        at: usize,
        volume: Option<VolumeRef>,
        demands: Arc<Demands>,
        context: &mut Context<'_>,
    ) -> std::io::Result<Self> {
        let ring = &mut *context.ring;
        let area = ring.add_area(spec.depth, spec.max_bytes, !spec.zero_copy)?;
        // The last step that can fail: up to Linux 6.12 a process that ends between this and its
        // first fetch leaves a device that cannot be recovered.
        let descriptors = match Descriptors::map(&spec.device_file, spec.queue, spec.depth) {
            Ok(descriptors) => descriptors,
            Err(error) => {
                ring.remove_area(area, spec.depth);
                return Err(error);
            }
        };
        let flow = volume.map(|volume| context.executor.add_flow(volume, Owner::Queue(at)));
        if let Some(None) = flow {
            ring.remove_area(area, spec.depth);
            return Err(std::io::Error::other("the volume is not served"));
        }
        let served = volume.zip(flow.flatten());
        let tags = (0..spec.depth)
            .map(|tag| Tag { buffer: ring.piece(area, tag), registered: false, answer: 0 })
            .collect();
        let fails = match spec.standby {
            QueueStandby::Fails => Fails::OfDevice,
            QueueStandby::No | QueueStandby::Waits => Fails::No,
        };
        let mut queue = Self {
            spec,
            served,
            leaving: None,
            flushes: Flushes::default(),
            fails,
            demands,
            at,
            area,
            descriptors,
            tags,
            fetching: 0,
            in_flight: 0,
            held: VecDeque::new(),
            draining: false,
            refused: None,
        };
        queue.held.reserve(queue.tags.len());
        for tag in 0..queue.spec.depth {
            queue.fetch(tag, None, context);
        }
        Ok(queue)
    }

    /// The first error number that the kernel gave to a fetch.
    #[must_use]
    pub const fn refused(&self) -> Option<i32> {
        self.refused
    }

    /// Whether the kernel has taken all requests back.
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        self.fetching == 0 && self.in_flight == 0 && !self.draining
    }

    /// Whether no request is being served.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Requests that come from now on are left to the process that follows this one: the kernel
    /// hands them out again.
    pub fn drain(&mut self) {
        self.draining = true;
        self.in_flight -= self.held.len();
        self.held.clear();
    }

    fn queue_tag(&self, tag: u16) -> QueueTag {
        QueueTag { file: self.spec.device_file.as_raw_fd(), queue: self.spec.queue, tag }
    }

    /// Fetches a request, after answering the one before.
    fn fetch(&mut self, tag: u16, answer: Option<i32>, context: &mut Context<'_>) {
        let token = Token::Queue { at: self.at, tag, step: Step::Fetch }.encode();
        let at = self.queue_tag(tag);
        let Some(buffer) = &self.tags[usize::from(tag)].buffer else {
            tracing::error!(device = self.spec.device, tag, "a request has lost its memory");
            return;
        };
        match context.ring.fetch(token, at, answer, buffer) {
            Ok(()) => self.fetching += 1,
            // Operations are kept for each of its requests. A device that lost one would hang.
            Err(error) => blockd_media::hardening::give_up(&format!("it can't answer: {error}")),
        }
    }

    /// A command of the request with this tag has ended.
    pub fn ended(&mut self, tag: u16, step: Step, result: i32, context: &mut Context<'_>) {
        let at = usize::from(tag);
        match step {
            Step::Fetch => {
                self.fetching -= 1;
                if result < 0 {
                    self.refused.get_or_insert(result);
                } else if !self.draining {
                    self.in_flight += 1;
                    self.take(tag, context);
                }
            }
            Step::Register if result < 0 => self.answer(tag, result, context),
            Step::Register => {
                self.tags[at].registered = true;
                self.take(tag, context);
            }
            Step::Unregister => {
                self.tags[at].registered = false;
                let answer = self.tags[at].answer;
                self.answer(tag, answer, context);
            }
        }
    }

    /// The volume, unless it was let go.
    #[must_use]
    pub fn volume(&self) -> Option<VolumeRef> {
        self.served.or(self.leaving).map(|(volume, _)| volume)
    }

    /// Has requests wait from now on.
    pub fn stand_by(&mut self) {
        if self.served.is_some() {
            self.flushes = Flushes::Wait;
        }
        self.leaving = self.leaving.or_else(|| self.served.take());
    }

    /// Lets go of the volume once no request is with it. True when it has none.
    pub fn rest(&mut self, context: &mut Context<'_>) -> bool {
        if self.served.is_some() || (self.leaving.is_some() && self.in_flight > self.held.len()) {
            return false;
        }
        if let Some((volume, flow)) = self.leaving.take() {
            context.executor.remove_flow(flow);
            context.executor.detach(volume);
            if self.held.iter().any(|&tag| self.asks(tag)) {
                self.demands.add(self.spec.pool);
            }
        }
        true
    }

    /// Serves again after a standby, with this volume where it had let go of its own. False if that
    /// is not served.
    pub fn serve(&mut self, volume: Option<VolumeRef>, context: &mut Context<'_>) -> bool {
        if let Some(volume) = volume {
            let owner = Owner::Queue(self.at);
            let Some(flow) = context.executor.add_flow(volume, owner) else { return false };
            self.leaving = Some((volume, flow));
        }
        self.served = self.served.or_else(|| self.leaving.take());
        self.fails = Fails::No;
        self.resume(context);
        true
    }

    /// Fails requests that wait for the volume, and those that would: the device is about to be
    /// removed.
    pub fn fail_waiting(&mut self, context: &mut Context<'_>) {
        self.fail(Fails::OfDevice, context);
    }

    /// The same until the pool is served again, or was closed in order after all.
    pub fn fail_until_served(&mut self, context: &mut Context<'_>) {
        self.fail(Fails::OfPool, context);
    }

    fn fail(&mut self, fails: Fails, context: &mut Context<'_>) {
        if self.served.is_some() {
            return;
        }
        // A device that is about to be removed stays so.
        if self.fails != Fails::OfDevice {
            self.fails = fails;
        }
        for tag in std::mem::take(&mut self.held) {
            self.answer(tag, -libc::EIO, context);
        }
    }

    /// Has requests wait for the volume, which failed before.
    pub const fn let_wait(&mut self) {
        self.fails = Fails::No;
    }

    #[cold]
    #[inline(never)]
    fn wait_for_volume(&mut self, tag: u16, context: &mut Context<'_>) {
        if self.fails != Fails::No {
            return self.answer(tag, -libc::EIO, context);
        }
        if self.flushes == Flushes::Answer && self.is_flush(tag) {
            return self.answer(tag, 0, context);
        }
        self.held.push_back(tag);
        if self.leaving.is_none() && self.asks(tag) {
            self.demands.add(self.spec.pool);
        }
    }

    /// Whether a request that waits asks for the pool.
    fn asks(&self, tag: u16) -> bool {
        self.flushes != Flushes::Wait || !self.is_flush(tag)
    }

    fn is_flush(&self, tag: u16) -> bool {
        let wanted = self.descriptors.get(tag).map(|one| Wanted::of(one, self.spec.max_bytes));
        matches!(wanted, Some(Ok(Wanted { operation: Operation::Flush, .. })))
    }

    /// Answers flushes from now on: the pool was closed in order.
    pub fn answer_flushes(&mut self, context: &mut Context<'_>) {
        if self.volume().is_some() {
            return;
        }
        // A close that failed before has failed its requests, also where an opening that failed
        // since has them ask.
        if self.fails == Fails::OfPool {
            self.fails = Fails::No;
        }
        if self.flushes != Flushes::Wait {
            return;
        }
        self.flushes = Flushes::Answer;
        for tag in std::mem::take(&mut self.held) {
            match self.is_flush(tag) {
                true => self.answer(tag, 0, context),
                false => self.held.push_back(tag),
            }
        }
    }

    /// Answers no flush any more: the pool is opened here.
    pub const fn hold_flushes(&mut self) {
        self.flushes = Flushes::Ask;
    }

    /// Serves a request that has been fetched.
    fn take(&mut self, tag: u16, context: &mut Context<'_>) {
        let Some((volume, flow)) = self.served else {
            return self.wait_for_volume(tag, context);
        };
        let Some(descriptor) = self.descriptors.get(tag) else { return };
        let wanted = match Wanted::of(descriptor, self.spec.max_bytes) {
            Ok(wanted) => wanted,
            Err(error) => return self.answer(tag, error, context),
        };
        let at = usize::from(tag);
        if wanted.needs_pages && !self.tags[at].registered {
            return self.register(tag, Step::Register, context);
        }
        if self.spec.read_only && !matches!(wanted.operation, Operation::Read | Operation::Flush) {
            return self.answer(tag, -libc::EPERM, context);
        }
        // A flush does not wait behind requests that limits hold back.
        let in_order = self.held.is_empty() || wanted.operation == Operation::Flush;
        let demand = Executor::demand(wanted.operation, wanted.len);
        if !in_order || context.executor.admit(volume, flow, &demand).is_err() {
            self.held.push_back(tag);
            return;
        }
        let token = Token::Queue { at: self.at, tag, step: Step::Fetch }.encode();
        let buffer = self.tags[at].buffer.take();
        let Wanted { operation, offset, len, .. } = wanted;
        let request = Request::new(operation, offset, len, token, buffer);
        context.executor.begin(volume, flow, request, context.ring);
    }

    fn register(&mut self, tag: u16, step: Step, context: &mut Context<'_>) {
        let token = Token::Queue { at: self.at, tag, step }.encode();
        let at = self.queue_tag(tag);
        let Some(buffer) = &self.tags[usize::from(tag)].buffer else { return };
        let started = context.ring.register_pages(token, at, buffer, step == Step::Register);
        if let Err(error) = started {
            tracing::error!(%error, device = self.spec.device, "a request's pages are lost");
            self.tags[usize::from(tag)].registered = false;
            self.answer(tag, -libc::EIO, context);
        }
    }

    /// The request with this tag has been carried out.
    pub fn answered(&mut self, tag: u16, completion: Completion, context: &mut Context<'_>) {
        self.tags[usize::from(tag)].buffer = completion.buffer;
        if self.draining && completion.result == Err(BlockError::Gone) {
            // It waited, for space perhaps, and goes on to wait for the next process.
            self.in_flight -= 1;
            return;
        }
        let result = answer(completion.operation, completion.len, completion.result);
        self.answer(tag, result, context);
    }

    fn answer(&mut self, tag: u16, answer: i32, context: &mut Context<'_>) {
        let state = &mut self.tags[usize::from(tag)];
        if state.registered {
            state.answer = answer;
            self.register(tag, Step::Unregister, context);
            return;
        }
        self.in_flight -= 1;
        self.fetch(tag, Some(answer), context);
    }

    /// Goes on with requests that were held back, until one is again.
    pub fn resume(&mut self, context: &mut Context<'_>) {
        if self.served.is_none() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.held);
        while let Some(tag) = waiting.pop_front() {
            self.take(tag, context);
            if let Some(tag) = self.held.pop_front() {
                waiting.push_front(tag);
                break;
            }
        }
        self.held = waiting;
    }

    /// Gives everything back, when it has ended.
    pub fn release(self, context: &mut Context<'_>) {
        context.ring.remove_area(self.area, self.spec.depth);
        if let Some((volume, flow)) = self.served.or(self.leaving) {
            context.executor.remove_flow(flow);
            context.executor.detach(volume);
        }
    }
}
