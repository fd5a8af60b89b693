//! The devices of a pool that is made or opened.

use crate::pool::lock::lock;
use std::sync::Arc;

use blockd_mapper::create::NewDevice;
use blockd_media::pool::newest::superblock;
use blockd_media::pool::{PoolError, PoolSpec};
use blockd_media::units::hex;
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
/// cannot be opened is left out; the pool reports it if it needs it. One of another pool is left
/// out as well, and not written to.
pub(super) fn open_spares(
    spec: &PoolSpec,
    devices: &mut Vec<Arc<Device>>,
) -> Result<Vec<Arc<Device>>, PoolError> {
    let named = devices.clone();
    let (mut spares, mut own) = (Vec::new(), None);
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
        let Some(found) = superblock(&opened) else {
            spares.push(opened);
            continue;
        };
        let own = *own.get_or_insert_with(|| pool_of(&named));
        if own.is_some_and(|own| own != found.pool_id) {
            let (path, other) = (spare.path.display(), hex(&found.pool_id));
            let pool = &spec.name;
            tracing::warn!(pool, %path, other, "a spare device belongs to another pool: left out");
            continue;
        }
        devices.push(opened);
    }
    Ok(spares)
}

/// The pool of the first device that names one, as the mapper finds it when it opens the pool.
fn pool_of(devices: &[Arc<Device>]) -> Option<[u8; 16]> {
    devices.iter().find_map(|device| superblock(device)).map(|found| found.pool_id)
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
