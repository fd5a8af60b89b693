//! A fast writer that can verify each byte that it wrote.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::nbd::Connection;

/// Bytes of a write: an extent, so that each of them needs a new one.
pub const PIECE: usize = 256 << 10;
const BLOCK: usize = 4096;
/// Connections, each with a write under way. The first writes the pieces 0, 4, 8 and so on.
const LANES: usize = 4;

/// The content of a piece: blocks of random bytes, each with its place in front and a checksum of
/// all of it at its end.
#[must_use]
pub fn content(seed: u64, piece: u64) -> Vec<u8> {
    let mut data = vec![0; PIECE];
    let mut random = fastrand::Rng::with_seed(seed ^ piece.rotate_left(32));
    random.fill(&mut data);
    for (block, number) in data.chunks_exact_mut(BLOCK).zip(0_u64..) {
        block[..8].copy_from_slice(&piece.to_le_bytes());
        block[8..16].copy_from_slice(&number.to_le_bytes());
        let (body, sum) = block.split_at_mut(BLOCK - 4);
        sum.copy_from_slice(&crc32c::crc32c(body).to_le_bytes());
    }
    data
}

/// Whether a block's checksum is the one at its end.
fn is_sound(block: &[u8]) -> bool {
    let (body, sum) = block.split_at(block.len() - 4);
    crc32c::crc32c(body).to_le_bytes() == sum
}

/// The state of one connection.
#[derive(Debug, Default)]
struct Lane {
    /// When the write that is under way was sent.
    since: Option<Clock>,
    /// The slowest that was answered since the last query.
    slowest: Duration,
    /// Pieces answered.
    done: u64,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    bytes: AtomicU64,
    lanes: [Mutex<Lane>; LANES],
    error: Mutex<Option<String>>,
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes one piece after the other over several connections, at a given speed as long as the
/// daemon keeps up. It does not catch up after a delay.
#[derive(Debug)]
pub struct Writer {
    volume: String,
    seed: u64,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Writer {
    /// Connects and begins.
    ///
    /// # Errors
    /// When the volume is not served.
    pub fn start(daemon: &Daemon, volume: &str, rate: u64, seed: u64) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let pause = Duration::from_secs_f64((LANES * PIECE) as f64 / rate as f64);
        let mut threads = Vec::new();
        for (lane, number) in (0..LANES).zip(0_u64..) {
            let mut connection = daemon.connect(volume)?;
            let shared = Arc::clone(&shared);
            threads.push(std::thread::spawn(move || {
                let written = shared.write_lane(&mut connection, (lane, number), pause, seed);
                if let Err(error) = written {
                    held(&shared.error).get_or_insert_with(|| format!("{error:#}"));
                    shared.stop.store(true, Ordering::SeqCst);
                }
            }));
        }
        Ok(Self { volume: volume.to_owned(), seed, shared, threads })
    }

    /// Bytes that were answered.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }

    /// The error of the write that failed.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        held(&self.shared.error).clone()
    }

    /// How long writes take: the slowest that was answered since the last call, or the one that
    /// has been under way for longest.
    pub fn take_delay(&self) -> Duration {
        let delay = |lane: &Mutex<Lane>| {
            let mut lane = held(lane);
            let waits = lane.since.map_or(Duration::ZERO, |since| since.elapsed());
            std::mem::take(&mut lane.slowest).max(waits)
        };
        self.shared.lanes.iter().map(delay).max().unwrap_or_default()
    }

    /// Stops, once the writes under way are answered; makes all of them durable.
    ///
    /// # Errors
    /// When a write was answered with an error, or the flush is.
    pub fn finish(self, daemon: &Daemon) -> Result<Written> {
        self.shared.stop.store(true, Ordering::SeqCst);
        for thread in self.threads {
            thread.join().map_err(|_| anyhow!("a thread of the writer has died"))?;
        }
        if let Some(error) = held(&self.shared.error).take() {
            return Err(anyhow!(error).context("a write has failed"));
        }
        daemon.connect(&self.volume)?.flush().context("flushing")?;
        let pieces = self.shared.lanes.iter().map(|lane| held(lane).done).collect();
        let bytes = self.shared.bytes.load(Ordering::SeqCst);
        Ok(Written { volume: self.volume, seed: self.seed, bytes, pieces })
    }
}

impl Shared {
    fn write_lane(
        &self,
        connection: &mut Connection,
        (lane, number): (usize, u64),
        pause: Duration,
        seed: u64,
    ) -> Result<()> {
        let (clock, mut next) = (Clock::start(), Duration::ZERO);
        for done in 0_u64.. {
            let now = clock.elapsed();
            std::thread::sleep(next.saturating_sub(now));
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            next = next.max(now) + pause;
            let piece = done * LANES as u64 + number;
            let data = content(seed, piece);
            let sent = Clock::start();
            held(&self.lanes[lane]).since = Some(sent);
            connection.write(piece * PIECE as u64, &data)?;
            let took = sent.elapsed();
            self.bytes.fetch_add(PIECE as u64, Ordering::SeqCst);
            let mut lane = held(&self.lanes[lane]);
            *lane = Lane { since: None, slowest: lane.slowest.max(took), done: done + 1 };
        }
        Ok(())
    }
}

/// The data that was written and answered.
#[derive(Debug)]
pub struct Written {
    volume: String,
    seed: u64,
    pub bytes: u64,
    /// By each connection.
    pieces: Vec<u64>,
}

/// The result of reading it back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Compared {
    pub bytes: u64,
    /// Blocks that are not what was written.
    pub differ: u64,
    /// Blocks whose checksum is not that of their bytes.
    pub unsound: u64,
}

impl Written {
    /// Reads all of it.
    ///
    /// # Errors
    /// When a read fails.
    pub fn compare(&self, daemon: &Daemon) -> Result<Compared> {
        let mut all = Compared::default();
        let one = |(number, pieces): (u64, u64)| -> Result<Compared> {
            let mut connection = daemon.connect(&self.volume)?;
            let mut found = Compared::default();
            for done in 0..pieces {
                let piece = done * LANES as u64 + number;
                let read = connection.read(piece * PIECE as u64, PIECE)?;
                let expected = content(self.seed, piece);
                for (read, expected) in read.chunks(BLOCK).zip(expected.chunks(BLOCK)) {
                    found.differ += u64::from(read != expected);
                    found.unsound += u64::from(!is_sound(read));
                }
                found.bytes += PIECE as u64;
            }
            Ok(found)
        };
        let parts = std::thread::scope(|scope| {
            let pieces = (0_u64..).zip(self.pieces.iter().copied());
            let threads: Vec<_> = pieces.map(|lane| scope.spawn(move || one(lane))).collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });
        for part in parts {
            let part = part.map_err(|_| anyhow!("a thread that compares has died"))??;
            all.bytes += part.bytes;
            all.differ += part.differ;
            all.unsound += part.unsound;
        }
        ensure!(all.bytes > 0, "nothing was compared");
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_knows_its_place_and_its_checksum() {
        let (one, other) = (content(1, 7), content(1, 8));
        assert!(one.chunks(BLOCK).all(is_sound));
        assert!(one.chunks(BLOCK).zip(other.chunks(BLOCK)).all(|(one, other)| one != other));
        let mut bent = one[..BLOCK].to_vec();
        bent[100] ^= 1;
        assert!(!is_sound(&bent) && !is_sound(&[0xff; BLOCK]));
        assert_eq!(one, content(1, 7));
        assert_ne!(one, content(2, 7));
    }
}
