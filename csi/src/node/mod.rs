//! The node service: makes volumes usable on this host.
//!
//! `stage`, `publish`, `ephemeral` and `look` are made of the steps of `world`, and are completed
//! by their repeat wherever they end. Their state is in `records`; the mount table (`mountinfo`)
//! and the daemon take precedence over it.

pub mod condition;
pub mod content;
pub mod ephemeral;
pub mod flags;
pub mod host;
pub mod judge;
pub mod kata;
pub mod look;
pub mod looks;
pub mod machine;
pub mod memory;
pub mod modes;
pub mod mountinfo;
pub mod paths;
pub mod publish;
pub mod real;
pub mod records;
pub mod request;
pub mod stage;
pub mod steps;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use tonic::{Request, Response, Status};

use crate::config::Config;
use crate::error::Error;
use crate::health::split::{self, Side};
use crate::health::{Cause, condition as condition_of, unknown};
use crate::plugin::{Call, Plugin};
use crate::proto;
use crate::proto::node_server::Node;
use crate::proto::node_service_capability::{self, Rpc, rpc};
use crate::proto::volume_usage::Unit;
use crate::sizes::Range;
use look::{Shown, Stats};
use looks::{Looks, Seen};
use modes::Target;
use real::Real;
use records::{Place, Record};
use world::{Kind, Result, Usage, Volumes as _, World};

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
    world: Arc<Real>,
    looks: Looks,
}

/// The capabilities of the node. The last two can be disabled.
const CAPABILITIES: [rpc::Type; 5] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeCondition,
];

/// Timeout of a check of a device and its file system. They answer out of memory, but a machine
/// that is short of time stands still for seconds.
const LOOK_TIME: Duration = Duration::from_secs(10);

