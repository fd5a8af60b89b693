//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot, and what the calls
//! for single snapshots make of those of a group.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::group_controller_service_capability::rpc::Type as Rpc;
use blockd_csi::proto::plugin_capability::service::Type as Plugin;
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type};
use blockd_csi::proto::{
    CreateVolumeGroupSnapshotRequest, GetSnapshotRequest, GetVolumeGroupSnapshotRequest,
    ListSnapshotsRequest, VolumeGroupSnapshot,
};
use tonic::{Code, Request};

use crate::csi::case::Need::Rows;
use crate::csi::case::{CREATE, GET_SNAPSHOT, GROUP, LIST_SNAPSHOTS, SNAPSHOT, cases};
use crate::csi::cx::{Answer, Cx, one, refused, refused_as, says};

/// Calls at once for one name.
const AT_ONCE: usize = 100;

cases! { [CREATE, GROUP]
    a_driver_with_groups_says_that_it_has_the_service;
    create_group_without_name_is_invalid_argument;
    create_group_without_volumes_is_invalid_argument;
    create_group_of_an_unknown_volume_is_not_found;
    create_group_with_a_volume_twice_is_invalid_argument: Rows;
    create_group_of_more_volumes_than_fit_is_refused_with_the_limit: Rows;
    create_group_says_what_it_made;
    create_group_again_gives_the_same_group;
    create_group_again_in_another_order_gives_the_same_group: Rows;
    create_group_again_of_other_volumes_already_exists;
    create_group_that_is_refused_makes_nothing: LIST_SNAPSHOTS;
    group_names_of_128_characters_are_accepted;
    group_names_of_signs_are_accepted;
    a_group_name_with_control_characters_is_invalid_argument;
    an_unknown_group_parameter_is_refused_by_name: Rows;
    a_group_and_a_snapshot_of_one_name_are_two_things: SNAPSHOT;
    a_group_of_one_volume_is_made;
    one_volume_is_in_several_groups;
    snapshots_of_a_group_are_listed_as_such: LIST_SNAPSHOTS;
    a_snapshot_of_a_group_is_reported_as_such: GET_SNAPSHOT;
    a_snapshot_of_a_group_is_not_deleted_alone: SNAPSHOT;
    a_volume_is_made_of_a_snapshot_of_a_group;
    a_group_outlives_its_volumes;
    get_group_without_id_is_invalid_argument;
    get_group_of_an_unknown_one_is_not_found;
    get_group_is_as_it_was_made;
    get_group_with_other_snapshots_is_invalid_argument;
    delete_group_without_id_is_invalid_argument;
    delete_group_that_is_gone_is_ok;
    delete_group_that_never_was_is_ok;
    delete_group_with_other_snapshots_is_invalid_argument;
    delete_group_deletes_its_snapshots_and_no_other: LIST_SNAPSHOTS, SNAPSHOT;
    a_deleted_groups_name_can_be_taken_again;
    ids_of_a_mebibyte_are_refused_for_groups;
    group_secrets_beyond_4_kib_are_refused: Rows;
    many_calls_for_one_group_make_one;
}

fn ids(group: &VolumeGroupSnapshot) -> Vec<String> {
    group.snapshots.iter().map(|one| one.snapshot_id.clone()).collect()
}

fn get(cx: &Cx<'_>, id: &str, snapshots: &[String]) -> Answer<Option<VolumeGroupSnapshot>> {
    let request = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: id.to_owned(),
        snapshot_ids: snapshots.to_vec(),
        ..Default::default()
    };
    cx.driver.get_volume_group_snapshot(request).map(|answer| answer.group_snapshot)
}

fn a_driver_with_groups_says_that_it_has_the_service(cx: &mut Cx<'_>) -> Result<()> {
    let offers = cx.offers();
    let said = offers.plugin.contains(&i32::from(Plugin::GroupControllerService));
    ensure!(said, "GROUP_CONTROLLER_SERVICE is not said");
    let different: BTreeSet<i32> = offers.group.iter().copied().collect();
    ensure!(different.len() == offers.group.len(), "said twice: {:?}", offers.group);
    let known = |one: &i32| *one != 0 && Rpc::try_from(*one).is_ok();
    ensure!(different.iter().all(known), "unknown capability in {different:?}");
    Ok(())
}

