//! Folds: composite entries become plain again, in the background.
//!
//! *Down*: what the overlay has is copied into the base, and the overlay is dropped. *Up*: what
//! only the base has is copied into the overlay, and the base is dropped. A fold is an entry of the
//! table of slow writes, which every other write of the extent waits for. In order:
//!
//! 1. Into the table, with one more reference to the overlay, so that no new write goes in place.
//! 2. All IO that began before has ended (K6): writes in place into the overlay take no lock, and
//!    readers may have found the base from before the entry was composite.
//! 3. Down: the entry is durable (K5), and so every durable map hides what is written over.
//! 4. The copy; then the record (K7), unless a discard has changed the entry meanwhile (K2).
//!
//! While the pool is to be without composite entries, every one of them is folded: also up
//! into an overlay that others share, and in a leaf that others share, of which the volume or
//! snapshot gets its own copy then. Blocks that another holder's fold has put there are not copied
//! again.
//!
//! No promise depends on a fold (K11): a fold that meets an obstacle ends without a change, and is
//! tried again later; after an error of the media once something else gives a reason to look.

use std::sync::Arc;

use crate::change::Site;
use crate::entry::{Composite, Entry};
use crate::io::{IoError, IoOp};
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::{CHANGE_UNITS, Pool};
use crate::space::SpaceState;
use crate::stripe::Stripe;
use crate::sync::{Mutex, Ordering};
use crate::units::{ExtentIndex, LeafId, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;

use super::Engine;
use super::copy::Copy;
use super::pace::Pace;
use super::queue::Purpose;

mod find;

/// Waiting for older IO at the most: some operations of a slow disk.
pub(super) const DRAIN_LIMIT_NS: u64 = 100_000_000;
/// How often the wait for older IO is doubled where that has not ended in time: up to 3.2 seconds,
/// so that folds get on where some IO always takes long.
pub(super) const MAX_DOUBLINGS: u32 = 5;
/// How much faster folds go where space is short: most of them return an extent.
const HURRY: u64 = 4;

/// Figures of folds since the pool was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FoldStatus {
    /// Composite entries of all volumes and snapshots.
    pub composite: u64,
    /// Folds under way.
    pub running: u64,
    /// Entries that a fold has made plain.
    pub folded: u64,
    /// Bytes copied by folds.
    pub bytes: u64,
    /// Folds that ended without a change: by IO errors, or since the entry had changed.
    pub abandoned: u64,
    /// Whether all entries have been examined since something changed.
    pub settled: bool,
    /// Whether entries of the pool may be composite.
    pub is_enabled: bool,
    /// Whether all of them are being folded, so that the pool has none any more.
    pub is_leaving: bool,
    /// Bytes a second that folds may copy; 0: nothing is folded.
    pub rate: u64,
}

/// The folds of a pool, and the walk that looks for entries to be folded.
#[derive(Debug, Default)]
pub(crate) struct Folds {
    /// The next slot to be examined; `None` when nothing is to be looked for.
    walk: Option<(VolumeId, SlotIndex, usize)>,
    /// Something was abandoned or put off during the walk: it begins again at this time.
    again_ns: Option<u64>,
    /// Pauses where the media is slow, or older IO did not end in time.
    pace: Pace,
    /// How often the wait for older IO is doubled.
    doublings: u32,
    running: Vec<Fold>,
    /// Families that a structure change waits to change: no fold of theirs begins.
    barred: Vec<VolumeId>,
    /// The last LSN of a leaf in which folds are all that has changed since it was durable.
    own: Option<(LeafId, u64)>,
    next_token: u64,
    /// Bytes a second that may be copied; 0: nothing is folded.
    rate: u64,
    status: FoldStatus,
}

#[derive(Debug)]
struct Fold {
    token: u64,
    volume: Arc<Volume>,
    extent: ExtentIndex,
    copy: Copy,
    overlay: PhysicalExtent,
    /// From then on the fold ends without a change if older IO has not ended: writers of the extent
    /// wait for the fold, and that IO may be of other volumes.
    late_ns: u64,
    /// Sub-blocks to be copied.
    bits: u64,
    stage: Stage,
    /// The parity of the IO epoch that its copy is in.
    parity: Option<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Until this IO epoch.
    Draining(u64),
    Copying,
    /// An operation is out.
    Out,
    /// `true`: everything is copied.
    Ending(bool),
}

impl Fold {
    fn is_down(&self) -> bool {
        self.copy.from == self.overlay
    }

