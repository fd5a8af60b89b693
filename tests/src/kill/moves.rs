//! Devices that come, go, are replaced, shrink and grow while others write, so that extents are
//! moved all the time.

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
/// One removal or shrink in this number is aborted.
const ABORTS: u32 = 6;
/// Bytes that a device shrinks to: all that is in the pool fits into the rest.
const SHRUNK: std::ops::Range<u64> = 400 << 20..600 << 20;
/// Bytes at each end of a disk that have to be zero before it is added.
const ENDS: u64 = 2 << 20;
/// After a command has failed, it is soon known that the daemon was to die.
const PATIENCE: Duration = Duration::from_secs(60);
/// A daemon that is to die is dead after this time, or its end was asked for.
const MOMENT: Duration = Duration::from_millis(200);
/// Between two looks at what the daemon does.
const LOOK: Duration = Duration::from_millis(5);

/// The counts of changes that were seen to their ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Devices that have left.
    pub left: u64,
    /// Of them, in exchange for another one.
    pub replaced: u64,
    /// Devices that have become smaller.
    pub shrunk: u64,
    /// Removals and shrinks that were aborted.
    pub aborted: u64,
}

/// A device that is leaving, or the size that it shrinks to.
#[derive(Clone, Debug)]
struct Busy {
    path: PathBuf,
    shrinks_to: u64,
}

/// Two devices, of which one or both are in the pool.
#[derive(Debug)]
pub struct Moves {
    devices: [PathBuf; 2],
    rates: [&'static str; 3],
    rng: fastrand::Rng,
    /// The device that another one was added for.
    replaced: Option<usize>,
    /// Counts since the start of this program.
    pub counts: Counts,
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
        let (replaced, counts) = (None, Counts::default());
        let moves = Self { devices, rates, rng, replaced, counts, report: None };
        if moves.used(daemon)? == [false, false] {
            moves.add(daemon, 0)?;
        }
        Ok(moves)
    }

