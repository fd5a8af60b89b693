//! The table of a pool's devices in the superblock.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::{Problem, check_reserved};
use crate::geometry::{
    DEVICE_SHIFT, Geometry, MAX_DEVICES, MAX_PHYSICAL_EXTENTS, MIN_BLOCK_SIZE, PAGE_BYTES,
};
use crate::units::{DeviceIndex, PhysicalExtent};

pub(crate) const RAW_DEVICES: usize = MAX_DEVICES;
/// A superblock area at either end and something between.
pub(crate) const MIN_EXTENTS: u64 = 3;
const RAW_DEVICE_SIZE: usize = 64;
const TABLE_AT: usize = 512;

/// Whether a pool uses a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum DeviceState {
    /// Everything may lie on it.
    #[default]
    InUse = 0,
    /// Nothing new is put on it, and everything is moved to other devices.
    Leaving = 1,
    /// No longer of the pool. Its place stays, since the numbers of extents name places.
    Removed = 2,
    /// Nothing new is put behind its new end, and everything there is moved.
    Shrinking = 3,
}

impl DeviceState {
    const fn from_raw(raw: u8) -> Option<Self> {
        match raw {
            0 => Some(Self::InUse),
            1 => Some(Self::Leaving),
            2 => Some(Self::Removed),
            3 => Some(Self::Shrinking),
            _ => None,
        }
    }
}

/// One device of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceRecord {
    /// Identity of the device in the pool.
    pub uuid: [u8; 16],
    /// Bytes that the device had at the last check.
    pub size: u64,
    /// The pool-wide number of its first extent.
    pub first: PhysicalExtent,
    /// Extents that it gives, superblock areas included.
    pub extents: u64,
    /// Bytes of its logical block.
    pub block_size: u32,
    /// The kind of storage; only the caller interprets the number.
    pub class: u8,
    /// Whether the pool uses it.
    pub state: DeviceState,
    /// Extents that it keeps, while it shrinks; else 0.
    pub keeps: u64,
}

/// The extents of a device that everything is moved off: all of them, or those from its new end on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaving {
    /// The device's place in the table.
    pub device: usize,
    /// The first of the extents, counted on the device. Where a device shrinks, that is the last
    /// one that it keeps: a superblock area will lie there.
    pub from: u64,
}

impl Leaving {
    /// Whether an extent is one of them.
    #[must_use]
    pub const fn holds(self, extent: PhysicalExtent) -> bool {
        extent.0 >> DEVICE_SHIFT == self.device as u64
            && extent.0 & ((1 << DEVICE_SHIFT) - 1) >= self.from
    }

    /// The pool-wide number of the first of them.
    #[must_use]
    pub const fn first(self) -> PhysicalExtent {
        PhysicalExtent((self.device as u64) << DEVICE_SHIFT | self.from)
    }

    /// Whether the whole device leaves.
    #[must_use]
    pub const fn is_whole(self) -> bool {
        self.from == 0
    }
}

impl DeviceRecord {
    /// Whether it is still a device of the pool.
    #[must_use]
    pub fn is_present(&self) -> bool {
        self.state != DeviceState::Removed
    }

    /// Extents that the device has when it has shrunk, or has now.
    #[must_use]
    pub const fn lasting(&self) -> u64 {
        match self.state {
            DeviceState::Shrinking => self.keeps,
            _ => self.extents,
        }
    }
}

/// 1 to 16 devices in the order of their extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTable {
    records: [DeviceRecord; MAX_DEVICES],
    count: u8,
}

impl DeviceTable {
    /// A table of these devices; `None` unless there are 1 to 16.
    #[must_use]
    pub fn new(devices: &[DeviceRecord]) -> Option<Self> {
        let mut records = [DeviceRecord::default(); MAX_DEVICES];
        records.get_mut(..devices.len())?.copy_from_slice(devices);
        let count = u8::try_from(devices.len()).ok().filter(|&count| count > 0)?;
        Some(Self { records, count })
    }

    /// The devices.
    #[must_use]
    pub fn as_slice(&self) -> &[DeviceRecord] {
        &self.records[..usize::from(self.count)]
    }

    /// The devices that are still of the pool, with their places in the table.
    pub fn present(&self) -> impl Iterator<Item = (usize, &DeviceRecord)> {
        self.as_slice().iter().enumerate().filter(|(_, device)| device.is_present())
    }

    /// The extents that everything is moved off, if there are such.
    #[must_use]
    pub fn leaving(&self) -> Option<Leaving> {
        let mut devices = self.as_slice().iter().enumerate();
        devices.find_map(|(device, record)| match record.state {
            DeviceState::Leaving => Some(Leaving { device, from: 0 }),
            DeviceState::Shrinking => Some(Leaving { device, from: record.keeps - 1 }),
            DeviceState::InUse | DeviceState::Removed => None,
        })
    }

    /// Whether a device is leaving or shrinking or was removed: a reader must know the state then.
    #[must_use]
    pub fn has_states(&self) -> bool {
        self.as_slice().iter().any(|device| device.state != DeviceState::InUse)
    }

    /// The device that holds an extent.
    #[must_use]
    pub fn find(&self, extent: PhysicalExtent) -> Option<(DeviceIndex, &DeviceRecord)> {
        (0..).map(DeviceIndex).zip(self.as_slice()).find(|(_, device)| {
            extent.0.checked_sub(device.first.0).is_some_and(|within| within < device.extents)
        })
    }

