//! NodeGetVolumeStats and NodeExpandVolume, and what snapshots and clones hold, on real devices.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use blockd_csi::proto::volume_usage::Unit;
use blockd_csi::proto::{
    ControllerExpandVolumeRequest, CreateVolumeRequest, NodeExpandVolumeRequest,
    NodeExpandVolumeResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
};
use tonic::Code;

use super::publish::device_size;
use super::stage::{read_at, write_at};
use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CLONE, CREATE, EXPAND, NODE_EXPAND, SNAPSHOT, STAGE, STATS, cases};
use crate::csi::cx::{Answer, Cx, Staged, block, mounted_as, range, refused};

cases! { [CREATE, STAGE, Host]
    stats_of_a_mounted_volume_add_up: STATS;
    stats_of_a_block_volume_have_its_size: STATS;
    stats_at_the_staging_path_have_usage: STATS;
    stats_of_a_path_that_never_was_the_volumes_are_not_found: STATS;
    node_expand_of_a_path_that_never_was_the_volumes_is_not_found: NODE_EXPAND;
    a_file_system_grows_with_its_volume: EXPAND, NODE_EXPAND;
    each_file_system_grows_with_its_volume: EXPAND, NODE_EXPAND, Rows;
    a_block_device_grows_with_its_volume: EXPAND, NODE_EXPAND;
    node_expand_accepts_a_missing_capability_and_every_known_mode: NODE_EXPAND;
    node_expand_of_what_has_not_grown_is_ok: NODE_EXPAND;
    a_snapshot_holds_what_was_there: SNAPSHOT;
    a_clone_holds_what_was_there_and_goes_its_own_way: CLONE;
    a_clone_of_xfs_is_mounted_beside_its_source: CLONE, Rows;
    a_larger_clone_has_a_larger_file_system: CLONE;
}

fn stats(cx: &Cx<'_>, staged: &Staged, path: &str) -> Answer<NodeGetVolumeStatsResponse> {
    cx.driver.node_get_volume_stats(NodeGetVolumeStatsRequest {
        volume_id: staged.id.clone(),
        volume_path: path.to_owned(),
        staging_target_path: staged.path().to_owned(),
    })
}

fn stats_of_a_mounted_volume_add_up(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    fs::write(Path::new(&target).join("file"), vec![1; 4 << 20])?;
    let usage = stats(cx, &staged, &target)?.usage;
    for unit in [Unit::Bytes, Unit::Inodes] {
        let of = usage.iter().find(|usage| usage.unit == i32::from(unit));
        let of = of.with_context(|| format!("nothing in {unit:?}: {usage:?}"))?;
        ensure!(of.total > 0 && of.available >= 0 && of.used > 0, "{of:?}");
        ensure!(of.used + of.available <= of.total, "{of:?}");
    }
    let bytes = usage.iter().find(|usage| usage.unit == i32::from(Unit::Bytes));
    ensure!(bytes.is_some_and(|bytes| bytes.total <= staged.size), "{bytes:?}");
    Ok(())
}

fn stats_of_a_block_volume_have_its_size(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let usage = stats(cx, &staged, &target)?.usage;
    let bytes = usage.iter().find(|usage| usage.unit == i32::from(Unit::Bytes));
    ensure!(bytes.is_some_and(|bytes| bytes.total == staged.size), "{usage:?}");
    Ok(())
}

fn stats_at_the_staging_path_have_usage(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let path = staged.path().to_owned();
    ensure!(!stats(cx, &staged, &path)?.usage.is_empty(), "no usage");
    Ok(())
}

fn stats_of_a_path_that_never_was_the_volumes_are_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let other = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let elsewhere = cx.published(&other)?;
    let nowhere = cx.target()?;
    for path in [elsewhere.as_str(), nowhere.as_str(), other.path(), "/", "/proc"] {
        refused(stats(cx, &staged, path), Code::NotFound).with_context(|| path.to_owned())?;
    }
    Ok(())
}

