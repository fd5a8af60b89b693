//! Checkpoint: the map as it was at one LSN, written beside the old one, then switched to (R17).
//!
//! Cut (all changed leaves are noted while nothing can change) -> leaves -> index pages ->
//! catalogue -> flush of every device -> superblock. A leaf that changes before it is written is
//! copied first. Structure changes wait until a checkpoint has ended.

use crate::directory::Directory;
use crate::format::PageRef;
use crate::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord, encode_catalogue};
use crate::format::leaf_page::encode_leaf;
use crate::format::page::PageStamp;
use crate::format::superblock::Superblock;
use crate::geometry::MAX_DEVICES;
use crate::io::{IoBuffer, IoOp, Page};
use crate::leaf::Leaf;
use crate::mutation::{Mutation, active};
use crate::sync::Ordering;
use crate::units::{DeviceIndex, LeafId, Lsn, PageAddress, SlotIndex, VolumeId};

use super::queue::{MAX_WRITES_OUT, Purpose};
use super::{Engine, NO_MEMORY, VolumeTree};

/// Where a checkpoint is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    #[default]
    Idle,
    Leaves,
    Index,
    Catalogue,
    CatalogueIndex,
    /// All pages are sent; waiting for them.
    Written,
    Flushing,
    Super,
}

/// A leaf that was dirty at the cut.
#[derive(Clone, Copy, Debug)]
struct Pending {
    volume: VolumeId,
    slot: SlotIndex,
    leaf: LeafId,
    stripe: usize,
}

/// Pages that lie in a row, being filled.
#[derive(Debug)]
struct Batch {
    first: PageAddress,
    count: u64,
    filled: usize,
    buffer: IoBuffer,
}

/// The one checkpoint that may be under way.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    phase: Phase,
    /// The map is written as of this LSN.
    lsn: Lsn,
    tail: u64,
    tail_sum: u64,
    pending: Vec<Pending>,
    next: usize,
    trees: Vec<VolumeId>,
    tree_at: usize,
    cursor: (usize, usize),
    batch: Option<Batch>,
    /// Pages of the former checkpoint that this one replaces.
    dead: Vec<PageAddress>,
    sums: [u64; MAX_DEVICES],
    wanted: bool,
    /// Pages that the running checkpoint may need besides those of leaves.
    index_pages: u64,
    /// Marks the pool clean: nothing may change any more.
    closes: bool,
    last_ns: u64,
    /// Checkpoints finished since the pool was opened.
    pub(crate) finished: u64,
}

impl Checkpoint {
    pub(crate) fn is_idle(&self) -> bool {
        self.phase == Phase::Idle && !self.wanted
    }

    pub(crate) fn is_running(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Whether dropped leaves must stay as they are: they may have to be written yet.
    pub(crate) fn holds_leaves(&self) -> bool {
        self.phase == Phase::Leaves
    }

    /// Pages that the running checkpoint may still ask for.
    pub(crate) fn pages_to_write(&self) -> u64 {
        (self.pending.len() - self.next) as u64 + self.index_pages
    }

    pub(crate) fn request(&mut self) {
        self.wanted = true;
    }
}

impl Engine {
    pub(super) fn checkpoint_deadline(&self) -> Option<u64> {
        (self.wal.used() > 0 && !self.checkpoint.is_running()).then(|| {
            self.checkpoint.last_ns.saturating_add(self.pool.tuning.checkpoint_interval_ns)
        })
    }

    pub(super) fn step_checkpoint(&mut self) {
        let mut again = true;
        while again {
            again = match self.checkpoint.phase {
                Phase::Idle => {
                    self.checkpoint_is_due() && self.pages_suffice() && self.begin_checkpoint(false)
                }
                Phase::Leaves => self.write_leaves(),
                Phase::Index => self.write_index(),
                Phase::Catalogue => self.write_catalogue(),
                Phase::CatalogueIndex => self.write_catalogue_index(),
                Phase::Written => self.flush_pages(),
                Phase::Flushing => self.start_super(),
                Phase::Super => self.finish_checkpoint(),
            };
        }
    }