    /// Whether the entry is still the one that the fold began with.
    fn is_of(&self, entry: Entry) -> Option<Composite> {
        let base = if self.is_down() { self.copy.to } else { self.copy.from };
        match entry {
            Entry::Composite(it) if it.overlay == self.overlay && it.base == base => Some(it),
            _ => None,
        }
    }

    fn stripe<'a>(&self, pool: &'a Pool) -> &'a Mutex<Stripe> {
        pool.stripe(self.volume.identity.lineage, self.extent.slot())
    }
}

impl Folds {
    pub(crate) fn new(rate: u64) -> Self {
        Self { rate, ..Self::default() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.walk.is_none() && self.again_ns.is_none()
    }

    /// Whether a fold is under way in a family of volumes.
    fn concerns(&self, lineage: VolumeId) -> bool {
        self.running.iter().any(|fold| fold.volume.identity.lineage == lineage)
    }

    /// Whether a fold under way copies from this extent, or to it.
    pub(super) fn concerns_extent(&self, extent: PhysicalExtent) -> bool {
        self.running.iter().any(|fold| fold.copy.from == extent || fold.copy.to == extent)
    }

    /// Lets folds begin in all families but these.
    pub(crate) fn bar(&mut self, families: Vec<VolumeId>) {
        self.barred = families;
    }

    fn begin_walk(&mut self) {
        self.walk = Some((VolumeId(0), SlotIndex(0), 0));
        self.again_ns = None;
    }

    fn put_off(&mut self, until_ns: u64) {
        self.again_ns.get_or_insert(until_ns);
    }
}

impl Engine {
    /// Figures of composite entries and their folds.
    #[must_use]
    pub fn fold_status(&self) -> FoldStatus {
        let volumes = self.pool.volumes.read();
        let composite = volumes.values().map(|v| v.composites.load(Ordering::Relaxed)).sum();
        FoldStatus {
            composite,
            running: self.folds.running.len() as u64,
            settled: self.folds.is_idle() && !self.pool.fold_wanted.load(Ordering::Acquire),
            is_enabled: self.pool.has_composite(),
            is_leaving: self.pool.is_leaving(),
            rate: self.folds.rate,
            ..self.folds.status
        }
    }

    /// Looks for entries to be folded now, and not only when something has changed.
    pub fn fold_now(&mut self) {
        self.folds.pace.end_pause();
        self.pool.want_folds();
    }

    /// Sets the bytes a second that folds may copy from now on. With 0 no more folds begin, and
    /// those that have begun end.
    pub fn set_fold_rate(&mut self, rate: u64) {
        if rate == self.folds.rate {
            return;
        }
        self.folds.rate = rate;
        self.fold_now();
    }

    /// When folds go on at the latest, if they wait for the time.
    pub(super) fn fold_deadline(&self) -> Option<u64> {
        let folds = &self.folds;
        if folds.walk.is_none() && folds.again_ns.is_none() {
            return None;
        }
        let rate = self.fold_pace();
        if rate == 0 || self.closing {
            return None;
        }
        let paced = folds.walk.and_then(|_| folds.pace.deadline(self.now_ns, rate));
        // A walk that is held up ends first.
        let again = folds.again_ns.filter(|_| folds.walk.is_none());
        [paced, again].into_iter().flatten().min()
    }

    pub(super) fn step_folds(&mut self) {
        if !self.pool.has_composite() || self.pool.read_only {
            return;
        }
        // Nothing to do in nearly every poll, and no time to be counted.
        if self.folds.is_idle() && !self.pool.fold_wanted.load(Ordering::Acquire) {
            return;
        }
        let is_off = self.folds.rate == 0;
        let is_time = self.folds.again_ns.is_some_and(|at| at <= self.now_ns);
        // A walk goes on to its end, or volumes at the end would never have their turn.
        let is_free = !is_off && self.folds.walk.is_none();
        if is_free && (self.pool.fold_wanted.swap(false, Ordering::AcqRel) || is_time) {
            self.folds.begin_walk();
        }
        let (rate, least) = (self.fold_pace(), self.pool.geometry.extent_size());
        self.folds.pace.refill(self.now_ns, rate, least);
        let mut at = 0;
        while at < self.folds.running.len() {
            if self.step_fold(at) {
                self.folds.running.swap_remove(at);
                self.pool.want_engine();
            } else {
                at += 1;
            }
        }
        if is_off {
            self.folds.walk = None;
            self.folds.again_ns = None;
        }
        self.look_for_folds();
    }

