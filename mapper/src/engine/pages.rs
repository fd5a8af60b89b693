//! Metadata pages: whole extents of the pool, cut into pages of 4 KiB.

use std::collections::BTreeMap;

use crate::format::superblock::Leaving;
use crate::geometry::Geometry;
use crate::pool::FreeSpace;
use crate::units::{PageAddress, PhysicalExtent};

/// Most pages of an extent: 1 MiB of 4 KiB, four words of bits.
const WORDS: usize = 4;

/// Pages of one metadata extent.
#[derive(Clone, Copy, Debug)]
struct PageExtent {
    used: [u64; WORDS],
    /// Whether the extent belongs to the reserved run for metadata, which is never returned.
    reserve: bool,
    /// Whether its pages are for the next checkpoint only: the map that the running one writes may
    /// name the extent yet.
    is_for_next: bool,
}

/// Which pages of the metadata extents are in use. Derived at load, never stored.
#[derive(Debug)]
pub(crate) struct PageSpace {
    geometry: Geometry,
    extents: BTreeMap<PhysicalExtent, PageExtent>,
    free: u64,
    cursor: PhysicalExtent,
    reserve_pages: u64,
    /// Extents that are leaving: none of their pages is given out, or counted as free.
    leaving: Option<Leaving>,
}

impl PageSpace {
    pub(crate) fn new(geometry: Geometry) -> Self {
        let (extents, cursor) = (BTreeMap::new(), PhysicalExtent(0));
        Self { geometry, extents, free: 0, cursor, reserve_pages: 0, leaving: None }
    }

    /// Gives out no page of these extents from now on. Their free pages stop counting.
    pub(crate) fn leave(&mut self, leaving: Option<Leaving>) {
        self.free += self.free_on_leaving();
        self.leaving = leaving;
        self.free -= self.free_on_leaving();
    }

    fn is_leaving(&self, extent: PhysicalExtent) -> bool {
        self.leaving.is_some_and(|leaving| leaving.holds(extent))
    }

    /// Free pages of leaving extents.
    pub(crate) fn free_on_leaving(&self) -> u64 {
        let leaving = self.extents.iter().filter(|(one, _)| self.is_leaving(**one));
        leaving.map(|(_, pages)| self.geometry.pages_per_extent() - ones(&pages.used)).sum()
    }

    /// Returns the leaving extents that have no page in use.
    pub(crate) fn leave_empty(&mut self, space: &mut FreeSpace) -> u64 {
        let Some(leaving) = self.leaving else { return 0 };
        let before = self.extents.len();
        self.extents.retain(|extent, pages| {
            let is_empty = leaving.holds(*extent) && ones(&pages.used) == 0;
            if is_empty {
                space.free(*extent, 1);
            }
            !is_empty
        });
        (before - self.extents.len()) as u64
    }

    pub(crate) fn add_extent(&mut self, extent: PhysicalExtent, reserve: bool) {
        let page_extent = PageExtent { used: [0; WORDS], reserve, is_for_next: false };
        if self.extents.insert(extent, page_extent).is_none() {
            self.free += self.geometry.pages_per_extent();
        }
        if reserve {
            self.reserve_pages += self.geometry.pages_per_extent();
        }
    }

    /// Adds an extent that was freed since the cut of the running checkpoint, whose pages that
    /// checkpoint cannot take (R17e). They count as free.
    pub(crate) fn add_for_next(&mut self, extent: PhysicalExtent) {
        self.add_extent(extent, false);
        if let Some(pages) = self.extents.get_mut(&extent) {
            pages.is_for_next = true;
        }
    }

    /// The running checkpoint has ended.
    pub(crate) fn checkpoint_ended(&mut self) {
        for pages in self.extents.values_mut() {
            pages.is_for_next = false;
        }
    }

    /// Notes a page in use, its extent too. `false` if it was noted before.
    pub(crate) fn mark_used(&mut self, address: PageAddress) -> bool {
        let (extent, page) = self.geometry.page_place(address);
        if !self.extents.contains_key(&extent) {
            self.add_extent(extent, false);
        }
        let Some(pages) = self.extents.get_mut(&extent) else { return false };
        let (word, bit) = split(page);
        let fresh = pages.used[word] & bit == 0;
        pages.used[word] |= bit;
        let counts = self.leaving.is_none_or(|leaving| !leaving.holds(extent));
        self.free -= u64::from(fresh && counts);
        fresh
    }

    /// Frees a page that no superblock copy refers to any more.
    pub(crate) fn free(&mut self, address: PageAddress) {
        let (extent, page) = self.geometry.page_place(address);
        let counts = !self.is_leaving(extent);
        if let Some(pages) = self.extents.get_mut(&extent) {
            let (word, bit) = split(page);
            debug_assert!(pages.used[word] & bit != 0, "page {address} freed twice");
            self.free += u64::from(counts && pages.used[word] & bit != 0);
            pages.used[word] &= !bit;
        }
    }

