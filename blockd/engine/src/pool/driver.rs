//! IO of a pool that has no thread yet.

use std::sync::Arc;
use std::time::Duration;

use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenOptions, Opened, Opening};
use blockd_media::clock::Clock;
use blockd_media::pool::PoolError;
use blockd_media::{Device, io_error};

use super::lock::{LOCK_PAUSE, lock};
use crate::backing::{Ended, FileSlot, Ring, RingOptions};

/// Operations of a pool's thread that can be out at once: the engine has fewer.
const OPERATIONS: u32 = 256;

/// A device and its place in a ring.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) device: Arc<Device>,
    pub(super) slot: FileSlot,
}

pub(super) fn new_ring() -> Result<Ring, PoolError> {
    let options = RingOptions { operations: OPERATIONS, arena_bytes: 0, serves: false };
    Ring::new(options).map_err(PoolError::io("set up io_uring for", "the pool"))
}

pub(super) fn serve(ring: &mut Ring, devices: &[Arc<Device>]) -> Result<Vec<Served>, PoolError> {
    let mut served = Vec::new();
    for device in devices {
        let slot = ring.add_device(device);
        let slot = slot.map_err(PoolError::io("register", &device.info().path))?;
        served.push(Served { device: Arc::clone(device), slot });
    }
    Ok(served)
}

type Answered = Vec<(IoCommand, Result<(), IoError>)>;

/// Does the IO of a pool that is being made or opened.
pub(super) struct Driver<'a> {
    pub(super) ring: &'a mut Ring,
    pub(super) served: &'a [Served],
    pub(super) lock_wait: Duration,
}

impl Driver<'_> {
    /// Begins a command; gives it back if it has ended at once.
    pub(super) fn begin(&mut self, mut command: IoCommand) -> Result<Answered, PoolError> {
        let Some(one) = self.served.get(usize::from(command.device.0)) else {
            return Err(MapperError::Internal("a command names no device").into());
        };
        if matches!(command.op, IoOp::Fence) {
            lock(&one.device, self.lock_wait)?;
            return Ok(vec![(command, Ok(()))]);
        }
        let writes = matches!(command.op, IoOp::Write { .. });
        // The claim is renewed meanwhile.
        let clock = Clock::start();
        while writes && !one.device.may_write() && clock.elapsed() < self.lock_wait {
            if one.device.gate().is_some_and(|gate| gate.has_ended()) {
                break;
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let started = match at_once(&one.device, &mut command.op) {
            Begun::Ended(result) => return Ok(vec![(command, result)]),
            Begun::Synced => self.ring.sync_command(one.slot, command),
            Begun::NotYet => self.ring.command(one.slot, command),
        };
        match started {
            Ok(()) => Ok(Vec::new()),
            Err(command) => Ok(vec![(command, Err(IoError::Media))]),
        }
    }

    /// Waits until something has ended.
    pub(super) fn wait(&mut self) -> Result<Answered, PoolError> {
        self.ring.enter(1).map_err(PoolError::io("wait for", "the pool's IO"))?;
        let mut ended = Vec::new();
        while let Some(one) = self.ring.reap() {
            if let Ended::Command(command, result) = one {
                if let Err(error) = &result {
                    tracing::error!(operation = command.op.name(), %error, "IO of the pool failed");
                }
                ended.push((command, result.map_err(|error| io_error(&error))));
            }
        }
        Ok(ended)
    }
}

/// Opens a pool, step by step.
pub(super) fn opened(driver: &mut Driver<'_>, options: OpenOptions) -> Result<Opened, PoolError> {
    let mut opening = Opening::new(options)?;
    loop {
        while let Some(command) = opening.poll() {
            driver.begin(command)?.into_iter().for_each(|(c, r)| opening.complete(c, r));
        }
        if opening.is_done() {
            return Ok(opening.finish()?);
        }
        driver.wait()?.into_iter().for_each(|(c, r)| opening.complete(c, r));
    }
}

/// How far a command is that was begun without the ring.
pub(super) enum Begun {
    /// The command has ended.
    Ended(Result<(), IoError>),
    /// The data is written, and is durable after a sync.
    Synced,
    /// The ring has to do it, or the thread that waits for discards.
    NotYet,
}

/// Executes operations that need no ring at once: all those on a device in memory. Nothing that is
/// written here needs a lane: a reference to it has its checksum, and is written later or twice.
pub(super) fn at_once(device: &Device, op: &mut IoOp) -> Begun {
    let Some(memory) = device.memory() else { return Begun::NotYet };
    Begun::Ended(match op {
        IoOp::Fence => Ok(()),
        IoOp::Flush if memory.needs_sync() => return Begun::NotYet,
        IoOp::Flush => Ok(()),
        IoOp::Read { offset, buffer } => memory.read(*offset, buffer.as_bytes_mut()),
        IoOp::Write { offset, buffer, fua } => {
            let written = memory.write(0, *offset, buffer.as_bytes(), true);
            memory.fence();
            if written.is_ok() && *fua && memory.needs_sync() {
                return Begun::Synced;
            }
            written
        }
        IoOp::Discard { .. } if device.pmem().is_some() => return Begun::NotYet,
        IoOp::Discard { offset, len } => device.discard(*offset, *len),
    })
}