    /// Bytes a second that folds may copy at present.
    fn fold_pace(&self) -> u64 {
        let is_short = self.space_watch().state() != SpaceState::Normal;
        if is_short { self.folds.rate.saturating_mul(HURRY) } else { self.folds.rate }
    }

    /// Whether a structure change of these families has to wait for folds (K6). Those that have not
    /// begun to copy end without a change.
    pub(super) fn folds_are_in_the_way(&mut self, lineages: &[VolumeId]) -> bool {
        for fold in &mut self.folds.running {
            let is_waiting = matches!(fold.stage, Stage::Draining(_));
            if is_waiting && lineages.contains(&fold.volume.identity.lineage) {
                fold.stage = Stage::Ending(false);
                self.pool.want_engine();
            }
        }
        lineages.iter().any(|lineage| self.folds.concerns(*lineage))
    }

    /// Ends folds that have not begun to copy; `true` when none is under way.
    pub(super) fn end_folds(&mut self) -> bool {
        for fold in &mut self.folds.running {
            if matches!(fold.stage, Stage::Draining(_)) {
                fold.stage = Stage::Ending(false);
            }
        }
        self.folds.walk = None;
        self.folds.again_ns = None;
        self.folds.running.is_empty()
    }

    /// When to look again: a commit by the timer has made durable by then what is not now.
    pub(super) fn later(&self) -> u64 {
        self.now_ns.saturating_add(self.pool.tuning.commit_interval_ns)
    }

    /// Continues a fold; `true` when it has ended.
    fn step_fold(&mut self, at: usize) -> bool {
        let fold = &mut self.folds.running[at];
        if fold.stage != Stage::Out
            && let Some(sent_ns) = fold.copy.sent_ns.take()
        {
            self.folds.pace.note_run(self.now_ns, sent_ns);
        }
        match self.folds.running[at].stage {
            Stage::Draining(until) => {
                let is_drained = self.pool.epochs.reached(until) || active(Mutation::FoldUndrained);
                let is_late = self.now_ns >= self.folds.running[at].late_ns;
                if !is_drained && !is_late {
                    self.pool.await_epoch(until);
                    return false;
                }
                if is_drained {
                    self.folds.doublings = 0;
                } else if !self.folds.pace.is_paused(self.now_ns) {
                    // The first of those that began together.
                    self.folds.doublings = (self.folds.doublings + 1).min(MAX_DOUBLINGS);
                    self.folds.pace.pause_until(self.later());
                }
                self.folds.running[at].stage =
                    if is_drained { self.begin_copy(at) } else { Stage::Ending(false) };
                self.step_fold(at)
            }
            Stage::Copying => {
                self.copy_next(at);
                false
            }
            Stage::Out => false,
            Stage::Ending(is_copied) => {
                self.end_fold(at, is_copied);
                true
            }
        }
    }

    /// Decides, with all older IO ended, whether the copy may begin.
    fn begin_copy(&mut self, at: usize) -> Stage {
        let fold = &mut self.folds.running[at];
        let pool = &self.pool;
        if !active(Mutation::FoldOutsideEpoch) {
            // K4, before the entry is read: a discard may drop an extent of it during the copy, and
            // it is not reused before the copy has ended.
            fold.parity = Some(pool.epochs.enter(pool.tuning.workers));
        }
        let directory = fold.volume.directory.load_full();
        let _stripe = fold.stripe(pool).lock();
        let slot = fold.extent.slot();
        let Some(leaf) = directory.load(slot) else { return Stage::Ending(false) };
        let Some(it) = fold.is_of(pool.arena.entry(leaf, fold.extent.entry())) else {
            return Stage::Ending(false);
        };
        if fold.is_down() && !is_durable(pool, leaf, self.folds.own) {
            return Stage::Ending(false);
        }
        fold.bits = if fold.is_down() { it.top } else { it.under & !it.top };
        let there = if fold.is_down() { 0 } else { find::in_overlay(pool, fold) };
        let planned = fold.copy.bytes(pool.geometry);
        fold.copy.left = fold.bits & !there;
        self.folds.pace.refund(planned.saturating_sub(fold.copy.bytes(pool.geometry)));
        Stage::Copying
    }

