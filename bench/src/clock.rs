//! The one place in this package that asks the time.

use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// A monotonic clock that starts at 0.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this package measures time")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds since the start.
    #[must_use]
    #[inline]
    pub fn ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Seconds since the start.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }

    /// The cost of one reading in nanoseconds: the lowest mean of several hundred in a row. It is
    /// subtracted from short intervals.
    #[must_use]
    pub fn cost_ns(&self) -> f64 {
        const READINGS: u32 = 500;
        let mean = || {
            let from = self.ns();
            for _ in 0..READINGS {
                std::hint::black_box(self.ns());
            }
            (self.ns() - from) as f64 / f64::from(READINGS + 1)
        };
        (0..20).map(|_| mean()).fold(f64::MAX, f64::min)
    }
}

/// CPU time of the calling thread, user and system.
pub fn thread_cpu() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok(duration(usage.user_time()) + duration(usage.system_time()))
}

fn duration(time: TimeVal) -> Duration {
    let whole = Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or(0));
    whole + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
}
