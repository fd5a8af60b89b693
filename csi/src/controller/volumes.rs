//! Volumes that are there: delete, validate, list, get.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_csi_base::error::shown;

use crate::capability::{Capability, Reach, Refusal};
use crate::error::Error;
use crate::ids::{Kind, SnapshotId, VolumeId};
use crate::labels;
use crate::limits;
use crate::plugin::Plugin;
use crate::proto;
use crate::proto::volume_content_source::{SnapshotSource, Type};

use super::cells;
use super::conditions::Conditions;
use super::create::class_of;
use super::paging::page;

/// How long is waited before the daemon is asked again, while it is away at the start.
const SWEEP_PAUSE: Duration = Duration::from_secs(5);

pub(super) async fn delete(
    plugin: Arc<Plugin>,
    request: proto::DeleteVolumeRequest,
) -> Result<proto::DeleteVolumeResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    limits::map("secrets", &request.secrets)?;
    let _lock = plugin.locks.take(&request.volume_id)?;
    if let Some(id) = plugin.settings.cells.parse(&request.volume_id) {
        cells::delete(&plugin, &id).await?;
        return Ok(proto::DeleteVolumeResponse {});
    }
    let id = match plugin.volume(&request.volume_id).await {
        Ok((id, _)) => id,
        Err(Error::NotFound { .. }) => return Ok(proto::DeleteVolumeResponse {}),
        Err(error) => return Err(error),
    };
    let asked = v1::DeleteVolumeRequest {
        name: id.name,
        pool: id.pool,
        force: false,
        ..Default::default()
    };
    plugin.daemon.delete_volume(asked).await?;
    // An abandoned clone may have left a snapshot behind: it is deleted with its volume. The volume
    // is gone already, whatever becomes of this.
    if let Err(error) = sweep(&plugin).await {
        tracing::debug!(%error, "leftovers of clones were not searched");
    }
    Ok(proto::DeleteVolumeResponse {})
}

/// Removes leftovers of clones that were interrupted and never repeated, as soon as the daemon
/// answers.
pub async fn sweep_once(plugin: Arc<Plugin>) {
    while let Err(error) = sweep(&plugin).await {
        tracing::debug!(%error, "leftovers of clones were not searched yet");
        tokio::time::sleep(SWEEP_PAUSE).await;
    }
}

/// Deletes snapshots that clones are made from, unless one is being made just now.
async fn sweep(plugin: &Plugin) -> Result<(), Error> {
    let Ok(_clones) = plugin.clones.try_write() else { return Ok(()) };
    for (volume, kind) in ours(plugin).await? {
        if kind != Kind::CloneSnapshot {
            continue;
        }
        tracing::info!(pool = volume.pool, name = volume.name, "left by a clone: removed");
        let (name, pool) = (volume.name, volume.pool);
        let asked = v1::DeleteVolumeRequest { name, pool, force: false, ..Default::default() };
        plugin.daemon.delete_volume(asked).await?;
    }
    Ok(())
}

/// All volumes and snapshots of the driver, in all pools of its classes.
pub(crate) async fn ours(plugin: &Plugin) -> Result<Vec<(v1::Volume, Kind)>, Error> {
    let pools = plugin.pools().await?;
    let all = plugin.daemon.volumes("").await?;
    let kind = |volume: v1::Volume| {
        let kind = plugin.settings.names.kind(&volume.name);
        (volume, kind)
    };
    let is_ours = |(volume, kind): &(v1::Volume, Kind)| {
        let is_snapshot = volume.kind() == v1::VolumeKind::Snapshot;
        let fits = match kind {
            Kind::Foreign => false,
            Kind::Volume | Kind::Ephemeral => !is_snapshot,
            Kind::Snapshot | Kind::CloneSnapshot => is_snapshot,
        };
        fits && pools.has(&volume.pool)
    };
    Ok(all.into_iter().map(kind).filter(is_ours).collect())
}

