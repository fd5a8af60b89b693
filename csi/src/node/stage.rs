//! Staging: the volume becomes a device, and if it is to be mounted, a file system at one path.

use std::path::Path;

use super::content::Plan;
use super::modes::{self, Access};
use super::mountinfo::Table;
use super::records::{Encryption, Place, Record, Stage};
use super::steps::{self, FileSystemSpec};
use super::world::{Kind, Mount, Mounted, Result, Unfinished, Volume, World};
use crate::capability::Mode;
use crate::error::Error;

/// A request to stage a volume.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub volume: &'a str,
    pub place: &'a Place,
    pub path: &'a Path,
    pub mode: Mode,
    /// `None`: the device itself.
    pub spec: Option<&'a FileSystemSpec>,
}

impl Request<'_> {
    fn stage(&self) -> Stage {
        Stage {
            path: self.path.to_path_buf(),
            mode: self.mode,
            access: if self.spec.is_some() { Access::Mount } else { Access::Block },
            file_system: self.spec.map(|spec| spec.file_system.clone()).unwrap_or_default(),
            options: self.spec.map(|spec| spec.hash).unwrap_or_default(),
            made_folder: false,
            read_only: Some(
                self.mode == Mode::ReaderOnly
                    || self.spec.is_some_and(|spec| spec.options.read_only()),
            ),
        }
    }

    /// In which property an earlier stage differs, so that it is no repeat of it.
    fn difference(&self, there: &Stage) -> Option<(&'static str, String, String)> {
        let wanted = self.stage();
        if there.access != wanted.access {
            let text = |access| format!("{access:?}").to_lowercase();
            Some(("access type", text(there.access), text(wanted.access)))
        } else if !modes::stage_alike(there.mode, wanted.mode) {
            let text = |mode: Mode| mode.name().to_owned();
            Some(("access mode", text(there.mode), text(wanted.mode)))
        } else if there.file_system != wanted.file_system {
            Some(("file system", there.file_system.clone(), wanted.file_system))
        } else if there.options != wanted.options {
            // They may hold secrets.
            Some(("mount options", "some".to_owned(), "others".to_owned()))
        } else {
            None
        }
    }
}

/// Stages a volume, or goes on where an earlier call ended. A failure after which the kubelet does
/// not unstage leaves nothing, unless the volume was staged or published before.
///
/// # Errors
/// When it is staged in another way, holds something else, or a step fails.
pub fn stage(world: &World<'_>, request: &Request<'_>) -> Result<()> {
    let volume = steps::existing(world, request.volume, request.place)?;
    refuse_standby(request, &volume)?;
    if volume.encrypted {
        // Plaintext on its device would overwrite its header.
        let problem = "is encrypted, and its volume context asks for no encryption: its \
                       PersistentVolume lacks the attribute that the class gave it";
        return Err(Error::in_use(format_args!("volume {}", request.volume), problem));
    }
    let record = world
        .volumes
        .record(request.volume)
        .unwrap_or_else(|| Record::new(request.volume, request.place));
    let table = world.machine.mounts()?;
    let is_used = is_used(&table, &record, &volume);
    let mut wanted = request.stage();
    match &record.stage {
        Some(there) if steps::is_staged(&table, there, &volume) => {
            if there.path != request.path {
                let problem = format!("is staged at {}", there.path.display());
                return Err(Error::in_use(format_args!("volume {}", request.volume), problem));
            }
            if let Some((field, existing, wanted)) = request.difference(there) {
                let what = ("staged volume", request.volume);
                return Err(Error::exists(what, field, existing, wanted));
            }
        }
        // It is written down and not there any more, as after a restart of the machine.
        Some(there) if there.path != request.path => {
            steps::unmount(world, &there.path)?;
            if there.made_folder {
                steps::remove(world, &there.path)?;
            }
        }
        Some(_) => {}
        None => refuse_foreign(&table, request, &volume)?,
    }
    let same = record.stage.as_ref().filter(|there| there.path == request.path);
    wanted.made_folder = same.is_some_and(|there| there.made_folder);
    match show(world, record, request, wanted, &volume) {
        Err(error) if error.is_final() && !is_used => Err(undo(world, request, error)),
        result => result,
    }
}

/// Whether an earlier stage or a publication uses the volume.
fn is_used(table: &Table, record: &Record, volume: &Volume) -> bool {
    let is_mounted = |path: &Path| table.at(path).is_some();
    let is_staged =
        |there: &Stage| is_mounted(&there.path) || steps::is_staged(table, there, volume);
    let is_of = |device| table.entries.iter().any(|entry| entry.is_of(device));
    record.stage.as_ref().is_some_and(is_staged)
        || record.targets.iter().any(|target| is_mounted(&target.path))
        || volume.device.as_ref().is_some_and(is_of)
}

/// Undoes a stage that has failed, and returns the error of the call.
fn undo(world: &World<'_>, request: &Request<'_>, error: Error) -> Error {
    match unstage(world, request.volume, request.place, request.path) {
        Ok(()) => error,
        // After an error that is not final the kubelet undoes it.
        Err(left) => Error::Aborted {
            what: format!("{error};"),
            problem: format!("undoing the stage failed: {left}"),
        },
    }
}

