//! The cost of memory on this machine, measured in the same run: budgets are multiples of it, so
//! that they say the same of the mapper on any processor.

use blockd_testkit::clock::Clock;

use super::rig::{mix, shuffled};
use crate::report::{Budget, Row};

/// Lines of the memory that is read: 256 MiB, more than any processor's caches and as much as the
/// mapper's leaves for 4 TiB.
const LINES: u64 = 4 << 20;
/// Words in a line of 64 bytes.
const LINE: u64 = 8;

/// The yardsticks.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Nanoseconds of a read at a random place, which depends on the read before.
    pub miss: f64,
    /// The same where the processor knows the places ahead.
    pub independent: f64,
}

impl Machine {
    /// Measures all of them: the best of several times, since others can only make them longer.
    #[must_use]
    pub fn measure() -> Self {
        const ROUNDS: usize = 5;
        let words = usize::try_from(LINES * LINE).unwrap_or(0);
        let word = |line: u64| usize::try_from(line * LINE).unwrap_or(0);
        // Each line names the next one, once around all of them.
        let order = shuffled(LINES, 3);
        let mut memory = vec![0_usize; words];
        for (at, next) in order.iter().zip(order.iter().skip(1).chain(order.first())) {
            memory[word(u64::from(*at))] = word(u64::from(*next));
        }
        let best = |measure: &dyn Fn() -> f64| {
            (0..ROUNDS).map(|_| measure()).fold(f64::INFINITY, f64::min)
        };
        let miss = best(&|| {
            const READS: u64 = 1_000_000;
            let (clock, mut at) = (Clock::start(), 0);
            for _ in 0..READS {
                at = memory[at];
            }
            std::hint::black_box(at);
            clock.ns() as f64 / READS as f64
        });
        let independent = best(&|| {
            const READS: u64 = 8_000_000;
            let (clock, mut sum) = (Clock::start(), 0);
            for number in 0..READS {
                sum ^= memory[word(mix(number) % LINES)];
            }
            std::hint::black_box(sum);
            clock.ns() as f64 / READS as f64
        });
        Self { miss, independent }
    }

    /// A budget of `times` reads at random places, each after the other.
    #[must_use]
    pub const fn misses(&self, times: f64) -> Budget {
        Budget::Times { times, of: "miss", each: self.miss }
    }

    /// A budget in seconds: `times` misses for each of `count` things.
    #[must_use]
    pub fn misses_each(&self, times: f64, count: f64) -> Budget {
        Budget::Times { times, of: "miss each", each: self.miss * count / 1e9 }
    }

    /// The yardsticks themselves.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let row = |name: &str, figure| Row::new(name, figure, "ns", Budget::None);
        vec![
            row("read at a random place, each after the other (miss)", self.miss),
            row("read at a random place known ahead", self.independent),
        ]
    }
}
