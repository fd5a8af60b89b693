//! Completions: the change of an entry, and how it becomes visible.

use super::map::{Entry, NONE, Record, RecordKind, UNMAPPED};
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{Fold, Op, OpState};
use super::state::{World, ix};
use super::step::Kind;

/// The new state of an entry, and the kind of its record.
pub(super) type Change = (Entry, RecordKind);

impl World {
    /// The record of a request that sets its entry to `after`.
    pub fn map_record(&self, op: &Op, after: Entry, kind: RecordKind) -> Record {
        let Entry { p, bits, base, under, .. } = after;
        Record { lsn: self.last_lsn, kind, v: op.v, e: op.e, p, bits, base, under, q: op.q }
    }

    /// Assigns the LSN under the leaf lock, from the entry as it is now (R5d, K2).
    pub fn assign(&mut self, slot: usize) -> bool {
        let op = self.ops[slot];
        if self.is_locked(op.v, op.e) || !self.record_fits(op.q) {
            return false;
        }
        let entry = self.map.entry(op.v, op.e);
        let change = if op.fold != Fold::No {
            self.fold_change(&op, entry)
        } else if op.state == OpState::Discard {
            self.discard_change(slot, entry)
        } else {
            self.write_change(slot, entry)
        };
        let Some((after, kind)) = change else {
            if op.fold == Fold::No {
                self.complete(slot);
            } else {
                self.give_up(slot);
            }
            return true;
        };
        self.last_lsn += 1;
        self.ops[slot].record = self.map_record(&op, after, kind);
        self.ops[slot].state = OpState::HasLsn;
        if self.is(Mutation::AnswerFirst) && !op.fua {
            self.promise(&op, self.now);
        }
        true
    }

    fn discard_change(&mut self, slot: usize, entry: Entry) -> Option<Change> {
        let op = self.ops[slot];
        // A redirect does not write the extent that it finds, which may go.
        let targets = |o: &Op| !o.redirect || o.p == entry.p;
        let under_write = self.slow_in_flight(op.v, op.e).any(targets);
        // The second record of a discard only takes away an extent that is still empty.
        let mask = if op.emptied { 0 } else { op.mask };
        if !self.is(Mutation::NoCancel) {
            for other in &mut self.ops {
                let slow =
                    matches!(other.state, OpState::CopyRead | OpState::Write | OpState::Landed)
                        && other.slow;
                if slow && (other.v, other.e) == (op.v, op.e) {
                    other.set &= !mask;
                }
            }
        }
        if entry.is_composite() {
            return self.discard_composite(slot, entry, under_write);
        }
        let bits = entry.bits & !mask;
        let frees = bits == 0
            && entry.p != NONE
            && !op.keep
            && (!under_write || self.is(Mutation::UnmapUnderWrite));
        if bits == entry.bits && !frees {
            return None;
        }
        let after = if frees { UNMAPPED } else { Entry::plain(entry.p, bits) };
        Some((after, RecordKind::Unmap))
    }

    // One record drops one extent (K8): first the base, then the overlay by a second one.
    fn discard_composite(&mut self, slot: usize, entry: Entry, kept: bool) -> Option<Change> {
        let op = &mut self.ops[slot];
        if op.emptied {
            return None;
        }
        let mut after = Entry { bits: entry.bits & !op.mask, ..entry };
        if self.mutation != Mutation::DiscardKeepsUnder {
            after.under &= !op.mask;
        }
        if after.valid() == 0 {
            let at_once = self.mutation == Mutation::DropBoth && !kept && !op.keep;
            op.emptied = !at_once;
            let after = if at_once { UNMAPPED } else { Entry::plain(entry.p, 0) };
            return Some((after, RecordKind::Unmap));
        }
        (after != entry).then_some((after, RecordKind::Unmap))
    }

    fn write_change(&mut self, slot: usize, entry: Entry) -> Option<Change> {
        let op = self.ops[slot];
        let after = if op.redirect {
            self.redirect_change(&op, entry)
        } else {
            self.plain_change(&op, entry)
        };
        if after.bits != 0 {
            return Some((after, RecordKind::Map));
        }
        // All bits were cancelled: an extent allocated for them goes straight back.
        let others = self.slow_in_flight(op.v, op.e).filter(|o| o.p == op.p).count() > 1;
        if !others && entry.p != op.p {
            self.reserved &= !(1 << op.p);
        }
        None
    }

