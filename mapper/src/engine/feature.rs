//! Composite entries turned on and off in an open pool.
//!
//! *On*: pages are counted for them first, then a checkpoint writes the feature's bit, and only
//! when every copy of the superblock has it a write may make a composite entry. Neither ring nor
//! log has a record of one before (K13).
//!
//! *Off*: writes make no more of them, and folds make all plain. With none left, a commit makes
//! that durable, so that the log ends behind the last record of a composite entry. Then comes a
//! checkpoint whose superblock has no bit: its cut is behind those records, and no leaf of the map
//! has a page of version 2. A crash on the way leaves the pool with the feature, and with entries
//! of both kinds.

use std::collections::BTreeMap;

use crate::error::MapperError;
use crate::format::superblock::COMPOSITE;
use crate::geometry::PAGE_BYTES;
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::Composites;
use crate::sync::Ordering;
use crate::units::{LeafId, Lsn};

use super::Engine;
use super::control::{ControlId, Outcome};
use super::grant::PAGES_AT_HAND;

/// Checkpoints before the pages must suffice: the second finds no slot that was dirty before the
/// pages of composite entries were counted.
const MAX_TRIES: u32 = 4;
/// Leaves for each index page: an index page has room for more.
const LEAVES_PER_INDEX: u64 = 64;

/// A change of the feature that is under way.
#[derive(Debug, Default)]
pub(crate) struct Feature {
    /// Whether the next superblock has the bit; `None`: as the present one.
    next: Option<bool>,
    /// No entry is composite any more once this is durable.
    plain: Option<Lsn>,
    /// Checkpoints that were waited for.
    tries: u32,
}

impl Feature {
    /// The features of a checkpoint that is cut now.
    pub(super) fn incompat(&self, present: u64) -> u64 {
        match self.next {
            None => present,
            Some(true) => present | COMPOSITE,
            Some(false) => present & !COMPOSITE,
        }
    }
}

impl Engine {
    pub(super) fn enable_composite(&mut self, id: ControlId) {
        match self.pool.composites() {
            Composites::On => return self.end_when_durable(id, Outcome::Unchanged),
            Composites::Leaving => {
                // The bit is still there: a checkpoint without it has not begun.
                self.feature = Feature::default();
                self.pool.set_composites(Composites::On);
                return self.end_when_durable(id, Outcome::Enabled);
            }
            Composites::Off | Composites::Joining => {}
        }
        if let Err(error) = self.check_room_for_bases() {
            return self.end(id, Err(error));
        }
        self.pool.set_composites(match active(Mutation::CompositeBeforeBit) {
            true => Composites::On,
            false => Composites::Joining,
        });
        self.feature = Feature { next: Some(true), ..Feature::default() };
        self.begin_checkpoint_for(id, Outcome::Enabled);
    }

    /// The bit is durable: entries may be composite, if there is a page for the bases of each slot
    /// that is dirty. One that is may have been promised a single page.
    pub(super) fn finish_enabling(&mut self, id: ControlId) {
        self.update_limits();
        if self.dirty_or_promised() <= self.dirty_limit(self.pages.free_pages()) {
            self.feature = Feature::default();
            self.pool.set_composites(Composites::On);
            met(Situation::CompositeEnabled);
            return self.end(id, Ok(Outcome::Enabled));
        }
        self.feature.tries += 1;
        if self.feature.tries < MAX_TRIES {
            return self.begin_checkpoint_for(id, Outcome::Enabled);
        }
        let problem = self.check_room_for_bases().err();
        // The next checkpoint takes the bit away.
        self.feature = Feature { next: Some(false), ..Feature::default() };
        self.pool.set_composites(Composites::Off);
        let busy = MapperError::Limit { what: "pages for changes in flight", limit: 0 };
        self.end(id, Err(problem.unwrap_or(busy)));
    }

    /// Refuses where too few pages of bases could be written for the slots that are dirty, or will
    /// soon be.
    fn check_room_for_bases(&self) -> Result<(), MapperError> {
        let dirty = self.dirty_or_promised().max(PAGES_AT_HAND.min(self.trees.slots()));
        let index = (dirty * self.levels()).min(self.trees.most_pages());
        self.check_room_for_pages(self.fixed_pages() + 2 * dirty + index)
    }

