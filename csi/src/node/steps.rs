//! Steps that staging and publishing share.

use std::path::Path;

use super::content::{self, Making, Plan};
use super::flags::Options;
use super::modes::Access;
use super::mountinfo::{Device, Entry, Table};
use super::records::{Place, Record, Stage};
use super::world::{Kind, Result, Unfinished, Volume, World};
use crate::capability::FileSystem;
use crate::error::Error;
use crate::mkfs;

/// Mounts on one path that are taken away in a call. There is one; a death at a bad moment makes it
/// two.
const MOST_MOUNTS: u32 = 16;

/// The file system that a client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystemSpec {
    /// Empty: the existing one, or the default.
    pub file_system: String,
    pub options: Options,
    /// A hash of the options as they came.
    pub hash: u64,
    /// How it is made.
    pub making: Making,
    /// Its files are to be mapped as they are, or it is not mounted.
    pub dax: bool,
}

/// The volume, which has to exist.
///
/// # Errors
/// When it does not.
pub fn existing(world: &World<'_>, id: &str, place: &Place) -> Result<Volume> {
    world.volumes.get(place)?.ok_or_else(|| Error::not_found("volume", id))
}

/// Whether the recorded stage exists: the mount table and the daemon decide.
#[must_use]
pub fn is_staged(table: &Table, stage: &Stage, volume: &Volume) -> bool {
    let Some(device) = &volume.device else { return false };
    match stage.access {
        Access::Mount => table.shows(&stage.path, device),
        Access::Block => true,
    }
}

/// The volume as a block device that can be written or not. One that is attached in the other mode
/// is attached again, which the daemon refuses while it is in use.
///
/// # Errors
/// When the daemon refuses.
pub fn attach(
    world: &World<'_>,
    place: &Place,
    volume: &Volume,
    read_only: bool,
) -> Result<Volume> {
    if volume.device.is_some() && volume.read_only != read_only {
        world.volumes.detach(place)?;
    }
    world.volumes.attach(place, read_only)
}

/// The device of a volume that was just attached.
///
/// # Errors
/// When there is none.
pub fn device_of<'a>(id: &str, volume: &'a Volume) -> Result<&'a Device> {
    let missing = || Error::in_use(format_args!("volume {id}"), "is attached and has no device");
    volume.device.as_ref().ok_or_else(missing)
}

/// Ensures that there is a file system, and returns its kind.
///
/// # Errors
/// When the device holds something else, or it cannot be made or repaired.
pub fn prepare(
    world: &World<'_>,
    record: &mut Record,
    volume: &Volume,
    spec: &FileSystemSpec,
) -> Result<String> {
    let device = device_of(&record.volume, volume)?;
    let content = world.machine.content(device)?;
    let empty = is_empty(world, volume, device)?;
    match content.plan(&spec.file_system, empty, record.formatting) {
        Plan::Mount(there) => {
            // Tools must not run on a device that is still mounted elsewhere.
            let mounts = world.machine.mounts()?.entries;
            let free = |entry: &Entry| entry.kind == "devtmpfs" || !entry.is_of(device);
            if mounts.iter().all(free) {
                world.machine.check(device, &there)?;
            }
            Ok(there)
        }
        Plan::Refuse(what) => Err(refused(record, &spec.file_system, &what)),
        Plan::Format(name) => {
            if let Some(file_system) = FileSystem::of_name(&name) {
                mkfs::check("mkfs-options", file_system, &spec.making.options)?;
            }
            free(world, record, device)?;
            mark(world, &record.place, volume, Unfinished::FileSystem)?;
            if !record.formatting {
                record.formatting = true;
                world.volumes.keep(record)?;
            }
            world.machine.format(device, &name, &spec.making)?;
            mark(world, &record.place, volume, Unfinished::Nothing)?;
            record.formatting = false;
            world.volumes.keep(record)?;
            Ok(name)
        }
    }
}

/// Marks a volume that moves between nodes: before the step that its mark names, and again once
/// that is done. The mark of any other volume is in its record.
///
/// # Errors
/// When the daemon refuses.
pub(super) fn mark(
    world: &World<'_>,
    place: &Place,
    volume: &Volume,
    unfinished: Unfinished,
) -> Result<()> {
    if volume.unfinished.is_some() { world.volumes.mark(place, unfinished) } else { Ok(()) }
}

