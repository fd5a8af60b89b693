//! For how long a volume that waits for space counts on what others drop.

use crate::sync::{AtomicU64, Ordering};

/// Nanoseconds that a volume counts on that, and until all that was dropped before is durable.
/// Beside a neighbour that discards and writes without a pause, in space that is set aside for it,
/// a volume would else never be out of space.
const LIMIT_NS: u64 = 1_000_000_000;
/// The same while a volume or a snapshot is being deleted: what that gives back is for all, and may
/// take seconds. A neighbour may delete snapshots without a pause, too.
const DELETION_NS: u64 = 30_000_000_000;
/// The commit under way, the one that takes what it has left, and one whose extents are free since.
const LIMIT_COMMITS: u64 = 3;

/// Since when a volume waits for what was dropped, and the commits that had ended by then. Only the
/// engine's thread begins to count.
#[derive(Debug, Default)]
pub(crate) struct Hope {
    /// 0: it does not.
    since_ns: AtomicU64,
    commits: AtomicU64,
}

impl Hope {
    /// Whether it may still get some of it. Begins to count where it did not.
    pub(crate) fn lasts(
        &self,
        now_ns: u64,
        commits: u64,
        is_deleting: impl FnOnce() -> bool,
    ) -> bool {
        // Read once: a worker may end it at any time.
        let mut since_ns = self.since_ns.load(Ordering::Relaxed);
        if since_ns == 0 {
            since_ns = now_ns.max(1);
            self.since_ns.store(since_ns, Ordering::Relaxed);
            self.commits.store(commits, Ordering::Relaxed);
        }
        let passed = now_ns.saturating_sub(since_ns);
        passed < LIMIT_NS
            || commits.saturating_sub(self.commits.load(Ordering::Relaxed)) < LIMIT_COMMITS
            || passed < DELETION_NS && is_deleting()
    }

    /// The volume has space or has dropped some itself, or nothing is on its way.
    pub(crate) fn end(&self) {
        if self.since_ns.load(Ordering::Relaxed) != 0 {
            self.since_ns.store(0, Ordering::Relaxed);
        }
    }
}
