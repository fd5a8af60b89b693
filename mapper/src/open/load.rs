//! Reading the trees of the last checkpoint: catalogue, index pages, leaves. Load is the check:
//! every page is compared with its parent's reference.

mod labels;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::MapperError;
use crate::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord, decode_catalogue};
use crate::format::index_page::decode_index;
use crate::format::leaf_page::{LeafEntry, decode_leaf};
use crate::format::page::PageExpect;
use crate::format::superblock::Superblock;
use crate::format::under_page::decode_under;
use crate::format::{INDEX_FANOUT, Limits, PageRef, Place};
use crate::io::Page;
use crate::mapping::Mapping;
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{LeafId, PageAddress, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::{Identity, Volume};

use crate::engine::catalogue::Catalogue;
use crate::engine::info::fixed_extents;
use crate::engine::labels::LabelPages;
use crate::engine::pages::PageSpace;
use crate::engine::tree::PageTree;
use crate::engine::trees::{Trees, VolumeTree};

/// The purpose of a page.
#[derive(Clone, Copy, Debug)]
enum What {
    CatalogueIndex {
        level: u8,
        index: u64,
    },
    Catalogue {
        index: u64,
    },
    Index {
        volume: VolumeId,
        level: u8,
        index: u64,
    },
    Leaf {
        slot: SlotIndex,
        leaf: LeafId,
    },
    /// The bases of a leaf's composite entries.
    Under {
        slot: SlotIndex,
        leaf: LeafId,
    },
    LabelIndex {
        level: u8,
        index: u64,
    },
    /// The labels of the volume at this place of the catalogue.
    Label {
        place: u64,
        volume: VolumeId,
    },
}

impl What {
    const fn is_of_labels(self) -> bool {
        matches!(self, Self::LabelIndex { .. } | Self::Label { .. })
    }
}

/// A page to be read.
#[derive(Clone, Copy, Debug)]
struct PageRead {
    reference: PageRef,
    what: What,
}

/// Pages that lie in a row, to be read at once.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) first: PageAddress,
    pending: Vec<PageRead>,
}

impl Batch {
    /// Whether only labels are in it: they are read apart from all other pages.
    pub(super) fn is_labels(&self) -> bool {
        let is_one = |one: &PageRead| one.what.is_of_labels();
        self.pending.iter().all(is_one)
    }

    /// The same pages, each for itself.
    pub(super) fn singles(&self) -> impl Iterator<Item = Self> {
        let one = |page: &PageRead| Self { first: page.reference.address, pending: vec![*page] };
        self.pending.iter().map(one)
    }

    pub(super) fn pages(&self) -> usize {
        self.pending.last().map_or(0, |last| {
            usize::try_from(last.reference.address.0 - self.first.0 + 1).unwrap_or(0)
        })
    }
}

/// The loader: a list of pages to read, extended by the pages that were read.
#[derive(Debug)]
pub(super) struct Loader {
    superblock: Superblock,
    limits: Limits,
    /// Superblock areas, log and reserve: no entry may name them.
    fixed: BTreeSet<PhysicalExtent>,
    pending: Vec<PageRead>,
    /// The list is in order.
    sorted: bool,
    /// Pages seen so far; only leaves may have several parents.
    seen: BTreeSet<PageAddress>,
    leaves: HashMap<PageAddress, (LeafId, SlotIndex)>,
    records: BTreeMap<u64, VolumeRecord>,
    pub(super) catalogue: Catalogue,
    pub(super) trees: Trees,
    pub(super) pages: PageSpace,
    /// Reading labels has begun.
    has_labels_begun: bool,
    pub(super) labels: LabelPages,
    /// Pages of labels that cannot be used.
    pub(super) lost_pages: Vec<PageAddress>,
    /// How many pages of labels could not be read.
    pub(super) labels_lost: u64,
    /// Whether an index page is among them.
    is_label_index_lost: bool,
}

