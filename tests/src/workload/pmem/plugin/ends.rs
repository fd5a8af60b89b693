//! Ends that are not in order: plugin and daemon die under volumes that are in use, and the power
//! goes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;

use super::node::Node;
use super::{drop_caches, has_dax, mounted};
use crate::workload::csi::life::{self, Shape, Volume};
use crate::workload::csi::node::insist;
use crate::workload::guest::shell;
use crate::workload::pmem::direct;

/// Bytes of a file that is written before a process dies.
const WRITTEN: usize = 4 << 20;

/// The volume that is removed before the power is cut.
const FIRST: &str = "first";
/// A volume that stays up until the power is cut: name, file system, size in MiB and parameters.
type Kept = (&'static str, Shape, i64, &'static [(&'static str, &'static str)]);
const KEPT: [Kept; 4] = [
    ("kept", Shape::Mount("ext4"), 64, &[("class", "direct")]),
    ("kept-raw", Shape::Block, 32, &[("class", "direct")]),
    ("kept-image", Shape::Mount("ext4"), 128, &[("class", "direct"), ("kataContainers", "true")]),
    ("kept-pooled", Shape::Mount("ext4"), 64, &[("class", "pooled"), ("usage", "FileIO")]),
];

/// Deaths of the two, with one volume of each kind in use. Gives how many steps that were.
///
/// # Errors
/// When something is lost, mounted anew or left.
pub(super) fn all(node: &mut Node) -> Result<usize> {
    let start = Clock::start();
    deaths(node).with_context(|| node.last_words())?;
    node.clean("deaths")?;
    println!("deaths under volumes in use: ok, {:.1} s", start.elapsed().as_secs_f64());
    Ok(1)
}

fn deaths(node: &mut Node) -> Result<()> {
    let mapped = node.up("mapped", Shape::Mount("ext4"), 64, &[("class", "direct")])?;
    let pooled = node.up("pooled", Shape::Mount("ext4"), 64, &[("usage", "FileIO")])?;
    let (source, options) = mounted(&pooled.target(0))?;
    ensure!(source.starts_with("/dev/ublkb"), "{source}");
    ensure!(!has_dax(&options), "{options:?}");
    ensure!(node.attribute(&pooled, "durability")? == "power-safe", "{:?}", pooled.context);
    direct::map(&mapped.target(0))?;
    write(&pooled.target(0).join("file"), 1)?;
    let table = life::left(&node.rig)?.mounts;
    for forgets in node.either(&[false][..], &[false, true]) {
        node.kill()?;
        if *forgets {
            // And the plugin has forgotten all.
            node.rig.plugin.kill()?;
            fs::remove_dir_all(node.rig.plugin.state_dir())?;
            node.rig.plugin.start()?;
            node.driver = node.rig.plugin.driver()?;
        }
        for volume in [&mapped, &pooled] {
            let driver = &node.driver;
            insist("staging again", || volume.stage(driver))?;
            insist("publishing again", || volume.publish(driver, 0))?;
            node.total(volume)?;
        }
        let now = life::left(&node.rig)?.mounts;
        ensure!(now == table, "{now:?} rather than {table:?}");
        drop_caches()?;
        direct::compare(&mapped.target(0))?;
        compare(&pooled.target(0).join("file"), 1)?;
    }
    for volume in [&mapped, &pooled] {
        node.down(volume)?;
    }
    Ok(())
}

/// Leaves volumes up and written. The first namespace goes, so that the kernel may number those
/// that stay otherwise after the next boot.
///
/// # Errors
/// When one can't be made, used or written.
pub(super) fn leave_up(node: &mut Node) -> Result<()> {
    let parameters = [("class", "direct"), ("eraseAfter", "false")];
    let first = node.up(FIRST, Shape::Block, 16, &parameters)?;
    for (name, shape, mib, parameters) in KEPT {
        let volume = node.up(name, shape, mib, parameters)?;
        match name {
            "kept" => drop(direct::map(&volume.target(0))?),
            "kept-raw" => write(&volume.target(0), 2)?,
            _ => write(&volume.target(0).join("file"), 3)?,
        }
    }
    node.down(&first)?;
    node.scrubbed(direct::POOL)?;
    Ok(())
}

/// After the boot: repeats the kubelet's calls for all of it, and compares the data.
///
/// # Errors
/// When it is not, or something is left in the end.
pub(super) fn find(node: &mut Node) -> Result<String> {
    let mut all: Vec<Volume> = Vec::new();
    for (name, shape, mib, parameters) in KEPT {
        let mut volume = node.volume(name, shape, mib, parameters)?;
        // It is there, and the answer is as it was.
        volume.create(&node.driver)?;
        let driver = &node.driver;
        insist("staging", || volume.stage(driver)).with_context(|| node.last_words())?;
        insist("publishing", || volume.publish(driver, 0)).with_context(|| node.last_words())?;
        let target = volume.target(0);
        match name {
            "kept" => {
                ensure!(has_dax(&mounted(&target)?.1), "{name} has no DAX any more");
                direct::compare(&target)?;
            }
            "kept-raw" => compare(&target, 2)?,
            _ => compare(&target.join("file"), 3)?,
        }
        all.push(volume);
    }
    for volume in &all {
        node.down(volume)?;
    }
    // The removal of its folders may not be durable.
    node.volume(FIRST, Shape::Block, 16, &[])?.gone()?;
    node.clean("what was found")?;
    shell("! ls /dev/pmem*").context("a device is left")?;
    Ok(format!("{} volumes staged again after a power cut", all.len()))
}

fn content(seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..WRITTEN / 8).flat_map(|_| rng.u64(..).to_le_bytes()).collect()
}

/// Writes, until it is durable.
fn write(path: &Path, seed: u64) -> Result<()> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(&content(seed), 0)?;
    file.sync_all()?;
    let folder = path.parent().context("no folder")?;
    Ok(File::open(folder)?.sync_all()?)
}

fn compare(path: &Path, seed: u64) -> Result<()> {
    let mut bytes = vec![0; WRITTEN];
    File::open(path)?.read_exact_at(&mut bytes, 0)?;
    let other = bytes.iter().zip(content(seed)).position(|(a, b)| *a != b);
    ensure!(other.is_none(), "byte {other:?} of {} is another", path.display());
    Ok(())
}
