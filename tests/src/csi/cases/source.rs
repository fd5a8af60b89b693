//! CreateVolume from a snapshot.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type};
use blockd_csi::proto::{CreateVolumeRequest, VolumeContentSource};
use tonic::Code;

use crate::csi::case::{CREATE, SNAPSHOT, cases};
use crate::csi::cx::{Cx, range, refused};

cases! { [CREATE, SNAPSHOT]
    a_volume_of_a_snapshot_says_so;
    a_volume_of_a_snapshot_again_is_the_same;
    a_volume_of_a_snapshot_again_without_it_already_exists;
    a_volume_of_another_snapshot_already_exists;
    a_volume_of_a_snapshot_that_is_gone_is_not_found;
    a_volume_of_a_snapshot_without_id_is_invalid_argument;
    a_volume_of_a_source_of_no_type_is_invalid_argument;
    a_volume_smaller_than_its_snapshot_is_out_of_range;
    a_volume_larger_than_its_snapshot_is_that_large;
    a_volume_of_a_snapshot_is_as_large_without_a_range;
    a_snapshot_can_go_before_a_volume_made_of_it;
    a_volume_id_is_no_snapshot_to_make_one_of;
}

fn of(snapshot: &str) -> Type {
    Type::Snapshot(SnapshotSource { snapshot_id: snapshot.to_owned() })
}

fn a_volume_of_a_snapshot_says_so(cx: &mut Cx<'_>) -> Result<()> {
    let (source, snapshot) = cx.volume_and_snapshot()?;
    let request = cx.request_from(of(&snapshot.snapshot_id));
    let volume = cx.create(&request)?;
    ensure!(volume.content_source == request.volume_content_source, "{volume:?}");
    ensure!(volume.volume_id != source.volume_id, "it is its own source");
    ensure!(volume.capacity_bytes >= snapshot.size_bytes, "{volume:?} of {snapshot:?}");
    Ok(())
}

fn a_volume_of_a_snapshot_again_is_the_same(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request = cx.request_from(of(&snapshot.snapshot_id));
    let first = cx.create(&request)?;
    let again = cx.create(&request)?;
    ensure!(first == again, "{first:?} and {again:?}");
    Ok(())
}

fn a_volume_of_a_snapshot_again_without_it_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request = cx.request_from(of(&snapshot.snapshot_id));
    cx.create(&request)?;
    let again = CreateVolumeRequest { volume_content_source: None, ..request };
    refused(cx.create(&again), Code::AlreadyExists).map(|_| ())
}

fn a_volume_of_another_snapshot_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, first) = cx.volume_and_snapshot()?;
    let second = cx.snapshot_request(&volume.volume_id);
    let second = cx.snapshot(&second)?;
    let (_, third) = cx.volume_and_snapshot()?;
    let request = cx.request_from(of(&first.snapshot_id));
    cx.create(&request)?;
    for other in [second, third] {
        let again = CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource {
                r#type: Some(of(&other.snapshot_id)),
            }),
            ..request.clone()
        };
        refused(cx.create(&again), Code::AlreadyExists)?;
    }
    Ok(())
}

fn a_volume_of_a_snapshot_that_is_gone_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_snapshot()?;
    for id in [gone.as_str(), "nothing", "a/b@c", "../x", "🦀"] {
        let request = cx.request_from(of(id));
        refused(cx.create(&request), Code::NotFound)?;
    }
    Ok(())
}

fn a_volume_of_a_snapshot_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request_from(of(""));
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn a_volume_of_a_source_of_no_type_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume_content_source = Some(VolumeContentSource { r#type: None });
    let request = CreateVolumeRequest { volume_content_source, ..cx.request() };
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn a_volume_smaller_than_its_snapshot_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let large = cx.request_of(cx.options.size * 2, 0);
    let source = cx.create(&large)?;
    let snapshot = cx.snapshot_request(&source.volume_id);
    let snapshot = cx.snapshot(&snapshot)?;
    let request = CreateVolumeRequest {
        capacity_range: range(cx.options.size, source.capacity_bytes - 4096),
        ..cx.request_from(of(&snapshot.snapshot_id))
    };
    refused(cx.create(&request), Code::OutOfRange).map(|_| ())
}

fn a_volume_larger_than_its_snapshot_is_that_large(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let size = snapshot.size_bytes.max(cx.options.size) * 3;
    let request = CreateVolumeRequest {
        capacity_range: range(size, size),
        ..cx.request_from(of(&snapshot.snapshot_id))
    };
    let volume = cx.create(&request)?;
    ensure!(volume.capacity_bytes == size, "{volume:?} for {size}");
    ensure!(cx.create(&request)? == volume, "another one when it is asked for again");
    Ok(())
}

fn a_volume_of_a_snapshot_is_as_large_without_a_range(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request =
        CreateVolumeRequest { capacity_range: None, ..cx.request_from(of(&snapshot.snapshot_id)) };
    let volume = cx.create(&request)?;
    ensure!(volume.capacity_bytes >= snapshot.size_bytes, "{volume:?} of {snapshot:?}");
    Ok(())
}

fn a_snapshot_can_go_before_a_volume_made_of_it(cx: &mut Cx<'_>) -> Result<()> {
    let (_, snapshot) = cx.volume_and_snapshot()?;
    let request = cx.request_from(of(&snapshot.snapshot_id));
    let volume = cx.create(&request)?;
    match cx.delete_snapshot(&snapshot.snapshot_id) {
        Ok(()) => {}
        // A driver may refuse it while it is in use.
        Err(status) if status.code() == Code::FailedPrecondition => {
            cx.delete(&volume.volume_id)?;
            cx.delete_snapshot(&snapshot.snapshot_id)?;
            return Ok(());
        }
        Err(status) => return Err(status.into()),
    }
    let next = cx.snapshot_request(&volume.volume_id);
    cx.snapshot(&next).context("the volume is gone with its snapshot")?;
    Ok(())
}

fn a_volume_id_is_no_snapshot_to_make_one_of(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = cx.request_from(of(&volume.volume_id));
    refused(cx.create(&request), Code::NotFound).map(|_| ())
}
