//! Rewrites a pool's metadata, over data that stays in place.

use std::collections::HashSet;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord, encode_catalogue};
use blockd_mapper::format::index_page::encode_index;
use blockd_mapper::format::labels::encode_labels;
use blockd_mapper::format::leaf_page::{encode_composite_leaf, encode_leaf};
use blockd_mapper::format::page::PageStamp;
use blockd_mapper::format::settings::VolumeSettings;
use blockd_mapper::format::superblock::{LABELS, Superblock, copy_offsets};
use blockd_mapper::format::under_page::encode_under;
use blockd_mapper::format::{INDEX_FANOUT, Labels, PageRef, label_levels, levels_for};
use blockd_mapper::geometry::{Geometry, PAGE_BYTES};
use blockd_mapper::io::{IoError, Page};
use blockd_mapper::units::{DeviceIndex, PageAddress, PhysicalExtent, VolumeId};

use super::owners::{Owner, Owners};
use super::{Entries, Media};

/// Devices that can be written.
pub trait MediaMut: Media {
    /// Writes whole sectors.
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError>;
    /// Makes all writes durable.
    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError>;
}

/// Allocates pages for new metadata.
#[derive(Debug)]
pub(crate) struct PageSource {
    geometry: Geometry,
    /// Pages that can be had, the next one last.
    free: Vec<PageAddress>,
}

impl PageSource {
    /// Sets `count` pages aside: in whole free extents first, then in the run kept for metadata,
    /// and never on one of `avoid`, nor in an extent that has one of them unless it is of that run.
    pub(crate) fn new(
        superblock: &Superblock,
        owners: &Owners,
        avoid: &HashSet<PageAddress>,
        count: u64,
    ) -> Result<Self, MapperError> {
        let geometry = Geometry::new(superblock.extent_size)?;
        let free = free_pages(superblock, geometry, owners, avoid);
        let reserve = reserve_pages(superblock, geometry, avoid);
        Self::of(geometry, free.chain(reserve), count)
    }

    /// The same for a pool of which a part is lost: in the run kept for metadata first, as extents
    /// of a lost leaf, or of changes behind a broken log, seem free.
    pub(crate) fn reserve_first(
        superblock: &Superblock,
        owners: &Owners,
        avoid: &HashSet<PageAddress>,
        count: u64,
    ) -> Result<Self, MapperError> {
        let geometry = Geometry::new(superblock.extent_size)?;
        let free = free_pages(superblock, geometry, owners, avoid);
        let reserve = reserve_pages(superblock, geometry, avoid);
        Self::of(geometry, reserve.chain(free), count)
    }

    fn of(
        geometry: Geometry,
        pages: impl Iterator<Item = PageAddress>,
        count: u64,
    ) -> Result<Self, MapperError> {
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        let mut free: Vec<_> = pages.take(most).collect();
        if (free.len() as u64) < count {
            let free = free.len() as u64 * PAGE_BYTES;
            return Err(MapperError::NoSpace { needed: count * PAGE_BYTES, free });
        }
        free.reverse();
        Ok(Self { geometry, free })
    }

    fn take(&mut self) -> Result<PageAddress, MapperError> {
        self.free.pop().ok_or(MapperError::Internal("more metadata than was counted"))
    }
}

/// The pages of free extents, from the end of the pool on: extents that seem free because their
/// leaf is lost lie further in front, where a dump from before the damage still finds them.
fn free_pages(
    superblock: &Superblock,
    geometry: Geometry,
    owners: &Owners,
    avoid: &HashSet<PageAddress>,
) -> impl Iterator<Item = PageAddress> {
    let busy: HashSet<_> = avoid.iter().map(|page| geometry.page_place(*page).0).collect();
    let devices = superblock.devices.as_slice().iter().rev();
    let extents = devices.flat_map(|device| {
        (device.first.0..device.first.0 + device.extents).rev().map(PhysicalExtent)
    });
    let free = extents
        .filter(move |extent| owners.get(*extent) == Some(Owner::Free) && !busy.contains(extent));
    free.flat_map(move |extent| pages_of(geometry, extent))
}

/// The pages of the run kept for metadata.
fn reserve_pages(
    superblock: &Superblock,
    geometry: Geometry,
    avoid: &HashSet<PageAddress>,
) -> impl Iterator<Item = PageAddress> {
    let first = superblock.reserve_start.0;
    let extents = (first..first + u64::from(superblock.reserve_extents)).map(PhysicalExtent);
    let pages = extents.flat_map(move |extent| pages_of(geometry, extent));
    pages.filter(move |page| !avoid.contains(page))
}

