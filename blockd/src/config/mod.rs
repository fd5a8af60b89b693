//! The configuration: read from a file, checked once, and with all defaults in one place.
//!
//! `deploy/blockd.toml` documents every key; a test holds its values equal to the defaults.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_control::config::{HealthConfig, HostsConfig, NodeConfig, PoolConfig};
use blockd_control::direct::DirectConfig;
pub(crate) use blockd_control::services::with_causes;
use blockd_media::error::Error;
use blockd_media::place::Places;

mod command;
mod direct;
mod file;
mod listen;
mod parse;
mod surroundings;

pub use command::{check, show};
pub use parse::note_others;

/// The configuration of the daemon, with every value checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The file it comes from; without one, all is as by default.
    pub source: Option<PathBuf>,
    /// Sockets, the lock against a second daemon, delta rings. Has to be a tmpfs.
    pub runtime_dir: PathBuf,
    /// The folder of the state that survives a restart.
    pub state_dir: PathBuf,
    /// Where the control API is served.
    pub control_socket: PathBuf,
    /// The time limit for requests in flight when the daemon stops.
    pub stop_timeout: Duration,
    /// In the file's order.
    pub pools: Vec<PoolConfig>,
    /// Whether the file has no pool: the one of [`Self::pools`] is there by default.
    pub has_implied_pool: bool,
    /// Pools whose volumes are namespaces of persistent memory.
    pub direct_pools: Vec<DirectConfig>,
    /// The template of pools that are created at run time.
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
    /// The level and the format of the log.
    pub log: LogConfig,
    /// This host as a member of its pools.
    pub node: NodeConfig,
    /// How pools and volumes are looked at.
    pub health: HealthConfig,
    /// Daemons of other hosts that share cells with this one.
    pub hosts: HostsConfig,
}

/// The NBD server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdConfig {
    /// Where it listens.
    pub listeners: Vec<ListenerConfig>,
    /// The time limit of a client's handshake.
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
    /// TLS is optional for clients.
    Allowed,
    /// TLS is required; clients get no information before it.
    Required,
}

/// Files of the NBD server's certificates, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsConfig {
    /// The server's chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of the certificates that clients must present; without it they present none.
    pub client_ca: Option<PathBuf>,
}

/// Block devices of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UblkConfig {
    /// Volumes may be attached so.
    pub enabled: bool,
    /// Queues of a device that specifies no number.
    pub queues: u16,
    /// Requests that each can have in flight. 0 for the number that fits, with and without copying.
    pub depth: u16,
    /// Most bytes of a read or write.
    pub max_bytes: u32,
    /// Nothing is copied, where kernel and pool can do that.
    pub zero_copy: bool,
    /// Devices that are added ahead of need.
    pub ready: usize,
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

/// The level and the format of the log.
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
