//! Checkpoint: the map as it was at one LSN, written beside the old one, then switched to (R17).
//!
//! Cut (all changed leaves are noted while nothing can change) -> bases -> leaves -> index pages ->
//! labels -> catalogue -> flush of every device -> superblock. A leaf that changes before it is
//! written is copied first. Structure changes wait until a checkpoint has ended.

mod write;

use super::Engine;
use super::queue::Purpose;
use super::tree::PageTree;
use super::trees::Trees;
use crate::directory::Directory;
use crate::format::PageRef;
use crate::format::superblock::{DEVICE_STATES, LABELS, Superblock};
use crate::geometry::MAX_DEVICES;
use crate::io::IoOp;
use crate::mutation::{Mutation, active};
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{DeviceIndex, LeafId, Lsn, PageAddress, SlotIndex, VolumeId};
use crate::volumes::Volumes;

use write::Batch;

/// Where a checkpoint is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    #[default]
    Idle,
    /// The bases of composite entries, whose pages those of their leaves refer to.
    Bases,
    Leaves,
    Index,
    Labels,
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
    /// Volumes with dirty slots, while a cut looks at them.
    changed: Vec<VolumeId>,
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
    /// The features of the map as it was at the cut.
    incompat: u64,
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
        matches!(self.phase, Phase::Bases | Phase::Leaves)
    }

    /// Pages that the running checkpoint may still ask for.
    pub(crate) fn pages_to_write(&self) -> u64 {
        let pending = self.pending.len();
        let bases = if self.phase == Phase::Bases { pending } else { 0 };
        (bases + pending - self.next) as u64 + self.index_pages
    }

    pub(crate) fn request(&mut self) {
        self.wanted = true;
    }

    /// Notes the changes of all volumes that have any, and which trees they are in. The gate is
    /// closed.
    fn note_changes(&mut self, pool: &Pool, volumes: &Volumes, trees: &mut Trees) {
        // The pool's list keeps its memory, so that workers do not have to ask for any.
        self.changed.append(&mut pool.changed.lock());
        self.changed.sort_unstable();
        for id in self.changed.drain(..) {
            let Some(volume) = volumes.get(&id) else { continue };
            let Some(tree) = trees.change(id) else { continue };
            volume.changed.store(false, Ordering::Release);
            let note = Note { pool, volume: id, lineage: volume.identity.lineage };
            note.dirty_slots(&volume.directory.load(), tree, &mut self.pending);
        }
        self.trees.extend(trees.take_changed());
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
                Phase::Bases => self.write_bases(),
                Phase::Leaves => self.write_leaves(),
                Phase::Index => self.write_index(),
                Phase::Labels => self.write_labels(),
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
        self.take_pages_to_write();
        let pool = std::sync::Arc::clone(&self.pool);
        let volumes = pool.volumes.read();
        let gate = pool.gate.close();
        self.checkpoint.lsn = gate.last_assigned();
        self.checkpoint.note_changes(&pool, &volumes, &mut self.trees);
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
        self.releases.is_any_since_cut = false;
        checkpoint.phase = if pool.has_composite() { Phase::Bases } else { Phase::Leaves };
        checkpoint.closes = closes;
        checkpoint.incompat = self.feature.incompat(self.superblock.incompat);
        checkpoint.wanted = false;
        self.checkpoint.index_pages =
            self.index_pages(self.checkpoint.pending.len() as u64) + self.new_tree_pages;
        self.new_tree_pages = 0;
        if active(Mutation::TruncateEarly) {
            self.wal.tail = self.checkpoint.tail;
        }
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
        let table = self.superblock.devices;
        for (device, _) in table.present() {
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
        let next = self.controls.next_superblock(&self.superblock);
        let incompat = self.checkpoint.incompat & !DEVICE_STATES;
        let states = if next.devices.has_states() { DEVICE_STATES } else { 0 };
        let labels_root = self.labels.tree.root();
        let labels = if labels_root.is_none() { 0 } else { LABELS };
        let block = Superblock {
            clean: closes,
            compat: next.compat & !LABELS | labels,
            incompat: incompat | states,
            boot_id: if closes { [0; 16] } else { self.superblock.boot_id },
            checkpoint_lsn: self.checkpoint.lsn,
            wal_tail_sequence: self.checkpoint.tail,
            wal_tail_hash: self.checkpoint.tail_sum,
            catalogue_root: self.catalogue.tree.root(),
            catalogue_levels: u8::try_from(self.catalogue.tree.level_count()).unwrap_or(u8::MAX),
            labels_root,
            catalogue_records: u32::try_from(self.catalogue.place_count()).unwrap_or(u32::MAX),
            next_volume_id: self.controls.next_volume_id,
            ..next
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
        self.pages.checkpoint_ended();
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
    pool: &'a Pool,
    volume: VolumeId,
    lineage: VolumeId,
}

impl Note<'_> {
    fn dirty_slots(&self, directory: &Directory, tree: &mut PageTree, out: &mut Vec<Pending>) {
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
        tree: &mut PageTree,
        out: &mut Vec<Pending>,
    ) {
        let Some(leaf) = directory.load(slot) else {
            tree.set(u64::from(slot.0), PageRef::NONE);
            return;
        };
        let meta = self.pool.arena.meta(leaf);
        if meta.clean.load(Ordering::Relaxed) {
            // Its page says it already; if it changes from now on, that is for the next one.
            let address = PageAddress(meta.page.load(Ordering::Relaxed));
            let own = PageRef { address, sum: meta.page_sum.load(Ordering::Relaxed) };
            tree.set(u64::from(slot.0), own);
            return;
        }
        meta.capture_pending.store(true, Ordering::Relaxed);
        let stripe = crate::stripe::stripe_index(self.lineage, slot);
        out.push(Pending { volume: self.volume, slot, leaf, stripe });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::testing;
    use super::super::trees::VolumeTree;
    use super::*;

    /// With each detach comes a checkpoint.
    #[test]
    fn a_cut_looks_at_no_volume_without_changes() {
        let pool = testing::pool();
        let (mut trees, mut checkpoint) = (Trees::default(), Checkpoint::default());
        for id in 1..=100 {
            pool.volumes.write().insert(testing::volume(id, &format!("v{id}")));
            let tree = VolumeTree { tree: PageTree::new(id, 1, 1), place: 0 };
            trees.insert(VolumeId(id), tree);
        }
        let mut cut = |checkpoint: &mut Checkpoint| {
            checkpoint.note_changes(&pool, &pool.volumes.read(), &mut trees);
            std::mem::take(&mut checkpoint.trees)
        };
        assert_eq!(cut(&mut checkpoint), []);
        let change = |id| {
            let volume = pool.volume(VolumeId(id)).unwrap();
            let is_new = volume.directory.load().mark_dirty(SlotIndex(0));
            if is_new {
                pool.note_dirty(&volume);
            }
        };
        [70, 7, 70].into_iter().for_each(&change);
        assert_eq!(cut(&mut checkpoint), [VolumeId(7), VolumeId(70)]);
        assert_eq!(cut(&mut checkpoint), []);
        // The next change after a cut is for the next one; a volume that is gone has none.
        [7, 8].into_iter().for_each(&change);
        pool.volumes.write().remove(VolumeId(8));
        assert_eq!(cut(&mut checkpoint), [VolumeId(7)]);
    }
}
