//! A tree of index pages in memory, as of the last checkpoint, with the changes since.

use crate::format::index_page::encode_index;
use crate::format::page::PageStamp;
use crate::format::{INDEX_FANOUT, MAX_LEVELS, PageRef};
use crate::io::Page;
use crate::units::PageAddress;

const FANOUT: usize = 252;
const _: () = assert!(FANOUT as u64 == INDEX_FANOUT, "the tree has the format's fan-out");

/// One index page: its references, and the place of its present content.
struct Node {
    entries: [PageRef; FANOUT],
    own: PageRef,
    dirty: bool,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}{}", self.own.address, if self.dirty { " dirty" } else { "" })
    }
}

impl Node {
    fn new() -> Box<Self> {
        Box::new(Self { entries: [PageRef::NONE; FANOUT], own: PageRef::NONE, dirty: false })
    }
}

/// The index of a volume's leaves, or of the catalogue's pages. Nodes exist only where something
/// is mapped.
#[derive(Debug)]
pub(crate) struct PageTree {
    /// Volume id; 0 for the catalogue.
    pub(crate) id: u32,
    /// Pages below the index.
    pages: u64,
    /// From the lowest index level up. The last has one node.
    levels: Vec<Vec<Option<Box<Node>>>>,
    /// For a tree of one page without an index above it.
    single: PageRef,
}

impl PageTree {
    /// Creates a tree for `pages` pages. `min_levels` is 1 for volumes, 0 for the catalogue.
    pub(crate) fn new(id: u32, pages: u64, min_levels: usize) -> Self {
        let mut levels = Vec::new();
        let mut count = pages.max(1);
        while count > 1 || levels.len() < min_levels {
            count = count.div_ceil(INDEX_FANOUT);
            levels.push((0..count).map(|_| None).collect());
        }
        debug_assert!(levels.len() <= usize::from(MAX_LEVELS), "sizes are limited");
        Self { id, pages, levels, single: PageRef::NONE }
    }

    /// Pages that it has room for.
    pub(crate) const fn page_count(&self) -> u64 {
        self.pages
    }

    pub(crate) fn level_count(&self) -> usize {
        self.levels.len()
    }

    /// Index pages if everything were mapped; the most that a checkpoint may have to write.
    pub(crate) fn most_pages(&self) -> u64 {
        self.levels.iter().map(|level| level.len() as u64).sum()
    }

    /// Index pages that a checkpoint would write if all of them had changed.
    pub(crate) fn present_pages(&self) -> u64 {
        let lowest = self.levels.first().map_or(0, |level| level.iter().flatten().count());
        self.levels.iter().map(|level| level.len().min(lowest) as u64).sum()
    }

    /// The reference to the top page.
    pub(crate) fn root(&self) -> PageRef {
        match self.levels.last() {
            Some(top) => top[0].as_ref().map_or(PageRef::NONE, |node| node.own),
            None => self.single,
        }
    }

    /// Index levels as a record names them: 0 when nothing is mapped.
    pub(crate) fn stored_levels(&self) -> u8 {
        if self.root().is_none() { 0 } else { u8::try_from(self.levels.len()).unwrap_or(u8::MAX) }
    }

