//! Pools that were served before. One that is missing now is never made anew: its volumes may come
//! back with a disk that is attached again, or a file system that is mounted.

use std::path::{Path, PathBuf};

use blockd_engine::pool::PoolHandle;
use blockd_media::error::{Error, ErrorKind};
use blockd_media::pool::{PoolError, PoolSpec, boot_id, identity, is_there};
use blockd_media::{DeviceKind, DeviceSpec, same_device};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceConfig, PoolConfig, SizeWish};

use super::attachments;
use super::hex;
use super::opening::Remembered;
use super::places::{is_in_memory, resolved, would_be_in_memory};
use super::pools::Unopened;
use super::state_file::StateFile;

/// Why a pool is not open that was served before.
pub(super) const MISSING: &str = "missing";

/// Seconds that the time may be old which says when a pool was last seen, while it is all that has
/// changed. A file is not written for less.
const SEEN_PRECISION: u64 = 60;

/// The advice for a list of served pools that cannot be read.
const ADVICE: &str = "restore it from a backup, or correct it. It keeps missing pools from being \
                      created anew: remove it only while the files and disks of all pools are there";

/// Whether a pool may be created, or has to be there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Permit {
    /// The pool may be created: none was served by this name or at this place, or that one is given
    /// up.
    Create,
    /// The pool may only be opened. Its identity in hexadecimal digits, where that is known.
    Open(Option<String>),
}

impl Permit {
    /// Whether another pool has to be there than the one with this identity.
    pub(super) fn is_for_another(&self, id: &[u8]) -> bool {
        matches!(self, Self::Open(Some(known)) if *known != hex(id))
    }
}

/// A pool as it was when it was last opened or closed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ServedPool {
    name: String,
    /// Its identity in hexadecimal digits; empty where it is not known.
    id: String,
    devices: Vec<ServedDevice>,
    /// Whether it is in memory, and lost at the host's next boot.
    volatile: bool,
    /// The boot in which it was seen, in hexadecimal digits.
    boot: String,
    /// 0 where it is not known.
    last_seen_unix_seconds: u64,
    /// Devices that were added by a call: they are opened with the pool, as its spares are. Older
    /// versions wrote no such field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    added: Vec<PathBuf>,
    /// Bytes a second that may be moved off the device that leaves or shrinks, or that was the last
    /// to do so. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate: Option<u64>,
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
    /// Older versions wrote this and the attachments alone, and each may be left when the file is
    /// lost.
    created: StateFile,
    state_dir: PathBuf,
    writing: Mutex<()>,
    /// Whether the file was there when the daemon started. One that was lost has the pools alone
    /// that were opened since.
    was_there: bool,
}

impl ServedPools {
    pub(super) fn new(state_dir: &Path) -> Self {
        let file = StateFile::new(state_dir, "served.json").with_advice(ADVICE);
        Self {
            was_there: is_there(file.path()),
            file,
            created: StateFile::new(state_dir, "pools.json"),
            state_dir: state_dir.to_owned(),
            writing: Mutex::default(),
        }
    }

    /// Remembers an open pool durably. One in the process's memory never comes back and is left
    /// out. Fails only where the pool is not remembered yet: an outdated entry still protects it.
    pub(super) fn note(&self, handle: &PoolHandle, created: bool, now: u64) -> Result<(), Error> {
        let devices = handle.devices();
        if devices.iter().all(|device| device.kind == DeviceKind::Memory) {
            return Ok(());
        }
        let pool = ServedPool {
            name: handle.name().to_owned(),
            id: hex(&handle.id()),
            volatile: devices.iter().all(|device| is_in_memory(&device.path)),
            devices: devices
                .into_iter()
                .map(|device| ServedDevice { path: device.path, size: device.size })
                .collect(),
            boot: this_boot(),
            last_seen_unix_seconds: now,
            added: Vec::new(),
            rate: None,
        };
        let _one = self.writing.lock();
        let mut all: Vec<ServedPool> = self.file.read()?;
        // Under another name it is the same pool.
        let before = all.iter().find(|one| one.name == pool.name && one.id == pool.id).cloned();
        let same = before.as_ref().or_else(|| all.iter().find(|one| one.id == pool.id));
        let (added, rate) = same.map(|one| (one.added.clone(), one.rate)).unwrap_or_default();
        let pool = ServedPool { added, rate, ..pool };
        if before.as_ref().is_some_and(|before| before.says_the_same(&pool)) {
            return Ok(());
        }
        let name = pool.name.clone();
        all.retain(|one| one.name != name && !one.is_replaced_by(&pool, created));
        all.push(pool);
        match self.file.write(all) {
            Err(error) if before.is_some() => {
                tracing::warn!(pool = name, %error, "cannot remember when the pool was last seen");
                Ok(())
            }
            other => other,
        }
    }

