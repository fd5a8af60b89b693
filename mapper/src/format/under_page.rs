//! Under pages: the bases of a leaf's composite entries, at the same places as in the leaf.

use crate::entry::{Composite, Entry};
use crate::format::leaf_page::{ENTRIES, LeafEntry, LeafPage, RawEntry, fill, plain_entries};
use crate::format::page::{PageExpect, PageHeader, PageKind, PageStamp, seal, try_open};
use crate::format::{FormatError, Limits, Place, Problem};
use crate::io::Page;
use crate::mapping::Mapping;
use crate::units::PhysicalExtent;

/// An under page whose every entry has been checked, also against its leaf.
#[derive(Debug, Clone, Copy)]
pub struct UnderPage<'a> {
    header: PageHeader,
    entries: &'a [RawEntry; ENTRIES],
}

impl<'a> UnderPage<'a> {
    /// The page's header.
    #[must_use]
    pub const fn header(&self) -> &PageHeader {
        &self.header
    }

    /// The base of a composite entry with its valid sub-blocks; unmapped for any other entry.
    #[must_use]
    pub fn entry(&self, index: usize) -> Mapping {
        self.entries.get(index).map_or_else(Mapping::default, RawEntry::mapping)
    }

    /// The bases of all 256 entries.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Mapping> + 'a {
        self.entries.iter().map(RawEntry::mapping)
    }

    /// All 256 whole entries of the leaf that the page was checked against.
    pub fn whole(&self, leaf: &LeafPage<'a>) -> impl ExactSizeIterator<Item = Entry> + use<'a> {
        leaf.iter().zip(self.entries).map(|(entry, under)| match entry {
            LeafEntry::Plain(mapping) => mapping.into(),
            LeafEntry::Overlay { overlay, top } => {
                let (base, under) = (under.physical(), under.valid());
                Entry::Composite(Composite { overlay, top, base, under })
            }
        })
    }
}

/// Writes and seals an under page. `base` is mapped exactly where the leaf's entry is composite.
/// Returns the sum for the leaf.
pub fn encode_under(page: &mut Page, stamp: &PageStamp, base: impl Fn(usize) -> Mapping) -> u64 {
    let used = fill(page, base);
    seal(page, PageKind::Under, 0, used, stamp)
}

/// Checks an under page, every entry of it, and that it belongs to its leaf: `overlay` has the
/// overlays of the leaf's composite entries.
pub fn decode_under<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
    place: Place,
    overlay: impl Fn(usize) -> Option<PhysicalExtent>,
) -> Result<UnderPage<'a>, FormatError> {
    try_decode(bytes, expect, limits, overlay)
        .map_err(|problem| problem.of(PageKind::Under.structure(), place))
}

fn try_decode<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
    overlay: impl Fn(usize) -> Option<PhysicalExtent>,
) -> Result<UnderPage<'a>, Problem> {
    let header = try_open(bytes, expect)?;
    if !limits.has_composite() {
        let found = u64::from(PageKind::Under as u8);
        return Err(Problem::UnsupportedKind { what: "page kind", found });
    }
    let entries = plain_entries(bytes, &header, limits)?;
    for (index, entry) in entries.iter().enumerate() {
        let found = entry.mapping().physical;
        let allowed = match (overlay(index), found) {
            (None, None) => continue,
            (Some(overlay), Some(base)) if overlay != base => continue,
            (Some(_), Some(_)) => "another extent than the overlay",
            (Some(_), None) => "mapped under a composite entry",
            (None, Some(_)) => "unmapped where the leaf's entry is not composite",
        };
        return Err(Problem::entry(index, "base", found.map_or(0, |base| base.0), allowed));
    }
    Ok(UnderPage { header, entries })
}
