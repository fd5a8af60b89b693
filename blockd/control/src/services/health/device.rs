//! The operating system's state of a pool's devices, without any IO on them.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use blockd_media::DeviceKind;
use blockd_media::pool::PMEM_HEADER_BYTES;

use crate::health::BadBlocks;

/// Where the kernel describes devices.
pub(super) const SYSFS: &str = "/sys";
/// The unit of sizes in sysfs.
const SECTOR_BYTES: u64 = 512;

/// The state of a device as one look has found it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceLook {
    /// Why it is not there any more: a kind, and one line.
    pub(super) gone: Option<(&'static str, String)>,
    /// In its own bytes.
    pub(super) bad: BadBlocks,
    /// The kernel's sequence number of the disk: another number is another disk of the same name.
    pub(super) disk_sequence: Option<u64>,
}

/// Looks at an open device that had `size` bytes when the pool last looked. Blocks as long as the
/// file system below a file does.
pub(super) fn look_at(
    sysfs: &Path,
    kind: DeviceKind,
    file: &fs::File,
    size: u64,
    disk_sequence: Option<u64>,
) -> DeviceLook {
    let gone = |reason, problem: &str| DeviceLook {
        gone: Some((reason, problem.to_owned())),
        ..DeviceLook::default()
    };
    if kind == DeviceKind::Memory {
        return DeviceLook::default();
    }
    let metadata = match file.metadata() {
        Ok(metadata) => metadata,
        Err(error) => return gone("io", &format!("can't be looked at: {error}")),
    };
    if kind == DeviceKind::Disk {
        return look_at_disk(sysfs, metadata.rdev(), size, disk_sequence);
    }
    let is_pmem = matches!(kind, DeviceKind::Pmem(_));
    if is_pmem && metadata.file_type().is_char_device() {
        // A file that is gone cannot be opened again, and until then it is mapped.
        return DeviceLook::default();
    }
    let size = size + if is_pmem { PMEM_HEADER_BYTES } else { 0 };
    if metadata.nlink() == 0 {
        return gone("deleted", "was deleted: it is lost when the daemon ends");
    }
    if metadata.len() < size {
        let problem = format!("has shrunk from {size} to {} bytes", metadata.len());
        return gone("truncated", &problem);
    }
    DeviceLook::default()
}

fn look_at_disk(sysfs: &Path, device: u64, size: u64, sequence: Option<u64>) -> DeviceLook {
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let here = sysfs.join("dev/block").join(format!("{major}:{minor}"));
    let mut look = DeviceLook { disk_sequence: sequence, ..DeviceLook::default() };
    let mut gone = |reason, problem: &str| look.gone = Some((reason, problem.to_owned()));
    // Where there is no sysfs at all, as in some containers, nothing is known.
    let Ok(here) = here.canonicalize() else {
        if sysfs.join("dev/block").is_dir() {
            gone("removed", "was removed");
        }
        return look;
    };
    let disk = match here.join("partition").exists() {
        true => here.parent().map_or_else(|| here.clone(), Path::to_path_buf),
        false => here.clone(),
    };
    let now = number(&disk.join("diskseq"));
    let bytes = number(&here.join("size")).map(|sectors| sectors.saturating_mul(SECTOR_BYTES));
    let state = text(&disk.join("device/state"));
    if sequence.is_some() && now.is_some() && now != sequence {
        gone("replaced", "was removed, and another one has its place");
    } else if let Some(state) = state.filter(|state| is_dead(state)) {
        gone("offline", &format!("is {state}"));
    } else if let Some(bytes) = bytes.filter(|&bytes| bytes < size) {
        gone("truncated", &format!("has shrunk from {size} to {bytes} bytes"));
    }
    look.disk_sequence = sequence.or(now);
    look.bad = bad_blocks(&here, &disk, bytes.unwrap_or(size));
    look
}

/// The lists of the device itself and of the disk that it is a part of, in the device's bytes.
fn bad_blocks(here: &Path, disk: &Path, bytes: u64) -> BadBlocks {
    let read = |folder: &Path| text(&folder.join("badblocks")).map(|list| BadBlocks::parse(&list));
    let own = read(here).unwrap_or_default();
    if here == disk || !own.runs.is_empty() {
        return own.within(0, bytes);
    }
    let start = number(&here.join("start")).unwrap_or(0).saturating_mul(SECTOR_BYTES);
    read(disk).unwrap_or_default().within(start, bytes)
}