    // A write of the entry's own extent, of a new one, or of a copy; the base of a composite entry
    // stays as it is. Without bits there is nothing to publish.
    fn plain_change(&mut self, op: &Op, entry: Entry) -> Entry {
        let stale = self.is(Mutation::NoReRead);
        let found = if stale {
            Entry { bits: op.old_bits, base: op.base, under: op.old_under, ..entry }
        } else {
            entry
        };
        if op.source != NONE {
            if entry.p != op.source {
                self.unexpected(op);
            }
            self.tally(Kind::OverlayCopied, entry.is_composite());
            return Entry { p: op.p, bits: (found.bits & op.copied) | op.set, ..found };
        }
        if op.set == 0 {
            return UNMAPPED;
        }
        if entry.p == op.p || stale {
            self.tally(Kind::OverlayGrown, entry.is_composite());
            return Entry { p: op.p, bits: found.bits | op.set, ..found };
        }
        if entry.p != NONE {
            self.unexpected(op);
        }
        Entry::plain(op.p, op.set)
    }

    // K2: the redirect publishes above the entry as it is now.
    fn redirect_change(&mut self, op: &Op, entry: Entry) -> Entry {
        if op.set == 0 {
            return UNMAPPED;
        }
        if self.is(Mutation::RedirectNoReRead) {
            return Entry { base: op.base, under: op.old_under, ..Entry::plain(op.p, op.set) };
        }
        if entry.p == op.p && (entry.is_composite() || !self.is(Mutation::RedirectForgetsOthers)) {
            // Another redirect was there first, or a first write after a discard took the base.
            let kind =
                if entry.is_composite() { Kind::RedirectJoined } else { Kind::RedirectMapped };
            self.tally(kind, true);
            return Entry { bits: entry.bits | op.set, ..entry };
        }
        if entry.p == op.base && !entry.is_composite() {
            self.tally(Kind::Redirected, true);
            return Entry { base: entry.p, under: entry.bits, ..Entry::plain(op.p, op.set) };
        }
        if entry.p == NONE {
            // A discard took the base away.
            self.tally(Kind::RedirectAlone, true);
            return Entry::plain(op.p, op.set);
        }
        if entry.p != op.p {
            self.unexpected(op);
        }
        Entry { base: entry.base, under: entry.under, ..Entry::plain(op.p, op.set) }
    }

    // No rule says how a completion changes such an entry. Without one of the rules it goes on, so
    // that the oracle shows the harm.
    fn unexpected(&mut self, op: &Op) {
        if self.is(Mutation::Nothing) {
            self.fail(FaultKind::Unexpected, op.v, ix(op.e), 0);
        }
    }

    /// Record, then visible (R9). The two bitmaps of a composite entry change one after the other.
    pub fn show(&mut self, slot: usize) {
        let record = self.ops[slot].record;
        if record.p != NONE {
            self.reserved &= !(1 << record.p);
        }
        let before = self.map.entry(record.v, record.e);
        let Some(half) = self.halfway(before, record.entry()) else {
            self.publish(record);
            self.shown(slot);
            return;
        };
        self.record(record);
        let Entry { p, bits, base, under, .. } = half;
        self.make_visible(&Record { p, bits, base, under, ..record }, true);
        self.ops[slot].state = OpState::Half;
    }

    /// The second half of a change becomes visible.
    pub fn show_rest(&mut self, slot: usize) {
        let record = self.ops[slot].record;
        self.make_visible(&record, true);
        self.shown(slot);
    }

    fn shown(&mut self, slot: usize) {
        let op = &mut self.ops[slot];
        let overlay_left = op.emptied && op.record.p != NONE && !op.keep;
        op.state = if overlay_left { OpState::Discard } else { OpState::Published };
        self.tally(Kind::BaseDiscarded, overlay_left);
    }

    // K12: what a reader finds between the two halves of a change, if it is neither.
    fn halfway(&self, before: Entry, after: Entry) -> Option<Entry> {
        let half = match (before.is_composite(), after.is_composite()) {
            (true, true) if before.p == after.p && self.is(Mutation::DiscardTopFirst) => {
                Entry { bits: after.bits, ..before }
            }
            (true, true) if before.p == after.p => Entry { under: after.under, ..before },
            (false, true) if self.is(Mutation::UnderAfterTop) => Entry { under: 0, ..after },
            (true, false) if self.is(Mutation::UnderClearedFirst) => Entry { under: 0, ..before },
            _ => after,
        };
        let content = |e: Entry| Entry { lsn: 0, ..e };
        let same = |e: Entry| content(half) == content(e);
        (!same(before) && !same(after)).then_some(half)
    }
}
