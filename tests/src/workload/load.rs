//! Verified load on a block device: threads that write, read, trim, zero and flush it, and
//! compare every sector with a model.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use blockd_testkit::clock::Clock;
use blockd_testkit::nbd::{Kind, Request};

use super::device::{Buffer, Device};
use super::ledger::Ledger;
use crate::kill::content::SECTOR;
use crate::kill::volume::{Unanswered, Volume};

/// Bytes compared at a time.
const PIECE: u64 = 1 << 20;

/// The work done, over all threads.
#[derive(Debug, Default)]
pub struct Counts {
    pub operations: AtomicU64,
    pub flushes: AtomicU64,
    /// Milliseconds of the request that took longest.
    pub slowest: AtomicU64,
}

/// A device under load.
#[derive(Debug)]
pub struct Load {
    threads: Vec<JoinHandle<Result<()>>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: Device,
    volume: Arc<Mutex<Volume>>,
    /// Where it is written down what was asked and answered, if the machine itself is to die.
    ledger: Option<Arc<Ledger>>,
    counts: Arc<Counts>,
    stop: AtomicBool,
}

impl Load {
    /// Starts threads with one request each under way.
    ///
    /// # Errors
    /// When the device can't be opened.
    pub fn start(
        path: &Path,
        volume: &Arc<Mutex<Volume>>,
        ledger: Option<&Arc<Ledger>>,
        counts: &Arc<Counts>,
        seeds: &[u64],
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            device: Device::open(path)?,
            volume: Arc::clone(volume),
            ledger: ledger.map(Arc::clone),
            counts: Arc::clone(counts),
            stop: AtomicBool::new(false),
        });
        let thread = |&seed: &u64| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let result = shared.work(fastrand::Rng::with_seed(seed));
                // The first thing that is wrong ends all of it.
                shared.stop.fetch_or(result.is_err(), Ordering::Relaxed);
                result
            })
        };
        Ok(Self { threads: seeds.iter().map(thread).collect(), shared })
    }

    /// Whether a thread found something wrong.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }

    /// No further requests; waits for those under way.
    ///
    /// # Errors
    /// When one failed, or read something else than was written last.
    pub fn stop(self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            match thread.join() {
                Ok(result) => result?,
                Err(_) => bail!("a thread of the load panicked"),
            }
        }
        Ok(())
    }
}

impl Shared {
    fn work(&self, mut rng: fastrand::Rng) -> Result<()> {
        let mut buffer = Buffer::default();
        while !self.stop.load(Ordering::Relaxed) {
            let next = lock(&self.volume).begin(draw(&mut rng), &mut rng);
            let Some((request, data)) = next else {
                std::thread::yield_now();
                continue;
            };
            buffer.of(data.len()).copy_from_slice(&data);
            if let Some(ledger) = &self.ledger {
                let generation = lock(&self.volume).generation_of(request.cookie);
                if !ledger.begins(&request, generation)? {
                    // Full: what was begun is not done, and nothing else is.
                    return Ok(());
                }
            }
            let start = Clock::start();
            self.device.ask(&request, &mut buffer)?;
            let took = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.answered(&request, &buffer)?;
            self.counts.slowest.fetch_max(took, Ordering::Relaxed);
        }
        Ok(())
    }

    fn answered(&self, request: &Request, buffer: &Buffer) -> Result<()> {
        if let Some(ledger) = &self.ledger {
            ledger.done(request)?;
        }
        let data = if request.kind == Kind::Read { buffer.bytes() } else { &[] };
        lock(&self.volume).answered(request.cookie, data)?;
        self.counts.operations.fetch_add(1, Ordering::Relaxed);
        self.counts.flushes.fetch_add(u64::from(request.kind == Kind::Flush), Ordering::Relaxed);
        Ok(())
    }
}

/// A discard starts a program of its own, and so is seldom.
fn draw(rng: &mut fastrand::Rng) -> Kind {
    match rng.u16(..1000) {
        0..600 => Kind::Write,
        600..850 => Kind::Read,
        850..920 => Kind::Flush,
        920..930 => Kind::Trim,
        _ => Kind::WriteZeroes,
    }
}

/// Reads the whole device and compares it with its model; nothing is under way.
///
/// # Errors
/// When something else is there, or reading fails.
pub fn compare(path: &Path, volume: &Mutex<Volume>) -> Result<()> {
    let mut volume = lock(volume);
    let mut unanswered = Unanswered::default();
    pieces(path, |offset, data| {
        volume.recovered(offset / SECTOR as u64, data, &mut unanswered).map_err(Into::into)
    })
}

/// Reads the whole device, piece by piece.
///
/// # Errors
/// When reading fails, or the caller does.
pub fn pieces(path: &Path, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
    let device = Device::open(path)?;
    let mut buffer = Buffer::default();
    let mut offset = 0;
    while offset < device.size {
        let len = u32::try_from(PIECE.min(device.size - offset))?;
        let read = Request { kind: Kind::Read, flags: 0, cookie: 0, offset, len };
        device.ask(&read, &mut buffer)?;
        take(offset, buffer.bytes()).with_context(|| format!("at {offset}"))?;
        offset += u64::from(len);
    }
    Ok(())
}

/// The model. A thread that found an error has already reported it, hence no poison.
pub fn lock(volume: &Mutex<Volume>) -> MutexGuard<'_, Volume> {
    volume.lock().unwrap_or_else(PoisonError::into_inner)
}