    /// Refuses to go on with a pool that was served before and is missing, or has become another
    /// one. With `replace`, a missing pool is given up, unless its devices hold another pool.
    /// Blocks.
    pub(super) fn require(
        &self,
        config: &PoolConfig,
        spec: &PoolSpec,
        replace: bool,
    ) -> Result<Permit, Unopened> {
        if config.devices.iter().all(|device| device.kind == crate::config::DeviceKind::Memory) {
            return Ok(Permit::Create);
        }
        let Some(seen) = self.seen(config)? else {
            return Ok(match identity(spec) {
                Ok(None) => Permit::Create,
                Ok(Some(id)) => Permit::Open(Some(hex(&id))),
                // There is one, which can't be read: opening it says what is wrong.
                Err(_) => Permit::Open(None),
            });
        };
        if replace {
            return seen.given_up(config, spec);
        }
        let path = spec.devices.first().map(|device| device.path.display().to_string());
        let path = path.unwrap_or_default();
        let absent = spec.devices.iter().find(|device| is_absent(device));
        let absent = absent.map(|device| device.path.display());
        let problem = match identity(spec) {
            Ok(Some(id)) if seen.may_be(config, &hex(&id)) => match absent {
                Some(absent) => format!("{absent} does not exist"),
                None => return Ok(Permit::Open(Some(hex(&id)))),
            },
            Ok(Some(id)) => format!("{path} holds another pool, {}", hex(&id)),
            Ok(None) if seen.is_lost_with_its_boot(spec) => {
                tracing::warn!(pool = config.name, path, "the volatile pool is made anew");
                return Ok(Permit::Create);
            }
            Ok(None) => match absent {
                Some(absent) => format!("{absent} does not exist"),
                None => format!("{path} holds no pool"),
            },
            Err(PoolError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                format!("{path} does not exist")
            }
            // There is one, which can't be read: opening it says what is wrong.
            Err(_) => return Ok(Permit::Open(None)),
        };
        Err(seen.missing(&config.name, &problem))
    }

    /// The names of all; `None` where the file was lost or can't be read. Blocks.
    pub(super) fn names(&self) -> Option<Vec<String>> {
        let all = self.was_there.then(|| self.file.read::<ServedPool>().ok()).flatten()?;
        Some(all.into_iter().map(|one| one.name).collect())
    }

    /// The stored entry of a pool: by its name, else by the pool that was served at its place, else
    /// by the name in other files of the state directory.
    fn seen(&self, config: &PoolConfig) -> Result<Option<ServedPool>, Error> {
        let all: Vec<ServedPool> = self.file.read()?;
        if let Some(found) = all.iter().find(|one| one.name == config.name) {
            return Ok(Some(found.clone()));
        }
        let places: Vec<_> = config.devices.iter().map(|device| resolved(&device.path)).collect();
        if let Some(found) = all.into_iter().find(|one| one.is_at_any(&places)) {
            return Ok(Some(found));
        }
        let mut attached = attachments::remembered(&self.state_dir)?;
        attached.retain(|record| record.pool == config.name);
        let created: Vec<Remembered> = self.created.read()?;
        if attached.is_empty() && created.iter().all(|one| one.name != config.name) {
            return Ok(None);
        }
        let devices = config.devices.iter();
        Ok(Some(ServedPool {
            name: config.name.clone(),
            id: attached
                .into_iter()
                .map(|one| one.pool_id)
                .find(|id| !id.is_empty())
                .unwrap_or_default(),
            devices: devices
                .map(|device| ServedDevice { path: device.path.clone(), size: 0 })
                .collect(),
            volatile: config.volatile,
            boot: String::new(),
            last_seen_unix_seconds: 0,
            added: Vec::new(),
            rate: None,
        }))
    }

