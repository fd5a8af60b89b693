use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_media::error::{Error, ErrorKind};
use blockd_pmem::media::{Domain, Durability};
use blockd_pmem::platform::provision::NamespaceSpec;
use blockd_pmem::platform::step::{HUGE_PAGE, Rule};
use blockd_pmem::platform::testing::{FakeHost, FakeSpec};
use blockd_pmem::platform::{Kernel, Mode, PageMap, RegionKey, Uuid};

use super::*;
use crate::services::testing::{Folder, folder};

mod bare;
mod growth;
mod region;
mod scrub;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Behind the end of a volume of 62 MiB, and before that of one of 100.
const SECRET: u64 = 90 * MIB;
/// The first and the last bytes of what a volume of 62 MiB has.
const OWN: [u64; 2] = [0, 62 * MIB - 7];

fn config() -> DirectConfig {
    DirectConfig {
        name: "direct".to_owned(),
        region: RegionKey::Cookie(1),
        name_prefix: "blockd-".to_owned(),
        alignment: Rule::Formula,
        size_rule: SizeRule::Usable,
        page_map: PageMap::Device,
        power_safe: false,
        has_percentage: false,
    }
}

/// Of volumes that can grow.
fn memory() -> DirectConfig {
    DirectConfig { page_map: PageMap::Memory, ..config() }
}

fn wish(name: &str, size: u64) -> CreateWish {
    CreateWish {
        name: name.to_owned(),
        size,
        limit: 0,
        usage: Usage::AppDirect,
        erase_after: true,
        size_rule: None,
    }
}

struct Rig {
    host: Arc<FakeHost>,
    folder: Folder,
}

impl Rig {
    fn new(size: u64) -> Self {
        let host = FakeHost::new(&[FakeSpec::new(1, size).at_node(1), FakeSpec::new(2, GIB)]);
        Self { host, folder: folder() }
    }

    fn dir(&self) -> &Path {
        self.folder.path()
    }

    fn journal(&self) -> PathBuf {
        self.dir().join("direct-direct.journal")
    }

    fn open(&self) -> DirectPool {
        self.open_as(config()).unwrap()
    }

    fn open_as(&self, config: DirectConfig) -> Result<DirectPool, Error> {
        DirectPool::open(config, self.host.platform(), self.dir())
    }