fn pages_of(geometry: Geometry, extent: PhysicalExtent) -> impl Iterator<Item = PageAddress> {
    (0..geometry.pages_per_extent()).map(move |page| geometry.page_address(extent, page))
}

/// The tree above some pages, filled from left to right.
#[derive(Debug)]
struct Tree {
    id: u32,
    /// Levels from the lowest: the page that is being filled, and its content.
    levels: Vec<(u64, Box<[PageRef]>)>,
    any: bool,
}

impl Tree {
    fn new(id: u32, levels: u8) -> Self {
        let empty = || vec![PageRef::NONE; 252].into_boxed_slice();
        let levels = (0..levels).map(|_| (0, empty())).collect();
        Self { id, levels, any: false }
    }
}

/// The pages that a leaf with these entries takes.
pub(crate) fn leaf_pages(entries: &Entries) -> u64 {
    1 + u64::from(entries.iter().any(|entry| entry.plain().is_none()))
}

/// The pages that labels in these places of a catalogue take.
pub(crate) fn label_pages(labelled: &[u64], places: u64) -> u64 {
    let mut below = labelled.to_vec();
    let mut pages = below.len() as u64;
    for _ in 0..label_levels(places) {
        below.iter_mut().for_each(|place| *place /= INDEX_FANOUT);
        below.dedup();
        pages += below.len() as u64;
    }
    pages
}

/// Writes a pool.
pub(crate) struct Builder<'m> {
    media: &'m mut dyn MediaMut,
    superblock: Superblock,
    handles: Vec<u8>,
    pages: PageSource,
    /// Pages of leaves by their number.
    leaves: std::collections::HashMap<u64, (u32, PageRef)>,
    current: Option<(VolumeRecord, Tree)>,
    current_labels: Labels,
    records: Vec<VolumeRecord>,
    /// Labels by the place of their record.
    labels: Vec<(u64, VolumeId, Labels)>,
    pub(crate) pages_written: u64,
    keeps_log: bool,
}

impl std::fmt::Debug for Builder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("pages_written", &self.pages_written)
            .finish_non_exhaustive()
    }
}

impl<'m> Builder<'m> {
    pub(crate) fn new(
        media: &'m mut dyn MediaMut,
        superblock: Superblock,
        handles: Vec<u8>,
        pages: PageSource,
    ) -> Self {
        Self {
            media,
            superblock,
            handles,
            pages,
            leaves: std::collections::HashMap::new(),
            current: None,
            current_labels: Labels::default(),
            records: Vec::new(),
            labels: Vec::new(),
            pages_written: 0,
            keeps_log: false,
        }
    }

    /// Leaves the log's blocks as they are: the new tail lies beyond all of them.
    pub(crate) const fn keep_log(&mut self) {
        self.keeps_log = true;
    }

    /// Begins a volume. Its leaves follow in the order of their slots.
    pub(crate) fn volume(&mut self, record: VolumeRecord) -> Result<(), MapperError> {
        self.end_volume()?;
        let slots = self.pages.geometry.slots_for(record.size);
        let levels = levels_for(u64::from(slots)).max(1);
        self.current = Some((record, Tree::new(record.id.0, levels)));
        Ok(())
    }

    /// Gives settings to the volume that was begun last.
    pub(crate) fn settings(&mut self, settings: VolumeSettings) {
        if let Some((record, _)) = &mut self.current {
            record.settings = settings;
        }
    }

    /// The labels of the volume that has begun.
    pub(crate) fn labels(&mut self, labels: Labels) {
        self.current_labels = labels;
    }

    /// A leaf that is new.
    pub(crate) fn leaf(
        &mut self,
        number: u64,
        slot: u32,
        entries: &Entries,
    ) -> Result<(), MapperError> {
        let tree = self.current.as_ref().map_or(0, |(record, _)| record.id.0);
        let reference = self.write_leaf(tree, slot, entries)?;
        self.leaves.insert(number, (slot, reference));
        self.put(slot, reference)
    }

