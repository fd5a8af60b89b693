//! The superblock: identity, devices, where the log and the trees begin.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::checksum::{page_crc, sum};
use crate::format::index_page::RawRef;
use crate::format::page::short;
use crate::format::{
    FORMAT_MAJOR, FormatError, Limits, MAX_LEVELS, PageRef, Place, PoolId, Problem, Structure,
    as_page, capacity_of, check_reserved,
};
use crate::geometry::{EXTENT_SIZES, Geometry, MAX_PHYSICAL_EXTENTS, PAGE_BYTES, PAGE_SIZE};
use crate::io::Page;
use crate::units::{DeviceIndex, Epoch, Lsn, PhysicalExtent};

pub(crate) use crate::format::devices::MIN_EXTENTS;
pub use crate::format::devices::{DeviceRecord, DeviceState, DeviceTable, Leaving};
use crate::format::devices::{RAW_DEVICES, RawDevice};

/// Entries may be composite: leaf pages of version 2, under pages, and records of kind 67.
pub const COMPOSITE: u64 = 1;
/// A device of the table is leaving or shrinking, or was removed.
pub const DEVICE_STATES: u64 = 2;
/// Features that a reader must know to read.
pub const KNOWN_INCOMPAT: u64 = COMPOSITE | DEVICE_STATES;
/// Features that a writer must know to write. None exists yet.
pub const KNOWN_RO_COMPAT: u64 = 0;
/// Volume records may hold settings. A reader that does not know them ignores limits and
/// reservations.
pub const VOLUME_SETTINGS: u64 = 1;
/// The first device has a claim page, which its opens for writing renew where several hosts may
/// reach the storage.
pub const CLAIM_PAGE: u64 = 2;
/// Volumes have labels, in pages below a root of their own. A writer that does not know them leaves
/// the root out of its first superblock: they are gone then, as a whole.
pub const LABELS: u64 = 4;
/// Volume records may hold a placement. A reader that does not know it lets the volume's extents
/// come from any device.
pub const PLACEMENT: u64 = 8;
/// Features that may be ignored.
pub const KNOWN_COMPAT: u64 = VOLUME_SETTINGS | CLAIM_PAGE | LABELS | PLACEMENT;

const MAGIC: [u8; 8] = *b"BLOCKDsb";
const CRC_AT: usize = 8;
const THIS_DEVICE_AT: usize = 89;

/// Everything that a checkpoint or an open makes true at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// The pool.
    pub pool_id: PoolId,
    /// Rises by one with each superblock written.
    pub generation: u64,
    /// [`Superblock::sum`] of the generation before; 0 in the first.
    pub previous_sum: u64,
    /// Version of the format.
    pub major: u16,
    /// Version of the format.
    pub minor: u16,
    /// Features in use that a reader or writer may ignore.
    pub compat: u64,
    /// Features in use without which one may read but not write.
    pub ro_compat: u64,
    /// Features in use without which one may not even read.
    pub incompat: u64,
    /// Bytes of an extent.
    pub extent_size: u32,
    /// The node that wrote it.
    pub node: u32,
    /// The open that wrote it.
    pub epoch: Epoch,
    /// The pool was closed in order: the WAL behind the checkpoint is empty.
    pub clean: bool,
    /// Identity of the open, drawn at random; 0 if the pool was never open.
    pub open_id: u64,
    /// The boot of the host in which the pool was opened.
    pub boot_id: [u8; 16],
    /// The pool's devices.
    pub devices: DeviceTable,
    /// Which of them holds this copy: the one field in which copies may differ.
    pub this_device: DeviceIndex,
    /// First extent of the WAL, on device 0.
    pub wal_start: PhysicalExtent,
    /// Extents of the WAL.
    pub wal_extents: u32,
    /// The first WAL block that replay needs.
    pub wal_tail_sequence: u64,
    /// The sum of its predecessor that this block must name.
    pub wal_tail_hash: u64,
    /// The trees hold every change up to this one and none above it.
    pub checkpoint_lsn: Lsn,
    /// Root of the catalogue.
    pub catalogue_root: PageRef,
    /// Index levels above the catalogue pages.
    pub catalogue_levels: u8,
    /// Root of the labels, always an index page; none where no volume has any.
    pub labels_root: PageRef,
    /// Places for records in the catalogue, in use or not.
    pub catalogue_records: u32,
    /// Volume ids from here on were never used.
    pub next_volume_id: u32,
    /// First extent of the run kept for metadata.
    pub reserve_start: PhysicalExtent,
    /// Extents of that run.
    pub reserve_extents: u32,
}

/// Byte offsets of the four copies on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyOffsets {
    /// Written first, then flushed.
    pub first_pair: [u64; 2],
    /// Written when the first pair is durable.
    pub second_pair: [u64; 2],
}

