//! Structure changes: the changes of the map by create, delete, resize, snapshot, clone, rollback
//! and rename.
//!
//! The same functions serve a running pool (with the mutation gate closed and the volume drained)
//! and replay. They don't touch data, and take time with the size of a directory, not of a volume.

use std::sync::Arc;

use crate::change::Site;
use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::format::catalogue::VolumeKind;
use crate::format::record::Change;
use crate::format::{PageRef, VolumeName};
use crate::leaf::LEAF_ENTRIES;
use crate::mutation::{Mutation, active};
use crate::stripe::stripe_index;
use crate::sync::Ordering;
use crate::units::{ExtentIndex, Lsn, PageAddress, SlotIndex, VolumeId, WallTime};
use crate::volume::{DELETED, Identity, Volume};

use super::Engine;
use super::release::{Item, Releasing};
use super::tree::PageTree;
use super::trees::VolumeTree;

/// A snapshot, or with a size a clone, that is about to be made.
struct New {
    id: VolumeId,
    name: VolumeName,
    size: Option<u64>,
    lsn: Lsn,
    made: WallTime,
}

/// Volumes and snapshots of a pool. Lists and checkpoints examine all of them.
pub(crate) const MAX_VOLUMES: usize = 1 << 16;

impl Engine {
    /// Carries out a structure change with this LSN. Its dropped references wait until the LSN is
    /// durable.
    pub(crate) fn apply_structure(&mut self, change: &Change, lsn: Lsn) -> Result<(), MapperError> {
        match *change {
            Change::SnapshotGroup { volume, made, ref members } => {
                for (member, id) in members.iter().zip(volume.0..) {
                    let new = New { id: VolumeId(id), name: member.name, size: None, lsn, made };
                    self.share(member.source, &new)?;
                }
                Ok(())
            }
            Change::Create { volume, size, block_size, made, ref name } => {
                let identity = Identity {
                    id: volume,
                    lineage: volume,
                    origin: VolumeId(0),
                    kind: VolumeKind::Volume,
                    block_size,
                    created: lsn,
                    made,
                };
                let directory = self.new_directory(size)?;
                self.add_volume(Volume::new(identity, **name, size, directory))
            }
            Change::Delete { volume } => self.delete_volume(volume, lsn),
            Change::Resize { volume, size } => self.resize_volume(volume, size, lsn),
            Change::Snapshot { volume, source, made, ref name } => {
                self.share(source, &New { id: volume, name: **name, size: None, lsn, made })
            }
            Change::Clone { volume, source, size, made, ref name } => {
                self.share(source, &New { id: volume, name: **name, size: Some(size), lsn, made })
            }
            Change::Rollback { volume, snapshot, size } => {
                self.roll_back(volume, (snapshot, size), lsn)
            }
            Change::Rename { volume, ref name } => {
                self.pool.volume(volume)?;
                self.pool.volumes.write().rename(volume, **name);
                self.mark_record(volume);
                Ok(())
            }
            _ => Err(MapperError::Internal("not a structure change")),
        }
    }

    pub(crate) fn new_directory(&self, size: u64) -> Result<Directory, MapperError> {
        let slots = self.pool.geometry.slots_for(size);
        Directory::new(slots).ok_or(MapperError::Limit { what: "memory for a directory", limit: 0 })
    }

    fn new_tree(&self, id: VolumeId, size: u64) -> PageTree {
        PageTree::new(id.0, u64::from(self.pool.geometry.slots_for(size)), 1)
    }

    /// Adds a volume that no other thread has seen yet.
    pub(crate) fn add_volume(&mut self, volume: Volume) -> Result<(), MapperError> {
        let id = volume.identity.id;
        if self.trees.len() >= MAX_VOLUMES {
            return Err(MapperError::Limit { what: "volumes", limit: MAX_VOLUMES as u64 });
        }
        let tree = self.new_tree(id, volume.size.load(Ordering::Relaxed));
        let dead = &mut self.releases.dead_pages;
        let place = self.catalogue.add(id, dead);
        self.labels.grow(self.catalogue.place_count(), dead);
        self.trees.insert(id, VolumeTree { tree, place });
        self.controls.next_volume_id = self.controls.next_volume_id.max(id.0.saturating_add(1));
        self.controls.lineages.insert(id, volume.identity.lineage);
        self.pool.volumes.write().insert(Arc::new(volume));
        self.space.expect_holders(self.trees.len());
        Ok(())
    }

