//! Leaf pages: 256 entries of 14 bytes, and where some are composite, a reference to the page
//! with their bases.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::{Composite, Entry};
use crate::format::index_page::RawRef;
use crate::format::page::{
    COMPOSITE_LEAF_VERSION, PageExpect, PageHeader, PageKind, PageStamp, RawHeader, seal,
    seal_version, short, try_open,
};
use crate::format::{
    FormatError, Limits, PageRef, Place, Problem, STRUCTURE_VERSION, check_reserved,
};
use crate::geometry::{LEAF_ENTRIES, MAX_PHYSICAL_EXTENTS, PAGE_SIZE};
use crate::io::Page;
use crate::mapping::Mapping;
use crate::units::PhysicalExtent;

pub(crate) const ENTRIES: usize = 256;
const _: () = assert!(ENTRIES as u64 == LEAF_ENTRIES);
const KIND_MAPPED: u64 = 1;
/// An overlay, whose base is in the under page.
const KIND_COMPOSITE: u64 = 2;
const KIND_SHIFT: u32 = 40;
const PHYSICAL_MASK: u64 = MAX_PHYSICAL_EXTENTS - 1;
/// The six bytes of extent and kind in a word.
const WORD_MASK: u64 = (1 << 48) - 1;
const UNDER_AT: usize = 3648;

/// An entry as far as a leaf page holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafEntry {
    /// The whole entry.
    Plain(Mapping),
    /// The upper half of a composite entry.
    Overlay {
        /// The extent that is read first.
        overlay: PhysicalExtent,
        /// Its valid sub-blocks.
        top: u64,
    },
}

impl From<Entry> for LeafEntry {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::Composite(Composite { overlay, top, .. }) => Self::Overlay { overlay, top },
            Entry::Mapped { physical, valid } => {
                Self::Plain(Mapping { physical: Some(physical), valid })
            }
            Entry::Unmapped => Self::Plain(Mapping::UNMAPPED),
        }
    }
}

/// A leaf page whose every entry has been checked.
#[derive(Debug, Clone, Copy)]
pub struct LeafPage<'a> {
    header: PageHeader,
    under: PageRef,
    entries: &'a [RawEntry; ENTRIES],
}

impl<'a> LeafPage<'a> {
    /// The page's header.
    #[must_use]
    pub const fn header(&self) -> &PageHeader {
        &self.header
    }

    /// Entries that are mapped, composite ones included.
    #[must_use]
    pub const fn mapped(&self) -> u32 {
        self.header.entries as u32
    }

    /// The under page: none exactly where no entry is composite.
    #[must_use]
    pub const fn under(&self) -> PageRef {
        self.under
    }

    /// An entry; unmapped beyond the last.
    #[must_use]
    pub fn entry(&self, index: usize) -> LeafEntry {
        let unmapped = LeafEntry::Plain(Mapping::UNMAPPED);
        self.entries.get(index).map_or(unmapped, RawEntry::leaf_entry)
    }

    /// All 256 entries.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = LeafEntry> + use<'a> {
        self.entries.iter().map(RawEntry::leaf_entry)
    }

    /// The overlay of an entry; `None` for one that isn't composite.
    #[must_use]
    pub fn overlay(&self, index: usize) -> Option<PhysicalExtent> {
        match self.entry(index) {
            LeafEntry::Plain(_) => None,
            LeafEntry::Overlay { overlay, .. } => Some(overlay),
        }
    }

    /// All 256 entries of a leaf without composite ones; `None` for any other leaf.
    #[must_use]
    pub fn plain(&self) -> Option<impl ExactSizeIterator<Item = Mapping> + use<'a>> {
        self.under.is_none().then(|| self.entries.iter().map(RawEntry::mapping))
    }
}

/// Writes and seals a leaf page without composite entries. Returns the sum for its parent.
pub fn encode_leaf(page: &mut Page, stamp: &PageStamp, entry: impl Fn(usize) -> Mapping) -> u64 {
    let mapped = fill(page, entry);
    seal(page, PageKind::Leaf, 0, mapped, stamp)
}

