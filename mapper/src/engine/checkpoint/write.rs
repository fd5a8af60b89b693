//! The pages of a checkpoint: leaves, index pages, catalogue.

use super::super::queue::{MAX_WRITES_OUT, Purpose};
use super::super::tree::PageTree;
use super::super::{Engine, NO_MEMORY};
use super::{Pending, Phase};
use crate::arena::{Arena, LeafMeta};
use crate::error::MapperError;
use crate::format::PageRef;
use crate::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord, encode_catalogue};
use crate::format::labels::encode_labels;
use crate::format::leaf_page::{encode_composite_leaf, encode_leaf};
use crate::format::page::PageStamp;
use crate::format::superblock::COMPOSITE;
use crate::format::under_page::encode_under;
use crate::io::{IoBuffer, IoOp, Page};
use crate::mutation::{Mutation, Situation, active, met};
use crate::sync::Ordering;
use crate::units::{DeviceIndex, LeafId, PageAddress};

/// Pages that lie in a row, being filled.
#[derive(Debug)]
pub(super) struct Batch {
    first: PageAddress,
    count: u64,
    filled: usize,
    buffer: IoBuffer,
}

impl Engine {
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
            let mut run = self.pages.allocate(max as u64);
            if run.is_none() && self.add_page_extent() {
                run = self.pages.allocate(max as u64);
            }
            let Some((first, count)) = run else {
                self.pool.fail(MapperError::Internal("no page for a checkpoint"));
                return None;
            };
            let Some(buffer) = self.io.buffer(max) else {
                self.pool.fail(NO_MEMORY);
                return None;
            };
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

    pub(super) fn write_leaves(&mut self) -> bool {
        while self.checkpoint.next < self.checkpoint.pending.len() {
            let Some(address) = self.next_page() else { return false };
            let pending = self.checkpoint.pending[self.checkpoint.next];
            let reference = self.leaf_reference(pending, address);
            if let Some(tree) = self.trees.get_mut(pending.volume) {
                tree.set(u64::from(pending.slot.0), reference);
            }
            self.checkpoint.next += 1;
        }
        self.checkpoint.pending.clear();
        (self.checkpoint.next, self.checkpoint.tree_at, self.checkpoint.cursor) = (0, 0, (0, 0));
        self.checkpoint.phase = Phase::Index;
        true
    }

    /// Writes the bases of composite entries as they were at the cut, where they have changed.
    pub(super) fn write_bases(&mut self) -> bool {
        while self.checkpoint.next < self.checkpoint.pending.len() {
            let pending = self.checkpoint.pending[self.checkpoint.next];
            let pool = std::sync::Arc::clone(&self.pool);
            let _stripe = pool.stripes[pending.stripe].lock();
            if let Some(under) = self.bases_to_write(pending) {
                let Some(address) = self.next_page() else { return false };
                self.write_under(pending, under, address);
            }
            self.checkpoint.next += 1;
        }
        self.checkpoint.next = 0;
        self.checkpoint.phase = Phase::Leaves;
        true
    }

    /// The under leaf with the content of the cut, if no page has it yet.
    fn bases_to_write(&self, pending: Pending) -> Option<LeafId> {
        let arena = &self.pool.arena;
        let source = self.as_of_cut(pending.leaf)?;
        let under = arena.under(source).filter(|_| arena.composites(source) > 0)?;
        (!arena.meta(under).clean.load(Ordering::Relaxed)).then_some(under)
    }

    fn write_under(&mut self, pending: Pending, under: LeafId, address: PageAddress) {
        met(Situation::BasesWritten);
        let pool = std::sync::Arc::clone(&self.pool);
        let (stamp, source) = (self.leaf_stamp(pending), pool.arena.leaf(under));
        let sum = self.fill_page(|_, page| encode_under(page, &stamp, |i| source.load(i)));
        self.keep_page();
        let present = pool.arena.under(pending.leaf).map(|present| pool.arena.meta(present));
        if let Some(present) = present {
            let page = PageAddress(present.page.load(Ordering::Relaxed));
            if page.0 != 0 {
                self.checkpoint.dead.push(page);
            }
        }
        let meta = pool.arena.meta(under);
        for meta in present.into_iter().chain([meta]) {
            meta.page.store(address.0, Ordering::Relaxed);
            meta.page_sum.store(sum.unwrap_or(0), Ordering::Relaxed);
        }
        meta.clean.store(true, Ordering::Relaxed);
    }

