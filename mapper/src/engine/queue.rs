//! IO commands on their way to the caller and back.

use std::collections::VecDeque;

use crate::io::{IoBuffer, IoCommand, IoOp};
use crate::units::{DeviceIndex, PhysicalExtent};

/// Commands out at once for a checkpoint: enough to keep a disk busy, few enough that a flush
/// isn't stuck behind a second of writes.
pub(crate) const MAX_WRITES_OUT: usize = 4;

/// The purpose of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// A data flush of the running commit.
    CommitFlush { device: usize },
    /// Log blocks of the running commit.
    CommitLog,
    /// Pages of the running checkpoint.
    CheckpointPages,
    /// A flush of the running checkpoint, of pages and data.
    CheckpointFlush { device: usize },
    /// A superblock copy.
    Super,
    /// A flush between superblock pairs.
    SuperFlush,
    /// Passes a freed run down to the media before it is reused.
    Passdown { first: PhysicalExtent, count: u64 },
    /// A part of the copy of a fold.
    Fold { token: u64 },
    /// A part of the copy of a move.
    Move { token: u64 },
}

/// Commands not yet taken by the caller, and those out with it.
#[derive(Debug, Default)]
pub(crate) struct CommandQueue {
    waiting: VecDeque<IoCommand>,
    out: Vec<(u64, Purpose)>,
    next: u64,
    buffers: Vec<IoBuffer>,
}

impl CommandQueue {
    pub(crate) fn new(buffers: Vec<IoBuffer>) -> Self {
        Self { waiting: VecDeque::with_capacity(64), out: Vec::with_capacity(64), next: 1, buffers }
    }

    pub(crate) fn push(&mut self, device: DeviceIndex, op: IoOp, purpose: Purpose) {
        let id = self.next;
        self.next += 1;
        self.out.push((id, purpose));
        self.waiting.push_back(IoCommand { id, device, op });
    }

    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(crate) fn pop(&mut self) -> Option<IoCommand> {
        self.waiting.pop_front()
    }

    /// Takes a finished command back, with its memory. `None`: it isn't one of ours.
    pub(crate) fn finish(
        &mut self,
        command: IoCommand,
    ) -> Option<(Purpose, DeviceIndex, &'static str)> {
        let at = self.out.iter().position(|(id, _)| *id == command.id)?;
        let (_, purpose) = self.out.swap_remove(at);
        let name = command.op.name();
        match command.op {
            IoOp::Write { buffer, .. } | IoOp::Read { buffer, .. } => self.buffers.push(buffer),
            _ => {}
        }
        Some((purpose, command.device, name))
    }

    /// The fold or move that a command belongs to.
    pub(crate) fn copy_of(&self, command: &IoCommand) -> Option<Purpose> {
        let purpose = self.out.iter().find(|(id, _)| *id == command.id)?.1;
        matches!(purpose, Purpose::Fold { .. } | Purpose::Move { .. }).then_some(purpose)
    }

    /// Forgets a command that came back, whose memory is not one of these.
    pub(crate) fn forget(&mut self, command: &IoCommand) {
        self.out.retain(|(id, _)| *id != command.id);
    }

    /// Memory for a command: one of those that came back, or a new one.
    pub(crate) fn buffer(&mut self, pages: usize) -> Option<IoBuffer> {
        let fitting = self.buffers.iter().enumerate().filter(|(_, b)| b.capacity() >= pages);
        if let Some((at, _)) = fitting.min_by_key(|(_, b)| b.capacity()) {
            let mut buffer = self.buffers.swap_remove(at);
            buffer.set_pages(pages);
            return Some(buffer);
        }
        IoBuffer::new(pages)
    }

    pub(crate) fn return_buffer(&mut self, buffer: IoBuffer) {
        self.buffers.push(buffer);
    }

    pub(crate) fn out_for(&self, purpose: impl Fn(&Purpose) -> bool) -> usize {
        self.out.iter().filter(|(_, p)| purpose(p)).count()
    }

    /// Forgets commands that the caller has not taken yet: the pool has failed.
    pub(crate) fn drop_waiting(&mut self) {
        while let Some(command) = self.waiting.pop_front() {
            let _ = self.finish(command);
        }
    }
}
