//! Pools that have what is ours of a region of persistent memory: its namespaces stand in place of
//! paths, and are made where that is allowed.
//!
//! Which pool such a name means is remembered: a namespace that is not seen for a while must not be
//! the reason to make another pool in the rest of its region.

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
use super::pools::{Opened, Unopened, open_or_create, spec};
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
    node: u32,
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
        return open_or_create(config, runtime_dir, node, permit);
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
    let opened = open_or_create(&present, runtime_dir, node, permit)?;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockd_media::pool::PmemOptions;
    use blockd_pmem::platform::testing::{FakeHost, FakeSpec, Shown};
    use blockd_pmem::platform::{Kernel, RegionKey};

    use super::*;
    use crate::config::DeviceKind;
    use crate::services::testing::{Folder, folder, memory_pool};

    const GIB: u64 = 1 << 30;
    const ID: PoolId = [0xab; 16];

    struct Rig {
        host: Arc<FakeHost>,
        book: Book,
        /// The pools that are found on devices.
        pools: Vec<(PathBuf, PoolId)>,
        unreadable: Vec<PathBuf>,
        _folder: Folder,
    }

    impl Rig {
        fn new() -> Self {
            let (folder, host) = (folder(), FakeHost::new(&[FakeSpec::new(1, GIB)]));
            let (book, pools) = (Book::new(folder.path()), Vec::new());
            Self { host, book, pools, unreadable: Vec::new(), _folder: folder }
        }

        fn id_of(&self, one: &PoolConfig) -> Result<Option<PoolId>, PoolError> {
            let path = &one.devices[0].path;
            if self.unreadable.contains(path) {
                let source = std::io::ErrorKind::Other.into();
                return Err(PoolError::Io {
                    what: "look for a pool on",
                    path: path.clone(),
                    source,
                });
            }
            Ok(self.pools.iter().find(|(at, _)| at == path).map(|(_, id)| *id))
        }

        /// Remembers something of the pool.
        fn note(&self, change: impl FnOnce(&mut Entry)) {
            let mut entry = self.book.of("p").unwrap();
            change(&mut entry);
            self.book.note(entry).unwrap();
        }

        fn make(&self, share: &RegionShare) -> Result<(), String> {
            let (config, platform) = (pool(share), self.host.platform());
            let id_of = |one: &PoolConfig| self.id_of(one);
            let made = make_missing(&config, share, &platform, &self.book, id_of);
            made.map_err(|error| error.to_string())
        }

        fn present(&self, share: &RegionShare, known: &str) -> Result<[Vec<PathBuf>; 2], String> {
            let id_of = |one: &PoolConfig| self.id_of(one);
            let entry = Entry { id: known.to_owned(), ..self.book.of("p").unwrap() };
            let found = present(&pool(share), share, &self.host.platform(), &entry, id_of);
            let paths = |list: Vec<DeviceConfig>| list.into_iter().map(|one| one.path).collect();
            found
                .map(|found| [paths(found.devices), paths(found.spares)])
                .map_err(|error| error.to_string())
        }

        /// The devices of a pool that is known by nothing.
        fn found(&self, share: &RegionShare) -> [Vec<PathBuf>; 2] {
            self.present(share, "").unwrap()
        }

        fn disable(&self, which: &Path) {
            let text = which.to_str().unwrap().trim_start_matches("namespace:").to_owned();
            let inventory = self.host.platform().read().unwrap();
            let (_, one) = inventory.namespace(text.parse().unwrap()).unwrap();
            let unbind = self.host.places().sys.join("bus/nd/drivers/dax_pmem/unbind");
            self.host.write(&unbind, one.holder.as_ref().unwrap()).unwrap();
        }
    }

    fn share(percentage: u8) -> RegionShare {
        let key = RegionKey::Cookie(1);
        RegionShare { key, percentage, create: true, others: Vec::new() }
    }

    fn pool(share: &RegionShare) -> PoolConfig {
        let mut config = memory_pool("p");
        config.devices[0].kind = DeviceKind::Pmem(PmemOptions::default());
        config.region = Some(share.clone());
        config
    }

    /// Row: P8.
    #[test]
    fn a_missing_share_is_created_once_and_only_where_that_is_allowed() {
        let rig = Rig::new();
        let by_hand = RegionShare { create: false, ..share(50) };
        rig.make(&by_hand).unwrap();
        let refused = rig.present(&by_hand, "").unwrap_err();
        assert!(refused.contains("pmem create --region 0x1` makes one; create_"), "{refused}");
        rig.make(&share(50)).unwrap();
        let found = rig.found(&share(50));
        assert_eq!((found[0].len(), found[1].len()), (1, 0));
        rig.host.reboot();
        let writes = rig.host.writes();
        rig.make(&share(50)).unwrap();
        assert_eq!(rig.found(&share(50)), found);
        assert_eq!(rig.host.writes(), writes);
    }

    #[test]
    fn a_raised_share_joins_the_pool_and_a_lowered_one_takes_nothing() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        let [first, _] = rig.found(&share(25));
        rig.pools.push((first[0].clone(), ID));
        // The second one is larger, and not the one with the pool.
        rig.make(&share(75)).unwrap();
        let [found, spares] = rig.found(&share(75));
        assert_eq!((&found, spares.len()), (&first, 1));
        // It has joined.
        rig.pools.push((spares[0].clone(), ID));
        let mut both = rig.found(&share(75)).concat();
        both.sort();
        let mut expected = [found[0].clone(), spares[0].clone()];
        expected.sort();
        assert_eq!(both, expected);
        let writes = rig.host.writes();
        rig.make(&share(10)).unwrap();
        assert_eq!(rig.host.writes(), writes);
    }

    /// Row: P11.
    #[test]
    fn a_namespace_that_another_pool_names_or_is_in_is_left_to_it() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        let [theirs, _] = rig.found(&share(25));
        let inventory = rig.host.platform().read().unwrap();
        let device = inventory.namespaces().next().unwrap().1.device.clone().unwrap();
        for others in [theirs.clone(), vec![device.path().into()]] {
            let one = RegionShare { others, ..share(25) };
            let refused = rig.present(&one, "").unwrap_err();
            assert!(refused.contains("other pools'"), "{refused}");
        }
        rig.make(&share(75)).unwrap();
        let one = RegionShare { others: theirs.clone(), ..share(75) };
        let [ours, spares] = rig.found(&one);
        assert!(ours != theirs && ours.len() == 1 && spares.is_empty());
        // It is named in no entry, and holds another pool than the one that is known.
        rig.pools = vec![(theirs[0].clone(), [1; 16]), (ours[0].clone(), ID)];
        assert_eq!(rig.present(&share(75), &hex(&ID)).unwrap(), [ours, Vec::new()]);
        let refused = rig.present(&share(75), "").unwrap_err();
        assert!(refused.contains("any of 2 pools"), "{refused}");
    }

    /// Row: P11.
    #[test]
    fn a_device_of_a_pool_is_known_by_whatever_name() {
        let rig = Rig::new();
        rig.make(&share(25)).unwrap();
        let [found, _] = rig.found(&share(25));
        let inventory = rig.host.platform().read().unwrap();
        let device = inventory.namespaces().next().unwrap().1.device.clone().unwrap();
        let (of_region, mut named, mut other) =
            (pool(&share(25)), memory_pool("named"), memory_pool("other"));
        named.devices[0].path.clone_from(&found[0]);
        other.region = Some(RegionShare { key: RegionKey::Cookie(2), ..share(25) });
        let owner = |path: &Path, pool: &PoolConfig| {
            let all = [other.clone(), pool.clone()];
            super::owner(path, &all, &rig.host.platform()).unwrap()
        };
        let mut by_path = named.clone();
        by_path.devices[0].path = device.path().into();
        let to_others = pool(&RegionShare { others: vec![found[0].clone()], ..share(25) });
        for path in [found[0].as_path(), Path::new(&device.path())] {
            assert_eq!(owner(path, &by_path).as_deref(), Some("named"));
            assert_eq!(owner(path, &to_others), None);
            assert_eq!(owner(path, &of_region).as_deref(), Some("p"));
            assert_eq!(owner(path, &named).as_deref(), Some("named"));
            assert_eq!(owner(path, &other), None);
        }
        assert_eq!(owner(Path::new("/dev/null"), &of_region), None);
    }

    #[test]
    fn no_pool_is_made_beside_one_that_is_not_seen() {
        let rig = Rig::new();
        rig.make(&share(25)).unwrap();
        rig.make(&share(50)).unwrap();
        let refused = rig.present(&share(50), &hex(&ID)).unwrap_err();
        assert!(refused.contains("has been abab") && refused.contains("regions.json"), "{refused}");
        let [first, _] = rig.found(&share(50));
        rig.disable(&first[0]);
        let writes = rig.host.writes();
        let not_enabled = |text: String| assert!(text.contains("is not enabled"), "{text}");
        not_enabled(rig.make(&share(75)).unwrap_err());
        not_enabled(rig.present(&share(75), "").unwrap_err());
        rig.host.show_region_as(1, Shown::NotEnabled);
        not_enabled(rig.make(&share(75)).unwrap_err());
        not_enabled(rig.present(&share(75), "").unwrap_err());
        rig.host.remove_region(1);
        assert!(rig.make(&share(75)).unwrap_err().contains("region 0x1"));
        assert!(rig.present(&share(75), "").unwrap_err().contains("region 0x1"));
        assert_eq!(rig.host.writes(), writes);
    }

    #[test]
    fn a_namespace_with_a_pool_is_not_removed_whatever_is_remembered() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        let [found, _] = rig.found(&share(25));
        rig.pools.push((found[0].clone(), ID));
        let making = found[0].to_str().unwrap().trim_start_matches("namespace:").to_owned();
        rig.note(|entry| entry.making = Some(making));
        let writes = rig.host.writes();
        let refused = rig.make(&share(25)).unwrap_err();
        assert!(refused.contains("holds a pool"), "{refused}");
        assert_eq!(rig.host.writes(), writes);
        // Without a device it can't be looked at, so that it is enabled before.
        rig.disable(&found[0]);
        let refused = rig.make(&share(25)).unwrap_err();
        assert!(refused.contains("holds a pool"), "{refused}");
        assert_eq!(rig.host.platform().read().unwrap().namespaces().count(), 1);
        // Nor is it opened beside the pool's others, as if it were finished.
        rig.note(|entry| entry.id = hex(&ID));
        assert!(rig.present(&share(25), "").unwrap_err().contains("other pools'"));
    }

    #[test]
    fn nothing_is_made_where_a_known_pool_may_have_been() {
        let rig = Rig::new();
        rig.note(|entry| entry.id = hex(&ID));
        let writes = rig.host.writes();
        let refused = rig.make(&share(50)).unwrap_err();
        assert!(refused.contains("of pool p in region 0x1"), "{refused}");
        assert_eq!(rig.host.writes(), writes);
    }

    #[test]
    fn an_unreadable_namespace_is_left_out_where_the_pool_is_known() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        rig.make(&share(50)).unwrap();
        let [first, spare] = rig.found(&share(50));
        rig.pools.push((first[0].clone(), ID));
        rig.unreadable.clone_from(&spare);
        let unknown = rig.present(&share(50), "").unwrap_err();
        assert!(unknown.contains("look for a pool"), "{unknown}");
        assert_eq!(rig.present(&share(50), &hex(&ID)).unwrap(), [first.clone(), Vec::new()]);
        rig.unreadable = first;
        let gone = rig.present(&share(50), &hex(&ID)).unwrap_err();
        assert!(gone.contains("look for a pool"), "{gone}");
    }

    #[test]
    fn a_pool_that_is_given_up_is_forgotten_and_another_is_not_taken_over() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        rig.note(|entry| entry.id = hex(&ID));
        let [found, _] = rig.found(&share(25));
        let give_up = |rig: &Rig| {
            let (share, platform) = (share(25), rig.host.platform());
            let id_of = |one: &PoolConfig| rig.id_of(one);
            super::give_up(&pool(&share), &share, &platform, &rig.book, id_of)
        };
        for (id, is_kept) in [(Some([1; 16]), true), (Some(ID), true), (None, false)] {
            rig.pools = id.into_iter().map(|id| (found[0].clone(), id)).collect();
            let given_up = give_up(&rig);
            assert_eq!(given_up.is_err(), id.is_some_and(|id| id != ID), "{given_up:?}");
            assert_eq!(rig.book.of("p").unwrap().id == hex(&ID), is_kept);
        }
        // Without its region nothing is known of the pool.
        rig.note(|entry| entry.id = hex(&ID));
        rig.host.remove_region(1);
        assert!(give_up(&rig).is_err());
        assert_eq!(rig.book.of("p").unwrap().id, hex(&ID));
    }

    #[test]
    fn a_pool_gets_no_more_namespaces_than_it_can_have() {
        let rig = Rig::new();
        for percentage in (5..=95).step_by(5) {
            rig.make(&share(percentage)).unwrap();
        }
        assert_eq!(rig.host.platform().read().unwrap().namespaces().count(), MAX_DEVICES);
    }

    #[test]
    fn a_half_made_namespace_is_removed_and_an_existing_one_is_served_as_it_is() {
        let rig = Rig::new();
        for stop in 0.. {
            rig.host.stop_after(stop);
            let done = rig.make(&share(25)).is_ok();
            rig.host.restart();
            if done {
                break;
            }
            let is_noted = rig.book.of("p").unwrap().making.is_some();
            let left = rig.host.platform().read().unwrap().namespaces().count();
            assert!(is_noted || left == 0, "after {stop} writes");
            // Allowed or not, what was being made goes.
            rig.make(&RegionShare { create: false, ..share(25) }).unwrap();
            assert_eq!(rig.host.platform().read().unwrap().namespaces().count(), 0);
        }
        assert_eq!(rig.book.of("p").unwrap().making, None);
        let found = rig.found(&share(25));
        rig.host.refuse("size", 16);
        rig.make(&share(75)).unwrap();
        rig.host.accept();
        assert_eq!(rig.found(&share(75)), found);
    }
}
