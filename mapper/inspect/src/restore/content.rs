//! The lines of a dump, checked in their order.

use std::collections::{HashMap, HashSet};

use blockd_mapper::entry::Composite;
use blockd_mapper::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord};
use blockd_mapper::format::settings::VolumeSettings;
use blockd_mapper::format::superblock::{COMPOSITE, DeviceRecord, DeviceTable, LABELS, Superblock};
use blockd_mapper::format::{
    FORMAT_MAJOR, FORMAT_MINOR, INDEX_FANOUT, Labels, Limits, PageRef, VolumeName, levels_for,
};
use blockd_mapper::geometry::{Geometry, LEAF_ENTRIES, MAX_PHYSICAL_EXTENTS};
use blockd_mapper::units::{DeviceIndex, PhysicalExtent};

use super::super::dump_line::{Line, PoolLine};
use super::super::owners::{Owner, Owners};
use super::super::rebuild::label_pages;

/// The state of the lines so far, as far as it is needed to check the following ones.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) pool: Option<PoolLine>,
    features: (u64, u64, u64),
    log: Option<(u64, u32, u64)>,
    reserve: (u64, u32),
    pub(super) devices: Vec<DeviceRecord>,
    pub(super) known: Option<Known>,
    names: HashSet<VolumeName>,
    ids: HashSet<u32>,
    volume: Option<VolumeRecord>,
    /// Its labels.
    labels: Vec<(String, String)>,
    /// Places of volumes with labels.
    labelled: Vec<u64>,
    /// Slots of the volume are used up to here.
    slots: u64,
    /// Leaves by number: slot, lineage, end in bytes.
    leaves: HashMap<u64, (u32, u32, u64)>,
    leaf: Option<(u64, usize)>,
    /// The leaf has composite entries.
    composite: bool,
    counter: [Option<u64>; 4],
    pub(super) pages: u64,
    pub(super) volumes: u64,
    pub(super) lost_slots: u64,
}

/// The properties that follow from the lines before the first volume.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) superblock: Superblock,
    geometry: Geometry,
    limits: Limits,
    pub(super) owners: Owners,
}

impl Content {
    pub(super) fn take(&mut self, line: Line) -> Result<(), String> {
        let head = matches!(
            line,
            Line::Pool(_)
                | Line::Features { .. }
                | Line::Log { .. }
                | Line::Reserve { .. }
                | Line::Device(_)
        );
        if head && self.known.is_some() {
            return Err("it stands behind a volume".to_owned());
        }
        if !head && self.known.is_none() {
            self.known = Some(self.settle()?);
        }
        match line {
            Line::Pool(pool) => self.pool = Some(pool),
            Line::Features { compat, ro_compat, incompat } => {
                self.features = (compat, ro_compat, incompat);
            }
            Line::Log { start, extents, sequence } => self.log = Some((start, extents, sequence)),
            Line::Reserve { start, extents } => self.reserve = (start, extents),
            Line::Device(device) => self.devices.push(device),
            Line::Volume(record) => self.volume(&record)?,
            Line::Settings(settings) => self.settings(settings)?,
            Line::Label { key, value } => self.label(key, value)?,
            Line::Leaf { slot, number } => self.leaf(slot, number)?,
            Line::Share { slot, number } => self.share(slot, number)?,
            Line::Map { at, count, first, valid } => self.map(at, count, first, valid)?,
            Line::Over { at, composite } => self.over(at, composite)?,
            Line::Lost { slot, count } => {
                self.next_slot(slot, count)?;
                self.lost_slots += count;
            }
        }
        Ok(())
    }

    pub(super) fn end(&mut self) -> Result<(), String> {
        if self.known.is_none() {
            self.known = Some(self.settle()?);
        }
        let pages = self.volumes.div_ceil(RECORDS_PER_PAGE);
        let levels = if pages == 0 { 0 } else { levels_for(pages) };
        let mut above = pages;
        self.pages += pages + label_pages(&self.labelled, self.volumes);
        for _ in 0..levels {
            above = above.div_ceil(INDEX_FANOUT);
            self.pages += above;
        }
        Ok(())
    }

