//! Disks that fail for real, below pools that are served: the other pool serves on, the failed one
//! is closed, checked and opened again by the same daemon, and a device with unreadable blocks
//! leaves when these can be read again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::tools;

use super::super::device::{Buffer, Device};
use super::super::guest;

/// Bytes of the part of a disk that a pool gets, and of a volume; all of it is written.
const PART: u64 = 256 << 20;
const VOLUME: u64 = 32 << 20;
/// Bytes of one write.
const WRITE: usize = 1 << 20;
/// Writes of the other pool that have to end while the first one has failed.
const WRITES: u64 = 20;
/// The exit code of a tool whose media can't be read.
const MEDIA: i32 = 9;

/// A part of a disk below device-mapper that can be made to fail.
struct Part {
    name: &'static str,
    linear: String,
}

impl Part {
    fn new(name: &'static str, disk: &Path, number: u64) -> Result<Self> {
        let sectors = PART / 512;
        let linear = format!("0 {sectors} linear {} {}", disk.display(), number * sectors);
        guest::shell(&format!(
            "dmsetup create --noudevsync {name} --table '{linear}'; dmsetup mknodes"
        ))?;
        Ok(Self { name, linear })
    }

    fn path(&self) -> PathBuf {
        Path::new("/dev/mapper").join(self.name)
    }

    /// Everything fails from now on, or reads only.
    fn fail(&self, reads_only: bool) -> Result<()> {
        let sectors = PART / 512;
        let flakey = self.linear.replace("linear", "flakey") + " 0 3600 1 error_reads";
        self.switch(&if reads_only { flakey } else { format!("0 {sectors} error") })
    }

    fn mend(&self) -> Result<()> {
        self.switch(&self.linear)
    }

    fn switch(&self, table: &str) -> Result<()> {
        let name = self.name;
        guest::shell(&format!(
            "dmsetup suspend --nolockfs --noudevsync {name}; \
             dmsetup load {name} --table '{table}'; dmsetup resume --noudevsync {name}"
        ))
        .map(drop)
    }
}

fn device(pool: &str, volume: &str) -> Result<Device> {
    Device::open(&Path::new("/dev/blockd").join(pool).join(volume))
}

fn fill(device: &Device, byte: u8) -> Result<()> {
    let mut buffer = Buffer::default();
    buffer.of(WRITE).fill(byte);
    for offset in (0..VOLUME).step_by(WRITE) {
        device.write(offset, &buffer)?;
    }
    device.flush()
}

fn check(device: &Device, byte: u8) -> Result<()> {
    let mut buffer = Buffer::default();
    for offset in (0..VOLUME).step_by(WRITE) {
        device.read(offset, WRITE, &mut buffer)?;
        let same = buffer.bytes().iter().all(|found| *found == byte);
        ensure!(same, "other bytes than {byte} at {offset}");
    }
    Ok(())
}

/// Both kinds of failure, on parts of one disk.
pub(super) fn all(disk: &Path) -> Result<()> {
    let first = Part::new("fails", disk, 0)?;
    let other = Part::new("serves", disk, 1)?;
    let second = Part::new("unreadable", disk, 2)?;
    let pool = |name: &str, part: &Part| {
        format!("[[pool]]\nname = {name:?}\npath = {:?}\n", part.path().display().to_string())
    };
    let pools = pool("fails", &first) + &pool("serves", &other);
    let mut daemon =
        Daemon::new("failed", &Settings { pools: Some(pools), ..Settings::default() })?;
    daemon.start()?;
    let size = VOLUME.to_string();
    for (name, byte) in [("fails/one", 1), ("serves/two", 2)] {
        daemon.cli(&["add", "--ublk", "--size", &size, name])?;
        let (pool, volume) = name.split_once('/').context("a path")?;
        fill(&device(pool, volume)?, byte)?;
    }
    let process = daemon.pid();
    pool_fails(&daemon, &first)?;
    device_is_unreadable(&daemon, &second)?;
    check(&device("serves", "two")?, 2)?;
    ensure!(daemon.pid() == process && daemon.is_running(), "the daemon has another process");
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(())
}