/// Whether nothing was ever written to a volume.
///
/// # Errors
/// When its device can't be read.
pub fn is_empty(world: &World<'_>, volume: &Volume, device: &Device) -> Result<bool> {
    if volume.own { world.machine.is_blank(device) } else { Ok(volume.empty) }
}

/// Checks that files of the mounted file system are mapped directly (DAX), if that is requested:
/// some file systems go on without.
///
/// # Errors
/// When they are not: then it is mounted no more.
pub fn check_dax(world: &World<'_>, id: &str, spec: &FileSystemSpec, path: &Path) -> Result<()> {
    if !spec.dax || world.machine.has_dax(path)? {
        return Ok(());
    }
    unmount(world, path)?;
    let problem = "would be mounted without DAX, which usage AppDirect needs: the device, the file \
                   system or a mount option stands against it";
    Err(Error::in_use(format_args!("volume {id}"), problem))
}

/// Why a device is left alone. `wanted` is empty for a file system of any kind.
#[must_use]
pub fn refused(record: &Record, wanted: &str, what: &str) -> Error {
    let wanted = if wanted.is_empty() { "a file system" } else { wanted };
    let problem = format!("holds {what}, where {wanted} is wanted; it is left as it is");
    Error::in_use(format_args!("volume {}", record.volume), problem)
}

/// Refuses a device that an earlier tool still has open: one that a killed process of ours left
/// behind may still write to it.
pub(super) fn free(world: &World<'_>, record: &Record, device: &Device) -> Result<()> {
    if world.machine.is_free(device)? {
        return Ok(());
    }
    let what = format!("volume {}", record.volume);
    Err(Error::Aborted { what, problem: "is still being written by an earlier try".to_owned() })
}

/// Makes a mounted file system as large as its device, if it is smaller.
///
/// # Errors
/// When it can't be written, or the tool fails.
pub fn grow(world: &World<'_>, device: &Device, path: &Path) -> Result<()> {
    let table = world.machine.mounts()?;
    let gone = || Error::in_use(path.display(), "has nothing mounted any more");
    let entry = table.at(path).ok_or_else(gone)?;
    let bytes = world.machine.device_bytes(device)?;
    if bytes < content::smallest_growth(&entry.kind) {
        let (device, kind) = (device.path.display(), &entry.kind);
        tracing::warn!(%device, kind, bytes, "this file system can't grow to so little");
        return Ok(());
    }
    match world.machine.file_system_bytes(device, &entry.kind)? {
        Some(taken) if taken >= bytes => Ok(()),
        _ if entry.read_only => Err(Error::in_use(
            path.display(),
            "is mounted read-only, and its file system can't grow",
        )),
        _ => world.machine.grow(device, &entry.kind, path),
    }
}

/// Removes all mounts at a path. A mount of a device's node is removed even while a process has it
/// open through this path: the device stays until that process closes it.
///
/// # Errors
/// When it is in use.
pub fn unmount(world: &World<'_>, path: &Path) -> Result<()> {
    for _ in 0..MOST_MOUNTS {
        let table = world.machine.mounts()?;
        let Some(entry) = table.at(path) else { return Ok(()) };
        world.machine.unmount(path, entry.kind == "devtmpfs")?;
    }
    let problem = format!("still has something mounted after {MOST_MOUNTS} times");
    Err(Error::in_use(path.display(), problem))
}

/// Makes a path of this kind, if it is not there.
///
/// # Errors
/// When something else is there, or its parent is missing.
pub fn make(world: &World<'_>, path: &Path, wanted: Kind) -> Result<()> {
    match (world.machine.kind(path)?, wanted) {
        (None, Kind::Folder) => world.machine.make_folder(path),
        (None, _) => world.machine.make_file(path),
        (Some(there), wanted) if there == wanted => Ok(()),
        (Some(_), Kind::Folder) => Err(Error::in_use(path.display(), "is there and no folder")),
        (Some(_), _) => Err(Error::in_use(path.display(), "is there and no empty file")),
    }
}

/// Removes an empty folder or file, if it is there.
///
/// # Errors
/// When it holds something.
pub fn remove(world: &World<'_>, path: &Path) -> Result<()> {
    world.machine.kind(path)?.map_or(Ok(()), |kind| world.machine.remove(path, kind))
}

/// The error of a foreign mount at a path of the volume.
#[must_use]
pub fn foreign(path: &Path) -> Error {
    Error::in_use(path.display(), "has something else mounted; it is left as it is")
}