/// Writes a stage down and makes it.
fn show(
    world: &World<'_>,
    mut record: Record,
    request: &Request<'_>,
    wanted: Stage,
    volume: &Volume,
) -> Result<()> {
    if record.stage.as_ref() != Some(&wanted) {
        record.stage = Some(wanted);
        world.volumes.keep(&record)?;
    }
    let read_only = request.mode == Mode::ReaderOnly;
    match request.spec {
        None => block(world, &mut record, request, volume, read_only),
        Some(spec) if read_only => read(world, &mut record, request, spec, volume),
        Some(spec) => write(world, &mut record, request, spec, volume),
    }
}

/// The volume as a device, with the record as it is then: encryption may have been made below, with
/// no file system in it yet.
fn attach(
    world: &World<'_>,
    record: &mut Record,
    request: &Request<'_>,
    volume: &Volume,
    read_only: bool,
) -> Result<Volume> {
    let attached = steps::attach(world, request.place, volume, read_only)?;
    refuse_standby(request, &attached)?;
    if let Some(stored) = world.volumes.record(request.volume) {
        *record = stored;
    }
    record.follow(attached.unfinished);
    Ok(attached)
}

/// Stages the device itself. The rest of an interrupted mkfs is removed first: its mark has a later
/// stage format the device, with all that is written to it until then.
fn block(
    world: &World<'_>,
    record: &mut Record,
    request: &Request<'_>,
    volume: &Volume,
    read_only: bool,
) -> Result<()> {
    let volume = attach(world, record, request, volume, read_only)?;
    if !record.formatting {
        return Ok(());
    }
    unformat(world, record, &volume)?;
    let volume = steps::existing(world, request.volume, request.place)?;
    attach(world, record, request, &volume, read_only).map(drop)
}

/// Refuses a volume that another node may write: its file system or the mapping over it would be
/// stale (H14).
fn refuse_standby(request: &Request<'_>, volume: &Volume) -> Result<()> {
    let is_shared = request.spec.is_none() && request.mode == Mode::ManyNodes;
    if !volume.standby || is_shared {
        return Ok(());
    }
    let problem = "is attached on standby, as its cell is on another node: it can be staged as a \
                   block device with MULTI_NODE_MULTI_WRITER alone";
    Err(Error::in_use(format_args!("volume {}", request.volume), problem))
}

/// Refuses a path at which something else is mounted.
fn refuse_foreign(table: &Table, request: &Request<'_>, volume: &Volume) -> Result<()> {
    let ours = volume.device.as_ref().is_some_and(|device| table.shows(request.path, device));
    if request.spec.is_some() && table.at(request.path).is_some() && !ours {
        return Err(steps::foreign(request.path));
    }
    Ok(())
}

/// Mounts for reading and writing.
fn write(
    world: &World<'_>,
    record: &mut Record,
    request: &Request<'_>,
    spec: &FileSystemSpec,
    volume: &Volume,
) -> Result<()> {
    let volume = attach(world, record, request, volume, false)?;
    let device = steps::device_of(request.volume, &volume)?;
    let table = world.machine.mounts()?;
    if !table.shows(request.path, device) {
        // Of a device that is gone.
        steps::unmount(world, request.path)?;
        let file_system = steps::prepare(world, record, &volume, spec)?;
        folder(world, record, request)?;
        mount(world, request, spec, &volume, &file_system)?;
    }
    steps::check_dax(world, request.volume, spec, request.path)?;
    if spec.options.read_only() {
        return Ok(());
    }
    steps::grow(world, device, request.path)
}

/// Mounts for reading, from a device that can't be written. A file system that has to be made, or
/// made whole after a crash, is so before.
fn read(
    world: &World<'_>,
    record: &mut Record,
    request: &Request<'_>,
    spec: &FileSystemSpec,
    volume: &Volume,
) -> Result<()> {
    let begun = volume.device.is_some() && !volume.read_only;
    if !begun && mount_read_only(world, record, request, spec, volume)? {
        return Ok(());
    }
    // Left by an earlier try, if it is there.
    steps::unmount(world, request.path)?;
    let volume = steps::existing(world, request.volume, request.place)?;
    let volume = attach(world, record, request, &volume, false)?;
    let file_system = steps::prepare(world, record, &volume, spec)?;
    folder(world, record, request)?;
    mount(world, request, spec, &volume, &file_system)?;
    steps::unmount(world, request.path)?;
    if mount_read_only(world, record, request, spec, &volume)? {
        return Ok(());
    }
    let what = format!("volume {}", request.volume);
    Err(Error::in_use(what, "can't be mounted for reading alone"))
}

