//! Which superblock counts, and which of the caller's devices is which of the pool's.

use crate::error::MapperError;
use crate::format::superblock::{DeviceRecord, Superblock, newest};
use crate::format::{FormatError, Place};
use crate::geometry::MAX_DEVICES;
use crate::units::DeviceIndex;

use super::PresentDevice;

/// Every copy of the superblock that could be read, and why others could not.
#[derive(Debug, Default)]
pub(super) struct Copies {
    pub(super) good: Vec<(Place, Superblock)>,
    pub(super) bad: Vec<FormatError>,
}

/// The superblock that counts, and the caller's index of each device of its table.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) superblock: Superblock,
    pub(super) handles: [u8; MAX_DEVICES],
}

impl Copies {
    pub(super) fn add(&mut self, bytes: &[u8], device: DeviceIndex, offset: u64) {
        let place = Place::Device { device, offset };
        match Superblock::decode(bytes, place) {
            Ok(copy) => self.good.push((place, copy)),
            Err(error) => self.bad.push(error),
        }
    }

    /// The size of an extent and of a device, as any readable copy has it.
    pub(super) fn any(&self) -> Option<&Superblock> {
        self.good.iter().map(|(_, copy)| copy).max_by_key(|copy| copy.generation)
    }

    /// Decides, or says by name what is missing, swapped, shrunk, foreign or too new.
    pub(super) fn choose(&self, present: &[PresentDevice]) -> Result<Found, MapperError> {
        if let Some(too_new) = self.bad.iter().find(|e| e.is_unsupported()) {
            return Err((*too_new).into());
        }
        let Some(chosen) = newest(&self.good)?.cloned() else {
            let first = self.bad.first().cloned();
            return Err(first.map_or(MapperError::Internal("no device was read"), Into::into));
        };
        let mut handles = [0; MAX_DEVICES];
        let table = chosen.devices.as_slice();
        let mut seen = [false; MAX_DEVICES];
        for (handle, device) in present.iter().enumerate() {
            let copy = self
                .newest_on(handle)
                .ok_or_else(|| refuse(&device.name, "holds no readable superblock".to_owned()))?;
            let at = position(&chosen, copy, device)?;
            if seen[at] {
                return Err(refuse(&device.name, "is the same device as another one".to_owned()));
            }
            // A checkpoint writes all devices before the next begins: none is two behind.
            if copy.generation + 1 < chosen.generation {
                let (found, newest) = (copy.generation, chosen.generation);
                let problem = format!("is stale: generation {found}, the pool is at {newest}");
                return Err(refuse(&device.name, problem));
            }
            check_device(&table[at], device)?;
            handles[at] = u8::try_from(handle).unwrap_or(u8::MAX);
            seen[at] = true;
        }
        if let Some(missing) = (0..table.len()).find(|&at| !seen[at]) {
            let name = hex(&table[missing].uuid);
            let problem = format!("device {missing} of the pool is missing");
            return Err(refuse(&name, problem));
        }
        Ok(Found { superblock: chosen, handles })
    }

    fn newest_on(&self, handle: usize) -> Option<&Superblock> {
        let on = |place: &Place| matches!(place, Place::Device { device, .. } if usize::from(device.0) == handle);
        let copies = self.good.iter().filter(|(place, _)| on(place)).map(|(_, copy)| copy);
        copies.max_by_key(|copy| copy.generation)
    }
}

fn position(
    chosen: &Superblock,
    copy: &Superblock,
    device: &PresentDevice,
) -> Result<usize, MapperError> {
    if copy.pool_id != chosen.pool_id {
        let problem = format!("belongs to pool {}", hex(&copy.pool_id));
        return Err(refuse(&device.name, problem));
    }
    let own = copy.devices.as_slice().get(usize::from(copy.this_device.0));
    let at = own.and_then(|own| chosen.devices.as_slice().iter().position(|d| d.uuid == own.uuid));
    at.ok_or_else(|| refuse(&device.name, "is not one of the pool's devices".to_owned()))
}

fn check_device(record: &DeviceRecord, device: &PresentDevice) -> Result<(), MapperError> {
    if device.size < record.size {
        let (found, known) = (device.size, record.size);
        return Err(refuse(&device.name, format!("has shrunk from {known} to {found} bytes")));
    }
    if device.block_size > record.block_size {
        let (found, known) = (device.block_size, record.block_size);
        let problem = format!("has a logical block of {found} bytes, the pool knows {known}");
        return Err(refuse(&device.name, problem));
    }
    Ok(())
}

fn refuse(name: &str, problem: String) -> MapperError {
    MapperError::Device { name: name.to_owned(), problem }
}

pub(super) fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}
