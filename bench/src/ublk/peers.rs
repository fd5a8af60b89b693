//! Other ways from a block device to a ramdisk: the kernel's loop, rublk, dm-thin.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::backing::{DISK_BYTES, Disk};
use super::mapper_control::Control;
use super::{Mode, shell};

/// A block device that is measured.
#[derive(Clone, Debug)]
pub struct Device {
    /// In the tables.
    pub name: String,
    /// Its node.
    pub path: PathBuf,
    /// The process that serves it, if one does.
    pub server: Option<u32>,
}

/// A loop device with direct IO.
#[derive(Debug)]
pub struct Loop {
    path: String,
}

impl Loop {
    /// On a ramdisk.
    pub fn start(disk: Disk) -> Result<Self> {
        let backing = disk.path();
        let backing = backing.to_string_lossy();
        let path = shell::run("losetup", &["--find", "--show", "--direct-io=on", &backing])?;
        let name = path.rsplit('/').next().unwrap_or_default();
        let direct = fs::read_to_string(format!("/sys/block/{name}/loop/dio"))?;
        ensure!(direct.trim() == "1", "{path} has no direct IO");
        Ok(Self { path })
    }

    /// The device to measure.
    #[must_use]
    pub fn device(&self) -> Device {
        Device {
            name: "kernel loop, direct".to_owned(),
            path: PathBuf::from(&self.path),
            server: None,
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        note(shell::run("losetup", &["--detach", &self.path]).map(|_| ()));
    }
}

/// rublk's loop target, in the foreground.
#[derive(Debug)]
pub struct Rublk {
    program: PathBuf,
    child: Child,
    number: u32,
    mode: Mode,
}

impl Rublk {
    /// On a ramdisk. One queue of 128, its default.
    pub fn start(program: &Path, disk: Disk, mode: Mode, log: &Path) -> Result<Self> {
        let number = match mode {
            Mode::Copy => 40,
            Mode::ZeroCopy => 41,
        };
        let output = fs::File::create(log)?;
        let mut command = Command::new(program);
        // Not pinned to one processor, as ours is not.
        command.args(["add", "loop", "--foreground", "--multi-cpus-affinity"]);
        command.args(["-q", "1", "-d", "128"]);
        command.args(["-n", &number.to_string(), "-f"]).arg(disk.path());
        if mode == Mode::ZeroCopy {
            command.arg("-z");
        }
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let mut rublk = Self { program: program.to_owned(), child, number, mode };
        let path = rublk.path();
        let up = shell::until("rublk's device", || {
            ensure!(rublk.child.try_wait()?.is_none(), "rublk has ended");
            Ok(path.exists())
        });
        up.with_context(|| fs::read_to_string(log).unwrap_or_default())?;
        Ok(rublk)
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.number))
    }

    /// The device to measure.
    #[must_use]
    pub fn device(&self) -> Device {
        Device {
            name: format!("rublk loop, {}", self.mode.name()),
            path: self.path(),
            server: Some(self.child.id()),
        }
    }
}

impl Drop for Rublk {
    fn drop(&mut self) {
        let deleted = shell::run(&self.program, &["del", "-n", &self.number.to_string()]);
        if deleted.is_err() {
            let _ = self.child.kill();
        }
        note(deleted.map(|_| ()));
        let _ = self.child.wait();
    }
}

/// The size of a chunk, and whether new ones are filled with zeroes before they are written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Chunk {
    /// Bytes.
    pub bytes: u64,
    /// As dm-thin does by default.
    pub zeroing: bool,
}

/// A pool of dm-thin with one volume.
#[derive(Debug)]
pub struct Thin {
    pool: String,
    volume: String,
    chunk: Chunk,
    next: u32,
    live: Option<u32>,
    snapshots: Vec<u32>,
}

/// Bytes in a sector of the device mapper's.
const SECTOR: u64 = 512;

impl Thin {
    /// An empty pool on two ramdisks.
    pub fn start(chunk: Chunk, data: Disk, meta: Disk) -> Result<Self> {
        meta.forget()?;
        let name = format!("{}k", chunk.bytes >> 10);
        let (pool, volume) = (format!("pool-{name}"), format!("thin-{name}"));
        let thin = Self { pool, volume, chunk, next: 0, live: None, snapshots: Vec::new() };
        shell::run("dmsetup", &["create", &thin.pool, "--table", &thin.table(data, meta)])?;
        Ok(thin)
    }

