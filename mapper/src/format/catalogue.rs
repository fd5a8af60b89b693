//! Catalogue pages: 15 volume records of 256 bytes.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::index_page::RawRef;
use crate::format::page::{
    PageExpect, PageHeader, PageKind, PageStamp, RawHeader, seal, short, try_open,
};
use crate::format::placement::Placement;
use crate::format::settings::{ENCODED, VolumeSettings, without_reserved};
use crate::format::{
    FormatError, Limits, MAX_LEVELS, PageRef, Place, Problem, VolumeName, capacity_of,
    check_reserved,
};
use crate::geometry::{
    EXTENT_SIZE_RANGE, Geometry, MAX_NAME, MAX_VOLUME_SIZE, MIN_BLOCK_SIZE, PAGE_SIZE,
};
use crate::io::Page;
use crate::units::{Lsn, VolumeId, WallTime};

/// Volume records of a page.
pub const RECORDS_PER_PAGE: u64 = 15;
const RECORDS: usize = 15;
const RECORD_SIZE: usize = 256;

/// The kind of a volume record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum VolumeKind {
    /// May be written: a volume or a clone.
    Volume = 1,
    /// May only be read.
    Snapshot = 2,
}

/// A volume or snapshot as a checkpoint leaves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeRecord {
    /// Identity, never reused.
    pub id: VolumeId,
    /// Identity of the first ancestor; its own if it has none.
    pub lineage: VolumeId,
    /// The volume that it was made from; 0 for none.
    pub origin: VolumeId,
    /// Volume or snapshot.
    pub kind: VolumeKind,
    /// Bytes of its logical block.
    pub block_size: u32,
    /// Its size in bytes.
    pub size: u64,
    /// The change that created it.
    pub created_lsn: Lsn,
    /// When that was.
    pub made: WallTime,
    /// The single page of the top level of its tree.
    pub root: PageRef,
    /// Index levels of its tree; 0 when nothing is mapped.
    pub levels: u8,
    /// Its name.
    pub name: VolumeName,
    /// Its settings.
    pub settings: VolumeSettings,
}

/// A catalogue page whose every record has been checked.
#[derive(Debug, Clone, Copy)]
pub struct CataloguePage {
    header: PageHeader,
    records: [Option<VolumeRecord>; RECORDS],
}

impl CataloguePage {
    /// The page's header.
    #[must_use]
    pub const fn header(&self) -> &PageHeader {
        &self.header
    }

    /// The page's 15 places.
    #[must_use]
    pub const fn records(&self) -> &[Option<VolumeRecord>; RECORDS] {
        &self.records
    }
}

/// Writes and seals a catalogue page. Returns the sum for its parent.
pub fn encode_catalogue(
    page: &mut Page,
    stamp: &PageStamp,
    record: impl Fn(usize) -> Option<VolumeRecord>,
) -> u64 {
    let mut used = 0;
    if let Ok(raw) = RawCatalogue::mut_from_bytes(&mut page.0) {
        for (index, slot) in raw.records.iter_mut().enumerate() {
            *slot = RawRecord::new_zeroed();
            if let Some(record) = record(index) {
                used += 1;
                *slot = RawRecord::new(&record);
            }
        }
        raw.reserved.fill(0);
    }
    seal(page, PageKind::Catalogue, 0, used, stamp)
}

/// Checks a catalogue page and every record of it.
pub fn decode_catalogue(
    bytes: &[u8],
    expect: &PageExpect,
    geometry: Geometry,
    limits: &Limits,
    place: Place,
) -> Result<CataloguePage, FormatError> {
    try_decode(bytes, expect, geometry, limits)
        .map_err(|problem| problem.of(PageKind::Catalogue.structure(), place))
}

fn try_decode(
    bytes: &[u8],
    expect: &PageExpect,
    geometry: Geometry,
    limits: &Limits,
) -> Result<CataloguePage, Problem> {
    let header = try_open(bytes, expect)?;
    let raw = RawCatalogue::ref_from_bytes(bytes).map_err(|_| short(bytes))?;
    let mut records = [None; RECORDS];
    let mut used = 0;
    for (index, (record, raw)) in records.iter_mut().zip(&raw.records).enumerate() {
        *record = raw.get(index, geometry, limits)?;
        used += u64::from(record.is_some());
    }
    if used != u64::from(header.entries) {
        let found = u64::from(header.entries);
        return Err(Problem::Mismatch { field: "entries in use", found, expected: used });
    }
    check_reserved(&raw.reserved, PAGE_SIZE - raw.reserved.len())?;
    Ok(CataloguePage { header, records })
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawCatalogue {
    header: RawHeader,
    records: [RawRecord; RECORDS],
    reserved: [u8; 192],
}

const _: () = assert!(size_of::<RawCatalogue>() == PAGE_SIZE);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    id: U32,
    lineage: U32,
    origin: U32,
    block_size: U32,
    size: U64,
    created_lsn: U64,
    root: RawRef,
    kind: u8,
    levels: u8,
    name_len: u8,
    placement: u8,
    pinned_to: U32,
    made: U64,
    settings: [u8; ENCODED],
    name: [u8; MAX_NAME],
}

const _: () = assert!(size_of::<RawRecord>() == RECORD_SIZE);

