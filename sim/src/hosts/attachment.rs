//! The state of a host, and of a cell on it.

use super::parts::{
    BLOCKS, CELL_UNITS, CELLS, DEVICES, FREE, HOSTS, Lease, NONE, Superblock, UNITS,
};

/// How far a command of an attachment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// There is none.
    Idle,
    /// Queued or in flight.
    Pending,
    /// The command has landed.
    Done,
}

/// How far a host is with a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Attached, not open: requests park.
    Standby,
    /// Waits for the lease.
    Acquire,
    /// Fences the holder of the lease.
    Fence,
    /// Flushes before it reads the rest (H4).
    Flush,
    /// Reads superblock, tree, log and directory.
    Read,
    /// Writes the superblock of this open.
    Stamp,
    /// Flushes the superblock of this open.
    StampFlush,
    /// Open.
    Serve,
    /// New requests park; those in flight end.
    Gate,
    /// Pages that clients have written through the page cache are written back.
    WriteBack,
    /// Flushes the data.
    DataFlush,
    /// Writes the tree.
    Tree,
    /// Flushes the tree.
    TreeFlush,
    /// Marks the superblock as clean.
    Clean,
    /// Flushes the mark.
    CleanFlush,
    /// Closed; gives the lease back.
    Release,
    /// A flush has failed: opens again as after a loss of power (R8).
    Poisoned,
    /// The host is fenced: refuses everything.
    Lost,
}

impl Phase {
    /// True from the lease to its release.
    pub const fn is_open(self) -> bool {
        !matches!(self, Self::Standby | Self::Acquire | Self::Fence | Self::Release | Self::Lost)
    }

    /// True if the attachment serves requests, or ends those in flight.
    pub const fn serves(self) -> bool {
        matches!(self, Self::Serve | Self::Gate)
    }
}

/// How far the growth of a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// None is wanted.
    Idle,
    /// Waits for the lease of the directory.
    Acquire,
    /// Writes the directory.
    Directory,
    /// Flushes the directory.
    DirectoryFlush,
    /// Gives the lease of the directory back.
    Release,
    /// Writes the superblock with the new size.
    Superblock,
    /// Flushes the superblock.
    SuperblockFlush,
}

/// The kind of a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Write one block.
    Write,
    /// Read one block.
    Read,
    /// Make everything answered durable.
    Flush,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is none.
    Idle,
    /// Waits until the cell is open.
    Parked,
    /// Waits until the cell has grown.
    NoSpace,
    /// Its data is under way.
    Data,
    /// A flush writes a page back first.
    Page,
    /// The log is under way.
    Log,
}

/// The request of a client on one host to one cell.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Its kind.
    pub kind: Kind,
    /// How far it is.
    pub progress: Progress,
    /// The block that it reads or writes.
    pub block: u8,
    /// The version that it writes.
    pub version: u8,
    /// For a flush: the versions of each block that may not come back after it.
    pub over: [u16; BLOCKS],
    /// The reign over the cell when it was submitted.
    pub reign: u8,
}

/// No request.
pub const NO_REQUEST: Request = Request {
    kind: Kind::Read,
    progress: Progress::Idle,
    block: 0,
    version: 0,
    over: [0; BLOCKS],
    reign: 0,
};

/// A page of the page cache above the device of an attachment.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The block, or `NONE`.
    pub block: u8,
    /// The version.
    pub version: u8,
    /// Not written back yet.
    pub is_dirty: bool,
}

/// No page.
pub const NO_PAGE: Page = Page { block: NONE, version: 0, is_dirty: false };

/// The delta ring of a cell, in the memory of a host.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// The open that it belongs to.
    pub id: u8,
    /// The open that is about to begin (R14).
    pub next: u8,
    /// Blocks that were mapped and are not durable yet.
    pub mapped: u8,
}

/// No ring.
pub const NO_RING: Ring = Ring { id: 0, next: 0, mapped: 0 };

/// The progress of a fence, against the holder of one lease.
#[derive(Clone, Copy, Debug)]
pub struct FenceProgress {
    /// The lease as it was when the fence began.
    pub target: Lease,
    /// The host is off, or has lost its lease (without reservations only).
    pub is_stopped: bool,
    /// Devices that are done, a bit for each.
    pub devices: u8,
}

