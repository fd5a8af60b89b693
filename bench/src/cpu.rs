//! CPU time of threads, and the cost of reading the clock.

use std::time::Duration;

use anyhow::Result;
use blockd_testkit::clock::Clock;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// CPU time of the calling thread, user and system.
pub fn thread_cpu() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok(duration(usage.user_time()) + duration(usage.system_time()))
}

/// CPU time of a process, user and system, with that of threads that have ended: the same as in its
/// line of `/proc`, which counts in hundredths of a second.
///
/// # Errors
/// When there is no such process.
pub fn process_cpu(pid: u32) -> Result<Duration> {
    let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid)?))?;
    Ok(clock_gettime(clock)?.into())
}

fn duration(time: TimeVal) -> Duration {
    let whole = Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or(0));
    whole + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
}

/// The cost of one reading of a clock in nanoseconds: the lowest mean of several hundred in a row.
/// It is subtracted from short intervals.
#[must_use]
pub fn clock_cost_ns(clock: Clock) -> f64 {
    const READINGS: u32 = 500;
    let mean = || {
        let from = clock.ns();
        for _ in 0..READINGS {
            std::hint::black_box(clock.ns());
        }
        (clock.ns() - from) as f64 / f64::from(READINGS + 1)
    };
    (0..20).map(|_| mean()).fold(f64::MAX, f64::min)
}
