//! Concurrent use of a volume: the rows W1 to W31, mounted and as a block device.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{NodePublishVolumeRequest, VolumeCapability};
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CREATE, NODE_MODES, STAGE, cases};
use crate::csi::cx::{Cx, Staged, block, mounted_at, refused};

const WRITER: Mode = Mode::SingleNodeWriter;
const READER: Mode = Mode::SingleNodeReaderOnly;
const SINGLE: Mode = Mode::SingleNodeSingleWriter;
const MULTI: Mode = Mode::SingleNodeMultiWriter;

cases! { [CREATE, STAGE, Host, NODE_MODES]
    second_target_of_single_writer_is_refused;
    second_target_of_single_writer_is_taken_after_the_first_is_gone;
    same_target_of_single_writer_again_is_ok;
    multi_writer_has_as_many_targets_as_are_wanted;
    old_writer_has_several_targets_unless_strict: Rows;
    single_writer_is_exclusive_against_every_other_mode;
    other_modes_are_refused_beside_single_writer;
    a_volume_of_the_old_mode_is_used_with_the_new_one_and_back;
    staged_with_the_new_mode_published_with_the_old_one;
    old_and_new_mode_go_side_by_side: Rows;
    unpublish_and_unstage_look_at_no_mode;
    a_readonly_second_target_of_single_writer_is_refused;
    a_readonly_second_target_of_multi_writer_is_allowed;
    a_volume_for_one_reader_is_mounted_read_only: Rows;
    a_block_volume_for_one_reader_can_not_be_written: Rows;
    the_old_mode_is_staged_and_published;
}

/// Both ways to use a volume: W28.
fn uses(cx: &Cx<'_>, mode: Mode) -> [VolumeCapability; 2] {
    [cx.mount(mode), block(mode)]
}

/// Publishes at a new path with this mode.
fn publish(cx: &mut Cx<'_>, staged: &Staged, mode: Mode) -> Result<String> {
    let target = cx.target()?;
    cx.publish(&staged.publish_as(&target, mode)).with_context(|| format!("{mode:?}"))?;
    ensure!(mounted_at(&target)?.is_some(), "nothing is mounted at {target}");
    Ok(target)
}

/// At a new path this mode is refused, and nothing is there.
fn conflict(cx: &mut Cx<'_>, staged: &Staged, mode: Mode) -> Result<()> {
    let target = cx.target()?;
    let answer = cx.publish(&staged.publish_as(&target, mode));
    refused(answer, Code::FailedPrecondition).with_context(|| format!("{mode:?}"))?;
    ensure!(mounted_at(&target)?.is_none(), "it is mounted at {target}");
    Ok(())
}

/// Row: W1.
fn second_target_of_single_writer_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, SINGLE) {
        let staged = cx.staged(capability)?;
        publish(cx, &staged, SINGLE)?;
        conflict(cx, &staged, SINGLE)?;
        conflict(cx, &staged, SINGLE)?;
    }
    Ok(())
}

/// Row: W12.
fn second_target_of_single_writer_is_taken_after_the_first_is_gone(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, SINGLE) {
        let staged = cx.staged(capability)?;
        let first = publish(cx, &staged, SINGLE)?;
        conflict(cx, &staged, SINGLE)?;
        cx.unpublish(&staged.id, &first)?;
        publish(cx, &staged, SINGLE)?;
    }
    Ok(())
}

/// Row: W13.
fn same_target_of_single_writer_again_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, SINGLE) {
        let staged = cx.staged(capability)?;
        let target = publish(cx, &staged, SINGLE)?;
        for _ in 0..3 {
            cx.publish(&staged.publish_as(&target, SINGLE))?;
        }
    }
    Ok(())
}

/// Row: W2.
fn multi_writer_has_as_many_targets_as_are_wanted(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, MULTI) {
        let staged = cx.staged(capability)?;
        for _ in 0..4 {
            publish(cx, &staged, MULTI)?;
        }
    }
    let staged = cx.staged(cx.mount(MULTI))?;
    let (first, second) = (publish(cx, &staged, MULTI)?, publish(cx, &staged, MULTI)?);
    fs::write(Path::new(&first).join("file"), b"shared")?;
    ensure!(fs::read(Path::new(&second).join("file"))? == b"shared", "two volumes");
    Ok(())
}

/// Row: W5.
fn old_writer_has_several_targets_unless_strict(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, WRITER) {
        let staged = cx.staged(capability)?;
        for _ in 0..3 {
            publish(cx, &staged, WRITER)?;
        }
    }
    Ok(())
}

/// Row: W6.
fn single_writer_is_exclusive_against_every_other_mode(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [WRITER, MULTI] {
        for capability in uses(cx, mode) {
            let staged = cx.staged(capability)?;
            let first = publish(cx, &staged, mode)?;
            conflict(cx, &staged, SINGLE)?;
            ensure!(mounted_at(&first)?.is_some(), "the first is gone");
        }
    }
    Ok(())
}

