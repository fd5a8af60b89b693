//! From the text of a dump back to metadata, in two passes: the first judges all of it before
//! anything is written, the second writes.

use std::collections::{HashMap, HashSet};

use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord};
use blockd_mapper::format::settings::VolumeSettings;
use blockd_mapper::format::superblock::{DeviceRecord, DeviceTable, Superblock};
use blockd_mapper::format::{
    FORMAT_MAJOR, FORMAT_MINOR, INDEX_FANOUT, Limits, PageRef, VolumeName, levels_for,
};
use blockd_mapper::geometry::{Geometry, LEAF_ENTRIES, MAX_PHYSICAL_EXTENTS};
use blockd_mapper::mapping::Mapping;
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::{DeviceIndex, PhysicalExtent};

use super::dump_line::{Line, PoolLine, first_line, last_line, parse};
use super::owners::{Owner, Owners};
use super::rebuild::{Builder, MediaMut, PageSource};
use super::{Entries, IDS_SKIPPED, reader};

/// Why a dump can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// The file is not a dump.
    #[error("it is no dump of a pool: the first line must be \"blockd dump\" and a version")]
    NoDump,
    /// Another version wrote it.
    #[error("it is of version {found}: this build reads version {}", super::dump::DUMP_VERSION)]
    Version {
        /// The version found.
        found: String,
    },
    /// The end is missing.
    #[error("it was cut short: the last line, with the sum, is missing after line {lines}")]
    Cut {
        /// Lines there are.
        lines: u64,
    },
    /// The dump was changed.
    #[error(
        "it was changed: its {lines} lines have sum {computed:016x}, the last line says {recorded}"
    )]
    Edited {
        /// Lines there are.
        lines: u64,
        /// Their sum.
        computed: u64,
        /// The sum in the last line.
        recorded: String,
    },
    /// A line makes no sense.
    #[error("line {line}: {problem}")]
    Line {
        /// Which, from 1.
        line: u64,
        /// The problem.
        problem: String,
    },
}

/// The first pass.
pub struct Scan {
    lines: u64,
    sum: xxhash_rust::xxh3::Xxh3,
    end: Option<(u64, u64)>,
    /// The first thing that is wrong; whether it was edited is known at the end only.
    problem: Option<DumpError>,
    content: Content,
}

impl std::fmt::Debug for Scan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scan").field("lines", &self.lines).finish_non_exhaustive()
    }
}

impl Default for Scan {
    fn default() -> Self {
        Self::new()
    }
}

impl Scan {
    /// Creates the state before the first line.
    #[must_use]
    pub fn new() -> Self {
        let sum = xxhash_rust::xxh3::Xxh3::new();
        Self { lines: 0, sum, end: None, problem: None, content: Content::default() }
    }

    /// The next line, without its line feed. `false`: later lines do not change the verdict.
    pub fn line(&mut self, line: &str) -> bool {
        if self.lines == 0
            && let Err(error) = first_line(line)
        {
            self.problem = Some(error);
            return false;
        }
        if let Some(end) = last_line(line) {
            self.end = Some(end);
            return false;
        }
        self.sum.update(line.as_bytes());
        self.sum.update(b"\n");
        self.lines += 1;
        if self.lines > 1 && self.problem.is_none() {
            let taken = parse(line).and_then(|line| self.content.take(line));
            let line = self.lines;
            self.problem = taken.err().map(|problem| DumpError::Line { line, problem });
        }
        true
    }

    /// The judgement.
    pub fn finish(mut self) -> Result<Plan, DumpError> {
        let lines = self.lines;
        if let Some(error @ (DumpError::NoDump | DumpError::Version { .. })) = self.problem {
            return Err(error);
        }
        if lines == 0 {
            return Err(DumpError::NoDump);
        }
        let Some((recorded_lines, sum)) = self.end else { return Err(DumpError::Cut { lines }) };
        let computed = self.sum.digest();
        if recorded_lines != lines || sum != computed {
            let recorded = format!("{recorded_lines} lines, {sum:016x}");
            return Err(DumpError::Edited { lines, computed, recorded });
        }
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        let ended = self.content.end();
        ended.map_err(|problem| DumpError::Line { line: lines, problem })?;
        Ok(Plan { content: self.content })
    }
}

/// The state of the lines so far, as far as it is needed to check the following ones.
#[derive(Debug, Default)]
struct Content {
    pool: Option<PoolLine>,
    features: (u64, u64, u64),
    log: Option<(u64, u32, u64)>,
    reserve: (u64, u32),
    devices: Vec<DeviceRecord>,
    known: Option<Known>,
    names: HashSet<VolumeName>,
    ids: HashSet<u32>,
    volume: Option<VolumeRecord>,
    /// Slots of the volume are used up to here.
    slots: u64,
    /// Leaves by number: slot, lineage, end in bytes.
    leaves: HashMap<u64, (u32, u32, u64)>,
    leaf: Option<(u64, usize)>,
    counter: [Option<u64>; 4],
    pages: u64,
    volumes: u64,
    lost_slots: u64,
}

