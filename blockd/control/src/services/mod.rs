//! The control service: executes the calls of the control API.
//!
//! The control service sends commands to pool threads and workers, and does nothing of the data
//! path itself. `service` is the edge to gRPC; the code behind it uses the crate's own types.

mod attachments;
mod closing;
mod data_path;
mod devices;
mod diff;
mod direct;
mod errors;
mod events;
mod exports;
mod extend;
mod health;
mod keeper;
mod kinds;
mod making;
mod membership;
mod messages;
mod nodes;
mod places;
mod policy;
mod pools;
mod regions;
mod releases;
mod served;
mod server;
mod service;
mod settings;
mod snapshots;
mod space;
mod state_file;
mod stats;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_direct;
#[cfg(test)]
mod tests_of_snapshots;
mod volumes;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use blockd_engine::pool::PoolHandle;
use blockd_media::Device;
use blockd_media::clock::{Clock, wall_seconds};
use blockd_media::error::{Error, shown};
use blockd_media::pool::PmemOptions;
use blockd_pmem::platform::Platform;
use blockd_serve::ublk::control::Devices;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceConfig, DeviceKind, HealthConfig, PoolConfig, SizeWish, SpaceConfig};
use crate::node::NodeId;

use attachments::Attachments;
use pools::Unopened;
use state_file::StateFile;

pub use attachments::remembered_devices;
pub use data_path::{Answer, DataPath};
pub use devices::{device_error, device_owner};
pub use errors::pool_error;
pub use events::{EventHub, EventKind};
pub use exports::{Exported, NbdAddress, NbdPlace};
pub use extend::{ExtendListener, bind_extend};
pub use health::HealthSummary;
pub use membership::{HostConfig, Leave, Left, NodeName, Taken, declare_dead, forget};
pub use server::{ControlListener, bind};

/// Options of the control service.
#[derive(Clone, Debug)]
pub struct ControlOptions {
    /// The folder of the daemon's state.
    pub state_dir: PathBuf,
    /// Delta rings are here.
    pub runtime_dir: PathBuf,
    /// The pool that is meant where none is named.
    pub default_pool: String,
    /// How pools that are made at run time wait for locks, commit, and so on.
    pub template: PoolConfig,
    /// This host; unknown where it has no identity.
    pub node: Option<NodeId>,
    /// How many pools the configuration has.
    pub configured_pools: usize,
    /// How pools and volumes are looked at.
    pub health: HealthConfig,
}

/// The control service. Clones are the same one.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    options: ControlOptions,
    data_path: Arc<dyn DataPath>,
    pools: RwLock<BTreeMap<String, Known>>,
    /// Pools whose volumes are namespaces.
    direct: direct::DirectPools,
    remembered: StateFile,
    served: Arc<served::ServedPools>,
    regions: Arc<regions::Book>,
    attachments: Attachments,
    events: Arc<EventHub>,
    nbd: RwLock<Vec<NbdAddress>>,
    /// Block devices; empty where the configuration has them off.
    ublk: OnceLock<Arc<Devices>>,
    /// Names of volumes whose extents are being let go.
    releases: releases::Releases,
    /// Requests of data paths outside.
    extends: extend::Extends,
    /// The health of pools and volumes.
    health: health::Book,
    /// The space policy of pools that are made at run time.
    space_of_new_pools: RwLock<SpaceConfig>,
    /// A pool is opened or created once at a time, and so is what is at a path.
    making_pools: making::NamedLocks,
    /// One operation at a time on each volume; names that share a lock wait for each other, so that
    /// two of them are taken by `lock_all`.
    locks: [tokio::sync::Mutex<()>; LOCKS],
    hasher: RandomState,
    ready: AtomicBool,
    stopping: AtomicBool,
    clock: Clock,
    started_unix_seconds: u64,
}

/// Enough that operations on different volumes seldom wait for each other.
const LOCKS: usize = 64;
/// How long the end of the daemon waits for pools that are being closed on request. Their own limit
/// is that of workers, 10 s, and a checkpoint.
const CLOSING_WAIT: std::time::Duration = std::time::Duration::from_secs(30);

/// A pool that was named, and what came of it.
#[derive(Clone, Debug)]
pub struct Known {
    pub config: PoolConfig,
    /// The handle, or why there is none.
    pub state: Result<PoolHandle, String>,
    /// The kind of the reason; empty where there is none.
    pub reason: &'static str,
}

impl Known {
    /// Whether it was served before, and is not there now.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.state.is_err() && self.reason == served::MISSING
    }

    /// Whether it was closed on request.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state.is_err() && self.reason == closing::CLOSED
    }

    /// Why it does not serve, if so.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match &self.state {
            Ok(handle) => handle.failure(),
            Err(failure) => Some(failure.clone()),
        }
    }
}

