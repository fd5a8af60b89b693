//! `health`: trouble of each kind is brought about on real devices and mounts, seen through the
//! plugin by the side that is to see it, by that side alone, and mended again.

mod devices;
mod mounts;
mod pools;
mod ward;

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::folder::Folder;

use super::{MARK, Run, figures, guest, sparse};
use crate::vm::Drive;
use ward::{Table, Ward};

const MIB: u64 = 1 << 20;
/// Bytes of the disks that pools lie on.
const DISK: u64 = 1024 * MIB;
/// Persistent memory comes in multiples of 128 MiB.
const PMEM: u64 = 256 * MIB;
/// The guest takes two minutes; one that gets stuck is not waited for.
const GUEST_LIMIT: Duration = Duration::from_secs(600);
/// A disk of the kernel's own that can simulate bad sectors. One that fails is not tried
/// again for long.
const BAD_DISK: &str = "scsi_debug dev_size_mb=256 max_luns=1";

/// The host's half.
///
/// # Errors
/// When something is not seen, or seen by the wrong side, or does not go away when it is mended.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("health")?;
    let mut vm = run
        .machine("health")?
        .memory(2560)
        .limit(GUEST_LIMIT)
        .modules(&["xfs", "btrfs", "dm-mod", "dm-flakey", "dm-delay", "sd_mod", BAD_DISK])
        .programs(&["blkid", "mkfs.xfs", "xfs_io", "xfs_repair", "dmsetup", "blockdev", "dd"])
        .program(&blockd_testkit::tools::blockd_csi()?);
    for disk in ["first", "second", "third"] {
        vm = vm.drive(Drive::File(sparse(&folder, disk, DISK)?));
    }
    vm = vm.drive(Drive::Nvdimm(sparse(&folder, "memory", PMEM)?));
    let short = if run.is_short() { " --short" } else { "" };
    let words = format!("health{short}");
    let script = format!("export BLOCKD_CSI_BIN=/usr/bin/blockd-csi\n{}", run.inside(&words));
    let output = vm.run(&script)?;
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(short: bool) -> Result<()> {
    // The kubelet shares its mounts with the containers that it starts.
    guest::shell("mount --make-rshared /")?;
    let mut table = Table::default();
    let done = all(&mut table, short);
    print!("{}", table.text());
    done?;
    let (lines, slowest) = (table.lines(), table.slowest());
    println!(
        "{MARK}{lines} kinds of trouble, each seen by its own side within {slowest:.1} s, and gone \
         when it was mended"
    );
    Ok(())
}

fn all(table: &mut Table, short: bool) -> Result<()> {
    let disk = devices::Switched::new("pool", Path::new("/dev/vda"))?;
    let slow_io = if short { ward::NEVER_SLOW } else { ward::SLOW };
    let mut ward = Ward::start("health", disk.path(), slow_io, table)?;
    mounts::all(&mut ward, short)?;
    devices::all(&mut ward, &disk, short)?;
    pools::space(&mut ward)?;
    ward.end()?;
    if !short {
        devices::bad_sectors(table)?;
        devices::bad_memory(table)?;
        pools::wrong(table)?;
        devices::unplugged(table)?;
    }
    ensure!(table.lines() > 0, "nothing was done");
    Ok(())
}
