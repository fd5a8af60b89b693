//! Namespaces that are made, changed and removed.

use std::fs;
use std::os::unix::fs::FileExt;

use super::super::provision::NamespaceSpec;
use super::super::step::{HUGE_PAGE, Rule, Step};
use super::super::testing::{FakeHost, FakeSpec};
use super::super::*;
use super::*;
use super::{GIB, MIB, key, spec, uuid};

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