    /// The volume's record has changed.
    pub(super) fn mark_record(&mut self, id: VolumeId) {
        if let Some(tree) = self.trees.get(id) {
            self.catalogue.mark(tree.place);
        }
    }

    fn delete_volume(&mut self, id: VolumeId, lsn: Lsn) -> Result<(), MapperError> {
        let volume = self.pool.volume(id)?;
        volume.state.store(DELETED, Ordering::SeqCst);
        self.pool.volumes.write().remove(id);
        volume.keep_less(u64::MAX);
        self.take_back_reserve(&volume);
        if volume.grants.load(Ordering::Acquire) > 0 {
            self.space.forget_holder(id);
        }
        let directory = volume.directory.load_full();
        self.release_all(&volume, directory, lsn);
        if let Some(tree) = self.trees.remove(id) {
            self.releases.dead_pages.extend(tree.tree.addresses());
            self.labels.remove(tree.place, &mut self.releases.dead_pages);
            self.catalogue.remove(tree.place);
        }
        self.controls.note_gone(id, lsn);
        Ok(())
    }

    /// Drops everything that the volume has mapped so far.
    fn release_all(&mut self, volume: &Volume, directory: Arc<Directory>, lsn: Lsn) {
        let Identity { id, lineage, .. } = volume.identity;
        let extents = volume.mapped.load(Ordering::Relaxed);
        let of = Releasing { volume: id, extents, left: extents };
        let item = Item::Directory { directory, lineage, of };
        if active(Mutation::ReleaseUndurable) {
            self.releases.drain(self.pool.epochs.current(), item);
        } else {
            self.releases.drop_at(lsn, item);
        }
    }

    fn take_back_reserve(&self, volume: &Volume) {
        let mut space = self.pool.free_space.lock();
        volume.take_back(|first, count| {
            space.free(first, count);
        });
    }

    /// A new snapshot or clone with the content of its source.
    fn share(&mut self, source: VolumeId, new: &New) -> Result<(), MapperError> {
        let New { id, name, size, lsn, made } = *new;
        let source = self.pool.volume(source)?;
        let kind = if size.is_some() { VolumeKind::Volume } else { VolumeKind::Snapshot };
        let identity = Identity {
            id,
            lineage: source.identity.lineage,
            origin: source.identity.id,
            kind,
            block_size: source.identity.block_size,
            created: lsn,
            made,
        };
        let size = size.unwrap_or_else(|| source.size.load(Ordering::Acquire));
        let directory = self.shared_directory(&source.directory.load(), size)?;
        let volume = Volume::new(identity, name, size, directory);
        volume.set_totals(source.totals());
        if kind == VolumeKind::Snapshot {
            // X2: an origin that has just been frozen holds no more than its data, and the space
            // that was kept for it on request.
            self.take_back_reserve(&source);
        }
        self.add_volume(volume)?;
        self.refer_to_leaves(id)
    }

    /// Refers to the pages of all leaves that are as their pages are; the others are dirty for
    /// this volume too.
    fn refer_to_leaves(&mut self, id: VolumeId) -> Result<(), MapperError> {
        let volume = self.pool.volume(id)?;
        let Some(tree) = self.trees.change(id) else { return Ok(()) };
        let directory = volume.directory.load();
        for (slot, leaf) in directory.iter() {
            let meta = self.pool.arena.meta(leaf);
            if meta.clean.load(Ordering::Relaxed) {
                let address = PageAddress(meta.page.load(Ordering::Relaxed));
                let sum = meta.page_sum.load(Ordering::Relaxed);
                tree.set(u64::from(slot.0), PageRef { address, sum });
            } else if directory.mark_dirty(slot) {
                self.pool.note_dirty(&volume);
            }
        }
        self.new_tree_pages += tree.present_pages();
        self.mark_record(id);
        Ok(())
    }

    /// A directory of this size over the same leaves, each with one more reference.
    fn shared_directory(&self, from: &Directory, size: u64) -> Result<Directory, MapperError> {
        let directory = self.new_directory(size)?;
        for (slot, leaf) in from.iter() {
            if slot.0 >= directory.slot_count() {
                break;
            }
            self.pool.arena.meta(leaf).references.fetch_add(1, Ordering::AcqRel);
            directory.store(slot, Some(leaf));
        }
        Ok(directory)
    }

