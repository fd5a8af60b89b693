//! Opening pools, and making those that are not there yet.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;

use blockd_engine::pool::{self, Created, OpenReport, PoolHandle};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoError;
use blockd_media::MARKED_BYTES;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::pool::{PoolError, PoolSpec, has_pmem_header, is_there};
use blockd_media::units::GIB;
use blockd_media::{Device, DeviceKind, DeviceSpec, claim_disk};
use nix::sys::statvfs::statvfs;

use crate::config::{DeviceConfig, PoolConfig, SizeWish};

use super::errors::pool_error;
use super::policy;
use super::served::{Permit, changed_meanwhile};

/// The least size of a pool, so that its metadata leaves room for data.
const LEAST_BYTES: u64 = 256 << 20;

/// A pool that was opened.
pub(super) struct Opened {
    pub(super) handle: PoolHandle,
    pub(super) report: OpenReport,
    /// Whether it was created by this call.
    pub(super) created: bool,
    /// The permit under which it was opened.
    pub(super) permit: Permit,
}

/// The host that opens a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Opener {
    /// The number of its node, 0 without.
    pub(super) node: u32,
    /// As of [`PoolSpec`].
    pub(super) leased_until_ns: u64,
    /// The node that it has fenced, or another host has for it.
    pub(super) fenced: Option<u32>,
}

impl Opener {
    /// The specification with which it opens a pool.
    pub(super) fn spec(self, config: &PoolConfig, runtime_dir: &Path) -> PoolSpec {
        let Self { node, leased_until_ns, fenced } = self;
        PoolSpec { node, leased_until_ns, fenced, ..spec(config, runtime_dir) }
    }
}

/// Why a pool was not opened.
#[derive(Debug)]
pub(super) struct Unopened {
    /// In a box, so that what is passed along when all is well stays small.
    pub(super) error: Box<Error>,
    /// The kind of it, in small letters with hyphens.
    pub(super) reason: &'static str,
}

impl From<Error> for Unopened {
    fn from(error: Error) -> Self {
        let reason = match error.kind() {
            ErrorKind::NotFound => "device-missing",
            ErrorKind::NoSpace => "no-space",
            ErrorKind::Invalid => "configuration",
            ErrorKind::InUse => "in-use",
            ErrorKind::Io => "io",
            ErrorKind::Corrupt => "damaged",
            _ => "other",
        };
        Self { error: Box::new(error), reason }
    }
}

/// An error of opening a pool.
fn unopened(pool: &str, error: PoolError) -> Unopened {
    let reason = match &error {
        PoolError::Mapper(error) => Some(reason(error)),
        PoolError::Foreign { .. } | PoolError::OpenElsewhere { .. } => Some("other-node"),
        _ => None,
    };
    let unopened = Unopened::from(pool_error(pool, error));
    Unopened { reason: reason.unwrap_or(unopened.reason), ..unopened }
}

/// The reason of a pool whose delta ring is not there, or not to be replayed.
pub(super) const RING_LOST: &str = "ring-lost";

/// The kind of a failure of a pool, in small letters with hyphens.
pub(super) fn reason(error: &MapperError) -> &'static str {
    match error {
        MapperError::Device { problem, .. } if problem.starts_with("belongs to") => "wrong-pool",
        MapperError::Device { problem, .. } if problem.ends_with("is missing") => "device-missing",
        MapperError::Device { problem, .. } if problem.starts_with("has shrunk") => "device-shrunk",
        MapperError::Device { problem, .. } if problem.starts_with("was overwritten") => {
            "overwritten"
        }
        MapperError::Device { .. } => "wrong-device",
        MapperError::Unsupported { .. } => "unknown-feature",
        MapperError::Format(_) => "damaged",
        MapperError::RingLost { .. } => RING_LOST,
        MapperError::ClaimLost { .. } => "other-node",
        MapperError::Io { error: IoError::Gone, .. } => "device-missing",
        MapperError::Io { error: IoError::NoSpace, .. } => "no-space",
        MapperError::Io { .. } | MapperError::Failed(_) => "io",
        MapperError::Internal(_) => "internal",
        _ => "other",
    }
}

