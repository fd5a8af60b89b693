//! Devices that leave a pool.

use std::path::PathBuf;

use blockd_api::v1::{self, DeviceRemoval, PoolDeviceState};
use blockd_engine::pool::{Control as Command, EvacuationStatus, Membership, Outcome, PoolHandle};
use blockd_media::error::{Error, shown};
use blockd_media::units::{human, to_wire};

use super::errors::pool_error;
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
async fn membership(handle: &PoolHandle, path: &str) -> Result<Membership, Error> {
    let (found, named) = (handle.clone(), PathBuf::from(path));
    let found = blocking(move || Ok::<_, Error>(found.membership_of(&named))).await?;
    if let Some(membership @ (Membership::At(_) | Membership::Left)) = found {
        return Ok(membership);
    }
    let devices = handle.devices();
    let known: Vec<_> = devices.iter().map(|one| one.path.display().to_string()).collect();
    let allowed = format!("a device of pool {}: {}", shown(handle.name()), known.join(", "));
    Err(Error::invalid("path", path, allowed))
}

impl Control {
    /// Begins to empty a device, or keeps it after all.
    pub(super) async fn remove_pool_device(
        &self,
        asked: &v1::RemovePoolDeviceRequest,
    ) -> Result<v1::RemovePoolDeviceResponse, Error> {
        let handle = self.pool(&asked.name)?;
        let name = handle.name().to_owned();
        let failed = |error| pool_error(handle.name(), error);
        let rate = u64::try_from(asked.rate_bytes).map_err(|_| {
            Error::invalid("rate_bytes", asked.rate_bytes, "0 or more bytes a second")
        })?;
        let action = asked.action();
        if asked.path.is_empty() && action != DeviceRemoval::Unspecified {
            return Err(Error::missing("path", "the path of a device of the pool"));
        }
        let mut changed = false;
        if action != DeviceRemoval::Unspecified {
            let _one = self.0.growing_pools.lock(&name).await;
            let leaving = handle.evacuation(None).await.map_err(failed)?.device;
            let command = match (membership(&handle, &asked.path).await?, action) {
                (Membership::At(device), DeviceRemoval::Abort) => {
                    (leaving == Some(device)).then_some(Command::KeepDevice { device })
                }
                (Membership::At(0), _) => {
                    let allowed = "another device than the pool's first, which holds its log";
                    return Err(Error::invalid("path", &asked.path, allowed));
                }
                (Membership::At(device), _) => match leaving.filter(|other| *other != device) {
                    None => Some(Command::RemoveDevice { device }),
                    Some(other) => {
                        let other = handle.path_at(other).unwrap_or_default();
                        let problem = format!("is leaving: wait, or abort that ({})", shown(&name));
                        return Err(Error::in_use(other.display().to_string(), problem));
                    }
                },
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
            self.forget_departed(&handle).await?;
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

    /// Releases the devices that have left the pool. A pool that is remembered is opened without
    /// them from now on.
    pub(super) async fn forget_departed(&self, handle: &PoolHandle) -> Result<(), Error> {
        let gone: Vec<PathBuf> =
            handle.departed().map(|device| device.info().path.clone()).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let (name, paths) = (handle.name().to_owned(), gone.clone());
        self.change_remembered(move |list| {
            for one in list.iter_mut().filter(|one| one.name == name) {
                one.more_paths.retain(|known| !paths.contains(known));
            }
        })
        .await?;
        if let Some(known) = self.0.pools.write().get_mut(handle.name()) {
            known.config.devices.retain(|device| !gone.contains(&device.path));
        }
        handle.departed().for_each(|device| device.unlock());
        Ok(())
    }
}
