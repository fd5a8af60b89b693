//! The pace of copies that the engine makes by itself: bytes a second, and pauses where the media
//! is slow, since clients come first there.

/// A run of sub-blocks that takes longer to copy shows a slow medium: copies pause for
/// [`PAUSE_FACTOR`] times as long as it took.
const SLOW_COPY_NS: u64 = 100_000_000;
const PAUSE_FACTOR: u64 = 10;
/// The longest such pause: a medium that hung for minutes may be quick again.
const MAX_PAUSE_NS: u64 = 60_000_000_000;

/// An allowance of bytes to be copied, which grows with the time.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes that may be copied by now; below 0 after a copy took more.
    allowance: i64,
    refilled_ns: u64,
    /// No copy begins before this.
    pause_ns: u64,
}

impl Pace {
    /// Adds what has come at `rate` bytes a second since the last time: a tenth of a second's worth
    /// at the most, or `least` bytes.
    pub(super) fn refill(&mut self, now_ns: u64, rate: u64, least: u64) {
        let passed = now_ns.saturating_sub(self.refilled_ns);
        let more = u128::from(passed) * u128::from(rate) / 1_000_000_000;
        if more > 0 {
            self.refilled_ns = now_ns;
            let most = i64::try_from((rate / 10).max(least)).unwrap_or(i64::MAX);
            let more = i64::try_from(more).unwrap_or(i64::MAX);
            self.allowance = self.allowance.saturating_add(more).min(most);
        }
    }

    pub(super) fn take(&mut self, bytes: i64) {
        self.allowance = self.allowance.saturating_sub(bytes);
    }

    /// Bytes that were taken and not copied.
    pub(super) fn refund(&mut self, bytes: i64) {
        self.allowance = self.allowance.saturating_add(bytes);
    }

    pub(super) const fn is_spent(&self) -> bool {
        self.allowance <= 0
    }

    pub(super) const fn is_paused(&self, now_ns: u64) -> bool {
        now_ns < self.pause_ns
    }

    pub(super) fn pause_until(&mut self, at_ns: u64) {
        self.pause_ns = self.pause_ns.max(at_ns);
    }

    pub(super) const fn end_pause(&mut self) {
        self.pause_ns = 0;
    }

    /// Pauses if a run that was sent then took long.
    pub(super) fn note_run(&mut self, now_ns: u64, sent_ns: u64) {
        let took_ns = now_ns.saturating_sub(sent_ns);
        if took_ns > SLOW_COPY_NS {
            let pause = took_ns.saturating_mul(PAUSE_FACTOR).min(MAX_PAUSE_NS);
            self.pause_until(now_ns.saturating_add(pause));
        }
    }

    /// When the next copy may begin, if it may not yet.
    pub(super) fn deadline(&self, now_ns: u64, rate: u64) -> Option<u64> {
        let paid = self.is_spent().then(|| {
            let missing = (1 - self.allowance).max(0).unsigned_abs();
            let wait = u128::from(missing) * 1_000_000_000 / u128::from(rate.max(1));
            self.refilled_ns.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX).max(1))
        });
        let paused = self.is_paused(now_ns).then_some(self.pause_ns);
        [paid, paused].into_iter().flatten().min()
    }
}
