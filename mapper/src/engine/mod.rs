//! The pool thread's half of the mapper: commits, checkpoints, grants, structure changes.
//!
//! The engine is stepped: [`Engine::poll`] gives IO commands until there are none, and
//! [`Engine::complete`] takes each one back. It never waits and never asks the time.

mod account;
pub(crate) mod catalogue;
mod checkpoint;
mod commit;
mod control;
mod copy;
mod diff;
mod evacuate;
mod feature;
mod fold;
mod grant;
mod group;
pub(crate) mod grow;
pub(crate) mod info;
mod keep;
pub(crate) mod labels;
mod pace;
pub(crate) mod pages;
mod placing;
pub(crate) mod queue;
pub(crate) mod release;
mod space;
pub(crate) mod structure;
mod superblocks;
#[cfg(all(test, not(loom)))]
pub(crate) mod testing;
pub(crate) mod tree;
pub(crate) mod trees;
mod usage;

use std::sync::Arc;

pub use account::{Accounting, Figures, MAX_ACCOUNTED};
pub use control::{Control, ControlId, Outcome};
pub use evacuate::{EvacuationStatus, RebalanceState, RebalanceStatus};
pub use fold::FoldStatus;
pub use grow::LARGEST_DEVICE;
pub use info::fixed_extents;
pub use keep::{Kept, Shortage};
pub use placing::STRIPE_BYTES;
pub use release::Releasing;
pub use usage::{Use, UsedExtent};

pub use crate::diff::{DiffPart, DiffRange, DiffRequest, RangeState};
pub use crate::volume::VolumeSummary;
pub use crate::volumes::Sums;

use crate::change::Spares;
use crate::error::MapperError;
use crate::format::superblock::Superblock;
use crate::format::wal::WalBlockBuilder;
use crate::io::{IoBuffer, IoCommand, IoError};
use crate::mutation::{Mutation, active};
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{Lsn, PageAddress, PhysicalExtent};

use catalogue::Catalogue;
use checkpoint::Checkpoint;
use commit::Commit;
use control::Controls;
use labels::LabelPages;
use pages::PageSpace;
use queue::{CommandQueue, Purpose};
use release::Releases;
use space::SpacePolicy;
pub(crate) use superblocks::FormerEnd;
use superblocks::SuperWriter;
use trees::Trees;

/// The log's place and how far it is written.
#[derive(Debug)]
pub(crate) struct Wal {
    pub(crate) start: PhysicalExtent,
    pub(crate) blocks: u64,
    /// The number of the next block.
    pub(crate) next: u64,
    /// Sum of the block before it.
    pub(crate) last_sum: u64,
    /// The first block that a replay would need.
    pub(crate) tail: u64,
}

impl Wal {
    pub(crate) const fn used(&self) -> u64 {
        self.next - self.tail
    }

    /// Blocks that may be written before a checkpoint frees some.
    pub(crate) const fn free(&self) -> u64 {
        self.blocks - self.used()
    }
}

/// Owner of a pool's metadata; there is one per open pool.
#[derive(Debug)]
pub struct Engine {
    pub(crate) pool: Arc<Pool>,
    pub(crate) now_ns: u64,
    pub(crate) io: CommandQueue,
    pub(crate) wal: Wal,
    pub(crate) commit: Commit,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) supers: SuperWriter,
    pub(crate) superblock: Superblock,
    pub(crate) releases: Releases,
    pub(crate) pages: PageSpace,
    pub(crate) catalogue: Catalogue,
    pub(crate) trees: Trees,
    pub(crate) labels: LabelPages,
    pub(crate) controls: Controls,
    pub(crate) spares: Spares,
    /// Index pages of trees that structure changes have made since the last checkpoint.
    pub(crate) new_tree_pages: u64,
    /// When the IO epoch was advanced last, or not awaited.
    awaited_ns: u64,
    /// Extents used by a state that only replay has seen; free once that is durable (R13).
    pub(crate) recovered: Vec<(PhysicalExtent, u64)>,
    pub(crate) space: SpacePolicy,
    pub(crate) folds: fold::Folds,
    pub(crate) evacuation: evacuate::Evacuation,
    pub(crate) rebalance: evacuate::Rebalance,
    pub(crate) feature: feature::Feature,
    pub(crate) closing: bool,
    /// The pool is clean, and nothing is done to it any more.
    pub(crate) closed: bool,
    /// The superblock of this open is durable; no log block is written before (R15).
    pub(crate) opened: bool,
    builder: WalBlockBuilder,
}