    /// Remembers the bytes a second that may be moved off a device of an open pool, durably. Of a
    /// pool that is not in the list of served ones it is not remembered. Blocks.
    pub(super) fn set_rate(&self, handle: &PoolHandle, rate: u64) -> Result<(), Error> {
        let (name, id) = (handle.name(), hex(&handle.id()));
        let _one = self.writing.lock();
        let mut all: Vec<ServedPool> = self.file.read()?;
        match all.iter_mut().find(|one| one.name == name && one.id == id) {
            Some(pool) if pool.rate != Some(rate) => pool.rate = Some(rate),
            _ => return Ok(()),
        }
        self.file.write(all)
    }

    /// The rate that was remembered of an open pool. Blocks.
    pub(super) fn rate_of(&self, handle: &PoolHandle) -> Result<Option<u64>, Error> {
        let (name, id) = (handle.name(), hex(&handle.id()));
        let all: Vec<ServedPool> = self.file.read()?;
        Ok(all.into_iter().find(|one| one.name == name && one.id == id).and_then(|one| one.rate))
    }

    /// Changes the list of devices that were added to an open pool by calls, durably. A pool that
    /// is not in the list of served ones has none. Blocks.
    pub(super) fn change_added(
        &self,
        handle: &PoolHandle,
        change: impl FnOnce(&mut Vec<PathBuf>),
    ) -> Result<(), Error> {
        let (name, id) = (handle.name(), hex(&handle.id()));
        let _one = self.writing.lock();
        let mut all: Vec<ServedPool> = self.file.read()?;
        let found = all.iter_mut().find(|one| one.name == name && one.id == id);
        let Some(pool) = found else {
            let mut none = Vec::new();
            change(&mut none);
            return if none.is_empty() { Ok(()) } else { Err(Error::not_found("pool", name)) };
        };
        let before = pool.added.clone();
        change(&mut pool.added);
        if pool.added == before { Ok(()) } else { self.file.write(all) }
    }

    /// A pool with the devices that were added to it by calls, among its spares: those that have
    /// joined the pool are found to be devices of it when it is opened. Blocks.
    pub(super) fn with_added(&self, config: &PoolConfig) -> Result<PoolConfig, Error> {
        // Under another name in the configuration it is the same pool.
        let added = self.seen(config)?.map(|one| one.added);
        let mut config = config.clone();
        for path in added.unwrap_or_default() {
            let mut known = config.devices.iter().chain(&config.spares);
            if known.all(|device| device.path != path && !same_device(&device.path, &path)) {
                config.spares.extend(added_device(&config, path));
            }
        }
        Ok(config)
    }

    /// Remembers a pool by another name, durably. Blocks.
    pub(super) fn rename(&self, former: &str, id: &str, name: String) -> Result<(), Error> {
        let _one = self.writing.lock();
        let mut all: Vec<ServedPool> = self.file.read()?;
        let Some(at) = all.iter().position(|one| one.name == former && one.id == id) else {
            return Ok(());
        };
        let pool = ServedPool { name, ..all.remove(at) };
        all.retain(|one| one.name != pool.name);
        all.push(pool);
        self.file.write(all)
    }

    /// Forgets a pool durably. Blocks.
    pub(super) fn forget(&self, name: &str) -> Result<(), Error> {
        let _one = self.writing.lock();
        self.file.retain(|one: &ServedPool| one.name != name)
    }

    /// The identity of a pool that was served by this name.
    pub(super) fn id_of(&self, name: &str) -> Result<Option<String>, Error> {
        let all: Vec<ServedPool> = self.file.read()?;
        Ok(all.into_iter().find(|one| one.name == name).map(|one| one.id))
    }

    /// An error of a pool's devices, which are missing if the pool was served before.
    pub(super) fn missing_or(&self, name: &str, error: Error) -> Unopened {
        if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InUse) {
            return error.into();
        }
        let all: Vec<ServedPool> = self.file.read().unwrap_or_default();
        match all.into_iter().find(|one| one.name == name) {
            Some(seen) => seen.missing(name, &error.to_string()),
            None => error.into(),
        }
    }
}

/// A device that is added to a pool by a call, with the options of the first one.
pub(super) fn added_device(config: &PoolConfig, path: PathBuf) -> Option<DeviceConfig> {
    let first = config.devices.first()?.clone();
    Some(DeviceConfig {
        path,
        kind: crate::config::DeviceKind::Auto,
        size: SizeWish::Existing,
        preallocate: false,
        ..first
    })
}

