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
    is_shut: AtomicBool,
    problem: OnceLock<String>,
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
        // After the time, and `shut` the other way round: one of both sees the other.
        if self.is_shut.load(Ordering::SeqCst) {
            self.until.store(0, Ordering::SeqCst);
        }
    }

    /// Closes it for good: the storage refuses this host's writes by a reservation, as the host was
    /// fenced (H5).
    pub fn exclude(&self) {
        self.shut(
            "is on storage that refuses this host's writes (reservation conflict): the host was \
             fenced"
                .to_owned(),
        );
    }

    /// Closes it for good. The problem is said of the pool: "is on storage that ...".
    pub fn shut(&self, problem: String) {
        let _ = self.problem.set(problem);
        self.is_shut.store(true, Ordering::SeqCst);
        self.until.store(0, Ordering::SeqCst);
        if let Some(doorbell) = self.doorbell.get() {
            doorbell.ring();
        }
    }

    /// Why it is closed for good, unless another open has the pool.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.problem.get().filter(|_| self.is_shut.load(Ordering::SeqCst)).map(String::as_str)
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

    /// Whether it is closed for good.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.lost_to().is_some() || self.problem().is_some()
    }

    /// Rings this doorbell when it is closed for good.
    pub fn ring_when_lost(&self, doorbell: &Arc<Doorbell>) {
        let _ = self.doorbell.set(Arc::clone(doorbell));
        if self.has_ended() {
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
        assert!(gate.is_open() && gate.problem().is_none());
        gate.exclude();
        // The claim is renewed once more.
        gate.open_until(u64::MAX);
        assert!(!gate.is_open() && gate.problem().is_some());
    }
}