/// A pool made at run time, as it is remembered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Remembered {
    name: String,
    path: PathBuf,
    size: u64,
    extent_size: u32,
    preallocate: bool,
    direct: bool,
    /// Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    volatile: bool,
    /// Of one in persistent memory. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pmem: Option<RememberedPmem>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct RememberedPmem {
    power_safe: bool,
    whole_blocks: bool,
    erase: bool,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl Control {
    /// Reads what is remembered. Opens nothing.
    pub fn new(options: ControlOptions, data_path: Arc<dyn DataPath>) -> Result<Self, Error> {
        let attachments = Attachments::read(&options.state_dir)?;
        let remembered = StateFile::new(&options.state_dir, "pools.json");
        let regions = Arc::new(regions::Book::new(&options.state_dir));
        let served = Arc::new(served::ServedPools::new(&options.state_dir));
        Ok(Self(Arc::new(Inner {
            data_path,
            pools: RwLock::default(),
            direct: direct::DirectPools::default(),
            remembered,
            served,
            regions,
            attachments,
            events: Arc::default(),
            nbd: RwLock::default(),
            ublk: OnceLock::new(),
            releases: releases::Releases::default(),
            extends: extend::Extends::default(),
            health: health::Book::new(&options.health),
            space_of_new_pools: RwLock::new(options.template.space.clone()),
            making_pools: making::NamedLocks::default(),
            locks: std::array::from_fn(|_| tokio::sync::Mutex::default()),
            hasher: RandomState::new(),
            ready: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            clock: Clock::start(),
            started_unix_seconds: wall_seconds(),
            options,
        })))
    }

    /// Pools made at run time, to be opened with those of the configuration.
    pub fn remembered_pools(&self) -> Result<Vec<PoolConfig>, Error> {
        let list: Vec<Remembered> = self.0.remembered.read()?;
        let template = &self.0.options.template;
        Ok(list.into_iter().map(|one| config_of(one, template)).collect())
    }

    /// Opens a pool, after making it where it isn't there. One that can't be opened stays known,
    /// with the reason.
    pub async fn open_pool(&self, config: &PoolConfig) -> Result<(), Error> {
        let result = self.try_open(config, false).await;
        let (state, reason) = match &result {
            Ok(handle) => (Ok(handle.clone()), ""),
            Err(Unopened { error, reason }) => {
                let text = format!("pool {} can't be opened: {error}", config.name);
                self.events().publish(EventKind::PoolFailed, &config.name, "", text);
                (Err(error.to_string()), *reason)
            }
        };
        if let Ok(handle) = &state {
            self.keep_space(handle, config);
        }
        let opened = state.clone();
        let known = Known { config: config.clone(), state, reason };
        self.0.pools.write().insert(config.name.clone(), known);
        // The pools that were known when the daemon began to stop are closed by that.
        if self.0.stopping.load(Ordering::SeqCst)
            && let Ok(handle) = opened
        {
            let _ = handle.close().await;
        }
        result.map(|_| ()).map_err(|failed| *failed.error)
    }

    async fn try_open(
        &self,
        config: &PoolConfig,
        replace_missing: bool,
    ) -> Result<PoolHandle, Unopened> {
        let (wanted, runtime_dir) = (config.clone(), self.0.options.runtime_dir.clone());
        let node = self.0.options.node.map_or(0, NodeId::number);
        let others = self.devices_of_others(&config.name);
        let (book, served) = (Arc::clone(&self.0.regions), Arc::clone(&self.0.served));
        let open = move || {
            let is_other = pools::refuse_aliases(&wanted, others).map_err(Unopened::from);
            Ok(is_other.and_then(|()| {
                regions::open(&wanted, &runtime_dir, node, &book, &served, replace_missing)
            }))
        };
        let opened = blocking(open).await??;
        let handle = &opened.handle;
        if opened.permit.is_for_another(&handle.id()) {
            let _ = handle.close().await;
            return Err(served::changed_meanwhile(&config.name, &config.devices[0].path));
        }
        // Before a volume of it is served: a pool that is not remembered could be made anew.
        if let Err(error) = self.note_served(handle, opened.created).await {
            let _ = handle.close().await;
            return Err(error.into());
        }
        self.0.data_path.add_pool(&opened.handle).await?;
        let (name, report) = (&config.name, &opened.report);
        if opened.created {
            let text = format!("pool {name} was created");
            self.events().publish(EventKind::PoolCreated, name, "", text);
        }
        let how = if report.was_clean {
            "it had been closed in order".to_owned()
        } else {
            let (log, ring) = (report.log_changes, report.ring_changes);
            format!("recovered {log} changes from its log and {ring} from its delta ring")
        };
        if let Some(problem) = &report.ring_problem {
            tracing::warn!(pool = name, problem, "the delta ring was not used");
        }
        let only = match opened.handle.is_read_only() {
            true => ", to be read only: nothing of that is written to the media",
            false => "",
        };
        let text = format!("pool {name} is open: {how}{only}");
        self.events().publish(EventKind::PoolOpened, name, "", text);
        Ok(opened.handle)
    }

    /// Closes all pools, in the reverse order of their names, and says which could not be.
    pub async fn close_pools(&self) -> Result<(), Error> {
        self.close_direct().await;
        // Waits for a pool that is being closed on request, but not for one that is being opened:
        // another process may hold its lock for long.
        let is_waited_for = |known: &Known| known.state.is_ok() || known.is_closed();
        let names = self.known_pools().into_iter().filter(is_waited_for);
        let names = names.map(|known| known.config.name).collect();
        let locks = self.0.making_pools.lock_all(names);
        let _names = tokio::time::timeout(CLOSING_WAIT, locks).await;
        let pools: Vec<_> = self.0.pools.read().values().rev().cloned().collect();
        let mut result = Ok(());
        for known in pools {
            let Ok(handle) = &known.state else { continue };
            if let Err(error) = self.note_served(handle, false).await {
                tracing::warn!(pool = known.config.name, %error, "last seen at its start");
            }
            if let Err(error) = handle.close().await {
                let error = pool_error(&known.config.name, error);
                tracing::error!(pool = known.config.name, %error, "the pool was not closed");
                result = result.and(Err(error));
            }
        }
        result
    }

    /// Everything is served from now on.
    pub fn set_ready(&self) {
        self.0.ready.store(true, Ordering::Release);
        self.events().publish(EventKind::Ready, "", "", "the daemon is ready");
    }

    /// Ends streams of events; nothing more is ready.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        self.0.ready.store(false, Ordering::Release);
        self.events().publish(EventKind::Stopping, "", "", "the daemon is stopping");
        self.events().close();
    }

    /// Whether everything is served: listeners listen, and no pool has failed.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.why_not_ready().is_none()
    }

    /// The reason for which the daemon is not ready, if any.
    #[must_use]
    pub fn why_not_ready(&self) -> Option<String> {
        if !self.0.ready.load(Ordering::Acquire) {
            return Some("starting or stopping".to_owned());
        }
        let failed = self.0.pools.read().iter().find_map(|(name, known)| {
            let failure = known.failure().filter(|_| !known.is_closed())?;
            Some(match known.is_missing() {
                true => failure,
                false => format!("pool {name} has failed: {failure}"),
            })
        });
        failed.or_else(|| self.failed_direct())
    }

    /// This host as a member of its pools, where it has an identity.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.0.options.node
    }

    /// When the daemon started.
    #[must_use]
    pub fn started_unix_seconds(&self) -> u64 {
        self.0.started_unix_seconds
    }

    /// Resident memory of the daemon.
    #[must_use]
    pub fn resident_bytes(&self) -> i64 {
        stats::resident_bytes()
    }

    /// Whether clients can reach a volume.
    #[must_use]
    pub fn is_attached(&self, pool: &str, volume: &str) -> bool {
        self.0.attachments.get(pool, volume).is_some()
    }

    /// Where NBD is served: URIs of volumes are made of these.
    pub fn set_nbd_addresses(&self, addresses: Vec<NbdAddress>) {
        *self.0.nbd.write() = addresses;
    }

    /// The hub of events.
    #[must_use]
    pub fn events(&self) -> &Arc<EventHub> {
        &self.0.events
    }

    /// Every pool that was named, by name.
    #[must_use]
    pub fn known_pools(&self) -> Vec<Known> {
        self.0.pools.read().values().cloned().collect()
    }

    /// Workers.
    #[must_use]
    pub fn data_path(&self) -> &Arc<dyn DataPath> {
        &self.0.data_path
    }

    /// The name of the pool that is meant.
    fn pool_name<'a>(&'a self, name: &'a str) -> &'a str {
        if name.is_empty() { &self.0.options.default_pool } else { name }
    }

    /// A pool by name; the default one without.
    fn known(&self, name: &str) -> Result<Known, Error> {
        self.not_for_direct(name)?;
        let name = self.pool_name(name);
        let found = self.0.pools.read().get(name).cloned();
        found.ok_or_else(|| Error::not_found("pool", name))
    }

    /// A pool that can be used.
    fn pool(&self, name: &str) -> Result<PoolHandle, Error> {
        let known = self.known(name)?;
        match (known.failure(), known.state) {
            (None, Ok(handle)) => Ok(handle),
            (failure, _) => {
                Err(errors::failed_pool(&known.config.name, &failure.unwrap_or_default()))
            }
        }
    }

    /// Keeps others from doing something with this name meanwhile.
    async fn lock(&self, pool: &str, name: &str) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.locks[self.lock_place(pool, name)].lock().await
    }

    fn lock_place(&self, pool: &str, name: &str) -> usize {
        let hash = self.0.hasher.hash_one((self.pool_name(pool), name)) % LOCKS as u64;
        usize::try_from(hash).unwrap_or(0)
    }

    /// Makes a pool at run time, and remembers it. True if it is new.
    async fn create_pool(
        &self,
        mut config: PoolConfig,
        replace_missing: bool,
    ) -> Result<bool, Error> {
        let in_memory = config.devices.iter().all(|device| device.kind == DeviceKind::Memory);
        let _name = self.0.making_pools.lock(&config.name).await;
        let existing = self.0.pools.read().get(&config.name).cloned();
        let is_known = existing.is_some();
        if let Some(existing) = existing {
            same_pool(&existing.config, &config)?;
            if existing.state.is_ok() {
                return Ok(false);
            }
            if existing.is_closed() {
                let problem = "was closed on request: open it with `blockd pool open`";
                return Err(Error::in_use(format!("pool {}", shown(&config.name)), problem));
            }
            // Fields that a request leaves out are as they were configured or created.
            config = existing.config;
        }
        let places = config.devices.iter().filter(|device| device.path.is_absolute());
        let places = places.map(|device| device.path.display().to_string()).collect();
        let _places = self.0.making_pools.lock_all(places).await;
        let device = config.devices[0].clone();
        let taken = self.known_pools().into_iter().find(|known| {
            let is_ours = |one: &DeviceConfig| {
                one.path.is_absolute() && config.devices.iter().any(|own| own.path == one.path)
            };
            !in_memory
                && known.config.name != config.name
                && known.config.devices.iter().any(is_ours)
        });
        let taken = match taken {
            Some(other) => Some(other.config.name),
            None if !in_memory => self.owner(&config).await?,
            None => None,
        };
        if let Some(other) = taken {
            let problem = format!("belongs to pool {}", shown(&other));
            return Err(Error::in_use(device.path.display().to_string(), problem));
        }
        let opened = self.try_open(&config, replace_missing).await;
        let handle = opened.map_err(|failed| *failed.error)?;
        self.keep_space(&handle, &config);
        let name = config.name.clone();
        let known = Known { config: config.clone(), state: Ok(handle), reason: "" };
        self.0.pools.write().insert(name, known);
        // One that is known already is in the configuration, or remembered.
        if !in_memory && !is_known {
            self.remember(config).await?;
        }
        if replace_missing {
            self.forget_attachments_of_missing_volumes().await?;
        }
        Ok(true)
    }

    /// Opens a pool that could not be opened before, or was closed, and serves what was attached of
    /// it. False if it is open.
    pub(crate) async fn reopen_pool(&self, name: &str) -> Result<bool, Error> {
        let name = self.pool_name(name);
        let _name = self.0.making_pools.lock(name).await;
        self.kind(name).reopen(name).await
    }

    /// Opens a pool of extents. False if it is open.
    pub(super) async fn reopen_extents(&self, name: &str) -> Result<bool, Error> {
        let known = self.known(name)?;
        if known.state.is_ok() {
            return match known.failure() {
                Some(failure) => Err(errors::failed_pool(&known.config.name, &failure)),
                None => Ok(false),
            };
        }
        self.0.attachments.renew(&known.config.name).await;
        self.open_pool(&known.config).await?;
        self.forget_attachments_of_missing_volumes().await?;
        self.recover(&known.config.name, "").await?;
        if let Err(error) = self.serve_extend_again(&known.config.name) {
            tracing::error!(pool = known.config.name, %error, "the extend socket is not served");
        }
        Ok(true)
    }

    /// Tries again to open the pools that could not be opened, side by side; those that were closed
    /// on request stay closed. A remaining error is logged as at the start.
    pub async fn reopen_pools(&self) {
        let failed = |known: &Known| known.state.is_err() && !known.is_closed();
        let unopened = self.known_pools().into_iter().filter(failed);
        let names = unopened.map(|known| known.config.name).chain(self.unopened_direct());
        let mut opening = tokio::task::JoinSet::new();
        for name in names {
            let control = self.clone();
            opening.spawn(async move {
                match control.reopen_pool(&name).await {
                    Ok(_) => tracing::info!(pool = name, "the pool is open now"),
                    Err(error) => tracing::warn!(pool = name, %error, "the pool is still not open"),
                }
            });
        }
        opening.join_all().await;
    }

    /// Whether a pool is missing that was served before.
    #[must_use]
    pub fn has_missing_pools(&self) -> bool {
        self.0.pools.read().values().any(Known::is_missing)
    }

    async fn note_served(&self, handle: &PoolHandle, created: bool) -> Result<(), Error> {
        let (served, handle) = (Arc::clone(&self.0.served), handle.clone());
        blocking(move || served.note(&handle, created, wall_seconds())).await
    }

    /// Devices of the pools with other names that are open.
    fn devices_of_others(&self, name: &str) -> Vec<(String, Vec<Arc<Device>>)> {
        let others = self.known_pools().into_iter().filter(|known| known.config.name != name);
        let serving = others.filter_map(|known| {
            let handle = known.state.ok().filter(|handle| handle.failure().is_none())?;
            Some((known.config.name, handle.open_devices().to_vec()))
        });
        serving.collect()
    }

    /// Which other pool the namespace is left to that a new one is to be made of.
    async fn owner(&self, config: &PoolConfig) -> Result<Option<String>, Error> {
        let device = config.devices[0].clone();
        if !matches!(device.kind, DeviceKind::Pmem(_)) {
            return Ok(None);
        }
        let known = self.known_pools().into_iter().map(|known| known.config);
        let others: Vec<_> = known.filter(|other| other.name != config.name).collect();
        let platform = Platform::default();
        blocking(move || regions::owner(&device.path, &others, &platform)).await
    }

    async fn remember(&self, config: PoolConfig) -> Result<(), Error> {
        let file = self.0.remembered.clone();
        blocking(move || {
            let mut list: Vec<Remembered> = file.read()?;
            list.retain(|one| one.name != config.name);
            let device = &config.devices[0];
            list.push(Remembered {
                name: config.name.clone(),
                path: device.path.clone(),
                size: match device.size {
                    SizeWish::Bytes(bytes) => bytes,
                    SizeWish::Existing | SizeWish::OfFree(_) => 0,
                },
                extent_size: config.extent_size,
                preallocate: device.preallocate,
                direct: device.direct,
                volatile: config.volatile,
                pmem: match device.kind {
                    DeviceKind::Pmem(PmemOptions { power_safe, whole_blocks, erase }) => {
                        Some(RememberedPmem { power_safe, whole_blocks, erase })
                    }
                    _ => None,
                },
            });
            file.write(list)
        })
        .await
    }
}

