//! The search of a repair: sound parts of the trees, and pages known by their headers alone.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use blockd_mapper::format::catalogue::{VolumeKind, VolumeRecord, decode_catalogue};
use blockd_mapper::format::leaf_page::{LeafEntry, decode_leaf};
use blockd_mapper::format::page::{self, PageExpect, PageKind, PageStamp};
use blockd_mapper::format::{PageRef, Place, PoolId, Structure, levels_for};
use blockd_mapper::geometry::{PAGE_BYTES, PAGE_SIZE};
use blockd_mapper::mapping::Mapping;
use blockd_mapper::units::{Lsn, PageAddress, PhysicalExtent, SlotIndex, VolumeId};

use super::super::check::Progress;
use super::super::dump::Lost;
use super::super::owners::Owner;
use super::super::rebuild::{label_pages, leaf_pages};
use super::super::walk::{NO_ENTRIES, PageUse, Stopped, Visitor, decode_whole_leaf};
use super::super::{Entries, Reader, State, VolumeView};
use super::{Orphan, Plan};

pub(super) struct PagesOnly<'a>(pub(super) &'a mut HashSet<PageAddress>);

impl Visitor for PagesOnly<'_> {
    fn page(&mut self, page: PageUse) -> Result<(), Stopped> {
        self.0.insert(page.address);
        Ok(())
    }
}

/// The stamp of a page that matches its header.
fn stamp(page: &[u8], kind: PageKind, pool_id: PoolId) -> Option<PageStamp> {
    let index = u64::from_le_bytes(page.get(40..48)?.try_into().ok()?);
    let opened = page::open(page, &expect(pool_id, kind, index), Place::Memory).ok()?;
    Some(opened.stamp)
}

fn expect(pool_id: PoolId, kind: PageKind, index: u64) -> PageExpect {
    PageExpect { pool_id, kind, level: 0, index, tree: None, sum: None }
}

pub(super) fn read(reader: &mut Reader<'_>, address: PageAddress) -> Option<Box<[u8]>> {
    let reference = PageRef { address, sum: 0 };
    let page = reader.page(reference, Structure::LeafPage).ok()?;
    Some(page.0.to_vec().into_boxed_slice())
}

/// The content of a leaf page without a parent.
pub(super) struct OrphanLeaf {
    pub(super) entries: Box<Entries>,
    /// Its under page.
    under: PageRef,
    /// Entries whose base is not known, as the under page is damaged.
    without_base: usize,
}

/// The entries of a leaf page without a parent.
pub(super) fn orphan_leaf(
    reader: &mut Reader<'_>,
    pool_id: PoolId,
    address: PageAddress,
    slot: u32,
) -> Option<OrphanLeaf> {
    let page = read(reader, address)?;
    let expect = expect(pool_id, PageKind::Leaf, slot.into());
    if let Ok((entries, under)) = decode_whole_leaf(reader, &page, address, &expect) {
        return Some(OrphanLeaf { entries, under, without_base: 0 });
    }
    let leaf = decode_leaf(&page, &expect, reader.limits(), Place::Page(address)).ok()?;
    let (mut entries, mut without_base) = (Box::new(NO_ENTRIES), 0);
    for (entry, found) in entries.iter_mut().zip(leaf.iter()) {
        let mapping = match found {
            LeafEntry::Plain(mapping) => mapping,
            LeafEntry::Overlay { overlay, top } => {
                without_base += 1;
                Mapping { physical: Some(overlay), valid: top }
            }
        };
        *entry = mapping.into();
    }
    Some(OrphanLeaf { entries, under: leaf.under(), without_base })
}

impl Plan {
    /// Records of lost catalogue pages, from the newest page of each that is found, and these
    /// pages.
    pub(super) fn find_records(
        &self,
        reader: &mut Reader<'_>,
        missing: &[Range<u64>],
        state: &State,
        progress: &mut dyn FnMut(Progress),
    ) -> (Vec<PageAddress>, Vec<VolumeRecord>) {
        let per_page = blockd_mapper::format::catalogue::RECORDS_PER_PAGE;
        let mut newest: BTreeMap<u64, Orphan> = BTreeMap::new();
        let wanted = |index: u64| missing.iter().any(|m| m.contains(&(index * per_page)));
        self.scan(reader, PageKind::Catalogue, progress, |index, orphan| {
            if wanted(index) && newest.get(&index).is_none_or(|best| best.age() < orphan.age()) {
                newest.insert(index, orphan);
            }
        });
        let (mut pages, mut records) = (Vec::new(), Vec::new());
        for (index, orphan) in newest {
            let Some(page) = read(reader, orphan.address) else { continue };
            let expect = expect(self.pool_id, PageKind::Catalogue, index);
            let (geometry, limits) = (reader.geometry(), *reader.limits());
            let place = Place::Page(orphan.address);
            let Ok(page) = decode_catalogue(&page, &expect, geometry, &limits, place) else {
                continue;
            };
            pages.push(orphan.address);
            let fits = |record: &&VolumeRecord| {
                !state.volumes.contains_key(&record.id) && record.id.0 < state.next_volume_id
            };
            records.extend(page.records().iter().flatten().filter(fits));
        }
        (pages, records)
    }

