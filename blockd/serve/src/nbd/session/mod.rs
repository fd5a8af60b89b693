//! The data phase of a connection, on its worker's ring: requests in, answers out, as many of
//! each at a time as there are.

mod deadlines;
mod input;
mod job;
mod leaving;
mod moving;
mod replies;
mod requests;
mod standby;

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blockd_engine::backing::{Chunk, Message, Ring, Socket};
use blockd_engine::block::{Buffer, Completion, Operation};
use blockd_engine::schedule::{Demand, FlowId, Owner, PAGE};
use blockd_engine::stats::Counter;
use blockd_engine::volume::{Executor, Token, VolumeRef};
use blockd_mapper::worker::{DiffRange, Stretch};
use blockd_nbd::Negotiated;
use blockd_nbd::codec::request::{EXTENDED_HEADER_BYTES, HEADER_BYTES};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{Shutdown, shutdown};

use crate::Context;
use crate::demands::Flushes;

pub use self::deadlines::{Deadlines, Overdue};
use self::input::Input;
use self::job::{Job, Payload};
use self::standby::Standby;
pub use self::standby::{FRONT_BYTES, Next, next_of};

/// A payload of which this much is still to come is received into its buffer directly; less is
/// received together with what follows it.
const DIRECT: usize = 16 << 10;
/// Most bytes that are received so at once. Such a receive ends when all of them are there, so that
/// this much of a payload has to come within the time limit for a client to send something.
const DIRECT_MOST: usize = 256 << 10;
/// As much as a chunk takes.
const ANY: usize = 64 << 10;
/// In place of a job, the operation that a token names.
const RECEIVE: u16 = 0;
const SEND: u16 = 1;

/// The job that a request of a connection belongs to.
fn job_of(completion: &Completion) -> u16 {
    match Token::decode(completion.tag) {
        Token::Connection { job, .. } => job,
        _ => u16::MAX,
    }
}

/// Which of its worker's lists a connection is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    touched: bool,
    stalled: bool,
}

impl Marks {
    /// Puts it on the list of those to be sent from; `false` if it is there.
    pub const fn touch(&mut self) -> bool {
        !std::mem::replace(&mut self.touched, true)
    }

    /// Marks the connection as no longer on that list.
    pub const fn untouch(&mut self) {
        self.touched = false;
    }

    /// Puts it on the list of those that wait for memory; `false` if it is there.
    pub const fn stall(&mut self) -> bool {
        !std::mem::replace(&mut self.stalled, true)
    }

    /// Marks the connection as no longer on that list.
    pub const fn unstall(&mut self) {
        self.stalled = false;
    }
}

/// How far a connection's life has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Open,
    /// No more requests are taken; requests in flight are answered.
    Closing,
    /// Nothing can be sent any more.
    Dead,
}

