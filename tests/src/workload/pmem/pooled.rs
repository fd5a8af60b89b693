//! A pool on a region, and volumes of it as block devices.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, NAMESPACE, Settings};

use super::{MIB, WRITING, answered, dax_file, direct, poison, regions};
use crate::workload::device_of;
use crate::workload::guest::{self, shell};

/// Bytes of the volume that power is cut under.
const VOLUME: u64 = 16 << 20;
/// The disk with the daemon's state about its namespaces, and its mount point.
const DISK: &str = "/dev/vda";
const STATE: &str = "/mnt/state";
/// Precedes what was found after a cut.
const FOUND: &str = "found ";

/// A daemon with a pool on the character device.
///
/// # Errors
/// When there is no device, or not one, or it does not serve.
pub(super) fn daemon(lines: &str, tables: &str) -> Result<Daemon> {
    daemon_on(place()?, lines, tables)
}

/// The same at a place that is named.
///
/// # Errors
/// When it does not serve.
pub(super) fn daemon_on(place: PathBuf, lines: &str, tables: &str) -> Result<Daemon> {
    let mut daemon = Daemon::new("pmem", &settings(place, lines, tables))?;
    if Path::new(DISK).exists() {
        let (at, state) = (STATE, daemon.folder().join("state"));
        shell(&format!(
            "blkid {DISK} || mkfs.ext4 -q {DISK}; mkdir -p {at}; mount {DISK} {at} || mountpoint {at}"
        ))?;
        std::os::unix::fs::symlink(at, state)?;
    }
    daemon.start()?;
    Ok(daemon)
}

/// How a daemon is configured whose pool is in persistent memory.
pub(super) fn settings(place: PathBuf, lines: &str, tables: &str) -> Settings {
    Settings {
        pool: Some(place),
        pool_lines: format!("kind = \"pmem\"\n{lines}"),
        lines: "default_pool = \"default\"\n".to_owned(),
        tables: format!("[metrics]\naddress = \"127.0.0.1:0\"\n{tables}"),
        ..Settings::default()
    }
}

/// The one character device of persistent memory that there is.
fn device() -> Result<PathBuf> {
    let text = shell("ls -d /dev/dax*")?;
    let mut all = text.split_whitespace();
    let one = all.next().context("no /dev/dax*")?;
    ensure!(all.next().is_none(), "more than one of {text}");
    Ok(PathBuf::from(one))
}

/// The path that a pool on it is configured with: its namespace, where that has a label.
fn place() -> Result<PathBuf> {
    let device = device()?;
    for region in regions::ours()?.iter().filter(|region| region["labelled"] == true) {
        for one in region["namespaces"].as_array().into_iter().flatten() {
            if one["device"].as_str() == device.to_str() {
                let uuid = one["uuid"].as_str().with_context(|| format!("no uuid: {one}"))?;
                return Ok(PathBuf::from(format!("{NAMESPACE}{uuid}")));
            }
        }
    }
    Ok(device)
}

/// Makes the pool, and does with it what clients do.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn make(short: bool, seed: u64) -> Result<String> {
    let [large, small] = regions::compare()?;
    for is_new in [true, false] {
        let said = regions::blockd(&format!("create --region {large} --percentage 50"))?;
        ensure!(said["changed"] == is_new, "{said}");
    }
    let mut daemon = daemon("", &direct::table(&small))?;
    guest::add_device(&daemon, "cut", VOLUME)?;
    guest::add_device(&daemon, "files", 64 << 20)?;
    for volume in ["cut", "files"] {
        let device = std::fs::canonicalize(device_of(volume))?;
        let node = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let cache = shell(&format!("cat /sys/block/{node}/queue/write_cache"))?;
        ensure!(cache.trim() == "write through", "{volume} has a cache: {cache}");
    }
    nearby(&daemon)?;
    amounts(&daemon, &large)?;
    verify(short)?;
    let kills = kills(&mut daemon, if short { 2 } else { 10 }, seed)
        .with_context(|| format!("the daemon's last words:\n{}", daemon.last_words()))?;
    let bad = poison::check(&daemon, &device()?, "files")
        .with_context(|| format!("the daemon's last words:\n{}", daemon.last_words()))?;
    let mapped = direct::make(&daemon)?;
    let below = dax_file::check(&daemon)?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(format!("a pool on {}, {kills}; {bad}; {mapped}; {below}", device()?.display()))
}

