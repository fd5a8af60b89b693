//! Takeovers that are interrupted, by a loss of power of the host that takes or by another host.
//! And hosts that are fenced, can't join a group, or wait for a cell.

use std::sync::Arc;

use blockd_api::v1;
use blockd_engine::pool::VolumeId;
use blockd_hosts::{Coordinator as _, Fence as _, Holder, HostNumber, Key};
use blockd_mapper::claim::Claimant;
use blockd_media::clock::boot_ns;
use blockd_serve::worker::ConnectionInfo;

use crate::config::DeviceConfig;

use super::cells::cell_name;
use super::dead_hosts::Steps;
use super::devices::AttachWish;
use super::pools::Opener;
use super::taking::opener_of_taken;
use super::testing::{Rig, folder_on_disk, memory_pool};
use super::tests_of_begun::deletion;
use super::tests_of_cells::{
    CELL, GROUP, Hosts, OTHER, THIS, attached, creation, die, handing, make_volume, releasing,
    taking, volumes,
};

#[tokio::test]
async fn a_takeover_goes_on_after_a_boot_of_the_host_that_takes() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.create("two").await;
    for (cell, has_lease) in [("one", true), ("two", false)] {
        hosts.die(cell).await;
        // Its power fails before it has the lease, or before it has opened the pool.
        let array = hosts.array.clone();
        hosts.array.before(&format!("take {cell}"), move || {
            if has_lease {
                array.before("keys", || false);
            }
            has_lease
        });
        let error = hosts.other.client.take_cell(taking(cell, true)).await.unwrap_err();
        assert!(error.message().contains("was made to fail"), "{error}");
        hosts.boot_other().await;
        hosts.other.client.take_cell(taking(cell, false)).await.unwrap();
        assert_eq!(volumes(&mut hosts.other, cell).await, ["v"]);
        let group = hosts.other.control.group(GROUP).unwrap();
        assert!(group.member().taking(&cell_name(cell).unwrap()).is_none());
    }
}

#[tokio::test]
async fn a_host_that_takes_a_freed_lease_for_a_moment_does_not_end_the_takeover() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    let (third, name) = (hosts.array.member(HostNumber(3)), cell_name("one").unwrap());
    third.join(Key::new(HostNumber(3), 7), &[], true).unwrap();
    // Between the end of the dead host's lease and this host's own one.
    let faster = (third.clone(), name.clone());
    hosts.array.before("take one", move || faster.0.acquire(&faster.1).is_ok());
    // The second call does not end it either.
    for fence in [true, false] {
        let error = hosts.other.client.take_cell(taking("one", fence)).await.unwrap_err();
        assert!(error.message().contains("cell one is held by host 3"), "{error}");
    }
    // It can't open the cell, and gives it back.
    third.release(&name).unwrap();
    hosts.other.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
}

#[tokio::test]
async fn a_cell_is_opened_under_its_lease_and_another_pool_without_one() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let control = hosts.this.control.clone();
    let (asked, config) = (boot_ns(), control.known("one").unwrap().config);
    assert!(control.confirm_cell(&config).await.unwrap() > asked);
    // Erasing a pool does not look whether this host still has its lease.
    let doomed = control.doomed(&control.known("one").unwrap()).await.unwrap();
    assert_eq!(doomed.leased_until_ns, Claimant::UNLEASED);
    // While it is being taken from a host that was fenced, a third one may have its lease as well.
    let (group, name) = (control.group(GROUP).unwrap(), cell_name("one").unwrap());
    control.note_taking(&group, &name, Some(Key::new(OTHER, 7))).await.unwrap();
    assert_eq!(control.confirm_cell(&config).await.unwrap(), Claimant::UNLEASED);
    control.note_taking(&group, &name, None).await.unwrap();
    // As it would be with one device in the cell, and one elsewhere.
    let mut of_two = config.clone();
    of_two.devices.push(DeviceConfig { path: "/x".into(), ..config.devices[0].clone() });
    assert_eq!(control.confirm_cell(&of_two).await.unwrap(), Claimant::UNLEASED);
    assert_eq!(control.confirm_cell(&memory_pool("p")).await.unwrap(), 0);
    // Folders have no keys, so that a fence does not keep the former host's writes away.
    let place = folder_on_disk();
    let request = v1::AddVolumeGroupRequest {
        name: "folder".to_owned(),
        folder: place.path().display().to_string(),
        ..Default::default()
    };
    hosts.this.client.add_volume_group(request).await.unwrap();
    let request = v1::CreateCellRequest { group: "folder".to_owned(), ..creation("two") };
    hosts.this.client.create_cell(request).await.unwrap();
    let known = control.known("two").unwrap();
    assert_eq!(control.confirm_cell(&known.config).await.unwrap(), 0);
    assert_eq!(control.doomed(&known).await.unwrap().leased_until_ns, 0);
}