    /// The leaf that has the content of the cut: itself, or the copy made when it changed. `None`
    /// if it was written already, for another volume that shares it.
    fn as_of_cut(&self, leaf: LeafId) -> Option<LeafId> {
        if self.pool.arena.meta(leaf).capture_pending.load(Ordering::Relaxed) {
            return Some(leaf);
        }
        self.pool.shadows.lock().iter().find(|(of, _)| *of == leaf).map(|(_, shadow)| *shadow)
    }

    /// Writes a leaf as it was at the cut, unless another volume that shares it came first.
    fn leaf_reference(&mut self, pending: Pending, address: PageAddress) -> PageRef {
        let pool = std::sync::Arc::clone(&self.pool);
        let _stripe = pool.stripes[pending.stripe].lock();
        let meta = pool.arena.meta(pending.leaf);
        let live = meta.capture_pending.load(Ordering::Relaxed);
        let present = page_of(meta);
        let shadow = if live { None } else { self.take_shadow(pending.leaf) };
        if !live && shadow.is_none() {
            return present;
        }
        let source = shadow.unwrap_or(pending.leaf);
        if self.checkpoint.incompat & COMPOSITE == 0 && pool.arena.composites(source) > 0 {
            // The pool could not be opened. As it is on the media it can.
            pool.fail(MapperError::Internal("a composite entry in a pool without the feature"));
        }
        let in_place = active(Mutation::PagesInPlace) && !present.is_none();
        let sum = if in_place {
            self.write_in_place(pending, source, present.address)
        } else {
            let stamp = self.leaf_stamp(pending);
            let sum = self.fill_page(|_, page| encode(&pool.arena, source, page, &stamp));
            self.keep_page();
            sum.unwrap_or(0)
        };
        let own = PageRef { address: if in_place { present.address } else { address }, sum };
        if !present.is_none() && !in_place {
            self.checkpoint.dead.push(present.address);
        }
        self.drop_bases(pending.leaf, source);
        meta.page.store(own.address.0, Ordering::Relaxed);
        meta.page_sum.store(own.sum, Ordering::Relaxed);
        meta.clean.store(live, Ordering::Relaxed);
        meta.capture_pending.store(false, Ordering::Relaxed);
        if let Some(shadow) = shadow {
            pool.arena.give_back(shadow);
        }
        own
    }

