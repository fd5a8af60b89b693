//! Repair: sound structures are kept, lost ones are searched among the pages on the media, and all
//! of it is written as a new tree beside the old one.
//!
//! A page that is found by its header alone is one that was right at some checkpoint. It may be
//! older than the lost page, so an entry of it counts only where nothing sound has its extent.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::{VolumeRecord, decode_catalogue};
use blockd_mapper::format::leaf_page::decode_leaf;
use blockd_mapper::format::page::{self, PageExpect, PageKind};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::{PageRef, Place, PoolId, Structure, VolumeName, levels_for};
use blockd_mapper::geometry::{PAGE_BYTES, PAGE_SIZE};
use blockd_mapper::io::IoError;
use blockd_mapper::leaf::LEAF_ENTRIES;
use blockd_mapper::mapping::Mapping;
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::{DeviceIndex, Lsn, PageAddress, PhysicalExtent, SlotIndex, VolumeId};

use super::check::{Progress, check};
use super::dump::Lost;
use super::owners::{Owner, Owners};
use super::rebuild::{Builder, MediaMut, PageSource};
use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{Entries, Fault, IDS_SKIPPED, Media, Reader, State, VolumeView, reader};

/// The options of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RepairOptions {
    /// Only report the planned changes.
    pub dry_run: bool,
    /// Look for nothing: data that is not proven to be the last state reads as zeroes.
    pub strict: bool,
}

/// The result of a repair.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RepairReport {
    /// Anything was damaged.
    pub damaged: bool,
    /// Anything was written.
    pub changed: bool,
    /// Volumes and snapshots of the pool as it is now.
    pub volumes: u64,
    /// The ranges that read as zeroes from now on.
    pub lost: Vec<Lost>,
    /// The ranges that were found by the header of their page alone: they may be older than the
    /// lost ones.
    pub salvaged: Vec<Lost>,
}