/// Workers stay on the two nodes in turn, and the pool's thread near its memory (P5).
fn nearby(daemon: &Daemon) -> Result<()> {
    let node = |number| shell(&format!("cat /sys/devices/system/node/node{number}/cpulist"));
    let nodes = [node(0)?.trim().to_owned(), node(1)?.trim().to_owned()];
    let pid = daemon.pid().context("no daemon")?;
    let text = shell(&format!(
        "for task in /proc/{pid}/task/*; do \
         echo $(cat $task/comm) $(grep Cpus_allowed_list $task/status); done"
    ))?;
    let allowed = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.and_then(|line| line.split_whitespace().last()).map(str::to_owned)
    };
    for (thread, expected) in
        [("worker-0", &nodes[0]), ("worker-1", &nodes[1]), ("pool-default", &nodes[0])]
    {
        let found = allowed(thread);
        ensure!(found.as_ref() == Some(expected), "{thread} of {nodes:?} is on {found:?}:\n{text}");
    }
    Ok(())
}

/// The metrics of the pool's region have the names that others have elsewhere (P49).
fn amounts(daemon: &Daemon, region: &str) -> Result<()> {
    let metrics = daemon.metrics()?;
    let amount = |name: &str| -> Result<u64> {
        let begin = format!("pmem_amount_{name}{{pool=\"default\",region=\"{region}\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&begin));
        let value = line.with_context(|| format!("no {begin}in\n{metrics}"))?;
        Ok(value.parse()?)
    };
    let (total, managed) = (amount("total")?, amount("managed")?);
    let (available, largest) = (amount("available")?, amount("max_volume_size")?);
    let whole = total == super::FIRST && managed < total / 2 && managed > total / 2 - 16 * MIB;
    ensure!(whole && available == largest && largest < managed, "{metrics}");
    Ok(())
}

/// Data written by others, with their own check.
fn verify(short: bool) -> Result<()> {
    let size = if short { 16 } else { 60 };
    let device = device_of("files");
    shell(&format!(
        "fio --name=v --filename={} --rw=randwrite --bsrange=512-64k --blockalign=512 \
         --size={size}m --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c \
         --do_verify=1 --randseed=7",
        device.display()
    ))
    .map(|_| ())
}

/// The daemon dies under writes; what was answered is there, and the device goes on.
fn kills(daemon: &mut Daemon, kills: u32, seed: u64) -> Result<String> {
    let device = device_of("cut");
    let mut known = 0;
    for number in 0..kills {
        let stop = AtomicBool::new(false);
        let seed = seed.wrapping_add(1000 + u64::from(number));
        clear(&device)?;
        let counts = std::thread::scope(|scope| -> Result<Vec<u64>> {
            let writing = scope.spawn(|| answered::write_quietly(&device, seed, &stop));
            for _ in 0..3 {
                std::thread::sleep(std::time::Duration::from_millis(150));
                daemon.kill()?;
                daemon.start()?;
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            writing.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?
        })?;
        known += answered::check(&device, seed, &counts)?.0;
    }
    Ok(format!("{} kills of the daemon, {known} answered blocks found", kills * 3))
}

/// After a boot: finds what was answered before the power was cut, and writes until the next cut.
///
/// # Errors
/// When something that was answered is not there.
pub(super) fn go_on(before: Option<&str>, last: bool, seed: u64) -> Result<()> {
    let [_, small] = regions::compare()?;
    let mut daemon = daemon("", &direct::table(&small))?;
    guest::add_device(&daemon, "cut", VOLUME)?;
    direct::find(&daemon)?;
    let device = device_of("cut");
    if let Some(before) = before {
        let counts = answered::parse(before)?;
        let (known, later) = answered::check(&device, seed.wrapping_sub(1), &counts)?;
        println!("{FOUND}{known} {later}");
    }
    if last {
        ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
        return Ok(());
    }
    clear(&device)?;
    println!("{WRITING}");
    answered::write(&device, seed, &AtomicBool::new(false))
}

/// Every round begins with nothing, and so with first writes.
fn clear(device: &Path) -> Result<()> {
    shell(&format!("blkdiscard {}", device.display())).map(|_| ())
}

/// The findings that a boot has printed.
#[must_use]
pub(super) fn found(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix(FOUND))?;
    let (known, later) = line.split_once(' ')?;
    Some((known.parse().ok()?, later.parse().ok()?))
}
