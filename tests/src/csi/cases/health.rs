//! Conditions of volumes: ListVolumes, ControllerGetVolume and NodeGetVolumeStats.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::controller_service_capability::rpc::Type as OfController;
use blockd_csi::proto::node_service_capability::rpc::Type as OfNode;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_usage::Unit;
use blockd_csi::proto::{
    ControllerGetVolumeRequest, ListVolumesRequest, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, VolumeCondition,
};
use nix::mount::{MntFlags, umount2};
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CONDITION, CREATE, GET, LIST, NODE_CONDITION, STAGE, STATS, cases};
use crate::csi::cx::{Answer, Cx, Staged, block, mounted_at, not_offered, refused};

cases! { [CREATE]
    each_volume_of_a_list_has_a_condition: LIST, CONDITION;
    get_volume_has_a_volume_and_a_status_with_a_condition: GET, CONDITION;
    published_nodes_are_listed_only_where_that_is_offered: GET;
    the_condition_of_an_unknown_volume_is_not_found: GET;
    list_and_get_report_the_same: LIST, GET, CONDITION;
    stats_have_a_condition: STAGE, STATS, NODE_CONDITION, Host;
    stats_of_a_block_volume_have_a_condition: STAGE, STATS, NODE_CONDITION, Host;
    stats_of_a_relative_path_are_not_found: STATS;
    stats_of_a_path_of_another_volume_are_not_found: STAGE, STATS, Host;
    usage_of_a_mount_is_bytes_and_inodes: STAGE, STATS, Host;
    usage_of_a_block_device_is_bytes_that_add_up: STAGE, STATS, Host;
    a_volume_that_was_deleted_is_not_found_and_not_listed: LIST, GET;
    unmounted_by_hand_is_abnormal_until_it_is_published_again:
        STAGE, STATS, NODE_CONDITION, Host, Rows;
    a_path_that_was_unpublished_in_order_is_not_found: STAGE, STATS, Host, Rows;
    a_full_file_system_is_abnormal_until_something_is_deleted:
        STAGE, STATS, NODE_CONDITION, Host, Rows;
    conditions_are_reported_where_they_are_offered_and_nowhere_else: LIST, GET;
}

/// A condition as the specification has it, and as short as a string may be.
fn checked(condition: Option<VolumeCondition>) -> Result<VolumeCondition> {
    let condition = condition.context("no volume_condition")?;
    let length = condition.message.len();
    ensure!((1..=128).contains(&length), "a message of {length} bytes: {:?}", condition.message);
    Ok(condition)
}

fn healthy(condition: Option<VolumeCondition>) -> Result<()> {
    let condition = checked(condition)?;
    ensure!(!condition.abnormal, "{:?}", condition.message);
    Ok(())
}

/// The condition of each volume of a list.
fn listed(cx: &Cx<'_>) -> Result<Vec<(String, Option<VolumeCondition>)>> {
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let request = ListVolumesRequest { max_entries: 100, starting_token: token };
        let answer = cx.driver.list_volumes(request)?;
        for entry in answer.entries {
            let condition = entry.status.and_then(|status| status.volume_condition);
            all.push((entry.volume.context("an entry without a volume")?.volume_id, condition));
        }
        if answer.next_token.is_empty() {
            return Ok(all);
        }
        token = answer.next_token;
    }
}

fn got(cx: &Cx<'_>, id: &str) -> Result<Option<VolumeCondition>> {
    let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let answer = cx.driver.controller_get_volume(request)?;
    let volume = answer.volume.context("no volume")?;
    ensure!(volume.volume_id == id, "{} in place of {id}", volume.volume_id);
    Ok(answer.status.context("no status")?.volume_condition)
}

fn stats_of(cx: &Cx<'_>, id: &str, path: &str) -> Answer<NodeGetVolumeStatsResponse> {
    cx.driver.node_get_volume_stats(NodeGetVolumeStatsRequest {
        volume_id: id.to_owned(),
        volume_path: path.to_owned(),
        ..Default::default()
    })
}

