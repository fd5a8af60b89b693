//! ControllerExpandVolume and ControllerModifyVolume.

use std::sync::Arc;

use blockd_api::v1;

use crate::bytes::Bytes;
use crate::capability::Capability;
use crate::config::{Class, Kind};
use crate::error::Error;
use crate::limits;
use crate::plugin::{Plugin, Pools};
use crate::proto;
use crate::provision;
use crate::quantity::Ratio;
use crate::sizes::{Range, Rules};

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
    let (_, volume) = plugin.volume(&request.volume_id).await?;
    // Which of the modes it is does not matter here, and older resizers send none.
    let capability = request.volume_capability.as_ref();
    let capability = capability.map(|one| Capability::parse("volume_capability", Some(one)));
    let is_block = capability.transpose()?.is_some_and(|one| one.is_block());
    let present = Bytes::new(volume.size_bytes).unwrap_or_default();
    let granule = Bytes::constant(i64::from(volume.block_size));
    let size = range.choose(&Rules { default: present, minimum: present, granule })?;
    let volume = if size > present {
        let pools = plugin.pools().await?;
        let class = class_of(&plugin.settings.config.classes, &pools, &volume);
        provision::grow(&plugin, &class, &volume, size).await?
    } else {
        volume
    };
    Ok(proto::ControllerExpandVolumeResponse {
        capacity_bytes: volume.size_bytes,
        // A file system does not grow by itself.
        node_expansion_required: !is_block,
    })
}

/// The class that a volume is of. That is written nowhere: it is one of its pool's and its kind,
/// and where several are, the one that promises most.
fn class_of(classes: &[Class], pools: &Pools, volume: &v1::Volume) -> Class {
    let is_thick = volume.settings.is_some_and(|settings| settings.thick);
    let kind = if is_thick { Kind::Thick } else { Kind::Thin };
    let is_here = |class: &&Class| {
        class.kind == kind && pools.serving(class).is_some_and(|pool| pool.name == volume.pool)
    };
    let most = |most: Class, class: &Class| {
        if class.overprovision_ratio.is_above(most.overprovision_ratio) {
            class.clone()
        } else {
            most
        }
    };
    let mut fitting = classes.iter().filter(is_here);
    let first = fitting.next().cloned().unwrap_or_else(|| Class {
        name: String::new(),
        pool: volume.pool.clone(),
        kind,
        overprovision_ratio: Ratio::ONE,
        is_default: false,
        block_size: 0,
    });
    fitting.fold(first, most)
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
    let (id, _) = plugin.volume(&request.volume_id).await?;
    let keys = &plugin.settings.keys;
    let mutable = keys.mutable("mutable_parameters", &request.mutable_parameters)?;
    plugin.daemon.configure_volume(mutable.request(&id.pool, &id.name)).await?;
    Ok(proto::ControllerModifyVolumeResponse {})
}
