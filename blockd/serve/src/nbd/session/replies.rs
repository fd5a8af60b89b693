//! From answers of the volume to bytes.

use blockd_engine::backing::Message;
use blockd_engine::block::{BlockError, Buffer, Completion};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Content, DiffRange, Look, RangeState, Stretch};
use blockd_nbd::codec::reply::{self, MAX_HEADER_BYTES};
use blockd_nbd::codec::request::Asked;
use blockd_nbd::codec::{changes, errno, state};
use blockd_nbd::{Describes, MAX_CONTEXTS, Selected};

use super::job::Kind;
use super::{Connection, Context, Phase};

/// Most ranges of one block status, shared out among the contexts that were selected: a client
/// requests further ones again.
const MAX_STRETCHES: usize = 512;
/// Bytes that they take, in the longest form.
const STATUS_BYTES: usize = 40 * MAX_CONTEXTS + 16 * MAX_STRETCHES;
/// Bytes of a volume that are looked at for one of them: the extents of more would keep the worker
/// from its other clients for longer than a few hundred microseconds.
const MAX_STATUS: u64 = 4 << 30;
/// The same for comparisons, counted in slots and shared out among the contexts: some hundred
/// microseconds where every leaf differs, 256 GiB where none does.
const MAX_WORK: u64 = 4096;

impl Connection {
    /// The volume has answered.
    pub fn answered(&mut self, completion: Completion, context: &mut Context<'_>) {
        self.in_flight -= 1;
        self.answered += 1;
        if self.phase == Phase::Dead {
            self.drop_answer(completion, context);
            return;
        }
        let job = super::job_of(&completion);
        let interrupted = self.exclusive.is_some_and(|other| other != job);
        if interrupted || !self.backlog.is_empty() || !self.has_room(context) {
            self.backlog.push_back(completion);
            return;
        }
        self.answer(completion, context);
    }

    /// Answers what had to wait, in order, except for a long read that must not be interrupted.
    pub(super) fn answer_backlog(&mut self, context: &mut Context<'_>) {
        let mut at = 0;
        while at < self.backlog.len() && self.has_room(context) {
            let job = super::job_of(&self.backlog[at]);
            if self.phase != Phase::Dead && self.exclusive.is_some_and(|other| other != job) {
                at += 1;
                continue;
            }
            let Some(completion) = self.backlog.remove(at) else { break };
            if self.phase == Phase::Dead {
                self.drop_answer(completion, context);
            } else {
                self.answer(completion, context);
            }
            // The end of a long read lets those before it go.
            at = 0;
        }
    }

    pub(super) fn drop_answer(&mut self, completion: Completion, context: &mut Context<'_>) {
        if let Some(buffer) = completion.buffer {
            self.free(buffer, context);
        }
    }

    /// Whether another answer fits in the message.
    pub(super) fn has_room(&mut self, context: &mut Context<'_>) -> bool {
        let message = self.message.get_or_insert_with(|| context.ring.message());
        message.has_room(STATUS_BYTES)
    }

    fn message(&mut self, context: &mut Context<'_>) -> &mut Message {
        self.message.get_or_insert_with(|| context.ring.message())
    }

    fn answer(&mut self, completion: Completion, context: &mut Context<'_>) {
        let job = super::job_of(&completion);
        let state = &mut self.jobs[usize::from(job)];
        state.in_flight -= 1;
        if let Err(error) = completion.result {
            state.error.get_or_insert((error, completion.offset));
        }
        if state.kind == Kind::Read {
            self.answer_read(job, completion, context);
            return;
        }
        if let Some(buffer) = completion.buffer {
            self.free(buffer, context);
        }
        let state = &self.jobs[usize::from(job)];
        // A write's payload comes to its end even if a part of it has failed.
        if state.in_flight > 0 || state.issued < state.len {
            return;
        }
        let (asked, error) = (state.asked, state.error);
        match error {
            None => self.succeed(asked, context),
            Some((error, _)) => {
                let (errno, message) = wire_error(error);
                self.refuse(asked, errno, message, context);
            }
        }
        self.free_jobs.push(job);
    }

