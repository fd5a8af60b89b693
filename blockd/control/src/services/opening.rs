//! Making pools at run time, opening pools, and remembering those that were made.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_engine::pool::PoolHandle;
use blockd_media::clock::wall_seconds;
use blockd_media::error::{Error, shown};
use blockd_media::pool::{PmemOptions, is_there};
use blockd_media::{Device, DeviceInfo};
use blockd_pmem::platform::Platform;
use serde::{Deserialize, Serialize};

use super::places::paths_of;
use super::pools::{Opener, RING_LOST, Unopened};
use super::{Control, EventKind, Known, blocking, errors, pools, regions, served};
use crate::config::{DeviceConfig, DeviceKind, PoolConfig, SizeWish};
use crate::node::NodeId;

/// A pool made at run time, as it is remembered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Remembered {
    pub(super) name: String,
    path: PathBuf,
    /// Its other devices. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) more_paths: Vec<PathBuf>,
    /// The file at its path was made for it. Older versions wrote no such field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    made_file: bool,
    size: u64,
    extent_size: u32,
    /// Older versions wrote no such field.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    composite: bool,
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
pub(super) struct RememberedPmem {
    power_safe: bool,
    whole_blocks: bool,
    erase: bool,
}

/// Records of the delta ring of a cell, for each worker: a host has many cells, whose rings are
/// locked in memory. Half of them begin a commit.
const CELL_RING_RECORDS: u64 = 1024;

/// The state of a pool that was opened by a call and could not be remembered.
const NOT_REMEMBERED: &str =
    "the pool is open, and the next start of the daemon will not open it: repeat the call";

impl Remembered {
    fn of(config: &PoolConfig, made_file: bool) -> Self {
        let device = &config.devices[0];
        let more = config.devices.iter().skip(1).map(|device| device.path.clone());
        Self {
            name: config.name.clone(),
            path: device.path.clone(),
            more_paths: more.collect(),
            made_file,
            size: match device.size {
                SizeWish::Bytes(bytes) => bytes,
                SizeWish::Existing | SizeWish::OfFree(_) => 0,
            },
            extent_size: config.extent_size,
            composite: config.composite,
            preallocate: device.preallocate,
            direct: device.direct,
            volatile: config.volatile,
            pmem: match device.kind {
                DeviceKind::Pmem(PmemOptions { power_safe, whole_blocks, erase }) => {
                    Some(RememberedPmem { power_safe, whole_blocks, erase })
                }
                _ => None,
            },
        }
    }

    /// The file that was made for this pool, if one was.
    pub(super) fn made_file(self) -> Option<PathBuf> {
        self.made_file.then_some(self.path)
    }
}

/// The default of pools that are made.
const fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_true(value: &bool) -> bool {
    *value
}

/// A pool made at run time, as it is opened.
pub(super) fn config_of(one: Remembered, template: &PoolConfig) -> PoolConfig {
    let first = DeviceConfig {
        path: one.path,
        kind: one.pmem.map_or(DeviceKind::Auto, |pmem| {
            let RememberedPmem { power_safe, whole_blocks, erase } = pmem;
            DeviceKind::Pmem(PmemOptions { power_safe, whole_blocks, erase })
        }),
        size: if one.size == 0 { SizeWish::Existing } else { SizeWish::Bytes(one.size) },
        preallocate: one.preallocate,
        direct: one.direct,
    };
    let more = one.more_paths.into_iter().map(|path| DeviceConfig { path, ..first.clone() });
    let more: Vec<_> = more.collect();
    PoolConfig {
        name: one.name,
        devices: std::iter::once(first).chain(more).collect(),
        spares: Vec::new(),
        region: None,
        volatile: one.volatile,
        extent_size: one.extent_size,
        composite: one.composite,
        accept_loss: false,
        extend_socket: None,
        ..template.clone()
    }
}

/// Whether a device is a file that a call may have made.
fn is_file(device: &DeviceInfo) -> bool {
    std::fs::symlink_metadata(&device.path).is_ok_and(|found| found.is_file())
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
        ("composite", existing.composite.to_string(), asked.composite.to_string()),
    ];
    for (field, existing, wanted) in rows {
        if existing != wanted {
            let (name, field) = (shown(&asked.name), field.to_owned());
            return Err(Error::Exists { what: "pool", name, field, existing, asked: wanted });
        }
    }
    Ok(())
}

