//! How fast the processor's counter runs, which an emulated machine has from this one.
//!
//! A kernel finds it out when it boots, beside a timer. On a machine that is busy the emulator
//! stands still meanwhile, and the kernel has been seen to end with a sixtieth of it: its clock
//! went sixty times too fast, and everything that it waited for was late.

use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use blockd_testkit::clock::Clock;

/// The time in which the counter is watched.
const WINDOW: Duration = Duration::from_millis(50);

/// A reading of the counter with the time, both at the same moment: tries of it, and how far apart
/// the counter may be around the clock.
const TRIES: u32 = 1000;
const APART: u64 = 10_000;

/// A word for a kernel: ticks of the counter in a millisecond. It still compares them with a timer,
/// for longer, and corrects what is less than a hundredth off. Nothing where this machine is too
/// busy for a measurement.
pub(super) fn word() -> String {
    static KHZ: OnceLock<Option<u64>> = OnceLock::new();
    KHZ.get_or_init(ticks_per_ms).map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default()
}

fn ticks_per_ms() -> Option<u64> {
    let clock = Clock::start();
    let (first, began) = reading(&clock)?;
    thread::sleep(WINDOW);
    let (last, ended) = reading(&clock)?;
    let ns = u128::from(ended.checked_sub(began)?);
    u64::try_from(u128::from(last.checked_sub(first)?) * 1_000_000 / ns.max(1))
        .ok()
        .filter(|khz| *khz > 0)
}

/// The counter and the clock in nanoseconds.
fn reading(clock: &Clock) -> Option<(u64, u64)> {
    (0..TRIES).find_map(|_| {
        let (before, ns, after) = (ticks(), clock.ns(), ticks());
        (after.checked_sub(before)? < APART).then_some((before, ns))
    })
}

fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every processor of this architecture has the instruction, which reads a counter.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        0
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let [first, second] = [ticks_per_ms().unwrap(), ticks_per_ms().unwrap()];
        assert!(first.abs_diff(second) < first / 50, "{first} and {second}");
        assert_eq!(word(), word());
    }
}
