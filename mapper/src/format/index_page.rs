//! Index pages: 252 references to pages of the level below.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::page::{
    PageExpect, PageHeader, PageKind, PageStamp, RawHeader, seal, short, try_open,
};
use crate::format::{FormatError, INDEX_FANOUT, Limits, PageRef, Place, Problem};
use crate::geometry::PAGE_SIZE;
use crate::io::Page;
use crate::units::PageAddress;

const ENTRIES: usize = 252;
const _: () = assert!(ENTRIES as u64 == INDEX_FANOUT);

/// An index page whose every reference has been checked.
#[derive(Debug, Clone, Copy)]
pub struct IndexPage<'a> {
    header: PageHeader,
    entries: &'a [RawRef; ENTRIES],
}

impl<'a> IndexPage<'a> {
    /// The page's header.
    #[must_use]
    pub const fn header(&self) -> &PageHeader {
        &self.header
    }

    /// A reference; none beyond the last.
    #[must_use]
    pub fn entry(&self, index: usize) -> PageRef {
        self.entries.get(index).map_or(PageRef::NONE, RawRef::get)
    }

    /// All 252 references, with those that name nothing.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = PageRef> + 'a {
        self.entries.iter().map(RawRef::get)
    }
}

/// Writes and seals an index page. Returns the sum for its parent.
pub fn encode_index(
    page: &mut Page,
    level: u8,
    stamp: &PageStamp,
    entry: impl Fn(usize) -> PageRef,
) -> u64 {
    let mut used = 0;
    if let Ok(raw) = RawIndex::mut_from_bytes(&mut page.0) {
        for (index, slot) in raw.entries.iter_mut().enumerate() {
            let reference = entry(index);
            used += u16::from(!reference.is_none());
            *slot = RawRef::new(reference);
        }
    }
    seal(page, PageKind::Index, level, used, stamp)
}

/// Checks an index page and every reference of it.
pub fn decode_index<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
    place: Place,
) -> Result<IndexPage<'a>, FormatError> {
    try_decode(bytes, expect, limits)
        .map_err(|problem| problem.of(PageKind::Index.structure(), place))
}

fn try_decode<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
) -> Result<IndexPage<'a>, Problem> {
    let header = try_open(bytes, expect)?;
    let raw = RawIndex::ref_from_bytes(bytes).map_err(|_| short(bytes))?;
    let mut used = 0;
    for entry in &raw.entries {
        let reference = entry.get();
        limits.check_ref(reference)?;
        used += u64::from(!reference.is_none());
    }
    if used != u64::from(header.entries) {
        let found = u64::from(header.entries);
        return Err(Problem::Mismatch { field: "entries in use", found, expected: used });
    }
    Ok(IndexPage { header, entries: &raw.entries })
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawIndex {
    header: RawHeader,
    entries: [RawRef; ENTRIES],
}

const _: () = assert!(size_of::<RawIndex>() == PAGE_SIZE);

/// A [`PageRef`] on media.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawRef {
    address: U64,
    sum: U64,
}

impl RawRef {
    pub(crate) fn new(reference: PageRef) -> Self {
        Self { address: reference.address.0.into(), sum: reference.sum.into() }
    }

    pub(crate) fn get(&self) -> PageRef {
        PageRef { address: PageAddress(self.address.get()), sum: self.sum.get() }
    }
}
