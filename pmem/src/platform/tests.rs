//! Reading and changing a host, on one that is made of files.

use std::fs;
use std::os::unix::fs::FileExt;

use super::provision::NamespaceSpec;
use super::step::{HUGE_PAGE, Rule, Step};
use super::testing::{FakeHost, FakeSpec, Shown};
use super::*;
use crate::media::Domain;

mod changes;
mod growth;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn key(cookie: u64) -> RegionKey {
    RegionKey::Cookie(cookie)
}

fn uuid(number: u8) -> Uuid {
    Uuid::of_random([number; 16])
}

fn spec(number: u8, size: u64) -> NamespaceSpec {
    NamespaceSpec {
        uuid: uuid(number),
        alt_name: format!("volume-{number}"),
        mode: Mode::Fsdax,
        map: PageMap::Device,
        align: HUGE_PAGE,
        size,
    }
}

/// Row: P17.
#[test]
fn regions_of_1_2_and_6_ways_are_read() {
    for ways in [1, 2, 6] {
        let host = FakeHost::new(&[FakeSpec::new(0xabc, 6 * GIB).of_ways(ways).at_node(1)]);
        let inventory = host.platform().read().unwrap();
        let [region] = inventory.regions.as_slice() else { panic!("{inventory:?}") };
        assert_eq!((region.ways, region.dimms.len() as u64), (ways, ways));
        assert_eq!(region.key, key(0xabc));
        assert_eq!((region.size, region.available), (6 * GIB, 6 * GIB));
        assert_eq!(region.max_available_extent, 6 * GIB);
        assert_eq!(region.numa_node, Some(1));
        assert_eq!(region.domain, Domain::MemoryController);
        assert!(region.labelled && !region.read_only && region.namespaces.is_empty());
        let align = if ways == 6 { 96 * MIB } else { 16 * MIB };
        assert_eq!(region.align, Some(align));
        assert_eq!(Step::of(region, HUGE_PAGE, Rule::Formula).unwrap().bytes(), align);
        assert_eq!(Step::of(region, HUGE_PAGE, Rule::Coarse).unwrap().bytes(), ways * GIB);
        assert!(region.dimms.iter().all(|dimm| dimm.id.is_some()));
    }
}

/// The kernel returns ENODEV for an open file whose device is gone.
#[test]
fn a_disappearing_object_is_read_again_and_a_failing_one_is_not() {
    let says = |errno: rustix::io::Errno| is_transient(&errno.into());
    assert!(says(rustix::io::Errno::NOENT) && says(rustix::io::Errno::NODEV));
    assert!(!says(rustix::io::Errno::IO) && !says(rustix::io::Errno::NXIO));
}

#[test]
fn a_namespace_whose_files_went_has_nothing_left() {
    let left = |size: Result<Option<u64>, rustix::io::Errno>| {
        let path = "/sys/size".into();
        provision::left_of(size.map_err(|errno| PlatformError::Read { path, source: errno.into() }))
    };
    assert_eq!(left(Ok(None)).unwrap(), 0);
    assert_eq!(left(Err(rustix::io::Errno::NODEV)).unwrap(), 0);
    assert_eq!(left(Ok(Some(MIB))).unwrap(), MIB);
    assert!(left(Err(rustix::io::Errno::IO)).is_err());
}

#[test]
fn a_host_without_such_memory_has_none() {
    let host = FakeHost::new(&[]);
    fs::remove_dir_all(host.places().sys.join("bus/nd")).unwrap();
    let inventory = host.platform().read_with_users().unwrap();
    assert_eq!(inventory, Inventory::default());
}

#[test]
fn regions_are_identified_by_cookie_independent_of_their_number() {
    let specs = [FakeSpec::new(1, GIB).at_node(0), FakeSpec::new(2, GIB).at_node(1)];
    let host = FakeHost::new(&specs);
    let platform = host.platform();
    platform.create(&key(2), &spec(1, 64 * MIB)).unwrap();
    let before = platform.read().unwrap();
    host.reboot();
    let after = platform.read().unwrap();
    assert_ne!(before.regions[0].name, after.regions[0].name);
    for inventory in [&before, &after] {
        let keys: Vec<_> = inventory.regions.iter().map(|one| one.key.clone()).collect();
        assert_eq!(keys, [key(1), key(2)]);
        let (region, namespace) = inventory.namespace(uuid(1)).unwrap();
        assert_eq!((&region.key, region.numa_node), (&key(2), Some(1)));
        assert_eq!(namespace.alt_name, "volume-1");
        assert!(namespace.device.is_some());
    }
}

