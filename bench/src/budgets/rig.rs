//! A pool whose metadata is real and whose data is not: the mapper's writes go to a sparse file,
//! requests are planned and completed and never done. So terabytes fit into any machine.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockd_mapper::create::{CreateOptions, Creating};
use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenReport, Opening};
use blockd_mapper::plan::{Answer, Plan, Step};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::ring::VecRingMemory;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};
use blockd_testkit::clock::Clock;

use crate::alloc_count::allocations;
use crate::cpu::thread_cpu;
use crate::pool_options;

/// Bytes of every request here.
pub const BLOCK: u64 = 4096;
/// Bytes of an extent.
pub const EXTENT: u64 = blockd_mapper::geometry::DEFAULT_EXTENT_SIZE as u64;
/// Bytes of a tebibyte.
pub const TIB: u64 = 1 << 40;

/// Records of the delta ring per slot.
const RING_RECORDS: u64 = 1 << 14;

/// The sparse file, and the counts of its operations.
#[derive(Debug)]
pub struct Media {
    file: File,
    size: u64,
    /// Flushes, of the engine and of workers.
    pub flushes: u64,
    /// Writes.
    pub writes: u64,
    /// Blocks of the writes that were made with FUA: those of the log.
    pub log_blocks: u64,
    /// Reads, and discards, of which the engine needs none once the pool is open.
    pub reads: u64,
    /// Discards of freed extents.
    pub discards: u64,
    /// Flushes and FUA are carried out, as on a disk that matters.
    pub durable: bool,
}

impl Media {
    /// A sparse file of `size` bytes; one that is there is emptied first.
    pub fn create(path: &Path, size: u64) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path);
        let file = file.with_context(|| format!("create {}", path.display()))?;
        file.set_len(size).with_context(|| format!("{} bytes, sparse", size))?;
        Self::of(file)
    }

    /// The file as a former process left it.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Self::of(file)
    }

    fn of(file: File) -> Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self {
            file,
            size,
            flushes: 0,
            writes: 0,
            log_blocks: 0,
            reads: 0,
            discards: 0,
            durable: false,
        })
    }

    /// From now on without the page cache, and as on a disk that matters. False where the file
    /// system has no such way: then through the cache.
    pub fn become_durable(&mut self, path: &Path) -> Result<bool> {
        self.durable = true;
        self.file.sync_all()?;
        let mut options = OpenOptions::new();
        match options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => self.file = file,
            Err(_) => return Ok(false),
        }
        Ok(true)
    }

    /// Another handle of the file as it is.
    pub fn handle(&self) -> Result<File> {
        Ok(self.file.try_clone()?)
    }

    fn run(&mut self, op: &mut IoOp, sparse: bool) -> std::io::Result<()> {
        match op {
            IoOp::Fence => Ok(()),
            IoOp::Discard { .. } => {
                self.discards += 1;
                Ok(())
            }
            IoOp::Flush => {
                self.flushes += 1;
                if self.durable { self.file.sync_data() } else { Ok(()) }
            }
            IoOp::Read { offset, buffer } => {
                self.reads += 1;
                self.file.read_exact_at(buffer.as_bytes_mut(), *offset)
            }
            IoOp::Write { offset, buffer, fua } => {
                self.writes += 1;
                self.log_blocks += if *fua { buffer.pages().len() as u64 } else { 0 };
                if sparse && buffer.as_bytes().iter().all(|byte| *byte == 0) {
                    return Ok(());
                }
                self.file.write_all_at(buffer.as_bytes(), *offset)?;
                if self.durable && *fua { self.file.sync_data() } else { Ok(()) }
            }
        }
    }
}

/// An open pool with one worker.
#[derive(Debug)]
pub struct Rig {
    /// The media.
    pub media: Media,
    /// The pool.
    pub pool: Arc<Pool>,
    /// Its worker.
    pub worker: Worker,
    /// One plan, used again and again.
    pub plan: Plan,
    /// The report of its opening.
    pub report: OpenReport,
    /// CPU time that opening took in the mapper, and with the media's share.
    pub open_cpu: [Duration; 2],
    /// Heap allocations of the engine.
    pub engine_allocations: u64,
    engine: Engine,
}