fn create_group_without_name_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let request = cx.group_request(&[&volume]);
    let request = CreateVolumeGroupSnapshotRequest { name: String::new(), ..request };
    refused(cx.group(&request), Code::InvalidArgument).map(|_| ())
}

fn create_group_without_volumes_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    for volumes in [&[][..], &[""], &[&volume, ""]] {
        let request = cx.group_request(volumes);
        refused(cx.group(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn create_group_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, gone) = (cx.volume()?.volume_id, cx.gone_volume()?);
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        for volumes in [&[id][..], &[&volume, id], &[id, &volume]] {
            let request = cx.group_request(volumes);
            refused(cx.group(&request), Code::NotFound)?;
        }
    }
    Ok(())
}

fn create_group_with_a_volume_twice_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?.volume_id, cx.volume()?.volume_id);
    let request = cx.group_request(&[&first, &second, &first]);
    let status = refused(cx.group(&request), Code::InvalidArgument)?;
    says(&status, &["source_volume_ids", &first])
}

fn create_group_of_more_volumes_than_fit_is_refused_with_the_limit(cx: &mut Cx<'_>) -> Result<()> {
    let volumes: Vec<String> = (0..17).map(|number| format!("default/csi.x{number}")).collect();
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    let request = cx.group_request(&volumes);
    let status = refused(cx.group(&request), Code::InvalidArgument)?;
    says(&status, &["source_volume_ids", "17", "16"])
}

fn create_group_says_what_it_made(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, group) = cx.volumes_and_group()?;
    ensure!((1..=128).contains(&group.group_snapshot_id.len()), "{group:?}");
    ensure!(group.creation_time.is_some(), "{group:?}");
    let sources: BTreeSet<&str> =
        group.snapshots.iter().map(|one| one.source_volume_id.as_str()).collect();
    let asked: BTreeSet<&str> = volumes.iter().map(String::as_str).collect();
    ensure!(sources == asked && group.snapshots.len() == 2, "{group:?} of {asked:?}");
    for snapshot in &group.snapshots {
        ensure!((1..=128).contains(&snapshot.snapshot_id.len()), "{snapshot:?}");
        ensure!(snapshot.group_snapshot_id == group.group_snapshot_id, "{snapshot:?}");
        ensure!(snapshot.creation_time.is_some() && snapshot.size_bytes >= 0, "{snapshot:?}");
        ensure!(snapshot.ready_to_use || !group.ready_to_use, "{group:?}");
    }
    Ok(())
}

fn create_group_again_gives_the_same_group(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?.volume_id, cx.volume()?.volume_id);
    let request = cx.group_request(&[&first, &second]);
    let made = cx.group(&request)?;
    let again = cx.group(&request)?;
    ensure!(made.group_snapshot_id == again.group_snapshot_id, "{made:?} and {again:?}");
    let sorted = |group: &VolumeGroupSnapshot| ids(group).into_iter().collect::<BTreeSet<_>>();
    ensure!(sorted(&made) == sorted(&again), "{made:?} and {again:?}");
    ensure!(made.creation_time == again.creation_time, "{made:?} and {again:?}");
    Ok(())
}

fn create_group_again_in_another_order_gives_the_same_group(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?.volume_id, cx.volume()?.volume_id);
    let request = cx.group_request(&[&first, &second]);
    let made = cx.group(&request)?;
    let source_volume_ids = vec![second, first];
    let again = CreateVolumeGroupSnapshotRequest { source_volume_ids, ..request };
    let again = cx.group(&again)?;
    ensure!(made == again, "{made:?} and {again:?}");
    Ok(())
}

fn create_group_again_of_other_volumes_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let volumes = [cx.volume()?.volume_id, cx.volume()?.volume_id, cx.volume()?.volume_id];
    let [a, b, c] = &volumes;
    let request = cx.group_request(&[a, b]);
    cx.group(&request)?;
    for others in [vec![a], vec![a, b, c], vec![a, c], vec![c]] {
        let source_volume_ids = others.into_iter().cloned().collect();
        let again = CreateVolumeGroupSnapshotRequest { source_volume_ids, ..request.clone() };
        refused(cx.group(&again), Code::AlreadyExists)?;
    }
    Ok(())
}

