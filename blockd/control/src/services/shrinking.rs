//! Devices of a pool that become smaller.

use std::sync::Arc;

use blockd_engine::pool::{EvacuationStatus, PoolHandle};
use blockd_media::DeviceKind;
use blockd_media::error::{Error, shown};
use blockd_media::units::human;

use super::errors::pool_error;
use super::joining::answered;
use super::{Control, EventKind};

/// The problem of a device that keeps another one from leaving or shrinking.
pub(super) const ONE_AT_A_TIME: &str = "is leaving or shrinking: wait, or keep it with `blockd \
     pool device remove --abort` or `blockd pool shrink --abort`";

/// The path of the pool's device, where it has one only.
pub(super) fn only_device(handle: &PoolHandle) -> Result<String, Error> {
    let devices = handle.devices();
    match devices.as_slice() {
        // Its name is no path.
        [one] if one.kind == DeviceKind::Memory => Err(in_memory(handle)),
        [one] => Ok(one.path.display().to_string()),
        _ => {
            let known: Vec<_> = devices.iter().map(|one| one.path.display().to_string()).collect();
            let allowed = format!("the path of one of the pool's devices: {}", known.join(", "));
            Err(Error::missing("path", allowed))
        }
    }
}

fn in_memory(handle: &PoolHandle) -> Error {
    let pool = format!("pool {}", shown(handle.name()));
    Error::in_use(pool, "is in memory, and stays as long as it is")
}

/// Checks that a device may become so small, as far as that does not depend on its content.
pub(super) fn check_may_shrink(
    handle: &PoolHandle,
    (place, keep): (u8, u64),
    present: &EvacuationStatus,
) -> Result<(), Error> {
    let Some(device) = handle.device_at(place) else { return Ok(()) };
    if device.memory().is_some() {
        return Err(in_memory(handle));
    }
    if keep > device.size() {
        let allowed = format!(
            "at most {}, which the device has: `blockd pool grow` makes it larger",
            human(device.size())
        );
        return Err(Error::out_of_range("size", human(keep), allowed));
    }
    let other = present.device.filter(|other| *other != place);
    let is_other_size = present.device == Some(place)
        && present.shrinks_to != Some(keep / handle.extent_size() * handle.extent_size());
    match other.or_else(|| is_other_size.then_some(place)) {
        Some(busy) => {
            let busy = handle.path_at(busy).unwrap_or_default();
            Err(Error::in_use(busy.display().to_string(), ONE_AT_A_TIME))
        }
        None => Ok(()),
    }
}

impl Control {
    /// Cuts off what lies behind the new end of a device that has shrunk since the pool was opened,
    /// unless that was done.
    pub(super) async fn finish_shrink(&self, handle: &PoolHandle) -> Result<(), Error> {
        if handle.mapper().shrunk().is_none() {
            return Ok(());
        }
        let _one = self.lock_devices_of(handle).await;
        self.finish_shrink_now(handle).await
    }

    /// The same while nothing else changes the pool's devices.
    pub(super) async fn finish_shrink_now(&self, handle: &PoolHandle) -> Result<(), Error> {
        let Some(place) = handle.mapper().shrunk() else { return Ok(()) };
        self.cut_off(handle, place).await?;
        handle.mapper().forget_shrunk(place);
        Ok(())
    }

    /// Truncates a file that is longer than its part of the pool. A disk stays as long as it is.
    pub(super) async fn cut_off(&self, handle: &PoolHandle, place: u8) -> Result<(), Error> {
        let Some(device) = handle.device_at(place).cloned() else { return Ok(()) };
        let growths = device.growths();
        // A part of an extent at the end is the device's, too: the pool is refused without it.
        let status = handle.evacuation(None).await;
        let sizes = status.map_err(|error| pool_error(handle.name(), error))?.sizes;
        let size = sizes.get(usize::from(place)).copied().unwrap_or(0);
        if size == 0 || device.size() <= size || handle.failure().is_some() {
            return Ok(());
        }
        let path = device.info().path.display().to_string();
        let shrunk = Arc::clone(&device);
        let cut = answered(&path, move || Ok(shrunk.shrink(size, growths))).await?;
        cut.map_err(|error| Error::io(format!("truncate {path}"), error))?;
        let (pool, shown_path, bytes) = (shown(handle.name()), shown(&path), human(size));
        let rest = match device.info().kind {
            DeviceKind::File => "",
            _ => ": it stays as long as it is, and the pool uses no more of it",
        };
        let text = format!("device {shown_path} of pool {pool} has shrunk to {bytes}{rest}");
        self.events().publish(EventKind::DeviceShrunk, handle.name(), "", text);
        Ok(())
    }
}
