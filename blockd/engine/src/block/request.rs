//! A request moves by value and is answered exactly once.

use super::{BlockError, Buffer};

/// An operation on a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Fill the buffer.
    Read,
    /// Write the buffer.
    Write {
        /// Durable when answered.
        fua: bool,
    },
    /// Make every write answered before durable.
    Flush,
    /// The range's content is no longer needed.
    Discard {
        /// Durable when answered.
        fua: bool,
    },
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// Its space may be given back.
        unmap: bool,
        /// Durable when answered.
        fua: bool,
    },
}

impl Operation {
    /// The same, to be durable when it is answered.
    #[must_use]
    #[inline]
    pub const fn durable(self) -> Self {
        match self {
            Self::Read | Self::Flush => self,
            Self::Write { .. } => Self::Write { fua: true },
            Self::Discard { .. } => Self::Discard { fua: true },
            Self::WriteZeroes { unmap, .. } => Self::WriteZeroes { unmap, fua: true },
        }
    }
}

/// A request on its way. It ends as a [`Completion`]; one that is dropped before is a fault of the
/// program, which debug builds stop at.
#[derive(Debug)]
pub struct Request {
    /// The operation to execute.
    pub operation: Operation,
    /// First byte of the volume.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Names the request to the front-end that made it.
    pub tag: u64,
    buffer: Option<Buffer>,
    ended: bool,
}

impl Request {
    /// A request. Reads and writes bring a buffer of at least `len` bytes.
    #[must_use]
    pub const fn new(
        operation: Operation,
        offset: u64,
        len: u64,
        tag: u64,
        buffer: Option<Buffer>,
    ) -> Self {
        Self { operation, offset, len, tag, buffer, ended: false }
    }

    /// Its memory.
    #[must_use]
    #[inline]
    pub const fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    /// Ends the request.
    #[must_use]
    #[inline]
    pub fn complete(mut self, result: Result<(), BlockError>) -> Completion {
        self.ended = true;
        Completion {
            operation: self.operation,
            offset: self.offset,
            len: self.len,
            tag: self.tag,
            buffer: self.buffer.take(),
            result,
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.ended && !std::thread::panicking() {
            tracing::error!(tag = self.tag, "a request was dropped without an answer");
            debug_assert!(self.ended, "a request was dropped without an answer");
        }
    }
}

/// The end of a [`Request`]: its answer, and its memory.
#[derive(Debug)]
pub struct Completion {
    /// The operation that was executed.
    pub operation: Operation,
    /// First byte of the volume.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The request's name.
    pub tag: u64,
    /// Its memory; filled by a read that succeeded.
    pub buffer: Option<Buffer>,
    /// The answer.
    pub result: Result<(), BlockError>,
}
