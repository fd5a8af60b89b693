//! Cells of two hosts that share a simulated array, and of one host in a folder.

use std::sync::Arc;

use blockd_api::v1;
use blockd_hosts::simulated::Array;
use blockd_hosts::{CellName, Coordinator as _, Fence as _, HostNumber, Key};
use blockd_mapper::error::MapperError;
use tonic::Code;

use super::testing::{Folder, Rig, folder, folder_on_disk};

pub(super) const GROUP: &str = "san";
pub(super) const THIS: HostNumber = HostNumber(1);
pub(super) const OTHER: HostNumber = HostNumber(2);
const OTHER_NODE: &str = "4f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";
pub(super) const CELL: i64 = 64 << 20;

/// Two hosts with their daemons, and the array that both reach.
pub(super) struct Hosts {
    pub(super) array: Array,
    pub(super) this: Rig,
    pub(super) other: Rig,
    _folder: Folder,
}

impl Hosts {
    pub(super) async fn new() -> Self {
        let place = folder_on_disk();
        let array = Array::new(place.path().to_owned(), 1024 << 20);
        let this = Rig::without_pool(folder()).await;
        let other = Rig::of_other_node(OTHER_NODE).await;
        let mut hosts = Self { array, this, other, _folder: place };
        for (host, is_this) in [(THIS, true), (OTHER, false)] {
            let rig = if is_this { &mut hosts.this } else { &mut hosts.other };
            rig.control.0.groups.add_simulated(GROUP, hosts.array.member(host));
            let request =
                v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
            let group = rig.client.add_volume_group(request).await.unwrap().into_inner();
            let group = group.group.unwrap();
            assert_eq!(group.failure, "");
            assert_eq!(Key::parse(&group.key).unwrap().host(), host);
        }
        hosts
    }

    /// This host makes a cell, with a volume in it.
    pub(super) async fn create(&mut self, cell: &str) {
        let made = self.this.client.create_cell(creation(cell)).await.unwrap().into_inner();
        assert!(made.changed);
        assert_eq!(made.cell.unwrap().state(), v1::CellState::Open);
        make_volume(&mut self.this, cell, "v").await;
    }

    /// This host was switched off and on, and its daemon has started.
    pub(super) async fn boot_this(&mut self) {
        boot(&self.array, &mut self.this, THIS).await;
    }

    /// The same of the other host.
    pub(super) async fn boot_other(&mut self) {
        boot(&self.array, &mut self.other, OTHER).await;
    }

    /// This host stops at once: nothing is closed in order. Its locks are free.
    pub(super) async fn die(&self, cell: &str) {
        die(&self.this, cell).await;
    }
}

/// A host stops at once. Its locks are free.
pub(super) async fn die(rig: &Rig, cell: &str) {
    let handle = rig.control.pool(cell).unwrap();
    let problem = "the host has died".to_owned();
    handle.halt(MapperError::Device { name: "host".to_owned(), problem });
    handle.abandon().await;
}

async fn boot(array: &Array, rig: &mut Rig, host: HostNumber) {
    array.boot(host);
    let control = &rig.control;
    let group = control.group(GROUP).unwrap();
    control.0.groups.change(&group, |member| member.forget_boot()).unwrap();
    for known in control.known_pools() {
        control.forget_pool(&known.config.name).await.unwrap();
    }
    let request = v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    rig.client.add_volume_group(request).await.unwrap();
}

pub(super) fn creation(name: &str) -> v1::CreateCellRequest {
    v1::CreateCellRequest {
        group: GROUP.to_owned(),
        name: name.to_owned(),
        device_bytes: CELL,
        extent_size: 64 << 10,
        only_begun: false,
    }
}

pub(super) fn taking(name: &str, fence: bool) -> v1::TakeCellRequest {
    let (group, name) = (GROUP.to_owned(), name.to_owned());
    v1::TakeCellRequest { group, name, fence, ..Default::default() }
}

