//! The contract that every coordinator keeps, on those that need no other machine.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use blockd_hosts::folder::Folder;
use blockd_hosts::simulated::Array;
use blockd_hosts::{CellName, Coordinator, Fence as _, Holder, HostNumber, HostsError, Key, Owner};
use blockd_testkit::folder::Folder as TestFolder;

const MIB: u64 = 1 << 20;
const HOST: HostNumber = HostNumber(1);
const OTHER: HostNumber = HostNumber(2);

fn name(text: &str) -> CellName {
    CellName::parse(text).unwrap()
}

const fn owner(host: HostNumber, generation: u64) -> Owner {
    Owner { host, generation }
}

/// The life of a cell on one host: each call is repeated, and has to end in the same state.
fn lives(coordinator: &dyn Coordinator) {
    let (one, none) = (name("one"), name("none"));
    assert!(coordinator.cells().unwrap().is_empty());
    let made = coordinator.create(&one, 8 * MIB).unwrap();
    assert_eq!((made.size, &made.holder), (8 * MIB, &Holder::This));
    assert_eq!(std::fs::metadata(&made.path).unwrap().len(), 8 * MIB);
    let again = coordinator.create(&one, 8 * MIB).unwrap_err();
    assert!(matches!(again, HostsError::Exists { .. }), "{again}");
    assert_eq!(coordinator.cells().unwrap(), std::slice::from_ref(&made));
    assert!(made.is_new);
    for _ in 0..2 {
        coordinator.finish(&one).unwrap();
        assert!(!coordinator.cells().unwrap()[0].is_new);
    }
    for _ in 0..2 {
        coordinator.mark_new(&one).unwrap();
        assert!(coordinator.cells().unwrap()[0].is_new);
    }
    coordinator.finish(&one).unwrap();
    for _ in 0..2 {
        assert_eq!(coordinator.acquire(&one).unwrap().holder, Holder::This);
        assert_eq!(coordinator.extend(&one, 16 * MIB).unwrap(), 16 * MIB);
    }
    // It does not become smaller.
    assert_eq!(coordinator.extend(&one, MIB).unwrap(), 16 * MIB);
    assert_eq!(std::fs::metadata(&made.path).unwrap().len(), 16 * MIB);
    let too_large = coordinator.extend(&one, u64::MAX / 2).unwrap_err();
    assert!(matches!(too_large, HostsError::NoSpace { .. }), "{too_large}");
    for _ in 0..2 {
        coordinator.release(&one).unwrap();
        assert_eq!(coordinator.cells().unwrap()[0].holder, Holder::Free);
    }
    for refused in [
        coordinator.extend(&one, 32 * MIB).map(drop),
        coordinator.mark_new(&one),
        coordinator.remove(&one),
    ] {
        assert!(matches!(refused, Err(HostsError::NotHeld { .. })), "{refused:?}");
    }
    let absent = [coordinator.acquire(&none).map(drop), coordinator.release(&none)];
    for refused in absent.into_iter().chain([coordinator.remove(&none)]) {
        assert!(matches!(refused, Err(HostsError::NotFound { .. })), "{refused:?}");
    }
    for node in [7, 7, u32::MAX] {
        coordinator.publish_node(HOST, node).unwrap();
        assert_eq!(coordinator.nodes().unwrap(), [(HOST, node)]);
    }
    assert_eq!(coordinator.address_of(HOST).unwrap(), None);
    for address in ["host-a:7020", "[::1]:7020"] {
        coordinator.publish_address(HOST, address).unwrap();
        assert_eq!(coordinator.address_of(HOST).unwrap().as_deref(), Some(address));
    }
    coordinator.publish_address(HOST, "").unwrap();
    assert_eq!(coordinator.address_of(HOST).unwrap(), None);
    coordinator.acquire(&one).unwrap();
    coordinator.remove(&one).unwrap();
    assert!(coordinator.cells().unwrap().is_empty() && !made.path.exists());
}

#[test]
fn a_cell_lives_in_a_folder() {
    let folder = TestFolder::new("cells").unwrap();
    lives(&Folder::new(folder.path().to_owned(), HOST));
}

#[test]
fn a_cell_lives_on_a_simulated_array() {
    let folder = TestFolder::new("cells").unwrap();
    lives(&Array::new(folder.path().to_owned(), 64 * MIB).member(HOST));
}

