//! GetCapacity: what can still be made of a class, here.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::Bytes;
use crate::capability::{Capability, FileSystem, Refusal};
use crate::error::Error;
use crate::limits;
use crate::plugin::Plugin;
use crate::proto;
use crate::provision::{self, Capacity};

/// What can't be made has no room.
const NONE: Capacity = Capacity { available: Bytes::ZERO, maximum: Bytes::ZERO };

/// How long the daemon may take while a scraper waits: it waits ten seconds, unless it is told
/// otherwise.
const TELLING_TIME: Duration = Duration::from_secs(3);

/// Brings the metrics of capacities up to date. Without an answer of the daemon there are none:
/// what was so before would be a guess.
pub async fn tell(plugin: Arc<Plugin>) {
    let figures = tokio::time::timeout(TELLING_TIME, of_classes(&plugin)).await;
    plugin.metrics.capacities(&figures.ok().and_then(Result::ok).unwrap_or_default());
}

async fn of_classes(plugin: &Plugin) -> Result<Vec<(String, i64)>, Error> {
    let pools = plugin.pools().await?;
    let mut figures = Vec::new();
    for class in &plugin.settings.config.classes {
        let capacity = match pools.serving(class) {
            Some(pool) => provision::capacity(plugin, pool, class).await?,
            None => NONE,
        };
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
    let device_class = class.device_class.as_deref();
    let device_class = settings.config.class(&settings.keys.device_class(), device_class)?;
    let (capabilities, is_possible) = match request.volume_capabilities.as_slice() {
        [] => (Vec::new(), true),
        list => match Capability::parse_all("volume_capabilities", list) {
            Ok(capabilities) => (capabilities, true),
            Err(Refusal::Unsupported(_)) => (Vec::new(), false),
            Err(Refusal::Malformed(error)) => return Err(error),
        },
    };
    let is_here = match &request.accessible_topology {
        None => true,
        Some(topology) => {
            limits::map("accessible_topology.segments", &topology.segments)?;
            settings.place.is_in(topology)
        }
    };
    let file_system = |one: &Capability| {
        let given = one.file_system().or(class.file_system);
        (!one.is_block()).then(|| given.unwrap_or(FileSystem::Ext4))
    };
    // Who says nothing gets the smallest of all.
    let smallest = settings.config.minimum.of(None);
    let minimum = capabilities.iter().map(|one| settings.config.minimum.of(file_system(one))).max();
    let minimum = minimum.unwrap_or(smallest);
    let pools = plugin.pools().await?;
    let (capacity, minimum) = match pools.serving(device_class) {
        Some(pool) if is_here && is_possible => {
            let minimum = minimum.round_up(provision::granule(pool, device_class));
            let capacity = provision::capacity(&plugin, pool, device_class).await?;
            (capacity, minimum.unwrap_or(Bytes::MAX))
        }
        _ => (NONE, minimum),
    };
    Ok(proto::GetCapacityResponse {
        available_capacity: capacity.available.get(),
        maximum_volume_size: Some(capacity.maximum.get()),
        minimum_volume_size: Some(minimum.get()),
    })
}
