//! Verified load: connections that keep requests under way until the server is gone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::nbd::{Connection, Kind, Request};

use super::content::SECTOR;
use super::volume::{Unanswered, Volume, Wrong};

/// How many bytes of a volume are compared at a time.
const PIECE: u64 = 1 << 20;

/// The error of requests to a server that is shutting down: `NBD_ESHUTDOWN`.
const SHUTTING_DOWN: u32 = 108;

/// A volume that several connections write to.
#[derive(Debug)]
pub struct Shared {
    volume: Mutex<Volume>,
    answered: Condvar,
}

impl Shared {
    /// Shares a volume.
    #[must_use]
    pub fn new(volume: Volume) -> Arc<Self> {
        Arc::new(Self { volume: Mutex::new(volume), answered: Condvar::new() })
    }

    /// The model. A thread that found an error has already reported it, hence no poison.
    pub fn volume(&self) -> MutexGuard<'_, Volume> {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counters over all connections.
#[derive(Debug, Default)]
pub struct Counts {
    pub answered: AtomicU64,
    pub flushes: AtomicU64,
    pub bytes: AtomicU64,
    /// Connections of which the server answered with an error while it ended.
    pub turned_away: AtomicU64,
}

/// The state that a load shares with its owner.
#[derive(Debug, Default)]
pub struct Control {
    /// No further requests.
    pub stop: AtomicBool,
    /// The server is shutting down, and may reject requests.
    pub ending: AtomicBool,
    pub counts: Counts,
}

/// The state that the two threads of a connection share.
#[derive(Debug, Default)]
struct Line {
    /// Requests that were sent and not answered.
    under_way: AtomicU64,
    /// Nothing comes any more.
    gone: AtomicBool,
}

/// The threads of one connection.
#[derive(Debug)]
pub struct Load {
    asks: JoinHandle<()>,
    listens: JoinHandle<Result<(), Wrong>>,
}

impl Load {
    /// Starts to load a volume with up to `depth` requests under way on this connection.
    ///
    /// # Errors
    /// When the server does not take the connection.
    pub fn start(
        connection: Connection,
        shared: &Arc<Shared>,
        control: &Arc<Control>,
        depth: usize,
        seed: u64,
    ) -> Result<Self> {
        let sender = connection.try_clone()?;
        let line = Arc::new(Line::default());
        let asks = {
            let (shared, control) = (Arc::clone(shared), Arc::clone(control));
            let line = Arc::clone(&line);
            let rng = fastrand::Rng::with_seed(seed);
            std::thread::spawn(move || ask(sender, &shared, &control, &line, depth, rng))
        };
        let (shared, control) = (Arc::clone(shared), Arc::clone(control));
        let listens = std::thread::spawn(move || listen(connection, &shared, &control, &line));
        Ok(Self { asks, listens })
    }

    /// Waits for the connection's end.
    ///
    /// # Errors
    /// The first error that was found.
    pub fn join(self) -> Result<(), Wrong> {
        let broken = |_| Wrong("a thread of the load panicked".to_owned());
        self.asks.join().map_err(broken)?;
        self.listens.join().map_err(broken)?
    }
}

fn ask(
    mut connection: Connection,
    shared: &Shared,
    control: &Control,
    line: &Line,
    depth: usize,
    mut rng: fastrand::Rng,
) {
    let over = || control.stop.load(Ordering::Relaxed) || line.gone.load(Ordering::Relaxed);
    while !over() {
        let next = {
            let mut volume = shared.volume();
            while line.under_way.load(Ordering::Relaxed) >= depth as u64 {
                let waited = shared.answered.wait_timeout(volume, Duration::from_millis(50));
                volume = waited.unwrap_or_else(PoisonError::into_inner).0;
                if over() {
                    return;
                }
            }
            volume.begin(draw(&mut rng), &mut rng)
        };
        let Some((request, data)) = next else {
            std::thread::yield_now();
            continue;
        };
        line.under_way.fetch_add(1, Ordering::Relaxed);
        // A broken connection: the other half learns of it by itself, after the last answers.
        if connection.send(&request, &data).is_err() {
            return;
        }
    }
}

fn draw(rng: &mut fastrand::Rng) -> Kind {
    match rng.u8(..100) {
        0..56 => Kind::Write,
        56..76 => Kind::Read,
        76..82 => Kind::Flush,
        82..91 => Kind::Trim,
        _ => Kind::WriteZeroes,
    }
}

fn listen(
    mut connection: Connection,
    shared: &Shared,
    control: &Control,
    line: &Line,
) -> Result<(), Wrong> {
    let result = listen_on(&mut connection, shared, control, line);
    if result.is_err() {
        control.stop.store(true, Ordering::Relaxed);
    }
    line.gone.store(true, Ordering::Relaxed);
    shared.answered.notify_all();
    result
}

fn listen_on(
    connection: &mut Connection,
    shared: &Shared,
    control: &Control,
    line: &Line,
) -> Result<(), Wrong> {
    let counts = &control.counts;
    let mut data = Vec::new();
    // An end of the connection is what a kill looks like from here.
    while let Ok(reply) = connection.receive() {
        let pending = shared.volume().pending(reply.cookie);
        let Some(op) = pending else {
            return Err(Wrong(format!("an answer to nothing: {}", reply.cookie)));
        };
        line.under_way.fetch_sub(1, Ordering::Relaxed);
        if reply.errno != 0 {
            if reply.errno == SHUTTING_DOWN && control.ending.load(Ordering::Relaxed) {
                // Not done, or done without a word: as if it had not been answered.
                counts.turned_away.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            return Err(Wrong(format!("{op:?} was answered with error {}", reply.errno)));
        }
        data.resize(op.answer_len(), 0);
        if connection.data(&mut data).is_err() {
            break;
        }
        shared.volume().answered(reply.cookie, &data)?;
        shared.answered.notify_all();
        counts.answered.fetch_add(1, Ordering::Relaxed);
        counts.flushes.fetch_add(u64::from(op.kind == Kind::Flush), Ordering::Relaxed);
        counts.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Compares a whole volume with its model, after the server was started anew.
///
/// # Errors
/// When an answered write is missing, data appears that was never written, or the server fails.
pub fn compare(mut connection: Connection, shared: &Shared) -> Result<Unanswered> {
    let mut unanswered = Unanswered::default();
    let mut volume = shared.volume();
    let mut offset = 0;
    while offset < volume.size() {
        let len = PIECE.min(volume.size() - offset);
        let data = connection
            .read(offset, usize::try_from(len)?)
            .with_context(|| format!("reading {} at {offset}", volume.name))?;
        volume.recovered(offset / SECTOR as u64, &data, &mut unanswered)?;
        offset += len;
    }
    for sector in volume.take_torn() {
        connection.write(sector * SECTOR as u64, &[0; SECTOR])?;
    }
    unanswered.requests = volume.forget_pending();
    Ok(unanswered)
}

/// Writes to a volume one request after the other, and flushes at the end.
///
/// # Errors
/// When the connection breaks. Requests answered until then are in the model.
pub fn fill_some(connection: &mut Connection, volume: &mut Volume, seed: u64) -> Result<()> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let kinds = [[Kind::Write; 6].as_slice(), &[Kind::Trim, Kind::Flush]].concat();
    for kind in kinds {
        let Some((request, mut data)) = volume.begin(kind, &mut rng) else { continue };
        let Request { kind, flags, cookie, offset, len } = request;
        data.resize(usize::try_from(len)?, 0);
        connection.ask(kind, offset, &mut data, flags)?;
        volume.answered(cookie, &[])?;
    }
    Ok(())
}
