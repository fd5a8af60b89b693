//! One extent moved to another device.
//!
//! All entries that name it are of one family, at the same extent of each volume or snapshot, under
//! one stripe's mutex. In order:
//!
//! 1. One more reference to the source, so that no new write goes in place (M1).
//! 2. All IO that began before has ended (M2). Until then other writes of the extent wait, since a
//!    copy would miss what a write in place still brings. They wait for a limited time. After
//!    that the move releases its reference to the source and ends, and then they continue.
//! 3. The copy of all sub-blocks that any of the entries shows, to a new extent (M3).
//! 4. Each entry is switched with a record of its own (M4), where no write in flight has the source
//!    for its own (M5). Until all are switched the target has one more reference too, so that
//!    no write goes into blocks that others are still to see (M6).
//!
//! The source is free when the last entry that names it is gone and durable (R4).

use std::sync::Arc;

use super::Evacuation;
use crate::change::{Site, Spares};
use crate::engine::copy::Copy;
use crate::engine::fold::{DRAIN_LIMIT_NS, MAX_DOUBLINGS};
use crate::engine::queue::Purpose;
use crate::engine::{AWAITED_POLL_NS, Engine};
use crate::entry::{Composite, Entry};
use crate::format::placement::Placement;
use crate::io::{IoError, IoOp};
use crate::mutation::{Mutation, Situation, active, met};
use crate::mutation_gate::MutationGuard;
use crate::pool::{CHANGE_UNITS, Pool, split};
use crate::stripe::{SlowWrite, Stripe};
use crate::sync::Ordering;
use crate::units::{ExtentIndex, PhysicalExtent, VolumeId};
use crate::volume::Volume;

/// Entries switched at a time: their leaves are at hand, and the stripe's mutex is held.
const SWITCHES_AT_ONCE: usize = 16;
/// Time beyond the deadline of older IO for the copy and the switches of a rebalance's move.
const SWITCH_LIMIT_NS: u64 = 30_000_000_000;
/// Volumes and snapshots that name an extent at the most for a rebalance to move it: each gets a
/// leaf and a page of its own. A device that leaves has no choice.
pub(super) const MOST_HOLDERS: usize = 64;
/// In the table of slow writes, tokens of moves have this bit, and those of folds have not.
const OF_MOVE: u64 = 1 << 47;

#[derive(Debug)]
pub(super) struct Move {
    token: u64,
    lineage: VolumeId,
    extent: ExtentIndex,
    from: PhysicalExtent,
    /// Once the copy has begun.
    copy: Option<Copy>,
    /// Sub-blocks that are copied.
    bits: u64,
    /// Entries switched.
    switches: u64,
    /// Deadline of older IO, after which the move ends without a change: writers of the extent wait
    /// for it, and that IO may be of other volumes.
    late_ns: u64,
    /// Records wait until this time, for room, or for the end of a write; 0: for nothing.
    retry_ns: u64,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Until this IO epoch.
    Draining(u64),
    Copying,
    /// An operation is out.
    Out,
    Switching,
    /// Nothing more is switched.
    Ending,
}

impl Move {
    pub(super) fn concerns(&self, extent: PhysicalExtent) -> bool {
        self.from == extent || self.copy.as_ref().is_some_and(|copy| copy.to == extent)
    }

    /// The time until which it waits, if it waits for the time.
    pub(super) fn retried_at(&self) -> Option<u64> {
        (self.retry_ns > 0).then_some(self.retry_ns)
    }

    /// Its entry in the table of slow writes, with the number of the engine's ring.
    fn write(&self, ring_slot: usize) -> u64 {
        (ring_slot as u64) << 48 | OF_MOVE | self.token
    }
}

/// The entry with one extent in the place of another; `None` where it does not name it.
fn switched(entry: Entry, from: PhysicalExtent, to: PhysicalExtent) -> Option<Entry> {
    match entry {
        Entry::Mapped { physical, valid } if physical == from => {
            Some(Entry::Mapped { physical: to, valid })
        }
        Entry::Composite(it) if it.overlay == from => {
            Some(Entry::Composite(Composite { overlay: to, ..it }))
        }
        Entry::Composite(it) if it.base == from => {
            Some(Entry::Composite(Composite { base: to, ..it }))
        }
        _ => None,
    }
}