pub(super) async fn list(
    plugin: Arc<Plugin>,
    request: proto::ListVolumesRequest,
) -> Result<proto::ListVolumesResponse, Error> {
    // An invalid page is refused before the call to the daemon.
    let is_id = |token: &str| {
        let settings = &plugin.settings;
        settings.names.parse_volume(token).is_some() || settings.cells.parse(token).is_some()
    };
    page::<()>(Vec::new(), request.max_entries, &request.starting_token, is_id)?;
    let mut volumes = ours(&plugin).await?;
    volumes.retain(|(_, kind)| *kind == Kind::Volume);
    let conditions = Conditions::fetch(&plugin, None).await?;
    let lost = lost(&plugin, conditions.as_ref(), &volumes).await?;
    let volumes = volumes.into_iter().map(|(volume, _)| volume).chain(lost);
    let entries = volumes.map(|volume| {
        let id = VolumeId { pool: volume.pool.clone(), name: volume.name.clone() }.to_string();
        (id, (volume, None))
    });
    let in_cells = cells::list(&plugin).await?;
    let in_cells = in_cells.into_iter().map(|(id, volume)| (id.to_string(), volume));
    let entries = entries.chain(in_cells).map(|(id, volume)| (id.clone(), (id, volume)));
    let entries = entries.collect();
    let (entries, next_token) = page(entries, request.max_entries, &request.starting_token, is_id)?;
    let entries = entries.into_iter().map(|(id, (volume, unopened))| {
        let status = conditions.as_ref().map(|all| {
            let condition = unopened.unwrap_or_else(|| all.of(&volume.pool, &volume.name));
            let volume_condition = Some(condition);
            proto::list_volumes_response::VolumeStatus { volume_condition, ..Default::default() }
        });
        let volume = Some(to_wire(&plugin, &id, &volume));
        proto::list_volumes_response::Entry { volume, status }
    });
    Ok(proto::ListVolumesResponse { entries: entries.collect(), next_token })
}

/// Volumes of ours that are not listed since their pool failed. Their size is not known.
async fn lost(
    plugin: &Plugin,
    conditions: Option<&Conditions>,
    listed: &[(v1::Volume, Kind)],
) -> Result<Vec<v1::Volume>, Error> {
    let names = &plugin.settings.names;
    let listed: BTreeSet<(&str, &str)> =
        listed.iter().map(|(volume, _)| (volume.pool.as_str(), volume.name.as_str())).collect();
    let lost = conditions.into_iter().flat_map(Conditions::lost);
    let lost: Vec<(&str, &str)> = lost
        .filter(|(_, name)| names.kind(name) == Kind::Volume)
        .filter(|place| !listed.contains(place))
        .collect();
    if lost.is_empty() {
        return Ok(Vec::new());
    }
    let pools = plugin.pools().await?;
    let ours = lost.into_iter().filter(|(pool, _)| pools.has(pool));
    Ok(ours.map(|(pool, name)| nameless(pool, name)).collect())
}

/// A volume of which nothing is known but where it is.
fn nameless(pool: &str, name: &str) -> v1::Volume {
    v1::Volume { pool: pool.to_owned(), name: name.to_owned(), ..Default::default() }
}

pub(super) async fn get(
    plugin: Arc<Plugin>,
    request: proto::ControllerGetVolumeRequest,
) -> Result<proto::ControllerGetVolumeResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    let (id, volume) = match plugin.volume(&request.volume_id).await {
        Ok(found) => found,
        // Its cell is on another node, or its pool has failed here.
        Err(Error::InUse { .. } | Error::Daemon(_))
            if plugin.settings.cells.parse(&request.volume_id).is_some() =>
        {
            return get_unopened(&plugin, &request.volume_id).await;
        }
        Err(error) => of_failed_pool(&plugin, &request.volume_id, error).await?,
    };
    let conditions = match Conditions::fetch(&plugin, Some((&id.pool, &id.name))).await {
        // It was deleted just now.
        Err(error) if error.is_absent() => {
            return Err(Error::not_found("volume", &request.volume_id));
        }
        conditions => conditions?,
    };
    let volume_condition = conditions.map(|all| all.of(&id.pool, &id.name));
    let status = proto::controller_get_volume_response::VolumeStatus {
        volume_condition,
        ..Default::default()
    };
    let volume = Some(to_wire(&plugin, &request.volume_id, &volume));
    Ok(proto::ControllerGetVolumeResponse { volume, status: Some(status) })
}

/// A volume whose cell is not open here.
async fn get_unopened(
    plugin: &Plugin,
    id: &str,
) -> Result<proto::ControllerGetVolumeResponse, Error> {
    let cell = plugin.settings.cells.parse(id).ok_or_else(|| Error::not_found("volume", id))?;
    let (volume, condition) = cells::get_unopened(plugin, &cell).await?;
    let volume_condition = plugin.settings.config.health.then_some(condition);
    let status = proto::controller_get_volume_response::VolumeStatus {
        volume_condition,
        ..Default::default()
    };
    let volume = Some(to_wire(plugin, id, &volume));
    Ok(proto::ControllerGetVolumeResponse { volume, status: Some(status) })
}

