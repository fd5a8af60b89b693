//! The parts of the model: media, commands, leases, and what a host keeps of a cell.

/// Hosts that share the array.
pub const HOSTS: usize = 3;
/// Cells on the array.
pub const CELLS: usize = 2;
/// Devices of the volume group. The superblock, tree and log of a cell lie on the device of its
/// number, the directory on device 0.
pub const DEVICES: usize = 2;
/// Paths from a host to the array.
pub const PATHS: usize = 2;
/// Units of space that the directory grants to cells. Unit n lies on device n modulo `DEVICES`.
pub const UNITS: usize = 4;
/// Blocks in a unit.
pub const UNIT_BLOCKS: usize = 2;
/// Units that a cell can grow to: all that the array has, shared evenly, so that space never runs
/// out for good.
pub const CELL_UNITS: usize = 2;
/// Blocks of a cell that has grown as far as it can.
pub const BLOCKS: usize = UNIT_BLOCKS * CELL_UNITS;
/// Objects that have a lease: each cell, and the directory.
pub const OBJECTS: usize = CELLS + 1;
/// The directory among these.
pub const DIRECTORY: usize = CELLS;
/// Neither host, cell, unit, path nor key.
pub const NONE: u8 = u8::MAX;
/// Commands that are queued or in flight at once, over all hosts and their former boots.
pub const COMMANDS: usize = 16;
/// All devices, a bit for each.
pub const ALL_DEVICES: u8 = (1 << DEVICES) - 1;

/// How a host is kept from the array by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceKind {
    /// Its key is removed by PREEMPT AND ABORT.
    Reservations,
    /// A power switch turns it off.
    PowerSwitch,
    /// Its hardware watchdog resets it when it does not renew its lease.
    Watchdog,
}

/// The circumstances of a history.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How hosts are fenced.
    pub fence: FenceKind,
    /// The reservation refuses reads of others too ("exclusive access").
    pub exclusive: bool,
    /// The coordinator frees the lease of a fenced host at once, not after its expiry.
    pub recovery: bool,
    /// A holder that does not answer is fenced, also while it renews its lease.
    pub fences_silent: bool,
    /// Clients read and write through a page cache.
    pub buffered: bool,
    /// Growth takes the last free unit, which may lie on the other device, not the first.
    pub last_unit: bool,
    /// Cells that begin open on the host of their number.
    pub open: u8,
    /// Hosts whose second path is down at the start and not registered, a bit for each.
    pub one_path: u8,
}

/// A structure on the media: the content that readers see, and the content that a loss of power
/// leaves.
#[derive(Clone, Copy, Debug)]
pub struct Stored<T> {
    /// In the array's write cache, or written back from it.
    pub cached: T,
    /// Durable.
    pub durable: T,
}

impl<T: Copy> Stored<T> {
    /// Content that is durable.
    pub const fn durable(value: T) -> Self {
        Self { cached: value, durable: value }
    }

    /// The cache is written back.
    pub const fn flush(&mut self) {
        self.durable = self.cached;
    }

    /// Power is lost; a write that was not flushed is kept or not.
    pub const fn lose(&mut self, is_kept: bool) {
        if is_kept {
            self.durable = self.cached;
        } else {
            self.cached = self.durable;
        }
    }
}

/// The superblock of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The open id, drawn anew by each open (R14).
    pub id: u8,
    /// Closed in order.
    pub is_clean: bool,
    /// Units that the cell may allocate from.
    pub units: u8,
}

/// The content of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A block of a unit: unit, block of the unit, version.
    Data(u8, u8, u8),
    /// The log of a cell: blocks that are mapped, a bit for each.
    Log(u8, u8),
    /// The tree of a cell.
    Tree(u8, u8),
    /// The superblock of a cell.
    Superblock(u8, Superblock),
    /// The directory: the owner of each unit.
    Directory([u8; UNITS]),
}

impl Payload {
    /// The device that it is written to.
    pub const fn device(self) -> usize {
        let place = match self {
            Self::Data(unit, ..) => unit,
            Self::Log(cell, _) | Self::Tree(cell, _) | Self::Superblock(cell, _) => cell,
            Self::Directory(_) => 0,
        };
        place as usize % DEVICES
    }
}

/// The part of an attachment that waits for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiter {
    /// Opening or closing.
    Move,
    /// The request of a client.
    Request,
    /// Growth.
    Growth,
}

/// Where a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// In the kernel of its host.
    Kernel,
    /// In the target, which has accepted it.
    Target,
}

/// A write command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The host that has sent it.
    pub host: u8,
    /// The boot of the host.
    pub boot: u8,
    /// The process of the daemon that waits for it.
    pub process: u8,
    /// The key of the host at that time.
    pub key: u8,
    /// The cell for which it is sent.
    pub cell: u8,
    /// The cell, or the directory, that it writes to.
    pub object: u8,
    /// The reign over this object in which it was sent.
    pub reign: u8,
    /// The part that waits for it.
    pub waiter: Waiter,
    /// Its content.
    pub payload: Payload,
    /// How far it is.
    pub stage: Stage,
}

/// Fills unused places.
pub const NO_COMMAND: Command = Command {
    host: NONE,
    boot: 0,
    process: 0,
    key: 0,
    cell: 0,
    object: 0,
    reign: 0,
    waiter: Waiter::Move,
    payload: Payload::Log(0, 0),
    stage: Stage::Kernel,
};

/// A lease of the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The host that holds it, or `NONE`.
    pub holder: u8,
    /// The key of the holder.
    pub key: u8,
    /// The boot of the holder.
    pub boot: u8,
    /// The membership of the holder in the lockspace: another one after each lapse and boot.
    pub membership: u8,
}

/// A lease that is free.
pub const FREE: Lease = Lease { holder: NONE, key: NONE, boot: NONE, membership: NONE };

/// How far a command of an attachment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// There is none.
    Idle,
    /// Queued or in flight.
    Pending,
    /// It has landed.
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
    /// It was not written back yet.
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
    /// Those that a flush in progress makes durable.
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
    /// It is opened to declare its holder dead: replay, close, release.
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
    /// The lease was renewed in this tick.
    pub renewed: bool,
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
