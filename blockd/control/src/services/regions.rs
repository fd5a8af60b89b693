//! Pools that have what is ours of a region of persistent memory: its namespaces stand in place of
//! paths, and are made where that is allowed.
//!
//! Which pool such a name means is remembered: a namespace that is not seen for a while must not be
//! the reason to make another pool in the rest of its region.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use blockd_mapper::geometry::MAX_DEVICES;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::pool::{PoolError, path_of_namespace};
use blockd_pmem::platform::pooled::{self, OWN_NAME, Target};
use blockd_pmem::platform::{Mode, Namespace, Platform, Region, Uuid, new_uuid};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceConfig, PoolConfig, RegionShare};

use super::errors::pool_error;
use super::hex;
use super::places::{check_kinds, check_places};
use super::pools::{Opened, Opener, Unopened, open_or_create, spec};
use super::served::{Permit, ServedPools};
use super::state_file::StateFile;

/// The identity of a pool, as its superblocks have it.
type PoolId = [u8; 16];

/// The stored entry of a pool.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Entry {
    pool: String,
    /// Which pool it is, in hexadecimal digits; empty until it was opened.
    id: String,
    /// The namespace that is being made for it: until that is over it has had no user.
    making: Option<String>,
    /// The region that it is made in.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    making_in: String,
}

impl Entry {
    /// The namespace that is not finished.
    fn unfinished(&self) -> Option<Uuid> {
        self.making.as_ref()?.parse().ok()
    }
}

/// The stored entries of pools with a share of a region.
#[derive(Debug)]
pub(super) struct Book {
    file: StateFile,
    /// Pools are opened side by side, and the file is replaced as a whole.
    writing: Mutex<()>,
}

impl Book {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { file: StateFile::new(state_dir, "regions.json"), writing: Mutex::new(()) }
    }

    fn of(&self, pool: &str) -> Result<Entry, Error> {
        let found = self.file.read::<Entry>()?.into_iter().find(|one| one.pool == pool);
        Ok(found.unwrap_or_else(|| Entry { pool: pool.to_owned(), ..Entry::default() }))
    }

    /// Forgets a pool durably. Blocks.
    pub(super) fn forget(&self, pool: &str) -> Result<(), Error> {
        let _one = self.writing.lock();
        self.file.retain(|one: &Entry| one.pool != pool)
    }

    /// Replaces what is known of a pool, durably, where that is something else.
    fn note(&self, entry: Entry) -> Result<(), Error> {
        let _one = self.writing.lock();
        let mut all = self.file.read::<Entry>()?;
        if all.contains(&entry) {
            return Ok(());
        }
        all.retain(|one| one.pool != entry.pool);
        all.push(entry);
        self.file.write(all)
    }
}

/// Opens a pool by its paths, or by the region that it has a share of. One that was served before
/// has to be there, unless it is given up (`replace`). Blocks.
pub(super) fn open(
    config: &PoolConfig,
    runtime_dir: &Path,
    opener: Opener,
    book: &Book,
    served: &ServedPools,
    replace: bool,
) -> Result<Opened, Unopened> {
    let Some(share) = &config.region else {
        check_kinds(config)?;
        let spec = spec(config, runtime_dir);
        // A file system that is not mounted is the reason, and not where its folder lies then.
        let permit = served.require(config, &spec, replace)?;
        if permit == Permit::Create {
            check_places(config, &spec)?;
        }
        return open_or_create(config, runtime_dir, opener, permit);
    };
    let platform = Platform::default();
    // Nothing is made by looking, so that no folder is needed.
    let id_of = |alone: &PoolConfig| blockd_media::pool::identity(&spec(alone, Path::new("")));
    let entry = book.of(&config.name)?;
    if replace {
        give_up(config, share, &platform, book, id_of)?;
    } else if entry.id.is_empty()
        && let Some(id) = served.id_of(&config.name)?
    {
        book.note(Entry { id, ..entry })?;
    }
    let found = make_missing(config, share, &platform, book, id_of)
        .and_then(|()| present(config, share, &platform, &book.of(&config.name)?, id_of));
    let present = found.map_err(|error| served.missing_or(&config.name, error))?;
    let known = Some(book.of(&config.name)?.id).filter(|id| !id.is_empty());
    let permit = known.map_or(Permit::Create, |id| Permit::Open(Some(id)));
    let opened = open_or_create(&present, runtime_dir, opener, permit)?;
    let id = hex(&opened.handle.id());
    let noted = book.of(&config.name).and_then(|entry| book.note(Entry { id, ..entry }));
    if let Err(error) = noted {
        tracing::warn!(pool = config.name, %error, "which pool it is can't be remembered");
    }
    Ok(opened)
}

