//! Opening a pool: fence, flush, read, replay, take over the ring, and one ordinary commit before
//! the first request (rules R11 to R15).

#[doc(hidden)]
pub mod find;
mod load;
mod options;
mod replay;
mod ring;
mod take_over;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::arena::Arena;
use crate::engine::pages::PageSpace;
use crate::engine::{Engine, EngineParts, Wal};
use crate::error::MapperError;
use crate::format::PageRef;
use crate::format::superblock::{COMPOSITE, Superblock};
use crate::geometry::{EXTENT_SIZE_RANGE, Geometry, MAX_DEVICES, PAGE_BYTES};
use crate::io::{IoBuffer, IoCommand, IoError, IoOp};
use crate::mutation::{Mutation, active};
use crate::pool::{FreeSpace, MAX_WORKERS, Pool, PoolParts};
use crate::sync::Ordering;
use crate::units::{DeviceIndex, Lsn};

use find::{Copies, Found};
use load::{Batch, Loader};
use replay::Replay;
use take_over::check_numbers;

pub use options::{OpenMode, OpenOptions, OpenReport, Opened, PresentDevice};

/// Reads that are out at once while the trees are loaded.
const READS_OUT: usize = 4;
/// Pages of one read: 256 KiB.
const READ_PAGES: usize = 64;
/// Leaves that a pool which is one of many has from the start: 128 KiB of memory.
const FIRST_LEAVES: u32 = 32;

#[derive(Debug)]
enum Stage {
    Fence,
    /// A first read of the superblocks, at the front and at the end: whether the ring is this
    /// pool's. Nothing else is taken from it.
    Look,
    LookBack,
    Flush,
    /// Superblocks at the front of each device, then at the end.
    Front,
    Back,
    Trees,
    Log,
    /// The engine writes the superblock that was found to every copy that hasn't got it.
    Repair,
    /// The engine writes the superblock of this open, then commits the replayed changes.
    Super,
    Commit,
    Done,
}

/// The opening of a pool, stepped by the caller like the engine.
#[derive(Debug)]
pub struct Opening {
    options: OpenOptions,
    stage: Stage,
    queue: VecDeque<IoCommand>,
    out: Vec<(u64, Option<Batch>)>,
    next: u64,
    copies: Copies,
    found: Option<Found>,
    pool: Option<Arc<Pool>>,
    loader: Option<Loader>,
    replay: Option<Replay>,
    engine: Option<Engine>,
    report: OpenReport,
    failure: Option<MapperError>,
}

impl Opening {
    /// Checks the options. Nothing is read before [`Self::poll`].
    pub fn new(options: OpenOptions) -> Result<Self, MapperError> {
        let invalid = |field, value, allowed| Err(MapperError::Invalid { field, value, allowed });
        if !(1..=MAX_DEVICES).contains(&options.devices.len()) {
            return invalid("devices", options.devices.len() as u64, "1 to 16 devices");
        }
        if !(1..=MAX_WORKERS).contains(&options.tuning.workers) {
            return invalid("workers", options.tuning.workers as u64, "from 1 to 63");
        }
        if options.open_id == 0 {
            return invalid("open_id", 0, "random and not 0");
        }
        if options.tuning.quantum == 0 || options.tuning.commit_blocks == 0 {
            return invalid("quantum or commit_blocks", 0, "at least 1");
        }
        let mut opening = Self {
            options,
            stage: Stage::Fence,
            queue: VecDeque::new(),
            out: Vec::new(),
            next: 1,
            copies: Copies::default(),
            found: None,
            pool: None,
            loader: None,
            replay: None,
            engine: None,
            report: OpenReport::default(),
            failure: None,
        };
        if !active(Mutation::NoFence) {
            opening.on_every_device(|_| IoOp::Fence);
        }
        Ok(opening)
    }

