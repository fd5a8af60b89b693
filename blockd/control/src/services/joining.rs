//! Devices that are added to a pool by a call.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{Membership, PoolHandle, VolumeSettings};
use blockd_media::Device;
use blockd_media::error::{Error, shown};
use blockd_media::pool::{PoolError, PoolSpec, identity, is_there};
use blockd_media::units::{human, to_wire};

use super::errors::pool_error;
use super::evacuation::{check_may_leave, membership};
use super::handing_on::refuse_owned;
use super::places::{check_kinds, is_in_memory};
use super::pools::{refuse_aliases, refuse_foreign, spec};
use super::served::added_device;
use super::volumes::existing;
use super::{Control, EventKind, blocking, hex};
use crate::config::{DeviceKind, PoolConfig};
use crate::pool;

/// A device that is open and not of the pool yet.
struct Candidate {
    /// The number by which the mapper and the rings know it.
    number: u8,
    device: Arc<Device>,
    /// Whether this call has opened it: if it is refused, it is given up again.
    is_new: bool,
}

/// Waiting for the file system of a path, while calls that change the pool's devices wait.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Waiting for the lock of a device that is to join, likewise.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

/// Runs what looks at a path on a thread where that does no harm, and waits for it for a limited
/// time. What it would have returned later is dropped: a device is closed, and its lock is gone.
pub(super) async fn answered<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::time::timeout(ANSWER_LIMIT, blocking(work)).await;
    done.unwrap_or_else(|_| {
        let problem = format!("does not answer within {} s", ANSWER_LIMIT.as_secs());
        Err(Error::in_use(path, problem))
    })
}

pub(super) fn checked_path(field: &'static str, text: &str) -> Result<PathBuf, Error> {
    let path = PathBuf::from(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err(Error::invalid(field, text, "an absolute path"));
    }
    Ok(path)
}

/// Refuses a device that the pool can't have, before it is opened. Blocks.
fn check(config: &PoolConfig, spec: &PoolSpec, pool_id: &[u8], path: &Path) -> Result<(), Error> {
    let shown_path = path.display().to_string();
    if !is_there(path) {
        return Err(Error::not_found("path", &shown_path));
    }
    check_kinds(config)?;
    if !config.volatile && is_in_memory(path) {
        let allowed = "on a disk: a file in memory is gone with the next boot, and the pool stays";
        return Err(Error::invalid("path", shown_path, allowed));
    }
    let problem = match identity(spec) {
        Ok(None) => return refuse_foreign(path),
        Ok(Some(id)) if id == *pool_id => "holds a device of this pool that is not in use in it: \
             zero its first and last 2 MiB, make a new file, or name another one"
            .to_owned(),
        Ok(Some(id)) => format!("holds a device of another pool, {}: name another one", hex(&id)),
        Err(error @ PoolError::Io { .. }) => return Err(pool_error(&config.name, error)),
        Err(_) => "holds a pool that can't be read: name another one".to_owned(),
    };
    Err(Error::in_use(shown_path, problem))
}

