//! CreateSnapshot, DeleteSnapshot, ListSnapshots, GetSnapshot.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::{
    CreateSnapshotRequest, GetSnapshotRequest, ListSnapshotsRequest, Snapshot,
};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CREATE, EXPAND, GET_SNAPSHOT, LIST_SNAPSHOTS, SNAPSHOT, cases};
use crate::csi::cx::{Answer, Cx, one, range, refused, says};

cases! { [CREATE, SNAPSHOT]
    create_snapshot_without_name_is_invalid_argument;
    create_snapshot_without_source_is_invalid_argument;
    create_snapshot_of_an_unknown_volume_is_not_found;
    a_snapshot_is_no_volume_to_take_one_of;
    create_snapshot_says_what_it_made;
    create_snapshot_again_gives_the_same_snapshot;
    create_snapshot_again_of_another_volume_already_exists;
    snapshot_names_of_128_characters_are_accepted;
    snapshot_names_of_signs_are_accepted;
    a_snapshot_name_with_control_characters_is_invalid_argument;
    an_unknown_snapshot_parameter_is_refused_by_name: Rows;
    a_snapshot_keeps_its_size_when_its_volume_grows: EXPAND;
    delete_snapshot_without_id_is_invalid_argument;
    delete_snapshot_that_is_gone_is_ok;
    delete_snapshot_that_never_was_is_ok;
    a_deleted_snapshot_can_be_taken_again;
    delete_volume_deletes_no_snapshot_by_its_id;
    a_new_snapshot_is_listed: LIST_SNAPSHOTS;
    snapshots_are_listed_by_their_id: LIST_SNAPSHOTS;
    snapshots_are_listed_by_their_volume: LIST_SNAPSHOTS;
    snapshots_of_what_is_unknown_are_an_empty_list: LIST_SNAPSHOTS;
    pages_of_snapshots_lack_none: LIST_SNAPSHOTS;
    an_unknown_token_of_snapshots_is_aborted: LIST_SNAPSHOTS;
    a_negative_number_of_snapshots_is_invalid_argument: LIST_SNAPSHOTS;
    get_snapshot_without_id_is_invalid_argument: GET_SNAPSHOT;
    get_snapshot_of_an_unknown_one_is_not_found: GET_SNAPSHOT;
    get_snapshot_is_as_it_was_taken: GET_SNAPSHOT;
}

fn create_snapshot_without_name_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let request = CreateSnapshotRequest { name: String::new(), ..request };
    refused(cx.snapshot(&request), Code::InvalidArgument).map(|_| ())
}

fn create_snapshot_without_source_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.snapshot_request("");
    refused(cx.snapshot(&request), Code::InvalidArgument).map(|_| ())
}

fn create_snapshot_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        let request = cx.snapshot_request(id);
        refused(cx.snapshot(&request), Code::NotFound)?;
    }
    Ok(())
}

fn a_snapshot_is_no_volume_to_take_one_of(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request = cx.snapshot_request(&snapshot.snapshot_id);
    refused(cx.snapshot(&request), Code::NotFound).map(|_| ())
}

fn create_snapshot_says_what_it_made(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    ensure!((1..=128).contains(&snapshot.snapshot_id.len()), "{snapshot:?}");
    ensure!(snapshot.source_volume_id == volume.volume_id, "{snapshot:?} of {volume:?}");
    let time = snapshot.creation_time.as_ref().context("no creation_time")?;
    ensure!(time.seconds > 1_600_000_000 && (0..1_000_000_000).contains(&time.nanos), "{time:?}");
    ensure!(snapshot.size_bytes >= 0, "{snapshot:?}");
    ensure!(!cx.options.rows || snapshot.size_bytes == volume.capacity_bytes, "{snapshot:?}");
    ensure!(!cx.options.rows || snapshot.ready_to_use, "{snapshot:?}");
    Ok(())
}

fn create_snapshot_again_gives_the_same_snapshot(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let first = cx.snapshot(&request)?;
    let again = cx.snapshot(&request)?;
    ensure!(first.snapshot_id == again.snapshot_id, "{first:?} and {again:?}");
    ensure!(first.creation_time == again.creation_time, "{first:?} and {again:?}");
    Ok(())
}

fn create_snapshot_again_of_another_volume_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?, cx.volume()?);
    let request = cx.snapshot_request(&first.volume_id);
    cx.snapshot(&request)?;
    let again = CreateSnapshotRequest { source_volume_id: second.volume_id, ..request };
    refused(cx.snapshot(&again), Code::AlreadyExists).map(|_| ())
}

