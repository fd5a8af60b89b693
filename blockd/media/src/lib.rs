//! Files, disks and memory that pools are on, and pools that are not open: shared by the daemon and
//! the tools of the command line.
//!
//! A [`Device`] is opened once, with its owner lock. [`pool`] has what is needed to make or open a
//! pool, the claim that keeps other hosts off it, and reading and writing one offline. The rings
//! that do the daemon's IO are not here.
//!
//! [`error`] has the errors that users see, [`units`] the sizes that they write and read, and
//! [`place`] where their files are.
#![deny(unsafe_code)]

pub mod clock;
mod device;
mod doorbell;
pub mod error;
pub mod finding;
mod gate;
mod guard;
pub mod hardening;
#[expect(unsafe_code, reason = "a call of the C library that no package has")]
mod heap;
mod io_error;
#[expect(unsafe_code, reason = "ioctls of block devices")]
mod ioctl;
#[expect(unsafe_code, reason = "copies to and from a mapping that others may write")]
mod mapped;
mod memory;
pub mod names;
pub mod place;
pub mod pmem;
pub mod pool;
pub mod program;
mod room;
pub mod ublk;
pub mod units;

pub use blockd_pmem::media::Durability;
pub use device::{
    Device, DeviceInfo, DeviceKind, DeviceSpec, MARKED_BYTES, claim_disk, disk_sequence,
    lock_below, lock_owner, same_device,
};
pub use doorbell::Doorbell;
pub use gate::Gate;
pub use io_error::io_error;
pub use mapped::Mapped;
pub use memory::Memory;

/// Bytes of a page of IO memory.
pub const PAGE: usize = 4096;
