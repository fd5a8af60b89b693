//! Devices that leave a pool, or become smaller.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use blockd_api::v1::{self, DeviceRemoval, PoolDeviceState};
use blockd_engine::pool::{Control as Command, EvacuationStatus, Membership, Outcome, PoolHandle};
use blockd_media::Device;
use blockd_media::error::{Error, shown};
use blockd_media::pool::PoolError;
use blockd_media::units::{human, to_wire};

use super::errors::pool_error;
use super::joining::{answered, checked_path};
use super::messages::device;
use super::shrinking::{ONE_AT_A_TIME, check_may_shrink, only_device};
use super::{Control, EventKind, blocking};

/// The device that is leaving or shrinking, as a client gets it.
pub(super) fn evacuation(
    handle: &PoolHandle,
    status: &EvacuationStatus,
) -> Option<v1::PoolEvacuation> {
    let path = handle.path_at(status.device?).unwrap_or_default();
    Some(v1::PoolEvacuation {
        path: path.display().to_string(),
        left_bytes: to_wire(status.left),
        moved_bytes: to_wire(status.moved),
        moved_extents: status.extents,
        rate_bytes: to_wire(status.rate),
        waits_for_space: status.waits_for_space,
        errors: status.errors,
        shrinks_to_bytes: to_wire(status.shrinks_to.unwrap_or(0)),
    })
}

/// The device of the pool that the path of a request leads to.
pub(super) async fn membership(handle: &PoolHandle, path: &str) -> Result<Membership, Error> {
    member(handle, "path", path).await
}

/// The same of the path in a field of a request.
pub(super) async fn member(
    handle: &PoolHandle,
    field: &'static str,
    path: &str,
) -> Result<Membership, Error> {
    let (found, named) = (handle.clone(), checked_path(field, path)?);
    let found = answered(path, move || Ok(found.membership_of(&named))).await?;
    if let Some(membership @ (Membership::At(_) | Membership::Left)) = found {
        return Ok(membership);
    }
    Err(not_of(handle, field, path))
}

/// The error of a path that leads to no device of the pool.
pub(super) fn not_of(handle: &PoolHandle, field: &'static str, path: &str) -> Error {
    let devices = handle.devices();
    let known: Vec<_> = devices.iter().map(|one| one.path.display().to_string()).collect();
    let allowed = format!("a device of pool {}: {}", shown(handle.name()), known.join(", "));
    Error::invalid(field, path, allowed)
}

/// Checks that the device at this place may leave: not the first, nor while another one does.
pub(super) fn check_may_leave(
    handle: &PoolHandle,
    path: &str,
    place: u8,
    leaving: Option<u8>,
) -> Result<(), Error> {
    if place == 0 {
        let allowed = "another device than the pool's first, which holds its log";
        return Err(Error::invalid("path", path, allowed));
    }
    if let Some(other) = leaving.filter(|other| *other != place) {
        let other = handle.path_at(other).unwrap_or_default();
        return Err(Error::in_use(other.display().to_string(), ONE_AT_A_TIME));
    }
    Ok(())
}

fn state_of(found: Membership, status: &EvacuationStatus) -> PoolDeviceState {
    match found {
        Membership::At(device) if status.device != Some(device) => PoolDeviceState::InUse,
        Membership::At(_) if status.shrinks_to.is_some() => PoolDeviceState::Shrinking,
        Membership::At(_) => PoolDeviceState::Leaving,
        _ => PoolDeviceState::Left,
    }
}

