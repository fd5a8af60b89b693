//! Locks by name: a pool is opened or created by one call at a time, and so is a volume changed.
//! Neither waits for calls on others. Calls on volumes share a lock of their pool: one that renames
//! the pool waits for all of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// One lock for each name that is in use.
#[derive(Debug, Default)]
pub(super) struct NamedLocks(Mutex<Locks>);

type Locks = BTreeMap<String, Arc<RwLock<()>>>;

/// A lock that one call has.
pub(super) type Lock = OwnedRwLockWriteGuard<()>;

/// Locks of volumes, and the shared one of their pool.
#[derive(Debug)]
pub(super) struct VolumeLocks {
    _pool: OwnedRwLockReadGuard<()>,
    _volumes: Vec<Lock>,
}

impl NamedLocks {
    /// Waits until no other call has a lock of this name.
    pub(super) async fn lock(&self, name: &str) -> Lock {
        let one = Arc::clone(self.in_use().entry(name.to_owned()).or_default());
        one.write_owned().await
    }

    /// Locks of this pool's volumes. A call that waits for the pool's lock alone goes before.
    pub(super) async fn lock_volumes(
        &self,
        pool: &str,
        names: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> VolumeLocks {
        let one = Arc::clone(self.in_use().entry(pool.to_owned()).or_default());
        let _pool = one.read_owned().await;
        // No name has a slash.
        let names = names.into_iter().map(|name| format!("{pool}/{}", name.as_ref()));
        VolumeLocks { _pool, _volumes: self.lock_all(names.collect()).await }
    }

    /// The same for several names. They are taken in order, so that two calls never wait for each
    /// other.
    pub(super) async fn lock_all(&self, mut names: Vec<String>) -> Vec<Lock> {
        names.sort();
        names.dedup();
        let locks: Vec<_> = {
            let mut all = self.in_use();
            names.into_iter().map(|name| Arc::clone(all.entry(name).or_default())).collect()
        };
        let mut held = Vec::with_capacity(locks.len());
        for lock in locks {
            held.push(lock.write_owned().await);
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
