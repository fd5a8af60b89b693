//! An image for virtual machines, made by staging a volume, which then leaves this machine.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::kata::Image;
use tonic::Code;

use super::node::{MIB, Node};
use super::{has_dax, mounted};
use crate::csi::refused;
use crate::workload::csi::life::Shape;
use crate::workload::guest::shell;
use crate::workload::pmem::kata::TEXT;

/// As container runtimes know it.
const NAME: &str = "pmem-csi-vm.img";
/// The disk on which it leaves.
const OUT: &str = "/dev/vdc";

/// Stages a volume with an image, writes to it and copies the image to a disk. Gives its bytes.
///
/// # Errors
/// When it is not what it is said to be.
pub(super) fn leave(node: &mut Node) -> Result<u64> {
    if !node.short {
        one(node, "parted", 200)?;
    }
    one(node, "direct", 200)
}

/// A volume with an image, of this class. Its image is on the disk in the end.
fn one(node: &mut Node, class: &str, mib: i64) -> Result<u64> {
    let parameters = [("class", class), ("kataContainers", "true"), ("eraseAfter", "false")];
    let mut volume = node.volume("image", Shape::Mount("ext4"), mib, &parameters)?;
    volume.create(&node.driver)?;
    ensure!(node.told(&volume, "kata-containers")? == "true", "{:?}", volume.context);
    volume.stage(&node.driver)?;
    volume.publish(&node.driver, 0)?;
    let target = volume.target(0);
    fs::write(target.join("file"), TEXT)?;
    // What is mounted is what a loop device shows of the image.
    let (source, options) = mounted(&target)?;
    ensure!(source.starts_with("/dev/loop") && !has_dax(&options), "{source}: {options:?}");
    let file = shell(&format!("losetup --noheadings --raw --output BACK-FILE {source}"))?;
    let file = Path::new(file.trim());
    ensure!(file.file_name().is_some_and(|name| name == NAME), "{}", file.display());
    let at = shell(&format!("losetup --noheadings --raw --output OFFSET {source}"))?;
    let image = Image::read(&File::open(file)?)?;
    ensure!(at.trim().parse::<u64>()? == image.file_system(), "at {at}");
    let folder = file.parent().context("no folder")?;
    let (around, options) = mounted(folder)?;
    ensure!(Path::new(&around) == node.device(&volume)?, "{around}");
    ensure!(has_dax(&options), "{options:?}");
    // It fills what is around it, and none of it is a hole.
    let data = fs::metadata(file)?;
    ensure!(data.blocks() * 512 >= image.size(), "{} blocks", data.blocks());
    tables_written(&source)?;
    // A fifth is more than an ext4 needs with its journal and what it keeps back.
    let least = u64::try_from((mib - mib / 5) * MIB)?;
    ensure!(image.size() > least, "{} bytes of {mib} MiB", image.size());
    ensure!(u64::try_from(node.total(&volume)?)? <= image.file_system_bytes());
    refused(volume.grow(&node.driver, 2 * mib * MIB), Code::FailedPrecondition)?;
    if !node.short {
        // Both die while it is in use.
        node.kill()?;
        volume.stage(&node.driver)?;
        volume.publish(&node.driver, 0)?;
        ensure!(fs::read_to_string(target.join("file"))? == TEXT, "another file");
    }
    node.off(&volume)?;
    ensure!(!folder.exists(), "{} is left", folder.display());
    let bytes = copy(&node.device(&volume)?)?;
    ensure!(bytes == image.size(), "{bytes} bytes");
    // And nothing is made anew.
    volume.stage(&node.driver)?;
    volume.publish(&node.driver, 0)?;
    ensure!(fs::read_to_string(target.join("file"))? == TEXT, "another file");
    node.down(&volume)?;
    node.clean("a volume with an image")?;
    Ok(bytes)
}

/// Copies the image in a volume that nobody has, found by nothing but its name.
fn copy(device: &Path) -> Result<u64> {
    let mount = "/mnt/around";
    shell(&format!(
        "mkdir -p {mount}; mount -t ext4 -o ro {} {mount}; \
         dd if={mount}/{NAME} of={OUT} bs=1M conv=fsync",
        device.display()
    ))?;
    let data = fs::metadata(Path::new(mount).join(NAME))?;
    // Its use has made no holes either.
    ensure!(data.blocks() * 512 >= data.len(), "{} blocks", data.blocks());
    let bytes = data.len();
    shell(&format!("umount {mount}"))?;
    Ok(bytes)
}

/// The kernel would zero inode tables that mkfs left some time after the mount, through the loop
/// device, and what is zeroed there is a hole in the image.
fn tables_written(device: &str) -> Result<()> {
    let groups = shell(&format!("dumpe2fs {device}"))?;
    let count = |text: &str| groups.lines().filter(|line| line.contains(text)).count();
    let (all, written) = (count(": (Blocks "), count("ITABLE_ZEROED"));
    ensure!(all > 0 && written == all, "{written} of {all} groups: {groups}");
    Ok(())
}
