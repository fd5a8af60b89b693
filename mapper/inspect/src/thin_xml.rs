//! A pool's metadata as the XML that `thin_restore` makes dm-thin metadata from.
//!
//! dm-thin knows no bitmaps: a mapped block shows the media's content. So sub-blocks that were
//! never written have to be zero on the media before, which is what [`Gaps`] are for.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use blockd_mapper::entry::Entry;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::DeviceTable;
use blockd_mapper::units::{DeviceIndex, PhysicalExtent, VolumeId};

use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{Entries, Fault, Reader, State, VolumeView};

/// Device ids of dm-thin have 24 bits.
const MAX_DEVICE_ID: u32 = (1 << 24) - 1;
/// Text is given away in pieces of about this many bytes.
const PIECE: usize = 64 << 10;

/// Bytes of a device that no volume has data in, in extents that are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// The reader's number of the device.
    pub device: DeviceIndex,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The ranges that must be zero on the media before dm-thin shows the same as blockd.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gaps {
    /// Ranges to be zeroed. Doing so changes nothing that blockd shows.
    pub gaps: Vec<Gap>,
    /// Extents that can't be said in XML: one volume has discarded a part of an extent that a
    /// relative has.
    pub torn: u64,
}

/// Writes a pool as it is at the end of its log. Refused where anything can't be read.
pub fn thin_xml(
    reader: &mut Reader<'_>,
    out: &mut dyn FnMut(&str) -> Result<(), Stopped>,
) -> Result<Gaps, MapperError> {
    let stopped = |Stopped| MapperError::Internal("the dump was stopped");
    let mut counter = Counter::default();
    let mut state = State::of_checkpoint(reader, &mut counter).map_err(stopped)?;
    let log = state.replay(reader, &mut counter).map_err(stopped)?;
    walk::volumes(reader, &state, &mut counter).map_err(stopped)?;
    if counter.lost || log.broken.is_some() {
        return Err(MapperError::Internal("the pool is damaged: repair it first"));
    }
    if let Some(id) = state.volumes.keys().find(|id| id.0 > MAX_DEVICE_ID) {
        let (value, allowed) = (u64::from(id.0), "below 2^24 for dm-thin");
        return Err(MapperError::Invalid { field: "volume id", value, allowed });
    }
    if counter.composite > 0 {
        let (value, allowed) = (counter.composite, "0 for dm-thin");
        return Err(MapperError::Invalid { field: "composite entries", value, allowed });
    }
    let superblock = reader.superblock().clone();
    let table = superblock.devices;
    let mut families: HashMap<VolumeId, u32> = HashMap::new();
    for view in state.volumes.values() {
        *families.entry(view.record.lineage).or_default() += 1;
    }
    let uuid = u128::from_be_bytes(superblock.pool_id);
    let sectors = superblock.extent_size / 512;
    let blocks: u64 = table.as_slice().iter().map(|device| device.extents).sum();
    let text = format!(
        "<superblock uuid=\"{uuid:032x}\" time=\"1\" transaction=\"0\" version=\"2\" \
         data_block_size=\"{sectors}\" nr_data_blocks=\"{blocks}\">\n"
    );
    let mapped = counter.mapped;
    let mut writer = Writer { out, text, table, families, mapped, run: None, open: false };
    walk::volumes(reader, &state, &mut writer).map_err(stopped)?;
    writer.end_device().map_err(stopped)?;
    writer.text.push_str("</superblock>\n");
    (writer.out)(&writer.text).map_err(stopped)?;
    Ok(gaps(reader, &counter.partial))
}

