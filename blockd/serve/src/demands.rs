//! Pools on standby whose clients have asked for something.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;

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