/// A pool made at run time, as it is opened.
fn config_of(one: Remembered, template: &PoolConfig) -> PoolConfig {
    PoolConfig {
        name: one.name,
        devices: vec![DeviceConfig {
            path: one.path,
            kind: one.pmem.map_or(DeviceKind::Auto, |pmem| {
                let RememberedPmem { power_safe, whole_blocks, erase } = pmem;
                DeviceKind::Pmem(PmemOptions { power_safe, whole_blocks, erase })
            }),
            size: if one.size == 0 { SizeWish::Existing } else { SizeWish::Bytes(one.size) },
            preallocate: one.preallocate,
            direct: one.direct,
        }],
        spares: Vec::new(),
        region: None,
        volatile: one.volatile,
        extent_size: one.extent_size,
        accept_loss: false,
        extend_socket: None,
        ..template.clone()
    }
}

/// Refuses another pool of the same name.
fn same_pool(existing: &PoolConfig, asked: &PoolConfig) -> Result<(), Error> {
    let paths = |pool: &PoolConfig| {
        pool.devices.iter().map(|one| one.path.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    let size = |pool: &PoolConfig| match pool.devices.first().map(|one| one.size) {
        Some(SizeWish::Bytes(bytes)) => bytes.to_string(),
        _ => "0".to_owned(),
    };
    let rows = [
        ("path", paths(existing), paths(asked)),
        ("size in bytes", size(existing), size(asked)),
        ("extent size", existing.extent_size.to_string(), asked.extent_size.to_string()),
    ];
    for (field, existing, wanted) in rows {
        if existing != wanted {
            let (name, field) = (shown(&asked.name), field.to_owned());
            return Err(Error::Exists { what: "pool", name, field, existing, asked: wanted });
        }
    }
    Ok(())
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs what blocks on a thread where that does no harm.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::Unexpected { what: "a task ended".to_owned(), problem: error.to_string() })
    })
}
