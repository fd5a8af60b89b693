//! NodePublishVolume and NodeUnpublishVolume, on real devices.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::NodePublishVolumeRequest;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use super::stage::{read_at, write_at};
use crate::csi::case::Need::Host;
use crate::csi::case::{CREATE, STAGE, cases};
use crate::csi::cx::{Cx, block, mounted_at, refused};

cases! { [CREATE, STAGE, Host]
    publish_without_a_staging_path_is_failed_precondition;
    publish_of_what_is_not_staged_is_failed_precondition;
    publish_makes_the_target_and_unpublish_removes_it;
    publish_again_is_ok;
    publish_again_for_another_use_already_exists;
    publish_again_with_another_readonly_already_exists;
    unpublish_again_is_ok;
    unpublish_removes_a_target_that_is_not_mounted;
    delete_of_a_published_volume_is_refused;
    data_written_at_the_target_is_staged_too;
    a_readonly_target_can_not_be_written;
    a_block_volume_is_published_as_a_device;
    data_written_to_a_block_volume_stays;
    a_held_block_device_is_unstaged_later_and_loses_nothing;
    unstage_of_a_published_volume_loses_nothing;
    a_target_that_was_unmounted_behind_our_back_is_mounted_again;
}

fn publish_without_a_staging_path_is_failed_precondition(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.target()?;
    let request =
        NodePublishVolumeRequest { staging_target_path: String::new(), ..staged.publish(&target) };
    refused(cx.publish(&request), Code::FailedPrecondition).map(|_| ())
}

fn publish_of_what_is_not_staged_is_failed_precondition(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    cx.unstage(&staged.id, staged.path())?;
    let target = cx.target()?;
    refused(cx.publish(&staged.publish(&target)), Code::FailedPrecondition).map(|_| ())
}

fn publish_makes_the_target_and_unpublish_removes_it(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let target = cx.published(&staged)?;
        ensure!(mounted_at(&target)?.is_some(), "nothing is mounted at {target}");
        cx.unpublish(&staged.id, &target)?;
        ensure!(mounted_at(&target)?.is_none(), "it is still mounted");
        ensure!(!Path::new(&target).exists(), "{target} is still there");
    }
    Ok(())
}

fn publish_again_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let target = cx.published(&staged)?;
        let before = super::super::cx::mounts()?.len();
        for _ in 0..3 {
            cx.publish(&staged.publish(&target))?;
        }
        ensure!(before == super::super::cx::mounts()?.len(), "it is mounted over itself");
    }
    Ok(())
}

fn publish_again_for_another_use_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let volume_capability = Some(block(Mode::SingleNodeWriter));
    let request = NodePublishVolumeRequest { volume_capability, ..staged.publish(&target) };
    refused(cx.publish(&request), Code::AlreadyExists).map(|_| ())
}

fn publish_again_with_another_readonly_already_exists(cx: &mut Cx<'_>) -> Result<()> {
    for readonly in [false, true] {
        let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
        let target = cx.target()?;
        let request = NodePublishVolumeRequest { readonly, ..staged.publish(&target) };
        cx.publish(&request)?;
        let request = NodePublishVolumeRequest { readonly: !readonly, ..request };
        refused(cx.publish(&request), Code::AlreadyExists)?;
    }
    Ok(())
}

fn unpublish_again_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let target = cx.published(&staged)?;
        for _ in 0..3 {
            cx.unpublish(&staged.id, &target)?;
        }
    }
    Ok(())
}

fn unpublish_removes_a_target_that_is_not_mounted(cx: &mut Cx<'_>) -> Result<()> {
    // As after a publish that got no further than making it.
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.target()?;
    fs::create_dir(&target)?;
    cx.unpublish(&staged.id, &target)?;
    ensure!(!Path::new(&target).exists(), "{target} is still there");
    Ok(())
}

/// Row: P51.
fn delete_of_a_published_volume_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [cx.mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)] {
        let staged = cx.staged(capability)?;
        let target = cx.published(&staged)?;
        refused(cx.delete(&staged.id), Code::FailedPrecondition)?;
        ensure!(mounted_at(&target)?.is_some(), "it is gone from {target}");
    }
    Ok(())
}