pub(super) fn releasing(name: &str) -> v1::ReleaseCellRequest {
    v1::ReleaseCellRequest { group: GROUP.to_owned(), name: name.to_owned(), force: false }
}

pub(super) async fn make_volume(rig: &mut Rig, pool: &str, name: &str) {
    let request = v1::CreateVolumeRequest {
        pool: pool.to_owned(),
        name: name.to_owned(),
        size_bytes: 1 << 20,
        ..Default::default()
    };
    rig.client.create_volume(request).await.unwrap();
}

pub(super) async fn volumes(rig: &mut Rig, pool: &str) -> Vec<String> {
    let request = v1::ListVolumesRequest { pool: pool.to_owned(), ..Default::default() };
    let listed = rig.client.list_volumes(request).await.unwrap().into_inner();
    listed.volumes.into_iter().map(|volume| volume.name).collect()
}

pub(super) async fn group(rig: &mut Rig) -> v1::VolumeGroup {
    let request = v1::ListVolumeGroupsRequest { name: GROUP.to_owned(), ..Default::default() };
    let listed = rig.client.list_volume_groups(request).await.unwrap().into_inner();
    listed.groups.into_iter().next().unwrap()
}

pub(super) async fn states(rig: &mut Rig) -> Vec<(String, v1::CellState, u32)> {
    let cells = group(rig).await.cells;
    cells.into_iter().map(|cell| (cell.name.clone(), cell.state(), cell.holder)).collect()
}

#[tokio::test]
async fn a_cell_goes_from_host_to_host_with_its_volumes() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let again = hosts.this.client.create_cell(creation("one")).await.unwrap().into_inner();
    assert!(!again.changed);
    let held = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
    assert_eq!(held.code(), Code::FailedPrecondition);
    assert!(held.message().contains("cell one is held by host 1: release it there"), "{held}");
    let elsewhere = ("one".to_owned(), v1::CellState::Elsewhere, 1);
    assert_eq!(states(&mut hosts.other).await, [elsewhere]);
    for changed in [true, false] {
        let given = hosts.this.client.release_cell(releasing("one")).await.unwrap().into_inner();
        assert_eq!(given.changed, changed);
    }
    assert!(hosts.this.control.known("one").is_err(), "it is known where it is not");
    for changed in [true, false] {
        let taken = hosts.other.client.take_cell(taking("one", false)).await.unwrap().into_inner();
        assert_eq!((taken.changed, taken.fenced_host), (changed, 0));
    }
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    let open = ("one".to_owned(), v1::CellState::Open, 2);
    assert_eq!(states(&mut hosts.other).await, [open]);
    let error = hosts.this.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("held by host 2"), "{error}");
}

#[tokio::test]
async fn a_cell_of_a_dead_host_is_taken_after_a_fence_and_not_by_an_expired_lease() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    // Its lease may have expired or not: a fence is needed, and enough.
    let error = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("held by host 1"), "an expired lease is no fence: {error}");
    let taken = hosts.other.client.take_cell(taking("one", true)).await.unwrap().into_inner();
    assert_eq!((taken.changed, taken.fenced_host), (true, 1));
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    // The host that was fenced finds that out by itself, and is let nowhere.
    hosts.this.control.watch_groups().await;
    assert!(group(&mut hosts.this).await.failure.contains("this host was fenced"));
    hosts.other.client.release_cell(releasing("one")).await.unwrap();
    let error = hosts.this.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("this host was fenced"), "{error}");
}

#[tokio::test]
async fn a_host_that_was_not_the_one_to_fence_waits_for_the_lease() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.create("two").await;
    hosts.die("one").await;
    hosts.die("two").await;
    let third = hosts.array.member(HostNumber(3));
    let (own, dead) = (Key::new(HostNumber(3), 7), group(&mut hosts.this).await.key);
    third.join(own, &[], true).unwrap();
    assert!(third.fence(own, Key::parse(&dead).unwrap()).unwrap());
    let array = hosts.array.clone();
    let expiry = tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        array.lapse(THIS);
    });
    let taken = hosts.other.client.take_cell(taking("one", true)).await.unwrap().into_inner();
    assert!(taken.changed && expiry.is_finished(), "the lease was taken before it expired");
}

