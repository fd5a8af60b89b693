//! The interface to the service that keeps leases and the directory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cell::{Cell, CellName, HostNumber, Owner};
use crate::error::HostsError;
use crate::fence::Key;

/// Space of a group, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// All of it.
    pub total: u64,
    /// Not in any cell.
    pub free: u64,
}

/// A device of a group.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Device {
    /// Stays the same when the kernel finds the device by another name. All hosts order devices by
    /// it.
    pub id: String,
    /// Its name now.
    pub path: PathBuf,
}

/// A cell, and the keys of hosts beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// The cell.
    pub cell: Cell,
    /// The key of each host, as it was last published.
    pub keys: Vec<Key>,
}

/// Keys and nodes of hosts, as they were last published.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Published {
    /// The key of each host.
    pub keys: Vec<Key>,
    /// The node of each host. Older releases publish none.
    pub nodes: Vec<(HostNumber, u32)>,
}

impl Published {
    /// The key of a host, if it has published one.
    #[must_use]
    pub fn key_of(&self, host: HostNumber) -> Option<Key> {
        key_of(&self.keys, host)
    }

    /// The hosts whose node has this number: one, if each host has a node of its own.
    pub fn hosts_of(&self, node: u32) -> impl Iterator<Item = HostNumber> {
        self.nodes.iter().filter(move |(_, of)| *of == node).map(|(host, _)| *host)
    }

    /// Whether a node is that of a host, and of no other one.
    #[must_use]
    pub fn is_only_of(&self, node: u32, host: HostNumber) -> bool {
        let mut hosts = self.hosts_of(node);
        hosts.next() == Some(host) && hosts.next().is_none()
    }
}

impl Seen {
    /// The key of a host, if it has published one.
    #[must_use]
    pub fn key_of(&self, host: HostNumber) -> Option<Key> {
        key_of(&self.keys, host)
    }
}

fn key_of(keys: &[Key], host: HostNumber) -> Option<Key> {
    keys.iter().copied().find(|key| key.host() == host)
}

/// Leases and directory of one group of cells. Every call blocks, within a limit of time, and ends
/// in the same state if it is repeated after a failure or a crash.
pub trait Coordinator: Send + Sync {
    /// Every cell of the group, by name.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn cells(&self) -> Result<Vec<Cell>, HostsError>;