    /// R17d: a checkpoint is possible whenever the log is not empty, even if nothing was numbered
    /// since the last one; else a flush could wait for ever on a full log.
    fn checkpoint_is_due(&self) -> bool {
        if !self.opened || !self.supers.is_idle() || self.controls.holds_checkpoints() {
            return false;
        }
        let dirty = self.pool.pages.0.dirty.load(Ordering::Relaxed) > 0;
        if self.wal.used() == 0 && !dirty && !self.checkpoint.wanted {
            return false;
        }
        if active(Mutation::NoIdleCheckpoint)
            && self.pool.gate.last_assigned() == self.superblock.checkpoint_lsn
        {
            return false;
        }
        let old = self.checkpoint_deadline().is_some_and(|at| at <= self.now_ns);
        self.checkpoint.wanted
            || self.wal.used() > self.wal.blocks / 2
            || old
            || self.pages_are_short()
    }

    /// Notes everything that has changed since the last cut, while nothing can change (R17a).
    pub(super) fn begin_checkpoint(&mut self, closes: bool) -> bool {
        let pool = std::sync::Arc::clone(&self.pool);
        let volumes = pool.volumes.read();
        let gate = pool.gate.close();
        self.checkpoint.lsn = gate.last_assigned();
        for volume in volumes.values() {
            let Some(tree) = self.trees.get_mut(&volume.identity.id) else { continue };
            let lineage = volume.identity.lineage;
            let note = Note { pool: &pool, volume: volume.identity.id, lineage };
            note.dirty_slots(&volume.directory.load(), tree, &mut self.checkpoint.pending);
        }
        // No page that this checkpoint needs is promised: the limits are updated once the number of
        // remaining pages is known. Writes in flight that found their slot dirty have no promise,
        // and it is clean now.
        pool.pages.0.limit.store(0, Ordering::SeqCst);
        pool.pages.0.limit_freeing.store(0, Ordering::SeqCst);
        for stripe in &pool.stripes {
            for write in stripe.lock().unpromised() {
                write.page_promised = true;
                pool.pages.0.promised.fetch_add(1, Ordering::Relaxed);
            }
        }
        pool.pages.0.dirty.store(0, Ordering::Relaxed);
        pool.pages.0.wanted.store(false, Ordering::Relaxed);
        pool.pages.0.strict.store(false, Ordering::Relaxed);
        self.checkpoint.tail = self.wal.next;
        self.checkpoint.tail_sum = self.wal.last_sum;
        drop(gate);
        drop(volumes);
        let checkpoint = &mut self.checkpoint;
        checkpoint.dead.append(&mut self.releases.dead_pages);
        checkpoint.trees.extend(self.trees.keys());
        checkpoint.phase = Phase::Leaves;
        checkpoint.closes = closes;
        checkpoint.wanted = false;
        self.checkpoint.index_pages =
            self.index_pages(self.checkpoint.pending.len() as u64) + self.new_tree_pages;
        self.new_tree_pages = 0;
        if active(Mutation::TruncateEarly) {
            self.wal.tail = self.checkpoint.tail;
        }
        true
    }

    fn stamp(&self) -> PageStamp {
        PageStamp {
            pool_id: self.pool.pool_id,
            tree: 0,
            node: self.superblock.node,
            index: 0,
            lsn: self.checkpoint.lsn,
            epoch: self.superblock.epoch,
        }
    }

    /// The next page to fill; `None` while enough is out.
    fn next_page(&mut self) -> Option<PageAddress> {
        if self.checkpoint.batch.as_ref().is_some_and(|b| b.filled as u64 == b.count) {
            self.send_batch();
        }
        if self.checkpoint.batch.is_none() {
            if self.io.out_for(|p| *p == Purpose::CheckpointPages) >= MAX_WRITES_OUT {
                return None;
            }
            let max = self.pool.tuning.commit_blocks.max(1);
            if self.pages.free_pages() == 0 && !self.add_page_extent() {
                self.pool.fail(crate::error::MapperError::Internal("no page for a checkpoint"));
                return None;
            }
            let Some(buffer) = self.io.buffer(max) else {
                self.pool.fail(NO_MEMORY);
                return None;
            };
            let (first, count) = self.pages.allocate(max as u64)?;
            self.checkpoint.batch = Some(Batch { first, count, filled: 0, buffer });
        }
        self.checkpoint.batch.as_ref().map(|b| PageAddress(b.first.0 + b.filled as u64))
    }

