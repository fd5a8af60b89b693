//! One machine: other programs open the disk of a pool, the disk is taken out and put back, and a
//! pool's file lies on a file system that is not mounted.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;

use super::super::device::{Buffer, Device};
use super::super::{MARK, Run, device_of, figures, guest, sparse};
use crate::vm::Drive;

/// Bytes of the disks.
const DISK: u64 = 768 << 20;
/// Bytes of a volume, and what is written of it.
const VOLUME: u64 = 16 << 20;
const WRITTEN: usize = 1 << 20;

/// Where the file system of the second pool is mounted.
const FOLDER: &str = "/mnt/pools";

/// The commands of others on the disk of a pool that is served. Each opens it exclusively.
const OTHERS: [&str; 4] = [
    "mkfs.ext4 -q -F {}",
    "mount -t ext4 {} /mnt/other",
    "wipefs -a {}",
    "dmsetup create --noudevsync other --table '0 2048 linear {} 0'",
];

/// Boots the machine.
pub(super) fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("safety")?;
    let mut vm =
        run.machine("safety")?.modules(&["dm-mod", "dm-flakey"]).programs(&["wipefs", "dmsetup"]);
    for disk in ["first", "second", "third", "fourth"] {
        vm = vm.drive(Drive::File(sparse(&folder, disk, DISK)?));
    }
    let short = if run.is_short() { " --short" } else { "" };
    let output = vm.run(&run.inside(&format!("safety{short}")))?;
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

/// The guest's half.
///
/// # Errors
/// When a mistake is not refused, or data is lost.
pub fn inside(short: bool) -> Result<()> {
    // As systemd has it: the daemon's own namespace sees what is mounted later.
    guest::shell("mount --make-rshared /")?;
    fs::create_dir_all("/mnt/other")?;
    let refused = claimed(Path::new("/dev/vda"))?;
    let rounds = if short { 1 } else { 5 };
    for _ in 0..rounds {
        replugged(Path::new("/dev/vdb"))?;
    }
    unmounted("/dev/vdc")?;
    guest::no_errors()?;
    // From here on the kernel reports errors.
    super::failed::all(Path::new("/dev/vdd"))?;
    println!(
        "{MARK}a disk that is served: {refused} others refused; a disk taken out and put back \
         {rounds} times: its ring refused; a pool on a file system that was not mounted: missing, \
         then served by the device it had; a disk that failed: its pool closed, checked and opened \
         while another served; a device with unreadable blocks: left when they could be read"
    );
    Ok(())
}

fn write(volume: &str, byte: u8) -> Result<()> {
    let device = Device::open(&device_of(volume))?;
    let mut buffer = Buffer::default();
    buffer.of(WRITTEN).fill(byte);
    device.write(0, &buffer)?;
    device.flush()
}

fn check(volume: &str, byte: u8) -> Result<()> {
    let device = Device::open(&device_of(volume))?;
    let mut buffer = Buffer::default();
    device.read(0, WRITTEN, &mut buffer)?;
    ensure!(buffer.bytes().iter().all(|found| *found == byte), "{volume} has other bytes");
    Ok(())
}

/// Others can't have the disk while the pool is served, also after a kill; afterwards they can.
fn claimed(disk: &Path) -> Result<usize> {
    let mut daemon = guest::daemon(disk, "")?;
    guest::add_device(&daemon, "claimed", VOLUME)?;
    write("claimed", 1)?;
    let mut refused = 0;
    for killed in [false, true] {
        if killed {
            daemon.kill()?;
            daemon.start()?;
        }
        for other in OTHERS {
            let line = other.replace("{}", &disk.display().to_string());
            let Err(error) = guest::shell(&line) else { anyhow::bail!("not refused: {line}") };
            let said = format!("{error:#}").to_lowercase();
            ensure!(said.contains("busy") || said.contains("in use"), "{line}: {said}");
            refused += 1;
        }
        check("claimed", 1)?;
    }
    daemon.cli(&["del", "--force", "claimed"]).context("deleting the volume")?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    guest::shell(&format!(
        "dmsetup create --noudevsync other --table '0 2048 linear {} 0'; dmsetup remove other",
        disk.display()
    ))?;
    Ok(refused)
}

/// The daemon dies, and its disk is another one when it comes back, though the host is the same:
/// what it kept in its cache may be gone.
fn replugged(disk: &Path) -> Result<()> {
    let mut daemon = guest::daemon(disk, "")?;
    daemon.cli(&["add", "--nbd", "--size", &VOLUME.to_string(), "replugged"])?;
    let mut connection = daemon.connect("replugged")?;
    connection.write(0, &[2; 4096])?;
    daemon.kill()?;
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let below = fs::canonicalize(format!("/sys/block/{name}/device"))?;
    let slot = below.parent().context("the disk's slot")?.display();
    guest::shell(&format!("echo 1 >{slot}/remove; echo 1 >/sys/bus/pci/rescan"))?;
    blockd_testkit::tools::wait_until("the disk", guest::PATIENCE, || disk.exists().then_some(()))?;
    let error = refused_start(&mut daemon)?;
    ensure!(error.contains("disk sequence number"), "{error}");
    // Only data without an answered flush is lost, and only with an explicit setting.
    let settings = Settings {
        pool: Some(disk.to_path_buf()),
        pool_lines: "accept_loss = true\n".to_owned(),
        ..Settings::default()
    };
    daemon.configure(&settings)?;
    daemon.start()?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    Ok(())
}

/// Starts a daemon whose only pool can't be opened, and returns its error.
fn refused_start(daemon: &mut Daemon) -> Result<String> {
    let before = daemon.log().len();
    if daemon.start().is_ok() {
        daemon.stop()?;
    }
    let log = daemon.log();
    Ok(log.get(before..).unwrap_or_default().to_owned())
}

/// A pool's file lies on a file system that is not mounted when the daemon starts.
fn unmounted(disk: &str) -> Result<()> {
    guest::shell(&format!(
        "mkfs.ext4 -q -F {disk}; mkdir -p {FOLDER}; mount -t ext4 {disk} {FOLDER}"
    ))?;
    let pool = Path::new(FOLDER).join("pool");
    let settings =
        Settings { pool: Some(pool.clone()), pool_size: DISK / 4, ..Settings::default() };
    let mut daemon = Daemon::new("unmounted", &settings)?;
    daemon.start()?;
    guest::add_device(&daemon, "kept", VOLUME)?;
    write("kept", 3)?;
    let device = fs::canonicalize(device_of("kept"))?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    guest::shell(&format!("umount {FOLDER}"))?;
    daemon.start()?;
    ensure!(!pool.exists(), "a missing pool was made anew");
    let health = daemon.cli_output(&["health"])?;
    let said = String::from_utf8_lossy(&health.stdout).into_owned();
    ensure!(said.contains("missing"), "{said}");
    guest::shell(&format!("mount -t ext4 {disk} {FOLDER}"))?;
    daemon.cli(&["pool", "open", "default"])?;
    ensure!(fs::canonicalize(device_of("kept"))? == device, "the volume has another device");
    check("kept", 3)?;
    ensure!(daemon.stop()?.success(), "{}", daemon.last_words());
    guest::shell(&format!("umount {FOLDER}"))?;
    Ok(())
}
