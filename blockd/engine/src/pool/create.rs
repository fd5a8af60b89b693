//! Making a pool on its devices.

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating};
use blockd_mapper::error::MapperError;
use blockd_media::pool::ownership::{Ownership, add_gate};
use blockd_media::pool::{PoolError, PoolSpec, holds_pool};
use blockd_media::{Device, DeviceKind};

use super::devices::{new_device, open_each, random_id};
use super::driver::{Driver, new_ring, serve};
use super::lock::lock;
use crate::backing::Ring;

/// A pool that was made. Its devices stay locked and claimed until it is opened, or dropped.
#[derive(Debug)]
pub struct Created {
    /// Its identity.
    pub pool_id: [u8; 16],
    pub(super) devices: Vec<Arc<Device>>,
}

impl Drop for Created {
    fn drop(&mut self) {
        // No IO is under way: the pool is made when all of it has ended.
        self.devices.iter().for_each(|device| device.unlock());
    }
}

/// Makes a pool on its devices. Files that are not there are made, and removed again if that fails;
/// a pool that is there already is never written over.
pub fn create(spec: &PoolSpec) -> Result<Created, PoolError> {
    refuse_pools(spec)?;
    let mut devices = Vec::new();
    let opened = open_each(&spec.devices, true, &mut devices);
    let created =
        opened.map_err(|error| (error, true)).and_then(|()| lock_and_make(spec, &devices));
    match created {
        Ok(pool_id) => Ok(Created { pool_id, devices }),
        Err((error, is_idle)) => {
            if !error.is_of_another_opener() {
                remove_without_pool(spec, &devices);
            }
            if is_idle {
                devices.iter().for_each(|device| device.unlock());
            }
            Err(error)
        }
    }
}

/// Returns the new pool's identity, or the error and whether no IO is left under way.
fn lock_and_make(spec: &PoolSpec, devices: &[Arc<Device>]) -> Result<[u8; 16], (PoolError, bool)> {
    let idle = |error| (error, true);
    devices.iter().try_for_each(|device| lock(device, spec.lock_wait)).map_err(idle)?;
    // Another process may have made one while the lock was waited for, or removed its file.
    refuse_pools(spec).map_err(idle)?;
    refuse_removed(devices).map_err(idle)?;
    let (pool_id, gate) = (random_id(), add_gate(devices));
    let none = || (MapperError::Internal("a pool has no device").into(), true);
    let first = devices.first().ok_or_else(none)?;
    let open_id = fastrand::u64(1..);
    let mut ownership =
        Ownership::take(spec, first, pool_id, open_id, gate.as_ref()).map_err(idle)?;
    // Another host may have made one while it was watched.
    let made = refuse_pools(spec).map_err(idle).and_then(|()| {
        make(spec, devices, pool_id).inspect_err(|_| {
            // They hold a part of this pool, and are locked since they were empty.
            devices.iter().for_each(|device| device.remove_if_new());
        })
    });
    // With IO under way the claim stays as it is, and the next opener waits.
    if !matches!(made, Err((_, false))) {
        ownership.release();
    }
    made.map(|()| pool_id)
}

/// Removes new files, unless another process has made a pool in them meanwhile.
fn remove_without_pool(spec: &PoolSpec, devices: &[Arc<Device>]) {
    for (one, device) in spec.devices.iter().zip(devices) {
        let is_locked = device.try_lock().unwrap_or(false);
        if is_locked && holds_pool(one).is_ok_and(|holds| !holds) {
            device.remove_if_new();
        }
    }
}

/// Refuses files that were removed or replaced while their lock was waited for.
fn refuse_removed(devices: &[Arc<Device>]) -> Result<(), PoolError> {
    for device in devices {
        let info = device.info();
        if info.kind == DeviceKind::File && !device.is_at(&info.path) {
            let gone = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(PoolError::io("make a pool on", &info.path)(gone));
        }
    }
    Ok(())
}

fn refuse_pools(spec: &PoolSpec) -> Result<(), PoolError> {
    for device in &spec.devices {
        if holds_pool(device)? {
            return Err(PoolError::Exists { path: device.path.clone() });
        }
    }
    Ok(())
}

pub(super) fn make(
    spec: &PoolSpec,
    devices: &[Arc<Device>],
    pool_id: [u8; 16],
) -> Result<(), (PoolError, bool)> {
    let mut ring = new_ring().map_err(|error| (error, true))?;
    make_on(&mut ring, spec, devices, pool_id).map_err(|error| (error, ring.in_flight() == 0))
}

fn make_on(
    ring: &mut Ring,
    spec: &PoolSpec,
    devices: &[Arc<Device>],
    pool_id: [u8; 16],
) -> Result<(), PoolError> {
    for device in devices {
        device.format(random_id()).map_err(PoolError::io("format", &device.info().path))?;
    }
    let options = CreateOptions {
        pool_id,
        extent_size: spec.extent_size,
        devices: devices.iter().map(|device| new_device(device)).collect(),
        wal_size: None,
        reserve_size: None,
        node: spec.node,
        composite: spec.composite,
    };
    let mut creating = Creating::new(&options)?;
    let served = serve(ring, devices)?;
    let mut driver = Driver { ring, served: &served, lock_wait: spec.lock_wait };
    loop {
        while let Some(command) = creating.poll() {
            driver.begin(command)?.into_iter().for_each(|(c, r)| creating.complete(c, r));
        }
        if creating.is_done() {
            break;
        }
        driver.wait()?.into_iter().for_each(|(c, r)| creating.complete(c, r));
    }
    creating.finish()?;
    Ok(())
}