#[tokio::test]
async fn a_host_that_was_fenced_stops_all_of_its_cells_and_registers_no_more() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.create("two").await;
    let key = Key::parse(&group(&mut hosts.this).await.key).unwrap();
    let own = Key::parse(&group(&mut hosts.other).await.key).unwrap();
    hosts.array.member(OTHER).fence(own, key).unwrap();
    // Also where the fence is met by a call, and not by the watch.
    let error = hosts.this.client.create_cell(creation("three")).await.unwrap_err();
    assert!(error.message().contains("this host was fenced"), "{error}");
    assert!(!hosts.array.member(THIS).is_member(key).unwrap(), "the key is registered again");
    hosts.this.control.watch_groups().await;
    for cell in ["one", "two"] {
        let failure = hosts.this.control.known(cell).unwrap().failure().unwrap_or_default();
        assert!(failure.contains("is not this host's any more"), "{cell}: {failure:?}");
    }
}

#[tokio::test]
async fn a_host_that_was_restarted_has_a_new_key_and_takes_its_own_cells_back() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let before = Key::parse(&group(&mut hosts.this).await.key).unwrap();
    hosts.die("one").await;
    hosts.boot_this().await;
    let free = ("one".to_owned(), v1::CellState::Free, 0);
    assert_eq!(states(&mut hosts.this).await, [free]);
    let taken = hosts.this.client.take_cell(taking("one", false)).await.unwrap().into_inner();
    assert!(taken.changed && taken.fenced_host == 0);
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
    let after = Key::parse(&group(&mut hosts.this).await.key).unwrap();
    let member = hosts.array.member(THIS);
    assert!(after != before && member.is_member(after).unwrap());
    assert!(!member.is_member(before).unwrap(), "both keys are registered");
}

#[tokio::test]
async fn a_host_that_was_restarted_recovers_its_cell_for_the_one_that_asks() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    hosts.boot_this().await;
    let asked = v1::HandOverCellRequest { only_unused: true, ..handing() };
    assert!(hosts.this.control.hand_over(asked.clone()).await.unwrap());
    let taken = hosts.other.client.take_cell(taking("one", false)).await.unwrap().into_inner();
    assert!(taken.changed && taken.fenced_host == 0);
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    // By then it is none of this host's.
    assert!(!hosts.this.control.hand_over(asked).await.unwrap());
}

#[tokio::test]
async fn a_host_that_was_fenced_comes_back_by_a_restart() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    hosts.other.client.take_cell(taking("one", true)).await.unwrap();
    hosts.this.control.watch_groups().await;
    hosts.this.client.take_cell(taking("one", false)).await.unwrap_err();
    hosts.boot_this().await;
    hosts.other.client.release_cell(releasing("one")).await.unwrap();
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
}

#[tokio::test]
async fn a_host_that_came_back_during_a_takeover_is_fenced_again() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    let group = hosts.other.control.group(GROUP).unwrap();
    let fenced = group.fence(group.key_of(THIS).unwrap()).unwrap();
    assert!(fenced.was_first && fenced.is_ours);
    let note = |member: &mut super::groups::Membership| member.note_removed(fenced.key);
    hosts.other.control.0.groups.change(&group, note).unwrap();
    hosts.boot_this().await;
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    // The fence of the former incarnation is none of this one, whatever was noted.
    let taken = hosts.other.client.take_cell(taking("one", true)).await;
    let key = Key::parse(&self::group(&mut hosts.this).await.key).unwrap();
    assert!(!hosts.array.member(THIS).is_member(key).unwrap(), "{taken:?}");
}

