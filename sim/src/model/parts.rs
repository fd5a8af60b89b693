//! The parts of a history's state: requests, commit, checkpoint, metadata.

use super::device::Value;
use super::list::List;
use super::log::{Image, Superblock};
use super::map::{NO_RECORD, NONE, Record};
use super::state::SUBS;

/// State of a client request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpState {
    /// No request.
    Free,
    /// Fold in the table: writes of its entry wait, those in flight end.
    FoldWait,
    /// Reading the source of a copy-on-write or fold.
    CopyRead,
    /// Data write in flight.
    Write,
    /// Slow write: the data is there, the map not yet changed.
    Landed,
    /// Discard, not yet started.
    Discard,
    /// LSN assigned, leaf locked.
    HasLsn,
    /// Record in the ring, a composite entry half changed.
    Half,
    /// Record in the ring, change visible.
    Published,
    /// Waits for a commit.
    AwaitCommit,
    /// FLUSH by a device flush alone.
    ShortFlush,
    /// Read that found no bit in the overlay, and has not looked at the base's bitmap.
    Look,
    /// Read in flight.
    Read,
    /// Repeated structure request waiting for the durable LSN.
    AwaitDurable,
}

/// The direction of a fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Not a fold.
    No,
    /// From the overlay into the base.
    Down,
    /// From the base into the overlay.
    Up,
}

/// A client request, or a fold.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// Where it stands.
    pub state: OpState,
    /// Queue.
    pub q: u8,
    /// Volume.
    pub v: u8,
    /// Extent of the volume.
    pub e: u8,
    /// Sub-blocks touched.
    pub mask: u8,
    /// FUA write.
    pub fua: bool,
    /// The write went out with FUA and needs nothing else.
    pub direct: bool,
    /// Completion changes the map.
    pub slow: bool,
    /// Write-zeroes that keeps the extent.
    pub keep: bool,
    /// Extent it targets.
    pub p: u8,
    /// Source of a copy-on-write or fold, or `NONE`.
    pub source: u8,
    /// First write above a shared extent, which becomes the base.
    pub redirect: bool,
    /// A fold's direction.
    pub fold: Fold,
    /// Base at submission, or `NONE`.
    pub base: u8,
    /// Base's bitmap at submission, which only a mutation reads later.
    pub old_under: u8,
    /// No durable map shows the place of the data, so that a power loss may tear it.
    pub unseen: bool,
    /// A discard whose first record took away the base of an entry that is empty now.
    pub emptied: bool,
    /// Bits to set at completion; discards take bits away.
    pub set: u8,
    /// Bits copied.
    pub copied: u8,
    /// The copied values.
    pub copy: [Value; SUBS],
    /// Bitmap at submission, which only a mutation reads later.
    pub old_bits: u8,
    /// Value written.
    pub value: Value,
    /// Submission time; unique.
    pub start: u16,
    /// Its record.
    pub record: Record,
    /// FLUSH: the cut must reach this LSN.
    pub need: u16,
    /// The commit in flight answers it.
    pub served: bool,
}

/// No request.
pub const NO_OP: Op = Op {
    state: OpState::Free,
    q: 0,
    v: 0,
    e: 0,
    mask: 0,
    fua: false,
    direct: false,
    slow: false,
    keep: false,
    p: NONE,
    source: NONE,
    redirect: false,
    fold: Fold::No,
    base: NONE,
    old_under: 0,
    unseen: false,
    emptied: false,
    set: 0,
    copied: 0,
    copy: [0; SUBS],
    old_bits: 0,
    value: 0,
    start: 0,
    record: NO_RECORD,
    need: 0,
    served: false,
};

/// State of the one structure change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StructState {
    /// None.
    Idle,
    /// Gate shut, writes draining.
    Gated,
    /// LSN assigned.
    HasLsn,
    /// Half of a group is visible: a mutation.
    Half,
    /// Visible, waits for the durable LSN.
    Visible,
}

/// A structure change.
#[derive(Clone, Copy, Debug)]
pub struct StructOp {
    /// Where it stands.
    pub state: StructState,
    /// Its record.
    pub record: Record,
    /// When it became visible.
    pub visible: u16,
}

/// State of the committer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitState {
    /// Idle.
    Idle,
    /// Records captured.
    Captured,
    /// Data flush in flight.
    FlushSent,
    /// Data flushed.
    Flushed,
    /// WAL blocks in flight.
    WalSent,
    /// WAL blocks durable.
    WalDurable,
}

/// A commit.
#[derive(Clone, Copy, Debug)]
pub struct Commit {
    /// Where it stands.
    pub state: CommitState,
    /// The cut.
    pub cut: u16,
    /// Captured records in LSN order.
    pub records: List<Record, 24>,
    /// Its WAL blocks: cell and index.
    pub blocks: List<(u8, u16), 6>,
    /// Blocks that reached the device's cache.
    pub landed: u8,
    /// Mutations: queue, or `NONE`; and a commit of one entry.
    pub queue: u8,
    /// A commit of one entry alone.
    pub solo: bool,
}

/// State of the checkpointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CkptState {
    /// Idle.
    Idle,
    /// Map captured.
    Captured,
    /// Pages in flight.
    PagesSent,
    /// Pages in the device's cache.
    PagesCached,
    /// Flush in flight.
    FlushSent,
    /// Flushed.
    Flushed,
    /// Superblock in flight.
    SuperSent,
    /// Superblock in the device's cache.
    SuperCached,
}

/// A checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Ckpt {
    /// Where it stands.
    pub state: CkptState,
    /// The image.
    pub image: Image,
    /// Its index once written.
    pub index: u16,
    /// Its place.
    pub place: u8,
    /// WAL head that goes with it.
    pub head: (u16, u32),
    /// Index of the superblock.
    pub super_index: u16,
    /// LSN of the last checkpoint.
    pub last: u16,
}

/// A reference that was dropped and may not count yet.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// The extent.
    pub p: u8,
    /// The drop's LSN.
    pub lsn: u16,
    /// When the drop became visible.
    pub time: u16,
}

/// Where the process stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Dead, or opening: next step of the open.
    Open(u8),
    /// Committing the replayed changes.
    Recover,
    /// Serving requests.
    Serve,
    /// A flush failed.
    Failed,
}

/// The process's state of the pool's metadata.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    /// Newest superblock.
    pub sb: Superblock,
    /// Which copy holds it.
    pub copy: u8,
    /// Places that the two copies refer to.
    pub places: [u8; 2],
    /// Next WAL block.
    pub next_seq: u16,
    /// Hash of the last WAL block.
    pub last_hash: u32,
    /// First WAL block that may not be overwritten.
    pub head_seq: u16,
    /// Open epoch.
    pub epoch: u16,
    /// Open id drawn for this open.
    pub new_id: u16,
    /// Index of the superblock on its way at open.
    pub new_super: u16,
    /// The ring was accepted at this open.
    pub ring_used: bool,
}
