//! Writing the superblock: one pair of copies on every device, a flush, then the other pair.
//!
//! At any time one pair is whole. When both are written, all copies are equal, so that nothing
//! on the media refers to the former state any more.

use crate::format::superblock::{Superblock, copy_offsets};
use crate::io::IoOp;
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
    /// before the others name it.
    Fresh,
    FreshFlush,
    FirstPair,
    FirstFlush,
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
        self.supers.block = Some(block);
        match self.supers.fresh.take() {
            Some(device) => {
                self.supers.state = State::Fresh;
                self.push_copies(true, Some(device));
                self.push_copies(false, Some(device));
            }
            None => {
                self.supers.state = State::FirstPair;
                self.push_copies(true, None);
            }
        }
    }

    /// Starts to write the present superblock once more, to copies that a crash left behind.
    pub(crate) fn repeat_superblock(&mut self) {
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
            State::Fresh => {
                self.push_flushes();
                State::FreshFlush
            }
            State::FreshFlush => {
                self.push_copies(true, None);
                State::FirstPair
            }
            State::FirstPair => {
                self.push_flushes();
                State::FirstFlush
            }
            State::FirstFlush => {
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
            let handle = self.pool.handles[device].load(Ordering::Relaxed);
            let pair = if first { offsets.first_pair } else { offsets.second_pair };
            for offset in pair {
                let Some(mut buffer) = self.io.buffer(1) else {
                    self.pool.fail(NO_MEMORY);
                    return;
                };
                copy.encode(&mut buffer.pages_mut()[0]);
                let op = IoOp::Write { offset, buffer, fua: false };
                self.io.push(DeviceIndex(handle), op, Purpose::Super);
            }
        }
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
