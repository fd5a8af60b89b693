//! An image for virtual machines, made by staging a volume, which then leaves this machine.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockd_kata::Image;
use blockd_pmem::media::{Mapping, MappingOptions, Medium};
use blockd_testkit::clock::Clock;
use tonic::Code;

use super::node::{CONTEXT, MIB, Node};
use super::{has_dax, mounted};
use crate::csi::refused;
use crate::workload::csi::life::Shape;
use crate::workload::guest::shell;
use crate::workload::pmem::kata::TEXT;

/// The file name that container runtimes look for.
const NAME: &str = "pmem-csi-vm.img";
/// The disk on which it leaves.
const OUT: &str = "/dev/vdc";

/// Stages a volume with an image, writes to it and copies the image to a disk. Gives its bytes.
///
/// # Errors
/// When it is not what it is said to be.
pub(super) fn leave(node: &mut Node) -> Result<u64> {
    let start = Clock::start();
    without_dax(node).with_context(|| node.last_words())?;
    println!("an image without DAX: ok, {:.1} s", start.elapsed().as_secs_f64());
    if !node.short {
        one(node, "parted", 200)?;
    }
    one(node, "direct", 200)
}

/// A pooled volume with an image, as an earlier release made it. It is not staged as AppDirect,
/// because stores of a virtual machine would reach only the page cache. With the usage FileIO it is
/// staged, so that its data can be copied.
fn without_dax(node: &mut Node) -> Result<()> {
    let mut volume =
        node.volume("pooled-image", Shape::Mount("ext4"), 96, &[("class", "pooled")])?;
    volume.create(&node.driver)?;
    let mut stage_as = |usage: &str| {
        let words = [("kata-containers", "true"), ("usage", usage)];
        let words = words.map(|(word, value)| (format!("{CONTEXT}/{word}"), value.to_owned()));
        volume.context.extend(words);
        volume.stage(&node.driver).map(|()| volume.clone())
    };
    let refused_with_reason = |answer| -> Result<()> {
        let status = refused(answer, Code::FailedPrecondition)?;
        let text = status.message();
        ensure!(text.contains("kataContainers is true"), "{text}");
        ensure!(text.contains("AppDirect needs DAX"), "{text}");
        ensure!(text.contains("class of kind pmem-direct"), "{text}");
        ensure!(images()?.is_empty(), "an image is mounted");
        Ok(())
    };
    refused_with_reason(stage_as("AppDirect"))?;
    let copied = stage_as("FileIO")?;
    copied.publish(&node.driver, 0)?;
    let file = copied.target(0).join("file");
    fs::write(&file, TEXT)?;
    let [image] = <[PathBuf; 1]>::try_from(images()?)
        .map_err(|images| anyhow::anyhow!("one image, not {images:?}"))?;
    let (around, options) = mounted(image.parent().context("no folder")?)?;
    ensure!(around.starts_with("/dev/ublkb") && !has_dax(&options), "{around}: {options:?}");
    // The reason for the refusal: a mapping of the image does not reach the persistent memory.
    let medium = Mapping::open(&image, &MappingOptions::default()).map(|it| it.medium());
    ensure!(!matches!(medium, Ok(Medium::DaxFile)), "{medium:?}");
    // A repeated request does not disturb a volume in use.
    stage_as("AppDirect")?;
    ensure!(fs::read_to_string(&file)? == TEXT, "another file");
    node.off(&copied)?;
    refused_with_reason(stage_as("AppDirect"))?;
    stage_as("FileIO")?;
    copied.publish(&node.driver, 0)?;
    ensure!(fs::read_to_string(&file)? == TEXT, "another file");
    node.down(&copied)?;
    node.clean("an image without DAX")
}

/// Paths of images in mounted file systems.
fn images() -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let paths = table.lines().filter_map(|line| line.split(' ').nth(4));
    Ok(paths.map(|path| Path::new(path).join(NAME)).filter(|path| path.is_file()).collect())
}

/// A volume with an image, of this class. Its image is on the disk in the end.
fn one(node: &mut Node, class: &str, mib: i64) -> Result<u64> {
    let parameters = [("class", class), ("kataContainers", "true"), ("eraseAfter", "false")];
    let mut volume = node.volume("image", Shape::Mount("ext4"), mib, &parameters)?;
    volume.create(&node.driver)?;
    ensure!(node.attribute(&volume, "kata-containers")? == "true", "{:?}", volume.context);
    volume.stage(&node.driver)?;
    volume.publish(&node.driver, 0)?;
    let target = volume.target(0);
    fs::write(target.join("file"), TEXT)?;
    // The mount is of the image's part that a loop device shows.
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
    ensure!(node.attribute(&volume, "usage")? == "AppDirect", "{:?}", volume.context);
    // Stores of a virtual machine that maps it reach the persistent memory, not a page cache.
    let mapping = Mapping::open(file, &MappingOptions::default())?;
    ensure!(mapping.medium() == Medium::DaxFile, "{:?}", mapping.medium());
    drop(mapping);
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

/// Copies the image in a volume that is not published, found by nothing but its name.
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