    /// Writes a leaf's page, and before it the one with the bases of its composite entries.
    pub(crate) fn write_leaf(
        &mut self,
        tree: u32,
        slot: u32,
        entries: &Entries,
    ) -> Result<PageRef, MapperError> {
        let (mut page, stamp) = (Page::zeroed(), self.stamp(tree, u64::from(slot)));
        let sum = if leaf_pages(entries) == 1 {
            encode_leaf(&mut page, &stamp, |i| entries[i].plain().unwrap_or_default())
        } else {
            let sum = encode_under(&mut page, &stamp, |i| entries[i].base());
            let under = self.write_page(&page, sum)?;
            encode_composite_leaf(&mut page, &stamp, under, |i| entries[i].into())
        };
        self.write_page(&page, sum)
    }

    /// A leaf that was there before.
    pub(crate) fn share(&mut self, number: u64, slot: u32) -> Result<(), MapperError> {
        let Some(&(at, reference)) = self.leaves.get(&number) else {
            return Err(MapperError::Internal("a leaf is shared that is not there"));
        };
        if at != slot {
            return Err(MapperError::Internal("a leaf is shared at two different slots"));
        }
        self.put(slot, reference)
    }

    /// Names a leaf's page in the volume's tree.
    pub(crate) fn put(&mut self, slot: u32, reference: PageRef) -> Result<(), MapperError> {
        let Some((record, mut tree)) = self.current.take() else {
            return Err(MapperError::Internal("a leaf without a volume"));
        };
        let set = self.set(&mut tree, 0, u64::from(slot), reference);
        self.current = Some((record, tree));
        set
    }

    /// Names a page of the level below `level`; writes the page before when it is complete.
    fn set(
        &mut self,
        tree: &mut Tree,
        level: usize,
        child: u64,
        reference: PageRef,
    ) -> Result<(), MapperError> {
        let (index, entry) = (child / INDEX_FANOUT, child % INDEX_FANOUT);
        if tree.any && tree.levels[level].0 != index {
            self.seal(tree, level)?;
        }
        tree.any |= level == 0;
        tree.levels[level].0 = index;
        tree.levels[level].1[usize::try_from(entry).unwrap_or(0)] = reference;
        Ok(())
    }

    /// Writes the page of a level, and names it in the one above. Returns the page.
    fn seal(&mut self, tree: &mut Tree, level: usize) -> Result<PageRef, MapperError> {
        let (index, entries) = &mut tree.levels[level];
        let index = *index;
        if entries.iter().all(|entry| entry.is_none()) {
            return Ok(PageRef::NONE);
        }
        let mut page = Page::zeroed();
        let stamp = self.stamp(tree.id, index);
        let height = u8::try_from(level + 1).unwrap_or(u8::MAX);
        let sum = encode_index(&mut page, height, &stamp, |i| entries[i]);
        entries.fill(PageRef::NONE);
        let reference = self.write_page(&page, sum)?;
        if level + 1 < tree.levels.len() {
            self.set(tree, level + 1, index, reference)?;
        }
        Ok(reference)
    }

    /// Writes the rest of a tree, and returns its root.
    fn end_tree(&mut self, tree: &mut Tree) -> Result<PageRef, MapperError> {
        let mut root = PageRef::NONE;
        for level in 0..tree.levels.len() {
            root = self.seal(tree, level)?;
        }
        Ok(root)
    }

    fn end_volume(&mut self) -> Result<(), MapperError> {
        let Some((mut record, mut tree)) = self.current.take() else { return Ok(()) };
        record.root = self.end_tree(&mut tree)?;
        let levels = u8::try_from(tree.levels.len()).unwrap_or(u8::MAX);
        record.levels = if record.root.is_none() { 0 } else { levels };
        let labels = std::mem::take(&mut self.current_labels);
        if !labels.is_empty() {
            self.labels.push((self.records.len() as u64, record.id, labels));
        }
        self.records.push(record);
        Ok(())
    }

    fn stamp(&self, tree: u32, index: u64) -> PageStamp {
        PageStamp {
            pool_id: self.superblock.pool_id,
            tree,
            node: self.superblock.node,
            index,
            lsn: self.superblock.checkpoint_lsn,
            epoch: self.superblock.epoch,
        }
    }

    fn write_page(&mut self, page: &Page, sum: u64) -> Result<PageRef, MapperError> {
        let address = self.pages.take()?;
        let (extent, within) = self.pages.geometry.page_place(address);
        let (device, offset) = self.place(extent)?;
        self.write(device, offset + within * PAGE_BYTES, &page.0)?;
        self.pages_written += 1;
        Ok(PageRef { address, sum })
    }

