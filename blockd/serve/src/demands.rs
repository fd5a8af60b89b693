//! Pools on standby whose clients have asked for something.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The treatment of flushes while their client is on standby.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Flushes {
    /// Waiting, and asking for the pool, as other requests do.
    #[default]
    Ask,
    /// Waiting for the end of a close that is under way here.
    Wait,
    /// Answered: the pool was closed in order, so that all that was answered is durable.
    /// Ends on every worker before one of them serves the pool again.
    Answer,
}

/// Which pools clients wait for, by identity. Each is named once until it was taken.
#[derive(Debug, Default)]
pub struct Demands {
    pools: Mutex<BTreeSet<[u8; 16]>>,
    added: Notify,
}

impl Demands {
    /// A client waits for this pool.
    #[cold]
    pub fn add(&self, pool: [u8; 16]) {
        self.pools.lock().insert(pool);
        self.added.notify_one();
    }

    /// The next pool that a client waits for.
    pub async fn next(&self) -> [u8; 16] {
        loop {
            if let Some(pool) = self.pools.lock().pop_first() {
                return pool;
            }
            self.added.notified().await;
        }
    }
}
