//! NodeGetInfo, and which node calls refuse what is missing before anything else.

use anyhow::{Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    NodeExpandVolumeRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest,
};
use tonic::Code;

use crate::csi::case::{CREATE, NODE_EXPAND, STAGE, STATS, TOPOLOGY, cases};
use crate::csi::cx::{Cx, not_offered, refused, refused_as};

cases! { []
    the_node_has_an_id;
    the_node_says_where_it_is: TOPOLOGY;
    stage_without_id_path_or_capability_is_invalid_argument: STAGE;
    unstage_without_id_or_path_is_invalid_argument: STAGE;
    publish_without_id_path_or_capability_is_invalid_argument: STAGE;
    unpublish_without_id_or_path_is_invalid_argument: STAGE;
    stats_without_id_or_path_are_invalid_argument: STATS;
    node_expand_without_id_or_path_is_invalid_argument: NODE_EXPAND;
    stage_of_an_unknown_volume_is_not_found: CREATE, STAGE;
    publish_of_an_unknown_volume_is_not_found: CREATE, STAGE;
    stats_of_an_unknown_volume_come_before_the_path: CREATE, STATS;
    node_expand_of_an_unknown_volume_comes_before_the_path: CREATE, NODE_EXPAND;
    stage_and_publish_of_an_unknown_mode_are_invalid_argument: CREATE, STAGE;
    stage_and_publish_without_a_mode_are_invalid_argument: CREATE, STAGE;
    stage_and_publish_for_several_nodes_are_refused: CREATE, STAGE;
    unstage_and_unpublish_of_what_never_was_here_are_ok: CREATE, STAGE;
}

fn the_node_has_an_id(cx: &mut Cx<'_>) -> Result<()> {
    if cx.offers().node.is_empty() {
        return not_offered("the node");
    }
    let info = cx.driver.node_get_info(NodeGetInfoRequest {})?;
    ensure!((1..=256).contains(&info.node_id.len()), "{:?}", info.node_id);
    ensure!(info.max_volumes_per_node >= 0, "{}", info.max_volumes_per_node);
    Ok(())
}

fn the_node_says_where_it_is(cx: &mut Cx<'_>) -> Result<()> {
    if cx.offers().node.is_empty() {
        return not_offered("the node");
    }
    let info = cx.driver.node_get_info(NodeGetInfoRequest {})?;
    let segments = info.accessible_topology.map(|place| place.segments).unwrap_or_default();
    ensure!(!segments.is_empty(), "no accessible_topology");
    Ok(())
}

/// A path that is below the folders of the options, and is not there.
fn nowhere(cx: &mut Cx<'_>) -> String {
    cx.options.staging_dir.join(cx.name()).join("globalmount").to_string_lossy().into_owned()
}

fn stage(cx: &mut Cx<'_>, id: &str) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: nowhere(cx),
        volume_capability: Some(cx.mount(Mode::SingleNodeWriter)),
        ..Default::default()
    }
}

fn publish(cx: &mut Cx<'_>, id: &str) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: nowhere(cx),
        target_path: nowhere(cx).replace("globalmount", "mount"),
        volume_capability: Some(cx.mount(Mode::SingleNodeWriter)),
        ..Default::default()
    }
}