/// No fence.
pub const NO_FENCE: FenceProgress = FenceProgress { target: FREE, is_stopped: false, devices: 0 };

/// A cell on a host.
#[derive(Clone, Copy, Debug)]
pub struct Attachment {
    /// How far it is.
    pub phase: Phase,
    /// The command of opening or closing.
    pub io: Io,
    /// The reign over the cell in which it was opened.
    pub reign: u8,
    /// Blocks that are mapped.
    pub mapped: u8,
    /// Mapped blocks that a flush in progress makes durable.
    pub captured: u8,
    /// Units that may be allocated from.
    pub units: u8,
    /// The units of the cell, in order.
    pub table: [u8; CELL_UNITS],
    /// The superblock as read or written last.
    pub superblock: Superblock,
    /// The superblock was read in this boot.
    pub is_known: bool,
    /// The client's request.
    pub request: Request,
    /// The command of the request.
    pub request_io: Io,
    /// The page cache above.
    pub page: Page,
    /// The delta ring.
    pub ring: Ring,
    /// Growth.
    pub growth: Growth,
    /// The command of the growth.
    pub growth_io: Io,
    /// The reign over the directory in which it grows.
    pub growth_reign: u8,
    /// How often the holder of the lease was asked for it.
    pub patience: u8,
    /// The fence in progress, or the last one.
    pub fence: FenceProgress,
    /// The lease was free when it was taken: the cell has to be clean (H6).
    pub was_free: bool,
    /// The requests that waited for this open have been served.
    pub has_served: bool,
    /// The cell is opened to declare its holder dead: replay, close, release.
    pub is_declared: bool,
    /// Answered writes of its client may be lost: its next flush fails.
    pub owes_error: bool,
    /// Growth failed once and is not tried again (a mutation).
    pub has_given_up: bool,
}

/// A cell that is attached and not open.
pub const STANDBY: Attachment = Attachment {
    phase: Phase::Standby,
    io: Io::Idle,
    reign: 0,
    mapped: 0,
    captured: 0,
    units: 1,
    table: [NONE; CELL_UNITS],
    superblock: Superblock { id: 0, is_clean: true, units: 1 },
    is_known: false,
    request: NO_REQUEST,
    request_io: Io::Idle,
    page: NO_PAGE,
    ring: NO_RING,
    growth: Growth::Idle,
    growth_io: Io::Idle,
    growth_reign: 0,
    patience: 0,
    fence: NO_FENCE,
    was_free: false,
    has_served: false,
    is_declared: false,
    owes_error: false,
    has_given_up: false,
};

/// A host.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// Its machine has power.
    pub is_on: bool,
    /// Its machine stands still and does not know it.
    pub is_frozen: bool,
    /// Its daemon runs.
    pub has_daemon: bool,
    /// Its key: the incarnation.
    pub key: u8,
    /// The number of the incarnation; with all rules in place the same as the key.
    pub boot: u8,
    /// Its membership in the lockspace.
    pub membership: u8,
    /// The process of its daemon.
    pub process: u8,
    /// Paths that are up, a bit for each.
    pub paths: u8,
    /// Paths that are registered and verified, by device.
    pub registered: [u8; DEVICES],
    /// A device and path that are registered and not verified yet, or `NONE`.
    pub probing: (u8, u8),
    /// The daemon knows that the host is fenced.
    pub is_fenced: bool,
    /// The key of this incarnation was removed.
    pub is_preempted: bool,
    /// The host has lost its lease in the lockspace.
    pub has_lapsed: bool,
    /// Ticks of its own clock since it renewed its lease.
    pub age: u8,
    /// Ticks of the watchdog since then.
    pub watchdog: u8,
    /// Hosts that have renewed their lease since this one looked last, a bit for each.
    pub renewals: u8,
    /// Devices whose restart has not been noticed.
    pub restarted: u8,
    /// The directory as read last.
    pub directory: [u8; UNITS],
    /// The directory was read in this boot.
    pub knows_directory: bool,
    /// Ticks for which it has not seen each host renew its lease.
    pub seen: [u8; HOSTS],
    /// The cells.
    pub cells: [Attachment; CELLS],
}
