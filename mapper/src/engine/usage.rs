//! The usage of extents: for pictures of a pool.

use crate::pool::Pool;
use crate::units::{DeviceIndex, VolumeId};

use super::Engine;

/// The usage of an extent of the media.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Use {
    /// Superblocks, log, and pages of the map.
    Metadata,
    /// Granted to a volume, and not written yet.
    Reserved(VolumeId),
    /// Mapped by this volume alone.
    Mapped(VolumeId),
    /// Mapped by several volumes or snapshots.
    Shared,
}

/// An extent in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UsedExtent {
    /// The caller's index of the device.
    pub device: DeviceIndex,
    /// Position on the device, in extents.
    pub extent: u64,
    /// The usage of the run.
    pub usage: Use,
}

impl Engine {
    /// The extents of metadata.
    #[must_use]
    pub fn metadata_extents(&self) -> Vec<UsedExtent> {
        let extents = self.fixed_extents().into_iter().chain(self.pages.extents());
        extents.map(|extent| used(&self.pool, extent, Use::Metadata)).collect()
    }
}

impl Pool {
    /// The extents that volumes map or hold. May be called from any thread: concurrent changes are
    /// seen before or after.
    #[must_use]
    pub fn volume_extents(&self) -> Vec<UsedExtent> {
        let volumes: Vec<_> = self.volumes.read().values().cloned().collect();
        let mut found = Vec::new();
        for volume in volumes {
            let id = volume.identity.id;
            volume.for_each_reserved(|extent| found.push(used(self, extent, Use::Reserved(id))));
            for (_, leaf) in volume.directory.load().iter() {
                for extent in self.arena.entries(leaf).flat_map(|entry| entry.extents()) {
                    found.push(used(self, extent, Use::Mapped(id)));
                }
            }
        }
        found.sort_unstable();
        found.dedup_by(|next, kept| {
            let same = (next.device, next.extent) == (kept.device, kept.extent);
            if same && next.usage != kept.usage {
                kept.usage = Use::Shared;
            }
            same
        });
        found
    }

    /// How many of some extents each volume maps that maps any. The places are the caller's index
    /// of the device, the first extent there and how many, in order and without overlap. May be
    /// called from any thread, as [`Self::volume_extents`]; takes time in proportion to the mapped
    /// extents.
    #[must_use]
    pub fn who_maps(&self, places: &[(DeviceIndex, u64, u64)]) -> Vec<(VolumeId, u64)> {
        let volumes: Vec<_> = self.volumes.read().values().cloned().collect();
        let is_meant = |extent| {
            let used = used(self, extent, Use::Metadata);
            let at =
                places.partition_point(|place| (place.0, place.1) <= (used.device, used.extent));
            let place = at.checked_sub(1).map(|at| places[at]);
            place.is_some_and(|(device, first, count)| {
                device == used.device && used.extent - first < count
            })
        };
        let mut found = Vec::new();
        for volume in volumes {
            let mut count = 0;
            for (_, leaf) in volume.directory.load().iter() {
                let extents = self.arena.entries(leaf).flat_map(|entry| entry.extents());
                count += extents.filter(|&extent| is_meant(extent)).count() as u64;
            }
            if count > 0 {
                found.push((volume.identity.id, count));
            }
        }
        found
    }
}

fn used(pool: &Pool, extent: crate::units::PhysicalExtent, usage: Use) -> UsedExtent {
    let (device, offset) = pool.place(extent);
    UsedExtent { device, extent: offset / pool.geometry.extent_size(), usage }
}
