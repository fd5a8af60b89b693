//! From bytes to requests of the volume.

use blockd_engine::backing::Ring;
use blockd_engine::block::{Operation, Request};
use blockd_engine::schedule::Demand;
use blockd_engine::volume::Executor;
use blockd_nbd::codec::request::{
    Asked, Command, EXTENDED_HEADER_BYTES, Header, Parsed, check, parse,
};

use super::job::{Job, Kind, PIECE, Payload};
use super::{Connection, Context, Phase, Token};

/// A write from this length on is long: its header is received apart from its payload.
const LONG_WRITE: u32 = 32 << 10;
/// Pieces of one long read in flight.
const READ_AHEAD: u32 = 4;

/// Requests for the block status that are answered in a turn, and the bytes that one counts for.
/// Each may take some 100 us of the worker, and others wait for all of a turn: one takes the turn
/// of its volume while others are active.
const MAX_DESCRIBED: u32 = 4;
const DESCRIBE_BYTES: u64 = 496 << 10;

/// Whether a command is answered where it is taken, without a request to the volume.
const fn answers_itself(command: &Command) -> bool {
    match command {
        Command::Read { len, df, .. } => *len == 0 || *df,
        Command::Write { len, .. } => *len == 0,
        Command::Trim { len, .. } | Command::WriteZeroes { len, .. } => *len == 0,
        Command::Cache { .. } | Command::BlockStatus { .. } => true,
        Command::Flush | Command::Disconnect => false,
    }
}

impl Connection {
    /// Looks at what was received, as far as there is room to carry it out.
    pub(super) fn take_requests(&mut self, context: &mut Context<'_>) {
        self.described = 0;
        while self.phase == Phase::Open && !self.waits() && self.take_one(context) {}
        if self.phase == Phase::Open {
            self.input.settle(context.ring);
        } else {
            self.input.clear(context.ring);
        }
        self.idle_since.set(if self.is_half_received() { u64::MAX } else { self.received_at });
    }

    /// Does one step. `false`: more has to be received first, or given back.
    fn take_one(&mut self, context: &mut Context<'_>) -> bool {
        if self.skip > 0 {
            let available = self.input.available();
            let skip = usize::try_from(self.skip).unwrap_or(usize::MAX).min(available);
            self.input.skip(skip);
            self.skip -= skip as u64;
            return self.skip == 0;
        }
        if self.payload.is_some() {
            return self.take_payload(context);
        }
        let mut bytes = [0; EXTENDED_HEADER_BYTES];
        if self.stands_by() {
            let len = self.input.front(context.ring, &mut bytes);
            return self.look_at_next(&bytes[..len], context);
        }
        let len = self.input.front(context.ring, &mut bytes);
        match parse(&bytes[..len], self.agreed.extended) {
            Parsed::Need(_) => false,
            Parsed::BadMagic(magic) => {
                tracing::warn!(connection = self.id, magic, "no request begins like this");
                self.close();
                false
            }
            Parsed::Header(header, used) => self.take_header(&header, used, context),
        }
    }

