//! Volumes in cells of their own, which come to the node where something is done with them unless
//! another node uses them. Each step can be repeated, and a repeat finds the results of an earlier
//! call: cell, volume, settings, answer; and to delete: volume, cell.

use std::collections::BTreeMap;

use blockd_api::v1::{self, CellState, ErrorKind};
use blockd_csi_base::bytes::Bytes;

use crate::cells::{self, Aim, CellId};
use crate::daemon::Daemon;
use crate::error::Error;
use crate::health::{self, unknown};
use crate::ids::VolumeId;
use crate::labels;
use crate::parameters::{Keys, Mutable};
use crate::plugin::Plugin;
use crate::proto;
use crate::provision::{self, CreateSpec};
use crate::room::Capacity;
use crate::sizes::{MAX_VOLUME, Range};

use super::create::{Asked, Source};

/// Bytes of a cell beside its volume: superblocks, log, trees, and the reserve of its pool, which
/// are some 20 MiB in a small one.
const OVERHEAD: Bytes = Bytes::constant(64 * 1_048_576);

/// The largest cell to begin with. The daemon makes it larger as it is written, in steps of at
/// least as much.
const MOST_AT_FIRST: Bytes = Bytes::constant(1024 * 1_048_576);

/// A granule that the volumes of each device can have.
const BLOCK: u32 = 4096;

/// Creates a volume in a cell, or finishes one.
///
/// # Errors
/// As CreateVolume. A cell that was made for nothing is deleted again.
pub(super) async fn create(
    plugin: &Plugin,
    request: &proto::CreateVolumeRequest,
    asked: &Asked,
    group: &str,
) -> Result<proto::CreateVolumeResponse, Error> {
    let settings = &plugin.settings;
    let (keys, wanted) = (&settings.keys, request.accessibility_requirements.as_ref());
    settings.place.check_group(wanted, &settings.cells.key(group))?;
    let id = settings.cells.id(group, &asked.name);
    let _id = plugin.locks.take(&id.to_string())?;
    let size = asked.size(plugin, &any_pool(), &Source::Nothing)?;
    let mut context = asked.context_of_fs(plugin);
    if let Some(word) = asked.parameters.front_end.and_then(v1::FrontEnd::word) {
        context.insert(keys.front_end(), word.to_owned());
    }
    let mut stored = context.clone();
    stored.insert(keys.volume_group(), group.to_owned());
    stored.insert(keys.volume_name(), asked.name.clone());
    let mut labels = labels::of_volume(keys, "", &request.parameters, &stored);
    labels.remove(&keys.device_class());
    asked.check_driver(plugin, &labels)?;
    open_or_make(plugin, &id, asked, size).await?;
    let mutable = asked.parameters.mutable.clone().under(asked.mutable.clone());
    let spec = CreateSpec {
        class: &asked.class,
        pool: &id.cell,
        name: &id.volume,
        size,
        limit: asked.device_limit(),
        mutable: &mutable,
        pmem: asked.pmem,
        labels: &labels,
    };
    let volume = match make(plugin, asked, &spec).await {
        Ok(volume) => volume,
        Err(error) if error.daemon_kind().is_some() => {
            return Err(remove_unused(plugin, &id, error).await);
        }
        Err(error) => return Err(error),
    };
    Ok(proto::CreateVolumeResponse {
        volume: Some(proto::Volume {
            capacity_bytes: plugin.capacity(&volume).get(),
            volume_id: id.to_string(),
            volume_context: context,
            content_source: None,
            accessible_topology: vec![settings.cells.topology(group)],
        }),
    })
}

/// The pool that sizes are chosen for before there is a cell.
fn any_pool() -> v1::Pool {
    let device = v1::Device { block_size: BLOCK, ..Default::default() };
    v1::Pool { devices: vec![device], ..Default::default() }
}

/// A name is that of one volume, whatever its group or pool: a class may have changed between two
/// tries. A pool that has failed may have the volume, which a repeat of the call finds out once the
/// pool is open.
async fn refuse_elsewhere(plugin: &Plugin, id: &CellId, name: &str) -> Result<(), Error> {
    for group in cells::names(&plugin.daemon).await? {
        let is_other = group != id.group;
        let found = match is_other {
            true => cells::with_cell(&plugin.daemon, &group, &id.cell).await?,
            false => None,
        };
        if found.is_some_and(|found| !found.cells.is_empty()) {
            return Err(Error::exists(("volume", name), "volume-group", group, &id.group));
        }
    }
    for pool in plugin.pools().await?.names() {
        let there = plugin.settings.names.volume(pool, name);
        let found = plugin.daemon.find_volume(pool, &there.name).await;
        if found.map_err(|error| to_be_repeated_in(pool, &plugin.daemon, error))?.is_some() {
            return Err(Error::exists(("volume", name), "pool", pool, &id.group));
        }
    }
    Ok(())
}

