//! Identity, and the capabilities that the services report.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use blockd_csi::proto::controller_service_capability::rpc::Type as Controller;
use blockd_csi::proto::node_service_capability::rpc::Type as Node;
use blockd_csi::proto::plugin_capability::service::Type as Plugin;
use blockd_csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{ControllerPublishVolumeRequest, ProbeRequest};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{EXPAND, cases};
use crate::csi::cx::{Cx, not_offered, refused};

cases! { []
    the_name_is_in_domain_notation;
    the_version_is_not_empty;
    a_driver_that_works_says_that_it_is_ready;
    capabilities_of_the_plugin_are_known_and_said_once;
    capabilities_of_the_controller_are_known_and_said_once;
    capabilities_of_the_node_are_known_and_said_once;
    a_controller_that_can_make_volumes_is_a_service_of_the_plugin;
    a_volume_that_can_expand_says_whether_it_may_be_in_use: EXPAND;
    published_nodes_are_listed_only_where_volumes_are_published;
    calls_that_are_not_offered_are_unimplemented;
    controller_and_node_offer_the_writer_modes_together: Rows;
    the_controller_offers_what_was_asked_for: Rows;
    the_node_offers_what_was_asked_for: Rows;
}

fn the_name_is_in_domain_notation(cx: &mut Cx<'_>) -> Result<()> {
    let name = &cx.offers().name;
    ensure!((1..=63).contains(&name.len()), "the name has {} bytes", name.len());
    let inside = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    ensure!(name.chars().all(inside), "{name:?}");
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    ensure!(ends(name.chars().next()) && ends(name.chars().last()), "{name:?}");
    Ok(())
}

fn the_version_is_not_empty(cx: &mut Cx<'_>) -> Result<()> {
    ensure!(!cx.offers().version.is_empty(), "there is no vendor_version");
    Ok(())
}

fn a_driver_that_works_says_that_it_is_ready(cx: &mut Cx<'_>) -> Result<()> {
    let answer = cx.driver.probe(ProbeRequest {})?;
    ensure!(answer.ready != Some(false), "it is not ready");
    Ok(())
}

fn once(what: &[i32], known: impl Fn(i32) -> bool) -> Result<()> {
    let different: BTreeSet<i32> = what.iter().copied().collect();
    ensure!(different.len() == what.len(), "something is said twice: {what:?}");
    let unknown: Vec<i32> = different.into_iter().filter(|one| *one == 0 || !known(*one)).collect();
    ensure!(unknown.is_empty(), "unknown capabilities {unknown:?}");
    Ok(())
}

fn capabilities_of_the_plugin_are_known_and_said_once(cx: &mut Cx<'_>) -> Result<()> {
    once(&cx.offers().plugin, |one| Plugin::try_from(one).is_ok())?;
    once(&cx.offers().expansion, |one| Expansion::try_from(one).is_ok())
}

fn capabilities_of_the_controller_are_known_and_said_once(cx: &mut Cx<'_>) -> Result<()> {
    once(&cx.offers().controller, |one| Controller::try_from(one).is_ok())
}

fn capabilities_of_the_node_are_known_and_said_once(cx: &mut Cx<'_>) -> Result<()> {
    once(&cx.offers().node, |one| Node::try_from(one).is_ok())
}

fn a_controller_that_can_make_volumes_is_a_service_of_the_plugin(cx: &mut Cx<'_>) -> Result<()> {
    let offers = cx.offers();
    if offers.controller.is_empty() {
        return not_offered("the controller");
    }
    let said = offers.plugin.contains(&i32::from(Plugin::ControllerService));
    ensure!(said, "CONTROLLER_SERVICE is not said");
    Ok(())
}

fn a_volume_that_can_expand_says_whether_it_may_be_in_use(cx: &mut Cx<'_>) -> Result<()> {
    ensure!(cx.offers().expansion.len() == 1, "ONLINE or OFFLINE: {:?}", cx.offers().expansion);
    Ok(())
}

fn published_nodes_are_listed_only_where_volumes_are_published(cx: &mut Cx<'_>) -> Result<()> {
    let has = |rpc: Controller| cx.offers().controller.contains(&i32::from(rpc));
    let fine =
        !has(Controller::ListVolumesPublishedNodes) || has(Controller::PublishUnpublishVolume);
    ensure!(fine, "LIST_VOLUMES_PUBLISHED_NODES without PUBLISH_UNPUBLISH_VOLUME");
    Ok(())
}

fn calls_that_are_not_offered_are_unimplemented(cx: &mut Cx<'_>) -> Result<()> {
    let offers = cx.offers();
    if offers.controller.contains(&i32::from(Controller::PublishUnpublishVolume)) {
        return not_offered("something that is left out: volumes are published by the controller");
    }
    let request = ControllerPublishVolumeRequest {
        volume_id: "volume".to_owned(),
        node_id: "node".to_owned(),
        volume_capability: Some(cx.mount(Mode::SingleNodeWriter)),
        ..Default::default()
    };
    refused(cx.driver.controller_publish_volume(request), Code::Unimplemented).map(|_| ())
}

/// Row: W3.
fn controller_and_node_offer_the_writer_modes_together(cx: &mut Cx<'_>) -> Result<()> {
    let offers = cx.offers();
    let controller = offers.controller.contains(&i32::from(Controller::SingleNodeMultiWriter));
    let node = offers.node.contains(&i32::from(Node::SingleNodeMultiWriter));
    ensure!(controller && node, "the controller: {controller}, the node: {node}");
    Ok(())
}

fn the_controller_offers_what_was_asked_for(cx: &mut Cx<'_>) -> Result<()> {
    use Controller::{
        CloneVolume, CreateDeleteSnapshot, CreateDeleteVolume, ExpandVolume, GetCapacity,
        GetSnapshot, GetVolume, ListSnapshots, ListVolumes, ModifyVolume, SingleNodeMultiWriter,
    };
    let offers = cx.offers();
    let controller = [
        CreateDeleteVolume,
        ListVolumes,
        GetCapacity,
        CreateDeleteSnapshot,
        ListSnapshots,
        GetSnapshot,
        CloneVolume,
        ExpandVolume,
        ModifyVolume,
        GetVolume,
        SingleNodeMultiWriter,
    ];
    let missing: Vec<_> =
        controller.iter().filter(|rpc| !offers.controller.contains(&i32::from(**rpc))).collect();
    ensure!(missing.is_empty(), "the controller lacks {missing:?}");
    ensure!(offers.expansion == [i32::from(Expansion::Online)], "{:?}", offers.expansion);
    let topology = Plugin::VolumeAccessibilityConstraints;
    ensure!(offers.plugin.contains(&i32::from(topology)), "no topology");
    Ok(())
}

fn the_node_offers_what_was_asked_for(cx: &mut Cx<'_>) -> Result<()> {
    let offers = cx.offers();
    let node = [
        Node::StageUnstageVolume,
        Node::GetVolumeStats,
        Node::ExpandVolume,
        Node::SingleNodeMultiWriter,
    ];
    let missing: Vec<_> =
        node.iter().filter(|rpc| !offers.node.contains(&i32::from(**rpc))).collect();
    ensure!(missing.is_empty(), "the node lacks {missing:?}");
    Ok(())
}
