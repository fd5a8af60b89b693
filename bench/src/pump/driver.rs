//! An open pool on one ring: the engine's IO, the owner lock, and commands to the pool.

use std::fs::{File, TryLockError};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockd_mapper::create::Creating;
use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenReport, Opening};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::ring::VecRingMemory;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Worker;
use blockd_testkit::clock::Clock;

use crate::alloc_count::allocations;
use crate::pool_options;
use crate::ring::{Ended, Ring};

/// Records of the delta ring per slot: 4 MiB. A commit begins when half are in use, so this sets
/// how many first writes share a commit without a flush request.
const RING_RECORDS: u64 = 1 << 16;

/// How often the owner lock is tried, and how long it is waited for in between: a former owner has
/// 5 seconds after its signal.
const LOCK_TRIES: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// The counts of the engine so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineCounts {
    /// Nanoseconds in [`Engine::poll`] and [`Engine::complete`].
    pub ns: u64,
    /// Heap allocations there.
    pub allocations: u64,
    /// Flushes of the device.
    pub flushes: u64,
    /// Writes of the log.
    pub log_writes: u64,
    /// Blocks of 4 KiB in them.
    pub log_blocks: u64,
    /// Writes of checkpoints and superblocks.
    pub map_writes: u64,
}

/// A pool that one thread drives on one ring.
#[derive(Debug)]
pub struct Driver {
    /// The ring, for the workload's own IO.
    pub ring: Ring,
    /// The clock that the engine sees.
    pub clock: Clock,
    /// For the pool's state.
    pub pool: Arc<Pool>,
    /// The data path.
    pub worker: Worker,
    /// The counts of the engine.
    pub counts: EngineCounts,
    engine: Engine,
    /// A command of the engine has ended since it was polled last.
    engine_io: bool,
    deadline: Option<u64>,
}

/// Makes a pool of the first `size` bytes of the ring's file.
pub fn create(ring: &mut Ring, name: &str, size: u64) -> Result<()> {
    let mut creating = Creating::new(&pool_options::create(name, size))?;
    run(ring, &mut creating)?;
    creating.finish().context("making the pool")
}

impl Driver {
    /// Opens the pool on the ring's file.
    pub fn open(mut ring: Ring, name: &str, size: u64) -> Result<(Self, OpenReport)> {
        let memory = Arc::new(VecRingMemory::new(2, RING_RECORDS));
        let options = pool_options::open(name, size, Some(memory), Tuning::default());
        let mut opening = Opening::new(options)?;
        run(&mut ring, &mut opening)?;
        let opened = opening.finish().context("opening the pool")?;
        let driver = Self {
            ring,
            clock: Clock::start(),
            worker: opened.pool.worker()?,
            pool: opened.pool,
            counts: EngineCounts::default(),
            engine: opened.engine,
            engine_io: true,
            deadline: None,
        };
        Ok((driver, opened.report))
    }

    /// Closes the pool and gives the ring back.
    pub fn close(mut self) -> Result<Ring> {
        match self.control(Control::Close)? {
            Outcome::Closed => Ok(self.ring),
            other => bail!("closing the pool: {other:?}"),
        }
    }

    /// A new volume.
    pub fn create_volume(&mut self, name: &str, size: u64) -> Result<VolumeId> {
        let control = Control::Create { name: name.to_owned(), size, block_size: 4096 };
        match self.control(control)? {
            Outcome::Created(id) => Ok(id),
            other => bail!("creating a volume: {other:?}"),
        }
    }

    /// Carries a command out. No request is in flight.
    pub fn control(&mut self, control: Control) -> Result<Outcome> {
        let id = self.engine.submit(control);
        let started = self.clock.seconds();
        loop {
            self.poll_engine()?;
            if let Some((ended, outcome)) = self.engine.take_outcome() {
                debug_assert_eq!(ended, id, "one command at a time");
                return Ok(outcome?);
            }
            self.ring.submit(1)?;
            while let Some(ended) = self.ring.reap() {
                match ended {
                    Ended::Command(command, result) => self.command_ended(command, result)?,
                    Ended::Slot(slot, _) => bail!("slot {slot} was in flight during a command"),
                }
            }
            if self.clock.seconds() - started > 60.0 {
                bail!("a command to the pool has not ended in a minute");
            }
        }
    }

