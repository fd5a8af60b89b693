//! The only place that reads the operating system's clock.

use std::time::{Duration, Instant, SystemTime};

/// A monotonic clock that counts from its start.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock at 0.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Time since 1970 by the host's clock, which may jump. Zero where it is before that.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the clock")]
pub fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