/// Whether it could be mounted as it is.
fn mount_read_only(
    world: &World<'_>,
    record: &mut Record,
    request: &Request<'_>,
    spec: &FileSystemSpec,
    volume: &Volume,
) -> Result<bool> {
    let volume = attach(world, record, request, volume, true)?;
    let device = steps::device_of(request.volume, &volume)?;
    if world.machine.mounts()?.shows(request.path, device) {
        steps::check_dax(world, request.volume, spec, request.path)?;
        return Ok(true);
    }
    steps::unmount(world, request.path)?;
    let content = world.machine.content(device)?;
    let empty = steps::is_empty(world, &volume, device)?;
    match content.plan(&spec.file_system, empty, record.formatting) {
        Plan::Refuse(what) => Err(steps::refused(record, &spec.file_system, &what)),
        Plan::Format(_) => Ok(false),
        Plan::Mount(file_system) => {
            folder(world, record, request)?;
            let options = options(spec, &file_system, true);
            let path = request.path;
            let mount = Mount { device, file_system: &file_system, path, options: &options };
            let done = world.machine.mount(&mount)? == Mounted::Done;
            if done {
                steps::check_dax(world, request.volume, spec, request.path)?;
            }
            Ok(done)
        }
    }
}

/// The staging path, written down if it is made here.
fn folder(world: &World<'_>, record: &mut Record, request: &Request<'_>) -> Result<()> {
    if world.machine.kind(request.path)?.is_none()
        && let Some(stage) = record.stage.as_mut().filter(|stage| !stage.made_folder)
    {
        stage.made_folder = true;
        world.volumes.keep(record)?;
    }
    steps::make(world, request.path, Kind::Folder)
}

fn mount(
    world: &World<'_>,
    request: &Request<'_>,
    spec: &FileSystemSpec,
    volume: &Volume,
    file_system: &str,
) -> Result<()> {
    let device = steps::device_of(request.volume, volume)?;
    let options = options(spec, file_system, false);
    match world.machine.mount(&Mount {
        device,
        file_system,
        path: request.path,
        options: &options,
    })? {
        Mounted::Done => Ok(()),
        Mounted::NeedsWriting => {
            Err(Error::in_use(format_args!("volume {}", request.volume), "can't be written"))
        }
    }
}

/// The options of a mount of ours. A clone of xfs has the number of its source, and is refused
/// beside it without `nouuid`.
#[must_use]
pub fn options(spec: &FileSystemSpec, file_system: &str, read_only: bool) -> super::flags::Options {
    let mut options = spec.options.clone();
    if read_only {
        options.flags |= nix::mount::MsFlags::MS_RDONLY;
    }
    if spec.dax {
        // Each as its oldest kernels know it.
        options = options.with(if file_system == "ext4" { "dax" } else { "dax=always" });
    }
    if file_system == "xfs" { options.with("nouuid") } else { options }
}

/// Undoes a stage, wherever it ended.
///
/// # Errors
/// When the volume is published or in use.
pub fn unstage(world: &World<'_>, id: &str, place: &Place, path: &Path) -> Result<()> {
    let record = world.volumes.record(id);
    let volume = world.volumes.get(place)?;
    let device = volume.as_ref().and_then(|volume| volume.device.as_ref());
    let table = world.machine.mounts()?;
    let known = record.as_ref().and_then(|record| record.stage.as_ref());
    if let Some(there) = known.filter(|there| there.path != path)
        && volume.as_ref().is_some_and(|volume| steps::is_staged(&table, there, volume))
    {
        // Nothing of it is at that path.
        return Ok(());
    }
    let targets = record.as_ref().map(|record| record.targets.as_slice()).unwrap_or_default();
    if let Some(target) = targets.iter().find(|target| table.at(&target.path).is_some()) {
        let problem = format!("is published at {}", target.path.display());
        return Err(Error::in_use(format_args!("volume {id}"), problem));
    }
    if table.at(path).is_some() {
        let ours = device.is_some_and(|device| table.shows(path, device));
        if !ours && known.is_none_or(|there| there.path != path) {
            return Err(steps::foreign(path));
        }
        steps::unmount(world, path)?;
    }
    if let (Some(mut record), Some(volume)) = (record.clone(), &volume) {
        record.follow(volume.unfinished);
        if record.is_unfinished() {
            unformat(world, &mut record, volume)?;
        }
    }
    // Also where the volume is gone: a layer above its device may be left.
    world.volumes.detach(place)?;
    if let Some(there) = known.filter(|there| there.made_folder) {
        steps::remove(world, &there.path)?;
    }
    if record.is_some() {
        world.volumes.forget(id)?;
    }
    Ok(())
}

/// Removes the rest of an interrupted mkfs, or of encryption without a file system: it is not user
/// data, but would be taken for it once the record is gone.
fn unformat(world: &World<'_>, record: &mut Record, volume: &Volume) -> Result<()> {
    if volume.device.is_some() && volume.read_only {
        world.volumes.detach(&record.place)?;
    }
    let volume = world.volumes.bare(&record.place)?;
    let device = steps::device_of(&record.volume, &volume)?;
    steps::free(world, record, device)?;
    world.machine.wipe(device)?;
    steps::mark(world, &record.place, &volume, Unfinished::Nothing)?;
    record.formatting = false;
    record.encryption = record.encryption.map(|it| Encryption { formatting: false, ..it });
    world.volumes.keep(record)
}
