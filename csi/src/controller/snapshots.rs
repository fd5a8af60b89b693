//! Snapshots: create, delete, list, get.

use std::collections::HashMap;
use std::sync::Arc;

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;
use prost_types::Timestamp;

use crate::error::Error;
use crate::ids::{Kind, Names, SnapshotId};
use crate::labels;
use crate::limits;
use crate::parameters::is_of_sidecars;
use crate::plugin::Plugin;
use crate::proto;

use super::cells::refuse_family;
use super::paging::page;
use super::volumes::ours;

pub(super) async fn create(
    plugin: Arc<Plugin>,
    request: proto::CreateSnapshotRequest,
) -> Result<proto::CreateSnapshotResponse, Error> {
    limits::name("name", &request.name)?;
    limits::required("source_volume_id", &request.source_volume_id)?;
    limits::map("secrets", &request.secrets)?;
    check_parameters(&request.parameters)?;
    let _lock = plugin.locks.take_name("snapshot", &request.name)?;
    let absent = || Error::not_found("volume", &request.source_volume_id);
    let names = &plugin.settings.names;
    if let Some(id) = plugin.settings.cells.parse(&request.source_volume_id) {
        return Err(refuse_family(&id, "snapshots"));
    }
    let source = names.parse_volume(&request.source_volume_id);
    // A name is that of one snapshot, whatever its source. The same one is answered again, also
    // when its source is gone.
    let bodies = Names::snapshot_bodies(&request.name);
    for (present, kind) in ours(&plugin).await? {
        let id = SnapshotId { pool: present.pool.clone(), name: present.name.clone() };
        if kind != Kind::Snapshot || !bodies.iter().any(|body| body == id.body()) {
            continue;
        }
        if Some(id.source()) == source {
            let snapshot = Some(to_wire(&plugin, &present));
            return Ok(proto::CreateSnapshotResponse { snapshot });
        }
        let it = ("snapshot", request.name.as_str());
        let asked = &request.source_volume_id;
        return Err(Error::exists(it, "source_volume_id", id.source(), asked));
    }
    let source = source.ok_or_else(absent)?;
    let (_, volume) = plugin.volume(&request.source_volume_id).await?;
    let id = names.snapshot(&source, &request.name);
    let member = v1::SnapshotMember { volume: source.name, name: id.name };
    let labels = labels::of_snapshot(&plugin.settings.keys, &volume.labels);
    let asked = v1::CreateSnapshotsRequest { pool: id.pool, members: vec![member], labels };
    let made = plugin.daemon.create_snapshots(asked).await?.snapshots;
    let made = made.first().ok_or_else(|| {
        Error::unexpected("CreateSnapshots of the daemon", "answered without a snapshot")
    })?;
    Ok(proto::CreateSnapshotResponse { snapshot: Some(to_wire(&plugin, made)) })
}

/// Checks the parameters of a snapshot. The driver has none of its own; those of the sidecars are
/// names of objects.
pub(crate) fn check_parameters(map: &HashMap<String, String>) -> Result<(), Error> {
    limits::map("parameters", map)?;
    match map.keys().find(|key| !is_of_sidecars(key)) {
        Some(key) => Err(Error::invalid("a key of parameters", key, "left out: there are none")),
        None => Ok(()),
    }
}

pub(super) async fn delete(
    plugin: Arc<Plugin>,
    request: proto::DeleteSnapshotRequest,
) -> Result<proto::DeleteSnapshotResponse, Error> {
    limits::required("snapshot_id", &request.snapshot_id)?;
    limits::map("secrets", &request.secrets)?;
    let _lock = plugin.locks.take(&request.snapshot_id)?;
    if let Some((id, _)) = find(&plugin, &request.snapshot_id).await? {
        if let Some(group) = plugin.settings.names.group_of(&id) {
            let allowed = format!("of no group: it goes with {group}");
            return Err(Error::invalid("snapshot_id", id, allowed));
        }
        let asked = v1::DeleteVolumeRequest {
            name: id.name,
            pool: id.pool,
            force: false,
            ..Default::default()
        };
        plugin.daemon.delete_volume(asked).await?;
    }
    Ok(proto::DeleteSnapshotResponse {})
}

