//! Extents from the devices that a volume's placement names.

use std::sync::Arc;

use crate::error::MapperError;
use crate::format::placement::{DeviceMark, Placement};
use crate::pool::FreeSpace;
use crate::units::PhysicalExtent;
use crate::volume::Volume;

use super::Engine;

/// Bytes of a volume in the order in which it is written that lie on one device, where it is
/// spread: a stripe. A read or write in sequence takes several devices from 2 MiB on, and is still
/// cut into pieces at which disks reach their rate in sequence.
pub const STRIPE_BYTES: u64 = 1 << 20;

impl Engine {
    /// A run of up to `max` extents for a volume.
    pub(super) fn run_for(
        &self,
        volume: &Volume,
        space: &mut FreeSpace,
        max: u64,
    ) -> Option<(PhysicalExtent, u64)> {
        let placement = volume.settings.lock().placement;
        let preferred = match placement {
            Placement::Fill => None,
            Placement::Spread => {
                let stripe = (STRIPE_BYTES / self.pool.geometry.extent_size()).max(1);
                let mut spread = volume.spread.lock();
                let next = spread.next(stripe, space.usable_by_device());
                let run = next.and_then(|(device, most)| space.allocate_on(device, most.min(max)));
                run.inspect(|(_, count)| spread.took(*count))
            }
            Placement::Pin(mark) => {
                self.marked(mark).and_then(|device| space.allocate_on(device, max))
            }
        };
        preferred.or_else(|| space.allocate(max))
    }

    /// Refuses to pin a volume to a device that the pool does not have. One that it is pinned to
    /// already may have left.
    pub(super) fn check_placement(
        &self,
        wanted: Placement,
        is_new: bool,
    ) -> Result<(), MapperError> {
        match wanted {
            Placement::Pin(mark) if is_new && self.marked(mark).is_none() => {
                let allowed = "the mark of one of the pool's devices";
                Err(MapperError::Invalid { field: "placement", value: mark.0.into(), allowed })
            }
            _ => Ok(()),
        }
    }

    /// Takes back the extents that a volume holds for writes to come, as they lie where its former
    /// placement had them. It gets others, at once where extents are set aside or kept for it.
    pub(super) fn place_anew(&mut self, volume: &Volume) {
        let pool = Arc::clone(&self.pool);
        let mut taken = 0;
        volume.take_back(|first, count| {
            taken += count;
            pool.free_space.lock().free(first, count);
        });
        self.space.returned(taken);
        if taken > 0 && volume.reserves() {
            self.grant_available(volume, taken, &pool.volumes.read());
        }
    }

    /// The place of the device that a volume is pinned to, if it is in the pool.
    pub(super) fn pinned_to(&self, volume: &Volume) -> Option<usize> {
        match volume.settings.lock().placement {
            Placement::Pin(mark) => self.marked(mark),
            _ => None,
        }
    }

    /// The place of a device of the pool.
    pub(super) fn marked(&self, mark: DeviceMark) -> Option<usize> {
        let mut present = self.superblock.devices.present();
        present.find(|(_, device)| DeviceMark::of(&device.uuid) == mark).map(|(place, _)| place)
    }
}
