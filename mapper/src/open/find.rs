//! Which superblock counts, and which of the caller's devices is which of the pool's.

use crate::engine::FormerEnd;
use crate::error::MapperError;
use crate::format::superblock::{DeviceRecord, Superblock, copy_offsets, newest};
use crate::format::{FormatError, Place};
use crate::geometry::{EXTENT_SIZE_RANGE, Geometry, MAX_DEVICES, PAGE_BYTES};
use crate::io::IoError;
use crate::units::DeviceIndex;

use super::PresentDevice;

/// Every copy of the superblock that could be read, and why others could not.
#[derive(Debug, Default)]
pub struct Copies {
    pub good: Vec<(Place, Superblock)>,
    bad: Vec<FormatError>,
    /// Devices of which a copy could not be read.
    unreadable: Vec<(DeviceIndex, IoError)>,
}

/// Bytes at a device's front that hold copies.
const FRONT: u64 = 2 * PAGE_BYTES;

/// The superblock that counts, and the caller's index of each device of its table.
#[derive(Debug)]
pub struct Found {
    pub superblock: Superblock,
    pub handles: [u8; MAX_DEVICES],
}

impl Copies {
    pub fn add(&mut self, bytes: &[u8], device: DeviceIndex, offset: u64) {
        let place = Place::Device { device, offset };
        match Superblock::decode(bytes, place) {
            Ok(copy) => self.good.push((place, copy)),
            Err(error) => self.bad.push(error),
        }
    }

    /// Notes that a place of a device can't be read.
    pub fn add_unreadable(&mut self, device: DeviceIndex, error: IoError) {
        self.unreadable.push((device, error));
    }

    /// The media's error of one of these devices.
    fn media_error(&self, of: impl Fn(DeviceIndex) -> bool) -> Option<MapperError> {
        let (device, error) = self.unreadable.iter().find(|(device, _)| of(*device))?;
        Some(MapperError::Io { operation: "read", device: device.0, error: *error })
    }

    /// Returns the offsets at which a device's last copies may lie: by its own front, or, if that
    /// cannot be read, by each size of extent, the last place first.
    pub fn back_offsets(&self, handle: usize, size: u64) -> Vec<u64> {
        let fits = |offset: &u64| offset.checked_add(FRONT).is_some_and(|end| end <= size);
        if let Some(own) = self.newest_where(handle, |offset| offset < FRONT) {
            return own_offsets(own).map(|pair| pair[1]).into_iter().filter(fits).collect();
        }
        let mut offsets = Vec::new();
        let mut extent = *EXTENT_SIZE_RANGE.start();
        while extent <= *EXTENT_SIZE_RANGE.end() {
            let extents = size / u64::from(extent);
            let last = extents.saturating_sub(1) * u64::from(extent);
            if extents >= 3 && !offsets.contains(&last) {
                offsets.push(last);
            }
            extent *= 2;
        }
        offsets.retain(fits);
        offsets
    }

    /// Drops copies that are none: data of a client at the place of a copy can be made to look like
    /// one. A device's own front says where the end is; without it, the last place that holds a
    /// copy of just that place is the end, since places before it are data.
    fn drop_planted(&mut self, present: &[PresentDevice]) {
        for (handle, device) in present.iter().enumerate() {
            self.only_own(handle, device.size);
        }
    }

    /// The same for one device.
    pub fn only_own(&mut self, handle: usize, size: u64) {
        let front = self.newest_where(handle, |offset| offset < FRONT).cloned();
        let end = match &front {
            Some(own) => own_offsets(own).map(|pair| pair[1]),
            None => self.back_offsets(handle, size).into_iter().find(|&offset| {
                self.newest_where(handle, |at| at == offset || at == offset + PAGE_BYTES)
                    .is_some_and(|copy| own_offsets(copy).is_some_and(|pair| pair[1] == offset))
            }),
        };
        self.good.retain(|(place, _)| match place {
            Place::Device { device, offset } if usize::from(device.0) == handle => {
                *offset < FRONT || end.is_some_and(|end| (end..end + FRONT).contains(offset))
            }
            _ => true,
        });
        if let Some(own) = front {
            self.good.retain(|(place, copy)| !on(place, handle) || copy.pool_id == own.pool_id);
        }
    }

    /// An error that says the pool is too new for this build. Only the front is asked: elsewhere
    /// it could be a client's data.
    pub fn too_new(&self) -> Option<FormatError> {
        let front =
            |e: &&FormatError| matches!(e.place, Place::Device { offset, .. } if offset < FRONT);
        self.bad.iter().filter(front).find(|e| e.is_unsupported()).copied()
    }