impl Control {
    /// Takes a device into an open pool. After an error everything is as it was before.
    pub(super) async fn add_pool_device(
        &self,
        asked: v1::AddPoolDeviceRequest,
    ) -> Result<v1::AddPoolDeviceResponse, Error> {
        let name = self.pool(&asked.name)?.name().to_owned();
        let path = checked_path("path", &asked.path)?;
        let _name = self.0.making_pools.lock(&name).await;
        let _place = self.0.making_pools.lock(&asked.path).await;
        let handle = self.pool(&name)?;
        if handle.devices().iter().any(|device| self.is_in_cell(&device.path)) {
            let problem = "lies in a cell, which has one device: its group makes it larger";
            return Err(Error::in_use(format!("pool {}", shown(&name)), problem));
        }
        let devices = self.lock_devices_of(&handle).await;
        let leaving = handle.evacuation(None).await.map_err(|error| pool_error(&name, error))?;
        let (open, named) = (handle.clone(), path.clone());
        let found = answered(&asked.path, move || Ok(open.find_device(&named))).await?;
        self.check_replaced(&handle, &asked, found.map(|one| one.1), leaving.device).await?;
        let candidate = match found {
            Some((_, Membership::At(place))) if leaving.device == Some(place) => {
                let problem = "is leaving the pool: wait, or keep it with `blockd pool device \
                               remove --abort`";
                return Err(Error::in_use(asked.path, problem));
            }
            Some((_, Membership::At(_))) => {
                // The list of added devices may have been lost since.
                let known = self.known(&name)?.config;
                if known.devices.iter().chain(&known.spares).all(|device| device.path != path) {
                    self.change_added(&handle, &path, true).await?;
                }
                drop(devices);
                self.move_pins(&handle, &asked).await;
                return Ok(v1::AddPoolDeviceResponse { changed: false, name, gained_bytes: 0 });
            }
            Some((number, Membership::Spare)) => {
                let spare = path.clone();
                answered(&asked.path, move || refuse_foreign(&spare)).await?;
                let spare = handle.open_devices().nth(number).zip(u8::try_from(number).ok());
                let gone = || Error::not_found("path", &asked.path);
                let (device, number) = spare.ok_or_else(gone)?;
                Candidate { number, device: Arc::clone(device), is_new: false }
            }
            _ => self.open_candidate(&handle, &path).await?,
        };
        let gained = self.join(&handle, candidate).await?;
        // Volumes are locked next.
        drop(devices);
        self.move_pins(&handle, &asked).await;
        let text = format!(
            "pool {} has grown by {}: {} has joined it",
            shown(&name),
            human(gained),
            path.display()
        );
        self.events().publish(EventKind::PoolGrown, &name, "", text);
        Ok(v1::AddPoolDeviceResponse { changed: true, name, gained_bytes: to_wire(gained) })
    }

    /// Refuses a request whose second half, the removal of another device, would be refused.
    async fn check_replaced(
        &self,
        handle: &PoolHandle,
        asked: &v1::AddPoolDeviceRequest,
        added: Option<Membership>,
        leaving: Option<u8>,
    ) -> Result<(), Error> {
        let old = &asked.replaces;
        if old.is_empty() {
            return Ok(());
        }
        match membership(handle, old).await? {
            same if added == Some(same) && matches!(same, Membership::At(_)) => {
                let allowed = "another device than the one that it replaces";
                Err(Error::invalid("path", &asked.path, allowed))
            }
            Membership::At(place) => check_may_leave(handle, old, place, leaving),
            _ if matches!(added, Some(Membership::At(_))) => Ok(()),
            _ => {
                let allowed = "a device that is in use: this one has left the pool; add another \
                               one with `blockd pool device add`";
                Err(Error::invalid("path", old, allowed))
            }
        }
    }

    /// Pins the volumes that are pinned to a device to the one that replaces it. Where that fails
    /// they are as volumes whose device leaves, until the request is repeated.
    async fn move_pins(&self, handle: &PoolHandle, asked: &v1::AddPoolDeviceRequest) {
        if asked.replaces.is_empty() {
            return;
        }
        let pin = async |path: &str| match membership(handle, path).await {
            Ok(Membership::At(place)) => handle.pin_to(place),
            _ => None,
        };
        let (Some(old), Some(new)) = (pin(&asked.replaces).await, pin(&asked.path).await) else {
            return;
        };
        for pinned in handle.mapper().summaries() {
            if pinned.settings.placement != old {
                continue;
            }
            let _guard = self.lock(handle, &pinned.name).await;
            let Ok(volume) = existing(handle, &pinned.name) else { continue };
            if volume.settings.placement != old {
                continue;
            }
            let settings = VolumeSettings { placement: new, ..volume.settings };
            if let Err(error) = self.configure_locked(handle, &volume, settings).await {
                let (pool, name) = (handle.name(), &volume.name);
                tracing::warn!(pool, volume = name, %error, "not pinned to the new device");
            }
        }
    }

