//! The few questions to block devices that have no safe interface.

use std::fs::File;
use std::os::fd::AsRawFd;

nix::ioctl_read!(blkgetsize64, 0x12, 114, u64);
nix::ioctl_read!(blkgetdiskseq, 0x12, 128, u64);
nix::ioctl_read_bad!(loop_get_status64, 0x4c05, [u64; LOOP_WORDS]);
nix::ioctl_read_bad!(blksszget, nix::request_code_none!(0x12, 104), libc::c_int);
nix::ioctl_write_ptr_bad!(blkdiscard, nix::request_code_none!(0x12, 119), [u64; 2]);

/// Words of `struct loop_info64` in `include/uapi/linux/loop.h`: it has 232 bytes.
const LOOP_WORDS: usize = 29;

/// Device and inode numbers of the file below a loop device, and the byte of it that the device
/// begins at. The device number is coded as the kernel does for user space.
pub(super) fn loop_file(file: &File) -> std::io::Result<(u64, u64, u64)> {
    let mut status = [0; LOOP_WORDS];
    // SAFETY: the kernel writes a `loop_info64` there, or refuses what is no loop device.
    unsafe { loop_get_status64(file.as_raw_fd(), &raw mut status) }?;
    let [device, inode, _, offset, ..] = status;
    Ok((device, inode, offset))
}

/// Bytes of a block device.
pub(super) fn device_size(file: &File) -> std::io::Result<u64> {
    let mut size = 0;
    // SAFETY: the kernel writes a u64 there, or refuses what is no block device.
    unsafe { blkgetsize64(file.as_raw_fd(), &raw mut size) }?;
    Ok(size)
}

/// The kernel's sequence number of the disk that a device is or is part of; since Linux 5.15.
pub(super) fn disk_sequence(file: &File) -> std::io::Result<u64> {
    let mut sequence = 0;
    // SAFETY: the kernel writes a u64 there, or refuses what is no block device.
    unsafe { blkgetdiskseq(file.as_raw_fd(), &raw mut sequence) }?;
    Ok(sequence)
}

/// Logical block of a block device in bytes.
pub(super) fn device_block_size(file: &File) -> std::io::Result<u32> {
    let mut size = 0;
    // SAFETY: the kernel writes an int there, or refuses what is no block device.
    unsafe { blksszget(file.as_raw_fd(), &raw mut size) }?;
    u32::try_from(size).map_err(std::io::Error::other)
}

/// Discards a range of a block device that is not in use. Blocks until it is done.
pub(super) fn discard(file: &File, offset: u64, len: u64) -> std::io::Result<()> {
    let range = [offset, len];
    // SAFETY: the kernel reads two u64 there, or refuses what is no block device.
    unsafe { blkdiscard(file.as_raw_fd(), &raw const range) }?;
    Ok(())
}