/// Has the cell open here. As long as there is a cell that can't be opened, the call is to be
/// repeated: with an error that ends it the volume would never be deleted.
async fn open_or_make(
    plugin: &Plugin,
    id: &CellId,
    asked: &Asked,
    size: Bytes,
) -> Result<(), Error> {
    let (daemon, node) = (&plugin.daemon, &plugin.settings.place.node);
    let Some(group) = cells::with_cell(daemon, &id.group, &id.cell).await? else {
        // With this code alone another node is chosen.
        let place = format!(
            "in volume group {group}, which the daemon here does not have (`blockd vg add {group}` \
             adds it)",
            group = id.group
        );
        return Err(Error::Elsewhere { place, node: node.clone() });
    };
    if let Some(cell) = group.cells.first() {
        let opened = cells::open(daemon, id, cell).await;
        return opened.map_err(|error| to_be_repeated(id, error));
    }
    refuse_elsewhere(plugin, id, &asked.name).await?;
    let free = room(Bytes::new(group.free_bytes).unwrap_or_default());
    if size > free {
        let why = ", in the volume group of that name".to_owned();
        return Err(Error::NoSpace { pool: id.group.clone(), requested: size, free, why });
    }
    let asked = v1::CreateCellRequest {
        group: id.group.clone(),
        name: id.cell.clone(),
        device_bytes: cell_size(size).get(),
        extent_size: 0,
        only_begun: false,
    };
    let Err(error) = daemon.create_cell(asked).await else { return Ok(()) };
    let is_answered = error.daemon_kind().is_some();
    match is_answered && cells::find(daemon, node, id).await?.is_some() {
        true => Err(to_be_repeated(id, error)),
        false => Err(error),
    }
}

/// The error of a call that has to be repeated.
fn to_be_repeated(id: &CellId, error: Error) -> Error {
    if error.daemon_kind().is_none() && !matches!(error, Error::InUse { .. }) {
        return error;
    }
    Error::Aborted { what: format!("volume {id}"), problem: format!("has a cell already: {error}") }
}

/// The error of a look into a pool that can't answer now: any other code would end the call.
fn to_be_repeated_in(pool: &str, daemon: &Daemon, error: Error) -> Error {
    if error.daemon_kind().is_none() {
        return error;
    }
    let problem = format!("pool {pool} may have a volume of that name: {error}");
    Error::Unavailable { address: daemon.address(), problem }
}

/// The largest volume in a group with so much free space.
fn room(free: Bytes) -> Bytes {
    let is_small = free < MOST_AT_FIRST.saturating_add(OVERHEAD);
    if is_small { free.saturating_sub(OVERHEAD) } else { free }
}

/// Bytes of a new cell for a volume of this size, which is thin.
fn cell_size(volume: Bytes) -> Bytes {
    volume.saturating_add(OVERHEAD).min(MOST_AT_FIRST)
}

async fn make(plugin: &Plugin, asked: &Asked, spec: &CreateSpec<'_>) -> Result<v1::Volume, Error> {
    if let Some(present) = plugin.daemon.find_volume(spec.pool, spec.name).await? {
        // The name of a cell has a digest of the volume's, which another one may share.
        let key = plugin.settings.keys.volume_name();
        if let Some(name) = present.labels.get(&key).filter(|name| **name != asked.name) {
            return Err(Error::exists(("cell", spec.pool), "volume", name, &asked.name));
        }
        let size = asked.check_present(plugin, &present, &Source::Nothing)?;
        let spec = CreateSpec { size, ..*spec };
        return provision::finish(plugin, &spec, present, false).await;
    }
    let request = v1::CreateVolumeRequest {
        name: spec.name.to_owned(),
        pool: spec.pool.to_owned(),
        size_bytes: spec.size.get(),
        ..Default::default()
    };
    let made = plugin.daemon.create_volume(request).await?;
    let volume = made.volume.unwrap_or_default();
    provision::finish(plugin, spec, volume, made.changed).await
}

