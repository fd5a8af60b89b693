//! The clock of tests and measurements.

use std::time::Instant;

/// The present time. No other code of this package reads the clock.
#[expect(clippy::disallowed_methods, reason = "what starts programs and waits for them")]
#[must_use]
pub fn clock() -> Instant {
    Instant::now()
}