/// The sub-blocks of an extent that an entry shows.
fn shown(entry: Entry, of: PhysicalExtent) -> u64 {
    let parts = [entry.top(), entry.base()];
    parts.iter().filter(|part| part.physical == Some(of)).fold(0, |bits, part| bits | part.valid)
}

/// Whether a write in flight has the extent for its target or its source.
fn is_written(stripe: &Stripe, extent: PhysicalExtent) -> bool {
    stripe.all().any(|write| write.target == extent || write.source == Some(extent))
}

impl Engine {
    /// Begins to move an extent of a volume that lies on the leaving device, unless something of it
    /// is in flight: a later walk finds it then.
    pub(super) fn begin_move(
        &mut self,
        volume: &Volume,
        extent: ExtentIndex,
        from: PhysicalExtent,
    ) {
        let pool = Arc::clone(&self.pool);
        let lineage = volume.identity.lineage;
        if self.evacuation.moves(from) || self.folds.concerns_extent(from) {
            return;
        }
        // Holders of a shared leaf get their own: nothing is copied that could not be switched.
        if self.ensure_leaves(SWITCHES_AT_ONCE).is_err() {
            return self.evacuation.wait_for_space();
        }
        let mut stripe = pool.stripe(lineage, extent.slot()).lock();
        let directory = volume.directory.load_full();
        let ring_slot = pool.tuning.workers;
        let site = Site { pool: &pool, volume, directory: &directory, ring_slot };
        let entry = site.entry(extent);
        let is_free = !is_written(&stripe, from) && !stripe.is_full();
        if switched(entry, from, from).is_none() || !is_free {
            return;
        }
        // A snapshot shares what the volume has that is pinned.
        let device = Some(split(from).0);
        let is_at_home = |(one, _): &(Arc<Volume>, Entry)| self.pinned_to(one) == device;
        if self.evacuation.leaving.is_none() {
            let naming = naming(&pool, lineage, extent, from);
            if naming.len() > MOST_HOLDERS || naming.iter().any(is_at_home) {
                return;
            }
        }
        // What others share has seen the end of all writes in place, and into a base there are
        // none.
        let is_in_place = entry.top().physical == Some(from) && site.is_exclusive(extent, from);
        let token = self.evacuation.next_token + 1;
        if is_in_place {
            let token = (ring_slot as u64) << 48 | OF_MOVE | token;
            let of = (volume.identity.id, extent);
            stripe.add(SlowWrite::of_engine(token, of, (from, from), 0));
        }
        pool.hold_uncached(from);
        if let Some((counts, local)) =
            pool.counts_of(from).filter(|_| !active(Mutation::MoveNotHeld))
        {
            counts.add(local, 1);
        }
        let until = pool.epochs.drain_end();
        drop(stripe);
        let evacuation = &mut self.evacuation;
        evacuation.next_token = token;
        let stage = Stage::Draining(until);
        let late_ns = self.now_ns.saturating_add(DRAIN_LIMIT_NS << evacuation.doublings);
        let (copy, bits, switches, retry_ns) = (None, 0, 0, 0);
        evacuation.running.push(Move {
            token,
            lineage,
            extent,
            from,
            copy,
            bits,
            switches,
            late_ns,
            retry_ns,
            stage,
        });
        let cost = i64::try_from(pool.geometry.extent_size()).unwrap_or(i64::MAX);
        evacuation.pace.take(cost);
        self.rebalance.began(from);
        pool.await_epoch(until);
    }

    pub(super) fn step_moves(&mut self) {
        let mut at = 0;
        while at < self.evacuation.running.len() {
            if self.step_move(at) {
                self.evacuation.running.swap_remove(at);
                self.pool.want_engine();
            } else {
                at += 1;
            }
        }
    }

    /// Ends moves, with as much switched as is by now; `true` when none is under way.
    pub(in super::super) fn end_moves(&mut self) -> bool {
        for one in &mut self.evacuation.running {
            if one.stage != Stage::Out {
                (one.stage, one.retry_ns) = (Stage::Ending, 0);
            }
        }
        self.step_moves();
        self.evacuation.running.is_empty()
    }