/// The properties that follow from the lines before the first volume.
#[derive(Debug)]
struct Known {
    superblock: Superblock,
    geometry: Geometry,
    limits: Limits,
    owners: Owners,
}

impl Content {
    fn take(&mut self, line: Line) -> Result<(), String> {
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
            Line::Leaf { slot, number } => self.leaf(slot, number)?,
            Line::Share { slot, number } => self.share(slot, number)?,
            Line::Map { at, count, first, valid } => self.map(at, count, first, valid)?,
            Line::Lost { slot, count } => {
                self.next_slot(slot, count)?;
                self.lost_slots += count;
            }
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        if self.known.is_none() {
            self.known = Some(self.settle()?);
        }
        let pages = self.volumes.div_ceil(RECORDS_PER_PAGE);
        let levels = if pages == 0 { 0 } else { levels_for(pages) };
        let mut above = pages;
        self.pages += pages;
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
            compat,
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
        self.leaf = Some((number, 0));
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
        let (Some((number, next)), Some(record)) = (self.leaf, self.volume) else {
            return Err("there is no leaf before it".to_owned());
        };
        let end = at
            .checked_add(count)
            .filter(|&end| count > 0 && end <= blockd_mapper::leaf::LEAF_ENTRIES);
        let Some(end) = end.filter(|_| at >= next) else {
            return Err("its entries are out of order or beyond the leaf".to_owned());
        };
        let Some(known) = &mut self.known else { return Err("nothing is known".to_owned()) };
        if !known.limits.allows_bits(valid) {
            return Err(format!("bitmap {valid:x} has bits that no sub-block has"));
        }
        let (slot, lineage, _) = self.leaves.get(&number).copied().unwrap_or_default();
        if first >= MAX_PHYSICAL_EXTENTS {
            return Err(format!("extent {first} is beyond any device"));
        }
        for (index, physical) in (at as u64..end as u64).zip(first..) {
            let logical = u64::from(slot) * LEAF_ENTRIES + index;
            let owner = Owner::Lineage(lineage, logical);
            match known.owners.claim(PhysicalExtent(physical), owner) {
                Ok(()) => {}
                Err(other) if other == owner => {}
                Err(_) => return Err(format!("extent {physical} belongs to something else")),
            }
        }
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
        Ok(())
    }
}

/// A dump that makes sense.
#[derive(Debug)]
pub struct Plan {
    content: Content,
}

/// The content of the devices that a dump is to be restored to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    handles: Vec<u8>,
    generation: u64,
    epoch: u64,
    next_volume_id: u32,
    /// Every device says by a superblock of its own that it is the one of the dump.
    pub known: bool,
    /// The error of structures of a later release on the devices, which this one does not know.
    pub later: Option<MapperError>,
}

impl Plan {
    /// Volumes and snapshots in it.
    #[must_use]
    pub const fn volumes(&self) -> u64 {
        self.content.volumes
    }

    /// Slots of volumes that were lost already when it was written.
    #[must_use]
    pub const fn lost_slots(&self) -> u64 {
        self.content.lost_slots
    }

    /// The pool that it is of.
    #[must_use]
    pub fn pool_id(&self) -> [u8; 16] {
        self.content.pool.unwrap_or_default().pool_id
    }