#[test]
fn without_a_cookie_the_modules_are_the_key() {
    let host = FakeHost::new(&[FakeSpec::new(0, GIB).of_ways(2)]);
    let inventory = host.platform().read().unwrap();
    let text = inventory.regions[0].key.to_string();
    assert_eq!(text, "ACPI.NFIT:8680-57341200-00000000-0,8680-57341200-00000000-1");
    assert_eq!(text.parse(), Ok(inventory.regions[0].key.clone()));
    // Two regions with one cookie cannot be distinguished: neither is used.
    let host = FakeHost::new(&[FakeSpec::new(7, GIB), FakeSpec::new(7, GIB)]);
    let error = host.platform().read().unwrap_err();
    assert_eq!(
        error.to_string(),
        "region0 and region1: both have the key 0x7, so that neither can be used"
    );
}

/// Every file that is read is broken in turn: each time the error names it, and nothing is taken
/// for absent.
#[test]
fn an_unreadable_file_is_an_error_that_names_it() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB).of_ways(2)]);
    let platform = host.platform();
    platform.create(&key(1), &spec(1, 64 * MIB)).unwrap();
    let whole = platform.read_with_users().unwrap();
    let region = host.places().sys.join("bus/nd/devices/region0");
    let namespace = region.join("namespace0.0");
    let files = [
        region.join("size"),
        region.join("available_size"),
        region.join("max_available_extent"),
        region.join("set_cookie"),
        region.join("mappings"),
        region.join("mapping1"),
        region.join("devtype"),
        region.join("nstype"),
        region.join("numa_node"),
        region.join("persistence_domain"),
        region.join("align"),
        region.join("read_only"),
        region.join("badblocks"),
        namespace.join("size"),
        namespace.join("uuid"),
        namespace.join("holder"),
        region.join("pfn0.0/mode"),
        region.join("pfn0.0/align"),
        region.join("pfn0.0/block/pmem0/size"),
        region.join("pfn0.0/block/pmem0/dev"),
        region.join("pfn0.0/block/pmem0/badblocks"),
    ];
    for file in files {
        let good = fs::read(&file).unwrap();
        for (bad, is_dir) in [("x\u{fffd}y\n", false), ("", true)] {
            fs::remove_file(&file).unwrap();
            if is_dir {
                // An existing path that cannot be read as a file.
                fs::create_dir(&file).unwrap();
            } else {
                fs::write(&file, bad).unwrap();
            }
            let error = platform.read_with_users().unwrap_err();
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!(error.to_string().contains(name), "{}: {error}", file.display());
            if is_dir {
                fs::remove_dir(&file).unwrap();
            }
            fs::write(&file, &good).unwrap();
        }
    }
    assert_eq!(platform.read_with_users().unwrap(), whole);
}

#[test]
fn each_mode_is_made_read_and_removed() {
    let host = FakeHost::new(&[FakeSpec::new(1, 4 * GIB)]);
    let platform = host.platform();
    let kinds = [
        (Mode::Fsdax, PageMap::Device, 124 * MIB, "pmem0"),
        (Mode::Fsdax, PageMap::Memory, 126 * MIB, "pmem0.1"),
        (Mode::Sector, PageMap::Memory, 133_005_312, "pmem0.2s"),
        (Mode::Raw, PageMap::Memory, 128 * MIB, "pmem0.3"),
        (Mode::Devdax, PageMap::Device, 124 * MIB, "dax0.4"),
    ];
    for (number, (mode, map, usable, device)) in (0..).zip(kinds) {
        let spec = NamespaceSpec { mode, map, ..spec(number, 128 * MIB) };
        let made = platform.create(&key(1), &spec).unwrap();
        assert_eq!((made.mode, made.size, made.usable), (mode, 128 * MIB, Some(usable)));
        assert_eq!(made.device.as_ref().unwrap().name, device);
        assert_eq!(made.alt_name, spec.alt_name);
        let has_pages = matches!(mode, Mode::Fsdax | Mode::Devdax);
        assert_eq!(
            (made.map, made.align),
            (has_pages.then_some(map), has_pages.then_some(HUGE_PAGE))
        );
    }
    let region = platform.read().unwrap().regions.remove(0);
    assert_eq!((region.namespaces.len(), region.available), (5, 4 * GIB - 5 * 128 * MIB));
    host.reboot();
    for number in 0..5 {
        assert!(platform.destroy(&key(1), uuid(number)).unwrap());
        assert!(!platform.destroy(&key(1), uuid(number)).unwrap());
    }
    let region = platform.read().unwrap().regions.remove(0);
    assert_eq!((region.namespaces.len(), region.available), (0, 4 * GIB));
}