#[tokio::test]
async fn a_takeover_that_was_interrupted_goes_on() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    hosts.array.lapse(THIS);
    // The daemon ended after the fence and the lease, before it opened the pool.
    let group = hosts.other.control.group(GROUP).unwrap();
    let name = CellName::parse("one").unwrap();
    let key = group.fence(group.key_of(THIS).unwrap()).unwrap().key;
    hosts.array.member(OTHER).acquire(&name).unwrap();
    let note = |member: &mut super::groups::Membership| member.set_taking(&name, Some(key));
    hosts.other.control.0.groups.change(&group, note).unwrap();
    let error = hosts.other.client.release_cell(releasing("one")).await.unwrap_err();
    assert!(error.message().contains("was not closed in order"), "{error}");
    let taken = hosts.other.client.take_cell(taking("one", false)).await.unwrap().into_inner();
    assert!(taken.changed);
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    assert!(group.member().taking(&name).is_none());
    // Also where its pool was known and had failed.
    let note = |member: &mut super::groups::Membership| member.set_taking(&name, Some(key));
    hosts.other.control.0.groups.change(&group, note).unwrap();
    let problem = "failed for a test".to_owned();
    let handle = hosts.other.control.pool("one").unwrap();
    handle.halt(blockd_mapper::error::MapperError::Device { name: "one".to_owned(), problem });
    hosts.other.client.take_cell(taking("one", false)).await.unwrap();
    assert!(group.member().taking(&name).is_none());
}

#[tokio::test]
async fn a_free_lease_of_a_cell_that_was_not_closed_is_given_back() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    let name = CellName::parse("one").unwrap();
    hosts.array.member(THIS).release(&name).unwrap();
    let error = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("which has not closed it"), "{error}");
    let free = ("one".to_owned(), v1::CellState::Free, 0);
    assert_eq!(states(&mut hosts.other).await, [free]);
}

#[tokio::test]
async fn open_cells_go_on_while_the_coordinator_is_away() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.array.set_away(true);
    hosts.this.control.watch_groups().await;
    make_volume(&mut hosts.this, "one", "w").await;
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v", "w"]);
    let failure = group(&mut hosts.this).await.failure;
    assert!(failure.contains("can't be asked now"), "{failure}");
    for error in [
        hosts.this.client.create_cell(creation("two")).await.unwrap_err(),
        hosts.this.client.release_cell(releasing("one")).await.unwrap_err(),
    ] {
        assert!(error.message().contains("can't be asked now"), "{error}");
    }
    assert!(hosts.this.control.pool("one").is_ok());
    hosts.array.set_away(false);
    assert!(hosts.this.client.release_cell(releasing("one")).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_cell_grows_from_its_group_and_takes_what_is_left_of_it() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let control = hosts.this.control.clone();
    let device = control.pool("one").unwrap().devices().remove(0);
    assert!(control.extend_cell(&device.path, device.size, 0, 16 << 20).await.unwrap());
    assert_eq!(control.grow_pool("one", 0, None).await.unwrap(), 16 << 20);
    // 1 GiB at least is more than there is.
    let size = control.pool("one").unwrap().devices()[0].size;
    assert!(control.extend_cell(&device.path, size, 0, 0).await.unwrap());
    assert_eq!(group(&mut hosts.this).await.free_bytes, 0);
    let error = control.extend_cell(&device.path, 1024 << 20, 0, 0).await.unwrap_err();
    assert!(error.to_string().contains("volume group san is full"), "{error}");
}

#[tokio::test]
async fn a_cell_gets_no_device_that_other_hosts_would_miss() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let request = v1::AddPoolDeviceRequest {
        name: "one".to_owned(),
        path: "/srv/other".to_owned(),
        ..Default::default()
    };
    let error = hosts.this.client.add_pool_device(request).await.unwrap_err();
    assert!(error.message().contains("lies in a cell"), "{error}");
}