/// Repairs a pool. One that is sound is left alone.
pub fn repair(
    media: &mut dyn MediaMut,
    devices: &[PresentDevice],
    options: RepairOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<RepairReport, MapperError> {
    let (superblock, handles) = superblock(media, devices)?;
    if superblock.unknown_ro_compat() != 0 {
        return Err(MapperError::Unsupported { features: superblock.unknown_ro_compat() });
    }
    let mut plan = {
        let mut reader = Reader::with(media, superblock.clone(), handles.clone())?;
        let report = &mut |now| {
            progress(now);
            Ok(())
        };
        let found = check(&mut reader, report)?;
        if !found.damaged {
            let volumes = found.volumes + found.snapshots;
            return Ok(RepairReport { volumes, ..RepairReport::default() });
        }
        let stopped = |_| MapperError::Internal("the repair was stopped");
        let mut plan = Plan::new(&reader, options);
        plan.collect(&mut reader, progress).map_err(stopped)?;
        plan
    };
    let mut report = RepairReport {
        damaged: true,
        changed: false,
        volumes: plan.state.volumes.len() as u64,
        lost: std::mem::take(&mut plan.lost),
        salvaged: std::mem::take(&mut plan.salvaged),
    };
    if !options.dry_run {
        plan.write(media, &superblock, &handles, !report.lost.is_empty())?;
        report.changed = true;
    }
    Ok(report)
}

/// The superblock that counts. A device that has none any more is known where only one place of
/// the table is left for it.
fn superblock(
    media: &mut dyn MediaMut,
    devices: &[PresentDevice],
) -> Result<(Superblock, Vec<u8>), MapperError> {
    let refused = match Reader::open(media, devices) {
        Ok(reader) => {
            let count = reader.superblock().devices.as_slice().len();
            let handles = (0..count).map(|device| reader.handle(device).0).collect();
            return Ok((reader.superblock().clone(), handles));
        }
        // Structures that this build cannot read are not lost: they must not be overwritten.
        Err(MapperError::Format(error)) if error.is_unsupported() => return Err(error.into()),
        Err(error) => error,
    };
    let mut copies = Vec::new();
    let mut silent = Vec::new();
    for (handle, device) in (0..).zip(devices) {
        match reader::newest_copy(media, DeviceIndex(handle), device) {
            Some(copy) => copies.push((handle, copy)),
            None => silent.push(handle),
        }
    }
    let newest = copies.iter().map(|(_, copy)| copy).max_by_key(|copy| copy.generation);
    let (Some(newest), [silent]) = (newest.cloned(), silent.as_slice()) else {
        return Err(refused);
    };
    let table = newest.devices.as_slice();
    let mut handles = vec![None; table.len()];
    for (handle, copy) in &copies {
        let own = copy.devices.as_slice().get(usize::from(copy.this_device.0));
        let at = own.and_then(|own| table.iter().position(|record| record.uuid == own.uuid));
        match at.filter(|_| copy.pool_id == newest.pool_id) {
            Some(at) if copy.generation >= newest.generation.saturating_sub(1) => {
                handles[at] = Some(*handle)
            }
            _ => return Err(refused),
        }
    }
    let missing: Vec<_> = (0..table.len()).filter(|&at| handles[at].is_none()).collect();
    let size = devices.get(usize::from(*silent)).map_or(0, |device| device.size);
    match missing.as_slice() {
        [at] if size >= table[*at].size => handles[*at] = Some(*silent),
        _ => return Err(refused),
    }
    let handles = handles.into_iter().map(|handle| handle.unwrap_or(u8::MAX)).collect();
    Ok((newest, handles))
}

/// A page found by its header.
#[derive(Debug, Clone, Copy)]
struct Orphan {
    address: PageAddress,
    tree: u32,
    lsn: Lsn,
}

/// The plan of a repair.
struct Plan {
    options: RepairOptions,
    pool_id: PoolId,
    state: State,
    owners: Owners,
    /// Pages of the old trees.
    avoid: HashSet<PageAddress>,
    /// Leaves that can't be read, by volume and slot.
    missing: BTreeMap<(VolumeId, u32), Option<PageAddress>>,
    catalogue_missing: Vec<Range<u64>>,
    /// Slots in use of each volume so far.
    slots: HashMap<VolumeId, u64>,
    leaves: u64,
    lost: Vec<Lost>,
    salvaged: Vec<Lost>,
    next_sequence: u64,
    span: u64,
    geometry: blockd_mapper::geometry::Geometry,
}

impl Plan {
    fn new(reader: &Reader<'_>, options: RepairOptions) -> Self {
        let geometry = reader.geometry();
        Self {
            options,
            pool_id: reader.superblock().pool_id,
            state: State::empty(reader),
            owners: Owners::new(reader.superblock()),
            avoid: HashSet::new(),
            missing: BTreeMap::new(),
            catalogue_missing: Vec::new(),
            slots: HashMap::new(),
            leaves: 0,
            lost: Vec::new(),
            salvaged: Vec::new(),
            next_sequence: 0,
            span: geometry.leaf_span(),
            geometry,
        }
    }

    /// Everything that is sound, then the parts of the rest that can be found.
    fn collect(
        &mut self,
        reader: &mut Reader<'_>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Stopped> {
        let mut state = State::of_checkpoint(reader, self)?;
        // The trees of volumes that the log deletes are in use until the new superblock counts.
        walk::volumes(reader, &state, &mut PagesOnly(&mut self.avoid))?;
        let log = state.replay(reader, self)?;
        self.next_sequence = log.next_sequence;
        if let Some(fault) = log.broken {
            self.lose(VolumeId(0), String::new(), 0..0, format!("{fault}; changes behind it"));
        }
        walk::volumes(reader, &state, self)?;
        if !self.catalogue_missing.is_empty() && !self.options.strict {
            let records = self.find_records(reader, &state, progress);
            let mut found = state.clone();
            found.volumes.clear();
            for record in records {
                let text = "its record is of an older checkpoint".to_owned();
                let name = record.name.as_str().to_owned();
                self.salvaged.push(Lost { volume: record.id, name, range: 0..record.size, text });
                found.volumes.insert(record.id, VolumeView::new(self.geometry, record));
            }
            walk::volumes(reader, &found, self)?;
            state.volumes.extend(found.volumes);
        }
        self.state = state;
        if !self.options.strict && !self.missing.is_empty() {
            self.find_leaves(reader, progress);
        }
        self.report_missing();
        Ok(())
    }

    fn lose(&mut self, volume: VolumeId, name: String, range: Range<u64>, text: String) {
        self.lost.push(Lost { volume, name, range, text });
    }

    /// Records of lost catalogue pages: from the newest page of each that is found.
    fn find_records(
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
            if wanted(index) && newest.get(&index).is_none_or(|best| best.lsn < orphan.lsn) {
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
    fn find_leaves(&mut self, reader: &mut Reader<'_>, progress: &mut dyn FnMut(Progress)) {
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
                let before = orphan.lsn < made;
                let age = if before { orphan.lsn.0 } else { u64::MAX - orphan.lsn.0 };
                if own.contains(&orphan.tree) {
                    (2, orphan.lsn.0)
                } else {
                    (u64::from(before), age)
                }
            };
            let best = candidates.iter().filter(related).max_by_key(rank);
            let Some(best) = best.copied() else { continue };
            let Some(mut entries) = orphan_leaf(reader, self.pool_id, best.address, slot) else {
                continue;
            };
            let view = view.clone();
            let range = self.bytes(&view, u64::from(slot)..u64::from(slot) + 1);
            let dropped = self.claim(&view, SlotIndex(slot), &mut entries, true);
            self.avoid.insert(best.address);
            self.missing.insert((id, slot), Some(best.address));
            *self.slots.entry(id).or_default() += 1;
            self.leaves += 1;
            let mut text = format!("from a leaf page of LSN {}", best.lsn);
            if dropped > 0 {
                text.push_str(&format!(
                    "; {dropped} extent(s) of it belong to others and are lost"
                ));
            }
            let name = view.record.name.as_str().to_owned();
            self.salvaged.push(Lost { volume: id, name, range, text });
        }
    }

    /// Reports the slots that were not found, as runs.
    fn report_missing(&mut self) {
        let mut runs: Vec<(VolumeId, Range<u64>)> = Vec::new();
        for (&(id, slot), found) in &self.missing {
            let slot = u64::from(slot);
            match runs.last_mut() {
                _ if found.is_some() => {}
                Some((last, range)) if *last == id && range.end == slot => range.end += 1,
                _ => runs.push((id, slot..slot + 1)),
            }
        }
        for (id, slots) in runs {
            let Some(view) = self.state.volumes.get(&id).cloned() else { continue };
            let range = self.bytes(&view, slots);
            let name = view.record.name.as_str().to_owned();
            let text = "the data that was mapped there reads as zeroes".to_owned();
            self.lose(id, name, range, text);
        }
    }

    fn bytes(&self, view: &VolumeView, slots: Range<u64>) -> Range<u64> {
        let size = view.record.size;
        (slots.start * self.span).min(size)..(slots.end * self.span).min(size)
    }

    /// Takes the extents of a leaf; entries whose extent belongs to another volume are dropped.
    /// Entries of an old page are also cut to the volume's size.
    fn claim(
        &mut self,
        view: &VolumeView,
        slot: SlotIndex,
        entries: &mut Entries,
        old: bool,
    ) -> u64 {
        let mut dropped = 0;
        let (size, lineage) = (view.record.size, view.record.lineage.0);
        for (extent, entry) in (slot.first_extent().0..).zip(entries.iter_mut()) {
            let Some(physical) = entry.physical else { continue };
            let cut = match old {
                true => super::state::cut_mapping(self.geometry, *entry, extent, size),
                false => *entry,
            };
            let owner = Owner::Lineage(lineage, extent);
            let mine = cut.is_mapped()
                && self.owners.claim(physical, owner).map_or_else(|o| o == owner, |()| true);
            dropped += u64::from(!mine);
            *entry = if mine { cut } else { Mapping::UNMAPPED };
        }
        dropped
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
                    let Some((index, tree, lsn)) = header(page, kind, self.pool_id) else {
                        continue;
                    };
                    now.pages += 1;
                    if lsn <= superblock.checkpoint_lsn {
                        each(index, Orphan { address, tree, lsn });
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
    fn pages(&self) -> u64 {
        let mut pages = self.leaves + 8;
        let mut above = self.state.volumes.len() as u64;
        pages += above;
        while above > 1 {
            above = above.div_ceil(blockd_mapper::format::INDEX_FANOUT);
            pages += above;
        }
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

    /// Returns the next volume id. Lost parts of the log may have made volumes, whose ids backups
    /// know.
    const fn next_volume_id(&self, lost: bool) -> u32 {
        let skipped = if lost { IDS_SKIPPED } else { 0 };
        self.state.next_volume_id.saturating_add(skipped)
    }

    /// Writes the new trees, and makes them valid.
    fn write(
        &mut self,
        media: &mut dyn MediaMut,
        old: &Superblock,
        handles: &[u8],
        lost: bool,
    ) -> Result<(), MapperError> {
        // A forged superblock can have values that no real pool reaches.
        let end = |what| MapperError::Limit { what, limit: u64::MAX };
        let generation = old.generation.checked_add(1).ok_or_else(|| end("generations"))?;
        let epoch = old.epoch.0.checked_add(1).ok_or_else(|| end("epochs"))?;
        // Far enough ahead that no block that lies in the log can be taken for the next one.
        let ahead = self.next_sequence.checked_add(2 * old.wal_blocks());
        let superblock = Superblock {
            generation,
            previous_sum: old.sum(),
            clean: true,
            epoch: blockd_mapper::units::Epoch(epoch),
            open_id: 0,
            wal_tail_sequence: ahead.ok_or_else(|| end("blocks of the log"))?,
            wal_tail_hash: 0,
            checkpoint_lsn: self.state.lsn,
            next_volume_id: self.next_volume_id(lost),
            ..old.clone()
        };
        let source = PageSource::new(&superblock, &self.owners, &self.avoid, self.pages())?;
        // The old tree is read; the new one is written elsewhere.
        let shared = RefCell::new(media);
        let [mut first, mut second, mut third] =
            [Shared(&shared), Shared(&shared), Shared(&shared)];
        let mut reader = Reader::with(&mut first, old.clone(), handles.to_vec())?;
        let orphans = Reader::with(&mut second, old.clone(), handles.to_vec())?;
        let mut builder = Builder::new(&mut third, superblock, handles.to_vec(), source);
        builder.keep_log();
        let state = self.state.clone();
        let mut writer = Writer {
            plan: self,
            builder,
            orphans,
            current: None,
            slots: BTreeMap::new(),
            salvaged: BTreeMap::new(),
            leaves: HashMap::new(),
            failure: None,
        };
        let walked = walk::volumes(&mut reader, &state, &mut writer);
        let ended = walked.and_then(|()| writer.end_volume());
        match writer.failure {
            Some(failure) => Err(failure),
            None if ended.is_err() => Err(MapperError::Internal("the repair was stopped")),
            None => writer.builder.finish().map(|_| ()),
        }
    }
}

impl Visitor for Plan {
    fn page(&mut self, page: PageUse) -> Result<(), Stopped> {
        self.avoid.insert(page.address);
        let (extent, _) = self.geometry.page_place(page.address);
        // Data in the same extent is damage, of which an owner is left to be found.
        let _ = self.owners.claim(extent, Owner::Pages);
        Ok(())
    }

    fn catalogue_lost(&mut self, places: Range<u64>, fault: &Fault) -> Result<(), Stopped> {
        let text = format!("{fault}; the rest is not reported as salvaged");
        self.lose(VolumeId(0), String::new(), places.clone(), text);
        self.catalogue_missing.push(places);
        Ok(())
    }

    fn lost(&mut self, volume: &VolumeView, slots: Range<u64>, _: &Fault) -> Result<(), Stopped> {
        for slot in slots {
            let slot = u32::try_from(slot).unwrap_or(u32::MAX);
            self.missing.insert((volume.record.id, slot), None);
        }
        Ok(())
    }

    fn problem(&mut self, what: &'static str, text: String) -> Result<(), Stopped> {
        self.lose(VolumeId(0), String::new(), 0..0, format!("{what}: {text}"));
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        *self.slots.entry(leaf.volume.record.id).or_default() += 1;
        let Some(fresh) = leaf.fresh else { return Ok(()) };
        self.leaves += 1;
        let mut entries = *fresh;
        self.claim(leaf.volume, leaf.slot, &mut entries, false);
        for (extent, (was, is)) in
            (leaf.slot.first_extent().0..).zip(fresh.iter().zip(entries.iter()))
        {
            if let Some(physical) = was.physical.filter(|_| !is.is_mapped()) {
                let size = self.geometry.extent_size();
                let name = leaf.volume.record.name.as_str().to_owned();
                let text = format!("extent {physical} belongs to something else");
                self.lose(leaf.volume.record.id, name, extent * size..(extent + 1) * size, text);
            }
        }
        Ok(())
    }
}

struct PagesOnly<'a>(&'a mut HashSet<PageAddress>);

impl Visitor for PagesOnly<'_> {
    fn page(&mut self, page: PageUse) -> Result<(), Stopped> {
        self.0.insert(page.address);
        Ok(())
    }
}

/// One set of devices, read and written in turn.
struct Shared<'a, 'm>(&'a RefCell<&'m mut dyn MediaMut>);

impl Media for Shared<'_, '_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.0.borrow_mut().read(device, offset, bytes)
    }
}

