//! A pool on tmpfs that could become larger than the machine's memory.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::tools;

use super::super::{device_of, guest};
use super::MIB;

/// Bytes of the pool, more than twice what the machine has.
const POOL: u64 = 4096 * MIB;

/// Writes until there is no memory left that the pool may take: the writer waits, the machine goes
/// on, and so does the writer's volume when there is memory again.
///
/// # Errors
/// When the kernel ends a process for lack of memory, or a write fails that should wait.
pub(super) fn steps() -> Result<String> {
    guest::shell("mkdir -p /memory; mount -t tmpfs -o size=8g tmpfs /memory")?;
    let mut daemon = Daemon::new(
        "memory",
        &Settings {
            pool: Some("/memory/file".into()),
            pool_size: POOL,
            pool_lines: "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n".to_owned(),
            ..Settings::default()
        },
    )?;
    daemon.start()?;
    guest::add_device(&daemon, "large", POOL)?;
    let before = available()?;
    let device = device_of("large");
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "oflag=direct"]).arg(format!("of={}", device.display()));
    let dd = dd.stderr(Stdio::piped()).spawn().context("starting dd")?;
    // On a slow machine a write also waits for a moment before the pool is full.
    let is_full = || -> Option<()> {
        let shown = daemon.cli(&["pool", "show"]).ok()?;
        let waits = shown["pool"]["blocked_writes"].as_u64()? > 0;
        (waits && shown["pool"]["space_state"] == "full").then_some(())
    };
    // A gigabyte is written until then, which takes a minute where others use the processors.
    tools::wait_until("a write to wait for memory", 4 * guest::PATIENCE, is_full)
        .with_context(|| format!("{:?}", daemon.cli(&["pool", "show"])))?;
    let left = available()?;
    ensure!(left >= 32 * MIB, "{} MiB of memory are left", left / MIB);
    // Another volume's blocks that were written can be read and written meanwhile.
    guest::shell(&format!(
        "dd if={0} of=/dev/null bs=1M count=16 iflag=direct status=none
         dd if=/dev/zero of={0} bs=1M count=16 oflag=direct conv=notrunc status=none",
        device.display()
    ))?;
    daemon.cli(&["del", "--force", "large"])?;
    let said = String::from_utf8_lossy(&dd.wait_with_output()?.stderr).into_owned();
    ensure!(said.contains("No space left on device"), "dd says {said}");
    tools::wait_until("memory to be given back", guest::PATIENCE, || {
        matches!(available(), Ok(now) if now + 128 * MIB >= before).then_some(())
    })
    .with_context(|| format!("{} MiB before, {:?} now", before / MIB, available()))?;
    guest::add_device(&daemon, "small", 64 * MIB)?;
    guest::shell(&format!(
        "dd if=/dev/zero of={} bs=1M count=64 oflag=direct status=none",
        device_of("small").display()
    ))?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    guest::shell("umount /memory")?;
    Ok(format!(
        "{} MiB of memory left of {} when a pool on tmpfs was full",
        left / MIB,
        before / MIB
    ))
}

fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no MemAvailable")?;
    Ok(kib.parse::<u64>()? << 10)
}
