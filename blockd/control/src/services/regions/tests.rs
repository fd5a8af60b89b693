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
            return Err(PoolError::Io { what: "look for a pool on", path: path.clone(), source });
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