fn node_expand(
    cx: &Cx<'_>,
    staged: &Staged,
    path: &str,
    size: i64,
) -> Answer<NodeExpandVolumeResponse> {
    cx.driver.node_expand_volume(NodeExpandVolumeRequest {
        volume_id: staged.id.clone(),
        volume_path: path.to_owned(),
        staging_target_path: staged.path().to_owned(),
        capacity_range: range(size, 0),
        volume_capability: staged.stage.volume_capability.clone(),
        ..Default::default()
    })
}

fn node_expand_of_a_path_that_never_was_the_volumes_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let nowhere = cx.target()?;
    refused(node_expand(cx, &staged, &nowhere, 0), Code::NotFound).map(|_| ())
}

/// Makes a volume three times as large, on its node as well. Where the kernel can't show a device
/// its new size while it is there, the driver says so, and staging anew has to do.
fn grow(cx: &mut Cx<'_>, staged: &Staged, target: &str) -> Result<i64> {
    let size = staged.size * 3;
    let answer = cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
        volume_id: staged.id.clone(),
        capacity_range: range(size, 0),
        volume_capability: staged.stage.volume_capability.clone(),
        ..Default::default()
    })?;
    ensure!(answer.capacity_bytes == size, "{answer:?}");
    match node_expand(cx, staged, target, size) {
        Ok(answer) => ensure!(answer.capacity_bytes >= size, "{answer:?} for {size}"),
        Err(status) if status.code() == Code::FailedPrecondition => {
            cx.unpublish(&staged.id, target)?;
            cx.unstage(&staged.id, staged.path())?;
            cx.stage(&staged.stage)?;
            cx.publish(&staged.publish(target))?;
            node_expand(cx, staged, target, size).context("after staging anew")?;
        }
        Err(status) => bail!("{status}"),
    }
    node_expand(cx, staged, target, size).context("again")?;
    Ok(size)
}

/// Bytes of the file system mounted here.
fn total(path: &str) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    Ok(stat.blocks() * stat.fragment_size())
}

fn grows(cx: &mut Cx<'_>, fs_type: &str) -> Result<()> {
    let capability = mounted_as(fs_type, Mode::SingleNodeWriter);
    let request = CreateVolumeRequest {
        volume_capabilities: vec![capability.clone()],
        ..cx.request_of(cx.options.size.max(1), 0)
    };
    let volume = cx.create(&request)?;
    let staged = cx.stage_volume(&volume, capability)?;
    let target = cx.published(&staged)?;
    let file = Path::new(&target).join("file");
    fs::write(&file, b"before")?;
    let before = total(&target)?;
    let size = grow(cx, &staged, &target)?;
    let after = total(&target)?;
    ensure!(after > before * 2, "{fs_type}: {before} bytes, then {after} of {size}");
    ensure!(fs::read(&file)? == b"before", "{fs_type}: the file is another");
    Ok(())
}

fn a_file_system_grows_with_its_volume(cx: &mut Cx<'_>) -> Result<()> {
    let fs_type = cx.options.fs_type.clone();
    grows(cx, &fs_type)
}

fn each_file_system_grows_with_its_volume(cx: &mut Cx<'_>) -> Result<()> {
    for fs_type in ["xfs", "btrfs"] {
        grows(cx, fs_type)?;
    }
    Ok(())
}

fn a_block_device_grows_with_its_volume(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    write_at(&target, 0, &[9; 4096])?;
    let size = grow(cx, &staged, &target)?;
    let has = device_size(&target)?;
    ensure!(has == u64::try_from(size)?, "{has} bytes of {size}");
    ensure!(read_at(&target, 0, 4096)? == [9; 4096], "other bytes");
    Ok(())
}

/// Row: W22.
fn node_expand_accepts_a_missing_capability_and_every_known_mode(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let modes = [Mode::SingleNodeWriter, Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter];
    let mut all = vec![None];
    all.extend(modes.map(|mode| Some(cx.mount(mode))));
    for volume_capability in all {
        cx.driver.node_expand_volume(NodeExpandVolumeRequest {
            volume_id: staged.id.clone(),
            volume_path: target.clone(),
            volume_capability,
            ..Default::default()
        })?;
    }
    Ok(())
}