    /// Continues a move; `true` when it has ended.
    fn step_move(&mut self, at: usize) -> bool {
        let (now_ns, is_too_late) = (self.now_ns, self.is_too_late(at));
        let Evacuation { running, pace, .. } = &mut self.evacuation;
        let one = &mut running[at];
        if one.stage != Stage::Out
            && let Some(sent_ns) = one.copy.as_mut().and_then(|copy| copy.sent_ns.take())
        {
            pace.note_run(now_ns, sent_ns);
        }
        match one.stage {
            Stage::Draining(until) => {
                let is_drained = self.pool.epochs.reached(until) || active(Mutation::MoveUndrained);
                if !is_drained && now_ns < one.late_ns {
                    self.pool.await_epoch(until);
                    return false;
                }
                if !is_drained {
                    one.stage = Stage::Ending;
                    self.put_off_moves();
                    return self.step_move(at);
                }
                self.evacuation.doublings = 0;
                self.rebalance.drained();
                if self.unblock(at) {
                    self.begin_move_copy(at);
                } else {
                    self.evacuation.running[at].stage = Stage::Ending;
                }
                self.step_move(at)
            }
            Stage::Copying => {
                self.copy_on(at);
                self.evacuation.running[at].stage != Stage::Out && self.step_move(at)
            }
            Stage::Out => false,
            Stage::Switching | Stage::Ending if now_ns < one.retry_ns => false,
            Stage::Switching if is_too_late => {
                self.evacuation.running[at].stage = Stage::Ending;
                self.note_put_off();
                self.step_move(at)
            }
            Stage::Switching => self.switch(at),
            Stage::Ending => self.end_move(at),
        }
    }

    /// Whether a rebalance has waited long enough for pages, or for the end of a write. A device
    /// that leaves waits as long as it takes.
    fn is_too_late(&self, at: usize) -> bool {
        let late_ns = self.evacuation.running[at].late_ns.saturating_add(SWITCH_LIMIT_NS);
        self.evacuation.leaving.is_none() && self.now_ns > late_ns
    }

    /// Older IO did not end in time: the next moves begin later, and wait longer.
    fn put_off_moves(&mut self) {
        let later = self.later();
        let evacuation = &mut self.evacuation;
        // The first of those that began together.
        if !evacuation.pace.is_paused(self.now_ns) {
            evacuation.doublings = (evacuation.doublings + 1).min(MAX_DOUBLINGS);
            evacuation.pace.pause_until(later);
            self.note_put_off();
        }
    }

    /// Ends the wait of other writes for the extent, as all older IO has ended. `false`: a discard
    /// has emptied it meanwhile, and there is nothing to be moved.
    fn unblock(&self, at: usize) -> bool {
        let one = &self.evacuation.running[at];
        let mut stripe = self.pool.stripe(one.lineage, one.extent.slot()).lock();
        let token = one.write(self.pool.tuning.workers);
        if emptied(&stripe, token).is_some() {
            return false;
        }
        remove_write(&self.pool, &mut stripe, token);
        true
    }

    /// Every entry that names the source, by its volume.
    fn naming(pool: &Pool, one: &Move) -> Vec<(Arc<Volume>, Entry)> {
        naming(pool, one.lineage, one.extent, one.from)
    }

    /// Takes an extent elsewhere for what the entries show by now.
    fn begin_move_copy(&mut self, at: usize) {
        let pool = Arc::clone(&self.pool);
        let one = &self.evacuation.running[at];
        let (bits, placed) = {
            let _stripe = pool.stripe(one.lineage, one.extent.slot()).lock();
            let naming = Self::naming(&pool, one);
            let bits = naming.iter().fold(0, |bits, (_, entry)| bits | shown(*entry, one.from));
            let is_placed =
                |volume: &Arc<Volume>| volume.settings.lock().placement != Placement::default();
            (bits, naming.into_iter().map(|(volume, _)| volume).find(is_placed))
        };
        let to = self.take_target(placed.as_deref());
        let one = &mut self.evacuation.running[at];
        let Some(to) = to else {
            one.stage = Stage::Ending;
            return;
        };
        let copy = Copy::new(one.from, to, bits);
        let planned = i64::try_from(pool.geometry.extent_size()).unwrap_or(i64::MAX);
        self.evacuation.pace.refund(planned.saturating_sub(copy.bytes(pool.geometry)));
        (one.bits, one.copy, one.stage) = (bits, Some(copy), Stage::Copying);
    }