#[tokio::test]
async fn a_lost_membership_drops_the_cells_of_its_group_alone() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.this.control.open_pool(&super::testing::memory_pool("default")).await.unwrap();
    let lose = || v1::LoseVolumeGroupRequest { name: GROUP.to_owned() };
    let lost = hosts.this.client.lose_volume_group(lose()).await.unwrap().into_inner();
    assert_eq!((lost.changed, lost.cells), (true, vec!["one".to_owned()]));
    let lost = hosts.this.client.lose_volume_group(lose()).await.unwrap().into_inner();
    assert!(!lost.changed && lost.cells.is_empty());
    assert!(hosts.this.control.pool("one").is_err());
    assert!(hosts.this.control.pool("default").is_ok());
    let close = v1::ClosePoolRequest { name: "one".to_owned(), force: true };
    hosts.this.client.close_pool(close).await.unwrap();
    let open = v1::OpenPoolRequest { name: "one".to_owned() };
    let error = hosts.this.client.open_pool(open).await.unwrap_err();
    assert!(error.message().contains("has lost its membership"), "{error}");
}

#[tokio::test]
async fn a_cell_that_a_crash_has_left_half_made_is_made() {
    let mut hosts = Hosts::new().await;
    let name = CellName::parse("one").unwrap();
    let cell = hosts.array.member(THIS).create(&name, 64 << 20).unwrap();
    // Its space was another's before.
    let former = || std::fs::File::options().write(true).open(&cell.path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&former(), b"a former cell", 4096).unwrap();
    let error = hosts.this.client.take_cell(taking("one", false)).await.unwrap_err();
    assert!(error.message().contains("`blockd cell create` finishes it"), "{error}");
    // Also after a restart of the host.
    hosts.boot_this().await;
    hosts.create("one").await;
    // One whose ends were cleared, and which has no pool yet.
    let two = CellName::parse("two").unwrap();
    hosts.array.member(THIS).create(&two, 64 << 20).unwrap();
    hosts.array.member(THIS).finish(&two).unwrap();
    hosts.create("two").await;
    // One that another host makes is not touched.
    hosts.array.member(OTHER).create(&CellName::parse("three").unwrap(), 64 << 20).unwrap();
    let error = hosts.this.client.create_cell(creation("three")).await.unwrap_err();
    assert!(error.message().contains("`blockd cell create` on host 2 finishes it"), "{error}");
}

#[tokio::test]
async fn a_cell_with_a_pool_is_never_made_anew_or_deleted_unseen() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let export = v1::ExportPoolRequest { name: "one".to_owned(), force: false };
    hosts.this.client.export_pool(export).await.unwrap();
    let error = hosts.this.client.create_cell(creation("one")).await.unwrap_err();
    assert!(error.message().contains("cell one exists"), "{error}");
    let delete =
        |force| v1::DeleteCellRequest { group: GROUP.to_owned(), name: "one".to_owned(), force };
    // Also one whose superblocks can't be read.
    for damage in [false, true] {
        if damage {
            let path = hosts.array.member(THIS).cells().unwrap()[0].path.clone();
            let file = std::fs::File::options().write(true).open(path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[7; 8192], 0).unwrap();
        }
        let error = hosts.this.client.delete_cell(delete(false)).await.unwrap_err();
        assert!(error.message().contains("has a pool that is not open"), "{error}");
    }
    assert!(hosts.this.client.delete_cell(delete(true)).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_second_host_registers_before_it_can_write_the_directory() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let third = hosts.array.member(HostNumber(3));
    third.cells().unwrap_err();
    let mut rig = Rig::of_other_node("5f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f").await;
    rig.control.0.groups.add_simulated(GROUP, third);
    hosts.array.set_away(true);
    let request = || v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    // Its locks are not started yet, which need the registration. The daemon knows the group, as
    // after a boot of the host.
    rig.client.add_volume_group(request()).await.unwrap();
    let group = self::group(&mut rig).await;
    assert!(group.failure.contains("is not known there yet"), "{}", group.failure);
    let key = Key::parse(&group.key).unwrap();
    assert!(hosts.array.member(HostNumber(3)).is_member(key).unwrap());
    rig.control.watch_groups().await;
    // Once they are started it is known to the others without a further call.
    hosts.array.set_away(false);
    assert!(!hosts.array.member(THIS).keys().unwrap().contains(&key));
    rig.control.watch_groups().await;
    assert!(hosts.array.member(THIS).keys().unwrap().contains(&key));
    assert_eq!(self::group(&mut rig).await.failure, "");
}