/// A command that was timed.
#[derive(Clone, PartialEq, Debug)]
pub struct Timed {
    /// The outcome.
    pub outcome: Outcome,
    /// From its sending to its answer, IO included.
    pub ns: u64,
    /// The longest step of the engine meanwhile. Writes are stopped within one step when none is
    /// in flight, so they were stopped for no longer.
    pub longest_step_ns: u64,
    /// CPU time, that of the media included.
    pub cpu: Duration,
}

/// A command that takes longer has a fault.
const PATIENCE_SECONDS: f64 = 60.0;

const NAME: &str = "bench";

impl Rig {
    /// A new pool. The log has its default size unless one is given.
    pub fn create(media: Media, wal_size: Option<u64>) -> Result<Self> {
        Self::create_for(media, wal_size, 1)
    }

    /// The same for more workers than its own.
    pub fn create_for(mut media: Media, wal_size: Option<u64>, workers: usize) -> Result<Self> {
        let options = CreateOptions { wal_size, ..pool_options::create(NAME, media.size) };
        let mut creating = Creating::new(&options)?;
        while let Some(mut command) = creating.poll() {
            // The new file is zero already where zeroes are written.
            let result = media.run(&mut command.op, true);
            creating.complete(command, result.map_err(|_| IoError::Media));
        }
        creating.finish()?;
        Self::open_for(media, workers)
    }

    /// Opens a pool that is there.
    pub fn open(media: Media) -> Result<Self> {
        Self::open_for(media, 1)
    }

    fn open_for(mut media: Media, workers: usize) -> Result<Self> {
        let memory = Arc::new(VecRingMemory::new(workers + 1, RING_RECORDS));
        let mut options = pool_options::open(NAME, media.size, Some(memory), Tuning::default());
        options.tuning.workers = workers;
        let (start, mut in_media) = (thread_cpu()?, Duration::ZERO);
        let mut opening = Opening::new(options)?;
        while let Some(mut command) = opening.poll() {
            let before = thread_cpu()?;
            let result = media.run(&mut command.op, false);
            in_media += thread_cpu()?.saturating_sub(before);
            opening.complete(command, result.map_err(|_| IoError::Media));
        }
        let opened = opening.finish()?;
        let all = thread_cpu()?.saturating_sub(start);
        Ok(Self {
            open_cpu: [all.saturating_sub(in_media), all],
            media,
            worker: opened.pool.worker()?,
            pool: opened.pool,
            plan: Plan::with_capacity(Plan::MIN_OPS),
            report: opened.report,
            engine_allocations: 0,
            engine: opened.engine,
        })
    }

    /// Polls the engine until it has no more work. Its clock is stopped, so no timer expires.
    pub fn settle(&mut self) -> Result<()> {
        let before = allocations();
        loop {
            let mut did = false;
            while let Some(mut command) = self.engine.poll(1) {
                did = true;
                let result = self.media.run(&mut command.op, false);
                self.complete(command, result)?;
            }
            if !did && !self.pool.engine_wanted() {
                break;
            }
        }
        self.engine_allocations += allocations() - before;
        Ok(())
    }

    /// The work of a front-end after each request.
    #[inline]
    pub fn settle_if_wanted(&mut self) -> Result<()> {
        if self.pool.engine_wanted() { self.settle() } else { Ok(()) }
    }

    /// The pool's engine, to ask.
    #[must_use]
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Carries a command out and times it.
    pub fn timed(&mut self, control: Control) -> Result<Timed> {
        let (clock, cpu) = (Clock::start(), thread_cpu()?);
        self.engine.submit(control);
        let mut longest = 0;
        while clock.seconds() < PATIENCE_SECONDS {
            loop {
                let from = clock.ns();
                let command = self.engine.poll(1);
                longest = longest.max(clock.ns() - from);
                let Some(mut command) = command else { break };
                let result = self.media.run(&mut command.op, false);
                self.complete(command, result)?;
            }
            if let Some((_, outcome)) = self.engine.take_outcome() {
                let (ns, cpu) = (clock.ns(), thread_cpu()?.saturating_sub(cpu));
                return Ok(Timed { outcome: outcome?, ns, longest_step_ns: longest, cpu });
            }
        }
        bail!("a command to the pool does not end")
    }