/// Returns the offsets of the copies on a device with this many extents for the pool.
#[must_use]
pub const fn copy_offsets(geometry: Geometry, extents: u64) -> CopyOffsets {
    let last = extents.saturating_sub(1).saturating_mul(geometry.extent_size());
    CopyOffsets {
        first_pair: [0, last],
        second_pair: [PAGE_BYTES, last.saturating_add(PAGE_BYTES)],
    }
}

/// The newest of the copies that could be read, all of one pool.
///
/// Sound copies of that generation that differ are refused: two writers have been at work, and
/// neither copy can be trusted. A copy without labels counts before one with them: a release that
/// doesn't know them has begun to write the others anew, and may have used their pages since.
pub fn newest(copies: &[(Place, Superblock)]) -> Result<Option<&Superblock>, FormatError> {
    let rank = |copy: &Superblock| (copy.generation, copy.labels_root.is_none());
    let Some((_, newest)) = copies.iter().max_by_key(|(_, copy)| rank(copy)) else {
        return Ok(None);
    };
    for (place, copy) in copies.iter().filter(|(_, copy)| copy.generation == newest.generation) {
        let mut same = Superblock { this_device: newest.this_device, ..copy.clone() };
        if newest.labels_root.is_none() {
            same.labels_root = PageRef::NONE;
        }
        if same != *newest {
            return Err(disagree(newest, copy, *place));
        }
    }
    Ok(Some(newest))
}

/// Apart, and never inlined: it holds whole pages on the stack. With them in `newest`, rustc 1.95
/// (LLVM's shrink-wrapping beside stack probes) leaves out the saving of registers, and the
/// optimised function crashes.
#[cold]
#[inline(never)]
fn disagree(newest: &Superblock, copy: &Superblock, place: Place) -> FormatError {
    let (first, second) = (newest.sum(), copy.sum());
    let generation = newest.generation;
    Problem::Disagree { generation, first, second }.of(Structure::Superblock, place)
}

impl Superblock {
    /// Whether bytes begin as a superblock of any version does, sound or not.
    #[must_use]
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Checks a copy of the superblock.
    pub fn decode(bytes: &[u8], place: Place) -> Result<Self, FormatError> {
        try_decode(bytes).map_err(|problem| problem.of(Structure::Superblock, place))
    }