#[tokio::test]
async fn a_cell_is_deleted_where_it_is_held_and_with_its_volumes_only_by_force() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let delete =
        |force| v1::DeleteCellRequest { group: GROUP.to_owned(), name: "one".to_owned(), force };
    let error = hosts.other.client.delete_cell(delete(true)).await.unwrap_err();
    assert!(error.message().contains("not held by this host"), "{error}");
    hosts.this.client.delete_cell(delete(false)).await.unwrap_err();
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
    let deleted = hosts.this.client.delete_cell(delete(true)).await.unwrap().into_inner();
    assert_eq!((deleted.changed, deleted.deleted_volumes), (true, 1));
    assert!(!hosts.this.client.delete_cell(delete(true)).await.unwrap().into_inner().changed);
    assert!(states(&mut hosts.other).await.is_empty());
}

#[tokio::test]
async fn a_group_is_removed_without_cells_and_its_key_with_it() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let key = Key::parse(&group(&mut hosts.this).await.key).unwrap();
    let remove = || v1::RemoveVolumeGroupRequest { name: GROUP.to_owned() };
    let error = hosts.this.client.remove_volume_group(remove()).await.unwrap_err();
    assert!(error.message().contains("has cell one: release it first"), "{error}");
    hosts.this.client.release_cell(releasing("one")).await.unwrap();
    for changed in [true, false] {
        let removed = hosts.this.client.remove_volume_group(remove()).await.unwrap().into_inner();
        assert_eq!(removed.changed, changed);
    }
    assert!(!hosts.array.member(THIS).is_member(key).unwrap());
}

#[tokio::test]
async fn the_next_start_opens_the_cells_that_are_held_and_forgets_the_others() {
    let mut rig = Rig::without_pool(folder()).await;
    let place = folder_on_disk();
    let request = v1::AddVolumeGroupRequest {
        name: GROUP.to_owned(),
        folder: place.path().display().to_string(),
        host: 0,
    };
    for changed in [true, false] {
        let added = rig.client.add_volume_group(request.clone()).await.unwrap().into_inner();
        assert_eq!(added.changed, changed);
    }
    for cell in ["one", "two"] {
        rig.client.create_cell(creation(cell)).await.unwrap();
    }
    rig.control.close_pools().await.unwrap();
    std::fs::remove_file(place.path().join("cell-two")).unwrap();
    rig.control.0.groups.let_go();
    let options = rig.control.0.options.clone();
    let next = super::Control::new(options, Arc::clone(&rig.data_path) as _).unwrap();
    next.start_groups().await.unwrap();
    let remembered: Vec<_> =
        next.remembered_pools().unwrap().into_iter().map(|config| config.name).collect();
    assert_eq!(remembered, ["one"]);
    assert_eq!(next.describe_groups(GROUP).await.unwrap()[0].cells.len(), 1);
}

