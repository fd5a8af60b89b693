//! Counters and latency histograms that the data path keeps.
//!
//! Each has one writer, a worker's thread; others read. So a store is all that counting costs.

mod media;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

pub use media::{DeviceStats, LATER_DEVICES, MediaOp, MediaStats};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts. By its one writer.
    #[inline]
    pub fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Lowers it, of one that says what is at present. By its one writer.
    #[inline]
    pub fn lower(&self, by: u64) {
        self.0.store(self.get().saturating_sub(by), Ordering::Relaxed);
    }

    /// Sets it. By its one writer.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// How far it has come.
    #[must_use]
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Kinds of requests, as they are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
    /// Writes of zeroes.
    WriteZeroes,
}

impl Op {
    /// All of them, in the order of their counters.
    pub const ALL: [Self; 5] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
        }
    }
}

/// Where a request spends its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Planning: lookup and allocation. Measured for one request in 64.
    Map,
    /// Held back by the volume's limits.
    Limit,
    /// Parked, until the pool can go on.
    Wait,
    /// IO on the media.
    Media,
    /// Waiting for a commit.
    Commit,
    /// From the request's arrival to its answer.
    Total,
}

impl Stage {
    /// All of them, in the order of their histograms.
    pub const ALL: [Self; 6] =
        [Self::Map, Self::Limit, Self::Wait, Self::Media, Self::Commit, Self::Total];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Limit => "limit",
            Self::Wait => "wait",
            Self::Media => "media",
            Self::Commit => "commit",
            Self::Total => "total",
        }
    }
}

/// Powers of two that are distinguished: from 1 ns to 2^40 ns, 18 minutes.
const POWERS: usize = 41;
/// Parts of each: the error of a quantile is at most a quarter.
const PARTS: usize = 4;

/// How often something took how long.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter]>,
    sum_ns: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = (0..POWERS * PARTS).map(|_| Counter::default()).collect();
        Self { buckets, sum_ns: Counter::default() }
    }
}

impl Histogram {
    /// Counts a duration. By its one writer.
    #[inline]
    pub fn record(&self, ns: u64) {
        self.sum_ns.add(ns);
        self.buckets[bucket(ns)].add(1);
    }

    /// All durations together, in nanoseconds.
    #[must_use]
    #[inline]
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns.get()
    }

    /// How many durations were counted.
    #[must_use]
    #[inline]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// Each bucket's upper end in nanoseconds, exclusive, and its count.
    #[inline]
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.buckets.iter().enumerate().map(|(at, count)| (upper_end(at), count.get()))
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1);
    let power = ns.ilog2() as usize;
    let part = if power >= 2 { (ns >> (power - 2)) & 3 } else { 0 };
    let part = usize::try_from(part).unwrap_or(0);
    (power * PARTS + part).min(POWERS * PARTS - 1)
}

fn upper_end(bucket: usize) -> u64 {
    let (power, part) = (bucket / PARTS, (bucket % PARTS) as u64);
    let base = 1_u64 << power;
    if power >= 2 { base + (part + 1) * (base >> 2) } else { base * 2 }
}

/// The name of a pool or volume, which may be renamed while it is counted.
#[derive(Debug, Default)]
pub struct SharedName(RwLock<String>);

impl SharedName {
    /// The present name.
    #[must_use]
    pub fn get(&self) -> String {
        self.0.read().clone()
    }

    /// Whether this is the present name.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        *self.0.read() == name
    }

    /// Changes the name.
    pub fn set(&self, name: &str) {
        name.clone_into(&mut self.0.write());
    }
}

impl From<String> for SharedName {
    fn from(name: String) -> Self {
        Self(RwLock::new(name))
    }
}

impl fmt::Display for SharedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.read())
    }
}

/// One worker's counters of one volume.
#[derive(Debug, Default)]
pub struct VolumeStats {
    /// The pool's name.
    pub pool: SharedName,
    /// The volume's name.
    pub volume: SharedName,
    /// The worker's number.
    pub worker: usize,
    /// Requests answered, by [`Op`].
    pub ops: [Counter; 5],
    /// Bytes of them.
    pub bytes: [Counter; 5],
    /// Requests that failed.
    pub errors: [Counter; 5],
    /// Of these, by fault of the media or the pool: reads, and all others.
    pub faults: [Counter; 2],
    /// By [`Stage`].
    pub stages: [Histogram; 6],
    /// Requests that wait for the pool at present.
    pub parked: Counter,
    /// Requests that were parked. Each counts once.
    pub parks: Counter,
    /// Writes that found no space below, and are tried again. Each counts once.
    pub starved: Counter,
    /// Writes that were slowed down because the pool is nearly full.
    pub slowed: Counter,
    /// Nanoseconds that they were slowed down for.
    pub slowed_ns: Counter,
    /// Requests that the volume's limits held back.
    pub limited: Counter,
    /// Times that a connection or queue was held back, by [`crate::schedule::Hold`], and for how
    /// many nanoseconds.
    pub held: [Counter; 4],
    pub held_ns: [Counter; 4],
    /// Connections and queues that are held back at present.
    pub held_now: [Counter; 4],
    /// Writes that wait for space at present, and don't know whether it will come.
    pub blocked: Counter,
    /// Nanoseconds that the first of them has waited for.
    pub blocked_ns: Counter,
    /// Writes that failed for lack of space.
    pub refused: Counter,
}

impl VolumeStats {
    /// Counters of a kind of requests.
    #[must_use]
    #[inline]
    pub fn op(&self, op: Op) -> (&Counter, &Counter, &Counter) {
        let at = op as usize;
        (&self.ops[at], &self.bytes[at], &self.errors[at])
    }

    /// The histogram of a stage.
    #[must_use]
    #[inline]
    pub const fn stage(&self, stage: Stage) -> &Histogram {
        &self.stages[stage as usize]
    }
}

/// Counters of one worker's thread.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// The worker's number.
    pub worker: usize,
    /// Calls of `io_uring_enter`.
    pub enters: Counter,
    /// Operations on the media that went through the ring.
    pub media_operations: Counter,
    /// Times it was woken by another thread.
    pub wakeups: Counter,
    /// Connections at present, and those that moved to another worker.
    pub connections: Counter,
    pub moved: Counter,
    /// Bytes of IO memory that are free.
    pub free_memory: Counter,
    /// Times that a connection waited for memory.
    pub memory_waits: Counter,
    /// Connections dropped because their clients read no replies.
    pub send_timeouts: Counter,
    /// Connections dropped because their clients stopped in the middle of a request.
    pub receive_timeouts: Counter,
    /// Connections closed because their clients sent no request.
    pub idle_timeouts: Counter,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_lies_in_its_bucket() {
        for ns in (0..100_000).chain([1 << 30, (1 << 30) + 7, 1 << 39]) {
            let at = bucket(ns);
            assert!(ns < upper_end(at), "{ns}");
            assert!(
                at == 0 || ns.max(1) >= upper_end(at - 1) || upper_end(at - 1) == upper_end(at)
            );
        }
        assert_eq!(bucket(u64::MAX), POWERS * PARTS - 1);
    }

    #[test]
    fn a_recorded_time_is_counted_once() {
        let histogram = Histogram::default();
        [1, 10, 100, 1_000_000].into_iter().for_each(|ns| histogram.record(ns));
        assert_eq!(histogram.count(), 4);
        assert_eq!(histogram.sum_ns(), 1_000_111);
        let shown: u64 = histogram.buckets().map(|(_, count)| count).sum();
        assert_eq!(shown, 4);
    }
}
