//! The index trees of all volumes, with the sums over them that each poll of the engine needs: a
//! pool may have thousands of volumes.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::MAX_LEVELS;
use crate::units::{PageAddress, VolumeId};

use super::tree::PageTree;

/// The index of one volume's leaves, and its place in the catalogue.
#[derive(Debug)]
pub(crate) struct VolumeTree {
    pub(crate) tree: PageTree,
    pub(crate) place: usize,
}

/// All of them, by volume.
#[derive(Debug, Default)]
pub(crate) struct Trees {
    by_volume: BTreeMap<VolumeId, VolumeTree>,
    slots: u64,
    most_pages: u64,
    /// How many trees have each number of levels.
    by_levels: [usize; MAX_LEVELS as usize + 1],
    /// Trees that a checkpoint has to write, some perhaps without a change.
    changed: BTreeSet<VolumeId>,
}

impl Trees {
    pub(crate) fn insert(&mut self, id: VolumeId, tree: VolumeTree) {
        self.remove(id);
        self.count(&tree.tree, true);
        self.by_volume.insert(id, tree);
    }

    pub(crate) fn remove(&mut self, id: VolumeId) -> Option<VolumeTree> {
        let tree = self.by_volume.remove(&id)?;
        self.count(&tree.tree, false);
        self.changed.remove(&id);
        Some(tree)
    }

    pub(crate) fn get(&self, id: VolumeId) -> Option<&VolumeTree> {
        self.by_volume.get(&id)
    }

    /// A volume's tree, whose references may be changed, but not its size. The next checkpoint
    /// writes the changes.
    pub(crate) fn change(&mut self, id: VolumeId) -> Option<&mut PageTree> {
        let tree = self.by_volume.get_mut(&id)?;
        self.changed.insert(id);
        Some(&mut tree.tree)
    }

    /// The same, for changes that a running checkpoint writes, or that are on the media already.
    pub(crate) fn get_mut(&mut self, id: VolumeId) -> Option<&mut PageTree> {
        self.by_volume.get_mut(&id).map(|one| &mut one.tree)
    }

    /// Puts another tree in the place of a volume's, made of it.
    pub(crate) fn replace(
        &mut self,
        id: VolumeId,
        make: impl FnOnce(PageTree) -> PageTree,
    ) -> Option<&PageTree> {
        let VolumeTree { tree, place } = self.remove(id)?;
        self.insert(id, VolumeTree { tree: make(tree), place });
        self.changed.insert(id);
        self.get(id).map(|one| &one.tree)
    }

    /// Index pages, as they are on the media, at such addresses.
    pub(crate) fn count_pages(&self, at: impl Fn(PageAddress) -> bool + Copy) -> u64 {
        self.by_volume
            .values()
            .map(|one| one.tree.addresses().filter(|a| at(*a)).count() as u64)
            .sum()
    }

    /// Has the next checkpoint write the pages at such addresses elsewhere.
    pub(crate) fn rewrite(&mut self, at: impl Fn(PageAddress) -> bool + Copy) {
        for (id, one) in &mut self.by_volume {
            if one.tree.rewrite(at) {
                self.changed.insert(*id);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_volume.len()
    }

    /// Takes the volumes whose trees have changed since the last time, by id.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<VolumeId> {
        std::mem::take(&mut self.changed)
    }

    /// Slots of all volumes.
    pub(crate) const fn slots(&self) -> u64 {
        self.slots
    }

    /// Index pages if everything were mapped.
    pub(crate) const fn most_pages(&self) -> u64 {
        self.most_pages
    }

    /// Levels of the highest tree.
    pub(crate) fn levels(&self) -> u64 {
        self.by_levels.iter().rposition(|count| *count > 0).map_or(1, |levels| levels as u64)
    }

    fn count(&mut self, tree: &PageTree, is_there: bool) {
        let counts = &mut self.by_levels[tree.level_count().min(usize::from(MAX_LEVELS))];
        if is_there {
            self.slots += tree.page_count();
            self.most_pages += tree.most_pages();
            *counts += 1;
        } else {
            self.slots -= tree.page_count();
            self.most_pages -= tree.most_pages();
            *counts -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_trees_that_are_there() {
        let mut all = Trees::default();
        let tree = |pages| VolumeTree { tree: PageTree::new(1, pages, 1), place: 0 };
        let sums = |all: &Trees| (all.slots(), all.most_pages(), all.levels(), all.len());
        assert_eq!(sums(&all), (0, 0, 1, 0));
        all.insert(VolumeId(1), tree(10));
        all.insert(VolumeId(2), tree(1000));
        // Four pages below one; the other has one.
        assert_eq!(sums(&all), (1010, 6, 2, 2));
        all.insert(VolumeId(1), tree(20));
        assert_eq!(sums(&all), (1020, 6, 2, 2));
        assert!(all.take_changed().is_empty(), "a new tree has no pages");
        all.replace(VolumeId(2), |old| old.resized(252, 1, &mut Vec::new()));
        assert_eq!(sums(&all), (272, 2, 1, 2));
        assert!(all.get_mut(VolumeId(1)).is_some() && all.change(VolumeId(1)).is_some());
        assert_eq!(all.take_changed(), BTreeSet::from([1, 2].map(VolumeId)));
        assert!(all.change(VolumeId(1)).is_some() && all.change(VolumeId(9)).is_none());
        assert!(all.remove(VolumeId(1)).is_some() && all.remove(VolumeId(1)).is_none());
        assert_eq!(sums(&all), (252, 1, 1, 1));
        assert!(all.take_changed().is_empty(), "it is gone");
    }
}