/// A connection in its data phase.
pub struct Connection {
    /// Its name among all that its worker has served.
    pub id: u64,
    /// The served volume.
    pub volume: VolumeRef,
    /// Which lists it is on.
    pub marks: Marks,
    /// How many requests are in flight, for others to see.
    pub shown: Arc<Counter>,
    /// When the client sent something last, or connected, for others to see; [`u64::MAX`] in the
    /// middle of a request.
    pub idle_since: Arc<Counter>,
    at: usize,
    socket: Arc<OwnedFd>,
    /// The same, as the ring knows it.
    known: Socket,
    agreed: Negotiated,
    guard: Option<Box<dyn Send>>,
    phase: Phase,
    /// As the worker's scheduler knows it.
    flow: FlowId,
    /// Made when they are needed, so that an idle connection has none.
    jobs: Vec<Job>,
    free_jobs: Vec<u16>,
    max_jobs: u16,
    /// Requests to the volume that are in flight.
    in_flight: usize,
    input: Input,
    payload: Option<Payload>,
    /// Bytes of a refused payload that are still to come.
    skip: u64,
    /// Long reads that wait for memory.
    waiting_reads: VecDeque<u16>,
    /// Whether it waits for room in the ring, which other connections give back.
    stalled: bool,
    /// Whether it waits for its own answers to be sent.
    blocked: bool,
    /// The scheduler holds it back.
    held: bool,
    /// Whether requests wait for the volume.
    standby: Standby,
    flushes: Flushes,
    /// And one has come since.
    has_next: bool,
    /// A flush, that is.
    next_is_flush: bool,
    /// The client sends no more requests.
    input_has_ended: bool,
    /// Its requests were cancelled, as no client reads the answers.
    is_abandoned: bool,
    /// The server closes the connection, and since when.
    is_closed: bool,
    closing_since: Option<u64>,
    /// The worker that it moves to after its present request.
    moves_to: Option<usize>,
    /// Requests answered since it was asked last.
    answered: u64,
    /// Questions about blocks that were answered in this turn.
    described: u32,
    receiving: bool,
    /// When something was received last; at first, when the client connected.
    received_at: u64,
    /// The same, or when a receive was started since.
    progress_at: u64,
    /// Long writes come: a header is received alone, so that its payload needs no copy.
    long_writes: bool,
    message: Option<Box<Message>>,
    sending: bool,
    sending_since: u64,
    /// The long read whose answer must not be interrupted.
    exclusive: Option<u16>,
    /// When a part was admitted last for which other answers wait; [`u64::MAX`] once its memory was
    /// found to be free again.
    awaited_since: u64,
    /// Answers for which there was no room in the message.
    backlog: VecDeque<Completion>,
    stretches: Vec<Stretch>,
    changes: Vec<DiffRange>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("id", &self.id)
            .field("phase", &self.phase)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Takes over a negotiated connection, with at most `requests` requests in flight.
    #[expect(clippy::too_many_arguments, reason = "the parts of a connection")]
    pub fn new(
        id: u64,
        at: usize,
        stream: OwnedFd,
        agreed: Negotiated,
        volume: VolumeRef,
        requests: usize,
        guard: Option<Box<dyn Send>>,
        context: &mut Context<'_>,
    ) -> std::io::Result<Self> {
        // The ring waits for it; a socket that refuses to wait would be asked again and again.
        let flags = OFlag::from_bits_truncate(fcntl(&stream, FcntlArg::F_GETFL)?);
        fcntl(&stream, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK))?;
        let socket = Arc::new(stream);
        let known = context.ring.add_socket(&socket)?;
        let max_jobs = u16::try_from(requests).unwrap_or(u16::MAX).max(1);
        let Some(flow) = context.executor.add_flow(volume, Owner::Connection(at)) else {
            context.ring.remove_socket(known);
            return Err(std::io::Error::other("the volume is not served"));
        };
        let now = context.executor.now();
        let idle_since = Arc::new(Counter::default());
        idle_since.set(now);
        Ok(Self {
            id,
            volume,
            marks: Marks::default(),
            shown: Arc::default(),
            idle_since,
            at,
            socket,
            known,
            agreed,
            guard,
            phase: Phase::Open,
            flow,
            jobs: Vec::new(),
            free_jobs: Vec::new(),
            max_jobs,
            in_flight: 0,
            input: Input::default(),
            payload: None,
            skip: 0,
            waiting_reads: VecDeque::new(),
            stalled: false,
            blocked: false,
            held: false,
            standby: Standby::default(),
            flushes: Flushes::default(),
            has_next: false,
            next_is_flush: false,
            input_has_ended: false,
            is_abandoned: false,
            is_closed: false,
            closing_since: None,
            moves_to: None,
            answered: 0,
            described: 0,
            receiving: false,
            received_at: now,
            progress_at: now,
            long_writes: false,
            message: None,
            sending: false,
            sending_since: 0,
            exclusive: None,
            awaited_since: u64::MAX,
            backlog: VecDeque::new(),
            stretches: Vec::new(),
            changes: Vec::new(),
        })
    }

    /// Whether it waits for room in the ring that others will give back.
    #[must_use]
    pub const fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Something was received.
    pub fn received(
        &mut self,
        result: std::io::Result<(usize, Option<Chunk>)>,
        context: &mut Context<'_>,
    ) {
        self.receiving = false;
        let now = context.executor.now();
        (self.received_at, self.progress_at) = (now, now);
        match result {
            Ok((0, chunk)) => {
                chunk.into_iter().for_each(|chunk| context.ring.recycle(chunk));
                self.leave(context);
            }
            Ok((_, Some(chunk))) if self.phase == Phase::Open => {
                self.input.add(chunk, context.ring);
                self.take_requests(context);
            }
            Ok((_, Some(chunk))) => context.ring.recycle(chunk),
            Ok((len, None)) => {
                if let Some(payload) = &mut self.payload {
                    payload.filled += len;
                }
                self.take_requests(context);
            }
            // All chunks are being looked at: there will be some in the next turn.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => self.stalled = true,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => self.die(),
        }
    }

    /// Nothing more can be sent, and nothing is to be received.
    fn die(&mut self) {
        self.phase = Phase::Dead;
        self.stalled = false;
        // Ends a receive that is out.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    /// A message is out, or can't get out.
    pub fn sent(
        &mut self,
        result: std::io::Result<()>,
        message: Box<Message>,
        context: &mut Context<'_>,
    ) {
        self.sending = false;
        context.executor.free_memory(self.flow, message.buffer_bytes());
        context.ring.recycle_message(message);
        if result.is_err() {
            self.die();
        }
    }

    /// Goes on after it was held back or stalled.
    pub fn resume(&mut self, context: &mut Context<'_>) {
        self.stalled = false;
        self.held = false;
        self.read_on_first(context);
        for _ in 0..self.waiting_reads.len() {
            if let Some(job) = self.waiting_reads.pop_front() {
                self.read_on(job, context);
            }
        }
        self.take_requests(context);
    }

    /// Sends the gathered replies and starts the next receive.
    pub fn push(&mut self, now: u64, context: &mut Context<'_>) {
        self.answer_backlog(context);
        self.shown.set(self.in_flight as u64);
        if self.is_closed && self.closing_since.is_none() {
            self.closing_since = Some(now);
        }
        if self.phase == Phase::Dead {
            self.abandon(context);
            return;
        }
        if std::mem::take(&mut self.blocked) {
            self.take_requests(context);
        }
        // The volumes' IO in flight may leave no room for a message and a receive.
        self.stalled |= context.ring.spare() < 2;
        if !self.sending
            && context.ring.spare() > 0
            && let Some(message) = self.message.take_if(|message| !message.is_empty())
        {
            let token = Token::Connection { at: self.at, job: SEND }.encode();
            self.sending = context.ring.send(token, self.known, message).is_ok();
            self.sending_since = now;
            if !self.sending {
                self.die();
                return;
            }
            self.answer_backlog(context);
        }
        let waits = self.stalled || self.blocked || self.held;
        let waits = waits || self.awaits_volume();
        if self.phase == Phase::Open && !self.receiving && !waits && !self.may_move() {
            self.receiving = self.receive(context).is_ok();
            self.progress_at = now;
            self.stalled |= !self.receiving;
        }
    }

    fn receive(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let token = Token::Connection { at: self.at, job: RECEIVE }.encode();
        if let Some(Payload { buffer: Some(buffer), piece, filled, .. }) = &self.payload
            && piece - filled >= DIRECT
        {
            let len = (piece - filled).min(DIRECT_MOST);
            return context.ring.receive_into(token, self.known, buffer, *filled, len);
        }
        let header = if self.agreed.extended { EXTENDED_HEADER_BYTES } else { HEADER_BYTES };
        let alone = self.long_writes && self.payload.is_none() && self.skip == 0;
        let max = if alone { header.saturating_sub(self.input.available()).max(1) } else { ANY };
        context.ring.receive_any(token, self.known, max)
    }

    /// Takes no more requests; requests in flight are answered.
    pub fn hang_up(&mut self) {
        self.close();
        self.held &= !self.waiting_reads.is_empty();
        // Ends a receive that is out.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Read);
    }

    fn close(&mut self) {
        self.is_closed = true;
        self.take_no_more();
    }

    fn take_no_more(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Closing;
        }
        self.stalled = false;
    }

    /// Whether nothing of it is left.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let answered = self.backlog.is_empty()
            && self.waiting_reads.is_empty()
            && self.message.as_ref().is_none_or(|m| m.is_empty());
        let quiet = !self.receiving && !self.sending && self.in_flight == 0;
        quiet && (self.phase == Phase::Dead || (self.phase == Phase::Closing && answered))
    }

    /// Gives everything back.
    pub fn release(mut self, context: &mut Context<'_>) {
        self.input.clear(context.ring);
        if let Some(payload) = self.payload.take() {
            self.drop_payload(payload, context);
        }
        while let Some(completion) = self.backlog.pop_front() {
            self.drop_answer(completion, context);
        }
        if let Some(message) = self.message.take() {
            context.executor.free_memory(self.flow, message.buffer_bytes());
            context.ring.recycle_message(message);
        }
        assert!(!self.receiving && !self.sending, "an operation of the ring has this socket");
        context.ring.remove_socket(self.known);
        self.let_go(context);
    }

    /// Admits a part of a request and takes its memory: less than it needs where that is scarce,
    /// unless it must be whole. `None` when the connection is held back.
    fn take_memory(
        &mut self,
        operation: Operation,
        len: u64,
        whole: bool,
        context: &mut Context<'_>,
    ) -> Option<(Buffer, u64)> {
        let wanted = len.next_power_of_two().max(PAGE);
        let demand = Executor::demand(operation, len).with_memory(wanted, whole);
        let memory = self.admit(&demand, context)?;
        self.take_admitted(&demand, memory, len, whole, context)
    }

    /// The same of a part for which other answers wait.
    #[cold]
    fn take_awaited(
        &mut self,
        operation: Operation,
        len: u64,
        context: &mut Context<'_>,
    ) -> Option<(Buffer, u64)> {
        let wanted = len.next_power_of_two().max(PAGE);
        let demand = Executor::demand(operation, len).with_memory(wanted, false).awaited();
        let admitted = context.executor.admit_awaited(self.volume, self.flow, &demand);
        self.held |= admitted.is_err();
        let taken = self.take_admitted(&demand, admitted.ok()?, len, false, context)?;
        self.awaited_since = context.executor.now();
        Some(taken)
    }

    #[inline]
    fn take_admitted(
        &mut self,
        demand: &Demand,
        memory: u64,
        len: u64,
        whole: bool,
        context: &mut Context<'_>,
    ) -> Option<(Buffer, u64)> {
        let mut piece = memory;
        loop {
            if let Some(buffer) = context.ring.allocate(piece) {
                let part = len.min(piece);
                if piece < memory {
                    let unused = len.min(memory) - part;
                    context.executor.shrink(self.flow, unused, memory - piece);
                }
                return Some((buffer, part));
            }
            // There is enough, but not in one piece.
            if whole || piece <= PAGE {
                context.executor.revoke(self.flow, demand, memory);
                self.held = true;
                return None;
            }
            piece /= 2;
        }
    }

    /// Requests the admission of a request from the scheduler. `None` when the connection is held
    /// back.
    fn admit(&mut self, demand: &Demand, context: &mut Context<'_>) -> Option<u64> {
        let admitted = context.executor.admit(self.volume, self.flow, demand);
        self.held |= admitted.is_err();
        admitted.ok()
    }

    fn free(&mut self, buffer: Buffer, context: &mut Context<'_>) {
        context.executor.free_memory(self.flow, Ring::capacity(&buffer) as u64);
        context.ring.free(buffer);
    }
}
