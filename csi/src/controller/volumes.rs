//! Volumes that are there: delete, validate, list, get.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;

use crate::capability::{Capability, Refusal};
use crate::error::{Error, shown};
use crate::ids::{Kind, SnapshotId, VolumeId};
use crate::limits;
use crate::plugin::Plugin;
use crate::proto;
use crate::proto::volume_content_source::{SnapshotSource, Type};

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
    let id = match plugin.volume(&request.volume_id).await {
        Ok((id, _)) => id,
        Err(Error::NotFound { .. }) => return Ok(proto::DeleteVolumeResponse {}),
        Err(error) => return Err(error),
    };
    let asked = v1::DeleteVolumeRequest { name: id.name, pool: id.pool, force: false };
    plugin.daemon.delete_volume(asked).await?;
    // A clone that was given up may have left something behind: it goes with what it was of. The
    // volume is gone already, whatever becomes of this.
    if let Err(error) = sweep(&plugin).await {
        tracing::debug!(%error, "what clones have left was not looked for");
    }
    Ok(proto::DeleteVolumeResponse {})
}

/// Removes what was left by clones that were cut and never repeated, as soon as the daemon answers.
pub async fn sweep_once(plugin: Arc<Plugin>) {
    while let Err(error) = sweep(&plugin).await {
        tracing::debug!(%error, "what clones have left was not looked for yet");
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
        let asked = v1::DeleteVolumeRequest { name, pool, force: false };
        plugin.daemon.delete_volume(asked).await?;
    }
    Ok(())
}

/// All volumes and snapshots of the driver, in all pools of its classes.
pub(crate) async fn ours(plugin: &Plugin) -> Result<Vec<(v1::Volume, Kind)>, Error> {
    let pools = plugin.pools().await?;
    let asked = v1::ListVolumesRequest { pool: String::new(), brief: true };
    let all = plugin.daemon.list_volumes(asked).await?.volumes;
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
    // What is wrong with the page is told before the daemon is asked.
    let is_id = |token: &str| plugin.settings.names.parse_volume(token).is_some();
    page::<()>(Vec::new(), request.max_entries, &request.starting_token, is_id)?;
    let volumes = ours(&plugin).await?;
    let volumes = volumes.into_iter().filter(|(_, kind)| *kind == Kind::Volume);
    let entries = volumes.map(|(volume, _)| {
        let id = VolumeId { pool: volume.pool.clone(), name: volume.name.clone() }.to_string();
        let volume = Some(to_wire(&plugin, &id, &volume));
        (id, proto::list_volumes_response::Entry { volume, status: None })
    });
    let entries = entries.collect();
    let (entries, next_token) = page(entries, request.max_entries, &request.starting_token, is_id)?;
    Ok(proto::ListVolumesResponse { entries, next_token })
}

pub(super) async fn get(
    plugin: Arc<Plugin>,
    request: proto::ControllerGetVolumeRequest,
) -> Result<proto::ControllerGetVolumeResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    let (id, volume) = plugin.volume(&request.volume_id).await?;
    Ok(proto::ControllerGetVolumeResponse {
        volume: Some(to_wire(&plugin, &id.to_string(), &volume)),
        status: Some(proto::controller_get_volume_response::VolumeStatus::default()),
    })
}

/// A volume as it is told of later: its size, and what it was made from as long as that is there.
/// The context is what its creation answered, and is not kept.
fn to_wire(plugin: &Plugin, id: &str, volume: &v1::Volume) -> proto::Volume {
    let is_snapshot = plugin.settings.names.kind(&volume.origin) == Kind::Snapshot;
    let content_source = is_snapshot.then(|| {
        let snapshot = SnapshotId { pool: volume.pool.clone(), name: volume.origin.clone() };
        let snapshot = SnapshotSource { snapshot_id: snapshot.to_string() };
        proto::VolumeContentSource { r#type: Some(Type::Snapshot(snapshot)) }
    });
    proto::Volume {
        capacity_bytes: volume.size_bytes,
        volume_id: id.to_owned(),
        volume_context: std::collections::HashMap::new(),
        content_source,
        accessible_topology: vec![plugin.settings.place.to_wire()],
    }
}

pub(super) async fn validate(
    plugin: Arc<Plugin>,
    request: proto::ValidateVolumeCapabilitiesRequest,
) -> Result<proto::ValidateVolumeCapabilitiesResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    limits::map("volume_context", &request.volume_context)?;
    limits::map("secrets", &request.secrets)?;
    let capabilities = Capability::parse_all("volume_capabilities", &request.volume_capabilities);
    let unsupported = match capabilities {
        Ok(_) => None,
        Err(Refusal::Malformed(error)) => return Err(error),
        Err(Refusal::Unsupported(error)) => Some(error),
    };
    plugin.volume(&request.volume_id).await?;
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
    plugin.settings.config.class(&keys.device_class(), class.device_class.as_deref())?;
    keys.mutable("mutable_parameters", &request.mutable_parameters)?;
    Ok(())
}
