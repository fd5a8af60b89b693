//! Pools that were served before. One that is missing now is never made anew: its volumes may come
//! back with a disk that is attached again, or a file system that is mounted.

use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::config::{self, DeviceConfig, PoolConfig, SizeWish};
use crate::error::Error;
use crate::pool::{DeviceKind, PoolError, PoolHandle, PoolSpec, boot_id, identity};

use super::pools::Unopened;
use super::state_file::StateFile;

/// Why a pool is not open that was served before.
pub(super) const MISSING: &str = "missing";

/// A pool as it was when it was last opened or closed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ServedPool {
    name: String,
    /// Its identity in hexadecimal digits.
    id: String,
    devices: Vec<ServedDevice>,
    /// It is in memory, and gone with the host's next boot.
    volatile: bool,
    /// The boot in which it was seen, in hexadecimal digits.
    boot: String,
    last_seen_unix_seconds: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct ServedDevice {
    path: PathBuf,
    size: u64,
}

/// All of them, in a file of the state directory.
#[derive(Debug)]
pub(super) struct ServedPools {
    file: StateFile,
    writing: Mutex<()>,
}

impl ServedPools {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { file: StateFile::new(state_dir, "served.json"), writing: Mutex::default() }
    }

    /// Remembers an open pool durably. One in the process's memory never comes back and is left
    /// out.
    pub(super) fn note(&self, handle: &PoolHandle, volatile: bool, now: u64) -> Result<(), Error> {
        let devices = handle.devices();
        if devices.iter().all(|device| device.kind == DeviceKind::Memory) {
            return Ok(());
        }
        let pool = ServedPool {
            name: handle.name().to_owned(),
            id: hex(&handle.id()),
            devices: devices
                .into_iter()
                .map(|device| ServedDevice { path: device.path, size: device.size })
                .collect(),
            volatile,
            boot: this_boot(),
            last_seen_unix_seconds: now,
        };
        self.change(|all| {
            all.retain(|one| one.name != pool.name);
            all.push(pool);
        })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<ServedPool>)) -> Result<(), Error> {
        let _one = self.writing.lock();
        let mut all = self.file.read()?;
        change(&mut all);
        self.file.write(all)
    }

    /// Refuses to go on with a pool that was served before and is missing, or has become another
    /// one. Blocks.
    pub(super) fn require(&self, config: &PoolConfig, spec: &PoolSpec) -> Result<(), Unopened> {
        let all: Vec<ServedPool> = self.file.read()?;
        let Some(seen) = all.into_iter().find(|one| one.name == config.name) else { return Ok(()) };
        let path = spec.devices.first().map(|device| device.path.display().to_string());
        let path = path.unwrap_or_default();
        let problem = match identity(spec) {
            Ok(Some(id)) if hex(&id) == seen.id => return Ok(()),
            Ok(Some(id)) => format!("{path} holds another pool, {}", hex(&id)),
            Ok(None) if seen.volatile && seen.boot != this_boot() => {
                tracing::warn!(pool = config.name, path, "the volatile pool is made anew");
                return Ok(());
            }
            Ok(None) if spec.devices.iter().any(|device| !device.path.exists()) => {
                format!("{path} does not exist")
            }
            Ok(None) => format!("{path} holds no pool"),
            Err(PoolError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                format!("{path} does not exist")
            }
            // There is one, which can't be read: opening it says what is wrong.
            Err(_) => return Ok(()),
        };
        Err(seen.missing(&problem))
    }
}

impl ServedPool {
    fn missing(&self, problem: &str) -> Unopened {
        let places: Vec<_> =
            self.devices.iter().map(|device| device.path.display().to_string()).collect();
        let (name, when) = (&self.name, time(self.last_seen_unix_seconds));
        let problem = format!(
            "is missing: {problem}; it was last seen at {when} on {}. Attach its disk or mount its \
             file system, then run `blockd pool open {name}`; only `blockd pool create \
             --replace-missing` starts anew",
            places.join(", ")
        );
        let error = Box::new(Error::in_use(format!("pool {name}"), problem));
        Unopened { error, reason: MISSING }
    }
}

/// Devices that have a path; others are in the process's memory, or found by another name.
fn with_paths(config: &PoolConfig) -> impl Iterator<Item = (&DeviceConfig, bool)> {
    let with_paths = config
        .devices
        .iter()
        .filter(|device| device.path.is_absolute() && device.kind != config::DeviceKind::Memory);
    with_paths.map(|device| (device, matches!(device.kind, config::DeviceKind::Pmem(_))))
}

/// Refuses what is neither a file nor a disk, before anything is opened: opening a FIFO waits for
/// ever, and opening a character device may have effects of its own.
pub(super) fn check_kinds(config: &PoolConfig) -> Result<(), Error> {
    use std::os::unix::fs::FileTypeExt;
    for (device, is_pmem) in with_paths(config) {
        let Ok(metadata) = std::fs::metadata(&device.path) else { continue };
        let kind = metadata.file_type();
        let fits = kind.is_file() || kind.is_block_device();
        if !(fits || is_pmem && kind.is_char_device()) {
            let path = device.path.display();
            return Err(Error::invalid("path", path, "a regular file or a block device"));
        }
    }
    Ok(())
}

/// Refuses places where no new file may be made.
pub(super) fn check_places(config: &PoolConfig) -> Result<(), Error> {
    for (device, is_pmem) in with_paths(config) {
        let is_made = !matches!(device.size, SizeWish::Existing);
        if is_made && std::fs::metadata(&device.path).is_err() {
            check_new(&device.path, config.volatile || is_pmem)?;
        }
    }
    Ok(())
}

/// Folders of devices are no place for files, but for the part that is shared memory.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";

/// Refuses a new file where it would be lost with the next boot.
fn check_new(path: &Path, volatile: bool) -> Result<(), Error> {
    let Some(folder) = path.parent().and_then(|folder| folder.canonicalize().ok()) else {
        // Making the file says what is wrong with its folder.
        return Ok(());
    };
    let shown = path.display().to_string();
    if folder.starts_with(DEVICES) && !folder.starts_with(SHARED_MEMORY) {
        let allowed = "a device that is there, or a file elsewhere: no file is made below /dev";
        return Err(Error::invalid("path", shown, allowed));
    }
    use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
    /// linux/magic.h: ramfs has no limit and no name in the library.
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    let kind = statfs(&folder).map(|fs| fs.filesystem_type());
    if !volatile && kind.is_ok_and(|kind| kind == TMPFS_MAGIC || kind == RAMFS_MAGIC) {
        let allowed = "on a disk: a file in memory is gone with the next boot; pass --volatile \
                       (pool.volatile = true) if that is meant";
        return Err(Error::invalid("path", shown, allowed));
    }
    Ok(())
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn this_boot() -> String {
    boot_id().map(|id| hex(&id)).unwrap_or_default()
}

/// Seconds since 1970 as people write them, in UTC.
fn time(seconds: u64) -> String {
    crate::units::utc(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
}
