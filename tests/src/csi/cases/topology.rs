//! Where volumes are reachable from: the rows T32, P34, P41.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::{
    CreateVolumeRequest, GetCapacityRequest, NodeGetInfoRequest, Topology, TopologyRequirement,
};
use tonic::Code;

use crate::csi::case::{CAPACITY, CREATE, TOPOLOGY, cases};
use crate::csi::cx::{Cx, not_offered, one, refused};

cases! { [CREATE, TOPOLOGY]
    a_volume_says_where_it_is;
    volume_and_node_are_at_the_same_place;
    keys_and_segments_of_topology_are_well_formed;
    a_volume_can_be_asked_for_at_its_place;
    a_volume_for_another_place_is_resource_exhausted;
    one_of_several_places_is_enough;
    a_preferred_place_elsewhere_is_no_obstacle;
    an_unknown_topology_key_is_no_place_of_ours;
    create_volume_again_elsewhere_is_refused;
    capacity_at_another_place_is_0: CAPACITY;
    capacity_at_our_place_is_that_of_the_pool: CAPACITY;
}

fn place(cx: &mut Cx<'_>) -> Result<Topology> {
    let volume = cx.volume()?;
    ensure!(!volume.accessible_topology.is_empty(), "accessible_topology is empty");
    volume.accessible_topology.into_iter().next().context("no topology")
}

/// The same keys with other values.
fn elsewhere(place: &Topology) -> Topology {
    let segments = place.segments.keys().map(|key| (key.clone(), "no-such-place".to_owned()));
    Topology { segments: segments.collect() }
}

fn at(cx: &mut Cx<'_>, requisite: Vec<Topology>, preferred: Vec<Topology>) -> CreateVolumeRequest {
    let accessibility_requirements = Some(TopologyRequirement { requisite, preferred });
    CreateVolumeRequest { accessibility_requirements, ..cx.request() }
}

/// Row: P41.
fn a_volume_says_where_it_is(cx: &mut Cx<'_>) -> Result<()> {
    let place = place(cx)?;
    ensure!(!place.segments.is_empty(), "no segments");
    Ok(())
}

/// Row: P41.
fn volume_and_node_are_at_the_same_place(cx: &mut Cx<'_>) -> Result<()> {
    if cx.offers().node.is_empty() {
        return not_offered("the node");
    }
    let place = place(cx)?;
    let node = cx.driver.node_get_info(NodeGetInfoRequest {})?;
    let node = node.accessible_topology.context("the node has no accessible_topology")?;
    for (key, value) in &place.segments {
        ensure!(node.segments.get(key) == Some(value), "{key}={value}, and {:?}", node.segments);
    }
    Ok(())
}

fn keys_and_segments_of_topology_are_well_formed(cx: &mut Cx<'_>) -> Result<()> {
    let word = |text: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        text.len() <= 63
            && ends(text.chars().next())
            && ends(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    for (key, value) in place(cx)?.segments {
        let (prefix, name) = key.split_once('/').unwrap_or(("a", &key));
        ensure!(word(prefix) && word(name) && prefix.to_lowercase() == prefix, "{key:?}");
        ensure!(word(&value), "{value:?}");
    }
    Ok(())
}

/// Row: T32.
fn a_volume_can_be_asked_for_at_its_place(cx: &mut Cx<'_>) -> Result<()> {
    let place = place(cx)?;
    for requirement in [
        (vec![place.clone()], vec![]),
        (vec![], vec![place.clone()]),
        (vec![place.clone()], vec![place.clone()]),
    ] {
        let request = at(cx, requirement.0, requirement.1);
        let volume = cx.create(&request)?;
        ensure!(volume.accessible_topology == [place.clone()], "{volume:?}");
    }
    Ok(())
}

/// Row: T32.
fn a_volume_for_another_place_is_resource_exhausted(cx: &mut Cx<'_>) -> Result<()> {
    let place = elsewhere(&place(cx)?);
    let request = at(cx, vec![place], vec![]);
    refused(cx.create(&request), Code::ResourceExhausted).map(|_| ())
}

/// Row: T32.
fn one_of_several_places_is_enough(cx: &mut Cx<'_>) -> Result<()> {
    let here = place(cx)?;
    let requisite = vec![elsewhere(&here), here.clone()];
    let request = at(cx, requisite.clone(), requisite);
    let volume = cx.create(&request)?;
    ensure!(volume.accessible_topology == [here], "{volume:?}");
    Ok(())
}

fn a_preferred_place_elsewhere_is_no_obstacle(cx: &mut Cx<'_>) -> Result<()> {
    let here = place(cx)?;
    let request = at(cx, vec![], vec![elsewhere(&here)]);
    let volume = cx.create(&request)?;
    ensure!(volume.accessible_topology == [here], "{volume:?}");
    Ok(())
}

fn an_unknown_topology_key_is_no_place_of_ours(cx: &mut Cx<'_>) -> Result<()> {
    let segments = one("example.com/no-such-key", "a");
    let request = at(cx, vec![Topology { segments }], vec![]);
    refused(cx.create(&request), Code::ResourceExhausted).map(|_| ())
}

fn create_volume_again_elsewhere_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let volume = cx.create(&request)?;
    let place = volume.accessible_topology.into_iter().next().context("no topology")?;
    let requirement = TopologyRequirement { requisite: vec![elsewhere(&place)], preferred: vec![] };
    let accessibility_requirements = Some(requirement);
    let again = CreateVolumeRequest { accessibility_requirements, ..request };
    // It exists and does not fit, and what was asked for can't be met: the order is open.
    let codes = [Code::AlreadyExists, Code::ResourceExhausted];
    crate::csi::cx::refused_as(cx.create(&again), &codes).map(|_| ())
}

fn capacity(cx: &Cx<'_>, accessible_topology: Option<Topology>) -> Result<i64> {
    let parameters = cx.options.parameters.clone();
    let asked = GetCapacityRequest { parameters, accessible_topology, ..Default::default() };
    Ok(cx.driver.get_capacity(asked)?.available_capacity)
}

/// Row: P34.
fn capacity_at_another_place_is_0(cx: &mut Cx<'_>) -> Result<()> {
    let place = elsewhere(&place(cx)?);
    let free = capacity(cx, Some(place))?;
    ensure!(free == 0, "{free} bytes");
    Ok(())
}

/// Row: P34.
fn capacity_at_our_place_is_that_of_the_pool(cx: &mut Cx<'_>) -> Result<()> {
    let place = place(cx)?;
    let (here, anywhere) = (capacity(cx, Some(place))?, capacity(cx, None)?);
    ensure!(here == anywhere && here > 0, "{here} and {anywhere}");
    Ok(())
}