/// The result of opening a pool, from which an engine is made.
#[derive(Debug)]
pub(crate) struct EngineParts {
    pub(crate) pool: Arc<Pool>,
    pub(crate) wal: Wal,
    pub(crate) superblock: Superblock,
    pub(crate) pages: PageSpace,
    pub(crate) catalogue: Catalogue,
    pub(crate) trees: Trees,
    pub(crate) labels: LabelPages,
    /// Pages of labels that are lost: the next checkpoint frees them.
    pub(crate) lost_pages: Vec<PageAddress>,
}

impl Engine {
    pub(crate) fn new(parts: EngineParts) -> Result<Self, MapperError> {
        let EngineParts { pool, wal, superblock, mut pages, catalogue, trees, labels, lost_pages } =
            parts;
        let leaving = superblock.devices.leaving();
        pages.leave(leaving);
        let blocks = pool.tuning.commit_blocks.max(1);
        // Two for a commit that wraps around the log's end, some for the pages of checkpoints, and
        // one for each copy of the superblock that is written at a time.
        let copies = 2 * superblock.devices.present().count();
        let sizes = std::iter::repeat_n(blocks, 2 + queue::MAX_WRITES_OUT)
            .chain(std::iter::repeat_n(1, copies));
        let buffers: Option<Vec<IoBuffer>> = sizes.map(IoBuffer::new).collect();
        let mut buffers = buffers.ok_or(MapperError::Limit { what: "memory for IO", limit: 0 })?;
        if !pool.tuning.sparing {
            // A commit should not wait for the kernel to find memory.
            buffers.iter_mut().for_each(|buffer| buffer.as_bytes_mut().fill(0));
        }
        let slots = pool.tuning.workers + 1;
        let mut engine = Self {
            now_ns: 0,
            io: CommandQueue::new(buffers),
            wal,
            commit: Commit::new(&pool, slots, blocks),
            checkpoint: Checkpoint::default(),
            supers: SuperWriter::default(),
            superblock,
            releases: Releases::default(),
            pages,
            catalogue,
            trees,
            labels,
            controls: Controls::default(),
            spares: Spares::with_capacity(64),
            new_tree_pages: 0,
            awaited_ns: 0,
            recovered: Vec::new(),
            space: SpacePolicy::new(pool.tuning.marks),
            folds: fold::Folds::new(pool.tuning.fold_rate),
            evacuation: evacuate::Evacuation::new(pool.tuning.evacuation_rate, leaving),
            rebalance: evacuate::Rebalance::default(),
            feature: feature::Feature::default(),
            closing: false,
            closed: false,
            opened: false,
            builder: WalBlockBuilder::new(),
            pool,
        };
        engine.releases.dead_pages = lost_pages;
        engine.controls.next_volume_id = engine.superblock.next_volume_id;
        for volume in engine.pool.volumes.read().values() {
            let (id, lineage) = (volume.identity.id, volume.identity.lineage);
            engine.controls.lineages.insert(id, lineage);
        }
        let pool = Arc::clone(&engine.pool);
        engine.space.note_all_reserving(&pool.volumes.read());
        engine.space.expect_holders(engine.trees.len());
        // No page extents are taken here: until the log is replayed the free map is too free.
        Ok(engine)
    }

    /// The pool it serves.
    #[must_use]
    pub const fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Advances all work that can proceed, and returns the next IO command. `now_ns` is the
    /// caller's monotonic clock. Call it until it returns `None`, after each event.
    pub fn poll(&mut self, now_ns: u64) -> Option<IoCommand> {
        self.now_ns = self.now_ns.max(now_ns);
        // One step may unblock another, which then requests another turn of the engine.
        for _ in 0..STEPS_PER_POLL {
            // Before waiting answers are given: after a failure nothing more may be written (R8).
            if self.closed || self.has_failed() {
                self.io.drop_waiting();
                self.controls.fail_all(&self.pool);
                return None;
            }
            if let Some(command) = self.io.pop() {
                return Some(command);
            }
            self.step_supers();
            self.step_commit();
            self.step_checkpoint();
            self.step_feature();
            self.step_controls();
            self.step_releases();
            self.step_awaited_epoch();
            self.step_folds();
            // A device rarely leaves or shrinks, or is evened out with others.
            if !self.moves_nothing() {
                self.step_evacuation();
            }
            self.step_grants();
            self.step_space();
            if !self.io.has_waiting() && !self.pool.engine_wanted() {
                return None;
            }
        }
        self.pool.want_engine();
        if self.has_failed() { None } else { self.io.pop() }
    }