    /// Waits for what goes on in the background.
    fn wait_for(&self, is_done: impl Fn() -> bool) {
        for _ in 0..1000 {
            if is_done() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("it takes too long");
    }

    /// Creates a volume of 62 MiB with old data of another volume behind its end, and returns the
    /// media.
    fn over_remains(&self, pool: &DirectPool) -> File {
        self.over_remains_behind(pool, false)
    }

    /// The same with so much free in front of it that the kernel would take that.
    fn over_remains_behind(&self, pool: &DirectPool, is_behind: bool) -> File {
        pool.create(&CreateWish { erase_after: false, ..wish("old", 120 * MIB) }).unwrap();
        pool.delete("old").unwrap();
        if is_behind {
            pool.create(&wish("first", 62 * MIB)).unwrap();
        }
        pool.create(&wish("a", 62 * MIB)).unwrap();
        if is_behind {
            pool.delete("first").unwrap();
            self.wait_for(|| pool.get("first").is_err());
        }
        let start = if is_behind { 64 * MIB } else { 0 };
        let media = self.host.root().join(format!("media/1-{start:x}"));
        let media = File::options().read(true).write(true).open(media).unwrap();
        media.write_all_at(b"secret", SECRET).unwrap();
        for at in OWN {
            media.write_all_at(b"its own", at).unwrap();
        }
        media
    }

    /// Asserts that the volume has all that was written to it.
    fn has_its_own(&self, media: &File) {
        for at in OWN {
            let mut found = [0; 7];
            media.read_exact_at(&mut found, at).unwrap();
            assert_eq!(&found, b"its own", "at {at}");
        }
    }

    fn secret(&self, media: &File) -> [u8; 6] {
        let mut found = [1; 6];
        media.read_exact_at(&mut found, SECRET).unwrap();
        found
    }

    fn available(&self) -> u64 {
        let inventory = self.host.platform().read().unwrap();
        inventory.region(&RegionKey::Cookie(1)).unwrap().available
    }

    /// As an administrator or a crash leaves a namespace: it is there, and has no device.
    fn disable(&self, holder: &str) {
        let path = self.host.places().sys.join("bus/nd/drivers/nd_pmem/unbind");
        self.host.write(&path, holder).unwrap();
    }

    fn device(&self, pool: &DirectPool, name: &str) -> File {
        let device = pool.get(name).unwrap().device.unwrap();
        File::options().read(true).write(true).open(self.host.device(&device.name)).unwrap()
    }
}

/// Waits for the background, which has a moment's work.
fn until(mut is_so: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if is_so() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("it does not come");
}

/// Rows: P12, P13.
#[test]
fn volumes_are_made_shown_and_removed() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    let (changed, made) = pool.create(&wish("a", 100 * MIB)).unwrap();
    assert!(changed);
    assert_eq!((made.usable, made.charged), (110 * MIB, 112 * MIB));
    assert_eq!((made.state, made.problem.clone()), (State::Ready, None));
    assert_eq!(made.device.as_ref().unwrap().path(), "/dev/pmem0");
    let (changed, again) = pool.create(&wish("a", 100 * MIB)).unwrap();
    assert!(!changed);
    assert_eq!(again, made);
    let inventory = rig.host.platform().read().unwrap();
    let names: Vec<_> = inventory.namespaces().map(|(_, one)| one.alt_name.clone()).collect();
    assert_eq!(names, ["blockd-a"]);
    let error = pool.create(&wish("a", 300 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    let file_io = CreateWish { usage: Usage::FileIo, ..wish("a", 100 * MIB) };
    assert!(pool.create(&file_io).unwrap_err().to_string().contains("usage app-direct"));
    // As many as there is room for.
    let mut count = 1;
    let error = loop {
        match pool.create(&wish(&format!("v{count}"), 100 * MIB)) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((count, error.kind()), (9, ErrorKind::NoSpace));
    assert!(pool.delete("unknown").unwrap().is_none());
    assert_eq!(pool.delete("a").unwrap().unwrap().name, "a");
    until(|| pool.get("a").is_err_and(|error| error.kind() == ErrorKind::NotFound));
    assert_eq!(rig.available(), GIB - 8 * 112 * MIB);
    pool.close();
}

/// Rows: P2, P3.
#[test]
fn direct_refuses_what_is_in_pieces_with_both_figures() {
    // The case of 127 with 63 and 1, in 16 MiB each.
    let unit = 16 * MIB;
    let rig = Rig::new(127 * unit);
    let config = DirectConfig { size_rule: SizeRule::Charged, ..config() };
    let pool = rig.open_as(config).unwrap();
    let keep = CreateWish { erase_after: false, ..wish("first", 63 * unit) };
    pool.create(&keep).unwrap();
    pool.create(&wish("small", unit)).unwrap();
    pool.delete("first").unwrap();
    assert_eq!(rig.available(), 126 * unit);
    let error = pool.create(&wish("large", 64 * unit)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let (needed, free, largest) = (64 * unit, 126 * unit, 63 * unit);
    let text = format!(
        "region 0x1: no space in one piece: {needed} bytes needed, {free} bytes free, the largest \
         piece {largest} bytes"
    );
    assert_eq!(error.to_string(), text);
    let space = pool.describe().space.unwrap();
    assert_eq!((space.available, space.largest_volume), (126 * unit, 63 * unit));
    let error = pool.create(&wish("large", 127 * unit)).unwrap_err();
    assert!(error.to_string().starts_with("region 0x1: no space: 2130706432"), "{error}");
    pool.create(&wish("fits", 63 * unit)).unwrap();
    pool.close();
}

/// Rows: P14, P16.
#[test]
fn limits_steps_and_rules_of_size() {
    let rig = Rig::new(4 * GIB);
    let pool = rig.open_as(DirectConfig { alignment: Rule::Coarse, ..config() }).unwrap();
    let space = pool.describe().space.unwrap();
    assert_eq!((space.step, space.smallest_volume), (GIB, 1006 * MIB));
    assert_eq!(pool.create(&wish("a", 1)).unwrap().1.charged, GIB);
    // A whole step is more than a step when what is usable counts.
    assert_eq!(pool.create(&wish("b", GIB)).unwrap().1.charged, 2 * GIB);
    let limited = CreateWish { limit: GIB, ..wish("c", GIB) };
    let error = pool.create(&limited).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.to_string().starts_with("limit_bytes is 1073741824: must be at least"),
        "{error}"
    );
    let charged = CreateWish { size_rule: Some(SizeRule::Charged), ..limited };
    let (_, view) = pool.create(&charged).unwrap();
    assert_eq!((view.charged, view.usable), (GIB, 1006 * MIB));
    assert_eq!(pool.create(&wish("d", 0)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(pool.create(&wish("a/b", 1)).unwrap_err().kind(), ErrorKind::Invalid);
    pool.close();
}

/// Row: P24.
#[test]
fn file_io_is_a_sector_namespace() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    let file_io = CreateWish { usage: Usage::FileIo, ..wish("files", 64 * MIB) };
    let (_, view) = pool.create(&file_io).unwrap();
    assert!(view.usable >= 64 * MIB);
    let inventory = rig.host.platform().read().unwrap();
    assert_eq!(inventory.namespaces().next().unwrap().1.mode, Mode::Sector);
    pool.close();
}

/// An administrator can make a namespace anew in another mode, under the same UUID.
///
/// Row: P7.
#[test]
fn a_namespace_of_another_mode_is_not_used_and_both_modes_are_named() {
    for (usage, mode, problem) in [
        (Usage::AppDirect, Mode::Devdax, "of mode devdax, and usage app-direct needs fsdax"),
        (Usage::AppDirect, Mode::Sector, "of mode sector, and usage app-direct needs fsdax"),
        (Usage::FileIo, Mode::Fsdax, "of mode fsdax, and usage file-io needs sector"),
    ] {
        let rig = Rig::new(GIB);
        let pool = rig.open();
        let (_, view) = pool.create(&CreateWish { usage, ..wish("a", 64 * MIB) }).unwrap();
        assert!(view.device.is_some() && view.problem.is_none(), "{view:?}");
        let (platform, region) = (rig.host.platform(), RegionKey::Cookie(1));
        let inventory = platform.read().unwrap();
        let own = inventory.namespaces().next().unwrap().1;
        let anew = NamespaceSpec {
            uuid: own.uuid.unwrap(),
            alt_name: own.alt_name.clone(),
            mode,
            map: PageMap::Memory,
            align: HUGE_PAGE,
            size: own.size,
        };
        platform.destroy(&region, anew.uuid).unwrap();
        platform.create(&region, &anew).unwrap();
        let view = pool.get("a").unwrap();
        assert_eq!(view.problem, Some(format!("its namespace is {problem}")));
        assert_eq!(view.device.map(|device| device.name), None);
        pool.close();
    }
}

#[test]
fn a_volume_in_use_is_not_deleted() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 64 * MIB)).unwrap();
    rig.host.mount("pmem0", Some("/mnt/a"));
    let error = pool.delete("a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert_eq!(error.to_string(), "volume a is in use: mounted at /mnt/a");
    rig.host.mount("pmem0", None);
    rig.host.set_open("pmem0", true);
    assert!(pool.delete("a").unwrap_err().to_string().contains("process 77 (database)"));
    rig.host.set_open("pmem0", false);
    assert_eq!(pool.get("a").unwrap().state, State::Ready);
    assert!(pool.delete("a").unwrap().is_some());
    until(|| rig.available() == GIB);
    assert!(rig.host.torn().is_empty());
    pool.close();
}

/// The daemon dies at each write while a volume grows: after its start the volume has its device.
#[test]
fn growing_that_was_cut_short_leaves_no_volume_without_its_device() {
    let mut had_none = false;
    for steps in 0..12 {
        let rig = Rig::new(GIB);
        let pool = rig.open_as(memory()).unwrap();
        pool.create(&wish("a", 62 * MIB)).unwrap();
        rig.host.stop_after(steps);
        let grown = pool.resize("a", 100 * MIB);
        pool.close();
        rig.host.restart();
        had_none |= grown.is_err() && pool.get("a").unwrap().device.is_none();
        let pool = rig.open_as(memory()).unwrap();
        rig.wait_for(|| pool.get("a").unwrap().device.is_some());
        pool.resize("a", 100 * MIB).unwrap();
        assert!(pool.get("a").unwrap().usable >= 100 * MIB);
        pool.close();
    }
    assert!(had_none);
}

/// Row: P51.
#[test]
fn foreign_namespaces_are_neither_shown_nor_touched() {
    let rig = Rig::new(GIB);
    let theirs = NamespaceSpec {
        uuid: Uuid::of_random([9; 16]),
        alt_name: "blockd-a".to_owned(),
        mode: Mode::Fsdax,
        map: PageMap::Device,
        align: HUGE_PAGE,
        size: 128 * MIB,
    };
    rig.host.platform().create(&RegionKey::Cookie(1), &theirs).unwrap();
    let pool = rig.open();
    assert!(pool.list().is_empty());
    assert!(pool.delete("a").unwrap().is_none());
    pool.create(&wish("a", 64 * MIB)).unwrap();
    assert_eq!(pool.list().len(), 1);
    pool.delete("a").unwrap();
    until(|| pool.list().is_empty());
    assert_eq!(rig.available(), GIB - 128 * MIB);
    assert!(rig.host.platform().read().unwrap().namespace(theirs.uuid).is_some());
    let view = pool.describe();
    assert_eq!((view.charged, view.space.unwrap().available), (0, GIB - 128 * MIB));
    pool.close();
}

/// The daemon dies at each write to the kernel while it makes a volume; then it is started anew,
/// on the host as it is or after a reboot.
///
/// Row: P50.
#[test]
fn making_is_taken_back_after_a_crash_at_every_step() {
    for reboots in [false, true] {
        let mut steps = 0;
        loop {
            let rig = Rig::new(GIB);
            let pool = rig.open();
            pool.create(&wish("before", 64 * MIB)).unwrap();
            rig.host.stop_after(steps);
            let made = pool.create(&wish("a", 64 * MIB));
            pool.close();
            if reboots {
                rig.host.reboot()
            } else {
                rig.host.restart()
            }
            let pool = rig.open();
            if made.is_ok() {
                assert_eq!(pool.get("a").unwrap().state, State::Ready);
                pool.close();
                break;
            }
            let names: Vec<_> = pool.list().into_iter().map(|one| one.name).collect();
            assert_eq!(names, ["before"], "step {steps}");
            let before = pool.get("before").unwrap();
            assert_eq!(rig.available(), GIB - before.charged, "step {steps}");
            pool.create(&wish("a", 64 * MIB)).unwrap();
            pool.close();
            steps += 1;
        }
        assert!(steps >= 8, "{steps} steps");
    }
}

/// Row: P50.
#[test]
fn deleting_goes_on_after_a_crash_at_every_step() {
    for (reboots, erases) in [(false, true), (true, true), (false, false), (true, false)] {
        for steps in 0..6 {
            let rig = Rig::new(GIB);
            let pool = rig.open();
            let wish = CreateWish { erase_after: erases, ..wish("a", 64 * MIB) };
            pool.create(&wish).unwrap();
            rig.host.stop_after(steps);
            let deleted = pool.delete("a");
            pool.close();
            if reboots {
                rig.host.reboot()
            } else {
                rig.host.restart()
            }
            let pool = rig.open();
            if deleted.is_err() && pool.get("a").is_ok_and(|one| one.state == State::Ready) {
                // It had not begun.
                pool.delete("a").unwrap();
            }
            until(|| rig.available() == GIB && pool.list().is_empty());
            pool.close();
        }
    }
}

#[test]
fn resize_is_for_maps_in_memory_and_says_so() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    pool.create(&wish("a", 62 * MIB)).unwrap();
    assert!(!pool.resize("a", 62 * MIB).unwrap().0);
    let error = pool.resize("a", 128 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("can't grow: its pages are noted on itself"), "{error}");
    assert!(pool.resize("a", MIB).unwrap_err().to_string().contains("do not shrink"));
    pool.close();
    let memory = DirectConfig { page_map: PageMap::Memory, ..config() };
    let pool = rig.open_as(memory).unwrap();
    let (_, made) = pool.create(&wish("b", 62 * MIB)).unwrap();
    assert_eq!(made.usable, 62 * MIB);
    let (changed, before, grown) = pool.resize("b", 100 * MIB).unwrap();
    assert!(changed);
    assert_eq!((before, grown.usable, grown.charged), (62 * MIB, 110 * MIB, 112 * MIB));
    pool.close();
}

#[test]
fn durability_is_what_the_platform_says() {
    let cases = [
        (Domain::CpuCache, false, false, Durability::PowerSafe),
        (Domain::MemoryController, false, false, Durability::PowerSafe),
        (Domain::Unknown, false, false, Durability::RestartSafe),
        (Domain::Unknown, true, false, Durability::PowerSafe),
        (Domain::MemoryController, true, true, Durability::Volatile),
    ];
    for (domain, power_safe, volatile, expected) in cases {
        let spec = FakeSpec { domain, volatile, ..FakeSpec::new(1, GIB) };
        let (host, folder) = (FakeHost::new(&[spec]), folder());
        let config = DirectConfig { power_safe, ..config() };
        let pool = DirectPool::open(config, host.platform(), folder.path()).unwrap();
        assert_eq!(pool.describe().durability, expected);
        pool.close();
    }
}

#[test]
fn names_that_are_too_long_for_a_label_are_cut() {
    let rig = Rig::new(GIB);
    let pool = rig.open();
    let long = "ä".repeat(60);
    pool.create(&wish(&long, MIB)).unwrap();
    assert_eq!(pool.get(&long).unwrap().name, long);
    let inventory = rig.host.platform().read().unwrap();
    let label = inventory.namespaces().next().unwrap().1.alt_name.clone();
    assert!(label.len() <= 63 && label.starts_with("blockd-ää"), "{label}");
    pool.close();
}
