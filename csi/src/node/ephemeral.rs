//! Inline volumes: made when they are published, and deleted when that ends. They live with one
//! pod.

use super::modes::{Access, Target};
use super::records::{Place, Record};
use super::stage;
use super::steps::{self, FileSystemSpec};
use super::world::{Kind, Mount, Mounted, Result, Wanted, World};
use crate::capability::Mode;
use crate::error::Error;

/// A request to publish an inline volume.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub volume: &'a str,
    pub place: &'a Place,
    pub target: &'a Target,
    pub spec: &'a FileSystemSpec,
    pub wanted: &'a Wanted,
}

/// Makes and mounts it, or goes on where an earlier call ended. A failure leaves nothing, unless
/// the volume was there for a workload before: it may hold data.
///
/// # Errors
/// When it is published elsewhere or otherwise, or a step fails.
pub fn publish(world: &World<'_>, request: &Request<'_>) -> Result<()> {
    let new = || Record { ephemeral: true, ..Record::new(request.volume, request.place) };
    let record = world.volumes.record(request.volume).unwrap_or_else(new);
    if !record.ephemeral {
        return Err(Error::in_use(
            format_args!("volume {}", request.volume),
            "is no inline volume",
        ));
    }
    let table = world.machine.mounts()?;
    if let Some(there) = record.targets.iter().find(|there| table.at(&there.path).is_some()) {
        if there.path != request.target.path {
            let problem = format!("is published at {}", there.path.display());
            return Err(Error::in_use(format_args!("volume {}", request.volume), problem));
        }
        if there.read_only != request.target.read_only {
            let path = there.path.to_string_lossy();
            let (existing, asked) = (there.read_only, request.target.read_only);
            let what = ("target path", path.as_ref());
            return Err(Error::exists(what, "readonly", existing, asked));
        }
    } else if table.at(&request.target.path).is_some() {
        return Err(steps::foreign(&request.target.path));
    }
    let wanted = Record { targets: vec![request.target.clone()], ..record };
    let complete = wanted.complete;
    let result = begin(world, &wanted).and_then(|()| show(world, wanted.clone(), request));
    if result.is_err() && !complete {
        // Steps that cannot be undone now are recorded, and undone when the publication ends.
        let _ = end(world, &wanted);
    }
    result
}

fn begin(world: &World<'_>, record: &Record) -> Result<()> {
    let same = world.volumes.record(&record.volume).as_ref() == Some(record);
    if same { Ok(()) } else { world.volumes.keep(record) }
}

fn show(world: &World<'_>, mut record: Record, request: &Request<'_>) -> Result<()> {
    let path = request.target.path.as_path();
    // Where it was made, should the default pool be another now.
    let place = record.place.clone();
    world.volumes.create(&place, request.wanted)?;
    let volume = world.volumes.attach(&place, false)?;
    let device = steps::device_of(request.volume, &volume)?;
    if !world.machine.mounts()?.shows(path, device) {
        // Of a device that is gone.
        steps::unmount(world, path)?;
        let file_system = steps::prepare(world, &mut record, &volume, request.spec)?;
        steps::make(world, path, Kind::Folder)?;
        let options = stage::options(request.spec, &file_system, request.target.read_only);
        let mount = Mount { device, file_system: &file_system, path, options: &options };
        if world.machine.mount(&mount)? != Mounted::Done {
            let what = format_args!("volume {}", request.volume);
            return Err(Error::in_use(what, "can't be written"));
        }
    }
    steps::check_dax(world, request.volume, request.spec, path)?;
    if !record.complete {
        record.complete = true;
        world.volumes.keep(&record)?;
    }
    Ok(())
}

/// Removes all of it, at any stage of its creation.
/// # Errors
/// When it is in use, or a step fails; a repeat continues.
pub(super) fn end(world: &World<'_>, record: &Record) -> Result<()> {
    for target in &record.targets {
        steps::unmount(world, &target.path)?;
        steps::remove(world, &target.path)?;
    }
    world.volumes.detach(&record.place)?;
    world.volumes.delete(&record.place)?;
    world.volumes.forget(&record.volume)
}

/// Removes, at the start, a volume that was never complete, or whose pod is gone with the directory
/// of its path: no further request for it will come.
///
/// # Errors
/// When a step fails.
pub fn sweep(world: &World<'_>, record: &Record) -> Result<()> {
    let table = world.machine.mounts()?;
    let mounted = record.targets.iter().any(|target| table.at(&target.path).is_some());
    let mut has_pod = false;
    for target in &record.targets {
        let above = target.path.parent().unwrap_or(&target.path);
        has_pod |= world.machine.kind(above)?.is_some();
    }
    let wanted = record.complete && has_pod;
    if mounted || wanted { Ok(()) } else { end(world, record) }
}

/// An inline volume's place of publication.
#[must_use]
pub fn target(path: std::path::PathBuf, mode: Mode, read_only: bool) -> Target {
    Target { path, mode, read_only, access: Access::Mount }
}
