//! Limits on what a volume may do in a second: requests, and bytes.
//!
//! Kept by all workers that serve the volume together, each request by one compare-and-swap: the
//! time at which the next one may begin moves on by what a request is worth (the generic cell rate
//! algorithm of ATM). Credit that was not used for longer than the tolerance is lost, so that the
//! speed is right over any second.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far ahead of its time a request may begin: a burst of a tenth of a second is what a client
/// sends at once, and 1 % of 10 seconds.
const TOLERANCE_NS: u64 = 100_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// One rate, counted in nanoseconds.
#[derive(Debug, Default)]
struct Rate {
    /// Units a second; 0 for no limit.
    per_second: AtomicU64,
    /// When what was let through so far would have been done at that speed.
    due_ns: AtomicU64,
}

impl Rate {
    /// The time that this many units take at the limit's rate.
    fn worth(&self, units: u64) -> u64 {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return 0;
        }
        let ns = u128::from(units) * u128::from(SECOND_NS) / u128::from(per_second);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// When the next unit may begin.
    fn open_at(&self) -> u64 {
        if self.per_second.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.due_ns.load(Ordering::Acquire).saturating_sub(TOLERANCE_NS)
    }

    /// Counts units that begin now, and says what they are worth, or when they may.
    fn take(&self, now_ns: u64, units: u64) -> Result<u64, u64> {
        let worth = self.worth(units);
        if worth == 0 {
            return Ok(0);
        }
        let next = |due: u64| {
            let open = due.saturating_sub(TOLERANCE_NS) <= now_ns;
            open.then(|| due.max(now_ns).saturating_add(worth))
        };
        let taken = self.due_ns.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        taken.map(|_| worth).map_err(|due| due.saturating_sub(TOLERANCE_NS))
    }

    /// Takes back what was counted. The speed may have been set anew meanwhile, and all forgotten.
    fn give_back(&self, worth: u64) {
        let less = |due: u64| Some(due.saturating_sub(worth));
        let _ = self.due_ns.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    fn set(&self, per_second: u64) {
        if self.per_second.swap(per_second, Ordering::AcqRel) != per_second {
            self.due_ns.store(0, Ordering::Release);
        }
    }
}

/// The limits of a volume's rate: requests and bytes per second.
#[derive(Debug, Default)]
pub struct Limiter {
    requests: Rate,
    bytes: Rate,
}

impl Limiter {
    /// Sets requests and bytes a second, each 0 for no limit. Waiting requests continue by the new
    /// ones.
    pub fn set(&self, iops: u64, bandwidth: u64) {
        self.requests.set(iops);
        self.bytes.set(bandwidth);
    }

    /// Counts a request of this many bytes that begins now.
    ///
    /// # Errors
    /// The time at which it may begin at the earliest.
    pub fn take(&self, now_ns: u64, bytes: u64) -> Result<(), u64> {
        let worth = self.requests.take(now_ns, 1)?;
        let taken = self.bytes.take(now_ns, bytes);
        taken.map(|_| ()).inspect_err(|_| self.requests.give_back(worth))
    }

    /// Takes back what [`Self::take`] has counted, of requests and bytes that do not begin.
    pub fn give_back(&self, requests: u64, bytes: u64) {
        self.requests.give_back(self.requests.worth(requests));
        self.bytes.give_back(self.bytes.worth(bytes));
    }

    /// When the next request may begin.
    #[must_use]
    pub fn open_at(&self) -> u64 {
        self.requests.open_at().max(self.bytes.open_at())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries requests of this many bytes every millisecond, and returns how many were admitted.
    fn run(limiter: &Limiter, from_ns: u64, seconds: u64, bytes: u64) -> u64 {
        let mut done = 0;
        for ms in 0..seconds * 1000 {
            while limiter.take(from_ns + ms * 1_000_000, bytes).is_ok() {
                done += 1;
                assert!(done < 1 << 24, "no limit at all");
            }
        }
        done
    }

    #[test]
    fn units_returned_after_a_change_block_no_request() {
        let limiter = Limiter::default();
        limiter.set(1000, 0);
        let worth = limiter.requests.take(SECOND_NS, 1).unwrap();
        limiter.set(500, 0);
        limiter.requests.give_back(worth);
        assert_eq!(limiter.take(SECOND_NS, 4096), Ok(()));
        // A request that was counted without a limit gives nothing back.
        let limiter = Limiter::default();
        let worth = limiter.requests.take(SECOND_NS, 1).unwrap();
        limiter.set(1000, 0);
        limiter.requests.give_back(worth);
        assert_eq!(limiter.take(SECOND_NS, 4096), Ok(()));
    }

    #[test]
    fn ten_seconds_are_right_to_two_percent() {
        for iops in [10, 1000, 50_000] {
            let limiter = Limiter::default();
            limiter.set(iops, 0);
            let done = run(&limiter, SECOND_NS, 10, 4096);
            assert!(done.abs_diff(iops * 10) * 50 <= iops * 10, "{done} of {}", iops * 10);
        }
        for bytes in [4096, 1 << 20] {
            let limiter = Limiter::default();
            limiter.set(0, 100 << 20);
            let done = run(&limiter, SECOND_NS, 10, bytes) * bytes;
            assert!(done.abs_diff(1000 << 20) * 50 <= 1000 << 20, "{done}");
        }
    }

    #[test]
    fn both_limits_hold() {
        let limiter = Limiter::default();
        limiter.set(1000, 1 << 20);
        // 256 requests of 4 KiB are a MiB: fewer than 1000.
        assert!((2550..=2620).contains(&run(&limiter, SECOND_NS, 10, 4096)));
        limiter.set(100, 1 << 20);
        assert!((1000..=1020).contains(&run(&limiter, 100 * SECOND_NS, 10, 4096)));
    }

    #[test]
    fn a_pause_is_not_made_up_for() {
        let limiter = Limiter::default();
        limiter.set(100, 0);
        let _ = run(&limiter, SECOND_NS, 1, 0);
        assert!(run(&limiter, 1000 * SECOND_NS, 1, 0) <= 112);
    }

    #[test]
    fn without_limits_nothing_is_counted_and_others_take_effect_at_once() {
        let limiter = Limiter::default();
        assert_eq!((limiter.take(0, u64::MAX), limiter.open_at()), (Ok(()), 0));
        limiter.set(1, 0);
        assert!(limiter.take(SECOND_NS, 1).is_ok());
        let later = limiter.take(SECOND_NS, 1).unwrap_err();
        assert_eq!(later, 2 * SECOND_NS - TOLERANCE_NS);
        assert_eq!(limiter.open_at(), later);
        limiter.set(0, 0);
        assert!(limiter.take(SECOND_NS, 1).is_ok());
    }

    #[test]
    fn the_longest_request_is_let_through_however_low_the_limit() {
        let limiter = Limiter::default();
        limiter.set(0, 1 << 20);
        assert!(limiter.take(SECOND_NS, 32 << 20).is_ok());
        assert!(limiter.take(2 * SECOND_NS, 512).is_err());
        assert!(limiter.take(33 * SECOND_NS, 512).is_ok());
    }
}