    fn copy_on(&mut self, at: usize) {
        let one = &mut self.evacuation.running[at];
        let purpose = Purpose::Move { token: one.token };
        let Some(copy) = &mut one.copy else {
            one.stage = Stage::Ending;
            return;
        };
        if copy.left == 0 {
            one.stage = Stage::Switching;
        } else if copy.send(&self.pool, &mut self.io, self.now_ns, purpose) {
            one.stage = Stage::Out;
        } else {
            one.stage = Stage::Ending;
        }
    }

    /// An operation of a move has ended.
    pub(in super::super) fn move_done(
        &mut self,
        token: u64,
        op: IoOp,
        result: Result<(), IoError>,
    ) {
        let Some(at) = self.evacuation.running.iter().position(|one| one.token == token) else {
            return;
        };
        self.pool.want_engine();
        let one = &mut self.evacuation.running[at];
        let Some(copy) = &mut one.copy else { return };
        let purpose = Purpose::Move { token };
        match copy.done(&self.pool, &mut self.io, purpose, (op, result)) {
            _ if copy.failed => {
                one.stage = Stage::Ending;
                self.evacuation.status.errors += 1;
            }
            Some(bytes) => {
                one.stage = Stage::Copying;
                self.evacuation.status.moved += bytes;
            }
            None if active(Mutation::MoveBeforeData) => one.stage = Stage::Switching,
            None => {}
        }
    }

    /// Switches some entries to the copy; `true` when the move has ended.
    fn switch(&mut self, at: usize) -> bool {
        let pool = Arc::clone(&self.pool);
        let slot = pool.tuning.workers;
        let most = if active(Mutation::TargetNotHeld) { 1 } else { SWITCHES_AT_ONCE };
        let has_leaves = self.ensure_leaves(most).is_ok();
        let one = &mut self.evacuation.running[at];
        one.retry_ns = 0;
        let Some(to) = one.copy.as_ref().map(|copy| copy.to) else { return self.end_move(at) };
        let gate = pool.gate.enter(slot);
        let stripe = pool.stripe(one.lineage, one.extent.slot()).lock();
        let naming = Self::naming(&pool, one);
        if naming.is_empty() {
            let is_moved = one.switches > 0;
            drop((stripe, gate));
            if is_moved {
                met(Situation::ExtentMoved);
                self.evacuation.status.extents += 1;
            }
            return self.end_move(at);
        }
        let is_changed = naming.iter().any(|(_, entry)| shown(*entry, one.from) & !one.bits != 0);
        let is_sourced = is_written(&stripe, one.from) && !active(Mutation::SwitchUnderRedirect);
        if is_changed || !has_leaves {
            drop((stripe, gate));
            return self.end_move(at);
        }
        if is_sourced {
            // The end of that write wakes workers, and not the engine.
            one.retry_ns = self.now_ns.saturating_add(AWAITED_POLL_NS);
            return false;
        }
        let (before, is_alone) = (one.switches, naming.len() == 1);
        for (volume, entry) in naming.into_iter().take(most) {
            let Some(new) = switched(entry, one.from, to) else { continue };
            let is_held = !active(Mutation::TargetNotHeld) || one.switches > 0;
            let held = pool.counts_of(to).filter(|_| is_held);
            if let Some((counts, local)) = held {
                counts.add(local, 1);
            }
            let place = (&*volume, one.extent);
            if !record(&pool, &mut self.spares, &gate, place, (entry, new), true) {
                if let Some((counts, local)) = held {
                    counts.sub(local);
                }
                one.retry_ns = self.now_ns.saturating_add(AWAITED_POLL_NS);
                break;
            }
            one.switches += 1;
            met(if is_alone { Situation::EntryMoved } else { Situation::SharedMoved });
        }
        // Without a switch it waits for a commit or a checkpoint.
        if one.switches > before && !active(Mutation::TargetNotHeld) {
            pool.want_engine();
        }
        false
    }

