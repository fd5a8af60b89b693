//! The mutation gate: what the engine may take as complete, and how it gets everybody out.
//!
//! Every mapping change happens between [`MutationGate::enter`] and the drop of the guard,
//! including the publication of its record. A thread that enters leaves a marker: no LSN that it
//! will take is below it. The engine computes a cut from the markers without stopping anybody, or
//! closes the gate for microseconds.
//!
//! # Why a cut holds
//!
//! The engine reads the last assigned LSN first and the markers afterwards. An LSN it counts as
//! assigned was taken by a `fetch_add` that it sees; the marker was stored before that, so it sees
//! the marker too, or what replaced it once the guard was dropped and the record published. In the
//! first case the cut ends below the marker. Read the other way round, a thread could enter, take
//! an LSN and be missed.
//!
//! # Why closing excludes
//!
//! A thread that enters stores its marker and then looks whether the gate is closed; the engine
//! closes and then looks at the markers. With a sequentially consistent fence between the two
//! steps on either side, at least one of them sees the other.

use crate::sync::{AtomicBool, AtomicU64, Backoff, CachePadded, Ordering, fence};
use crate::units::Lsn;

/// The marker of a slot whose thread is not inside.
const IDLE: u64 = u64::MAX;

/// Assigns LSNs and knows which of them may not be published yet.
#[derive(Debug)]
pub struct MutationGate {
    next_lsn: CachePadded<AtomicU64>,
    closed: CachePadded<AtomicBool>,
    markers: Box<[CachePadded<AtomicU64>]>,
}

impl MutationGate {
    /// An open gate; `next` is the first LSN it assigns.
    #[must_use]
    pub fn new(slots: usize, next: Lsn) -> Self {
        Self {
            next_lsn: CachePadded(AtomicU64::new(next.0)),
            closed: CachePadded(AtomicBool::new(false)),
            markers: (0..slots).map(|_| CachePadded(AtomicU64::new(IDLE))).collect(),
        }
    }

    /// Enters; waits while the gate is closed. Only the slot's thread calls this, and not again
    /// before it has dropped the guard.
    #[inline]
    pub fn enter(&self, slot: usize) -> MutationGuard<'_> {
        let marker = &self.markers[slot].0;
        debug_assert_eq!(marker.load(Ordering::Relaxed), IDLE, "slot {slot} is inside already");
        loop {
            // A value that is out of date is too low, which only makes cuts end earlier.
            let lower_bound = self.next_lsn.0.load(Ordering::Relaxed);
            marker.store(lower_bound, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !self.closed.0.load(Ordering::Acquire) {
                return MutationGuard { gate: self, marker };
            }
            marker.store(IDLE, Ordering::Release);
            self.wait_until_open();
        }
    }

    /// The highest LSN that was assigned.
    #[must_use]
    pub fn last_assigned(&self) -> Lsn {
        Lsn(self.next_lsn.0.load(Ordering::Acquire) - 1)
    }

    /// An LSN up to which every assigned one is published: its guard is dropped. Stops nobody.
    /// While nobody is inside, it is the last assigned one.
    #[must_use]
    pub fn cut(&self) -> Lsn {
        let last = self.last_assigned().0;
        fence(Ordering::SeqCst);
        let markers = self.markers.iter().map(|marker| marker.0.load(Ordering::Acquire));
        // Markers are at least the first LSN ever assigned, which is at least 1.
        Lsn(markers.fold(last, |cut, marker| cut.min(marker - 1)))
    }

    /// Closes the gate and waits until nobody is inside. Engine only, and not from inside.
    ///
    /// # Panics
    ///
    /// If the gate is closed already.
    pub fn close(&self) -> ClosedGate<'_> {
        let was_closed = self.closed.0.swap(true, Ordering::SeqCst);
        assert!(!was_closed, "only the engine closes the gate, once at a time");
        let closed = ClosedGate { gate: self };
        fence(Ordering::SeqCst);
        for marker in &self.markers {
            let mut backoff = Backoff::default();
            while marker.0.load(Ordering::Acquire) != IDLE {
                backoff.wait();
            }
        }
        closed
    }

    fn take_lsn(&self, count: u64) -> Lsn {
        debug_assert!(count > 0, "a change has an LSN");
        Lsn(self.next_lsn.0.fetch_add(count, Ordering::AcqRel))
    }

    #[cold]
    fn wait_until_open(&self) {
        let mut backoff = Backoff::default();
        while self.closed.0.load(Ordering::Acquire) {
            backoff.wait();
        }
    }
}

/// Being inside the gate. Dropping it says that the records of all LSNs taken are published.
#[derive(Debug)]
#[must_use = "the change happens while the guard lives"]
pub struct MutationGuard<'a> {
    gate: &'a MutationGate,
    marker: &'a AtomicU64,
}

impl MutationGuard<'_> {
    /// Assigns `count` consecutive LSNs and returns the first.
    #[must_use = "an LSN without a record leaves a gap"]
    pub fn take_lsn(&self, count: u64) -> Lsn {
        self.gate.take_lsn(count)
    }
}

impl Drop for MutationGuard<'_> {
    fn drop(&mut self) {
        self.marker.store(IDLE, Ordering::Release);
    }
}

/// The gate while it is closed: nobody is inside, and nobody gets in. Dropping it opens the gate.
#[derive(Debug)]
#[must_use = "the gate is closed while this lives"]
pub struct ClosedGate<'a> {
    gate: &'a MutationGate,
}

impl ClosedGate<'_> {
    /// Assigns `count` consecutive LSNs and returns the first.
    #[must_use = "an LSN without a record leaves a gap"]
    pub fn take_lsn(&self, count: u64) -> Lsn {
        self.gate.take_lsn(count)
    }

    /// The highest LSN that was assigned. All up to it are published.
    #[must_use]
    pub fn last_assigned(&self) -> Lsn {
        self.gate.last_assigned()
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        self.gate.closed.0.store(false, Ordering::Release);
    }
}