    /// Leaf pages for slots that are lost.
    pub(super) fn find_leaves(
        &mut self,
        reader: &mut Reader<'_>,
        progress: &mut dyn FnMut(Progress),
    ) {
        let slots: HashSet<u32> = self.missing.keys().map(|(_, slot)| *slot).collect();
        let mut found: HashMap<u32, Vec<Orphan>> = HashMap::new();
        self.scan(reader, PageKind::Leaf, progress, |index, orphan| {
            if let Ok(slot) = u32::try_from(index)
                && slots.contains(&slot)
            {
                found.entry(slot).or_default().push(orphan);
            }
        });
        // The next best ones as well: the best may not be readable a second time.
        self.avoid.extend(found.values().flatten().map(|orphan| orphan.address));
        let keys: Vec<_> = self.missing.keys().copied().collect();
        for (id, slot) in keys {
            let Some(view) = self.state.volumes.get(&id) else { continue };
            let pages = found.get(&slot).map(Vec::as_slice).unwrap_or_default();
            let candidates = self.candidates(view, pages);
            let found = candidates.into_iter().find_map(|orphan| {
                let leaf = orphan_leaf(reader, self.pool_id, orphan.address, slot)?;
                Some((orphan, leaf))
            });
            let Some((best, leaf)) = found else { continue };
            let OrphanLeaf { mut entries, under, without_base } = leaf;
            let view = view.clone();
            let range = self.bytes(&view, u64::from(slot)..u64::from(slot) + 1);
            // The page is of the checkpoint at the latest: the log's changes lie over it.
            view.apply(self.geometry, SlotIndex(slot), &mut entries);
            let dropped = self.claim(&view, SlotIndex(slot), &mut entries, true);
            self.avoid.extend([best.address, under.address]);
            self.missing.insert((id, slot), Some(best.address));
            *self.slots.entry(id).or_default() += 1;
            self.pages += leaf_pages(&entries);
            let mut text = format!("from a leaf page of LSN {}", best.lsn);
            if best.tree != id.0 {
                text.push_str(&format!(" of the tree of volume {}", best.tree));
            }
            if dropped > 0 {
                text.push_str(&format!(
                    "; {dropped} extent(s) of it belong to others and are lost"
                ));
            }
            if without_base > 0 {
                text.push_str(&format!(
                    "; {without_base} extent(s) lie in two parts, of which one is lost"
                ));
            }
            let name = view.record.name.as_str().to_owned();
            self.salvaged.push(Lost { volume: id, name, range, text });
        }
    }

    /// The pages of a slot that may be a volume's, the likeliest first: the newest of its own; the
    /// newest that an origin had when the volume parted from it; the oldest since of an origin, or
    /// of a snapshot of it or of the volume, as the page of a leaf that several share names the
    /// one with the lowest id. Clones beside the volume, and of it, write for themselves.
    fn candidates(&self, view: &VolumeView, pages: &[Orphan]) -> Vec<Orphan> {
        let volumes = &self.state.volumes;
        // What the log made or rolled back has the tree of another volume.
        let record = volumes.get(&view.tree).map_or(&view.record, |of| &of.record);
        let origins = self.origins(record);
        let rank = |orphan: &Orphan| {
            let (epoch, lsn) = (orphan.epoch.0, orphan.lsn.0);
            let is_snapshot = || {
                let of = volumes.get(&VolumeId(orphan.tree)).map(|view| &view.record);
                let of = of.filter(|one| one.kind == VolumeKind::Snapshot).map(|one| one.origin);
                of.is_some_and(|of| of == record.id || origins.contains_key(&of.0))
            };
            match origins.get(&orphan.tree) {
                _ if orphan.tree == view.tree.0 => Some((2, epoch, lsn)),
                Some(parted) if orphan.lsn < *parted => Some((1, epoch, lsn)),
                None if orphan.lsn < record.created_lsn || !is_snapshot() => None,
                _ => Some((0, u64::MAX - epoch, u64::MAX - lsn)),
            }
        };
        let mut ranked: Vec<_> = pages.iter().filter_map(|one| Some((rank(one)?, *one))).collect();
        ranked.sort_by_key(|(rank, _)| Reverse(*rank));
        ranked.into_iter().map(|(_, orphan)| orphan).collect()
    }