impl Service {
    /// For this plugin.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn open(plugin: Arc<Plugin>) -> Result<Self, Error> {
        let world = Arc::new(Real::open(Arc::clone(&plugin))?);
        let service = Self { plugin, world, looks: Looks::default() };
        service.review();
        Ok(service)
    }

    /// Compares the records with the mount table, and ends inline volumes whose pods are gone.
    /// Beside the calls: the daemon may be away, and those that come find out by themselves.
    fn review(&self) {
        let service = self.clone();
        tokio::spawn(async move {
            let records = service.world.records();
            let inline = records.iter().filter(|record| record.ephemeral);
            let inline: Vec<String> = inline.map(|record| record.volume.clone()).collect();
            let compared = service.blocking(move |world| compare(world, &records)).await;
            for result in std::iter::once(compared).chain(service.sweep(inline).await) {
                if let Err(error) = result {
                    tracing::warn!(%error, "reading the records of volumes");
                }
            }
        });
    }

    /// Removes inline volumes that no request will name any more.
    async fn sweep(&self, volumes: Vec<String>) -> Vec<Result<()>> {
        let mut results = Vec::new();
        for volume in volumes {
            // A call that is quicker knows better.
            let Ok(lock) = self.plugin.locks.take(&volume) else { continue };
            let kubelet = self.plugin.settings.kubelet_dir.clone();
            let work = move |world: &World<'_>| {
                let _lock = lock;
                // Without kubelet's folder nothing can be said about pods.
                match (world.machine.kind(&kubelet.join("pods"))?, world.volumes.record(&volume)) {
                    (Some(Kind::Folder), Some(record)) => {
                        let place = &record.place;
                        let act = |world: &World<'_>| ephemeral::sweep(world, &record);
                        kata::through(world, &volume, place, None, act)
                    }
                    _ => Ok(()),
                }
            };
            results.push(self.blocking(work).await);
        }
        results
    }

    /// Does steps where they may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&World<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let world = Arc::clone(&self.world);
        let ended = tokio::task::spawn_blocking(move || work(&world.as_world())).await;
        ended.map_err(|error| Error::unexpected("a call ended in the middle:", error))?
    }

    /// Where the daemon has a volume.
    fn place(&self, id: &str) -> Result<Place> {
        request::place(&self.plugin, id).ok_or_else(|| Error::not_found("volume", id))
    }

    async fn stage(&self, asked: proto::NodeStageVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("staging_target_path", &asked.staging_target_path)?;
        request::maps(&asked.publish_context, &asked.secrets)?;
        let capability = request::capability(asked.volume_capability.as_ref())?;
        let spec = request::file_system_spec(&self.plugin, &capability, &asked.volume_context)?;
        let image = request::kata(&self.plugin, &asked.volume_context);
        if image.is_some() && spec.is_none() {
            let allowed = "mount: the volume holds an image for virtual machines";
            return Err(Error::invalid("volume_capability.access_type", "block", allowed));
        }
        let place = self.place(&asked.volume_id)?;
        let lock = self.plugin.locks.take(&asked.volume_id)?;
        let work = move |world: &World<'_>| {
            let _lock = lock;
            let request = stage::Request {
                volume: &asked.volume_id,
                place: &place,
                path: &path,
                mode: capability.mode,
                spec: spec.as_ref(),
            };
            kata::through(world, request.volume, &place, image, |world| {
                stage::stage(world, &request)
            })
        };
        self.blocking(work).await
    }

    async fn unstage(&self, asked: proto::NodeUnstageVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("staging_target_path", &asked.staging_target_path)?;
        // An id that cannot exist is not staged.
        let Some(place) = request::place(&self.plugin, &asked.volume_id) else { return Ok(()) };
        let lock = self.plugin.locks.take(&asked.volume_id)?;
        let work = move |world: &World<'_>| {
            let _lock = lock;
            let id = &asked.volume_id;
            let act = |world: &World<'_>| stage::unstage(world, id, &place, &path);
            kata::through(world, id, &place, None, act)
        };
        self.blocking(work).await
    }

    async fn publish(&self, asked: proto::NodePublishVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("target_path", &asked.target_path)?;
        request::maps(&asked.publish_context, &asked.secrets)?;
        let capability = request::capability(asked.volume_capability.as_ref())?;
        let inline = request::is_ephemeral(&asked.volume_context);
        let spec = if inline {
            None
        } else {
            request::file_system_spec(&self.plugin, &capability, &asked.volume_context)?
        };
        let asks_for_reading = spec.as_ref().is_some_and(|spec| spec.options.read_only());
        let target = Target {
            path,
            mode: capability.mode,
            read_only: asked.readonly || asks_for_reading,
            access: request::access(&capability),
        };
        let lock = self.plugin.locks.take(&asked.volume_id)?;
        if inline {
            let (id, context) = (asked.volume_id, asked.volume_context);
            let (place, wanted, spec) =
                request::inline(&self.plugin, &id, &capability, &context).await?;
            let work = move |world: &World<'_>| {
                let _lock = lock;
                let (volume, place) = (id.as_str(), &place);
                let (target, spec, wanted) = (&target, &spec, &wanted);
                let request = ephemeral::Request { volume, place, target, spec, wanted };
                let partition = wanted.pmem.kata_partition;
                let image = kata::ImageSpec { partition, app_direct: true };
                let image = wanted.pmem.kata.then_some(image);
                kata::through(world, volume, place, image, |world| {
                    ephemeral::publish(world, &request)
                })
            };
            return self.blocking(work).await;
        }
        let place = self.place(&asked.volume_id)?;
        let staging = self.staging(&asked, &place).await?;
        let strict = self.plugin.settings.strict_single_node_writer;
        let work = move |world: &World<'_>| {
            let _lock = lock;
            let (volume, place) = (asked.volume_id.as_str(), &place);
            let request =
                publish::Request { volume, place, staging: &staging, target: &target, strict };
            kata::through(world, volume, place, None, |world| publish::publish(world, &request))
        };
        self.blocking(work).await
    }

    /// The staging path of a publication, which only those that are staged have.
    async fn staging(
        &self,
        asked: &proto::NodePublishVolumeRequest,
        place: &Place,
    ) -> Result<PathBuf> {
        if !asked.staging_target_path.is_empty() {
            return self.path("staging_target_path", &asked.staging_target_path);
        }
        // A missing volume is reported first.
        let (id, place) = (asked.volume_id.clone(), place.clone());
        self.blocking(move |world| steps::existing(world, &id, &place).map(drop)).await?;
        let what = format!("volume {}", blockd_csi_base::error::shown(&asked.volume_id));
        Err(Error::in_use(what, "is published from where it is staged: no staging_target_path"))
    }

    async fn unpublish(&self, asked: proto::NodeUnpublishVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("target_path", &asked.target_path)?;
        let id = asked.volume_id;
        let place = request::place(&self.plugin, &id);
        let lock = self.plugin.locks.take(&id)?;
        let pools = match (&place, self.world.record(&id)) {
            (Some(_), _) | (_, Some(_)) => Vec::new(),
            // Perhaps an inline volume that nothing is remembered of.
            (None, None) => self.plugin.pools().await?.names().map(str::to_owned).collect(),
        };
        let name = self.plugin.settings.names.ephemeral(&id);
        let work = move |world: &World<'_>| {
            let _lock = lock;
            if let Some(place) =
                place.or_else(|| world.volumes.record(&id).map(|record| record.place))
            {
                let act = |world: &World<'_>| publish::unpublish(world, &id, &place, &path);
                return kata::through(world, &id, &place, None, act);
            }
            let place = |pool: &String| Place { pool: pool.clone(), name: name.clone() };
            for place in pools.iter().map(place) {
                if world.volumes.get(&place)?.is_some() {
                    let act = |world: &World<'_>| {
                        adopt(world, &id, &place, &path)?;
                        publish::unpublish(world, &id, &place, &path)
                    };
                    return kata::through(world, &id, &place, None, act);
                }
            }
            let place = Place { pool: String::new(), name };
            publish::unpublish(world, &id, &place, &path)
        };
        self.blocking(work).await
    }

    async fn stats(
        &self,
        asked: proto::NodeGetVolumeStatsRequest,
        limit: Duration,
    ) -> Result<proto::NodeGetVolumeStatsResponse> {
        request::id(&asked.volume_id)?;
        request::plain_paths(&asked.volume_path, &asked.staging_target_path)?;
        let id = asked.volume_id.clone();
        let place = self.place_of_any(&id)?;
        let health = self.plugin.settings.config.health;
        let volume = match self.world.volume_now(&place).await {
            Err(error) if health && error.is_of_media() => {
                return self.unserved(asked, error).await;
            }
            volume => volume?,
        };
        // Existence comes first; a path that is none of ours was never one of this volume.
        let path = match self.path("volume_path", &asked.volume_path) {
            Err(_) if volume.is_none() => return Err(Error::not_found("volume", &id)),
            path => absent(path, &asked.volume_path)?,
        };
        let daemon_causes = match &volume {
            Some(_) if health => self.daemon_causes(&place).await?,
            _ => Vec::new(),
        };
        let (world, volume_id) = (Arc::clone(&self.world), id.clone());
        let work = move || {
            kata::through(&world.as_world(), &volume_id, &place, None, |world| {
                let volume =
                    volume.map(|volume| world.volumes.inside(&place, volume)).transpose()?;
                look::stats(world, &volume_id, &place, &path, volume.as_ref())
            })
        };
        let mut stats = match self.looks.look(&id, limit, work).await? {
            Seen::Done(stats) => stats?,
            Seen::Silent(time) if health => Stats::unseen(judge::silent(time.as_secs())),
            Seen::Crowded if health => Stats::unseen(judge::crowded()),
            Seen::Silent(_) | Seen::Crowded => {
                return Err(Error::Late { milliseconds: limit.as_millis() });
            }
        };
        stats.causes.extend(daemon_causes);
        if health {
            return Ok(answer(stats, true));
        }
        // With conditions disabled the call can only report that nothing is mounted.
        stats.usage.ok_or_else(|| Error::not_found("path", &asked.volume_path))?;
        Ok(answer(stats, false))
    }

    /// A volume in a failed pool, at a path that is known to belong to it: it is not checked, and
    /// the controller reports the failed pool.
    async fn unserved(
        &self,
        asked: proto::NodeGetVolumeStatsRequest,
        error: Error,
    ) -> Result<proto::NodeGetVolumeStatsResponse> {
        let path = self.path("volume_path", &asked.volume_path);
        let path = absent(path, &asked.volume_path)?;
        let record = self.blocking(move |world| Ok(world.volumes.record(&asked.volume_id))).await?;
        if judge::known(record.as_ref(), &path).is_none() {
            return Err(error);
        }
        let volume_condition = Some(unknown(&format!("the daemon does not serve it: {error}")));
        Ok(proto::NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition })
    }

    /// Returns the daemon's causes for a volume that the node reports.
    async fn daemon_causes(&self, place: &Place) -> Result<Vec<Cause>> {
        let request = v1::HealthRequest {
            pool: place.pool.clone(),
            volume: place.name.clone(),
            abnormal_only: true,
        };
        let health = match self.plugin.daemon.find_health(request).await {
            Ok(health) => health.unwrap_or_default(),
            // It was deleted just now: the next call reports that.
            Err(error) if error.is_absent() => v1::HealthResponse::default(),
            Err(error) => return Err(error),
        };
        let causes = health.volumes.iter().flat_map(|volume| &volume.causes);
        let causes: Vec<v1::Cause> = causes.cloned().collect();
        Ok(split::causes_for(Side::Node, &causes))
    }

    async fn expand(
        &self,
        asked: proto::NodeExpandVolumeRequest,
    ) -> Result<proto::NodeExpandVolumeResponse> {
        request::id(&asked.volume_id)?;
        request::plain_paths(&asked.volume_path, &asked.staging_target_path)?;
        crate::limits::map("secrets", &asked.secrets)?;
        let range = Range::parse("capacity_range", asked.capacity_range.as_ref())?;
        if asked.volume_capability.is_some() {
            let wire = asked.volume_capability.as_ref();
            crate::capability::Capability::parse("volume_capability", wire)?;
        }
        let id = asked.volume_id.clone();
        let place = self.place_of_any(&id)?;
        let lock = self.plugin.locks.take(&id)?;
        let path = self.path("volume_path", &asked.volume_path);
        let work = move |world: &World<'_>| {
            let _lock = lock;
            steps::existing(world, &id, &place)?;
            let path = absent(path, &asked.volume_path)?;
            if world.volumes.record(&id).is_some_and(|record| record.kata) {
                return Err(kata::refuse_growth(&id));
            }
            look::expand(world, (&id, &place), &path, &range)
        };
        let capacity_bytes = self.blocking(work).await?;
        Ok(proto::NodeExpandVolumeResponse { capacity_bytes })
    }

    fn path(&self, field: &str, path: &str) -> Result<PathBuf> {
        request::path(&self.plugin, field, path)
    }

    /// Where the daemon has a volume, inline ones too.
    fn place_of_any(&self, id: &str) -> Result<Place> {
        let record = self.world.record(id);
        record.map_or_else(|| self.place(id), |record| Ok(record.place))
    }
}