/// Clear bits of extents, over all volumes that map them.
fn gaps(reader: &Reader<'_>, partial: &BTreeMap<PhysicalExtent, Bits>) -> Gaps {
    let geometry = reader.geometry();
    let mut gaps = Gaps::default();
    for (extent, bits) in partial {
        gaps.torn += u64::from(bits.differ);
        let Some((device, base)) = reader.place(*extent) else { continue };
        let mut clear = !bits.any & geometry.full_bitmap();
        while clear != 0 {
            let first = u64::from(clear.trailing_zeros());
            let count = u64::from((clear >> first).trailing_ones());
            let (offset, len) =
                (first * geometry.sub_block_size(), count * geometry.sub_block_size());
            gaps.gaps.push(Gap { device, offset: base + offset, len });
            let done = if count == 64 { u64::MAX } else { ((1 << count) - 1) << first };
            clear &= !done;
        }
    }
    gaps
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bits {
    any: u64,
    /// Not all have the same.
    differ: bool,
}

/// Extents that each volume maps, and those with bits that are clear.
#[derive(Debug, Default)]
struct Counter {
    mapped: HashMap<VolumeId, u64>,
    leaves: HashMap<u64, u64>,
    partial: BTreeMap<PhysicalExtent, Bits>,
    /// Composite entries, which dm-thin does not have.
    composite: u64,
    lost: bool,
}

impl Visitor for Counter {
    fn page(&mut self, _: PageUse) -> Result<(), Stopped> {
        Ok(())
    }

    fn catalogue_lost(&mut self, _: std::ops::Range<u64>, _: &Fault) -> Result<(), Stopped> {
        self.lost = true;
        Ok(())
    }

    fn lost(&mut self, _: &VolumeView, _: std::ops::Range<u64>, _: &Fault) -> Result<(), Stopped> {
        self.lost = true;
        Ok(())
    }

    fn problem(&mut self, _: &'static str, _: String) -> Result<(), Stopped> {
        self.lost = true;
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        if let Some(entries) = leaf.fresh {
            let mut count = 0;
            for entry in entries {
                let (physical, now) = match *entry {
                    Entry::Unmapped => continue,
                    Entry::Mapped { physical, valid } => (physical, valid),
                    Entry::Composite(_) => {
                        self.composite += 1;
                        continue;
                    }
                };
                count += 1;
                let bits = self.partial.entry(physical).or_insert(Bits { any: now, differ: false });
                bits.differ |= bits.any != now;
                bits.any |= now;
            }
            self.leaves.insert(leaf.number, count);
        }
        let count = self.leaves.get(&leaf.number).copied().unwrap_or(0);
        *self.mapped.entry(leaf.volume.record.id).or_default() += count;
        Ok(())
    }
}

/// Blocks that lie in a row in the volume and on the media.
#[derive(Debug, Clone, Copy)]
struct Run {
    origin: u64,
    data: u64,
    length: u64,
}

struct Writer<'o> {
    out: &'o mut dyn FnMut(&str) -> Result<(), Stopped>,
    text: String,
    table: DeviceTable,
    families: HashMap<VolumeId, u32>,
    mapped: HashMap<VolumeId, u64>,
    run: Option<Run>,
    open: bool,
}

impl Writer<'_> {
    /// The devices of the pool, one after the other, are the data device.
    fn block(&self, extent: PhysicalExtent) -> u64 {
        let Some((index, record)) = self.table.find(extent) else { return u64::MAX };
        let before = &self.table.as_slice()[..usize::from(index.0)];
        before.iter().map(|device| device.extents).sum::<u64>() + extent.0 - record.first.0
    }

    fn end_run(&mut self) -> Result<(), Stopped> {
        let Some(Run { origin, data, length }) = self.run.take() else { return Ok(()) };
        let _ = writeln!(
            self.text,
            "    <range_mapping origin_begin=\"{origin}\" data_begin=\"{data}\" \
             length=\"{length}\" time=\"0\"/>"
        );
        if self.text.len() < PIECE {
            return Ok(());
        }
        (self.out)(&std::mem::take(&mut self.text))
    }

    fn end_device(&mut self) -> Result<(), Stopped> {
        self.end_run()?;
        if std::mem::take(&mut self.open) {
            self.text.push_str("  </device>\n");
        }
        Ok(())
    }

    fn entries(&mut self, first: u64, entries: &Entries) -> Result<(), Stopped> {
        for (origin, entry) in (first..).zip(entries) {
            // None is composite: else the pool was refused.
            let Entry::Mapped { physical, .. } = *entry else { continue };
            let data = self.block(physical);
            match &mut self.run {
                Some(run) if run.origin + run.length == origin && run.data + run.length == data => {
                    run.length += 1;
                }
                _ => {
                    self.end_run()?;
                    self.run = Some(Run { origin, data, length: 1 });
                }
            }
        }
        Ok(())
    }
}

impl Visitor for Writer<'_> {
    fn page(&mut self, _: PageUse) -> Result<(), Stopped> {
        Ok(())
    }

    fn every_leaf(&self) -> bool {
        true
    }

    fn volume(&mut self, volume: &VolumeView) -> Result<(), Stopped> {
        self.end_device()?;
        let id = volume.record.id;
        let mapped = self.mapped.get(&id).copied().unwrap_or(0);
        // Blocks older than the last snapshot are taken for shared.
        let family = self.families.get(&volume.record.lineage).copied().unwrap_or(1);
        let snap_time = u8::from(family > 1);
        let _ = writeln!(
            self.text,
            "  <device dev_id=\"{id}\" mapped_blocks=\"{mapped}\" transaction=\"0\" \
             creation_time=\"0\" snap_time=\"{snap_time}\">"
        );
        self.open = true;
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        match leaf.fresh {
            Some(entries) => self.entries(leaf.slot.first_extent().0, entries),
            None => Ok(()),
        }
    }
}