    /// The page of bases that a leaf had is dead when the leaf, as it was written, has none.
    fn drop_bases(&mut self, leaf: LeafId, written: LeafId) {
        let arena = &self.pool.arena;
        let Some(under) = arena.under(leaf).filter(|_| arena.composites(written) == 0) else {
            return;
        };
        let page = PageAddress(arena.meta(under).page.swap(0, Ordering::Relaxed));
        arena.meta(under).clean.store(false, Ordering::Relaxed);
        if page.0 != 0 {
            self.checkpoint.dead.push(page);
        }
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
    fn write_in_place(&mut self, pending: Pending, source: LeafId, address: PageAddress) -> u64 {
        let stamp = self.leaf_stamp(pending);
        let Some(mut buffer) = self.io.buffer(1) else {
            self.pool.fail(NO_MEMORY);
            return 0;
        };
        let sum = encode(&self.pool.arena, source, &mut buffer.pages_mut()[0], &stamp);
        let (device, offset) = self.page_offset(address);
        self.io.push(device, IoOp::Write { offset, buffer, fua: false }, Purpose::CheckpointPages);
        sum
    }

    pub(super) fn write_index(&mut self) -> bool {
        while let Some(&id) = self.checkpoint.trees.get(self.checkpoint.tree_at) {
            let Some(address) = self.next_page() else { return false };
            let stamp = self.stamp();
            let wrote = self.fill_page(|engine, page| {
                let checkpoint = &mut engine.checkpoint;
                let tree = engine.trees.get_mut(id)?;
                let before = tree.root();
                let wrote = tree.write_next(
                    &mut checkpoint.cursor,
                    address,
                    &stamp,
                    page,
                    &mut checkpoint.dead,
                );
                if wrote || before != tree.root() {
                    let place = engine.trees.get(id)?.place;
                    engine.catalogue.mark(place);
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
        self.checkpoint.phase = Phase::Labels;
        true
    }

    /// Writes labels that have changed, then the index above them.
    pub(super) fn write_labels(&mut self) -> bool {
        while let Some(place) = self.labels.first_changed() {
            let (id, labels) = self.labels_at(place);
            let reference = if labels.is_empty() {
                PageRef::NONE
            } else {
                let Some(address) = self.next_page() else { return false };
                let stamp = PageStamp { tree: id.0, index: place as u64, ..self.stamp() };
                let sum = self.fill_page(|_, page| encode_labels(page, &stamp, &labels));
                self.keep_page();
                PageRef { address, sum: sum.unwrap_or(0) }
            };
            let old = self.labels.written(place, reference);
            if !old.is_none() {
                self.checkpoint.dead.push(old.address);
            }
        }
        if !self.write_tree(|engine| &mut engine.labels.tree) {
            return false;
        }
        self.checkpoint.phase = Phase::Catalogue;
        true
    }

    pub(super) fn write_catalogue(&mut self) -> bool {
        while let Some(at) = self.catalogue.first_dirty() {
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
            self.catalogue.clean(at);
        }
        self.checkpoint.phase = Phase::CatalogueIndex;
        true
    }

    /// Returns the catalogue's record of the volume at a place of a page.
    fn record(&self, page: usize, index: usize) -> Option<VolumeRecord> {
        let per_page = usize::try_from(RECORDS_PER_PAGE).unwrap_or(1);
        let id = self.catalogue.at(page * per_page + index)?;
        let tree = &self.trees.get(id)?.tree;
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
            name: volume.name(),
            settings: *volume.settings.lock(),
        })
    }

    pub(super) fn write_catalogue_index(&mut self) -> bool {
        if !self.write_tree(|engine| &mut engine.catalogue.tree) {
            return false;
        }
        self.send_batch();
        self.checkpoint.phase = Phase::Written;
        true
    }

    /// Writes the changed pages of an index. `false` while enough is out.
    fn write_tree(&mut self, tree: impl Fn(&mut Self) -> &mut PageTree) -> bool {
        loop {
            let Some(address) = self.next_page() else { return false };
            let stamp = self.stamp();
            let wrote = self.fill_page(|engine, page| {
                let mut cursor = engine.checkpoint.cursor;
                let mut dead = std::mem::take(&mut engine.checkpoint.dead);
                let wrote = tree(engine).write_next(&mut cursor, address, &stamp, page, &mut dead);
                (engine.checkpoint.cursor, engine.checkpoint.dead) = (cursor, dead);
                wrote
            });
            if wrote != Some(true) {
                break;
            }
            self.keep_page();
        }
        self.checkpoint.cursor = (0, 0);
        true
    }
}

/// The page that holds a leaf.
fn page_of(meta: &LeafMeta) -> PageRef {
    let address = PageAddress(meta.page.load(Ordering::Relaxed));
    PageRef { address, sum: meta.page_sum.load(Ordering::Relaxed) }
}

/// Writes a leaf's page. That of its bases, if it has some, was written before.
fn encode(arena: &Arena, id: LeafId, page: &mut Page, stamp: &PageStamp) -> u64 {
    let leaf = arena.leaf(id);
    match arena.under(id).filter(|_| arena.composites(id) > 0) {
        None => encode_leaf(page, stamp, |index| leaf.load(index)),
        Some(under) => {
            let bases = page_of(arena.meta(under));
            encode_composite_leaf(page, stamp, bases, |index| arena.entry(id, index).into())
        }
    }
}