#[tokio::test]
async fn a_closed_cell_that_can_not_be_opened_in_a_takeover_can_be_given_back() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let request = v1::ExportPoolRequest { name: "one".to_owned(), force: true };
    hosts.this.control.export_pool(request).await.unwrap();
    // No file can take its place.
    let file = hosts.other.folder.path().join("pools.json");
    let _ = std::fs::remove_file(&file);
    std::fs::create_dir_all(file.join("in-the-way")).unwrap();
    hosts.other.client.take_cell(taking("one", true)).await.unwrap_err();
    // No lease counts until it is open.
    let (group, name) = (hosts.other.control.group(GROUP).unwrap(), cell_name("one").unwrap());
    assert!(group.member().taking(&name).is_some());
    std::fs::remove_dir_all(&file).unwrap();
    let given = hosts.other.client.release_cell(releasing("one")).await.unwrap();
    assert!(given.into_inner().changed && group.member().taking(&name).is_none());
}

#[tokio::test]
async fn a_takeover_whose_cell_is_open_has_ended() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let (group, name) = (hosts.this.control.group(GROUP).unwrap(), cell_name("one").unwrap());
    // The daemon was killed behind the opening.
    let key = Some(Key::new(OTHER, 7));
    hosts.this.control.note_taking(&group, &name, key).await.unwrap();
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    assert!(group.member().taking(&name).is_none());
}

#[test]
fn a_taken_pool_is_opened_without_a_lease_and_a_fence_counts_where_disks_have_keys() {
    let opener = |has_keys| opener_of_taken(3, has_keys, Some(4));
    let leased_until_ns = Claimant::UNLEASED;
    assert_eq!(opener(true), Opener { node: 3, leased_until_ns, fenced: Some(4) });
    assert_eq!(opener(false), Opener { node: 3, leased_until_ns: 0, fenced: None });
}

#[tokio::test]
async fn a_host_that_was_fenced_stops_its_cells_where_that_can_not_be_remembered() {
    for by_a_call in [false, true] {
        let mut hosts = Hosts::new().await;
        hosts.create("one").await;
        let (this, other) = (hosts.array.member(THIS), hosts.array.member(OTHER));
        let key = |host| other.keys().unwrap().into_iter().find(|key| key.host() == host).unwrap();
        other.fence(key(OTHER), key(THIS)).unwrap();
        // No file can take its place.
        let file = hosts.this.folder.path().join("groups.json");
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir_all(file.join("in-the-way")).unwrap();
        match by_a_call {
            true => drop(hosts.this.client.create_cell(creation("two")).await.unwrap_err()),
            false => hosts.this.control.watch_groups().await,
        }
        let failure = hosts.this.control.known("one").unwrap().failure().unwrap_or_default();
        assert!(failure.contains("this host was fenced"), "{by_a_call}: {failure:?}");
        assert!(!this.is_member(key(THIS)).unwrap());
    }
}

#[tokio::test]
async fn adding_a_known_group_fails_where_a_new_disk_takes_no_key() {
    let mut hosts = Hosts::new().await;
    hosts.array.add_unsuitable_disk();
    let request = v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    let error = hosts.this.client.add_volume_group(request).await.unwrap_err();
    assert!(error.message().contains("refuses the registration"), "{error}");
}

#[tokio::test]
async fn a_pool_with_the_name_of_a_cell_on_standby_is_not_opened() {
    let mut hosts = attached().await;
    assert!(hosts.this.control.hand_over(handing()).await.unwrap());
    let place = folder_on_disk();
    let request = v1::AddVolumeGroupRequest {
        name: "other".to_owned(),
        folder: place.path().display().to_string(),
        ..Default::default()
    };
    hosts.this.client.add_volume_group(request).await.unwrap();
    let in_memory = v1::CreatePoolRequest {
        name: "one".to_owned(),
        kind: v1::DeviceKind::Memory.into(),
        size_bytes: CELL,
        ..Default::default()
    };
    let in_other = v1::CreateCellRequest { group: "other".to_owned(), ..creation("one") };
    for error in [
        hosts.this.client.create_pool(in_memory).await.unwrap_err(),
        hosts.this.client.create_cell(in_other).await.unwrap_err(),
    ] {
        let expected = "pool one is the name of cell san/one, whose volumes are on standby here";
        assert!(error.message().contains(expected), "{error}");
    }
    assert!(!place.path().join("cell-one").exists(), "a cell was made");
    assert!(hosts.this.control.0.attachments.get("one", "v").unwrap().waits());
    // Its own cell is opened.
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    assert!(!hosts.this.control.0.attachments.get("one", "v").unwrap().waits());
}