impl Control {
    /// Begins to empty a device or its end, or keeps it after all.
    pub(super) async fn remove_pool_device(
        &self,
        asked: &v1::RemovePoolDeviceRequest,
    ) -> Result<v1::RemovePoolDeviceResponse, Error> {
        let handle = self.pool(&asked.name)?;
        let failed = |error| pool_error(handle.name(), error);
        let not_negative = |field, bytes: i64| {
            u64::try_from(bytes).map_err(|_| Error::invalid(field, bytes, "0 or more bytes"))
        };
        let rate = not_negative("rate_bytes", asked.rate_bytes)?;
        let keep = not_negative("keep_bytes", asked.keep_bytes)?;
        let action = asked.action();
        // Until the answer: a device that is about to join may pass for one that has left.
        let _one = self.lock_devices_of(&handle).await;
        let name = handle.name().to_owned();
        let path = match asked.path.is_empty() {
            true if keep > 0 => only_device(&handle)?,
            true if action != DeviceRemoval::Unspecified => {
                return Err(Error::missing("path", "the path of a device of the pool"));
            }
            _ => asked.path.clone(),
        };
        let changed = match action {
            DeviceRemoval::Unspecified => false,
            _ => self.change_device(&handle, &path, (action, keep)).await?,
        };
        let status = self.set_rate(&handle, rate).await.map_err(failed)?;
        let found = match path.is_empty() {
            true => None,
            false => Some(membership(&handle, &path).await?),
        };
        let state = found.map_or(PoolDeviceState::Unspecified, |one| state_of(one, &status));
        if changed {
            self.note_change(&handle, (action, keep), &path, status.left);
        }
        // Before the answer, which says that the device may go, or is smaller.
        if state == PoolDeviceState::Left {
            self.forget_departed_now(&handle).await?;
        }
        let mut shown_device = None;
        if let Some(Membership::At(place)) = found {
            if state == PoolDeviceState::InUse {
                let finished = self.finish_shrink_now(&handle).await;
                if keep > 0 {
                    finished?;
                }
                // The daemon may have been killed before the file was truncated.
                if keep > 0 && action == DeviceRemoval::Begin {
                    self.cut_off(&handle, place).await?;
                }
            }
            shown_device = handle.device_at(place).map(|one| device(&one.present()));
        }
        Ok(v1::RemovePoolDeviceResponse {
            changed,
            name,
            evacuation: evacuation(&handle, &status),
            state: state.into(),
            device: shown_device,
        })
    }

    /// Sets the bytes a second that may be moved between the devices of a pool; 0: as before. For
    /// the device that leaves or shrinks, the rate is remembered until that is done.
    pub(super) async fn set_rate(
        &self,
        handle: &PoolHandle,
        rate: u64,
    ) -> Result<EvacuationStatus, PoolError> {
        let status = handle.evacuation((rate > 0).then_some(rate)).await?;
        if status.device.is_some() {
            let (served, pool) = (Arc::clone(&self.0.served), handle.clone());
            if let Err(error) = blocking(move || served.set_rate(&pool, status.rate)).await {
                let pool = handle.name();
                tracing::warn!(pool, %error, "cannot remember the rate of moves");
            }
        }
        Ok(status)
    }

    /// Goes on at the rate of before, if a device leaves or shrinks.
    pub(super) async fn renew_rate(&self, handle: &PoolHandle) {
        let Ok(EvacuationStatus { device: Some(_), .. }) = handle.evacuation(None).await else {
            return;
        };
        let (served, pool) = (Arc::clone(&self.0.served), handle.clone());
        match blocking(move || served.rate_of(&pool)).await {
            // A pool that has failed meanwhile moves nothing.
            Ok(rate) => drop(handle.evacuation(rate).await),
            Err(error) => {
                tracing::warn!(pool = handle.name(), %error, "cannot read the rate of moves");
            }
        }
    }

