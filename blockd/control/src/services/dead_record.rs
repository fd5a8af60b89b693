//! Hosts of a volume group that were declared dead here, as they are remembered with the group.

use std::collections::{BTreeMap, BTreeSet};

use blockd_api::v1;
use blockd_hosts::{HostNumber, Key};
use serde::{Deserialize, Serialize};

/// The dead hosts of one group, by their numbers: one record for each, the last one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct DeadHosts(BTreeMap<u16, DeadHost>);

/// A host that was declared dead. The record ends when the host comes back.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct DeadHost {
    /// The key by which it was fenced; empty where it had none. A host that comes back has another.
    key: String,
    pub(super) dead_unix_ms: i64,
    /// Cells that were taken over from it, each once. No more than the group has.
    #[serde(default)]
    pub(super) cells: BTreeSet<String>,
    /// Cells that it had, and whose takeover has not ended.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) pending: BTreeSet<String>,
    /// Pending cells that a takeover opens, and has not closed: one that goes on does that.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    opening: BTreeSet<String>,
}

fn text(key: Option<Key>) -> String {
    key.map_or_else(String::new, |key| key.to_string())
}

impl DeadHost {
    /// A host that was fenced by this key, with the cells that it had.
    pub(super) fn new(key: Option<Key>, dead_unix_ms: i64, pending: BTreeSet<String>) -> Self {
        let (cells, opening) = (BTreeSet::new(), BTreeSet::new());
        Self { key: text(key), dead_unix_ms, cells, pending, opening }
    }

    /// The key by which it was fenced.
    pub(super) fn key(&self) -> Option<Key> {
        Key::parse(&self.key)
    }

    /// The takeover of a cell has ended. `is_taken`: by this host, and not by another one.
    pub(super) fn finish(&mut self, cell: &str, is_taken: bool) {
        self.pending.remove(cell);
        self.opening.remove(cell);
        if is_taken {
            self.cells.insert(cell.to_owned());
        }
    }

    /// A takeover is about to open a cell, or has not opened it.
    pub(super) fn set_opening(&mut self, cell: &str, is_opening: bool) {
        match is_opening {
            true => self.opening.insert(cell.to_owned()),
            false => self.opening.remove(cell),
        };
    }

    /// Whether a takeover has opened a cell, if that is open.
    pub(super) fn is_opening(&self, cell: &str) -> bool {
        self.opening.contains(cell)
    }

    /// Whether a host with this key is another incarnation. One without a key has not come back.
    fn is_former_of(&self, present: Option<Key>) -> bool {
        present.is_some() && self.key != text(present)
    }
}

impl DeadHosts {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn get(&self, host: HostNumber) -> Option<&DeadHost> {
        self.0.get(&host.0)
    }

    pub(super) fn get_mut(&mut self, host: HostNumber) -> Option<&mut DeadHost> {
        self.0.get_mut(&host.0)
    }

    /// A cell was taken by a call of its own: no takeover that goes on closes it.
    pub(super) fn note_taken(&mut self, cell: &str) {
        self.0.values_mut().for_each(|dead| dead.set_opening(cell, false));
    }

    pub(super) fn insert(&mut self, host: HostNumber, dead: DeadHost) {
        self.0.insert(host.0, dead);
    }

    pub(super) fn remove(&mut self, host: HostNumber) {
        self.0.remove(&host.0);
    }

    /// Ends the records of hosts that have come back, unless they are newer than `before`.
    pub(super) fn remove_returned(&mut self, before: &Self, returned: &[HostNumber]) {
        for host in returned {
            if self.get(*host) == before.get(*host) {
                self.remove(*host);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (HostNumber, &DeadHost)> {
        self.0.iter().map(|(host, dead)| (HostNumber(*host), dead))
    }

    /// As the control API has them.
    pub(super) fn describe(&self) -> Vec<v1::DeadHost> {
        let dead = self.iter().map(|(host, dead)| v1::DeadHost {
            host: u32::from(host.0),
            dead_unix_ms: dead.dead_unix_ms,
            cells: dead.cells.iter().cloned().collect(),
            pending_cells: dead.pending.iter().cloned().collect(),
        });
        dead.collect()
    }

    /// Hosts that have come back, by the keys that the group has now.
    pub(super) fn returned(&self, keys: &[Key]) -> Vec<HostNumber> {
        let key_of = |host| keys.iter().copied().find(|key| key.host() == host);
        let returned = self.iter().filter(|(host, dead)| dead.is_former_of(key_of(*host)));
        returned.map(|(host, _)| host).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_ends_with_another_key_alone_and_names_each_cell_once() {
        let (host, key) = (HostNumber(2), Key::new(HostNumber(2), 7));
        let mut all = DeadHosts::default();
        let mut dead = DeadHost::new(Some(key), 5, ["one".to_owned(), "two".to_owned()].into());
        for _ in 0..2 {
            dead.finish("one", true);
            dead.finish("two", false);
        }
        assert_eq!((dead.cells.len(), dead.pending.len()), (1, 0));
        all.insert(host, dead.clone());
        all.insert(host, dead);
        assert_eq!(all.iter().count(), 1);
        let json = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<DeadHosts>(&json).unwrap(), all);
        assert!(all.returned(&[]).is_empty() && all.returned(&[key]).is_empty());
        assert_eq!(all.returned(&[Key::new(host, 8)]), [host]);
        // It was declared dead again meanwhile: that record is another one.
        let before = all.clone();
        all.insert(host, DeadHost::new(Some(Key::new(host, 8)), 6, BTreeSet::new()));
        all.remove_returned(&before, &[host]);
        assert!(all.get(host).is_some());
        all.remove_returned(&all.clone(), &[host]);
        assert!(all.is_empty());
    }
}
