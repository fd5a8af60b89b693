//! The devices of a pool that is made or opened.

use crate::pool::lock::lock;
use std::sync::Arc;

use blockd_mapper::create::NewDevice;
use blockd_media::pool::newest::superblock;
use blockd_media::pool::{PoolError, PoolSpec};
use blockd_media::{Device, DeviceSpec};

/// Opens devices, or creates those that are files and not there. `devices` has those that were
/// opened, also after an error.
pub(super) fn open_each(
    specs: &[DeviceSpec],
    create: bool,
    devices: &mut Vec<Arc<Device>>,
) -> Result<(), PoolError> {
    for spec in specs {
        let opened = if create { Device::create(spec) } else { Device::open(spec) };
        devices.push(Arc::new(opened.map_err(PoolError::io("open", &spec.path))?));
    }
    Ok(())
}

/// Opens the spares: a device that has joined the pool before is one of its devices. A device that
/// cannot be opened is left out; the pool reports it if it needs it.
pub(super) fn open_spares(
    spec: &PoolSpec,
    devices: &mut Vec<Arc<Device>>,
) -> Result<Vec<Arc<Device>>, PoolError> {
    let mut spares = Vec::new();
    for spare in &spec.spares {
        let opened = match open_spare(spec, spare) {
            Ok(opened) => Arc::new(opened),
            Err(error) => {
                let path = spare.path.display();
                tracing::warn!(pool = spec.name, %path, %error, "a spare device can't be opened");
                continue;
            }
        };
        // An unreadable rest of an interrupted join makes it no member.
        match superblock(&opened) {
            Some(_) => devices.push(opened),
            None => spares.push(opened),
        }
    }
    Ok(spares)
}

/// A spare in persistent memory has to have our mark before anything of it is read; its owner makes
/// it, where nothing is.
fn open_spare(spec: &PoolSpec, spare: &DeviceSpec) -> Result<Device, PoolError> {
    let device = Device::open(spare).map_err(PoolError::io("open", &spare.path))?;
    if device.pmem().is_some() {
        lock(&device, spec.lock_wait)?;
        let formatted = device.format_if_new(random_id());
        formatted.map_err(PoolError::io("format", &spare.path))?;
    }
    Ok(device)
}

/// The description of a device for a pool that it joins.
#[must_use]
pub fn new_device(device: &Device) -> NewDevice {
    NewDevice {
        name: device.info().path.display().to_string(),
        uuid: random_id(),
        size: device.size(),
        block_size: device.info().block_size,
        class: 0,
    }
}

pub(super) fn random_id() -> [u8; 16] {
    // Twelve lines of kernel source say it never fails once the host has booted.
    let mut id = [0; 16];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut id));
    if read.is_err() {
        fastrand::fill(&mut id);
    }
    id
}
