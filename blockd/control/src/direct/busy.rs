//! Volumes that are overwritten before somebody gets them. That takes minutes: nobody else touches
//! them meanwhile, and everything else of their pool goes on.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Those of a pool.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// By uuid: whether whoever holds it is to give up.
    held: Mutex<BTreeMap<String, bool>>,
    changed: Condvar,
}

/// One of them, until it is dropped. Taken by who holds the pool's lock, which may be let go then.
#[derive(Debug)]
pub(super) struct Held<'a> {
    busy: &'a Busy,
    uuid: String,
}

impl Busy {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing if somebody has it.
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

    /// Waits until nobody has it. Not for who holds the pool's lock: its holder may need that.
    pub(super) fn wait(&self, uuid: &str) {
        let is_held = |all: &mut BTreeMap<String, bool>| all.contains_key(uuid);
        drop(self.changed.wait_while(self.all(), is_held).unwrap_or_else(PoisonError::into_inner));
    }

    /// Has whoever holds it give up, and waits for that as [`Self::wait`] does.
    pub(super) fn give_up(&self, uuid: &str) {
        let mut all = self.all();
        // Also whoever takes it next, before this one comes to see that it was given up.
        while let Some(gives_up) = all.get_mut(uuid) {
            *gives_up = true;
            all = self.changed.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Held<'_> {
    /// Somebody waits for it to be given up.
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
