//! Writing the superblock: one pair of copies on every device, a flush, then the other pair.
//!
//! At any time one pair is whole. When both are written, all copies are equal, so that nothing
//! on the media refers to the former state any more. Copies at the former end of a device that
//! becomes smaller are cleared between the two, while a copy at the front still says where they
//! are.

use crate::format::superblock::{DeviceTable, Superblock, copy_offsets};
use crate::geometry::Geometry;
use crate::io::{IoOp, Page};
use crate::mutation::{Mutation, active};
use crate::sync::Ordering;
use crate::units::DeviceIndex;

use super::queue::Purpose;
use super::{Engine, NO_MEMORY};

/// Where the writing of a superblock is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Idle,
    /// Both pairs of a device that was not in the pool before: it must be known to be of the pool
    /// before the others name it. Or those at the new end of a device that becomes smaller: no data
    /// may lie there when a copy names that end.
    Ahead,
    AheadFlush,
    FirstPair,
    FirstFlush,
    Clearing,
    ClearingFlush,
    SecondPair,
    SecondFlush,
    /// Durable, and not yet seen by its requester.
    Done,
}

/// The one superblock that may be on its way.
#[derive(Debug, Default)]
pub(crate) struct SuperWriter {
    state: State,
    block: Option<Superblock>,
    fresh: Option<usize>,
    former_end: Option<FormerEnd>,
}

/// The end of a device before it became smaller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FormerEnd {
    /// The device's place in the table.
    pub(crate) device: usize,
    /// The extents that it had.
    pub(crate) extents: u64,
}

impl FormerEnd {
    /// Returns that of the device which has fewer extents in one table than in the other.
    fn between(before: &DeviceTable, after: &DeviceTable) -> Option<Self> {
        let mut pairs = before.as_slice().iter().zip(after.as_slice()).enumerate();
        pairs.find_map(|(device, (before, after))| {
            let is_smaller = after.is_present() && after.extents < before.extents;
            (is_smaller && after.uuid == before.uuid)
                .then_some(Self { device, extents: before.extents })
        })
    }
}

impl SuperWriter {
    pub(crate) fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// A device, by position, that joins with the next superblock.
    pub(crate) fn set_fresh(&mut self, device: usize) {
        self.fresh = Some(device);
    }
}

impl Engine {
    /// Starts to write a superblock: this one, with the next generation.
    pub(crate) fn write_superblock(&mut self, mut block: Superblock) {
        block.generation = self.superblock.generation + 1;
        block.previous_sum = self.superblock.sum();
        let former_end = FormerEnd::between(&self.superblock.devices, &block.devices);
        self.supers.former_end = former_end;
        self.supers.block = Some(block);
        if let Some(device) = self.supers.fresh.take() {
            self.supers.state = State::Ahead;
            self.push_copies(true, Some(device));
            self.push_copies(false, Some(device));
        } else if let Some(end) = former_end {
            self.supers.state = State::Ahead;
            self.push_end(end.device);
        } else {
            self.supers.state = State::FirstPair;
            self.push_copies(true, None);
        }
    }

    /// Starts to write the present superblock once more, to copies that a crash left behind, and to
    /// clear those at an end that a device had before.
    pub(crate) fn repeat_superblock(&mut self, former_end: Option<FormerEnd>) {
        self.supers.former_end = former_end;
        self.supers.block = Some(self.superblock.clone());
        self.supers.state = State::FirstPair;
        self.push_copies(true, None);
    }

    /// Takes note that it is durable. `false` while it isn't.
    pub(crate) fn superblock_written(&mut self) -> bool {
        if self.supers.state != State::Done {
            return false;
        }
        self.supers.state = State::Idle;
        if let Some(block) = self.supers.block.take() {
            self.superblock = block;
        }
        true
    }

    pub(super) fn step_supers(&mut self) {
        let out = self.io.out_for(|p| matches!(p, Purpose::Super | Purpose::SuperFlush));
        if out > 0 {
            return;
        }
        self.supers.state = match self.supers.state {
            State::Ahead => {
                self.push_flushes();
                State::AheadFlush
            }
            State::AheadFlush => {
                self.push_copies(true, None);
                State::FirstPair
            }
            State::FirstPair => {
                self.push_flushes();
                State::FirstFlush
            }
            State::FirstFlush if self.supers.former_end.is_some() => {
                self.clear_former_end();
                State::Clearing
            }
            State::Clearing => {
                self.push_flushes();
                State::ClearingFlush
            }
            State::FirstFlush | State::ClearingFlush => {
                self.push_copies(false, None);
                State::SecondPair
            }
            State::SecondPair => {
                self.push_flushes();
                State::SecondFlush
            }
            State::SecondFlush => State::Done,
            other => other,
        };
    }

    fn push_copies(&mut self, first: bool, only: Option<usize>) {
        let Some(block) = self.supers.block.clone() else { return };
        for (device, record) in block.devices.present() {
            if only.is_some_and(|only| only != device) {
                continue;
            }
            let offsets = copy_offsets(self.pool.geometry, record.extents);
            let this_device = DeviceIndex(u8::try_from(device).unwrap_or(u8::MAX));
            let copy = Superblock { this_device, ..block.clone() };
            let pair = if first { offsets.first_pair } else { offsets.second_pair };
            for offset in pair {
                self.push_page(device, offset, |page| copy.encode(page));
            }
        }
    }

    /// Writes both copies at the end of a device.
    fn push_end(&mut self, device: usize) {
        let Some(block) = self.supers.block.clone() else { return };
        let Some(record) = block.devices.as_slice().get(device) else { return };
        let this_device = DeviceIndex(u8::try_from(device).unwrap_or(u8::MAX));
        let copy = Superblock { this_device, ..block.clone() };
        for offset in end_offsets(self.pool.geometry, record.extents) {
            self.push_page(device, offset, |page| copy.encode(page));
        }
    }

    fn clear_former_end(&mut self) {
        let Some(end) = self.supers.former_end.take() else { return };
        for offset in end_offsets(self.pool.geometry, end.extents) {
            self.push_page(end.device, offset, |page| page.0.fill(0));
        }
    }

    fn push_page(&mut self, device: usize, offset: u64, fill: impl FnOnce(&mut Page)) {
        let Some(mut buffer) = self.io.buffer(1) else {
            self.pool.fail(NO_MEMORY);
            return;
        };
        fill(&mut buffer.pages_mut()[0]);
        let handle = self.pool.handles[device].load(Ordering::Relaxed);
        let op = IoOp::Write { offset, buffer, fua: false };
        self.io.push(DeviceIndex(handle), op, Purpose::Super);
    }

    fn push_flushes(&mut self) {
        if active(Mutation::NoOpeningFlush) && !self.opened {
            self.pool.want_engine();
            return;
        }
        let Some(table) = self.supers.block.as_ref().map(|block| block.devices) else { return };
        for (device, _) in table.present() {
            let handle = self.pool.handles[device].load(Ordering::Relaxed);
            self.io.push(DeviceIndex(handle), IoOp::Flush, Purpose::SuperFlush);
        }
    }
}

/// Where the copies at the end of a device with this many extents lie.
const fn end_offsets(geometry: Geometry, extents: u64) -> [u64; 2] {
    let offsets = copy_offsets(geometry, extents);
    [offsets.first_pair[1], offsets.second_pair[1]]
}
