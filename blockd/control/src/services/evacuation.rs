//! Devices that leave a pool.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use blockd_api::v1::{self, DeviceRemoval, PoolDeviceState};
use blockd_engine::pool::{Control as Command, EvacuationStatus, Membership, Outcome, PoolHandle};
use blockd_media::Device;
use blockd_media::error::{Error, shown};
use blockd_media::units::{human, to_wire};

use super::errors::pool_error;
use super::joining::{answered, checked_path};
use super::{Control, EventKind, blocking};

/// The device that is leaving, as a client gets it.
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
    })
}

/// The device of the pool that the path of a request leads to.
pub(super) async fn membership(handle: &PoolHandle, path: &str) -> Result<Membership, Error> {
    let (found, named) = (handle.clone(), checked_path(path)?);
    let found = answered(path, move || Ok(found.membership_of(&named))).await?;
    if let Some(membership @ (Membership::At(_) | Membership::Left)) = found {
        return Ok(membership);
    }
    let devices = handle.devices();
    let known: Vec<_> = devices.iter().map(|one| one.path.display().to_string()).collect();
    let allowed = format!("a device of pool {}: {}", shown(handle.name()), known.join(", "));
    Err(Error::invalid("path", path, allowed))
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
        let problem = "is leaving: wait, or keep it with `blockd pool device remove --abort`";
        return Err(Error::in_use(other.display().to_string(), problem));
    }
    Ok(())
}

impl Control {
    /// Begins to empty a device, or keeps it after all.
    pub(super) async fn remove_pool_device(
        &self,
        asked: &v1::RemovePoolDeviceRequest,
    ) -> Result<v1::RemovePoolDeviceResponse, Error> {
        let handle = self.pool(&asked.name)?;
        let failed = |error| pool_error(handle.name(), error);
        let rate = u64::try_from(asked.rate_bytes).map_err(|_| {
            Error::invalid("rate_bytes", asked.rate_bytes, "0 or more bytes a second")
        })?;
        let action = asked.action();
        if asked.path.is_empty() && action != DeviceRemoval::Unspecified {
            return Err(Error::missing("path", "the path of a device of the pool"));
        }
        let mut changed = false;
        // Until the answer: a device that is about to join may pass for one that has left.
        let _one = self.lock_devices_of(&handle).await;
        let name = handle.name().to_owned();
        if action != DeviceRemoval::Unspecified {
            let leaving = handle.evacuation(None).await.map_err(failed)?.device;
            let command = match (membership(&handle, &asked.path).await?, action) {
                (Membership::At(device), DeviceRemoval::Abort) => {
                    (leaving == Some(device)).then_some(Command::KeepDevice { device })
                }
                (Membership::At(device), _) => {
                    check_may_leave(&handle, &asked.path, device, leaving)?;
                    Some(Command::RemoveDevice { device })
                }
                _ => None,
            };
            if let Some(command) = command {
                let outcome = handle.control(command).await.map_err(failed)?;
                changed = outcome != Outcome::Unchanged;
            }
        }
        let status = handle.evacuation((rate > 0).then_some(rate)).await.map_err(failed)?;
        let state = match asked.path.is_empty() {
            true => PoolDeviceState::Unspecified,
            false => match membership(&handle, &asked.path).await? {
                Membership::At(device) if status.device == Some(device) => PoolDeviceState::Leaving,
                Membership::At(_) => PoolDeviceState::InUse,
                _ => PoolDeviceState::Left,
            },
        };
        if state == PoolDeviceState::Left {
            // Before the answer, which says that the device may go.
            self.forget_departed_now(&handle).await?;
        }
        if changed {
            let (pool, path, left) = (shown(&name), shown(&asked.path), human(status.left));
            let (kind, text) = match action {
                DeviceRemoval::Abort => {
                    (EventKind::DeviceStays, format!("device {path} stays in pool {pool}"))
                }
                _ => {
                    let text = format!("device {path} leaves pool {pool}: {left} are to be moved");
                    (EventKind::DeviceLeaves, text)
                }
            };
            self.events().publish(kind, &name, "", text);
        }
        let evacuation = evacuation(&handle, &status);
        Ok(v1::RemovePoolDeviceResponse { changed, name, evacuation, state: state.into() })
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