    /// Writes the copy of device `this_device`.
    pub fn encode(&self, page: &mut Page) {
        let (device_count, devices) = self.devices.raw();
        let raw = RawSuperblock {
            magic: MAGIC,
            crc: 0.into(),
            major: self.major.into(),
            minor: self.minor.into(),
            compat: self.compat.into(),
            ro_compat: self.ro_compat.into(),
            incompat: self.incompat.into(),
            pool_id: self.pool_id,
            node: self.node.into(),
            extent_size: self.extent_size.into(),
            epoch: self.epoch.0.into(),
            generation: self.generation.into(),
            previous_sum: self.previous_sum.into(),
            clean: self.clean.into(),
            this_device: self.this_device.0,
            device_count,
            catalogue_levels: self.catalogue_levels,
            reserved_a: [0; 4],
            open_id: self.open_id.into(),
            boot_id: self.boot_id,
            wal_start: self.wal_start.0.into(),
            wal_extents: self.wal_extents.into(),
            catalogue_records: self.catalogue_records.into(),
            wal_tail_sequence: self.wal_tail_sequence.into(),
            wal_tail_hash: self.wal_tail_hash.into(),
            checkpoint_lsn: self.checkpoint_lsn.0.into(),
            catalogue_root: RawRef::new(self.catalogue_root),
            reserve_start: self.reserve_start.0.into(),
            reserve_extents: self.reserve_extents.into(),
            next_volume_id: self.next_volume_id.into(),
            labels_root: RawRef::new(self.labels_root),
            reserved_b: [0; 304],
            devices,
            reserved_c: [0; 2560],
        };
        page.0.copy_from_slice(raw.as_bytes());
        let crc = crc32c::crc32c(&page.0);
        page.0[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// XXH3-64 of the copy of device 0, whichever copy this is: the same for all copies.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let mut page = Page::zeroed();
        Self { this_device: DeviceIndex(0), ..self.clone() }.encode(&mut page);
        sum(&page.0)
    }

    /// Features in use that this code would have to know to write to the pool. Unless it is 0,
    /// the pool may only be read.
    #[must_use]
    pub const fn unknown_ro_compat(&self) -> u64 {
        self.ro_compat & !KNOWN_RO_COMPAT
    }

    /// Whether this build knows all of its bytes: a later feature may use reserved ones.
    #[must_use]
    pub const fn is_known_whole(&self) -> bool {
        !unknown(self.compat, self.ro_compat)
    }

    /// Blocks of the WAL, for [`block_position`](crate::format::wal::block_position).
    #[must_use]
    pub fn wal_blocks(&self) -> u64 {
        u64::from(self.wal_extents) * (u64::from(self.extent_size) / PAGE_BYTES)
    }

    /// The limits that entries and references of this pool keep.
    pub fn limits(&self) -> Result<Limits, FormatError> {
        let limits = self.geometry().map(|geometry| Limits::new(geometry, self.devices.end()));
        let limits = limits.map(|limits| limits.with_unknown_features(self.ignores_features()));
        let has_settings = self.compat & VOLUME_SETTINGS != 0;
        let limits = limits.map(|limits| limits.with_volume_settings(has_settings));
        let has_placement = self.compat & PLACEMENT != 0;
        let limits = limits.map(|limits| limits.with_placement(has_placement));
        let has_composite = self.incompat & COMPOSITE != 0;
        let limits = limits.map(|limits| limits.with_composite(has_composite));
        limits.map_err(|problem| problem.of(Structure::Superblock, Place::Memory))
    }

    /// Whether features are in use that this code doesn't know and need not know to read.
    const fn ignores_features(&self) -> bool {
        unknown(self.compat, self.ro_compat)
    }

    /// Checks that the fields fit each other. [`decode`](Self::decode) has done so.
    pub fn validate(&self) -> Result<(), Problem> {
        let geometry = self.geometry()?;
        self.devices.validate(geometry)?;
        if self.devices.has_states() != (self.incompat & DEVICE_STATES != 0) {
            let allowed =
                "with bit 1 exactly when a device is leaving, is shrinking or was removed";
            return Err(Problem::field("incompatible features", self.incompat, allowed));
        }
        let end = self.devices.end();
        let limits = Limits::new(geometry, end);
        let count = self.devices.as_slice().len() as u64;
        let this = u64::from(self.this_device.0);
        if this >= count {
            return Err(Problem::field("this device", this, "a device of the table"));
        }
        self.check_run("WAL start", self.wal_start, self.wal_extents, Some(DeviceIndex(0)))?;
        if self.wal_extents == 0 {
            return Err(Problem::field("WAL extents", 0, "at least 1"));
        }
        if self.reserve_extents != 0 {
            self.check_run("reserve start", self.reserve_start, self.reserve_extents, None)?;
        }
        self.check_catalogue(&limits)
    }

    fn geometry(&self) -> Result<Geometry, Problem> {
        Geometry::new(self.extent_size).map_err(|_| {
            let found = u64::from(self.extent_size);
            Problem::field("extent size", found, EXTENT_SIZES)
        })
    }

    /// Checks that a run lies in one device, clear of its superblock areas, and stays there.
    fn check_run(
        &self,
        field: &'static str,
        start: PhysicalExtent,
        extents: u32,
        only: Option<DeviceIndex>,
    ) -> Result<(), Problem> {
        let end = start.0.saturating_add(u64::from(extents));
        let fits = self.devices.find(start).is_some_and(|(index, device)| {
            let last = device.first.0 + device.lasting() - 1;
            start.0 > device.first.0 && end <= last && only.is_none_or(|only| only == index)
        });
        let allowed =
            "a run in one device (the first, for the WAL), clear of its first and last extent";
        if fits { Ok(()) } else { Err(Problem::field(field, start.0, allowed)) }
    }

    fn check_catalogue(&self, limits: &Limits) -> Result<(), Problem> {
        let (levels, records) = (self.catalogue_levels, u64::from(self.catalogue_records));
        limits.check_ref(self.catalogue_root)?;
        limits.check_ref(self.labels_root)?;
        if records == 0 && !self.labels_root.is_none() {
            let found = self.labels_root.address.0;
            return Err(Problem::field("labels root", found, "0 without records"));
        }
        let pages = records.div_ceil(super::catalogue::RECORDS_PER_PAGE);
        if levels > MAX_LEVELS || capacity_of(levels) < pages || (records == 0 && levels > 0) {
            let allowed = "at most 4, enough for the records, 0 without records";
            return Err(Problem::field("catalogue levels", u64::from(levels), allowed));
        }
        if self.catalogue_root.is_none() != (records == 0) {
            let allowed = "0 exactly when there are no records";
            return Err(Problem::field("catalogue root", self.catalogue_root.address.0, allowed));
        }
        Ok(())
    }
}

fn try_decode(bytes: &[u8]) -> Result<Superblock, Problem> {
    let page = as_page(bytes)?;
    let raw = RawSuperblock::ref_from_bytes(page).map_err(|_| short(bytes))?;
    if raw.magic != MAGIC {
        return Err(Problem::Magic {
            found: u64::from_be_bytes(raw.magic),
            expected: u64::from_be_bytes(MAGIC),
        });
    }
    let computed = u64::from(page_crc::<CRC_AT>(page));
    let found = u64::from(raw.crc.get());
    if computed != found {
        return Err(Problem::Checksum { found, computed });
    }
    raw.check_version()?;
    raw.check_reserved()?;
    let clean = match raw.clean {
        0 => false,
        1 => true,
        found => return Err(Problem::field("clean", u64::from(found), "0 or 1")),
    };
    let superblock = Superblock {
        pool_id: raw.pool_id,
        generation: raw.generation.get(),
        previous_sum: raw.previous_sum.get(),
        major: raw.major.get(),
        minor: raw.minor.get(),
        compat: raw.compat.get(),
        ro_compat: raw.ro_compat.get(),
        incompat: raw.incompat.get(),
        extent_size: raw.extent_size.get(),
        node: raw.node.get(),
        epoch: Epoch(raw.epoch.get()),
        clean,
        open_id: raw.open_id.get(),
        boot_id: raw.boot_id,
        devices: DeviceTable::from_raw(raw.device_count, &raw.devices)?,
        this_device: DeviceIndex(raw.this_device),
        wal_start: PhysicalExtent(raw.wal_start.get()),
        wal_extents: raw.wal_extents.get(),
        wal_tail_sequence: raw.wal_tail_sequence.get(),
        wal_tail_hash: raw.wal_tail_hash.get(),
        checkpoint_lsn: Lsn(raw.checkpoint_lsn.get()),
        catalogue_root: raw.catalogue_root.get(),
        catalogue_levels: raw.catalogue_levels,
        labels_root: raw.labels_root()?,
        catalogue_records: raw.catalogue_records.get(),
        next_volume_id: raw.next_volume_id.get(),
        reserve_start: PhysicalExtent(raw.reserve_start.get()),
        reserve_extents: raw.reserve_extents.get(),
    };
    superblock.validate()?;
    Ok(superblock)
}

const fn unknown(compat: u64, ro_compat: u64) -> bool {
    compat & !KNOWN_COMPAT != 0 || ro_compat & !KNOWN_RO_COMPAT != 0
}

/// The first 40 bytes keep their meaning in every version, so that any version can be refused by
/// name.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSuperblock {
    magic: [u8; 8],
    crc: U32,
    major: U16,
    minor: U16,
    compat: U64,
    ro_compat: U64,
    incompat: U64,
    pool_id: PoolId,
    node: U32,
    extent_size: U32,
    epoch: U64,
    generation: U64,
    previous_sum: U64,
    clean: u8,
    this_device: u8,
    device_count: u8,
    catalogue_levels: u8,
    reserved_a: [u8; 4],
    open_id: U64,
    boot_id: [u8; 16],
    wal_start: U64,
    wal_extents: U32,
    catalogue_records: U32,
    wal_tail_sequence: U64,
    wal_tail_hash: U64,
    checkpoint_lsn: U64,
    catalogue_root: RawRef,
    reserve_start: U64,
    reserve_extents: U32,
    next_volume_id: U32,
    labels_root: RawRef,
    reserved_b: [u8; 304],
    devices: [RawDevice; RAW_DEVICES],
    reserved_c: [u8; 2560],
}

