//! The interface to the service that keeps leases and the directory.

use std::path::Path;

use crate::cell::{Cell, CellName, HostNumber};
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

    /// The cell whose device this path is. Looks at nothing.
    fn cell_at(&self, path: &Path) -> Option<CellName>;

    /// Writes this host's key where other hosts find it, in place of its former ones, before it is
    /// registered with the devices (H1).
    ///
    /// # Errors
    /// If the directory can't be written.
    fn publish_key(&self, key: Key) -> Result<(), HostsError>;

    /// The key of a host, as it was last published.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn key_of(&self, host: HostNumber) -> Result<Option<Key>, HostsError>;

    /// Space of the group.
    ///
    /// # Errors
    /// If the directory can't be read.
    fn space(&self) -> Result<Space, HostsError>;

    /// Makes a cell of at least this many bytes, which this host has from then on. Its first MiB
    /// reads as zeroes.
    ///
    /// # Errors
    /// If there is one of that name, or no room.
    fn create(&self, name: &CellName, bytes: u64) -> Result<Cell, HostsError>;

    /// Takes the lease of a cell (H2). Nothing is changed where this host has it.
    ///
    /// # Errors
    /// [`HostsError::Held`] while another host has it, also one that is dead and not yet counted as
    /// dead.
    fn acquire(&self, name: &CellName) -> Result<Cell, HostsError>;

    /// Ends the lease of a host that this host was the one to fence, so that no call has to wait
    /// until it expires. Nothing is changed where another host has the lease.
    ///
    /// # Errors
    /// If the lease can't be read or written.
    fn free(&self, name: &CellName, of: HostNumber) -> Result<(), HostsError>;

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

    /// Ends IO of this host to the group's cells without its devices' help, when the membership is
    /// lost (H2). What is in flight ends with errors. Then the coordinator may forget this host's
    /// leases.
    ///
    /// # Errors
    /// If the devices can't be replaced: the leases stay, and the watchdog resets the host.
    fn cut_off(&self) -> Result<(), HostsError>;
}
