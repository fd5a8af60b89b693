//! NBD: handshake, and the session on a worker's ring.
//!
//! The protocol itself is in the package `blockd-nbd`. `listener` accepts connections and has
//! `handshake` negotiate them, through `tls` where that is configured; then a worker serves them.

pub mod handshake;
pub mod listener;
mod places;
pub mod session;
pub mod tls;

use std::future::Future;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use blockd_nbd::{ExportError, ExportInfo, MetaContext, Negotiated};

/// An export that a client asked for by name, with what a session needs to serve it.
#[derive(Clone, Debug)]
pub struct Opened<V> {
    pub info: ExportInfo,
    pub volume: V,
}

/// The exports that clients may see. Asked during negotiation only, so it may take a moment,
/// but nothing that strangers could make expensive.
pub trait Exports: Send + Sync + 'static {
    /// The volume of an export, as a session serves it.
    type Volume: Send + 'static;

    /// All of them.
    fn list(&self) -> impl Future<Output = Vec<ExportInfo>> + Send;

    /// The export of that name. The empty name is the default export, if there is one.
    fn open(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Opened<Self::Volume>, ExportError>> + Send;

    /// The metadata contexts that an export has besides `base:allocation`, the newest last.
    fn contexts(&self, _volume: &Self::Volume) -> impl Future<Output = Vec<MetaContext>> + Send {
        std::future::ready(Vec::new())
    }
}

/// The peer of a connection, for limits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Peer {
    /// Not known; all of these are one.
    #[default]
    Unknown,
    /// A host, over TCP. Its ports are all the same.
    Host(IpAddr),
    /// A process of this host, over a Unix socket.
    Process(i32),
}

/// Where a connection comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Origin {
    /// The listener's number; 0 for connections without a listener.
    pub listener: u64,
    /// The client.
    pub peer: Peer,
}

/// A negotiated connection on its way to a worker.
pub struct Session<V> {
    pub volume: V,
    /// The export's own name.
    pub export: String,
    pub negotiated: Negotiated,
    /// The peer's address, for logs and lists.
    pub peer: String,
    pub origin: Origin,
    /// Dropped when the connection ends: its place among the listener's connections.
    pub guard: Option<Box<dyn Send>>,
}

impl<V> std::fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("export", &self.export)
            .field("negotiated", &self.negotiated)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// Serves connections once they are negotiated.
pub trait Sessions<V>: Send + Sync + 'static {
    /// Takes over a connection. The next byte to read from `stream` is the first of the
    /// transmission phase. The socket is in blocking mode.
    fn connect(&self, stream: OwnedFd, session: Session<V>);

    /// Closes one connection of a listener that is full, to make room for a new one of `peer`, that
    /// has at least `has` of them. It is one that has been idle for this long, of `peer` itself or
    /// of one with more connections. Of these the peer with the most gives one up, the one that has
    /// been idle for longest. Returns `false` if there is none.
    fn displace_idle(
        &self,
        listener: u64,
        peer: Peer,
        has: usize,
        idle: Duration,
    ) -> impl Future<Output = bool> + Send;
}