    fn table(&self, data: Disk, meta: Disk) -> String {
        let features = if self.chunk.zeroing { "0" } else { "1 skip_block_zeroing" };
        format!(
            "0 {} thin-pool {} {} {} 0 {features}",
            DISK_BYTES / SECTOR,
            meta.path().display(),
            data.path().display(),
            self.chunk.bytes / SECTOR
        )
    }

    /// A new, empty volume in place of the one before.
    pub fn renew(&mut self, bytes: u64) -> Result<Device> {
        self.remove()?;
        let number = self.next;
        self.next += 1;
        let node = format!("/dev/mapper/{}", self.pool);
        shell::run("dmsetup", &["message", &self.pool, "0", &format!("create_thin {number}")])?;
        let table = format!("0 {} thin {node} {number}", bytes / SECTOR);
        shell::run("dmsetup", &["create", &self.volume, "--table", &table])?;
        self.live = Some(number);
        Ok(Device {
            name: self.chunk.name(),
            path: PathBuf::from(format!("/dev/mapper/{}", self.volume)),
            server: None,
        })
    }

    /// A snapshot of the volume. It goes with it.
    pub fn snapshot(&mut self) -> Result<()> {
        let origin = self.live.context("no volume to take a snapshot of")?;
        let number = self.next;
        self.next += 1;
        shell::run("dmsetup", &["suspend", &self.volume])?;
        let message = format!("create_snap {number} {origin}");
        let taken = shell::run("dmsetup", &["message", &self.pool, "0", &message]);
        shell::run("dmsetup", &["resume", &self.volume])?;
        taken?;
        self.snapshots.push(number);
        Ok(())
    }

    /// A clone of its newest snapshot: the snapshot's number in the pool, to delete it by.
    pub(super) fn clone_newest(&mut self, control: &Control) -> Result<u32> {
        let origin = self.snapshots.last().context("no snapshot to clone")?;
        let number = self.next;
        self.next += 1;
        control.message(&self.pool, &format!("create_snap {number} {origin}"))?;
        Ok(number)
    }

    /// The device of a clone.
    pub(super) fn activate(&self, control: &Control, number: u32, bytes: u64) -> Result<PathBuf> {
        let parameters = format!("/dev/mapper/{} {number}", self.pool);
        control.create(&self.clone_name(number), bytes / SECTOR, "thin", &parameters)
    }

    /// Takes a clone and its device away.
    pub(super) fn delete_clone(&self, control: &Control, number: u32) -> Result<()> {
        let name = self.clone_name(number);
        // A program of the kernel's may still look at it.
        shell::until("the device of a clone", || Ok(control.remove(&name).is_ok()))?;
        self.delete_unused(control, number)
    }

    /// Takes a clone away that has no device.
    pub(super) fn delete_unused(&self, control: &Control, number: u32) -> Result<()> {
        control.message(&self.pool, &format!("delete {number}"))
    }

    fn clone_name(&self, number: u32) -> String {
        format!("{}-clone-{number}", self.volume)
    }

    fn remove(&mut self) -> Result<()> {
        let Some(number) = self.live.take() else { return Ok(()) };
        shell::run("dmsetup", &["remove", "--retry", &self.volume])?;
        for number in std::iter::once(number).chain(self.snapshots.drain(..)) {
            shell::run("dmsetup", &["message", &self.pool, "0", &format!("delete {number}")])?;
        }
        Ok(())
    }
}

impl Drop for Thin {
    fn drop(&mut self) {
        note(self.remove());
        note(shell::run("dmsetup", &["remove", "--retry", &self.pool]).map(|_| ()));
    }
}

impl Chunk {
    /// In the tables.
    #[must_use]
    pub fn name(self) -> String {
        let how = if self.zeroing { "zeroing" } else { "no zeroing" };
        format!("dm-thin, {} KiB, {how}", self.bytes >> 10)
    }
}

/// Ignores a failed cleanup, since the virtual machine ends anyway.
fn note(done: Result<()>) {
    if let Err(error) = done {
        eprintln!("note: {error:#}");
    }
}
