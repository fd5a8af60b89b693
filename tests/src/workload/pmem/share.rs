//! A pool that has a share of a region: the daemon makes its namespaces, and a share that is raised
//! adds to the pool that is there.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{MIB, SECOND, pooled, regions};
use crate::clock::clock;
use crate::daemon::{Daemon, REGION};
use crate::workload::device_of;
use crate::workload::guest::{self, shell};

const VOLUME: &str = "shared";
/// More than the first half of the region holds.
const VOLUME_BYTES: u64 = 160 * MIB;
/// MiB that are written with each half.
const PART: u64 = 80;
/// A device joins a pool as soon as it is low, which is looked at a few times a second.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// The guest's half.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn inside() -> Result<String> {
    let list = regions::ours()?;
    let key = list.first().and_then(|one| one["region"].as_str()).context("no region")?.to_owned();
    let refused = start(&key, "").err().context("a pool without a namespace")?;
    ensure!(format!("{refused:#}").contains("pmem create --region"), "{refused:#}");
    ensure!(namespaces()?.is_empty(), "a namespace nobody has asked for");
    // The first start makes it, and the second finds it.
    for _ in 0..2 {
        let daemon = start(&key, "create_namespaces = true\npercentage = 50\n")?;
        let found = namespaces()?;
        ensure!(found.len() == 1 && taken(&found) <= SECOND / 2, "{found:?}");
        guest::add_device(&daemon, VOLUME, VOLUME_BYTES)?;
        stop(daemon)?;
    }
    let daemon = start(&key, "create_namespaces = true\npercentage = 50\n")?;
    guest::add_device(&daemon, VOLUME, VOLUME_BYTES)?;
    shell(&format!("dd if=/dev/urandom of=/tmp/parts bs=1M count={}", PART * 2))?;
    write(0)?;
    stop(daemon)?;
    let daemon = start(&key, "create_namespaces = true\npercentage = 100\n")?;
    let found = namespaces()?;
    ensure!(found.len() == 2 && taken(&found) > SECOND / 2, "{found:?}");
    guest::add_device(&daemon, VOLUME, VOLUME_BYTES)?;
    compare(PART)?;
    write(PART)?;
    joined(&daemon)?;
    compare(PART * 2)?;
    stop(daemon)?;
    // Both belong to it from now on, whatever is allowed.
    let daemon = start(&key, "")?;
    guest::add_device(&daemon, VOLUME, VOLUME_BYTES)?;
    joined(&daemon)?;
    compare(PART * 2)?;
    stop(daemon)?;
    Ok(format!("a share of 50 and then 100 % of a region, {} MiB found", PART * 2))
}

fn start(key: &str, lines: &str) -> Result<Daemon> {
    let daemon = pooled::daemon_on(PathBuf::from(format!("{REGION}{key}")), lines, "")?;
    let pool = &daemon.cli(&["pool", "show", "default"])?["pool"];
    let failure = pool["failure"].as_str().filter(|text| !text.is_empty());
    if let Some(failure) = failure {
        bail!("{failure}");
    }
    Ok(daemon)
}

fn stop(mut daemon: Daemon) -> Result<()> {
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(())
}

fn namespaces() -> Result<Vec<Value>> {
    let regions = regions::ours()?;
    let all = regions.iter().filter_map(|one| one["namespaces"].as_array());
    Ok(all.flatten().cloned().collect())
}

fn taken(namespaces: &[Value]) -> u64 {
    namespaces.iter().filter_map(|one| one["size_bytes"].as_u64()).sum()
}

/// Writes a part of the volume, as it is in the file.
fn write(at: u64) -> Result<()> {
    let device = device_of(VOLUME);
    let device = device.display();
    shell(&format!(
        "dd if=/tmp/parts of={device} bs=1M skip={at} seek={at} count={PART} oflag=direct"
    ))
    .map(|_| ())
}

/// Compares so many MiB of the volume with the file.
fn compare(mib: u64) -> Result<()> {
    let device = device_of(VOLUME);
    shell(&format!("cmp -n {} {} /tmp/parts", mib * MIB, device.display())).map(|_| ())
}

/// Waits until the pool has both devices.
fn joined(daemon: &Daemon) -> Result<()> {
    let start = clock();
    loop {
        let pool = daemon.cli(&["pool", "show", "default"])?["pool"].clone();
        let devices = pool["devices"].as_array().map_or(0, Vec::len);
        let size = pool["size_bytes"].as_u64().unwrap_or(0);
        if devices == 2 && size > SECOND / 2 {
            return Ok(());
        }
        ensure!(start.elapsed() < JOIN_LIMIT, "{pool}\n{}", daemon.last_words());
        std::thread::sleep(Duration::from_millis(100));
    }
}
