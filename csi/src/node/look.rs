//! Looking at a volume through one of its paths, and growing the file system that is there.

use std::path::Path;

use super::modes::{self, Access};
use super::records::Place;
use super::steps;
use super::world::{Result, Usage, Volume, World};
use crate::error::Error;
use crate::sizes::Range;

/// What a path shows of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Empty when nothing is mounted there any more.
    pub usage: Option<Shown>,
    /// What is wrong; empty when nothing is.
    pub problem: String,
}

/// How much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// A file system's bytes and inodes.
    Mount(Usage, Usage),
    /// A device's bytes.
    Block(i64),
}

/// A path of a volume.
struct Found {
    volume: Volume,
    access: Access,
    /// It is there, as the mount table and the daemon say.
    there: bool,
}

/// Finds out whether a path was ever one of this volume.
fn find(world: &dyn World, id: &str, place: &Place, path: &Path) -> Result<Found> {
    let volume = steps::existing(world, id, place)?;
    let table = world.mounts()?;
    let shown = volume.device.as_ref().is_some_and(|device| table.shows(path, device));
    let record = world.record(id);
    let known = record.as_ref().and_then(|record| {
        let stage = record.stage.as_ref().filter(|stage| stage.path == path);
        let target = modes::at(&record.targets, path);
        target.map(|target| target.access).or_else(|| stage.map(|stage| stage.access))
    });
    // A device is staged at a path and never shown there.
    let block_stage = record.and_then(|record| record.stage).is_some_and(|stage| {
        stage.path == path && stage.access == Access::Block && volume.device.is_some()
    });
    let of_node = |it: &super::mountinfo::Entry| {
        if it.kind == "devtmpfs" { Access::Block } else { Access::Mount }
    };
    let seen = table.at(path).filter(|_| shown).map(of_node);
    let access = seen.or(known).ok_or_else(|| Error::not_found("path", path.display()))?;
    Ok(Found { volume, access, there: shown || block_stage })
}

/// How much a volume has and takes, at one of its paths.
///
/// # Errors
/// When there is no such volume, or it was never at that path.
pub fn stats(world: &dyn World, id: &str, place: &Place, path: &Path) -> Result<Stats> {
    let found = find(world, id, place, path)?;
    if !found.there {
        let problem = format!("nothing is mounted at {} any more", path.display());
        return Ok(Stats { usage: None, problem });
    }
    let shown = match found.access {
        Access::Block => Shown::Block(found.volume.size_bytes),
        Access::Mount => {
            let (bytes, inodes) = world.usage(path)?;
            Shown::Mount(bytes, inodes)
        }
    };
    Ok(Stats { usage: Some(shown), problem: String::new() })
}

/// Makes what is on a volume as large as the volume, and says how large that is.
///
/// # Errors
/// When there is no such volume or path, the volume's size is not in the range, or the kernel can't
/// show the new size of a device in use.
pub fn expand(
    world: &dyn World,
    (id, place): (&str, &Place),
    path: &Path,
    range: &Range,
) -> Result<i64> {
    let Range { required, limit } = *range;
    let mut found = find(world, id, place, path)?;
    if required.get() > found.volume.size_bytes
        && let Some(larger) = world.enlarge(place, range)?
    {
        found.volume = larger;
    }
    let size = found.volume.size_bytes;
    let text = |what: &str| format!("{what} {size}, which the volume has");
    if required.get() > size {
        let field = "capacity_range.required_bytes";
        return Err(Error::out_of_range(field, required, text("at most")));
    }
    if !limit.is_zero() && limit.get() < size {
        return Err(Error::out_of_range("capacity_range.limit_bytes", limit, text("at least")));
    }
    let what = || format!("volume {id}");
    let (Some(device), true) = (&found.volume.device, found.there) else {
        return Err(Error::in_use(what(), format!("is not mounted at {}", path.display())));
    };
    let shown = world.device_bytes(device)?;
    if i64::try_from(shown).is_ok_and(|shown| shown < size) {
        let problem = format!(
            "is in use, and its device goes on to show {shown} bytes until then: this kernel \
             can't resize it. It grows when it is staged the next time"
        );
        return Err(Error::in_use(what(), problem));
    }
    if found.access == Access::Mount {
        // Through a path that can't be written it can't grow; where it is staged it can.
        let table = world.mounts()?;
        let staged = world.record(id).and_then(|record| record.stage).map(|stage| stage.path);
        let staged = staged.filter(|staged| table.shows(staged, device));
        steps::grow(world, device, staged.as_deref().unwrap_or(path))?;
    }
    Ok(size)
}