    /// The next IO command.
    pub fn poll(&mut self) -> Option<IoCommand> {
        loop {
            if self.failure.is_some() {
                return None;
            }
            if let Some(command) = self.queue.pop_front() {
                return Some(command);
            }
            if let Some(command) = self.poll_engine() {
                return Some(command);
            }
            if !self.out.is_empty() || matches!(self.stage, Stage::Done) {
                return None;
            }
            match self.advance() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => self.failure = Some(error),
            }
        }
    }

    fn poll_engine(&mut self) -> Option<IoCommand> {
        let command = self.engine.as_mut()?.poll(0);
        command.filter(|_| matches!(self.stage, Stage::Repair | Stage::Super | Stage::Commit))
    }

    /// Takes a command back with its result.
    pub fn complete(&mut self, command: IoCommand, result: Result<(), IoError>) {
        if let Some(engine) = self.engine.as_mut() {
            engine.complete(command, result);
            if let Some(failure) = engine.pool().failure() {
                self.failure = Some(failure);
            }
            return;
        }
        let Some(at) = self.out.iter().position(|(id, _)| *id == command.id) else { return };
        let (_, batch) = self.out.swap_remove(at);
        if let Err(error) = result {
            if let (Some(loader), Some(batch)) = (&mut self.loader, &batch)
                && batch.is_labels()
            {
                return loader.unreadable(batch);
            }
            match self.go_on_without(&command, batch, error) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    self.failure.get_or_insert(error);
                    return;
                }
            }
            let (operation, device) = (command.op.name(), command.device.0);
            if matches!(command.op, IoOp::Flush)
                && let Some(memory) = &self.options.ring
                && !active(Mutation::RingAfterFailure)
            {
                // R8, before the ring is even read: the device may have dropped data that the ring
                // calls valid.
                crate::ring::poison_unreported(&**memory);
            }
            self.failure.get_or_insert(MapperError::Io { operation, device, error });
            return;
        }
        if let IoOp::Read { offset, buffer } = command.op
            && let Err(error) = self.took(command.device, offset, &buffer, batch)
        {
            self.failure.get_or_insert(error);
        }
    }

    /// Goes on behind a place that can't be read where what lies there is not needed: pages that
    /// were read at once are read one by one, and of the superblock another copy counts. False
    /// where it is needed.
    fn go_on_without(
        &mut self,
        command: &IoCommand,
        batch: Option<Batch>,
        error: IoError,
    ) -> Result<bool, MapperError> {
        let (IoOp::Read { offset, buffer }, IoError::Media) = (&command.op, error) else {
            return Ok(false);
        };
        let pages = buffer.pages().len();
        match (&self.stage, batch) {
            (Stage::Look | Stage::LookBack | Stage::Front | Stage::Back, _) if pages > 1 => {
                for at in (0..).take(pages) {
                    self.read(command.device, offset + at * PAGE_BYTES, 1, None)?;
                }
                Ok(true)
            }
            (Stage::Look | Stage::LookBack | Stage::Front | Stage::Back, _) => {
                self.copies.add_unreadable(command.device, error);
                Ok(true)
            }
            (Stage::Trees, Some(batch)) if pages > 1 => {
                for one in batch.singles() {
                    let at = offset + (one.first.0 - batch.first.0) * PAGE_BYTES;
                    self.read(command.device, at, 1, Some(one))?;
                }
                Ok(true)
            }
            (Stage::Log, _) => Ok(self.replay.as_mut().is_some_and(|log| log.unreadable(pages))),
            _ => Ok(false),
        }
    }

    /// Pages of labels that could not be read so far. Where an index page is among them, the
    /// superblock that this opening writes has no labels, even if the opening fails after that.
    #[must_use]
    pub const fn labels_lost(&self) -> u64 {
        self.report.labels_lost
    }

    /// Whether there is nothing left to do.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.failure.is_some() || matches!(self.stage, Stage::Done)
    }

    /// The pool, ready to serve.
    pub fn finish(self) -> Result<Opened, MapperError> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        match (self.stage, self.engine) {
            (Stage::Done, Some(engine)) => {
                let pool = Arc::clone(engine.pool());
                if pool.failure().is_none() {
                    pool.ring.unpoison();
                }
                pool.serving.store(true, Ordering::SeqCst);
                Ok(Opened { pool, engine, report: self.report })
            }
            _ => Err(MapperError::Internal("the pool is not open yet")),
        }
    }

    fn push(&mut self, device: DeviceIndex, op: IoOp, batch: Option<Batch>) {
        self.out.push((self.next, batch));
        self.queue.push_back(IoCommand { id: self.next, device, op });
        self.next += 1;
    }

    fn on_every_device(&mut self, op: impl Fn(usize) -> IoOp) {
        for index in 0..self.options.devices.len() {
            self.push(DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX)), op(index), None);
        }
    }

    fn read(
        &mut self,
        device: DeviceIndex,
        offset: u64,
        pages: usize,
        batch: Option<Batch>,
    ) -> Result<(), MapperError> {
        let buffer =
            IoBuffer::new(pages).ok_or(MapperError::Limit { what: "memory for IO", limit: 0 })?;
        self.push(device, IoOp::Read { offset, buffer }, batch);
        Ok(())
    }

    /// Processes a finished read.
    fn took(
        &mut self,
        device: DeviceIndex,
        offset: u64,
        buffer: &IoBuffer,
        batch: Option<Batch>,
    ) -> Result<(), MapperError> {
        match self.stage {
            Stage::Look | Stage::LookBack | Stage::Front | Stage::Back => {
                for (page, at) in buffer.pages().iter().zip(0..) {
                    self.copies.add(&page.0, device, offset + at * PAGE_BYTES);
                }
                Ok(())
            }
            Stage::Trees => match (&mut self.loader, &self.pool, batch) {
                (Some(loader), Some(pool), Some(batch)) => {
                    loader.read(pool, &batch, buffer.pages())
                }
                _ => Err(MapperError::Internal("a page without a request")),
            },
            Stage::Log => match &mut self.replay {
                Some(replay) => replay.took(device, offset, buffer.pages()),
                None => Err(MapperError::Internal("a block without a request")),
            },
            _ => Ok(()),
        }
    }

    /// All commands of a stage have ended; goes on. `false`: nothing to do before IO ends.
    fn advance(&mut self) -> Result<bool, MapperError> {
        match self.stage {
            Stage::Fence if self.options.mode == OpenMode::ReadOnly => self.stage = Stage::Flush,
            Stage::Fence => {
                self.stage = Stage::Look;
                self.read_front()?;
            }
            Stage::Look => {
                self.stage = Stage::LookBack;
                self.read_back()?;
            }
            Stage::LookBack => {
                self.refuse_other_ring()?;
                self.copies = Copies::default();
                self.stage = Stage::Flush;
                // R12: readable data may be in the device's cache only.
                if !active(Mutation::NoOpeningFlush) {
                    self.on_every_device(|_| IoOp::Flush);
                }
            }
            Stage::Flush => {
                self.stage = Stage::Front;
                self.read_front()?;
            }
            Stage::Front => {
                self.stage = Stage::Back;
                self.read_back()?;
            }
            Stage::Back => {
                self.begin_trees()?;
                self.stage = Stage::Trees;
            }
            Stage::Trees => return self.next_trees(),
            Stage::Log => return self.next_log(),
            Stage::Repair => return self.after_repair(),
            Stage::Super => return self.after_super(),
            Stage::Commit => return self.after_commit(),
            Stage::Done => return Ok(false),
        }
        Ok(true)
    }

    fn check_sizes(&self) -> Result<(), MapperError> {
        let smallest = 3 * u64::from(*EXTENT_SIZE_RANGE.start());
        match self.options.devices.iter().find(|d| d.size < smallest) {
            Some(device) => Err(MapperError::Device {
                name: device.name.clone(),
                problem: format!("has {} bytes: too small to hold a pool", device.size),
            }),
            None => Ok(()),
        }
    }

    fn read_front(&mut self) -> Result<(), MapperError> {
        self.check_sizes()?;
        for index in 0..self.options.devices.len() {
            let device = DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX));
            self.read(device, 0, 2, None)?;
        }
        Ok(())
    }

    fn read_back(&mut self) -> Result<(), MapperError> {
        for index in 0..self.options.devices.len() {
            let device = DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX));
            for offset in self.copies.back_offsets(index, self.options.devices[index].size) {
                self.read(device, offset, 2, None)?;
            }
        }
        Ok(())
    }

    fn begin_trees(&mut self) -> Result<(), MapperError> {
        let found = self.copies.choose(&self.options.devices)?;
        let superblock = &found.superblock;
        if superblock.unknown_ro_compat() != 0 && self.options.mode == OpenMode::ReadWrite {
            return Err(MapperError::Unsupported { features: superblock.unknown_ro_compat() });
        }
        check_numbers(superblock)?;
        self.report.was_clean = superblock.clean;
        let ring = self.take_ring(superblock)?;
        let tuning = self.options.tuning.clone();
        let arena = Arena::new(tuning.max_leaves);
        let pool = Pool::assemble(PoolParts {
            pool_id: superblock.pool_id,
            geometry: Geometry::new(superblock.extent_size)?,
            arena: if tuning.sparing { arena.with_first_block(FIRST_LEAVES) } else { arena },
            tuning,
            handles: found.handles,
            ring,
            next_lsn: Lsn(superblock.checkpoint_lsn.0 + 1),
            read_only: self.options.mode == OpenMode::ReadOnly,
            composite: superblock.incompat & COMPOSITE != 0,
        });
        *pool.free_space.lock() = FreeSpace::of(&superblock.devices)?;
        for (index, record) in superblock.devices.present() {
            crate::engine::grow::note_mark(&pool, index, record);
        }
        pool.progress.0.durable.store(superblock.checkpoint_lsn.0, Ordering::SeqCst);
        self.loader = Some(Loader::new(&pool, superblock)?);
        self.pool = Some(Arc::new(pool));
        self.found = Some(found);
        Ok(())
    }

    fn next_trees(&mut self) -> Result<bool, MapperError> {
        let (Some(pool), Some(loader)) = (self.pool.clone(), self.loader.as_mut()) else {
            return Err(MapperError::Internal("no pool to load"));
        };
        let mut batches = Vec::new();
        while batches.len() < READS_OUT
            && let Some(batch) = loader.next_batch(&pool, READ_PAGES)
        {
            batches.push(batch);
        }
        if batches.is_empty() && loader.begin_labels(&pool) {
            return Ok(true);
        }
        if batches.is_empty() {
            self.begin_log(&pool)?;
            return Ok(true);
        }
        for batch in batches {
            let (extent, page) = pool.geometry.page_place(batch.first);
            let (device, base) = pool.place(extent);
            self.read(device, base + page * PAGE_BYTES, batch.pages(), Some(batch))?;
        }
        Ok(true)
    }

    fn begin_log(&mut self, pool: &Arc<Pool>) -> Result<(), MapperError> {
        let (Some(mut loader), Some(found)) = (self.loader.take(), &self.found) else {
            return Err(MapperError::Internal("no trees to replay into"));
        };
        let mut superblock = found.superblock.clone();
        if loader.drop_cut_off(pool) {
            // The bit stays until the next checkpoint: copies of one generation may differ in the
            // root only.
            superblock.labels_root = PageRef::NONE;
        }
        self.report.labels_lost = loader.labels_lost;
        let engine = make_engine(pool, loader, &superblock)?;
        self.replay = Some(Replay::new(engine, &superblock)?);
        self.stage = Stage::Log;
        Ok(())
    }

    fn next_log(&mut self) -> Result<bool, MapperError> {
        let Some(replay) = self.replay.as_mut() else {
            return Err(MapperError::Internal("no log to replay"));
        };
        if let Some((device, offset, pages)) = replay.next_read()? {
            self.read(device, offset, pages, None)?;
            return Ok(true);
        }
        let Some(replay) = self.replay.take() else { return Ok(false) };
        let engine = replay.finish(&mut self.report)?;
        let newest = engine.superblock.generation;
        let copies = self.copies.good.iter().filter(|(_, copy)| copy.generation == newest);
        let uneven = copies.count() < 4 * engine.superblock.devices.present().count();
        if uneven && self.options.mode == OpenMode::ReadWrite {
            self.begin_repair(engine);
        } else {
            self.begin_super(engine);
        }
        Ok(true)
    }
}