/// Refuses a path that leads to a device of another pool that is open, under whatever name. Blocks.
pub(super) fn refuse_aliases(
    config: &PoolConfig,
    others: Vec<(String, Vec<Arc<Device>>)>,
) -> Result<(), Error> {
    for (other, devices) in others {
        for device in &config.devices {
            if devices.iter().any(|open| open.is_at(&device.path)) {
                let problem = format!("belongs to pool {}", shown(&other));
                return Err(Error::in_use(device.path.display().to_string(), problem));
            }
        }
    }
    Ok(())
}

/// Opens a pool, after making it where it isn't there and that is permitted. Blocks.
pub(super) fn open_or_create(
    config: &PoolConfig,
    runtime_dir: &Path,
    opener: Opener,
    permit: Permit,
) -> Result<Opened, Unopened> {
    let failed = |error| unopened(&config.name, error);
    policy::check_before_opening(config)?;
    let mut spec = opener.spec(config, runtime_dir);
    let in_memory = spec.devices.iter().all(|device| device.kind == DeviceKind::Memory);
    let is_new = !in_memory && !blockd_media::pool::exists(&spec).map_err(failed)?;
    if is_new && permit != Permit::Create {
        return Err(changed_meanwhile(&config.name, &spec.devices[0].path));
    }
    let made = if is_new { create(config, &mut spec)? } else { None };
    let opened = match made {
        Some(made) => pool::open_created(&spec, made),
        None => pool::open(&spec),
    };
    let (handle, report) = opened.map_err(failed)?;
    Ok(Opened { handle, report, created: is_new || in_memory, permit })
}

/// Makes a pool; `None` if there is one, on another device than the first.
fn create(config: &PoolConfig, spec: &mut PoolSpec) -> Result<Option<Created>, Error> {
    for (device, wanted) in spec.devices.iter_mut().zip(&config.devices) {
        let is_new = !is_there(&device.path);
        if !is_new && is_looked_at(device) {
            refuse_foreign(&device.path)?;
        }
        device.size = size_to_make(&config.name, wanted, is_new)?;
    }
    match pool::create(spec) {
        Ok(created) => Ok(Some(created)),
        // Another device than the first holds it: opening says what is missing.
        Err(PoolError::Exists { .. }) => Ok(None),
        Err(error) => Err(pool_error(&config.name, error)),
    }
}

/// Whether a device is looked at before it is opened, which makes a file as long as it is to be. A
/// device of persistent memory can't be read, and is looked at when it is mapped; so is a file with
/// the header of one.
fn is_looked_at(device: &DeviceSpec) -> bool {
    let is_file = || fs::metadata(&device.path).is_ok_and(|metadata| metadata.is_file());
    let is_ours = || File::open(&device.path).is_ok_and(|file| has_pmem_header(&file));
    !matches!(device.kind, DeviceKind::Pmem(_)) || (is_file() && !is_ours())
}

/// The specification with which an unknown node opens a pool.
pub(super) fn spec(config: &PoolConfig, runtime_dir: &Path) -> PoolSpec {
    let device = |device: &DeviceConfig| DeviceSpec {
        path: device.path.clone(),
        kind: kind(device),
        size: match device.size {
            SizeWish::Bytes(bytes) => Some(bytes),
            SizeWish::Existing | SizeWish::OfFree(_) => None,
        },
        preallocate: device.preallocate,
        direct: device.direct,
    };
    PoolSpec {
        name: config.name.clone(),
        devices: config.devices.iter().map(device).collect(),
        spares: config.spares.iter().map(device).collect(),
        extent_size: config.extent_size,
        composite: config.composite,
        ring_dir: blockd_media::pool::ring_dir(runtime_dir),
        accept_loss: config.accept_loss,
        lock_wait: config.lock_wait,
        claim_wait: config.claim_wait,
        commit_interval: config.commit_interval,
        ring_records: config.ring_records,
        sparing: config.sparing,
        node: 0,
        taken_from: None,
        leased_until_ns: 0,
        fenced: None,
        marks: config.space.marks,
        quantum: config.space.quantum,
        fold_rate: config.space.fold_rate,
        read_cache: config.read_cache(),
    }
}