impl MediaMut for Shared<'_, '_> {
    fn write(&mut self, device: DeviceIndex, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.0.borrow_mut().write(device, offset, bytes)
    }

    fn flush(&mut self, device: DeviceIndex) -> Result<(), IoError> {
        self.0.borrow_mut().flush(device)
    }
}

/// Carries out the plan.
struct Writer<'p, 'm> {
    plan: &'p mut Plan,
    builder: Builder<'m>,
    orphans: Reader<'m>,
    current: Option<VolumeRecord>,
    /// Leaves of the volume that are written.
    slots: BTreeMap<u32, PageRef>,
    /// Leaves of the volume that were found; the log may know more of them.
    salvaged: BTreeMap<u32, Box<Entries>>,
    /// Leaves by number, with their lineage.
    leaves: HashMap<u64, (VolumeId, PageRef)>,
    failure: Option<MapperError>,
}

impl Writer<'_, '_> {
    fn kept<T>(&mut self, result: Result<T, MapperError>) -> Result<T, Stopped> {
        result.map_err(|error| {
            self.failure.get_or_insert(error);
            Stopped
        })
    }

    fn end_volume(&mut self) -> Result<(), Stopped> {
        let Some(record) = self.current.take() else { return Ok(()) };
        for (slot, entries) in std::mem::take(&mut self.salvaged) {
            let written = self.builder.write_leaf(record.id.0, slot, &entries);
            let reference = self.kept(written)?;
            self.slots.insert(slot, reference);
        }
        let begun = self.builder.volume(record);
        self.kept(begun)?;
        for (slot, reference) in std::mem::take(&mut self.slots) {
            let put = self.builder.put(slot, reference);
            self.kept(put)?;
        }
        Ok(())
    }
}

