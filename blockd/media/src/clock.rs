//! The only place that reads the clocks of the operating system.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A monotonic clock that counts from its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock at 0.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds since the start; enough for 584 years.
    #[must_use]
    #[inline]
    pub fn ns(self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Time since the start.
    #[must_use]
    #[inline]
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Nanoseconds since the host's boot. Goes on while the host is suspended, as other hosts do. No
/// system call: the kernel's shared page has it.
#[must_use]
#[inline]
pub fn boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    // Neither is ever negative.
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(rest.unwrap_or(0))
}

/// Nanoseconds that the calling thread has used a processor for.
#[must_use]
#[inline]
pub fn thread_cpu_ns() -> u64 {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let (seconds, rest) = (u64::try_from(used.tv_sec), u64::try_from(used.tv_nsec));
    // Neither is ever negative.
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(rest.unwrap_or(0))
}

/// Seconds since 1970, by the host's clock.
#[must_use]
pub fn wall_seconds() -> u64 {
    since_1970().as_secs()
}

/// Milliseconds since 1970, by the host's clock.
#[must_use]
pub fn wall_ms() -> i64 {
    i64::try_from(since_1970().as_millis()).unwrap_or(i64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "this is the clock")]
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
