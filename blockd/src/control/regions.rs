//! Pools that have what is ours of a region of persistent memory: its namespaces stand in place of
//! paths, and are made where that is allowed.
//!
//! Which pool such a name means is remembered: a namespace that is not seen for a while must not be
//! the reason to make another pool in the rest of its region.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use blockd_pmem::platform::pooled::{self, Target};
use blockd_pmem::platform::{Mode, Namespace, Platform, Region, Uuid, new_uuid};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceConfig, PoolConfig, RegionShare};
use crate::error::{Error, shown};
use crate::pool::{self, PoolError, path_of_namespace};

use super::errors::pool_error;
use super::pools::{Opened, Unopened, open_or_create, spec};
use super::state_file::StateFile;

/// The identity of a pool, as its superblocks have it.
type PoolId = [u8; 16];

/// What is remembered of a pool.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Entry {
    pool: String,
    /// Which pool it is, in hexadecimal digits; empty until it was opened.
    id: String,
    /// The namespace that is being made for it: until that is over nobody has had it.
    making: Option<String>,
}

/// What is remembered of pools with a share of a region.
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

/// Opens a pool by its paths, or by the region that it has a share of. Blocks.
pub(super) fn open(
    config: &PoolConfig,
    runtime_dir: &Path,
    node: u32,
    book: &Book,
) -> Result<Opened, Unopened> {
    let Some(share) = &config.region else { return open_or_create(config, runtime_dir, node) };
    let platform = Platform::default();
    // Nothing is made by looking, so that no folder is needed.
    let id_of = |alone: &PoolConfig| pool::identity(&spec(alone, Path::new("")));
    remove_half_made(config, share, &platform, book, id_of)?;
    make(config, share, &platform, book)?;
    let entry = book.of(&config.name)?;
    let present = present(config, share, &platform, &entry.id, id_of)?;
    let opened = open_or_create(&present, runtime_dir, node)?;
    let id = hex(opened.handle.id());
    if let Err(error) = book.note(Entry { id, making: None, ..entry }) {
        tracing::warn!(pool = config.name, %error, "which pool it is can't be remembered");
    }
    Ok(opened)
}