fn stage_without_id_path_or_capability_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let right = stage(cx, "a/b");
    for request in [
        NodeStageVolumeRequest { volume_id: String::new(), ..right.clone() },
        NodeStageVolumeRequest { staging_target_path: String::new(), ..right.clone() },
        NodeStageVolumeRequest { volume_capability: None, ..right },
    ] {
        refused(cx.driver.node_stage_volume(request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn unstage_without_id_or_path_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let path = nowhere(cx);
    refused(cx.unstage("", &path), Code::InvalidArgument)?;
    refused(cx.unstage("a/b", ""), Code::InvalidArgument).map(|_| ())
}

fn publish_without_id_path_or_capability_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let right = publish(cx, "a/b");
    for request in [
        NodePublishVolumeRequest { volume_id: String::new(), ..right.clone() },
        NodePublishVolumeRequest { target_path: String::new(), ..right.clone() },
        NodePublishVolumeRequest { volume_capability: None, ..right },
    ] {
        refused(cx.driver.node_publish_volume(request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn unpublish_without_id_or_path_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let path = nowhere(cx);
    refused(cx.unpublish("", &path), Code::InvalidArgument)?;
    refused(cx.unpublish("a/b", ""), Code::InvalidArgument).map(|_| ())
}

fn stats(id: &str, path: &str) -> NodeGetVolumeStatsRequest {
    NodeGetVolumeStatsRequest {
        volume_id: id.to_owned(),
        volume_path: path.to_owned(),
        ..Default::default()
    }
}

fn stats_without_id_or_path_are_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let path = nowhere(cx);
    for request in [stats("", &path), stats("a/b", "")] {
        refused(cx.driver.node_get_volume_stats(request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn expand(id: &str, path: &str) -> NodeExpandVolumeRequest {
    NodeExpandVolumeRequest {
        volume_id: id.to_owned(),
        volume_path: path.to_owned(),
        ..Default::default()
    }
}

fn node_expand_without_id_or_path_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let path = nowhere(cx);
    for request in [expand("", &path), expand("a/b", "")] {
        refused(cx.driver.node_expand_volume(request), Code::InvalidArgument)?;
    }
    Ok(())
}

fn stage_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing/there", "a/b/c"] {
        let request = stage(cx, id);
        refused(cx.driver.node_stage_volume(request), Code::NotFound)?;
    }
    Ok(())
}

fn publish_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing/there", "a/b/c"] {
        let request = publish(cx, id);
        refused(cx.driver.node_publish_volume(request), Code::NotFound)?;
    }
    Ok(())
}

fn stats_of_an_unknown_volume_come_before_the_path(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    let path = nowhere(cx);
    for request in [stats(&gone, &path), stats("nothing/there", &path)] {
        refused(cx.driver.node_get_volume_stats(request), Code::NotFound)?;
    }
    Ok(())
}

fn node_expand_of_an_unknown_volume_comes_before_the_path(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    let path = nowhere(cx);
    for request in [expand(&gone, &path), expand("nothing/there", &path)] {
        refused(cx.driver.node_expand_volume(request), Code::NotFound)?;
    }
    Ok(())
}

/// Staging and publishing a volume that is there are refused when its capability is this.
fn refused_for(cx: &mut Cx<'_>, change: impl Fn(&mut Option<i32>), codes: &[Code]) -> Result<()> {
    let id = cx.volume()?.volume_id;
    let mut capability = cx.mount(Mode::SingleNodeWriter);
    let mut mode = capability.access_mode.as_ref().map(|mode| mode.mode);
    change(&mut mode);
    capability.access_mode =
        mode.map(|mode| blockd_csi::proto::volume_capability::AccessMode { mode });
    let request = stage(cx, &id);
    let request = NodeStageVolumeRequest { volume_capability: Some(capability.clone()), ..request };
    refused_as(cx.stage(&request), codes)?;
    let request = publish(cx, &id);
    let request = NodePublishVolumeRequest { volume_capability: Some(capability), ..request };
    refused_as(cx.publish(&request), codes).map(|_| ())
}

/// Row: W10.
fn stage_and_publish_of_an_unknown_mode_are_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused_for(cx, |mode| *mode = Some(0), &[Code::InvalidArgument])?;
    refused_for(cx, |mode| *mode = Some(99), &[Code::InvalidArgument])
}

/// Row: W11.
fn stage_and_publish_without_a_mode_are_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused_for(cx, |mode| *mode = None, &[Code::InvalidArgument])
}

/// Row: W31.
fn stage_and_publish_for_several_nodes_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    for wanted in
        [Mode::MultiNodeReaderOnly, Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter]
    {
        let codes = [Code::InvalidArgument, Code::FailedPrecondition];
        refused_for(cx, |mode| *mode = Some(wanted.into()), &codes)?;
    }
    Ok(())
}

fn unstage_and_unpublish_of_what_never_was_here_are_ok(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.volume()?.volume_id;
    let path = nowhere(cx);
    cx.unpublish(&id, &path)?;
    cx.unstage(&id, &path)?;
    let gone = cx.gone_volume()?;
    for answer in [cx.unpublish(&gone, &path), cx.unstage(&gone, &path)] {
        // The specification has a code for it, and a repeat has to be fine.
        if answer.is_err() {
            refused(answer, Code::NotFound)?;
        }
    }
    Ok(())
}