    /// Fills the page that [`Self::next_page`] named.
    fn fill_page<R>(&mut self, fill: impl FnOnce(&mut Self, &mut Page) -> R) -> Option<R> {
        let mut batch = self.checkpoint.batch.take()?;
        let filled = batch.filled;
        let result = batch.buffer.pages_mut().get_mut(filled).map(|page| fill(self, page));
        self.checkpoint.batch = Some(batch);
        result
    }

    fn keep_page(&mut self) {
        if let Some(batch) = &mut self.checkpoint.batch {
            batch.filled += 1;
        }
    }

    fn send_batch(&mut self) {
        let Some(mut batch) = self.checkpoint.batch.take() else { return };
        let unused = batch.count - batch.filled as u64;
        self.pages.free_run(PageAddress(batch.first.0 + batch.filled as u64), unused);
        if batch.filled == 0 {
            self.io.return_buffer(batch.buffer);
            return;
        }
        batch.buffer.set_pages(batch.filled);
        let (device, offset) = self.page_offset(batch.first);
        let op = IoOp::Write { offset, buffer: batch.buffer, fua: false };
        self.io.push(device, op, Purpose::CheckpointPages);
    }

    fn page_offset(&self, address: PageAddress) -> (DeviceIndex, u64) {
        let (extent, page) = self.pool.geometry.page_place(address);
        let (device, base) = self.pool.place(extent);
        (device, base + page * crate::geometry::PAGE_BYTES)
    }

    fn write_leaves(&mut self) -> bool {
        while self.checkpoint.next < self.checkpoint.pending.len() {
            let Some(address) = self.next_page() else { return false };
            let pending = self.checkpoint.pending[self.checkpoint.next];
            let reference = self.leaf_reference(pending, address);
            if let Some(tree) = self.trees.get_mut(&pending.volume) {
                tree.tree.set(u64::from(pending.slot.0), reference);
            }
            self.checkpoint.next += 1;
        }
        self.checkpoint.pending.clear();
        (self.checkpoint.next, self.checkpoint.tree_at, self.checkpoint.cursor) = (0, 0, (0, 0));
        self.checkpoint.phase = Phase::Index;
        true
    }

    /// Writes a leaf as it was at the cut, unless another volume that shares it came first.
    fn leaf_reference(&mut self, pending: Pending, address: PageAddress) -> PageRef {
        let pool = std::sync::Arc::clone(&self.pool);
        let _stripe = pool.stripes[pending.stripe].lock();
        let meta = pool.arena.meta(pending.leaf);
        let live = meta.capture_pending.load(Ordering::Relaxed);
        let present = PageRef {
            address: PageAddress(meta.page.load(Ordering::Relaxed)),
            sum: meta.page_sum.load(Ordering::Relaxed),
        };
        let shadow = if live { None } else { self.take_shadow(pending.leaf) };
        if !live && shadow.is_none() {
            return present;
        }
        let source = pool.arena.leaf(shadow.unwrap_or(pending.leaf));
        let in_place = active(Mutation::PagesInPlace) && !present.is_none();
        let sum = if in_place {
            self.write_in_place(pending, source, present.address)
        } else {
            let stamp = self.leaf_stamp(pending);
            let sum = self.fill_page(|_, page| encode_leaf(page, &stamp, |i| source.load(i)));
            self.keep_page();
            sum.unwrap_or(0)
        };
        let own = PageRef { address: if in_place { present.address } else { address }, sum };
        if !present.is_none() && !in_place {
            self.checkpoint.dead.push(present.address);
        }
        meta.page.store(own.address.0, Ordering::Relaxed);
        meta.page_sum.store(own.sum, Ordering::Relaxed);
        meta.clean.store(live, Ordering::Relaxed);
        meta.capture_pending.store(false, Ordering::Relaxed);
        if let Some(shadow) = shadow {
            pool.arena.give_back(shadow);
        }
        own
    }

    fn leaf_stamp(&self, pending: Pending) -> PageStamp {
        PageStamp { tree: pending.volume.0, index: u64::from(pending.slot.0), ..self.stamp() }
    }

    fn take_shadow(&self, leaf: LeafId) -> Option<LeafId> {
        let mut shadows = self.pool.shadows.lock();
        let at = shadows.iter().position(|(of, _)| *of == leaf)?;
        Some(shadows.swap_remove(at).1)
    }