#[tokio::test]
async fn a_group_is_listed_with_one_cell_and_by_its_name_without_a_look_at_a_disk() {
    let (place, mut rig) = (folder_on_disk(), Rig::without_pool(folder()).await);
    let request = v1::AddVolumeGroupRequest {
        name: GROUP.to_owned(),
        folder: place.path().display().to_string(),
        ..Default::default()
    };
    rig.client.add_volume_group(request).await.unwrap();
    for cell in ["one", "two"] {
        rig.client.create_cell(creation(cell)).await.unwrap();
    }
    let listed = async |name: &str, cell: &str, brief| {
        let (name, cell) = (name.to_owned(), cell.to_owned());
        let asked = v1::ListVolumeGroupsRequest { name, cell, brief };
        rig.control.list_groups(&asked).await
    };
    let names = |groups: &[v1::VolumeGroup]| -> Vec<String> {
        groups[0].cells.iter().map(|cell| cell.name.clone()).collect()
    };
    for name in ["", GROUP] {
        assert_eq!(names(&listed(name, "two", false).await.unwrap()), ["two"]);
        assert!(names(&listed(name, "three", false).await.unwrap()).is_empty());
        assert!(names(&listed(name, "", true).await.unwrap()).is_empty());
    }
    assert!(listed(GROUP, "", true).await.unwrap()[0].total_bytes > 0);
    for (cell, brief, problem) in [("two", true, "brief is true"), ("T", false, "cell is T")] {
        let error = listed(GROUP, cell, brief).await.unwrap_err().to_string();
        assert!(error.starts_with(problem), "{error}");
    }
    // Its disk does not answer.
    std::fs::remove_dir_all(place.path()).unwrap();
    assert!(!listed(GROUP, "", true).await.unwrap()[0].failure.is_empty());
    let found = listed("", "", true).await.unwrap().remove(0);
    assert_eq!((found.name.as_str(), found.failure.as_str()), (GROUP, ""));
}

#[tokio::test]
async fn names_and_folders_that_can_not_be_are_refused() {
    let mut rig = Rig::without_pool(folder()).await;
    for (name, folder, problem) in [
        ("", "", "name is"),
        ("-a", "", "name is"),
        ("a/b", "", "name is"),
        ("a", "relative", "an absolute path"),
        ("a", "/no/such/folder", "does not exist"),
    ] {
        let (name, folder) = (name.to_owned(), folder.to_owned());
        let request = v1::AddVolumeGroupRequest { name, folder, host: 0 };
        let error = rig.client.add_volume_group(request).await.unwrap_err();
        assert!(error.message().contains(problem), "{error}");
    }
    let error = rig.client.create_cell(creation("one")).await.unwrap_err();
    assert!(error.message().contains("volume group san does not exist"), "{error}");
}

/// This host has cell `one`, whose volume `v` is attached.
pub(super) async fn attached() -> Hosts {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let request = v1::AttachVolumeRequest {
        name: "v".to_owned(),
        pool: "one".to_owned(),
        ..Default::default()
    };
    hosts.this.client.attach_volume(request).await.unwrap();
    hosts
}

pub(super) fn handing() -> v1::HandOverCellRequest {
    let (group, name) = (GROUP.to_owned(), "one".to_owned());
    v1::HandOverCellRequest { group, name, host: 2, only_unused: false }
}

