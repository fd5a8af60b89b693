//! Pools that were closed by a call: they stay closed through restarts of the daemon, until a call
//! opens them.

use std::collections::BTreeSet;
use std::path::Path;

use blockd_media::error::Error;
use parking_lot::Mutex;

use super::state_file::StateFile;

/// Their names, in a file of the state directory.
#[derive(Debug)]
pub(super) struct ClosedPools {
    file: StateFile,
    names: Mutex<BTreeSet<String>>,
}

impl ClosedPools {
    /// Reads the names that the state directory remembers.
    pub(super) fn read(state_dir: &Path) -> Result<Self, Error> {
        let file = StateFile::new(state_dir, "closed.json");
        let names = file.read::<String>()?.into_iter().collect();
        Ok(Self { file, names: Mutex::new(names) })
    }

    /// Whether a pool is to stay closed.
    pub(super) fn has(&self, pool: &str) -> bool {
        self.names.lock().contains(pool)
    }

    /// Remembers durably whether a pool is to stay closed. False if it was so already. After an
    /// error nothing has changed. Blocks.
    pub(super) fn set(&self, pool: &str, is_closed: bool) -> Result<bool, Error> {
        let mut names = self.names.lock();
        if names.contains(pool) == is_closed {
            return Ok(false);
        }
        let mut next = names.clone();
        match is_closed {
            true => drop(next.insert(pool.to_owned())),
            false => drop(next.remove(pool)),
        }
        self.file.write(next.iter().collect())?;
        *names = next;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::testing::folder;

    #[test]
    fn closed_pools_are_remembered_until_they_are_opened() {
        let folder = folder();
        let closed = ClosedPools::read(folder.path()).unwrap();
        assert!(closed.set("a", true).unwrap() && !closed.set("a", true).unwrap());
        assert!(closed.set("b", true).unwrap() && closed.set("b", false).unwrap());
        let read = ClosedPools::read(folder.path()).unwrap();
        assert_eq!((read.has("a"), read.has("b")), (true, false));
    }

    #[test]
    fn a_folder_that_can_not_be_written_changes_nothing() {
        let folder = folder();
        let closed = ClosedPools::read(&folder.path().join("gone")).unwrap();
        assert!(closed.set("a", true).is_err());
        assert!(!closed.has("a"));
    }
}