/// Writes and seals a leaf page with composite entries, whose bases lie in the page `under`.
/// Returns the sum for its parent.
///
/// # Panics
///
/// When no entry is composite, or without an under page.
pub fn encode_composite_leaf(
    page: &mut Page,
    stamp: &PageStamp,
    under: PageRef,
    entry: impl Fn(usize) -> LeafEntry,
) -> u64 {
    let (mut mapped, mut composite) = (0, 0);
    if let Ok(raw) = RawLeaf::mut_from_bytes(&mut page.0) {
        for (index, slot) in raw.entries.iter_mut().enumerate() {
            *slot = match entry(index) {
                LeafEntry::Plain(mapping) => RawEntry::new(mapping),
                LeafEntry::Overlay { overlay, top } => {
                    composite += 1;
                    RawEntry::of_kind(KIND_COMPOSITE, overlay, top)
                }
            };
            mapped += u16::from(slot.word() != 0);
        }
        raw.under = RawRef::new(under);
        raw.reserved.fill(0);
    }
    assert!(composite > 0 && !under.is_none(), "an under page, exactly for composite entries");
    seal_version(page, COMPOSITE_LEAF_VERSION, PageKind::Leaf, 0, mapped, stamp)
}

/// Fills in plain entries. Returns how many are mapped.
pub(crate) fn fill(page: &mut Page, entry: impl Fn(usize) -> Mapping) -> u16 {
    let mut mapped = 0;
    if let Ok(raw) = RawLeaf::mut_from_bytes(&mut page.0) {
        for (index, slot) in raw.entries.iter_mut().enumerate() {
            let mapping = entry(index);
            mapped += u16::from(mapping.physical.is_some());
            *slot = RawEntry::new(mapping);
        }
        raw.under = RawRef::new(PageRef::NONE);
        raw.reserved.fill(0);
    }
    mapped
}

/// Checks a leaf page and every entry of it. Composite entries are refused unless the pool may
/// have some.
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
    if header.version != STRUCTURE_VERSION {
        return composite_leaf(bytes, header, limits);
    }
    let entries = plain_entries(bytes, &header, limits)?;
    Ok(LeafPage { header, under: PageRef::NONE, entries })
}

/// Checks a page of 256 plain entries.
pub(crate) fn plain_entries<'a>(
    bytes: &'a [u8],
    header: &PageHeader,
    limits: &Limits,
) -> Result<&'a [RawEntry; ENTRIES], Problem> {
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
        return Err(first_fault(&raw.entries, limits, fault_bits, "0 or 1"));
    }
    check_used(header, mapped)?;
    check_reserved(raw.under.as_bytes(), UNDER_AT)?;
    check_reserved(&raw.reserved, PAGE_SIZE - raw.reserved.len())?;
    Ok(&raw.entries)
}

fn composite_leaf<'a>(
    bytes: &'a [u8],
    header: PageHeader,
    limits: &Limits,
) -> Result<LeafPage<'a>, Problem> {
    if !limits.has_composite() {
        let found = header.version.into();
        return Err(Problem::UnsupportedKind { what: "page version", found });
    }
    let raw = RawLeaf::ref_from_bytes(bytes).map_err(|_| short(bytes))?;
    let (mut mapped, mut composite, mut faults) = (0, 0, 0);
    for entry in &raw.entries {
        let word = entry.word();
        composite += u64::from(word >> KIND_SHIFT == KIND_COMPOSITE);
        mapped += u64::from(word >> KIND_SHIFT != 0);
        faults |= composite_fault_bits(word, entry.valid(), limits);
    }
    if faults != 0 {
        return Err(first_fault(&raw.entries, limits, composite_fault_bits, "0, 1 or 2"));
    }
    check_used(&header, mapped)?;
    if composite == 0 {
        let allowed = "at least 1 in a page of version 2";
        return Err(Problem::field("composite entries", 0, allowed));
    }
    let under = raw.under.get();
    if under.is_none() {
        return Err(Problem::field("under page", 0, "a page in a leaf of version 2"));
    }
    limits.check_ref(under)?;
    check_reserved(&raw.reserved, PAGE_SIZE - raw.reserved.len())?;
    Ok(LeafPage { header, under, entries: &raw.entries })
}

