//! Plans: the media operations of a request, in arrays that the caller owns and reuses.

use crate::error::MapperError;
use crate::geometry::MAX_DEVICES;
use crate::read_cache::Fill;
use crate::units::{DeviceIndex, ExtentIndex, VolumeId};

/// The caller's next step with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Do the operations of the plan, stage 0 before stage 1, then call `complete`. The plan
    /// covers this many bytes from the request's start; the rest is asked for again.
    Issue {
        /// Bytes covered.
        covered: u64,
    },
    /// This many bytes from the request's start are done; there is no IO and no `complete`.
    Done {
        /// Bytes done.
        covered: u64,
    },
    /// Answer when [`commit_state`](crate::pool::Pool::commit_state) has a result for the ticket.
    Wait(CommitTicket),
    /// Nothing was done. Retry when [`events`](crate::pool::Pool::events) has changed.
    Park(ParkReason),
}

/// The caller's step after the IO of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Answer the client now.
    Done,
    /// Answer when [`commit_state`](crate::pool::Pool::commit_state) has a result for the ticket.
    Wait(CommitTicket),
}

/// Why a request can't go on at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ParkReason {
    /// The volume has no granted extent left: the engine grants, or the pool is full.
    Space,
    /// The pool is nearly full, and the volume has had its share for now.
    Slowed,
    /// A metadata page for this change can't be promised before a checkpoint frees some.
    Metadata,
    /// The arena has no leaf to spare: the engine refills it.
    Leaves,
    /// The worker's part of the delta ring is full: a commit frees it.
    Ring,
    /// Something in flight must end first: a copy of the same extent, a write that fills up the
    /// same sub-block, or, for a flush, a flush of the same device.
    InFlight,
    /// A structure change of the volume is under way.
    Gated,
}

/// Names the commit that a flush waits for: one captured after the flush arrived, and reaching
/// its last LSN (rules R2, R3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommitTicket {
    pub(crate) lsn: u64,
    pub(crate) sequence: u64,
}

/// One operation on the media, or on the client's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanOp {
    /// The kind of operation.
    pub kind: OpKind,
    /// Operations of stage 1 start when all of stage 0 have ended well.
    pub stage: u8,
    /// The caller's index of the device.
    pub device: DeviceIndex,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the bytes are in the request's buffer, for reads and writes.
    pub buffer_offset: u64,
    /// For writes: no map shows the target, neither the present one nor one that a crash could
    /// bring back. So an interrupted write is never visible in part.
    pub unseen: bool,
}

/// The kinds of [`PlanOp`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// From the device into the client's buffer.
    Read,
    /// Zeroes into the client's buffer; no device is involved.
    ReadZeroes,
    /// From the client's buffer to the device.
    Write {
        /// Durable when it completes.
        fua: bool,
    },
    /// Zeroes to the device.
    WriteZeroes {
        /// Durable when it completes.
        fua: bool,
    },
    /// From one place of the media to another, through memory of the caller's.
    Copy {
        /// The caller's index of the device read from.
        from_device: DeviceIndex,
        /// First byte read.
        from_offset: u64,
    },
    /// Make every completed write of the device durable.
    Flush,
}

/// A part of a write whose completion changes the map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlowPiece {
    pub(crate) extent: ExtentIndex,
    pub(crate) token: u64,
}

/// The steps that an armed plan has to undo or finish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PlanKind {
    /// No operation is in flight.
    Idle,
    Read,
    /// One that brings pages into the cache.
    CachedRead,
    Write,
    Flush,
}

/// The operations of one request. Made once per request in flight and used again.
#[derive(Debug)]
pub struct Plan {
    pub(crate) ops: Vec<PlanOp>,
    pub(crate) slow: Vec<SlowPiece>,
    /// Pages that the read brings into the cache. Empty when it has ended.
    pub(crate) fills: Vec<Fill>,
    pub(crate) kind: PlanKind,
    pub(crate) parity: u8,
    pub(crate) volume: VolumeId,
    /// A FUA write that a commit has to make durable.
    pub(crate) fua_commit: bool,
    /// Whether the request is exempt from throttling, however full the pool is.
    pub(crate) hurried: bool,
    /// Completed writes per device that a flush has to cover, and once it is sent, those that it
    /// does; 0 for a device that it does not need.
    pub(crate) flushed: [u64; MAX_DEVICES],
    /// Whether the plan's request is a flush that waits for another one to end.
    pub(crate) joins: bool,
}

impl Plan {
    /// Fewest operations a plan can be made with: a copy-on-write of one extent with 64
    /// sub-blocks needs at most 32 copies, two fills and the write.
    pub const MIN_OPS: usize = 40;

    /// A plan for up to `ops` operations (at least [`Self::MIN_OPS`]); longer requests are
    /// planned in several goes.
    #[must_use]
    pub fn with_capacity(ops: usize) -> Self {
        let ops = ops.max(Self::MIN_OPS);
        Self {
            ops: Vec::with_capacity(ops),
            slow: Vec::with_capacity(ops),
            fills: Vec::new(),
            kind: PlanKind::Idle,
            parity: 0,
            volume: VolumeId(0),
            fua_commit: false,
            hurried: false,
            flushed: [0; MAX_DEVICES],
            joins: false,
        }
    }

    /// Forgets what a parked request that is not tried again has left. To be called with each new
    /// request.
    pub fn begin(&mut self) {
        self.joins = false;
    }

    /// The operations to do, ascending in the request's buffer within a stage.
    #[must_use]
    #[inline]
    pub fn ops(&self) -> &[PlanOp] {
        &self.ops
    }

    /// Whether `complete` will change the map: the bytes that it then shows have to be where no
    /// commit can come before them.
    #[must_use]
    #[inline]
    pub fn changes_map(&self) -> bool {
        !self.slow.is_empty()
    }

    /// Whether the read brings something into the cache, so that
    /// [`keep`](crate::worker::Worker::keep) is to be called.
    #[must_use]
    #[inline]
    pub fn fills_cache(&self) -> bool {
        self.kind == PlanKind::CachedRead
    }

    /// Whether IO is out that `complete` must be called for.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.kind != PlanKind::Idle
    }

    /// Whether the request has been slowed down for long enough: it takes its resources from now
    /// on, as far as they are available. A read waits for no other one.
    #[inline]
    pub fn hurry(&mut self, hurried: bool) {
        self.hurried = hurried;
    }

    /// Forgets the request without completing it, as the death of a process does. The pool object
    /// it belongs to must not be used afterwards.
    pub fn abandon(&mut self) {
        self.fills.clear();
        self.reset();
    }

    /// Refuses to plan over a request in flight.
    pub(crate) fn check_idle(&self) -> Result<(), MapperError> {
        if self.is_armed() {
            return Err(MapperError::Internal("a plan was used again with its request in flight"));
        }
        Ok(())
    }

    pub(crate) fn reset(&mut self) {
        self.ops.clear();
        self.slow.clear();
        self.kind = PlanKind::Idle;
        self.fua_commit = false;
        self.joins = false;
    }

    pub(crate) fn room(&self) -> usize {
        self.ops.capacity() - self.ops.len()
    }

    pub(crate) fn push(&mut self, op: PlanOp) {
        debug_assert!(self.room() > 0, "callers check the room first");
        self.ops.push(op);
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        debug_assert!(
            !self.is_armed() || std::thread::panicking(),
            "a plan was dropped with its request in flight"
        );
    }
}