    fn answer_read(&mut self, job: u16, completion: Completion, context: &mut Context<'_>) {
        let Completion { offset, len, buffer, .. } = completion;
        let state = &mut self.jobs[usize::from(job)];
        let (asked, done, failed) = (state.asked, state.is_done(), state.error);
        let first = !std::mem::replace(&mut state.answering, true);
        let whole = state.len;
        match (buffer, failed) {
            (Some(buffer), None) => {
                let len = u32::try_from(len).unwrap_or(u32::MAX);
                self.push_data(asked, (offset, len), buffer, (first, done, whole), context);
            }
            (buffer, _) => buffer.into_iter().for_each(|buffer| self.free(buffer, context)),
        }
        if !self.agreed.structured {
            self.exclusive = (!done).then_some(job);
        }
        if !done {
            self.read_on(job, context);
            return;
        }
        if let Some((error, at)) = failed {
            // It may be waiting for memory to go on with.
            self.waiting_reads.retain(|&other| other != job);
            self.fail_read(asked, first, error, at, context);
        }
        self.exclusive = self.exclusive.filter(|other| *other != job);
        self.free_jobs.push(job);
    }

    fn push_data(
        &mut self,
        asked: Asked,
        range: (u64, u32),
        buffer: Buffer,
        (first, done, whole): (bool, bool, u64),
        context: &mut Context<'_>,
    ) {
        let mut header = [0; MAX_HEADER_BYTES];
        let len = if self.agreed.structured {
            reply::read_data(&mut header, &self.agreed, asked, range, done)
        } else if first {
            let all = u32::try_from(whole).unwrap_or(u32::MAX);
            reply::read_data(&mut header, &self.agreed, asked, (range.0, all), true)
        } else {
            0
        };
        let message = self.message(context);
        message.push_bytes(&header[..len]);
        message.push_buffer(buffer, range.1 as usize);
    }

    fn fail_read(
        &mut self,
        asked: Asked,
        first: bool,
        error: BlockError,
        at: u64,
        context: &mut Context<'_>,
    ) {
        let (errno, message) = wire_error(error);
        if first || self.agreed.structured {
            let mut header = [0; MAX_HEADER_BYTES];
            let failure = (errno, message);
            let len = reply::error_at(&mut header, &self.agreed, asked, failure, at);
            self.message(context).push_bytes(&header[..len]);
            return;
        }
        // A simple reply has said that it succeeds: nothing can be said any more. Any following
        // bytes would be taken for its data, so nothing may follow: not even other answers.
        tracing::warn!(connection = self.id, at, "a long read failed halfway: hanging up");
        self.die();
    }

    /// Answers that it went well.
    pub(super) fn succeed(&mut self, asked: Asked, context: &mut Context<'_>) {
        let mut header = [0; MAX_HEADER_BYTES];
        let len = reply::done(&mut header, &self.agreed, asked);
        self.message(context).push_bytes(&header[..len]);
    }

    /// Answers that it did not.
    pub(super) fn refuse(
        &mut self,
        asked: Asked,
        errno: u32,
        message: &str,
        context: &mut Context<'_>,
    ) {
        let mut header = [0; MAX_HEADER_BYTES];
        let len = reply::error(&mut header, &self.agreed, asked, errno, message);
        self.message(context).push_bytes(&header[..len]);
    }

    /// A read that must come in one piece is longer than a piece.
    pub(super) fn refuse_long(&mut self, asked: Asked, context: &mut Context<'_>) {
        let message = "a read without fragments is at most 1 MiB long";
        self.refuse(asked, errno::EOVERFLOW, message, context);
    }

