//! A volume grows over remains of others: no client can read them, whenever the daemon dies.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;
use blockd_testkit::tools;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::node::{GROWING, Node};
use super::{MIB, drop_caches};
use crate::workload::guest::shell;

/// MiB of the one whose bytes are left, and of the one that grows over them, before and after.
const LEFT: u64 = 128;
const SMALL: u64 = 32;
const LARGE: u64 = 80;
/// MiB of what is in front of it, and then free: more than it grows by.
const FRONT: u64 = 64;
/// MiB of what is written over and over.
const PIECE: u64 = 16;
/// The pattern is in the machine's memory.
const PATTERN: &str = "/tmp/pattern";
/// Until the next daemon has finished it.
const LIMIT: Duration = Duration::from_secs(60);
/// The daemon is killed up to this long after the volume was to grow.
const LATEST_KILL_MS: u64 = 900;

pub(super) fn over_remains(node: &mut Node) -> Result<()> {
    let (rounds, step) = node.either((2, LATEST_KILL_MS / 3), (12, LATEST_KILL_MS / 12));
    let daemon = &mut node.rig.daemon;
    let mut cut = 0;
    for round in 1..=rounds {
        let left = add(daemon, "left", LEFT, &["--no-erase"])?;
        fill(&left, "a secret", LEFT)?;
        daemon.cli(&["del", "--pool", GROWING, "left"])?;
        // It must not grow into the free space in front of it, although the kernel would use that.
        let is_behind = round % 2 == 0;
        if is_behind {
            add(daemon, "first", FRONT, &["--no-erase"])?;
        }
        let volume = add(daemon, "over", SMALL, &["--no-erase"])?;
        fill(&volume, "its own", SMALL)?;
        if is_behind {
            daemon.cli(&["del", "--pool", GROWING, "first"])?;
        }
        // The last one is left in peace.
        if round < rounds {
            cut += u32::from(!killed(daemon, Duration::from_millis(round * step))?);
            compare(daemon)?;
        }
        resize(daemon)?;
        let bytes = compare(daemon)?;
        ensure!(bytes >= LARGE * MIB, "{bytes} bytes");
        daemon.cli(&["del", "--pool", GROWING, "over"])?;
    }
    println!("{cut} of {} growths were cut short", rounds - 1);
    Ok(())
}

fn add(daemon: &Daemon, name: &str, mib: u64, words: &[&str]) -> Result<PathBuf> {
    let size = format!("{mib}M");
    daemon.cli(&[&["add", "--pool", GROWING, "--size", &size, name], words].concat())?;
    device(&show(daemon, name)?).context("a volume without a device")
}

fn show(daemon: &Daemon, name: &str) -> Result<Value> {
    Ok(daemon.cli(&["show", "--pool", GROWING, name])?["volume"].clone())
}

fn device(volume: &Value) -> Option<PathBuf> {
    volume["device_path"].as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn resize(daemon: &Daemon) -> Result<Value> {
    daemon.cli(&["resize", "--pool", GROWING, "over", "--size", &format!("{LARGE}M")])
}

/// Kills the daemon while the volume grows; returns whether the command had succeeded before. Then
/// polls the next daemon until the volume has its device.
fn killed(daemon: &mut Daemon, after: Duration) -> Result<bool> {
    let grown = std::thread::scope(|scope| {
        let growing = scope.spawn(|| resize(daemon).is_ok());
        std::thread::sleep(after);
        daemon.signal(Signal::SIGKILL)?;
        Ok::<bool, anyhow::Error>(growing.join().unwrap_or(false))
    })?;
    daemon.kill()?;
    daemon.start()?;
    tools::wait_until("the volume's device", LIMIT, || {
        show(daemon, "over").ok().as_ref().and_then(device)
    })?;
    Ok(grown)
}

/// Writes a text over and over, to the end of `mib` MiB.
fn fill(device: &Path, text: &str, mib: u64) -> Result<()> {
    let device = device.display();
    shell(&format!("yes {text:?} | dd of={PATTERN} bs=1M count={PIECE} iflag=fullblock"))?;
    for at in 0..mib / PIECE {
        shell(&format!("dd if={PATTERN} of={device} bs={PIECE}M count=1 seek={at} oflag=direct"))?;
    }
    Ok(())
}

/// The volume has what was written to it, and nothing else. Gives its bytes.
fn compare(daemon: &Daemon) -> Result<u64> {
    drop_caches()?;
    let device = device(&show(daemon, "over")?).context("no device")?;
    let device = device.display();
    for at in 0..SMALL / PIECE {
        let (bytes, skip) = (PIECE * MIB, at * PIECE * MIB);
        shell(&format!("cmp -n {bytes} {PATTERN} {device} 0 {skip}"))?;
    }
    let bytes: u64 = shell(&format!("blockdev --getsize64 {device}"))?.trim().parse()?;
    let (skip, rest) = (SMALL * MIB, bytes - SMALL * MIB);
    shell(&format!("cmp -n {rest} {device} /dev/zero {skip} 0"))
        .context("others' bytes in a volume that has grown")?;
    Ok(bytes)
}
