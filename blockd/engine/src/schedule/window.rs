//! The media queue of a pool, divided among the volumes that use it on all workers.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limit::Limiter;

/// Workers that can use a window: as many as a pool serves.
const MAX_WORKERS: usize = 16;

/// Most cost of the requests that one pool has in flight while several volumes use it. It keeps a
/// local disk busy (100 requests of 4 KiB, 14 of 128 KiB), and an SSD serves a queue of that length
/// in 1 to 4 ms.
pub const WINDOW_COST: u64 = 2 << 20;

/// The window shrinks to this while volumes with little in flight are slowed down by others: a
/// request or two of each volume.
const LEAST_COST: u64 = 64 << 10;
/// How often a worker changes the window.
const ADJUST_NS: u64 = 2_000_000;
/// How many times as long as at the best a request of such a volume may take on the media, in
/// eighths: above the first the window shrinks, below the second it grows.
const SHRINK_ABOVE: u64 = 16;
const GROW_BELOW: u64 = 12;
/// After this long the best time is measured anew, as devices change.
const BEST_NS: u64 = 30_000_000_000;

/// One worker's requests in flight. Padded, so that workers do not share cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    in_flight: AtomicU64,
}

/// The share of a pool's media queue that each of its active volumes may use.
///
/// A worker only stores to its own cell while it serves requests. The cells are summed when a
/// volume has used up its own share and requests the unused shares of the others.
#[derive(Debug)]
pub struct Window {
    most: u64,
    /// Between the least and the most.
    cost: AtomicU64,
    cells: [Cell; MAX_WORKERS],
    /// Sum of the weights of active volumes, each counted once.
    weight: AtomicU64,
    /// Active volumes.
    volumes: AtomicU64,
    /// Incremented after each change of the above.
    generation: AtomicU64,
}

impl Default for Window {
    fn default() -> Self {
        Self::new(WINDOW_COST)
    }
}

impl Window {
    /// A window of this many units of cost.
    #[must_use]
    pub fn new(cost: u64) -> Self {
        Self {
            most: cost,
            cost: AtomicU64::new(cost),
            cells: Default::default(),
            weight: AtomicU64::new(0),
            volumes: AtomicU64::new(0),
            generation: AtomicU64::new(1),
        }
    }

    /// Cost that is in flight on all workers.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.cells.iter().map(|cell| cell.in_flight.load(Ordering::Relaxed)).sum()
    }

    /// Whether so much of the window is not in use.
    pub(super) fn has_room(&self, cost: u64) -> bool {
        self.in_flight() + cost <= self.cost()
    }

    /// The cost that may be in flight now.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost.load(Ordering::Relaxed)
    }

    /// Sets it, within its bounds.
    pub(super) fn set_cost(&self, cost: u64) {
        let cost = cost.clamp(LEAST_COST.min(self.most), self.most);
        if self.cost.swap(cost, Ordering::Relaxed) != cost {
            self.generation.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Whether several volumes are active.
    pub(super) fn is_shared(&self) -> bool {
        self.volumes.load(Ordering::Relaxed) > 1
    }

    /// Publishes what a worker has in flight.
    pub(super) fn publish(&self, worker: usize, in_flight: u64) {
        if let Some(cell) = self.cells.get(worker) {
            cell.in_flight.store(in_flight, Ordering::Relaxed);
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The share of a volume on one of the workers that use it; `None` while no other volume is
    /// active, which leaves it the whole media queue, however long.
    pub(super) fn share(&self, volume: &VolumeShare, weight: u64) -> Option<u64> {
        if self.volumes.load(Ordering::Acquire) < 2 {
            return None;
        }
        let total = self.weight.load(Ordering::Acquire).max(weight).max(1);
        let workers = volume.workers.load(Ordering::Acquire).max(1);
        Some(self.cost() * weight / total / workers)
    }

    /// A worker begins to use a volume.
    pub(super) fn join(&self, volume: &VolumeShare, weight: u64) {
        if volume.workers.fetch_add(1, Ordering::AcqRel) == 0 {
            self.weight.fetch_add(weight, Ordering::AcqRel);
            self.volumes.fetch_add(1, Ordering::AcqRel);
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// A worker no longer uses a volume.
    pub(super) fn leave(&self, volume: &VolumeShare, weight: u64) {
        if volume.workers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.weight.fetch_sub(weight, Ordering::AcqRel);
            self.volumes.fetch_sub(1, Ordering::AcqRel);
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

/// State that the workers that serve a volume share: its limits, and the number of workers.
#[derive(Debug, Default)]
pub struct VolumeShare {
    /// Requests and bytes per second.
    pub limiter: Limiter,
    /// Workers on which the volume is active.
    workers: AtomicU64,
}

/// How long requests of volumes with little in flight take on the media, as one worker sees it, and
/// what that means for the window.
///
/// Such a volume cannot make up for a long queue by a longer one of its own. A window whose queue
/// takes about as long as an idle device needs to answer keeps the device busy, and slows the
/// volume down by half at the most.
#[derive(Debug, Default)]
pub(super) struct Latency {
    /// Of reads and of writes: the best time, and a moving average.
    best: [u64; 2],
    average: [u64; 2],
    /// The best time since the last was set, and when that was.
    next_best: [u64; 2],
    since: u64,
    adjusted: u64,
    /// Requests seen since the last sweep.
    seen: u64,
}

impl Latency {
    /// A request of such a volume was on the media for so long.
    pub(super) fn observe(&mut self, window: &Window, now: u64, is_write: bool, ns: u64) {
        let at = usize::from(is_write);
        let ns = ns.max(1);
        self.seen += 1;
        let lower = |best: u64| if best == 0 { ns } else { best.min(ns) };
        self.best[at] = lower(self.best[at]);
        self.next_best[at] = lower(self.next_best[at]);
        let average = self.average[at];
        self.average[at] = if average == 0 { ns } else { average - average / 8 + ns / 8 };
        if now.saturating_sub(self.adjusted) < ADJUST_NS {
            return;
        }
        self.adjusted = now;
        if now.saturating_sub(self.since) > BEST_NS {
            self.since = now;
            self.best = std::mem::take(&mut self.next_best);
        }
        let (eighths, cost) = (self.average[at] * 8 / self.best[at].max(1), window.cost());
        if eighths > SHRINK_ABOVE {
            window.set_cost(cost - cost / 4);
        } else if eighths < GROW_BELOW {
            window.set_cost(cost + cost / 16);
        }
    }

    /// Opens the window if no such request was seen since the last call.
    pub(super) fn sweep(&mut self, window: &Window) {
        if std::mem::take(&mut self.seen) == 0 {
            window.set_cost(u64::MAX);
        }
    }
}