    fn take_header(&mut self, header: &Header, used: usize, context: &mut Context<'_>) -> bool {
        if !self.has_job() || !self.has_room(context) {
            self.blocked = true;
            return false;
        }
        let asked = header.asked();
        let checked = check(header, &self.agreed);
        if self.exclusive.is_some() && checked.as_ref().map_or(true, answers_itself) {
            // Its answer would come to lie within the data of the long read.
            self.blocked = true;
            return false;
        }
        let command = match checked {
            Ok(command) => command,
            Err(refusal) => {
                self.input.skip(used);
                self.skip = refusal.skip;
                self.refuse(asked, refusal.errno, refusal.message, context);
                if refusal.hang_up {
                    self.close();
                }
                return true;
            }
        };
        // A short read needs its memory at once, or waits with its header unread.
        if let Command::Read { offset, len, df } = command
            && len > 0
            && u64::from(len) <= PIECE
        {
            let len = u64::from(len);
            let whole = df && self.agreed.structured;
            let part = self.take_memory(Operation::Read, len, whole, context);
            let Some((buffer, part)) = part else { return false };
            self.input.skip(used);
            let job = self.begin_job(asked, Kind::Read, offset, len);
            self.issue(job, Operation::Read, offset, part, Some(buffer), context);
            if part < len {
                self.read_on(job, context);
            }
            return true;
        }
        let demand = match command {
            Command::Flush => Some(Executor::demand(Operation::Flush, 0)),
            Command::Trim { len: 1.., fua, .. } => {
                Some(Executor::demand(Operation::Discard { fua }, 0))
            }
            Command::WriteZeroes { len: 1.., fua, no_hole, .. } => {
                let operation = Operation::WriteZeroes { unmap: !no_hole, fua };
                Some(Executor::demand(operation, 0))
            }
            Command::BlockStatus { .. } => Some(Demand::new(DESCRIBE_BYTES, false, false)),
            _ => None,
        };
        if demand.is_some_and(|demand| self.admit(&demand, context).is_none()) {
            return false;
        }
        self.input.skip(used);
        self.carry_out(asked, command, context);
        if let (Command::BlockStatus { .. }, Some(demand)) = (command, demand) {
            context.executor.end_admission(self.flow, &demand);
        }
        true
    }

    const fn waits(&self) -> bool {
        self.stalled || self.blocked || self.held
    }

    /// Whether another request of the connection can be begun.
    fn has_job(&mut self) -> bool {
        if self.free_jobs.is_empty() && self.jobs.len() < usize::from(self.max_jobs) {
            self.free_jobs.push(u16::try_from(self.jobs.len()).unwrap_or(0));
            self.jobs.push(Job::idle());
        }
        !self.free_jobs.is_empty()
    }

    fn carry_out(&mut self, asked: Asked, command: Command, context: &mut Context<'_>) {
        match command {
            Command::Read { len: 0, .. }
            | Command::Write { len: 0, .. }
            | Command::Trim { len: 0, .. }
            | Command::WriteZeroes { len: 0, .. }
            // Cached data would be in the cache of the media.
            | Command::Cache { .. } => self.succeed(asked, context),
            Command::Read { df: true, .. } if self.agreed.structured => {
                self.refuse_long(asked, context);
            }
            Command::Read { offset, len, .. } => {
                let job = self.begin_job(asked, Kind::Read, offset, u64::from(len));
                self.read_on(job, context);
            }
            Command::Write { offset, len, fua } => {
                self.long_writes = len >= LONG_WRITE;
                let job = self.begin_job(asked, Kind::Write { fua }, offset, u64::from(len));
                self.payload = Some(Payload { job, buffer: None, piece: 0, filled: 0 });
            }
            Command::Flush => {
                let job = self.begin_job(asked, Kind::Plain, 0, 0);
                self.issue(job, Operation::Flush, 0, 0, None, context);
            }
            Command::Trim { offset, len, fua } => {
                let job = self.begin_job(asked, Kind::Plain, offset, len);
                self.issue(job, Operation::Discard { fua }, offset, len, None, context);
            }
            Command::WriteZeroes { offset, len, fua, no_hole, .. } => {
                let job = self.begin_job(asked, Kind::Plain, offset, len);
                let operation = Operation::WriteZeroes { unmap: !no_hole, fua };
                self.issue(job, operation, offset, len, None, context);
            }
            Command::BlockStatus { offset, len, req_one } => {
                self.describe(asked, offset, len, req_one, context);
                self.described += 1;
                // The answers are sent, which brings the next turn.
                self.blocked |= self.described >= MAX_DESCRIBED;
            }
            Command::Disconnect => self.leave(context),
        }
    }

    fn begin_job(&mut self, asked: Asked, kind: Kind, offset: u64, len: u64) -> u16 {
        // There is one: it was looked for before the header was taken.
        let job = self.free_jobs.pop().unwrap_or(0);
        self.jobs[usize::from(job)] = Job { asked, kind, offset, len, ..Job::idle() };
        job
    }