    /// All of the head was read.
    fn settle(&self) -> Result<Known, String> {
        let pool = self.pool.ok_or("the pool's line is missing")?;
        let (wal_start, wal_extents, sequence) = self.log.ok_or("the log's line is missing")?;
        let devices = DeviceTable::new(&self.devices).ok_or("there must be 1 to 16 devices")?;
        let (compat, ro_compat, incompat) = self.features;
        let unknown = incompat & !blockd_mapper::format::superblock::KNOWN_INCOMPAT
            | ro_compat & !blockd_mapper::format::superblock::KNOWN_RO_COMPAT;
        if unknown != 0 {
            return Err(format!("features {unknown:x} are unknown to this build"));
        }
        let superblock = Superblock {
            pool_id: pool.pool_id,
            generation: pool.generation,
            previous_sum: 0,
            major: FORMAT_MAJOR,
            minor: FORMAT_MINOR,
            // The bit of labels comes with their root.
            compat: compat & !LABELS,
            ro_compat,
            incompat,
            extent_size: pool.extent_size,
            node: pool.node,
            epoch: pool.epoch,
            clean: true,
            // No delta ring is of this open.
            open_id: 0,
            boot_id: [0; 16],
            devices,
            this_device: DeviceIndex(0),
            wal_start: PhysicalExtent(wal_start),
            wal_extents,
            wal_tail_sequence: sequence,
            wal_tail_hash: 0,
            checkpoint_lsn: pool.lsn,
            catalogue_root: PageRef::NONE,
            catalogue_levels: 0,
            labels_root: PageRef::NONE,
            catalogue_records: 0,
            next_volume_id: pool.next_volume_id,
            reserve_start: PhysicalExtent(self.reserve.0),
            reserve_extents: self.reserve.1,
        };
        superblock.validate().map_err(|problem| problem.to_string())?;
        let geometry = Geometry::new(pool.extent_size).map_err(|error| error.to_string())?;
        let limits = superblock.limits().map_err(|error| error.to_string())?;
        let owners = Owners::new(&superblock);
        Ok(Known { superblock, geometry, limits, owners })
    }

    fn volume(&mut self, record: &VolumeRecord) -> Result<(), String> {
        let next = self.pool.unwrap_or_default().next_volume_id;
        if record.id.0 >= next {
            return Err(format!("volume {} is not below the next id, {next}", record.id));
        }
        if !self.ids.insert(record.id.0) || !self.names.insert(record.name) {
            return Err(format!("id {} or name {} is used twice", record.id, record.name.as_str()));
        }
        self.volume = Some(*record);
        self.labels.clear();
        (self.slots, self.leaf, self.counter) = (0, None, [None; 4]);
        self.volumes += 1;
        Ok(())
    }

    /// Applies settings, which follow the line of their volume.
    fn settings(&mut self, settings: VolumeSettings) -> Result<(), String> {
        let is_behind_volume = self.slots == 0 && self.leaf.is_none();
        let record = self.volume.as_mut().filter(|_| is_behind_volume);
        record.ok_or("settings stand without a volume before them")?.settings = settings;
        Ok(())
    }

    /// A label, which follows the line of its volume.
    fn label(&mut self, key: String, value: String) -> Result<(), String> {
        if self.volume.is_none() || self.slots > 0 || self.leaf.is_some() {
            return Err("a label stands without a volume before it".to_owned());
        }
        self.labels.push((key, value));
        let labels = self.labels.iter().map(|(key, value)| (key, value));
        Labels::new(labels).map_err(|error| error.to_string())?;
        if self.labels.len() == 1 {
            self.labelled.push(self.volumes - 1);
        }
        Ok(())
    }

    /// Slots stand in their order, within the volume.
    fn next_slot(&mut self, slot: u64, count: u64) -> Result<VolumeRecord, String> {
        let (Some(record), Some(known)) = (self.volume, &self.known) else {
            return Err("there is no volume before it".to_owned());
        };
        let slots = u64::from(known.geometry.slots_for(record.size));
        // A leaf that is lost may have changes of the log behind the line that says so.
        let again = slot.checked_add(1) == Some(self.slots);
        if (slot < self.slots && !again) || slot.saturating_add(count) > slots {
            return Err(format!("slot {slot} is out of order or beyond the volume's {slots}"));
        }
        self.slots = slot + count;
        self.leaf = None;
        Ok(record)
    }

    /// Counts the index pages above a leaf.
    fn count(&mut self, slot: u32, record: &VolumeRecord) {
        let slots = self.known.as_ref().map_or(0, |known| known.geometry.slots_for(record.size));
        let levels = levels_for(u64::from(slots)).max(1);
        let mut index = u64::from(slot);
        for last in self.counter.iter_mut().take(levels.into()) {
            index /= INDEX_FANOUT;
            self.pages += u64::from(last.replace(index) != Some(index));
        }
    }

