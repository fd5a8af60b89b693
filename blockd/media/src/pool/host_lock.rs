//! One lock for each pool on a host, whatever path leads to the pool's devices. The owner lock is
//! of one inode: a file and a loop device over it have two.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::PoolError;
use crate::clock::Clock;

/// The directory of locks of root. It has to be the same for all daemons of the host, whose runtime
/// directories differ, and no other user may be able to make it first.
const OF_ROOT: &str = "/run/blockd-locks";
/// Directories of locks of other users are in here: it is the same for all of their daemons.
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

/// Takes the lock of a pool; `device` is for messages. `None` where there can be no directory of
/// locks: then only the claim on the media protects the pool.
pub(super) fn take(
    pool_id: &[u8; 16],
    device: &Path,
    limit: Duration,
) -> Result<Option<HostLock>, PoolError> {
    let user = nix::unistd::geteuid().as_raw();
    let folder = folder_of(user);
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            let path = folder.display();
            tracing::warn!(%path, %error, "cannot make the directory of host locks");
            return Ok(None);
        }
        _ => {}
    }
    let space =
        check(&folder, user).map_err(PoolError::io("use directory of host locks", &folder))?;
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

fn folder_of(user: u32) -> PathBuf {
    match user {
        0 => PathBuf::from(OF_ROOT),
        _ => Path::new(SHARED_MEMORY).join(format!("blockd-locks-{user}")),
    }
}

/// Returns the identity of a directory of locks, or an error if others can lock or replace what is
/// in it: a lock there would protect nothing.
fn check(folder: &Path, user: u32) -> std::io::Result<u64> {
    let found = std::fs::symlink_metadata(folder)?;
    let refuse = |problem: String| Err(std::io::Error::new(ErrorKind::PermissionDenied, problem));
    if !found.is_dir() {
        return refuse("it is no directory; remove it".to_owned());
    }
    if found.uid() != user {
        return refuse(format!("it belongs to user {}; remove it", found.uid()));
    }
    if found.mode() & 0o022 != 0 {
        return refuse("other users can write to it; remove it".to_owned());
    }
    Ok((found.dev().rotate_left(32) ^ found.ino()).max(1))
}
