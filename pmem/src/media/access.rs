//! The interface to persistent memory, independent of the implementation.

use std::sync::Arc;

use super::MediaError;

/// Memory that is written past the caches. Access to persistent memory. Stores are as durable as
/// the memory makes them once [`Media::fence`] has returned, and unordered before: any part of them
/// may survive a loss of power, in units of eight aligned bytes.
pub trait Media: Send + Sync {
    /// Bytes.
    fn len(&self) -> u64;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` from this byte on.
    ///
    /// # Errors
    /// The range leaves the memory, or some of it is bad; what `to` holds then is anything.
    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), MediaError>;

    /// Stores `from` from this byte on.
    ///
    /// # Errors
    /// The range leaves the memory, and nothing is stored; or some of it is bad.
    fn write(&self, at: u64, from: &[u8]) -> Result<(), MediaError>;

    /// Stores zeroes.
    ///
    /// # Errors
    /// As [`Media::write`].
    fn zero(&self, at: u64, len: u64) -> Result<(), MediaError>;

    /// Comes back when all that this thread has stored before is durable, where fences do that.
    fn fence(&self);
}

impl<M: Media + ?Sized> Media for Arc<M> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), MediaError> {
        (**self).read(at, to)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), MediaError> {
        (**self).write(at, from)
    }

    fn zero(&self, at: u64, len: u64) -> Result<(), MediaError> {
        (**self).zero(at, len)
    }

    fn fence(&self) {
        (**self).fence();
    }
}