#[tokio::test]
async fn a_cell_with_an_attached_volume_is_in_use_without_a_client_too() {
    let mut hosts = attached().await;
    let unused = || v1::HandOverCellRequest { only_unused: true, ..handing() };
    let error = hosts.this.control.hand_over(unused()).await.unwrap_err();
    let expected = "cell one is in use: its volume v is attached";
    assert_eq!(error.to_string(), expected);
    // Nor one whose pool was closed below its attachment.
    let close = v1::ClosePoolRequest { name: "one".to_owned(), force: true };
    hosts.this.client.close_pool(close).await.unwrap();
    let error = hosts.this.control.hand_over(unused()).await.unwrap_err();
    assert_eq!(error.to_string(), expected);
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    let (name, pool) = ("v".to_owned(), "one".to_owned());
    let detach = v1::DetachVolumeRequest { name, pool, force: false };
    hosts.this.client.detach_volume(detach).await.unwrap();
    assert!(hosts.this.control.hand_over(unused()).await.unwrap());
    let alone = v1::TakeCellRequest { only_unused: true, ..taking("one", false) };
    let error = hosts.other.client.take_cell(alone).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_on_standby_is_described_without_a_look_at_its_group() {
    let mut hosts = attached().await;
    let get = |name: &str| v1::GetVolumeRequest { name: name.to_owned(), pool: "one".to_owned() };
    let found = hosts.this.client.get_volume(get("v")).await.unwrap().into_inner().volume.unwrap();
    assert!(found.attached && !found.standby);
    assert!(hosts.this.control.hand_over(handing()).await.unwrap());
    let waits = hosts.this.client.get_volume(get("v")).await.unwrap().into_inner().volume.unwrap();
    assert!(waits.attached && waits.standby);
    assert_eq!((waits.id, waits.size_bytes), (found.id, found.size_bytes));
    assert_eq!((waits.front_end, waits.nbd_uris), (found.front_end, found.nbd_uris));
    let error = hosts.this.client.get_volume(get("w")).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

#[tokio::test]
async fn a_cell_is_handed_over_with_its_attachments_left_on_standby() {
    let mut hosts = attached().await;
    let id = hosts.this.control.pool("one").unwrap().id();
    assert!(hosts.this.control.hand_over(handing()).await.unwrap());
    // Asked twice: it is gone already.
    assert!(!hosts.this.control.hand_over(handing()).await.unwrap());
    assert!(hosts.this.data_path.standing.lock().contains(&id), "its clients wait");
    let cell = group(&mut hosts.this).await.cells.remove(0);
    assert_eq!((cell.state(), cell.standby), (v1::CellState::Free, vec!["v".to_owned()]));
    let record = hosts.this.control.0.attachments.get("one", "v").unwrap().record.clone();
    assert_eq!(record.standby.unwrap().size, 1 << 20);
    hosts.other.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    hosts.other.client.release_cell(releasing("one")).await.unwrap();
    // It comes back, and its clients go on.
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    assert!(hosts.this.data_path.standing.lock().is_empty());
    assert!(!hosts.this.control.0.attachments.get("one", "v").unwrap().waits());
}

#[tokio::test]
async fn a_cell_whose_requests_do_not_end_stays_and_is_served_on() {
    let mut hosts = attached().await;
    *hosts.this.data_path.is_busy.lock() = true;
    let error = hosts.this.control.hand_over(handing()).await.unwrap_err();
    assert!(error.to_string().contains("has requests that do not end"), "{error}");
    assert!(!hosts.this.control.0.attachments.get("one", "v").unwrap().waits());
    assert_eq!(states(&mut hosts.this).await, [("one".to_owned(), v1::CellState::Open, 1)]);
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
}

#[tokio::test]
async fn clients_of_a_cell_that_fails_in_a_hand_over_wait_no_more() {
    let mut hosts = attached().await;
    let handle = hosts.this.control.pool("one").unwrap();
    *hosts.this.data_path.fails_on_stand_by.lock() = Some(handle.clone());
    let error = hosts.this.control.hand_over(handing()).await.unwrap_err();
    assert!(error.to_string().contains("failed for a test"), "{error}");
    assert!(!hosts.this.data_path.standing.lock().contains(&handle.id()), "its clients wait");
    assert!(!hosts.this.control.0.attachments.get("one", "v").unwrap().waits());
    assert_eq!(states(&mut hosts.this).await, [("one".to_owned(), v1::CellState::Held, 1)]);
}

#[tokio::test]
async fn a_host_without_an_address_is_not_asked_for_a_cell() {
    let mut hosts = attached().await;
    let request = v1::TakeCellRequest { handover: true, ..taking("one", false) };
    let error = hosts.other.client.take_cell(request).await.unwrap_err();
    assert!(error.message().contains("host 1 of volume group san has published no address"));
    let both = v1::TakeCellRequest { handover: true, ..taking("one", true) };
    let error = hosts.other.client.take_cell(both).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(states(&mut hosts.this).await, [("one".to_owned(), v1::CellState::Open, 1)]);
}