impl Loader {
    pub(super) fn new(pool: &Pool, superblock: &Superblock) -> Result<Self, MapperError> {
        let records = u64::from(superblock.catalogue_records);
        if records > crate::engine::structure::MAX_VOLUMES as u64 {
            let limit = crate::engine::structure::MAX_VOLUMES as u64;
            return Err(MapperError::Limit { what: "records of the catalogue", limit });
        }
        let count = usize::try_from(records).unwrap_or(0);
        let mut pages = PageSpace::new(pool.geometry);
        let first = superblock.reserve_start.0;
        let reserve = (first..first + u64::from(superblock.reserve_extents)).map(PhysicalExtent);
        for extent in reserve.clone() {
            pages.add_extent(extent, true);
        }
        let mut loader = Self {
            limits: superblock.limits()?,
            fixed: fixed_extents(superblock).into_iter().chain(reserve.clone()).collect(),
            pending: Vec::new(),
            sorted: false,
            seen: BTreeSet::new(),
            leaves: HashMap::new(),
            records: BTreeMap::new(),
            catalogue: Catalogue::new(count),
            trees: Trees::default(),
            pages,
            has_labels_begun: false,
            labels: LabelPages::new(count),
            lost_pages: Vec::new(),
            labels_lost: 0,
            is_label_index_lost: false,
            superblock: superblock.clone(),
        };
        let levels = superblock.catalogue_levels;
        if usize::from(levels) != loader.catalogue.tree.level_count() && records > 0 {
            return Err(MapperError::Limit {
                what: "levels of the catalogue",
                limit: u64::from(levels),
            });
        }
        let root = superblock.catalogue_root;
        let what = match levels {
            0 => What::Catalogue { index: 0 },
            level => What::CatalogueIndex { level, index: 0 },
        };
        loader.request(root, what)?;
        Ok(loader)
    }

    /// Notes a page to be read. A page with two parents, other than a leaf, is refused.
    fn request(&mut self, reference: PageRef, what: What) -> Result<(), MapperError> {
        if reference.is_none() {
            return Ok(());
        }
        if !self.seen.insert(reference.address) {
            return Err(MapperError::Format(
                crate::format::Problem::field(
                    "page address",
                    reference.address.0,
                    "named by one parent only",
                )
                .of(crate::format::Structure::IndexPage, Place::Page(reference.address)),
            ));
        }
        self.pages.mark_used(reference.address);
        self.pending.push(PageRead { reference, what });
        self.sorted = false;
        Ok(())
    }

    /// The next pages to read, at most `max`; `None` when all are read.
    pub(super) fn next_batch(&mut self, pool: &Pool, max: usize) -> Option<Batch> {
        if self.pending.is_empty() {
            return None;
        }
        // Descending, so that the lowest is taken from the end.
        if !std::mem::replace(&mut self.sorted, true) {
            self.pending
                .sort_unstable_by_key(|page_read| std::cmp::Reverse(page_read.reference.address));
        }
        let first = self.pending.last()?.reference.address;
        let extent = pool.geometry.page_place(first).0;
        let mut pending = Vec::new();
        while let Some(page_read) = self.pending.last() {
            let address = page_read.reference.address;
            let near = address.0 - first.0 < max as u64;
            if !near || pool.geometry.page_place(address).0 != extent {
                break;
            }
            pending.extend(self.pending.pop());
        }
        Some(Batch { first, pending })
    }

    pub(super) fn read(
        &mut self,
        pool: &Pool,
        batch: &Batch,
        pages: &[Page],
    ) -> Result<(), MapperError> {
        for page_read in &batch.pending {
            let at = usize::try_from(page_read.reference.address.0 - batch.first.0)
                .unwrap_or(usize::MAX);
            let page = pages.get(at).ok_or(MapperError::Internal("a page was not read"))?;
            self.page(pool, *page_read, page)?;
        }
        Ok(())
    }

