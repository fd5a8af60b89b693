//! Repair: sound structures are kept, lost ones are searched among the pages on the media, and all
//! of it is written as a new tree beside the old one.
//!
//! A page that is found by its header alone is one that was right at some checkpoint. It may be
//! older than the lost page, so an entry of it counts only where nothing sound has its extent.

mod find;
mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use blockd_mapper::entry::Entry;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::{PoolId, VolumeName};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::{DeviceIndex, Epoch, Lsn, PageAddress, SlotIndex, VolumeId};

use super::check::{Progress, check, lost_labels};
use super::dump::Lost;
use super::owners::{Owner, Owners};
use super::rebuild::{MediaMut, leaf_pages};
use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{Entries, Fault, IDS_SKIPPED, Reader, State, VolumeView, reader};

use find::PagesOnly;

/// The options of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RepairOptions {
    /// Only report the planned changes.
    pub dry_run: bool,
    /// Look for nothing: data that is not proven to be the last state reads as zeroes.
    pub strict: bool,
    /// Take a device without a superblock for the one that is missing.
    pub force: bool,
    /// This boot of the host, where it has delta rings: that of a pool that was open in it may hold
    /// answered writes, and a repair drops it.
    pub boot_id: Option<[u8; 16]>,
    /// Repair such a pool, too.
    pub accept_loss: bool,
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
    /// The name of a device without a superblock, which is taken for the one that is missing.
    pub identified: Option<String>,
    /// Answered writes of this boot that were not flushed are lost, as the delta ring is not read.
    pub drops_ring: bool,
}

