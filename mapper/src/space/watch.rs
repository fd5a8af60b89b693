//! The fill level of a pool, its fill rate, and the resulting state: states with hysteresis, and
//! the speed at which a pool that is nearly full may be filled further.

use crate::error::MapperError;

/// Over how long the rate is averaged: long enough to see past single grants.
const AVERAGE_NS: u64 = 10_000_000_000;
/// How long a peak is remembered: a job that writes every few minutes is expected again.
const PEAK_NS: u64 = 600_000_000_000;
/// Samples are no closer than this: a grant is a step, not a rate.
const SAMPLE_NS: u64 = 100_000_000;
/// Interval after which a state other than normal is reported again, for readers that missed it.
const REPEAT_NS: u64 = 30_000_000_000;
/// The shortest time that an extension is expected to take, as long as none was seen.
const LEAST_SECONDS: u32 = 5;
const SECOND_NS: u64 = 1_000_000_000;

/// How much of a pool is left, in steps that call for action.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub enum SpaceState {
    /// Enough space is free.
    #[default]
    Normal,
    /// More should be found; nothing is held up.
    Low,
    /// Writes that need extents are slowed down.
    VeryLow,
    /// Writes that need extents wait.
    Full,
}

impl SpaceState {
    /// Returns the name for users.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Low => "low",
            Self::VeryLow => "very low",
            Self::Full => "full",
        }
    }
}

/// How much must be left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage of the pool, 0 to 100.
    Percent(u8),
    /// The first writes of this many seconds at the recent rate.
    Seconds(u32),
}

/// Where a pool's states begin. Both marks are of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// Below it a pool is low.
    pub low: Mark,
    /// Below it a pool is very low.
    pub very_low: Mark,
}

impl Default for Marks {
    fn default() -> Self {
        Self { low: Mark::Seconds(20), very_low: Mark::Seconds(LEAST_SECONDS) }
    }
}

impl Marks {
    /// Refuses marks that are no percentage, not of one kind, or in the wrong order.
    ///
    /// # Errors
    /// [`MapperError::Invalid`] with the field, its value and the allowed values.
    pub fn check(&self) -> Result<(), MapperError> {
        let invalid = |field, value, allowed| Err(MapperError::Invalid { field, value, allowed });
        for (field, mark) in [("low", self.low), ("very_low", self.very_low)] {
            if let Mark::Percent(percent @ 101..) = mark {
                return invalid(field, percent.into(), "a percentage up to 100");
            }
        }
        let (low, very_low) = match (self.low, self.very_low) {
            (Mark::Bytes(low), Mark::Bytes(very_low)) => (low, very_low),
            (Mark::Percent(low), Mark::Percent(very_low)) => (low.into(), very_low.into()),
            (Mark::Seconds(low), Mark::Seconds(very_low)) => (low.into(), very_low.into()),
            (_, Mark::Bytes(bytes)) => return invalid("very_low", bytes, "of the kind of `low`"),
            (_, Mark::Percent(percent)) => {
                return invalid("very_low", percent.into(), "of the kind of `low`");
            }
            (_, Mark::Seconds(seconds)) => {
                return invalid("very_low", seconds.into(), "of the kind of `low`");
            }
        };
        if very_low >= low {
            return invalid("very_low", very_low, "less than `low`");
        }
        Ok(())
    }
}

/// An observation of a pool at one moment, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Observed {
    /// The whole pool.
    pub total: u64,
    /// Bytes that can still be granted.
    pub free: u64,
    /// Whether a volume waits for an extent, there is none, and none is on its way.
    pub stuck: bool,
}

/// A state was entered, or goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpaceChange {
    /// The state before.
    pub from: SpaceState,
    /// The state now: unchanged when it is reported again.
    pub to: SpaceState,
    /// Bytes left.
    pub free: u64,
    /// Bytes of the pool.
    pub total: u64,
    /// Bytes a second that were lately written for the first time.
    pub rate: u64,
}

/// Watches the space of one pool.
#[derive(Clone, Debug)]
pub struct SpaceWatch {
    /// `None`: it is full or not, and nothing in between.
    marks: Option<Marks>,
    state: SpaceState,
    seen: Observed,
    /// Bytes granted since the last sample.
    granted: u64,
    sampled_ns: u64,
    /// Bytes a second.
    rate: u64,
    peak: u64,
    /// The duration of an extension in nanoseconds; 0 before the first one.
    extension_ns: u64,
    report_ns: u64,
}