    /// Opens a device that is to join the pool, and makes it known to all threads.
    async fn open_candidate(&self, handle: &PoolHandle, path: &Path) -> Result<Candidate, Error> {
        let name = handle.name().to_owned();
        // A device that has left may be added again.
        self.forget_departed_now(handle).await?;
        let known = self.known(&name)?.config;
        let shown_path = path.display().to_string();
        if known.devices.iter().all(|device| device.kind == DeviceKind::Memory) {
            let allowed = "left out: a pool in memory takes no device in";
            return Err(Error::invalid("path", shown_path, allowed));
        }
        self.refuse_known_devices(&name, &[path.to_owned()]).await?;
        let devices = added_device(&known, path.to_owned()).into_iter().collect();
        let config = PoolConfig { devices, spares: Vec::new(), region: None, ..known };
        let (others, pool) = (self.devices_of_others(&name), handle.clone());
        let runtime_dir = self.0.options.runtime_dir.clone();
        let path = path.to_owned();
        let asked = shown_path.clone();
        let device = answered(&asked, move || {
            let spec = spec(&config, &runtime_dir);
            check(&config, &spec, &pool.id(), &path)?;
            refuse_aliases(&config, others)?;
            refuse_owned(std::slice::from_ref(&path))?;
            let one = spec.devices.first().ok_or_else(|| Error::not_found("path", &shown_path))?;
            let opened = pool.open_later(one, spec.lock_wait.min(LOCK_LIMIT));
            let device = opened.map_err(|error| match error {
                PoolError::Locked { .. } => {
                    Error::in_use(&shown_path, "is locked by another process: stop that first")
                }
                other => pool_error(&config.name, other),
            })?;
            // Once more, now that it is locked.
            refuse_foreign(&path).inspect_err(|_| device.unlock())?;
            Ok(device)
        })
        .await?;
        let number = handle.take_up(&device).await.map_err(|error| pool_error(&name, error))?;
        self.data_path().add_pool(handle).await.inspect_err(|_| handle.refuse(number))?;
        Ok(Candidate { number, device, is_new: true })
    }

    /// Takes a device into the pool that all threads know. Returns the bytes gained.
    async fn join(&self, handle: &PoolHandle, candidate: Candidate) -> Result<u64, Error> {
        let Candidate { number, device, is_new } = candidate;
        let path = device.info().path.clone();
        let failed = |error| pool_error(handle.name(), error);
        // First it is remembered: a pool that has it can't be opened without it, and one that has
        // not is opened with it as a spare.
        if is_new {
            let remembered = self.change_added(handle, &path, true).await;
            remembered.inspect_err(|_| handle.refuse(number))?;
        }
        match pool::join(handle, number, &device).await {
            Ok(gained) => {
                if let Some(known) = self.0.pools.write().get_mut(handle.name())
                    && is_new
                {
                    let added = added_device(&known.config, path);
                    known.config.spares.extend(added);
                }
                if let Err(error) = self.note_served(handle, false).await {
                    tracing::warn!(pool = handle.name(), %error, "its devices are noted later");
                }
                Ok(gained.unwrap_or(0))
            }
            // The superblocks of a pool that has failed may name the device.
            Err(error) if is_new && handle.failure().is_none() => {
                handle.refuse(number);
                let forgotten = self.change_added(handle, &path, false).await;
                let error = failed(error);
                Err(match forgotten {
                    Ok(()) => error,
                    Err(problem) => error.with_note(&format!(
                        "{} stays a spare device of the pool: {problem}",
                        path.display()
                    )),
                })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Remembers durably that a device was added to a pool by a call, or no longer.
    async fn change_added(
        &self,
        handle: &PoolHandle,
        path: &Path,
        is_added: bool,
    ) -> Result<(), Error> {
        let (served, handle) = (Arc::clone(&self.0.served), handle.clone());
        let path = path.to_owned();
        blocking(move || {
            served.change_added(&handle, |added| {
                added.retain(|known| *known != path);
                added.extend(is_added.then_some(path));
            })
        })
        .await
    }
}