/// Repairs a pool. One that is sound is left alone.
pub fn repair(
    media: &mut dyn MediaMut,
    devices: &[PresentDevice],
    options: RepairOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<RepairReport, MapperError> {
    let Known { superblock, handles, guessed } = known(media, devices)?;
    if superblock.unknown_ro_compat() != 0 {
        return Err(MapperError::Unsupported { features: superblock.unknown_ro_compat() });
    }
    let name = |at: usize| devices.get(usize::from(handles[at])).map(|device| device.name.clone());
    let identified = guessed.and_then(name);
    if let Some(name) = identified.clone().filter(|_| !options.force && !options.dry_run) {
        let problem = "has no superblock: --force takes it for the pool's missing device, and \
                       writes to it";
        return Err(MapperError::Device { name, problem: problem.to_owned() });
    }
    let mut report = RepairReport { identified, ..RepairReport::default() };
    let plan = {
        let mut reader = Reader::with(media, superblock.clone(), handles.clone())?;
        let found = check(&mut reader, &mut |now| {
            progress(now);
            Ok(())
        })?;
        report.volumes = found.volumes + found.snapshots;
        report.damaged = found.damaged || guessed.is_some();
        match found.damaged {
            true => Some(Plan::made(&mut reader, options, progress)?),
            false => None,
        }
    };
    report.changed = report.damaged && !options.dry_run;
    report.drops_ring =
        plan.is_some() && !superblock.clean && options.boot_id == Some(superblock.boot_id);
    if report.drops_ring && report.changed && !options.accept_loss {
        let problem = "a repair drops the delta ring: start the daemon, or use `blockd journal \
                       replay`, if one of them can open the pool, else pass --accept-loss";
        return Err(MapperError::RingLost { problem: problem.to_owned() });
    }
    if let Some(mut plan) = plan {
        report.volumes = plan.state.volumes.len() as u64;
        report.lost = std::mem::take(&mut plan.lost);
        report.salvaged = std::mem::take(&mut plan.salvaged);
        if report.changed {
            plan.write(media, devices, &superblock, &handles, !report.lost.is_empty())?;
        }
    } else if let Some(at) = guessed.filter(|_| report.changed) {
        write::copies(media, &superblock, at, &handles)?;
    }
    Ok(report)
}

/// The superblock that counts, and the devices that it names.
struct Known {
    superblock: Superblock,
    /// The reader's number of each device of the table.
    handles: Vec<u8>,
    /// The place in the table of a device that has no superblock: by elimination.
    guessed: Option<usize>,
}

/// The superblock that counts. A device that has none any more is known where only one place of
/// the table is left for it.
fn known(media: &mut dyn MediaMut, devices: &[PresentDevice]) -> Result<Known, MapperError> {
    let refused = match Reader::open(media, devices) {
        Ok(reader) => {
            let count = reader.superblock().devices.as_slice().len();
            let handles = (0..count).map(|device| reader.handle(device).0).collect();
            let superblock = reader.superblock().clone();
            return Ok(Known { superblock, handles, guessed: None });
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
    let is_missing = |at: &usize| handles[*at].is_none() && table[*at].is_present();
    let missing: Vec<_> = (0..table.len()).filter(is_missing).collect();
    let size = devices.get(usize::from(*silent)).map_or(0, |device| device.size);
    let guessed = match missing.as_slice() {
        [at] if size >= table[*at].size => *at,
        _ => return Err(refused),
    };
    handles[guessed] = Some(*silent);
    let handles = handles.into_iter().map(|handle| handle.unwrap_or(u8::MAX)).collect();
    Ok(Known { superblock: newest, handles, guessed: Some(guessed) })
}

/// A page found by its header.
#[derive(Debug, Clone, Copy)]
struct Orphan {
    address: PageAddress,
    tree: u32,
    lsn: Lsn,
    epoch: Epoch,
}

impl Orphan {
    /// Orders pages by when they were written. After power loss LSNs are used again: the page of a
    /// checkpoint that did not end may have a higher one than a page of a later open.
    const fn age(&self) -> (Epoch, Lsn) {
        (self.epoch, self.lsn)
    }
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
    /// Pages of leaves.
    pages: u64,
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
            pages: 0,
            lost: Vec::new(),
            salvaged: Vec::new(),
            next_sequence: 0,
            span: geometry.leaf_span(),
            geometry,
        }
    }

    /// The plan for what a pool has.
    fn made(
        reader: &mut Reader<'_>,
        options: RepairOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, MapperError> {
        let stopped = |_| MapperError::Internal("the repair was stopped");
        let mut plan = Self::new(reader, options);
        plan.collect(reader, progress).map_err(stopped)?;
        Ok(plan)
    }

    /// Everything that is sound, then the parts of the rest that can be found.
    fn collect(
        &mut self,
        reader: &mut Reader<'_>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Stopped> {
        let mut state = State::of_checkpoint(reader, self)?;
        let records = self.find_volumes(reader, &mut state, progress)?;
        // The trees of volumes that the log deletes are in use until the new superblock counts.
        walk::volumes(reader, &state, &mut PagesOnly(&mut self.avoid))?;
        let log = state.replay(reader, self)?;
        self.next_sequence = log.next_sequence;
        if let Some(fault) = log.broken {
            self.lose(VolumeId(0), String::new(), 0..0, format!("{fault}; changes behind it"));
        }
        self.name_found(&mut state, &records);
        // A tree that an old record names gets no extent that is of a sound one.
        let mut old = state.clone();
        old.volumes.retain(|_, view| records.contains(&view.tree));
        state.volumes.retain(|_, view| !records.contains(&view.tree));
        walk::volumes(reader, &state, self)?;
        walk::volumes(reader, &old, self)?;
        state.volumes.append(&mut old.volumes);
        self.state = state;
        if !self.options.strict && !self.missing.is_empty() {
            self.find_leaves(reader, progress);
        }
        self.report_missing();
        Ok(())
    }

    /// Puts the volumes of lost catalogue pages, as far as their records are found, into the state
    /// of the checkpoint. Returns their ids.
    fn find_volumes(
        &mut self,
        reader: &mut Reader<'_>,
        state: &mut State,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<HashSet<VolumeId>, Stopped> {
        if self.catalogue_missing.is_empty() || self.options.strict {
            return Ok(HashSet::new());
        }
        // The search leaves out the data of the volumes that are there.
        let mut sound = Self::new(reader, self.options);
        let mut end = state.clone();
        end.replay(reader, &mut sound)?;
        walk::volumes(reader, &end, &mut sound)?;
        let (avoid, records) = sound.find_records(reader, &self.catalogue_missing, state, progress);
        self.avoid.extend(avoid);
        let found = records.iter().map(|record| record.id).collect();
        let views = records.into_iter().map(|one| (one.id, VolumeView::new(self.geometry, one)));
        state.volumes.extend(views);
        Ok(found)
    }

    /// Reports the volumes whose records were found, and gives those a new name whose old one
    /// another volume has by now.
    fn name_found(&mut self, state: &mut State, found: &HashSet<VolumeId>) {
        let others = state.volumes.iter().filter(|(id, _)| !found.contains(*id));
        let mut names: HashSet<_> = others.map(|(_, view)| view.record.name).collect();
        let found = state.volumes.iter_mut().filter(|(id, _)| found.contains(*id));
        for (id, view) in found {
            let record = &mut view.record;
            if !names.insert(record.name)
                && let Ok(name) = VolumeName::new(&format!("salvaged-{id}"))
            {
                record.name = name;
            }
            let text = "its record is of an older checkpoint".to_owned();
            let name = record.name.as_str().to_owned();
            self.salvaged.push(Lost { volume: *id, name, range: 0..record.size, text });
        }
    }

    fn lose(&mut self, volume: VolumeId, name: String, range: Range<u64>, text: String) {
        self.lost.push(Lost { volume, name, range, text });
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
            if !entry.is_mapped() {
                continue;
            }
            let cut = match old {
                true => super::state::cut_entry(self.geometry, *entry, extent, size),
                false => *entry,
            };
            let owner = Owner::Lineage(lineage, extent);
            let mut claim = |physical| {
                self.owners.claim(physical, owner).map_or_else(|o| o == owner, |()| true)
            };
            let mine = cut.is_mapped() && cut.extents().all(&mut claim);
            dropped += u64::from(!mine);
            *entry = if mine { cut } else { Entry::Unmapped };
        }
        dropped
    }

    /// Returns the next volume id. Lost parts of the log may have made volumes, whose ids backups
    /// know.
    const fn next_volume_id(&self, lost: bool) -> u32 {
        let skipped = if lost { IDS_SKIPPED } else { 0 };
        self.state.next_volume_id.saturating_add(skipped)
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

    fn labels_lost(
        &mut self,
        volume: Option<&VolumeView>,
        places: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let text = lost_labels(volume, &places, fault);
        let (id, name) = volume.map_or_else(Default::default, |view| {
            (view.record.id, view.record.name.as_str().to_owned())
        });
        self.lose(id, name, 0..0, text);
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
        self.pages += leaf_pages(fresh);
        let mut entries = *fresh;
        self.claim(leaf.volume, leaf.slot, &mut entries, false);
        for (extent, (was, is)) in
            (leaf.slot.first_extent().0..).zip(fresh.iter().zip(entries.iter()))
        {
            let owner = Some(Owner::Lineage(leaf.volume.record.lineage.0, extent));
            let lost = was.extents().find(|physical| self.owners.get(*physical) != owner);
            if let Some(physical) = lost.filter(|_| !is.is_mapped()) {
                let size = self.geometry.extent_size();
                let name = leaf.volume.record.name.as_str().to_owned();
                let text = format!("extent {physical} belongs to something else");
                self.lose(leaf.volume.record.id, name, extent * size..(extent + 1) * size, text);
            }
        }
        Ok(())
    }
}
