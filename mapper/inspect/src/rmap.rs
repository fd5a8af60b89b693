//! Reverse map: the owners of a physical range.

use std::collections::HashMap;
use std::ops::Range;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::Structure;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_mapper::geometry::Geometry;
use blockd_mapper::units::{PhysicalExtent, VolumeId};

use super::check::lost_labels;
use super::dump::Lost;
use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{Fault, Reader, State, VolumeView};

/// The usage of a part of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// A superblock area.
    Superblock,
    /// The log.
    Log,
    /// The run kept for metadata, as far as no page of a tree lies in it.
    Reserve,
    /// A page of metadata.
    Page {
        /// The kind of structure.
        structure: Structure,
        /// The volume whose tree it is; 0 for the catalogue.
        tree: u32,
        /// Its level.
        level: u8,
        /// Which page of its level.
        index: u64,
    },
    /// Data of a volume or snapshot.
    Data {
        /// Which.
        volume: VolumeId,
        /// Its name.
        name: String,
        /// Volume or snapshot.
        kind: VolumeKind,
        /// Where in the volume the range begins, in bytes.
        offset: u64,
    },
}

/// A range of a device that has an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Bytes of the device.
    pub range: Range<u64>,
    /// The usage of the range.
    pub usage: Use,
}

/// The owners within a range. Parts without an entry are free if nothing is lost and the pool was
/// closed in order: extents that changes in the delta ring name have no entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RmapReport {
    /// In the order of bytes, then of volumes.
    pub claims: Vec<Claim>,
    /// The structures that could not be read, so that an owner may be missing.
    pub lost: Vec<Lost>,
}

/// Returns the owners of a range of a device, by its place in the pool's table, at the end of the
/// log.
pub fn rmap(
    reader: &mut Reader<'_>,
    device: usize,
    bytes: &Range<u64>,
) -> Result<RmapReport, MapperError> {
    let superblock = reader.superblock().clone();
    let geometry = reader.geometry();
    let size = geometry.extent_size();
    let record = superblock.devices.as_slice().get(device).filter(|record| record.is_present());
    let Some(record) = record else {
        let (value, allowed) = (device as u64, "a device of the pool");
        return Err(MapperError::Invalid { field: "device", value, allowed });
    };
    let base = record.first.0;
    let end = bytes.end.div_ceil(size).min(record.extents);
    let extents = base + (bytes.start / size).min(end)..base + end;
    let mut finder = Finder {
        geometry,
        base,
        extents: extents.clone(),
        bytes: bytes.clone(),
        leaves: HashMap::new(),
        report: RmapReport::default(),
    };
    let last = base + record.extents - 1;
    finder.run(base, 1, &Use::Superblock);
    finder.run(last, 1, &Use::Superblock);
    finder.run(superblock.wal_start.0, u64::from(superblock.wal_extents), &Use::Log);
    finder.run(superblock.reserve_start.0, u64::from(superblock.reserve_extents), &Use::Reserve);
    finder.all(reader).map_err(|Stopped| MapperError::Internal("the search was stopped"))?;
    Ok(finder.done())
}

struct Finder {
    geometry: Geometry,
    /// First extent of the device.
    base: u64,
    extents: Range<u64>,
    bytes: Range<u64>,
    /// Leaves with extents in the range: logical and physical extent.
    leaves: HashMap<u64, Vec<(u64, u64)>>,
    report: RmapReport,
}

impl Finder {
    fn all(&mut self, reader: &mut Reader<'_>) -> Result<(), Stopped> {
        let mut state = State::of_checkpoint(reader, self)?;
        let log = state.replay(reader, self)?;
        if let Some(fault) = log.broken {
            self.lose(format!("{fault}; changes behind it"));
        }
        walk::volumes(reader, &state, self)
    }

    /// Reports a loss that is of no part of a volume.
    fn lose(&mut self, text: String) {
        let (volume, name) = (VolumeId(0), String::new());
        self.report.lost.push(Lost { volume, name, range: 0..0, text });
    }