fn create_group_that_is_refused_makes_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, gone) = (cx.volume()?.volume_id, cx.gone_volume()?);
    let request = cx.group_request(&[&volume, &gone]);
    refused(cx.group(&request), Code::NotFound)?;
    let left = cx.driver.all_snapshots(0, &volume)?;
    ensure!(left.is_empty(), "{left:?}");
    // The name is free.
    let source_volume_ids = vec![volume];
    cx.group(&CreateVolumeGroupSnapshotRequest { source_volume_ids, ..request })?;
    Ok(())
}

fn group_named(cx: &mut Cx<'_>, volume: &str, name: String) -> Result<String> {
    let request = CreateVolumeGroupSnapshotRequest { name, ..cx.group_request(&[volume]) };
    let first = cx.group(&request)?;
    let again = cx.group(&request)?;
    ensure!(first.group_snapshot_id == again.group_snapshot_id, "{first:?} and {again:?}");
    ensure!((1..=128).contains(&first.group_snapshot_id.len()), "{first:?}");
    ensure!(first.snapshots.iter().all(|one| one.snapshot_id.len() <= 128), "{first:?}");
    Ok(first.group_snapshot_id)
}

fn group_names_of_128_characters_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let name = cx.long_name('v');
    let mut request = cx.request();
    request.name = name;
    let volume = cx.create(&request)?.volume_id;
    for fill in ['x', 'ß', '🦀'] {
        let start = cx.name();
        let rest = 127 - start.chars().count();
        let start = format!("{start}{}", fill.to_string().repeat(rest));
        let first = group_named(cx, &volume, format!("{start}a"))?;
        let second = group_named(cx, &volume, format!("{start}b"))?;
        ensure!(first != second, "both are {first}");
    }
    Ok(())
}

fn group_names_of_signs_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let names = ["@", "~", "/", "..", " ", "\t", "a@b", "a/b", "~g0123456789abcdef"];
    let mut different = BTreeSet::new();
    for name in names {
        different.insert(group_named(cx, &volume, name.to_owned())?);
    }
    ensure!(different.len() == names.len(), "two of them are one: {different:?}");
    Ok(())
}