fn kind(device: &DeviceConfig) -> DeviceKind {
    let is_disk =
        || fs::metadata(&device.path).is_ok_and(|metadata| metadata.file_type().is_block_device());
    match device.kind {
        crate::config::DeviceKind::Memory => DeviceKind::Memory,
        crate::config::DeviceKind::Disk => DeviceKind::Disk,
        crate::config::DeviceKind::Pmem(options) => DeviceKind::Pmem(options),
        crate::config::DeviceKind::Auto if is_disk() => DeviceKind::Disk,
        crate::config::DeviceKind::File | crate::config::DeviceKind::Auto => DeviceKind::File,
    }
}

/// Bytes to make a device with; `None` for one that stays as it is.
fn size_to_make(pool: &str, device: &DeviceConfig, is_new: bool) -> Result<Option<u64>, Error> {
    match device.size {
        SizeWish::Existing
            if is_new && matches!(kind(device), DeviceKind::File | DeviceKind::Pmem(_)) =>
        {
            let name = device.path.display().to_string();
            let problem = "it is not there, and no size to make it with is given".to_owned();
            Err(Error::Invalid {
                field: format!("size of {name}"),
                value: "0".to_owned(),
                allowed: format!("more than 0 bytes: {problem}"),
            })
        }
        SizeWish::Existing => Ok(None),
        SizeWish::Bytes(bytes) => Ok(Some(bytes)),
        SizeWish::OfFree(percent) => {
            let folder = device.path.parent().unwrap_or_else(|| Path::new("/"));
            let below = statvfs(folder)
                .map_err(|error| Error::file("read the free space of", folder, error.into()))?;
            let free = below.blocks_available().saturating_mul(below.fragment_size());
            let part = free / 100 * u64::from(percent);
            let size = if part >= GIB { part / GIB * GIB } else { part >> 20 << 20 };
            if size < LEAST_BYTES {
                let what = format!("pool {pool} in {}", folder.display());
                return Err(Error::NoSpace { what, needed: LEAST_BYTES, free: part });
            }
            Ok(Some(size))
        }
    }
}

/// Rejects a path with content, which must not be overwritten, unless it looks unused.
pub(super) fn refuse_foreign(path: &Path) -> Result<(), Error> {
    let failed = |error| Error::file("read", path, error);
    let file = File::open(path).map_err(failed)?;
    // The size of a block device is where its end is.
    let size = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0)).map_err(failed)?;
    let mut page = vec![0; 64 << 10];
    let end = size.saturating_sub(MARKED_BYTES);
    for start in [0, end] {
        let mut at = start;
        while at < size && at < start + MARKED_BYTES {
            let length = usize::try_from(size - at).unwrap_or(usize::MAX).min(page.len());
            let part = &mut page[..length];
            file.read_exact_at(part, at).map_err(failed)?;
            if part.iter().any(|byte| *byte != 0) {
                return Err(Error::in_use(path.display().to_string(), foreign(&file)));
            }
            at += length as u64;
        }
    }
    Ok(())
}

