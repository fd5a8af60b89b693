//! The configuration: read from a file, checked once, and with all defaults in one place.
//!
//! `deploy/blockd.toml` documents every key; a test holds its values equal to the defaults.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_mapper::space::Marks;
use blockd_media::error::Error;
use blockd_media::place::Places;
use blockd_media::pool::PmemOptions;
use blockd_pmem::platform::RegionKey;

use crate::direct::DirectConfig;
use crate::node::NodeId;

mod command;
mod direct;
mod file;
mod listen;
mod parse;

pub use command::{check, show};
pub use parse::{MAX_UBLK_DEPTH, note_others};

/// What the daemon does, with every value checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The file it comes from; without one, all is as by default.
    pub source: Option<PathBuf>,
    /// Sockets, the lock against a second daemon, delta rings. Has to be a tmpfs.
    pub runtime_dir: PathBuf,
    /// What is remembered from one start to the next.
    pub state_dir: PathBuf,
    /// Where the control API is served.
    pub control_socket: PathBuf,
    /// How long requests may take to end when the daemon is told to.
    pub stop_timeout: Duration,
    /// In the file's order.
    pub pools: Vec<PoolConfig>,
    /// Pools whose volumes are namespaces of persistent memory.
    pub direct_pools: Vec<DirectConfig>,
    /// What pools that are made at run time have in common.
    pub template: PoolConfig,
    /// The pool that is meant when none is named.
    pub default_pool: String,
    /// The NBD server.
    pub nbd: NbdConfig,
    /// Block devices of the kernel.
    pub ublk: UblkConfig,
    /// Threads of the data path.
    pub workers: WorkersConfig,
    /// Where metrics are served over HTTP.
    pub metrics: Option<SocketAddr>,
    /// What is logged, and how.
    pub log: LogConfig,
    /// This host as a member of its pools.
    pub node: NodeConfig,
    /// How pools and volumes are looked at.
    pub health: HealthConfig,
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
    /// What is wrong stays so for at least this long, so that what comes and goes is told once.
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
    /// Where requests for more space are answered; nowhere without it.
    pub extend_socket: Option<PathBuf>,
    /// What is done when it fills up.
    pub space: SpaceConfig,
}

/// What a pool has of a region of persistent memory (P5, P8 to P11).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionShare {
    /// Which region.
    pub key: RegionKey,
    /// How much of it pools may have, from 1 to 100.
    pub percentage: u8,
    /// What is missing of that is made.
    pub create: bool,
    /// Devices that other pools name, which are theirs.
    pub others: Vec<PathBuf>,
}

/// What is done when a pool fills up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpaceConfig {
    /// Where its states begin; `None`: it has none but full.
    pub marks: Option<Marks>,
    /// Bytes that a volume is granted at a time.
    pub quantum: u64,
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
    /// What it is.
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
    /// It isn't: it has to be there.
    Existing,
    /// So many bytes.
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

/// The NBD server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdConfig {
    /// Where it listens.
    pub listeners: Vec<ListenerConfig>,
    /// How long a client may take to say what it wants.
    pub handshake_timeout: Duration,
    /// Clients of a listener that may negotiate at once.
    pub max_handshakes: usize,
    /// How long a client may leave its replies unread.
    pub send_timeout: Duration,
    /// How long a client may send nothing in the middle of a request.
    pub receive_timeout: Duration,
    /// How long a client may stay connected without a request; `None` for ever.
    pub idle_timeout: Option<Duration>,
    /// Connections of one host to a listener, over TCP.
    pub max_connections_per_peer: usize,
    /// Requests of a connection that are worked on at once.
    pub max_requests: usize,
    /// Certificates, if any.
    pub tls: Option<TlsConfig>,
}

/// An address that NBD is served on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListenerConfig {
    /// Where.
    pub address: ListenAddress,
    /// Whether connections are encrypted.
    pub tls: TlsUse,
    /// Connections at once.
    pub max_connections: usize,
}

/// Where to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenAddress {
    /// A Unix socket, with the mode of its file.
    Unix {
        /// Absolute.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// A port.
    Tcp(SocketAddr),
}

/// Whether connections are encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsUse {
    /// Never.
    Off,
    /// When the client wants to.
    Allowed,
    /// Always; nothing is told to clients before.
    Required,
}

/// Files of the NBD server's certificates, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsConfig {
    /// The server's chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who signs the certificates that clients must show; without it they show none.
    pub client_ca: Option<PathBuf>,
}

/// Block devices of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UblkConfig {
    /// Volumes may be attached so.
    pub enabled: bool,
    /// Queues of a device that asks for no number.
    pub queues: u16,
    /// Requests that each can have in flight. 0: what fits, with and without copying.
    pub depth: u16,
    /// Most bytes of a read or write.
    pub max_bytes: u32,
    /// Nothing is copied, where kernel and pool can do that.
    pub zero_copy: bool,
    /// The daemon gets a mount namespace of its own.
    pub mount_namespace: bool,
}

/// Threads of the data path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkersConfig {
    /// How many.
    pub count: usize,
    /// Memory for the data of requests, in bytes for each worker.
    pub buffer_bytes: usize,
}

/// What is logged, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogConfig {
    /// One JSON object in each line.
    pub json: bool,
    /// A level, or directives as `tracing-subscriber` reads them.
    pub filter: String,
}

impl Config {
    /// Reads and checks a file. Without one, the file at the usual place if there is one, and else
    /// all is as by default.
    pub fn load(path: Option<&Path>) -> Result<Self, Error> {
        let places = Places::of_process();
        let usual = places.config_file();
        let path = path.or_else(|| usual.exists().then_some(usual.as_path()));
        let Some(path) = path else { return Self::parse("", None, &places) };
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::file("read the configuration", path, error))?;
        Self::parse(&text, Some(path), &places)
    }

    /// Checks a file's text.
    pub fn parse(text: &str, path: Option<&Path>, places: &Places) -> Result<Self, Error> {
        parse::parse(text, path, places)
    }
}

#[cfg(test)]
mod tests;