    /// One cell as it is now; `None` where there is none of that name.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn cell(&self, name: &CellName) -> Result<Option<Cell>, HostsError> {
        Ok(self.cells()?.into_iter().find(|cell| cell.name == *name))
    }

    /// The same, with the keys of hosts. They are read before the cell's lease is, so that the host
    /// which has it may have published another key since.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn look_at(&self, name: &CellName) -> Result<Option<Seen>, HostsError> {
        let keys = self.keys()?;
        Ok(self.cell(name)?.map(|cell| Seen { cell, keys }))
    }

    /// The cell whose device this path is. Looks at nothing.
    fn cell_at(&self, path: &Path) -> Option<CellName>;

    /// Writes this host's key where other hosts find it, in place of its former ones, before it is
    /// registered with the devices (H1).
    ///
    /// # Errors
    /// If the directory can't be written.
    fn publish_key(&self, key: Key) -> Result<(), HostsError>;

    /// The key of each host, as it was last published. Needs no locks of the group.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn keys(&self) -> Result<Vec<Key>, HostsError>;

    /// Writes where this host's daemon answers others, in place of a former address. Empty: it does
    /// not.
    ///
    /// # Errors
    /// If the directory can't be written, or has no room for such an address.
    fn publish_address(&self, host: HostNumber, address: &str) -> Result<(), HostsError>;

    /// Where the daemon of a host answers, as it was last published; `None` where it does not.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn address_of(&self, host: HostNumber) -> Result<Option<String>, HostsError>;

    /// Writes the number of a host's node, by which pools name their last owner, in place of a
    /// former one.
    ///
    /// # Errors
    /// If the directory can't be written.
    fn publish_node(&self, host: HostNumber, node: u32) -> Result<(), HostsError>;

    /// The nodes of hosts, as they were last published. Older releases publish none.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn nodes(&self) -> Result<Vec<(HostNumber, u32)>, HostsError>;

    /// Keys and nodes of hosts, as they were last published. Needs no locks of the group.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn published(&self) -> Result<Published, HostsError> {
        Ok(Published { keys: self.keys()?, nodes: self.nodes()? })
    }

    /// Removes what the directory has of another host: its key, address and node. `key` is its
    /// present key, if it has one. Nothing is changed where there is nothing of it.
    ///
    /// # Errors
    /// [`HostsError::CameBack`] where it has another key: that one is not removed.
    fn forget_host(&self, host: HostNumber, key: Option<Key>) -> Result<(), HostsError>;

    /// Whether this host has the cell whose device this path is, by what can be seen without the
    /// coordinator; true where nothing can be seen. Blocks.
    fn holds(&self, path: &Path) -> bool {
        path.exists()
    }

    /// Makes sure that this host has the lease of a cell, before a pool is opened on its device
    /// (H2). One that was lost while the device stayed is taken again. Gives for how long from now,
    /// and a minute longer, no other host gets the lease, unless it fences this one or this one
    /// gives it back; zero where that is not known. No more than is needed to open the pool at
    /// once: a host that has fenced this one overwrites the lease.
    ///
    /// # Errors
    /// If it was lost and can't be taken again, as where another host has it.
    fn confirm(&self, _name: &CellName) -> Result<Duration, HostsError> {
        Ok(Duration::ZERO)
    }

    /// Space of the group.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn space(&self) -> Result<Space, HostsError>;

    /// Makes a cell of at least this many bytes, which this host has from then on. It is marked as
    /// new in the same step.
    ///
    /// # Errors
    /// If there is one of that name, or no room.
    fn create(&self, name: &CellName, bytes: u64) -> Result<Cell, HostsError>;

    /// Removes the mark of a new cell that this host has, before anything is kept in it.
    ///
    /// # Errors
    /// If this host does not have it.
    fn finish(&self, name: &CellName) -> Result<(), HostsError>;

    /// Marks a cell that this host has as new again, durably, before its pool is erased.
    ///
    /// # Errors
    /// If this host does not have it.
    fn mark_new(&self, name: &CellName) -> Result<(), HostsError>;

    /// Takes the lease of a cell (H2). Nothing is changed where this host has it.
    ///
    /// # Errors
    /// [`HostsError::Held`] while another host has it, also one that is dead and not yet counted as
    /// dead.
    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError>;

    /// The same, with the keys that hosts have once this host has the lease.
    ///
    /// # Errors
    /// As [`Self::acquire`], and if the keys can't be read: then this host has the lease.
    fn acquire_and_look(&self, name: &CellName) -> Result<Seen, HostsError> {
        let cell = self.acquire(name)?;
        Ok(Seen { cell, keys: self.keys()? })
    }

    /// Ends the lease of a host that this host was the one to fence, so that no call has to wait
    /// until it expires. Nothing is changed where the lease is not this owner's.
    ///
    /// # Errors
    /// If the lease can't be read or written.
    fn free(&self, name: &CellName, of: Owner) -> Result<(), HostsError>;

    /// Gives back the lease of a cell whose device is closed (H6). Nothing is changed where this
    /// host does not have it.
    ///
    /// # Errors
    /// If the device is in use.
    fn release(&self, name: &CellName) -> Result<(), HostsError>;

    /// Makes a cell larger, durably, before its superblock says so (H9). Gives its size then.
    /// Nothing is changed where it is that large.
    ///
    /// # Errors
    /// If this host does not have the cell, or there is no room.
    fn extend(&self, name: &CellName, bytes: u64) -> Result<u64, HostsError>;

    /// Removes a cell that this host has, with all that it holds.
    ///
    /// # Errors
    /// If this host does not have it, or its device is in use.
    fn remove(&self, name: &CellName) -> Result<(), HostsError>;

    /// Whether this host takes part in the group's leases now, or still has a device of it.
    ///
    /// # Errors
    /// If that can't be found out.
    fn is_in_use(&self) -> Result<bool, HostsError>;

    /// Ends all IO of this host to the group without its devices' help, when the membership is
    /// lost (H2). IO in flight ends with errors. Then the coordinator may forget this host's
    /// leases.
    ///
    /// # Errors
    /// If the devices can't be replaced: the leases stay, and the watchdog resets the host.
    fn cut_off(&self) -> Result<(), HostsError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_two_hosts_have_is_of_none_of_them_alone() {
        let [one, two, three] = [1, 2, 3].map(HostNumber);
        let nodes = vec![(one, 7), (two, 8), (three, 8)];
        let published = Published { keys: vec![Key::new(two, 5)], nodes };
        assert!(published.is_only_of(7, one));
        assert!(!published.is_only_of(8, two) && !published.is_only_of(8, three));
        assert!(!published.is_only_of(7, two) && !published.is_only_of(9, one));
        assert_eq!(published.key_of(two), Some(Key::new(two, 5)));
        assert_eq!(published.key_of(one), None);
    }
}
