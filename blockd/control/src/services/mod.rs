//! The control service: executes the calls of the control API.
//!
//! The control service sends commands to pool threads and workers, and does nothing of the data
//! path itself. `service` is the edge to gRPC; the code behind it uses the crate's own types.

mod adding;
mod attachments;
mod authority;
mod begun;
mod cells;
mod cloning;
mod closed;
mod closing;
mod data_path;
mod dead_hosts;
mod dead_record;
mod deleting;
mod devices;
mod diff;
mod direct;
mod errors;
mod evacuation;
mod events;
mod exports;
mod extend;
mod folds;
mod group_checks;
mod groups;
mod handing_on;
mod health;
mod joining;
mod keeper;
mod kinds;
mod labels;
mod making;
mod membership;
mod messages;
mod nodes;
mod opening;
mod peer_places;
mod peers;
mod places;
mod policy;
mod pools;
mod rebalancing;
mod regions;
mod releases;
mod renaming;
mod renaming_pools;
mod served;
mod server;
mod service;
mod settings;
mod shrinking;
mod snapshots;
mod space;
mod standby;
mod state_file;
mod stats;
mod taking;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_adding;
#[cfg(test)]
mod tests_of_begun;
#[cfg(test)]
mod tests_of_cells;
#[cfg(test)]
mod tests_of_dead_hosts;
#[cfg(test)]
mod tests_of_devices;
#[cfg(test)]
mod tests_of_direct;
#[cfg(test)]
mod tests_of_pool_names;
#[cfg(test)]
mod tests_of_renaming;
#[cfg(test)]
mod tests_of_snapshots;
#[cfg(test)]
mod tests_of_takeovers;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockd_engine::pool::PoolHandle;
use blockd_media::DeviceKind;
use blockd_media::clock::{Clock, wall_seconds};
use blockd_media::error::Error;
use blockd_media::units::hex;
use blockd_serve::ublk::control::Devices;
use parking_lot::RwLock;

use crate::config::{HealthConfig, HostsConfig, PoolConfig, SpaceConfig};
use crate::node::NodeId;

use attachments::Attachments;
use making::{Lock, VolumeLocks};
use state_file::StateFile;

pub use attachments::remembered_devices;
pub use data_path::{Answer, DataPath};
pub use devices::{device_error, device_owner};
pub use errors::pool_error;
pub use events::{EventHub, EventKind};
pub use exports::{Arrival, Exported, NbdAddress, NbdPlace};
pub use extend::{ExtendListener, bind_extend};
pub use health::HealthSummary;
pub use membership::{HostConfig, Leave, Left, NodeName, Taken, Unread, declare_dead, forget};
pub use peers::PeerListener;
pub use server::{ControlListener, bind};
pub use standby::with_causes;

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
    /// The health checks of pools and volumes.
    pub health: HealthConfig,
    /// Daemons of other hosts.
    pub hosts: HostsConfig,
    /// The directories of scripts are in here.
    pub hooks_dir: PathBuf,
    /// How long a script of these may take.
    pub hook_timeout: Duration,
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
    /// The list of remembered pools is changed by one call at a time.
    remembering: tokio::sync::Mutex<()>,
    /// Names of pools that the configuration has, as it was last read.
    configured: RwLock<BTreeSet<String>>,
    /// Pools that stay closed until a call opens them.
    closed: Arc<closed::ClosedPools>,
    regions: Arc<regions::Book>,
    /// Storage that several hosts reach.
    groups: groups::Groups,
    /// One operation at a time on each cell, by its group's name and its own.
    cells: making::NamedLocks,
    /// Cells that clients of this host wait for.
    standby: standby::Standbys,
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
    /// A pool is extended once at a time. By the pool's identity.
    growing_pools: making::NamedLocks,
    /// Held while a pool has two names: in files of the state directory, and in memory.
    renaming: tokio::sync::Mutex<()>,
    /// One operation at a time on each volume. By the identity of its pool, which may be renamed.
    volumes: making::NamedLocks,
    ready: AtomicBool,
    stopping: AtomicBool,
    clock: Clock,
    started_unix_seconds: u64,
}

/// How long the end of the daemon waits for pools that are being closed on request. Their own limit
/// is that of workers, 10 s, and a checkpoint.
const CLOSING_WAIT: Duration = Duration::from_secs(30);

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

    /// The paths of its devices; of one that is not open, also of the spares that it may have
    /// taken. A device in memory has none.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        match &self.state {
            Ok(handle) => {
                let devices = handle.devices().into_iter();
                devices.filter(|one| one.kind != DeviceKind::Memory).map(|one| one.path).collect()
            }
            Err(_) => places::paths_of(self.config.devices.iter().chain(&self.config.spares)),
        }
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
        let closed = Arc::new(closed::ClosedPools::read(&options.state_dir)?);
        let regions = Arc::new(regions::Book::new(&options.state_dir));
        let served = Arc::new(served::ServedPools::new(&options.state_dir));
        let groups = groups::Groups::new(&options.state_dir);
        Ok(Self(Arc::new(Inner {
            data_path,
            pools: RwLock::default(),
            direct: direct::DirectPools::default(),
            remembered,
            remembering: tokio::sync::Mutex::default(),
            configured: RwLock::default(),
            served,
            closed,
            regions,
            groups,
            cells: making::NamedLocks::default(),
            standby: standby::Standbys::default(),
            attachments,
            events: Arc::default(),
            nbd: RwLock::default(),
            ublk: OnceLock::new(),
            releases: releases::Releases::default(),
            extends: extend::Extends::default(),
            health: health::Book::new(&options.health),
            space_of_new_pools: RwLock::new(options.template.space.clone()),
            making_pools: making::NamedLocks::default(),
            growing_pools: making::NamedLocks::default(),
            renaming: tokio::sync::Mutex::default(),
            volumes: making::NamedLocks::default(),
            ready: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            clock: Clock::start(),
            started_unix_seconds: wall_seconds(),
            options,
        })))
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

    /// The open pools that have failed, with the reason. A pool that is being closed in order has
    /// not failed.
    #[must_use]
    pub fn failed_pools(&self) -> BTreeMap<String, String> {
        let failure = |known: &Known| known.state.as_ref().ok().and_then(PoolHandle::fault);
        let known = self.known_pools().into_iter();
        known.filter_map(|one| Some((one.config.name.clone(), failure(&one)?))).collect()
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

    /// Keeps others from doing something with this volume meanwhile, and its pool's name.
    async fn lock(&self, pool: &PoolHandle, name: &str) -> VolumeLocks {
        self.lock_all(pool, [name]).await
    }

    /// The same for several volumes of a pool. A caller that holds a lock takes no other.
    async fn lock_all(
        &self,
        pool: &PoolHandle,
        names: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> VolumeLocks {
        self.0.volumes.lock_volumes(&hex(&pool.id()), names).await
    }

    /// Waits for calls on the pool's volumes, and keeps others back.
    async fn lock_volumes_of(&self, pool: &PoolHandle) -> Lock {
        self.0.volumes.lock(&hex(&pool.id())).await
    }

    /// Keeps others from changing the pool's devices meanwhile, and its name.
    async fn lock_devices_of(&self, pool: &PoolHandle) -> Lock {
        self.0.growing_pools.lock(&hex(&pool.id())).await
    }
}

/// Runs what blocks on a thread where that does no harm.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::Unexpected { what: "a task ended".to_owned(), problem: error.to_string() })
    })
}
