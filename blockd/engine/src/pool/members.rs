//! The devices of an open pool: which of those that are open belong to it, and at which place.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_mapper::engine::UsedExtent;
use blockd_media::{Device, DeviceInfo, same_device};

use super::handle::{ExtentRun, PoolHandle, Shared};

/// The relation of an open device to the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Membership {
    /// At this place of the device table.
    At(u8),
    /// No longer: it has left, before the pool was opened or since then.
    Left,
    /// Not yet.
    Spare,
}

impl Shared {
    /// The relation of the open device with this number.
    fn membership(&self, at: usize) -> Membership {
        let handle = u8::try_from(at).ok();
        match handle.and_then(|handle| self.pool.position_of(handle)) {
            Some(place) => Membership::At(place),
            // The caller may have opened the pool with a device that had left before.
            None if at < self.members => Membership::Left,
            None if handle.is_some_and(|handle| self.pool.has_known(handle)) => Membership::Left,
            None => Membership::Spare,
        }
    }

    /// The open devices that belong to the pool, with their numbers.
    fn joined(&self) -> impl Iterator<Item = (usize, &Arc<Device>)> {
        let devices = self.devices.iter().enumerate();
        devices.filter(|(at, _)| matches!(self.membership(*at), Membership::At(_)))
    }
}

impl PoolHandle {
    /// Its devices, in the order that they were named in.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.joined().map(|device| device.present()).collect()
    }

    /// The open devices that belong to the pool.
    pub(super) fn joined(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.shared.joined().map(|(_, device)| device)
    }

    /// A device by its position among [`Self::devices`], with its number among the open ones.
    pub(super) fn joined_at(&self, position: usize) -> Option<(u8, &Arc<Device>)> {
        let (at, device) = self.shared.joined().nth(position)?;
        Some((u8::try_from(at).ok()?, device))
    }

    /// The open devices that belong to the pool or may join it, with their numbers among
    /// [`Self::open_devices`].
    pub fn used_devices(&self) -> impl Iterator<Item = (usize, &Arc<Device>)> {
        let devices = self.shared.devices.iter().enumerate();
        devices.filter(|(at, _)| self.shared.membership(*at) != Membership::Left)
    }

    /// The open devices that have left the pool.
    pub fn departed(&self) -> impl Iterator<Item = &Arc<Device>> {
        let devices = self.shared.devices.iter().enumerate();
        let left = devices.filter(|(at, _)| self.shared.membership(*at) == Membership::Left);
        left.map(|(_, device)| device)
    }

    /// How many devices are left that may join it.
    #[must_use]
    pub fn spare_count(&self) -> usize {
        self.spares().count()
    }

    /// The next device that may join the pool, and the index by which the mapper would know it.
    #[must_use]
    pub fn next_spare(&self) -> Option<(u8, Arc<Device>)> {
        let (at, spare) = self.spares().next()?;
        Some((u8::try_from(at).ok()?, Arc::clone(spare)))
    }

    fn spares(&self) -> impl Iterator<Item = (usize, &Arc<Device>)> {
        let devices = self.shared.devices.iter().enumerate();
        devices.filter(|(at, _)| self.shared.membership(*at) == Membership::Spare)
    }

    /// The relation of the open device with this path, or else of the one that the path leads to
    /// as well. `None` where it is not open. Blocks while a file system does not answer.
    #[must_use]
    pub fn membership_of(&self, path: &Path) -> Option<Membership> {
        let devices = &self.shared.devices;
        let at = devices.iter().position(|device| device.info().path == path);
        let at = at
            .or_else(|| devices.iter().position(|device| same_device(&device.info().path, path)))?;
        Some(self.shared.membership(at))
    }

    /// The path of the device at a place of the device table.
    #[must_use]
    pub fn path_at(&self, place: u8) -> Option<PathBuf> {
        let mut joined = self.shared.joined();
        let found = joined.find(|(at, _)| self.shared.membership(*at) == Membership::At(place))?;
        Some(found.1.info().path.clone())
    }

    /// Open devices, for rings: those of the pool, spares, and those that have left.
    pub fn open_devices(&self) -> &[Arc<Device>] {
        &self.shared.devices
    }
}

/// Joins extents to runs, with the free ones between them. The device of a run is its position in
/// [`PoolHandle::devices`].
pub(super) fn runs(used: &[UsedExtent], shared: &Shared) -> Vec<ExtentRun> {
    let mut runs: Vec<ExtentRun> = Vec::new();
    for (index, (at, device)) in (0..=u8::MAX).zip(shared.joined()) {
        let mut add = |first, count, usage| {
            let run = ExtentRun { device: index, first, count, usage };
            match runs.last_mut() {
                _ if count == 0 => {}
                Some(last) if last.device == index && last.usage == usage => last.count += count,
                _ => runs.push(run),
            }
        };
        let mut next = 0;
        for extent in used.iter().filter(|extent| usize::from(extent.device.0) == at) {
            add(next, extent.extent.saturating_sub(next), None);
            add(extent.extent, u64::from(extent.extent >= next), Some(extent.usage));
            next = next.max(extent.extent + 1);
        }
        let total = device.size() / shared.extent_size;
        add(next, total.saturating_sub(next), None);
    }
    runs
}
