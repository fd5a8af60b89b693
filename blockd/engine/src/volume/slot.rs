//! A request on its way through the executor.

use blockd_mapper::io::IoError;
use blockd_mapper::plan::{CommitTicket, ParkReason, Plan};

use crate::block::{Operation, Request};
use crate::schedule::{self, FlowId};

/// Operations that one plan can hold. A plan with fewer than a request needs is made again for the
/// rest.
const PLAN_OPS: usize = Plan::MIN_OPS;

/// How long a write is slowed down at the most: guests give a disk up after a minute or two.
pub(super) const MAX_SLOWED_NS: u64 = 10_000_000_000;

/// How long a read waits for another client's read of the same pages: that may be of a disk that
/// hangs or fails, and all who wait would otherwise try it in turn.
const MAX_JOINED_NS: u64 = 1_000_000_000;

/// Returns whether a read with `done` bytes has waited [`MAX_JOINED_NS`] for another client's.
pub(super) fn is_late(joined: Option<(u64, u64)>, done: u64, now: u64) -> bool {
    joined.is_some_and(|(at, since)| at == done && now.saturating_sub(since) >= MAX_JOINED_NS)
}

/// The event that a slot waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// A request.
    Idle,
    /// Its turn to be planned.
    Ready,
    /// IO on the media.
    Media,
    /// A change of the pool's state.
    Parked,
    /// A commit.
    Committing,
    /// Space below the pool.
    Starved,
}

impl State {
    /// Whether the pool has to change before it goes on.
    pub(super) const fn is_wait(self) -> bool {
        matches!(self, Self::Parked | Self::Starved)
    }
}

/// A request, and how far it has come.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) request: Option<Request>,
    /// Place of its volume.
    pub(super) volume: usize,
    /// The connection or queue that it came by, and what it was admitted for.
    pub(super) flow: Option<FlowId>,
    pub(super) cost: u64,
    pub(super) plan: Plan,
    pub(super) state: State,
    /// Bytes done.
    pub(super) done: u64,
    /// Bytes that the plan covers.
    pub(super) covered: u64,
    /// The stage of the plan that is out.
    pub(super) stage: u8,
    /// Operations that are out.
    pub(super) outstanding: u32,
    pub(super) error: Option<IoError>,
    /// The pool's claim was not renewed in time for one of its writes: it waits for that, and not
    /// for space.
    pub(super) is_late: bool,
    /// The commit that its answer has to wait for.
    pub(super) ticket: Option<CommitTicket>,
    /// All is done but the flush that makes it durable.
    pub(super) flushing: bool,
    /// Its volume is going away: it is not to wait for the pool or for space any more.
    pub(super) doomed: bool,
    /// Whether the request has waited for space.
    pub(super) has_waited: bool,
    /// How many bytes of a read were done when it began to wait for another client's read of the
    /// same pages, and when that was.
    pub(super) joined: Option<(u64, u64)>,
    /// Cost of copies that its plan makes.
    pub(super) extra: u64,
    /// Why it was parked last.
    pub(super) reason: ParkReason,
    /// Since when it is slowed down, and since when it waits for space that is not on its way; 0
    /// for neither.
    pub(super) slowed_at: u64,
    pub(super) stuck_at: u64,
    /// When it was first seen waiting for space; 0 if it was not.
    pub(super) lacks_at: u64,
    /// Whether the request is counted among those that were parked, and those that found no space
    /// below; and for how many nanoseconds it has waited in all, if it has. A request that ends
    /// resets them: one that does not wait never touches them.
    pub(super) was_parked: bool,
    pub(super) was_starved: bool,
    pub(super) waited_ns: Option<u64>,
    /// When it came, and when its present state began, in nanoseconds.
    pub(super) arrived: u64,
    pub(super) since: u64,
}

impl Slot {
    pub(super) fn new() -> Self {
        Self {
            request: None,
            volume: 0,
            flow: None,
            cost: 0,
            plan: Plan::with_capacity(PLAN_OPS),
            state: State::Idle,
            done: 0,
            covered: 0,
            stage: 0,
            outstanding: 0,
            error: None,
            is_late: false,
            ticket: None,
            flushing: false,
            doomed: false,
            has_waited: false,
            joined: None,
            extra: 0,
            reason: ParkReason::InFlight,
            slowed_at: 0,
            stuck_at: 0,
            lacks_at: 0,
            was_parked: false,
            was_starved: false,
            waited_ns: None,
            arrived: 0,
            since: 0,
        }
    }

    /// Notes that the read waits for another client's read of the same pages.
    pub(super) fn note_join(&mut self, now: u64) {
        if !self.is_joined() {
            self.joined = Some((self.done, now));
        }
    }

    /// Whether the request is a read that waits, or has just waited, for another client's.
    pub(super) fn is_joined(&self) -> bool {
        self.joined.is_some_and(|(done, _)| done == self.done)
    }

    /// The time from which a write that is slowed down, or a joined read, waits no longer.
    pub(super) fn hurries_at(&self) -> Option<u64> {
        match (self.reason, self.joined) {
            (ParkReason::Slowed, _) if self.slowed_at > 0 => {
                Some(self.slowed_at.saturating_add(MAX_SLOWED_NS))
            }
            (ParkReason::InFlight, Some((done, since))) if done == self.done => {
                Some(since.saturating_add(MAX_JOINED_NS))
            }
            _ => None,
        }
    }

    /// Takes a request.
    pub(super) fn begin(&mut self, volume: usize, flow: FlowId, request: Request, now: u64) {
        self.cost = cost_of(&request);
        self.request = Some(request);
        self.volume = volume;
        self.flow = Some(flow);
        self.plan.begin();
        self.state = State::Ready;
        self.done = 0;
        self.covered = 0;
        self.stage = 0;
        self.outstanding = 0;
        self.error = None;
        self.is_late = false;
        self.ticket = None;
        self.flushing = false;
        self.doomed = false;
        self.has_waited = false;
        self.joined = None;
        self.extra = 0;
        self.slowed_at = 0;
        self.stuck_at = 0;
        self.lacks_at = 0;
        self.arrived = now;
        self.since = now;
    }
}

/// Bytes that a request moves: they count for its cost, and for the volume's limits.
pub(super) const fn moved(operation: Operation, len: u64) -> u64 {
    match operation {
        Operation::Read | Operation::Write { .. } => len,
        Operation::Flush | Operation::Discard { .. } | Operation::WriteZeroes { .. } => 0,
    }
}

const fn cost_of(request: &Request) -> u64 {
    schedule::cost(moved(request.operation, request.len))
}
