//! One lock for each pool on a host, whatever path leads to the pool's devices. The owner lock is
//! of one inode: a file and a loop device over it have two.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use super::PoolError;
use crate::clock::Clock;

/// Has to be in memory and the same for all daemons of the host: their runtime directories differ.
const SHARED_MEMORY: &str = "/dev/shm";
/// How often a lock of another process is tried.
const PAUSE: Duration = Duration::from_millis(10);

/// The lock of a pool, until it is dropped or its process ends.
#[derive(Debug)]
pub(super) struct HostLock {
    _file: File,
    space: u64,
}

impl HostLock {
    /// Identity of the directory that the lock is in, never 0. Processes that see the same one
    /// exclude each other.
    pub(super) const fn space(&self) -> u64 {
        self.space
    }
}

/// Takes the lock of a pool; `device` is for messages. `None` where the directory of locks can't be
/// used: then only the claim on the media protects the pool.
pub(super) fn take(
    pool_id: &[u8; 16],
    device: &Path,
    limit: Duration,
) -> Result<Option<HostLock>, PoolError> {
    let (folder, space) = match folder() {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "cannot use the directory of host locks");
            return Ok(None);
        }
    };
    let path = folder.join(format!("{:032x}", u128::from_be_bytes(*pool_id)));
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(PoolError::io("open host lock", &path))?;
    let clock = Clock::start();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(HostLock { _file: file, space })),
            Err(TryLockError::Error(error)) => return Err(PoolError::io("lock", path)(error)),
            Err(TryLockError::WouldBlock) if clock.elapsed() >= limit => {
                let (path, waited) = (device.to_owned(), clock.elapsed());
                return Err(PoolError::OpenHere { path, waited });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
        }
    }
}

/// The directory of locks of this user, and its identity. Others can neither lock nor replace what
/// is in it.
fn folder() -> std::io::Result<(PathBuf, u64)> {
    let user = nix::unistd::geteuid().as_raw();
    let path = Path::new(SHARED_MEMORY).join(format!("blockd-locks-{user}"));
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(&path)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0 {
        let problem =
            format!("{} belongs to another user or can be written by others", path.display());
        return Err(std::io::Error::other(problem));
    }
    if statfs(&path)?.filesystem_type() != TMPFS_MAGIC {
        return Err(std::io::Error::other(format!("{} is not on tmpfs", path.display())));
    }
    Ok((path, (found.dev().rotate_left(32) ^ found.ino()).max(1)))
}
