//! Staging: the volume becomes a device, and if it is to be mounted, a file system at one path.

use std::path::Path;

use super::content::Plan;
use super::modes::{self, Access};
use super::mountinfo::Table;
use super::records::{Place, Record, Stage};
use super::steps::{self, Wish};
use super::world::{Kind, Mount, Mounted, Result, Volume, World};
use crate::capability::Mode;
use crate::error::Error;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    pub volume: &'a str,
    pub place: &'a Place,
    pub path: &'a Path,
    pub mode: Mode,
    /// `None`: the device itself.
    pub wish: Option<&'a Wish>,
}

impl Ask<'_> {
    fn stage(&self) -> Stage {
        Stage {
            path: self.path.to_path_buf(),
            mode: self.mode,
            access: if self.wish.is_some() { Access::Mount } else { Access::Block },
            file_system: self.wish.map(|wish| wish.file_system.clone()).unwrap_or_default(),
            options: self.wish.map(|wish| wish.hash).unwrap_or_default(),
            made_folder: false,
            read_only: Some(
                self.mode == Mode::ReaderOnly
                    || self.wish.is_some_and(|wish| wish.options.read_only()),
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

/// Stages a volume, or goes on where an earlier call ended.
///
/// # Errors
/// When it is staged in another way, holds something else, or a step fails.
pub fn stage(world: &dyn World, ask: &Ask<'_>) -> Result<()> {
    let volume = steps::existing(world, ask.volume, ask.place)?;
    let mut record = world.record(ask.volume).unwrap_or_else(|| Record::new(ask.volume, ask.place));
    let table = world.mounts()?;
    let mut wanted = ask.stage();
    match &record.stage {
        Some(there) if steps::is_staged(&table, there, &volume) => {
            if there.path != ask.path {
                let problem = format!("is staged at {}", there.path.display());
                return Err(Error::in_use(format_args!("volume {}", ask.volume), problem));
            }
            if let Some((field, existing, wanted)) = ask.difference(there) {
                let what = ("staged volume", ask.volume);
                return Err(Error::exists(what, field, existing, wanted));
            }
        }
        // It is written down and not there any more, as after a restart of the machine.
        Some(there) if there.path != ask.path => {
            steps::unmount(world, &there.path)?;
            if there.made_folder {
                steps::remove(world, &there.path)?;
            }
        }
        Some(_) => {}
        None => refuse_foreign(&table, ask, &volume)?,
    }
    let same = record.stage.as_ref().filter(|there| there.path == ask.path);
    wanted.made_folder = same.is_some_and(|there| there.made_folder);
    if record.stage.as_ref() != Some(&wanted) {
        record.stage = Some(wanted);
        world.keep(&record)?;
    }
    let read_only = ask.mode == Mode::ReaderOnly;
    match ask.wish {
        None => steps::attach(world, ask.place, &volume, read_only).map(drop),
        Some(wish) if read_only => read(world, &mut record, ask, wish, &volume),
        Some(wish) => write(world, &mut record, ask, wish, &volume),
    }
}

/// A path that nothing of ours was ever mounted at.
fn refuse_foreign(table: &Table, ask: &Ask<'_>, volume: &Volume) -> Result<()> {
    let ours = volume.device.as_ref().is_some_and(|device| table.shows(ask.path, device));
    if ask.wish.is_some() && table.at(ask.path).is_some() && !ours {
        return Err(steps::foreign(ask.path));
    }
    Ok(())
}

/// Mounts for reading and writing.
fn write(
    world: &dyn World,
    record: &mut Record,
    ask: &Ask<'_>,
    wish: &Wish,
    volume: &Volume,
) -> Result<()> {
    let volume = steps::attach(world, ask.place, volume, false)?;
    let device = steps::device_of(ask.volume, &volume)?;
    let table = world.mounts()?;
    if !table.shows(ask.path, device) {
        // Of a device that is gone.
        steps::unmount(world, ask.path)?;
        let file_system = steps::prepare(world, record, &volume, wish)?;
        folder(world, record, ask)?;
        mount(world, ask, wish, &volume, &file_system)?;
    }
    steps::check_dax(world, ask.volume, wish, ask.path)?;
    if wish.options.read_only() {
        return Ok(());
    }
    steps::grow(world, device, ask.path)
}

/// Mounts for reading, from a device that can't be written. A file system that has to be made, or
/// made whole after a crash, is so before.
fn read(
    world: &dyn World,
    record: &mut Record,
    ask: &Ask<'_>,
    wish: &Wish,
    volume: &Volume,
) -> Result<()> {
    let begun = volume.device.is_some() && !volume.read_only;
    if !begun && mount_read_only(world, record, ask, wish, volume)? {
        return Ok(());
    }
    // Left by an earlier try, if it is there.
    steps::unmount(world, ask.path)?;
    let volume = steps::existing(world, ask.volume, ask.place)?;
    let volume = steps::attach(world, ask.place, &volume, false)?;
    let file_system = steps::prepare(world, record, &volume, wish)?;
    folder(world, record, ask)?;
    mount(world, ask, wish, &volume, &file_system)?;
    steps::unmount(world, ask.path)?;
    if mount_read_only(world, record, ask, wish, &volume)? {
        return Ok(());
    }
    let what = format!("volume {}", ask.volume);
    Err(Error::in_use(what, "can't be mounted for reading alone"))
}

/// Whether it could be mounted as it is.
fn mount_read_only(
    world: &dyn World,
    record: &mut Record,
    ask: &Ask<'_>,
    wish: &Wish,
    volume: &Volume,
) -> Result<bool> {
    let volume = steps::attach(world, ask.place, volume, true)?;
    let device = steps::device_of(ask.volume, &volume)?;
    if world.mounts()?.shows(ask.path, device) {
        steps::check_dax(world, ask.volume, wish, ask.path)?;
        return Ok(true);
    }
    steps::unmount(world, ask.path)?;
    let content = world.content(device)?;
    let empty = steps::is_empty(world, &volume, device)?;
    match content.plan(&wish.file_system, empty, record.formatting) {
        Plan::Refuse(what) => Err(steps::refused(record, wish, &what)),
        Plan::Format(_) => Ok(false),
        Plan::Mount(file_system) => {
            folder(world, record, ask)?;
            let options = options(wish, &file_system, true);
            let path = ask.path;
            let mount = Mount { device, file_system: &file_system, path, options: &options };
            let done = world.mount(&mount)? == Mounted::Done;
            if done {
                steps::check_dax(world, ask.volume, wish, ask.path)?;
            }
            Ok(done)
        }
    }
}

/// The staging path, written down if it is made here.
fn folder(world: &dyn World, record: &mut Record, ask: &Ask<'_>) -> Result<()> {
    if world.kind(ask.path)?.is_none()
        && let Some(stage) = record.stage.as_mut().filter(|stage| !stage.made_folder)
    {
        stage.made_folder = true;
        world.keep(record)?;
    }
    steps::make(world, ask.path, Kind::Folder)
}

fn mount(
    world: &dyn World,
    ask: &Ask<'_>,
    wish: &Wish,
    volume: &Volume,
    file_system: &str,
) -> Result<()> {
    let device = steps::device_of(ask.volume, volume)?;
    let options = options(wish, file_system, false);
    match world.mount(&Mount { device, file_system, path: ask.path, options: &options })? {
        Mounted::Done => Ok(()),
        Mounted::NeedsWriting => {
            Err(Error::in_use(format_args!("volume {}", ask.volume), "can't be written"))
        }
    }
}

/// The options of a mount of ours. A clone of xfs has the number of its source, and is refused
/// beside it without `nouuid`.
#[must_use]
pub fn options(wish: &Wish, file_system: &str, read_only: bool) -> super::flags::Options {
    let mut options = wish.options.clone();
    if read_only {
        options.flags |= nix::mount::MsFlags::MS_RDONLY;
    }
    if wish.dax {
        // Each as its oldest kernels know it.
        options = options.with(if file_system == "ext4" { "dax" } else { "dax=always" });
    }
    if file_system == "xfs" { options.with("nouuid") } else { options }
}

/// Undoes a stage, wherever it ended.
///
/// # Errors
/// When the volume is published or in use.
pub fn unstage(world: &dyn World, id: &str, place: &Place, path: &Path) -> Result<()> {
    let record = world.record(id);
    let volume = world.volume(place)?;
    let device = volume.as_ref().and_then(|volume| volume.device.as_ref());
    let table = world.mounts()?;
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
    if let (Some(mut record), Some(volume)) = (record.clone(), &volume)
        && record.formatting
    {
        unformat(world, &mut record, volume)?;
    }
    if volume.is_some() {
        world.detach(place)?;
    }
    if let Some(there) = known.filter(|there| there.made_folder) {
        steps::remove(world, &there.path)?;
    }
    if record.is_some() {
        world.forget(id)?;
    }
    Ok(())
}

/// What a file system that was not finished has left is nobody's data, and would be taken for
/// somebody's when this is forgotten.
fn unformat(world: &dyn World, record: &mut Record, volume: &Volume) -> Result<()> {
    let volume = steps::attach(world, &record.place, volume, false)?;
    let device = steps::device_of(&record.volume, &volume)?;
    if !world.is_free(device)? {
        let what = format!("volume {}", record.volume);
        return Err(Error::in_use(what, "is still being written by an earlier try"));
    }
    world.wipe(device)?;
    record.formatting = false;
    world.keep(record)
}
