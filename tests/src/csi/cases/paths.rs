//! Paths of staging and publishing that lead elsewhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{NodePublishVolumeRequest, NodeStageVolumeRequest};
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CREATE, STAGE, cases};
use crate::csi::cx::{Cx, mounted_at, refused, text};

cases! { [CREATE, STAGE, Host]
    a_path_that_is_not_absolute_is_invalid_argument;
    a_path_that_goes_up_is_invalid_argument: Rows;
    a_path_beyond_the_limit_of_the_system_is_invalid_argument: Rows;
    a_path_out_of_the_kubelets_folder_is_invalid_argument: Rows;
    a_symlink_out_of_the_kubelets_folder_is_not_followed: Rows;
    a_target_that_is_a_symlink_is_not_followed: Rows;
    a_path_with_strange_characters_is_a_path;
}

fn everywhere(cx: &mut Cx<'_>, path: &str) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let stage =
        NodeStageVolumeRequest { staging_target_path: path.to_owned(), ..staged.stage.clone() };
    refused(cx.driver.node_stage_volume(stage), Code::InvalidArgument)?;
    let publish = staged.publish(path);
    refused(cx.driver.node_publish_volume(publish), Code::InvalidArgument)?;
    let target = cx.target()?;
    let publish = NodePublishVolumeRequest {
        staging_target_path: path.to_owned(),
        ..staged.publish(&target)
    };
    refused(cx.driver.node_publish_volume(publish), Code::InvalidArgument)?;
    refused(cx.unpublish(&staged.id, path), Code::InvalidArgument)?;
    refused(cx.unstage(&staged.id, path), Code::InvalidArgument)?;
    Ok(())
}

fn a_path_that_is_not_absolute_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for path in ["a", "./a", "../a"] {
        everywhere(cx, path)?;
    }
    Ok(())
}

fn a_path_that_goes_up_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let below = cx.options.target_dir.to_string_lossy().into_owned();
    for path in
        [format!("{below}/../../../../etc/suite"), format!("{below}/a/../b"), format!("{below}/..")]
    {
        everywhere(cx, &path)?;
    }
    Ok(())
}

fn a_path_beyond_the_limit_of_the_system_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let below = cx.options.target_dir.to_string_lossy().into_owned();
    everywhere(cx, &format!("{below}{}", "/aaaaaaa".repeat(1 << 17)))?;
    everywhere(cx, &format!("{below}/a\0b"))
}

fn a_path_out_of_the_kubelets_folder_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for path in ["/tmp/suite-target", "/etc/suite-target", "/suite-target"] {
        everywhere(cx, path)?;
        ensure!(!Path::new(path).exists(), "{path} was made");
    }
    Ok(())
}

fn a_symlink_out_of_the_kubelets_folder_is_not_followed(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let outside = blockd_testkit::folder::Folder::new("outside")?;
    let link = cx.options.target_dir.join(cx.name());
    symlink(outside.path(), &link)?;
    let target = text(&link.join("mount"))?;
    let answer = cx.driver.node_publish_volume(staged.publish(&target));
    let made = outside.path().join("mount").exists();
    let unpublished = cx.unpublish(&staged.id, &target);
    fs::remove_file(&link)?;
    refused(answer, Code::InvalidArgument)?;
    ensure!(!made, "it was made outside");
    if unpublished.is_err() {
        refused(unpublished, Code::InvalidArgument)?;
    }
    Ok(())
}

fn a_target_that_is_a_symlink_is_not_followed(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let outside = blockd_testkit::folder::Folder::new("outside")?;
    let inside = outside.path().join("precious");
    fs::create_dir(&inside)?;
    let target = cx.target()?;
    symlink(&inside, &target)?;
    let answer = cx.driver.node_publish_volume(staged.publish(&target));
    let mounted = mounted_at(&text(&inside)?)?.is_some();
    if mounted {
        nix::mount::umount(&inside)?;
    }
    fs::remove_file(&target)?;
    refused(answer, Code::InvalidArgument)?;
    ensure!(!mounted, "it was mounted outside");
    Ok(())
}

fn a_path_with_strange_characters_is_a_path(cx: &mut Cx<'_>) -> Result<()> {
    let staged = cx.staged(cx.mount(Mode::SingleNodeWriter))?;
    let folder = cx.options.target_dir.join(format!("{} \\ ö ..a #", cx.name()));
    fs::create_dir(&folder)?;
    cx.remember_folder(&folder);
    let target = text(&folder.join("mount"))?;
    cx.publish(&staged.publish(&target))?;
    ensure!(mounted_at(&target)?.is_some(), "nothing is mounted");
    cx.publish(&staged.publish(&target))?;
    cx.unpublish(&staged.id, &target)?;
    ensure!(!Path::new(&target).exists(), "{target} is still there");
    Ok(())
}