impl Visitor for Writer<'_, '_> {
    fn page(&mut self, _: PageUse) -> Result<(), Stopped> {
        Ok(())
    }

    fn volume(&mut self, volume: &VolumeView) -> Result<(), Stopped> {
        self.end_volume()?;
        self.current = Some(volume.record);
        Ok(())
    }

    fn lost(&mut self, volume: &VolumeView, slots: Range<u64>, _: &Fault) -> Result<(), Stopped> {
        let id = volume.record.id;
        let [from, to] = [slots.start, slots.end].map(|s| u32::try_from(s).unwrap_or(u32::MAX));
        let found = self.plan.missing.range((id, from)..(id, to));
        let found: Vec<_> = found.filter_map(|(&(_, slot), at)| Some((slot, (*at)?))).collect();
        for (slot, address) in found {
            let pool_id = self.plan.pool_id;
            let Some(mut entries) = orphan_leaf(&mut self.orphans, pool_id, address, slot) else {
                continue;
            };
            self.plan.claim(volume, SlotIndex(slot), &mut entries, true);
            self.salvaged.insert(slot, entries);
        }
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        let (slot, lineage) = (leaf.slot.0, leaf.volume.record.lineage);
        if let Some(fresh) = leaf.fresh {
            let mut entries = Box::new(*fresh);
            self.plan.claim(leaf.volume, leaf.slot, &mut entries, false);
            if let Some(salvaged) = self.salvaged.get_mut(&slot) {
                for (entry, newer) in salvaged.iter_mut().zip(entries.iter()) {
                    *entry = if newer.is_mapped() { *newer } else { *entry };
                }
                return Ok(());
            }
            let written = self.builder.write_leaf(leaf.volume.record.id.0, slot, &entries);
            let reference = self.kept(written)?;
            self.leaves.insert(leaf.number, (lineage, reference));
        }
        if let Some(&(of, reference)) = self.leaves.get(&leaf.number)
            && of == lineage
            && !self.salvaged.contains_key(&slot)
        {
            self.slots.insert(slot, reference);
        }
        Ok(())
    }
}

