//! A device that becomes smaller while its pool is used.
//!
//! The extents behind its new end leave, and the one before that end with them: the superblocks
//! are to lie there. The record of the device says so until they are empty, then it has the new
//! size.

use crate::engine::Engine;
use crate::engine::control::{ControlId, Outcome};
use crate::error::MapperError;
use crate::format::superblock::{DeviceRecord, DeviceState, DeviceTable, Leaving, MIN_EXTENTS};

use super::Room;

impl Engine {
    /// Begins to shrink a device, with the next superblock.
    pub(in super::super) fn shrink_device(&mut self, id: ControlId, device: u8, size: u64) {
        match self.prepare_shrink(usize::from(device), size) {
            Ok(false) => self.end_when_durable(id, Outcome::Unchanged),
            Ok(true) => self.begin_checkpoint_for(id, Outcome::Shrinking),
            Err(error) => self.end(id, Err(error)),
        }
    }

    /// Checks it, and has nothing new put behind the new end. `false`: the device shrinks to that
    /// size already, or has it.
    fn prepare_shrink(&mut self, device: usize, size: u64) -> Result<bool, MapperError> {
        let record = self.present_device(device)?;
        let extent = self.pool.geometry.extent_size();
        let keeps = size / extent;
        if keeps > record.extents {
            let allowed = "no larger than the device is in its pool";
            return Err(MapperError::Invalid { field: "size", value: size, allowed });
        }
        let refuse =
            |extents: u64, why| Err(MapperError::TooSmall { size, least: extents * extent, why });
        let fixed = self.fixed_extents_of(device);
        if keeps < fixed {
            return refuse(fixed, "for superblocks, log and reserve at their places");
        }
        let leaving = Leaving { device, from: keeps - 1 };
        if self.is_leaving_alone(leaving)? {
            return Ok(false);
        }
        if keeps == record.extents {
            // At most the part of an extent behind the last one goes: nothing is in it.
            return Ok(self.drop_part(device, size));
        }
        let room = self.room_without(leaving);
        match self.least_extents(keeps, record.extents, room) {
            Some(least) if least == keeps => {}
            Some(least) => {
                return refuse(least, "for what is in use, set aside and below the low mark");
            }
            None => return Err(self.no_space(room.needed, room.free)),
        }
        let state = DeviceState::Shrinking;
        self.begin_to_leave(leaving, DeviceRecord { state, keeps, ..record })?;
        Ok(true)
    }

    /// Notes a size for the next superblock that has as many extents. Returns whether it is new.
    fn drop_part(&mut self, device: usize, size: u64) -> bool {
        let mut records = self.superblock.devices.as_slice().to_vec();
        let is_smaller = records.get(device).is_some_and(|record| size < record.size);
        if is_smaller {
            records[device].size = size;
            self.controls.devices = DeviceTable::new(&records);
        }
        is_smaller
    }

    /// Extents of a device up to the end of those that never move, with one for a volume where
    /// there are such, and the superblocks behind.
    fn fixed_extents_of(&self, device: usize) -> u64 {
        let block = &self.superblock;
        let runs =
            [(block.wal_start, block.wal_extents), (block.reserve_start, block.reserve_extents)];
        let ends = runs.into_iter().filter(|(_, extents)| *extents > 0).map(|(start, extents)| {
            let (at, local) = crate::pool::split(start);
            if at == device { local.0 + u64::from(extents) + 2 } else { 0 }
        });
        ends.max().unwrap_or(0).max(MIN_EXTENTS)
    }

    /// Extents from `keeps` on with which the rest of the pool has the room, and does not become
    /// low; `None` where only as many as there are would do.
    fn least_extents(&self, keeps: u64, present: u64, room: Room) -> Option<u64> {
        let total = self.pool.free_space.lock().total_count() - (present - keeps);
        let mut least = keeps;
        while least < present {
            // With each extent more one more is free, or one less is to be moved.
            let more = least - keeps;
            let needed = room.needed.saturating_add(self.low_mark(total + more));
            let missing = needed.saturating_sub(room.free + more);
            if missing == 0 {
                // Those that volumes hold for writes to come may be among them.
                let held = if more > 0 { room.granted } else { 0 };
                return Some(least + held).filter(|least| *least < present);
            }
            least = least.saturating_add(missing);
        }
        None
    }
}