#[tokio::test]
async fn cells_are_opened_when_their_disks_answer_after_the_start() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    let control = hosts.this.control.clone();
    // As after a restart of the daemon whose first look has failed.
    let known = control.known("one").unwrap();
    control.pool("one").unwrap().close().await.unwrap();
    control.group(GROUP).unwrap().forget_look();
    let error = control.open_pool(&known.config).await.unwrap_err().to_string();
    assert!(error.contains("have not answered yet"), "{error}");
    control.watch_groups().await;
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
}

#[tokio::test]
async fn a_pool_that_is_opened_while_its_cell_is_taken_is_not_closed() {
    let mut hosts = attached().await;
    let (control, data_path) = (hosts.this.control.clone(), Arc::clone(&hosts.this.data_path));
    let (known, handle) = (control.known("one").unwrap(), control.pool("one").unwrap());
    let volume = VolumeId(control.0.attachments.get("one", "v").unwrap().record.id);
    handle.close().await.unwrap();
    *data_path.refuses_pools.lock() = Some("not yet".to_owned());
    control.open_pool(&known.config).await.unwrap_err();
    *data_path.refuses_pools.lock() = None;
    let connection = ConnectionInfo { pool: handle.id(), volume, ..Default::default() };
    data_path.connections.lock().push(connection);
    // As the task does it that opens pools once their disks answer.
    let (opening, runtime) = (control.clone(), tokio::runtime::Handle::current());
    let reopen = move || runtime.block_on(opening.reopen_pool("one")).unwrap();
    hosts.array.before("take one", reopen);
    let mut events = control.events().reader(false, "one".to_owned());
    hosts.this.client.take_cell(taking("one", false)).await.unwrap();
    control.events().close();
    let mut kinds = Vec::new();
    while let Some(event) = events.next().await {
        kinds.push(event.kind());
    }
    assert!(!kinds.contains(&v1::EventKind::PoolClosed), "{kinds:?}");
    assert_eq!(data_path.connections.lock().len(), 1, "its client was disconnected");
    assert_eq!(volumes(&mut hosts.this, "one").await, ["v"]);
}

#[tokio::test]
async fn a_takeover_that_did_not_end_does_not_count_for_a_later_cell() {
    let name = cell_name("one").unwrap();
    for is_deleted_again in [false, true] {
        let mut hosts = Hosts::new().await;
        hosts.create("one").await;
        hosts.die("one").await;
        hosts.array.before("take one", || false);
        hosts.other.client.take_cell(taking("one", true)).await.unwrap_err();
        hosts.boot_other().await;
        hosts.boot_this().await;
        hosts.this.client.take_cell(taking("one", false)).await.unwrap();
        let forced = v1::DeleteCellRequest { force: true, ..deletion("one") };
        assert!(hosts.this.client.delete_cell(forced).await.unwrap().into_inner().changed);
        let group = hosts.other.control.group(GROUP).unwrap();
        assert!(group.member().taking(&name).is_some());
        let client = &mut hosts.other.client;
        let changed = match is_deleted_again {
            true => client.delete_cell(deletion("one")).await.unwrap().into_inner().changed,
            false => client.create_cell(creation("one")).await.unwrap().into_inner().changed,
        };
        assert_eq!(changed, !is_deleted_again);
        assert!(group.member().taking(&name).is_none(), "{is_deleted_again}");
    }
}

#[tokio::test]
async fn attachments_of_a_pool_that_was_closed_by_force_end_when_its_cell_is_handed_over() {
    for (is_restarted, was_moved) in [(false, false), (true, false), (true, true)] {
        let mut hosts = attached().await;
        if was_moved {
            assert!(hosts.this.control.hand_over(handing()).await.unwrap());
            hosts.other.client.take_cell(taking("one", false)).await.unwrap();
            hosts.other.client.release_cell(releasing("one")).await.unwrap();
            hosts.this.client.take_cell(taking("one", false)).await.unwrap();
        }
        let close = v1::ClosePoolRequest { name: "one".to_owned(), force: true };
        hosts.this.client.close_pool(close).await.unwrap();
        let former = &hosts.this.control;
        let mut control = former.clone();
        if is_restarted {
            let options = former.0.options.clone();
            control = super::Control::new(options, Arc::clone(&hosts.this.data_path) as _).unwrap();
            control.0.groups.add(former.group(GROUP).unwrap());
            for config in control.remembered_pools().unwrap() {
                control.start_pool(&config).await.unwrap();
            }
        }
        let mut events = control.events().reader(false, "one".to_owned());
        assert!(control.hand_over(handing()).await.unwrap());
        control.events().close();
        let mut kinds = Vec::new();
        while let Some(event) = events.next().await {
            kinds.push(event.kind());
        }
        assert!(kinds.contains(&v1::EventKind::VolumeDetached), "{is_restarted}: {kinds:?}");
        hosts.other.client.take_cell(taking("one", false)).await.unwrap();
        hosts.other.client.release_cell(releasing("one")).await.unwrap();
        control.take_cell(taking("one", false)).await.unwrap();
        // An attachment that is left lets no client connect, and is not made anew.
        let attached = control.attach_volume("one", "v", AttachWish::default()).await.unwrap();
        assert!(attached.0, "{is_restarted}");
    }
}

