//! How many writes of a volume wait for an extent, so that its next grant has one for each.

use crate::sync::{AtomicU64, Ordering};

/// Bits of the number of writes, of which a volume has fewer in flight. The others are of the
/// pool's events.
const COUNT_BITS: u32 = 16;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Writes that have found no extent since an event of their pool. After each event those that wait
/// are tried again, or noted anew: else one that waits for long would look like many.
#[derive(Debug, Default)]
pub(crate) struct Misses(AtomicU64);

impl Misses {
    /// Notes such a write, when its pool has had this many events.
    pub(crate) fn note(&self, events: u64) {
        let event = events << COUNT_BITS;
        let add = |noted: u64| {
            let count = if noted & !COUNT_MASK == event { noted & COUNT_MASK } else { 0 };
            Some(event | (count + 1).min(COUNT_MASK))
        };
        // It always has a next value.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
    }

    /// How many wait.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire) & COUNT_MASK
    }

    /// Forgets all of them: there are extents.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_tries_again_after_an_event_is_counted_once() {
        let misses = Misses::default();
        for events in 5..50 {
            misses.note(events);
            assert_eq!(misses.count(), 1);
        }
        (0..31).for_each(|_| misses.note(49));
        assert_eq!(misses.count(), 32);
        misses.clear();
        assert_eq!(misses.count(), 0);
    }

    #[test]
    fn the_count_stays_within_its_bits() {
        let misses = Misses::default();
        (0..=COUNT_MASK + 5).for_each(|_| misses.note(u64::MAX));
        assert_eq!(misses.count(), COUNT_MASK);
    }
}