fn snapshot_named(cx: &mut Cx<'_>, volume: &str, name: String) -> Result<String> {
    let request = CreateSnapshotRequest { name, ..cx.snapshot_request(volume) };
    let first = cx.snapshot(&request)?;
    let again = cx.snapshot(&request)?;
    ensure!(first.snapshot_id == again.snapshot_id, "{first:?} and {again:?}");
    ensure!((1..=128).contains(&first.snapshot_id.len()), "{first:?}");
    Ok(first.snapshot_id)
}

fn snapshot_names_of_128_characters_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    // The id has to contain both names, and both are as long as they can be.
    let name = cx.long_name('v');
    let mut request = cx.request();
    request.name = name;
    let volume = cx.create(&request)?.volume_id;
    for fill in ['x', 'ß', '🦀'] {
        let start = cx.name();
        let rest = 128 - start.chars().count();
        let start = format!("{start}{}", fill.to_string().repeat(rest - 1));
        let first = snapshot_named(cx, &volume, format!("{start}a"))?;
        let second = snapshot_named(cx, &volume, format!("{start}b"))?;
        ensure!(first != second, "both are {first}");
    }
    Ok(())
}

fn snapshot_names_of_signs_are_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let mut ids = BTreeSet::new();
    let names = ["@", "~", "/", "..", ".", " ", "\t", "a@b", "~clone-0123456789abcdef", "a/b"];
    for name in names {
        ids.insert(snapshot_named(cx, &volume, name.to_owned())?);
    }
    ensure!(ids.len() == names.len(), "two of them are one: {ids:?}");
    Ok(())
}

fn a_snapshot_name_with_control_characters_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    for sign in ['\0', '\u{8}', '\u{1f}', '\u{7f}', '\u{9f}'] {
        let mut request = cx.snapshot_request(&volume);
        request.name.push(sign);
        refused(cx.snapshot(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn an_unknown_snapshot_parameter_is_refused_by_name(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    let request = cx.snapshot_request(&volume);
    let request = CreateSnapshotRequest { parameters: one("no-such-key", "1"), ..request };
    let status = refused(cx.snapshot(&request), Code::InvalidArgument)?;
    says(&status, &["no-such-key"])
}

/// Row: T17.
fn a_snapshot_keeps_its_size_when_its_volume_grows(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, _) = cx.volume_and_snapshot()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let before = cx.snapshot(&request)?;
    let grow = blockd_csi::proto::ControllerExpandVolumeRequest {
        volume_id: volume.volume_id,
        capacity_range: range(volume.capacity_bytes * 2, 0),
        ..Default::default()
    };
    cx.driver.controller_expand_volume(grow)?;
    let after = cx.snapshot(&request)?;
    ensure!(before == after, "{before:?} and {after:?}");
    Ok(())
}

fn delete_snapshot_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(cx.delete_snapshot(""), Code::InvalidArgument).map(|_| ())
}

fn delete_snapshot_that_is_gone_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.gone_snapshot()?;
    for _ in 0..3 {
        cx.delete_snapshot(&id)?;
    }
    Ok(())
}

fn delete_snapshot_that_never_was_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for id in ["nothing", "a/b", "a/b@c", "@", "a@", "../../etc", "🦀", "default/csi.x@"] {
        cx.delete_snapshot(id)?;
    }
    Ok(())
}

fn a_deleted_snapshot_can_be_taken_again(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let first = cx.snapshot(&request)?;
    cx.delete_snapshot(&first.snapshot_id)?;
    // Of another volume now: nothing of the first is remembered.
    let other = cx.volume()?;
    let again = CreateSnapshotRequest { source_volume_id: other.volume_id.clone(), ..request };
    let again = cx.snapshot(&again)?;
    ensure!(again.source_volume_id == other.volume_id, "{again:?}");
    Ok(())
}

fn delete_volume_deletes_no_snapshot_by_its_id(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    // Neither is the other: what is unknown is no error, and nothing happens.
    cx.delete(&snapshot.snapshot_id)?;
    cx.delete_snapshot(&volume.volume_id)?;
    let mut request = cx.snapshot_request(&volume.volume_id);
    cx.snapshot(&request).context("the volume is gone")?;
    request.name = cx.name();
    let source = blockd_csi::proto::volume_content_source::SnapshotSource {
        snapshot_id: snapshot.snapshot_id,
    };
    let request = cx.request_from(blockd_csi::proto::volume_content_source::Type::Snapshot(source));
    cx.create(&request).context("the snapshot is gone")?;
    Ok(())
}

