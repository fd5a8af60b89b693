//! NodeStageVolume and NodeUnstageVolume, on real devices.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_capability::{AccessType, MountVolume};
use blockd_csi::proto::{CreateVolumeRequest, NodeStageVolumeRequest, VolumeCapability};
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CREATE, STAGE, cases};
use crate::csi::cx::{Cx, block, mounted_as, mounted_at, refused, refused_as};

cases! { [CREATE, STAGE, Host]
    stage_mounts_the_file_system_that_was_asked_for;
    stage_again_is_ok;
    stage_again_for_another_use_already_exists;
    stage_again_with_another_file_system_already_exists;
    stage_of_a_block_volume_mounts_nothing;
    unstage_undoes_stage_and_is_ok_again;
    written_data_is_there_after_staging_again;
    a_device_with_another_file_system_is_never_formatted;
    a_device_with_unknown_bytes_is_never_formatted: Rows;
    delete_of_a_staged_volume_is_refused;
    each_file_system_is_made_and_mounted: Rows;
    mount_flags_reach_the_mount;
    mount_flags_that_the_kernel_refuses_fail_and_leave_nothing;
    options_of_mkfs_are_taken: Rows;
}

fn stage_mounts_the_file_system_that_was_asked_for(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let mount = mounted_at(staged.path())?.context("nothing is mounted")?;
    ensure!(mount.fs_type == cx.options.fs_type, "{mount:?}");
    Ok(())
}

fn stage_again_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let before = mounted_at(staged.path())?;
        for _ in 0..3 {
            cx.stage(&staged.stage)?;
        }
        ensure!(before == mounted_at(staged.path())?, "it is mounted anew");
    }
    Ok(())
}

fn stage_again_for_another_use_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let mode = Mode::SingleNodeWriter;
    for (first, second) in [(cx.mount(mode), block(mode)), (block(mode), cx.mount(mode))] {
        let staged = cx.staged(first)?;
        let request =
            NodeStageVolumeRequest { volume_capability: Some(second), ..staged.stage.clone() };
        refused(cx.stage(&request), Code::AlreadyExists)?;
    }
    Ok(())
}

fn stage_again_with_another_file_system_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let other = if cx.options.fs_type == "xfs" { "ext4" } else { "xfs" };
    let volume_capability = Some(mounted_as(other, Mode::SingleNodeWriter));
    let request = NodeStageVolumeRequest { volume_capability, ..staged.stage.clone() };
    refused(cx.stage(&request), Code::AlreadyExists).map(|_| ())
}

fn stage_of_a_block_volume_mounts_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let mount = mounted_at(staged.path())?;
    ensure!(mount.is_none_or(|mount| mount.fs_type != cx.options.fs_type), "it is mounted");
    Ok(())
}

fn unstage_undoes_stage_and_is_ok_again(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        for _ in 0..3 {
            cx.unstage(&staged.id, staged.path())?;
        }
        ensure!(mounted_at(staged.path())?.is_none(), "it is still mounted");
    }
    Ok(())
}

fn written_data_is_there_after_staging_again(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let file = Path::new(staged.path()).join("file");
    for round in 0..3 {
        if round > 0 {
            ensure!(fs::read(&file)? == b"what was written", "round {round}");
        }
        fs::write(&file, b"what was written")?;
        cx.unstage(&staged.id, staged.path())?;
        ensure!(!file.exists(), "the file is still there without its volume");
        cx.stage(&staged.stage)?;
    }
    Ok(())
}

fn a_device_with_another_file_system_is_never_formatted(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let file = Path::new(staged.path()).join("file");
    fs::write(&file, b"precious")?;
    cx.unstage(&staged.id, staged.path())?;
    let other = if cx.options.fs_type == "xfs" { "ext4" } else { "xfs" };
    let volume_capability = Some(mounted_as(other, Mode::SingleNodeWriter));
    let request = NodeStageVolumeRequest { volume_capability, ..staged.stage.clone() };
    ensure!(cx.stage(&request).is_err(), "{other} where there was {}", cx.options.fs_type);
    cx.unstage(&staged.id, staged.path())?;
    cx.stage(&staged.stage).context("staging it as it was")?;
    ensure!(fs::read(&file)? == b"precious", "the file is another");
    Ok(())
}