impl Control {
    /// Pools made at run time, to be opened with those of the configuration.
    pub fn remembered_pools(&self) -> Result<Vec<PoolConfig>, Error> {
        let list: Vec<Remembered> = self.0.remembered.read()?;
        let template = &self.0.options.template;
        let config = |one| {
            let config = config_of(one, template);
            let space = self.space_at(&config.devices[0].path, config.space);
            PoolConfig { space, ..config }
        };
        Ok(list.into_iter().map(config).collect())
    }

    /// A pool with the devices that were added to it by calls. A list that can't be read keeps a
    /// pool from being opened, which reports that.
    #[must_use]
    pub fn with_added_devices(&self, config: &PoolConfig) -> PoolConfig {
        self.0.served.with_added(config).unwrap_or_else(|_| config.clone())
    }

    /// Opens a pool, and creates it first where it does not exist. A pool that can't be opened
    /// stays known, with the reason.
    pub async fn open_pool(&self, config: &PoolConfig) -> Result<(), Error> {
        // The list may not have been readable before.
        let config = &self.with_added_devices(config);
        let result = self.try_open(config, false, None).await;
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
            self.renew_rate(handle).await;
        }
        let opened = state.clone();
        let known = Known { config: config.clone(), state, reason };
        self.0.pools.write().insert(config.name.clone(), known);
        self.serve_waiting(&config.name).await;
        // The pools that were known when the daemon began to stop are closed by that.
        if self.0.stopping.load(Ordering::SeqCst)
            && let Ok(handle) = opened
        {
            let _ = handle.close().await;
        }
        result.map(|_| ()).map_err(|failed| *failed.error)
    }

    /// Opens a pool, which has to be the one with this identity if one is given.
    async fn try_open(
        &self,
        config: &PoolConfig,
        replace_missing: bool,
        id: Option<[u8; 16]>,
    ) -> Result<PoolHandle, Unopened> {
        let leased_until_ns = self.confirm_cell(config).await.map_err(Unopened::from)?;
        self.refuse_awaited(config).map_err(Unopened::from)?;
        let (mut wanted, runtime_dir) = (config.clone(), self.0.options.runtime_dir.clone());
        if self.is_in_cell(&config.devices[0].path) {
            wanted.ring_records = wanted.ring_records.min(CELL_RING_RECORDS);
            wanted.sparing = true;
        }
        let node = self.0.options.node.map_or(0, NodeId::number);
        let opener = Opener { node, leased_until_ns, fenced: None };
        let others = self.devices_of_others(&config.name);
        let (book, served) = (Arc::clone(&self.0.regions), Arc::clone(&self.0.served));
        let open = move || {
            let is_other = pools::refuse_aliases(&wanted, others).map_err(Unopened::from);
            Ok(is_other.and_then(|()| {
                regions::open(&wanted, &runtime_dir, opener, &book, &served, replace_missing)
            }))
        };
        let opened = blocking(open).await??;
        let handle = &opened.handle;
        if id.is_some_and(|id| id != handle.id()) {
            let _ = handle.close().await;
            let path = config.devices[0].path.display().to_string();
            let problem = "holds another pool than a moment ago: repeat the call";
            return Err(Error::in_use(path, problem).into());
        }
        if opened.permit.is_for_another(&handle.id()) {
            let _ = handle.close().await;
            return Err(served::changed_meanwhile(&config.name, &config.devices[0].path));
        }
        // Before a volume of it is served: a pool that is not remembered could be made anew.
        if let Err(error) = self.note_served(handle, opened.created).await {
            let _ = handle.close().await;
            return Err(error.into());
        }
        if let Err(error) = self.0.data_path.add_pool(handle).await {
            // Some of the workers may have taken it up.
            self.0.data_path.remove_pool(handle.id()).await;
            let _ = handle.close().await;
            return Err(error.into());
        }
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
        if report.labels_lost > 0 {
            let pages = report.labels_lost;
            tracing::warn!(
                pool = name,
                pages,
                "labels of volumes can't be read: `blockd pool check`"
            );
        }
        let only = match opened.handle.is_read_only() {
            true => ", read-only: nothing is written to the media",
            false => "",
        };
        let text = format!("pool {name} is open: {how}{only}");
        self.events().publish(EventKind::PoolOpened, name, "", text);
        Ok(opened.handle)
    }

    /// Creates a pool at run time, and remembers it. True if it is new.
    pub(super) async fn create_pool(
        &self,
        mut config: PoolConfig,
        replace_missing: bool,
    ) -> Result<bool, Error> {
        let in_memory = config.devices.iter().all(|device| device.kind == DeviceKind::Memory);
        let _name = self.0.making_pools.lock(&config.name).await;
        let existing = self.0.pools.read().get(&config.name).cloned();
        let is_known = existing.is_some();
        if let Some(mut existing) = existing {
            // The feature may have been turned on or off since the pool was created, or the pool is
            // older than the feature.
            if let Ok(pool) = &existing.state {
                existing.config.composite = match pool.mapper().has_composite() {
                    true => existing.config.composite | config.composite,
                    false => existing.config.composite & config.composite,
                };
            }
            same_pool(&existing.config, &config)?;
            if existing.state.is_ok() {
                self.remember_again(&existing.config).await?;
                return Ok(false);
            }
            if existing.is_closed() {
                let problem = "was closed on request: open it with `blockd pool open`";
                return Err(Error::in_use(format!("pool {}", shown(&config.name)), problem));
            }
            // Fields that a request leaves out are as they were configured or created.
            config = self.with_added_devices(&existing.config);
        }
        let paths = paths_of(&config.devices);
        let places = paths.iter().map(|path| path.display().to_string()).collect();
        let _places = self.0.making_pools.lock_all(places).await;
        self.refuse_known_devices(&config.name, &paths).await?;
        if let Some(other) = self.owner(&config).await? {
            let problem = format!("belongs to pool {}", shown(&other));
            return Err(Error::in_use(config.devices[0].path.display().to_string(), problem));
        }
        // No other call makes or opens what is at this path.
        let is_new_file = !in_memory && !is_there(&config.devices[0].path);
        let handle = self.open_named(&config, replace_missing, None).await?;
        if is_known {
            self.remember_again(&config).await?;
        } else if !in_memory {
            let made_file = is_new_file && handle.devices().iter().all(is_file);
            self.remember(&config, made_file).await?;
        }
        if replace_missing {
            self.forget_attachments_of_missing_volumes().await?;
        }
        Ok(true)
    }

    /// Opens a pool, which is known by its name from then on.
    async fn open_named(
        &self,
        config: &PoolConfig,
        replace_missing: bool,
        id: Option<[u8; 16]>,
    ) -> Result<PoolHandle, Error> {
        let opened = self.try_open(config, replace_missing, id).await;
        let handle = opened.map_err(|failed| *failed.error)?;
        self.keep_space(&handle, config);
        self.renew_rate(&handle).await;
        let known = Known { config: config.clone(), state: Ok(handle.clone()), reason: "" };
        self.0.pools.write().insert(config.name.clone(), known);
        self.serve_waiting(&config.name).await;
        // A crash may have left the note of an earlier pool of this name.
        self.note_open(&config.name).await?;
        Ok(handle)
    }

    /// Opens the pool with this identity, which was found on its devices, and remembers it.
    pub(super) async fn open_found(&self, config: PoolConfig, id: [u8; 16]) -> Result<(), Error> {
        self.open_named(&config, false, Some(id)).await?;
        self.remember(&config, false).await
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
                Some(failure) => {
                    let name = shown(&known.config.name);
                    let failure = format!(
                        "{failure}; close it with `blockd pool close --force {name}`, then it can \
                         be opened"
                    );
                    Err(errors::failed_pool(&known.config.name, &failure))
                }
                None => {
                    // The call that opened it may have failed to.
                    self.note_open(&known.config.name).await?;
                    Ok(false)
                }
            };
        }
        self.0.attachments.renew(&known.config.name);
        self.open_pool(&known.config).await?;
        // Not before: after a failed opening a pool that a call closed stays closed at the next
        // start.
        let noted = self.note_open(&known.config.name).await;
        self.forget_attachments_of_missing_volumes().await?;
        self.recover(&known.config.name, "").await?;
        if let Err(error) = self.serve_extend_again(&known.config.name) {
            tracing::error!(pool = known.config.name, %error, "the extend socket is not served");
        }
        noted.map(|()| true)
    }

    /// Remembers durably that an open pool is to be opened at the next start.
    async fn note_open(&self, pool: &str) -> Result<(), Error> {
        let noted = self.note_closed(pool, false).await;
        noted.map_err(|error| error.with_note(NOT_REMEMBERED))
    }

    /// Applies the configuration to pools that are not open: their next opening uses it. Returns
    /// the names of those that it changed.
    pub fn configure_unopened(&self, configured: &[PoolConfig]) -> Vec<String> {
        let mut changed = Vec::new();
        let configured: Vec<_> =
            configured.iter().map(|config| self.with_added_devices(config)).collect();
        let mut pools = self.0.pools.write();
        let names = self.0.configured.read();
        for config in configured.iter().filter(|config| names.contains(&config.name)) {
            let Some(known) = pools.get_mut(&config.name) else { continue };
            if known.state.is_err() && known.config != *config {
                known.config = config.clone();
                changed.push(config.name.clone());
            }
        }
        changed
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

    /// Whether a pool can be opened only once a call or a reload says how: one that is missing, and
    /// one whose delta ring is lost. Another start does not help these.
    #[must_use]
    pub fn has_pools_for_a_call(&self) -> bool {
        let is_ring_lost = |known: &Known| known.state.is_err() && known.reason == RING_LOST;
        self.0.pools.read().values().any(|known| known.is_missing() || is_ring_lost(known))
    }

    pub(super) async fn note_served(
        &self,
        handle: &PoolHandle,
        created: bool,
    ) -> Result<(), Error> {
        let (served, handle) = (Arc::clone(&self.0.served), handle.clone());
        blocking(move || served.note(&handle, created, wall_seconds())).await
    }

    /// Devices of the pools with other names that are open.
    pub(super) fn devices_of_others(&self, name: &str) -> Vec<(String, Vec<Arc<Device>>)> {
        let others = self.known_pools().into_iter().filter(|known| known.config.name != name);
        let serving = others.filter_map(|known| {
            let handle = known.state.ok().filter(|handle| handle.failure().is_none())?;
            Some((known.config.name, handle.open_devices().cloned().collect()))
        });
        serving.collect()
    }

    /// The other pool that owns the namespace in which a new pool is to be created.
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

    /// Remembers an open pool, for the next start to open it.
    async fn remember(&self, config: &PoolConfig, made_file: bool) -> Result<(), Error> {
        let pool = Remembered::of(config, made_file);
        let changed = self.change_remembered(move |list| {
            list.retain(|one| one.name != pool.name);
            list.push(pool);
        });
        changed.await.map_err(|error| error.with_note(NOT_REMEMBERED))
    }

    /// Remembers a pool that was known before, unless the configuration has it: the call that made
    /// or imported it may have failed to.
    pub(super) async fn remember_again(&self, config: &PoolConfig) -> Result<(), Error> {
        self.note_open(&config.name).await?;
        let in_memory = config.devices.iter().all(|device| device.kind == DeviceKind::Memory);
        if in_memory || self.0.configured.read().contains(&config.name) {
            return Ok(());
        }
        let pool = Remembered::of(config, false);
        let changed = self.change_remembered(move |list| {
            if list.iter().all(|one| one.name != pool.name) {
                list.push(pool);
            }
        });
        changed.await.map_err(|error| error.with_note(NOT_REMEMBERED))
    }

    /// Changes the list of remembered pools, durably.
    pub(super) async fn change_remembered(
        &self,
        change: impl FnOnce(&mut Vec<Remembered>) + Send + 'static,
    ) -> Result<(), Error> {
        let _one = self.0.remembering.lock().await;
        let file = self.0.remembered.clone();
        blocking(move || {
            let before: Vec<Remembered> = file.read()?;
            let mut list = before.clone();
            change(&mut list);
            if list == before { Ok(()) } else { file.write(list) }
        })
        .await
    }
}