fn a_group_name_with_control_characters_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    for sign in ['\0', '\u{8}', '\u{1f}', '\u{7f}', '\u{9f}'] {
        let mut request = cx.group_request(&[&volume]);
        request.name.push(sign);
        refused(cx.group(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn an_unknown_group_parameter_is_refused_by_name(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let request = cx.group_request(&[&volume]);
    let parameters = one("no-such-key", "1");
    let request = CreateVolumeGroupSnapshotRequest { parameters, ..request };
    says(&refused(cx.group(&request), Code::InvalidArgument)?, &["no-such-key"])
}

fn a_group_and_a_snapshot_of_one_name_are_two_things(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let alone = cx.snapshot_request(&volume);
    let request = cx.group_request(&[&volume]);
    let request = CreateVolumeGroupSnapshotRequest { name: alone.name.clone(), ..request };
    let group = cx.group(&request)?;
    let alone = cx.snapshot(&alone)?;
    ensure!(alone.group_snapshot_id.is_empty(), "{alone:?}");
    ensure!(!ids(&group).contains(&alone.snapshot_id), "{group:?}");
    cx.delete_snapshot(&alone.snapshot_id)?;
    ensure!(cx.group(&request)? == group, "it went with the other");
    Ok(())
}

fn a_group_of_one_volume_is_made(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let request = cx.group_request(&[&volume]);
    let group = cx.group(&request)?;
    ensure!(group.snapshots.len() == 1, "{group:?}");
    Ok(())
}

fn one_volume_is_in_several_groups(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, first) = cx.volumes_and_group()?;
    let request = cx.group_request(&[&volumes[1]]);
    let second = cx.group(&request)?;
    cx.delete_group(&first.group_snapshot_id, &ids(&first))?;
    ensure!(cx.group(&request)? == second, "it went with the first");
    Ok(())
}

fn snapshots_of_a_group_are_listed_as_such(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    let all = cx.driver.all_snapshots(1, "")?;
    for snapshot in &group.snapshots {
        ensure!(all.contains(snapshot), "{snapshot:?} is not in {all:?}");
        let snapshot_id = snapshot.snapshot_id.clone();
        let request = ListSnapshotsRequest { snapshot_id, ..Default::default() };
        let listed = cx.driver.list_snapshots(request)?.entries;
        let listed: Vec<_> = listed.into_iter().filter_map(|entry| entry.snapshot).collect();
        ensure!(listed == [snapshot.clone()], "{listed:?}");
    }
    Ok(())
}

fn a_snapshot_of_a_group_is_reported_as_such(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for snapshot in &group.snapshots {
        let snapshot_id = snapshot.snapshot_id.clone();
        let request = GetSnapshotRequest { snapshot_id, ..Default::default() };
        let got = cx.driver.get_snapshot(request)?.snapshot;
        ensure!(got.as_ref() == Some(snapshot), "{got:?} and {snapshot:?}");
    }
    Ok(())
}

fn a_snapshot_of_a_group_is_not_deleted_alone(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for snapshot in &group.snapshots {
        refused(cx.delete_snapshot(&snapshot.snapshot_id), Code::InvalidArgument)?;
    }
    let got = get(cx, &group.group_snapshot_id, &ids(&group))?;
    ensure!(got.as_ref() == Some(&group), "{got:?} and {group:?}");
    // Afterwards it is one that is gone.
    cx.delete_group(&group.group_snapshot_id, &ids(&group))?;
    cx.delete_snapshot(&group.snapshots[0].snapshot_id)?;
    Ok(())
}

fn a_volume_is_made_of_a_snapshot_of_a_group(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for snapshot_id in ids(&group) {
        let request = cx.request_from(Type::Snapshot(SnapshotSource { snapshot_id }));
        let volume = cx.create(&request)?;
        ensure!(volume.content_source == request.volume_content_source, "{volume:?}");
    }
    Ok(())
}

fn a_group_outlives_its_volumes(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, group) = cx.volumes_and_group()?;
    for volume in &volumes {
        match cx.delete(volume) {
            Ok(()) => {}
            // Then they are deleted after it.
            answer => return refused(answer, Code::FailedPrecondition).map(|_| ()),
        }
    }
    let got = get(cx, &group.group_snapshot_id, &ids(&group))?;
    ensure!(got.as_ref() == Some(&group), "{got:?} and {group:?}");
    Ok(())
}

fn get_group_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(get(cx, "", &[]), Code::InvalidArgument).map(|_| ())
}

fn get_group_of_an_unknown_one_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, group) = cx.volumes_and_group()?;
    cx.delete_group(&group.group_snapshot_id, &ids(&group))?;
    let gone = group.group_snapshot_id.as_str();
    for id in [gone, &volumes[0], "nothing", "a/b", "default/csi.~g0", "../x", "🦀"] {
        refused(get(cx, id, &ids(&group)), Code::NotFound)?;
        refused(get(cx, id, &[]), Code::NotFound)?;
    }
    Ok(())
}

fn get_group_is_as_it_was_made(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    let got = get(cx, &group.group_snapshot_id, &ids(&group))?;
    ensure!(got.as_ref() == Some(&group), "{got:?} and {group:?}");
    Ok(())
}

/// Lists of snapshots that are not those of the first group.
fn wrong_lists(cx: &mut Cx<'_>, group: &VolumeGroupSnapshot) -> Result<Vec<Vec<String>>> {
    let (_, other) = cx.volumes_and_group()?;
    let its = ids(group);
    let more: Vec<String> = its.iter().chain(&ids(&other)).cloned().collect();
    let half = vec![its[0].clone(), other.snapshots[0].snapshot_id.clone()];
    Ok(vec![vec![its[0].clone()], ids(&other), more, half])
}

fn get_group_with_other_snapshots_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for list in wrong_lists(cx, &group)? {
        refused(get(cx, &group.group_snapshot_id, &list), Code::InvalidArgument)?;
    }
    Ok(())
}

fn delete_group_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(cx.delete_group("", &[]), Code::InvalidArgument).map(|_| ())
}

fn delete_group_that_is_gone_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for _ in 0..3 {
        cx.delete_group(&group.group_snapshot_id, &ids(&group))?;
    }
    Ok(())
}

fn delete_group_that_never_was_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for id in ["nothing", "a/b", "a/b@c", "default/csi.~g0", "../../etc", "🦀"] {
        cx.delete_group(id, &[])?;
        cx.delete_group(id, &["nothing".to_owned()])?;
    }
    Ok(())
}

