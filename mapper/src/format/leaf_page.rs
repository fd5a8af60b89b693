//! Leaf pages: 256 entries of 14 bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::page::{
    PageExpect, PageHeader, PageKind, PageStamp, RawHeader, seal, short, try_open,
};
use crate::format::{FormatError, Limits, Place, Problem, check_reserved};
use crate::geometry::{LEAF_ENTRIES, MAX_PHYSICAL_EXTENTS, PAGE_SIZE};
use crate::io::Page;
use crate::mapping::Mapping;
use crate::units::PhysicalExtent;

const ENTRIES: usize = 256;
const _: () = assert!(ENTRIES as u64 == LEAF_ENTRIES);
const KIND_MAPPED: u64 = 1;
/// Reserved for entries that lie over another extent.
const KIND_COMPOSITE: u64 = 2;
const KIND_SHIFT: u32 = 40;
const PHYSICAL_MASK: u64 = MAX_PHYSICAL_EXTENTS - 1;
/// The six bytes of extent and kind in a word.
const WORD_MASK: u64 = (1 << 48) - 1;

/// A leaf page whose every entry has been checked.
#[derive(Debug, Clone, Copy)]
pub struct LeafPage<'a> {
    header: PageHeader,
    entries: &'a [RawEntry; ENTRIES],
}

impl<'a> LeafPage<'a> {
    /// The page's header.
    #[must_use]
    pub const fn header(&self) -> &PageHeader {
        &self.header
    }

    /// Entries that are mapped.
    #[must_use]
    pub const fn mapped(&self) -> u32 {
        self.header.entries as u32
    }

    /// An entry; unmapped beyond the last.
    #[must_use]
    pub fn entry(&self, index: usize) -> Mapping {
        self.entries.get(index).map_or_else(Mapping::default, RawEntry::mapping)
    }

    /// All 256 entries.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Mapping> + 'a {
        self.entries.iter().map(RawEntry::mapping)
    }
}

/// Writes and seals a leaf page. Returns the sum for its parent.
pub fn encode_leaf(page: &mut Page, stamp: &PageStamp, entry: impl Fn(usize) -> Mapping) -> u64 {
    let mut mapped = 0;
    if let Ok(raw) = RawLeaf::mut_from_bytes(&mut page.0) {
        for (index, slot) in raw.entries.iter_mut().enumerate() {
            let mapping = entry(index);
            mapped += u16::from(mapping.physical.is_some());
            *slot = RawEntry::new(mapping);
        }
        raw.reserved.fill(0);
    }
    seal(page, PageKind::Leaf, 0, mapped, stamp)
}

/// Checks a leaf page and every entry of it.
pub fn decode_leaf<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
    place: Place,
) -> Result<LeafPage<'a>, FormatError> {
    try_decode(bytes, expect, limits)
        .map_err(|problem| problem.of(PageKind::Leaf.structure(), place))
}

fn try_decode<'a>(
    bytes: &'a [u8],
    expect: &PageExpect,
    limits: &Limits,
) -> Result<LeafPage<'a>, Problem> {
    let header = try_open(bytes, expect)?;
    let raw = RawLeaf::ref_from_bytes(bytes).map_err(|_| short(bytes))?;
    let (mut mapped, mut faults) = (0, 0);
    // One pass without branches over the entries; which of them is wrong is found out only when
    // one is.
    for entry in &raw.entries {
        let word = entry.word();
        mapped += word >> KIND_SHIFT & 1;
        faults |= fault_bits(word, entry.valid(), limits);
    }
    if faults != 0 {
        return Err(first_fault(&raw.entries, limits));
    }
    if mapped != u64::from(header.entries) {
        let found = u64::from(header.entries);
        return Err(Problem::Mismatch { field: "entries in use", found, expected: mapped });
    }
    check_reserved(&raw.reserved, PAGE_SIZE - raw.reserved.len())?;
    Ok(LeafPage { header, entries: &raw.entries })
}

/// Bits that are set only in an entry that isn't sound.
#[inline]
fn fault_bits(word: u64, valid: u64, limits: &Limits) -> u64 {
    let (kind, physical) = (word >> KIND_SHIFT, word & PHYSICAL_MASK);
    let mapped = (kind & KIND_MAPPED).wrapping_neg();
    let outside = u64::from(!limits.allows_physical(PhysicalExtent(physical)));
    (kind & !KIND_MAPPED)
        | (mapped & outside)
        | (!mapped & (physical | valid))
        | limits.excess(valid)
}

#[cold]
fn first_fault(entries: &[RawEntry; ENTRIES], limits: &Limits) -> Problem {
    for (index, entry) in entries.iter().enumerate() {
        let (word, valid) = (entry.word(), entry.valid());
        if fault_bits(word, valid, limits) == 0 {
            continue;
        }
        return match word >> KIND_SHIFT {
            0 if valid != 0 => Problem::entry(index, "bitmap", valid, "0 where nothing is mapped"),
            0 => Problem::entry(index, "extent", word, "0 where nothing is mapped"),
            KIND_MAPPED if limits.allows_bits(valid) => {
                Problem::entry(index, "extent", word & PHYSICAL_MASK, "an extent of the pool")
            }
            KIND_MAPPED => Problem::entry(index, "bitmap", valid, "within the sub-blocks"),
            KIND_COMPOSITE => {
                Problem::UnsupportedKind { what: "entry kind", found: KIND_COMPOSITE }
            }
            kind => Problem::entry(index, "kind", kind, "0 or 1"),
        };
    }
    Problem::field("entries", 0, "sound")
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLeaf {
    header: RawHeader,
    entries: [RawEntry; ENTRIES],
    reserved: [u8; 448],
}

const _: () = assert!(size_of::<RawLeaf>() == PAGE_SIZE);

/// 40 bits of physical extent, 8 bits of kind, the bitmap. As bytes, because both parts are read
/// as whole words, of which the first overlaps the second.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry([u8; 14]);

impl RawEntry {
    fn new(mapping: Mapping) -> Self {
        let Some(physical) = mapping.physical else { return Self([0; 14]) };
        let word = physical.0 & PHYSICAL_MASK | KIND_MAPPED << KIND_SHIFT;
        // Put together in registers: two stores that overlap would be slow to read again.
        let bits = u128::from(word) | u128::from(mapping.valid) << 48;
        let mut bytes = [0; 14];
        bytes.copy_from_slice(&bits.to_le_bytes()[..14]);
        Self(bytes)
    }

    #[inline]
    fn word(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) & WORD_MASK
    }

    #[inline]
    fn valid(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    fn mapping(&self) -> Mapping {
        let word = self.word();
        if word >> KIND_SHIFT == 0 {
            return Mapping::default();
        }
        Mapping { physical: Some(PhysicalExtent(word & PHYSICAL_MASK)), valid: self.valid() }
    }
}
