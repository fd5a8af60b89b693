//! Devices that come and go while others write, so that extents are moved all the time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;

use super::load::Control;

/// Bytes of the pool's first device: the volumes do not fit into it.
pub const FIRST: u64 = 128 << 20;
/// Bytes of each other device: all that is in the pool does.
const OTHER: u64 = 640 << 20;
/// Bytes a second that are moved: slow enough to be killed in the middle, or done in a moment.
const RATES: [&str; 3] = ["4M", "32M", "1G"];
/// One removal in this number is aborted.
const ABORTS: u32 = 6;

/// Two devices, of which one or both are in the pool.
#[derive(Debug)]
pub struct Moves {
    devices: [PathBuf; 2],
    rng: fastrand::Rng,
    /// Devices that have left.
    pub left: u64,
    /// Removals that were aborted.
    pub aborted: u64,
}

impl Moves {
    /// Makes the devices, and adds one of them.
    ///
    /// # Errors
    /// When that fails.
    pub fn new(daemon: &Daemon, seed: u64) -> Result<Self> {
        let devices = ["one", "two"].map(|name| daemon.folder().join(name));
        let moves = Self { devices, rng: fastrand::Rng::with_seed(seed), left: 0, aborted: 0 };
        moves.add(daemon, 0)?;
        Ok(moves)
    }

    /// Adds and removes devices until it is stopped, or until the daemon is gone: what was so by
    /// then is seen after its start.
    pub fn run(&mut self, daemon: &Daemon, control: &Control) {
        while !control.stop.load(Ordering::Relaxed) && self.step(daemon, control).is_ok() {
            std::thread::sleep(Duration::from_millis(self.rng.u64(1..20)));
        }
    }

    fn step(&mut self, daemon: &Daemon, control: &Control) -> Result<()> {
        match self.used(daemon)? {
            [true, true] => {
                let which = self.rng.usize(..2);
                self.remove(daemon, control, which)
            }
            [true, false] => self.add(daemon, 1),
            _ => self.add(daemon, 0),
        }
    }

    /// Adds a device with nothing on it: whatever was there before is needed no more.
    fn add(&self, daemon: &Daemon, which: usize) -> Result<()> {
        let path = &self.devices[which];
        File::create(path)?.set_len(OTHER).context("a device of the pool")?;
        daemon.cli(&["pool", "device", "add", &path.to_string_lossy()]).map(drop)
    }

    fn remove(&mut self, daemon: &Daemon, control: &Control, which: usize) -> Result<()> {
        let path = self.devices[which].to_string_lossy().into_owned();
        let rate = RATES[self.rng.usize(..RATES.len())];
        let remove = ["pool", "device", "remove", &path];
        daemon.cli(&[&remove[..], &["--rate", rate, "--no-wait"]].concat())?;
        let is_aborted = self.rng.u32(..ABORTS) == 0;
        while self.used(daemon)?[which] {
            if control.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if is_aborted {
                daemon.cli(&[&remove[..], &["--abort"]].concat())?;
                self.aborted += 1;
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // It may be lost from now on.
        File::create(&self.devices[which])?.set_len(OTHER)?;
        self.left += 1;
        Ok(())
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

/// The devices of the pool, the first one first.
///
/// # Errors
/// When the daemon does not say so.
pub fn in_pool(daemon: &Daemon) -> Result<Vec<PathBuf>> {
    let listed = daemon.cli(&["pool", "device", "list"])?;
    let devices = listed["devices"].as_array().context("no devices are listed")?;
    let paths = devices.iter().filter_map(|device| device["path"].as_str());
    Ok(paths.map(|path| Path::new(path).to_owned()).collect())
}
