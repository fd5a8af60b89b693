//! The one place that asks the time for tests, benches and `cargo ci`.

use std::time::{Duration, Instant};

/// A monotonic clock that starts at 0.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    #[must_use]
    #[inline]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// Nanoseconds since the start.
    #[must_use]
    #[inline]
    pub fn ns(&self) -> u64 {
        u64::try_from(self.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Seconds since the start.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.elapsed().as_secs_f64()
    }
}
