//! The whole state of one history.

use super::array::{Array, NO_KEY};
use super::attachment::{Host, Io, Phase, STANDBY};
use super::mutation::Mutation;
use super::oracle::{FRESH, Fault, FaultKind, Registers};
use super::parts::{
    BLOCKS, CELLS, COMMANDS, Command, Config, DEVICES, FREE, FenceKind, HOSTS, Lease, NO_COMMAND,
    NONE, OBJECTS, PATHS, Payload, Stage, UNIT_BLOCKS, UNITS, Waiter,
};
use super::step::{Event, KINDS};
use crate::model::list::List;

/// Ticks without a renewal after which a host gives its cells up.
pub const OWN_EXPIRY: u8 = 3;
/// Ticks without a renewal after which a hardware watchdog has reset the host. More than
/// `OWN_EXPIRY`: a host that runs gives its cells up first.
pub const WATCHDOG: u8 = 4;
/// Ticks without a renewal after which others count a host as dead. More than `WATCHDOG`.
pub const EXPIRY: u8 = 6;
/// How often the holder of a cell is asked for it before it is fenced.
pub const PATIENCE: u8 = 3;

/// A history at one moment.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// The circumstances.
    pub cfg: Config,
    /// The rule that is left out.
    pub without: Mutation,
    /// The array.
    pub array: Array,
    /// The hosts.
    pub hosts: [Host; HOSTS],
    /// The leases of cells and directory.
    pub leases: [Lease; OBJECTS],
    /// Write commands in kernels and target.
    pub commands: List<Command, COMMANDS>,
    /// Reigns over cells and directory: each holder of the lease begins one.
    pub reigns: [u8; OBJECTS],
    /// Hosts that have asked for each cell, a bit for each.
    pub asks: [u8; CELLS],
    /// The coordinator does not answer; leases go on.
    pub is_away: bool,
    /// Messages between hosts are lost.
    pub is_silent: bool,
    /// The power switch refuses.
    pub is_switch_broken: bool,
    /// The number of the next boot, key and open id.
    pub next: u8,
    /// The promises.
    pub registers: Registers,
    /// The cell that has written to each unit.
    pub tenants: [u8; UNITS],
    /// The first violation.
    pub fault: Option<Fault>,
    /// Values compared.
    pub checks: u64,
    /// Events that happened.
    pub tally: [u8; KINDS.len()],
}

/// Returns the number of a small thing as it is stored.
pub(super) fn number(n: usize) -> u8 {
    n.to_le_bytes()[0]
}

impl World {
    /// The state at the start: all hosts are up, and own what the configuration says.
    pub fn new(cfg: Config, without: Mutation) -> Self {
        let host = |h: usize| {
            let paths = if cfg.one_path & 1 << h == 0 { 0b11 } else { 0b01 };
            Host {
                is_on: true,
                is_frozen: false,
                has_daemon: true,
                key: number(h) + 1,
                boot: number(h) + 1,
                membership: number(h) + 1,
                process: 0,
                paths,
                registered: [0; DEVICES],
                probing: (NONE, NONE),
                is_fenced: false,
                is_preempted: false,
                has_lapsed: false,
                age: 0,
                watchdog: 0,
                renewals: 0,
                restarted: 0,
                directory: [NONE; UNITS],
                knows_directory: false,
                seen: [0; HOSTS],
                cells: [STANDBY; CELLS],
            }
        };
        let mut world = Self {
            cfg,
            without,
            array: Array::new(),
            hosts: std::array::from_fn(host),
            leases: [FREE; OBJECTS],
            commands: List::new(NO_COMMAND),
            reigns: [0; OBJECTS],
            asks: [0; CELLS],
            is_away: false,
            is_silent: false,
            is_switch_broken: false,
            next: 4,
            registers: [[FRESH; BLOCKS]; CELLS],
            tenants: [NONE; UNITS],
            fault: None,
            checks: 0,
            tally: [0; KINDS.len()],
        };
        if cfg.fence == FenceKind::Reservations {
            for h in 0..HOSTS {
                world.start_registered(h);
            }
        }
        for c in 0..CELLS {
            if cfg.open & 1 << c != 0 {
                world.start_open(c);
            }
        }
        world
    }

    fn start_registered(&mut self, h: usize) {
        if self.without == Mutation::RegisterLate {
            return;
        }
        while self.register(h) {}
    }

    // Host c has cell c open.
    fn start_open(&mut self, c: usize) {
        let host = &mut self.hosts[c];
        let (key, boot, membership) = (host.key, host.boot, host.membership);
        self.leases[c] = Lease { holder: number(c), key, boot, membership };
        self.reigns[c] = 1;
        let superblock = &mut self.array.superblocks[c];
        superblock.cached.is_clean = false;
        superblock.flush();
        let cell = &mut host.cells[c];
        cell.phase = Phase::Serve;
        cell.reign = 1;
        cell.superblock = superblock.cached;
        cell.is_known = true;
        cell.table[0] = number(c);
        cell.ring.id = superblock.cached.id;
        cell.ring.next = superblock.cached.id;
        cell.has_served = true;
    }

    /// Records the first violation.
    pub(super) fn fail(&mut self, kind: FaultKind, host: usize, cell: usize, found: u8) {
        self.fault.get_or_insert(Fault { kind, host, cell, found });
    }

    /// Counts an event.
    pub(super) fn note(&mut self, event: Event) {
        let n = &mut self.tally[event as usize];
        *n = n.saturating_add(1);
    }

