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
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    names: BTreeSet<String>,
    /// Whether the file has these names. After a failed write it may have those or the new ones: it
    /// is replaced before its folder is made durable.
    is_written: bool,
}

impl ClosedPools {
    /// Reads the names that the state directory remembers.
    pub(super) fn read(state_dir: &Path) -> Result<Self, Error> {
        let file = StateFile::new(state_dir, "closed.json");
        let names = file.read::<String>()?.into_iter().collect();
        Ok(Self { file, state: Mutex::new(State { names, is_written: true }) })
    }

    /// Whether a pool is to stay closed.
    pub(super) fn has(&self, pool: &str) -> bool {
        self.state.lock().names.contains(pool)
    }

    /// Remembers durably whether a pool is to stay closed. False if it was so already. After an
    /// error the next start may find either, until another call has written the file. Blocks.
    pub(super) fn set(&self, pool: &str, is_closed: bool) -> Result<bool, Error> {
        let mut state = self.state.lock();
        let changed = state.names.contains(pool) != is_closed;
        if !changed && state.is_written {
            return Ok(false);
        }
        let mut next = state.names.clone();
        match is_closed {
            true => drop(next.insert(pool.to_owned())),
            false => drop(next.remove(pool)),
        }
        state.is_written = false;
        self.file.write(next.iter().collect())?;
        *state = State { names: next, is_written: true };
        Ok(changed)
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

    /// The folder of the file may fail to be made durable after the file was replaced. No file
    /// system does that on request: the file is replaced here.
    #[test]
    fn after_a_failed_write_the_next_call_writes_the_file() {
        let folder = folder();
        let closed = ClosedPools::read(folder.path()).unwrap();
        let blocked = folder.path().join("closed.json.next");
        std::fs::create_dir(&blocked).unwrap();
        assert!(closed.set("a", true).is_err());
        std::fs::remove_dir(&blocked).unwrap();
        closed.file.write(vec!["a"]).unwrap();
        assert!(!closed.has("a") && !closed.set("a", false).unwrap());
        assert!(!ClosedPools::read(folder.path()).unwrap().has("a"));
    }

    #[test]
    fn a_folder_that_can_not_be_written_changes_nothing() {
        let folder = folder();
        let closed = ClosedPools::read(&folder.path().join("gone")).unwrap();
        assert!(closed.set("a", true).is_err());
        assert!(!closed.has("a"));
    }
}
