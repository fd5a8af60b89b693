//! Group commit: capture completed changes as a cut, flush the data, write the log, then answer.
//!
//! The order is rules R1 to R4 and R6; each step here names the one it keeps.

use crate::format::record::Change;
use crate::format::wal::{WalStamp, block_position};
use crate::geometry::{MAX_DEVICES, PAGE_BYTES};
use crate::io::{IoBuffer, IoOp};
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::Pool;
use crate::ring::{Dropped, RingRecord};
use crate::stripe::stripe_index;
use crate::sync::Ordering;
use crate::units::{DeviceIndex, ExtentIndex, Lsn, VolumeId};

use super::queue::Purpose;
use super::release::Item;
use super::{Engine, NO_MEMORY};

/// Where a commit is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Idle,
    /// Data flushes are out.
    Flushing,
    /// Log blocks are out.
    Logging,
}

/// The one commit that may be under way.
#[derive(Debug)]
pub(crate) struct Commit {
    state: State,
    /// Everything up to here was taken from the rings by this commit or an earlier one.
    pub(crate) consumed: Lsn,
    /// Next position to be taken, per ring slot.
    positions: Vec<u64>,
    /// Positions before these were published by the former process: their dropped references do not
    /// concern this one.
    adopted: Vec<u64>,
    /// The next record of each slot, read and not taken.
    heads: Vec<Option<RingRecord>>,
    drops: Vec<(Lsn, Item)>,
    /// Completed writes per device when its flush was sent.
    sums: [u64; MAX_DEVICES],
    /// When the oldest change not yet taken was first seen.
    dirty_since: Option<u64>,
    max_blocks: usize,
    /// Blocks built and not yet sent, with the position of the first.
    blocks: Vec<(u64, IoBuffer)>,
}

impl Commit {
    pub(crate) fn new(pool: &Pool, slots: usize, max_blocks: usize) -> Self {
        let slots = slots.max(pool.ring.slots());
        let first = |slot| pool.ring.first_needed(slot);
        Self {
            state: State::Idle,
            consumed: pool.durable_lsn(),
            positions: (0..slots)
                .map(|s| if s < pool.ring.slots() { first(s) } else { 1 })
                .collect(),
            adopted: (0..slots)
                .map(|s| if s < pool.ring.slots() { pool.ring.head(s) + 1 } else { 1 })
                .collect(),
            heads: vec![None; slots],
            drops: Vec::with_capacity(1024),
            sums: [0; MAX_DEVICES],
            dirty_since: None,
            max_blocks,
            blocks: Vec::with_capacity(2),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.state == State::Idle
    }
}

impl Engine {
    /// When the timer will commit.
    pub(super) fn commit_deadline(&self) -> Option<u64> {
        let since = self.commit.dirty_since?;
        Some(since.saturating_add(self.pool.tuning.commit_interval_ns))
    }

    pub(super) fn step_commit(&mut self) {
        if self.commit.state == State::Idle {
            if self.uncommitted() > 0 && self.commit.dirty_since.is_none() {
                self.commit.dirty_since = Some(self.now_ns);
                self.pool.wake.0.dirty_noted.store(true, Ordering::SeqCst);
            }
            let asked = self.pool.wake.0.commit.load(Ordering::SeqCst);
            let due = self.commit_deadline().is_some_and(|at| at <= self.now_ns);
            // In a full log a commit gets nowhere; a checkpoint, due by then, makes room.
            let stuck = self.wal.free() == 0 && self.uncommitted() > 0;
            if (asked || due) && self.opened && !stuck {
                self.start_commit();
            }
        }
        if self.commit.state == State::Flushing
            && self.io.out_for(|p| matches!(p, Purpose::CommitFlush { .. })) == 0
        {
            self.start_logging();
        }
        if self.commit.state == State::Logging && self.io.out_for(|p| *p == Purpose::CommitLog) == 0
        {
            self.finish_commit();
        }
    }

    /// R2: the cut comes before the data flush. A flush request that arrives from here on waits
    /// for the next commit.
    fn start_commit(&mut self) {
        self.pool.wake.0.commit.store(false, Ordering::SeqCst);
        self.pool.progress.0.captured.fetch_add(1, Ordering::SeqCst);
        self.commit.dirty_since = None;
        self.pool.wake.0.dirty_noted.store(false, Ordering::SeqCst);
        if !active(Mutation::CaptureLate) {
            self.capture();
        }
        if active(Mutation::LogBeforeData) {
            self.start_logging();
            return;
        }
        // R1. The count of completed writes is read before the flush is sent: it covers those.
        let table = self.superblock.devices;
        for (device, _) in table.present() {
            let written = self.pool.written_on(device);
            self.commit.sums[device] = written;
            if active(Mutation::CommitFlushesFirst) && device > 0 {
                continue;
            }
            if written > self.pool.flushed.0[device].load(Ordering::SeqCst) {
                let handle = self.pool.handles[device].load(Ordering::Relaxed);
                self.io.push(DeviceIndex(handle), IoOp::Flush, Purpose::CommitFlush { device });
            }
        }
        self.commit.state = State::Flushing;
    }

