//! The search of a repair: sound parts of the trees, and pages known by their headers alone.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

use blockd_mapper::format::catalogue::{VolumeRecord, decode_catalogue};
use blockd_mapper::format::leaf_page::{LeafEntry, decode_leaf};
use blockd_mapper::format::page::{self, PageExpect, PageKind, PageStamp};
use blockd_mapper::format::{PageRef, Place, PoolId, Structure, VolumeName, levels_for};
use blockd_mapper::geometry::{PAGE_BYTES, PAGE_SIZE};
use blockd_mapper::mapping::Mapping;
use blockd_mapper::units::{PageAddress, PhysicalExtent, SlotIndex, VolumeId};

use super::super::check::Progress;
use super::super::dump::Lost;
use super::super::owners::Owner;
use super::super::rebuild::{label_pages, leaf_pages};
use super::super::walk::{NO_ENTRIES, PageUse, Stopped, Visitor, decode_whole_leaf};
use super::super::{Entries, Reader, State};
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
    /// Records of lost catalogue pages: from the newest page of each that is found.
    pub(super) fn find_records(
        &mut self,
        reader: &mut Reader<'_>,
        state: &State,
        progress: &mut dyn FnMut(Progress),
    ) -> Vec<VolumeRecord> {
        let missing = self.catalogue_missing.clone();
        let per_page = blockd_mapper::format::catalogue::RECORDS_PER_PAGE;
        let mut newest: BTreeMap<u64, Orphan> = BTreeMap::new();
        let wanted = |index: u64| missing.iter().any(|m| m.contains(&(index * per_page)));
        self.scan(reader, PageKind::Catalogue, progress, |index, orphan| {
            if wanted(index) && newest.get(&index).is_none_or(|best| best.age() < orphan.age()) {
                newest.insert(index, orphan);
            }
        });
        let mut names: HashSet<_> = state.volumes.values().map(|v| v.record.name).collect();
        let mut records = Vec::new();
        for (index, orphan) in newest {
            let Some(page) = read(reader, orphan.address) else { continue };
            let expect = expect(self.pool_id, PageKind::Catalogue, index);
            let (geometry, limits) = (reader.geometry(), *reader.limits());
            let place = Place::Page(orphan.address);
            let Ok(page) = decode_catalogue(&page, &expect, geometry, &limits, place) else {
                continue;
            };
            self.avoid.insert(orphan.address);
            for record in page.records().iter().flatten() {
                let mut record = *record;
                let known = state.volumes.contains_key(&record.id);
                if known || record.id.0 >= state.next_volume_id {
                    continue;
                }
                if !names.insert(record.name)
                    && let Ok(name) = VolumeName::new(&format!("salvaged-{}", record.id))
                {
                    record.name = name;
                }
                records.push(record);
            }
        }
        records
    }

    /// Leaf pages for slots that are lost: the volume's own newest; else, for volumes that share
    /// their leaves with relatives, the newest from before it was made, or the oldest after that.
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
        let lineages: HashMap<u32, VolumeId> =
            self.state.volumes.values().map(|v| (v.record.id.0, v.record.lineage)).collect();
        let keys: Vec<_> = self.missing.keys().copied().collect();
        for (id, slot) in keys {
            let Some(view) = self.state.volumes.get(&id) else { continue };
            let (own, made) = ([id.0, view.tree.0], view.record.created_lsn);
            let lineage = view.record.lineage;
            let candidates = found.get(&slot).map(Vec::as_slice).unwrap_or_default();
            let related = |o: &&Orphan| {
                lineages.get(&o.tree) == Some(&lineage)
                    || own.contains(&o.tree)
                    || o.tree == lineage.0
            };
            let rank = |orphan: &&Orphan| {
                let (epoch, lsn) = (orphan.epoch.0, orphan.lsn.0);
                if own.contains(&orphan.tree) {
                    (2, epoch, lsn)
                } else if orphan.lsn < made {
                    (1, epoch, lsn)
                } else {
                    (0, u64::MAX - epoch, u64::MAX - lsn)
                }
            };
            let mut candidates: Vec<_> = candidates.iter().filter(related).copied().collect();
            candidates.sort_by_key(|orphan| Reverse(rank(&orphan)));
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
                    if lsn <= superblock.checkpoint_lsn {
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