    fn leaf(&mut self, slot: u32, number: u64) -> Result<(), String> {
        let record = self.next_slot(slot.into(), 1)?;
        self.count(slot, &record);
        self.pages += 1;
        if self.leaves.insert(number, (slot, record.lineage.0, 0)).is_some() {
            return Err(format!("leaf {number} stands there twice"));
        }
        (self.leaf, self.composite) = (Some((number, 0)), false);
        Ok(())
    }

    fn share(&mut self, slot: u32, number: u64) -> Result<(), String> {
        let record = self.next_slot(slot.into(), 1)?;
        self.count(slot, &record);
        match self.leaves.get(&number) {
            Some(&(at, lineage, end))
                if at == slot && lineage == record.lineage.0 && self.fits(end, &record) =>
            {
                Ok(())
            }
            Some(_) => Err(format!("leaf {number} is of another slot, lineage or size")),
            None => Err(format!("leaf {number} does not stand before it")),
        }
    }

    fn fits(&self, end: u64, record: &VolumeRecord) -> bool {
        let sub = self.known.as_ref().map_or(1, |known| known.geometry.sub_block_size());
        end <= record.size.next_multiple_of(sub)
    }

    fn map(&mut self, at: usize, count: usize, first: u64, valid: u64) -> Result<(), String> {
        let end = at.checked_add(count).filter(|_| count > 0).unwrap_or(usize::MAX);
        let number = self.entry(at, end, valid)?;
        for (index, physical) in (at as u64..end as u64).zip(first..) {
            self.claim(number, index, physical)?;
        }
        Ok(())
    }

    /// A composite entry.
    fn over(&mut self, at: usize, entry: Composite) -> Result<(), String> {
        let Composite { overlay, top, base, under } = entry;
        if self.features.2 & COMPOSITE == 0 {
            return Err("composite entries need the feature of that name".to_owned());
        }
        if overlay == base {
            return Err(format!("extent {base} is overlay and base at once"));
        }
        let number = self.entry(at, at.saturating_add(1), top | under)?;
        for physical in [overlay, base] {
            self.claim(number, at as u64, physical.0)?;
        }
        if !std::mem::replace(&mut self.composite, true) {
            self.pages += 1;
        }
        Ok(())
    }

    /// Checks entries of the present leaf that have these bits, and notes where they end. Returns
    /// the leaf's number.
    fn entry(&mut self, at: usize, end: usize, valid: u64) -> Result<u64, String> {
        let (Some((number, next)), Some(record)) = (self.leaf, self.volume) else {
            return Err("there is no leaf before it".to_owned());
        };
        if at < next || end > blockd_mapper::leaf::LEAF_ENTRIES {
            return Err("its entries are out of order or beyond the leaf".to_owned());
        }
        let Some(known) = &self.known else { return Err("nothing is known".to_owned()) };
        if !known.limits.allows_bits(valid) {
            return Err(format!("bitmap {valid:x} has bits that no sub-block has"));
        }
        let (slot, ..) = self.leaves.get(&number).copied().unwrap_or_default();
        let last = u64::from(slot) * LEAF_ENTRIES + end as u64 - 1;
        let bits = 64 - u64::from(valid.leading_zeros());
        let bytes =
            last * known.geometry.extent_size() + (bits * known.geometry.sub_block_size()).max(1);
        if !self.fits(bytes, &record) {
            return Err("it maps something beyond the volume's end".to_owned());
        }
        self.leaf = Some((number, end));
        if let Some(leaf) = self.leaves.get_mut(&number) {
            leaf.2 = leaf.2.max(bytes);
        }
        Ok(number)
    }

    /// Takes an extent for an entry of a leaf.
    fn claim(&mut self, number: u64, index: u64, physical: u64) -> Result<(), String> {
        if physical >= MAX_PHYSICAL_EXTENTS {
            return Err(format!("extent {physical} is beyond any device"));
        }
        let Some(known) = &mut self.known else { return Err("nothing is known".to_owned()) };
        let (slot, lineage, _) = self.leaves.get(&number).copied().unwrap_or_default();
        let owner = Owner::Lineage(lineage, u64::from(slot) * LEAF_ENTRIES + index);
        match known.owners.claim(PhysicalExtent(physical), owner) {
            Ok(()) => Ok(()),
            Err(other) if other == owner => Ok(()),
            Err(_) => Err(format!("extent {physical} belongs to something else")),
        }
    }
}
