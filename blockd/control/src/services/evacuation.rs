//! Devices that leave a pool.

use std::path::{Path, PathBuf};

use blockd_api::v1::{self, DeviceRemoval};
use blockd_engine::pool::{Control as Command, EvacuationStatus, Outcome, PoolHandle};
use blockd_media::error::{Error, shown};
use blockd_media::units::to_wire;

use super::Control;
use super::errors::pool_error;

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

/// The device's place in the pool; `None` where it has left since the pool was opened.
fn place(handle: &PoolHandle, path: &Path) -> Result<Option<u8>, Error> {
    handle.place_of(path).ok_or_else(|| {
        let devices = handle.devices();
        let known: Vec<_> = devices.iter().map(|one| one.path.display().to_string()).collect();
        let allowed = format!("a device of pool {}: {}", shown(handle.name()), known.join(", "));
        Error::invalid("path", path.display(), allowed)
    })
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
        let _one = self.0.growing_pools.lock(&name).await;
        let rate = u64::try_from(asked.rate_bytes).map_err(|_| {
            Error::invalid("rate_bytes", asked.rate_bytes, "0 or more bytes a second")
        })?;
        let command = match asked.action() {
            DeviceRemoval::Unspecified => None,
            action => place(&handle, Path::new(&asked.path))?.map(|device| match action {
                DeviceRemoval::Abort => Command::KeepDevice { device },
                _ => Command::RemoveDevice { device },
            }),
        };
        if matches!(command, Some(Command::RemoveDevice { device: 0 })) {
            let allowed = "another device than the pool's first, which holds its log";
            return Err(Error::invalid("path", &asked.path, allowed));
        }
        let mut changed = false;
        if let Some(command) = command {
            let outcome = handle.control(command).await.map_err(failed)?;
            changed = outcome != Outcome::Unchanged;
        }
        let status = handle.evacuation((rate > 0).then_some(rate)).await.map_err(failed)?;
        if changed {
            let (path, left) = (&asked.path, status.left);
            tracing::info!(pool = name, path, left, action = ?asked.action(), "device changed");
        }
        let evacuation = evacuation(&handle, &status);
        Ok(v1::RemovePoolDeviceResponse { changed, name, evacuation })
    }

    /// A device has left a pool: a pool that is remembered is opened without it from now on.
    pub(super) async fn forget_device(&self, pool: &str, path: PathBuf) {
        let name = pool.to_owned();
        tracing::info!(pool, path = %path.display(), "the device has left the pool");
        let forgotten = self.change_remembered(move |list| {
            for one in list.iter_mut().filter(|one| one.name == name) {
                one.more_paths.retain(|known| *known != path);
            }
        });
        if let Err(error) = forgotten.await {
            tracing::error!(pool, %error, "the device that has left stays in the list of pools");
        }
    }
}
