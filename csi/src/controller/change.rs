//! ControllerExpandVolume and ControllerModifyVolume.

use std::sync::Arc;

use crate::capability::{Capability, Reach};
use crate::cells::CellId;
use crate::error::Error;
use crate::limits;
use crate::plugin::Plugin;
use crate::proto;
use crate::provision;
use crate::sizes::Range;

use super::cells;

pub(super) async fn expand(
    plugin: Arc<Plugin>,
    request: proto::ControllerExpandVolumeRequest,
) -> Result<proto::ControllerExpandVolumeResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    limits::map("secrets", &request.secrets)?;
    let range = Range::parse("capacity_range", request.capacity_range.as_ref())?;
    if range.is_empty() {
        return Err(Error::missing("capacity_range"));
    }
    let _lock = plugin.locks.take(&request.volume_id)?;
    if let Some(id) = plugin.settings.cells.parse(&request.volume_id) {
        return expand_in_cell(&plugin, &id, &request, &range).await;
    }
    let (_, volume) = plugin.volume(&request.volume_id).await?;
    // Which of the modes it is does not matter here, and older resizers send none.
    let capability = request.volume_capability.as_ref();
    let capability = capability.map(|one| Capability::parse("volume_capability", Some(one)));
    let is_block = capability.transpose()?.is_some_and(|one| one.is_block());
    let volume = provision::expand(&plugin, volume, &range).await?;
    Ok(proto::ControllerExpandVolumeResponse {
        capacity_bytes: plugin.capacity(&volume).get(),
        // Neither a file system nor a mapping grows by itself.
        node_expansion_required: !is_block || !plugin.header(&volume).is_zero(),
    })
}

/// Where another node uses the volume, NodeExpandVolume makes it larger there.
async fn expand_in_cell(
    plugin: &Plugin,
    id: &CellId,
    request: &proto::ControllerExpandVolumeRequest,
    range: &Range,
) -> Result<proto::ControllerExpandVolumeResponse, Error> {
    let wire = request.volume_capability.as_ref();
    let parse = |one| Capability::parse_for(Reach::Group, "volume_capability", Some(one));
    let is_block = wire.map(parse).transpose()?.is_some_and(|one| one.is_block());
    Ok(match cells::expand(plugin, id, range).await? {
        Some(volume) => proto::ControllerExpandVolumeResponse {
            capacity_bytes: plugin.capacity(&volume).get(),
            node_expansion_required: !is_block || !plugin.header(&volume).is_zero(),
        },
        None => proto::ControllerExpandVolumeResponse {
            capacity_bytes: range.required.get(),
            node_expansion_required: true,
        },
    })
}

pub(super) async fn modify(
    plugin: Arc<Plugin>,
    request: proto::ControllerModifyVolumeRequest,
) -> Result<proto::ControllerModifyVolumeResponse, Error> {
    limits::required("volume_id", &request.volume_id)?;
    limits::map("secrets", &request.secrets)?;
    if request.mutable_parameters.is_empty() {
        return Err(Error::missing("mutable_parameters"));
    }
    limits::map("mutable_parameters", &request.mutable_parameters)?;
    let _lock = plugin.locks.take(&request.volume_id)?;
    let keys = &plugin.settings.keys;
    let read = || keys.mutable("mutable_parameters", &request.mutable_parameters);
    let (id, mutable) = match plugin.settings.cells.parse(&request.volume_id) {
        Some(id) => {
            let mutable = read()?;
            (cells::prepare_change(&plugin, keys, &id, &mutable).await?, mutable)
        }
        None => {
            let (id, _) = plugin.volume(&request.volume_id).await?;
            (id, read()?)
        }
    };
    plugin.daemon.configure_volume(mutable.request(&id.pool, &id.name)).await?;
    Ok(proto::ControllerModifyVolumeResponse {})
}
