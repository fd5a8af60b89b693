//! Replay: the log behind the checkpoint, then the ring behind the log, in LSN order (R6, R13).

use std::sync::Arc;

use crate::change::Site;
use crate::engine::Engine;
use crate::entry::{Composite, Entry};
use crate::error::MapperError;
use crate::format::record::Change;
use crate::format::superblock::Superblock;
use crate::format::wal::{WalExpect, WalStop, begins_later_commit, block_position, decode_block};
use crate::format::{Limits, Place, Problem, Structure};
use crate::geometry::PAGE_BYTES;
use crate::io::Page;
use crate::mutation::{Mutation, active};
use crate::pool::FreeSpace;
use crate::ring::RingRecord;
use crate::stripe::stripe_index;
use crate::units::{DeviceIndex, Epoch, ExtentIndex, Lsn, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;

use super::{OpenReport, READ_PAGES};

/// A replay under way: the log, then the ring.
#[derive(Debug)]
pub(super) struct Replay {
    engine: Engine,
    limits: Limits,
    expect: WalExpect,
    /// Limit of blocks still to be read.
    left: u64,
    ended: bool,
    /// Blocks behind the end still to be read: a later commit there means that the log has not
    /// ended but rotted.
    scan: u64,
    scanned: u64,
    /// Blocks that are read at once: one, where some could not be read.
    at_once: u64,
    /// Everything up to here is in the map.
    lsn: Lsn,
    checkpoint: Lsn,
    /// Extents used by the checkpoint's map, or by any change replayed since.
    before: FreeSpace,
    touched: Vec<PhysicalExtent>,
    blocks: u64,
    changes: u64,
    volume: Option<Arc<Volume>>,
}

impl Replay {
    pub(super) fn new(engine: Engine, superblock: &Superblock) -> Result<Self, MapperError> {
        // The pool's own goes with the changes meanwhile: it knows which extents are named.
        let before = engine.pool.free_space.lock().clone();
        Ok(Self {
            limits: superblock.limits()?,
            expect: WalExpect {
                pool_id: superblock.pool_id,
                sequence: superblock.wal_tail_sequence,
                previous: superblock.wal_tail_hash,
                min_epoch: Epoch(0),
                max_epoch: superblock.epoch,
                after: Lsn(0),
            },
            left: superblock.wal_blocks(),
            ended: superblock.clean,
            scan: 0,
            scanned: 0,
            at_once: READ_PAGES as u64,
            lsn: superblock.checkpoint_lsn,
            checkpoint: superblock.checkpoint_lsn,
            before,
            touched: Vec::new(),
            blocks: 0,
            changes: 0,
            volume: None,
            engine,
        })
    }

    /// The next blocks of the log to read; `None` at its end.
    pub(super) fn next_read(&mut self) -> Result<Option<(DeviceIndex, u64, usize)>, MapperError> {
        let left = if self.ended { self.scan - self.scanned } else { self.left };
        if left == 0 {
            return Ok(None);
        }
        let from = self.expect.sequence + self.scanned;
        let position = block_position(from, self.engine.wal.blocks);
        let to_wrap = self.engine.wal.blocks - position;
        let count = to_wrap.min(left).min(self.at_once);
        let (device, base) = self.engine.pool.place(self.engine.wal.start);
        let pages = usize::try_from(count).unwrap_or(READ_PAGES);
        Ok(Some((device, base + position * PAGE_BYTES, pages)))
    }

    /// Blocks can't be read. Whether that is known of each of them, and none is needed: behind the
    /// end, a block that can't be read proves nothing.
    pub(super) const fn unreadable(&mut self, pages: usize) -> bool {
        self.at_once = 1;
        if pages == 1 && self.ended {
            self.scanned += 1;
        }
        pages > 1 || self.ended
    }

    pub(super) fn took(
        &mut self,
        device: DeviceIndex,
        offset: u64,
        pages: &[Page],
    ) -> Result<(), MapperError> {
        for (page, at) in pages.iter().zip(0..) {
            let place = Place::Device { device, offset: offset + at * PAGE_BYTES };
            if self.ended {
                self.scanned += 1;
                let blocks = self.engine.wal.blocks;
                if begins_later_commit(&page.0, &self.expect, blocks) && !active(Mutation::NoChain)
                {
                    return Err(Problem::field(
                        "sequence",
                        self.expect.sequence,
                        "durable before a later commit",
                    )
                    .of(Structure::WalBlock, place)
                    .into());
                }
                continue;
            }
            let block = match decode_block(&page.0, &self.expected(&page.0), &self.limits, place) {
                Ok(block) => block,
                Err(WalStop::End(_)) => {
                    self.ended = true;
                    self.scan = self.left;
                    self.scanned = 1;
                    continue;
                }
                Err(WalStop::Corrupt(error)) => return Err(error.into()),
            };
            for (lsn, change) in &block {
                self.apply(&change, lsn)?;
            }
            self.expect = block.next(&self.expect);
            self.blocks += 1;
            self.left -= 1;
            self.engine.wal.next = self.expect.sequence;
            self.engine.wal.last_sum = self.expect.previous;
        }
        Ok(())
    }

    /// Returns the expected properties of the next block. Without the rule they are the block's
    /// own.
    fn expected(&self, page: &[u8]) -> WalExpect {
        if !active(Mutation::NoChain) {
            return self.expect;
        }
        let previous =
            page.get(56..64).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        WalExpect { previous, min_epoch: Epoch(0), after: Lsn(0), ..self.expect }
    }

    /// The ring behind the log; then the free map is derived, and the engine is ready.
    pub(super) fn finish(mut self, report: &mut OpenReport) -> Result<Engine, MapperError> {
        report.log_blocks = self.blocks;
        report.log_changes = self.changes;
        self.engine.pool.progress.0.durable.store(self.lsn.0, crate::sync::Ordering::SeqCst);
        let from_ring = self.ring_records()?;
        report.ring_changes = 0;
        let mut highest = self.lsn;
        for record in &from_ring {
            highest = highest.max(record.lsn);
            if record.lsn > self.lsn || active(Mutation::RingsUnmerged) {
                self.apply(&record.change, record.lsn)?;
                report.ring_changes += 1;
            }
        }
        highest = highest.max(self.lsn);
        if active(Mutation::ReplayedIsDurable) {
            self.engine.pool.progress.0.durable.store(highest.0, crate::sync::Ordering::SeqCst);
        }
        self.engine.start_from(highest);
        self.derive_free_space()?;
        Ok(self.engine)
    }

    fn ring_records(&self) -> Result<Vec<RingRecord>, MapperError> {
        let lost = |problem: crate::ring::RingProblem| MapperError::RingLost {
            problem: problem.to_string(),
        };
        let mut records = self.engine.pool.ring.recover().map_err(lost)?;
        if active(Mutation::RingsUnmerged) {
            records.sort_by_key(|record| (record.slot, record.position));
        }
        Ok(records)
    }

    /// R6: each change once, in rising order, and none that the state holds already.
    fn apply(&mut self, change: &Change, lsn: Lsn) -> Result<(), MapperError> {
        if lsn <= self.lsn && !active(Mutation::ReplayOld) && !active(Mutation::RingsUnmerged) {
            return Ok(());
        }
        self.lsn = self.lsn.max(lsn);
        self.changes += 1;
        match *change {
            Change::Map { volume, extent, physical, valid } => {
                self.map(volume, extent, Entry::Mapped { physical, valid }, lsn)
            }
            Change::Composite { volume, extent, overlay, top, base, under } => {
                let entry = Entry::Composite(Composite { overlay, top, base, under });
                self.map(volume, extent, entry, lsn)
            }
            Change::Unmap { volume, extent } => self.map(volume, extent, Entry::Unmapped, lsn),
            Change::UnmapLeaf { volume, slot } => self.unmap_slot(volume, slot),
            ref structure => {
                self.volume = None;
                let applied = self.engine.apply_structure(structure, lsn);
                self.settle();
                match applied {
                    // With rules taken out, replay meets states that never were.
                    Err(_) if cfg!(feature = "mutations") && active(Mutation::ReplayOld) => Ok(()),
                    other => other,
                }
            }
        }
    }

    fn volume(&mut self, id: VolumeId) -> Result<Arc<Volume>, MapperError> {
        if let Some(volume) = self.volume.as_ref().filter(|v| v.identity.id == id) {
            return Ok(Arc::clone(volume));
        }
        let volume = self.engine.pool.volume(id)?;
        self.volume = Some(Arc::clone(&volume));
        Ok(volume)
    }

    fn map(
        &mut self,
        id: VolumeId,
        extent: ExtentIndex,
        new: Entry,
        lsn: Lsn,
    ) -> Result<(), MapperError> {
        // Its checksum holds, but only extents of the pool may enter the map.
        let is_known = new.extents().all(|physical| self.before.contains(physical))
            && new.valid() & !self.engine.pool.geometry.full_bitmap() == 0;
        if !is_known {
            return Err(MapperError::Internal(
                "a change maps an extent that the pool does not have",
            ));
        }
        self.touched.extend(new.extents());
        let Ok(volume) = self.volume(id) else {
            return if active(Mutation::ReplayOld) {
                Ok(())
            } else {
                Err(MapperError::NoVolume(id.to_string()))
            };
        };
        let pool = Arc::clone(&self.engine.pool);
        let directory = volume.directory.load();
        if extent.slot().0 >= directory.slot_count() {
            return Err(MapperError::Internal("the log maps beyond a volume's end"));
        }
        self.engine.ensure_leaves(1)?;
        let site = Site {
            pool: &pool,
            volume: &volume,
            directory: &directory,
            ring_slot: pool.tuning.workers,
        };
        let old = site.entry(extent);
        if old == new {
            return Ok(());
        }
        let dropped = site.set_unrecorded(&mut self.engine.spares, lsn, extent, old, new);
        let mut space = pool.free_space.lock();
        for physical in new.without(&old) {
            // After a move, several entries name the same new extent.
            if let Some((counts, local)) = pool.counts_of(physical)
                && !space.mark_used(physical)
            {
                counts.add(local, 1);
            }
        }
        for physical in dropped {
            match pool.counts_of(physical) {
                Some((counts, local)) if counts.extra(local) > 0 => drop(counts.sub(local)),
                _ => space.free(physical, 1),
            }
        }
        drop(space);
        if !pool.leaf_drops.lock().is_empty() {
            self.settle();
        }
        Ok(())
    }

    fn unmap_slot(&mut self, id: VolumeId, slot: SlotIndex) -> Result<(), MapperError> {
        let volume = self.volume(id)?;
        let directory = volume.directory.load();
        let Some(leaf) = directory.load(slot) else { return Ok(()) };
        let pool = Arc::clone(&self.engine.pool);
        volume.count_less(crate::change::totals(&pool.arena, leaf));
        directory.store(slot, None);
        let site = Site {
            pool: &pool,
            volume: &volume,
            directory: &directory,
            ring_slot: pool.tuning.workers,
        };
        site.mark_dirty(slot);
        let stripe = stripe_index(volume.identity.lineage, slot);
        self.engine.releases.release_leaf(&pool, leaf, stripe);
        // Nothing is passed down to the media: extents that the release freed may be mapped in the
        // durable state.
        self.settle();
        Ok(())
    }

    /// Frees dropped references at once, since no reader exists during replay.
    fn settle(&mut self) {
        self.engine.settle_replayed();
    }

    /// The free map is derived from the map. Extents that only the durable state or an intermediate
    /// one used stay taken until the recovery commit is durable (R13).
    fn derive_free_space(&mut self) -> Result<(), MapperError> {
        let pool = Arc::clone(&self.engine.pool);
        if self.changes == 0 {
            *pool.free_space.lock() = std::mem::take(&mut self.before);
            self.engine.update_limits();
            return Ok(());
        }
        let mut space = FreeSpace::of(&self.engine.superblock.devices)?;
        for extent in self.engine.fixed_extents() {
            space.mark_used(extent);
        }
        for extent in self.engine.pages.extents() {
            space.mark_used(extent);
        }
        for volume in pool.volumes.read().values() {
            for (_, leaf) in volume.directory.load().iter() {
                for physical in pool.arena.entries(leaf).flat_map(|entry| entry.extents()) {
                    // One that was mapped and unmapped again may hold pages by now.
                    if self.engine.pages.contains(physical) {
                        let text = "an extent holds both metadata and data after the log";
                        return Err(MapperError::Internal(text));
                    }
                    space.mark_used(physical);
                }
            }
        }
        let mut recovered = Vec::new();
        let mut keep = |first: PhysicalExtent, count: u64, space: &mut FreeSpace| {
            for extent in (first.0..first.0 + count).map(PhysicalExtent) {
                if space.mark_used(extent) {
                    recovered.push((extent, 1));
                }
            }
        };
        for (first, count) in self.before.used_runs() {
            keep(first, count, &mut space);
        }
        for &extent in &self.touched {
            keep(extent, 1, &mut space);
        }
        self.engine.recovered = recovered;
        *pool.free_space.lock() = space;
        self.engine.update_limits();
        debug_assert!(self.lsn >= self.checkpoint, "replay goes forward");
        Ok(())
    }
}
