//! Memory that the kernel fills with what clients send: a ring of chunks shared by all connections
//! of a worker, so that an idle connection holds none.

use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use memmap2::MmapMut;

/// Bytes of a chunk: sixteen 4 KiB writes with their headers.
pub(super) const CHUNK: usize = 64 << 10;
/// Chunks of a worker: one is held only from a receive to the end of its parsing, or while a
/// connection waits for memory.
const CHUNKS: u16 = 32;
/// The group's number: a ring has one.
pub(super) const GROUP: u16 = 0;

/// Received bytes. Given back with [`super::Ring::recycle`].
#[derive(Debug)]
pub struct Chunk {
    pub(super) id: u16,
    pub(super) len: usize,
}

impl Chunk {
    /// Bytes received.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the other side has sent nothing.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The chunks, and the ring by which the kernel gets them.
#[derive(Debug)]
pub(super) struct Chunks {
    memory: MmapMut,
    entries: MmapMut,
    tail: u16,
}

impl Chunks {
    /// Makes the chunks and registers them.
    pub(super) fn register(ring: &IoUring) -> std::io::Result<Self> {
        let memory = MmapMut::map_anon(usize::from(CHUNKS) * CHUNK)?;
        let bytes = usize::from(CHUNKS) * size_of::<BufRingEntry>();
        let mut entries = MmapMut::map_anon(bytes)?;
        let address = entries.as_mut_ptr() as u64;
        // SAFETY: the entries are page-aligned, large enough, and live until the ring is gone: the
        // ring is dropped before its chunks (see `super::ring::Ring`).
        unsafe { ring.submitter().register_buf_ring_with_flags(address, CHUNKS, GROUP, 0)? };
        let mut chunks = Self { memory, entries, tail: 0 };
        for id in 0..CHUNKS {
            chunks.give(id);
        }
        Ok(chunks)
    }

    /// The received bytes in a chunk.
    pub(super) fn bytes(&self, chunk: &Chunk) -> &[u8] {
        let start = usize::from(chunk.id) * CHUNK;
        &self.memory[start..start + chunk.len]
    }

    /// Gives a chunk to the kernel.
    pub(super) fn give(&mut self, id: u16) {
        let start = usize::from(id) * CHUNK;
        let address = self.memory[start..].as_mut_ptr() as u64;
        let base = self.entries.as_mut_ptr().cast::<BufRingEntry>();
        let at = usize::from(self.tail & (CHUNKS - 1));
        // SAFETY: `at` is below the number of entries that the mapping has room for, the mapping is
        // aligned to a page, and the kernel reads an entry only after the tail has passed it.
        let entry = unsafe { &mut *base.wrapping_add(at) };
        entry.set_addr(address);
        entry.set_len(u32::try_from(CHUNK).unwrap_or(u32::MAX));
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is a field of the first entry, inside the mapping.
        let tail = unsafe { BufRingEntry::tail(base) };
        // SAFETY: it is aligned to two bytes, lives as long as the mapping, and only this thread
        // writes it.
        let tail = unsafe { AtomicU16::from_ptr(tail.cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}