fn delete_group_with_other_snapshots_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (_, group) = cx.volumes_and_group()?;
    for list in wrong_lists(cx, &group)? {
        refused(cx.delete_group(&group.group_snapshot_id, &list), Code::InvalidArgument)?;
    }
    let got = get(cx, &group.group_snapshot_id, &ids(&group))?;
    ensure!(got.as_ref() == Some(&group), "{got:?} and {group:?}");
    Ok(())
}

fn delete_group_deletes_its_snapshots_and_no_other(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, group) = cx.volumes_and_group()?;
    let alone = cx.snapshot_request(&volumes[0]);
    let alone = cx.snapshot(&alone)?;
    let request = cx.group_request(&[&volumes[0]]);
    let other = cx.group(&request)?;
    cx.delete_group(&group.group_snapshot_id, &ids(&group))?;
    let left: BTreeSet<String> =
        cx.driver.all_snapshots(0, &volumes[0])?.into_iter().map(|one| one.snapshot_id).collect();
    let expected: BTreeSet<String> = ids(&other).into_iter().chain([alone.snapshot_id]).collect();
    ensure!(left == expected, "{left:?}, expected {expected:?}");
    ensure!(cx.driver.all_snapshots(0, &volumes[1])?.is_empty(), "one is left");
    Ok(())
}

fn a_deleted_groups_name_can_be_taken_again(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?.volume_id, cx.volume()?.volume_id);
    let request = cx.group_request(&[&first]);
    let group = cx.group(&request)?;
    cx.delete_group(&group.group_snapshot_id, &ids(&group))?;
    // Of others now: nothing of the first is remembered.
    let source_volume_ids = vec![second, first];
    let again = CreateVolumeGroupSnapshotRequest { source_volume_ids, ..request };
    let again = cx.group(&again)?;
    ensure!(again.snapshots.len() == 2, "{again:?}");
    Ok(())
}

fn ids_of_a_mebibyte_are_refused_for_groups(cx: &mut Cx<'_>) -> Result<()> {
    let long = "x".repeat(1 << 20);
    let volume = cx.volume()?.volume_id;
    let codes = [Code::InvalidArgument, Code::NotFound];
    let request = cx.group_request(&[&long]);
    refused_as(cx.group(&request), &codes)?;
    let request =
        CreateVolumeGroupSnapshotRequest { name: long.clone(), ..cx.group_request(&[&volume]) };
    let status = refused(cx.group(&request), Code::InvalidArgument)?;
    ensure!(status.message().len() < 4096, "a message of {} bytes", status.message().len());
    refused_as(get(cx, &long, &[]), &codes)?;
    match cx.delete_group(&long, &[]) {
        Ok(()) => Ok(()),
        answer => refused(answer, Code::InvalidArgument).map(|_| ()),
    }
}

fn group_secrets_beyond_4_kib_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let request = cx.group_request(&[&volume]);
    let secrets = one("key", &"hush".repeat(1100));
    let request = CreateVolumeGroupSnapshotRequest { secrets, ..request };
    let status = refused(cx.group(&request), Code::InvalidArgument)?;
    ensure!(!status.message().contains("hush"), "an error has a secret: {}", status.message());
    Ok(())
}

fn many_calls_for_one_group_make_one(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?.volume_id, cx.volume()?.volume_id);
    let request = cx.group_request(&[&first, &second]);
    let runtime = cx.driver.runtime();
    let limit = cx.options.limit;
    let calls: Vec<_> = (0..AT_ONCE)
        .map(|_| {
            let mut request = Request::new(request.clone());
            request.set_timeout(limit);
            let mut client = cx.driver.groups();
            runtime.spawn(async move { client.create_volume_group_snapshot(request).await })
        })
        .collect();
    let mut made = BTreeSet::new();
    for call in calls {
        match runtime.block_on(call).context("a call did not end")? {
            Ok(answer) => {
                let group = answer.into_inner().group_snapshot.context("no group")?;
                made.insert(group.group_snapshot_id);
            }
            Err(status) => ensure!(status.code() == Code::Aborted, "{status}"),
        }
    }
    let last = cx.group(&request)?;
    ensure!(made.iter().eq([&last.group_snapshot_id]), "{made:?} and {last:?}");
    Ok(())
}
