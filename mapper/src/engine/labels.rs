//! The pages of labels: one for each volume that has any, by the volume's place in the catalogue,
//! below a tree of their own.
//!
//! The tree hangs from the superblock and not from the records: a release that does not know labels
//! leaves them out of its first superblock, before it may use their pages for something else.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::MapperError;
use crate::format::{Labels, PageRef, label_levels};
use crate::geometry::PAGE_BYTES;
use crate::units::{PageAddress, VolumeId};

use super::Engine;
use super::control::Outcome;
use super::tree::PageTree;

/// Which page each place of the catalogue has for labels, and which of them have changed.
#[derive(Debug)]
pub(crate) struct LabelPages {
    pub(crate) tree: PageTree,
    /// Places whose labels are to be written.
    changed: BTreeSet<usize>,
}

impl LabelPages {
    /// The pages of a catalogue with this many places, without any.
    pub(crate) fn new(places: usize) -> Self {
        Self { tree: PageTree::new(0, places as u64, 1), changed: BTreeSet::new() }
    }

    /// The catalogue has this many places from now on.
    pub(crate) fn grow(&mut self, places: usize, dead: &mut Vec<PageAddress>) {
        let places = places as u64;
        if usize::from(label_levels(places)) == self.tree.level_count() {
            self.tree.extend(places);
        } else {
            let old = std::mem::replace(&mut self.tree, PageTree::new(0, 1, 1));
            self.tree = old.resized(places, 1, dead);
        }
    }

    /// Notes that the labels of a place have changed.
    pub(crate) fn mark(&mut self, place: usize) {
        self.changed.insert(place);
    }

    /// The volume at this place is gone, and its labels with it.
    pub(crate) fn remove(&mut self, place: usize, dead: &mut Vec<PageAddress>) {
        self.changed.remove(&place);
        let old = self.tree.get(place as u64);
        if !old.is_none() {
            dead.push(old.address);
            self.tree.set(place as u64, PageRef::NONE);
        }
    }

    /// The first place whose labels are to be written.
    pub(crate) fn first_changed(&self) -> Option<usize> {
        self.changed.first().copied()
    }

    /// Notes the page that a place's labels are written to, or that it has none. Returns the former
    /// page.
    pub(crate) fn written(&mut self, place: usize, to: PageRef) -> PageRef {
        self.changed.remove(&place);
        let old = self.tree.get(place as u64);
        self.tree.set(place as u64, to);
        old
    }

    /// The most pages that the next checkpoint writes for labels: a deleted volume changes the
    /// index too.
    pub(crate) fn pages_to_write(&self) -> u64 {
        let (changed, levels) = (self.changed.len() as u64, self.tree.level_count() as u64);
        let index = self.tree.present_pages() + changed * levels;
        changed + index.min(self.tree.most_pages())
    }

    /// Has the next checkpoint write the pages at such addresses elsewhere. Returns whether there
    /// are any that it would not have written.
    fn rewrite(&mut self, at: impl Fn(PageAddress) -> bool + Copy) -> bool {
        let before = self.changed.len();
        let moved: Vec<_> = self.tree.entries().filter(|(_, page)| at(page.address)).collect();
        self.changed.extend(moved.iter().filter_map(|(place, _)| usize::try_from(*place).ok()));
        self.tree.rewrite(at) || self.changed.len() > before
    }
}

impl Engine {
    /// Gives a volume or snapshot these labels, in place of all that it has. They are durable with
    /// the next checkpoint.
    pub(super) fn label(&mut self, id: VolumeId, labels: &Labels) -> Result<Outcome, MapperError> {
        let volume = self.pool.volume(id)?;
        let before = volume.labels();
        if before == *labels {
            return Ok(Outcome::Unchanged);
        }
        let place = self.trees.get(id).ok_or(MapperError::Internal("a volume without a tree"))?;
        let place = place.place;
        let was_changed = self.labels.changed.contains(&place);
        self.labels.mark(place);
        // The page is found before it is promised: the checkpoint cannot fail for lack of one. One
        // that stays in use is not taken from the reserve, which is for changes that free space.
        let is_new = self.labels.tree.get(place as u64).is_none();
        let reserve = if is_new { self.pages.reserve_pages() } else { 0 };
        let has_room = self.make_pages_beside(0, reserve);
        if !has_room {
            if !was_changed {
                self.labels.changed.remove(&place);
            }
            self.update_limits();
            return Err(MapperError::NoSpace { needed: PAGE_BYTES, free: 0 });
        }
        self.update_limits();
        volume.set_labels(labels.clone());
        Ok(Outcome::Labelled { before })
    }

    /// Has the next checkpoint write the pages of labels that lie at such addresses elsewhere, if
    /// there is room. Returns whether it has to; `None` if there is no room.
    pub(super) fn move_labels(&mut self, at: impl Fn(PageAddress) -> bool + Copy) -> Option<bool> {
        let before = self.labels.changed.clone();
        if !self.labels.rewrite(at) {
            return Some(false);
        }
        let has_room = self.make_pages(0);
        if !has_room {
            self.labels.changed = before;
        }
        self.update_limits();
        has_room.then_some(true)
    }

    /// The labels of the volume at a place of the catalogue, with its id.
    pub(super) fn labels_at(&self, place: usize) -> (VolumeId, Labels) {
        let id = self.catalogue.at(place).unwrap_or(VolumeId(0));
        let labels = self.pool.volume(id).map(|volume| Arc::clone(&volume).labels());
        (id, labels.unwrap_or_default())
    }
}
