//! Commands of the mapper to the caller's IO; they own their memory.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::geometry::PAGE_SIZE;
use crate::units::DeviceIndex;

/// One 4 KiB page of memory.
///
/// Not aligned to its size: values as aligned as that, on a stack that is probed page by page, have
/// been seen to be compiled to a frame without a prologue (rustc 1.95, x86-64, optimised).
#[derive(Clone, FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C, align(64))]
pub struct Page(pub [u8; PAGE_SIZE]);

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:02x?}..)", &self.0[..8])
    }
}

impl Page {
    /// A page of zeroes.
    #[must_use]
    pub const fn zeroed() -> Self {
        Self([0; PAGE_SIZE])
    }
}

/// Memory of an IO command: whole pages aligned to 4 KiB, as O_DIRECT needs them, never moved while
/// the command is out.
pub struct IoBuffer {
    /// The pages, and what comes before the first multiple of 4 KiB and after the last. Memory that
    /// is allocated with an alignment is written with zeroes; this is taken from the kernel page by
    /// page, as it is used.
    memory: Box<[u8]>,
    /// The first page's place.
    start: usize,
    /// Pages that it could hold.
    capacity: usize,
    /// Pages in use, from the front.
    count: usize,
}

impl std::fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuffer({} of {} pages)", self.count, self.capacity)
    }
}

impl IoBuffer {
    /// A zeroed buffer. `None` when there is no memory for it.
    #[must_use]
    pub fn new(pages: usize) -> Option<Self> {
        let bytes = pages.checked_add(1)?.checked_mul(PAGE_SIZE)?;
        let memory = <[u8]>::new_box_zeroed_with_elems(bytes).ok()?;
        let start = memory.as_ptr().align_offset(PAGE_SIZE);
        Some(Self { memory, start, capacity: pages, count: pages })
    }

    /// Uses only the first `count` pages from now on (never more than the buffer has).
    pub fn set_pages(&mut self, count: usize) {
        self.count = count.min(self.capacity);
    }

    /// Pages the buffer could hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The pages in use.
    #[must_use]
    pub fn pages(&self) -> &[Page] {
        <[Page]>::ref_from_bytes(self.as_bytes()).unwrap_or_default()
    }

    /// The pages in use, to be filled.
    pub fn pages_mut(&mut self) -> &mut [Page] {
        <[Page]>::mut_from_bytes(self.as_bytes_mut()).unwrap_or_default()
    }

    /// The bytes in use.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.count * PAGE_SIZE]
    }

    /// The bytes in use, to be filled.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.count * PAGE_SIZE]
    }
}

/// How an IO failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IoError {
    /// The media reported an error (EIO and its kin).
    #[error("media error")]
    Media,
    /// The storage below had no room (ENOSPC, EDQUOT).
    #[error("no space left below")]
    NoSpace,
    /// The device is gone, or the process that drove it is.
    #[error("device gone")]
    Gone,
}

/// A command for the caller, who returns it when it is done.
#[derive(Debug)]
pub struct IoCommand {
    /// Names the command; unique within the object that gave it.
    pub id: u64,
    /// The caller's index of the device.
    pub device: DeviceIndex,
    /// The operation.
    pub op: IoOp,
}

/// The kinds of [`IoCommand`].
#[derive(Debug)]
pub enum IoOp {
    /// Hold the device's owner lock, with every IO of its former owner ended (rule R11).
    Fence,
    /// Make every completed write durable.
    Flush,
    /// Fill the buffer from this byte of the device on.
    Read {
        /// First byte, a multiple of 4096.
        offset: u64,
        /// Where to.
        buffer: IoBuffer,
    },
    /// Write the buffer to this byte of the device on.
    Write {
        /// First byte, a multiple of 4096.
        offset: u64,
        /// The data to write.
        buffer: IoBuffer,
        /// Durable when it completes.
        fua: bool,
    },
    /// The range is no longer needed; its content afterwards does not matter.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl IoOp {
    /// The operation's name in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Fence => "fence",
            Self::Flush => "flush",
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Discard { .. } => "discard",
        }
    }
}