fn data_written_at_the_target_is_staged_too(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    fs::write(Path::new(&target).join("file"), b"there")?;
    ensure!(fs::read(Path::new(staged.path()).join("file"))? == b"there", "another file");
    cx.unpublish(&staged.id, &target)?;
    ensure!(fs::read(Path::new(staged.path()).join("file"))? == b"there", "gone with its target");
    Ok(())
}

fn a_readonly_target_can_not_be_written(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    fs::write(Path::new(staged.path()).join("file"), b"there")?;
    let target = cx.target()?;
    let request = NodePublishVolumeRequest { readonly: true, ..staged.publish(&target) };
    cx.publish(&request)?;
    let error =
        fs::write(Path::new(&target).join("other"), b"x").err().context("it was written")?;
    ensure!(error.kind() == std::io::ErrorKind::ReadOnlyFilesystem, "{error}");
    ensure!(fs::read(Path::new(&target).join("file"))? == b"there", "it can't be read");
    // The stage is as it was.
    fs::write(Path::new(staged.path()).join("other"), b"x")?;
    Ok(())
}

fn a_block_volume_is_published_as_a_device(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let kind = fs::metadata(&target)?.file_type();
    ensure!(kind.is_block_device(), "{kind:?}");
    let size = device_size(&target)?;
    ensure!(size == u64::try_from(staged.size)?, "{size} bytes of {}", staged.size);
    Ok(())
}

/// Bytes of a device.
pub(super) fn device_size(path: &str) -> Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut file = fs::File::open(path).with_context(|| path.to_owned())?;
    Ok(file.seek(SeekFrom::End(0))?)
}

fn data_written_to_a_block_volume_stays(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let last = u64::try_from(staged.size)? - 4096;
    for at in [0, 1 << 20, last] {
        write_at(&target, at, &[0x5a; 4096])?;
    }
    cx.unpublish(&staged.id, &target)?;
    cx.unstage(&staged.id, staged.path())?;
    cx.stage(&staged.stage)?;
    let target = cx.published(&staged)?;
    for at in [0, 1 << 20, last] {
        ensure!(read_at(&target, at, 4096)? == [0x5a; 4096], "other bytes at {at}");
    }
    Ok(())
}

fn a_held_block_device_is_unstaged_later_and_loses_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    // The kubelet's loop device holds it open beyond unpublish.
    let holder = fs::File::options().read(true).write(true).open(&target)?;
    cx.unpublish(&staged.id, &target)?;
    if let Err(status) = cx.driver.within(std::time::Duration::from_secs(20)).node_unstage_volume(
        blockd_csi::proto::NodeUnstageVolumeRequest {
            volume_id: staged.id.clone(),
            staging_target_path: staged.path().to_owned(),
        },
    ) {
        use Code::{Aborted, DeadlineExceeded, FailedPrecondition, Internal, Unavailable};
        let codes = [Aborted, DeadlineExceeded, FailedPrecondition, Internal, Unavailable];
        ensure!(codes.contains(&status.code()), "{status}");
    }
    use std::os::unix::fs::FileExt;
    holder.write_all_at(&[0x3c; 4096], 8192).context("the holder's device was taken away")?;
    holder.sync_all()?;
    drop(holder);
    let mut answer = cx.unstage(&staged.id, staged.path());
    for _ in 0..1000 {
        if answer.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        answer = cx.unstage(&staged.id, staged.path());
    }
    answer.context("after the holder has gone")?;
    cx.stage(&staged.stage)?;
    let target = cx.published(&staged)?;
    ensure!(read_at(&target, 8192, 4096)? == [0x3c; 4096], "what the holder wrote is lost");
    Ok(())
}

fn unstage_of_a_published_volume_loses_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    let file = Path::new(&target).join("file");
    fs::write(&file, b"there")?;
    // The CO is not to do that. It may be refused, and the target goes on to work.
    let _ = cx.unstage(&staged.id, staged.path());
    ensure!(fs::read(&file)? == b"there", "the target is gone");
    Ok(())
}

fn a_target_that_was_unmounted_behind_our_back_is_mounted_again(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    nix::mount::umount(target.as_str()).context("unmounting it behind its back")?;
    cx.publish(&staged.publish(&target))?;
    ensure!(mounted_at(&target)?.is_some(), "nothing is mounted at {target}");
    Ok(())
}
