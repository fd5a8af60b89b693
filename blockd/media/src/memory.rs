//! Media that are served by copying: files in memory, and persistent memory.

use blockd_mapper::io::IoError;

use super::mapped::Mapped;
use super::pmem::Pmem;

/// Memory that a device is.
#[derive(Debug)]
pub enum Memory {
    /// A file on tmpfs, or memory of this process.
    File(Mapped),
    /// Persistent memory, or a file that is served in the same way.
    Pmem(Box<Pmem>),
}

impl Memory {
    /// Fills `to` from this byte on.
    #[inline]
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), IoError> {
        match self {
            Self::File(mapped) => mapped.read(at, to),
            Self::Pmem(pmem) => pmem.read(at, to),
        }
    }

    /// Writes `from` to this byte on, durable after a [`Self::fence`]. An `unseen` write may be
    /// torn; all others go through the caller's lane where blocks are to stay whole.
    #[inline]
    pub fn write(&self, lane: usize, at: u64, from: &[u8], unseen: bool) -> Result<(), IoError> {
        match self {
            Self::File(mapped) => mapped.write(at, from),
            Self::Pmem(pmem) => pmem.write(lane, at, from, unseen),
        }
    }

    /// Writes zeroes in the same way.
    #[inline]
    pub fn zero(&self, lane: usize, at: u64, len: u64, unseen: bool) -> Result<(), IoError> {
        match self {
            Self::File(mapped) => mapped.zero(at, len),
            Self::Pmem(pmem) => pmem.zero(lane, at, len, unseen),
        }
    }

    /// Whether writes have to be fenced.
    #[must_use]
    #[inline]
    pub const fn is_fenced(&self) -> bool {
        matches!(self, Self::Pmem(_))
    }

    /// Makes this thread's earlier writes as durable as possible without a sync.
    #[inline]
    pub fn fence(&self) {
        if let Self::Pmem(pmem) = self {
            pmem.fence();
        }
    }

    /// Whether more than a fence is needed for what was written to last.
    #[must_use]
    #[inline]
    pub const fn needs_sync(&self) -> bool {
        match self {
            Self::File(_) => false,
            // A fence is all that there is to do, or nothing helps.
            Self::Pmem(_) => false,
        }
    }
}
