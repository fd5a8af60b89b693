//! NBD: codec, handshake, and the session on a worker's ring.
//!
//! `codec` knows the protocol and does no IO. `listener` accepts connections and has
//! `handshake` negotiate them, through `tls` where that is wanted; then they are a worker's.

pub mod codec;
pub mod handshake;
pub mod listener;
mod places;
pub mod session;
pub mod tls;

use std::future::Future;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use blockd_mapper::units::VolumeId;

/// The metadata context that the protocol's document defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// What of a volume was written.
pub const ALLOCATED: &str = "blockd:allocated";
/// Followed by a snapshot's name: what has changed since it was taken.
pub const CHANGED_SINCE: &str = "blockd:changed-since:";

/// The most metadata contexts that a connection selects: each of them is looked at for each
/// question, and all have to fit in one answer.
pub const MAX_CONTEXTS: usize = 16;

/// What a metadata context tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Describes {
    /// Holes and zeroes, as the protocol's document has them.
    BaseAllocation,
    /// What was written.
    Allocated,
    /// What differs from a snapshot.
    ChangedSince(VolumeId),
}

/// A metadata context that an export has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContext {
    pub name: String,
    pub describes: Describes,
}

impl MetaContext {
    /// What has changed since a snapshot.
    #[must_use]
    pub fn changed_since(name: &str, snapshot: VolumeId) -> Self {
        Self {
            name: format!("{CHANGED_SINCE}{name}"),
            describes: Describes::ChangedSince(snapshot),
        }
    }
}

/// A metadata context that a client has selected, and the id under which it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected {
    pub id: u32,
    pub describes: Describes,
}

/// The longest payload of a request or reply that is taken or sent. The protocol's document
/// names 2^25 as what every server should take, and clients split what is longer.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// What server and client agreed on: everything that decides how requests are judged and what
/// replies look like. It does not change while the connection lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Replies are structured. Always so when `extended` is.
    pub structured: bool,
    /// Headers are extended, and lengths have 64 bits.
    pub extended: bool,
    /// What the client selected for this export, at most [`MAX_CONTEXTS`].
    pub contexts: Vec<Selected>,
    pub read_only: bool,
    /// Bytes; a multiple of `block_min`.
    pub size: u64,
    /// Offsets and lengths have to be multiples of it: the volume's block.
    pub block_min: u32,
    pub block_preferred: u32,
    /// The longest read, and the longest payload of a write.
    pub block_max: u32,
    /// A flush covers what other connections wrote.
    pub multi_conn: bool,
    /// The connection is encrypted. What was said before it was counts for nothing.
    pub tls: bool,
}

impl Negotiated {
    /// The agreement on `export` before the client asked for anything.
    #[must_use]
    pub fn plain(export: &ExportInfo) -> Self {
        Self {
            structured: false,
            extended: false,
            contexts: Vec::new(),
            read_only: export.read_only,
            size: export.size,
            block_min: export.block_size,
            block_preferred: export.preferred_size.max(export.block_size),
            block_max: MAX_PAYLOAD_BYTES,
            multi_conn: export.multi_conn,
            tls: false,
        }
    }

    /// The flags that tell the client what it may ask for.
    #[must_use]
    pub fn transmission_flags(&self) -> u16 {
        use codec::transmission as flag;
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        if self.read_only {
            flags |= flag::READ_ONLY;
        } else {
            flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
        }
        if self.structured {
            flags |= flag::SEND_DF;
        }
        if self.multi_conn {
            flags |= flag::CAN_MULTI_CONN;
        }
        flags
    }
}

/// What clients are told of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its own name, whichever name the client used.
    pub name: String,
    /// One line for people, with the size; may be empty.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// The volume's block: 512 or 4096.
    pub block_size: u32,
    /// Least bytes that are served without reading around them; a power of two.
    pub preferred_size: u32,
    pub read_only: bool,
    pub multi_conn: bool,
}

/// An export that a client asked for by name, with what a session needs to serve it.
#[derive(Clone, Debug)]
pub struct Opened<V> {
    pub info: ExportInfo,
    pub volume: V,
}

/// Why an export can't be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    #[error("there is no such export")]
    Unknown,
    /// It is there, and not to be had now; the text says why.
    #[error("{0}")]
    Refused(String),
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// The exports that clients may see. Asked during negotiation only, so it may take a moment,
/// but nothing that strangers could make expensive.
pub trait Exports: Send + Sync + 'static {
    /// What a session needs to serve an export.
    type Volume: Send + 'static;

    /// All of them.
    fn list(&self) -> impl Future<Output = Vec<ExportInfo>> + Send;

    /// The export of that name. The empty name is the default export, if there is one.
    fn open(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Opened<Self::Volume>, ExportError>> + Send;

    /// The metadata contexts that an export has besides [`BASE_ALLOCATION`], the newest last.
    fn contexts(&self, _volume: &Self::Volume) -> impl Future<Output = Vec<MetaContext>> + Send {
        std::future::ready(Vec::new())
    }
}

/// Whose connection it is, as far as limits are concerned.
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
    /// Who it is, for people.
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

/// Who serves connections once they are negotiated.
pub trait Sessions<V>: Send + Sync + 'static {
    /// Takes over a connection. The next byte to read from `stream` is the first of the
    /// transmission phase. The socket is in blocking mode.
    fn connect(&self, stream: OwnedFd, session: Session<V>);

    /// Closes one connection of a listener that is full, to make room for a new one: one that has
    /// been idle for this long, of the peer that has the most connections, and of those the one
    /// that has been idle for longest. Returns `false` if there is none.
    fn displace_idle(&self, listener: u64, idle: Duration) -> impl Future<Output = bool> + Send;
}
