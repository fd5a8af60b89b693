//! Files and their paths below devices.

use std::fs::{File, Metadata, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use blockd_mapper::io::IoBuffer;
use rustix::fs::{AtFlags, StatxFlags, statx};

/// Makes a file's entry in its folder durable.
pub(super) fn sync_folder(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

/// Whether a path leads to an open file or block device.
pub(super) fn leads_to(path: &Path, file: &File) -> bool {
    let (Ok(own), Ok(other)) = (file.metadata(), std::fs::metadata(path)) else {
        return false;
    };
    is_same(&own, &other)
}

/// Whether two paths lead to one file or device, under whatever names. False where one leads to
/// nothing.
#[must_use]
pub fn same_device(one: &Path, other: &Path) -> bool {
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => is_same(&one, &other),
        _ => false,
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    match one.file_type().is_block_device() {
        true => other.file_type().is_block_device() && one.rdev() == other.rdev(),
        false => (one.dev(), one.ino()) == (other.dev(), other.ino()),
    }
}

/// Creates an empty file. False if there is something at the path, which stays as it is.
pub(super) fn create_file(path: &Path) -> std::io::Result<bool> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        other => other.map(|_| true),
    }
}

/// Removes a file that this process created. A process that has its lock may be making a pool in
/// it, and one that waits for the lock looks afterwards whether the path leads to its file.
pub(super) fn remove_created(file: &File, path: &Path) {
    if file.try_lock().is_ok()
        && leads_to(path, file)
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove a file without a pool");
    }
}

/// Opens a file for reading and writing, past the page cache if requested and possible; returns
/// whether it is.
pub(super) fn open_file(path: &Path, direct: bool) -> std::io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if direct {
        match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((options.open(path)?, false))
}

/// The smallest block that a file can be read and written by: past the page cache, what the kernel
/// says of it (since Linux 6.1 and not on all file systems), else what a read finds out. A hole is
/// read without the disk, so the read alone would not do.
pub(super) fn direct_block(file: &File, direct: bool) -> u32 {
    if !direct {
        return 512;
    }
    let flags = AtFlags::EMPTY_PATH;
    let asked = statx(file, c"", flags, StatxFlags::DIOALIGN);
    if let Ok(found) = asked
        && found.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        && found.stx_dio_offset_align.is_power_of_two()
    {
        return found.stx_dio_offset_align.clamp(512, 4096);
    }
    let refused = IoBuffer::new(1).is_some_and(|mut buffer| {
        let read = file.read_at(&mut buffer.as_bytes_mut()[..512], 512);
        read.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
    });
    if refused { 4096 } else { 512 }
}