    /// Decides, or returns an error that names the missing, swapped, shrunk, foreign or too new
    /// device.
    pub fn choose(&mut self, present: &[PresentDevice]) -> Result<Found, MapperError> {
        if let Some(too_new) = self.too_new() {
            return Err(too_new.into());
        }
        self.drop_planted(present);
        // The first device that says so names the pool; one of another pool is refused below.
        let pool = (0..present.len()).find_map(|handle| self.newest_on(handle)).map(|c| c.pool_id);
        let of_pool: Vec<_> =
            self.good.iter().filter(|(_, copy)| Some(copy.pool_id) == pool).cloned().collect();
        let Some(chosen) = newest(&of_pool)?.cloned() else {
            let damaged = self.bad.first().cloned().map(Into::into);
            let found = damaged.or_else(|| self.media_error(|_| true));
            return Err(found.unwrap_or(MapperError::Internal("no device was read")));
        };
        let table = chosen.devices.as_slice();
        let (mut handles, mut seen) = ([0; MAX_DEVICES], [false; MAX_DEVICES]);
        for (at, _) in table.iter().enumerate().filter(|(_, record)| !record.is_present()) {
            // No number of the caller's: nothing is ever read or written there.
            (handles[at], seen[at]) = (u8::MAX, true);
        }
        for (handle, device) in present.iter().enumerate() {
            let copy = self.newest_on(handle).ok_or_else(|| {
                let media_error = self.media_error(|one| usize::from(one.0) == handle);
                let none = || refuse(&device.name, "holds no readable superblock".to_owned());
                media_error.unwrap_or_else(none)
            })?;
            let at = match position(&chosen, copy) {
                Some(at) if table[at].is_present() => at,
                // It has left the pool, and the caller has not noted that yet. Its place may be
                // another's by now.
                Some(_) => continue,
                None if is_former(&chosen, copy) => continue,
                None => return Err(stranger(&chosen, copy, device)),
            };
            if seen[at] {
                return Err(refuse(&device.name, "is the same device as another one".to_owned()));
            }
            // A checkpoint writes all devices before the next begins: none is two behind.
            if copy.generation < chosen.generation.saturating_sub(1) {
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

    /// The end that a device had before the superblock that counts, if it was further back: a crash
    /// may have left copies there.
    pub(crate) fn former_end(
        &self,
        chosen: &Superblock,
        present: &[PresentDevice],
    ) -> Option<FormerEnd> {
        let table = chosen.devices.as_slice();
        self.good.iter().find_map(|(place, copy)| {
            let own = copy.devices.as_slice().get(usize::from(copy.this_device.0))?;
            let device = position(chosen, copy)?;
            let Place::Device { device: handle, .. } = place else { return None };
            let size = present.get(usize::from(handle.0))?.size;
            let is_former = copy.generation < chosen.generation
                && table[device].is_present()
                && table[device].extents < own.extents
                && own.size <= size;
            is_former.then_some(FormerEnd { device, extents: own.extents })
        })
    }

    /// The newest copy on a device, by the caller's number of it.
    pub fn newest_on(&self, handle: usize) -> Option<&Superblock> {
        self.newest_where(handle, |_| true)
    }

    fn newest_where(&self, handle: usize, at: impl Fn(u64) -> bool) -> Option<&Superblock> {
        let here = |place: &Place| matches!(place, Place::Device { offset, .. } if at(*offset));
        let copies = self.good.iter().filter(|(place, _)| on(place, handle) && here(place));
        copies.map(|(_, copy)| copy).max_by_key(|copy| copy.generation)
    }
}

fn on(place: &Place, handle: usize) -> bool {
    matches!(place, Place::Device { device, .. } if usize::from(device.0) == handle)
}

/// Where the copies of the device lie that a copy says it is of: front, then end.
fn own_offsets(copy: &Superblock) -> Option<[u64; 2]> {
    let geometry = Geometry::new(copy.extent_size).ok()?;
    let record = copy.devices.as_slice().get(usize::from(copy.this_device.0))?;
    Some(copy_offsets(geometry, record.extents).first_pair)
}

/// The place in the pool's table of the device that a copy says it is of.
fn position(chosen: &Superblock, copy: &Superblock) -> Option<usize> {
    let own = copy.devices.as_slice().get(usize::from(copy.this_device.0))?;
    let mut table = chosen.devices.as_slice().iter();
    table.position(|one| one.uuid == own.uuid).filter(|_| copy.pool_id == chosen.pool_id)
}

/// Whether the device of a copy has left the pool, and another one has its place. The first device
/// never leaves, and places are not taken out of the table.
fn is_former(chosen: &Superblock, copy: &Superblock) -> bool {
    let place = usize::from(copy.this_device.0);
    copy.pool_id == chosen.pool_id
        && copy.generation < chosen.generation
        && (1..chosen.devices.as_slice().len()).contains(&place)
}

fn stranger(chosen: &Superblock, copy: &Superblock, device: &PresentDevice) -> MapperError {
    let problem = match copy.pool_id == chosen.pool_id {
        true => "is not one of the pool's devices".to_owned(),
        false => format!("belongs to pool {}", hex(&copy.pool_id)),
    };
    refuse(&device.name, problem)
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

pub fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}