const _: () = {
    assert!(size_of::<RawSuperblock>() == PAGE_SIZE);
    assert!(std::mem::offset_of!(RawSuperblock, this_device) == THIS_DEVICE_AT);
    assert!(std::mem::offset_of!(RawSuperblock, devices) == 512);
    assert!(MAX_PHYSICAL_EXTENTS <= u64::MAX >> 20);
};

impl RawSuperblock {
    fn check_version(&self) -> Result<(), Problem> {
        let (major, minor, incompat) = (self.major.get(), self.minor.get(), self.incompat.get());
        if major != FORMAT_MAJOR || incompat & !KNOWN_INCOMPAT != 0 {
            return Err(Problem::Unsupported { major, minor, incompat, known: KNOWN_INCOMPAT });
        }
        Ok(())
    }

    /// The root of the labels where the pool has such. Else the bytes are unused, or belong to a
    /// feature that this code does not know.
    fn labels_root(&self) -> Result<PageRef, Problem> {
        if self.compat.get() & LABELS != 0 {
            return Ok(self.labels_root.get());
        }
        if !unknown(self.compat.get(), self.ro_compat.get()) {
            check_reserved(self.labels_root.as_bytes(), 192)?;
        }
        Ok(PageRef::NONE)
    }

    /// Reserved bytes belong to features that this code doesn't know, where such are in use.
    fn check_reserved(&self) -> Result<(), Problem> {
        if unknown(self.compat.get(), self.ro_compat.get()) {
            return Ok(());
        }
        self.devices.iter().enumerate().try_for_each(|(at, device)| device.check_reserved(at))?;
        check_reserved(&self.reserved_a, 92)?;
        check_reserved(&self.reserved_b, 208)?;
        check_reserved(&self.reserved_c, 1536)
    }
}