    /// Answers a block status: a part for each context that was selected.
    pub(super) fn describe(
        &mut self,
        asked: Asked,
        offset: u64,
        len: u64,
        req_one: bool,
        context: &mut Context<'_>,
    ) {
        let count = self.agreed.contexts.len().max(1);
        let limit = if req_one { 1 } else { MAX_STRETCHES / count };
        let mut bytes = [0; STATUS_BYTES];
        let mut used = 0;
        for at in 0..self.agreed.contexts.len() {
            let Selected { id, describes } = self.agreed.contexts[at];
            let last = at + 1 == self.agreed.contexts.len();
            let whole = (offset, len);
            let part = &mut bytes[used..];
            let found = match describes {
                Describes::BaseAllocation => self.look(whole, limit, context),
                Describes::Allocated => self.compare(whole, None, limit, context),
                Describes::ChangedSince(snapshot) => {
                    self.compare(whole, Some(VolumeId(snapshot)), limit, context)
                }
            };
            if let Err((errno, message)) = found {
                // Nothing of the answer was sent yet: it is an error as a whole.
                self.refuse(asked, errno, message, context);
                return;
            }
            let to = (id, last);
            used += match describes {
                Describes::BaseAllocation => {
                    let ranges = self.stretches.iter().map(|one| (one.len, allocation(one)));
                    reply::block_status(part, &self.agreed, asked, to, ranges)
                }
                Describes::Allocated | Describes::ChangedSince(_) => {
                    let alone = describes == Describes::Allocated;
                    let ranges = self.changes.iter().map(|one| (one.len, change(one, alone)));
                    reply::block_status(part, &self.agreed, asked, to, ranges)
                }
            };
        }
        self.message(context).push_bytes(&bytes[..used]);
    }

    /// Looks up the allocated ranges.
    fn look(
        &mut self,
        (offset, len): (u64, u64),
        limit: usize,
        context: &mut Context<'_>,
    ) -> Result<(), (u32, &'static str)> {
        self.stretches.clear();
        let len = len.min(MAX_STATUS);
        let (volume, out) = (self.volume, &mut self.stretches);
        context.executor.stretches(volume, offset, len, limit, out).map_err(wire_error)
    }

    /// Looks up the changed ranges.
    fn compare(
        &mut self,
        (offset, len): (u64, u64),
        since: Option<VolumeId>,
        max_ranges: usize,
        context: &mut Context<'_>,
    ) -> Result<(), (u32, &'static str)> {
        let max_work = MAX_WORK / self.agreed.contexts.len().max(1) as u64;
        let look = Look { offset, len, max_ranges, max_work };
        let looked = context.executor.changes(self.volume, since, &look, &mut self.changes);
        if looked.map_err(wire_error)? {
            Ok(())
        } else {
            Err((errno::EINVAL, "the snapshot of a selected context was deleted"))
        }
    }
}

fn allocation(stretch: &Stretch) -> u32 {
    match stretch.content {
        Content::Data => 0,
        Content::Zeroes => state::ZERO,
        Content::Hole => state::HOLE | state::ZERO,
    }
}

/// `alone`: there is nothing to compare with, and what holds no data is not worth a word.
fn change(range: &DiffRange, alone: bool) -> u32 {
    match range.state {
        RangeState::Data => changes::CHANGED,
        RangeState::Zero if !alone => changes::CHANGED | changes::ZERO,
        RangeState::Zero | RangeState::Same => 0,
    }
}

/// An error as it goes over the wire.
fn wire_error(error: BlockError) -> (u32, &'static str) {
    match error {
        BlockError::Invalid => (errno::EINVAL, "request leaves the volume"),
        BlockError::ReadOnly => (errno::EPERM, "volume is read-only"),
        BlockError::NoSpace => (errno::ENOSPC, "no space left"),
        BlockError::Io => (errno::EIO, "media error, or the pool has stopped"),
        BlockError::Gone => (errno::ESHUTDOWN, "volume is going away"),
    }
}