/// Removes what was being made when the daemon ended: nobody has had it. If it holds a pool all the
/// same, what is remembered may be an older copy, and nothing is removed.
fn remove_half_made(
    config: &PoolConfig,
    share: &RegionShare,
    platform: &Platform,
    book: &Book,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError>,
) -> Result<(), Error> {
    let (pool, region) = (&config.name, &share.key);
    let mut entry = book.of(pool)?;
    let Some(text) = entry.making.take() else { return Ok(()) };
    let uuid: Uuid = text.parse().map_err(|allowed| Error::invalid("making", &text, allowed))?;
    let inventory = platform.read()?;
    let can_hold = |one: &Namespace| one.mode == Mode::Devdax && one.device.is_some();
    if inventory.namespace(uuid).is_some_and(|(_, one)| can_hold(one)) {
        let device = DeviceConfig { path: path_of_namespace(uuid), ..config.devices[0].clone() };
        let alone = PoolConfig { devices: vec![device], ..config.clone() };
        if id_of(&alone).map_err(|error| pool_error(pool, error))?.is_some() {
            let problem = "was being made, and holds a pool: it is not removed. Correct its pool's \
                           entry in regions.json of the state directory";
            return Err(Error::in_use(format!("namespace {uuid}"), problem));
        }
    }
    if platform.destroy(region, uuid)? {
        tracing::info!(pool, %region, %uuid, "a namespace that was half made was removed");
    }
    book.note(entry)
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
    let uuid = new_uuid()?;
    let entry = book.of(pool)?;
    book.note(Entry { making: Some(uuid.to_string()), ..entry.clone() })?;
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
    known: &str,
    id_of: impl Fn(&PoolConfig) -> Result<Option<PoolId>, PoolError>,
) -> Result<PoolConfig, Error> {
    let inventory = platform.read()?;
    let region = named(inventory.region(&share.key), share)?;
    // What is not seen may be where the pool is: the others are not taken for an empty region.
    pooled::check_enabled(region)?;
    let mut devices = Vec::new();
    for device in own(pooled::own(region), share, &config.devices[0]) {
        let alone = PoolConfig { devices: vec![device.clone()], ..config.clone() };
        let id = id_of(&alone).map_err(|error| pool_error(&config.name, error))?;
        devices.push((device, id.map(hex)));
    }
    if devices.is_empty() {
        return Err(nothing(config, share));
    }
    let wanted = pool_of(config, share, known, &devices)?;
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

/// What is said of a pool whose region has nothing for it.
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

fn hex(id: PoolId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockd_pmem::platform::testing::{FakeHost, FakeSpec, Shown};
    use blockd_pmem::platform::{Kernel, RegionKey};

    use super::*;
    use crate::config::DeviceKind;
    use crate::control::testing::{Folder, folder, memory_pool};
    use crate::pool::PmemOptions;

    const GIB: u64 = 1 << 30;
    const ID: PoolId = [0xab; 16];

    struct Rig {
        host: Arc<FakeHost>,
        book: Book,
        /// What is found on devices.
        pools: Vec<(PathBuf, PoolId)>,
        _folder: Folder,
    }

    impl Rig {
        fn new() -> Self {
            let (folder, host) = (folder(), FakeHost::new(&[FakeSpec::new(1, GIB)]));
            Self { host, book: Book::new(folder.path()), pools: Vec::new(), _folder: folder }
        }

        fn make(&self, share: &RegionShare) -> Result<(), String> {
            let (config, platform) = (pool(share), self.host.platform());
            let id_of = |one: &PoolConfig| {
                let path = &one.devices[0].path;
                Ok(self.pools.iter().find(|(at, _)| at == path).map(|(_, id)| *id))
            };
            let removed = remove_half_made(&config, share, &platform, &self.book, id_of);
            let made = removed.and_then(|()| make(&config, share, &platform, &self.book));
            made.map_err(|error| error.to_string())
        }

        fn present(&self, share: &RegionShare, known: &str) -> Result<[Vec<PathBuf>; 2], String> {
            let id_of = |one: &PoolConfig| {
                let path = &one.devices[0].path;
                Ok(self.pools.iter().find(|(at, _)| at == path).map(|(_, id)| *id))
            };
            let found = present(&pool(share), share, &self.host.platform(), known, id_of);
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

    #[test]
    fn p8_what_is_missing_is_made_once_and_only_where_that_is_allowed() {
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
    fn d13_what_a_raised_share_adds_joins_the_pool_and_a_lowered_one_takes_nothing() {
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

    #[test]
    fn p11_a_namespace_that_another_pool_names_or_is_in_is_left_to_it() {
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
        // Nobody names it, and it holds another pool than the one that is known.
        rig.pools = vec![(theirs[0].clone(), [1; 16]), (ours[0].clone(), ID)];
        assert_eq!(rig.present(&share(75), &hex(ID)).unwrap(), [ours, Vec::new()]);
        let refused = rig.present(&share(75), "").unwrap_err();
        assert!(refused.contains("any of 2 pools"), "{refused}");
    }

    #[test]
    fn no_pool_is_made_beside_one_that_is_not_seen() {
        let rig = Rig::new();
        rig.make(&share(25)).unwrap();
        rig.make(&share(50)).unwrap();
        let refused = rig.present(&share(50), &hex(ID)).unwrap_err();
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
    fn what_holds_a_pool_is_not_removed_whatever_is_remembered() {
        let mut rig = Rig::new();
        rig.make(&share(25)).unwrap();
        let [found, _] = rig.found(&share(25));
        rig.pools.push((found[0].clone(), ID));
        let making = found[0].to_str().unwrap().trim_start_matches("namespace:").to_owned();
        rig.book
            .note(Entry { pool: "p".to_owned(), making: Some(making), ..Entry::default() })
            .unwrap();
        let writes = rig.host.writes();
        let refused = rig.make(&share(25)).unwrap_err();
        assert!(refused.contains("holds a pool"), "{refused}");
        assert_eq!(rig.host.writes(), writes);
    }

    #[test]
    fn what_was_half_made_is_removed_and_what_is_there_is_served_without_more() {
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