impl ServedPool {
    fn says_the_same(&self, now: &Self) -> bool {
        let seconds = now.last_seen_unix_seconds.abs_diff(self.last_seen_unix_seconds);
        let then = Self { last_seen_unix_seconds: now.last_seen_unix_seconds, ..self.clone() };
        then == *now && seconds < SEEN_PRECISION
    }

    /// Whether another pool was created in its place, or it has another name now.
    fn is_replaced_by(&self, pool: &Self, created: bool) -> bool {
        let places: Vec<_> = pool.devices.iter().map(|device| resolved(&device.path)).collect();
        self.is_at_any(&places) && (created || self.id == pool.id)
    }

    fn is_at_any(&self, places: &[PathBuf]) -> bool {
        self.devices.iter().any(|device| {
            device.path.is_absolute()
                && places
                    .iter()
                    .any(|place| *place == device.path || *place == resolved(&device.path))
        })
    }

    /// Whether the pool with this identity may be opened. Another name at the same place is a
    /// pool that was renamed, or replaced by one that is there.
    fn may_be(&self, config: &PoolConfig, id: &str) -> bool {
        self.name != config.name || self.id.is_empty() || self.id == id
    }

    fn is_lost_with_its_boot(&self, spec: &PoolSpec) -> bool {
        let is_in_memory = || spec.devices.iter().all(|device| would_be_in_memory(&device.path));
        self.volatile && self.boot != this_boot() && is_in_memory()
    }

    /// Allows to create a pool anew where all its devices are empty or not there.
    fn given_up(&self, config: &PoolConfig, spec: &PoolSpec) -> Result<Permit, Unopened> {
        let is_whole = !spec.devices.iter().any(is_absent);
        for (at, device) in spec.devices.iter().enumerate() {
            let alone = PoolSpec { devices: vec![device.clone()], ..spec.clone() };
            let is_first = at == 0;
            let whose = match identity(&alone) {
                Ok(None) => continue,
                Err(PoolError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::NotFound =>
                {
                    continue;
                }
                // It is not missing at all, or damaged: opening it says what is wrong.
                Err(_) if is_first => return Ok(Permit::Open(None)),
                Ok(Some(id)) if is_first && is_whole && self.may_be(config, &hex(&id)) => {
                    return Ok(Permit::Open(Some(hex(&id))));
                }
                Ok(Some(id)) if self.id == hex(&id) => "a device of this pool".to_owned(),
                Ok(Some(id)) => format!("another pool, {}", hex(&id)),
                Err(_) => "a pool that cannot be read".to_owned(),
            };
            let problem = format!(
                "holds {whose}, and --replace-missing never replaces that: zero its first and \
                 last 2 MiB (blkdiscard --zeroout does), or move the file away"
            );
            return Err(Error::in_use(device.path.display().to_string(), problem).into());
        }
        Ok(Permit::Create)
    }

    pub(super) fn missing(&self, name: &str, problem: &str) -> Unopened {
        let places: Vec<_> =
            self.devices.iter().map(|device| device.path.display().to_string()).collect();
        let when = match self.last_seen_unix_seconds {
            0 => "it was served before".to_owned(),
            seconds => format!("it was last seen at {}", time(seconds)),
        };
        let as_other = match self.name == name {
            true => String::new(),
            false => format!(" as pool {}", self.name),
        };
        let problem = format!(
            "is missing: {problem}; {when}{as_other} on {}. Attach its disk or mount its \
             file system, then run `blockd pool open {name}`; only `blockd pool create {name} \
             --replace-missing` starts anew",
            places.join(", ")
        );
        missing(name, problem)
    }
}

fn missing(name: &str, problem: String) -> Unopened {
    Unopened { error: Box::new(Error::in_use(format!("pool {name}"), problem)), reason: MISSING }
}

/// The error of a pool whose devices were exchanged or went away while it was opened.
pub(super) fn changed_meanwhile(name: &str, path: &Path) -> Unopened {
    let path = path.display();
    missing(name, format!("is missing: {path} no longer holds it. Run `blockd pool open {name}`"))
}

fn is_absent(device: &DeviceSpec) -> bool {
    device.kind != DeviceKind::Memory && !is_there(&device.path)
}

fn this_boot() -> String {
    boot_id().map(|id| hex(&id)).unwrap_or_default()
}

/// Seconds since 1970 as people write them, in UTC.
fn time(seconds: u64) -> String {
    blockd_media::units::utc(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
}