/// States of SCSI disks and NVMe controllers in which they do no IO, and won't by themselves.
fn is_dead(state: &str) -> bool {
    matches!(state, "offline" | "transport-offline" | "cancel" | "deleted" | "dead" | "deleting")
}

fn text(path: &PathBuf) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &PathBuf) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::testing::{Folder, folder};

    /// A sysfs with the disk 8:16 of 1000 sectors, and its partition 8:17 from sector 100 on.
    fn sysfs() -> Folder {
        let folder = folder();
        let disk = folder.path().join("devices/sdb");
        fs::create_dir_all(disk.join("sdb1")).unwrap();
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(folder.path().join("dev/block")).unwrap();
        for (name, text) in [
            ("size", "1000\n"),
            ("diskseq", "7\n"),
            ("device/state", "running\n"),
            ("badblocks", "90 2\n110 8\n"),
            ("sdb1/size", "900\n"),
            ("sdb1/start", "100\n"),
            ("sdb1/partition", "1\n"),
        ] {
            fs::write(disk.join(name), text).unwrap();
        }
        for (numbers, name) in [("8:16", "sdb"), ("8:17", "sdb/sdb1")] {
            let link = folder.path().join("dev/block").join(numbers);
            std::os::unix::fs::symlink(folder.path().join("devices").join(name), link).unwrap();
        }
        folder
    }

    fn device(minor: u64) -> u64 {
        nix::sys::stat::makedev(8, minor)
    }

    /// Row: H2.
    #[test]
    fn a_disk_that_is_removed_replaced_or_offline_is_gone() {
        let sysfs = sysfs();
        let disk = sysfs.path().join("devices/sdb");
        let reason = |sequence| {
            let look = look_at_disk(sysfs.path(), device(16), 1000 * 512, sequence);
            look.gone.map(|gone| gone.0)
        };
        assert_eq!(reason(None), None);
        assert_eq!(reason(Some(7)), None);
        assert_eq!(reason(Some(6)), Some("replaced"));
        fs::write(disk.join("device/state"), "offline\n").unwrap();
        assert_eq!(reason(Some(7)), Some("offline"));
        fs::write(disk.join("device/state"), "running\n").unwrap();
        fs::write(disk.join("size"), "0\n").unwrap();
        assert_eq!(reason(Some(7)), Some("truncated"));
        fs::remove_file(sysfs.path().join("dev/block/8:16")).unwrap();
        assert_eq!(reason(Some(7)), Some("removed"));
        // It is back.
        fs::write(disk.join("size"), "1000\n").unwrap();
        std::os::unix::fs::symlink(disk, sysfs.path().join("dev/block/8:16")).unwrap();
        assert_eq!(reason(Some(7)), None);
    }

    /// Row: H11.
    #[test]
    fn bad_blocks_of_a_disk_are_those_of_its_partitions() {
        let sysfs = sysfs();
        let of = |minor, sectors: u64| {
            look_at_disk(sysfs.path(), device(minor), sectors * 512, None).bad.runs
        };
        assert_eq!(of(16, 1000), [(90 * 512, 2 * 512), (110 * 512, 8 * 512)]);
        assert_eq!(of(17, 900), [(10 * 512, 8 * 512)]);
    }

    /// Row: H2.
    #[test]
    fn a_file_that_is_deleted_or_shorter_is_gone() {
        let folder = folder();
        let path = folder.path().join("pool");
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let reason = || {
            let look = look_at(Path::new(SYSFS), DeviceKind::File, &file, 1 << 20, None);
            look.gone.map(|gone| gone.0)
        };
        assert_eq!(reason(), None);
        file.set_len(1 << 19).unwrap();
        assert_eq!(reason(), Some("truncated"));
        file.set_len(1 << 20).unwrap();
        assert_eq!(reason(), None);
        fs::remove_file(&path).unwrap();
        assert_eq!(reason(), Some("deleted"));
    }

    #[test]
    fn without_sysfs_nothing_is_said_to_be_gone() {
        let folder = folder();
        assert_eq!(look_at_disk(folder.path(), device(16), 512, None), DeviceLook::default());
    }
}
