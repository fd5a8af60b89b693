//! What the mapper asks of the caller's IO: commands that own their memory.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::geometry::PAGE_SIZE;
use crate::units::DeviceIndex;

/// One 4 KiB page of memory, aligned so that O_DIRECT takes it as it is.
#[derive(Clone, FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C, align(4096))]
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

/// Memory of an IO command: whole pages, never moved while the command is out.
#[derive(Debug)]
pub struct IoBuffer {
    pages: Box<[Page]>,
    /// Pages in use, from the front.
    count: usize,
}

impl IoBuffer {
    /// A zeroed buffer. `None` when there is no memory for it.
    #[must_use]
    pub fn new(pages: usize) -> Option<Self> {
        let pages = <[Page]>::new_box_zeroed_with_elems(pages).ok()?;
        let count = pages.len();
        Some(Self { pages, count })
    }

    /// Uses only the first `count` pages from now on (never more than the buffer has).
    pub fn set_pages(&mut self, count: usize) {
        self.count = count.min(self.pages.len());
    }

    /// Pages the buffer could hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pages.len()
    }

    /// The pages in use.
    #[must_use]
    pub fn pages(&self) -> &[Page] {
        &self.pages[..self.count]
    }

    /// The pages in use, to be filled.
    pub fn pages_mut(&mut self) -> &mut [Page] {
        &mut self.pages[..self.count]
    }

    /// The bytes in use.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.pages().as_bytes()
    }

    /// The bytes in use, to be filled.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.pages_mut().as_mut_bytes()
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

/// Something the caller must do for the mapper, and hand back when it is done.
#[derive(Debug)]
pub struct IoCommand {
    /// Names the command; unique within the object that gave it.
    pub id: u64,
    /// The caller's index of the device.
    pub device: DeviceIndex,
    /// What to do.
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
        /// What.
        buffer: IoBuffer,
        /// Durable when it completes.
        fua: bool,
    },
    /// The range is no longer needed; what it holds afterwards doesn't matter.
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
