//! The clock of those who wait and measure.

use std::time::Instant;

/// Now. The only place that asks.
#[expect(clippy::disallowed_methods, reason = "what starts programs and waits for them")]
#[must_use]
pub fn clock() -> Instant {
    Instant::now()
}