/// Row: H13.
fn each_volume_of_a_list_has_a_condition(cx: &mut Cx<'_>) -> Result<()> {
    let made = [cx.volume()?.volume_id, cx.volume()?.volume_id];
    let listed = listed(cx)?;
    for id in made {
        let entry = listed.iter().find(|(listed, _)| *listed == id);
        healthy(entry.with_context(|| format!("{id} is not listed"))?.1.clone())?;
    }
    for (id, condition) in listed {
        checked(condition).context(id)?;
    }
    Ok(())
}

/// Row: H14.
fn get_volume_has_a_volume_and_a_status_with_a_condition(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.volume()?.volume_id;
    healthy(got(cx, &id)?)
}

/// Row: H15.
fn published_nodes_are_listed_only_where_that_is_offered(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.volume()?.volume_id;
    let request = ControllerGetVolumeRequest { volume_id: id };
    let answer = cx.driver.controller_get_volume(request)?;
    answer.volume.context("no volume")?;
    let nodes = answer.status.context("no status")?.published_node_ids;
    let offered = cx.offers().controller.contains(&OfController::ListVolumesPublishedNodes.into());
    ensure!(offered || nodes.is_empty(), "{nodes:?}");
    Ok(())
}

/// Row: H16.
fn the_condition_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    let get = |id: &str| {
        let volume_id = id.to_owned();
        cx.driver.controller_get_volume(ControllerGetVolumeRequest { volume_id })
    };
    for id in [gone.as_str(), "nothing/there"] {
        refused(get(id), Code::NotFound)?;
    }
    refused(get(""), Code::InvalidArgument).map(|_| ())
}

/// Row: H17.
fn list_and_get_report_the_same(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.volume()?.volume_id;
    let listed = listed(cx)?.into_iter().find(|(listed, _)| *listed == id);
    let listed = checked(listed.context("it is not listed")?.1)?;
    let got = checked(got(cx, &id)?)?;
    ensure!(listed.abnormal == got.abnormal, "{listed:?} and {got:?}");
    Ok(())
}

/// Row: H18.
fn stats_have_a_condition(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    for path in [target.as_str(), staged.path()] {
        healthy(stats_of(cx, &staged.id, path)?.volume_condition)
            .with_context(|| path.to_owned())?;
    }
    Ok(())
}

/// Row: H18.
fn stats_of_a_block_volume_have_a_condition(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    healthy(stats_of(cx, &staged.id, &target)?.volume_condition)
}

/// Row: H19.
fn stats_of_a_relative_path_are_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.volume()?.volume_id;
    for path in ["some/path", "./a", "relative"] {
        refused(stats_of(cx, &id, path), Code::NotFound)?;
    }
    Ok(())
}

/// Row: H19.
fn stats_of_a_path_of_another_volume_are_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let other = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    refused(stats_of(cx, &staged.id, other.path()), Code::NotFound)?;
    // Its own staging path beside it makes it no path of this volume.
    let request = NodeGetVolumeStatsRequest {
        volume_id: staged.id.clone(),
        volume_path: other.path().to_owned(),
        staging_target_path: staged.path().to_owned(),
    };
    refused(cx.driver.node_get_volume_stats(request), Code::NotFound).map(|_| ())
}

/// The usage in a unit: no amount is below 0 or above the total.
fn usage(answer: &NodeGetVolumeStatsResponse, unit: Unit) -> Result<Option<(i64, i64, i64)>> {
    let mut all = answer.usage.iter().filter(|usage| usage.unit == i32::from(unit));
    let Some(of) = all.next() else { return Ok(None) };
    ensure!(all.next().is_none(), "{unit:?} is reported twice");
    ensure!(of.total >= 0 && of.used >= 0 && of.available >= 0, "{of:?}");
    ensure!(of.used.saturating_add(of.available) <= of.total, "{of:?}");
    Ok(Some((of.total, of.used, of.available)))
}

/// Row: H20.
fn usage_of_a_mount_is_bytes_and_inodes(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let before = stats_of(cx, &staged.id, &target)?;
    let (total, used, _) = usage(&before, Unit::Bytes)?.context("no bytes")?;
    ensure!(total > 0 && total <= staged.size, "{total} bytes of {}", staged.size);
    usage(&before, Unit::Inodes)?.context("no inodes")?;
    ensure!(before.usage.len() == 2, "{before:?}");
    fs::write(Path::new(&target).join("file"), vec![1; 4 << 20])?;
    fs::File::open(&target)?.sync_all()?;
    let after = stats_of(cx, &staged.id, &target)?;
    let (_, now, _) = usage(&after, Unit::Bytes)?.context("no bytes")?;
    ensure!(now >= used + (4 << 20), "{used} bytes were used, and {now} are with 4 MiB more");
    Ok(())
}