    pub(super) fn commit_flushed(&mut self, device: usize) {
        self.pool.note_flushed(device, self.commit.sums[device]);
    }

    /// Takes records of all slots in LSN order up to the cut, as far as the log has room (R6).
    fn capture(&mut self) {
        let dropped = self.pool.wake.0.dropped.swap(false, Ordering::SeqCst);
        let assigned = self.pool.gate.last_assigned();
        let cut = self.pool.gate.cut();
        let mut room = self.wal.free().min(self.commit.max_blocks as u64);
        let durable = self.durable();
        let mut full = false;
        let mut run = None;
        while let Some(slot) = self.next_slot(cut, &mut run) {
            let Some(record) = self.commit.heads[slot].take() else { break };
            if record.lsn > durable && !self.log(&record, &mut room) {
                self.commit.heads[slot] = Some(record);
                full = true;
                break;
            }
            self.commit.positions[slot] = record.position + record.units;
            self.commit.consumed = self.commit.consumed.max(record.lsn);
            self.note_drop(slot, &record);
        }
        if !self.builder.is_empty() {
            self.seal_block();
        }
        if full {
            met(Situation::LogFull);
            // The rest is for the next commit, after a checkpoint if the log was full.
            self.pool.wake.0.commit.store(true, Ordering::SeqCst);
        } else {
            self.commit.consumed = self.commit.consumed.max(cut);
            if cut < assigned {
                // Another thread is publishing; a flush may wait for that.
                self.pool.wake.0.commit.store(true, Ordering::SeqCst);
            }
        }
        if dropped && (full || cut < assigned) {
            // It may be of a change that is left.
            self.pool.wake.0.dropped.store(true, Ordering::SeqCst);
        }
        if active(Mutation::TrimAtCapture) {
            self.trim();
        }
    }

    /// Whether the commit under way makes drops of references durable.
    pub(super) fn commits_drops(&self) -> bool {
        !self.commit.drops.is_empty()
    }

    /// The slot whose next record has the lowest LSN, if that is within the cut. A run names a slot
    /// and the LSN up to which no other slot has a record, so that not all slots are read for each
    /// record. What is published meanwhile is behind the cut.
    fn next_slot(&mut self, cut: Lsn, run: &mut Option<(usize, Lsn)>) -> Option<usize> {
        if let Some((slot, end)) = *run
            && self.head_of(slot).is_some_and(|lsn| lsn <= end)
        {
            return Some(slot);
        }
        let mut best: Option<(Lsn, usize)> = None;
        let mut end = cut;
        for slot in 0..self.pool.ring.slots() {
            if active(Mutation::CaptureOneSlot) && slot != 0 && slot != self.pool.tuning.workers {
                continue;
            }
            let Some(lsn) = self.head_of(slot).filter(|lsn| *lsn <= end) else { continue };
            match best {
                Some((lowest, _)) if lowest < lsn => end = lsn,
                lower => {
                    end = lower.map_or(cut, |(lsn, _)| lsn);
                    best = Some((lsn, slot));
                }
            }
        }
        *run = best.map(|(_, slot)| (slot, end));
        best.map(|(_, slot)| slot)
    }

    /// The LSN of a slot's next record.
    fn head_of(&mut self, slot: usize) -> Option<Lsn> {
        if self.commit.heads[slot].is_none() {
            self.commit.heads[slot] = self.pool.ring.read(slot, self.commit.positions[slot]);
        }
        self.commit.heads[slot].as_ref().map(|record| record.lsn)
    }

    /// Adds a record to the block being built, or to the next. `false`: no room in the log.
    fn log(&mut self, record: &RingRecord, room: &mut u64) -> bool {
        let fresh = self.builder.is_empty();
        if fresh && *room == 0 {
            return false;
        }
        if !self.builder.push(&record.change, record.lsn) {
            self.seal_block();
            if *room == 0 || !self.builder.push(&record.change, record.lsn) {
                return false;
            }
            *room -= 1;
        } else if fresh {
            *room -= 1;
        }
        true
    }

