//! Writing what a repair has found.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::VolumeRecord;
use blockd_mapper::format::superblock::{Superblock, copy_offsets};
use blockd_mapper::format::{Labels, PageRef, Place, Structure};
use blockd_mapper::geometry::Geometry;
use blockd_mapper::io::{IoError, Page};
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::{DeviceIndex, SlotIndex, VolumeId};

use super::super::rebuild::{Builder, MediaMut, PageSource};
use super::super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::super::{Entries, Fault, Media, Reader, VolumeView};
use super::Plan;
use super::find::{OrphanLeaf, orphan_leaf};

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
    devices: &'p [PresentDevice],
    current: Option<(VolumeRecord, Labels)>,
    /// Leaves of the volume that are written.
    slots: BTreeMap<u32, PageRef>,
    /// Leaves of the volume that were found, with the changes of the log.
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

    /// Ends the repair at a page on which the plan relies: without it data would be lost that the
    /// report doesn't name.
    fn unsteady(&mut self, structure: Structure, place: Place) -> Stopped {
        let problem = format!(
            "{structure}{place} was readable before, and is not any more: the pool is left as it \
             was; repeat the repair"
        );
        let device = match place {
            Place::Page(page) => self.orphans.place(self.plan.geometry.page_place(page).0),
            _ => None,
        };
        let device = device.and_then(|(handle, _)| self.devices.get(usize::from(handle.0)));
        let name = device.map_or_else(String::new, |device| device.name.clone());
        self.failure.get_or_insert(MapperError::Device { name, problem });
        Stopped
    }

    fn end_volume(&mut self) -> Result<(), Stopped> {
        let Some((record, labels)) = self.current.take() else { return Ok(()) };
        for (slot, entries) in std::mem::take(&mut self.salvaged) {
            let written = self.builder.write_leaf(record.id.0, slot, &entries);
            let reference = self.kept(written)?;
            self.slots.insert(slot, reference);
        }
        let begun = self.builder.volume(record);
        self.kept(begun)?;
        self.builder.labels(labels);
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
        self.current = Some((volume.record, volume.labels.clone()));
        Ok(())
    }

    fn lost(
        &mut self,
        volume: &VolumeView,
        slots: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let id = volume.record.id;
        let [from, to] = [slots.start, slots.end].map(|s| u32::try_from(s).unwrap_or(u32::MAX));
        let missing = self.plan.missing.range((id, from)..(id, to));
        let mut slot = from;
        let mut found = Vec::new();
        for (&(_, missing), at) in missing {
            if missing != slot {
                break;
            }
            slot += 1;
            found.extend(at.map(|at| (missing, at)));
        }
        if slot < to {
            return Err(self.unsteady(fault.structure(), fault.place()));
        }
        for (slot, address) in found {
            let pool_id = self.plan.pool_id;
            let found = orphan_leaf(&mut self.orphans, pool_id, address, slot);
            let Some(OrphanLeaf { mut entries, .. }) = found else {
                return Err(self.unsteady(Structure::LeafPage, Place::Page(address)));
            };
            volume.apply(self.plan.geometry, SlotIndex(slot), &mut entries);
            self.plan.claim(volume, SlotIndex(slot), &mut entries, true);
            self.salvaged.insert(slot, entries);
        }
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        let (slot, lineage) = (leaf.slot.0, leaf.volume.record.lineage);
        if self.salvaged.contains_key(&slot) {
            return Ok(());
        }
        if let Some(fresh) = leaf.fresh {
            let mut entries = Box::new(*fresh);
            self.plan.claim(leaf.volume, leaf.slot, &mut entries, false);
            let written = self.builder.write_leaf(leaf.volume.record.id.0, slot, &entries);
            let reference = self.kept(written)?;
            self.leaves.insert(leaf.number, (lineage, reference));
        }
        if let Some(&(of, reference)) = self.leaves.get(&leaf.number)
            && of == lineage
        {
            self.slots.insert(slot, reference);
        }
        Ok(())
    }
}

/// Writes the superblock, as it is, to a device that has none.
pub(super) fn copies(
    media: &mut dyn MediaMut,
    superblock: &Superblock,
    at: usize,
    handles: &[u8],
) -> Result<(), MapperError> {
    let this_device = DeviceIndex(u8::try_from(at).unwrap_or(u8::MAX));
    let mut page = Page::zeroed();
    Superblock { this_device, ..superblock.clone() }.encode(&mut page);
    let geometry = Geometry::new(superblock.extent_size)?;
    let offsets = copy_offsets(geometry, superblock.devices.as_slice()[at].extents);
    let device = handles[at];
    let failed = |operation| move |error| MapperError::Io { operation, device, error };
    for offset in offsets.first_pair.into_iter().chain(offsets.second_pair) {
        media.write(DeviceIndex(device), offset, &page.0).map_err(failed("write"))?;
    }
    media.flush(DeviceIndex(device)).map_err(failed("flush"))
}

impl Plan {
    /// Writes the new trees, and makes them valid.
    pub(super) fn write(
        &mut self,
        media: &mut dyn MediaMut,
        devices: &[PresentDevice],
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
        let source =
            PageSource::reserve_first(&superblock, &self.owners, &self.avoid, self.pages())?;
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
            devices,
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