    /// Polls the engine if there is a reason to.
    pub fn step_engine(&mut self) -> Result<()> {
        let wanted = self.pool.engine_wanted();
        if wanted || self.engine_io || self.deadline.is_some_and(|at| at <= self.clock.ns()) {
            self.poll_engine()?;
        }
        Ok(())
    }

    /// Takes back a command that has ended.
    pub fn command_ended(&mut self, command: IoCommand, result: std::io::Result<()>) -> Result<()> {
        self.engine_io = true;
        let name = command.op.name();
        let (from, before) = (self.clock.ns(), allocations());
        self.engine.complete(command, result.as_ref().copied().map_err(|_| IoError::Media));
        self.counts.ns += self.clock.ns() - from;
        self.counts.allocations += allocations() - before;
        result.with_context(|| format!("{name} of the engine"))
    }

    fn poll_engine(&mut self) -> Result<()> {
        self.engine_io = false;
        loop {
            let (from, before) = (self.clock.ns(), allocations());
            let command = self.engine.poll(from);
            self.counts.ns += self.clock.ns() - from;
            self.counts.allocations += allocations() - before;
            let Some(command) = command else { break };
            self.count(&command);
            match command.op {
                // Already locked at opening; freed space is left as it is.
                IoOp::Fence | IoOp::Discard { .. } => self.command_ended(command, Ok(()))?,
                _ => self.ring.start_command(command)?,
            }
        }
        self.deadline = self.engine.next_deadline();
        Ok(())
    }

    fn count(&mut self, command: &IoCommand) {
        match &command.op {
            IoOp::Flush => self.counts.flushes += 1,
            // The log alone is written with FUA.
            IoOp::Write { buffer, fua: true, .. } => {
                self.counts.log_writes += 1;
                self.counts.log_blocks += buffer.pages().len() as u64;
            }
            IoOp::Write { .. } => self.counts.map_writes += 1,
            _ => {}
        }
    }
}

/// An object that is stepped until it has no more work.
trait Stepped {
    fn poll(&mut self) -> Option<IoCommand>;
    fn complete(&mut self, command: IoCommand, result: Result<(), IoError>);
}

impl Stepped for Creating {
    fn poll(&mut self) -> Option<IoCommand> {
        Self::poll(self)
    }
    fn complete(&mut self, command: IoCommand, result: Result<(), IoError>) {
        Self::complete(self, command, result);
    }
}

impl Stepped for Opening {
    fn poll(&mut self) -> Option<IoCommand> {
        Self::poll(self)
    }
    fn complete(&mut self, command: IoCommand, result: Result<(), IoError>) {
        Self::complete(self, command, result);
    }
}

fn run(ring: &mut Ring, stepped: &mut impl Stepped) -> Result<()> {
    loop {
        while let Some(command) = stepped.poll() {
            match command.op {
                IoOp::Fence => {
                    lock(ring.file())?;
                    stepped.complete(command, Ok(()));
                }
                IoOp::Discard { .. } => stepped.complete(command, Ok(())),
                _ => ring.start_command(command)?,
            }
        }
        if ring.in_flight() == 0 {
            return Ok(());
        }
        ring.submit(1)?;
        while let Some(ended) = ring.reap() {
            if let Ended::Command(command, result) = ended {
                stepped.complete(command, result.map_err(|_| IoError::Media));
            }
        }
    }
}

/// Holds the owner lock on the open file description that does the IO: the kernel keeps that
/// description, and so the lock, until the last operation of the ring has ended. Once the lock is
/// acquired, every IO of the former owner has therefore ended.
fn lock(file: &File) -> Result<()> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(error).context("lock the device"),
        }
    }
    bail!("the device has another owner, which did not release it within 5 seconds")
}
