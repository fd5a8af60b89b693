//! GetMetadataAllocated and GetMetadataDelta, as far as that goes without data. Those with data are
//! in the test `csi_changes`.

use anyhow::{Result, ensure};
use blockd_csi::proto::{
    BlockMetadata, BlockMetadataType, CreateSnapshotRequest, GetMetadataAllocatedRequest,
    GetMetadataAllocatedResponse, GetMetadataDeltaRequest, GetMetadataDeltaResponse, Snapshot,
};
use tonic::{Code, Request};

use crate::csi::case::Need::Rows;
use crate::csi::case::{CHANGES, CREATE, GROUP, SNAPSHOT, cases};
use crate::csi::cx::{Answer, Cx, one, refused, refused_as, says};

cases! { [CREATE, SNAPSHOT, CHANGES]
    allocated_without_id_is_invalid_argument;
    allocated_of_an_unknown_snapshot_is_not_found;
    allocated_of_a_volume_is_not_found;
    allocated_from_beyond_the_end_is_out_of_range;
    allocated_with_a_negative_number_of_results_is_invalid_argument: Rows;
    allocated_blocks_come_in_messages_of_the_requested_length;
    delta_without_ids_is_invalid_argument;
    delta_of_an_unknown_snapshot_is_not_found;
    delta_from_beyond_the_end_is_out_of_range;
    delta_with_a_negative_number_of_results_is_invalid_argument: Rows;
    delta_of_two_volumes_is_invalid_argument: Rows;
    delta_of_a_volume_and_its_clone_is_invalid_argument: Rows;
    delta_back_in_time_is_invalid_argument: Rows;
    delta_of_a_snapshot_and_itself_is_empty: Rows;
    delta_of_what_was_not_written_is_empty;
    a_snapshot_made_anew_is_not_compared_as_the_old_one: Rows;
    changes_are_listed_for_snapshots_of_groups: GROUP;
    ids_of_a_mebibyte_are_refused_for_changes;
    secrets_of_changes_beyond_4_kib_are_refused: Rows;
    streams_without_a_reader_block_no_other_call;
}

/// Offsets that no volume has.
const NEVER: [i64; 3] = [-1, i64::MIN, i64::MAX];

fn whole(id: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest { snapshot_id: id.to_owned(), ..Default::default() }
}

fn delta(base: &str, target: &str) -> GetMetadataDeltaRequest {
    GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        ..Default::default()
    }
}

/// The content of a message of either kind.
type Said = (i32, i64, Vec<BlockMetadata>);

fn allocated(cx: &Cx<'_>, request: GetMetadataAllocatedRequest) -> Answer<Vec<Said>> {
    let said = |one: GetMetadataAllocatedResponse| {
        (one.block_metadata_type, one.volume_capacity_bytes, one.block_metadata)
    };
    cx.driver.get_metadata_allocated(request).map(|all| all.into_iter().map(said).collect())
}

fn changed(cx: &Cx<'_>, request: GetMetadataDeltaRequest) -> Answer<Vec<Said>> {
    let said = |one: GetMetadataDeltaResponse| {
        (one.block_metadata_type, one.volume_capacity_bytes, one.block_metadata)
    };
    cx.driver.get_metadata_delta(request).map(|all| all.into_iter().map(said).collect())
}

/// The rules of a stream: one style, one size, in order, no overlap, no message too long.
fn check(messages: &[Said], from: i64, max: i32) -> Result<Vec<BlockMetadata>> {
    let mut all: Vec<BlockMetadata> = Vec::new();
    for (style, size, ranges) in messages {
        ensure!((*style, *size) == (messages[0].0, messages[0].1), "{messages:?}");
        let known = *style != 0 && BlockMetadataType::try_from(*style).is_ok();
        ensure!(known, "the style {style}");
        let most = usize::try_from(max).unwrap_or(0);
        ensure!(max == 0 || ranges.len() <= most, "{} of {max}", ranges.len());
        for range in ranges {
            let end = all.last().map_or(0, |last| last.byte_offset + last.size_bytes);
            ensure!(range.byte_offset >= end && range.size_bytes > 0, "{range:?} after {end}");
            let ours = range.byte_offset + range.size_bytes;
            ensure!(ours > from && ours <= *size, "{range:?} of {size} from {from}");
            all.push(*range);
        }
    }
    let fixed = i32::from(BlockMetadataType::FixedLength);
    let same = |one: &BlockMetadata| one.size_bytes == all[0].size_bytes;
    ensure!(messages.first().is_none_or(|one| one.0 != fixed) || all.iter().all(same), "{all:?}");
    Ok(all)
}