    /// Carries an action out, if there is anything to do. Returns whether that changed anything.
    async fn change_device(
        &self,
        handle: &PoolHandle,
        path: &str,
        (action, keep): (DeviceRemoval, u64),
    ) -> Result<bool, Error> {
        let failed = |error| pool_error(handle.name(), error);
        // Of a device that has shrunk just now. A file that can't be truncated does no harm.
        if let Err(error) = self.finish_shrink_now(handle).await
            && keep > 0
        {
            return Err(error);
        }
        let present = handle.evacuation(None).await.map_err(failed)?;
        let command = match (membership(handle, path).await?, action) {
            (Membership::At(device), DeviceRemoval::Abort) if present.device == Some(device) => {
                Command::KeepDevice { device }
            }
            (_, DeviceRemoval::Abort) => return Ok(false),
            (Membership::At(device), _) if keep > 0 => {
                check_may_shrink(handle, (device, keep), &present)?;
                Command::ShrinkDevice { device, size: keep }
            }
            (Membership::At(device), _) => {
                check_may_leave(handle, path, device, present.device)?;
                Command::RemoveDevice { device }
            }
            _ if keep > 0 => return Err(Error::invalid("path", path, "a device that is in use")),
            _ => return Ok(false),
        };
        Ok(handle.control(command).await.map_err(failed)? != Outcome::Unchanged)
    }

    /// Publishes that a device begins to leave or to shrink, or stays as it is.
    fn note_change(
        &self,
        handle: &PoolHandle,
        (action, keep): (DeviceRemoval, u64),
        path: &str,
        left: u64,
    ) {
        let (pool, path, left) = (shown(handle.name()), shown(path), human(left));
        let (kind, text) = match action {
            DeviceRemoval::Abort => {
                (EventKind::DeviceStays, format!("device {path} stays in pool {pool}"))
            }
            _ if keep > 0 => {
                let size = human(keep);
                let text = format!(
                    "device {path} of pool {pool} shrinks to {size}: {left} are to be moved"
                );
                (EventKind::DeviceShrinks, text)
            }
            _ => {
                let text = format!("device {path} leaves pool {pool}: {left} are to be moved");
                (EventKind::DeviceLeaves, text)
            }
        };
        self.events().publish(kind, handle.name(), "", text);
    }

    /// Releases the devices that have left the pool, and returns them by their numbers. A pool that
    /// is remembered is opened without them from now on.
    pub(super) async fn forget_departed(
        &self,
        handle: &PoolHandle,
    ) -> Result<BTreeMap<usize, PathBuf>, Error> {
        // A device that is about to join may pass for one that has left for a moment.
        let _one = self.lock_devices_of(handle).await;
        self.forget_departed_now(handle).await?;
        let departed = handle.departed();
        Ok(departed.map(|(number, device)| (number, device.info().path.clone())).collect())
    }

    /// The same while nothing else changes the pool's devices.
    pub(super) async fn forget_departed_now(&self, handle: &PoolHandle) -> Result<(), Error> {
        let path_of = |(_, device): (usize, &Arc<Device>)| device.info().path.clone();
        // One may have been added again.
        let used: Vec<PathBuf> = handle.used_devices().map(path_of).collect();
        let gone = handle.departed().map(path_of).filter(|path| !used.contains(path));
        let gone: Vec<PathBuf> = gone.collect();
        if gone.is_empty() {
            handle.departed().for_each(|(_, device)| device.unlock());
            return Ok(());
        }
        let (served, pool, paths) = (Arc::clone(&self.0.served), handle.clone(), gone.clone());
        let forget = move |added: &mut Vec<PathBuf>| added.retain(|path| !paths.contains(path));
        blocking(move || served.change_added(&pool, forget)).await?;
        let (name, paths) = (handle.name().to_owned(), gone.clone());
        self.change_remembered(move |list| {
            for one in list.iter_mut().filter(|one| one.name == name) {
                one.more_paths.retain(|known| !paths.contains(known));
            }
        })
        .await?;
        if let Some(known) = self.0.pools.write().get_mut(handle.name()) {
            known.config.devices.retain(|device| !gone.contains(&device.path));
            known.config.spares.retain(|device| !gone.contains(&device.path));
        }
        handle.departed().for_each(|(_, device)| device.unlock());
        Ok(())
    }
}
