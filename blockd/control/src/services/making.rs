//! Locks by name: a pool is opened or created by one call at a time, and so is a volume changed.
//! Neither waits for calls on others.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::OwnedMutexGuard;

/// One lock for each name that is in use.
#[derive(Debug, Default)]
pub(super) struct NamedLocks(Mutex<Locks>);

type Locks = BTreeMap<String, Arc<tokio::sync::Mutex<()>>>;

impl NamedLocks {
    /// Waits until no other call has a lock of this name.
    pub(super) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let one = Arc::clone(self.in_use().entry(name.to_owned()).or_default());
        one.lock_owned().await
    }

    /// The same for several names. They are taken in order, so that two calls never wait for each
    /// other.
    pub(super) async fn lock_all(&self, mut names: Vec<String>) -> Vec<OwnedMutexGuard<()>> {
        names.sort();
        names.dedup();
        let locks: Vec<_> = {
            let mut all = self.in_use();
            names.into_iter().map(|name| Arc::clone(all.entry(name).or_default())).collect()
        };
        let mut held = Vec::with_capacity(locks.len());
        for lock in locks {
            held.push(lock.lock_owned().await);
        }
        held
    }

    /// The locks that calls have or wait for. Names come from clients: the others are forgotten.
    fn in_use(&self) -> MutexGuard<'_, Locks> {
        let mut all = self.0.lock();
        all.retain(|_, one| Arc::strong_count(one) > 1);
        all
    }
}
