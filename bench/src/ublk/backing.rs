//! The disks that everything lies on: ramdisks, or disks with limits.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// Bytes of each. Ramdisks take memory as they are written.
pub const DISK_BYTES: u64 = 2 << 30;

/// The folder with a link to each disk, by its number, where they are no ramdisks.
const LINKS: &str = "/dev/bench";

/// A disk by its use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disk {
    /// Used as it is: by itself, and by everything that only passes requests on.
    Plain,
    /// Our pool whose devices copy; later that with extents of 64 KiB.
    First,
    /// Our pool without copying; later that with extents of 256 KiB.
    Second,
    /// Data of dm-thin with chunks of 64 KiB. Where instructions are counted, our pool of volumes
    /// with snapshots.
    ThinSmall,
    /// Data of dm-thin with chunks of 256 KiB.
    ThinLarge,
    /// Metadata of dm-thin with chunks of 64 KiB.
    MetaSmall,
    /// Metadata of dm-thin with chunks of 256 KiB.
    MetaLarge,
    /// Persistent memory as a character device: our pool.
    Dax,
    /// The same, of which blocks may be torn: our pool for comparison.
    DaxTorn,
    /// Persistent memory as a block device, used as it is.
    Pmem,
}

impl Disk {
    /// How many there are, persistent memory not counted.
    pub const COUNT: usize = 7;

    /// Its device.
    #[must_use]
    pub fn path(self) -> PathBuf {
        let number = match self {
            Self::Plain => 0,
            Self::First => 1,
            Self::Second => 2,
            Self::ThinSmall => 3,
            Self::ThinLarge => 4,
            Self::MetaSmall => 5,
            Self::MetaLarge => 6,
            Self::Dax => return PathBuf::from("/dev/dax0.0"),
            Self::Pmem => return PathBuf::from("/dev/pmem1"),
            Self::DaxTorn => return PathBuf::from("/dev/dax2.0"),
        };
        let link = PathBuf::from(format!("{LINKS}/{number}"));
        fs::canonicalize(&link).unwrap_or_else(|_| PathBuf::from(format!("/dev/ram{number}")))
    }

    /// Writes so much of it, so that the kernel has found the memory before anything is measured.
    pub fn warm(self, bytes: u64) -> Result<()> {
        const PIECE: usize = 1 << 20;
        let path = self.path();
        let context = || format!("warm {}", path.display());
        let file = OpenOptions::new().write(true).open(&path).with_context(context)?;
        let zeroes = vec![0; PIECE];
        let mut at = 0;
        while at < bytes {
            file.write_all_at(&zeroes, at).with_context(context)?;
            at += PIECE as u64;
        }
        file.sync_all().with_context(context)
    }

    /// Makes the old content unreadable: both ends become zeroes.
    pub fn forget(self) -> Result<()> {
        const ENDS: usize = 4 << 20;
        if matches!(self, Self::Dax | Self::DaxTorn) {
            // The machine's memory is new with each boot.
            return Ok(());
        }
        let path = self.path();
        let context = || format!("clean {}", path.display());
        let file = OpenOptions::new().write(true).open(&path).with_context(context)?;
        let zeroes = vec![0; ENDS];
        file.write_all_at(&zeroes, 0).with_context(context)?;
        file.write_all_at(&zeroes, DISK_BYTES - ENDS as u64).with_context(context)?;
        file.sync_all().with_context(context)
    }
}

/// The kernel's description of the disks, for the report.
///
/// # Errors
/// If there are none.
pub fn words() -> Result<String> {
    let path = Disk::Plain.path();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let size = fs::read_to_string(format!("/sys/block/{name}/size"));
    let sectors: u64 = size.context("no disk; of ramdisks: module brd")?.trim().parse()?;
    Ok(format!("{} disks of {} MiB, {name} and others", Disk::COUNT, sectors >> 11))
}
