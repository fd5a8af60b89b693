//! Publishing: mounts a staged volume at a path of a workload.

use std::path::Path;

use super::ephemeral;
use super::modes::{self, Access, Target, Verdict};
use super::mountinfo::{Device, Table};
use super::records::{Place, Record};
use super::steps;
use super::world::{Kind, Result, World};
use crate::capability::Mode;
use crate::error::Error;

/// A request to publish a staged volume.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub volume: &'a str,
    pub place: &'a Place,
    pub staging: &'a Path,
    pub target: &'a Target,
    /// The old mode has its literal meaning.
    pub strict: bool,
}

/// Publishes a volume, or goes on where an earlier call ended.
///
/// # Errors
/// When it is not staged there, another workload has it, or a step fails.
pub fn publish(world: &World<'_>, request: &Request<'_>) -> Result<()> {
    let record = world.volumes.record(request.volume);
    let table = world.machine.mounts()?;
    // First, since it needs no other service: clients retry often.
    let record = record.map(|record| beside(world, &table, record, request)).transpose()?;
    let volume = steps::existing(world, request.volume, request.place)?;
    let not_staged = || {
        let problem = format!("is not staged at {}", request.staging.display());
        Error::in_use(format_args!("volume {}", request.volume), problem)
    };
    let (Some(mut record), Some(device)) = (record, &volume.device) else {
        return Err(not_staged());
    };
    let staged = record
        .stage
        .as_ref()
        .filter(|stage| stage.path == request.staging && steps::is_staged(&table, stage, &volume));
    let stage = staged.cloned().ok_or_else(not_staged)?;
    if stage.access != request.target.access {
        let text = format!("is staged as {:?}", stage.access).to_lowercase();
        return Err(Error::in_use(format_args!("volume {}", request.volume), text));
    }
    if !modes::stage_alike(stage.mode, request.target.mode) {
        let text = format!("is staged for {}", stage.mode.name());
        return Err(Error::in_use(format_args!("volume {}", request.volume), text));
    }
    let from = match stage.access {
        Access::Mount => stage.path.as_path(),
        Access::Block => device.path.as_path(),
    };
    note(world, &table, &mut record, request.target, device)?;
    show(world, request.target, device, from)
}

/// Checks the request against the existing publications. A recorded publication that is no longer
/// mounted causes no conflict.
fn beside(
    world: &World<'_>,
    table: &Table,
    mut record: Record,
    request: &Request<'_>,
) -> Result<Record> {
    loop {
        let gone = match modes::judge(&record.targets, request.target, request.strict) {
            Verdict::Repeat | Verdict::New => return Ok(record),
            Verdict::Different => {
                let path = &request.target.path;
                let found = record.targets.iter().position(|target| target.path == *path);
                let (Some(index), Some(_)) = (found, table.at(path)) else {
                    record.targets.retain(|target| target.path != *path);
                    continue;
                };
                return Err(different(&record.targets[index], request.target));
            }
            Verdict::Conflict(index) => index,
        };
        let other = &record.targets[gone];
        if table.at(&other.path).is_some() {
            world.volumes.count_conflict(request.target.mode);
            let (path, mode) = (other.path.display(), other.mode.name());
            let problem = format!(
                "is published at {path} as {mode}, which does not go with {}",
                request.target.mode.name()
            );
            return Err(Error::in_use(format_args!("volume {}", request.volume), problem));
        }
        record.targets.remove(gone);
    }
}

fn different(there: &Target, wanted: &Target) -> Error {
    let path = there.path.to_string_lossy();
    let what = ("target path", path.as_ref());
    let text = |mode: Mode| mode.name().to_owned();
    let (field, existing, asked) = if there.access != wanted.access {
        let text = |access: Access| format!("{access:?}").to_lowercase();
        ("access type", text(there.access), text(wanted.access))
    } else if there.read_only != wanted.read_only {
        ("readonly", there.read_only.to_string(), wanted.read_only.to_string())
    } else {
        ("access mode", text(there.mode), text(wanted.mode))
    };
    Error::exists(what, field, existing, asked)
}

/// Records the mount before it is made, unless something else is there already.
///
/// # Errors
/// When it is.
pub(super) fn note(
    world: &World<'_>,
    table: &Table,
    record: &mut Record,
    target: &Target,
    device: &Device,
) -> Result<()> {
    let known = modes::at(&record.targets, &target.path).is_some();
    if !known && table.at(&target.path).is_some() && !table.shows(&target.path, device) {
        return Err(steps::foreign(&target.path));
    }
    let before = world.volumes.record(&record.volume);
    record.targets.retain(|there| there.path != target.path);
    record.targets.push(target.clone());
    if before.as_ref() != Some(record) {
        world.volumes.keep(record)?;
    }
    Ok(())
}

/// Binds it, and makes that read-only if it is to be.
fn show(world: &World<'_>, target: &Target, device: &Device, from: &Path) -> Result<()> {
    let path = target.path.as_path();
    if !world.machine.mounts()?.shows(path, device) {
        // Of a device that is gone.
        steps::unmount(world, path)?;
        let kind = match target.access {
            Access::Mount => Kind::Folder,
            Access::Block => Kind::File,
        };
        steps::make(world, path, kind)?;
        world.machine.bind(from, path)?;
    }
    let writable = world.machine.mounts()?.at(path).is_some_and(|entry| !entry.read_only);
    if target.read_only && writable { world.machine.make_read_only(path) } else { Ok(()) }
}

/// Undoes a publication, wherever it ended. `place` is where the volume would be, if its id is of
/// the form of ours.
/// # Errors
/// When it is in use, or something else is at that path.
pub fn unpublish(world: &World<'_>, id: &str, place: &Place, path: &Path) -> Result<()> {
    let record = world.volumes.record(id);
    let table = world.machine.mounts()?;
    let known = record.as_ref().is_some_and(|it| modes::at(&it.targets, path).is_some());
    if table.at(path).is_some() && !known {
        let device = world.volumes.get(place)?.and_then(|volume| volume.device);
        if !device.is_some_and(|device| table.shows(path, &device)) {
            return Err(steps::foreign(path));
        }
    }
    steps::unmount(world, path)?;
    steps::remove(world, path)?;
    match record {
        Some(record) if record.ephemeral => {
            if record.targets.iter().all(|target| target.path == path) {
                ephemeral::end(world, &record)?;
            }
            Ok(())
        }
        Some(mut record) if known => {
            record.targets.retain(|target| target.path != path);
            if record.is_empty() { world.volumes.forget(id) } else { world.volumes.keep(&record) }
        }
        _ => Ok(()),
    }
}
