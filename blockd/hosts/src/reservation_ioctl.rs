//! Persistent reservations of a block device, by the kernel's `include/uapi/linux/pr.h`. The same
//! calls work on SCSI, NVMe and device-mapper.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

nix::ioctl_write_ptr!(pr_register, b'p', 200, Registration);
nix::ioctl_write_ptr!(pr_reserve, b'p', 201, Reservation);
nix::ioctl_write_ptr!(pr_preempt_abort, b'p', 204, Preemption);

/// `struct pr_registration`.
#[repr(C)]
pub(super) struct Registration {
    pub(super) old_key: u64,
    pub(super) new_key: u64,
    pub(super) flags: u32,
    pub(super) pad: u32,
}

/// `struct pr_reservation`.
#[repr(C)]
pub(super) struct Reservation {
    pub(super) key: u64,
    pub(super) kind: u32,
    pub(super) flags: u32,
}

/// `struct pr_preempt`.
#[repr(C)]
pub(super) struct Preemption {
    pub(super) old_key: u64,
    pub(super) new_key: u64,
    pub(super) kind: u32,
    pub(super) flags: u32,
}

/// Registers, changes or removes a key. A positive number is the device's status.
pub(super) fn register(file: &File, registration: &Registration) -> io::Result<i32> {
    // SAFETY: the kernel reads a `pr_registration` there, or refuses what is no block device.
    Ok(unsafe { pr_register(file.as_raw_fd(), registration) }?)
}

/// Makes a reservation. A positive number is the device's status.
pub(super) fn reserve(file: &File, reservation: &Reservation) -> io::Result<i32> {
    // SAFETY: the kernel reads a `pr_reservation` there, or refuses what is no block device.
    Ok(unsafe { pr_reserve(file.as_raw_fd(), reservation) }?)
}

/// Removes another key, and aborts its commands. A positive number is the device's status.
pub(super) fn preempt_and_abort(file: &File, preemption: &Preemption) -> io::Result<i32> {
    // SAFETY: the kernel reads a `pr_preempt` there, or refuses what is no block device.
    Ok(unsafe { pr_preempt_abort(file.as_raw_fd(), preemption) }?)
}
