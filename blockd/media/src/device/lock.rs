//! The owner lock of a device, and the claim on a disk.

use std::fs::{File, TryLockError};
use std::os::unix::fs::FileTypeExt;

use super::super::{guard, ioctl};
use super::{Device, DeviceKind};

/// The kernel's sequence number of a disk. `None` for a file, and before Linux 5.15.
#[must_use]
pub fn disk_sequence(file: &File) -> Option<u64> {
    ioctl::disk_sequence(file).ok()
}

/// Keeps other programs off a block device as long as the returned file is open; `None` for a file.
///
/// # Errors
/// `ResourceBusy`, with what has it, while another program has a claim.
pub fn claim_disk(file: &File) -> std::io::Result<Option<File>> {
    if !file.metadata()?.file_type().is_block_device() {
        return Ok(None);
    }
    guard::claim(file).map(Some).map_err(|error| match guard::holder(file) {
        Some(by) if error.raw_os_error() == Some(libc::EBUSY) => {
            std::io::Error::new(std::io::ErrorKind::ResourceBusy, by)
        }
        _ => error,
    })
}

/// Takes the owner locks of the files below a loop device, until they are dropped; none below other
/// devices and files. `None` while another process has one.
pub fn lock_below(device: &File) -> std::io::Result<Option<Vec<File>>> {
    guard::lock_below(device)
}

/// The living process that has the owner lock of a file or disk, where it is seen from here.
#[must_use]
pub fn lock_owner(file: &File) -> Option<u32> {
    guard::lock_owner(file).or_else(|| {
        let below = guard::files_below(file).unwrap_or_default();
        below.iter().find_map(guard::lock_owner)
    })
}

impl Device {
    /// Tries once to become the owner: of a loop device also of the file below it.
    pub fn try_lock(&self) -> std::io::Result<bool> {
        match self.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut below = self.below.lock();
        if below.is_none() {
            let locked = guard::lock_below(&self.file);
            if !matches!(locked, Ok(Some(_))) {
                self.file.unlock()?;
            }
            *below = locked?;
        }
        Ok(below.is_some())
    }

    /// Keeps other programs off a block device until it is unlocked; files need nothing. For the
    /// owner of the lock. A repetition changes nothing.
    ///
    /// # Errors
    /// `EBUSY` while another program, a mount or another device has it.
    pub fn claim(&self) -> std::io::Result<()> {
        let mut held = self.guard.lock();
        if self.info.kind == DeviceKind::Disk && held.is_none() {
            *held = Some(guard::claim(&self.file)?);
        }
        Ok(())
    }

    /// The living process that has the owner lock, where it is seen from here.
    #[must_use]
    pub fn owner(&self) -> Option<u32> {
        lock_owner(&self.file)
    }

    /// The user that has a claim on this block device, where the kernel reports one.
    #[must_use]
    pub fn holder(&self) -> Option<String> {
        guard::holder(&self.file)
    }

    /// The kernel's sequence number of a disk: another one after the disk was removed and added
    /// again.
    #[must_use]
    pub fn disk_sequence(&self) -> Option<u64> {
        disk_sequence(&self.file)
    }

    /// Gives ownership up. For an owner whose IO has all ended: else the lock is to stay until the
    /// last file description is closed.
    pub fn unlock(&self) {
        *self.guard.lock() = None;
        *self.below.lock() = None;
        if let Err(error) = self.file.unlock() {
            let path = self.info.path.display();
            tracing::warn!(%path, %error, "the owner lock stays a moment longer");
        }
    }
}