#[test]
fn a_folder_remembers_its_cells_and_takes_other_files_for_none() {
    let folder = TestFolder::new("cells").unwrap();
    Folder::new(folder.path().to_owned(), HOST).create(&name("one"), MIB).unwrap();
    for other in ["file", "cell-", "cell-UPPER", "cell-one_tdata"] {
        std::fs::write(folder.path().join(other), "").unwrap();
    }
    let cells = Folder::new(folder.path().to_owned(), HOST).cells().unwrap();
    assert_eq!(cells.len(), 1);
    assert_eq!((cells[0].name.as_str(), &cells[0].holder), ("one", &Holder::This));
}

#[test]
fn one_host_has_a_cell_until_it_gives_it_back_or_its_membership_ends() {
    let folder = TestFolder::new("cells").unwrap();
    let array = Array::new(folder.path().to_owned(), 64 * MIB);
    let (this, other) = (array.member(HOST), array.member(OTHER));
    let one = name("one");
    this.create(&one, MIB).unwrap();
    let refused = other.acquire(&one).unwrap_err();
    assert_eq!(refused.to_string(), "cell one is held by host 1");
    assert_eq!(other.cells().unwrap()[0].holder, Holder::Other(owner(HOST, 0)));
    this.release(&one).unwrap();
    other.acquire(&one).unwrap();
    array.lapse(OTHER);
    this.acquire(&one).unwrap();
    let refused = other.extend(&one, 2 * MIB).unwrap_err();
    assert!(matches!(refused, HostsError::NotHeld { .. }), "{refused}");
}

#[test]
fn a_lease_from_before_a_boot_is_free_and_a_host_without_a_key_can_do_nothing() {
    let folder = TestFolder::new("cells").unwrap();
    let array = Array::new(folder.path().to_owned(), 64 * MIB);
    let (this, other) = (array.member(HOST), array.member(OTHER));
    let one = name("one");
    this.create(&one, MIB).unwrap();
    array.boot(HOST);
    assert_eq!(this.cells().unwrap()[0].holder, Holder::Other(owner(HOST, 0)));
    assert_eq!(this.acquire(&one).unwrap().holder, Holder::This);
    this.join(Key::new(HOST, 7), &[], false).unwrap();
    let refused = other.cells().unwrap_err();
    assert!(matches!(refused, HostsError::Away { .. }), "{refused}");
}

#[test]
fn the_lease_of_a_fenced_host_is_freed_and_no_other() {
    let folder = TestFolder::new("cells").unwrap();
    let array = Array::new(folder.path().to_owned(), 64 * MIB);
    let (this, other) = (array.member(HOST), array.member(OTHER));
    let one = name("one");
    this.create(&one, MIB).unwrap();
    for of in [owner(OTHER, 0), owner(HOST, 1)] {
        other.free(&one, of).unwrap();
        other.acquire(&one).unwrap_err();
    }
    other.free(&one, owner(HOST, 0)).unwrap();
    assert_eq!(other.acquire(&one).unwrap().holder, Holder::This);
}

#[test]
fn a_host_that_was_fenced_fences_no_other() {
    let folder = TestFolder::new("cells").unwrap();
    let array = Array::new(folder.path().to_owned(), 64 * MIB);
    let (this, other) = (array.member(HOST), array.member(OTHER));
    let (own, key) = (Key::new(HOST, 7), Key::new(OTHER, 9));
    this.join(own, &[], false).unwrap();
    other.join(key, &[], false).unwrap();
    assert!(this.fence(own, key).unwrap());
    assert!(!this.fence(own, key).unwrap(), "another call has removed it");
    assert!(this.is_member(own).unwrap() && !other.is_member(key).unwrap());
    let refused = other.fence(key, own).unwrap_err();
    assert!(matches!(refused, HostsError::Fenced { .. }), "{refused}");
}

#[test]
fn one_daemon_of_a_folder_has_a_cell() {
    let folder = TestFolder::new("cells").unwrap();
    let this = Folder::new(folder.path().to_owned(), HOST);
    let other = Folder::new(folder.path().to_owned(), OTHER);
    let one = name("one");
    this.create(&one, MIB).unwrap();
    assert_eq!(other.cells().unwrap()[0].holder, Holder::Other(owner(HOST, 0)));
    let refused = other.acquire(&one).unwrap_err();
    assert_eq!(refused.to_string(), "cell one is held by host 1");
    // Another's lease is not given back.
    other.release(&one).unwrap();
    assert_eq!(this.cells().unwrap()[0].holder, Holder::This);
    this.release(&one).unwrap();
    assert_eq!(other.acquire(&one).unwrap().holder, Holder::This);
    // As older versions, which knew one daemon, have left it.
    std::fs::write(folder.path().join("cell-one_held"), "").unwrap();
    assert_eq!(this.cells().unwrap()[0].holder, Holder::This);
}
