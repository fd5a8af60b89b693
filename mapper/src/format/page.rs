//! Metadata pages: the header that every kind shares, sealing and opening.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::checksum::{page_crc, sum};
use crate::format::{FormatError, Place, PoolId, Problem, STRUCTURE_VERSION, Structure, as_page};
use crate::geometry::PAGE_SIZE;
use crate::io::Page;
use crate::units::{Epoch, Lsn, SlotIndex};

/// Bytes of the header.
pub const PAGE_HEADER_SIZE: usize = 64;
const MAGIC: [u8; 4] = *b"BDpg";
const CRC_AT: usize = 8;

/// Version of a leaf page that has composite entries.
pub(crate) const COMPOSITE_LEAF_VERSION: u16 = 2;

/// The kind of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageKind {
    /// The 256 entries of a leaf.
    Leaf = 1,
    /// References to pages of the level below.
    Index = 2,
    /// Volume records.
    Catalogue = 3,
    /// The bases of a leaf's composite entries.
    Under = 4,
    /// The labels of a volume.
    Labels = 5,
}

impl PageKind {
    pub(crate) const fn structure(self) -> Structure {
        match self {
            Self::Leaf => Structure::LeafPage,
            Self::Index => Structure::IndexPage,
            Self::Catalogue => Structure::CataloguePage,
            Self::Under => Structure::UnderPage,
            Self::Labels => Structure::LabelPage,
        }
    }

    /// The highest version of such a page.
    const fn last_version(self) -> u16 {
        match self {
            Self::Leaf => COMPOSITE_LEAF_VERSION,
            Self::Index | Self::Catalogue | Self::Under | Self::Labels => STRUCTURE_VERSION,
        }
    }
}

/// The stamp that a writer puts on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageStamp {
    /// The pool.
    pub pool_id: PoolId,
    /// The volume whose tree or labels it was written for; 0 for the catalogue and for index pages
    /// above labels.
    pub tree: u32,
    /// The node that wrote it.
    pub node: u32,
    /// Which page of its level; the slot for a leaf.
    pub index: u64,
    /// The checkpoint that wrote it.
    pub lsn: Lsn,
    /// The open that wrote it.
    pub epoch: Epoch,
}

/// The header of a page that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHeader {
    /// Its kind.
    pub kind: PageKind,
    /// 0 for leaves, under pages, catalogue pages and labels, from 1 up for index pages.
    pub level: u8,
    /// Version of its layout.
    pub version: u16,
    /// Entries in use.
    pub entries: u16,
    /// The stamp of its writer.
    pub stamp: PageStamp,
}

/// The properties of a page that a reader expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageExpect {
    /// The pool.
    pub pool_id: PoolId,
    /// Its kind.
    pub kind: PageKind,
    /// Its level.
    pub level: u8,
    /// Which page of its level.
    pub index: u64,
    /// The tree, where only one can be right. Pages of volumes are shared with snapshots and
    /// carry the tree that wrote them first, so any tree is.
    pub tree: Option<u32>,
    /// The sum in its parent. `None` for tools that examine orphans.
    pub sum: Option<u64>,
}

impl PageExpect {
    /// The leaf of a slot.
    #[must_use]
    pub fn leaf(pool_id: PoolId, slot: SlotIndex, sum: u64) -> Self {
        let index = u64::from(slot.0);
        Self { pool_id, kind: PageKind::Leaf, level: 0, index, tree: None, sum: Some(sum) }
    }

    /// The bases of the composite entries in the leaf of a slot.
    #[must_use]
    pub fn under(pool_id: PoolId, slot: SlotIndex, sum: u64) -> Self {
        Self { kind: PageKind::Under, ..Self::leaf(pool_id, slot, sum) }
    }

    /// An index page of a volume.
    #[must_use]
    pub const fn index(pool_id: PoolId, level: u8, index: u64, sum: u64) -> Self {
        Self { pool_id, kind: PageKind::Index, level, index, tree: None, sum: Some(sum) }
    }

    /// An index page of the catalogue.
    #[must_use]
    pub const fn catalogue_index(pool_id: PoolId, level: u8, index: u64, sum: u64) -> Self {
        Self { pool_id, kind: PageKind::Index, level, index, tree: Some(0), sum: Some(sum) }
    }

    /// The labels of the volume at a place of the catalogue.
    #[must_use]
    pub const fn labels(pool_id: PoolId, place: u64, volume: u32, sum: u64) -> Self {
        let (kind, tree) = (PageKind::Labels, Some(volume));
        Self { pool_id, kind, level: 0, index: place, tree, sum: Some(sum) }
    }

