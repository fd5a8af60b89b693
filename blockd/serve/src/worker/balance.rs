//! Which worker serves a new connection or queue, and which connections leave a busy worker.
//!
//! A connection moves between two of its requests. The queues of a block device stay where they
//! are: the kernel hands their requests to the thread that fetched them first.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::Shared;
use super::placement::Placement;

/// Parts of a thousand of a processor from which a worker is saturated, and below which it takes
/// connections of one that is.
pub(super) const SATURATED: u64 = 900;
const RELAXED: u64 = 500;

/// How much a worker has to do.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// Connections and queues that it was given and that have not ended.
    placed: AtomicUsize,
    /// Of the last second, how many thousandths it used a processor.
    busy: AtomicU64,
}

impl Load {
    pub(super) fn place(&self) {
        self.placed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.placed.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets what part of the time was used, and returns it in thousandths.
    pub(super) fn set_busy(&self, used_ns: u64, of_ns: u64) -> u64 {
        let busy = used_ns.saturating_mul(1000) / of_ns.max(1);
        self.busy.store(busy, Ordering::Relaxed);
        busy
    }

    /// The key of comparison: whether the worker is saturated, then its load.
    fn rank(&self) -> (bool, usize) {
        let is_saturated = self.busy.load(Ordering::Relaxed) >= SATURATED;
        (is_saturated, self.placed.load(Ordering::Relaxed))
    }
}

/// The worker with the least to do of those that may serve a pool; one after the other where
/// several have the same. The place is taken.
pub(super) fn place(threads: &[Shared], near: &[usize], turn: usize) -> usize {
    let count = near.len().max(1);
    let in_turn = (0..count).map(|at| near.get((turn + at) % count).copied().unwrap_or(0));
    let least = in_turn.min_by_key(|&worker| threads[worker].load.rank()).unwrap_or(0);
    threads[least].load.place();
    least
}

/// How often it is looked whether connections are still on their way.
const MOVE_PAUSE: Duration = Duration::from_millis(1);

/// The parts that workers need to move connections to each other.
#[derive(Clone, Debug)]
pub(super) struct Moves {
    /// All workers; empty until they have been started.
    threads: Arc<OnceLock<Weak<[Shared]>>>,
    placement: Arc<Mutex<Placement>>,
    state: Arc<MoveState>,
}

#[derive(Debug, Default)]
struct MoveState {
    /// Connections that have left a worker and not reached the next one.
    moving: AtomicUsize,
    /// The number of [`Still`]s: no connection starts to move while there is one.
    holders: AtomicUsize,
}

/// A connection is on its way while this lives.
pub(super) struct Moving(Arc<MoveState>);

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, Ordering::SeqCst);
    }
}

/// No connection moves while this lives.
pub(super) struct Still(Arc<MoveState>);

impl Drop for Still {
    fn drop(&mut self) {
        self.0.holders.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Moves {
    pub(super) fn new(placement: &Arc<Mutex<Placement>>) -> Self {
        let placement = Arc::clone(placement);
        Self { threads: Arc::default(), placement, state: Arc::default() }
    }

    /// The workers are there.
    pub(super) fn begin(&self, threads: &Arc<[Shared]>) {
        let _ = self.threads.set(Arc::downgrade(threads));
    }

    pub(super) fn threads(&self) -> Option<Arc<[Shared]>> {
        self.threads.get().and_then(Weak::upgrade)
    }

    /// A worker that has time for a connection to a pool of one that is saturated.
    pub(super) fn relaxed(&self, own: usize, pool: &[u8; 16]) -> Option<usize> {
        let near = self.placement.lock().workers(pool);
        let threads = self.threads()?;
        let busy = |worker: usize| threads[worker].load.busy.load(Ordering::Relaxed);
        let others = near.into_iter().filter(|&worker| worker != own);
        let least = others.map(|worker| (busy(worker), worker)).min()?;
        (least.0 < RELAXED).then_some(least.1)
    }

    /// Begins to move a connection, unless moves are on hold.
    pub(super) fn start(&self) -> Option<Moving> {
        self.state.moving.fetch_add(1, Ordering::SeqCst);
        let moving = Moving(Arc::clone(&self.state));
        (self.state.holders.load(Ordering::SeqCst) == 0).then_some(moving)
    }

    /// Lets no connection move, once those that do have arrived.
    pub(super) async fn hold(&self) -> Still {
        self.state.holders.fetch_add(1, Ordering::SeqCst);
        let still = Still(Arc::clone(&self.state));
        while self.state.moving.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(MOVE_PAUSE).await;
        }
        still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_saturated_ranks_last() {
        let (idle, busy) = (Load::default(), Load::default());
        (0..9).for_each(|_| idle.place());
        assert!(idle.rank() > busy.rank());
        assert_eq!(busy.set_busy(950_000_000, 1_000_000_000), 950);
        assert!(idle.rank() < busy.rank());
        assert_eq!(busy.set_busy(10, 1000), 10);
        assert!(idle.rank() > busy.rank());
    }
}