/// Row: H20.
fn usage_of_a_block_device_is_bytes_that_add_up(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let answer = stats_of(cx, &staged.id, &target)?;
    let (total, ..) = usage(&answer, Unit::Bytes)?.context("no bytes")?;
    ensure!(total == staged.size, "{total} bytes of {}", staged.size);
    ensure!(answer.usage.len() == 1, "{answer:?}");
    Ok(())
}

/// Row: H38.
fn a_volume_that_was_deleted_is_not_found_and_not_listed(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    let request = ControllerGetVolumeRequest { volume_id: gone.clone() };
    refused(cx.driver.controller_get_volume(request), Code::NotFound)?;
    ensure!(listed(cx)?.iter().all(|(id, _)| *id != gone), "{gone} is still listed");
    Ok(())
}

fn abnormal(cx: &Cx<'_>, staged: &Staged, path: &str, words: &str) -> Result<()> {
    let condition = checked(stats_of(cx, &staged.id, path)?.volume_condition)?;
    ensure!(condition.abnormal, "it is called normal: {:?}", condition.message);
    ensure!(condition.message.contains(words), "{:?} says nothing of {words}", condition.message);
    Ok(())
}

/// Row: H38.
fn unmounted_by_hand_is_abnormal_until_it_is_published_again(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let target = cx.published(&staged)?;
        healthy(stats_of(cx, &staged.id, &target)?.volume_condition)?;
        umount2(target.as_str(), MntFlags::MNT_DETACH)?;
        ensure!(mounted_at(&target)?.is_none(), "something is still mounted");
        abnormal(cx, &staged, &target, "nothing is mounted")?;
        // The fault is that of one path, and is not reported for others.
        healthy(stats_of(cx, &staged.id, staged.path())?.volume_condition)?;
        cx.publish(&staged.publish(&target))?;
        healthy(stats_of(cx, &staged.id, &target)?.volume_condition)?;
    }
    Ok(())
}

/// Row: H10.
fn a_path_that_was_unpublished_in_order_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    cx.unpublish(&staged.id, &target)?;
    refused(stats_of(cx, &staged.id, &target), Code::NotFound).map(|_| ())
}

/// Writes until there is no room.
fn fill(path: &Path) -> Result<()> {
    let mut file = fs::File::create(path)?;
    let mut length = 1 << 20;
    loop {
        match file.write_all(&vec![7; length]) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull && length == 512 => break,
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => length = 512,
            Err(error) => bail!("writing to {}: {error}", path.display()),
        }
    }
    Ok(())
}

/// Row: H38.
fn a_full_file_system_is_abnormal_until_something_is_deleted(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let file = Path::new(&target).join("large");
    fill(&file)?;
    abnormal(cx, &staged, &target, "out of capacity")?;
    let answer = stats_of(cx, &staged.id, &target)?;
    ensure!(usage(&answer, Unit::Bytes)?.is_some(), "a full file system reports no usage");
    fs::remove_file(&file)?;
    fs::File::open(&target)?.sync_all()?;
    healthy(stats_of(cx, &staged.id, &target)?.volume_condition)
}

/// Row: H37.
fn conditions_are_reported_where_they_are_offered_and_nowhere_else(cx: &mut Cx<'_>) -> Result<()> {
    let is_offered = cx.offers().controller.contains(&OfController::VolumeCondition.into());
    let of_node = cx.offers().node.contains(&OfNode::VolumeCondition.into());
    if !cx.offers().node.is_empty() {
        ensure!(is_offered == of_node, "controller {is_offered}, node {of_node}");
    } else if !is_offered {
        return not_offered("conditions");
    }
    let id = cx.volume()?.volume_id;
    ensure!(got(cx, &id)?.is_some() == is_offered, "ControllerGetVolume differs");
    let listed = listed(cx)?;
    ensure!(
        listed.iter().all(|(_, condition)| condition.is_some() == is_offered),
        "ListVolumes differs: {listed:?}"
    );
    Ok(())
}
