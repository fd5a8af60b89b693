//! A pool on a region, and volumes of it as block devices.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};

use super::{WRITING, answered, direct, regions};
use crate::daemon::{Daemon, Settings};
use crate::workload::device_of;
use crate::workload::guest::{self, shell};

/// Bytes of the volume that power is cut under.
const VOLUME: u64 = 16 << 20;
/// Precedes what was found after a cut.
const FOUND: &str = "found ";

/// A daemon with a pool on the character device.
///
/// # Errors
/// When there is no device, or not one, or it does not serve.
pub(super) fn daemon(lines: &str, tables: &str) -> Result<Daemon> {
    let settings = Settings {
        pool: Some(device()?),
        pool_lines: format!("kind = \"pmem\"\n{lines}"),
        tables: tables.to_owned(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("pmem", &settings)?;
    daemon.start()?;
    Ok(daemon)
}

/// The one character device of persistent memory that there is.
fn device() -> Result<PathBuf> {
    let text = shell("ls -d /dev/dax*")?;
    let mut all = text.split_whitespace();
    let one = all.next().context("no /dev/dax*")?;
    ensure!(all.next().is_none(), "more than one of {text}");
    Ok(PathBuf::from(one))
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
    verify(short)?;
    let kills = kills(&mut daemon, if short { 2 } else { 10 }, seed)?;
    let mapped = direct::make(&daemon)?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(format!("a pool on {}, {kills}; {mapped}", device()?.display()))
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

/// What a boot says it has found.
#[must_use]
pub(super) fn found(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix(FOUND))?;
    let (known, later) = line.split_once(' ')?;
    Some((known.parse().ok()?, later.parse().ok()?))
}
