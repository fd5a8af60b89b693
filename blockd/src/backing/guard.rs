//! The exclusive claim on a block device.
//!
//! A descriptor that was opened with `O_EXCL` keeps every other exclusive open of the device out:
//! `mount`, `mkfs`, `wipefs`, device-mapper, md, swap, and partitioning tools (open(2): "if the
//! block device is in use by the system, open fails with EBUSY"). The kernel holds the claim until
//! the last reference to the open file is gone. So it is a file of its own, which no ring ever
//! gets: rings keep what is registered with them for a while after the process has died.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use nix::sys::stat::{major, minor};

/// Claims the block device of this open file. Fails with `EBUSY` while another program has a claim.
pub(super) fn claim(device: &File) -> std::io::Result<File> {
    // By the descriptor: the path may lead to another device by now.
    let path = format!("/proc/self/fd/{}", device.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

/// What has a claim on a block device, as far as the kernel says: devices on top of it, mounts,
/// swap. `None` where it doesn't say, as of another program's exclusive open.
pub(super) fn holder(device: &File) -> Option<String> {
    let number = device.metadata().ok()?.rdev();
    let number = format!("{}:{}", major(number), minor(number));
    let system = format!("/sys/dev/block/{number}");
    let above = fs::read_dir(format!("{system}/holders")).ok().into_iter().flatten().flatten();
    let above: Vec<_> =
        above.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if !above.is_empty() {
        return Some(format!("it is part of {}", above.join(", ")));
    }
    // The daemon has a mount namespace of its own, which may not see what the host's first does.
    let folder = ["/proc/self/mountinfo", "/proc/1/mountinfo"]
        .iter()
        .find_map(|mounts| mounted_at(&number, mounts));
    if let Some(folder) = folder {
        return Some(format!("it is mounted on {folder}"));
    }
    let name = fs::canonicalize(&system).ok()?.file_name()?.to_string_lossy().into_owned();
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let is_swap = swaps.lines().any(|line| line.split(' ').next() == Some(&format!("/dev/{name}")));
    is_swap.then(|| "it is used as swap".to_owned())
}

/// Where the device with this number is mounted: fields 3 and 5 of proc(5)'s mountinfo.
fn mounted_at(number: &str, mounts: &str) -> Option<String> {
    let mounts = fs::read_to_string(mounts).ok()?;
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mut found = found.filter(|fields| fields.get(2) == Some(&number));
    found.next()?.get(4).map(|folder| (*folder).to_owned())
}

/// The living process that holds the owner lock of a file, where it is seen from here. The lock of
/// one that died is held until its IO has ended.
pub(super) fn lock_owner(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    // Lines of proc(5)'s locks: number, kind, mode, access, process, file, start, end. Waiting
    // requests have an arrow behind the number, and are of no interest.
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let found = locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut found = found.filter(|fields| {
        fields.get(1) == Some(&"FLOCK") && fields.get(5).is_some_and(|field| *field == file)
    });
    let process: u32 = found.next()?.get(4)?.parse().ok()?;
    let state = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The state follows the name, which may hold anything, in parentheses.
    let state = state.rsplit_once(") ")?.1.chars().next()?;
    (!matches!(state, 'Z' | 'X')).then_some(process)
}