/// Removes the cell of a failed call that has no volume. Gives the error of the call, which has to
/// be repeated where the cell stays.
async fn remove_unused(plugin: &Plugin, id: &CellId, error: Error) -> Error {
    if let Ok(Some(_)) = plugin.daemon.find_volume(&id.cell, &id.volume).await {
        return error;
    }
    let (group, name) = (id.group.clone(), id.cell.clone());
    let asked = v1::DeleteCellRequest { group, name, force: false };
    match plugin.daemon.delete_cell(asked).await {
        Ok(_) => error,
        Err(problem) => {
            tracing::warn!(cell = id.cell, %problem, "the cell of a failed call is still there");
            to_be_repeated(id, error)
        }
    }
}

/// Deletes a volume with its cell, which comes here first.
///
/// # Errors
/// FAILED_PRECONDITION: it is attached here or on another node. ABORTED: another node has taken it
/// meanwhile.
pub(super) async fn delete(plugin: &Plugin, id: &CellId) -> Result<(), Error> {
    let (daemon, node) = (&plugin.daemon, &plugin.settings.place.node);
    let Some(cell) = cells::find(daemon, node, id).await? else { return Ok(()) };
    refuse_standby(plugin, id).await?;
    let (was_open, error) = match cells::open(daemon, id, &cell).await {
        Err(error) => (false, error),
        Ok(()) => match delete_open(daemon, id).await {
            Err(error) => (true, error),
            Ok(()) => return Ok(()),
        },
    };
    if !matches!(error.daemon_kind(), Some(ErrorKind::NotFound | ErrorKind::InUse)) {
        return Err(error);
    }
    // Another node may have deleted or taken it between the steps.
    let Some(cell) = cells::find(daemon, node, id).await? else { return Ok(()) };
    if error.is_absent() || was_open && cell.state() != CellState::Open {
        let problem = format!("was taken or changed by another node meanwhile: {error}");
        return Err(Error::Aborted { what: format!("volume {id}"), problem });
    }
    Err(error)
}

/// Deletes a volume whose cell is open here, with the cell.
async fn delete_open(daemon: &Daemon, id: &CellId) -> Result<(), Error> {
    let asked = v1::DeleteVolumeRequest {
        name: id.volume.clone(),
        pool: id.cell.clone(),
        force: false,
        ..Default::default()
    };
    daemon.delete_volume(asked).await?;
    let (group, name) = (id.group.clone(), id.cell.clone());
    // A volume that an operator has made in it, or a snapshot, keeps the cell.
    let asked = v1::DeleteCellRequest { group, name, force: false };
    daemon.delete_cell(asked).await.map(drop)
}

