//! Volumes that are overwritten before they are handed out. Overwriting takes minutes: the volume
//! is locked meanwhile, and all other work of its pool goes on.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The namespaces of a pool that are being worked on.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// By uuid: whether the holder has to give up.
    held: Mutex<BTreeMap<String, bool>>,
    changed: Condvar,
}

/// One of them, until it is dropped. Taken with the pool's lock held, which may be released then.
#[derive(Debug)]
pub(super) struct Held<'a> {
    busy: &'a Busy,
    uuid: String,
}

impl Busy {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a volume; `None` if it is locked already.
    pub(super) fn hold(&self, uuid: &str) -> Option<Held<'_>> {
        let mut all = self.all();
        if all.contains_key(uuid) {
            return None;
        }
        all.insert(uuid.to_owned(), false);
        Some(Held { busy: self, uuid: uuid.to_owned() })
    }

    pub(super) fn is_held(&self, uuid: &str) -> bool {
        self.all().contains_key(uuid)
    }

    /// Waits until the volume is unlocked. Not to be called with the pool's lock held: the holder
    /// may need it.
    pub(super) fn wait(&self, uuid: &str) {
        let is_held = |all: &mut BTreeMap<String, bool>| all.contains_key(uuid);
        drop(self.changed.wait_while(self.all(), is_held).unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes the holder give up, and waits for that as [`Self::wait`] does.
    pub(super) fn give_up(&self, uuid: &str) {
        let mut all = self.all();
        // This includes a next holder, which may lock the volume before this thread wakes.
        while let Some(gives_up) = all.get_mut(uuid) {
            *gives_up = true;
            all = self.changed.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Held<'_> {
    /// Whether a caller waits for the holder to give up.
    pub(super) fn gives_up(&self) -> bool {
        self.busy.all().get(&self.uuid).copied().unwrap_or(true)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.busy.all().remove(&self.uuid);
        self.busy.changed.notify_all();
    }
}
