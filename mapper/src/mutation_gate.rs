//! The mutation gate: which changes the engine may take as complete, and how it waits for all
//! threads to leave.
//!
//! Every mapping change happens between [`MutationGate::enter`] and the drop of the guard,
//! including the publication of its record. A thread that enters leaves a marker: no LSN that it
//! will take is below it. The engine computes a cut from the markers without stopping any thread,
//! or closes the gate for microseconds.
//!
//! # Why a cut holds
//!
//! The engine reads the last assigned LSN first and the markers afterwards. An LSN it counts as
//! assigned was taken by a `fetch_add` that it sees; the marker was stored before that, so it sees
//! the marker too, or its successor once the guard was dropped and the record published. In the
//! first case the cut ends below the marker. Read the other way round, a thread could enter, take
//! an LSN and be missed.
//!
//! # Why closing excludes
//!
//! A thread that enters stores its marker and then looks whether the gate is closed; the engine
//! closes and then reads the markers. With a sequentially consistent fence between the two steps on
//! either side, at least one of them sees the other.

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
    ///
    /// # Panics
    ///
    /// If `next` is 0, which is before everything.
    #[must_use]
    pub fn new(slots: usize, next: Lsn) -> Self {
        assert!(next > Lsn(0), "LSN 0 is before the first");
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
            // Released, so that a cut that reads it sees the records of earlier guards of the slot.
            marker.store(lower_bound, Ordering::Release);
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

    /// An LSN up to which every assigned one is published: its guard is dropped. Blocks no thread.
    /// While no thread is inside, it is the last assigned LSN.
    #[must_use]
    pub fn cut(&self) -> Lsn {
        let last = self.last_assigned().0;
        fence(Ordering::SeqCst);
        let markers = self.markers.iter().map(|marker| marker.0.load(Ordering::Acquire));
        // Markers are at least the first LSN ever assigned, which is at least 1.
        Lsn(markers.fold(last, |cut, marker| cut.min(marker - 1)))
    }

    /// Closes the gate and waits until no thread is inside. Engine only, and not from inside.
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

/// Being inside the gate. Dropping it says that the records of all LSNs taken are published; so
/// does a panic, which opens the way for the engine to stop the pool instead of waiting for ever.
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

/// The gate while it is closed: no thread is inside, and none can enter. Dropping it opens the
/// gate.
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_cut_ends_below_the_lowest_open_guard() {
        let gate = MutationGate::new(3, Lsn(10));
        assert_eq!((gate.cut(), gate.last_assigned()), (Lsn(9), Lsn(9)));
        let first = gate.enter(0);
        assert_eq!(first.take_lsn(2), Lsn(10));
        let second = gate.enter(1);
        assert_eq!(second.take_lsn(1), Lsn(12));
        assert_eq!((gate.cut(), gate.last_assigned()), (Lsn(9), Lsn(12)));
        drop(first);
        assert_eq!(gate.cut(), Lsn(11));
        drop(second);
        assert_eq!(gate.cut(), Lsn(12));
    }

    #[test]
    fn a_guard_without_an_lsn_holds_the_cut_where_it_entered() {
        let gate = MutationGate::new(2, Lsn(1));
        let idle = gate.enter(0);
        assert_eq!(gate.enter(1).take_lsn(1), Lsn(1));
        assert_eq!(gate.cut(), Lsn(0));
        drop(idle);
        assert_eq!(gate.cut(), Lsn(1));
    }

    #[test]
    fn the_closed_gate_assigns_lsns_and_opens_when_dropped() {
        let gate = MutationGate::new(1, Lsn(1));
        let closed = gate.close();
        assert_eq!(closed.take_lsn(3), Lsn(1));
        assert_eq!(closed.last_assigned(), Lsn(3));
        drop(closed);
        assert_eq!(gate.enter(0).take_lsn(1), Lsn(4));
    }

    #[test]
    fn a_panic_inside_leaves_the_gate() {
        let gate = MutationGate::new(1, Lsn(1));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = gate.enter(0);
            panic!("inside");
        }));
        assert!(panicked.is_err());
        drop(gate.close());
    }

    #[test]
    fn closing_excludes_running_threads() {
        let gate = MutationGate::new(3, Lsn(1));
        let inside = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for slot in 0..2 {
                let (gate, inside) = (&gate, &inside);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let guard = gate.enter(slot);
                        inside.fetch_add(1, Ordering::Relaxed);
                        let _lsn = guard.take_lsn(1);
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..200 {
                let closed = gate.close();
                assert_eq!(inside.load(Ordering::Relaxed), 0);
                drop(closed);
                assert!(gate.cut() <= gate.last_assigned());
            }
        });
        assert_eq!(gate.cut(), Lsn(4000));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    type Cut = fn(&MutationGate) -> Lsn;
    type Enter = fn(&MutationGate, usize) -> MutationGuard<'_>;

    fn cut_markers_first(gate: &MutationGate) -> Lsn {
        let markers = gate.markers.iter().map(|marker| marker.0.load(Ordering::Acquire));
        let lowest = markers.min().unwrap_or(IDLE);
        fence(Ordering::SeqCst);
        Lsn(gate.last_assigned().0.min(lowest - 1))
    }

    fn enter_looking_before_marking(gate: &MutationGate, slot: usize) -> MutationGuard<'_> {
        gate.wait_until_open();
        let marker = &gate.markers[slot].0;
        marker.store(gate.next_lsn.0.load(Ordering::Relaxed), Ordering::Release);
        fence(Ordering::SeqCst);
        MutationGuard { gate, marker }
    }

    /// Two threads publish under the LSNs they took; every LSN of a cut is published, and the
    /// last cut has them all.
    fn cuts_are_published(cut: Cut, bound: Option<usize>) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = bound;
        model.check(move || {
            let gate = Arc::new(MutationGate::new(2, Lsn(1)));
            let published: Arc<[AtomicBool; 3]> =
                Arc::new(std::array::from_fn(|_| AtomicBool::new(false)));
            let spawn = |slot: usize, changes: usize| {
                let (gate, published) = (Arc::clone(&gate), Arc::clone(&published));
                thread::spawn(move || {
                    for _ in 0..changes {
                        let guard = gate.enter(slot);
                        let lsn = usize::try_from(guard.take_lsn(1).0).unwrap();
                        published[lsn - 1].store(true, Ordering::Relaxed);
                    }
                })
            };
            let workers = [spawn(0, 2), spawn(1, 1)];
            let reached = usize::try_from(cut(&gate).0).unwrap();
            let seen = published[..reached].iter().all(|flag| flag.load(Ordering::Relaxed));
            assert!(seen, "unpublished below the cut {reached}");
            for worker in workers {
                worker.join().unwrap();
            }
            assert_eq!(cut(&gate), Lsn(3));
        });
    }

    /// Loom tracks accesses of the cell: any that may be at the same time is an error.
    fn closing_excludes(enter: Enter) {
        loom::model(move || {
            let gate = Arc::new(MutationGate::new(1, Lsn(1)));
            let state = Arc::new(UnsafeCell::new(()));
            let worker = {
                let (gate, state) = (Arc::clone(&gate), Arc::clone(&state));
                thread::spawn(move || {
                    for _ in 0..2 {
                        let guard = enter(&gate, 0);
                        let _lsn = guard.take_lsn(1);
                        state.with_mut(|_| ());
                    }
                })
            };
            let closed = gate.close();
            let _lsn = closed.take_lsn(1);
            state.with_mut(|_| ());
            drop(closed);
            worker.join().unwrap();
            assert_eq!(gate.cut(), Lsn(3));
        });
    }

    #[test]
    fn loom_gate_cut_is_published() {
        cuts_are_published(MutationGate::cut, Some(3));
    }

    #[test]
    fn loom_gate_close_is_exclusive() {
        closing_excludes(MutationGate::enter);
    }

    #[test]
    #[should_panic(expected = "unpublished below the cut")]
    fn loom_gate_finds_markers_read_first() {
        cuts_are_published(cut_markers_first, Some(3));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_gate_finds_a_look_before_the_mark() {
        closing_excludes(enter_looking_before_marking);
    }
}
