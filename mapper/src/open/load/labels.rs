//! Reading labels, when everything else is read. Damage to them is no reason to refuse a pool:
//! volumes are read without those that are lost, and the next checkpoint leaves the damaged pages
//! out. Where an index page is lost, all labels are.

use super::{Batch, Loader, PageRead, What};
use crate::engine::labels::LabelPages;
use crate::format::index_page::decode_index;
use crate::format::labels::decode_labels;
use crate::format::page::PageExpect;
use crate::format::{FormatError, INDEX_FANOUT, Labels, PageRef, Place, label_levels};
use crate::io::Page;
use crate::pool::Pool;
use crate::units::VolumeId;

impl Loader {
    /// Begins with the labels. `false` if there are none, or it was done before.
    pub(in super::super) fn begin_labels(&mut self, pool: &Pool) -> bool {
        if std::mem::replace(&mut self.has_labels_begun, true) {
            return false;
        }
        let records = u64::from(self.superblock.catalogue_records);
        let what = What::LabelIndex { level: label_levels(records), index: 0 };
        self.request_labels(pool, self.superblock.labels_root, what);
        !self.pending.is_empty()
    }

    /// Notes a page of labels to be read, unless it is also another page, or no page at all.
    fn request_labels(&mut self, pool: &Pool, reference: PageRef, what: What) {
        if reference.is_none() {
            return;
        }
        let extent = pool.geometry.page_place(reference.address).0;
        let space = pool.free_space.lock();
        let is_other = self.fixed.contains(&extent) && !self.pages.contains(extent)
            || !space.contains(extent)
            || space.is_used(extent);
        drop(space);
        if is_other || self.request(reference, what).is_err() {
            self.forget(what);
        }
    }

    pub(super) fn label_page(
        &mut self,
        pool: &Pool,
        page_read: PageRead,
        page: &Page,
    ) -> Result<(), FormatError> {
        let place = Place::Page(page_read.reference.address);
        let (id, sum) = (self.superblock.pool_id, page_read.reference.sum);
        match page_read.what {
            What::LabelIndex { level, index } => {
                let expect = PageExpect::catalogue_index(id, level, index, sum);
                let decoded = decode_index(&page.0, &expect, &self.limits, place)?;
                let tree = &mut self.labels.tree;
                tree.install(level, index, page_read.reference, |i| decoded.entry(i));
                for (child, reference) in (index * INDEX_FANOUT..).zip(decoded.iter()) {
                    let volume = || self.catalogue.at(usize::try_from(child).ok()?);
                    let what = match level {
                        1 => What::Label { place: child, volume: volume().unwrap_or(VolumeId(0)) },
                        _ => What::LabelIndex { level: level - 1, index: child },
                    };
                    self.request_labels(pool, reference, what);
                }
            }
            What::Label { place: at, volume } => {
                let expect = PageExpect::labels(id, at, volume.0, sum);
                let labels = decode_labels(&page.0, &expect, place)?;
                if let Ok(volume) = pool.volume(volume) {
                    volume.set_labels(labels);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A page of labels is damaged.
    pub(super) fn lose(&mut self, page_read: PageRead) {
        self.lost_pages.push(page_read.reference.address);
        self.forget(page_read.what);
    }

    /// Nothing refers to a page of labels any more.
    fn forget(&mut self, what: What) {
        self.labels_lost += 1;
        match what {
            What::LabelIndex { .. } => self.is_label_index_lost = true,
            What::Label { place, .. } => self.labels.tree.forget(0, place),
            _ => {}
        }
    }

    /// Drops all labels, where an index page of them is lost: the pages below it are not known, and
    /// count as free from now on. The first superblock has to be without them, before a page or an
    /// extent of theirs can be used for something else. True if it was so.
    pub(in super::super) fn drop_cut_off(&mut self, pool: &Pool) -> bool {
        if !self.is_label_index_lost {
            return false;
        }
        self.lost_pages.extend(self.labels.tree.addresses());
        self.lost_pages.extend(self.labels.tree.entries().map(|(_, page)| page.address));
        self.labels = LabelPages::new(self.catalogue.place_count());
        for volume in pool.volumes.read().values() {
            volume.set_labels(Labels::default());
        }
        true
    }

    /// Pages of labels could not be read. The error may pass: labels are left where they are.
    pub(in super::super) fn unreadable(&mut self, batch: &Batch) {
        for page_read in &batch.pending {
            match page_read.what {
                What::LabelIndex { .. } => self.lose(*page_read),
                _ => self.labels_lost += 1,
            }
        }
    }
}
