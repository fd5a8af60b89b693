//! The one place in this package that asks the time.

use std::time::{Duration, Instant};

/// Measures how long a step took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts measuring.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this tool prints the durations of steps")]
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    #[must_use]
    pub(crate) fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
