//! IO on one device that is too much for others, or gets stuck.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::tools::wait_until;

use super::super::device::{Buffer, Device};
use super::super::{device_of, guest};
use super::{EXTENT, FULL, MIB, NEIGHBOUR, SMALL_DISK, WRITTEN, waiting};

const KIB: u64 = 1 << 10;
const TIB: u64 = 1 << 40;
/// Threads of attackers leave the processors to workers and victims, as in
/// `blockd_tests::neighbours`.
const NICE: i32 = 19;
/// An attack that is not on after this time has failed.
const START: Duration = Duration::from_secs(20);

/// The behaviour of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attack {
    /// 128 writes of 4 KiB into a full pool
    FullPool,
    /// A device limited to 10 MiB/s is written and read at depth 64
    Limited,
    /// 128 KiB at depth 32, read and written
    Hog,
    /// A TiB is discarded, and 4 GiB are zeroed again and again, 4 GiB with each command
    Zeroes,
}

/// An attack that is on.
pub(super) struct Running {
    attack: Attack,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

impl Attack {
    pub(super) const ALL: [Self; 4] = [Self::FullPool, Self::Limited, Self::Hog, Self::Zeroes];

    /// Starts it and waits until it is on.
    pub(super) fn start(self, daemon: &Daemon) -> Result<Running> {
        let mut running = Running {
            attack: self,
            threads: Vec::new(),
            stop: Arc::new(AtomicBool::new(false)),
            done: Arc::new(AtomicU64::new(0)),
        };
        match self {
            Self::FullPool => {
                for number in 0..128 {
                    let device = Device::open(&full_device())?;
                    running.thread(move |_, _| {
                        // It fails when the volume is detached.
                        let _ = device.write(TIB + number * EXTENT, &filled(4 * KIB));
                    })?;
                }
                wait_until("writes to wait for space", START, || {
                    waiting(daemon).ok().filter(|count| *count > 0)
                })?;
            }
            Self::Limited => {
                daemon.cli(&["set", "--bandwidth", "10M", NEIGHBOUR])?;
                running.transfers(64)?;
            }
            Self::Hog => running.transfers(32)?,
            Self::Zeroes => {
                for (number, word) in ["--discard", "--zeroout"].into_iter().enumerate() {
                    running.thread(move |stop, done| discards(number, word, stop, done))?;
                }
            }
        }
        if self != Self::FullPool {
            let done = Arc::clone(&running.done);
            let first = || (done.load(Ordering::Relaxed) > 0).then_some(());
            wait_until("the first request of the attack", START, first)?;
        }
        Ok(running)
    }
}

impl Running {
    fn thread(&mut self, run: impl FnOnce(&AtomicBool, &AtomicU64) + Send + 'static) -> Result<()> {
        let (stop, done) = (Arc::clone(&self.stop), Arc::clone(&self.done));
        let run = move || {
            // Without it the attack is only worse.
            let _ = rustix::process::setpriority_process(None, NICE);
            run(&stop, &done);
        };
        self.threads.push(std::thread::Builder::new().name("attacker".into()).spawn(run)?);
        Ok(())
    }

    /// Reads and writes of 128 KiB, one in flight for each of `depth` threads.
    fn transfers(&mut self, depth: u64) -> Result<()> {
        const LEN: u64 = 128 * KIB;
        for number in 0..depth {
            let device = Device::open(&device_of(NEIGHBOUR))?;
            self.thread(move |stop, done| {
                let mut random = fastrand::Rng::with_seed(number);
                let mut buffer = filled(LEN);
                while !stop.load(Ordering::Relaxed) {
                    let offset = random.u64(..WRITTEN / LEN) * LEN;
                    let result = if number % 2 == 0 {
                        device.write(offset, &buffer)
                    } else {
                        device.read(offset, buffer.bytes().len(), &mut buffer)
                    };
                    if result.is_err() {
                        return;
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })?;
        }
        Ok(())
    }

    /// Ends it and undoes what it changed. The time that detaching took, if that was needed.
    pub(super) fn end(self, daemon: &Daemon) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        let start = Clock::start();
        let mut took = Duration::ZERO;
        if self.attack == Attack::FullPool {
            daemon.cli(&["detach", "--force", "--pool", FULL, FULL])?;
            took = start.elapsed();
        }
        if self.attack == Attack::Limited {
            // Requests in the kernel can't be cancelled, and would take a second.
            daemon.cli(&["set", "--bandwidth", "0", NEIGHBOUR])?;
        }
        for thread in self.threads {
            ensure!(thread.join().is_ok(), "a thread of the attack panicked");
        }
        if self.attack == Attack::FullPool {
            daemon.cli(&["attach", "--ublk", "--pool", FULL, FULL])?;
        }
        Ok(took)
    }
}

fn full_device() -> PathBuf {
    Path::new("/dev/blockd").join(FULL).join(FULL)
}

fn filled(len: u64) -> Buffer {
    let mut buffer = Buffer::default();
    buffer.of(usize::try_from(len).unwrap_or(0)).fill(0x44);
    buffer
}

/// Discards or zeroes a volume beyond what is written of it. Zeroes take space, and the pool has
/// room for one command's. The kernel locks the device for the
/// whole of a command and can't be interrupted, so that a command is 4 requests.
fn discards(number: usize, word: &str, stop: &AtomicBool, done: &AtomicU64) {
    const LEN: u64 = 4 << 30;
    let places = if word == "--zeroout" { 1 } else { TIB / LEN };
    let mut next = 0;
    let mut spawn = || {
        let offset = (TIB * (1 + number as u64) + next % places * LEN).to_string();
        next += 1;
        let mut command = Command::new("blkdiscard");
        if word == "--zeroout" {
            command.arg(word);
        }
        command.args(["--force", "--offset", &offset, "--length", &LEN.to_string()]);
        // It warns of what --force does, each time.
        command.arg(device_of(NEIGHBOUR)).stderr(Stdio::null()).spawn()
    };
    let Ok(mut child) = spawn() else { return };
    done.fetch_add(1, Ordering::Relaxed);
    loop {
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(_)) => match spawn() {
                Ok(next) => child = next,
                Err(_) => return,
            },
            Err(_) => return,
        }
        if stop.load(Ordering::Relaxed) {
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes the first bytes of a volume's device.
pub(super) fn fill(volume: &str) -> Result<()> {
    let device = Device::open(&device_of(volume))?;
    let buffer = filled(MIB);
    for offset in (0..WRITTEN).step_by(usize::try_from(MIB)?) {
        device.write(offset, &buffer)?;
    }
    Ok(())
}

/// Writes to the small pool until it refuses.
pub(super) fn fill_pool() -> Result<()> {
    let device = Device::open(&full_device())?;
    let buffer = filled(EXTENT);
    let full = (0..2 * SMALL_DISK / EXTENT).any(|at| device.write(at * EXTENT, &buffer).is_err());
    ensure!(full, "a pool of {SMALL_DISK} bytes took twice as many");
    guest::shell("dmesg --clear || true").map(|_| ())
}
