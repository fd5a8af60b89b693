//! A writer that fills a file system: one file after the other, each durable before it counts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;

use crate::story::writer::{PIECE, content};
use crate::workload::guest;

/// Pieces of a file.
const PIECES: u64 = 4;

/// How a write ended that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// The number of the kernel's.
    pub(super) errno: i32,
    pub(super) text: String,
    /// How long that file took until then.
    pub(super) after: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    /// Files that are durable.
    done: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// When the file that is being written was begun.
    since: Mutex<Option<Clock>>,
}

/// A thread that writes files until it is stopped, or a write fails.
#[derive(Debug)]
pub(super) struct Fill {
    folder: PathBuf,
    seed: u64,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Fill {
    /// Begins, in a folder that is there.
    pub(super) fn start(folder: &Path, seed: u64) -> Self {
        let shared = Arc::<Shared>::default();
        let (path, theirs) = (folder.to_path_buf(), Arc::clone(&shared));
        let thread = Some(std::thread::spawn(move || theirs.fill(&path, seed)));
        Self { folder: folder.to_path_buf(), seed, shared, thread }
    }

    /// Files that are durable.
    pub(super) fn done(&self) -> u64 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// The failure of a write.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How long the file takes that is being written.
    pub(super) fn waits(&self) -> Duration {
        let since = *self.shared.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Ends after the file that is being written. Whether it has ended.
    pub(super) fn stop(&mut self) -> bool {
        self.shared.stop.store(true, Ordering::SeqCst);
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.thread.take().map(JoinHandle::join);
        }
        self.thread.is_none()
    }

    /// Compares all files that are durable with what was written, as the device has them.
    ///
    /// # Errors
    /// When one of them holds anything else.
    pub(super) fn compare(&self) -> Result<u64> {
        guest::shell("echo 3 >/proc/sys/vm/drop_caches")?;
        let done = self.done();
        for number in 0..done {
            let path = self.folder.join(number.to_string());
            let found = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
            ensure!(found == of(self.seed, number), "{} differs", path.display());
        }
        ensure!(done > 0, "no file was written to {}", self.folder.display());
        Ok(done)
    }
}

impl Shared {
    fn fill(&self, folder: &Path, seed: u64) {
        while !self.stop.load(Ordering::SeqCst) {
            let (begun, number) = (Clock::start(), self.done.load(Ordering::SeqCst));
            *self.since.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
            let written = write(folder, number, &of(seed, number));
            *self.since.lock().unwrap_or_else(PoisonError::into_inner) = None;
            if let Err(error) = written {
                let (errno, text) = (error.raw_os_error().unwrap_or(0), error.to_string());
                let failure = Some(Failure { errno, text, after: begun.elapsed() });
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
                return;
            }
            self.done.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn write(folder: &Path, number: u64, data: &[u8]) -> io::Result<()> {
    let mut file = File::create(folder.join(number.to_string()))?;
    file.write_all(data)?;
    file.sync_all()?;
    File::open(folder)?.sync_all()
}

fn of(seed: u64, number: u64) -> Vec<u8> {
    let mut data = Vec::with_capacity(4 * PIECE);
    for piece in 0..PIECES {
        data.extend(content(seed, number * PIECES + piece));
    }
    data
}
