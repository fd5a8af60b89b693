//! The node service: makes volumes usable on this host.
//!
//! `stage`, `publish`, `ephemeral` and `look` are made of the steps of `world`, and are completed
//! by their repeat wherever they end. Their state is in `records`; the mount table (`mountinfo`)
//! and the daemon take precedence over it.

mod cells;
pub mod content;
pub mod encryption;
pub mod ephemeral;
pub mod flags;
pub mod host;
pub mod judge;
pub mod kata;
pub mod look;
pub mod looks;
pub mod modes;
pub mod mountinfo;
pub mod paths;
pub mod publish;
pub mod real;
pub mod records;
pub mod request;
mod rpc;
pub mod stage;
mod stats;
pub mod steps;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_api::v1::FrontEnd;

use self::encryption::Keys;
use self::looks::Looks;
use self::modes::Target;
use self::real::Real;
use self::records::{Place, Record};
use self::world::{Kind, Result, Volumes as _, World};
use crate::capability::Reach;
use crate::cells::CellId;
use crate::error::Error;
use crate::plugin::Plugin;
use crate::proto;
use crate::sizes::Range;

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
    world: Arc<Real>,
    looks: Looks,
}

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
                        through(world, &volume, place, Layers::default(), act)
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

    async fn stage(&self, mut asked: proto::NodeStageVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("staging_target_path", &asked.staging_target_path)?;
        request::maps(&asked.publish_context, &asked.secrets)?;
        let cell = self.plugin.settings.cells.parse(&asked.volume_id);
        let capability = request::capability(reach(&cell), asked.volume_capability.as_ref())?;
        let spec = request::file_system_spec(&self.plugin, &capability, &asked.volume_context)?;
        let image = request::kata(&self.plugin, &asked.volume_context);
        if image.is_some() && spec.is_none() {
            let allowed = "mount: the volume holds an image for virtual machines";
            return Err(Error::invalid("volume_capability.access_type", "block", allowed));
        }
        let is_encrypted = request::is_encrypted(&self.plugin, &asked.volume_context)?;
        let keys = if is_encrypted {
            let keys = Keys::take(&mut asked.secrets)?;
            Some(keys.ok_or_else(|| Error::missing("secrets.key"))?)
        } else {
            None
        };
        let place = self.place(&asked.volume_id)?;
        let lock = self.plugin.locks.take(&asked.volume_id)?;
        if let Some(cell) = cell {
            let front_end = cells::front_end(&self.plugin, &asked.volume_context)?;
            cells::stage(&self.plugin, &cell, &capability, front_end).await?;
            if front_end == FrontEnd::Nbd {
                return Ok(());
            }
        }
        let work = move |world: &World<'_>| {
            let _lock = lock;
            let request = stage::Request {
                volume: &asked.volume_id,
                place: &place,
                path: &path,
                mode: capability.mode,
                spec: spec.as_ref(),
            };
            let opening = encryption::Request { keys: keys.as_ref(), mount: spec.is_some() };
            let layers = Layers { image, is_encrypted, opening };
            through(world, request.volume, &place, layers, |world| stage::stage(world, &request))
        };
        self.blocking(work).await
    }

    async fn unstage(&self, asked: proto::NodeUnstageVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("staging_target_path", &asked.staging_target_path)?;
        // An id that cannot exist is not staged.
        let Some(place) = request::place(&self.plugin, &asked.volume_id) else { return Ok(()) };
        let lock = self.plugin.locks.take(&asked.volume_id)?;
        if let Some(cell) = self.plugin.settings.cells.parse(&asked.volume_id)
            && cells::unstage(&self.plugin, &cell).await?
        {
            return Ok(());
        }
        let work = move |world: &World<'_>| {
            let _lock = lock;
            let id = &asked.volume_id;
            let act = |world: &World<'_>| stage::unstage(world, id, &place, &path);
            through(world, id, &place, Layers::default(), act)
        };
        self.blocking(work).await
    }

    async fn publish(&self, asked: proto::NodePublishVolumeRequest) -> Result<()> {
        request::id(&asked.volume_id)?;
        let path = self.path("target_path", &asked.target_path)?;
        request::maps(&asked.publish_context, &asked.secrets)?;
        let cell = self.plugin.settings.cells.parse(&asked.volume_id);
        let capability = request::capability(reach(&cell), asked.volume_capability.as_ref())?;
        if cell.is_some() {
            let front_end = cells::front_end(&self.plugin, &asked.volume_context)?;
            cells::check_published(&asked.volume_id, front_end)?;
        }
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
                let layers = Layers { image, ..Layers::default() };
                through(world, volume, place, layers, |world| ephemeral::publish(world, &request))
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
            through(world, volume, place, Layers::default(), |world| {
                publish::publish(world, &request)
            })
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
                return through(world, &id, &place, Layers::default(), act);
            }
            let place = |pool: &String| Place { pool: pool.clone(), name: name.clone() };
            for place in pools.iter().map(place) {
                if world.volumes.get(&place)?.is_some() {
                    let act = |world: &World<'_>| {
                        adopt(world, &id, &place, &path)?;
                        publish::unpublish(world, &id, &place, &path)
                    };
                    return through(world, &id, &place, Layers::default(), act);
                }
            }
            let place = Place { pool: String::new(), name };
            publish::unpublish(world, &id, &place, &path)
        };
        self.blocking(work).await
    }

    async fn expand(
        &self,
        mut asked: proto::NodeExpandVolumeRequest,
    ) -> Result<proto::NodeExpandVolumeResponse> {
        request::id(&asked.volume_id)?;
        request::plain_paths(&asked.volume_path, &asked.staging_target_path)?;
        let keys = Keys::take(&mut asked.secrets)?;
        let range = Range::parse("capacity_range", asked.capacity_range.as_ref())?;
        if asked.volume_capability.is_some() {
            let (wire, cell) = (asked.volume_capability.as_ref(), &asked.volume_id);
            let reach = reach(&self.plugin.settings.cells.parse(cell));
            crate::capability::Capability::parse_for(reach, "volume_capability", wire)?;
        }
        let id = asked.volume_id.clone();
        let place = self.place_of_any(&id)?;
        let lock = self.plugin.locks.take(&id)?;
        if let Some(cell) = self.plugin.settings.cells.parse(&id)
            && let Some(capacity_bytes) = cells::expand(&self.plugin, &cell, &range).await?
        {
            return Ok(proto::NodeExpandVolumeResponse { capacity_bytes });
        }
        let path = self.path("volume_path", &asked.volume_path);
        let work = move |world: &World<'_>| {
            let _lock = lock;
            steps::existing(world, &id, &place)?;
            let path = absent(path, &asked.volume_path)?;
            if world.volumes.record(&id).is_some_and(|record| record.kata) {
                return Err(kata::refuse_growth(&id));
            }
            let opening = encryption::Request { keys: keys.as_ref(), mount: false };
            let layers = Layers { opening, ..Layers::default() };
            through(world, &id, &place, layers, |world| {
                look::expand(world, (&id, &place), &path, &range)
            })
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

/// The layers between a device and its workloads, as a request describes them.
#[derive(Clone, Copy, Default)]
struct Layers<'a> {
    image: Option<kata::ImageSpec>,
    is_encrypted: bool,
    opening: encryption::Request<'a>,
}

/// Does something where a volume is as workloads see it.
fn through<T>(
    world: &World<'_>,
    id: &str,
    place: &Place,
    layers: Layers<'_>,
    act: impl FnOnce(&World<'_>) -> Result<T>,
) -> Result<T> {
    let Layers { image, is_encrypted, opening } = layers;
    encryption::through(world, id, place, (is_encrypted, opening), |world| {
        kata::through(world, id, place, image, act)
    })
}

/// Which nodes reach a volume: all of a group where it is in a cell.
const fn reach(cell: &Option<CellId>) -> Reach {
    if cell.is_some() { Reach::Group } else { Reach::Node }
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
