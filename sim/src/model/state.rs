//! The whole state of one history.

use super::device::{Device, PAGE0, SB0, Value, data_cell};
use super::list::List;
use super::log::{Block, Image, NO_SUPERBLOCK, Ring, Superblock, torn_block};
use super::map::{Entry, Map, NO_RECORD, NONE, Record, UNMAPPED, Volume};
use super::mutation::Mutation;
use super::oracle::{Cell, EXISTS, Fault, Promise, SIZE, VOLUME_CELLS};
use super::parts::{
    Ckpt, CkptState, Commit, CommitState, Meta, NO_OP, Op, Pending, Phase, StructOp, StructState,
};
use super::step::KINDS;

/// Volumes, snapshots and clones that a history can have; names are not used again.
pub const VOLS: usize = 4;
/// Extents of a volume.
pub const EXTS: usize = 2;
/// Sub-blocks of an extent.
pub const SUBS: usize = 3;
/// Extents of the pool.
pub const PHYS: usize = 7;
/// Client requests in flight.
pub const OPS: usize = 5;
/// WAL blocks one history can write.
pub const BLOCKS: usize = 48;
/// Checkpoints one history can take.
pub const IMAGES: usize = 14;
/// Superblocks one history can write.
pub const SUPERS: usize = 32;

/// Index from a small number.
pub fn ix(n: u8) -> usize {
    usize::from(n)
}

/// Sizes of the pool and its content at the start.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Extents of the pool.
    pub extents: u8,
    /// Sub-blocks of an extent.
    pub subs: u8,
    /// Extents of a volume.
    pub vol_extents: u8,
    /// Volumes at the start.
    pub volumes: u8,
    /// Valid bits of the initial extents, three for each, lowest first.
    pub fill: u16,
    /// Volume 0 has a snapshot (1) or a clone (2) at the start.
    pub copy: u8,
    /// Records a ring holds.
    pub ring: usize,
    /// WAL blocks.
    pub wal: u8,
    /// Records in a WAL block.
    pub per_block: usize,
    /// One commit after replay, before the first request: the simpler form of R13.
    pub recovery_commit: bool,
    /// A write of a shared extent redirects instead of copying.
    pub composite: bool,
    /// Overlay's bitmap of volume 0's first extent; 0 for no overlay.
    pub overlay: u8,
    /// Writes in flight keep each other's sub-blocks whole, and unseen ones may be torn.
    pub whole: bool,
}

/// The state of one history: device, process, client and oracle.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Sizes.
    pub cfg: Config,
    /// The removed rule.
    pub mutation: Mutation,
    /// Steps taken.
    pub now: u16,
    /// First violation.
    pub fault: Option<Fault>,
    /// Values the oracle compared.
    pub checks: u64,
    /// An arena is full: the history ends.
    pub exhausted: bool,

    /// The device.
    pub dev: Device,
    /// Shared memory.
    pub ring: Ring,
    /// A ring set aside.
    pub aside: Ring,
    /// Every WAL block written.
    pub blocks: List<Block, BLOCKS>,
    /// Every checkpoint image written.
    pub images: List<Image, IMAGES>,
    /// Every superblock written.
    pub supers: List<Superblock, SUPERS>,
    /// Writes of a dead owner that have not landed; true if nothing keeps them whole.
    pub late: List<(u8, Value, bool), 40>,

    /// Where the process stands.
    pub phase: Phase,
    /// Metadata.
    pub meta: Meta,
    /// The visible map.
    pub map: Map,
    /// References to each extent.
    pub refs: [u8; PHYS],
    /// Extents allocated by requests in flight, as a bit mask.
    pub reserved: u8,
    /// Dropped references.
    pub pending: List<Pending, 72>,
    /// Records published and not durable.
    pub dirty: List<Record, 24>,
    /// Last LSN assigned.
    pub last_lsn: u16,
    /// Durable LSN.
    pub durable: u16,
    /// Requests.
    pub ops: [Op; OPS],
    /// The structure change.
    pub sop: StructOp,
    /// The committer.
    pub commit: Commit,
    /// The checkpointer.
    pub ckpt: Ckpt,
    /// Volumes whose gate is shut, as a bit mask.
    pub gate: u8,
    /// How often each event of a composite entry happened.
    pub tally: [u16; KINDS.len()],

    /// The snapshots of a group of which none was deleted; `NONE` if there is no such group.
    pub group: (u8, u8),
    /// Next volume name.
    pub next_volume: u8,
    /// Volumes the client knows, as a bit mask.
    pub usable: u8,
    /// Next value a client writes.
    pub next_value: u16,
    /// Source of open ids.
    pub next_id: u16,
    /// Original volume of each volume.
    pub root: [u8; VOLS],
    /// The promise that the next recovery has to keep.
    pub promise: Promise,
    /// The ring was set aside or brought back since the last service.
    pub doubt: bool,
    /// The ring with the answered changes.
    pub life: u16,
    /// Ring memories made so far.
    pub lives: u16,
    /// The oracle.
    pub cells: [[Cell; VOLUME_CELLS]; VOLS],
}