    /// Finds out which device is which. One that says nothing is taken for one that is left over,
    /// in the order given.
    pub fn target(
        &self,
        media: &mut dyn MediaMut,
        present: &[PresentDevice],
    ) -> Result<Target, MapperError> {
        let refuse = |device: &PresentDevice, problem: String| {
            Err(MapperError::Device { name: device.name.clone(), problem })
        };
        let table = &self.content.devices;
        if present.len() != table.len() {
            let (value, allowed) = (present.len() as u64, "as many as the dump has");
            return Err(MapperError::Invalid { field: "devices", value, allowed });
        }
        let pool = self.content.pool.unwrap_or_default();
        let mut target = Target {
            handles: vec![u8::MAX; table.len()],
            generation: pool.generation,
            epoch: pool.epoch.0,
            next_volume_id: pool.next_volume_id,
            known: true,
            later: None,
        };
        let mut unknown = Vec::new();
        for (handle, device) in (0..).zip(present) {
            if let Some(error) = reader::too_new(media, DeviceIndex(handle), device) {
                target.later.get_or_insert_with(|| error.into());
            }
            let Some(own) = reader::newest_copy(media, DeviceIndex(handle), device) else {
                unknown.push(handle);
                continue;
            };
            if own.pool_id != pool.pool_id {
                let found = blockd_mapper::open::find::hex(&own.pool_id);
                return refuse(device, format!("belongs to pool {found}"));
            }
            let features = own.unknown_ro_compat();
            if features != 0 {
                target.later.get_or_insert(MapperError::Unsupported { features });
            }
            target.generation = target.generation.max(own.generation);
            target.epoch = target.epoch.max(own.epoch.0);
            // No id is used twice, since backups identify snapshots by them. Volumes in the log of
            // a pool in use are in no superblock yet.
            if !own.clean || own.next_volume_id > pool.next_volume_id {
                let next = own.next_volume_id.max(pool.next_volume_id);
                let next = next.saturating_add(IDS_SKIPPED);
                target.next_volume_id = target.next_volume_id.max(next);
            }
            let record = own.devices.as_slice().get(usize::from(own.this_device.0));
            let at = record.and_then(|own| table.iter().position(|d| d.uuid == own.uuid));
            match at {
                Some(at) if target.handles[at] == u8::MAX => target.handles[at] = handle,
                Some(_) => return refuse(device, "is the same device as another one".to_owned()),
                None => return refuse(device, "is not one of the dump's devices".to_owned()),
            }
        }
        target.known = unknown.is_empty();
        let free = target.handles.iter_mut().filter(|handle| **handle == u8::MAX);
        for (place, handle) in free.zip(unknown) {
            *place = handle;
        }
        for (record, handle) in table.iter().zip(&target.handles) {
            let Some(device) = present.get(usize::from(*handle)) else { continue };
            if device.size < record.size {
                let (size, needed) = (device.size, record.size);
                return refuse(device, format!("has {size} bytes, {needed} are needed"));
            }
        }
        Ok(target)
    }

    /// Begins the second pass. The old metadata is written over from here on.
    pub fn begin<'m>(
        self,
        media: &'m mut dyn MediaMut,
        target: Target,
    ) -> Result<Restoring<'m>, MapperError> {
        let known = self.content.known.ok_or(MapperError::Internal("the dump has no head"))?;
        let mut superblock = known.superblock;
        // A copy that is left from before must not be taken for a newer one, or for a twin.
        superblock.generation = target.generation.saturating_add(2);
        superblock.epoch.0 = target.epoch.saturating_add(1);
        superblock.next_volume_id = target.next_volume_id;
        let avoid = HashSet::new();
        let pages = PageSource::new(&superblock, &known.owners, &avoid, self.content.pages)?;
        let builder = Builder::new(media, superblock, target.handles, pages);
        Ok(Restoring { builder, leaf: None, lines: 0 })
    }
}

/// The second pass.
#[derive(Debug)]
pub struct Restoring<'m> {
    builder: Builder<'m>,
    leaf: Option<(u32, u64, Box<Entries>)>,
    lines: u64,
}

impl Restoring<'_> {
    /// The next line, as in the first pass.
    pub fn line(&mut self, line: &str) -> Result<(), MapperError> {
        self.lines += 1;
        if self.lines == 1 || last_line(line).is_some() {
            return Ok(());
        }
        let changed = |_| MapperError::Internal("the dump has changed between two readings");
        match parse(line).map_err(changed)? {
            Line::Volume(record) => {
                self.end_leaf()?;
                self.builder.volume(*record)
            }
            Line::Leaf { slot, number } => {
                self.end_leaf()?;
                let entries = Box::new([Mapping::UNMAPPED; blockd_mapper::leaf::LEAF_ENTRIES]);
                self.leaf = Some((slot, number, entries));
                Ok(())
            }
            Line::Share { slot, number } => {
                self.end_leaf()?;
                self.builder.share(number, slot)
            }
            Line::Map { at, count, first, valid } => {
                if let Some((_, _, entries)) = &mut self.leaf {
                    for (entry, physical) in entries.iter_mut().skip(at).take(count).zip(first..) {
                        let physical = Some(PhysicalExtent(physical));
                        *entry = Mapping { physical, valid };
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn end_leaf(&mut self) -> Result<(), MapperError> {
        match self.leaf.take() {
            Some((slot, number, entries)) => self.builder.leaf(number, slot, &entries),
            None => Ok(()),
        }
    }

    /// Writes the rest, and makes it valid. Returns the pages written.
    pub fn finish(mut self) -> Result<u64, MapperError> {
        self.end_leaf()?;
        let pages = self.builder.pages_written;
        self.builder.finish()?;
        Ok(pages)
    }
}