/// The problem of a file or disk that holds something else. One that is in use must not be
/// zeroed, so that is no advice there.
fn foreign(file: &File) -> String {
    match claim_disk(file) {
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            format!("holds something that is not a pool, and {error}: name another one")
        }
        _ => "holds something that is not a pool: name another one, or zero its first and last \
              2 MiB (wipefs does not; blkdiscard --zeroout does)"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use blockd_media::error::ErrorKind;

    use super::*;
    use crate::services::served::MISSING;
    use crate::services::testing::folder;

    fn pool(path: &Path, size: SizeWish) -> PoolConfig {
        let kind = crate::config::DeviceKind::Auto;
        let path = path.to_path_buf();
        PoolConfig {
            name: "p".to_owned(),
            devices: vec![DeviceConfig { path, kind, size, preallocate: false, direct: true }],
            spares: Vec::new(),
            region: None,
            volatile: false,
            extent_size: 256 << 10,
            composite: true,
            lock_wait: Duration::from_millis(50),
            claim_wait: Duration::from_secs(2),
            accept_loss: false,
            commit_interval: Duration::from_secs(1),
            ring_records: 1 << 10,
            sparing: false,
            extend_socket: None,
            space: crate::config::SpaceConfig::default(),
        }
    }

    #[test]
    fn a_device_that_is_not_a_pool_is_not_overwritten() {
        let folder = folder();
        let path = folder.path().join("disk");
        let pmem = crate::config::DeviceKind::Pmem(blockd_media::pool::PmemOptions::default());
        let places = [0, 70_000, (8 << 20) - 1].into_iter();
        let both = places.flat_map(|at| [(at, crate::config::DeviceKind::Auto), (at, pmem)]);
        for (at, kind) in both {
            let file = File::create(&path).unwrap();
            file.set_len(8 << 20).unwrap();
            file.write_all_at(b"x", at).unwrap();
            let mut wanted = pool(&path, SizeWish::Bytes(64 << 20));
            wanted.devices[0].kind = kind;
            let error = open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create)
                .err()
                .unwrap()
                .error;
            assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
            assert!(error.to_string().contains("not a pool"), "{error}");
            assert_eq!(file.metadata().unwrap().len(), 8 << 20);
        }
    }

    #[test]
    fn a_file_that_is_not_there_needs_a_size() {
        let folder = folder();
        let path = folder.path().join("file");
        let error = open_or_create(
            &pool(&path, SizeWish::Existing),
            folder.path(),
            Opener::default(),
            Permit::Create,
        )
        .err()
        .unwrap()
        .error;
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("/file"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_pool_that_can_not_be_made_leaves_no_file() {
        let folder = folder();
        let path = folder.path().join("file");
        let small = pool(&path, SizeWish::Bytes(64 << 10));
        let error = open_or_create(&small, folder.path(), Opener::default(), Permit::Create)
            .err()
            .unwrap()
            .error;
        assert!(!path.exists(), "{error}");
    }

    #[test]
    fn a_quantum_beyond_the_pool_is_refused_and_nothing_is_made() {
        let folder = folder();
        let path = folder.path().join("file");
        let mut wanted = pool(&path, SizeWish::Bytes(64 << 20));
        wanted.space.quantum = 65 << 20;
        let error = open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create)
            .err()
            .unwrap()
            .error;
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let expected = "space.quantum of pool p is 68157440: must be at most the pool's size, 64M";
        assert_eq!(error.to_string(), expected);
        assert!(!path.exists());
        // Of one that is there, its own size counts.
        File::create(&path).unwrap().set_len(32 << 20).unwrap();
        wanted.space.quantum = 33 << 20;
        let error = open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create)
            .err()
            .unwrap()
            .error;
        assert!(error.to_string().ends_with("the pool's size, 32M"), "{error}");
    }

    #[test]
    fn a_pool_that_has_to_be_there_is_not_made() {
        let folder = folder();
        let path = folder.path().join("file");
        let wanted = pool(&path, SizeWish::Bytes(64 << 20));
        for id in [None, Some("00".repeat(16))] {
            let refused =
                open_or_create(&wanted, folder.path(), Opener::default(), Permit::Open(id))
                    .err()
                    .unwrap();
            assert_eq!(refused.reason, MISSING);
            assert!(refused.error.to_string().contains("no longer holds it"), "{}", refused.error);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_pool_that_another_host_has_or_took_is_reported_as_such() {
        let path = PathBuf::from("/dev/sdx");
        let open = unopened("p", PoolError::OpenElsewhere { path, node: 1 });
        let lost = MapperError::ClaimLost { node: 1 };
        assert_eq!([open.reason, reason(&lost)], ["other-node"; 2]);
    }

    #[tokio::test]
    async fn a_pool_is_made_once_and_opened_again() {
        let folder = folder();
        let wanted = pool(&folder.path().join("file"), SizeWish::OfFree(50));
        let first =
            open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create).unwrap();
        assert!(first.created);
        let id = first.handle.id();
        let size = first.handle.devices()[0].size;
        assert!(size >= LEAST_BYTES && size.is_multiple_of(1 << 20));
        let locked = open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create)
            .err()
            .unwrap()
            .error;
        assert_eq!(locked.kind(), ErrorKind::InUse);
        assert!(locked.to_string().contains("pool p is locked"), "{locked}");
        first.handle.close().await.unwrap();
        drop(first);
        let second =
            open_or_create(&wanted, folder.path(), Opener::default(), Permit::Create).unwrap();
        assert!(!second.created);
        assert_eq!(second.handle.id(), id);
        second.handle.close().await.unwrap();
    }
}