    /// Reads the next run of sub-blocks; with none left, the fold ends.
    fn copy_next(&mut self, at: usize) {
        let fold = &mut self.folds.running[at];
        if fold.copy.left == 0 {
            fold.stage = Stage::Ending(true);
            self.pool.want_engine();
            return;
        }
        let purpose = Purpose::Fold { token: fold.token };
        let is_sent = fold.copy.send(&self.pool, &mut self.io, self.now_ns, purpose);
        fold.stage = if is_sent { Stage::Out } else { Stage::Ending(false) };
    }

    /// An operation of a fold has ended.
    pub(super) fn fold_done(&mut self, token: u64, op: IoOp, result: Result<(), IoError>) {
        let Some(at) = self.folds.running.iter().position(|fold| fold.token == token) else {
            return;
        };
        self.pool.want_engine();
        let fold = &mut self.folds.running[at];
        let ended = fold.copy.done(&self.pool, &mut self.io, Purpose::Fold { token }, (op, result));
        match ended {
            _ if fold.copy.failed => fold.stage = Stage::Ending(false),
            Some(bytes) => {
                fold.stage = Stage::Copying;
                self.folds.status.bytes += bytes;
            }
            None if active(Mutation::FoldBeforeData) => fold.stage = Stage::Ending(true),
            None => {}
        }
    }

    /// Publishes a fold, or ends it without a change.
    fn end_fold(&mut self, at: usize, is_copied: bool) {
        let pool = Arc::clone(&self.pool);
        let slot = pool.tuning.workers;
        let (has_leaves, later) = (self.ensure_leaves(1).is_ok(), self.later());
        if let Some(parity) = self.folds.running[at].parity.take() {
            pool.epochs.leave(slot, parity);
        }
        let fold = &self.folds.running[at];
        let directory = fold.volume.directory.load_full();
        let guard = pool.gate.enter(slot);
        let mut stripe = fold.stripe(&pool).lock();
        let site =
            Site { pool: &pool, volume: &fold.volume, directory: &directory, ring_slot: slot };
        let now = site.entry(fold.extent);
        let write = stripe.remove(fold.token);
        let is_cancelled = write.is_some_and(|write| write.cancelled != 0);
        let new = match fold.is_of(now) {
            Some(it) if is_copied => folded(fold, it),
            // The last write over an extent that a discard has emptied unmaps it (R5e).
            None if now.valid() == 0 && is_cancelled => Entry::Unmapped,
            _ => now,
        };
        if new == now || !has_leaves {
            pool.ring.release(slot, CHANGE_UNITS);
            self.folds.status.abandoned += 1;
            // Media that fails is not tried again before something else has changed.
            if !fold.copy.failed {
                self.folds.again_ns.get_or_insert(later);
            }
            self.folds.pace.refund(fold.copy.bytes(pool.geometry));
        } else {
            let (step, leaf) = ((now, new), || directory.load(fold.extent.slot()));
            let was_durable = leaf().is_some_and(|leaf| is_durable(&pool, leaf, self.folds.own));
            site.set(&mut self.spares, || guard.take_lsn(1), fold.extent, step, CHANGE_UNITS);
            let last = leaf().filter(|_| was_durable).map(|leaf| (leaf, last_lsn(&pool, leaf)));
            self.folds.own = last;
            met(if fold.is_down() { Situation::FoldedDown } else { Situation::FoldedUp });
            self.folds.status.folded += 1;
        }
        if let Some((counts, local)) = pool.counts_of(fold.overlay) {
            counts.sub(local);
        }
        pool.read_cache.end_hold(fold.overlay);
        let Some(write) = write else { return };
        if write.page_promised {
            pool.return_page();
        }
        if write.awaited | stripe.take_awaited() {
            pool.bump();
        }
    }
}

/// The entry after the fold. Only sub-blocks that are valid still count: a discard may have come.
fn folded(fold: &Fold, it: Composite) -> Entry {
    let valid = if fold.is_down() {
        it.under | (it.top & fold.bits)
    } else {
        it.top | (it.under & fold.bits)
    };
    Entry::Mapped { physical: fold.copy.to, valid }
}

fn last_lsn(pool: &Pool, leaf: LeafId) -> u64 {
    pool.arena.meta(leaf).last_lsn.load(Ordering::Acquire)
}

/// Whether the composite entries of the leaf are durable. The leaf's last LSN stands for them:
/// never too low. Folds change other entries (`own`), which are plain then.
fn is_durable(pool: &Pool, leaf: LeafId, own: Option<(LeafId, u64)>) -> bool {
    let last = last_lsn(pool, leaf);
    own == Some((leaf, last)) || last <= pool.progress.0.durable.load(Ordering::SeqCst)
}