    /// A number that was never used: a boot, key or open id that is drawn anew.
    pub(super) fn draw(&mut self) -> u8 {
        self.next = self.next.saturating_add(1);
        self.next
    }

    /// True if the machine runs.
    pub(super) fn runs(&self, h: usize) -> bool {
        self.hosts[h].is_on && !self.hosts[h].is_frozen
    }

    /// True if the daemon runs and may use the array.
    pub(super) fn works(&self, h: usize) -> bool {
        let host = &self.hosts[h];
        self.runs(h) && host.has_daemon && !host.is_fenced && !host.has_lapsed
    }

    /// True if reservations fence.
    pub(super) fn has_reservations(&self) -> bool {
        self.cfg.fence == FenceKind::Reservations
    }

    /// True if another has become the owner of the cell that the host has open.
    pub(super) fn is_deposed(&self, h: usize, c: usize) -> bool {
        self.hosts[h].cells[c].reign != self.reigns[c]
    }

    /// True if the host holds the lease.
    pub(super) fn holds(&self, h: usize, object: usize) -> bool {
        let (lease, host) = (&self.leases[object], &self.hosts[h]);
        usize::from(lease.holder) == h && lease.membership == host.membership
    }

    /// A path for IO to the device: registered, where reservations are used.
    pub(super) fn path(&self, h: usize, device: usize) -> Option<usize> {
        let host = &self.hosts[h];
        let is_free = !self.has_reservations() || self.without == Mutation::RegisterLate;
        let usable = if is_free { host.paths } else { host.paths & host.registered[device] };
        (0..PATHS).find(|path| usable & 1 << path != 0)
    }

    /// True if the target answers with a reservation conflict.
    pub(super) fn conflicts(&self, h: usize, device: usize, path: usize) -> bool {
        let is_reserved = self.has_reservations() && self.array.reserved[device];
        is_reserved && self.array.keys[device][h][path] == NO_KEY
    }

    /// A flush, or a read of the media, on each of the devices: false if it could not be done. Then
    /// the state may have changed, as the daemon learns of a conflict or of a restart of the array.
    pub(super) fn access(&mut self, h: usize, c: usize, devices: u8, is_read: bool) -> bool {
        for device in (0..DEVICES).filter(|device| devices & 1 << device != 0) {
            let Some(path) = self.path(h, device) else { return false };
            if !self.is_current(h, device) {
                return false;
            }
            let is_refused = !is_read || self.cfg.exclusive;
            if is_refused && self.conflicts(h, device, path) {
                self.conflict(h, c);
                return false;
            }
        }
        true
    }

    /// Flushes devices; false as [`Self::access`].
    pub(super) fn flush(&mut self, h: usize, c: usize, devices: u8) -> bool {
        let done = self.access(h, c, devices, false);
        for device in (0..DEVICES).filter(|device| done && devices & 1 << device != 0) {
            self.array.flush(device);
        }
        done
    }

    // False if the device had restarted: what it had not flushed is gone (H15).
    fn is_current(&mut self, h: usize, device: usize) -> bool {
        if self.hosts[h].restarted & 1 << device == 0 {
            return true;
        }
        self.hosts[h].restarted &= !(1 << device);
        if self.without == Mutation::RestartUnnoticed {
            return true;
        }
        self.note(Event::RestartNoticed);
        for c in 0..CELLS {
            self.poison(h, c);
        }
        false
    }

    /// Queues a command in the kernel; false if there are too many.
    pub(super) fn submit(&mut self, h: usize, c: usize, waiter: Waiter, payload: Payload) -> bool {
        if !self.commands.fits(1) {
            return false;
        }
        let host = &mut self.hosts[h];
        let cell = &mut host.cells[c];
        let (object, reign) = match payload {
            Payload::Directory(_) => (number(super::parts::DIRECTORY), cell.growth_reign),
            _ => (number(c), cell.reign),
        };
        match waiter {
            Waiter::Move => cell.io = Io::Pending,
            Waiter::Request => cell.request_io = Io::Pending,
            Waiter::Growth => cell.growth_io = Io::Pending,
        }
        self.commands.push(Command {
            host: number(h),
            boot: host.boot,
            process: host.process,
            key: host.key,
            cell: number(c),
            object,
            reign,
            waiter,
            payload,
            stage: Stage::Kernel,
        });
        true
    }

    /// True if commands of the host for the cell are queued or in flight (R11).
    pub(super) fn has_commands(&self, h: usize, c: usize) -> bool {
        let mut commands = self.commands.all().iter();
        commands.any(|x| usize::from(x.host) == h && usize::from(x.cell) == c)
    }

    /// Where a block lies: the unit and the block in it.
    pub(super) fn place(&self, h: usize, c: usize, block: u8) -> Option<(u8, u8)> {
        let at = usize::from(block);
        let unit = self.hosts[h].cells[c].table[at / UNIT_BLOCKS];
        (unit != NONE).then(|| (unit, number(at % UNIT_BLOCKS)))
    }

    /// The version of a block as the host sees it on the media.
    pub(super) fn version(&self, h: usize, c: usize, block: u8) -> u8 {
        let is_mapped = self.hosts[h].cells[c].mapped & 1 << block != 0;
        match self.place(h, c, block) {
            Some((unit, at)) if is_mapped => {
                self.array.data[usize::from(unit)][usize::from(at)].cached
            }
            _ => 0,
        }
    }
}
