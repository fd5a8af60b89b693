//! A pool that has a share of a region: the daemon makes its namespaces, and a share that is raised
//! adds to the pool that is there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, REGION};
use serde_json::Value;

use super::{MIB, SECOND, pooled, regions};
use crate::workload::device_of;
use crate::workload::guest::{self, shell};

const VOLUME: &str = "shared";
/// More than the first half of the region holds.
const VOLUME_BYTES: u64 = 160 * MIB;
/// MiB that are written with each half.
const PART: u64 = 80;
/// A device joins a pool as soon as it is low, which is looked at a few times a second.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// The daemon is killed no later than this after it was started.
const LATEST_KILL_MS: u64 = 2500;

/// The configuration of a daemon that may have half a region, or all of it.
const HALF: &str = "create_namespaces = true\npercentage = 50\n";
const ALL: &str = "create_namespaces = true\npercentage = 100\n";

/// The guest's half.
///
/// # Errors
/// When something is not as it has to be.
pub(super) fn inside(short: bool, seed: u64) -> Result<String> {
    let list = regions::ours()?;
    let key = list.first().and_then(|one| one["region"].as_str()).context("no region")?.to_owned();
    let place = PathBuf::from(format!("{REGION}{key}"));
    let mut daemon = Daemon::new("pmem", &pooled::settings(place.clone(), "", ""))?;
    let daemon = &mut daemon;
    let refused = start(daemon, &place, "").err().context("a pool without a namespace")?;
    ensure!(format!("{refused:#}").contains("pmem create --region"), "{refused:#}");
    ensure!(namespaces()?.is_empty(), "a namespace that was not requested");
    ensure!(daemon.pid().is_none(), "a daemon without its default pool");
    let deaths = if short { 3 } else { 20 };
    let mut rng = fastrand::Rng::with_seed(seed);
    killed(daemon, &place, HALF, deaths, &mut rng).context("while the first is made")?;
    // The next start makes what is missing, and the second finds it.
    for _ in 0..2 {
        start(daemon, &place, HALF)?;
        let found = namespaces()?;
        ensure!(found.len() == 1 && taken(&found) <= SECOND / 2, "{found:?}");
        guest::add_device(daemon, VOLUME, VOLUME_BYTES)?;
        stop(daemon)?;
    }
    start(daemon, &place, HALF)?;
    guest::add_device(daemon, VOLUME, VOLUME_BYTES)?;
    shell(&format!("dd if=/dev/urandom of=/tmp/parts bs=1M count={}", PART * 2))?;
    write(0)?;
    stop(daemon)?;
    killed(daemon, &place, ALL, deaths, &mut rng).context("while the second is made")?;
    start(daemon, &place, ALL)?;
    let found = namespaces()?;
    ensure!(found.len() == 2 && taken(&found) > SECOND / 2, "{found:?}");
    guest::add_device(daemon, VOLUME, VOLUME_BYTES)?;
    compare(PART)?;
    let kills = joining(daemon, deaths, &mut rng).context("while the second joins")?;
    joined(daemon)?;
    compare(PART * 2)?;
    stop(daemon)?;
    // Both belong to it from now on, whatever is allowed.
    start(daemon, &place, "")?;
    guest::add_device(daemon, VOLUME, VOLUME_BYTES)?;
    joined(daemon)?;
    compare(PART * 2)?;
    stop(daemon)?;
    Ok(format!(
        "a share of 50 and then 100 % of a region, {} kills while they were made and {kills} while \
         the second joined, {} MiB found",
        deaths * 2,
        PART * 2
    ))
}

fn configure(daemon: &Daemon, place: &Path, lines: &str) -> Result<()> {
    daemon.configure(&pooled::settings(place.to_owned(), lines, ""))
}

fn start(daemon: &mut Daemon, place: &Path, lines: &str) -> Result<()> {
    configure(daemon, place, lines)?;
    daemon.start()?;
    let pool = &daemon.cli(&["pool", "show", "default"])?["pool"];
    let failure = pool["failure"].as_str().filter(|text| !text.is_empty());
    if let Some(failure) = failure {
        bail!("{failure}");
    }
    Ok(())
}

fn stop(daemon: &mut Daemon) -> Result<()> {
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(())
}

/// Starts the daemon and kills it, again and again, wherever that finds it.
fn killed(
    daemon: &mut Daemon,
    place: &Path,
    lines: &str,
    deaths: u32,
    rng: &mut fastrand::Rng,
) -> Result<()> {
    configure(daemon, place, lines)?;
    for _ in 0..deaths {
        daemon.spawn()?;
        std::thread::sleep(Duration::from_millis(rng.u64(0..LATEST_KILL_MS)));
        daemon.kill()?;
    }
    Ok(())
}

/// Writes what has no room in the first, and kills the daemon while the second joins; how often.
fn joining(daemon: &mut Daemon, deaths: u32, rng: &mut fastrand::Rng) -> Result<u32> {
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| write(PART));
        let mut kills = 0;
        while kills < deaths && !writing.is_finished() {
            std::thread::sleep(Duration::from_millis(rng.u64(0..LATEST_KILL_MS / 4)));
            daemon.kill()?;
            daemon.start()?;
            kills += 1;
        }
        writing.join().map_err(|_| anyhow!("a thread panicked"))??;
        Ok(kills)
    })
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

/// Compares the first `mib` MiB of the volume with the file.
fn compare(mib: u64) -> Result<()> {
    let device = device_of(VOLUME);
    shell(&format!("cmp -n {} {} /tmp/parts", mib * MIB, device.display())).map(|_| ())
}

/// Waits until the pool has both devices.
fn joined(daemon: &Daemon) -> Result<()> {
    let start = Clock::start();
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
