//! Reading and changing a host, on one that is made of files.

use std::fs;
use std::os::unix::fs::FileExt;

use super::provision::NamespaceSpec;
use super::step::{HUGE_PAGE, Rule, Step};
use super::testing::{FakeHost, FakeSpec, Shown};
use super::*;
use crate::media::Domain;

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

/// Rows: P3, P52.
#[test]
fn fragmentation_is_detected_and_distinguished() {
    let host = FakeHost::new(&[FakeSpec::new(1, 640 * MIB)]);
    let platform = host.platform();
    for number in 1..=4 {
        platform.create(&key(1), &spec(number, 128 * MIB)).unwrap();
    }
    platform.destroy(&key(1), uuid(2)).unwrap();
    let region = platform.read().unwrap().regions.remove(0);
    assert_eq!((region.available, region.max_available_extent), (256 * MIB, 128 * MIB));
    let error = platform.create(&key(1), &spec(5, 256 * MIB)).unwrap_err();
    let PlatformError::NoRoom(refused) = &error else { panic!("{error}") };
    assert!(refused.is_fragmented(), "{error}");
    let error = platform.create(&key(1), &spec(5, 272 * MIB)).unwrap_err();
    let PlatformError::NoRoom(refused) = &error else { panic!("{error}") };
    assert!(!refused.is_fragmented() && refused.is_space(), "{error}");
    platform.create(&key(1), &spec(5, 128 * MIB)).unwrap();
}

#[test]
fn old_file_system_signatures_are_cleared() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    for mode in [Mode::Fsdax, Mode::Sector, Mode::Devdax] {
        let spec = NamespaceSpec { mode, ..spec(1, 128 * MIB) };
        let made = platform.create(&key(1), &spec).unwrap();
        let (path, size) = (host.device(&made.device.unwrap().name), made.usable.unwrap());
        let places =
            [0, 1024, 64 << 10, 2 * MIB, 8 * MIB - 4, size - 8 * MIB, size - 512, size - 4];
        for at in places {
            fs::File::options().write(true).open(&path).unwrap().write_all_at(b"mark", at).unwrap();
        }
        platform.destroy(&key(1), uuid(1)).unwrap();
        let made = platform.create(&key(1), &spec).unwrap();
        let file = fs::File::open(host.device(&made.device.unwrap().name)).unwrap();
        for at in places {
            let mut found = [1; 4];
            file.read_exact_at(&mut found, at).unwrap();
            assert_eq!(found, [0; 4], "{mode} at {at}");
        }
        platform.destroy(&key(1), uuid(1)).unwrap();
    }
}

/// Row: P51.
#[test]
fn a_namespace_in_use_is_not_removed() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    platform.create(&key(1), &spec(1, 128 * MIB)).unwrap();
    platform.create(&key(1), &NamespaceSpec { mode: Mode::Devdax, ..spec(2, 128 * MIB) }).unwrap();
    let writes = host.writes();
    host.mount("pmem0", Some("/mnt/data"));
    let error = platform.destroy(&key(1), uuid(1)).unwrap_err();
    assert!(
        error.to_string().ends_with("(namespace0.0) is in use: mounted at /mnt/data"),
        "{error}"
    );
    let error =
        platform.zeroing(&platform.read().unwrap().namespace(uuid(1)).unwrap().1.clone(), 0);
    assert!(matches!(error, Err(PlatformError::InUse { .. })), "{error:?}");
    host.mount("pmem0", None);
    for device in ["pmem0", "dax0.1"] {
        host.set_open(device, true);
        let number = if device == "pmem0" { 1 } else { 2 };
        let error = platform.destroy(&key(1), uuid(number)).unwrap_err();
        assert!(error.to_string().contains("open in process 77 (database)"), "{error}");
        host.set_open(device, false);
    }
    let maps = host.places().proc.join("77/maps");
    fs::write(&maps, "7f00-7f01 rw-s 00000000 00:06 9   /dev/dax0.1\n").unwrap();
    assert!(platform.destroy(&key(1), uuid(2)).is_err());
    fs::write(&maps, "").unwrap();
    assert_eq!((host.writes(), host.torn()), (writes, Vec::new()));
    assert!(
        platform.destroy(&key(1), uuid(1)).unwrap() && platform.destroy(&key(1), uuid(2)).unwrap()
    );
}

/// The maker dies at each of its writes, and the host keeps running or reboots: the rest is found
/// by its uuid and removed, whatever its state, and then it can be made.
#[test]
fn making_survives_a_crash_at_every_step() {
    for mode in [Mode::Fsdax, Mode::Devdax, Mode::Sector, Mode::Raw] {
        for reboots in [false, true] {
            let mut steps = 0;
            loop {
                let host = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB)]);
                let platform = host.platform();
                platform.create(&key(1), &spec(1, 64 * MIB)).unwrap();
                let spec = NamespaceSpec { mode, ..spec(2, 128 * MIB) };
                host.stop_after(steps);
                let made = platform.create(&key(1), &spec);
                if reboots {
                    host.reboot()
                } else {
                    host.restart()
                }
                if made.is_ok() {
                    break;
                }
                platform.destroy(&key(1), uuid(2)).unwrap();
                let left = platform.read().unwrap();
                assert_eq!(left.regions[0].available, GIB - 64 * MIB, "{mode} {steps} {reboots}");
                assert!(left.namespace(uuid(1)).unwrap().1.device.is_some());
                let made = platform.create(&key(1), &spec).unwrap();
                assert_eq!(made.mode, mode);
                assert!(host.torn().is_empty());
                steps += 1;
            }
            assert!(steps >= 4, "{mode}: {steps} steps");
        }
    }
}

