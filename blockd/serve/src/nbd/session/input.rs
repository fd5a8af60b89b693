//! Received bytes that are not parsed yet.

use blockd_engine::backing::{Chunk, Ring};
use blockd_engine::block::Buffer;
use blockd_nbd::codec::request::EXTENDED_HEADER_BYTES;

/// Received bytes in order: the rest of earlier chunks, then the present one. A chunk is held only
/// while it is being looked at, so that all connections find some to receive into.
#[derive(Debug, Default)]
pub(super) struct Input {
    left: Vec<u8>,
    left_at: usize,
    chunk: Option<Chunk>,
    chunk_at: usize,
}

impl Input {
    pub(super) fn available(&self) -> usize {
        let chunk = self.chunk.as_ref().map_or(0, |chunk| chunk.len() - self.chunk_at);
        self.left.len() - self.left_at + chunk
    }

    /// Adds what has been received. There is no chunk at the time.
    pub(super) fn add(&mut self, chunk: Chunk, ring: &mut Ring) {
        if let Some(before) = self.chunk.replace(chunk) {
            ring.recycle(before);
        }
        self.chunk_at = 0;
    }

    /// The front, as much of a header as there is.
    pub(super) fn front(&self, ring: &Ring, into: &mut [u8; EXTENDED_HEADER_BYTES]) -> usize {
        let left = &self.left[self.left_at..];
        let first = left.len().min(into.len());
        into[..first].copy_from_slice(&left[..first]);
        let mut len = first;
        if let Some(chunk) = &self.chunk {
            let rest = &ring.chunk(chunk)[self.chunk_at..];
            let more = rest.len().min(into.len() - len);
            into[len..len + more].copy_from_slice(&rest[..more]);
            len += more;
        }
        len
    }

    /// Drops this many bytes, which must be there.
    pub(super) fn skip(&mut self, bytes: usize) {
        let left = (self.left.len() - self.left_at).min(bytes);
        self.left_at += left;
        self.chunk_at += bytes - left;
        if self.left_at == self.left.len() {
            self.left.clear();
            self.left_at = 0;
        }
    }

    /// Moves this many bytes, which must be there, to a buffer.
    pub(super) fn take(&mut self, bytes: usize, ring: &mut Ring, to: &Buffer, at: usize) {
        let left = (self.left.len() - self.left_at).min(bytes);
        if left > 0 {
            ring.copy_in(&self.left[self.left_at..self.left_at + left], to, at);
        }
        if let (Some(chunk), true) = (&self.chunk, bytes > left) {
            ring.copy_chunk(chunk, self.chunk_at, bytes - left, to, at + left);
        }
        self.skip(bytes);
    }

    /// Gives the chunk back, and keeps what is left of it.
    pub(super) fn settle(&mut self, ring: &mut Ring) {
        let Some(chunk) = self.chunk.take() else { return };
        if self.left_at > 0 {
            self.left.drain(..self.left_at);
            self.left_at = 0;
        }
        self.left.extend_from_slice(&ring.chunk(&chunk)[self.chunk_at..]);
        ring.recycle(chunk);
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, ring: &mut Ring) {
        self.left.clear();
        self.left_at = 0;
        if let Some(chunk) = self.chunk.take() {
            ring.recycle(chunk);
        }
    }
}