impl SpaceWatch {
    /// Begins at a time of the caller's clock.
    #[must_use]
    pub fn new(marks: Option<Marks>, now_ns: u64) -> Self {
        Self {
            marks,
            state: SpaceState::Normal,
            seen: Observed::default(),
            granted: 0,
            sampled_ns: now_ns,
            rate: 0,
            peak: 0,
            extension_ns: 0,
            report_ns: now_ns,
        }
    }

    /// Other marks from now on.
    pub fn set_marks(&mut self, marks: Option<Marks>) {
        self.marks = marks;
    }

    /// Where the states begin.
    #[must_use]
    pub const fn marks(&self) -> Option<Marks> {
        self.marks
    }

    /// How full the pool is.
    #[must_use]
    pub const fn state(&self) -> SpaceState {
        self.state
    }

    /// Bytes a second that were lately written for the first time: the average, or the decayed
    /// peak.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate.max(self.peak)
    }

    /// The average alone, in bytes a second.
    #[must_use]
    pub const fn average(&self) -> u64 {
        self.rate
    }

    /// Bytes were granted.
    pub fn granted(&mut self, bytes: u64) {
        self.granted = self.granted.saturating_add(bytes);
    }

    /// More space was asked for, and has come after so long.
    pub fn extended(&mut self, took_ns: u64) {
        // The first is the best guess there is; later ones count a quarter.
        self.extension_ns = match self.extension_ns {
            0 => took_ns,
            known => known - known / 4 + took_ns / 4,
        };
    }

    /// The time that has to be lived through until more space comes, in nanoseconds: three times
    /// the duration of an extension, and no less than the seconds of `very_low`.
    #[must_use]
    pub fn horizon_ns(&self) -> u64 {
        let least = match self.marks.map(|marks| marks.very_low) {
            Some(Mark::Seconds(seconds)) => seconds,
            Some(Mark::Bytes(_) | Mark::Percent(_)) | None => LEAST_SECONDS,
        };
        self.extension_ns.saturating_mul(3).max(u64::from(least.max(1)) * SECOND_NS)
    }

    /// Bytes below which the pool is very low, and below which it is low.
    #[must_use]
    pub fn marks_in_bytes(&self) -> (u64, u64) {
        let Some(marks) = self.marks else { return (0, 0) };
        let horizon = self.horizon_ns();
        let total = self.seen.total;
        let bytes = |mark, seconds_ns: u64| match mark {
            Mark::Bytes(bytes) => bytes,
            Mark::Percent(percent) => scale(total, percent.into(), 100),
            Mark::Seconds(_) => scale(self.rate(), seconds_ns, SECOND_NS),
        };
        let low_ns = match marks.low {
            Mark::Seconds(seconds) => u64::from(seconds) * SECOND_NS,
            Mark::Bytes(_) | Mark::Percent(_) => 0,
        };
        let very_low = bytes(marks.very_low, horizon);
        let low = bytes(marks.low, low_ns.max(horizon.saturating_mul(4)));
        (very_low, low.max(very_low))
    }

    /// Bytes below which a pool of this size is low, at the rate of the last seconds.
    #[must_use]
    pub fn low_at(&self, total: u64) -> u64 {
        match self.marks.map(|marks| marks.low) {
            Some(Mark::Bytes(bytes)) => bytes,
            Some(Mark::Percent(percent)) => scale(total, percent.into(), 100),
            Some(Mark::Seconds(seconds)) => self.rate.saturating_mul(seconds.into()),
            None => 0,
        }
    }

    /// Observes the pool. Returns a change of state, or a repeated report of a lasting state.
    pub fn observe(&mut self, now_ns: u64, seen: Observed) -> Option<SpaceChange> {
        self.seen = seen;
        self.sample(now_ns);
        let from = self.state;
        self.state = self.next_state();
        let is_new = self.state != from;
        let goes_on =
            self.state != SpaceState::Normal && now_ns.saturating_sub(self.report_ns) >= REPEAT_NS;
        if !is_new && !goes_on {
            return None;
        }
        self.report_ns = now_ns;
        let Observed { total, free, .. } = seen;
        Some(SpaceChange { from, to: self.state, free, total, rate: self.rate() })
    }

    fn sample(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.sampled_ns);
        if passed < SAMPLE_NS {
            return;
        }
        self.sampled_ns = now_ns;
        let present = scale(std::mem::take(&mut self.granted), SECOND_NS, passed);
        self.rate = towards(self.rate, present, passed, AVERAGE_NS);
        self.peak = towards(self.peak, 0, passed, PEAK_NS).max(self.rate);
    }

    fn next_state(&self) -> SpaceState {
        let Observed { free, stuck, .. } = self.seen;
        if stuck || free == 0 {
            return SpaceState::Full;
        }
        let (very_low, low) = self.marks_in_bytes();
        // Hysteresis: a state ends only with a quarter more free space than its threshold.
        let mark = |state, bytes: u64| {
            if self.state >= state { bytes.saturating_add(bytes / 4) } else { bytes }
        };
        if free < mark(SpaceState::VeryLow, very_low) {
            SpaceState::VeryLow
        } else if free < mark(SpaceState::Low, low) {
            SpaceState::Low
        } else {
            SpaceState::Normal
        }
    }

    /// Bytes a second that may be written for the first time, where that is limited: so slow that
    /// the free space would at any moment last for the duration of an extension.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        (self.state == SpaceState::VeryLow)
            .then(|| scale(self.seen.free, SECOND_NS, self.horizon_ns()))
    }

    /// Seconds until the pool is full, if it goes on as lately. `None` while nothing is written.
    #[must_use]
    pub fn seconds_to_full(&self) -> Option<u64> {
        (self.rate > 0).then(|| self.seen.free / self.rate)
    }
}

