//! The parts that workloads share inside a guest: a daemon on a disk, and devices of it.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::tools;

use super::device::Device;
use super::device_of;
use crate::kill::volume::Volume;

/// Sub-blocks of a volume, the unit of giving back.
const SUB_BLOCK: u64 = 4096;

/// A device that takes longer to come back after a restart is stuck.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The kernel's messages about IO errors, and those of file systems.
const ERRORS: [&str; 6] = [
    "I/O error",
    "EXT4-fs error",
    "XFS (",
    "Aborting journal",
    "Remounting filesystem",
    "BTRFS error",
];

/// A daemon whose pool lies on this disk.
///
/// # Errors
/// When it does not come up.
pub fn daemon(pool: &Path, lines: &str) -> Result<Daemon> {
    start(Settings {
        pool: Some(pool.to_path_buf()),
        tables: lines.to_owned(),
        ..Settings::default()
    })
}

/// The same with small extents, so that snapshots share many of them, and commits that come soon: a
/// fold may have to wait for one. The lines are of the pool.
///
/// # Errors
/// As [`daemon`].
pub fn daemon_with_small_extents(pool: &Path, lines: &str) -> Result<Daemon> {
    start(Settings {
        pool: Some(pool.to_path_buf()),
        pool_lines: format!("extent_size = \"64K\"\ncommit_interval = \"100ms\"\n{lines}"),
        ..Settings::default()
    })
}

/// A daemon with these settings.
///
/// # Errors
/// As [`daemon`].
pub fn start(settings: Settings) -> Result<Daemon> {
    let mut daemon = Daemon::new("guest", &settings)?;
    daemon.start()?;
    Ok(daemon)
}

/// Makes a volume with a device, and the model of it.
///
/// # Errors
/// When the daemon refuses, or the device has another size.
pub fn add(daemon: &Daemon, name: &str, id: u32, bytes: u64) -> Result<Arc<Mutex<Volume>>> {
    add_device(daemon, name, bytes)?;
    Ok(Arc::new(Mutex::new(Volume::new(name, id, bytes, SUB_BLOCK))))
}

/// Makes a volume with a device.
///
/// # Errors
/// As [`add`].
pub fn add_device(daemon: &Daemon, name: &str, bytes: u64) -> Result<()> {
    let said = daemon.cli(&["add", "--ublk", "--size", &bytes.to_string(), name])?;
    let open = Device::open(&device_of(name));
    let size = open.with_context(|| format!("{said}\n{}", daemon.last_words()))?.size;
    ensure!(size == bytes, "the device of {name} has {size} bytes, not {bytes}");
    Ok(())
}

/// Runs a line of shell.
///
/// # Errors
/// When it does not end with 0, with what it said.
pub fn shell(line: &str) -> Result<String> {
    tools::text(Command::new("/bin/sh").args(["-euc", &format!("exec 2>&1; {line}")]))
        .with_context(|| line.to_owned())
}

/// Has new keys of encrypted volumes derived with 1 MiB of memory instead of 64 MiB, over which an
/// emulated processor takes seconds for each call.
///
/// # Errors
/// When the program is not there.
pub fn derive_keys_with_less_memory() -> Result<()> {
    shell(
        r#"
        program=$(command -v cryptsetup); first=/usr/local/sbin; mkdir -p $first
        cat >$first/cryptsetup <<END
#!/bin/sh
last=
for word do
    shift
    if [ "\$last" = --pbkdf-memory ]; then set -- "\$@" 1024; else set -- "\$@" "\$word"; fi
    last=\$word
done
exec $program "\$@"
END
        chmod +x $first/cryptsetup"#,
    )
    .map(|_| ())
}

/// Makes an ext4 file system on a volume's device and mounts it.
///
/// # Errors
/// When one of it fails.
pub fn mount_new(volume: &str, folder: &Path) -> Result<()> {
    let (device, folder) = (device_of(volume), folder.display());
    shell(&format!(
        "mkfs.ext4 -q {0}; mkdir -p {folder}; mount -t ext4 -o discard {0} {folder}",
        device.display()
    ))
    .map(|_| ())
}

/// Fails when the kernel has logged an IO error or a file system's error.
///
/// # Errors
/// With these lines.
pub fn no_errors() -> Result<()> {
    let said = shell("dmesg")?;
    let bad: Vec<&str> = said
        .lines()
        .filter(|line| ERRORS.iter().any(|part| line.contains(part)))
        .filter(|line| !line.contains("XFS (") || line.contains("rror") || line.contains("hutdown"))
        .collect();
    ensure!(bad.is_empty(), "the kernel has logged errors:\n{}", bad.join("\n"));
    Ok(())
}