#[test]
fn a_disabled_region_is_read_without_its_namespaces() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB)]);
    let platform = host.platform();
    platform.create(&key(1), &spec(1, 64 * MIB)).unwrap();
    host.set_bad_blocks(1, 8, 8);
    for (shown, problem) in
        [(Shown::NotEnabled, "is not enabled"), (Shown::WithoutLabels, "has no labels now")]
    {
        host.show_region_as(1, shown);
        let inventory = platform.read_with_users().unwrap();
        let region = inventory.region(&key(1)).unwrap();
        assert_eq!((region.hides(), region.namespaces.len()), (Some(problem), 0));
        assert_eq!(inventory.region(&key(2)).unwrap().hides(), None);
        let writes = host.writes();
        let error = platform.destroy(&key(1), uuid(1)).unwrap_err();
        assert_eq!(error.to_string(), format!("region 0x1 {problem}"));
        assert!(platform.create(&key(1), &spec(2, 64 * MIB)).is_err());
        assert_eq!(host.writes(), writes);
    }
    host.show_region_as(1, Shown::Whole);
    assert!(platform.destroy(&key(1), uuid(1)).unwrap());
    assert!(platform.destroy(&key(3), uuid(1)).is_err());
}

#[test]
fn duplicate_names_are_reported() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    for number in [1, 2] {
        let spec = NamespaceSpec { alt_name: "same".to_owned(), ..spec(number, 64 * MIB) };
        platform.create(&key(1), &spec).unwrap();
    }
    let inventory = platform.read().unwrap();
    assert_eq!(inventory.duplicate_names(), [(key(1), "same".to_owned(), 2)]);
    platform.destroy(&key(1), uuid(1)).unwrap();
    assert!(platform.read().unwrap().duplicate_names().is_empty());
}

#[test]
fn bad_wishes_are_refused_and_nothing_is_written() {
    let host =
        FakeHost::new(&[FakeSpec::new(1, GIB).of_ways(2), FakeSpec::new(2, GIB).without_labels()]);
    let platform = host.platform();
    platform.create(&key(1), &spec(9, 64 * MIB)).unwrap();
    let writes = host.writes();
    let long = "n".repeat(64);
    let refused = [
        (key(3), spec(1, 64 * MIB), "region 0x3 does not exist"),
        (key(2), spec(1, 64 * MIB), "has no labels"),
        (key(1), spec(1, 20 * MIB), "multiples of 16777216"),
        (key(1), spec(1, 0), "size is 0"),
        (key(1), spec(1, 2 * GIB), "bytes needed"),
        (key(1), spec(9, 64 * MIB), "exists already"),
        (key(1), NamespaceSpec { alt_name: long, ..spec(1, 64 * MIB) }, "1 to 63 bytes"),
        (key(1), NamespaceSpec { alt_name: String::new(), ..spec(1, 64 * MIB) }, "1 to 63 bytes"),
        (key(1), NamespaceSpec { align: GIB, ..spec(1, 64 * MIB) }, "multiples of 2147483648"),
    ];
    for (region, spec, text) in refused {
        let error = platform.create(&region, &spec).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!(host.writes(), writes);
}

#[test]
fn growing_is_for_maps_in_memory_only() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    let in_memory = NamespaceSpec { map: PageMap::Memory, ..spec(1, 128 * MIB) };
    let made = platform.create(&key(1), &in_memory).unwrap();
    let device = host.device(&made.device.unwrap().name);
    fs::File::options().write(true).open(&device).unwrap().write_all_at(b"kept", 9 * MIB).unwrap();
    let grown = growth::grow(&platform, 1, 256 * MIB).unwrap();
    assert_eq!((grown.size, grown.usable), (256 * MIB, Some(254 * MIB)));
    let mut found = [0; 4];
    let device = host.device(&grown.device.unwrap().name);
    fs::File::open(device).unwrap().read_exact_at(&mut found, 9 * MIB).unwrap();
    assert_eq!(&found, b"kept");

    // Something is behind it now: the kernel refuses, and it is as it was.
    platform.create(&key(1), &spec(2, 128 * MIB)).unwrap();
    let error = growth::grow(&platform, 1, 384 * MIB).unwrap_err();
    assert!(matches!(&error, PlatformError::NoRoom(no) if no.is_fragmented()), "{}", error.text());
    let inventory = platform.read().unwrap();
    let now = inventory.namespace(uuid(1)).unwrap().1;
    assert_eq!((now.size, now.usable), (256 * MIB, Some(254 * MIB)));

    let writes = host.writes();
    for (number, size, text) in [
        (2, 256 * MIB, "its pages are noted on itself"),
        (1, 256 * MIB, "more than 268435456"),
        (1, 257 * MIB, "multiples of"),
        (3, 256 * MIB, "does not exist"),
    ] {
        let error = growth::grow(&platform, number, size).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!(host.writes(), writes);
    platform.destroy(&key(1), uuid(2)).unwrap();
    let writes = host.writes();
    host.mount("pmem0", Some("/mnt"));
    assert!(growth::grow(&platform, 1, 384 * MIB).unwrap_err().to_string().contains("mounted at"));
    assert_eq!(host.writes(), writes);
}
