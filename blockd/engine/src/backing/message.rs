//! Messages to a client, which send many replies with one system call.

use crate::block::Buffer;

/// Bytes of headers and small payloads in one message. The longest reply without a buffer is a
/// block status of a few hundred ranges; several of those fit.
const HEADER_BYTES: usize = 32 << 10;
/// Pieces of a message: the kernel takes at most 1024.
const MAX_PARTS: usize = 256;

/// A piece of a message.
#[derive(Debug)]
pub(super) enum Part {
    /// Bytes `from..to` of the headers.
    Headers { from: usize, to: usize },
    /// The front of a buffer, from a byte on.
    Buffer { buffer: Buffer, len: usize },
}

/// Bytes on their way to a client, in order. Owns the buffers it sends from.
#[derive(Debug)]
pub struct Message {
    pub(super) headers: Vec<u8>,
    pub(super) parts: Vec<Part>,
    pub(super) bytes: usize,
}

impl Default for Message {
    fn default() -> Self {
        Self {
            headers: Vec::with_capacity(HEADER_BYTES),
            parts: Vec::with_capacity(MAX_PARTS),
            bytes: 0,
        }
    }
}

impl Message {
    /// Whether there is nothing to send.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes to send.
    #[must_use]
    #[inline]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of the buffers that it owns.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        let bytes = |part: &Part| match part {
            Part::Headers { .. } => 0,
            Part::Buffer { buffer, .. } => super::Ring::capacity(buffer) as u64,
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Whether a reply with a header of this many bytes, and a buffer, still fits.
    #[must_use]
    #[inline]
    pub fn has_room(&self, header: usize) -> bool {
        self.headers.len() + header <= HEADER_BYTES && self.parts.len() + 2 <= MAX_PARTS
    }

    /// Adds bytes. There must be room.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        debug_assert!(self.has_room(bytes.len()), "callers ask first");
        let from = self.headers.len();
        self.headers.extend_from_slice(bytes);
        let end = self.headers.len();
        self.bytes += bytes.len();
        if let Some(Part::Headers { to, .. }) = self.parts.last_mut() {
            *to = end;
        } else {
            self.parts.push(Part::Headers { from, to: end });
        }
    }

    /// Adds the front of a buffer. There must be room.
    #[inline]
    pub fn push_buffer(&mut self, buffer: Buffer, len: usize) {
        // The header in front of it may have taken one of the two places that were asked for.
        debug_assert!(self.parts.len() < MAX_PARTS, "callers ask first");
        self.bytes += len;
        self.parts.push(Part::Buffer { buffer, len });
    }
}
