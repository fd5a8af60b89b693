//! The exclusive claim on a block device, and the owner locks of the files below it.
//!
//! A descriptor that was opened with `O_EXCL` keeps every other exclusive open of the device out:
//! `mount`, `mkfs`, `wipefs`, device-mapper, md, swap, and partitioning tools (open(2): "if the
//! block device is in use by the system, open fails with EBUSY"). The kernel holds the claim until
//! the last reference to the open file is gone. So it is a file of its own, which no ring ever
//! gets: rings keep what is registered with them for a while after the process has died.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};

use nix::sys::stat::{major, makedev, minor};

use super::ioctl;

/// Claims the block device of this open file. Fails with `EBUSY` while another program has a claim.
pub(super) fn claim(device: &File) -> std::io::Result<File> {
    // By the descriptor: the path may lead to another device by now.
    let path = format!("/proc/self/fd/{}", device.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

/// How many loop devices over loop devices are looked through; setups have two at most.
const MAX_BELOW: usize = 4;

/// The files below a loop device that begin where it does: a pool that is on one of them is on the
/// device as well. None below other devices and files.
pub(super) fn files_below(device: &File) -> std::io::Result<Vec<File>> {
    let mut below: Vec<File> = Vec::new();
    while below.len() < MAX_BELOW
        && let Some(next) = file_below(below.last().unwrap_or(device))?
    {
        below.push(next);
    }
    Ok(below)
}

fn file_below(device: &File) -> std::io::Result<Option<File>> {
    let metadata = device.metadata()?;
    if !metadata.file_type().is_block_device() {
        return Ok(None);
    }
    let number = metadata.rdev();
    let folder = format!("/sys/dev/block/{}:{}/loop", major(number), minor(number));
    // Other devices have no such folder, and neither have partitions of loop devices.
    let Ok(path) = fs::read_to_string(format!("{folder}/backing_file")) else { return Ok(None) };
    let path = path.trim_end_matches('\n');
    let (number, inode, offset) = ioctl::loop_file(device)?;
    if offset != 0 {
        return Ok(None);
    }
    // The kernel's `new_encode_dev`.
    let number = makedev((number & 0xf_ff00) >> 8, number & 0xff | number >> 12 & 0xf_ff00);
    let open = |write| OpenOptions::new().read(true).write(write).open(path);
    // Network file systems require a descriptor for writing.
    match open(true).or_else(|_| open(false)) {
        Ok(file) if file.metadata().is_ok_and(|one| (one.dev(), one.ino()) == (number, inode)) => {
            Ok(Some(file))
        }
        // In another mount namespace, or deleted.
        found => {
            let error = found.err().map(tracing::field::display);
            tracing::warn!(path, error, "cannot find the file below a loop device to lock it");
            Ok(None)
        }
    }
}

/// Takes the owner locks of the files below a loop device; `None` while another process has one.
pub(super) fn lock_below(device: &File) -> std::io::Result<Option<Vec<File>>> {
    let below = files_below(device)?;
    for file in &below {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(Some(below))
}

/// The user that has a claim on a block device, as far as the kernel reports it: devices on top of
/// it, mounts, swap. `None` where it reports none, as for another program's exclusive open.
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
///
/// The kernel names the process that took the lock. Its number may be another's by now, so the
/// process counts only if it has the file open.
pub(super) fn lock_owner(file: &File) -> Option<u32> {
    let file = identity(&file.metadata().ok()?);
    // Lines of proc(5)'s locks: number, kind, mode, access, process, file, start, end. Waiting
    // requests have an arrow behind the number, and are of no interest.
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let holders = locks.lines().filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let is_flock = fields.get(1) == Some(&"FLOCK");
        (is_flock && is_file(fields.get(5)?, file)?).then(|| fields.get(4)?.parse().ok())?
    });
    holders.into_iter().find(|process| has_open(*process, file))
}

/// Whether a place in `/proc/locks`, like `08:01:131`, is that of a file. On btrfs the device
/// differs from that of `stat`: both have the major number 0, as no disk has.
fn is_file(place: &str, (device, inode): (u64, u64)) -> Option<bool> {
    let mut fields = place.split(':');
    let mut hex = || u64::from_str_radix(fields.next()?, 16).ok();
    let found = (hex()?, hex()?);
    let own = (major(device), minor(device));
    let is_same = own == found || (own.0, found.0) == (0, 0);
    Some(is_same && fields.next()?.parse() == Ok(inode))
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Whether a process has a file open. One that is dead has none.
fn has_open(process: u32, file: (u64, u64)) -> bool {
    let open = fs::read_dir(format!("/proc/{process}/fd")).ok().into_iter().flatten().flatten();
    let mut open = open.filter_map(|entry| fs::metadata(entry.path()).ok());
    open.any(|metadata| identity(&metadata) == file)
}

#[cfg(test)]
mod tests {
    use nix::fcntl::{Flock, FlockArg};

    use super::*;

    #[test]
    fn lock_owner_is_a_process_that_has_the_file_open() {
        let path = std::env::temp_dir().join(format!("blockd-lock-{}", std::process::id()));
        let (file, other) = (File::create(&path).unwrap(), File::open(&path).unwrap());
        assert_eq!(lock_owner(&other), None);
        let locked = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        let own = std::process::id();
        assert_eq!(lock_owner(&other), Some(own));
        let file = identity(&other.metadata().unwrap());
        // The parent lives and has the file not open: as after a reuse of the owner's number.
        assert!(has_open(own, file) && !has_open(std::os::unix::process::parent_id(), file));
        drop(locked);
        fs::remove_file(path).unwrap();
    }

    /// The first file of each ext4 has the number 12.
    #[test]
    fn files_of_the_same_number_on_two_disks_are_not_the_same() {
        let of = |major, minor| (makedev(major, minor), 12);
        assert_eq!(is_file("08:11:12", of(8, 17)), Some(true));
        assert_eq!(is_file("08:01:12", of(8, 17)), Some(false));
        assert_eq!(is_file("08:11:13", of(8, 17)), Some(false));
        assert_eq!(is_file("00:2a:12", of(8, 17)), Some(false));
        assert_eq!(is_file("00:2a:12", of(0, 43)), Some(true));
    }
}