#[test]
fn removing_survives_a_crash_at_every_step() {
    for mode in [Mode::Fsdax, Mode::Devdax, Mode::Sector, Mode::Raw] {
        for reboots in [false, true] {
            let mut steps = 0;
            loop {
                let host = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB)]);
                let platform = host.platform();
                platform.create(&key(1), &spec(1, 64 * MIB)).unwrap();
                platform.create(&key(1), &NamespaceSpec { mode, ..spec(2, 128 * MIB) }).unwrap();
                host.stop_after(steps);
                let removed = platform.destroy(&key(1), uuid(2));
                if reboots {
                    host.reboot()
                } else {
                    host.restart()
                }
                if removed.is_ok() {
                    break;
                }
                platform.destroy(&key(1), uuid(2)).unwrap();
                let left = platform.read().unwrap();
                assert_eq!(left.regions[0].available, GIB - 64 * MIB, "{mode} {steps} {reboots}");
                assert!(left.namespace(uuid(1)).unwrap().1.device.is_some());
                steps += 1;
            }
            assert!(steps >= 2, "{mode}: {steps} steps");
        }
    }
}

/// Each write is refused in turn: the error says so, and nothing is left.
#[test]
fn steps_that_the_kernel_refuses_are_undone() {
    let refusals = [
        ("namespace0.0/uuid", libc::EBUSY),
        ("namespace0.0/alt_name", libc::EINVAL),
        ("namespace0.0/size", libc::ENOSPC),
        ("pfn0.0/mode", libc::EBUSY),
        ("pfn0.0/align", libc::EINVAL),
        ("pfn0.0/uuid", libc::EBUSY),
        ("nd_pmem/bind", libc::ENOMEM),
    ];
    for (end, errno) in refusals {
        let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
        host.refuse(end, errno);
        let error = host.platform().create(&key(1), &spec(1, 64 * MIB)).unwrap_err();
        if end == "namespace0.0/size" {
            // The same file takes it back, where there was nothing yet.
            assert_eq!(error.os_error(), Some(errno));
        }
        assert!(error.text().contains(end.split('/').next_back().unwrap()), "{}", error.text());
        let left = host.platform().read().unwrap();
        assert_eq!(left.regions[0].available, GIB, "{end}");
        assert!(left.namespaces().next().is_none(), "{end}");
    }
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

#[test]
fn the_namespace_of_a_region_without_labels_is_converted() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB).without_labels()]);
    let platform = host.platform();
    let before = platform.read().unwrap();
    let bare = &before.regions[0].namespaces[0];
    assert_eq!((bare.mode, bare.uuid, bare.size), (Mode::Raw, None, GIB));
    host.mount("pmem0", Some("/mnt"));
    let spec = NamespaceSpec { mode: Mode::Devdax, map: PageMap::Memory, ..spec(1, GIB) };
    assert!(platform.convert(&key(1), &spec).unwrap_err().to_string().contains("mounted at /mnt"));
    host.mount("pmem0", None);
    host.refuse("dax_pmem/bind", libc::ENOMEM);
    let error = platform.convert(&key(1), &spec).unwrap_err();
    assert_eq!(error.os_error(), Some(libc::ENOMEM), "{}", error.text());
    assert_eq!(platform.read().unwrap(), before);
    let host = FakeHost::new(&[FakeSpec::new(1, GIB).without_labels()]);
    let made = host.platform().convert(&key(1), &spec).unwrap();
    assert_eq!((made.mode, made.size, made.uuid), (Mode::Devdax, GIB, Some(uuid(1))));
    host.reboot();
    let inventory = host.platform().read().unwrap();
    assert_eq!(inventory.namespace(uuid(1)).unwrap().1.mode, Mode::Devdax);
    assert!(
        host.platform()
            .destroy(&key(1), uuid(1))
            .unwrap_err()
            .to_string()
            .contains("has no labels")
    );
}

/// Row: P10.
#[test]
fn the_rest_is_left_byte_for_byte() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    let other = platform.create(&key(1), &spec(1, 256 * MIB)).unwrap();
    let path = host.device(&other.device.unwrap().name);
    fs::File::options().write(true).open(&path).unwrap().write_all_at(b"theirs", 7).unwrap();
    let region = platform.read().unwrap().regions.remove(0);
    let step = Step::of(&region, HUGE_PAGE, Rule::Formula).unwrap();
    let half = share::share(&region, 50, 0, step);
    assert_eq!(half.to_make, 512 * MIB);
    platform.create(&key(1), &spec(2, half.to_make)).unwrap();
    let after = platform.read().unwrap();
    assert_eq!(after.regions[0].available, 256 * MIB);
    assert_eq!(after.namespace(uuid(1)).unwrap().1.size, 256 * MIB);
    let mut found = [0; 6];
    fs::File::open(&path).unwrap().read_exact_at(&mut found, 7).unwrap();
    assert_eq!(&found, b"theirs");
}

#[test]
fn two_makers_wait_for_each_other() {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    std::thread::scope(|scope| {
        for number in 1..=4 {
            let platform = host.platform();
            scope.spawn(move || platform.create(&key(1), &spec(number, 64 * MIB)).unwrap());
        }
    });
    let inventory = host.platform().read().unwrap();
    assert_eq!(inventory.namespaces().count(), 4);
}