fn check_used(header: &PageHeader, expected: u64) -> Result<(), Problem> {
    let found = u64::from(header.entries);
    if found == expected {
        return Ok(());
    }
    Err(Problem::Mismatch { field: "entries in use", found, expected })
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

/// Where entries may be composite: those keep the rules of mapped ones.
#[inline]
fn composite_fault_bits(word: u64, valid: u64, limits: &Limits) -> u64 {
    let physical = word & PHYSICAL_MASK;
    let plain = match word >> KIND_SHIFT {
        KIND_COMPOSITE => physical | KIND_MAPPED << KIND_SHIFT,
        _ => word,
    };
    fault_bits(plain, valid, limits)
}

#[cold]
fn first_fault(
    entries: &[RawEntry; ENTRIES],
    limits: &Limits,
    fault_bits: fn(u64, u64, &Limits) -> u64,
    kinds: &'static str,
) -> Problem {
    for (index, entry) in entries.iter().enumerate() {
        let (word, valid) = (entry.word(), entry.valid());
        if fault_bits(word, valid, limits) == 0 {
            continue;
        }
        let (kind, physical) = (word >> KIND_SHIFT, word & PHYSICAL_MASK);
        // The first extent of the pool and no bit are always sound.
        let known = fault_bits(kind << KIND_SHIFT, 0, limits) == 0;
        return match kind {
            0 if valid != 0 => Problem::entry(index, "bitmap", valid, "0 where nothing is mapped"),
            0 => Problem::entry(index, "extent", word, "0 where nothing is mapped"),
            KIND_COMPOSITE if !limits.has_composite() => {
                Problem::UnsupportedKind { what: "entry kind", found: KIND_COMPOSITE }
            }
            kind if !known => Problem::entry(index, "kind", kind, kinds),
            _ if limits.allows_bits(valid) => {
                Problem::entry(index, "extent", physical, "an extent of the pool")
            }
            _ => Problem::entry(index, "bitmap", valid, "within the sub-blocks"),
        };
    }
    Problem::field("entries", 0, "sound")
}

/// A leaf page, or an under page.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLeaf {
    header: RawHeader,
    entries: [RawEntry; ENTRIES],
    under: RawRef,
    reserved: [u8; 432],
}

const _: () = {
    assert!(size_of::<RawLeaf>() == PAGE_SIZE);
    assert!(std::mem::offset_of!(RawLeaf, under) == UNDER_AT);
};

/// 40 bits of physical extent, 8 bits of kind, the bitmap. As bytes, because both parts are read
/// as whole words, of which the first overlaps the second.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawEntry([u8; 14]);

impl RawEntry {
    fn new(mapping: Mapping) -> Self {
        let Some(physical) = mapping.physical else { return Self([0; 14]) };
        Self::of_kind(KIND_MAPPED, physical, mapping.valid)
    }

    fn of_kind(kind: u64, physical: PhysicalExtent, valid: u64) -> Self {
        let word = physical.0 & PHYSICAL_MASK | kind << KIND_SHIFT;
        // Put together in registers: two stores that overlap would be slow to read again.
        let bits = u128::from(word) | u128::from(valid) << 48;
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
    pub(crate) fn valid(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// The extent, of a mapped or composite entry.
    pub(crate) fn physical(&self) -> PhysicalExtent {
        PhysicalExtent(self.word() & PHYSICAL_MASK)
    }

    /// A plain entry.
    pub(crate) fn mapping(&self) -> Mapping {
        let word = self.word();
        if word >> KIND_SHIFT == 0 {
            return Mapping::default();
        }
        Mapping { physical: Some(PhysicalExtent(word & PHYSICAL_MASK)), valid: self.valid() }
    }

    fn leaf_entry(&self) -> LeafEntry {
        if self.word() >> KIND_SHIFT == KIND_COMPOSITE {
            return LeafEntry::Overlay { overlay: self.physical(), top: self.valid() };
        }
        LeafEntry::Plain(self.mapping())
    }
}
