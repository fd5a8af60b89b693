//! Pools that get full, pools that are others than they were, and volumes that go away below their
//! users.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;

use super::ward::{SLOW, Side, Table, Trouble, Ward, settings};
use crate::workload::csi::life::{Shape, Volume};
use crate::workload::device::{Buffer, Device};
use crate::workload::guest;

const MIB: u64 = 1 << 20;
/// Bytes of the volume that fills the pool: more than that has.
const LARGE: u64 = 400 * MIB;
/// Bytes of a write.
const WRITE: u32 = 4 << 20;

/// Writes from an offset on, until an error, or until `enough` returns true.
fn write(path: &Path, from: u64, mut enough: impl FnMut() -> Result<bool>) -> Result<u64> {
    let device = Device::open(path)?;
    let mut buffer = Buffer::default();
    buffer.of(WRITE as usize).fill(0x5a);
    let mut offset = from;
    while !enough()? {
        ensure!(
            offset + u64::from(WRITE) <= device.size,
            "the volume is full, and the pool is not"
        );
        device.write(offset, &buffer)?;
        offset += u64::from(WRITE);
    }
    Ok(offset)
}

fn state(ward: &Ward<'_>) -> Result<String> {
    let shown = ward.rig.daemon.cli(&["pool", "show"])?;
    Ok(shown["pool"]["space_state"].as_str().context("the state of space")?.to_owned())
}

/// Gives back all that a volume has.
fn empty(path: &Path) -> Result<()> {
    guest::shell(&format!("blkdiscard --force {}", path.display())).map(drop)
}

/// A pool that gets low and full, and has room again.
pub(super) fn space(ward: &mut Ward<'_>) -> Result<()> {
    let volume = ward.up(Shape::Block, LARGE)?;
    let path = volume.target(0);
    let low = Trouble {
        cause: "the pool is low",
        side: Side::Controller,
        says: &["free of"],
        reads: None,
        absent: false,
    };
    ward.trouble(
        &low,
        &volume,
        |ward| write(&path, 0, || Ok(state(ward)? != "normal")).map(drop),
        |_| empty(&path),
    )?;
    let full = Trouble { cause: "the pool is full", says: &["for space"], ..low };
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::cell::Cell::new(None);
    ward.trouble(
        &full,
        &volume,
        |_| {
            let (path, stop): (PathBuf, _) = (path.clone(), Arc::clone(&stop));
            let enough = move || Ok(stop.load(Ordering::Acquire));
            writer.set(Some(std::thread::spawn(move || write(&path, 0, enough))));
            Ok(())
        },
        |_| {
            // One write still waits, and goes on when there is room.
            stop.store(true, Ordering::Release);
            empty(&path)?;
            let ended = writer.take().context("a writer")?.join();
            ensure!(matches!(ended, Ok(Ok(_))), "the writer: {ended:?}");
            empty(&path)
        },
    )?;
    missing(ward, &volume)?;
    ward.down(&volume)
}

/// A volume that is deleted while a pod uses it, and made again.
fn missing(ward: &mut Ward<'_>, volume: &Volume) -> Result<()> {
    let (pool, name) = volume.id.split_once('/').context("an id")?;
    let gone = Trouble {
        cause: "the volume is deleted",
        side: Side::Node,
        says: &["not found"],
        reads: None,
        absent: true,
    };
    ward.trouble(
        &gone,
        volume,
        |ward| ward.rig.daemon.cli(&["del", "--force", "--pool", pool, name]).map(drop),
        |ward| {
            ward.unpublish(volume)?;
            volume.clone().create(&ward.driver)?;
            ward.publish(volume)
        },
    )
}

/// Another pool where there was one, and the one that there was again.
pub(super) fn wrong(table: &mut Table) -> Result<()> {
    let mut other = Daemon::new("other", &settings(Path::new("/dev/vda"), SLOW))?;
    other.start()?;
    ensure!(other.stop()?.success(), "the other's end: {}", other.last_words());
    drop(other);
    let mut ward = Ward::start("wrong", Path::new("/dev/vdc"), SLOW, table)?;
    let volume = ward.up(Shape::Block, 16 * MIB)?;
    let wrong = Trouble {
        cause: "another pool in its place",
        side: Side::Node,
        says: &["not found"],
        reads: None,
        absent: true,
    };
    let restart = |ward: &mut Ward<'_>, pool: &str| {
        ward.restart(|ward| ward.rig.daemon.move_pool(&settings(Path::new(pool), SLOW)))
    };
    ward.trouble(
        &wrong,
        &volume,
        |ward| restart(ward, "/dev/vda"),
        |ward| {
            restart(ward, "/dev/vdc")?;
            // Its device was removed by the daemon that had no such volume.
            ward.unpublish(&volume)?;
            ward.publish(&volume)
        },
    )?;
    ward.down(&volume)?;
    ward.end()
}
