//! Faults of a file system and of its mounts.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::ward::{Side, Trouble, Ward};
use crate::workload::csi::life::{Shape, Volume};
use crate::workload::guest;

const MIB: u64 = 1 << 20;
/// ENOSPC.
const NO_SPACE: i32 = 28;

const NODE: Trouble<'static> =
    Trouble { cause: "", side: Side::Node, says: &[], reads: None, absent: false };

/// Trouble of ext4, then of xfs.
pub(super) fn all(ward: &mut Ward<'_>, short: bool) -> Result<()> {
    let volume = ward.up(Shape::Mount("ext4"), 32 * MIB)?;
    paths(ward, &volume)?;
    full(ward, &volume, short)?;
    errors(ward, &volume)?;
    ward.down(&volume)?;
    if !short {
        shut_down(ward)?;
    }
    Ok(())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Mounts that others undo, cover, or change.
fn paths(ward: &mut Ward<'_>, volume: &Volume) -> Result<()> {
    let (target, staging) = (text(&volume.target(0)), text(&volume.staging));
    let unmounted = Trouble { cause: "unmounted by hand", says: &["nothing is mounted"], ..NODE };
    ward.trouble(
        &unmounted,
        volume,
        |_| guest::shell(&format!("umount {target}")).map(drop),
        |ward| Ok(volume.publish(&ward.driver, 0)?),
    )?;
    let covered = Trouble {
        cause: "something else is mounted",
        says: &["something else is mounted", "tmpfs"],
        ..NODE
    };
    ward.trouble(
        &covered,
        volume,
        |_| guest::shell(&format!("mount -t tmpfs none {target}")).map(drop),
        |_| guest::shell(&format!("umount {target}")).map(drop),
    )?;
    let read_only = Trouble { cause: "mounted read-only by hand", says: &["read-only"], ..NODE };
    ward.trouble(
        &read_only,
        volume,
        |_| guest::shell(&format!("mount -o remount,ro {staging}")).map(drop),
        |_| guest::shell(&format!("mount -o remount,rw {staging}")).map(drop),
    )
}

/// Bytes and inodes come to their end.
fn full(ward: &mut Ward<'_>, volume: &Volume, short: bool) -> Result<()> {
    let target = volume.target(0);
    let bytes =
        Trouble { cause: "the file system is full", says: &["out of capacity", "bytes"], ..NODE };
    let file = target.join("large");
    ward.trouble(
        &bytes,
        volume,
        |_| {
            // Space that is too little for a large write may be enough for a small one.
            for size in ["1M", "4k", "1k"] {
                let mut line = guest::shell(&format!(
                    "dd if=/dev/zero bs={size} conv=fsync >> {} || true",
                    file.display()
                ))?;
                line.make_ascii_lowercase();
                ensure!(line.contains("no space left"), "{line}");
            }
            Ok(())
        },
        |_| fs::remove_file(&file).context("making room"),
    )?;
    if short {
        return Ok(());
    }
    let inodes =
        Trouble { cause: "no inodes are left", says: &["out of capacity", "inodes"], ..NODE };
    let folder = target.join("many");
    ward.trouble(
        &inodes,
        volume,
        |_| {
            fs::create_dir(&folder)?;
            for number in 0.. {
                match File::create(folder.join(format!("{number}"))) {
                    Ok(_) => {}
                    Err(error) if error.raw_os_error() == Some(NO_SPACE) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        },
        |_| fs::remove_dir_all(&folder).context("making room"),
    )
}

/// The file system finds itself damaged. Its count stays until it was checked.
fn errors(ward: &mut Ward<'_>, volume: &Volume) -> Result<()> {
    let (target, staging) = (text(&volume.target(0)), text(&volume.staging));
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mut mounts = mounts.lines().filter_map(|line| line.split_once(' '));
    let device = mounts.find(|(_, rest)| rest.split(' ').next() == Some(&staging));
    let device = device.context("the device of a mount")?.0.to_owned();
    let name = fs::canonicalize(&device)?;
    let name = text(name.file_name().context("a name")?.as_ref());
    let damaged = Trouble { cause: "ext4 counts an error", says: &["ext4 has counted"], ..NODE };
    ward.trouble(
        &damaged,
        volume,
        |_| {
            let file = format!("/sys/fs/ext4/{name}/trigger_fs_error");
            fs::write(&file, "damaged for a test").context(file)
        },
        |ward| {
            // 1: errors were corrected.
            guest::shell(&format!(
                "umount {target}; umount {staging}; e2fsck -fy {device} || [ $? = 1 ]"
            ))?;
            ward.publish(volume)
        },
    )
}

/// xfs shuts down. The next mount continues with its data.
fn shut_down(ward: &mut Ward<'_>) -> Result<()> {
    let volume = ward.up(Shape::Mount("xfs"), 320 * MIB)?;
    let down = Trouble { cause: "xfs shuts down", says: &["xfs was shut down"], ..NODE };
    ward.trouble(
        &down,
        &volume,
        |_| {
            let line = format!("xfs_io -x -c shutdown {}", volume.target(0).display());
            guest::shell(&line).map(drop)
        },
        |ward| {
            ward.unpublish(&volume)?;
            ward.publish(&volume)
        },
    )?;
    ward.down(&volume)
}
