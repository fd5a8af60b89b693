//! Looks for pools on devices, before anything is locked or written.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::geometry::EXTENT_SIZE_RANGE;
use blockd_mapper::io::IoBuffer;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{PoolError, PoolSpec};
use crate::pmem::namespace::is_namespace;
use crate::pmem::{NoHeader, Pmem};
use crate::pool::newest::superblock;
use crate::{Device, DeviceKind, DeviceSpec, PAGE};

/// Whether there is a pool on the first device. Nothing is written.
pub fn exists(spec: &PoolSpec) -> Result<bool, PoolError> {
    spec.devices.first().map_or(Ok(false), holds_pool)
}

/// Which pool the first device belongs to, by the newest superblock on it. Takes no lock.
pub fn identity(spec: &PoolSpec) -> Result<Option<[u8; 16]>, PoolError> {
    let Some(device) = spec.devices.first() else { return Ok(None) };
    if !holds_pool(device)? {
        return Ok(None);
    }
    let opened = Device::open(device).map_err(PoolError::io("open", &device.path))?;
    match superblock(&opened) {
        Some(found) => Ok(Some(found.pool_id)),
        None => {
            let (name, problem) = (device.path.display().to_string(), "has a pool that is damaged");
            Err(MapperError::Device { name, problem: problem.to_owned() }.into())
        }
    }
}

/// Looks for the mark of a superblock, where any of its copies may be: a device that one of them
/// can open is a pool. An unreadable place may be one, too, unless another place has the mark
/// anyway.
pub fn holds_pool(device: &DeviceSpec) -> Result<bool, PoolError> {
    use std::io::{ErrorKind, Seek, SeekFrom};
    use std::os::unix::fs::FileExt;
    let failed = |error| PoolError::io("look for a pool on", &device.path)(error);
    match device.kind {
        DeviceKind::Memory => return Ok(false),
        DeviceKind::Pmem(_) => return holds_pmem_pool(device).map_err(failed),
        DeviceKind::File | DeviceKind::Disk => {}
    }
    let mut file = match open_past_cache(&device.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        other => other.map_err(failed)?,
    };
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    let page = IoBuffer::new(1).ok_or_else(|| ErrorKind::OutOfMemory.into());
    let mut page = page.map_err(failed)?;
    let mut unread = None;
    for offset in superblock_offsets(size) {
        // One read: past the cache, the rest behind a short one would not be aligned.
        match file.read_at(page.as_bytes_mut(), offset) {
            Ok(PAGE) if Superblock::has_magic(page.as_bytes()) => return Ok(true),
            Ok(_) => {}
            Err(error) => {
                unread.get_or_insert(error);
            }
        }
    }
    unread.map_or(Ok(false), |error| Err(failed(error)))
}

/// Opens a file or disk so that reads return what lies on the media. The page cache of a disk is
/// kept while any program has it open, and does not show what another host, or another path of
/// this host, has written.
fn open_past_cache(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    match options.clone().custom_flags(libc::O_DIRECT).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let file = options.open(path)?;
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
            Ok(file)
        }
        other => other,
    }
}

/// The same of a device in persistent memory, which may be one that can't be read but mapped. One
/// that has our mark and no superblock was not finished.
fn holds_pmem_pool(spec: &DeviceSpec) -> std::io::Result<bool> {
    use std::io::ErrorKind;
    // A namespace that is named has to be there: one that is not visible may hold a pool.
    let is_named = is_namespace(&spec.path);
    let device = match Device::open(spec) {
        Err(error) if error.kind() == ErrorKind::NotFound && !is_named => return Ok(false),
        other => other?,
    };
    match device.pmem().map(Pmem::find_header) {
        Some(Ok(())) => {}
        Some(Err(NoHeader::Foreign)) | None => return Ok(false),
        // There is one, and opening it says what is wrong.
        Some(Err(_)) => return Ok(true),
    }
    let (mut page, mut unread) = (vec![0; 4096], None);
    for offset in superblock_offsets(device.size()) {
        match device.read(offset, &mut page) {
            Ok(()) if Superblock::has_magic(&page) => return Ok(true),
            Ok(()) => {}
            Err(error) => {
                unread.get_or_insert(error);
            }
        }
    }
    unread.map_or(Ok(false), Err)
}

/// Where superblocks may be: at the front, and where the end is for each size of extent.
fn superblock_offsets(size: u64) -> Vec<u64> {
    let mut offsets = vec![0, 4096];
    let mut extent = *EXTENT_SIZE_RANGE.start();
    while extent <= *EXTENT_SIZE_RANGE.end() {
        let extents = size / u64::from(extent);
        let last = extents.saturating_sub(1) * u64::from(extent);
        offsets.extend([last, last + 4096]);
        extent *= 2;
    }
    offsets
}