#[tokio::test]
async fn a_cell_whose_takeover_ended_unnoted_is_handed_over() {
    let mut hosts = attached().await;
    let group = hosts.this.control.group(GROUP).unwrap();
    let name = cell_name("one").unwrap();
    let note = |member: &mut super::groups::Membership| {
        member.set_taking(&name, Some(Key::new(OTHER, 7)));
    };
    hosts.this.control.0.groups.change(&group, note).unwrap();
    assert!(hosts.this.control.hand_over(handing()).await.unwrap());
    hosts.other.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
}

/// A third host, of another node, which has joined.
async fn third(hosts: &Hosts) -> Rig {
    let mut rig = Rig::of_other_node("5f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f").await;
    rig.control.0.groups.add_simulated(GROUP, hosts.array.member(HostNumber(3)));
    let request = v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    rig.client.add_volume_group(request).await.unwrap();
    rig
}

#[tokio::test]
async fn a_cell_of_a_host_that_died_while_it_took_it_from_another_one_is_taken() {
    for is_freed in [false, true] {
        let mut hosts = Hosts::new().await;
        let mut third = third(&hosts).await;
        third.client.create_cell(creation("one")).await.unwrap();
        make_volume(&mut third, "one", "v").await;
        die(&third, "one").await;
        // This host fences it, and dies before or after it has the lease, without a look at the
        // pool. In the former case the other host has begun a takeover as well.
        let (member, name) = (hosts.array.member(THIS), cell_name("one").unwrap());
        let group = hosts.other.control.group(GROUP).unwrap();
        let (own, key) = (group.key_of(THIS).unwrap(), group.key_of(HostNumber(3)).unwrap());
        assert!(member.fence(own, key).unwrap());
        let Holder::Other(owner) = member.cells().unwrap()[0].holder else { panic!("not held") };
        member.free(&name, owner).unwrap();
        if is_freed {
            let note = |member: &mut super::groups::Membership| member.set_taking(&name, Some(own));
            hosts.other.control.0.groups.change(&group, note).unwrap();
            // The other host does not know that the third one was fenced.
            let error = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
            assert!(error.message().contains("on another node, 5f2b8c1d-..."), "{error}");
            let (send, _steps) = tokio::sync::mpsc::unbounded_channel();
            let asked =
                v1::DeclareHostDeadRequest { group: GROUP.to_owned(), host: 3, force: true };
            hosts.other.control.declare_host_dead(&asked, &Steps::new(send)).await.unwrap();
        } else {
            member.acquire(&name).unwrap();
        }
        hosts.other.client.take_cell(taking("one", !is_freed)).await.unwrap();
        assert_eq!(volumes(&mut hosts.other, "one").await, ["v"]);
    }
}

#[tokio::test]
async fn a_cell_that_another_host_has_opened_since_is_not_recovered_by_an_old_takeover() {
    let mut hosts = Hosts::new().await;
    hosts.create("one").await;
    hosts.die("one").await;
    let (member, name) = (hosts.array.member(HostNumber(3)), cell_name("one").unwrap());
    let mut third = third(&hosts).await;
    // It takes the cell as well, and waits for the lease that the first one to fence ends.
    let group = third.control.group(GROUP).unwrap();
    let key = group.key_of(THIS).unwrap();
    let note = |member: &mut super::groups::Membership| member.set_taking(&name, Some(key));
    third.control.0.groups.change(&group, note).unwrap();
    let faster = (member.clone(), name.clone());
    hosts.array.before("take one", move || faster.0.acquire(&faster.1).is_ok());
    let error = hosts.other.client.take_cell(taking("one", true)).await.unwrap_err();
    assert!(error.message().contains("cell one is held by host 3"), "{error}");
    third.client.take_cell(taking("one", false)).await.unwrap();
    die(&third, "one").await;
    member.release(&name).unwrap();
    // At the second try the lease is with this host already: it could not be given back.
    hosts.array.before("release one", || false);
    for _ in 0..2 {
        let error = hosts.other.client.take_cell(taking("one", false)).await.unwrap_err();
        let expected = "on another node, 5f2b8c1d-..., which has not";
        assert!(error.message().contains(expected), "{error}");
    }
    // Its node takes it back.
    third.control.forget_pool("one").await.unwrap();
    third.client.take_cell(taking("one", false)).await.unwrap();
    assert_eq!(volumes(&mut third, "one").await, ["v"]);
}