fn listed(cx: &Cx<'_>, request: ListSnapshotsRequest) -> Answer<Vec<Snapshot>> {
    let answer = cx.driver.list_snapshots(request)?;
    Ok(answer.entries.into_iter().filter_map(|entry| entry.snapshot).collect())
}

fn a_new_snapshot_is_listed(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let all = listed(cx, ListSnapshotsRequest::default())?;
    ensure!(all.contains(&snapshot), "{snapshot:?} is not in {all:?}");
    Ok(())
}

fn snapshots_are_listed_by_their_id(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    let other = cx.snapshot_request(&volume.volume_id);
    cx.snapshot(&other)?;
    let snapshot_id = snapshot.snapshot_id.clone();
    let all = listed(cx, ListSnapshotsRequest { snapshot_id, ..Default::default() })?;
    ensure!(all == [snapshot], "{all:?}");
    Ok(())
}

fn snapshots_are_listed_by_their_volume(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, first) = cx.volume_and_snapshot()?;
    let second = cx.snapshot_request(&volume.volume_id);
    let second = cx.snapshot(&second)?;
    cx.volume_and_snapshot()?;
    let source_volume_id = volume.volume_id.clone();
    let all = listed(cx, ListSnapshotsRequest { source_volume_id, ..Default::default() })?;
    ensure!(all.len() == 2 && all.contains(&first) && all.contains(&second), "{all:?}");
    let paged = cx.driver.all_snapshots(1, &volume.volume_id)?;
    ensure!(paged == all, "{paged:?} in pages, {all:?} at once");
    Ok(())
}

fn snapshots_of_what_is_unknown_are_an_empty_list(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = (cx.gone_volume()?, cx.gone_snapshot()?);
    for id in [volume.as_str(), snapshot.as_str(), "nothing", "a/b", "a/b@c", "../x", "🦀"] {
        let source_volume_id = id.to_owned();
        let all = listed(cx, ListSnapshotsRequest { source_volume_id, ..Default::default() })?;
        ensure!(all.is_empty(), "of the volume {id}: {all:?}");
        let snapshot_id = id.to_owned();
        let all = listed(cx, ListSnapshotsRequest { snapshot_id, ..Default::default() })?;
        ensure!(all.is_empty(), "of the id {id}: {all:?}");
    }
    Ok(())
}

fn pages_of_snapshots_lack_none(cx: &mut Cx<'_>) -> Result<()> {
    let mut made = BTreeSet::new();
    for _ in 0..2 {
        let (volume, snapshot) = cx.volume_and_snapshot()?;
        made.insert(snapshot.snapshot_id);
        for _ in 0..2 {
            let request = cx.snapshot_request(&volume.volume_id);
            made.insert(cx.snapshot(&request)?.snapshot_id);
        }
    }
    for length in [1, 2, 4] {
        let all = cx.driver.all_snapshots(length, "")?;
        let ids: BTreeSet<String> = all.iter().map(|one| one.snapshot_id.clone()).collect();
        ensure!(ids.len() == all.len(), "one stands on two pages of {length}");
        ensure!(ids.is_superset(&made), "pages of {length} lack some of {made:?}");
    }
    Ok(())
}

fn an_unknown_token_of_snapshots_is_aborted(cx: &mut Cx<'_>) -> Result<()> {
    for token in ["no-such-token", "-1", "99999999999999999999", "🦀"] {
        let starting_token = token.to_owned();
        let request = ListSnapshotsRequest { starting_token, ..Default::default() };
        refused(listed(cx, request), Code::Aborted)?;
    }
    Ok(())
}

fn a_negative_number_of_snapshots_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = ListSnapshotsRequest { max_entries: -1, ..Default::default() };
    refused(listed(cx, request), Code::InvalidArgument).map(|_| ())
}

fn get(cx: &Cx<'_>, id: &str) -> Answer<Option<Snapshot>> {
    let request = GetSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    cx.driver.get_snapshot(request).map(|answer| answer.snapshot)
}

fn get_snapshot_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(get(cx, ""), Code::InvalidArgument).map(|_| ())
}

fn get_snapshot_of_an_unknown_one_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_snapshot()?;
    let volume = cx.volume()?.volume_id;
    for id in [gone.as_str(), volume.as_str(), "nothing", "a/b", "a/b@c", "../x", "🦀"] {
        refused(get(cx, id), Code::NotFound)?;
    }
    Ok(())
}

fn get_snapshot_is_as_it_was_taken(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let got = get(cx, &snapshot.snapshot_id)?;
    ensure!(got.as_ref() == Some(&snapshot), "{got:?} and {snapshot:?}");
    Ok(())
}