    /// Takes a command back with its result. A failed flush or write of metadata stops the pool
    /// for good (R8).
    pub fn complete(&mut self, command: IoCommand, result: Result<(), IoError>) {
        if let Some(purpose) = self.io.copy_of(&command) {
            self.io.forget(&command);
            return match purpose {
                Purpose::Move { token } => self.move_done(token, command.op, result),
                Purpose::Fold { token } => self.fold_done(token, command.op, result),
                _ => {}
            };
        }
        let Some((purpose, device, operation)) = self.io.finish(command) else { return };
        let result = if active(Mutation::FlushErrorIgnored) && operation == "flush" {
            Ok(())
        } else {
            result
        };
        if let (Err(error), false) = (result, matches!(purpose, Purpose::Passdown { .. })) {
            self.pool.fail(MapperError::Io { operation, device: device.0, error });
            self.io.drop_waiting();
            return;
        }
        match purpose {
            Purpose::CommitFlush { device } => self.commit_flushed(device),
            Purpose::CommitLog => self.commit_logged(),
            Purpose::CheckpointPages => {}
            Purpose::CheckpointFlush { device } => self.checkpoint_flushed(device),
            Purpose::Super | Purpose::SuperFlush => {}
            Purpose::Fold { .. } | Purpose::Move { .. } => {}
            Purpose::Passdown { first, count } => {
                self.releases.passed_down(&self.pool, first, count);
                self.pool.bump();
            }
        }
    }

    /// Passes all free space down to the media, as freed extents are: a former process may have
    /// freed some and ended before it did that. Allocation goes on meanwhile.
    pub fn scrub(&mut self) {
        if self.pool.tuning.passdown && !self.pool.read_only {
            self.releases.begin_scrub();
            self.pool.want_engine();
        }
    }

    /// Whether freed or free extents still have to be passed down to the media.
    #[must_use]
    pub fn is_scrubbed(&self) -> bool {
        self.releases.is_idle()
            && !self.releases.is_scrubbing()
            && self.pool.unshown.lock().is_empty()
    }