fn idle_commit() -> Commit {
    Commit {
        state: CommitState::Idle,
        cut: 0,
        records: List::new(NO_RECORD),
        blocks: List::new((0, 0)),
        landed: 0,
        queue: NONE,
        solo: false,
    }
}

/// Tag of a value: the volume that wrote it and a number that is never used again.
pub fn tag(v: u8, n: u16) -> Value {
    (u16::from(v) + 1) << 10 | n
}

impl World {
    /// A pool that serves, with its initial content durable.
    pub fn new(cfg: Config, mutation: Mutation) -> Self {
        let blank = Image { map: Map::new(), lsn: 0 };
        let mut world = Self {
            cfg,
            mutation,
            now: 1,
            fault: None,
            checks: 0,
            exhausted: false,
            dev: Device::new(),
            ring: Ring::fresh(),
            aside: Ring::absent(),
            blocks: List::new(torn_block()),
            images: List::new(blank),
            supers: List::new(NO_SUPERBLOCK),
            late: List::new((0, 0, false)),
            phase: Phase::Serve,
            meta: Meta {
                sb: NO_SUPERBLOCK,
                copy: 0,
                places: [0, NONE],
                next_seq: 1,
                last_hash: 0,
                head_seq: 1,
                epoch: 1,
                new_id: 1,
                new_super: 0,
                ring_used: false,
            },
            map: Map::new(),
            refs: [0; PHYS],
            reserved: 0,
            pending: List::new(Pending { p: 0, lsn: 0, time: 0 }),
            dirty: List::new(NO_RECORD),
            last_lsn: 0,
            durable: 0,
            ops: [NO_OP; OPS],
            sop: StructOp { state: StructState::Idle, record: NO_RECORD, visible: 0 },
            commit: idle_commit(),
            ckpt: Ckpt {
                state: CkptState::Idle,
                image: blank,
                index: 0,
                place: 0,
                head: (0, 0),
                super_index: 0,
                last: 0,
            },
            gate: 0,
            tally: [0; KINDS.len()],
            group: (NONE, NONE),
            next_volume: cfg.volumes,
            usable: (1 << cfg.volumes) - 1,
            next_value: 1,
            next_id: 2,
            root: [0, 1, 2, 3],
            promise: Promise::Answered,
            doubt: false,
            life: 0,
            lives: 0,
            cells: [[Cell::settled(0, 0); VOLUME_CELLS]; VOLS],
        };
        world.format();
        world
    }

    /// Whether this history removes rule `m`.
    pub fn is(&self, m: Mutation) -> bool {
        self.mutation == m
    }

    /// Sub-blocks of a volume of full size.
    pub fn full_size(&self) -> u8 {
        self.cfg.subs * self.cfg.vol_extents
    }

