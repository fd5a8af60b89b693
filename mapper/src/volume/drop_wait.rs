//! How long a volume that lacks space waits for extents that others have dropped, before its writes
//! are refused.

use crate::sync::{AtomicU64, Ordering};

/// Such a volume waits for this many nanoseconds at least, and for [`LIMIT_COMMITS`]. Without a
/// limit it would wait for ever beside a neighbour that discards and writes without a pause in
/// space that is set aside for that neighbour.
const LIMIT_NS: u64 = 1_000_000_000;
/// Nanoseconds that it waits at most while a volume or a snapshot is being deleted. A deletion may
/// take seconds, and a neighbour may delete snapshots without a pause.
const DELETION_NS: u64 = 30_000_000_000;
/// Commits that it waits for: the one under way, the one that takes the drops which that has left,
/// and one more, after which their extents are free.
const LIMIT_COMMITS: u64 = 3;

/// When the wait began, and how many commits had ended by then. Only the engine's thread begins it.
#[derive(Debug, Default)]
pub(crate) struct DropWait {
    /// 0: the volume does not wait.
    since_ns: AtomicU64,
    commits: AtomicU64,
}

impl DropWait {
    /// Whether the volume is to wait on. Begins the wait where there is none.
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

    /// Ends the wait: the volume has space or has dropped some itself, or nothing is on its way.
    pub(crate) fn end(&self) {
        if self.since_ns.load(Ordering::Relaxed) != 0 {
            self.since_ns.store(0, Ordering::Relaxed);
        }
    }
}
