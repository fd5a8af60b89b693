//! Memory that goes bad under a pool. An emulated machine has no memory that really fails to be
//! read: the kernel can only be made to believe so, and sends a signal to the processes that have
//! it mapped, whose default action is to end them. A load of bad memory is tested where a file is
//! cut short under its mapping.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_pmem::media::{Mapping, MappingOptions, Media};
use blockd_testkit::daemon::Daemon;

use crate::workload::device_of;
use crate::workload::guest::shell;

/// The unit of reads and writes.
const BLOCK: u64 = 4096;
/// Bytes in front of the pool's own: a header and the lanes.
const HEADER: u64 = 2 << 20;
/// The kernel's file that marks a page of memory as bad, by its physical address.
const OFFLINE: &str = "/sys/devices/system/memory/hard_offline_page";
/// The text that is searched for in the memory.
const TEXT: &[u8; 32] = b"this block is about to go bad...";

/// Lets the block that holds the beginning of a volume go bad. Returns the observation.
///
/// # Errors
/// When the daemon gets no signal, ends, or returns other data than was written.
pub(super) fn check(daemon: &Daemon, device: &Path, volume: &str) -> Result<String> {
    let file = device_of(volume);
    let dd = |words: &str| shell(&format!("dd bs={BLOCK} count=1 {words}"));
    fs::write("/tmp/good", TEXT.repeat(128))?;
    dd(&format!("if=/tmp/good of={} oflag=direct conv=notrunc", file.display()))?;
    let page = physical(device)? + place(device, TEXT)?;
    // So that processes that have not touched it get the signal as well.
    fs::write("/proc/sys/vm/memory_failure_early_kill", "1")?;
    fs::write(OFFLINE, format!("{page:#x}")).context("a page goes bad")?;
    let log = shell("dmesg | grep 'Memory failure' || true")?;
    ensure!(log.contains("Sending SIGBUS to blockd"), "the daemon got no signal: {log}");
    daemon.cli(&["pool", "show", "default"])?;
    let read = dd(&format!("if={} of=/tmp/read iflag=direct", file.display()));
    if read.is_ok() {
        ensure!(fs::read("/tmp/read")? == fs::read("/tmp/good")?, "not what was written");
    }
    daemon.cli(&["pool", "show", "default"])?;
    Ok("the daemon goes on after the signal for a bad page".to_owned())
}

/// Where the memory begins with this text at the beginning of a block.
fn place(device: &Path, text: &[u8; 32]) -> Result<u64> {
    let mapping = Mapping::open(device, &MappingOptions::default())?;
    let mut found = [0; 32];
    // Another copy is in the lane that the block went through.
    for at in (HEADER..mapping.len()).step_by(usize::try_from(BLOCK)?) {
        mapping.read(at, &mut found)?;
        if found == *text {
            return Ok(at);
        }
    }
    anyhow::bail!("what was written is not in the memory")
}

/// Where a device's memory begins.
fn physical(device: &Path) -> Result<u64> {
    let name = device.file_name().context("a device without a name")?.to_string_lossy();
    let path = format!("/sys/bus/dax/devices/{name}/resource");
    let text = fs::read_to_string(&path).context(path)?;
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).with_context(|| text.clone())
}