    /// Makes a request to the volume.
    fn issue(
        &mut self,
        job: u16,
        operation: Operation,
        offset: u64,
        len: u64,
        buffer: Option<blockd_engine::block::Buffer>,
        context: &mut Context<'_>,
    ) {
        let state = &mut self.jobs[usize::from(job)];
        state.issued += len;
        state.in_flight += 1;
        self.in_flight += 1;
        let token = Token::Connection { at: self.at, job }.encode();
        let request = Request::new(operation, offset, len, token, buffer);
        context.executor.begin(self.volume, self.flow, request, context.ring);
    }

    /// Goes on with a long read, as far as there is memory.
    pub(super) fn read_on(&mut self, job: u16, context: &mut Context<'_>) {
        loop {
            let state = &self.jobs[usize::from(job)];
            let (offset, left) = (state.offset + state.issued, state.len - state.issued);
            // Simple replies carry their data in order.
            let ahead = if self.agreed.structured { READ_AHEAD } else { 1 };
            if left == 0 || state.error.is_some() || state.in_flight >= ahead {
                return;
            }
            let len = left.min(PIECE);
            let part = if self.is_awaited(job) {
                self.take_awaited(Operation::Read, len, context)
            } else {
                self.take_memory(Operation::Read, len, false, context)
            };
            let Some((buffer, len)) = part else {
                if !self.waiting_reads.contains(&job) {
                    self.waiting_reads.push_back(job);
                }
                return;
            };
            self.issue(job, Operation::Read, offset, len, Some(buffer), context);
        }
    }

    /// Goes on with the long read that holds back all other answers, if it waits for memory. To be
    /// called in each turn with something new of the connection, while any is held back.
    pub fn read_on_first(&mut self, context: &mut Context<'_>) {
        // Nothing was to be sent when the part was admitted: the next message is the one with it.
        if !self.sending && self.sending_since >= self.awaited_since {
            self.awaited_since = u64::MAX;
            context.executor.end_awaited(self.flow);
        }
        let Some(job) = self.exclusive else { return };
        if let Some(at) = self.waiting_reads.iter().position(|&other| other == job) {
            self.waiting_reads.remove(at);
            self.read_on(job, context);
        }
    }

    /// Whether a long read has to go on before the connection gives memory back: other answers wait
    /// for its end, and none is being sent.
    fn is_awaited(&self, job: u16) -> bool {
        let sends = self.sending || self.message.as_ref().is_some_and(|one| !one.is_empty());
        self.exclusive == Some(job) && !sends
    }

    /// Goes on with a write's payload. `false`: more has to be received first, or given back.
    fn take_payload(&mut self, context: &mut Context<'_>) -> bool {
        let Some(mut payload) = self.payload.take() else { return true };
        let state = &self.jobs[usize::from(payload.job)];
        let (offset, left) = (state.offset + state.issued, state.len - state.issued);
        let Kind::Write { fua } = state.kind else { return true };
        let operation = Operation::Write { fua };
        if payload.buffer.is_none() {
            let taken = self.take_memory(operation, left.min(PIECE), false, context);
            let Some((buffer, len)) = taken else {
                self.payload = Some(payload);
                return false;
            };
            payload.buffer = Some(buffer);
            payload.piece = usize::try_from(len).unwrap_or(usize::MAX);
            payload.filled = 0;
        }
        let Some(buffer) = &payload.buffer else { return true };
        let bytes = self.input.available().min(payload.piece - payload.filled);
        if bytes > 0 {
            self.input.take(bytes, context.ring, buffer, payload.filled);
            payload.filled += bytes;
        }
        if payload.filled < payload.piece {
            self.payload = Some(payload);
            return false;
        }
        let (job, len) = (payload.job, payload.piece as u64);
        let buffer = payload.buffer.take();
        if len < left {
            self.payload = Some(payload);
        }
        self.issue(job, operation, offset, len, buffer, context);
        true
    }

    /// A payload whose rest does not come any more.
    pub(super) fn drop_payload(&mut self, payload: Payload, context: &mut Context<'_>) {
        let Some(buffer) = payload.buffer else { return };
        let memory = Ring::capacity(&buffer) as u64;
        context.ring.free(buffer);
        let operation = Operation::Write { fua: false };
        let demand = Executor::demand(operation, payload.piece as u64);
        context.executor.free_memory(self.flow, memory);
        context.executor.end_admission(self.flow, &demand);
    }
}
