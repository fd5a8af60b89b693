//! A client's request, which may take several of the volume.

use blockd_engine::block::{BlockError, Buffer};
use blockd_nbd::codec::request::Asked;

/// Bytes of one request to a volume: as long as a buffer can be.
pub(super) const PIECE: u64 = 1 << 20;

/// The kind of a request, where its answer depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write {
        fua: bool,
    },
    /// Anything with neither data nor a payload.
    Plain,
}

/// A client's request in flight.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) asked: Asked,
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Bytes that requests to the volume were made for.
    pub(super) issued: u64,
    /// Such requests in flight.
    pub(super) in_flight: u32,
    /// The first failure, and where.
    pub(super) error: Option<(BlockError, u64)>,
    /// Something of the answer is on its way.
    pub(super) answering: bool,
}

impl Job {
    pub(super) const fn idle() -> Self {
        Self {
            asked: Asked { cookie: 0, offset: 0 },
            kind: Kind::Plain,
            offset: 0,
            len: 0,
            issued: 0,
            in_flight: 0,
            error: None,
            answering: false,
        }
    }

    /// Whether nothing is left to be done but the answer.
    pub(super) const fn is_done(&self) -> bool {
        self.in_flight == 0 && (self.issued == self.len || self.error.is_some())
    }
}

/// A write's payload that is still coming in.
#[derive(Debug)]
pub(super) struct Payload {
    pub(super) job: u16,
    /// The piece that is being filled.
    pub(super) buffer: Option<Buffer>,
    /// Bytes of the piece, and how many have come.
    pub(super) piece: usize,
    pub(super) filled: usize,
}
