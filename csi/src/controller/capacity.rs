//! GetCapacity: the capacity of a class that is left on this node.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_csi_base::bytes::Bytes;

use crate::capability::{Capability, FileSystem, Refusal};
use crate::error::Error;
use crate::limits;
use crate::parameters::ClassParameters;
use crate::plugin::Plugin;
use crate::proto;
use crate::room::{self, Capacity};
use crate::sizes;

use super::cells;
use super::create::class_of;

/// The capacity of a class that cannot be created here.
const NONE: Capacity = Capacity { available: Bytes::ZERO, maximum: Bytes::ZERO };

/// Timeout of the daemon's answer during a scrape. Prometheus' default scrape timeout is ten
/// seconds.
const DAEMON_TIME: Duration = Duration::from_secs(3);

/// Updates the metrics of capacities. Without an answer of the daemon they are absent, since older
/// figures may be wrong.
pub async fn refresh_metrics(plugin: Arc<Plugin>) {
    let figures = tokio::time::timeout(DAEMON_TIME, of_classes(&plugin)).await;
    plugin.metrics.capacities(&figures.ok().and_then(Result::ok).unwrap_or_default());
}

async fn of_classes(plugin: &Plugin) -> Result<Vec<(String, i64)>, Error> {
    let pools = plugin.pools().await?;
    let mut figures = Vec::new();
    for class in &plugin.settings.config.classes {
        let capacity = room::capacity_of_all(plugin, &pools, class).await?;
        figures.push((class.name.clone(), capacity.available.get()));
    }
    Ok(figures)
}

pub(super) async fn get(
    plugin: Arc<Plugin>,
    request: proto::GetCapacityRequest,
) -> Result<proto::GetCapacityResponse, Error> {
    let settings = &plugin.settings;
    let class = settings.keys.class("parameters", &request.parameters)?;
    let device_class = &class_of(&plugin, &class)?;
    let plan = class.pmem.of_class("parameters.", device_class)?;
    let (capabilities, is_possible) = match request.volume_capabilities.as_slice() {
        [] => (Vec::new(), true),
        list => match Capability::parse_all_for(class.reach(), "volume_capabilities", list) {
            Ok(capabilities) => (capabilities, true),
            Err(Refusal::Unsupported(_)) => (Vec::new(), false),
            Err(Refusal::Malformed(error)) => return Err(error),
        },
    };
    let is_here = is_here(&plugin, &class, request.accessible_topology.as_ref())?;
    let file_system = |one: &Capability| {
        let given = one.file_system().or(class.file_system);
        (!one.is_block()).then(|| given.unwrap_or(FileSystem::Ext4))
    };
    let can_be = |one: &Capability| {
        plan.check("", one, file_system(one)).is_ok() && class.check_use("", one).is_ok()
    };
    let is_possible = is_possible && capabilities.iter().all(can_be);
    class.check_encryption(&plan)?;
    let header = if class.encrypted { sizes::LUKS_HEADER } else { Bytes::ZERO };
    let smallest = |pool: &v1::Pool| {
        let least = |file_system: Option<FileSystem>| {
            let of_use = settings.config.minimum.of(file_system);
            plan.minimum(pool, of_use, file_system)
        };
        // A request without capabilities gets the smallest minimum.
        capabilities.iter().map(|one| least(file_system(one))).max().unwrap_or_else(|| least(None))
    };
    if let Some(group) = &class.volume_group {
        let capacity = match is_here && is_possible {
            true => cells::capacity(&plugin, group, header).await?,
            false => NONE,
        };
        return Ok(answer(&capacity, smallest(&v1::Pool::default())));
    }
    let pools = plugin.pools().await?;
    let serving = || pools.serving(device_class).filter(|_| is_here && is_possible);
    let of_pool = |pool: &v1::Pool| {
        let mut granule = plan.granule(pool, room::granule(pool, device_class));
        if class.encrypted {
            granule = granule.max(sizes::LUKS_GRANULE);
        }
        smallest(pool).round_up(granule).unwrap_or(Bytes::MAX)
    };
    let minimum = serving().map(of_pool).min();
    let capacity = match minimum {
        Some(_) => room::capacity_of_all(&plugin, &pools, device_class).await?,
        None => NONE,
    };
    let minimum = minimum.unwrap_or_else(|| smallest(&v1::Pool::default()));
    let capacity = Capacity {
        available: capacity.available.saturating_sub(header),
        maximum: capacity.maximum.saturating_sub(header),
    };
    Ok(answer(&capacity, minimum))
}

fn answer(capacity: &Capacity, minimum: Bytes) -> proto::GetCapacityResponse {
    proto::GetCapacityResponse {
        available_capacity: capacity.available.get(),
        maximum_volume_size: Some(capacity.maximum.get()),
        minimum_volume_size: Some(minimum.get()),
    }
}

/// Whether volumes of a class can be reached in a topology: on this node, or on nodes that have the
/// volume group.
fn is_here(
    plugin: &Plugin,
    class: &ClassParameters,
    topology: Option<&proto::Topology>,
) -> Result<bool, Error> {
    let Some(topology) = topology else { return Ok(true) };
    limits::map("accessible_topology.segments", &topology.segments)?;
    let settings = &plugin.settings;
    Ok(match &class.volume_group {
        None => settings.place.is_in(topology),
        Some(group) => settings.place.is_in_group(topology, &settings.cells.key(group)),
    })
}
