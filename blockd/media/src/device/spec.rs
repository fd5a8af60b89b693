//! The properties of a device, and how it is opened.

use std::path::PathBuf;

use blockd_pmem::media::Durability;

use super::super::pmem::{self, PmemInfo, PmemOptions};

/// The kind of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// A regular file.
    File,
    /// A block device.
    Disk,
    /// Memory of this process: gone with it.
    Memory,
    /// Persistent memory: a character device, or a file that is served in the same way.
    Pmem(PmemOptions),
}

/// How a device is found, or made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    /// Where it is; a name only for memory.
    pub path: PathBuf,
    /// The kind of the device.
    pub kind: DeviceKind,
    /// Bytes of a file or memory that is made. What is there already is as long as it is.
    pub size: Option<u64>,
    /// A file's space is allocated when it is made, and never given back.
    pub preallocate: bool,
    /// Past the page cache, where the file system can.
    pub direct: bool,
}

/// Facts about an open device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Where it is.
    pub path: PathBuf,
    /// The kind of the device.
    pub kind: DeviceKind,
    /// Bytes.
    pub size: u64,
    /// Logical block in bytes.
    pub block_size: u32,
    /// Past the page cache.
    pub direct: bool,
    /// In memory, and served by copying.
    pub mapped: bool,
    /// A file with holes, that freed extents become again.
    pub sparse: bool,
    /// Of persistent memory.
    pub pmem: Option<PmemInfo>,
}

impl DeviceInfo {
    /// The durability of writes to it.
    #[must_use]
    pub fn durability(&self) -> Durability {
        match self.kind {
            DeviceKind::Pmem(_) => match self.pmem.as_ref().map(|pmem| pmem.durability) {
                Some(pmem::Level::PowerSafe) => Durability::PowerSafe,
                Some(pmem::Level::Volatile) => Durability::Volatile,
                Some(pmem::Level::RestartSafe) | None => Durability::RestartSafe,
            },
            DeviceKind::Memory => Durability::Volatile,
            // A file in memory outlives the daemon, and no more.
            DeviceKind::File if self.mapped => Durability::RestartSafe,
            DeviceKind::File | DeviceKind::Disk => Durability::PowerSafe,
        }
    }
}
