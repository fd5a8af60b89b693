//! Locks by name: a pool is opened or created by one call at a time, and does not wait for others.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// One lock for each name that is in use.
#[derive(Debug, Default)]
pub(super) struct NamedLocks(Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl NamedLocks {
    /// Waits until no other call has a lock of this name.
    pub(super) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let one = {
            let mut all = self.0.lock();
            // Names come from clients: those that are not in use are forgotten.
            all.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(all.entry(name.to_owned()).or_default())
        };
        one.lock_owned().await
    }

    /// The same for several names. They are taken in order, so that two calls never wait for each
    /// other.
    pub(super) async fn lock_all(&self, mut names: Vec<String>) -> Vec<OwnedMutexGuard<()>> {
        names.sort();
        names.dedup();
        let mut held = Vec::new();
        for name in names {
            held.push(self.lock(&name).await);
        }
        held
    }
}