impl RawRecord {
    fn new(record: &VolumeRecord) -> Self {
        let (placement, pinned_to) = record.settings.placement.encode();
        Self {
            id: record.id.0.into(),
            lineage: record.lineage.0.into(),
            origin: record.origin.0.into(),
            block_size: record.block_size.into(),
            size: record.size.into(),
            created_lsn: record.created_lsn.0.into(),
            root: RawRef::new(record.root),
            kind: record.kind as u8,
            levels: record.levels,
            name_len: name_len(&record.name),
            placement,
            pinned_to: pinned_to.into(),
            made: record.made.0.into(),
            settings: record.settings.encode(),
            name: *record.name.padded(),
        }
    }

    /// The record, or nothing where the place is empty. `index` is the place in its page.
    fn get(
        &self,
        index: usize,
        geometry: Geometry,
        limits: &Limits,
    ) -> Result<Option<VolumeRecord>, Problem> {
        let at = size_of::<RawHeader>() + index * RECORD_SIZE;
        if self.id.get() == 0 {
            return check_reserved(self.as_bytes(), at).map(|()| None);
        }
        let placement = self.placement(index, at, limits)?;
        let settings = VolumeSettings { placement, ..self.settings(index, limits)? };
        self.check(index)?;
        let name = self.name.get(..usize::from(self.name_len)).unwrap_or_default();
        let name = VolumeName::from_bytes(name).map_err(Problem::Name)?;
        check_reserved(&self.name[name.as_bytes().len()..], at + MAX_NAME + name.as_bytes().len())?;
        let root = self.root.get();
        limits.check_ref(root)?;
        let (levels, slots) = (self.levels, geometry.slots_for(self.size.get()));
        if root.is_none() != (levels == 0) {
            let allowed = "0 exactly when there is no root";
            return Err(Problem::entry(index, "levels", levels.into(), allowed));
        }
        if levels > MAX_LEVELS || (levels > 0 && capacity_of(levels) < u64::from(slots)) {
            let allowed = "at most 4 and enough for the size";
            return Err(Problem::entry(index, "levels", levels.into(), allowed));
        }
        Ok(Some(VolumeRecord {
            id: VolumeId(self.id.get()),
            lineage: VolumeId(self.lineage.get()),
            origin: VolumeId(self.origin.get()),
            kind: if self.kind == 1 { VolumeKind::Volume } else { VolumeKind::Snapshot },
            block_size: self.block_size.get(),
            size: self.size.get(),
            created_lsn: Lsn(self.created_lsn.get()),
            made: WallTime(self.made.get()),
            root,
            levels,
            name,
            settings,
        }))
    }

    /// Reads the settings, if the pool has any. Else the bytes are unused, or belong to a feature
    /// that this code does not know.
    fn settings(&self, index: usize, limits: &Limits) -> Result<VolumeSettings, Problem> {
        if limits.has_volume_settings() {
            let kind = u64::from(self.settings[0]);
            let problem = || Problem::entry(index, "settings", kind, "settings of a volume");
            let unknown = limits.has_unknown_features();
            let bytes = if unknown { without_reserved(self.settings) } else { self.settings };
            return VolumeSettings::decode(&bytes).ok_or_else(problem);
        }
        if !limits.has_unknown_features() {
            let at = size_of::<RawHeader>() + index * RECORD_SIZE;
            check_reserved(&self.settings, at + 64)?;
        }
        Ok(VolumeSettings::default())
    }

    /// Reads the placement, if the pool has any. Else the bytes are unused, or belong to a feature
    /// that this code does not know.
    fn placement(&self, index: usize, at: usize, limits: &Limits) -> Result<Placement, Problem> {
        let pinned_to = self.pinned_to.get();
        if limits.has_placement() {
            let policy = u64::from(self.placement);
            let problem = || Problem::entry(index, "placement", policy, "0, 1 or 2 with a device");
            return Placement::decode(self.placement, pinned_to).ok_or_else(problem);
        }
        if !limits.has_unknown_features() {
            check_reserved(&[self.placement], at + 51)?;
            if pinned_to != 0 {
                return Err(Problem::entry(index, "flags", pinned_to.into(), "0"));
            }
        }
        Ok(Placement::default())
    }

    fn check(&self, index: usize) -> Result<(), Problem> {
        let made = self.made.get();
        if made > WallTime::LAST.0 {
            return Err(Problem::entry(index, "time", made, "below 2^56"));
        }
        if self.lineage.get() == 0 {
            return Err(Problem::entry(index, "lineage", 0, "a volume"));
        }
        if !(1..=2).contains(&self.kind) {
            return Err(Problem::entry(index, "kind", self.kind.into(), "1 or 2"));
        }
        check_volume(self.size.get(), self.block_size.get())
    }
}

/// Checks size and block size of a volume.
pub fn check_volume(size: u64, block_size: u32) -> Result<(), Problem> {
    let blocks = MIN_BLOCK_SIZE..=*EXTENT_SIZE_RANGE.start();
    if !block_size.is_power_of_two() || !blocks.contains(&block_size) {
        let allowed = "a power of two from 512 to 65536";
        return Err(Problem::field("block size", block_size.into(), allowed));
    }
    if size == 0 || size > MAX_VOLUME_SIZE || !size.is_multiple_of(block_size.into()) {
        let allowed = "whole blocks, at least one, at most 2^50 bytes";
        return Err(Problem::field("volume size", size, allowed));
    }
    Ok(())
}

pub(crate) fn name_len(name: &VolumeName) -> u8 {
    // At most 128, by the rules of names.
    u8::try_from(name.as_bytes().len()).unwrap_or(0)
}
