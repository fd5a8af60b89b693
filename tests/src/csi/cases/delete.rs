//! DeleteVolume.

use anyhow::{Result, ensure};
use tonic::Code;

use crate::csi::case::{CREATE, LIST, LIST_SNAPSHOTS, SNAPSHOT, cases};
use crate::csi::cx::{Cx, refused};

cases! { [CREATE]
    delete_volume_without_id_is_invalid_argument;
    delete_volume_that_is_gone_is_ok;
    delete_volume_that_never_was_is_ok;
    a_deleted_volume_is_listed_no_more: LIST;
    a_deleted_volume_can_be_made_again;
    a_deleted_volume_leaves_its_snapshots_as_they_were: SNAPSHOT, LIST_SNAPSHOTS;
    delete_looks_at_no_access_mode;
}

fn delete_volume_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(cx.delete(""), Code::InvalidArgument).map(|_| ())
}

fn delete_volume_that_is_gone_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.gone_volume()?;
    for _ in 0..3 {
        cx.delete(&id)?;
    }
    Ok(())
}

fn delete_volume_that_never_was_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for id in ["nothing", "a/b", "a/b/c", "/", "../../etc", "default/", "🦀", "a\nb", "@", "~"] {
        cx.delete(id)?;
    }
    Ok(())
}

fn a_deleted_volume_is_listed_no_more(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.gone_volume()?;
    let listed = cx.driver.all_volumes(0)?;
    ensure!(listed.iter().all(|volume| volume.volume_id != id), "{id} is still listed");
    Ok(())
}

fn a_deleted_volume_can_be_made_again(cx: &mut Cx<'_>) -> Result<()> {
    let mut request = cx.request_of(cx.options.size, 0);
    let first = cx.create(&request)?;
    cx.delete(&first.volume_id)?;
    // With other properties: nothing of the first is remembered.
    request.capacity_range = crate::csi::cx::range(cx.options.size * 2, 0);
    let second = cx.create(&request)?;
    ensure!(second.capacity_bytes >= cx.options.size * 2, "{second:?}");
    Ok(())
}

fn a_deleted_volume_leaves_its_snapshots_as_they_were(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, snapshot) = cx.volume_and_snapshot()?;
    match cx.delete(&volume.volume_id) {
        Ok(()) => {}
        // A driver may refuse that, and then changes nothing.
        Err(status) if status.code() == Code::FailedPrecondition => {}
        Err(status) => return Err(status.into()),
    }
    let listed = cx.driver.all_snapshots(0, "")?;
    ensure!(listed.contains(&snapshot), "{snapshot:?} is not in {listed:?}");
    let source = blockd_csi::proto::volume_content_source::SnapshotSource {
        snapshot_id: snapshot.snapshot_id,
    };
    let request = cx.request_from(blockd_csi::proto::volume_content_source::Type::Snapshot(source));
    cx.create(&request)?;
    Ok(())
}

/// Row: W19.
fn delete_looks_at_no_access_mode(cx: &mut Cx<'_>) -> Result<()> {
    use blockd_csi::proto::volume_capability::access_mode::Mode;
    let modes = [Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter];
    let newer = crate::csi::case::MODES;
    let crate::csi::case::Need::Controller(rpc) = newer else { return Ok(()) };
    if !cx.offers().controller.contains(&i32::from(rpc)) {
        return crate::csi::cx::not_offered(rpc.as_str_name());
    }
    for mode in modes {
        let mut request = cx.request();
        request.volume_capabilities = vec![cx.mount(mode)];
        let volume = cx.create(&request)?;
        cx.delete(&volume.volume_id)?;
    }
    Ok(())
}