/// `value` * `by` / `of`, as far as it fits.
fn scale(value: u64, by: u64, of: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(by) / u128::from(of.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// A value on its way to another, after a part of the time that it takes.
fn towards(from: u64, to: u64, passed: u64, all: u64) -> u64 {
    let whole = passed.saturating_add(all);
    // The new value's share is rounded up, so that an average of zeroes becomes zero.
    scale(from, all, whole).saturating_add(scale(to, passed, whole))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Simulates a writer of `rate` MiB a second, observed ten times a second, until the pool has
    /// that state or the time is over. Returns the free space.
    fn fill(watch: &mut SpaceWatch, now: &mut u64, free: u64, rate: u64, until: SpaceState) -> u64 {
        let mut free = free;
        for _ in 0..10_000 {
            *now += SAMPLE_NS;
            let step = (rate * MIB / 10).min(free);
            free -= step;
            watch.granted(step);
            let total = 1 << 40;
            let _ = watch.observe(*now, Observed { total, free, stuck: false });
            if watch.state() == until {
                return free;
            }
        }
        panic!("never {until:?}: {watch:?}");
    }

    #[test]
    fn marks_in_seconds_follow_the_speed_of_writing() {
        let mut left = Vec::new();
        for rate in [50, 1300] {
            let (mut watch, mut now) = (SpaceWatch::new(Some(Marks::default()), 0), 0);
            // Long enough for the average to be right.
            let free = (rate * 300) << 20;
            let low = fill(&mut watch, &mut now, free, rate, SpaceState::Low);
            let very_low = fill(&mut watch, &mut now, low, rate, SpaceState::VeryLow);
            left.push((low / MIB, very_low / MIB));
        }
        let [(slow_low, slow_very), (fast_low, fast_very)] = left[..] else { panic!("{left:?}") };
        // 20 and 5 seconds of 50 and of 1300 MiB/s.
        assert!((950..=1000).contains(&slow_low) && (240..=250).contains(&slow_very), "{left:?}");
        assert!((25_000..=26_000).contains(&fast_low), "{left:?}");
        assert!((6_200..=6_500).contains(&fast_very), "{left:?}");
    }

    #[test]
    fn the_limit_begins_at_the_speed_there_was_and_only_falls() {
        let (mut watch, mut now) = (SpaceWatch::new(Some(Marks::default()), 0), 0);
        let mut free = fill(&mut watch, &mut now, 60_000 * MIB, 100, SpaceState::VeryLow);
        let first = watch.limit().unwrap();
        assert!((95 * MIB..=101 * MIB).contains(&first), "{}", first / MIB);
        let mut before = first;
        while free > 64 * 1024 {
            now += SAMPLE_NS;
            let step = (before / 10).clamp(1, free);
            free -= step;
            watch.granted(step);
            let _ = watch.observe(now, Observed { total: 1 << 40, free, stuck: false });
            let limit = watch.limit().unwrap();
            assert!(limit <= before, "{limit} after {before}");
            before = limit;
        }
    }

    #[test]
    fn a_state_has_hysteresis_and_is_reported_once() {
        let marks = Marks { low: Mark::Bytes(1000), very_low: Mark::Bytes(100) };
        let mut watch = SpaceWatch::new(Some(marks), 0);
        let mut now = 0;
        let mut reported = Vec::new();
        for free in [2000, 999, 1001, 990, 1200, 1249, 1250, 99, 101, 124, 125, 0, 1, 5000] {
            now += 1;
            let seen = Observed { total: 4000, free, stuck: false };
            reported.extend(watch.observe(now, seen).map(|change| (free, change.from, change.to)));
        }
        use SpaceState::{Full, Low, Normal, VeryLow};
        let expected = [
            (999, Normal, Low),
            (1250, Low, Normal),
            (99, Normal, VeryLow),
            (125, VeryLow, Low),
            (0, Low, Full),
            (1, Full, VeryLow),
            (5000, VeryLow, Normal),
        ];
        assert_eq!(reported, expected);
    }

    #[test]
    fn a_lasting_state_is_reported_again_every_30_seconds() {
        let marks = Marks { low: Mark::Percent(10), very_low: Mark::Percent(2) };
        let mut watch = SpaceWatch::new(Some(marks), 0);
        let seen = Observed { total: 1000, free: 50, stuck: false };
        let seconds = (1..=100_u64).filter(|&s| watch.observe(s * SECOND_NS, seen).is_some());
        assert_eq!(seconds.collect::<Vec<_>>(), [1, 31, 61, 91]);
    }

    #[test]
    fn a_blocked_volume_makes_the_pool_full_despite_free_space() {
        let mut watch = SpaceWatch::new(Some(Marks::default()), 0);
        let seen = Observed { total: 1000, free: 900, stuck: true };
        assert_eq!(watch.observe(1, seen).map(|change| change.to), Some(SpaceState::Full));
    }

    #[test]
    fn a_slow_extension_is_requested_earlier() {
        let (mut watch, mut now) = (SpaceWatch::new(Some(Marks::default()), 0), 0);
        watch.extended(10 * SECOND_NS);
        assert_eq!(watch.horizon_ns(), 30 * SECOND_NS);
        let low = fill(&mut watch, &mut now, 60_000 * MIB, 100, SpaceState::Low);
        assert!((11_500..=12_000).contains(&(low / MIB)), "{}", low / MIB);
    }

    #[test]
    fn marks_that_make_no_sense_are_refused_by_name() {
        let refused = |low, very_low| match (Marks { low, very_low }).check() {
            Err(MapperError::Invalid { field, allowed, .. }) => (field, allowed),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(Mark::Bytes(5), Mark::Bytes(5)), ("very_low", "less than `low`"));
        assert_eq!(refused(Mark::Percent(101), Mark::Percent(5)).0, "low");
        assert_eq!(refused(Mark::Percent(9), Mark::Seconds(5)).1, "of the kind of `low`");
        assert!(Marks::default().check().is_ok());
    }

    #[test]
    fn a_rate_is_forgotten() {
        let (mut watch, mut now) = (SpaceWatch::new(Some(Marks::default()), 0), 0);
        let _ = fill(&mut watch, &mut now, 60_000 * MIB, 100, SpaceState::Low);
        for _ in 0..100_000 {
            now += SECOND_NS;
            let _ = watch.observe(now, Observed { total: 1 << 40, free: 1 << 30, stuck: false });
        }
        assert_eq!((watch.rate(), watch.state()), (0, SpaceState::Normal));
    }
}