/// Index, tree and LSN of a page that matches its header.
fn header(page: &[u8], kind: PageKind, pool_id: PoolId) -> Option<(u64, u32, Lsn)> {
    let index = u64::from_le_bytes(page.get(40..48)?.try_into().ok()?);
    let opened = page::open(page, &expect(pool_id, kind, index), Place::Memory).ok()?;
    Some((index, opened.stamp.tree, opened.stamp.lsn))
}

fn expect(pool_id: PoolId, kind: PageKind, index: u64) -> PageExpect {
    PageExpect { pool_id, kind, level: 0, index, tree: None, sum: None }
}

fn read(reader: &mut Reader<'_>, address: PageAddress) -> Option<Box<[u8]>> {
    let reference = PageRef { address, sum: 0 };
    let page = reader.page(reference, Structure::LeafPage).ok()?;
    Some(page.0.to_vec().into_boxed_slice())
}

fn orphan_leaf(
    reader: &mut Reader<'_>,
    pool_id: PoolId,
    address: PageAddress,
    slot: u32,
) -> Option<Box<Entries>> {
    let page = read(reader, address)?;
    let expect = expect(pool_id, PageKind::Leaf, slot.into());
    let decoded = decode_leaf(&page, &expect, reader.limits(), Place::Page(address)).ok()?;
    let mut entries = Box::new([Mapping::UNMAPPED; LEAF_ENTRIES]);
    for (entry, mapping) in entries.iter_mut().zip(decoded.iter()) {
        *entry = mapping;
    }
    Some(entries)
}
