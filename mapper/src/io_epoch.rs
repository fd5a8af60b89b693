//! IO epochs: when an extent or a leaf that was unlinked is out of every request's sight.
//!
//! A worker enters before it looks a mapping up and leaves when the request's IO has ended. The
//! engine advances the epoch from time to time. Whatever was unlinked when [`IoEpochs::current`]
//! said `t` may be reused once [`IoEpochs::drained`]`(t)`, which is when the epoch is `t + 2`.
//!
//! # Why two
//!
//! A request counts itself under the parity of the epoch it read, and then reads the epoch
//! again; if that has changed, it takes the count back and starts over. So a request that
//! is inside under epoch `e` was counted before the epoch became `e + 1`.
//!
//! 1. The advance from `e + 1` to `e + 2` reads the counts of parity `e` after the epoch became
//!    `e + 1`, hence after the request was counted, and doesn't happen before the request leaves.
//!    While a request is inside under `e`, the epoch is at most `e + 1`.
//! 2. A request that found the old link read it after it had entered under `e`. The link was taken
//!    away after that and the tag read later still, so `t >= e`.
//! 3. Epoch `t + 2` is at least `e + 2`: by 1 the request has left.
//!
//! Because of the second look two advances are enough. Without it, a request that was delayed
//! between reading `e` and counting can count under `e` when the epoch is `e + 1` already and the
//! advance to `e + 2` has already read that parity. If then the link goes with the tag `e + 1`, the
//! next advance reads the other parity only, and the epoch becomes `e + 3` with the request inside.
//!
//! "After" above is the order of the sequentially consistent fences: in `enter` between the count
//! and the second look, in `current` between the unlinking and the tag, in `try_advance` between
//! the last change of the epoch and the read of the counts. `leave` releases, `try_advance`
//! acquires that and releases it with the epoch, `drained` acquires it: a request's accesses happen
//! before any use of the reused object.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, fence};

/// Epochs between the unlinking of something and its reuse.
const DRAIN_EPOCHS: u64 = 2;

/// Requests inside, by parity of the epoch they entered under. Written by one thread.
#[derive(Debug, Default)]
struct Slot {
    counts: [AtomicU32; 2],
}

/// The epoch of a pool and the requests inside, per worker.
#[derive(Debug)]
pub struct IoEpochs {
    epoch: CachePadded<AtomicU64>,
    slots: Box<[CachePadded<Slot>]>,
}

impl IoEpochs {
    /// Creates epoch 0 without participants.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            epoch: CachePadded(AtomicU64::new(0)),
            slots: (0..slots).map(|_| CachePadded(Slot::default())).collect(),
        }
    }

    /// A request begins; the result is for [`IoEpochs::leave`]. Only the slot's thread calls this,
    /// and it may do so any number of times before it leaves.
    #[must_use]
    #[inline]
    pub fn enter(&self, slot: usize) -> u8 {
        let counts = &self.slots[slot].0.counts;
        let mut epoch = self.epoch.0.load(Ordering::Acquire);
        loop {
            let parity = parity(epoch);
            let count = &counts[usize::from(parity)];
            // One thread writes here, so that no locked instruction is needed.
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let again = self.epoch.0.load(Ordering::Acquire);
            if again == epoch {
                return parity;
            }
            count.store(count.load(Ordering::Relaxed) - 1, Ordering::Release);
            epoch = again;
        }
    }

    /// A request's IO has ended. Only the slot's thread calls this.
    #[inline]
    pub fn leave(&self, slot: usize, parity: u8) {
        let count = &self.slots[slot].0.counts[usize::from(parity & 1)];
        let before = count.load(Ordering::Relaxed);
        debug_assert!(before > 0, "left more often than entered");
        count.store(before - 1, Ordering::Release);
    }

    /// The tag of an object that the caller has just unlinked.
    #[must_use]
    pub fn current(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.epoch.0.load(Ordering::Acquire)
    }

    /// The epoch that is [reached](Self::reached) when no request is inside that is now.
    #[must_use]
    pub fn drain_end(&self) -> u64 {
        self.current() + DRAIN_EPOCHS
    }

    /// Whether the epoch is at least this one.
    #[must_use]
    pub fn reached(&self, epoch: u64) -> bool {
        self.epoch.0.load(Ordering::Acquire) >= epoch
    }

    /// Advances the epoch if no participant is left in the one before the present. Engine only.
    pub fn try_advance(&self) -> bool {
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let next = epoch + 1;
        let index = usize::from(parity(next));
        let inside = |slot: &CachePadded<Slot>| slot.0.counts[index].load(Ordering::Acquire) != 0;
        if self.slots.iter().any(inside) {
            return false;
        }
        self.epoch.0.store(next, Ordering::Release);
        true
    }

    /// Whether no request can still hold an object that was unlinked under this tag.
    #[must_use]
    pub fn drained(&self, tag: u64) -> bool {
        self.reached(tag + DRAIN_EPOCHS)
    }

    /// Whether any request is inside, as far as the caller can see.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let count =
            |slot: &CachePadded<Slot>, index: usize| slot.0.counts[index].load(Ordering::Acquire);
        self.slots.iter().all(|slot| count(slot, 0) == 0 && count(slot, 1) == 0)
    }
}