fn a_device_with_unknown_bytes_is_never_formatted(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let bytes = [0xa5; 8192];
    write_at(&target, 0, &bytes)?;
    cx.unpublish(&staged.id, &target)?;
    cx.unstage(&staged.id, staged.path())?;
    let request = NodeStageVolumeRequest {
        volume_capability: Some(cx.mount(Mode::SingleNodeWriter)),
        staging_target_path: cx.staging()?,
        ..staged.stage.clone()
    };
    ensure!(cx.stage(&request).is_err(), "it was formatted");
    cx.unstage(&staged.id, &request.staging_target_path)?;
    cx.stage(&staged.stage)?;
    let target = cx.published(&staged)?;
    ensure!(read_at(&target, 0, bytes.len())? == bytes, "the bytes are others");
    Ok(())
}

/// Writes to a device, durably.
pub(super) fn write_at(path: &str, at: u64, bytes: &[u8]) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = fs::File::options().write(true).open(path).with_context(|| path.to_owned())?;
    file.write_all_at(bytes, at)?;
    file.sync_all()?;
    Ok(())
}

/// Reads from a device.
pub(super) fn read_at(path: &str, at: u64, len: usize) -> Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; len];
    fs::File::open(path).with_context(|| path.to_owned())?.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

fn delete_of_a_staged_volume_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let file = Path::new(staged.path()).join("file");
    fs::write(&file, b"precious")?;
    refused(cx.delete(&staged.id), Code::FailedPrecondition)?;
    ensure!(fs::read(&file)? == b"precious", "the file is another");
    Ok(())
}

fn each_file_system_is_made_and_mounted(cx: &mut Cx<'_>) -> Result<()> {
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mounted_as(fs_type, Mode::SingleNodeWriter);
        // The smallest there is of each.
        let request = CreateVolumeRequest {
            volume_capabilities: vec![capability.clone()],
            ..cx.request_of(1, 0)
        };
        let volume = cx.create(&request)?;
        let staged = cx.stage_volume(&volume, capability).with_context(|| fs_type.to_owned())?;
        let mount = mounted_at(staged.path())?.context("nothing is mounted")?;
        ensure!(mount.fs_type == fs_type, "{mount:?}");
        let target = cx.published(&staged)?;
        fs::write(Path::new(&target).join("file"), vec![7; 1 << 20])?;
    }
    Ok(())
}

fn with_flags(cx: &Cx<'_>, flags: &[&str]) -> VolumeCapability {
    let mount = MountVolume {
        fs_type: cx.options.fs_type.clone(),
        mount_flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
        ..Default::default()
    };
    let mut capability = cx.mount(Mode::SingleNodeWriter);
    capability.access_type = Some(AccessType::Mount(mount));
    capability
}

fn mount_flags_reach_the_mount(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(with_flags(cx, &["noatime", "nosuid"]))?;
    let target = cx.published(&staged)?;
    for path in [staged.path(), &target] {
        let mount = mounted_at(path)?.context("nothing is mounted")?;
        let has = |flag: &str| mount.options.split(',').any(|one| one == flag);
        ensure!(has("noatime") && has("nosuid"), "{mount:?}");
    }
    Ok(())
}

fn mount_flags_that_the_kernel_refuses_fail_and_leave_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: cx.staging()?,
        volume_capability: Some(with_flags(cx, &["no-such-flag=a-secret"])),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    };
    let codes = [Code::InvalidArgument, Code::Internal, Code::FailedPrecondition, Code::Unknown];
    let status = refused_as(cx.stage(&request), &codes)?;
    ensure!(!status.message().contains("a-secret"), "an error has a flag: {}", status.message());
    ensure!(mounted_at(&request.staging_target_path)?.is_none(), "it is mounted");
    cx.unstage(&volume.volume_id, &request.staging_target_path)?;
    // Nothing of it is remembered.
    cx.stage_volume(&volume, cx.mount(Mode::SingleNodeWriter))?;
    Ok(())
}

fn options_of_mkfs_are_taken(cx: &mut Cx<'_>) -> Result<()> {
    let key = format!("{}/mkfs-options", cx.offers().name);
    let mut request = cx.request_with(&key, "-L suite-label");
    let capability = mounted_as("ext4", Mode::SingleNodeWriter);
    request.volume_capabilities = vec![capability.clone()];
    let volume = cx.create(&request)?;
    let device = cx.stage_volume(&volume, block(Mode::SingleNodeWriter))?;
    cx.unstage(&device.id, device.path())?;
    let staged = cx.stage_volume(&volume, capability)?;
    cx.unstage(&staged.id, staged.path())?;
    // The label lies at 120 of the superblock, which lies at 1024.
    cx.stage(&device.stage)?;
    let target = cx.published(&device)?;
    let label = read_at(&target, 1024 + 120, 16)?;
    ensure!(label.starts_with(b"suite-label"), "{label:?}");
    Ok(())
}
