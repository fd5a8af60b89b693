//! NBD as bytes, for servers and clients, and a client.
//!
//! [`codec`] knows the protocol and does no IO. [`client`] is a small client that blocks. The items
//! here are what both sides agree on before the first request.
//!
//! A server parses the bytes that have arrived, and a client finds its server by a URI:
//!
//! ```
//! use blockd_nbd::client::{ServerAddress, Uri};
//! use blockd_nbd::codec::request::{Header, Parsed, parse};
//!
//! let header = Header { kind: 0, cookie: 7, offset: 4096, len: 512, ..Header::default() };
//! let mut bytes = Vec::new();
//! header.encode(false, &mut bytes);
//! assert!(matches!(parse(&bytes, false), Parsed::Header(found, 28) if found == header));
//!
//! let uri: Uri = "nbd://storage.example/data".parse()?;
//! assert!(matches!(uri.server, ServerAddress::Tcp { port: 10809, .. }));
//! # Ok::<(), blockd_nbd::client::ClientError>(())
//! ```
#![forbid(unsafe_code)]

pub mod client;
pub mod codec;

/// The metadata context that the protocol's document defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The metadata context of a volume's written ranges.
pub const ALLOCATED: &str = "blockd:allocated";
/// Followed by a snapshot's name: the changes since it was taken.
pub const CHANGED_SINCE: &str = "blockd:changed-since:";

/// The most metadata contexts that a connection selects: each of them is looked at for each
/// question, and all have to fit in one answer.
pub const MAX_CONTEXTS: usize = 16;

/// The subject of a metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Describes {
    /// Holes and zeroes, as the protocol's document has them.
    BaseAllocation,
    /// The written ranges.
    Allocated,
    /// The ranges that differ from the snapshot with this id.
    ChangedSince(u32),
}

/// A metadata context that an export has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContext {
    pub name: String,
    pub describes: Describes,
}

impl MetaContext {
    /// The context of the changes since a snapshot.
    #[must_use]
    pub fn changed_since(name: &str, snapshot: u32) -> Self {
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

/// The result of the negotiation between server and client: all that determines the validation of
/// requests and the form of replies. It does not change while the connection lives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// Replies are structured. Always so when `extended` is.
    pub structured: bool,
    /// Headers are extended, and lengths have 64 bits.
    pub extended: bool,
    /// The contexts that the client selected for this export, at most [`MAX_CONTEXTS`].
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
    /// The connection is encrypted. Anything sent before the encryption is ignored.
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

    /// The flags of the requests that the client may send.
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

/// The information about an export that clients get.
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

/// Why an export can't be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    #[error("there is no such export")]
    Unknown,
    /// The export exists, but is not available now; the text has the reason.
    #[error("{0}")]
    Refused(String),
    #[error("the server is shutting down")]
    ShuttingDown,
}