    /// Chains the block to the one before it and puts it where its number says.
    fn seal_block(&mut self) {
        let position = block_position(self.wal.next, self.wal.blocks);
        let stamp = WalStamp {
            pool_id: self.pool.pool_id,
            epoch: self.superblock.epoch,
            node: self.superblock.node,
            sequence: self.wal.next,
            previous: self.wal.last_sum,
            begins_commit: self.commit.blocks.is_empty(),
        };
        let continues = self
            .commit
            .blocks
            .last()
            .is_some_and(|(first, buffer)| first + buffer.pages().len() as u64 == position);
        if !continues {
            if !self.commit.blocks.is_empty() {
                met(Situation::CommitWrapped);
            }
            let Some(mut buffer) = self.io.buffer(self.commit.max_blocks) else {
                self.pool.fail(NO_MEMORY);
                return;
            };
            buffer.set_pages(0);
            self.commit.blocks.push((position, buffer));
        }
        if let Some((_, buffer)) = self.commit.blocks.last_mut() {
            let count = buffer.pages().len();
            buffer.set_pages(count + 1);
            if let Some(page) = buffer.pages_mut().last_mut() {
                self.wal.last_sum = self.builder.finish(page, &stamp);
                self.wal.next += 1;
            }
        }
    }

    /// Remembers the reference that the record drops; it takes effect when the record is durable
    /// (R10).
    fn note_drop(&mut self, slot: usize, record: &RingRecord) {
        if record.position < self.commit.adopted[slot] {
            return;
        }
        let (volume, logical) = match record.change {
            Change::Map { volume, extent, .. }
            | Change::Composite { volume, extent, .. }
            | Change::Unmap { volume, extent } => (volume, extent),
            Change::UnmapLeaf { volume, slot } => (volume, slot.first_extent()),
            _ => return,
        };
        let stripe = self.stripe_of(volume, logical);
        let item = match record.dropped {
            Dropped::Nothing => return,
            Dropped::Extent(physical) => Item::Extent { physical, stripe },
            Dropped::Leaf(leaf) => Item::Leaf { leaf, stripe },
        };
        if active(Mutation::ReuseAtCapture) {
            self.releases.drain(self.pool.epochs.current(), item);
        } else {
            self.commit.drops.push((record.lsn, item));
        }
    }

    fn stripe_of(&self, volume: VolumeId, logical: ExtentIndex) -> usize {
        let lineage = self.controls.lineage_of(&self.pool, volume);
        stripe_index(lineage, logical.slot())
    }

    /// R1: only now, with the data durable, the log.
    fn start_logging(&mut self) {
        if active(Mutation::CaptureLate) {
            self.capture();
        }
        let mut blocks = std::mem::take(&mut self.commit.blocks);
        for (position, buffer) in blocks.drain(..) {
            let (device, base) = self.pool.place(self.wal.start);
            let offset = base + position * PAGE_BYTES;
            self.io.push(device, IoOp::Write { offset, buffer, fua: true }, Purpose::CommitLog);
        }
        self.commit.blocks = blocks;
        self.commit.state = State::Logging;
    }

    pub(super) fn commit_logged(&mut self) {}

    /// R3, R4: the log is durable; flushes are answered, the ring is trimmed, drops count.
    fn finish_commit(&mut self) {
        self.commit.state = State::Idle;
        let consumed = self.commit.consumed;
        let mut drops = std::mem::take(&mut self.commit.drops);
        for (lsn, item) in drops.drain(..) {
            self.releases.drop_at(lsn, item);
        }
        self.commit.drops = drops;
        self.controls.forget_gone(consumed);
        let progress = &self.pool.progress.0;
        progress.durable.fetch_max(consumed.0, Ordering::SeqCst);
        progress.finished.store(progress.captured.load(Ordering::SeqCst), Ordering::SeqCst);
        // Before any waiter is woken for the new room.
        self.trim();
        if !self.recovered.is_empty() && self.uncommitted() == 0 {
            met(Situation::RecoveredFreed);
            let mut space = self.pool.free_space.lock();
            for (first, count) in self.recovered.drain(..) {
                space.free(first, count);
            }
        }
        self.rise(consumed);
        // Requests that arrived while it was under way are served by the next one.
        self.pool.want_engine();
    }

    /// R9: a record leaves the ring when its LSN is durable, not before.
    fn trim(&mut self) {
        for slot in 0..self.pool.ring.slots() {
            self.pool.ring.trim(slot, self.commit.positions[slot]);
        }
    }
}