    /// Changes devices until it is stopped.
    ///
    /// # Errors
    /// When a command fails, and it is not stopped soon after: the daemon was not to die.
    pub fn run(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        until_stopped(daemon, stop, || {
            self.step(daemon, stop).context("devices that come and go")?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(1..20)));
            Ok(())
        })
    }

    fn step(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        match self.used(daemon)? {
            [true, true] => self.change_one(daemon, stop),
            [true, false] => self.add_or_replace(daemon, stop, 1),
            _ => self.add_or_replace(daemon, stop, 0),
        }
    }

    /// Has one of two devices leave or shrink. One that did when the daemon died is waited for.
    fn change_one(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        let drawn = self.rng.usize(..2);
        if let Some(Busy { path, shrinks_to }) = busy(daemon)? {
            let which = self.devices.iter().position(|one| *one == path).unwrap_or(drawn);
            return match shrinks_to {
                0 => self.remove(daemon, stop, which),
                size => self.shrink(daemon, stop, which, size),
            };
        }
        self.grow(daemon)?;
        if self.rng.bool() {
            let size = self.rng.u64(SHRUNK);
            return self.shrink(daemon, stop, drawn, size);
        }
        self.remove(daemon, stop, drawn)
    }

    fn add_or_replace(&mut self, daemon: &Daemon, stop: &AtomicBool, which: usize) -> Result<()> {
        if busy(daemon)?.is_some() || self.rng.u8(..3) > 0 {
            return self.add(daemon, which);
        }
        overwrite(&self.devices[which])?;
        let [old, new] = [1 - which, which].map(|one| self.path(one));
        let rate = self.rate();
        let words = ["pool", "device", "replace", &old, &new, "--rate", rate, "--no-wait"];
        daemon.cli(&words)?;
        self.say(true);
        self.replaced = Some(1 - which);
        self.wait_until_left(daemon, stop, 1 - which, None)
    }

    /// Adds a device with nothing on it: whatever was there before is needed no more.
    fn add(&self, daemon: &Daemon, which: usize) -> Result<()> {
        let path = &self.devices[which];
        overwrite(path)?;
        daemon.cli(&["pool", "device", "add", &path.to_string_lossy()]).map(drop)
    }

    fn remove(&mut self, daemon: &Daemon, stop: &AtomicBool, which: usize) -> Result<()> {
        let path = self.path(which);
        let remove = ["pool", "device", "remove", &path];
        daemon.cli(&[&remove[..], &["--rate", self.rate(), "--no-wait"]].concat())?;
        self.say(true);
        let aborted = self.rng.u32(..ABORTS) == 0;
        let abort = [&remove[..], &["--abort"]].concat();
        self.wait_until_left(daemon, stop, which, aborted.then_some(&abort))
    }

    /// Waits until a device is no longer of the pool, or aborts that.
    fn wait_until_left(
        &mut self,
        daemon: &Daemon,
        stop: &AtomicBool,
        which: usize,
        abort: Option<&Vec<&str>>,
    ) -> Result<()> {
        while self.used(daemon)?[which] {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if let Some(words) = abort {
                let answer = daemon.cli(words)?;
                self.replaced = None;
                self.counts.aborted += u64::from(answer["changed"] == true);
                self.say(false);
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        // It may be lost from now on.
        overwrite(&self.devices[which])?;
        self.counts.left += 1;
        self.counts.replaced += u64::from(self.replaced.take() == Some(which));
        self.say(false);
        Ok(())
    }

    fn shrink(
        &mut self,
        daemon: &Daemon,
        stop: &AtomicBool,
        which: usize,
        size: u64,
    ) -> Result<()> {
        let (path, size) = (self.path(which), size.to_string());
        let shrink = ["pool", "shrink", "--device", &path];
        let begin = ["--size", &size, "--rate", self.rate(), "--no-wait"];
        if let Err(error) = daemon.cli(&[&shrink[..], &begin].concat()) {
            // One that had shrunk when the daemon was killed, before its file was truncated, or
            // whose disk is as large as before: lists have the length of the file or disk.
            let text = error.to_string();
            let is_smaller = ["which the device has", "than the device is in its pool"];
            return match is_smaller.iter().any(|part| text.contains(part)) {
                true => Ok(()),
                false => Err(error),
            };
        }
        self.say(true);
        let is_aborted = self.rng.u32(..ABORTS) == 0;
        while busy(daemon)?.is_some() {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if is_aborted {
                let answer = daemon.cli(&[&shrink[..], &["--abort"]].concat())?;
                self.counts.aborted += u64::from(answer["changed"] == true);
                self.say(false);
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        self.counts.shrunk += 1;
        self.say(false);
        Ok(())
    }

    /// Has both devices as large as they were, so that what is in the pool fits into one.
    fn grow(&self, daemon: &Daemon) -> Result<()> {
        let listed = daemon.cli(&["pool", "device", "list"])?;
        let devices = listed["devices"].as_array().context("no devices are listed")?;
        for (place, device) in devices.iter().enumerate() {
            let Some(found) = path(device).filter(|path| self.devices.contains(path)) else {
                continue;
            };
            if device["size_bytes"].as_u64() >= Some(OTHER) {
                continue;
            }
            let (place, size) = (place.to_string(), OTHER.to_string());
            let grow = ["pool", "grow", "--device", &place];
            let words: &[&str] = if is_disk(&found) { &[] } else { &["--size", &size] };
            daemon.cli(&[&grow[..], words].concat())?;
        }
        Ok(())
    }

    fn path(&self, which: usize) -> String {
        self.devices[which].to_string_lossy().into_owned()
    }

    fn rate(&mut self) -> &'static str {
        self.rates[self.rng.usize(..self.rates.len())]
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

/// Takes step after step until it is stopped, or one fails.
///
/// # Errors
/// When a step fails, and the daemon still answers after a moment: it was not to die.
pub(super) fn until_stopped(
    daemon: &Daemon,
    stop: &AtomicBool,
    mut step: impl FnMut() -> Result<()>,
) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let Err(error) = step() else { continue };
        std::thread::sleep(MOMENT);
        let is_alive = daemon.cli(&["version"]).is_ok();
        if is_alive && !stop.load(Ordering::Relaxed) {
            return Err(error);
        }
        let failed = Clock::start();
        while !stop.load(Ordering::Relaxed) {
            if failed.elapsed() > PATIENCE {
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

fn is_disk(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

/// Takes everything off a file, or the ends of a disk.
fn overwrite(path: &Path) -> Result<()> {
    let failed = || format!("clearing {}", path.display());
    if !is_disk(path) {
        return File::create(path).and_then(|file| file.set_len(OTHER)).with_context(failed);
    }
    let disk = File::options().write(true).open(path).with_context(failed)?;
    let zeroes = vec![0; usize::try_from(ENDS)?];
    for at in [0, OTHER - ENDS] {
        disk.write_all_at(&zeroes, at).with_context(failed)?;
    }
    disk.sync_all().with_context(failed)
}

/// The device of the pool that is leaving or shrinking.
fn busy(daemon: &Daemon) -> Result<Option<Busy>> {
    let listed = daemon.cli(&["pool", "device", "list"])?;
    let found = &listed["evacuation"];
    let shrinks_to = found["shrinks_to_bytes"].as_u64().unwrap_or(0);
    Ok(path(found).map(|path| Busy { path, shrinks_to }))
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
