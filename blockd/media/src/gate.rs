//! The gate of a pool's writes on storage that several hosts reach: open while the pool's claim
//! allows writes. A worker checks it right before it submits a write, which takes two loads and the
//! time, with no lock, no memory and no system call.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::Doorbell;
use crate::clock::boot_ns;

/// Open until a time, unless it is moved on.
#[derive(Debug, Default)]
pub struct Gate {
    until: AtomicU64,
    is_lost: AtomicBool,
    is_excluded: AtomicBool,
    node: AtomicU32,
    doorbell: OnceLock<Arc<Doorbell>>,
}

impl Gate {
    /// Whether a write may be submitted now.
    #[must_use]
    #[inline]
    pub fn is_open(&self) -> bool {
        // In this order: the time is the last thing that is looked at.
        let until = self.until.load(Ordering::Acquire);
        boot_ns() < until
    }

    /// Opens it until this time of [`boot_ns`].
    pub fn open_until(&self, until: u64) {
        self.until.store(until, Ordering::SeqCst);
        // After the time, and `exclude` the other way round: one of both sees the other.
        if self.is_excluded.load(Ordering::SeqCst) {
            self.until.store(0, Ordering::SeqCst);
        }
    }

    /// Closes it for good: the storage refuses this host's writes by a reservation, as the host was
    /// fenced (H5).
    pub fn exclude(&self) {
        self.is_excluded.store(true, Ordering::SeqCst);
        self.until.store(0, Ordering::SeqCst);
        if let Some(doorbell) = self.doorbell.get() {
            doorbell.ring();
        }
    }

    /// Whether the storage refuses this host's writes.
    #[must_use]
    pub fn is_excluded(&self) -> bool {
        self.is_excluded.load(Ordering::SeqCst)
    }

    /// Closes it for good: the pool was claimed by an open on this node.
    pub fn lose(&self, node: u32) {
        self.until.store(0, Ordering::Release);
        self.node.store(node, Ordering::Relaxed);
        self.is_lost.store(true, Ordering::Release);
        if let Some(doorbell) = self.doorbell.get() {
            doorbell.ring();
        }
    }

    /// The node of the open that has taken the pool; `None` while none has.
    #[must_use]
    #[inline]
    pub fn lost_to(&self) -> Option<u32> {
        self.is_lost.load(Ordering::Acquire).then(|| self.node.load(Ordering::Relaxed))
    }

    /// Rings this doorbell when the pool is lost.
    pub fn ring_when_lost(&self, doorbell: &Arc<Doorbell>) {
        let _ = self.doorbell.set(Arc::clone(doorbell));
        if self.lost_to().is_some() || self.is_excluded() {
            doorbell.ring();
        }
    }

    /// The error of a write that was not submitted because the gate is closed. Nothing was written,
    /// and the write is tried again after a moment.
    #[must_use]
    #[inline]
    pub fn closed() -> std::io::Error {
        // The kernel's errors have a number, so this is none of them.
        std::io::ErrorKind::ResourceBusy.into()
    }

    /// Whether an error is [`Self::closed`].
    #[must_use]
    #[inline]
    pub fn refused(error: &std::io::Error) -> bool {
        error.raw_os_error().is_none() && error.kind() == std::io::ErrorKind::ResourceBusy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_of_a_host_that_was_fenced_stays_closed() {
        let gate = Gate::default();
        gate.open_until(u64::MAX);
        assert!(gate.is_open() && !gate.is_excluded());
        gate.exclude();
        // The claim is renewed once more.
        gate.open_until(u64::MAX);
        assert!(!gate.is_open() && gate.is_excluded());
    }
}
