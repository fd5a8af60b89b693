//! Disks that are slow, fail, hang, have bad sectors, or are pulled out.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;

use super::ward::{SLOW, Side, Table, Trouble, Ward, settings};
use crate::workload::csi::life::{Shape, Volume};
use crate::workload::device::{Buffer, Device};
use crate::workload::guest;

const MIB: u64 = 1 << 20;
/// Bytes of the volumes whose disks are troubled, all of them written.
const VOLUME: u64 = 16 * MIB;
/// More than a pool leaves between commits.
const COMMITTED: Duration = Duration::from_secs(3);
/// A claim that can't be read is late after a second.
const CLAIM_IS_LATE: Duration = Duration::from_secs(2);
/// Bytes of the disk below device-mapper: few, so that it is full soon.
const SWITCHED: u64 = 256 * MIB;
/// Bytes of a write that fills a volume.
const WRITE: u32 = 1 << 20;

/// A disk below device-mapper, which can do something else with it from one moment to the next.
#[derive(Debug)]
pub(super) struct Switched {
    name: &'static str,
    below: PathBuf,
    path: PathBuf,
    sectors: u64,
}

impl Switched {
    /// The first part of a disk, handed through.
    pub(super) fn new(name: &'static str, below: &Path) -> Result<Self> {
        let sectors = SWITCHED / 512;
        let path = Path::new("/dev/mapper").join(name);
        let disk = Self { name, below: below.to_path_buf(), path, sectors };
        let table = disk.table("linear", "");
        guest::shell(&format!(
            "dmsetup create --noudevsync {name} --table '{table}'; dmsetup mknodes"
        ))?;
        Ok(disk)
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn table(&self, target: &str, words: &str) -> String {
        let (sectors, below) = (self.sectors, self.below.display());
        match target {
            "error" => format!("0 {sectors} error"),
            _ => format!("0 {sectors} {target} {below} 0 {words}"),
        }
    }

    /// Replaces the target from now on. Requests in flight end before.
    fn switch(&self, target: &str, words: &str) -> Result<()> {
        let (name, table) = (self.name, self.table(target, words));
        guest::shell(&format!(
            "dmsetup suspend --nolockfs --noudevsync {name}; \
             dmsetup load {name} --table '{table}'; dmsetup resume --noudevsync {name}"
        ))
        .map(drop)
    }

    fn mend(&self) -> Result<()> {
        self.switch("linear", "")
    }
}

/// Writes all of a device, so that what is read comes from the disk.
fn fill(path: &Path) -> Result<()> {
    let device = Device::open(path)?;
    let mut buffer = Buffer::default();
    for (number, offset) in (0..device.size).step_by(WRITE as usize).enumerate() {
        buffer.of(WRITE as usize).fill(u8::try_from(number % 251)? + 1);
        device.write(offset, &buffer)?;
    }
    device.flush()
}

/// A raw volume with data in it.
fn filled(ward: &mut Ward<'_>) -> Result<Volume> {
    let volume = ward.up(Shape::Block, VOLUME)?;
    fill(&volume.target(0))?;
    Ok(volume)
}

/// Reads some of a device, whatever becomes of that.
fn read(path: &Path) -> impl Fn() + Send + use<> {
    let path = path.to_path_buf();
    let begun = Clock::start();
    move || {
        let Ok(device) = Device::open(&path) else { return };
        let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(0);
        // Anywhere, as time will have it.
        let offset = millis * 7919 % (VOLUME / 4096) * 4096;
        let _ = device.read(offset, 4096, &mut Buffer::default());
    }
}

/// The faults that device-mapper can cause in a pool's disk.
pub(super) fn all(ward: &mut Ward<'_>, disk: &Switched, short: bool) -> Result<()> {
    let volume = filled(ward)?;
    let read = read(&volume.target(0));
    let errors = Trouble {
        cause: "reads of the disk fail",
        side: Side::Controller,
        says: &["failed"],
        reads: Some(&read),
        absent: false,
    };
    ward.trouble(
        &errors,
        &volume,
        |_| disk.switch("flakey", "0 3600 1 error_reads"),
        |_| disk.mend(),
    )?;
    if !short {
        let slow = Trouble { cause: "the disk is slow", says: &["half of its IO takes"], ..errors };
        ward.trouble(&slow, &volume, |_| disk.switch("delay", "600"), |_| disk.mend())?;
        hangs(ward, disk, &volume)?;
    }
    ward.down(&volume)?;
    fails(ward, disk)
}

/// Requests that never end, until they do.
fn hangs(ward: &mut Ward<'_>, disk: &Switched, volume: &Volume) -> Result<()> {
    let hang = Trouble {
        cause: "the disk does not answer",
        side: Side::Controller,
        says: &["has been under way"],
        reads: None,
        absent: false,
    };
    let path = volume.target(0);
    let reader = std::cell::Cell::new(None);
    let name = disk.name;
    ward.trouble(
        &hang,
        volume,
        |_| {
            guest::shell(&format!("dmsetup suspend --nolockfs --noflush --noudevsync {name}"))?;
            reader.set(Some(std::thread::spawn(read(&path))));
            Ok(())
        },
        |_| {
            guest::shell(&format!("dmsetup resume --noudevsync {name}"))?;
            let ended = reader.take().map(std::thread::JoinHandle::join);
            ensure!(ended.is_none_or(|ended| ended.is_ok()), "the reader");
            Ok(())
        },
    )
}

/// Everything fails, metadata too: what that ends is final, and a new start mends it. The write
/// comes after the claim is late: one that waits for the claim is answered too.
fn fails(ward: &mut Ward<'_>, disk: &Switched) -> Result<()> {
    let volume = filled(ward)?;
    let path = volume.target(0);
    let write = move || {
        // Discards are metadata, which a commit then has to write.
        let line = format!("blkdiscard --force --offset 0 --length {WRITE} {}", path.display());
        let _ = guest::shell(&line);
        let _ = Device::open(&path).and_then(|device| device.flush());
    };
    let failed = Trouble {
        cause: "the disk fails",
        side: Side::Controller,
        says: &["has failed"],
        reads: Some(&write),
        absent: false,
    };
    ward.trouble(
        &failed,
        &volume,
        |_| {
            disk.switch("error", "")?;
            std::thread::sleep(CLAIM_IS_LATE);
            Ok(())
        },
        |ward| {
            disk.mend()?;
            ward.restart(|_| Ok(()))
        },
    )?;
    ward.down(&volume)
}

/// A disk of the kernel's own that fails reads of the sectors that are set as bad.
pub(super) fn bad_sectors(table: &mut Table) -> Result<()> {
    const SETTINGS: &str = "/sys/bus/pseudo/drivers/scsi_debug";
    const PARAMETERS: &str = "/sys/module/scsi_debug/parameters";
    let mut ward = Ward::start("sectors", Path::new("/dev/sda"), SLOW, table)?;
    let volume = filled(&mut ward)?;
    let read = read(&volume.target(0));
    let bad = Trouble {
        cause: "the disk has bad sectors",
        side: Side::Controller,
        says: &["failed"],
        reads: Some(&read),
        absent: false,
    };
    let set = |path: String, value: &str| {
        fs::write(&path, value).with_context(|| format!("{value} to {path}"))
    };
    ward.trouble(
        &bad,
        &volume,
        |_| {
            // All of them: only the pool knows where the volume's data lies.
            set(format!("{PARAMETERS}/medium_error_start"), "0")?;
            set(format!("{PARAMETERS}/medium_error_count"), "1000000")?;
            set(format!("{SETTINGS}/opts"), "2")
        },
        |_| set(format!("{SETTINGS}/opts"), "0"),
    )?;
    ward.down(&volume)?;
    ward.end()
}

/// Persistent memory in which the kernel lists bad blocks.
pub(super) fn bad_memory(table: &mut Table) -> Result<()> {
    const DRIVER: &str = "/sys/bus/nd/drivers/nd_pmem";
    let mut ward = Ward::start("memory", Path::new("/dev/pmem0"), SLOW, table)?;
    let volume = filled(&mut ward)?;
    let bad = Trouble {
        cause: "memory has bad blocks",
        side: Side::Node,
        says: &["bad blocks"],
        reads: None,
        absent: false,
    };
    let list = "/sys/block/pmem0/badblocks";
    let name = fs::canonicalize("/sys/block/pmem0/device")?;
    let name = name.file_name().context("a name of memory")?.to_string_lossy().into_owned();
    ward.trouble(
        &bad,
        &volume,
        |_| {
            // From 16 MiB on, 64 MiB: some of the volume is there.
            fs::write(list, "32768 131072").context("marking blocks")
        },
        |ward| {
            // The driver finds none when it comes to it anew.
            ward.restart(|_| {
                fs::write(format!("{DRIVER}/unbind"), &name)?;
                Ok(fs::write(format!("{DRIVER}/bind"), &name)?)
            })
        },
    )?;
    ward.down(&volume)?;
    ward.end()
}

/// A disk that is pulled out and put back.
pub(super) fn unplugged(table: &mut Table) -> Result<()> {
    const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_blk";
    let mut ward = Ward::start("unplugged", Path::new("/dev/vdb"), SLOW, table)?;
    let volume = filled(&mut ward)?;
    let gone = Trouble {
        cause: "the disk is pulled out",
        side: Side::Controller,
        says: &["/dev/vdb"],
        reads: None,
        absent: false,
    };
    // Written data is committed within a second. Else writes meet a disk without an end, which is
    // reported as one without space, and the daemon waits for space before it ends.
    std::thread::sleep(COMMITTED);
    let name = fs::canonicalize("/sys/block/vdb/device")?;
    let name = name.file_name().context("a name of a disk")?.to_string_lossy().into_owned();
    ward.trouble(
        &gone,
        &volume,
        |_| fs::write(format!("{DRIVER}/unbind"), &name).context("pulling"),
        |ward| {
            ward.restart(|ward| {
                fs::write(format!("{DRIVER}/bind"), &name)?;
                // Its name is another while the disk that was pulled is held open.
                let block = format!("{DRIVER}/{name}/block");
                let found = fs::read_dir(block)?.next().context("a disk that was put back")??;
                let path = Path::new("/dev").join(found.file_name());
                ward.rig.daemon.move_pool(&settings(&path, SLOW))
            })
        },
    )?;
    ward.down(&volume)?;
    ward.end()
}
