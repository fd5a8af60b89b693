//! Devices that come and go while others write, so that extents are moved all the time.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use serde_json::Value;

/// Bytes of the pool's first device: the volumes do not fit into it.
pub const FIRST: u64 = 128 << 20;
/// Bytes of each other device: all that is in the pool fits into one.
pub const OTHER: u64 = 640 << 20;
/// Bytes a second that are moved: slow enough to be killed in the middle, or done in a moment.
const RATES: [&str; 3] = ["4M", "32M", "1G"];
/// The same for disks of an emulated machine, which writes less.
const SLOW_RATES: [&str; 3] = ["1M", "4M", "32M"];
/// One removal in this number is aborted.
const ABORTS: u32 = 6;
/// Bytes at each end of a disk that have to be zero before it is added.
const ENDS: u64 = 2 << 20;
/// After a command has failed, it is soon known that the daemon was to die.
const PATIENCE: Duration = Duration::from_secs(5);

/// Two devices, of which one or both are in the pool.
#[derive(Debug)]
pub struct Moves {
    devices: [PathBuf; 2],
    rates: [&'static str; 3],
    rng: fastrand::Rng,
    /// Devices that have left.
    pub left: u64,
    /// Removals that were aborted.
    pub aborted: u64,
    /// Called when a device begins to leave, and when that has ended; which of it is said.
    pub report: Option<fn(&Self, bool)>,
}

impl Moves {
    /// Files beside the pool of the daemon, of which one is added, or these disks.
    ///
    /// # Errors
    /// When a device can't be added.
    pub fn new(daemon: &Daemon, disks: Option<[PathBuf; 2]>, seed: u64) -> Result<Self> {
        let rates = if disks.is_some() { SLOW_RATES } else { RATES };
        let files = || ["one", "two"].map(|name| daemon.folder().join(name));
        let devices = disks.unwrap_or_else(files);
        let rng = fastrand::Rng::with_seed(seed);
        let moves = Self { devices, rates, rng, left: 0, aborted: 0, report: None };
        if moves.used(daemon)? == [false, false] {
            moves.add(daemon, 0)?;
        }
        Ok(moves)
    }

    /// Adds and removes devices until it is stopped.
    ///
    /// # Errors
    /// When a command fails, and it is not stopped soon after: the daemon was not to die.
    pub fn run(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let Err(error) = self.step(daemon, stop) else {
                std::thread::sleep(Duration::from_millis(self.rng.u64(1..20)));
                continue;
            };
            let failed = Clock::start();
            while !stop.load(Ordering::Relaxed) {
                if failed.elapsed() > PATIENCE {
                    return Err(error.context("devices that come and go"));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    fn step(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        match self.used(daemon)? {
            [true, true] => {
                // One that was leaving when the daemon died is waited for.
                let drawn = self.rng.usize(..2);
                let leaving = leaving(daemon)?;
                let which = self.devices.iter().position(|path| leaving.as_ref() == Some(path));
                self.remove(daemon, stop, which.unwrap_or(drawn))
            }
            [true, false] => self.add(daemon, 1),
            _ => self.add(daemon, 0),
        }
    }

    /// Adds a device with nothing on it: whatever was there before is needed no more.
    fn add(&self, daemon: &Daemon, which: usize) -> Result<()> {
        let path = &self.devices[which];
        overwrite(path)?;
        daemon.cli(&["pool", "device", "add", &path.to_string_lossy()]).map(drop)
    }

    fn remove(&mut self, daemon: &Daemon, stop: &AtomicBool, which: usize) -> Result<()> {
        let path = self.devices[which].to_string_lossy().into_owned();
        let rate = self.rates[self.rng.usize(..self.rates.len())];
        let remove = ["pool", "device", "remove", &path];
        daemon.cli(&[&remove[..], &["--rate", rate, "--no-wait"]].concat())?;
        self.say(true);
        let is_aborted = self.rng.u32(..ABORTS) == 0;
        while self.used(daemon)?[which] {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if is_aborted {
                daemon.cli(&[&remove[..], &["--abort"]].concat())?;
                self.aborted += 1;
                self.say(false);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // It may be lost from now on.
        overwrite(&self.devices[which])?;
        self.left += 1;
        self.say(false);
        Ok(())
    }

    fn say(&self, leaving: bool) {
        if let Some(report) = &self.report {
            report(self, leaving);
        }
    }

    /// Whether each of the devices is in the pool.
    fn used(&self, daemon: &Daemon) -> Result<[bool; 2]> {
        let listed = in_pool(daemon)?;
        Ok(self.devices.each_ref().map(|path| listed.contains(path)))
    }

    /// After a start: one device at least is in the pool, with a part of the volumes.
    ///
    /// # Errors
    /// When none is.
    pub fn compare(&self, daemon: &Daemon) -> Result<()> {
        let used = self.used(daemon)?;
        ensure!(used.contains(&true), "no device of the pool but its first is left");
        Ok(())
    }
}

/// Takes everything off a file, or the ends of a disk.
fn overwrite(path: &Path) -> Result<()> {
    let failed = || format!("clearing {}", path.display());
    let is_disk = path.metadata().is_ok_and(|found| found.file_type().is_block_device());
    if !is_disk {
        return File::create(path).and_then(|file| file.set_len(OTHER)).with_context(failed);
    }
    let disk = File::options().write(true).open(path).with_context(failed)?;
    let zeroes = vec![0; usize::try_from(ENDS)?];
    for at in [0, OTHER - ENDS] {
        disk.write_all_at(&zeroes, at).with_context(failed)?;
    }
    disk.sync_all().with_context(failed)
}

/// The device of the pool that is leaving.
///
/// # Errors
/// When the daemon does not say so.
pub fn leaving(daemon: &Daemon) -> Result<Option<PathBuf>> {
    let listed = daemon.cli(&["pool", "device", "list"])?;
    Ok(path(&listed["evacuation"]))
}

fn path(device: &Value) -> Option<PathBuf> {
    device["path"].as_str().map(PathBuf::from)
}

/// The devices of the pool, the first one first.
///
/// # Errors
/// When the daemon does not say so.
pub fn in_pool(daemon: &Daemon) -> Result<Vec<PathBuf>> {
    let listed = daemon.cli(&["pool", "device", "list"])?;
    let devices = listed["devices"].as_array().context("no devices are listed")?;
    Ok(devices.iter().filter_map(path).collect())
}
