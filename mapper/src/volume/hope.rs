//! For how long a volume that waits for space counts on what others drop.

use crate::sync::{AtomicU64, Ordering};

/// Nanoseconds that a volume counts on that, and until all that was dropped before is durable.
/// Beside a neighbour that discards and writes without a pause, in space that is set aside for it,
/// a volume would else never be out of space.
const LIMIT_NS: u64 = 1_000_000_000;
/// The commit under way, the one that takes what it has left, and one whose extents are free since.
const LIMIT_COMMITS: u64 = 3;

/// Since when a volume waits for what was dropped, and the commits that had ended by then. The
/// engine's thread alone uses it.
#[derive(Debug, Default)]
pub(crate) struct Hope {
    /// 0: it does not.
    since_ns: AtomicU64,
    commits: AtomicU64,
}

impl Hope {
    /// Whether it may still get some of it. Begins to count where it did not.
    pub(crate) fn lasts(&self, now_ns: u64, commits: u64) -> bool {
        if self.since_ns.load(Ordering::Relaxed) == 0 {
            self.since_ns.store(now_ns.max(1), Ordering::Relaxed);
            self.commits.store(commits, Ordering::Relaxed);
        }
        let passed = now_ns.saturating_sub(self.since_ns.load(Ordering::Relaxed));
        passed < LIMIT_NS || commits - self.commits.load(Ordering::Relaxed) < LIMIT_COMMITS
    }

    /// The volume has space, or nothing is on its way.
    pub(crate) fn end(&self) {
        self.since_ns.store(0, Ordering::Relaxed);
    }
}