    /// A page of volume records.
    #[must_use]
    pub const fn catalogue(pool_id: PoolId, index: u64, sum: u64) -> Self {
        Self { pool_id, kind: PageKind::Catalogue, level: 0, index, tree: Some(0), sum: Some(sum) }
    }
}

/// Checks everything about a page but its entries.
pub fn open(bytes: &[u8], expect: &PageExpect, place: Place) -> Result<PageHeader, FormatError> {
    try_open(bytes, expect).map_err(|problem| problem.of(expect.kind.structure(), place))
}

pub(crate) fn try_open(bytes: &[u8], expect: &PageExpect) -> Result<PageHeader, Problem> {
    let page = as_page(bytes)?;
    let (raw, _) = RawHeader::ref_from_prefix(page).map_err(|_| short(bytes))?;
    if raw.magic != MAGIC {
        return Err(Problem::Magic {
            found: u64::from(u32::from_be_bytes(raw.magic)),
            expected: u64::from(u32::from_be_bytes(MAGIC)),
        });
    }
    let computed = page_crc::<CRC_AT>(page);
    if computed != raw.crc.get() {
        let found = u64::from(raw.crc.get());
        return Err(Problem::Checksum { found, computed: u64::from(computed) });
    }
    if let Some(expected) = expect.sum {
        let computed = sum(page);
        if computed != expected {
            return Err(Problem::ParentSum { computed, expected });
        }
    }
    raw.check(expect)?;
    Ok(PageHeader {
        kind: expect.kind,
        level: raw.level,
        version: raw.version.get(),
        entries: raw.entries.get(),
        stamp: PageStamp {
            pool_id: raw.pool_id,
            tree: raw.tree.get(),
            node: raw.node.get(),
            index: raw.index.get(),
            lsn: Lsn(raw.lsn.get()),
            epoch: Epoch(raw.epoch.get()),
        },
    })
}

/// Writes the header over a page whose entries are in place. Returns the sum for the parent.
pub(crate) fn seal(
    page: &mut Page,
    kind: PageKind,
    level: u8,
    entries: u16,
    stamp: &PageStamp,
) -> u64 {
    seal_version(page, STRUCTURE_VERSION, kind, level, entries, stamp)
}

/// Seals a page of a version of its own.
pub(crate) fn seal_version(
    page: &mut Page,
    version: u16,
    kind: PageKind,
    level: u8,
    entries: u16,
    stamp: &PageStamp,
) -> u64 {
    let raw = RawHeader {
        magic: MAGIC,
        kind: kind as u8,
        level,
        version: version.into(),
        crc: 0.into(),
        tree: stamp.tree.into(),
        pool_id: stamp.pool_id,
        node: stamp.node.into(),
        entries: entries.into(),
        reserved: 0.into(),
        index: stamp.index.into(),
        lsn: stamp.lsn.0.into(),
        epoch: stamp.epoch.0.into(),
    };
    page.0[..PAGE_HEADER_SIZE].copy_from_slice(raw.as_bytes());
    let crc = crc32c::crc32c(&page.0);
    page.0[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    sum(&page.0)
}

pub(crate) fn short(bytes: &[u8]) -> Problem {
    Problem::Length { found: bytes.len() as u64, expected: PAGE_SIZE as u64 }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    magic: [u8; 4],
    kind: u8,
    level: u8,
    version: U16,
    crc: U32,
    tree: U32,
    pool_id: PoolId,
    node: U32,
    entries: U16,
    reserved: U16,
    index: U64,
    lsn: U64,
    epoch: U64,
}

const _: () = assert!(size_of::<RawHeader>() == PAGE_HEADER_SIZE);

impl RawHeader {
    fn check(&self, expect: &PageExpect) -> Result<(), Problem> {
        let version = self.version.get();
        if version < STRUCTURE_VERSION || version > expect.kind.last_version() {
            let found = u64::from(version);
            return Err(Problem::UnsupportedKind { what: "page version", found });
        }
        if self.pool_id != expect.pool_id {
            return Err(Problem::ForeignPool { found: self.pool_id, expected: expect.pool_id });
        }
        let tree = self.tree.get();
        for (field, found, expected) in [
            ("page kind", u64::from(self.kind), u64::from(expect.kind as u8)),
            ("level", u64::from(self.level), u64::from(expect.level)),
            ("page index", self.index.get(), expect.index),
            ("tree", u64::from(tree), u64::from(expect.tree.unwrap_or(tree))),
            ("reserved field", u64::from(self.reserved.get()), 0),
        ] {
            if found != expected {
                return Err(Problem::Mismatch { field, found, expected });
            }
        }
        Ok(())
    }
}
