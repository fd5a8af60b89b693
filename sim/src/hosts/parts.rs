//! The parts of the model: circumstances, media, commands and leases.

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
