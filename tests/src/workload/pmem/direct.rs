//! Volumes that are namespaces: mapped by applications, made, deleted, scrubbed, and there after
//! the next boot.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_pmem::media::{Mapping, MappingOptions, Media, Medium};
use blockd_testkit::daemon::Daemon;
use blockd_testkit::tools;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::Value;

use crate::workload::guest::shell;

const MIB: u64 = 1 << 20;
/// The pool of namespaces, as [`table`] has it.
pub(super) const POOL: &str = "direct";
/// Bytes that are written through a mapping, and found after the next boot.
const WRITTEN: u64 = 16 * MIB;
/// Page faults at most that touching it may take with huge pages: one for each 2 MiB, and what
/// else the process does.
const FAULTS: i64 = 64;
/// A scrub of a volume takes longer only if it hangs.
const SCRUB: Duration = Duration::from_secs(120);
/// Where the volume that stays is mounted.
const FOLDER: &str = "/mnt/kept";

/// The pool's table in the configuration.
pub(super) fn table(region: &str) -> String {
    format!("[[pool]]\nname = \"{POOL}\"\nkind = \"pmem-direct\"\nregion = \"{region}\"\n")
}

/// A volume as the daemon reports it.
fn volume(daemon: &Daemon, name: &str) -> Result<Value> {
    Ok(daemon.cli(&["show", "--pool", POOL, name])?["volume"].clone())
}

/// Makes one. Gives its device.
///
/// # Errors
/// When it is refused, or is no device of the kernel's.
pub(super) fn add(daemon: &Daemon, name: &str, bytes: u64, words: &[&str]) -> Result<PathBuf> {
    let size = bytes.to_string();
    daemon.cli(&[&["add", "--pool", POOL, "--size", &size, name], words].concat())?;
    let shown = volume(daemon, name)?;
    let path = shown["device_path"].as_str().with_context(|| format!("no device: {shown}"))?;
    ensure!(path.starts_with("/dev/pmem"), "{shown}");
    ensure!(shown["size_bytes"].as_u64() >= Some(bytes), "less than asked for: {shown}");
    Ok(PathBuf::from(path))
}

/// The kernel's name of the namespace behind a device.
fn namespace(device: &Path) -> Result<String> {
    for region in super::regions::ours()? {
        for one in region["namespaces"].as_array().into_iter().flatten() {
            if one["device"].as_str() == device.to_str() {
                return Ok(one["name"].as_str().context("no name")?.to_owned());
            }
        }
    }
    anyhow::bail!("no namespace has {}", device.display())
}

/// The error of a command that has to fail.
fn refused(daemon: &Daemon, words: &[&str]) -> Result<String> {
    let Output { status, stderr, stdout } = daemon.cli_output(words)?;
    ensure!(!status.success(), "{words:?} was done: {}", String::from_utf8_lossy(&stdout));
    Ok(String::from_utf8_lossy(&stderr).into_owned())
}

/// Makes volumes, and does with them what workloads do.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn make(daemon: &Daemon) -> Result<String> {
    let device = add(daemon, "kept", 64 * MIB, &[])?;
    let mount = format!("mkdir -p {FOLDER}; mount -t ext4 -o dax {} {FOLDER}", device.display());
    shell(&format!("mkfs.ext4 -q -b 4096 -E stride=512,stripe_width=512 {}", device.display()))?;
    shell(&mount)?;
    let faults = map(Path::new(FOLDER))?;
    let said = refused(daemon, &["del", "--pool", POOL, "kept"])?;
    ensure!(said.contains("mount") || said.contains("use"), "a mounted volume: {said}");
    ensure!(volume(daemon, "kept")?["pmem"]["state"] == "ready", "a volume that was not deleted");
    pieces(daemon)?;
    erased(daemon)?;
    shell(&format!("umount {FOLDER}"))?;
    Ok(format!("16 MiB mapped with MAP_SYNC, {faults} faults"))
}

