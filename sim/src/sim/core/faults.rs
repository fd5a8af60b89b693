//! Faults of the devices.

use super::super::content::{Kind, PAGE_UNITS, UNIT_BYTES, Value};
use super::super::disk::{Action, Answered, Fault};
use super::super::marks::Mark;
use super::{Core, Origin, is_superblock};

impl Core {
    pub(super) fn fault(&mut self, device: usize, at: usize) -> Fault {
        let flush = matches!(self.disks[device].flights()[at].action, Action::Flush);
        if flush && std::mem::take(&mut self.fail_flush) {
            return Fault::Media;
        }
        if self.calm {
            return Fault::None;
        }
        let flight = &self.disks[device].flights()[at];
        let (data, write, read, flush) = (
            flight.data,
            matches!(flight.action, Action::Write { .. }),
            matches!(flight.action, Action::Read { .. }),
            matches!(flight.action, Action::Flush),
        );
        let profile = &self.profile;
        let chance = match (data, read, write, flush) {
            (_, _, _, true) => profile.flush_error,
            (true, true, ..) | (true, _, true, _) => profile.data_error,
            (false, true, ..) => profile.metadata_read_error,
            (false, _, true, _) => profile.metadata_write_error,
            _ => 0.0,
        };
        let silent = if write && !data { profile.silent * 0.1 } else { 0.0 };
        if self.chance(chance) {
            return if data && write && self.random.bool() { Fault::NoSpace } else { Fault::Media };
        }
        if !self.damaged && self.chance(silent) {
            return self.silent_fault(device, at).unwrap_or(Fault::None);
        }
        Fault::None
    }

    /// A silent fault of a page or superblock write. The log is left alone: a last block that was
    /// never stored cannot be distinguished from one that was never written. Client data is never
    /// hit either: it has no checksums.
    fn silent_fault(&mut self, device: usize, at: usize) -> Option<Fault> {
        let Action::Write { start, values, .. } = &self.disks[device].flights()[at].action else {
            return None;
        };
        let (start, pages) = (*start, values.len() / PAGE_UNITS);
        if !values.iter().step_by(PAGE_UNITS).all(|value| self.is_page(*value)) {
            return None;
        }
        if self.random.bool() {
            return Some(Fault::Dropped);
        }
        let disk = &self.disks[device];
        let targets: Vec<u64> = (start + 8..disk.units().saturating_sub(8 * pages as u64))
            .step_by(PAGE_UNITS)
            .filter(|unit| (0..pages as u64).all(|page| self.is_page(disk.peek(unit + page * 8))))
            .collect();
        if targets.is_empty() {
            return Some(Fault::Dropped);
        }
        Some(Fault::Misdirected(targets[self.random.usize(..targets.len())] - start))
    }

    /// Whether the unit is the first of a metadata page or a superblock.
    #[must_use]
    pub fn is_page(&self, value: Value) -> bool {
        let mut bytes = [0; UNIT_BYTES];
        matches!(value.kind(), Kind::Metadata(_)) && {
            self.contents.bytes(value, &mut bytes);
            is_superblock(&bytes) || bytes.starts_with(b"BDpg")
        }
    }

    pub(super) fn count_fault(&mut self, answered: &Answered) {
        let data = self
            .origins
            .get(&answered.token)
            .is_some_and(|origin| !matches!(origin, Origin::Command(_)))
            || self.folds.remove(&answered.token);
        let mark = match (answered.fault, &answered.action) {
            (Fault::None, _) => return,
            (Fault::Dropped, _) => Mark::DroppedWrite,
            (Fault::Misdirected(_), _) => Mark::Misdirected,
            (Fault::NoSpace, _) => Mark::WriteNoSpace,
            (Fault::Media, Action::Flush) => Mark::FlushError,
            (Fault::Media, Action::Read { .. }) if data => Mark::ReadError,
            (Fault::Media, Action::Read { .. }) => Mark::MetadataReadError,
            (Fault::Media, _) if data => Mark::WriteError,
            (Fault::Media, _) => Mark::MetadataWriteError,
        };
        self.marks.hit(mark);
        match mark {
            Mark::FlushError => self.flush_failed = true,
            Mark::MetadataWriteError => self.metadata_failed = true,
            Mark::DroppedWrite | Mark::Misdirected => self.damaged = true,
            _ => {}
        }
    }

    /// Changes a random metadata unit on a random device: rot, zeroes, or another unit's bytes.
    pub fn damage(&mut self) -> Option<String> {
        let device = self.random.usize(..self.disks.len());
        let units = self.disks[device].units();
        let disk = &self.disks[device];
        let held: Vec<u64> =
            (0..units).step_by(8).filter(|unit| self.is_page(disk.peek(*unit))).collect();
        if held.is_empty() {
            return None;
        }
        let unit = held[self.random.usize(..held.len())];
        let value = match self.random.u8(..3) {
            0 => Value::ZERO,
            1 => disk.peek(held[self.random.usize(..held.len())]),
            _ => {
                let mut bytes = [0; UNIT_BYTES];
                self.contents.bytes(disk.peek(unit), &mut bytes);
                bytes[self.random.usize(..UNIT_BYTES)] ^= 1 << self.random.u8(..8);
                self.contents.intern(&bytes)
            }
        };
        self.disks[device].rot(unit, value);
        self.damaged = true;
        self.marks.hit(Mark::Rot);
        Some(format!("rot: dev{device} unit {unit} becomes {value:?}"))
    }
}
