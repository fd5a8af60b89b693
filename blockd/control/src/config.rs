//! How pools, health checks and this host are configured, with every value checked. Where the
//! values come from is not known here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use blockd_mapper::space::Marks;
use blockd_media::pool::PmemOptions;
use blockd_pmem::platform::RegionKey;

use crate::node::NodeId;

/// Requests of a queue at once. With copying, each has memory of its own; no disk of today is
/// faster with more.
pub const MAX_UBLK_DEPTH: i64 = 1024;

/// Most block devices that are added ahead of need. Each takes a thread, a number of the driver's,
/// and some hundred KiB of the kernel's memory.
pub const MAX_READY_DEVICES: i64 = 1024;

/// A pool to open at start, and to create when it isn't there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Unique.
    pub name: String,
    /// Its devices; at least one.
    pub devices: Vec<DeviceConfig>,
    /// Devices that join it, one at a time, when it is low.
    pub spares: Vec<DeviceConfig>,
    /// The region whose namespaces stand in place of the one device that is named, and of spares.
    pub region: Option<RegionShare>,
    /// A file in memory is meant: one that is gone after a boot is made anew.
    pub volatile: bool,
    /// Bytes of an extent.
    pub extent_size: u32,
    /// Whether its entries may be composite. Like the size of an extent, fixed when it is made.
    pub composite: bool,
    /// How long to wait for the IO of a previous owner to end.
    pub lock_wait: Duration,
    /// How long other hosts are watched and waited for, where several may reach the storage.
    pub claim_wait: Duration,
    /// Open it even if that loses answered writes that were not flushed.
    pub accept_loss: bool,
    /// How long a mapping may wait for its commit.
    pub commit_interval: Duration,
    /// Records that each worker's slot of the delta ring holds.
    pub ring_records: u64,
    /// Whether it is one of many, which take less memory each.
    pub sparing: bool,
    /// Where requests for more space are answered; nowhere without it.
    pub extend_socket: Option<PathBuf>,
    /// The policy when it fills up.
    pub space: SpaceConfig,
}

/// A pool's share of a region of persistent memory (P5, P8 to P11).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionShare {
    /// Which region.
    pub key: RegionKey,
    /// How much of it pools may have, from 1 to 100.
    pub percentage: u8,
    /// Whether the missing part of the share is created.
    pub create: bool,
    /// Devices that other pools name, which are theirs.
    pub others: Vec<PathBuf>,
}

/// Settings of a pool that can be changed while it is open: the policy when it fills up, and the
/// memory for its reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpaceConfig {
    /// Where its states begin; `None`: it has none but full.
    pub marks: Option<Marks>,
    /// Most bytes that a volume is granted at a time.
    pub quantum: u64,
    /// Bytes a second that folds of composite entries may copy; 0: nothing is folded.
    pub fold_rate: u64,
    /// Bytes that the cache of blocks which several volumes share may hold; 0: there is none. Pools
    /// in memory have none, whatever this says.
    pub read_cache: u64,
    /// Most bytes of all volumes together, in hundredths of the pool's size; `None`: no limit.
    pub overprovision_percent: Option<u64>,
    /// Bytes up to which its first file is made longer when it is low; 0 for not at all.
    pub grow_limit: u64,
    /// By how much; 0 for the larger of 4 quanta and 1 % of the pool.
    pub grow_step: u64,
    /// A program that is run when it is low.
    pub hook: Option<PathBuf>,
    /// How long that may take.
    pub hook_timeout: Duration,
}

impl Default for SpaceConfig {
    fn default() -> Self {
        Self {
            marks: Some(Marks::default()),
            quantum: 16 << 20,
            fold_rate: 64 << 20,
            read_cache: 0,
            overprovision_percent: None,
            grow_limit: 0,
            grow_step: 0,
            hook: None,
            hook_timeout: Duration::from_secs(60),
        }
    }
}

/// A device of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Empty for memory.
    pub path: PathBuf,
    /// The kind of the device.
    pub kind: DeviceKind,
    /// How large it is made.
    pub size: SizeWish,
    /// All of a file's space is taken at creation.
    pub preallocate: bool,
    /// IO bypasses the page cache, where the device can do that.
    pub direct: bool,
}

/// How large a device is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SizeWish {
    /// The device is not created: it has to exist.
    Existing,
    /// A size in bytes.
    Bytes(u64),
    /// A part of what is free on its file system, in percent.
    OfFree(u8),
}

/// How a device holds its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// A block device if the path is one, a file otherwise.
    Auto,
    /// A regular file.
    File,
    /// A block device.
    Disk,
    /// Memory of the daemon.
    Memory,
    /// Persistent memory, or a file that is served in the same way.
    Pmem(PmemOptions),
}

impl DeviceKind {
    /// Whether its bytes are memory of this host, which reads copy from.
    #[must_use]
    pub const fn is_memory(self) -> bool {
        matches!(self, Self::Memory | Self::Pmem(_))
    }
}

impl PoolConfig {
    /// Bytes that the cache of blocks which several volumes share may hold; none in memory.
    #[must_use]
    pub fn read_cache(&self) -> u64 {
        let is_memory = self.devices.iter().any(|device| device.kind.is_memory());
        if is_memory { 0 } else { self.space.read_cache }
    }
}

/// This host as a member of its pools.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeConfig {
    /// Its identity; unknown where neither the file nor the host says one.
    pub id: Option<NodeId>,
    /// How long a script of a hook directory may take.
    pub hook_timeout: Duration,
    /// The directories of scripts are in here.
    pub hooks_dir: PathBuf,
}

/// How it is found out what is wrong with pools and volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HealthConfig {
    /// Whether it is.
    pub enabled: bool,
    /// How often it is looked.
    pub interval: Duration,
    /// A device is slow when half of its IO takes longer.
    pub slow_io: Duration,
    /// A cause persists for at least this long, so that one that comes and goes is reported once.
    pub hold: Duration,
    /// The same for IO errors, which are over when they are counted.
    pub errors_hold: Duration,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            interval: Duration::from_secs(5),
            slow_io: Duration::from_millis(500),
            hold: Duration::from_secs(10),
            errors_hold: Duration::from_mins(10),
        }
    }
}

/// Where the daemons of other hosts reach this one, and it them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostsConfig {
    /// Where it listens; nowhere without it.
    pub listen: Option<SocketAddr>,
    /// HOST:PORT by which others find it; empty for that of `listen`.
    pub address: String,
    /// Certificates; without them only this machine is reached.
    pub tls: Option<HostsTls>,
}

/// Files of certificates between hosts, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostsTls {
    /// This host's chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of all hosts' certificates.
    pub ca: PathBuf,
}

impl HostsConfig {
    /// The address that other hosts are given; empty where none is served.
    #[must_use]
    pub fn published(&self) -> String {
        match (&self.listen, self.address.as_str()) {
            (None, _) => String::new(),
            (Some(listen), "") => listen.to_string(),
            (Some(_), address) => address.to_owned(),
        }
    }
}
