//! Volumes in cells of their own, which come to the node where something is done with them unless
//! another node uses them. Each step can be repeated, and a repeat finds the results of an earlier
//! call: cell, volume, settings, answer; and to delete: volume, cell.

use std::collections::BTreeMap;

use blockd_api::v1::{self, CellState};
use blockd_csi_base::bytes::Bytes;

use crate::cells::{self, Aim, CellId};
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
    refuse_elsewhere(plugin, &id, &asked.name).await?;
    let is_new = open_or_make(plugin, &id, size).await?;
    let mut context = asked.context_of_fs(plugin);
    if let Some(word) = asked.parameters.front_end.and_then(v1::FrontEnd::word) {
        context.insert(keys.front_end(), word.to_owned());
    }
    let mut stored = context.clone();
    stored.insert(keys.volume_group(), group.to_owned());
    stored.insert(keys.volume_name(), asked.name.clone());
    let mut labels = labels::of_volume(keys, "", &request.parameters, &stored);
    labels.remove(&keys.device_class());
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
        Err(error) => {
            if is_new && error.daemon_kind().is_some() {
                remove(plugin, &id).await;
            }
            return Err(error);
        }
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
/// tries.
async fn refuse_elsewhere(plugin: &Plugin, id: &CellId, name: &str) -> Result<(), Error> {
    for group in cells::all(&plugin.daemon).await? {
        if group.name != id.group && group.cells.iter().any(|cell| cell.name == id.cell) {
            return Err(Error::exists(("volume", name), "volume-group", group.name, &id.group));
        }
    }
    for pool in plugin.pools().await?.names() {
        let there = plugin.settings.names.volume(pool, name);
        if plugin.daemon.find_volume(pool, &there.name).await?.is_some() {
            return Err(Error::exists(("volume", name), "pool", pool, &id.group));
        }
    }
    Ok(())
}

/// Has the cell open here. True if it was made.
async fn open_or_make(plugin: &Plugin, id: &CellId, size: Bytes) -> Result<bool, Error> {
    let group = cells::group(&plugin.daemon, &plugin.settings.place.node, &id.group).await?;
    if let Some(cell) = group.cells.iter().find(|cell| cell.name == id.cell) {
        cells::open(&plugin.daemon, id, cell).await?;
        return Ok(false);
    }
    let free = Bytes::new(group.free_bytes).unwrap_or_default();
    if size > free {
        let why = ", in the volume group of that name".to_owned();
        return Err(Error::NoSpace { pool: id.group.clone(), requested: size, free, why });
    }
    let asked = v1::CreateCellRequest {
        group: id.group.clone(),
        name: id.cell.clone(),
        device_bytes: cell_size(size).get(),
        extent_size: 0,
    };
    plugin.daemon.create_cell(asked).await.map(|answer| answer.changed)
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

/// Removes a cell that was made for nothing. If that fails, the repeat finds it.
async fn remove(plugin: &Plugin, id: &CellId) {
    let (group, name) = (id.group.clone(), id.cell.clone());
    let asked = v1::DeleteCellRequest { group, name, force: false };
    if let Err(error) = plugin.daemon.delete_cell(asked).await {
        tracing::warn!(cell = id.cell, %error, "the cell of a failed call is still there");
    }
}

/// Deletes a volume with its cell, which comes here first.
///
/// # Errors
/// FAILED_PRECONDITION: it is attached here or on another node.
pub(super) async fn delete(plugin: &Plugin, id: &CellId) -> Result<(), Error> {
    let (daemon, node) = (&plugin.daemon, &plugin.settings.place.node);
    let Some(cell) = cells::find(daemon, node, id).await? else { return Ok(()) };
    refuse_standby(plugin, id).await?;
    cells::open(daemon, id, &cell).await?;
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
    let node = &plugin.settings.place.node;
    let found = match cells::group(&plugin.daemon, node, group).await {
        Ok(found) => found,
        // The node does not have the group.
        Err(Error::InUse { .. }) => return Ok(Capacity::default()),
        Err(error) => return Err(error),
    };
    let free = Bytes::new(found.free_bytes).unwrap_or_default();
    let available = free.saturating_sub(header).round_down(Bytes::constant(i64::from(BLOCK)));
    Ok(Capacity { available, maximum: available.min(MAX_VOLUME) })
}

/// All volumes in cells of this driver, with what is known of them here. A group that can't be used
/// now lists those that are open here.
///
/// # Errors
/// The daemon does not answer.
pub(super) async fn list(plugin: &Plugin) -> Result<BTreeMap<CellId, v1::Volume>, Error> {
    let mut found = BTreeMap::new();
    let open = plugin.daemon.volumes("").await?;
    let key = plugin.settings.keys.volume_group();
    for volume in open {
        let Some(group) = volume.labels.get(&key) else { continue };
        let id = plugin.settings.cells.in_cell(group, &volume.pool);
        if let Some(id) = id.filter(|id| id.volume == volume.name) {
            found.insert(id, volume);
        }
    }
    for group in cells::all(&plugin.daemon).await? {
        if !group.failure.is_empty() {
            tracing::warn!(group = group.name, problem = group.failure, "cells are not listed");
        }
        for cell in &group.cells {
            let Some(id) = plugin.settings.cells.in_cell(&group.name, &cell.name) else { continue };
            if cell.state() != CellState::Open {
                let volume = nameless(&id);
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
    let condition = match cell.state() {
        CellState::Elsewhere => unknown(&format!("its cell is on host {}", cell.holder)),
        CellState::Free => unknown("its cell is open on no host"),
        _ => health::condition(vec![health::Cause::failure("its cell is not open")]),
    };
    Ok((nameless(id), condition))
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
        Err(Error::Daemon(detail)) if detail.kind() == v1::ErrorKind::InUse => {
            tracing::info!(volume = %id, problem = detail.message, "left to the node that uses it");
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
}