    /// Drops what the move held. `false`: there is no room yet for the record of an extent that a
    /// discard has emptied.
    fn end_move(&mut self, at: usize) -> bool {
        let pool = Arc::clone(&self.pool);
        let slot = pool.tuning.workers;
        let has_leaves = self.ensure_leaves(1).is_ok();
        let one = &mut self.evacuation.running[at];
        one.retry_ns = 0;
        let token = one.write(slot);
        let gate = pool.gate.enter(slot);
        let mut stripe = pool.stripe(one.lineage, one.extent.slot()).lock();
        // The last write over an extent that a discard has emptied unmaps it (R5e). As that of any
        // slow write its page is provided for: the discard has made the slot dirty, and a cut since
        // then has promised a page. To ask for one could be in vain: a checkpoint that is short of
        // pages lets none be promised until this has ended.
        // The slow write is that of one volume: of others that have shared the entry since then, it
        // stays.
        if let Some(id) = emptied(&stripe, token).filter(|_| has_leaves) {
            let is_empty = |entry: Entry| entry == Entry::Mapped { physical: one.from, valid: 0 };
            let of_it = |one: &(Arc<Volume>, Entry)| one.0.identity.id == id;
            for (volume, entry) in Self::naming(&pool, one).into_iter().filter(of_it) {
                let (place, step) = ((&*volume, one.extent), (entry, Entry::Unmapped));
                if is_empty(entry) && !record(&pool, &mut self.spares, &gate, place, step, false) {
                    one.retry_ns = self.now_ns.saturating_add(AWAITED_POLL_NS);
                    return false;
                }
            }
        }
        // Before the waiting writes of the extent continue. One that found the reference would copy
        // from the extent, and miss what an older write in place still brings (M2).
        if !active(Mutation::MoveNotHeld) {
            self.releases.release_extent(&pool, one.from);
        }
        pool.read_cache.end_hold(one.from);
        if let Some(copy) = &one.copy
            && !(active(Mutation::TargetNotHeld) && one.switches > 0)
        {
            self.releases.release_extent(&pool, copy.to);
        }
        remove_write(&pool, &mut stripe, token);
        if one.switches == 0 {
            self.rebalance.came_to_nothing(one.from, one.copy.as_ref().map(|copy| copy.to));
        }
        if one.copy.is_none() {
            let planned = i64::try_from(pool.geometry.extent_size()).unwrap_or(i64::MAX);
            self.evacuation.pace.refund(planned);
        }
        true
    }
}

/// The volumes and snapshots of a family that name an extent at this place, and their entries.
fn naming(
    pool: &Pool,
    lineage: VolumeId,
    extent: ExtentIndex,
    from: PhysicalExtent,
) -> Vec<(Arc<Volume>, Entry)> {
    let volumes = pool.volumes.read();
    let entry = |volume: &Arc<Volume>| {
        let leaf = volume.directory.load().load(extent.slot())?;
        let entry = pool.arena.entry(leaf, extent.entry());
        switched(entry, from, from).map(|entry| (Arc::clone(volume), entry))
    };
    volumes.relatives(lineage).filter_map(entry).collect()
}

/// The volume of this write, if a discard came while it was in the table.
fn emptied(stripe: &Stripe, token: u64) -> Option<VolumeId> {
    let write = stripe.all().find(|write| write.token == token && write.cancelled != 0)?;
    Some(write.volume)
}

/// Takes a write out of the table, and wakes those that wait for it.
fn remove_write(pool: &Pool, stripe: &mut Stripe, token: u64) {
    let Some(write) = stripe.remove(token) else { return };
    // By a checkpoint's cut, as to every write in flight.
    if write.page_promised {
        pool.return_page();
    }
    if write.awaited | stripe.take_awaited() {
        pool.bump();
    }
}

/// Records a new entry of a volume or snapshot. `false`: there is no page for it, if it asks for
/// one, or no room in the delta ring, until a checkpoint or commit, which is requested.
fn record(
    pool: &Pool,
    spares: &mut Spares,
    gate: &MutationGuard<'_>,
    (volume, extent): (&Volume, ExtentIndex),
    step: (Entry, Entry),
    asks: bool,
) -> bool {
    let ring_slot = pool.tuning.workers;
    let directory = volume.directory.load_full();
    let is_strict = || pool.pages.0.strict.load(Ordering::Relaxed);
    let needs_page = asks && (!directory.is_dirty(extent.slot()) || is_strict());
    if needs_page && !pool.promise_page(true) {
        pool.want_engine();
        return false;
    }
    let has_room = pool.ring.reserve(ring_slot, CHANGE_UNITS);
    if has_room {
        let site = Site { pool, volume, directory: &directory, ring_slot };
        site.set(spares, || gate.take_lsn(1), extent, step, CHANGE_UNITS);
    } else {
        pool.want_commit();
    }
    if needs_page {
        pool.return_page();
    }
    has_room
}