    /// A run of up to `max` free pages that lie in a row.
    pub(crate) fn allocate(&mut self, max: u64) -> Option<(PageAddress, u64)> {
        let pages = self.geometry.pages_per_extent();
        let after = self.extents.range(self.cursor..).map(|(&e, _)| e);
        let before = self.extents.range(..self.cursor).map(|(&e, _)| e);
        let full = |extent: &PhysicalExtent| {
            self.is_leaving(*extent)
                || self.extents.get(extent).is_none_or(|p| p.is_for_next || ones(&p.used) == pages)
        };
        let extent = after.chain(before).find(|extent| !full(extent))?;
        self.cursor = extent;
        let used = &mut self.extents.get_mut(&extent)?.used;
        let is_used = |used: &[u64; WORDS], page: u64| used[split(page).0] & split(page).1 != 0;
        let first = (0..pages).find(|&page| !is_used(used, page))?;
        let mut count = 0;
        while count < max && first + count < pages && !is_used(used, first + count) {
            let (word, bit) = split(first + count);
            used[word] |= bit;
            count += 1;
        }
        self.free -= count;
        Some((self.geometry.page_address(extent, first), count))
    }

    /// Returns the pages of a run that were not needed.
    pub(crate) fn free_run(&mut self, first: PageAddress, count: u64) {
        for page in 0..count {
            self.free(PageAddress(first.0 + page));
        }
    }

    /// Returns extents without a page in use to the pool, as long as `keep` free pages stay.
    pub(crate) fn shrink(&mut self, keep: u64, space: &mut FreeSpace) -> u64 {
        let pages = self.geometry.pages_per_extent();
        let spare = self.free.saturating_sub(keep) / pages;
        let mut given = 0;
        // One by one: a list of them would be an allocation after each checkpoint.
        while given < spare {
            let empty = |(extent, p): &(&PhysicalExtent, &PageExtent)| {
                !p.reserve && ones(&p.used) == 0 && !self.is_leaving(**extent)
            };
            let Some(extent) = self.extents.iter().find(empty).map(|(&extent, _)| extent) else {
                break;
            };
            self.extents.remove(&extent);
            self.free -= pages;
            space.free(extent, 1);
            given += 1;
        }
        given
    }

    /// Whether an extent holds pages, or is kept for such.
    pub(crate) fn contains(&self, extent: PhysicalExtent) -> bool {
        self.extents.contains_key(&extent)
    }

    pub(crate) const fn free_pages(&self) -> u64 {
        self.free
    }

    pub(crate) const fn reserve_pages(&self) -> u64 {
        self.reserve_pages
    }

    pub(crate) fn extents(&self) -> impl Iterator<Item = PhysicalExtent> + '_ {
        self.extents.keys().copied()
    }

    pub(crate) fn extent_count(&self) -> u64 {
        self.extents.len() as u64
    }

    pub(crate) fn used_pages(&self) -> u64 {
        self.extents.values().map(|p| ones(&p.used)).sum()
    }
}

fn split(page: u64) -> (usize, u64) {
    (usize::try_from(page / 64).unwrap_or(WORDS) % WORDS, 1 << (page % 64))
}

fn ones(used: &[u64; WORDS]) -> u64 {
    used.iter().map(|word| u64::from(word.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_given_and_taken_back() {
        let mut pages = PageSpace::new(Geometry::new(64 << 10).unwrap());
        pages.add_extent(PhysicalExtent(5), true);
        pages.add_extent(PhysicalExtent(9), false);
        assert!(pages.mark_used(PageAddress(5 * 16 + 2)));
        assert!(!pages.mark_used(PageAddress(5 * 16 + 2)));
        assert_eq!(pages.allocate(10), Some((PageAddress(80), 2)));
        assert_eq!(pages.allocate(100), Some((PageAddress(83), 13)));
        assert_eq!(pages.allocate(3), Some((PageAddress(144), 3)));
        assert_eq!(pages.free_pages(), 13);
        pages.free_run(PageAddress(144), 3);
        let mut space = FreeSpace::default();
        assert_eq!(pages.shrink(0, &mut space), 1);
        assert_eq!((pages.free_pages(), pages.reserve_pages()), (0, 16));
    }

    #[test]
    fn pages_for_the_next_checkpoint_are_free_and_not_given_out() {
        let mut pages = PageSpace::new(Geometry::new(64 << 10).unwrap());
        pages.add_for_next(PhysicalExtent(7));
        assert_eq!((pages.free_pages(), pages.allocate(1)), (16, None));
        pages.checkpoint_ended();
        assert_eq!(pages.allocate(1), Some((PageAddress(7 * 16), 1)));
    }
}
