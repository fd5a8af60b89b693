//! The plugin for Kubernetes beside the daemon, on persistent memory as a kernel has it: volumes
//! that applications map, images for virtual machines, extents behind ublk, what is refused, what
//! dies, and a loss of power.

mod ends;
mod growth;
mod image;
mod lives;
mod node;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::{MIB, machine, regions};
use crate::vm::{Drive, Vm};
use crate::workload::guest::shell;
use crate::workload::{MARK, Run, figures, sparse};
use node::Node;

/// Bytes of the regions: of volumes that are namespaces, of such that grow, and of extents. They
/// are distinguished by their size. An xfs that is laid out in huge pages fits into the first.
const DIRECT: u64 = 1152 * MIB;
const GROWING: u64 = 256 * MIB;
const POOLED: u64 = 384 * MIB;
const LABELS: u64 = 2 * MIB;
/// Bytes of the disk with what daemon and plugin remember, of a pool that is not in memory, and of
/// the disk on which an image leaves the machine.
const STATE: u64 = 64 * MIB;
const DISK: u64 = 256 * MIB;
const OUT: u64 = 512 * MIB;
/// Printed when the power may be cut.
const UP: &str = "everything is up";
/// Precedes the bytes of an image that has left the machine.
const IMAGE: &str = "image of ";

/// The boots of such a machine, one in the short form. Gives figures, and an image that came out
/// of it. The host's half.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn host(run: &Run, folder: &Folder) -> Result<(String, PathBuf)> {
    let image = sparse(folder, "csi-image", OUT)?;
    let vm = machine(run)?
        .modules(&["loop"])
        .programs(&["losetup", "blockdev", "resize2fs", "dumpe2fs", "xfs_growfs", "xfs_repair"])
        .program(&tools::blockd_csi()?)
        .drive(Drive::File(sparse(folder, "csi-state", STATE)?))
        .drive(Drive::File(sparse(folder, "csi-disk", DISK)?))
        .drive(Drive::File(image.clone()))
        .drive(Drive::Nvdimm(sparse(folder, "csi-direct", DIRECT + LABELS)?))
        .drive(Drive::Nvdimm(sparse(folder, "csi-growing", GROWING + LABELS)?))
        .drive(Drive::Nvdimm(sparse(folder, "csi-pooled", POOLED + LABELS)?));
    // The short form has no time for another boot.
    let before = boot(run, &vm, "plugin", !run.is_short())?;
    let mut said = figures(&before)?.to_owned();
    if !run.is_short() {
        let after = boot(run, &vm, "plugin-again", false)?;
        said = format!("{said}; {}", figures(&after)?);
    }
    let bytes = before.lines().find_map(|line| line.strip_prefix(IMAGE));
    let bytes = bytes.context("no image has left the machine")?.parse()?;
    ensure!(bytes < OUT, "an image of {bytes} bytes does not fit");
    File::options().write(true).open(&image)?.set_len(bytes)?;
    Ok((said, image))
}

fn boot(run: &Run, vm: &Vm, name: &str, is_cut: bool) -> Result<String> {
    let short = if run.is_short() { " --short" } else { "" };
    let script = format!(
        "export BLOCKD_CSI_BIN=/usr/bin/blockd-csi\n{}",
        run.inside(&format!("pmem {name}{short}"))
    );
    let mut running = vm.start(&script)?;
    let output = if is_cut {
        running.wait_for(UP)?;
        running.cut()?
    } else {
        running.finish()?
    };
    println!("{}", output.text);
    Ok(output.text)
}

/// The guest's half, up to the cut, if there is one.
///
/// # Errors
/// As [`host`].
pub(super) fn inside(short: bool) -> Result<()> {
    regions::labels(3)?;
    let keys = keys()?;
    regions::blockd(&format!("create --region {} --percentage 100", keys[2]))?;
    let mut node = Node::start(keys, short)?;
    let steps = lives::all(&mut node)? + ends::all(&mut node)?;
    let bytes = image::leave(&mut node)?;
    println!("{IMAGE}{bytes}");
    println!("{MARK}{steps} steps of a node with persistent memory");
    if short {
        return node.end();
    }
    ends::leave_up(&mut node)?;
    println!("{UP}");
    // Nothing is taken down: the power goes.
    loop {
        std::thread::park();
    }
}

/// The guest's half after the cut.
///
/// # Errors
/// As [`host`].
pub(super) fn again(short: bool) -> Result<()> {
    let mut node = Node::start(keys()?, short)?;
    let found = ends::find(&mut node)?;
    node.end()?;
    println!("{MARK}{found}");
    Ok(())
}

/// Keys of the regions: direct, growing, pooled.
fn keys() -> Result<[String; 3]> {
    let mut all = regions::ours()?;
    all.sort_by_key(|one| one["size_bytes"].as_u64());
    let keys = all.iter().map(|one| one["region"].as_str().map(str::to_owned));
    let keys: Option<Vec<String>> = keys.collect();
    let [growing, pooled, direct] =
        <[String; 3]>::try_from(keys.context("a region has no key")?)
            .map_err(|keys| anyhow::anyhow!("three regions, not {keys:?}"))?;
    Ok([direct, growing, pooled])
}

/// The uppermost mount at a path in the mount table: its source, and all options.
fn mounted(path: &Path) -> Result<(String, Vec<String>)> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let path = path.display().to_string();
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == Some(&path));
    let line = line.with_context(|| format!("nothing is mounted at {path}"))?;
    let (mount, of) = line.split_once(" - ").context("a line of the mount table")?;
    let of: Vec<&str> = of.split(' ').collect();
    let [_, source, last] = of.as_slice() else { anyhow::bail!("{line}") };
    let options = mount.split(' ').nth(5).into_iter().chain([*last]);
    let options = options.flat_map(|all| all.split(',')).map(str::to_owned).collect();
    Ok(((*source).to_owned(), options))
}

/// Whether files there are mapped as they are, by these options.
fn has_dax(options: &[String]) -> bool {
    options.iter().any(|word| word == "dax" || word == "dax=always")
}

/// Writes out what is in the machine's memory of a file system, and forgets it.
fn drop_caches() -> Result<()> {
    shell("sync; echo 3 >/proc/sys/vm/drop_caches").map(|_| ())
}