/// A new volume with two snapshots.
fn two(cx: &mut Cx<'_>) -> Result<[Snapshot; 2]> {
    let (volume, first) = cx.volume_and_snapshot()?;
    let second = cx.snapshot_request(&volume.volume_id);
    Ok([first, cx.snapshot(&second)?])
}

fn allocated_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(allocated(cx, whole("")), Code::InvalidArgument).map(|_| ())
}

fn allocated_of_an_unknown_snapshot_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_snapshot()?;
    for id in [gone.as_str(), "nothing", "a/b", "a/b@c", "../x", "🦀"] {
        refused(allocated(cx, whole(id)), Code::NotFound)?;
    }
    Ok(())
}

fn allocated_of_a_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?.volume_id;
    refused(allocated(cx, whole(&volume)), Code::NotFound).map(|_| ())
}

fn allocated_from_beyond_the_end_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    for starting_offset in NEVER.into_iter().chain([volume.capacity_bytes + 1]) {
        let request =
            GetMetadataAllocatedRequest { starting_offset, ..whole(&snapshot.snapshot_id) };
        refused(allocated(cx, request), Code::OutOfRange)?;
    }
    // A consumer that has received everything resumes from there.
    let starting_offset = volume.capacity_bytes;
    let request = GetMetadataAllocatedRequest { starting_offset, ..whole(&snapshot.snapshot_id) };
    let ranges = check(&allocated(cx, request)?, starting_offset, 0)?;
    ensure!(ranges.is_empty(), "{ranges:?}");
    Ok(())
}

fn allocated_with_a_negative_number_of_results_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    for max_results in [-1, i32::MIN] {
        let request = GetMetadataAllocatedRequest { max_results, ..whole(&snapshot.snapshot_id) };
        let status = refused(allocated(cx, request), Code::InvalidArgument)?;
        says(&status, &["max_results"])?;
    }
    Ok(())
}

fn allocated_blocks_come_in_messages_of_the_requested_length(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    for max_results in [0, 1, 2, i32::MAX] {
        for starting_offset in [0, 1, 4095, 4096, volume.capacity_bytes - 1] {
            let request = GetMetadataAllocatedRequest {
                max_results,
                starting_offset,
                ..whole(&snapshot.snapshot_id)
            };
            let messages = allocated(cx, request)?;
            check(&messages, starting_offset, max_results)?;
            let says_size = |one: &Said| one.1 == snapshot.size_bytes;
            ensure!(messages.iter().all(says_size), "{messages:?} of {snapshot:?}");
            ensure!(!cx.options.rows || !messages.is_empty(), "no message has the size");
        }
    }
    Ok(())
}

fn delta_without_ids_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let id = snapshot.snapshot_id.as_str();
    for (base, target) in [("", id), (id, ""), ("", "")] {
        refused(changed(cx, delta(base, target)), Code::InvalidArgument)?;
    }
    Ok(())
}

fn delta_of_an_unknown_snapshot_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_snapshot()?;
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    let id = snapshot.snapshot_id.as_str();
    for unknown in [gone.as_str(), &volume.volume_id, "nothing", "a/b", "a/b@c", "../x", "🦀"] {
        refused(changed(cx, delta(unknown, id)), Code::NotFound)?;
        refused(changed(cx, delta(id, unknown)), Code::NotFound)?;
    }
    Ok(())
}

fn delta_from_beyond_the_end_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let [first, second] = two(cx)?;
    let request = delta(&first.snapshot_id, &second.snapshot_id);
    for starting_offset in NEVER.into_iter().chain([second.size_bytes + 1]) {
        let request = GetMetadataDeltaRequest { starting_offset, ..request.clone() };
        refused(changed(cx, request), Code::OutOfRange)?;
    }
    let starting_offset = second.size_bytes;
    let request = GetMetadataDeltaRequest { starting_offset, ..request };
    let ranges = check(&changed(cx, request)?, starting_offset, 0)?;
    ensure!(ranges.is_empty(), "{ranges:?}");
    Ok(())
}

fn delta_with_a_negative_number_of_results_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let [first, second] = two(cx)?;
    for max_results in [-1, i32::MIN] {
        let request = delta(&first.snapshot_id, &second.snapshot_id);
        let request = GetMetadataDeltaRequest { max_results, ..request };
        let status = refused(changed(cx, request), Code::InvalidArgument)?;
        says(&status, &["max_results"])?;
    }
    Ok(())
}

fn delta_of_two_volumes_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let (_, first) = cx.volume_and_snapshot()?;
    let (_, second) = cx.volume_and_snapshot()?;
    let request = delta(&first.snapshot_id, &second.snapshot_id);
    let status = refused(changed(cx, request), Code::InvalidArgument)?;
    says(&status, &["base_snapshot_id"])
}

