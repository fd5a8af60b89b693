//! The free extents of all devices.
//!
//! Leaving extents are kept apart, so that no search comes to them.

use crate::allocator::{Allocator, BadRegion};
use crate::error::MapperError;
use crate::format::superblock::{DeviceTable, Leaving};
use crate::geometry::DEVICE_SHIFT;
use crate::mutation::{Mutation, active};
use crate::units::PhysicalExtent;

/// Free extents, by device.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSpace {
    /// Extents that can be given out, by device.
    devices: Vec<Allocator>,
    /// Extents that are leaving: none of them is given out, or counted as free.
    leaving: Option<(Leaving, Allocator)>,
    /// Devices without space below for a first write, as bits by their place.
    full_below: u32,
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
            device.add_region(PhysicalExtent(0), record.extents).map_err(refuse)?;
            devices.push(device);
        }
        let mut space = Self { devices, ..Self::default() };
        if let Some(leaving) = table.leaving() {
            space.leave(leaving)?;
        }
        Ok(space)
    }

    /// Gives out none of these extents from now on.
    pub(crate) fn leave(&mut self, leaving: Leaving) -> Result<(), MapperError> {
        debug_assert!(self.leaving.is_none(), "extents of one device leave at a time");
        let Some(device) = self.devices.get_mut(leaving.device) else { return Ok(()) };
        let apart = device.split_off(PhysicalExtent(leaving.from)).map_err(refuse)?;
        self.leaving = Some((leaving, apart));
        Ok(())
    }

    /// The extents that were leaving may be given out again.
    pub(crate) fn stay(&mut self) {
        if let Some((leaving, apart)) = self.leaving.take()
            && let Some(device) = self.devices.get_mut(leaving.device)
        {
            device.append(apart);
        }
    }

    /// The extents that were leaving are of the pool no more, but for the first of those of a
    /// device that has shrunk, which holds superblocks.
    pub(crate) fn forget_leaving(&mut self) {
        let Some((leaving, _)) = self.leaving.take() else { return };
        if !leaving.is_whole() {
            let end = PhysicalExtent(leaving.from);
            self.add_region(leaving.device, end, 1);
            let _ = self.devices.get_mut(leaving.device).is_some_and(|one| one.mark_used(end));
        }
    }

    /// Adds free extents to a device, which may be a new one.
    pub(crate) fn add_region(&mut self, device: usize, first: PhysicalExtent, count: u64) -> bool {
        if self.devices.len() == device {
            self.devices.push(Allocator::new());
        }
        self.devices.get_mut(device).is_some_and(|one| one.add_region(first, count).is_ok())
    }

    /// Places of the device table that are known here.
    pub(crate) fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// The part that an extent belongs to, with its place on the device.
    fn part(&self, extent: PhysicalExtent) -> Option<(&Allocator, PhysicalExtent)> {
        let (device, local) = split(extent);
        match &self.leaving {
            Some((leaving, apart)) if leaving.holds(extent) => Some((apart, local)),
            _ => self.devices.get(device).map(|one| (one, local)),
        }
    }

    fn part_mut(&mut self, extent: PhysicalExtent) -> Option<(&mut Allocator, PhysicalExtent)> {
        let (device, local) = split(extent);
        match &mut self.leaving {
            Some((leaving, apart)) if leaving.holds(extent) => Some((apart, local)),
            _ => self.devices.get_mut(device).map(|one| (one, local)),
        }
    }

    /// The leaving extents of a device.
    fn apart(&self, device: usize) -> Option<&Allocator> {
        let of_it = |(leaving, _): &&(Leaving, Allocator)| leaving.device == device;
        self.leaving.as_ref().filter(of_it).map(|(_, apart)| apart)
    }

    pub(crate) fn contains(&self, extent: PhysicalExtent) -> bool {
        self.part(extent).is_some_and(|(part, local)| part.contains(local))
    }

    /// Runs in use, in order.
    pub(crate) fn used_runs(&self) -> impl Iterator<Item = (PhysicalExtent, u64)> + '_ {
        self.devices.iter().enumerate().flat_map(|(index, device)| {
            let base = (index as u64) << DEVICE_SHIFT;
            let apart = self.apart(index).into_iter().flat_map(Allocator::used_runs);
            let runs = device.used_runs().chain(apart);
            runs.map(move |(first, count)| (PhysicalExtent(base + first.0), count))
        })
    }

    /// Sets the devices that have no space below for a first write, as bits by their place.
    pub(crate) fn set_full_below(&mut self, devices: u32) {
        self.full_below = devices;
    }

    /// Whether extents of a device are not given out, as a first write there would fail, and
    /// another device has some.
    pub(crate) fn is_passed_over(&self, device: usize) -> bool {
        let is_full = |device: usize| self.full_below >> device & 1 == 1;
        let has_some = |(at, one): (usize, &Allocator)| !is_full(at) && one.free_count() > 0;
        is_full(device) && self.devices.iter().enumerate().any(has_some)
    }

    /// A run of up to `max` extents, from the device that served last while it has any.
    pub(crate) fn allocate(&mut self, max: u64) -> Option<(PhysicalExtent, u64)> {
        if active(Mutation::LeavingGivenOut)
            && let Some((leaving, apart)) = &mut self.leaving
            && apart.total_count() - apart.free_count() <= 1
            && let Some((first, count)) = apart.allocate_run(max)
        {
            let base = (leaving.device as u64) << DEVICE_SHIFT;
            return Some((PhysicalExtent(base + first.0), count));
        }
        for _ in 0..self.devices.len() {
            if !self.is_passed_over(self.cursor)
                && let Some((first, count)) = self.devices[self.cursor].allocate_run(max)
            {
                let base = (self.cursor as u64) << DEVICE_SHIFT;
                return Some((PhysicalExtent(base + first.0), count));
            }
            self.cursor = (self.cursor + 1) % self.devices.len();
        }
        None
    }

    /// A run of up to `max` extents from this device, unless it is passed over. Where
    /// [`Self::allocate`] goes on stays.
    pub(crate) fn allocate_on(&mut self, device: usize, max: u64) -> Option<(PhysicalExtent, u64)> {
        if self.is_passed_over(device) {
            return None;
        }
        let (first, count) = self.devices.get_mut(device)?.allocate_run(max)?;
        Some((PhysicalExtent(((device as u64) << DEVICE_SHIFT) + first.0), count))
    }

    /// Extents of each device that can be given out.
    pub(crate) fn free_by_device(&self) -> impl Iterator<Item = u64> + Clone {
        self.devices.iter().map(Allocator::free_count)
    }

    /// The same without those of devices that are passed over.
    pub(crate) fn usable_by_device(&self) -> impl Iterator<Item = u64> + Clone {
        let usable = |(at, free)| if self.is_passed_over(at) { 0 } else { free };
        self.free_by_device().enumerate().map(usable)
    }

    /// The first run of up to `max` free extents that begins at `from` or behind it.
    pub(crate) fn allocate_from(
        &mut self,
        from: PhysicalExtent,
        max: u64,
    ) -> Option<(PhysicalExtent, u64)> {
        let (first, mut local) = split(from);
        for (index, device) in self.devices.iter_mut().enumerate().skip(first) {
            if let Some((start, count)) = device.allocate_from(local, max) {
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
        let behind = PhysicalExtent(first.0 + count);
        if let Some((leaving, _)) = &self.leaving
            && let cut = leaving.first()
            && first < cut
            && cut < behind
        {
            self.free_in_part(first, cut.0 - first.0);
            return self.free_in_part(cut, behind.0 - cut.0);
        }
        self.free_in_part(first, count);
    }

    fn free_in_part(&mut self, first: PhysicalExtent, count: u64) {
        let freed = self.part_mut(first).is_some_and(|(part, local)| part.free(local, count));
        self.freed_twice |= !freed && !self.devices.is_empty();
    }

    pub(crate) fn mark_used(&mut self, extent: PhysicalExtent) -> bool {
        self.part_mut(extent).is_some_and(|(part, local)| part.mark_used(local))
    }

    pub(crate) fn is_used(&self, extent: PhysicalExtent) -> bool {
        self.part(extent).is_some_and(|(part, local)| part.is_used(local))
    }

    /// Extents that can be given out.
    pub(crate) fn free_count(&self) -> u64 {
        self.devices.iter().map(Allocator::free_count).sum()
    }

    /// Extents in use, and those that can be given out.
    pub(crate) fn total_count(&self) -> u64 {
        self.devices.iter().map(Allocator::total_count).sum::<u64>() + self.used_leaving()
    }

    /// Extents of a device, free or used.
    pub(crate) fn count_on(&self, device: usize) -> u64 {
        let known = self.devices.get(device).into_iter().chain(self.apart(device));
        known.map(Allocator::total_count).sum()
    }

    /// Extents of a device that are in use.
    pub(crate) fn used_on(&self, device: usize) -> u64 {
        let known = self.devices.get(device).into_iter().chain(self.apart(device));
        known.map(|one| one.total_count() - one.free_count()).sum()
    }

    /// Leaving extents that are in use.
    pub(crate) fn used_leaving(&self) -> u64 {
        self.leaving.as_ref().map_or(0, |(_, apart)| apart.total_count() - apart.free_count())
    }

    /// Of these extents: those in use, and those that can be given out.
    pub(crate) fn counts_of(&self, leaving: Leaving) -> (u64, u64) {
        let device = self.devices.get(leaving.device);
        let runs = device.into_iter().flat_map(Allocator::free_runs);
        let free = runs.map(|(first, count)| {
            let end = first.0 + count;
            end.saturating_sub(first.0.max(leaving.from))
        });
        let free: u64 = free.sum();
        let all = device.map_or(0, Allocator::total_count).saturating_sub(leaving.from);
        (all - free, free)
    }
}

fn refuse(bad: BadRegion) -> MapperError {
    MapperError::Limit { what: "extents of a device", limit: bad.count }
}

/// The device of the table that a physical extent lies on, and its place there.
#[must_use]
pub fn split(extent: PhysicalExtent) -> (usize, PhysicalExtent) {
    let device = usize::try_from(extent.0 >> DEVICE_SHIFT).unwrap_or(usize::MAX);
    (device, PhysicalExtent(extent.0 & ((1 << DEVICE_SHIFT) - 1)))
}