/// Refuses a volume that is staged on this node and whose cell is on another one.
async fn refuse_standby(plugin: &Plugin, id: &CellId) -> Result<(), Error> {
    match plugin.daemon.find_volume(&id.cell, &id.volume).await {
        Ok(Some(volume)) if volume.standby => {
            Err(Error::in_use(format_args!("volume {id}"), "is attached on standby"))
        }
        // The pool may be closed: opening the cell says more.
        Ok(_) | Err(Error::Daemon(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The capacity of a group, which all of its nodes share.
///
/// # Errors
/// The daemon does not answer, or the group can't be used now.
pub(super) async fn capacity(
    plugin: &Plugin,
    group: &str,
    header: Bytes,
) -> Result<Capacity, Error> {
    let Some(found) = cells::space(&plugin.daemon, group).await? else {
        return Ok(Capacity::default());
    };
    let free = Bytes::new(found.free_bytes).unwrap_or_default();
    let available = room(free).saturating_sub(header).round_down(Bytes::constant(i64::from(BLOCK)));
    Ok(Capacity { available, maximum: available.min(MAX_VOLUME) })
}

/// A volume with its condition, if its cell is not open here. The daemon's health has the condition
/// of any other.
type Listed = (v1::Volume, Option<proto::VolumeCondition>);

/// All volumes in cells of this driver, with what is known of them here. A group that can't be used
/// now lists those that are open here.
///
/// # Errors
/// The daemon does not answer.
pub(super) async fn list(plugin: &Plugin) -> Result<BTreeMap<CellId, Listed>, Error> {
    let mut found = BTreeMap::new();
    let open = plugin.daemon.volumes("").await?;
    let key = plugin.settings.keys.volume_group();
    for volume in open {
        let Some(group) = volume.labels.get(&key) else { continue };
        let id = plugin.settings.cells.in_cell(group, &volume.pool);
        if let Some(id) = id.filter(|id| id.volume == volume.name) {
            found.insert(id, (volume, None));
        }
    }
    for group in cells::all(&plugin.daemon).await? {
        if !group.failure.is_empty() {
            tracing::warn!(group = group.name, problem = group.failure, "cells are not listed");
        }
        for cell in &group.cells {
            let Some(id) = plugin.settings.cells.in_cell(&group.name, &cell.name) else { continue };
            if cell.state() != CellState::Open {
                let volume = (nameless(&id), Some(condition(cell)));
                found.entry(id).or_insert(volume);
            }
        }
    }
    Ok(found)
}

/// A volume of which nothing is known but its id: its cell is not here.
fn nameless(id: &CellId) -> v1::Volume {
    v1::Volume { pool: id.cell.clone(), name: id.volume.clone(), ..Default::default() }
}

/// A volume whose cell is not open here, and its condition.
///
/// # Errors
/// NOT_FOUND: there is no such cell. Or the group can't be used now.
pub(super) async fn get_unopened(
    plugin: &Plugin,
    id: &CellId,
) -> Result<(v1::Volume, proto::VolumeCondition), Error> {
    let node = &plugin.settings.place.node;
    let cell = cells::find(&plugin.daemon, node, id).await?;
    let cell = cell.ok_or_else(|| Error::not_found("volume", id))?;
    Ok((nameless(id), condition(&cell)))
}

/// The condition of a volume whose cell is not open here.
fn condition(cell: &v1::Cell) -> proto::VolumeCondition {
    match cell.state() {
        CellState::Elsewhere => unknown(&format!("its cell is on host {}", cell.holder)),
        CellState::Free => unknown("its cell is open on no host"),
        _ => health::condition(vec![health::Cause::failure("its cell is not open")]),
    }
}

/// Makes a volume larger, where no other node uses it. `None`: the node that uses it does that.
///
/// # Errors
/// The volume can't have that size, or does not exist.
pub(super) async fn expand(
    plugin: &Plugin,
    id: &CellId,
    range: &Range,
) -> Result<Option<v1::Volume>, Error> {
    let node = &plugin.settings.place.node;
    match cells::bring(&plugin.daemon, node, id, Aim::Alone).await {
        Ok(()) => {}
        Err(error) if cells::is_used_elsewhere(&error) => {
            tracing::info!(volume = %id, %error, "left to the node that uses it");
            return Ok(None);
        }
        Err(error) => return Err(error),
    }
    let (_, volume) = plugin.volume(&id.to_string()).await?;
    provision::expand(plugin, volume, range).await.map(Some)
}

/// Refuses changes of parameters that a volume in a cell can't have, and brings it here.
///
/// # Errors
/// INVALID_ARGUMENT, or another node uses it.
pub(super) async fn prepare_change(
    plugin: &Plugin,
    keys: &Keys,
    id: &CellId,
    mutable: &Mutable,
) -> Result<VolumeId, Error> {
    mutable.check_group(keys)?;
    let node = &plugin.settings.place.node;
    cells::bring(&plugin.daemon, node, id, Aim::Alone).await?;
    Ok(VolumeId { pool: id.cell.clone(), name: id.volume.clone() })
}

/// The error of a snapshot or clone: it would be in the same cell, and could be used where its
/// source is alone.
pub(crate) fn refuse_family(id: &CellId, what: &str) -> Error {
    let problem = format!(
        "is in a cell of its own, where {what} through CSI would have to be as well and could not \
         be used on another node: use `blockd snapshot` and `blockd send` on the host that has cell \
         {} (`blockd cell list`)",
        id.cell
    );
    Error::in_use(format_args!("volume {id}"), problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_begins_small_and_is_never_smaller_than_a_small_volume() {
        let bytes = |mib: i64| Bytes::constant(mib * 1_048_576);
        assert_eq!(cell_size(bytes(8)), bytes(72));
        assert_eq!(cell_size(bytes(960)), bytes(1024));
        assert_eq!(cell_size(bytes(1 << 20)), bytes(1024));
    }

    #[test]
    fn what_a_group_has_room_for_can_be_made() {
        let bytes = |mib: i64| Bytes::constant(mib * 1_048_576);
        assert_eq!(room(bytes(32)), Bytes::ZERO);
        for free in [64, 512, 1023, 1024, 1087, 1088, 4096] {
            let volume = room(bytes(free));
            assert!(cell_size(volume) <= bytes(free) && volume <= bytes(free), "{free}");
        }
        assert_eq!((room(bytes(1087)), room(bytes(1088))), (bytes(1023), bytes(1088)));
    }
}
