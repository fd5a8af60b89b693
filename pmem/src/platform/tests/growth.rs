//! Growing: at its end, whatever is free in front.

use std::fs::File;

use super::super::choose::Reason;
use super::*;

const OWN: &[u8] = b"its own";

/// Namespaces with these sizes in MiB, one after the other, in a region of 1 GiB. Those without a
/// number are removed again.
fn host(parts: &[(Option<u8>, u64)]) -> (std::sync::Arc<FakeHost>, Platform) {
    let host = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let platform = host.platform();
    for (at, (number, mib)) in (100..).zip(parts) {
        let map = PageMap::Memory;
        let spec = NamespaceSpec { map, ..spec(number.unwrap_or(at), mib * MIB) };
        platform.create(&key(1), &spec).unwrap();
    }
    for at in (100..).zip(parts).filter(|(_, part)| part.0.is_none()).map(|(at, _)| at) {
        assert!(platform.destroy(&key(1), uuid(at)).unwrap());
    }
    (host, platform)
}

fn namespace(platform: &Platform, number: u8) -> Namespace {
    platform.read().unwrap().namespace(uuid(number)).unwrap().1.clone()
}

fn device(host: &FakeHost, platform: &Platform, number: u8) -> File {
    let device = namespace(platform, number).device.unwrap();
    File::options().read(true).write(true).open(host.device(&device.name)).unwrap()
}

/// Its begin and end in MiB, with the content of its front.
fn place(host: &FakeHost, platform: &Platform, number: u8) -> (u64, u64) {
    let one = namespace(platform, number);
    let mut found = [0; OWN.len()];
    device(host, platform, number).read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, OWN);
    let start = one.start.unwrap();
    (start / MIB, (start + one.size) / MIB)
}

/// Grows a namespace into space without old data.
pub(super) fn grow(platform: &Platform, number: u8, size: u64) -> Result<Namespace, PlatformError> {
    platform.grow_bare(uuid(number), size)?;
    platform.restore(uuid(number), size, None)
}

/// The kernel would take the space in front of it, and it would begin elsewhere.
#[test]
fn a_namespace_grows_at_its_end_despite_free_space_in_front() {
    for (in_front, more) in [(0, 48), (32, 48), (48, 48), (64, 48), (256, 16), (400, 480)] {
        let mut parts = vec![(Some(1), 64)];
        if in_front > 0 {
            parts.insert(0, (None, in_front));
        }
        let (host, platform) = host(&parts);
        device(&host, &platform, 1).write_all_at(OWN, 0).unwrap();
        let size = (64 + more) * MIB;
        let grown = grow(&platform, 1, size).unwrap();
        assert_eq!((grown.size, grown.mode), (size, Mode::Fsdax));
        let now = place(&host, &platform, 1);
        assert_eq!(now, (in_front, in_front + 64 + more), "{in_front} in front");
    }
}

/// More is free in front than behind: the kernel cannot be made to take the space behind.
#[test]
fn a_namespace_does_not_grow_where_the_kernel_would_extend_it_in_front() {
    let parts = [(None, 128), (Some(1), 64), (None, 64), (Some(2), 16)];
    let (host, platform) = host(&parts);
    device(&host, &platform, 1).write_all_at(OWN, 0).unwrap();
    let writes = host.writes();
    let asked = [
        grow(&platform, 1, 112 * MIB).unwrap_err(),
        platform.grow_bare(uuid(1), 112 * MIB).unwrap_err(),
    ];
    for error in asked {
        let PlatformError::NoRoom(refused) = &error else { panic!("{error}") };
        let (front, behind) = (128 * MIB, 64 * MIB);
        assert_eq!(refused.refusals[0].reason, Reason::InFront { front, behind });
        assert!(refused.is_space() && error.to_string().contains("in front of it"), "{error}");
    }
    // Too much for the space behind it, and for the whole region.
    for size in [160 * MIB, 2 * GIB] {
        assert!(matches!(grow(&platform, 1, size), Err(PlatformError::NoRoom(_))));
    }
    assert_eq!((host.writes(), host.torn()), (writes, Vec::new()));
    assert_eq!(place(&host, &platform, 1), (128, 192));
    // Once that is taken it can.
    platform.create(&key(1), &NamespaceSpec { map: PageMap::Memory, ..spec(3, 96 * MIB) }).unwrap();
    grow(&platform, 1, 112 * MIB).unwrap();
    assert_eq!(place(&host, &platform, 1), (128, 240));
}

/// The kernel gives it a size, and fails to write that down: the first of two, or the second.
#[test]
fn a_size_that_was_not_written_down_is_not_kept() {
    for failures in 1..=5 {
        let (host, platform) = host(&[(None, 64), (Some(1), 64)]);
        device(&host, &platform, 1).write_all_at(OWN, 0).unwrap();
        for _ in 0..failures {
            host.refuse_after("size", libc::EIO);
        }
        let error = grow(&platform, 1, 112 * MIB).unwrap_err();
        assert_eq!(error.os_error(), Some(libc::EIO), "{error}");
        let now = namespace(&platform, 1);
        if failures < 3 {
            assert_eq!((now.size, now.mode, now.device.is_some()), (64 * MIB, Mode::Fsdax, true));
        } else {
            // The stored state is unknown. Restoring writes it again, and fails, and then succeeds.
            assert!(matches!(error, PlatformError::NotTakenBack { .. }), "{error}");
            assert_eq!((now.mode, now.device), (Mode::Raw, None));
            platform.ensure_enabled(uuid(1)).unwrap();
            let restored = platform.restore(uuid(1), 112 * MIB, None);
            assert_eq!(restored.is_err(), failures == 5);
            platform.restore(uuid(1), 112 * MIB, None).unwrap();
        }
        assert_eq!(place(&host, &platform, 1), (64, 128), "{failures} failures");
    }
}