/// Forgets which pool it was, so that another is created, where no namespace of the region holds
/// it. A pool that is there instead is not taken over.
fn give_up(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError> + Copy,
) -> Result<(), Error> {
    let entry = book.of(&config.name)?;
    pooled::check_enabled(named(platform.read()?.region(&share.key), share)?)?;
    if entry.id.is_empty() || present(config, share, platform, &entry, id_of).is_ok() {
        return Ok(());
    }
    let unknown = Entry { id: String::new(), ..entry };
    match present(config, share, platform, &unknown, id_of) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(found) => {
            let id = id_of(&found).map_err(|error| pool_error(&config.name, error))?;
            if let Some(id) = id {
                let what = found.devices[0].path.display().to_string();
                let problem = format!(
                    "holds another pool, {}, and --replace-missing never replaces that: name its \
                     namespace in that pool's table",
                    hex(&id)
                );
                return Err(Error::in_use(what, problem));
            }
        }
    }
    book.note(unknown)
}

/// Makes what a pool is to have of a region and has not, and removes what was half made.
fn make_missing(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError> + Copy,
) -> Result<(), Error> {
    remove_half_made(config, share, platform, book, id_of)?;
    let entry = book.of(&config.name)?;
    if !entry.id.is_empty() {
        // Where it was, if it is not there, is not to be written over by another namespace.
        present(config, share, platform, &entry, id_of)?;
    }
    make(config, share, platform, book)
}

/// Removes the namespace that was being created when the daemon ended: it has had no user. If it
/// holds a pool all the same, or may hold one, the stored entry may be an older copy, and nothing
/// is removed.
fn remove_half_made(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError>,
) -> Result<(), Error> {
    let pool = &config.name;
    let entry = book.of(pool)?;
    let Some(text) = &entry.making else { return Ok(()) };
    let uuid: Uuid = text.parse().map_err(|allowed| Error::invalid("making", text, allowed))?;
    let region = entry.making_in.parse().unwrap_or_else(|_| share.key.clone());
    let refused = |problem: &str| {
        let problem = format!(
            "was being made, and {problem}: it is not removed. Correct its pool's entry in \
             regions.json of the state directory"
        );
        Err(Error::in_use(format!("namespace {uuid}"), problem))
    };
    if platform.read()?.namespace(uuid).is_some() {
        // A namespace that is not enabled has no size, and one that is half made can be enabled,
        // too.
        platform.ensure_enabled(uuid)?;
    }
    match platform.read()?.namespace(uuid).map(|(_, one)| one) {
        None => {}
        Some(one) if one.alt_name != OWN_NAME => return refused("is called otherwise"),
        // It never became what can hold a pool.
        Some(one) if one.mode == Mode::Raw => {}
        Some(_) => {
            let path = path_of_namespace(uuid);
            let device = DeviceConfig { path, ..config.devices[0].clone() };
            let alone = PoolConfig { devices: vec![device], ..config.clone() };
            if id_of(&alone).map_err(|error| pool_error(pool, error))?.is_some() {
                return refused("holds a pool");
            }
        }
    }
    if platform.destroy(&region, uuid)? {
        tracing::info!(pool, %region, %uuid, "a namespace that was half made was removed");
    }
    book.note(Entry { making: None, making_in: String::new(), ..entry })
}