    fn page(&mut self, pool: &Pool, page_read: PageRead, page: &Page) -> Result<(), MapperError> {
        if page_read.what.is_of_labels() {
            if self.label_page(pool, page_read, page).is_err() {
                self.lose(page_read);
            }
            return Ok(());
        }
        let place = Place::Page(page_read.reference.address);
        let (id, sum) = (self.superblock.pool_id, page_read.reference.sum);
        match page_read.what {
            What::CatalogueIndex { level, index } => {
                let expect = PageExpect::catalogue_index(id, level, index, sum);
                let decoded = decode_index(&page.0, &expect, &self.limits, place)?;
                self.catalogue
                    .tree
                    .install(level, index, page_read.reference, |i| decoded.entry(i));
                for (child, reference) in (index * INDEX_FANOUT..).zip(decoded.iter()) {
                    let what = match level {
                        1 => What::Catalogue { index: child },
                        _ => What::CatalogueIndex { level: level - 1, index: child },
                    };
                    self.request(reference, what)?;
                }
            }
            What::Catalogue { index } => {
                let expect = PageExpect::catalogue(id, index, sum);
                let decoded =
                    decode_catalogue(&page.0, &expect, pool.geometry, &self.limits, place)?;
                self.catalogue.tree.install_single(page_read.reference);
                for (at, record) in (index * RECORDS_PER_PAGE..).zip(decoded.records()) {
                    if let Some(record) = record {
                        self.volume(pool, at, record)?;
                    }
                }
            }
            What::Index { volume, level, index } => {
                let expect = PageExpect::index(id, level, index, sum);
                let decoded = decode_index(&page.0, &expect, &self.limits, place)?;
                if let Some(tree) = self.trees.get_mut(volume) {
                    tree.install(level, index, page_read.reference, |i| decoded.entry(i));
                }
                for (child, reference) in (index * INDEX_FANOUT..).zip(decoded.iter()) {
                    self.child(pool, volume, level, child, reference)?;
                }
            }
            What::Leaf { slot, leaf } => {
                let expect = PageExpect::leaf(id, slot, sum);
                let decoded = decode_leaf(&page.0, &expect, &self.limits, place)?;
                let entries = decoded.iter().map(|entry| match entry {
                    LeafEntry::Plain(mapping) => (mapping, false),
                    LeafEntry::Overlay { overlay, top } => {
                        (Mapping { physical: Some(overlay), valid: top }, true)
                    }
                });
                self.fill_leaf(pool, leaf, entries, place)?;
                self.request(decoded.under(), What::Under { slot, leaf })?;
            }
            What::Under { slot, leaf } => {
                let expect = PageExpect::under(id, slot, sum);
                let top = pool.arena.leaf(leaf);
                let overlay = |index| top.load(index).physical.filter(|_| top.is_composite(index));
                let decoded = decode_under(&page.0, &expect, &self.limits, place, overlay)?;
                let under = take_leaf(pool)?;
                note_page(pool, under, page_read.reference);
                self.fill_leaf(pool, under, decoded.iter().map(|base| (base, false)), place)?;
                pool.arena.meta(leaf).under.store(under.0, Ordering::Release);
            }
            What::LabelIndex { .. } | What::Label { .. } => {}
        }
        Ok(())
    }

    fn volume(&mut self, pool: &Pool, at: u64, record: &VolumeRecord) -> Result<(), MapperError> {
        let place = usize::try_from(at).unwrap_or(usize::MAX);
        let bad = |what| Err(MapperError::Internal(what));
        if !self.catalogue.install(place, record.id) {
            return bad("the catalogue has more records than the superblock says");
        }
        if record.id.0 >= self.superblock.next_volume_id || self.trees.get(record.id).is_some() {
            return bad("the catalogue names a volume twice, or one that was never made");
        }
        let identity = Identity {
            id: record.id,
            lineage: record.lineage,
            origin: record.origin,
            kind: record.kind,
            block_size: record.block_size,
            created: record.created_lsn,
            made: record.made,
        };
        let slots = pool.geometry.slots_for(record.size);
        let directory = crate::directory::Directory::new(slots)
            .ok_or(MapperError::Limit { what: "memory for a directory", limit: 0 })?;
        let tree = PageTree::new(record.id.0, u64::from(slots), 1);
        if record.levels != 0 && usize::from(record.levels) != tree.level_count() {
            return bad("a volume's tree has not the levels of its size");
        }
        self.trees.insert(record.id, VolumeTree { tree, place });
        let volume =
            std::sync::Arc::new(Volume::new(identity, record.name, record.size, directory));
        volume.set(record.settings, pool.geometry);
        pool.volumes.write().insert(volume);
        self.records.insert(at, *record);
        let what = What::Index { volume: record.id, level: record.levels, index: 0 };
        if record.levels > 0 { self.request(record.root, what) } else { Ok(()) }
    }