    /// When [`Self::poll`] should be called at the latest, in nanoseconds of the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        // A reader leaves log and ring as they are, so that no timer runs.
        if self.has_failed() || self.pool.read_only {
            return None;
        }
        let commit = self.commit_deadline();
        let checkpoint = self.checkpoint_deadline();
        let after = |pause_ns| self.now_ns.saturating_add(pause_ns);
        let drains = match self.awaited_epoch() {
            0 => self.releases.has_drains().then(|| after(DRAIN_POLL_NS)),
            _ if self.now_ns < self.awaited_ns.saturating_add(AWAITED_LIMIT_NS) => {
                Some(after(AWAITED_POLL_NS))
            }
            _ => Some(after(DRAIN_POLL_NS)),
        };
        let folds = self.fold_deadline();
        let rest = self.space_deadline();
        let rest = match self.moves_nothing() {
            true => rest,
            false => rest.into_iter().chain(self.evacuation_deadline()).min(),
        };
        [commit, checkpoint, drains, folds, rest].into_iter().flatten().min()
    }

    /// Whether the pool is at rest: nothing is under way and nothing waits to be done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.commit.is_idle()
            && self.checkpoint.is_idle()
            && self.supers.is_idle()
            && self.controls.is_idle()
            && self.releases.is_idle()
            && self.pool.unshown.lock().is_empty()
            && self.folds.is_idle()
            && self.moves_nothing()
            && self.uncommitted() == 0
    }

    /// LSNs assigned and not yet taken by a commit.
    pub(crate) fn uncommitted(&self) -> u64 {
        self.pool.gate.last_assigned().0.saturating_sub(self.commit.consumed.0)
    }

    pub(crate) fn durable(&self) -> Lsn {
        self.pool.durable_lsn()
    }

    /// Everything up to this LSN is durable now: wakes the requests that waited for it.
    pub(crate) fn rise(&mut self, durable: Lsn) {
        let lsn =
            self.pool.progress.0.durable.fetch_max(durable.0, Ordering::SeqCst).max(durable.0);
        self.releases.durable(&self.pool, Lsn(lsn));
        self.pool.bump();
    }

    /// Numbers go on behind the highest that was replayed.
    pub(crate) fn start_from(&mut self, highest: Lsn) {
        let gate = self.pool.gate.close();
        let last = gate.last_assigned();
        if highest > last {
            // Gaps are allowed: these numbers belong to the former process.
            let _ = gate.take_lsn(highest.0 - last.0);
        }
        drop(gate);
        self.commit.consumed = self.pool.durable_lsn();
    }

    /// The replayed changes are durable; no state of the former process is left.
    pub(crate) fn is_recovered(&self) -> bool {
        self.commit.is_idle()
            && self.checkpoint.is_idle()
            && self.uncommitted() == 0
            && self.recovered.is_empty()
            && !self.pool.wake.0.commit.load(Ordering::SeqCst)
    }

    /// Requests a checkpoint at the next opportunity.
    pub(crate) fn want_checkpoint(&mut self) {
        self.checkpoint.request();
        self.pool.want_engine();
    }

    /// Ensures that there are leaves for `changes` changes.
    pub(crate) fn ensure_leaves(&mut self, changes: usize) -> Result<(), MapperError> {
        let full = |_| MapperError::Limit { what: "memory for leaves", limit: 0 };
        // Workers may take the new ones first.
        while !self.spares.ensure(&self.pool, changes) {
            self.pool.arena.refill(self.pool.tuning.spare_leaves.max(1)).map_err(full)?;
        }
        Ok(())
    }

    /// Frees at once what replay has dropped: no reader exists yet.
    pub(crate) fn settle_replayed(&mut self) {
        let drops = std::mem::take(&mut *self.pool.leaf_drops.lock());
        for drop in drops {
            self.releases.release_leaf(&self.pool, drop.leaf, drop.stripe);
        }
        self.releases.settle(&self.pool);
    }

    /// The rule taken out: the ring is emptied when it has been replayed (R13).
    pub(crate) fn forget_ring(&mut self) {
        for slot in 0..self.pool.ring.slots() {
            self.pool.ring.trim(slot, self.pool.ring.head(slot) + 1);
        }
    }

    fn has_failed(&self) -> bool {
        self.pool.failure().is_some_and(|error| !(self.closing && error == MapperError::Closed))
    }

    fn awaited_epoch(&self) -> u64 {
        self.pool.wake.0.epoch.load(Ordering::SeqCst)
    }

    /// Advances the IO epoch for writes that wait for older ones to end (R5f).
    fn step_awaited_epoch(&mut self) {
        let awaited = self.awaited_epoch();
        if awaited == 0 {
            self.awaited_ns = self.now_ns;
            return;
        }
        let advanced = self.pool.epochs.try_advance();
        let reached = self.pool.epochs.reached(awaited);
        if reached {
            // A later one may be awaited by now: that one stays.
            let word = &self.pool.wake.0.epoch;
            let _ = word.compare_exchange(awaited, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
        if advanced || reached {
            self.awaited_ns = self.now_ns;
            self.pool.bump();
            self.pool.want_engine();
        }
    }

    fn step_releases(&mut self) {
        let hold_leaves = self.checkpoint.holds_leaves();
        // One piece of work at a time: a commit must not wait for a volume to be taken apart.
        if self.releases.step(&self.pool, hold_leaves) {
            self.pool.want_engine();
        }
        // The list keeps its memory, so that the next push allocates nothing.
        let mut drops = self.pool.leaf_drops.lock();
        for drop in drops.drain(..) {
            let item = release::Item::Leaf { leaf: drop.leaf, stripe: drop.stripe };
            self.releases.drain(drop.tag, item);
        }
        drop(drops);
        if self.pool.tuning.passdown {
            self.releases.send_passdown(&self.pool, &mut self.io);
        }
        if self.pool.free_space.lock().freed_twice {
            self.pool.fail(MapperError::Internal("an extent was freed that was free already"));
        }
        if std::mem::take(&mut self.releases.unshared) {
            self.pool.want_folds();
        }
        if std::mem::take(&mut self.releases.freed) > 0 {
            self.pool.bump();
        }
    }
}

/// Nothing may be left unwritten for lack of a buffer: the pool stops instead.
const NO_MEMORY: MapperError = MapperError::Limit { what: "memory for IO", limit: 0 };

/// Rounds of steps in one poll: workers that keep asking must not keep the caller in it.
const STEPS_PER_POLL: usize = 8;

/// How often the engine looks whether IO that still uses dropped extents has ended, when nothing
/// else calls it: 10 ms is short beside the second until a timer commit.
const DRAIN_POLL_NS: u64 = 10_000_000;

/// The same where writers wait for that IO: about the time that one takes.
const AWAITED_POLL_NS: u64 = 200_000;
/// IO that takes longer than this is looked at less often, as above.
const AWAITED_LIMIT_NS: u64 = 100_000_000;
