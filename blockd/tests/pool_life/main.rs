//! Pools that are closed, opened, renamed, deleted, exported and imported while a daemon serves
//! others.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../cli_support/mod.rs"]
mod cli_support;
mod closing;
mod deleting;
mod failed;
mod handing_on;
mod renaming;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use blockd_media::clock::Clock;
use blockd_nbd::client::Client;
use cli_support::{Daemon, LIMIT, connect_patient, pattern};
use serde_json::Value;

/// Exit code of what is in use, or in another state than it has to be.
const IN_USE: i32 = 7;

const BYTES: usize = 1 << 20;

/// A daemon with the pool of its configuration, and the pool `w` that was made by a call.
struct Case {
    daemon: Daemon,
    pool: PathBuf,
}

impl Case {
    fn new() -> Self {
        let daemon = Daemon::start("128M");
        let pool = daemon.dir.join("w.pool");
        let path = pool.to_str().unwrap();
        daemon.ok(&["pool", "create", "w", "--path", path, "--size", "64M"]);
        Self { daemon, pool }
    }

    /// With data in a volume of `w` that is attached.
    fn with_data() -> Self {
        let case = Self::new();
        std::fs::write(case.daemon.dir.join("image"), pattern(BYTES, 1)).unwrap();
        case.daemon.ok(&["import", "--pool", "w", "image", "data"]);
        case.daemon.ok(&["attach", "--nbd", "--pool", "w", "data"]);
        case
    }

    fn path(&self) -> &str {
        self.pool.to_str().unwrap()
    }

    fn state(&self) -> Value {
        self.daemon.json(&["pool", "show", "w"])["pool"]["state"].clone()
    }

    /// Exit code and text of a call that has to be refused.
    fn refused(&self, words: &[&str]) -> String {
        let (code, error) = self.daemon.failure(words);
        assert_eq!(code, IN_USE, "{error}");
        error
    }
}

/// A loop device over a file, gone afterwards.
struct Loop(PathBuf);

impl Loop {
    fn attach(file: &Path) -> Self {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// The volume of this pool has the bytes of its image.
fn has_data(daemon: &Daemon, pool: &str) {
    let copy = daemon.dir.join("copy");
    daemon.ok(&["export", "--force", "--pool", pool, "data", copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == pattern(BYTES, 1), "the volume has other bytes");
}

fn client(daemon: &Daemon, pool: &str, volume: &str) -> Client {
    connect_patient(daemon, &format!("{pool}/{volume}"))
}

/// A client of another volume, which writes and reads until it is stopped.
struct Traffic {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Traffic {
    fn start(daemon: &Daemon) -> Self {
        Self::start_in(daemon, "default")
    }

    fn start_in(daemon: &Daemon, pool: &str) -> Self {
        const BLOCK: usize = 64 << 10;
        daemon.ok(&["add", "--nbd", "--size", "8M", "--pool", pool, "other"]);
        let mut client = client(daemon, pool, "other");
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, counts) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            let mut read = vec![0; BLOCK];
            while !ends.load(Ordering::SeqCst) {
                let round = counts.load(Ordering::SeqCst);
                let (at, bytes) = (round % 128 * BLOCK as u64, pattern(BLOCK, round));
                client.write(at, &bytes, round.is_multiple_of(16)).unwrap();
                client.read(at, &mut read).unwrap();
                assert!(read == bytes, "the volume returned other bytes");
                counts.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { stop, done, thread }
    }

    /// Waits for some more requests, none of which may fail.
    fn goes_on(&self) {
        let (clock, before) = (Clock::start(), self.done.load(Ordering::SeqCst));
        while self.done.load(Ordering::SeqCst) < before + 16 {
            assert!(!self.thread.is_finished() && clock.elapsed() < LIMIT, "no IO");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    fn end(self) {
        self.goes_on();
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}