    /// A page that an index page of a volume refers to.
    fn child(
        &mut self,
        pool: &Pool,
        volume: VolumeId,
        level: u8,
        child: u64,
        reference: PageRef,
    ) -> Result<(), MapperError> {
        if reference.is_none() {
            return Ok(());
        }
        if level > 1 {
            return self.request(reference, What::Index { volume, level: level - 1, index: child });
        }
        let slot = SlotIndex(u32::try_from(child).unwrap_or(u32::MAX));
        let of = pool.volume(volume)?;
        let directory = of.directory.load();
        if slot.0 >= directory.slot_count() {
            return Err(MapperError::Internal("a volume's tree goes beyond its size"));
        }
        if let Some(&(leaf, at)) = self.leaves.get(&reference.address) {
            if at != slot {
                return Err(MapperError::Internal("a leaf is shared at two different slots"));
            }
            if pool.arena.meta(leaf).page_sum.load(Ordering::Relaxed) != reference.sum {
                return Err(MapperError::Internal("two parents of a leaf name different sums"));
            }
            pool.arena.meta(leaf).references.fetch_add(1, Ordering::Relaxed);
            directory.store(slot, Some(leaf));
            return Ok(());
        }
        let leaf = take_leaf(pool)?;
        note_page(pool, leaf, reference);
        let meta = pool.arena.meta(leaf);
        meta.references.store(1, Ordering::Relaxed);
        meta.last_lsn.store(self.superblock.checkpoint_lsn.0, Ordering::Relaxed);
        directory.store(slot, Some(leaf));
        self.leaves.insert(reference.address, (leaf, slot));
        self.request(reference, What::Leaf { slot, leaf })
    }
}

impl Loader {
    /// Fills a leaf with its entries, each with whether it is composite. Notes its extents as used,
    /// and counts those that another leaf has already.
    fn fill_leaf(
        &self,
        pool: &Pool,
        leaf: LeafId,
        entries: impl Iterator<Item = (Mapping, bool)>,
        place: Place,
    ) -> Result<(), MapperError> {
        let (target, mut mapped) = (pool.arena.leaf(leaf), 0);
        let mut space = pool.free_space.lock();
        for (index, (mapping, is_composite)) in entries.enumerate() {
            let Some(physical) = mapping.physical else { continue };
            target.install(index, mapping, is_composite);
            mapped += 1;
            if !space.contains(physical) || self.fixed.contains(&physical) {
                return Err(crate::format::Problem::field(
                    "physical extent",
                    physical.0,
                    "an extent for data on one of the pool's devices",
                )
                .of(crate::format::Structure::LeafPage, place)
                .into());
            }
            if !space.mark_used(physical) {
                let (counts, local) = pool
                    .counts_of(physical)
                    .ok_or(MapperError::Internal("no counts for a device"))?;
                counts.add(local, 1);
            }
        }
        pool.arena.meta(leaf).mapped.store(mapped, Ordering::Relaxed);
        Ok(())
    }
}

/// A leaf that maps nothing yet.
fn take_leaf(pool: &Pool) -> Result<LeafId, MapperError> {
    if pool.arena.free_count() == 0 {
        let full = |_| MapperError::Limit { what: "memory for leaves", limit: 0 };
        pool.arena.refill(1).map_err(full)?;
    }
    pool.arena.take().ok_or(MapperError::Internal("no leaf after a refill"))
}

/// Notes the page that a leaf is read from.
fn note_page(pool: &Pool, leaf: LeafId, reference: PageRef) {
    let meta = pool.arena.meta(leaf);
    meta.page.store(reference.address.0, Ordering::Relaxed);
    meta.page_sum.store(reference.sum, Ordering::Relaxed);
    meta.clean.store(true, Ordering::Relaxed);
}