    /// The rule taken out: a page that the present superblock refers to is written over (R17c).
    fn write_in_place(&mut self, pending: Pending, source: &Leaf, address: PageAddress) -> u64 {
        let stamp = self.leaf_stamp(pending);
        let Some(mut buffer) = self.io.buffer(1) else {
            self.pool.fail(NO_MEMORY);
            return 0;
        };
        let sum = encode_leaf(&mut buffer.pages_mut()[0], &stamp, |i| source.load(i));
        let (device, offset) = self.page_offset(address);
        self.io.push(device, IoOp::Write { offset, buffer, fua: false }, Purpose::CheckpointPages);
        sum
    }

    fn write_index(&mut self) -> bool {
        while let Some(&id) = self.checkpoint.trees.get(self.checkpoint.tree_at) {
            let Some(address) = self.next_page() else { return false };
            let stamp = self.stamp();
            let wrote = self.fill_page(|engine, page| {
                let checkpoint = &mut engine.checkpoint;
                let tree = engine.trees.get_mut(&id)?;
                let before = tree.tree.root();
                let wrote = tree.tree.write_next(
                    &mut checkpoint.cursor,
                    address,
                    &stamp,
                    page,
                    &mut checkpoint.dead,
                );
                if wrote || before != tree.tree.root() {
                    let at = tree.place / usize::try_from(RECORDS_PER_PAGE).unwrap_or(1);
                    engine.catalogue.dirty[at] = true;
                }
                Some(wrote)
            });
            if wrote.flatten() == Some(true) {
                self.keep_page();
            } else {
                self.checkpoint.tree_at += 1;
                self.checkpoint.cursor = (0, 0);
            }
        }
        self.checkpoint.trees.clear();
        self.checkpoint.phase = Phase::Catalogue;
        true
    }

    fn write_catalogue(&mut self) -> bool {
        while let Some(at) = self.catalogue.dirty.iter().position(|dirty| *dirty) {
            let Some(address) = self.next_page() else { return false };
            let stamp = PageStamp { index: at as u64, ..self.stamp() };
            let sum = self.fill_page(|engine, page| {
                encode_catalogue(page, &stamp, |index| engine.record(at, index))
            });
            self.keep_page();
            let old = self.catalogue.tree.get(at as u64);
            if !old.is_none() {
                self.checkpoint.dead.push(old.address);
            }
            self.catalogue.tree.set(at as u64, PageRef { address, sum: sum.unwrap_or(0) });
            self.catalogue.dirty[at] = false;
        }
        self.checkpoint.phase = Phase::CatalogueIndex;
        true
    }

    /// Returns the catalogue's record of the volume at a place of a page.
    fn record(&self, page: usize, index: usize) -> Option<VolumeRecord> {
        let per_page = usize::try_from(RECORDS_PER_PAGE).unwrap_or(1);
        let id = (*self.catalogue.places.get(page * per_page + index)?)?;
        let tree = &self.trees.get(&id)?.tree;
        let volume = self.pool.volume(id).ok()?;
        let identity = volume.identity;
        Some(VolumeRecord {
            id,
            lineage: identity.lineage,
            origin: identity.origin,
            kind: identity.kind,
            block_size: identity.block_size,
            size: volume.size.load(Ordering::Acquire),
            created_lsn: identity.created,
            made: identity.made,
            root: tree.root(),
            levels: tree.stored_levels(),
            name: identity.name,
            settings: *volume.settings.lock(),
        })
    }

    fn write_catalogue_index(&mut self) -> bool {
        loop {
            let Some(address) = self.next_page() else { return false };
            let stamp = self.stamp();
            let wrote = self.fill_page(|engine, page| {
                let checkpoint = &mut engine.checkpoint;
                let cursor = &mut checkpoint.cursor;
                engine.catalogue.tree.write_next(
                    cursor,
                    address,
                    &stamp,
                    page,
                    &mut checkpoint.dead,
                )
            });
            if wrote != Some(true) {
                break;
            }
            self.keep_page();
        }
        self.checkpoint.cursor = (0, 0);
        self.send_batch();
        self.checkpoint.phase = Phase::Written;
        true
    }

