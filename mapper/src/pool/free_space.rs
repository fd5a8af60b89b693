//! The free extents of all devices.

use crate::allocator::Allocator;
use crate::error::MapperError;
use crate::format::superblock::DeviceTable;
use crate::geometry::DEVICE_SHIFT;
use crate::units::PhysicalExtent;

/// Free extents, by device.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSpace {
    pub(crate) devices: Vec<Allocator>,
    /// The device that is leaving: none of its extents is given out, or counted as free.
    pub(crate) leaving: Option<usize>,
    /// Where the next search starts.
    cursor: usize,
    /// Whether an extent without an owner was freed.
    pub(crate) freed_twice: bool,
}

impl FreeSpace {
    /// Creates the free map of the table's devices, without used extents.
    pub(crate) fn of(table: &DeviceTable) -> Result<Self, MapperError> {
        let mut devices = Vec::new();
        for record in table.as_slice() {
            let mut device = Allocator::new();
            if !record.is_present() {
                devices.push(device);
                continue;
            }
            let bad = |_| MapperError::Limit { what: "extents of a device", limit: record.extents };
            device.add_region(PhysicalExtent(0), record.extents).map_err(bad)?;
            devices.push(device);
        }
        Ok(Self { devices, leaving: table.leaving(), cursor: 0, freed_twice: false })
    }

    pub(crate) fn contains(&self, extent: PhysicalExtent) -> bool {
        let (device, local) = split(extent);
        self.devices.get(device).is_some_and(|a| a.contains(local))
    }

    /// Runs in use, in order.
    pub(crate) fn used_runs(&self) -> impl Iterator<Item = (PhysicalExtent, u64)> + '_ {
        self.devices.iter().enumerate().flat_map(|(index, device)| {
            let base = (index as u64) << DEVICE_SHIFT;
            device.used_runs().map(move |(first, count)| (PhysicalExtent(base + first.0), count))
        })
    }

    /// A run of up to `max` extents, from the device that served last while it has any.
    pub(crate) fn allocate(&mut self, max: u64) -> Option<(PhysicalExtent, u64)> {
        for _ in 0..self.devices.len() {
            if self.leaving != Some(self.cursor)
                && let Some((first, count)) = self.devices[self.cursor].allocate_run(max)
            {
                let base = (self.cursor as u64) << DEVICE_SHIFT;
                return Some((PhysicalExtent(base + first.0), count));
            }
            self.cursor = (self.cursor + 1) % self.devices.len();
        }
        None
    }

    /// The first run of up to `max` free extents that begins at `from` or behind it.
    pub(crate) fn allocate_from(
        &mut self,
        from: PhysicalExtent,
        max: u64,
    ) -> Option<(PhysicalExtent, u64)> {
        let (first, mut local) = split(from);
        for (index, device) in self.devices.iter_mut().enumerate().skip(first) {
            if self.leaving != Some(index)
                && let Some((start, count)) = device.allocate_from(local, max)
            {
                let base = (index as u64) << DEVICE_SHIFT;
                return Some((PhysicalExtent(base + start.0), count));
            }
            local = PhysicalExtent(0);
        }
        None
    }

    /// Frees a run. A run that is free already is the sign of a fault, which the engine looks for;
    /// while replay has no free map, nothing is noted.
    pub(crate) fn free(&mut self, first: PhysicalExtent, count: u64) {
        let (device, local) = split(first);
        let freed = self.devices.get_mut(device).is_some_and(|a| a.free(local, count));
        self.freed_twice |= !freed && !self.devices.is_empty();
    }

    pub(crate) fn mark_used(&mut self, extent: PhysicalExtent) -> bool {
        let (device, local) = split(extent);
        self.devices.get_mut(device).is_some_and(|a| a.mark_used(local))
    }

    pub(crate) fn is_used(&self, extent: PhysicalExtent) -> bool {
        let (device, local) = split(extent);
        self.devices.get(device).is_some_and(|a| a.is_used(local))
    }

    /// Extents that can be given out.
    pub(crate) fn free_count(&self) -> u64 {
        let all: u64 = self.devices.iter().map(Allocator::free_count).sum();
        all - self.free_on_leaving()
    }

    /// Extents in use, and those that can be given out.
    pub(crate) fn total_count(&self) -> u64 {
        let all: u64 = self.devices.iter().map(Allocator::total_count).sum();
        all - self.free_on_leaving()
    }

    fn free_on_leaving(&self) -> u64 {
        let leaving = self.leaving.and_then(|at| self.devices.get(at));
        leaving.map_or(0, Allocator::free_count)
    }

    /// Extents of a device that are in use.
    pub(crate) fn used_on(&self, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |one| one.total_count() - one.free_count())
    }
}

/// The device of the table that a physical extent lies on, and its place there.
#[must_use]
pub fn split(extent: PhysicalExtent) -> (usize, PhysicalExtent) {
    let device = usize::try_from(extent.0 >> DEVICE_SHIFT).unwrap_or(usize::MAX);
    (device, PhysicalExtent(extent.0 & ((1 << DEVICE_SHIFT) - 1)))
}
