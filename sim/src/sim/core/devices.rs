//! Devices that leave a pool or become smaller.

use blockd_mapper::units::DeviceIndex;

use super::super::content::{PAGE_UNITS, UNIT, Value};
use super::super::disk::Action;
use super::Core;

impl Core {
    /// Checks that nothing is changed that is not of the pool any more.
    pub(super) fn check_place(&self, device: DeviceIndex, action: &Action) {
        let changes = !matches!(action, Action::Read { .. } | Action::Flush | Action::Fence);
        let is_gone = changes && self.gone.contains(&usize::from(device.0));
        assert!(!is_gone, "dev{device} has left the pool, and is written to");
        let extents = self.extents.get(usize::from(device.0)).copied().unwrap_or(0);
        let end = extents * u64::from(self.profile.extent_size) / UNIT;
        let is_behind = changes && end_of(action) > end;
        assert!(!is_behind, "dev{device} is written to behind its end in the pool");
    }

    /// A device has left the pool: all but its superblocks is garbage from now on.
    pub fn lose_device(&mut self, device: usize) {
        self.gone.insert(device);
        let extent = u64::from(self.profile.extent_size) / UNIT;
        let Some(disk) = self.disks.get_mut(device) else { return };
        let superblocks = 2 * PAGE_UNITS as u64;
        for unit in superblocks..disk.units().saturating_sub(extent) {
            disk.rot(unit, Value::garbage(unit));
        }
    }

    /// A device has fewer extents from now on. What lies behind them is cut off, or is garbage, but
    /// for the place of the superblocks, which are cleared.
    pub fn shrink_device(&mut self, device: usize, extents: u64) {
        let units = u64::from(self.profile.extent_size) / UNIT;
        let before = std::mem::replace(&mut self.extents[device], extents);
        let is_cut = self.random.bool();
        let disk = &mut self.disks[device];
        let superblocks = (before - 1) * units;
        for unit in superblocks..superblocks + 2 * PAGE_UNITS as u64 {
            assert!(disk.peek(unit) == Value::ZERO, "dev{device} has a superblock behind its end");
        }
        if is_cut {
            return disk.shrink(extents * units);
        }
        for unit in extents * units..superblocks {
            disk.rot(unit, Value::garbage(unit));
        }
    }
}

/// One past the last unit of an operation.
fn end_of(action: &Action) -> u64 {
    match action {
        Action::Write { start, values, .. } => start + values.len() as u64,
        Action::Read { start, count } | Action::Discard { start, count } => start + count,
        Action::Flush | Action::Fence => 0,
    }
}
