//! Whether a device is slow, by what was counted between two looks.

use std::collections::BTreeMap;

/// IOs that have to have ended before a device is judged by them: one alone may meet a pause that
/// every device takes now and then.
const LEAST: u64 = 4;
/// After so long, fewer will do.
const PATIENCE_NS: u64 = 60_000_000_000;
/// An IO that is in flight for this many times the threshold is slow by itself.
const STUCK: u64 = 4;

/// Durations since the start: how many there were by the upper end of their bucket, in
/// nanoseconds.
pub type Latencies = BTreeMap<u64, u64>;

/// Watches one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SlowWatch {
    base: Latencies,
    base_ns: u64,
    /// The median of those that it was judged by, when that was too long.
    median_ns: Option<u64>,
}

impl SlowWatch {
    /// Takes what is counted by now, and for how long the oldest IO has been under way. Gives for
    /// how long IO takes, if that is too long, and whether it is one that has not ended.
    pub fn look(
        &mut self,
        now_ns: u64,
        latencies: &Latencies,
        oldest_ns: u64,
        threshold_ns: u64,
    ) -> Option<(u64, bool)> {
        let new = since(&self.base, latencies);
        let count: u64 = new.values().sum();
        let waited = now_ns.saturating_sub(self.base_ns) >= PATIENCE_NS;
        if count >= LEAST || waited {
            self.median_ns = median(&new, count).filter(|&median| median > threshold_ns);
            self.base = latencies.clone();
            self.base_ns = now_ns;
        }
        if oldest_ns > threshold_ns.saturating_mul(STUCK) {
            return Some((oldest_ns, true));
        }
        self.median_ns.map(|median| (median, false))
    }
}

/// The counts after `base`. Counters that started again from 0 have counted all of theirs since.
fn since(base: &Latencies, now: &Latencies) -> Latencies {
    let mut new = Latencies::new();
    for (&upper, &count) in now {
        let before = base.get(&upper).copied().unwrap_or(0);
        let more = if before > count { count } else { count - before };
        if more > 0 {
            new.insert(upper, more);
        }
    }
    new
}

fn median(counts: &Latencies, total: u64) -> Option<u64> {
    let mut below = 0;
    for (&upper, &count) in counts {
        below += count;
        if below >= total.div_ceil(2) {
            return Some(upper);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;
    const THRESHOLD: u64 = 500 * MS;

    fn counted(fast: u64, slow: u64) -> Latencies {
        Latencies::from([(MS, fast), (800 * MS, slow)])
    }

    /// Row: H6.
    #[test]
    fn a_device_is_slow_while_half_of_its_io_takes_too_long() {
        let mut watch = SlowWatch::default();
        let mut look = |second: u64, latencies: Latencies| {
            watch.look(second * SECOND, &latencies, 0, THRESHOLD)
        };
        assert_eq!(look(0, counted(100, 0)), None);
        assert_eq!(look(5, counted(200, 20)), None, "a few are slow");
        assert_eq!(look(10, counted(210, 40)), Some((800 * MS, false)));
        assert_eq!(look(15, counted(211, 41)), Some((800 * MS, false)), "too few to judge by");
        assert_eq!(look(20, counted(300, 41)), None, "it is fast again");
    }

    /// Row: H6.
    #[test]
    fn one_slow_io_is_no_slow_device_unless_nothing_else_comes() {
        let mut watch = SlowWatch::default();
        assert_eq!(watch.look(0, &counted(4, 0), 0, THRESHOLD), None);
        assert_eq!(watch.look(5 * SECOND, &counted(4, 1), 0, THRESHOLD), None);
        let slow = watch.look(61 * SECOND, &counted(4, 1), 0, THRESHOLD);
        assert_eq!(slow, Some((800 * MS, false)));
        assert_eq!(watch.look(122 * SECOND, &counted(4, 1), 0, THRESHOLD), None, "idle since");
    }

    /// Row: H6.
    #[test]
    fn io_that_does_not_end_is_slow() {
        let mut watch = SlowWatch::default();
        assert_eq!(watch.look(0, &counted(4, 0), 1999 * MS, THRESHOLD), None);
        let stuck = watch.look(SECOND, &counted(4, 0), 3 * SECOND, THRESHOLD);
        assert_eq!(stuck, Some((3 * SECOND, true)));
        assert_eq!(watch.look(2 * SECOND, &counted(5, 0), 0, THRESHOLD), None);
    }
}