/// Writes to the other pool all the time, until it is stopped.
fn write_on(stop: &AtomicBool, written: &AtomicU64) -> Result<()> {
    let device = device("serves", "two")?;
    let mut buffer = Buffer::default();
    buffer.of(4096).fill(2);
    while !stop.load(Ordering::Relaxed) {
        let offset = written.load(Ordering::Relaxed) * 4096 % VOLUME;
        device.write(offset, &buffer)?;
        device.flush()?;
        written.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A pool's disk fails under writes, and is mended.
fn pool_fails(daemon: &Daemon, disk: &Part) -> Result<()> {
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_on(&stop, &written));
        let done = fail_and_open(daemon, disk, &written);
        stop.store(true, Ordering::Relaxed);
        let wrote = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
        wrote.context("the pool whose disk did not fail")?;
        done
    })
}

fn fail_and_open(daemon: &Daemon, disk: &Part, written: &AtomicU64) -> Result<()> {
    {
        let device = device("fails", "one")?;
        disk.fail(false)?;
        // A discard is metadata, which the flush has to write.
        let path = Path::new("/dev/blockd/fails/one").display();
        let _ = guest::shell(&format!("blkdiscard --force --offset 0 --length {WRITE} {path}"));
        ensure!(device.flush().is_err(), "a flush was answered that the disk can't have done");
    }
    let state = || daemon.cli(&["pool", "show", "fails"]).ok();
    let has_failed = || state().filter(|shown| shown["pool"]["state"] == "failed").map(drop);
    tools::wait_until("the failure of the pool", guest::PATIENCE, has_failed)?;
    let before = written.load(Ordering::Relaxed);
    let went_on = || (written.load(Ordering::Relaxed) >= before + WRITES).then_some(());
    tools::wait_until("writes of the other pool", guest::PATIENCE, went_on)?;
    daemon.cli(&["pool", "close", "--force", "fails"])?;
    let path = disk.path().display().to_string();
    let checked = daemon.cli_output(&["pool", "check", &path])?;
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    let names_it = checked.status.code() == Some(MEDIA) && said.contains(&path);
    ensure!(names_it, "a check of a dead disk: {checked:?}, {said}");
    ensure!(daemon.cli(&["pool", "open", "fails"]).is_err(), "a pool on a dead disk was opened");
    disk.mend()?;
    daemon.cli(&["pool", "check", &path]).context("the check of the mended disk")?;
    daemon.cli(&["pool", "open", "fails"])?;
    let device = device("fails", "one")?;
    // The discard was not answered: it may have happened or not.
    let mut buffer = Buffer::default();
    for offset in (0..VOLUME).step_by(WRITE) {
        device.read(offset, WRITE, &mut buffer)?;
        let is_whole = |byte: u8| buffer.bytes().iter().all(|found| *found == byte);
        let fits = is_whole(1) || (offset == 0 && is_whole(0));
        ensure!(fits, "flushed bytes are lost at {offset}");
    }
    fill(&device, 3)?;
    check(&device, 3)
}

/// A device that is to leave can't be read for a while: nothing is lost, and then it leaves.
fn device_is_unreadable(daemon: &Daemon, part: &Part) -> Result<()> {
    let path = part.path().display().to_string();
    daemon.cli(&["pool", "device", "add", &path, "--pool", "fails"])?;
    let size = VOLUME.to_string();
    // More than is free on the first device lies on both.
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    for (name, byte) in names.iter().zip(10..) {
        daemon.cli(&["add", "--ublk", "--size", &size, &format!("fails/{name}")])?;
        fill(&device("fails", name)?, byte)?;
    }
    let remove = ["pool", "device", "remove", &path, "--pool", "fails"];
    // Half of them go, so that the rest has room on the first device.
    for name in &names[..3] {
        daemon.cli(&["del", "--force", &format!("fails/{name}")])?;
    }
    part.fail(true)?;
    let begun = [&remove[..], &["--no-wait"]].concat();
    let began = || daemon.cli(&begun).ok().map(drop);
    tools::wait_until("the beginning of the removal", guest::PATIENCE, began)?;
    let errors = || {
        let listed = daemon.cli(&["pool", "device", "list", "fails"]).ok()?;
        (listed["evacuation"]["errors"].as_u64()? > 0).then_some(())
    };
    tools::wait_until("copies that fail", guest::PATIENCE, errors)?;
    part.mend()?;
    let left = || {
        let listed = daemon.cli(&["pool", "device", "list", "fails"]).ok()?;
        (listed["devices"].as_array()?.len() == 1).then_some(())
    };
    tools::wait_until("the device that leaves", guest::PATIENCE, left)?;
    for (name, byte) in names.iter().zip(10..).skip(3) {
        check(&device("fails", name)?, byte).with_context(|| (*name).to_owned())?;
    }
    check(&device("fails", "one")?, 3)
}
