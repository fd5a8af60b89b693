//! Paths of pools' devices: the files that may be opened there, and the places where no pool file
//! may be created.

use std::fs;
use std::path::{Path, PathBuf};

use blockd_media::DeviceSpec;
use blockd_media::error::Error;
use blockd_media::pool::{PoolSpec, exists};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};

use crate::config::{DeviceConfig, PoolConfig, SizeWish};

use super::errors::pool_error;

/// Folders of devices are no place for files, but for the part that is shared memory.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";

/// linux/magic.h: ramfs has no limit and no name in the library.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// Devices that have a path; others are in the process's memory, or found by another name.
fn has_path(device: &DeviceConfig) -> bool {
    device.path.is_absolute() && device.kind != crate::config::DeviceKind::Memory
}

/// The paths of those that have one.
pub(super) fn paths_of<'a>(devices: impl IntoIterator<Item = &'a DeviceConfig>) -> Vec<PathBuf> {
    let with_path = devices.into_iter().filter(|device| has_path(device));
    with_path.map(|device| device.path.clone()).collect()
}

const fn is_pmem(device: &DeviceConfig) -> bool {
    matches!(device.kind, crate::config::DeviceKind::Pmem(_))
}

/// Refuses what is neither a file nor a disk, before anything is opened: opening a FIFO waits for
/// ever, and opening a character device may have effects of its own.
pub(super) fn check_kinds(config: &PoolConfig) -> Result<(), Error> {
    use std::os::unix::fs::FileTypeExt;
    for device in config.devices.iter().filter(|device| has_path(device)) {
        let Ok(metadata) = fs::metadata(&device.path) else { continue };
        let kind = metadata.file_type();
        let fits = kind.is_file() || kind.is_block_device();
        if !(fits || is_pmem(device) && kind.is_char_device()) {
            let path = device.path.display();
            return Err(Error::invalid("path", path, "a regular file or a block device"));
        }
    }
    Ok(())
}

/// Refuses places where no pool file may be made, be the file new or there and without a pool.
pub(super) fn check_places(config: &PoolConfig, spec: &PoolSpec) -> Result<(), Error> {
    for (device, one) in config.devices.iter().zip(&spec.devices) {
        if has_path(device) {
            check_place(config, device, one, spec)?;
        }
    }
    Ok(())
}

fn check_place(
    config: &PoolConfig,
    device: &DeviceConfig,
    one: &DeviceSpec,
    spec: &PoolSpec,
) -> Result<(), Error> {
    let path = &device.path;
    let volatile = config.volatile || is_pmem(device);
    match fs::metadata(path) {
        Err(_) if fs::symlink_metadata(path).is_ok() => {
            let allowed = "a file or a device: this link leads to nothing";
            Err(Error::invalid("path", path.display(), allowed))
        }
        Err(_) if device.size == SizeWish::Existing => Ok(()),
        Err(_) => check_new(path, path, volatile),
        Ok(found) if found.is_file() => {
            let alone = PoolSpec { devices: vec![one.clone()], ..spec.clone() };
            let holds_pool = exists(&alone).map_err(|error| pool_error(&config.name, error))?;
            if holds_pool { Ok(()) } else { check_new(path, &resolved(path), volatile) }
        }
        Ok(_) => Ok(()),
    }
}

/// Refuses a new pool file where it would be lost with the next boot.
fn check_new(path: &Path, place: &Path, volatile: bool) -> Result<(), Error> {
    let Some(folder) = place.parent().and_then(|folder| folder.canonicalize().ok()) else {
        // Making the file says what is wrong with its folder.
        return Ok(());
    };
    let shown = path.display().to_string();
    if is_of_devices(&folder) {
        let allowed = "a device that is there, or a file elsewhere: no file is made below /dev";
        return Err(Error::invalid("path", shown, allowed));
    }
    if !volatile && has_memory_below(&folder) {
        let allowed = "on a disk: a file in memory is gone with the next boot; pass --volatile \
                       (pool.volatile = true) if that is meant";
        return Err(Error::invalid("path", shown, allowed));
    }
    Ok(())
}

fn is_of_devices(folder: &Path) -> bool {
    folder.starts_with(DEVICES) && !folder.starts_with(SHARED_MEMORY)
}

fn has_memory_below(path: &Path) -> bool {
    let kind = statfs(path).map(|found| found.filesystem_type());
    kind.is_ok_and(|kind| kind == TMPFS_MAGIC || kind == RAMFS_MAGIC)
}

/// Whether a file that is there lies in memory. A disk's node does, and the disk does not.
pub(super) fn is_in_memory(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file()) && has_memory_below(path)
}

/// Whether a file that is made at this path lies in memory.
pub(super) fn would_be_in_memory(path: &Path) -> bool {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    folder.is_some_and(|folder| !is_of_devices(&folder) && has_memory_below(&folder))
}

/// A path without links, also where there is no file at its end.
pub(super) fn resolved(path: &Path) -> PathBuf {
    let whole = path.canonicalize();
    let in_folder = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    whole.ok().or_else(in_folder).unwrap_or_else(|| path.to_owned())
}
