//! Codecs of everything the mapper keeps on media and in the delta ring.
//!
//! `docs/ON_DISK_FORMAT.md` is the description; `tests/format_golden.rs` holds the code to it.
//! Decoders are total: whatever the bytes, they give a valid value or a [`FormatError`] that names
//! the structure, the place and the expected content. None of them allocates by a number it read.

pub mod catalogue;
pub mod checksum;
pub mod claim;
pub mod devices;
pub mod error;
pub mod index_page;
pub mod labels;
pub mod leaf_page;
pub mod name;
pub mod page;
pub mod placement;
pub mod record;
pub mod ring;
pub mod settings;
pub mod superblock;
pub mod under_page;
pub mod wal;

pub use error::{FormatError, Place, Problem, Structure};
pub use labels::{InvalidLabel, Labels};
pub use name::{InvalidName, VolumeName};

use crate::geometry::{Geometry, MAX_PHYSICAL_EXTENTS, PAGE_SIZE};
use crate::units::{PageAddress, PhysicalExtent};

/// Identity of a pool, drawn at random when it is created.
pub type PoolId = [u8; 16];

/// Version of the format that this code writes. It is frozen: see `docs/FORMAT_POLICY.md`.
pub const FORMAT_MAJOR: u16 = 1;
/// See [`FORMAT_MAJOR`]. Readers ignore it: the feature words say which features they have to know.
pub const FORMAT_MINOR: u16 = 0;
/// Version in the header of pages and WAL blocks.
pub const STRUCTURE_VERSION: u16 = 1;
/// References in an index page.
pub const INDEX_FANOUT: u64 = 252;
/// Index levels of a tree: 252^4 leaves are more than the 2^26 of the largest volume.
pub const MAX_LEVELS: u8 = 4;

/// Index levels of the tree of labels, which has a place for each record of the catalogue.
#[must_use]
pub const fn label_levels(records: u64) -> u8 {
    let levels = levels_for(records);
    if levels == 0 { 1 } else { levels }
}

/// How a parent names its child: its place, and its expected properties. The sum detects a write
/// that was lost or misdirected: the page found may be sound in itself and still not be the child.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageRef {
    /// Where the child lies; 0 when there is none.
    pub address: PageAddress,
    /// XXH3-64 of the child's 4096 bytes; 0 when there is none.
    pub sum: u64,
}

impl PageRef {
    /// No child.
    pub const NONE: Self = Self { address: PageAddress(0), sum: 0 };

    /// Whether it names no child.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.address.0 == 0
    }
}

/// The limits of a pool for entries and references.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    full_bitmap: u64,
    physical_end: u64,
    page_end: u64,
    unknown_features: bool,
    volume_settings: bool,
    placement: bool,
    composite: bool,
}

impl Limits {
    /// The limits of a pool whose devices end before physical extent `physical_end`.
    #[must_use]
    pub fn new(geometry: Geometry, physical_end: u64) -> Self {
        let physical_end = physical_end.min(MAX_PHYSICAL_EXTENTS);
        Self {
            full_bitmap: geometry.full_bitmap(),
            physical_end,
            page_end: physical_end * geometry.pages_per_extent(),
            unknown_features: false,
            volume_settings: false,
            placement: false,
            composite: false,
        }
    }

    /// The same in a pool with features that this code may ignore and doesn't know: the reserved
    /// bytes and flags of volume records belong to them.
    #[must_use]
    pub const fn with_unknown_features(mut self, unknown: bool) -> Self {
        self.unknown_features = unknown;
        self
    }

    /// The same in a pool whose volume records may hold settings.
    #[must_use]
    pub const fn with_volume_settings(mut self, settings: bool) -> Self {
        self.volume_settings = settings;
        self
    }

    /// The same in a pool whose volume records may hold a placement.
    #[must_use]
    pub const fn with_placement(mut self, placement: bool) -> Self {
        self.placement = placement;
        self
    }

    /// The context of a pool whose entries may be composite.
    #[must_use]
    pub const fn with_composite(mut self, composite: bool) -> Self {
        self.composite = composite;
        self
    }

    pub(crate) const fn has_composite(&self) -> bool {
        self.composite
    }

    pub(crate) const fn has_volume_settings(&self) -> bool {
        self.volume_settings
    }

    pub(crate) const fn has_placement(&self) -> bool {
        self.placement
    }

    pub(crate) const fn has_unknown_features(&self) -> bool {
        self.unknown_features
    }

    /// The limits of the layout itself, for readers that know no pool.
    #[must_use]
    pub const fn layout() -> Self {
        Self {
            full_bitmap: u64::MAX,
            physical_end: MAX_PHYSICAL_EXTENTS,
            page_end: MAX_PHYSICAL_EXTENTS << 8,
            unknown_features: false,
            volume_settings: false,
            placement: false,
            composite: false,
        }
    }

    /// The bits of a bitmap that no sub-block has.
    pub(crate) const fn excess(&self, valid: u64) -> u64 {
        valid & !self.full_bitmap
    }

    /// Whether a bitmap names no sub-block beyond those of an extent.
    #[must_use]
    pub const fn allows_bits(&self, valid: u64) -> bool {
        self.excess(valid) == 0
    }

    pub(crate) const fn allows_physical(&self, physical: PhysicalExtent) -> bool {
        physical.0 < self.physical_end
    }

    /// Checks a reference read from media.
    pub(crate) const fn check_ref(&self, found: PageRef) -> Result<(), Problem> {
        if found.address.0 >= self.page_end {
            return Err(Problem::field("page address", found.address.0, "a page of the pool"));
        }
        if found.address.0 == 0 && found.sum != 0 {
            return Err(Problem::field("sum", found.sum, "0 where there is no page"));
        }
        Ok(())
    }
}

/// Index levels that a tree over `children` lowest pages needs: the least L with
/// 252^L >= `children`. The tree of a volume in which anything is mapped has at least one.
#[must_use]
pub const fn levels_for(children: u64) -> u8 {
    let mut levels = 0;
    while capacity_of(levels) < children {
        levels += 1;
    }
    levels
}

/// Returns the number of lowest pages that a tree of this many index levels can hold.
#[must_use]
pub const fn capacity_of(levels: u8) -> u64 {
    // 252^8 is the highest power below 2^64.
    if levels > 8 { u64::MAX } else { INDEX_FANOUT.pow(levels as u32) }
}

/// The bytes as one page, or the complaint that they aren't.
pub(crate) fn as_page(bytes: &[u8]) -> Result<&[u8; PAGE_SIZE], Problem> {
    bytes
        .try_into()
        .map_err(|_| Problem::Length { found: bytes.len() as u64, expected: PAGE_SIZE as u64 })
}

/// Complains about the first byte of a reserved range that isn't zero. `offset` is where the range
/// begins in its structure.
pub(crate) fn check_reserved(bytes: &[u8], offset: usize) -> Result<(), Problem> {
    match bytes.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(at) => Err(Problem::Reserved { byte: (offset + at) as u64, found: bytes[at] }),
    }
}
