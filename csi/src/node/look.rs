//! Looking at a volume through one of its paths, and growing the file system that is there.

use std::path::Path;

use super::judge::{self, Role};
use super::modes::Access;
use super::mountinfo::{Device, Entry, Table};
use super::records::Place;
use super::steps;
use super::world::{Node, Result, Usage, Volume, World};
use crate::error::Error;
use crate::health::Cause;
use crate::sizes::Range;

/// The state of a volume at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Empty when it cannot be determined.
    pub usage: Option<Shown>,
    /// The faults; empty for a healthy volume.
    pub causes: Vec<Cause>,
}

impl Stats {
    /// The cause of a failed check.
    #[must_use]
    pub fn unseen(why: Cause) -> Self {
        Self { usage: None, causes: vec![why] }
    }
}

/// How much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// A file system's bytes and inodes.
    Mount(Usage, Usage),
    /// A device's bytes.
    Block(Usage),
}

/// A path of a volume.
struct Found {
    volume: Volume,
    access: Access,
    /// The volume is at this path, by the mount table and the daemon.
    there: bool,
}

/// Finds out whether a path was ever one of this volume.
fn find(world: &World<'_>, id: &str, place: &Place, path: &Path) -> Result<Found> {
    let volume = steps::existing(world, id, place)?;
    let (record, table) = (world.volumes.record(id), world.machine.mounts()?);
    let known = judge::known(record.as_ref(), path);
    let (access, there) = at(&table, known, &volume, path);
    let access = access.ok_or_else(|| Error::not_found("path", path.display()))?;
    Ok(Found { volume, access, there })
}

/// How a volume is at a path, if it is or was there; and whether it is.
fn at(
    table: &Table,
    known: Option<(Role, Access)>,
    volume: &Volume,
    path: &Path,
) -> (Option<Access>, bool) {
    let shown = volume.device.as_ref().is_some_and(|device| table.shows(path, device));
    // A device is staged at a path and never shown there.
    let staged = known == Some((Role::Staging, Access::Block)) && volume.device.is_some();
    let of_node = |it: &Entry| if it.kind == "devtmpfs" { Access::Block } else { Access::Mount };
    let seen = table.at(path).filter(|_| shown).map(of_node);
    (seen.or_else(|| known.map(|(_, access)| access)), shown || staged)
}

/// Capacity and usage of a volume, at one of its paths, and its faults as this node detects them.
/// `volume`: as the daemon has it, if it has it.
///
/// # Errors
/// When there is no such volume, or it was never at that path.
pub fn stats(
    world: &World<'_>,
    id: &str,
    place: &Place,
    path: &Path,
    volume: Option<&Volume>,
) -> Result<Stats> {
    let record = world.volumes.record(id);
    let known = judge::known(record.as_ref(), path);
    let Some(volume) = volume else {
        let absent = || Error::not_found("volume", id);
        known.ok_or_else(absent)?;
        let causes = vec![judge::no_volume(&place.pool, &place.name)];
        return Ok(Stats { usage: None, causes });
    };
    let table = world.machine.mounts()?;
    let (access, there) = at(&table, known, volume, path);
    let access = access.ok_or_else(|| Error::not_found("path", path.display()))?;
    let device = volume.device.as_ref();
    let look = device.map(|device| world.machine.device_look(device)).transpose()?;
    let mut causes = judge::device(volume, look.as_ref());
    if !there {
        // Without a device it cannot be mounted: that is reported already.
        if device.is_some() {
            let role = known.map_or(Role::Target, |(role, _)| role);
            causes.push(judge::not_there(role, table.at(path)));
        }
        return Ok(Stats { usage: None, causes });
    }
    if let (Some(stage), Some(device)) = (record.as_ref().and_then(|it| it.stage.as_ref()), device)
        && stage.access == Access::Mount
        && stage.path != path
        && !table.shows(&stage.path, device)
    {
        causes.push(judge::not_staged());
    }
    let usage = match (access, table.at(path), device) {
        (Access::Mount, Some(entry), Some(device)) => {
            causes.extend(judge::mount(entry, path, record.as_ref()));
            of_file_system(world, entry, device, path, &mut causes)?
        }
        (Access::Block, Some(_), Some(device))
            if world.machine.node_at(path, device)? != Node::Right =>
        {
            // A wrong node is reported already.
            if causes.is_empty() {
                causes.push(judge::wrong_node(device));
            }
            None
        }
        _ => Some(Shown::Block(judge::block_usage(volume))),
    };
    Ok(Stats { usage, causes })
}

/// Bytes and inodes of the file system mounted at a path, and its faults.
fn of_file_system(
    world: &World<'_>,
    entry: &Entry,
    device: &Device,
    path: &Path,
    causes: &mut Vec<Cause>,
) -> Result<Option<Shown>> {
    causes
        .extend(judge::errors(&entry.kind, world.machine.file_system_errors(device, &entry.kind)?));
    if !world.machine.answers(path)? {
        causes.push(judge::shut_down(&entry.kind));
        return Ok(None);
    }
    let (bytes, inodes) = world.machine.usage(path)?;
    causes.extend(judge::capacity(&bytes, &inodes));
    Ok(Some(Shown::Mount(bytes, inodes)))
}

/// Grows the content of a volume to the volume's size, and returns that size.
///
/// # Errors
/// When there is no such volume or path, the volume's size is not in the range, or the kernel can't
/// show the new size of a device in use.
pub fn expand(
    world: &World<'_>,
    (id, place): (&str, &Place),
    path: &Path,
    range: &Range,
) -> Result<i64> {
    let Range { required, limit } = *range;
    let mut found = find(world, id, place, path)?;
    if required.get() > found.volume.capacity_bytes()
        && let Some(larger) = world.volumes.enlarge(place, range)?
    {
        found.volume = larger;
    }
    // The claim's capacity is the charged size; the visible size may be smaller.
    let (size, capacity) = (found.volume.size_bytes, found.volume.capacity_bytes());
    let text = |what: &str| format!("{what} {capacity}, which the volume has");
    if required.get() > capacity {
        let field = "capacity_range.required_bytes";
        return Err(Error::out_of_range(field, required, text("at most")));
    }
    if !limit.is_zero() && limit.get() < capacity {
        return Err(Error::out_of_range("capacity_range.limit_bytes", limit, text("at least")));
    }
    let what = || format!("volume {id}");
    let (Some(device), true) = (&found.volume.device, found.there) else {
        return Err(Error::in_use(what(), format!("is not mounted at {}", path.display())));
    };
    world.volumes.stretch(place)?;
    let shown = world.machine.device_bytes(device)?;
    if i64::try_from(shown).is_ok_and(|shown| shown < size) {
        let problem = format!(
            "is in use, and its device goes on to show {shown} bytes until then: this kernel \
             can't resize it. It grows when it is staged the next time"
        );
        return Err(Error::in_use(what(), problem));
    }
    if found.access == Access::Mount {
        // Through a path that can't be written it can't grow; where it is staged it can.
        let table = world.machine.mounts()?;
        let staged =
            world.volumes.record(id).and_then(|record| record.stage).map(|stage| stage.path);
        let staged = staged.filter(|staged| table.shows(staged, device));
        steps::grow(world, device, staged.as_deref().unwrap_or(path))?;
    }
    Ok(capacity)
}