    /// Each page of the lowest level that there is, with its index.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u64, PageRef)> + '_ {
        let nodes = self.levels.first().into_iter().flatten();
        let nodes = (0_u64..).step_by(FANOUT).zip(nodes);
        let nodes = nodes.filter_map(|(first, node)| Some((first, node.as_ref()?)));
        let entries = nodes.flat_map(|(first, node)| (first..).zip(node.entries));
        entries.filter(|(_, page)| !page.is_none())
    }

    /// Makes room for more pages, which need no more levels.
    pub(crate) fn extend(&mut self, pages: u64) {
        let mut count = pages.max(1);
        for level in &mut self.levels {
            count = count.div_ceil(INDEX_FANOUT);
            let count = usize::try_from(count).unwrap_or(level.len());
            level.resize_with(count.max(level.len()), || None);
        }
        self.pages = self.pages.max(pages);
    }

    /// A page could not be read: nothing refers to it any more. The next checkpoint writes its
    /// parent anew.
    pub(crate) fn forget(&mut self, level: u8, index: u64) {
        self.set_at(usize::from(level), index, PageRef::NONE);
    }

    /// Returns the reference to a page of the lowest level.
    pub(crate) fn get(&self, index: u64) -> PageRef {
        let (node, entry) = place(index);
        match self.levels.first() {
            Some(level) => level[node].as_ref().map_or(PageRef::NONE, |n| n.entries[entry]),
            None => self.single,
        }
    }

    /// Refers to another page from now on.
    pub(crate) fn set(&mut self, index: u64, to: PageRef) {
        self.set_at(0, index, to);
    }

    fn set_at(&mut self, level: usize, index: u64, to: PageRef) {
        let (node, entry) = place(index);
        let Some(nodes) = self.levels.get_mut(level) else {
            self.single = to;
            return;
        };
        let Some(slot) = nodes.get_mut(node) else { return };
        if slot.is_none() && to.is_none() {
            return;
        }
        let node = slot.get_or_insert_with(Node::new);
        if node.entries[entry] != to {
            node.entries[entry] = to;
            node.dirty = true;
        }
    }

    /// The next page of a level to be written; empty nodes are dropped on the way.
    fn take_dirty(
        &mut self,
        level: usize,
        from: usize,
        dead: &mut Vec<PageAddress>,
    ) -> Option<usize> {
        for at in from..self.levels[level].len() {
            let Some(node) = self.levels[level][at].as_mut().filter(|node| node.dirty) else {
                continue;
            };
            node.dirty = false;
            if !node.own.is_none() {
                dead.push(node.own.address);
            }
            if node.entries.iter().all(|entry| entry.is_none()) {
                self.levels[level][at] = None;
                self.set_at(level + 1, at as u64, PageRef::NONE);
                continue;
            }
            return Some(at);
        }
        None
    }

    /// Writes the next changed page into `page`, from `cursor` on; `false` when all are written.
    /// Pages come bottom up, so that a parent is written after all its children are placed.
    pub(crate) fn write_next(
        &mut self,
        cursor: &mut (usize, usize),
        address: PageAddress,
        stamp: &PageStamp,
        page: &mut Page,
        dead: &mut Vec<PageAddress>,
    ) -> bool {
        while cursor.0 < self.levels.len() {
            let (level, from) = *cursor;
            let Some(at) = self.take_dirty(level, from, dead) else {
                *cursor = (level + 1, 0);
                continue;
            };
            *cursor = (level, at + 1);
            let Some(node) = self.levels[level][at].as_mut() else { continue };
            let stamp = PageStamp { index: at as u64, tree: self.id, ..*stamp };
            let number = u8::try_from(level + 1).unwrap_or(u8::MAX);
            let sum = encode_index(page, number, &stamp, |entry| node.entries[entry]);
            node.own = PageRef { address, sum };
            let own = node.own;
            if level + 1 < self.levels.len() {
                self.set_at(level + 1, at as u64, own);
            }
            return true;
        }
        false
    }

    /// Installs a page read from the media. The caller has checked it.
    pub(crate) fn install(
        &mut self,
        level: u8,
        index: u64,
        own: PageRef,
        entry: impl Fn(usize) -> PageRef,
    ) {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let level = usize::from(level).wrapping_sub(1);
        if let Some(slot) = self.levels.get_mut(level).and_then(|nodes| nodes.get_mut(at)) {
            let mut node = Node::new();
            for (index, target) in node.entries.iter_mut().enumerate() {
                *target = entry(index);
            }
            node.own = own;
            *slot = Some(node);
        }
    }

    /// For the catalogue of a single page, read from the media.
    pub(crate) fn install_single(&mut self, own: PageRef) {
        if self.levels.is_empty() {
            self.single = own;
        }
    }

    /// Addresses of all index pages the last checkpoint wrote.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = PageAddress> + '_ {
        self.levels.iter().flatten().flatten().map(|node| node.own.address).filter(|a| a.0 != 0)
    }

    /// Notes the index pages at such addresses as changed. Returns whether there were any.
    pub(crate) fn rewrite(&mut self, at: impl Fn(PageAddress) -> bool) -> bool {
        let mut any = false;
        for node in self.levels.iter_mut().flatten().flatten() {
            if !node.own.is_none() && at(node.own.address) {
                node.dirty = true;
                any = true;
            }
        }
        any
    }

    /// The same pages under a tree of another size; references beyond it are dropped. The old index
    /// pages are dead, all nodes are rewritten.
    pub(crate) fn resized(
        self,
        pages: u64,
        min_levels: usize,
        dead: &mut Vec<PageAddress>,
    ) -> Self {
        dead.extend(self.addresses());
        let mut new = Self::new(self.id, pages, min_levels);
        match self.levels.into_iter().next() {
            Some(level) => {
                for (at, node) in level.into_iter().enumerate() {
                    let Some(node) = node else { continue };
                    let first = at as u64 * INDEX_FANOUT;
                    for (index, &entry) in (first..).zip(&node.entries) {
                        if index < pages && !entry.is_none() {
                            new.set(index, entry);
                        }
                    }
                }
            }
            None => new.set(0, self.single),
        }
        new
    }
}