/// Makes what is missing of a region, if that is allowed. What is there already counts, and none of
/// it shrinks. Where there is something, it is served whether more can be made or not.
fn make(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
) -> Result<(), Error> {
    let (pool, region) = (&config.name, &share.key);
    if !share.create {
        return Ok(());
    }
    let inventory = platform.read()?;
    let found = named(inventory.region(region), share)?;
    pooled::check_enabled(found)?;
    let has_some = pooled::own(found).next().is_some();
    match more(config, share, platform, book, found) {
        Err(error) if has_some => {
            tracing::warn!(pool, %region, %error, "no more of the region can be had");
            Ok(())
        }
        other => other,
    }
}

fn more(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
    found: &Region,
) -> Result<(), Error> {
    let (pool, region) = (&config.name, &share.key);
    let target = Target::Percentage(share.percentage);
    let planned = pooled::plan(found, target)?;
    if planned.is_beyond() {
        let (own, allowed) = (planned.own, planned.allowed);
        tracing::warn!(
            pool, %region, own, allowed,
            "pools have more of the region than its percentage: nothing of it is given back"
        );
    }
    if planned.to_make == 0 {
        return Ok(());
    }
    if own(pooled::own(found), share, &config.devices[0]).len() >= MAX_DEVICES {
        let has = planned.own;
        tracing::warn!(pool, %region, has, "a pool has {MAX_DEVICES} devices at most: no more is made");
        return Ok(());
    }
    let uuid = new_uuid()?;
    let entry = book.of(pool)?;
    let (making, making_in) = (Some(uuid.to_string()), region.to_string());
    book.note(Entry { making, making_in, ..entry.clone() })?;
    let space = platform.ensure_pool_space(region, target, uuid)?;
    book.note(entry)?;
    if let Some(uuid) = space.made {
        let bytes = space.share.to_make;
        tracing::info!(pool, %region, %uuid, bytes, "a namespace was made for the pool");
    }
    Ok(())
}

fn named<'a>(region: Option<&'a Region>, share: &RegionShare) -> Result<&'a Region, Error> {
    region.ok_or_else(|| Error::not_found("region", &share.key.to_string()))
}

/// A pool with the devices that it has at present. It is opened by one of its own; the rest are its
/// own too, or join it when it is low.
fn present(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    entry: &Entry,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError>,
) -> Result<PoolConfig, Error> {
    let inventory = platform.read()?;
    let region = named(inventory.region(&share.key), share)?;
    // A namespace that is not visible may hold the pool: the others do not prove that the region is
    // empty.
    pooled::check_enabled(region)?;
    let finished = pooled::own(region).filter(|one| one.uuid != entry.unfinished());
    let (mut devices, mut unread) = (Vec::new(), Vec::new());
    for device in own(finished, share, &config.devices[0]) {
        let alone = PoolConfig { devices: vec![device.clone()], ..config.clone() };
        match id_of(&alone) {
            Ok(id) => devices.push((device, id.map(|id| hex(&id)))),
            Err(error) => unread.push((device, error)),
        }
    }
    let is_known = |id: &Option<String>| id.as_ref().is_some_and(|id| *id == entry.id);
    if devices.iter().any(|(_, id)| is_known(id)) {
        // The pool reports its missing devices; a device that it does not need does not keep it
        // closed.
        for (device, error) in &unread {
            let (pool, path) = (&config.name, device.path.display());
            tracing::warn!(pool, %path, %error, "it can't be read, and is left out");
        }
    } else if let Some((_, error)) = unread.into_iter().next() {
        return Err(pool_error(&config.name, error));
    }
    if devices.is_empty() {
        return Err(nothing(config, share));
    }
    let wanted = pool_of(config, share, &entry.id, &devices)?;
    // Another pool's are left to it, and those of this one come first.
    devices.retain(|(_, id)| id.is_none() || *id == wanted);
    devices.sort_by_key(|(_, id)| id.is_none());
    let mut devices: Vec<DeviceConfig> = devices.into_iter().map(|(device, _)| device).collect();
    let spares = devices.split_off(devices.len().min(1));
    Ok(PoolConfig { devices, spares, region: None, ..config.clone() })
}