#[inline]
fn parity(epoch: u64) -> u8 {
    u8::from(epoch & 1 == 1)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn an_unlinked_object_is_drained_two_advances_later() {
        let epochs = IoEpochs::new(2);
        let tag = epochs.current();
        assert!(!epochs.drained(tag));
        assert!(epochs.try_advance() && !epochs.drained(tag));
        assert!(epochs.try_advance() && epochs.drained(tag));
    }

    #[test]
    fn a_request_inside_lets_the_epoch_advance_once() {
        let epochs = IoEpochs::new(2);
        let parity = epochs.enter(1);
        let tag = epochs.current();
        assert!(epochs.try_advance());
        assert!(!epochs.try_advance() && !epochs.is_idle());
        // Later requests don't hold it up longer: they count under the other parity.
        let later = epochs.enter(1);
        assert_ne!(later, parity);
        epochs.leave(1, parity);
        assert!(epochs.try_advance() && epochs.drained(tag));
        assert!(!epochs.try_advance());
        epochs.leave(1, later);
        assert!(epochs.try_advance() && epochs.is_idle());
    }

    #[test]
    fn many_requests_of_a_slot_leave_in_any_order() {
        let epochs = IoEpochs::new(1);
        let parities = [epochs.enter(0), epochs.enter(0), epochs.enter(0)];
        assert!(epochs.try_advance());
        for parity in parities {
            assert!(!epochs.try_advance());
            epochs.leave(0, parity);
        }
        assert!(epochs.try_advance());
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;
    use crate::sync::AtomicBool;

    type Enter = fn(&IoEpochs) -> u8;
    type Drained = fn(&IoEpochs, u64) -> bool;

    fn enter(epochs: &IoEpochs) -> u8 {
        epochs.enter(0)
    }

    fn enter_without_second_look(epochs: &IoEpochs) -> u8 {
        let parity = parity(epochs.epoch.0.load(Ordering::Acquire));
        let count = &epochs.slots[0].0.counts[usize::from(parity)];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        parity
    }

    fn enter_without_fence(epochs: &IoEpochs) -> u8 {
        let parity = parity(epochs.epoch.0.load(Ordering::Acquire));
        let count = &epochs.slots[0].0.counts[usize::from(parity)];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        parity
    }

    fn drained(epochs: &IoEpochs, tag: u64) -> bool {
        epochs.drained(tag)
    }

    fn drained_after_one_advance(epochs: &IoEpochs, tag: u64) -> bool {
        epochs.epoch.0.load(Ordering::Acquire) > tag
    }

    /// Loom tracks accesses of `content`: one that may be at the same time as another is an error.
    struct Shared {
        epochs: IoEpochs,
        linked: AtomicBool,
        content: UnsafeCell<()>,
        /// Tag of the unlinking + 1; 0 before it.
        tag: AtomicU64,
    }

    impl Shared {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                epochs: IoEpochs::new(1),
                linked: AtomicBool::new(true),
                content: UnsafeCell::new(()),
                tag: AtomicU64::new(0),
            })
        }

        fn read(&self, enter: Enter) {
            let parity = enter(&self.epochs);
            if self.linked.load(Ordering::Relaxed) {
                self.content.with(|_| ());
            }
            self.epochs.leave(0, parity);
        }

        fn unlink(&self) {
            self.linked.store(false, Ordering::Relaxed);
            self.tag.store(self.epochs.current() + 1, Ordering::Release);
        }

        fn reuse_if(&self, drained: Drained) {
            let tag = self.tag.load(Ordering::Acquire);
            if tag > 0 && drained(&self.epochs, tag - 1) {
                self.content.with_mut(|_| ());
            }
        }
    }

    /// The engine unlinks by itself, while one request after the other reads.
    fn reader_and_engine(enter: Enter, drained: Drained) {
        loom::model(move || {
            let shared = Shared::new();
            let reader = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    shared.read(enter);
                    shared.read(enter);
                })
            };
            shared.unlink();
            for _ in 0..3 {
                shared.epochs.try_advance();
                shared.reuse_if(drained);
            }
            reader.join().unwrap();
        });
    }

    /// Another worker unlinks, at any moment of the engine's advances.
    fn reader_writer_and_engine(enter: Enter) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Shared::new();
            let reader = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.read(enter))
            };
            let writer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.unlink())
            };
            for _ in 0..3 {
                shared.epochs.try_advance();
            }
            shared.reuse_if(drained);
            reader.join().unwrap();
            writer.join().unwrap();
        });
    }

    #[test]
    fn loom_epoch_no_reuse_under_a_reader() {
        reader_and_engine(enter, drained);
    }

    #[test]
    fn loom_epoch_no_reuse_when_another_thread_unlinks() {
        reader_writer_and_engine(enter);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_epoch_finds_a_missing_second_advance() {
        reader_and_engine(enter, drained_after_one_advance);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_epoch_finds_a_missing_fence() {
        reader_and_engine(enter_without_fence, drained);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_epoch_finds_a_missing_second_look() {
        reader_writer_and_engine(enter_without_second_look);
    }
}
