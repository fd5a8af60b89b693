//! Writes to the kernel, behind a trait so that tests can replace it.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::error::PlatformError;
use super::key::Uuid;

/// The side of the kernel that changes something. Reading is done on files in any case.
pub trait Kernel: fmt::Debug + Send + Sync {
    /// Writes a value to a file of sysfs, in one piece.
    ///
    /// # Errors
    /// The kernel's error.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Opens a block device exclusively: `EBUSY` if it is mounted, swapped to or part of another
    /// one. It cannot be mounted while it is open so.
    ///
    /// # Errors
    /// The kernel's error.
    fn open_exclusive(&self, path: &Path) -> io::Result<File>;
}

/// The kernel of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostKernel;

impl Kernel for HostKernel {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        File::options().write(true).open(path)?.write_all(text.as_bytes())
    }

    fn open_exclusive(&self, path: &Path) -> io::Result<File> {
        File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(path)
    }
}

/// A uuid that there was not before.
///
/// # Errors
/// When the kernel gives none.
pub fn new_uuid() -> Result<Uuid, PlatformError> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let text = fs::read_to_string(path)
        .map_err(|source| PlatformError::Read { path: path.to_path_buf(), source })?;
    text.trim().parse().map_err(|expected| PlatformError::Malformed {
        path: path.to_path_buf(),
        text: text.clone(),
        expected,
    })
}