/// A volume that the daemon says nothing of, in a pool that failed: it is not gone, and that it is
/// not well is an answer.
async fn of_failed_pool(
    plugin: &Plugin,
    id: &str,
    error: Error,
) -> Result<(VolumeId, v1::Volume), Error> {
    let refused = matches!(error, Error::Daemon(_)) && !error.is_absent();
    let Some(parsed) = plugin.settings.names.parse_volume(id).filter(|_| refused) else {
        return Err(error);
    };
    let (pool, name) = (parsed.pool.as_str(), parsed.name.as_str());
    match Conditions::fetch(plugin, Some((pool, name))).await {
        Ok(Some(all)) if all.lost().any(|one| one == (pool, name)) => {
            let volume = nameless(pool, name);
            Ok((parsed, volume))
        }
        _ => Err(error),
    }
}

/// Converts an existing volume to its CSI message: its size, and its source as long as that exists.
/// Of its context it has the part that labels hold, which is all that the node acts by.
fn to_wire(plugin: &Plugin, id: &str, volume: &v1::Volume) -> proto::Volume {
    let is_snapshot = plugin.settings.names.kind(&volume.origin) == Kind::Snapshot;
    let content_source = is_snapshot.then(|| {
        let snapshot = SnapshotId { pool: volume.pool.clone(), name: volume.origin.clone() };
        let snapshot = SnapshotSource { snapshot_id: snapshot.to_string() };
        proto::VolumeContentSource { r#type: Some(Type::Snapshot(snapshot)) }
    });
    proto::Volume {
        capacity_bytes: plugin.capacity(volume).get(),
        volume_id: id.to_owned(),
        volume_context: labels::context(&plugin.settings.keys, &volume.labels),
        content_source,
        accessible_topology: vec![match plugin.settings.cells.parse(id) {
            Some(cell) => plugin.settings.cells.topology(&cell.group),
            None => plugin.settings.place.to_wire(),
        }],
    }
}

pub(super) async fn validate(
    plugin: Arc<Plugin>,
    request: proto::ValidateVolumeCapabilitiesRequest,
) -> Result<proto::ValidateVolumeCapabilitiesResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    limits::map("volume_context", &request.volume_context)?;
    limits::map("secrets", &request.secrets)?;
    let cell = plugin.settings.cells.parse(&request.volume_id);
    let reach = if cell.is_some() { Reach::Group } else { Reach::Node };
    let wire = &request.volume_capabilities;
    let capabilities = Capability::parse_all_for(reach, "volume_capabilities", wire);
    let unsupported = match capabilities {
        Ok(_) => None,
        Err(Refusal::Malformed(error)) => return Err(error),
        Err(Refusal::Unsupported(error)) => Some(error),
    };
    match plugin.volume(&request.volume_id).await {
        // Its cell is there, and not here.
        Err(Error::InUse { .. }) if cell.is_some() => {}
        found => drop(found?),
    }
    let refused = unsupported.or_else(|| parameters(&plugin, &request).err());
    if let Some(error) = refused {
        let message = shown(error);
        return Ok(proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message });
    }
    let confirmed = proto::validate_volume_capabilities_response::Confirmed {
        volume_context: request.volume_context,
        volume_capabilities: request.volume_capabilities,
        parameters: request.parameters,
        mutable_parameters: request.mutable_parameters,
    };
    let confirmed = Some(confirmed);
    Ok(proto::ValidateVolumeCapabilitiesResponse { confirmed, message: String::new() })
}

fn parameters(
    plugin: &Plugin,
    request: &proto::ValidateVolumeCapabilitiesRequest,
) -> Result<(), Error> {
    let keys = &plugin.settings.keys;
    let class = keys.class("parameters", &request.parameters)?;
    let device_class = &class_of(plugin, &class)?;
    keys.mutable("mutable_parameters", &request.mutable_parameters)?;
    let plan = class.pmem.of_class("parameters.", device_class)?;
    class.check_encryption(&plan)?;
    for (index, wire) in request.volume_capabilities.iter().enumerate() {
        let field = format!("volume_capabilities[{index}]");
        // Whether the volume can be reached so was checked before.
        let one = Capability::parse_for(Reach::Group, &field, Some(wire))?;
        plan.check(&field, &one, one.file_system().or(class.file_system))?;
        class.check_use(&field, &one)?;
    }
    Ok(())
}
