//! CreateVolume from a volume.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_content_source::{Type, VolumeSource};
use blockd_csi::proto::{CreateVolumeRequest, VolumeContentSource};
use tonic::Code;

use crate::csi::case::{CLONE, CREATE, LIST_SNAPSHOTS, cases};
use crate::csi::cx::{Cx, range, refused};

cases! { [CREATE, CLONE]
    a_clone_says_what_it_is_of;
    a_clone_again_is_the_same;
    a_clone_again_without_its_source_already_exists;
    a_clone_of_another_volume_already_exists;
    a_clone_of_a_volume_that_is_gone_is_not_found;
    a_clone_of_a_volume_without_id_is_invalid_argument;
    a_clone_smaller_than_its_source_is_out_of_range;
    a_clone_larger_than_its_source_is_that_large;
    a_clone_is_as_large_as_its_source_without_a_range;
    a_clone_of_a_clone_is_made;
    a_clone_and_its_source_are_deleted_in_any_order;
    a_repeated_clone_without_its_source_is_the_same_or_not_found;
    a_clone_leaves_no_snapshot_that_is_seen: LIST_SNAPSHOTS;
    a_clone_of_itself_is_refused;
}

fn of(volume: &str) -> Type {
    Type::Volume(VolumeSource { volume_id: volume.to_owned() })
}

fn a_clone_says_what_it_is_of(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let request = cx.request_from(of(&source.volume_id));
    let clone = cx.create(&request)?;
    ensure!(clone.content_source == request.volume_content_source, "{clone:?}");
    ensure!(clone.volume_id != source.volume_id, "it is its own source");
    ensure!(clone.capacity_bytes >= source.capacity_bytes, "{clone:?} of {source:?}");
    Ok(())
}

fn a_clone_again_is_the_same(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let request = cx.request_from(of(&source.volume_id));
    let first = cx.create(&request)?;
    let again = cx.create(&request)?;
    ensure!(first == again, "{first:?} and {again:?}");
    Ok(())
}

fn a_clone_again_without_its_source_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let request = cx.request_from(of(&source.volume_id));
    cx.create(&request)?;
    let again = CreateVolumeRequest { volume_content_source: None, ..request };
    refused(cx.create(&again), Code::AlreadyExists).map(|_| ())
}

fn a_clone_of_another_volume_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (cx.volume()?, cx.volume()?);
    let request = cx.request_from(of(&first.volume_id));
    cx.create(&request)?;
    let other = Some(VolumeContentSource { r#type: Some(of(&second.volume_id)) });
    let again = CreateVolumeRequest { volume_content_source: other, ..request };
    refused(cx.create(&again), Code::AlreadyExists).map(|_| ())
}

fn a_clone_of_a_volume_that_is_gone_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        let request = cx.request_from(of(id));
        refused(cx.create(&request), Code::NotFound)?;
    }
    Ok(())
}

fn a_clone_of_a_volume_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request_from(of(""));
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn a_clone_smaller_than_its_source_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let large = cx.request_of(cx.options.size * 2, 0);
    let source = cx.create(&large)?;
    let request = CreateVolumeRequest {
        capacity_range: range(cx.options.size, source.capacity_bytes - 4096),
        ..cx.request_from(of(&source.volume_id))
    };
    refused(cx.create(&request), Code::OutOfRange).map(|_| ())
}

fn a_clone_larger_than_its_source_is_that_large(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let size = source.capacity_bytes * 3;
    let request = CreateVolumeRequest {
        capacity_range: range(size, size),
        ..cx.request_from(of(&source.volume_id))
    };
    let clone = cx.create(&request)?;
    ensure!(clone.capacity_bytes == size, "{clone:?} for {size}");
    ensure!(cx.create(&request)? == clone, "another one when it is asked for again");
    Ok(())
}

fn a_clone_is_as_large_as_its_source_without_a_range(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let from = cx.request_from(of(&source.volume_id));
    let clone = cx.create(&CreateVolumeRequest { capacity_range: None, ..from })?;
    ensure!(clone.capacity_bytes >= source.capacity_bytes, "{clone:?} of {source:?}");
    Ok(())
}

fn a_clone_of_a_clone_is_made(cx: &mut Cx<'_>) -> Result<()> {
    let mut source = cx.volume()?.volume_id;
    for _ in 0..4 {
        let request = cx.request_from(of(&source));
        source = cx.create(&request)?.volume_id;
    }
    Ok(())
}

fn a_clone_and_its_source_are_deleted_in_any_order(cx: &mut Cx<'_>) -> Result<()> {
    for source_first in [true, false] {
        let source = cx.volume()?.volume_id;
        let request = cx.request_from(of(&source));
        let clone = cx.create(&request)?.volume_id;
        let (first, second) = if source_first { (source, clone) } else { (clone, source) };
        cx.delete(&first)?;
        cx.delete(&second)?;
    }
    Ok(())
}

fn a_repeated_clone_without_its_source_is_the_same_or_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?.volume_id;
    let request = cx.request_from(of(&source));
    let first = cx.create(&request)?;
    cx.delete(&source)?;
    // It is there as it was asked for, and what it was asked to be made of is not.
    match cx.create(&request) {
        Ok(again) => ensure!(again.volume_id == first.volume_id, "{first:?} and {again:?}"),
        answer => drop(refused(answer, Code::NotFound)?),
    }
    Ok(())
}

fn a_clone_leaves_no_snapshot_that_is_seen(cx: &mut Cx<'_>) -> Result<()> {
    let source = cx.volume()?;
    let before = cx.driver.all_snapshots(0, "")?;
    let request = cx.request_from(of(&source.volume_id));
    cx.create(&request)?;
    let after = cx.driver.all_snapshots(0, "")?;
    ensure!(before == after, "{after:?}");
    Ok(())
}

fn a_clone_of_itself_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let volume = cx.create(&request)?;
    let itself = Some(VolumeContentSource { r#type: Some(of(&volume.volume_id)) });
    let again = CreateVolumeRequest { volume_content_source: itself, ..request };
    refused(cx.create(&again), Code::AlreadyExists).context("made of itself")?;
    Ok(())
}
