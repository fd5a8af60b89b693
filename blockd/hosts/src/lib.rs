//! Several hosts on one disk: which host has which cell, and how another host is kept from it. The
//! rules are in `docs/HOSTS.md`.
//!
//! A [`Coordinator`] keeps leases and the directory of a group of cells, and a [`Fence`] keeps a
//! host's writes off the devices. [`lvm`] has both for a shared volume group, [`folder`] for files
//! of one host. All calls block, within a limit of time, and can be repeated.
#![deny(unsafe_code)]

mod cell;
mod coordinator;
mod error;
mod fence;
pub mod folder;
mod folder_lock;
pub mod lvm;
mod reservation;
#[expect(unsafe_code, reason = "ioctls of persistent reservations")]
mod reservation_ioctl;
#[cfg(any(test, feature = "testing"))]
pub mod simulated;

pub use cell::{Cell, CellName, Holder, HostNumber, Owner};
pub use coordinator::{Coordinator, Device, Published, Seen, Space};
pub use error::HostsError;
pub use fence::{Fence, Key};
pub use reservation::Reservations;