/// Row: W6.
fn other_modes_are_refused_beside_single_writer(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, SINGLE) {
        let staged = cx.staged(capability)?;
        publish(cx, &staged, SINGLE)?;
        conflict(cx, &staged, WRITER)?;
        conflict(cx, &staged, MULTI)?;
    }
    Ok(())
}

/// Row: W17.
fn a_volume_of_the_old_mode_is_used_with_the_new_one_and_back(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for mode in [WRITER, MULTI, WRITER] {
        let staged = cx.stage_volume(&volume, cx.mount(mode))?;
        let target = publish(cx, &staged, mode)?;
        cx.unpublish(&staged.id, &target)?;
        cx.unstage(&staged.id, staged.path())?;
    }
    Ok(())
}

/// Row: W18.
fn staged_with_the_new_mode_published_with_the_old_one(cx: &mut Cx<'_>) -> Result<()> {
    for (first, second) in [(MULTI, WRITER), (WRITER, MULTI)] {
        for capability in uses(cx, first) {
            let staged = cx.staged(capability)?;
            publish(cx, &staged, second)?;
            // As after a restart of the kubelet: staged again with the other one.
            let mut again = staged.stage.clone();
            again.volume_capability = staged.publish_as("", second).volume_capability;
            cx.stage(&again)?;
        }
    }
    Ok(())
}

/// Row: W18.
fn old_and_new_mode_go_side_by_side(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, MULTI) {
        let staged = cx.staged(capability)?;
        publish(cx, &staged, MULTI)?;
        let target = publish(cx, &staged, WRITER)?;
        cx.publish(&staged.publish_as(&target, MULTI))?;
    }
    Ok(())
}

/// Row: W19.
fn unpublish_and_unstage_look_at_no_mode(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [SINGLE, MULTI, WRITER] {
        let staged = cx.staged(cx.mount(mode))?;
        let target = publish(cx, &staged, mode)?;
        cx.unpublish(&staged.id, &target)?;
        cx.unstage(&staged.id, staged.path())?;
        cx.delete(&staged.id)?;
    }
    Ok(())
}

/// Row: W27.
fn a_readonly_second_target_of_single_writer_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, SINGLE) {
        let staged = cx.staged(capability)?;
        publish(cx, &staged, SINGLE)?;
        let target = cx.target()?;
        let request = staged.publish_as(&target, SINGLE);
        let request = NodePublishVolumeRequest { readonly: true, ..request };
        refused(cx.publish(&request), Code::FailedPrecondition)?;
    }
    Ok(())
}

/// Row: W27.
fn a_readonly_second_target_of_multi_writer_is_allowed(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [MULTI, WRITER] {
        let staged = cx.staged(cx.mount(mode))?;
        let first = publish(cx, &staged, mode)?;
        let target = cx.target()?;
        let request = staged.publish_as(&target, mode);
        cx.publish(&NodePublishVolumeRequest { readonly: true, ..request })?;
        ensure!(fs::write(Path::new(&target).join("file"), b"x").is_err(), "it was written");
        fs::write(Path::new(&first).join("file"), b"x")?;
    }
    Ok(())
}

/// Row: W30.
fn a_volume_for_one_reader_is_mounted_read_only(cx: &mut Cx<'_>) -> Result<()> {
    // The file system has to exist before a read-only mount.
    let volume = cx.volume()?;
    let staged = cx.stage_volume(&volume, cx.mount(WRITER))?;
    fs::write(Path::new(staged.path()).join("file"), b"there")?;
    cx.unstage(&staged.id, staged.path())?;
    let staged = cx.stage_volume(&volume, cx.mount(READER))?;
    for _ in 0..2 {
        let target = publish(cx, &staged, READER)?;
        ensure!(fs::read(Path::new(&target).join("file"))? == b"there", "it can't be read");
        ensure!(fs::write(Path::new(&target).join("file"), b"x").is_err(), "it was written");
    }
    let mount = mounted_at(staged.path())?.context("nothing is staged")?;
    ensure!(mount.options.split(',').any(|option| option == "ro"), "{mount:?}");
    Ok(())
}

/// Row: W30.
fn a_block_volume_for_one_reader_can_not_be_written(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(block(READER))?;
    let target = publish(cx, &staged, READER)?;
    let opened = fs::File::options().write(true).open(&target);
    let written = opened.and_then(|file| {
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 0)?;
        file.sync_all()
    });
    ensure!(written.is_err(), "it was written");
    Ok(())
}

/// Row: W4.
fn the_old_mode_is_staged_and_published(cx: &mut Cx<'_>) -> Result<()> {
    for capability in uses(cx, WRITER) {
        let staged = cx.staged(capability)?;
        let target = publish(cx, &staged, WRITER)?;
        cx.publish(&staged.publish(&target))?;
    }
    Ok(())
}