pub(super) async fn get(
    plugin: Arc<Plugin>,
    request: proto::GetSnapshotRequest,
) -> Result<proto::GetSnapshotResponse, Error> {
    limits::required("snapshot_id", &request.snapshot_id)?;
    limits::map("secrets", &request.secrets)?;
    let found = find(&plugin, &request.snapshot_id).await?;
    let (_, found) = found.ok_or_else(|| Error::not_found("snapshot", &request.snapshot_id))?;
    let snapshot = to_wire(&plugin, &found);
    Ok(proto::GetSnapshotResponse { snapshot: Some(snapshot) })
}

pub(super) async fn list(
    plugin: Arc<Plugin>,
    request: proto::ListSnapshotsRequest,
) -> Result<proto::ListSnapshotsResponse, Error> {
    limits::string("snapshot_id", &request.snapshot_id)?;
    limits::string("source_volume_id", &request.source_volume_id)?;
    limits::map("secrets", &request.secrets)?;
    let is_id = |token: &str| plugin.settings.names.parse_snapshot(token).is_some();
    page::<()>(Vec::new(), request.max_entries, &request.starting_token, is_id)?;
    let found = if request.snapshot_id.is_empty() {
        let all = ours(&plugin).await?.into_iter();
        all.filter(|(_, kind)| *kind == Kind::Snapshot).map(|(volume, _)| volume).collect()
    } else {
        let found = find(&plugin, &request.snapshot_id).await?;
        found.into_iter().map(|(_, volume)| volume).collect::<Vec<_>>()
    };
    let source = &request.source_volume_id;
    let snapshots = found.iter().map(|one| to_wire(&plugin, one));
    let entries = snapshots
        .filter(|snapshot| source.is_empty() || snapshot.source_volume_id == *source)
        .map(|snapshot| {
            let id = snapshot.snapshot_id.clone();
            (id, proto::list_snapshots_response::Entry { snapshot: Some(snapshot) })
        })
        .collect();
    let (entries, next_token) = page(entries, request.max_entries, &request.starting_token, is_id)?;
    Ok(proto::ListSnapshotsResponse { entries, next_token })
}

/// Returns the snapshot of an id; `None` if it does not exist or is foreign.
pub(crate) async fn find(
    plugin: &Plugin,
    id: &str,
) -> Result<Option<(SnapshotId, v1::Volume)>, Error> {
    let Some(id) = plugin.settings.names.parse_snapshot(id) else { return Ok(None) };
    if !plugin.has_pool(&id.pool).await? {
        return Ok(None);
    }
    let found = plugin.daemon.find_volume(&id.pool, &id.name).await?;
    let found = found.filter(|found| found.kind() == v1::VolumeKind::Snapshot);
    Ok(found.map(|found| (id, found)))
}

/// Converts a snapshot to its CSI message.
pub(crate) fn to_wire(plugin: &Plugin, snapshot: &v1::Volume) -> proto::Snapshot {
    let names = &plugin.settings.names;
    let id = SnapshotId { pool: snapshot.pool.clone(), name: snapshot.name.clone() };
    let size = Bytes::new(snapshot.size_bytes).unwrap_or_default();
    let ms = snapshot.made_unix_ms.max(0);
    let nanos = i32::try_from(ms % 1000).unwrap_or(0) * 1_000_000;
    proto::Snapshot {
        size_bytes: size.saturating_sub(plugin.header(snapshot)).get(),
        snapshot_id: id.to_string(),
        source_volume_id: id.source().to_string(),
        creation_time: Some(Timestamp { seconds: ms / 1000, nanos }),
        ready_to_use: true,
        group_snapshot_id: names.group_of(&id).map(|group| group.to_string()).unwrap_or_default(),
    }
}
