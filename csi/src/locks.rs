//! Locks that admit one call for each volume at a time; a second call is refused at once.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use blockd_csi_base::clock::Clock;
use parking_lot::Mutex;

use crate::error::Error;

/// The objects with a call in progress, and since when.
#[derive(Clone, Default, Debug)]
pub struct Locks(Arc<Mutex<BTreeMap<String, Clock>>>);

/// Releases the lock when dropped. The task that does the work owns it, so that the lock stays held
/// when the caller disconnects.
#[derive(Debug)]
#[must_use = "the lock ends when this goes"]
pub struct Guard {
    locks: Locks,
    key: String,
}

impl Locks {
    /// Takes a volume or snapshot, by its id.
    ///
    /// # Errors
    /// ABORTED: another call has it.
    pub fn take(&self, id: &str) -> Result<Guard, Error> {
        self.take_key(id, id)
    }

    /// Takes the name of something that may not be there yet, so that it has no id.
    ///
    /// # Errors
    /// ABORTED: another call has it.
    pub fn take_name(&self, what: &str, name: &str) -> Result<Guard, Error> {
        // No id has a control character.
        self.take_key(&format!("{what}\u{1}{name}"), &format!("{what} {name}"))
    }

    fn take_key(&self, key: &str, what: &str) -> Result<Guard, Error> {
        let age = match self.0.lock().entry(key.to_owned()) {
            Entry::Vacant(free) => {
                free.insert(Clock::start());
                return Ok(Guard { locks: self.clone(), key: key.to_owned() });
            }
            Entry::Occupied(taken) => taken.get().elapsed(),
        };
        let what = blockd_csi_base::error::shown(what);
        Err(Error::Aborted { what, problem: busy(age) })
    }

    /// How many are taken.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.lock().len()
    }
}

/// Says that a call is in progress. One that hangs in the kernel is seen by its age.
fn busy(age: Duration) -> String {
    match age.as_secs() {
        0 => "is being worked on by another call".to_owned(),
        seconds => format!("is being worked on by another call, for {seconds} s"),
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.locks.0.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_takes_long_is_refused_with_its_age() {
        let said = busy(Duration::from_millis(75_900));
        assert_eq!(said, "is being worked on by another call, for 75 s");
        assert_eq!(busy(Duration::from_millis(900)), "is being worked on by another call");
    }

    #[test]
    fn a_second_call_on_a_volume_is_aborted_and_others_are_not() {
        let locks = Locks::default();
        let first = locks.take("p/a").unwrap();
        let error = locks.take("p/a").unwrap_err();
        assert_eq!(error.code(), tonic::Code::Aborted);
        assert_eq!(error.to_string(), "p/a is being worked on by another call");
        let other = locks.take("p/b").unwrap();
        // A name is no id, and the same name can be that of different things.
        let names = [locks.take_name("volume", "p/a"), locks.take_name("snapshot", "p/a")];
        let names = names.map(Result::unwrap);
        assert!(locks.take_name("volume", "p/a").is_err());
        drop(names);
        assert_eq!(locks.count(), 2);
        drop(first);
        let again = locks.take("p/a").unwrap();
        drop((again, other));
        assert_eq!(locks.count(), 0);
    }
}