    // The initial content: durable, in checkpoint 1, superblock 1 and a ring stamped with id 1.
    fn format(&mut self) {
        let size = self.full_size();
        for v in 0..self.cfg.volumes {
            self.map.volumes[ix(v)] = Volume { exists: true, read_only: false, size, lsn: 0 };
            self.settle(v, SIZE, u16::from(size));
            self.settle(v, EXISTS, 1);
            for e in 0..self.cfg.vol_extents {
                self.format_extent(v, e);
            }
        }
        if self.cfg.copy > 0 {
            self.format_copy();
        }
        self.format_overlay();
        self.recount();
        let blank = Image { map: Map::new(), lsn: 0 };
        self.images.push(blank);
        self.images.push(Image { map: self.map, lsn: 0 });
        self.blocks.push(torn_block());
        self.supers.push(NO_SUPERBLOCK);
        let sb = Superblock {
            seq: 1,
            place: 0,
            image: 1,
            head_seq: 1,
            head_hash: 0,
            epoch: 1,
            open_id: 1,
        };
        self.supers.push(sb);
        self.meta.sb = sb;
        self.ring.current = 1;
        self.ring.next = 1;
        for c in [PAGE0, SB0] {
            self.dev.put(c, 1);
            self.dev.persist(c);
        }
    }

    fn format_extent(&mut self, v: u8, e: u8) {
        let n = v * self.cfg.vol_extents + e;
        let bits = (self.cfg.fill >> (n * 3)).to_le_bytes()[0] & ((1 << self.cfg.subs) - 1);
        // One extent stays free, so that there is always something to do.
        if bits == 0 || n + 1 >= self.cfg.extents {
            return;
        }
        self.map.entries[ix(v)][ix(e)] = Entry::plain(n, bits);
        self.format_values(v, e, n, bits);
    }

    fn format_values(&mut self, v: u8, e: u8, p: u8, bits: u8) {
        for s in 0..self.cfg.subs {
            if bits & (1 << s) != 0 {
                let value = tag(v, self.next_value);
                self.next_value += 1;
                self.dev.put(data_cell(p, s), value);
                self.dev.persist(data_cell(p, s));
                self.settle(v, ix(e) * SUBS + ix(s), value);
            }
        }
    }

    fn format_copy(&mut self) {
        let to = ix(self.next_volume);
        self.map.entries[to] = self.map.entries[0];
        self.map.volumes[to] = Volume { read_only: self.cfg.copy == 1, ..self.map.volumes[0] };
        self.cells[to] = self.cells[0];
        self.root[to] = 0;
        self.usable |= 1 << self.next_volume;
        self.next_volume += 1;
    }

    fn format_overlay(&mut self) {
        let bits = self.cfg.overlay & ((1 << self.cfg.subs) - 1);
        let p = self.cfg.volumes * self.cfg.vol_extents;
        let below = self.map.entries[0][0];
        if bits == 0 || below.p == NONE || p + 1 >= self.cfg.extents {
            return;
        }
        self.map.entries[0][0] =
            Entry { base: below.p, under: below.bits, ..Entry::plain(p, bits) };
        self.format_values(0, 0, p, bits);
    }

    fn settle(&mut self, v: u8, cell: usize, value: u16) {
        self.cells[ix(v)][cell] = Cell::settled(value, 0);
    }

    /// Derives the reference counts from the map, as an open does.
    pub fn recount(&mut self) {
        self.refs = self.counted();
    }

    /// References to each extent, counted from the map.
    pub fn counted(&self) -> [u8; PHYS] {
        let mut refs = [0; PHYS];
        for entry in self.map.entries.as_flattened() {
            for p in entry.extents() {
                refs[ix(p)] += 1;
            }
        }
        refs
    }

    /// Forgets everything that lives in the process.
    pub fn forget_process(&mut self) {
        self.map = Map::new();
        self.map.entries = [[UNMAPPED; EXTS]; VOLS];
        self.refs = [0; PHYS];
        self.reserved = 0;
        self.pending.clear();
        self.dirty.clear();
        self.ops = [NO_OP; OPS];
        self.sop.state = StructState::Idle;
        self.commit.state = CommitState::Idle;
        self.ckpt.state = CkptState::Idle;
        self.gate = 0;
        self.usable = 0;
    }
}