    /// The origins of a volume, the first of its family included, each with the LSN at which the
    /// volume, or the origin in between, was made of it. Where one of them is deleted, every older
    /// relative may be an origin of it.
    fn origins(&self, record: &VolumeRecord) -> HashMap<u32, Lsn> {
        let volumes = &self.state.volumes;
        let mut origins = HashMap::new();
        let mut of = record;
        // Ids fall on the way, unless the catalogue is damaged.
        while of.origin.0 != 0 && !origins.contains_key(&of.origin.0) {
            origins.insert(of.origin.0, of.created_lsn);
            let Some(origin) = volumes.get(&of.origin) else {
                let older = volumes.range(..of.origin).map(|(id, view)| (id, &view.record));
                for (id, _) in older.filter(|(_, one)| one.lineage == record.lineage) {
                    origins.entry(id.0).or_insert(of.created_lsn);
                }
                break;
            };
            of = &origin.record;
        }
        origins.entry(record.lineage.0).or_insert(of.created_lsn);
        origins
    }

    /// Every page of a kind on the media that isn't in an extent of sound data.
    fn scan(
        &self,
        reader: &mut Reader<'_>,
        kind: PageKind,
        progress: &mut dyn FnMut(Progress),
        mut each: impl FnMut(u64, Orphan),
    ) {
        let superblock = reader.superblock().clone();
        let of = superblock.devices.as_slice().iter().map(|device| device.extents).sum();
        let mut now = Progress { volumes: 0, of, pages: 0 };
        let size = usize::try_from(self.geometry.extent_size()).unwrap_or(PAGE_SIZE);
        let mut bytes = vec![0; size];
        for device in superblock.devices.as_slice() {
            for extent in (device.first.0..device.first.0 + device.extents).map(PhysicalExtent) {
                now.volumes += 1;
                let owner = self.owners.get(extent);
                if matches!(owner, Some(Owner::Lineage(..) | Owner::Fixed) | None) {
                    continue;
                }
                progress(now);
                self.read_extent(reader, extent, &mut bytes);
                for (within, page) in (0..).zip(bytes.chunks_exact(PAGE_SIZE)) {
                    let address = self.geometry.page_address(extent, within);
                    let Some(stamp) = stamp(page, kind, self.pool_id) else { continue };
                    now.pages += 1;
                    let PageStamp { index, tree, lsn, epoch, .. } = stamp;
                    // Pages of a restore or repair that did not end have a later epoch.
                    if lsn <= superblock.checkpoint_lsn && epoch <= superblock.epoch {
                        each(index, Orphan { address, tree, lsn, epoch });
                    }
                }
            }
        }
    }

    /// Reads an extent; unreadable parts are zero.
    fn read_extent(&self, reader: &mut Reader<'_>, extent: PhysicalExtent, bytes: &mut [u8]) {
        if reader.bytes(extent, 0, bytes, Structure::LeafPage).is_ok() {
            return;
        }
        for (within, page) in (0..).zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            if reader.bytes(extent, within * PAGE_BYTES, page, Structure::LeafPage).is_err() {
                page.fill(0);
            }
        }
    }

    /// At the most this many pages.
    pub(super) fn pages(&self) -> u64 {
        let mut pages = self.pages + 8;
        let mut above = self.state.volumes.len() as u64;
        pages += above;
        while above > 1 {
            above = above.div_ceil(blockd_mapper::format::INDEX_FANOUT);
            pages += above;
        }
        let views = (0..).zip(self.state.volumes.values());
        let labelled: Vec<_> =
            views.filter(|(_, view)| !view.labels.is_empty()).map(|(place, _)| place).collect();
        pages += label_pages(&labelled, self.state.volumes.len() as u64);
        for (id, count) in &self.slots {
            let Some(view) = self.state.volumes.get(id) else { continue };
            let mut all = u64::from(self.geometry.slots_for(view.record.size));
            for _ in 0..levels_for(all).max(1) {
                all = all.div_ceil(blockd_mapper::format::INDEX_FANOUT);
                pages += all.min(*count);
            }
        }
        pages
    }
}