fn place(index: u64) -> (usize, usize) {
    let node = usize::try_from(index / INDEX_FANOUT).unwrap_or(usize::MAX);
    let entry = usize::try_from(index % INDEX_FANOUT).unwrap_or(0);
    (node, entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Epoch, Lsn};

    fn stamp() -> PageStamp {
        PageStamp { pool_id: [1; 16], tree: 0, node: 0, index: 0, lsn: Lsn(1), epoch: Epoch(1) }
    }

    fn write_all(tree: &mut PageTree, first: u64) -> (u64, Vec<PageAddress>) {
        let (mut cursor, mut dead, mut count) = ((0, 0), Vec::new(), 0);
        let mut page = Page::zeroed();
        while tree.write_next(
            &mut cursor,
            PageAddress(first + count),
            &stamp(),
            &mut page,
            &mut dead,
        ) {
            count += 1;
        }
        (count, dead)
    }

    #[test]
    fn only_changed_paths_are_written() {
        let mut tree = PageTree::new(7, 252 * 252 + 1, 1);
        assert_eq!(tree.level_count(), 3);
        tree.set(5, PageRef { address: PageAddress(1000), sum: 9 });
        tree.set(252 * 252, PageRef { address: PageAddress(1001), sum: 9 });
        assert_eq!(write_all(&mut tree, 1), (5, vec![]));
        assert_eq!(tree.root().address, PageAddress(5));
        tree.set(6, PageRef { address: PageAddress(1002), sum: 9 });
        let (count, dead) = write_all(&mut tree, 10);
        assert_eq!((count, dead.len()), (3, 3));
        assert_eq!(tree.get(5).address, PageAddress(1000));
    }

    #[test]
    fn an_emptied_tree_has_no_root() {
        let mut tree = PageTree::new(7, 1000, 1);
        tree.set(999, PageRef { address: PageAddress(77), sum: 1 });
        write_all(&mut tree, 1);
        tree.set(999, PageRef::NONE);
        let (count, dead) = write_all(&mut tree, 10);
        assert_eq!(
            (count, dead.len(), tree.root(), tree.stored_levels()),
            (0, 2, PageRef::NONE, 0)
        );
    }

    #[test]
    fn resizing_keeps_the_data_that_fits() {
        let mut tree = PageTree::new(7, 300, 1);
        tree.set(1, PageRef { address: PageAddress(71), sum: 1 });
        tree.set(299, PageRef { address: PageAddress(72), sum: 1 });
        write_all(&mut tree, 1);
        let mut dead = Vec::new();
        let mut small = tree.resized(200, 1, &mut dead);
        assert_eq!(dead.len(), 3);
        assert_eq!(write_all(&mut small, 20).0, 1);
        assert_eq!(small.get(1).address, PageAddress(71));
    }
}