    /// Reclaims everything that is no longer referenced, and makes that durable.
    pub fn release(&mut self) -> Result<()> {
        for _ in 0..1_000_000 {
            self.settle()?;
            if self.engine.releasing().is_empty() && self.engine.space().pending == 0 {
                return Ok(());
            }
        }
        bail!("a deleted volume's extents don't come free")
    }

    /// A new volume, attached.
    pub fn volume(&mut self, name: &str, size: u64) -> Result<Attachment> {
        let control = Control::Create { name: name.to_owned(), size, block_size: 4096 };
        match self.control(control)? {
            Outcome::Created(id) => Ok(self.worker.attach(id)?),
            other => bail!("creating a volume: {other:?}"),
        }
    }

    /// The first volume of a pool that was opened.
    pub fn first_volume(&mut self) -> Result<Attachment> {
        Ok(self.worker.attach(VolumeId(1))?)
    }

    /// Carries a command out.
    pub fn control(&mut self, control: Control) -> Result<Outcome> {
        self.engine.submit(control);
        for _ in 0..1000 {
            self.settle()?;
            if let Some((_, outcome)) = self.engine.take_outcome() {
                return Ok(outcome?);
            }
        }
        bail!("a command to the pool does not end")
    }

    /// Writes a block, without its data.
    #[inline]
    pub fn write(&mut self, volume: &Attachment, offset: u64) -> Result<()> {
        loop {
            match self.worker.write(volume, offset, BLOCK, false, &mut self.plan)? {
                Step::Issue { .. } => break,
                Step::Park(_) => self.settle()?,
                other => bail!("a write ended with {other:?}"),
            }
        }
        match self.worker.complete(volume, &mut self.plan, Ok(()))? {
            Answer::Done => self.settle_if_wanted(),
            Answer::Wait(_) => bail!("a write without FUA waits for a commit"),
        }
    }

    /// Reads a block; gives the place it was planned to be read from.
    #[inline]
    pub fn read(&mut self, volume: &Attachment, offset: u64) -> Result<u64> {
        self.worker.read(volume, offset, BLOCK, &mut self.plan)?;
        let place = self.plan.ops().first().map_or(0, |op| op.offset);
        self.worker.complete(volume, &mut self.plan, Ok(()))?;
        Ok(place)
    }

    /// A flush, with everything that it needs.
    pub fn flush(&mut self, volume: &Attachment) -> Result<()> {
        match self.worker.flush(volume, &mut self.plan)? {
            Step::Issue { .. } => {
                self.media.flushes += self.plan.ops().len() as u64;
                self.worker.complete(volume, &mut self.plan, Ok(()))?;
                Ok(())
            }
            Step::Wait(ticket) => {
                for _ in 0..1000 {
                    self.settle()?;
                    if let Some(result) = self.pool.commit_state(&ticket) {
                        return Ok(result?);
                    }
                }
                bail!("a commit does not end")
            }
            Step::Done { .. } => Ok(()),
            Step::Park(reason) => bail!("a flush parked: {reason:?}"),
        }
    }

    /// Leaves the pool clean.
    pub fn close(mut self, volume: Attachment) -> Result<Media> {
        self.worker.detach(volume);
        match self.control(Control::Close)? {
            Outcome::Closed => Ok(self.media),
            other => bail!("closing: {other:?}"),
        }
    }

    fn complete(&mut self, command: IoCommand, result: std::io::Result<()>) -> Result<()> {
        self.engine.complete(command, result.as_ref().copied().map_err(|_| IoError::Media));
        result.context("the sparse file")
    }
}

/// Numbers below a power of two in random order, each once.
#[must_use]
pub fn shuffled(count: u64, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut order);
    order
}

/// A well-mixed function of its argument.
#[must_use]
#[inline]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    value ^ (value >> 29)
}