    fn roll_back(
        &mut self,
        id: VolumeId,
        (snapshot, size): (VolumeId, Option<u64>),
        lsn: Lsn,
    ) -> Result<(), MapperError> {
        let volume = self.pool.volume(id)?;
        let snapshot = self.pool.volume(snapshot)?;
        let size = size.unwrap_or_else(|| snapshot.size.load(Ordering::Acquire));
        let directory = self.shared_directory(&snapshot.directory.load(), size)?;
        let old = volume.directory.load_full();
        self.release_all(&volume, old, lsn);
        volume.set_totals(snapshot.totals());
        self.install_directory(&volume, directory, size);
        let fresh = self.new_tree(id, size);
        let dead = &mut self.releases.dead_pages;
        self.trees.replace(id, |former| {
            dead.extend(former.addresses());
            fresh
        });
        self.refer_to_leaves(id)
    }

    /// Swaps a volume's directory, and fits the tree to its size.
    fn install_directory(&mut self, volume: &Volume, directory: Directory, size: u64) {
        let slots = u64::from(directory.slot_count());
        let changed = volume.directory.load().slot_count() != directory.slot_count();
        // Shrinking: the size first, so that no lookup reaches the part that is cut off.
        volume.size.store(size, Ordering::Release);
        volume.directory.store(Arc::new(directory));
        volume.shape.fetch_add(1, Ordering::SeqCst);
        volume.follow_size(self.pool.geometry);
        let id = volume.identity.id;
        self.pool.volumes.write().recount(id);
        if changed {
            let dead = &mut self.releases.dead_pages;
            let new = self.trees.replace(id, |old| old.resized(slots, 1, dead));
            self.new_tree_pages += new.map_or(0, PageTree::present_pages);
        }
        self.mark_record(id);
    }

    fn resize_volume(&mut self, id: VolumeId, size: u64, lsn: Lsn) -> Result<(), MapperError> {
        let volume = self.pool.volume(id)?;
        let old = volume.directory.load_full();
        let directory = self.new_directory(size)?;
        let shrinks = size < volume.size.load(Ordering::Acquire);
        let last =
            self.pool.geometry.slot_of(volume.size.load(Ordering::Acquire).saturating_sub(1));
        if let Some(leaf) = old.load(last) {
            // A FUA write beyond the old end must wait until the new size is durable (R7).
            self.pool.arena.meta(leaf).last_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        }
        if shrinks {
            self.cut_off(&volume, &old, size, lsn)?;
        }
        old.copy_to(&directory);
        self.install_directory(&volume, directory, size);
        Ok(())
    }

    /// Drops everything beyond a new, smaller size, down to the sub-block (R18).
    fn cut_off(
        &mut self,
        volume: &Volume,
        directory: &Directory,
        size: u64,
        lsn: Lsn,
    ) -> Result<(), MapperError> {
        // All that is changed below lies on one leaf: the first change makes it this volume's own.
        self.ensure_leaves(1)?;
        let geometry = self.pool.geometry;
        let lineage = volume.identity.lineage;
        let keep = geometry.slots_for(size);
        for slot in (keep..directory.slot_count()).map(SlotIndex) {
            let Some(leaf) = directory.load(slot) else { continue };
            volume.count_less(crate::change::totals(&self.pool.arena, leaf));
            let stripe = stripe_index(lineage, slot);
            self.releases.drop_at(lsn, Item::Leaf { leaf, stripe });
            directory.store(slot, None);
        }
        if keep == 0 {
            return Ok(());
        }
        let pool = Arc::clone(&self.pool);
        let site = Site { pool: &pool, volume, directory, ring_slot: pool.tuning.workers };
        let stripe = stripe_index(lineage, SlotIndex(keep - 1));
        let first = SlotIndex(keep - 1).first_extent().0;
        for extent in (first..first + LEAF_ENTRIES as u64).map(ExtentIndex) {
            let now = site.entry(extent);
            let new = cut(geometry, now, extent, size);
            if new == now {
                continue;
            }
            let dropped = site.set_unrecorded(&mut self.spares, lsn, extent, now, new);
            for physical in dropped {
                self.releases.drop_at(lsn, Item::Extent { physical, stripe });
            }
        }
        Ok(())
    }
}

/// Returns the rest of an entry when the volume ends at `size` bytes.
fn cut(geometry: crate::geometry::Geometry, now: Entry, extent: ExtentIndex, size: u64) -> Entry {
    let start = extent.0 * geometry.extent_size();
    if start >= size {
        return Entry::Unmapped;
    }
    if active(Mutation::ShrinkWholeExtents) {
        return now;
    }
    let end = (size - start).min(geometry.extent_size());
    now.keep(geometry.touched(0, end))
}