/// A path that is refused is one that the volume was never at.
fn absent(path: Result<PathBuf>, asked: &str) -> Result<PathBuf> {
    path.map_err(|error| match error {
        Error::Invalid(_) => Error::not_found("path", asked),
        other => other,
    })
}

/// Writes down an inline volume that is there and that nothing is remembered of.
fn adopt(world: &World<'_>, id: &str, place: &Place, path: &Path) -> Result<()> {
    let mode = crate::capability::Mode::Writer;
    let target = ephemeral::target(path.to_path_buf(), mode, false);
    let mut record = Record::new(id, place);
    (record.ephemeral, record.complete) = (true, true);
    record.targets.push(target);
    world.volumes.keep(&record)
}

/// Logs recorded mounts that no longer exist. They are mounted again on request.
fn compare(world: &World<'_>, records: &[Record]) -> Result<()> {
    let table = world.machine.mounts()?;
    for record in records {
        let staged = record.stage.iter().filter(|stage| stage.access == modes::Access::Mount);
        let paths = staged.map(|stage| &stage.path);
        for path in paths.chain(record.targets.iter().map(|target| &target.path)) {
            if table.at(path).is_none() {
                let (volume, path) = (&record.volume, path.display());
                tracing::warn!(volume, %path, "was mounted before the start and is not");
            }
        }
    }
    Ok(())
}

