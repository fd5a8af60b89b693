//! Devices that are added ahead of need: what an attachment takes with them, and whose data they
//! have.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::tools;

use super::super::{device_of, guest};

/// How many are kept ready.
const READY: usize = 3;
/// How often a volume is attached, with and without a ready device.
const ATTACHMENTS: u32 = 8;
const SIZE: u64 = 64 << 20;

/// Attaches volumes without and with ready devices, kills the daemon under one that was ready, and
/// gives no device's cache to another volume.
///
/// # Errors
/// When anything is not as it should be.
pub(super) fn ready() -> Result<String> {
    let pool = Path::new("/dev/vda");
    let mut daemon = guest::daemon(pool, "")?;
    let without = attachments(&daemon, 0)?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());

    let mut daemon = guest::daemon(pool, &format!("[ublk]\nready = {READY}\n"))?;
    await_devices(&daemon, READY)?;
    let with = attachments(&daemon, READY)?;
    of_one_volume(&mut daemon)?;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    let left = count("c")?;
    ensure!(left == 0, "{left} ready devices are left by a daemon that ended");
    Ok(format!("attached in {without:.1} ms, with a ready device in {with:.1} ms"))
}

/// The least time that an attachment takes: other times have a neighbour's in them.
fn attachments(daemon: &Daemon, ready: usize) -> Result<f64> {
    let mut least = f64::MAX;
    guest::add_device(daemon, "timed", SIZE)?;
    for _ in 0..ATTACHMENTS {
        daemon.cli(&["detach", "timed"])?;
        await_devices(daemon, ready)?;
        let clock = Clock::start();
        daemon.cli(&["attach", "--ublk", "timed"])?;
        least = least.min(clock.elapsed().as_secs_f64() * 1e3);
    }
    daemon.cli(&["del", "timed"])?;
    Ok(least)
}

/// One that was ready goes on with its volume after a kill, and is nothing but that volume's.
fn of_one_volume(daemon: &mut Daemon) -> Result<()> {
    guest::add_device(daemon, "first", SIZE)?;
    let device = device_of("first");
    let number = || std::fs::canonicalize(device_of("first")).context("the device of first");
    let before = number()?;
    let write = "yes first | head -c 1048576 | dd of=$1 bs=64k iflag=fullblock conv=fsync";
    guest::shell(&format!("set -- {}; {write}", device.display()))?;
    await_devices(daemon, READY)?;
    daemon.kill()?;
    daemon.start()?;
    await_devices(daemon, READY)?;
    ensure!(number()? == before, "the device has another number after a restart");
    let compare = "yes first | head -c 1048576 | cmp - $1 -n 1048576";
    guest::shell(&format!("set -- {}; {compare}", device.display()))?;
    daemon.cli(&["del", "first"])?;
    guest::add_device(daemon, "second", SIZE)?;
    let zero = format!("cmp -n 1048576 /dev/zero {}", device_of("second").display());
    guest::shell(&zero).context("a new volume's device has something in it")?;
    daemon.cli(&["del", "second"])?;
    Ok(())
}

/// Waits until this many devices are there that no volume has.
fn await_devices(daemon: &Daemon, ready: usize) -> Result<()> {
    let look = || Some(count("c").ok()?.checked_sub(count("b").ok()?)? == ready).filter(|is| *is);
    let waited = tools::wait_until("ready devices", guest::PATIENCE, look);
    waited.map(|_| ()).with_context(|| daemon.last_words())
}

/// The kernel's devices: `c` those that are added, `b` those of them that are started.
fn count(kind: &str) -> Result<usize> {
    let count = guest::shell(&format!("ls /dev | grep -c '^ublk{kind}[0-9]*$' || true"))?;
    count.trim().parse().with_context(|| format!("{count:?} is no number"))
}