    /// One past the pool's last extent.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.as_slice().last().map_or(0, |last| last.first.0.saturating_add(last.extents))
    }

    pub(crate) fn validate(&self, geometry: Geometry) -> Result<(), Problem> {
        let is_leaving = |device: &&DeviceRecord| {
            matches!(device.state, DeviceState::Leaving | DeviceState::Shrinking)
        };
        let leaving = self.as_slice().iter().filter(is_leaving).count() as u64;
        if leaving > 1 {
            return Err(Problem::field("leaving devices", leaving, "one at the most"));
        }
        let mut end = 0;
        for (index, device) in self.as_slice().iter().enumerate() {
            let (first, extents) = (device.first.0, device.extents);
            if first < end || (index == 0 && first != 0) {
                let allowed = "0 for the first, else beyond the device before";
                return Err(Problem::entry(index, "first extent", first, allowed));
            }
            if index == 0 && matches!(device.state, DeviceState::Leaving | DeviceState::Removed) {
                let allowed = "0 or 3 for the first device, which holds the log";
                return Err(Problem::entry(index, "device state", device.state as u64, allowed));
            }
            let keeps_some = match device.state {
                DeviceState::Shrinking => (MIN_EXTENTS..extents).contains(&device.keeps),
                _ => device.keeps == 0,
            };
            if !keeps_some {
                let allowed = "at least 3 and fewer than there are, or 0 for one that stays";
                return Err(Problem::entry(index, "kept extents", device.keeps, allowed));
            }
            if !device.is_present() {
                if extents != 0 || device.size != 0 {
                    let allowed = "0 for a removed device";
                    return Err(Problem::entry(index, "extent count", extents, allowed));
                }
                continue;
            }
            if extents < MIN_EXTENTS || extents > device.size / geometry.extent_size() {
                let allowed = "at least 3 and no more than the device's size holds";
                return Err(Problem::entry(index, "extent count", extents, allowed));
            }
            end = first.saturating_add(extents);
            if end > MAX_PHYSICAL_EXTENTS {
                let allowed = "such that the device ends within 2^40 extents";
                return Err(Problem::entry(index, "first extent", first, allowed));
            }
            let block = device.block_size;
            let blocks = MIN_BLOCK_SIZE.into()..=PAGE_BYTES;
            if !block.is_power_of_two() || !blocks.contains(&u64::from(block)) {
                let allowed = "a power of two from 512 to 4096";
                return Err(Problem::entry(index, "block size", block.into(), allowed));
            }
            if self.as_slice()[..index].iter().any(|other| other.uuid == device.uuid) {
                let allowed = "in the table once only";
                return Err(Problem::entry(index, "device identity", index as u64, allowed));
            }
        }
        Ok(())
    }

    pub(crate) fn raw(&self) -> (u8, [RawDevice; RAW_DEVICES]) {
        (self.count, self.records.map(RawDevice::new))
    }

    /// Reads the table without checking its content, except that unused places are empty.
    pub(crate) fn from_raw(count: u8, raw: &[RawDevice; RAW_DEVICES]) -> Result<Self, Problem> {
        let used = usize::from(count);
        if used == 0 || used > MAX_DEVICES {
            return Err(Problem::field("device count", count.into(), "from 1 to 16"));
        }
        for (index, device) in raw.iter().enumerate() {
            if index >= used {
                check_reserved(device.as_bytes(), TABLE_AT + index * RAW_DEVICE_SIZE)?;
            }
        }
        let mut records = [DeviceRecord::default(); MAX_DEVICES];
        for (index, (record, raw)) in records.iter_mut().zip(&raw[..used]).enumerate() {
            *record = raw.get(index)?;
        }
        Ok(Self { records, count })
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawDevice {
    uuid: [u8; 16],
    size: U64,
    first: U64,
    extents: U64,
    block_size: U32,
    class: u8,
    state: u8,
    reserved_a: [u8; 2],
    keeps: U64,
    reserved_b: [u8; 8],
}

const _: () = assert!(size_of::<RawDevice>() == RAW_DEVICE_SIZE);

impl RawDevice {
    fn new(device: DeviceRecord) -> Self {
        Self {
            uuid: device.uuid,
            size: device.size.into(),
            first: device.first.0.into(),
            extents: device.extents.into(),
            block_size: device.block_size.into(),
            class: device.class,
            state: device.state as u8,
            reserved_a: [0; 2],
            keeps: device.keeps.into(),
            reserved_b: [0; 8],
        }
    }

    /// Complains about reserved bytes that are in use. `index` is the place in the table.
    pub(crate) fn check_reserved(&self, index: usize) -> Result<(), Problem> {
        let at = TABLE_AT + index * RAW_DEVICE_SIZE;
        check_reserved(&self.reserved_a, at + std::mem::offset_of!(Self, reserved_a))?;
        check_reserved(&self.reserved_b, at + std::mem::offset_of!(Self, reserved_b))
    }

    fn get(&self, index: usize) -> Result<DeviceRecord, Problem> {
        let state = DeviceState::from_raw(self.state).ok_or_else(|| {
            let allowed = "0 in use, 1 leaving, 2 removed or 3 shrinking";
            Problem::entry(index, "device state", self.state.into(), allowed)
        })?;
        Ok(DeviceRecord {
            uuid: self.uuid,
            size: self.size.get(),
            first: PhysicalExtent(self.first.get()),
            extents: self.extents.get(),
            block_size: self.block_size.get(),
            class: self.class,
            state,
            keeps: self.keeps.get(),
        })
    }
}