/// Stores to a file of a file system with DAX. Gives the page faults that it took.
///
/// # Errors
/// When there is no DAX, or pages are small.
pub(super) fn map(folder: &Path) -> Result<i64> {
    let path = folder.join("file");
    let file = File::create_new(&path)?;
    shell(&format!("fallocate -l {WRITTEN} {}", path.display()))?;
    // Blocks that were never written are made so by the first store, which costs a fault each.
    for at in (0..WRITTEN).step_by(1 << 20) {
        file.write_all_at(&vec![1; 1 << 20], at)?;
    }
    file.sync_all()?;
    let mapping = Mapping::open(&path, &MappingOptions::default())?;
    ensure!(mapping.medium() == Medium::DaxFile, "{:?}", mapping.medium());
    let before = getrusage(UsageWho::RUSAGE_THREAD)?.minor_page_faults();
    for at in (0..WRITTEN).step_by(4096) {
        mapping.write(at, &content(at))?;
    }
    mapping.fence();
    let faults = getrusage(UsageWho::RUSAGE_THREAD)?.minor_page_faults() - before;
    ensure!(faults <= FAULTS, "{faults} page faults for {WRITTEN} bytes");
    Ok(faults)
}

/// The content of the page at a byte.
fn content(at: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(at);
    (0..512).flat_map(|_| rng.u64(..).to_le_bytes()).collect()
}

/// After another boot: the volume is there, with the stored data, though it was never synced.
///
/// # Errors
/// When it is not.
pub(super) fn find(daemon: &Daemon) -> Result<()> {
    let shown = volume(daemon, "kept")?;
    let device = shown["device_path"].as_str().with_context(|| format!("no device: {shown}"))?;
    shell(&format!("mkdir -p {FOLDER}; mount -t ext4 -o dax {device} {FOLDER}"))?;
    compare(Path::new(FOLDER))?;
    shell(&format!("umount {FOLDER}")).map(|_| ())
}

/// Checks that the data that [`map`] stored is there.
///
/// # Errors
/// When it is not.
pub(super) fn compare(folder: &Path) -> Result<()> {
    let file = File::open(folder.join("file"))?;
    let mut page = vec![0; 4096];
    for at in (0..WRITTEN).step_by(4096) {
        file.read_exact_at(&mut page, at)?;
        ensure!(page == content(at), "what was stored at {at} is not there");
    }
    Ok(())
}

/// Fragmented free space is distinguished from too little of it (P3).
fn pieces(daemon: &Daemon) -> Result<()> {
    let names = ["p1", "p2", "p3"];
    for name in names {
        add(daemon, name, 32 * MIB, &["--no-erase"])?;
    }
    daemon.cli(&["del", "--pool", POOL, "p2"])?;
    let pool = &daemon.cli(&["pool", "show", POOL])?["pool"];
    let largest = pool["largest_volume_bytes"].as_u64().context("no largest volume")?;
    let free = pool["free_bytes"].as_u64().context("no free bytes")?;
    ensure!(largest < free, "the largest of {free} bytes in pieces is {largest}");
    let wish = (largest + 16 * MIB).to_string();
    let said = refused(daemon, &["add", "--pool", POOL, "--size", &wish, "p4"])?;
    ensure!(said.contains("contiguous") || said.contains("piece"), "free in pieces: {said}");
    for name in ["p1", "p3"] {
        daemon.cli(&["del", "--pool", POOL, name])?;
    }
    Ok(())
}

/// The data of a volume is gone before its space is free (P45), and counted until then: also where
/// it was a namespace of sectors, or had no device when it was deleted.
fn erased(daemon: &Daemon) -> Result<()> {
    for (name, words, is_off) in [
        ("sectors", &["--usage", "file-io"][..], false),
        ("off", &[], true),
        ("secret", &[], false),
    ] {
        let device = add(daemon, name, 32 * MIB, words)?;
        shell(&format!("dd if=/dev/urandom of={} bs=1M count=16 oflag=direct", device.display()))?;
        if is_off {
            shell(&format!("ndctl disable-namespace {}", namespace(&device)?))?;
        }
        daemon.cli(&["del", "--pool", POOL, name])?;
        tools::wait_until("the scrub", SCRUB, || {
            let pool = daemon.cli(&["pool", "show", POOL]).ok()?;
            (pool["pool"]["scrubbing_bytes"] == 0).then_some(())
        })?;
    }
    let device = add(daemon, "next", 32 * MIB, &[])?;
    let bytes = fs::read(&device)?;
    let left = bytes.iter().position(|&byte| byte != 0);
    ensure!(left.is_none(), "byte {left:?} of a new volume is not 0");
    daemon.cli(&["del", "--pool", POOL, "next"]).map(|_| ())
}