fn delta_of_a_volume_and_its_clone_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    use blockd_csi::proto::volume_content_source::{SnapshotSource, Type};
    let (_, first) = cx.volume_and_snapshot()?;
    let snapshot_id = first.snapshot_id.clone();
    let request = cx.request_from(Type::Snapshot(SnapshotSource { snapshot_id }));
    let clone = cx.create(&request)?;
    let second = cx.snapshot_request(&clone.volume_id);
    let second = cx.snapshot(&second)?;
    let request = delta(&first.snapshot_id, &second.snapshot_id);
    refused(changed(cx, request), Code::InvalidArgument).map(|_| ())
}

fn delta_back_in_time_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let [first, second] = two(cx)?;
    let request = delta(&second.snapshot_id, &first.snapshot_id);
    let status = refused(changed(cx, request), Code::InvalidArgument)?;
    says(&status, &["base_snapshot_id", &first.snapshot_id, &second.snapshot_id])
}

fn delta_of_a_snapshot_and_itself_is_empty(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request = delta(&snapshot.snapshot_id, &snapshot.snapshot_id);
    let ranges = check(&changed(cx, request)?, 0, 0)?;
    ensure!(ranges.is_empty(), "{ranges:?}");
    Ok(())
}

fn delta_of_what_was_not_written_is_empty(cx: &mut Cx<'_>) -> Result<()> {
    let [first, second] = two(cx)?;
    for max_results in [0, 1, i32::MAX] {
        let request = delta(&first.snapshot_id, &second.snapshot_id);
        let request = GetMetadataDeltaRequest { max_results, ..request };
        let ranges = check(&changed(cx, request)?, 0, max_results)?;
        ensure!(!cx.options.rows || ranges.is_empty(), "{ranges:?}");
    }
    Ok(())
}

fn a_snapshot_made_anew_is_not_compared_as_the_old_one(cx: &mut Cx<'_>) -> Result<()> {
    // A volume of a former one's name, and a snapshot of each.
    let request = cx.request();
    let volume = cx.create(&request)?.volume_id;
    let (first, second) = (cx.snapshot_request(&volume), cx.snapshot_request(&volume));
    let first = cx.snapshot(&first)?.snapshot_id;
    cx.delete(&volume)?;
    let again = cx.create(&request)?.volume_id;
    ensure!(again == volume, "{again} and {volume}");
    let second: CreateSnapshotRequest = second;
    let second = cx.snapshot(&second)?.snapshot_id;
    refused(changed(cx, delta(&first, &second)), Code::InvalidArgument).map(|_| ())
}

fn changes_are_listed_for_snapshots_of_groups(cx: &mut Cx<'_>) -> Result<()> {
    let (volumes, first) = cx.volumes_and_group()?;
    let request = cx.group_request(&[&volumes[0], &volumes[1]]);
    let second = cx.group(&request)?;
    for (base, target) in first.snapshots.iter().zip(&second.snapshots) {
        check(&allocated(cx, whole(&base.snapshot_id))?, 0, 0)?;
        check(&changed(cx, delta(&base.snapshot_id, &target.snapshot_id))?, 0, 0)?;
    }
    Ok(())
}

fn ids_of_a_mebibyte_are_refused_for_changes(cx: &mut Cx<'_>) -> Result<()> {
    let long = "x".repeat(1 << 20);
    let codes = [Code::InvalidArgument, Code::NotFound];
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let id = snapshot.snapshot_id;
    let status = refused_as(allocated(cx, whole(&long)), &codes)?;
    ensure!(status.message().len() < 4096, "a message of {} bytes", status.message().len());
    refused_as(changed(cx, delta(&long, &id)), &codes)?;
    refused_as(changed(cx, delta(&id, &long)), &codes)?;
    Ok(())
}

fn secrets_of_changes_beyond_4_kib_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let secrets = one("key", &"hush".repeat(1100));
    let request = GetMetadataAllocatedRequest { secrets, ..whole(&snapshot.snapshot_id) };
    let status = refused(allocated(cx, request), Code::InvalidArgument)?;
    ensure!(!status.message().contains("hush"), "an error has a secret: {}", status.message());
    Ok(())
}

fn streams_without_a_reader_block_no_other_call(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let runtime = cx.driver.runtime();
    let mut open = Vec::new();
    for _ in 0..32 {
        let mut client = cx.driver.changes();
        let request = Request::new(whole(&snapshot.snapshot_id));
        match runtime.block_on(client.get_metadata_allocated(request)) {
            Ok(stream) => open.push(stream),
            // There is a limit to them.
            Err(status) => ensure!(status.code() == Code::ResourceExhausted, "{status}"),
        }
    }
    cx.volume()?;
    drop(open);
    cx.volume()?;
    Ok(())
}
