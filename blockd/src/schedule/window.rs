//! The media queue of a pool, divided among the volumes that use it on all workers.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limit::Limiter;

/// Workers that can use a window: as many as a pool serves.
const MAX_WORKERS: usize = 16;

/// Cost of the requests that one pool has in flight while several volumes use it. It keeps a local
/// disk busy (100 requests of 4 KiB, 14 of 128 KiB), and an SSD serves a queue of that length in 1
/// to 4 ms.
pub const WINDOW_COST: u64 = 2 << 20;

/// What one worker has in flight. Padded, so that workers do not share cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    in_flight: AtomicU64,
}

/// The share of a pool's media queue that each of its active volumes may use.
///
/// A worker only stores to its own cell while it serves requests. The cells are summed when a
/// volume has used up its own share and asks for what the others leave.
#[derive(Debug)]
pub struct Window {
    cost: u64,
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
            cost,
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
        self.in_flight() + cost <= self.cost
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
        Some(self.cost * weight / total / workers)
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

/// What the workers that serve a volume share: its limits, and how many they are.
#[derive(Debug, Default)]
pub struct VolumeShare {
    /// Requests and bytes per second.
    pub limiter: Limiter,
    /// Workers on which the volume is active.
    workers: AtomicU64,
}