    fn run(&mut self, first: u64, count: u64, usage: &Use) {
        let (from, to) = (first.max(self.extents.start), (first + count).min(self.extents.end));
        if from < to {
            let size = self.geometry.extent_size();
            self.claim((from - self.base) * size..(to - self.base) * size, usage.clone());
        }
    }

    fn claim(&mut self, range: Range<u64>, usage: Use) {
        if range.start < self.bytes.end && self.bytes.start < range.end {
            self.report.claims.push(Claim { range, usage });
        }
    }

    fn done(mut self) -> RmapReport {
        let key = |claim: &Claim| match &claim.usage {
            Use::Data { volume, .. } => (1, volume.0, claim.range.start),
            _ => (0, 0, claim.range.start),
        };
        self.report.claims.sort_by_key(key);
        self.report.claims.dedup_by(|next, kept| joined(kept, next));
        self.report.claims.sort_by_key(|claim| claim.range.start);
        self.report
    }
}

/// Data that goes on where the claim before it ends, on the device and in the volume.
fn joined(kept: &mut Claim, next: &Claim) -> bool {
    let goes_on = match (&kept.usage, &next.usage) {
        (Use::Data { volume, offset, .. }, Use::Data { volume: other, offset: at, .. }) => {
            volume == other
                && kept.range.end == next.range.start
                && offset + (kept.range.end - kept.range.start) == *at
        }
        _ => false,
    };
    if goes_on {
        kept.range.end = next.range.end;
    }
    goes_on
}

impl Visitor for Finder {
    fn page(&mut self, page: PageUse) -> Result<(), Stopped> {
        let (extent, within) = self.geometry.page_place(page.address);
        if self.extents.contains(&extent.0) {
            let page_bytes = blockd_mapper::geometry::PAGE_BYTES;
            let at = (extent.0 - self.base) * self.geometry.extent_size() + within * page_bytes;
            let (structure, tree) = (page.structure, page.volume);
            let usage = Use::Page { structure, tree, level: page.level, index: page.index };
            self.claim(at..at + page_bytes, usage);
        }
        Ok(())
    }

    fn catalogue_lost(&mut self, places: Range<u64>, fault: &Fault) -> Result<(), Stopped> {
        let (volume, name, text) = (VolumeId(0), String::new(), fault.to_string());
        self.report.lost.push(Lost { volume, name, range: places, text });
        Ok(())
    }

    fn labels_lost(
        &mut self,
        volume: Option<&VolumeView>,
        places: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        self.lose(lost_labels(volume, &places, fault));
        Ok(())
    }

    fn problem(&mut self, what: &'static str, text: String) -> Result<(), Stopped> {
        self.lose(format!("{what}: {text}"));
        Ok(())
    }

    fn lost(
        &mut self,
        volume: &VolumeView,
        slots: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let span = self.geometry.leaf_span();
        self.report.lost.push(Lost {
            volume: volume.record.id,
            name: volume.record.name.as_str().to_owned(),
            range: slots.start * span..slots.end * span,
            text: fault.to_string(),
        });
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        if let Some(entries) = leaf.fresh {
            let entries = (leaf.slot.first_extent().0..).zip(entries);
            let found: Vec<_> = entries
                .flat_map(|(at, entry)| entry.extents().map(move |physical| (at, physical)))
                .filter(|(_, PhysicalExtent(physical))| self.extents.contains(physical))
                .map(|(at, physical)| (at, physical.0))
                .collect();
            if !found.is_empty() {
                self.leaves.insert(leaf.number, found);
            }
        }
        let size = self.geometry.extent_size();
        let record = &leaf.volume.record;
        for (at, physical) in self.leaves.get(&leaf.number).cloned().unwrap_or_default() {
            let start = (physical - self.base) * size;
            let usage = Use::Data {
                volume: record.id,
                name: record.name.as_str().to_owned(),
                kind: record.kind,
                offset: at * size,
            };
            self.claim(start..start + size, usage);
        }
        Ok(())
    }
}