    pub(super) fn check_room_for_pages(&self, needed: u64) -> Result<(), MapperError> {
        let pages = self.pool.geometry.pages_per_extent();
        let free = self.pool.free_space.lock().free_count() * pages
            + self.pages.free_pages().saturating_sub(self.pages.reserve_pages());
        if needed <= free {
            return Ok(());
        }
        Err(MapperError::NoSpace { needed: needed * PAGE_BYTES, free: free * PAGE_BYTES })
    }

    pub(super) fn disable_composite(&mut self) -> Result<Outcome, MapperError> {
        match self.pool.composites() {
            Composites::Off | Composites::Joining => return Ok(Outcome::Unchanged),
            Composites::Leaving => {
                self.fold_now();
                return Ok(Outcome::Unchanged);
            }
            Composites::On => {}
        }
        if self.check_room_for_pages(pages_of_leaves(self.most_new_leaves())).is_err() {
            let leaves = self.new_leaves(|leaf| self.pool.arena.composites(leaf) > 0);
            self.check_room_for_pages(pages_of_leaves(leaves))?;
        }
        self.pool.set_composites(Composites::Leaving);
        self.fold_now();
        Ok(Outcome::Disabling)
    }

    /// Limit of [`Self::new_leaves`], without a look at the leaves.
    fn most_new_leaves(&self) -> u64 {
        let volumes = self.pool.volumes.read();
        let most = volumes.values().map(|volume| {
            let slots = u64::from(volume.directory.load().slot_count());
            volume.composites.load(Ordering::Relaxed).min(slots)
        });
        most.sum()
    }

    /// Leaves that are added when all leaves of a kind are changed: each holder of a shared one
    /// gets its own. Takes time with the mapped leaves of all volumes.
    pub(super) fn new_leaves(&self, is_changed: impl Fn(LeafId) -> bool) -> u64 {
        // Whether it is of the kind, by leaf.
        let mut shared = BTreeMap::<LeafId, bool>::new();
        let mut holders = 0;
        let volumes = self.pool.volumes.read();
        for volume in volumes.values() {
            for (_, leaf) in volume.directory.load().iter() {
                if self.pool.arena.meta(leaf).references.load(Ordering::Acquire) > 1 {
                    let is_of_kind = shared.entry(leaf).or_insert_with(|| is_changed(leaf));
                    holders += u64::from(*is_of_kind);
                }
            }
        }
        holders - shared.values().filter(|is_of_kind| **is_of_kind).count() as u64
    }

    /// Takes the bit away once the last composite entry is gone.
    pub(super) fn step_feature(&mut self) {
        if !self.pool.is_leaving() || self.closing {
            return;
        }
        if self.superblock.incompat & COMPOSITE == 0 {
            self.feature = Feature::default();
            self.end_folds();
            self.pool.fold_wanted.store(false, Ordering::Release);
            self.pool.set_composites(Composites::Off);
            met(Situation::CompositeDisabled);
            return;
        }
        let is_logged = |lsn| self.durable() >= lsn || active(Mutation::BitBeforeLog);
        match self.feature.plain {
            None if self.is_plain() => {
                self.feature.plain = Some(self.pool.gate.last_assigned());
                self.pool.want_commit();
            }
            Some(lsn) if self.feature.next.is_none() && is_logged(lsn) => {
                self.feature.next = Some(false);
                self.want_checkpoint();
            }
            _ => {}
        }
    }

    /// Whether no entry is composite, and none can become so: a redirect that was planned before
    /// they were turned off may still be in flight.
    fn is_plain(&self) -> bool {
        let redirects =
            |stripe: &parking_lot::Mutex<crate::stripe::Stripe>| stripe.lock().redirects();
        self.folds.is_idle()
            && !self.pool.stripes.iter().any(redirects)
            && self.fold_status().composite == 0
    }
}

/// Pages that this many new leaves take: two each, and index pages.
pub(super) const fn pages_of_leaves(leaves: u64) -> u64 {
    2 * leaves + leaves / LEAVES_PER_INDEX
}
