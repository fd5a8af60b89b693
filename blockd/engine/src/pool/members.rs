//! The devices of an open pool: which of those that are open belong to it, and at which place.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_mapper::engine::UsedExtent;
use blockd_mapper::geometry::MAX_DEVICES;
use blockd_mapper::space::Placement;
use blockd_mapper::units::DeviceIndex;
use blockd_media::{Device, DeviceInfo, same_device};

use super::handle::{ExtentRun, PoolHandle, Shared};
use super::join::OpenDevice;

/// The relation of an open device to the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Membership {
    /// At this place of the device table.
    At(u8),
    /// No longer: it has left, before the pool was opened or since then.
    Left,
    /// Not yet.
    Spare,
    /// Never: the device was refused when it was to join.
    Refused,
}

impl Shared {
    /// Open devices with their numbers: those that the pool had when it was opened, the spares, and
    /// those that were opened since then.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.devices.iter().map(OpenDevice::device)
    }

    /// The open device that the mapper knows by this number.
    pub(super) fn device(&self, number: DeviceIndex) -> Option<&Arc<Device>> {
        self.devices.get(usize::from(number.0)).map(OpenDevice::device)
    }

    /// The relation of the open device with this number.
    fn membership(&self, at: usize) -> Membership {
        let handle = u8::try_from(at).ok();
        if self.devices.get(at).is_some_and(OpenDevice::is_refused) {
            return Membership::Refused;
        }
        match handle.and_then(|handle| self.pool.position_of(handle)) {
            Some(place) => Membership::At(place),
            // The caller may have opened the pool with a device that had left before.
            None if at < self.members => Membership::Left,
            None if handle.is_some_and(|handle| self.pool.has_known(handle)) => Membership::Left,
            None => Membership::Spare,
        }
    }

    /// The open devices that belong to the pool, with their numbers.
    pub(super) fn joined(&self) -> impl Iterator<Item = (usize, &Arc<Device>)> {
        let devices = self.devices().enumerate();
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
        let is_used =
            |at| matches!(self.shared.membership(at), Membership::At(_) | Membership::Spare);
        self.shared.devices().enumerate().filter(move |(at, _)| is_used(*at))
    }

    /// The open devices that have left the pool, with their numbers.
    pub fn departed(&self) -> impl Iterator<Item = (usize, &Arc<Device>)> {
        let devices = self.shared.devices().enumerate();
        devices.filter(|(at, _)| self.shared.membership(*at) == Membership::Left)
    }

    /// How many devices are left that may join it.
    #[must_use]
    pub fn spare_count(&self) -> usize {
        self.spares().len()
    }

    /// The devices that may join the pool, and the indexes by which the mapper would know them.
    #[must_use]
    pub fn spares(&self) -> Vec<(u8, Arc<Device>)> {
        let devices = self.shared.devices().enumerate();
        let spares = devices.filter(|(at, _)| self.shared.membership(*at) == Membership::Spare);
        let numbered = spares.map(|(at, spare)| Some((u8::try_from(at).ok()?, Arc::clone(spare))));
        numbered.flatten().collect()
    }

    /// The number of the open device with this path, or else of the one that the path leads to as
    /// well, and its relation to the pool. A device that left and was added again is open twice,
    /// and the one in use counts. `None` where it is not open. Blocks while a file system does not
    /// answer.
    #[must_use]
    pub fn find_device(&self, path: &Path) -> Option<(usize, Membership)> {
        let order = |membership| match membership {
            Membership::At(_) => 0,
            Membership::Spare => 1,
            Membership::Left => 2,
            Membership::Refused => 3,
        };
        let best = |is_at: &dyn Fn(&Path) -> bool| {
            let devices = self.shared.devices().enumerate();
            let found = devices.filter(|(_, device)| is_at(&device.info().path));
            let known = found.map(|(at, _)| (at, self.shared.membership(at)));
            known.min_by_key(|(_, membership)| order(*membership))
        };
        // Of several paths of one device, the one that it is in use by counts.
        let exact = best(&|other| other == path).filter(|(_, membership)| order(*membership) < 2);
        let found = exact.or_else(|| best(&|other| other == path || same_device(other, path)));
        found.filter(|(_, membership)| *membership != Membership::Refused)
    }

    /// The relation to the pool of the device that [`Self::find_device`] finds.
    #[must_use]
    pub fn membership_of(&self, path: &Path) -> Option<Membership> {
        Some(self.find_device(path)?.1)
    }

    /// The device at a place of the device table.
    #[must_use]
    pub fn device_at(&self, place: u8) -> Option<&Arc<Device>> {
        let mut joined = self.shared.joined();
        let found = joined.find(|(at, _)| self.shared.membership(*at) == Membership::At(place))?;
        Some(found.1)
    }

    /// The placement that pins a volume to the device at a place of the device table.
    #[must_use]
    pub fn pin_to(&self, place: u8) -> Option<Placement> {
        self.shared.pool.mark_at(place).map(Placement::Pin)
    }

    /// The path of the device that a placement pins to; `None` where that has left, and where
    /// nothing is pinned.
    #[must_use]
    pub fn pinned_to(&self, placement: Placement) -> Option<PathBuf> {
        let places = 0..u8::try_from(MAX_DEVICES).unwrap_or(u8::MAX);
        let is_pin = matches!(placement, Placement::Pin(_));
        let mut places = places.filter(|_| is_pin);
        self.path_at(places.find(|place| self.pin_to(*place) == Some(placement))?)
    }

    /// The path of the device at a place of the device table.
    #[must_use]
    pub fn path_at(&self, place: u8) -> Option<PathBuf> {
        Some(self.device_at(place)?.info().path.clone())
    }

    /// Open devices, for rings: those of the pool, spares, and those that have left. Their numbers
    /// stay, and further ones come behind.
    pub fn open_devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.shared.devices()
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