    /// R17b: every device that holds pages, or data that the new map makes durable.
    fn flush_pages(&mut self) -> bool {
        if self.io.out_for(|p| *p == Purpose::CheckpointPages) > 0 {
            return false;
        }
        self.checkpoint.phase = Phase::Flushing;
        if active(Mutation::CheckpointUnflushed) {
            return true;
        }
        for device in 0..self.superblock.devices.as_slice().len() {
            if active(Mutation::CheckpointFlushesFirst) && device > 0 {
                continue;
            }
            self.checkpoint.sums[device] = self.pool.written_on(device);
            let handle = self.pool.handles[device].load(Ordering::Relaxed);
            let purpose = Purpose::CheckpointFlush { device };
            self.io.push(DeviceIndex(handle), IoOp::Flush, purpose);
        }
        true
    }

    pub(super) fn checkpoint_flushed(&mut self, device: usize) {
        self.pool.note_flushed(device, self.checkpoint.sums[device]);
    }

    fn start_super(&mut self) -> bool {
        if self.io.out_for(|p| matches!(p, Purpose::CheckpointFlush { .. })) > 0 {
            return false;
        }
        if active(Mutation::DurableEarly) {
            self.rise(self.checkpoint.lsn);
        }
        let closes = self.checkpoint.closes;
        let block = Superblock {
            clean: closes,
            boot_id: if closes { [0; 16] } else { self.superblock.boot_id },
            checkpoint_lsn: self.checkpoint.lsn,
            wal_tail_sequence: self.checkpoint.tail,
            wal_tail_hash: self.checkpoint.tail_sum,
            catalogue_root: self.catalogue.tree.root(),
            catalogue_levels: u8::try_from(self.catalogue.tree.level_count()).unwrap_or(u8::MAX),
            catalogue_records: u32::try_from(self.catalogue.places.len()).unwrap_or(u32::MAX),
            next_volume_id: self.controls.next_volume_id,
            ..self.controls.next_superblock(&self.superblock)
        };
        self.write_superblock(block);
        self.checkpoint.phase = Phase::Super;
        true
    }

    /// Both pairs are durable: extents that only the old state needed are free.
    fn finish_checkpoint(&mut self) -> bool {
        if !self.superblock_written() {
            return false;
        }
        self.wal.tail = self.checkpoint.tail;
        for address in self.checkpoint.dead.drain(..) {
            self.pages.free(address);
        }
        self.checkpoint.phase = Phase::Idle;
        self.checkpoint.index_pages = 0;
        self.checkpoint.last_ns = self.now_ns;
        self.checkpoint.finished += 1;
        self.rise(self.checkpoint.lsn);
        self.pool.want_engine();
        // Commands that waited for the end come before the next one.
        false
    }
}

/// Notes the dirty slots of one volume at a cut.
struct Note<'a> {
    pool: &'a crate::pool::Pool,
    volume: VolumeId,
    lineage: VolumeId,
}

impl Note<'_> {
    fn dirty_slots(&self, directory: &Directory, tree: &mut VolumeTree, out: &mut Vec<Pending>) {
        for word in 0..directory.dirty_words() {
            let mut bits = directory.take_dirty_word(word);
            while bits != 0 {
                let slot = u32::try_from(word).unwrap_or(u32::MAX) * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                self.slot(directory, SlotIndex(slot), tree, out);
            }
        }
    }

    fn slot(
        &self,
        directory: &Directory,
        slot: SlotIndex,
        tree: &mut VolumeTree,
        out: &mut Vec<Pending>,
    ) {
        let Some(leaf) = directory.load(slot) else {
            tree.tree.set(u64::from(slot.0), PageRef::NONE);
            return;
        };
        let meta = self.pool.arena.meta(leaf);
        if meta.clean.load(Ordering::Relaxed) {
            // Its page says it already; if it changes from now on, that is for the next one.
            let address = PageAddress(meta.page.load(Ordering::Relaxed));
            let own = PageRef { address, sum: meta.page_sum.load(Ordering::Relaxed) };
            tree.tree.set(u64::from(slot.0), own);
            return;
        }
        meta.capture_pending.store(true, Ordering::Relaxed);
        let stripe = crate::stripe::stripe_index(self.lineage, slot);
        out.push(Pending { volume: self.volume, slot, leaf, stripe });
    }
}