fn answer(stats: Stats, health: bool) -> proto::NodeGetVolumeStatsResponse {
    let of = |usage: Usage, unit: Unit| proto::VolumeUsage {
        available: usage.available,
        total: usage.total,
        used: usage.used,
        unit: unit.into(),
    };
    let usage = match stats.usage {
        None => Vec::new(),
        Some(Shown::Mount(bytes, inodes)) => vec![of(bytes, Unit::Bytes), of(inodes, Unit::Inodes)],
        Some(Shown::Block(bytes)) => vec![of(bytes, Unit::Bytes)],
    };
    let volume_condition = health.then(|| condition_of(stats.causes));
    proto::NodeGetVolumeStatsResponse { usage, volume_condition }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        let call = Call::new("NodeStageVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.stage(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        let call = Call::new("NodeUnstageVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.unstage(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let call = Call::new("NodePublishVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.publish(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let call = Call::new("NodeUnpublishVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        let work = async move { service.unpublish(asked).await };
        let done = self.plugin.run(call, work).await?;
        Ok(done.map(|()| proto::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        let call = Call::new("NodeGetVolumeStats", &request, &request.get_ref().volume_id).quiet();
        let (service, asked) = (self.clone(), request.into_inner());
        let limit = call.time_for_part(LOOK_TIME);
        self.plugin.run(call, async move { service.stats(asked, limit).await }).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<proto::NodeExpandVolumeRequest>,
    ) -> Result<Response<proto::NodeExpandVolumeResponse>, Status> {
        let call = Call::new("NodeExpandVolume", &request, &request.get_ref().volume_id);
        let (service, asked) = (self.clone(), request.into_inner());
        self.plugin.run(call, async move { service.expand(asked).await }).await
    }

    async fn node_get_capabilities(
        &self,
        request: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        let call = Call::new("NodeGetCapabilities", &request, "").quiet();
        let of = |kind: rpc::Type| proto::NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let Config { health, multi_writer, .. } = self.plugin.settings.config;
        let here = |kind: &rpc::Type| match kind {
            rpc::Type::VolumeCondition => health,
            rpc::Type::SingleNodeMultiWriter => multi_writer,
            _ => true,
        };
        let capabilities = CAPABILITIES.into_iter().filter(here).map(of).collect();
        let answer = proto::NodeGetCapabilitiesResponse { capabilities };
        self.plugin.run(call, async { Ok(answer) }).await
    }

    async fn node_get_info(
        &self,
        request: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        let call = Call::new("NodeGetInfo", &request, "").quiet();
        let place = &self.plugin.settings.place;
        let answer = proto::NodeGetInfoResponse {
            node_id: place.node.clone(),
            max_volumes_per_node: machine::most_devices(),
            accessible_topology: Some(place.to_wire()),
        };
        self.plugin.run(call, async { Ok(answer) }).await
    }
}