/// A growth that died between two sizes: the namespace keeps its offset, and gets no more than
/// requested.
#[test]
fn wherever_the_writer_dies_it_begins_where_it_did() {
    let mut steps = 0;
    let mut had_more = false;
    loop {
        let (host, platform) = host(&[(None, 64), (Some(1), 64)]);
        device(&host, &platform, 1).write_all_at(OWN, 0).unwrap();
        host.stop_after(steps);
        let grown = grow(&platform, 1, 112 * MIB);
        host.restart();
        had_more |= namespace(&platform, 1).size > 112 * MIB;
        platform.ensure_enabled(uuid(1)).unwrap();
        platform.restore(uuid(1), 112 * MIB, None).unwrap();
        let (start, end) = place(&host, &platform, 1);
        assert!(start == 64 && [128, 176].contains(&end), "step {steps}: {start} to {end}");
        if grown.is_ok() {
            break;
        }
        steps += 1;
    }
    assert!(steps > 6 && had_more, "{steps} steps");
}

/// Without memory for the metadata of more pages a namespace keeps its former size.
#[test]
fn one_that_can_t_be_enabled_larger_is_as_it_was() {
    for in_front in [16, 64] {
        let (host, platform) = host(&[(None, in_front), (Some(1), 64)]);
        device(&host, &platform, 1).write_all_at(OWN, 0).unwrap();
        host.set_most(Some(64 * MIB));
        platform.grow_bare(uuid(1), 112 * MIB).unwrap();
        platform.restore(uuid(1), 112 * MIB, Some(64 * MIB)).unwrap_err();
        assert_eq!(namespace(&platform, 1).mode, Mode::Fsdax);
        assert_eq!(place(&host, &platform, 1), (in_front, in_front + 64));
        host.set_most(None);
        grow(&platform, 1, 112 * MIB).unwrap();
        assert_eq!(place(&host, &platform, 1), (in_front, in_front + 112));
    }
}

/// A container that has the device's node may open it at any time.
#[test]
fn a_node_bound_elsewhere_is_in_use() {
    let (host, platform) = host(&[(Some(1), 64)]);
    let name = namespace(&platform, 1).device.unwrap().name;
    host.show_at(&name, Some("/pods/volume"));
    let inventory = platform.read_with_users().unwrap();
    let users = &inventory.namespace(uuid(1)).unwrap().1.users;
    assert_eq!(users[..], [User::Mount { point: "/pods/volume".to_owned() }]);
    let error = grow(&platform, 1, 112 * MIB).unwrap_err();
    assert!(error.to_string().contains("/pods/volume"), "{error}");
    platform.destroy(&key(1), uuid(1)).unwrap_err();
    // A removed node is still available in the container that has it.
    host.show_at(&format!("{name}//deleted"), Some("/pods/volume"));
    host.show_at(&name, None);
    grow(&platform, 1, 112 * MIB).unwrap_err();
    host.show_at(&format!("{name}//deleted"), None);
    grow(&platform, 1, 112 * MIB).unwrap();
}

/// A namespace that was removed since the scan, and another has its name and numbers.
#[test]
fn a_device_that_is_anothers_by_now_is_not_overwritten() {
    let (host, platform) = host(&[(Some(1), 64)]);
    let seen = namespace(&platform, 1);
    platform.zeroing(&seen, 0).unwrap();
    platform.destroy(&key(1), uuid(1)).unwrap();
    host.reboot();
    platform.create(&key(1), &NamespaceSpec { map: PageMap::Memory, ..spec(2, 64 * MIB) }).unwrap();
    let now = namespace(&platform, 2);
    assert_eq!((&now.name, &now.device), (&seen.name, &seen.device));
    let error = platform.zeroing(&seen, 0).unwrap_err();
    assert!(error.to_string().contains("another device"), "{error}");
}

/// The kernel keeps a uuid as long as it could not remove the label of it.
#[test]
fn the_rest_of_a_namespace_without_bytes_is_removed_with_it() {
    let (host, platform) = host(&[]);
    host.stop_after(2);
    platform.create(&key(1), &spec(1, 64 * MIB)).unwrap_err();
    host.restart();
    let seed = host.places().sys.join("bus/nd/devices/region0/namespace0.0/uuid");
    assert_eq!(fs::read_to_string(&seed).unwrap().trim(), uuid(1).to_string());
    assert!(!platform.destroy(&key(1), uuid(1)).unwrap());
    assert_eq!(fs::read_to_string(&seed).unwrap().trim(), "");
}