    fn place(&self, extent: PhysicalExtent) -> Result<(DeviceIndex, u64), MapperError> {
        let none = MapperError::Internal("an extent lies on no device");
        let (index, record) = self.superblock.devices.find(extent).ok_or(none)?;
        let handle = self.handles.get(usize::from(index.0)).copied().unwrap_or(u8::MAX);
        let offset = (extent.0 - record.first.0) * self.pages.geometry.extent_size();
        Ok((DeviceIndex(handle), offset))
    }

    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), MapperError> {
        let written = self.media.write(device, offset, bytes);
        written.map_err(|error| MapperError::Io { operation: "write", device: device.0, error })
    }

    fn flush(&mut self) -> Result<(), MapperError> {
        for (index, _) in self.superblock.devices.present() {
            let device = self.handles.get(index).copied().unwrap_or(u8::MAX);
            let flushed = self.media.flush(DeviceIndex(device));
            flushed.map_err(|error| MapperError::Io { operation: "flush", device, error })?;
        }
        Ok(())
    }

    /// Writes the catalogue, empties the log, and makes all of it valid: the superblock goes to one
    /// pair of copies, then to the other.
    pub(crate) fn finish(mut self) -> Result<Superblock, MapperError> {
        self.end_volume()?;
        self.catalogue()?;
        if !self.keeps_log {
            self.clear_log()?;
        }
        self.flush()?;
        let devices = self.superblock.devices;
        for first in [true, false] {
            for (index, record) in devices.present() {
                let this_device = DeviceIndex(u8::try_from(index).unwrap_or(u8::MAX));
                let copy = Superblock { this_device, ..self.superblock.clone() };
                let mut page = Page::zeroed();
                copy.encode(&mut page);
                let offsets = copy_offsets(self.pages.geometry, record.extents);
                let pair = if first { offsets.first_pair } else { offsets.second_pair };
                let handle = self.handles.get(index).copied().unwrap_or(u8::MAX);
                for offset in pair {
                    self.write(DeviceIndex(handle), offset, &page.0)?;
                }
            }
            self.flush()?;
        }
        Ok(self.superblock)
    }

    fn catalogue(&mut self) -> Result<(), MapperError> {
        let records = std::mem::take(&mut self.records);
        let count = records.len() as u64;
        let pages = count.div_ceil(RECORDS_PER_PAGE);
        let levels = if pages == 0 { 0 } else { levels_for(pages) };
        let mut tree = Tree::new(0, levels);
        let mut root = PageRef::NONE;
        let per_page = usize::try_from(RECORDS_PER_PAGE).unwrap_or(1);
        for (index, records) in (0..).zip(records.chunks(per_page)) {
            let mut page = Page::zeroed();
            let stamp = self.stamp(0, index);
            let sum = encode_catalogue(&mut page, &stamp, |i| records.get(i).copied());
            root = self.write_page(&page, sum)?;
            if levels > 0 {
                self.set(&mut tree, 0, index, root)?;
            }
        }
        if levels > 0 {
            root = self.end_tree(&mut tree)?;
        }
        self.superblock.catalogue_root = root;
        self.superblock.catalogue_levels = levels;
        let limit = MapperError::Limit { what: "volumes", limit: u64::from(u32::MAX) };
        self.superblock.catalogue_records = u32::try_from(count).map_err(|_| limit)?;
        self.write_labels(count)
    }

    /// Writes all labels, over a catalogue of this many places.
    fn write_labels(&mut self, places: u64) -> Result<(), MapperError> {
        let mut tree = Tree::new(0, label_levels(places));
        for (place, id, labels) in std::mem::take(&mut self.labels) {
            let (mut page, stamp) = (Page::zeroed(), self.stamp(id.0, place));
            let sum = encode_labels(&mut page, &stamp, &labels);
            let reference = self.write_page(&page, sum)?;
            self.set(&mut tree, 0, place, reference)?;
        }
        let root = self.end_tree(&mut tree)?;
        let bit = if root.is_none() { 0 } else { LABELS };
        self.superblock.labels_root = root;
        self.superblock.compat = self.superblock.compat & !LABELS | bit;
        Ok(())
    }

    /// Clears the log, whose blocks could be taken for a part of the next one.
    fn clear_log(&mut self) -> Result<(), MapperError> {
        let size = usize::try_from(self.pages.geometry.extent_size()).unwrap_or(0);
        let zeroes = vec![0; size];
        let first = self.superblock.wal_start.0;
        for extent in first..first + u64::from(self.superblock.wal_extents) {
            let (device, offset) = self.place(PhysicalExtent(extent))?;
            self.write(device, offset, &zeroes)?;
        }
        Ok(())
    }
}