/// Which pool it is; `None` for one that is to be made.
fn pool_of(
    config: &PoolConfig,
    share: &RegionShare,
    known: &str,
    devices: &[(DeviceConfig, Option<String>)],
) -> Result<Option<String>, Error> {
    let what = || format!("pool {} in region {}", shown(&config.name), share.key);
    let mut seen: Vec<&String> = devices.iter().filter_map(|(_, id)| id.as_ref()).collect();
    if !known.is_empty() {
        if seen.iter().any(|id| *id == known) {
            return Ok(Some(known.to_owned()));
        }
        let problem = format!(
            "has been {known}, which no namespace there holds: it has to come back, or its entry \
             in regions.json of the state directory to go"
        );
        return Err(Error::in_use(what(), problem));
    }
    seen.sort();
    seen.dedup();
    match seen.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some((*one).clone())),
        more => {
            let problem =
                format!("may be any of {} pools there: name its namespace instead", more.len());
            Err(Error::in_use(what(), problem))
        }
    }
}

/// Namespaces that no other pool names, the largest first.
fn own<'a>(
    namespaces: impl Iterator<Item = &'a Namespace>,
    share: &RegionShare,
    device: &DeviceConfig,
) -> Vec<DeviceConfig> {
    let others: Vec<_> = share
        .others
        .iter()
        .map(|path| path.canonicalize().unwrap_or_else(|_| path.clone()))
        .collect();
    let is_others = |one: &Namespace| {
        let by_uuid = one.uuid.map(path_of_namespace);
        let by_path: Option<PathBuf> = one.device.as_ref().map(|device| device.path().into());
        others.iter().any(|path| Some(path) == by_uuid.as_ref() || Some(path) == by_path.as_ref())
    };
    let mut all: Vec<&Namespace> = namespaces.filter(|one| !is_others(one)).collect();
    all.sort_by_key(|one| (Reverse(one.size), one.uuid));
    let paths = all.into_iter().filter_map(|one| one.uuid).map(path_of_namespace);
    paths.map(|path| DeviceConfig { path, ..device.clone() }).collect()
}

/// The pool that a device in persistent memory is left to: it names its namespace, or has those of
/// its region.
pub(super) fn owner(
    path: &Path,
    pools: &[PoolConfig],
    platform: &Platform,
) -> Result<Option<String>, Error> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let inventory = platform.read()?;
    let is_it = |one: &Namespace| {
        let by_uuid = one.uuid.map(path_of_namespace);
        let device = one.device.as_ref().map(|device| PathBuf::from(device.path()));
        by_uuid.as_ref() == Some(&path) || device.as_ref() == Some(&path)
    };
    let found = inventory.namespaces().find(|(_, one)| is_it(one));
    let Some((region, namespace)) = found else { return Ok(None) };
    let names = [
        namespace.uuid.map(path_of_namespace),
        namespace.device.as_ref().map(|device| device.path().into()),
    ];
    let is_named = |path: &PathBuf| names.iter().flatten().any(|name| name == path);
    let is_of = |pool: &&PoolConfig| {
        let is_left = |share: &RegionShare| {
            share.key == region.key
                && namespace.alt_name == OWN_NAME
                && !share.others.iter().any(is_named)
        };
        let mut devices = pool.devices.iter().chain(&pool.spares).map(|one| &one.path);
        devices.any(is_named) || pool.region.as_ref().is_some_and(is_left)
    };
    Ok(pools.iter().find(is_of).map(|pool| pool.name.clone()))
}

/// The error of a pool whose region has no namespace for it.
fn nothing(config: &PoolConfig, share: &RegionShare) -> Error {
    let region = &share.key;
    let advice = match share.create {
        true => "what is called blockd there is other pools', and the percentage allows no more",
        false => "create_namespaces = true lets the daemon make one",
    };
    let name = format!(
        "of pool {} in region {region} (`blockd pmem create --region {region}` makes one; {advice})",
        shown(&config.name)
    );
    Error::not_found("namespace", &name)
}