fn node_expand_of_what_has_not_grown_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let path = staged.path().to_owned();
    for path in [&target, &path] {
        for size in [0, staged.size] {
            node_expand(cx, &staged, path, size)?;
        }
    }
    Ok(())
}

/// A volume with a file in it, unmounted.
fn filled(cx: &mut Cx<'_>, fs_type: &str) -> Result<Staged> {
    let capability = mounted_as(fs_type, Mode::SingleNodeWriter);
    let request =
        CreateVolumeRequest { volume_capabilities: vec![capability.clone()], ..cx.request() };
    let volume = cx.create(&request)?;
    let staged = cx.stage_volume(&volume, capability)?;
    fs::write(Path::new(staged.path()).join("file"), b"at first")?;
    cx.unstage(&staged.id, staged.path())?;
    Ok(staged)
}

fn made_from(cx: &mut Cx<'_>, staged: &Staged, source: Type, size: i64) -> Result<Staged> {
    let capability = staged.stage.volume_capability.clone().context("no capability")?;
    let request = CreateVolumeRequest {
        capacity_range: range(size, 0),
        volume_capabilities: vec![capability.clone()],
        ..cx.request_from(source)
    };
    let volume = cx.create(&request)?;
    cx.stage_volume(&volume, capability)
}

fn a_snapshot_holds_what_was_there(cx: &mut Cx<'_>) -> Result<()> {
    let staged = filled(cx, &cx.options.fs_type.clone())?;
    let request = cx.snapshot_request(&staged.id);
    let snapshot_id = cx.snapshot(&request)?.snapshot_id;
    cx.stage(&staged.stage)?;
    let original = Path::new(staged.path()).join("file");
    fs::write(&original, b"later")?;
    let source = Type::Snapshot(SnapshotSource { snapshot_id });
    let restored = made_from(cx, &staged, source, staged.size)?;
    let copy = Path::new(restored.path()).join("file");
    ensure!(fs::read(copy)? == b"at first", "another file");
    ensure!(fs::read(original)? == b"later", "another original");
    Ok(())
}

fn a_clone_holds_what_was_there_and_goes_its_own_way(cx: &mut Cx<'_>) -> Result<()> {
    let staged = filled(cx, &cx.options.fs_type.clone())?;
    let source = Type::Volume(VolumeSource { volume_id: staged.id.clone() });
    let clone = made_from(cx, &staged, source, staged.size)?;
    let copy = Path::new(clone.path()).join("file");
    ensure!(fs::read(&copy)? == b"at first", "another file");
    fs::write(&copy, b"in the clone")?;
    cx.stage(&staged.stage)?;
    ensure!(fs::read(Path::new(staged.path()).join("file"))? == b"at first", "another original");
    Ok(())
}

fn a_clone_of_xfs_is_mounted_beside_its_source(cx: &mut Cx<'_>) -> Result<()> {
    let staged = filled(cx, "xfs")?;
    cx.stage(&staged.stage)?;
    let source = Type::Volume(VolumeSource { volume_id: staged.id.clone() });
    // xfs refuses a second file system of the same UUID unless `nouuid` is given.
    let clone = made_from(cx, &staged, source, staged.size)?;
    ensure!(Path::new(clone.path()).join("file").exists(), "no file");
    Ok(())
}

fn a_larger_clone_has_a_larger_file_system(cx: &mut Cx<'_>) -> Result<()> {
    let staged = filled(cx, &cx.options.fs_type.clone())?;
    let source = Type::Volume(VolumeSource { volume_id: staged.id.clone() });
    let clone = made_from(cx, &staged, source, staged.size * 3)?;
    cx.stage(&staged.stage)?;
    let (small, large) = (total(staged.path())?, total(clone.path())?);
    ensure!(large > small * 2, "{small} and {large}");
    ensure!(fs::read(Path::new(clone.path()).join("file"))? == b"at first", "another file");
    Ok(())
}