/// The engine over the loaded trees; replay goes on into it.
fn make_engine(
    pool: &Arc<Pool>,
    loader: Loader,
    superblock: &Superblock,
) -> Result<Engine, MapperError> {
    let Loader { catalogue, trees, pages, labels, lost_pages, .. } = loader;
    note_fixed(pool, superblock, &pages)?;
    for volume in pool.volumes.read().values() {
        volume.set_totals(crate::change::totals_of(&pool.arena, &volume.directory.load()));
    }
    let wal = Wal {
        start: superblock.wal_start,
        blocks: superblock.wal_blocks(),
        next: superblock.wal_tail_sequence,
        last_sum: superblock.wal_tail_hash,
        tail: superblock.wal_tail_sequence,
    };
    let parts = EngineParts {
        pool: Arc::clone(pool),
        wal,
        superblock: superblock.clone(),
        pages,
        catalogue,
        trees,
        labels,
        lost_pages,
    };
    Engine::new(parts)
}

/// Marks areas that belong to no volume as used. An extent of a volume cannot be metadata.
fn note_fixed(pool: &Pool, superblock: &Superblock, pages: &PageSpace) -> Result<(), MapperError> {
    let mut space = pool.free_space.lock();
    let fixed = crate::engine::info::fixed_extents(superblock);
    for extent in fixed.into_iter().chain(pages.extents()) {
        if !space.mark_used(extent) {
            return Err(MapperError::Internal("an extent holds both metadata and data"));
        }
    }
    Ok(())
}
