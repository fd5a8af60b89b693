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
//! 1. The advance from `e + 1` to `e + 2` looks at the counts of parity `e` after the epoch became
//!    `e + 1`, hence after the request was counted, and doesn't happen before the request leaves.
//!    While a request is inside under `e`, the epoch is at most `e + 1`.
//! 2. A request that found the old link read it after it had entered under `e`. The link was taken
//!    away after that and the tag read later still, so `t >= e`.
//! 3. Epoch `t + 2` is at least `e + 2`: by 1 the request has left.
//!
//! The second look is what makes two advances enough. Without it, a request that was delayed
//! between reading `e` and counting can count under `e` when the epoch is `e + 1` already and the
//! advance to `e + 2` has already looked at that parity. If then the link goes with the tag `e + 1`,
//! the next advance looks at the other parity only, and the epoch becomes `e + 3` with the request
//! inside.
//!
//! "After" above is the order of the sequentially consistent fences: in `enter` between the count
//! and the second look, in `current` between the unlinking and the tag, in `try_advance` between
//! the last change of the epoch and the look at the counts. `leave` releases, `try_advance`
//! acquires that and releases it with the epoch, `drained` acquires it: what a request did comes
//! before whatever is done with the reused thing.

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
    /// Epoch 0 with nobody inside.
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

    /// The tag of what the caller has just unlinked.
    #[must_use]
    pub fn current(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.epoch.0.load(Ordering::Acquire)
    }

    /// Advances the epoch if nobody is inside under the one before the present. Engine only.
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

    /// Whether no request can know any more what was unlinked under this tag.
    #[must_use]
    pub fn drained(&self, tag: u64) -> bool {
        self.epoch.0.load(Ordering::Acquire) >= tag + DRAIN_EPOCHS
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
