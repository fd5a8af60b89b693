//! More space: a device that has grown below, or one more device.

use crate::create::{NewDevice, device_record};
use crate::error::MapperError;
use crate::format::placement::DeviceMark;
use crate::format::superblock::{DeviceRecord, DeviceState, DeviceTable};
use crate::geometry::DEVICE_SHIFT;
use crate::pool::{NO_DEVICE, Pool};
use crate::sync::Ordering;
use crate::units::PhysicalExtent;

use super::Engine;
use super::control::{ControlId, Outcome};

/// The limit of a device in words.
pub const LARGEST_DEVICE: &str = "at most 2^36 extents";

/// Notes by which mark volumes are pinned to a device.
pub(crate) fn note_mark(pool: &Pool, index: usize, device: &DeviceRecord) {
    if let Some(mark) = pool.marks.get(index) {
        mark.store(DeviceMark::of(&device.uuid).0, Ordering::Relaxed);
    }
}

impl Pool {
    /// Position of the last device that has shrunk since the pool was opened, until
    /// [`Self::forget_shrunk`], it grows, or another one shrinks or leaves. May be called from any
    /// thread.
    #[must_use]
    pub fn shrunk(&self) -> Option<u8> {
        Some(self.shrunk.load(Ordering::SeqCst)).filter(|device| *device != NO_DEVICE)
    }

    /// Forgets that this device has shrunk: its end was cut off.
    pub fn forget_shrunk(&self, device: u8) {
        let (seen, none) = (Ordering::SeqCst, NO_DEVICE);
        // Another one may have shrunk since.
        let _ = self.shrunk.compare_exchange(device, none, seen, seen);
    }

    pub(super) fn note_shrunk(&self, device: Option<u8>) {
        self.shrunk.store(device.unwrap_or(NO_DEVICE), Ordering::SeqCst);
    }

    /// Largest size of a device in bytes.
    #[must_use]
    pub const fn largest_size(&self) -> u64 {
        // A partial extent at the end is not used.
        ((1 << DEVICE_SHIFT) + 1) * self.geometry.extent_size() - 1
    }

    /// The record of a device that may join the pool, at this place of its table.
    ///
    /// # Errors
    /// If the device is too small or too large, or its logical block is larger than a volume's.
    pub fn check_new_device(
        &self,
        place: usize,
        device: &NewDevice,
    ) -> Result<DeviceRecord, MapperError> {
        let record = device_record(self.geometry, place, device)?;
        let smallest = self.volumes.read().values().map(|v| v.identity.block_size).min();
        if smallest.is_some_and(|block| record.block_size > block) {
            let problem =
                format!("logical block of {} bytes is larger than a volume's", record.block_size);
            return Err(MapperError::Device { name: device.name.clone(), problem });
        }
        Ok(record)
    }
}

impl Engine {
    /// Has the next superblock written with the extents gained, if there are any.
    pub(super) fn begin_to_grow(&mut self, id: ControlId, gained: Result<u64, MapperError>) {
        match gained {
            Ok(0) => self.end_when_durable(id, Outcome::Unchanged),
            Ok(extents) => self.begin_checkpoint_for(id, Outcome::Grown { extents }),
            Err(error) => self.end(id, Err(error)),
        }
    }

    /// Notes a device's new size for the next superblock. Returns the extents it gains.
    pub(super) fn prepare_grow(&mut self, device: u8, size: u64) -> Result<u64, MapperError> {
        let mut records = self.superblock.devices.as_slice().to_vec();
        let record = records.get_mut(usize::from(device));
        let record = record.filter(|record| record.state == DeviceState::InUse);
        let record = record.ok_or_else(|| MapperError::Invalid {
            field: "device",
            value: u64::from(device),
            allowed: "the position of a device of the pool that is not leaving or shrinking",
        })?;
        let extents = size / self.pool.geometry.extent_size();
        let refuse = |allowed| Err(MapperError::Invalid { field: "size", value: size, allowed });
        if size < record.size || extents < record.extents {
            return refuse("no smaller than the device was");
        }
        if size > self.pool.largest_size() {
            return refuse(LARGEST_DEVICE);
        }
        let gained = extents - record.extents;
        if gained == 0 {
            return Ok(0);
        }
        (record.size, record.extents) = (size, extents);
        self.controls.devices = DeviceTable::new(&records);
        if self.pool.shrunk() == Some(device) {
            self.pool.note_shrunk(None);
        }
        Ok(gained)
    }

    /// Notes a new device for the next superblock. Returns the extents it brings.
    pub(super) fn prepare_add(
        &mut self,
        handle: u8,
        device: &NewDevice,
    ) -> Result<u64, MapperError> {
        let mut records = self.superblock.devices.as_slice().to_vec();
        if records.iter().any(|r| r.uuid == device.uuid) {
            return Ok(0);
        }
        // The place of a removed device, or the one behind the last.
        let removed = records.iter().position(|record| !record.is_present());
        let index = removed.unwrap_or(records.len());
        let record = self.pool.check_new_device(index, device)?;
        let mut handles = self.pool.handles[..records.len()].iter();
        if handles.any(|h| h.load(Ordering::SeqCst) == handle) {
            return Err(MapperError::Invalid {
                field: "handle",
                value: u64::from(handle),
                allowed: "a number that no device of the pool has",
            });
        }
        match records.get_mut(index) {
            Some(removed) => {
                let former = self.pool.handles[index].load(Ordering::SeqCst);
                self.pool.former.lock().push(former);
                *removed = record;
            }
            None => records.push(record),
        }
        let table = DeviceTable::new(&records).ok_or(MapperError::Limit {
            what: "devices of a pool",
            limit: crate::geometry::MAX_DEVICES as u64,
        })?;
        self.pool.handles[index].store(handle, Ordering::SeqCst);
        self.supers.set_fresh(index);
        self.controls.devices = Some(table);
        Ok(record.extents)
    }

    /// The superblock names the new extents: they can be given out.
    pub(super) fn use_new_extents(&mut self) {
        let pool = std::sync::Arc::clone(&self.pool);
        let mut space = pool.free_space.lock();
        let table = self.superblock.devices;
        for (index, record) in table.present() {
            note_mark(&pool, index, record);
            extend(&mut space, index, record);
        }
        drop(space);
        pool.bump();
    }
}

/// Fits a device's free map to its record. The superblock area at the old end becomes free.
fn extend(space: &mut crate::pool::FreeSpace, index: usize, record: &DeviceRecord) {
    let had = space.count_on(index);
    if had >= record.extents || !space.add_region(index, PhysicalExtent(had), record.extents - had)
    {
        return;
    }
    let extent = |local: u64| PhysicalExtent(((index as u64) << DEVICE_SHIFT) + local);
    // All of these are free until now, but for the old superblock area.
    space.mark_used(extent(record.extents - 1));
    if had == 0 {
        space.mark_used(extent(0));
    } else {
        space.free(extent(had - 1), 1);
    }
}
