//! The list of volumes as the catalogue holds it: which place each has, and which pages have
//! changed. Every change takes the same time however many volumes there are.

use std::collections::BTreeSet;

use crate::format::catalogue::RECORDS_PER_PAGE;
use crate::units::{PageAddress, VolumeId};

use super::tree::PageTree;

/// The list of volumes as the catalogue holds it.
#[derive(Debug)]
pub(crate) struct Catalogue {
    pub(crate) tree: PageTree,
    /// Volumes by place in the catalogue.
    places: Vec<Option<VolumeId>>,
    /// Places without a volume.
    free: BTreeSet<usize>,
    /// Pages, of 15 places, whose records have changed.
    dirty: BTreeSet<usize>,
}

impl Catalogue {
    /// A catalogue with room for this many volumes, without any.
    pub(crate) fn new(places: usize) -> Self {
        let pages = (places as u64).div_ceil(RECORDS_PER_PAGE);
        Self {
            tree: PageTree::new(0, pages, 0),
            places: vec![None; places],
            free: (0..places).collect(),
            dirty: BTreeSet::new(),
        }
    }

    pub(crate) const fn place_count(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn page_count(&self) -> u64 {
        (self.places.len() as u64).div_ceil(RECORDS_PER_PAGE)
    }

    /// The volume at a place.
    pub(crate) fn at(&self, place: usize) -> Option<VolumeId> {
        *self.places.get(place)?
    }

    /// Puts a volume at a place as it was read from the media. `false` if there is no such place.
    pub(crate) fn install(&mut self, place: usize, id: VolumeId) -> bool {
        let Some(slot) = self.places.get_mut(place) else { return false };
        *slot = Some(id);
        self.free.remove(&place);
        true
    }

    /// Whether its pages have places for this many new volumes.
    pub(crate) fn has_places(&self, count: usize) -> bool {
        let places = (self.places.len() - self.free.len() + count) as u64;
        places <= self.page_count() * RECORDS_PER_PAGE
    }

    /// Gives a new volume the first free place, or one behind the last.
    pub(crate) fn add(&mut self, id: VolumeId, dead: &mut Vec<PageAddress>) -> usize {
        let place = self.free.pop_first().unwrap_or(self.places.len());
        if place == self.places.len() {
            self.places.push(None);
        }
        self.places[place] = Some(id);
        let pages = self.page_count();
        if pages > self.tree.page_count() {
            let old = std::mem::replace(&mut self.tree, PageTree::new(0, 1, 0));
            self.tree = old.resized(pages, 0, dead);
        }
        self.mark(place);
        place
    }

    /// The volume at this place is gone.
    pub(crate) fn remove(&mut self, place: usize) {
        self.places[place] = None;
        self.free.insert(place);
        self.mark(place);
    }

    /// Notes that the record at a place has changed.
    pub(crate) fn mark(&mut self, place: usize) {
        self.dirty.insert(place / usize::try_from(RECORDS_PER_PAGE).unwrap_or(1));
    }

    /// Notes the pages at such addresses as changed, with those of the index. Returns whether there
    /// were any.
    pub(crate) fn rewrite(&mut self, at: impl Fn(PageAddress) -> bool + Copy) -> bool {
        let pages = usize::try_from(self.page_count()).unwrap_or(usize::MAX);
        let moved: Vec<usize> =
            (0..pages).filter(|page| at(self.tree.get(*page as u64).address)).collect();
        self.dirty.extend(&moved);
        self.tree.rewrite(at) || !moved.is_empty()
    }

    /// The first page that has changed.
    pub(crate) fn first_dirty(&self) -> Option<usize> {
        self.dirty.first().copied()
    }

    /// Notes that a page is written as it is now.
    pub(crate) fn clean(&mut self, page: usize) {
        self.dirty.remove(&page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_and_their_pages_written() {
        let mut catalogue = Catalogue::new(2);
        let mut dead = Vec::new();
        assert!(catalogue.install(1, VolumeId(7)) && !catalogue.install(2, VolumeId(8)));
        assert_eq!(catalogue.first_dirty(), None, "as it is on the media");
        assert_eq!([8, 9].map(|id| catalogue.add(VolumeId(id), &mut dead)), [0, 2]);
        let more: Vec<usize> = (20..40).map(|id| catalogue.add(VolumeId(id), &mut dead)).collect();
        assert_eq!((more[0], more[19]), (3, 22));
        assert_eq!((catalogue.page_count(), catalogue.tree.page_count()), (2, 2));
        for page in [0, 1] {
            assert_eq!(catalogue.first_dirty(), Some(page));
            catalogue.clean(page);
        }
        catalogue.remove(16);
        catalogue.remove(1);
        assert_eq!((catalogue.at(1), catalogue.at(0)), (None, Some(VolumeId(8))));
        assert_eq!(catalogue.first_dirty(), Some(0));
        assert_eq!([50, 51].map(|id| catalogue.add(VolumeId(id), &mut dead)), [1, 16]);
    }
}
