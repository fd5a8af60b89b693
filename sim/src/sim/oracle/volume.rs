//! One volume as its clients may see it.

use std::ops::Range;
use std::rc::Rc;

use super::register::{Registers, Time};
use crate::sim::content::Value;

/// The payload of a change.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Tags of this write number.
    Tags(u64),
    /// Zeroes.
    Zeroes,
    /// Zeroes over the inner range; the units around it may become zero or stay.
    Discard(Range<usize>),
    /// The content another volume had, any of its possible values (rollback).
    Copy(Rc<Registers>),
}

/// A change of a volume's content that a client asked for.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// Units it covers.
    pub(super) units: Range<usize>,
    /// Its payload.
    pub(super) payload: Payload,
    /// When it was asked for.
    pub(super) issued: Time,
    /// When it ended, if it has.
    pub(super) answered: Option<Time>,
    /// Whether it ended with an error: then it may or may not have happened.
    pub(super) failed: bool,
}

impl Change {
    /// Whether this change may have put the value into the unit.
    fn explains(&self, ordinal: u64, unit: usize, value: Value) -> bool {
        if !self.units.contains(&unit) {
            return false;
        }
        match &self.payload {
            Payload::Tags(write) => value == Value::data(*write, ordinal, unit as u64),
            Payload::Zeroes | Payload::Discard(_) => value == Value::ZERO,
            Payload::Copy(from) => from.allows(unit, value),
        }
    }

    /// Whether it was still under way at or after this time.
    fn touches(&self, since: Time) -> bool {
        self.answered.is_none_or(|answered| answered >= since)
    }

    fn apply(&self, ordinal: u64, registers: &mut Registers, answered: Time) {
        for unit in self.units.clone() {
            let loose = self.failed
                || matches!(&self.payload, Payload::Discard(inner) if !inner.contains(&unit));
            let value = match &self.payload {
                Payload::Tags(write) => Value::data(*write, ordinal, unit as u64),
                Payload::Zeroes | Payload::Discard(_) => Value::ZERO,
                Payload::Copy(from) => from.value(unit),
            };
            if loose {
                registers.allow(unit, value, answered);
            } else {
                registers.put(unit, value, self.issued, answered);
            }
            if let Payload::Copy(from) = &self.payload
                && from.is_open(unit)
            {
                for other in from.values(unit) {
                    registers.allow(unit, other, answered);
                }
            }
        }
    }
}

/// The known state of a volume.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its number in order of creation: part of every tag written to it.
    pub ordinal: u64,
    /// Units it has at present.
    pub units: usize,
    /// Units of its logical block.
    pub block_units: usize,
    /// Whether it never changes.
    pub snapshot: bool,
    /// The value of its one label.
    pub label: Option<String>,
    /// Whether it must have that label: not after an opening that could not read some labels.
    pub is_label_known: bool,
    /// When it last lost units at its end.
    pub cut_at: Time,
    /// The values that a read may return now.
    pub live: Registers,
    /// The values that power loss may bring back, without the changes of `unflushed`.
    pub floor: Registers,
    changes: Vec<Change>,
    /// Changes under way, and those that ended while a reader or a copy may still care.
    recent: Vec<usize>,
    /// Changes that no flush has covered yet.
    unflushed: Vec<usize>,
}

/// Names a change of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangeId(usize);

impl Volume {
    /// A volume with this content.
    #[must_use]
    pub fn new(
        name: String,
        ordinal: u64,
        units: usize,
        block_units: usize,
        live: Registers,
    ) -> Self {
        let floor = live.clone();
        Self {
            name,
            ordinal,
            units,
            block_units,
            snapshot: false,
            label: None,
            is_label_known: true,
            cut_at: 0,
            live,
            floor,
            changes: Vec::new(),
            recent: Vec::new(),
            unflushed: Vec::new(),
        }
    }

    /// A client asks for a change.
    pub fn begin(&mut self, units: Range<usize>, payload: Payload, now: Time) -> ChangeId {
        self.live.grow(units.end);
        self.floor.grow(units.end);
        let id = self.changes.len();
        let change = Change { units, payload, issued: now, answered: None, failed: false };
        self.changes.push(change);
        self.recent.push(id);
        self.unflushed.push(id);
        ChangeId(id)
    }

    /// The change was answered: with success, or with an error, after which it may be there or not.
    pub fn end(&mut self, id: ChangeId, failed: bool, now: Time) {
        let change = &mut self.changes[id.0];
        change.answered = Some(now);
        change.failed = failed;
        let change = change.clone();
        change.apply(self.ordinal, &mut self.live, now);
    }

    /// The change was refused before anything was done: it is as if it had never been asked for.
    pub fn withdraw(&mut self, id: ChangeId) {
        self.recent.retain(|other| *other != id.0);
        self.unflushed.retain(|other| *other != id.0);
    }

    /// A flush that arrived at `since` was answered: changes answered by then stay.
    pub fn flushed(&mut self, since: Time) {
        let all = std::mem::take(&mut self.unflushed);
        let mut done: Vec<usize> = Vec::new();
        for id in all {
            if self.changes[id].answered.is_some_and(|answered| answered < since) {
                done.push(id);
            } else {
                self.unflushed.push(id);
            }
        }
        done.sort_by_key(|id| self.changes[*id].answered);
        for id in done {
            self.sink(id);
        }
    }

    /// A change was answered that is durable by itself (FUA).
    pub fn durable(&mut self, id: ChangeId) {
        self.unflushed.retain(|other| *other != id.0);
        self.sink(id.0);
    }

    fn sink(&mut self, id: usize) {
        let change = self.changes[id].clone();
        let answered = change.answered.unwrap_or_default();
        change.apply(self.ordinal, &mut self.floor, answered);
    }

    /// Forgets ended changes that are irrelevant for requests that began at or after `oldest`.
    pub fn prune(&mut self, oldest: Time) {
        let changes = &self.changes;
        self.recent.retain(|id| changes[*id].touches(oldest));
    }

    /// Whether a read that began at `since` and ends now may return this value, given the possible
    /// values when it began.
    #[must_use]
    pub fn may_read(&self, unit: usize, value: Value, since: Time) -> bool {
        self.recent.iter().any(|id| {
            let change = &self.changes[*id];
            change.touches(since) && change.explains(self.ordinal, unit, value)
        })
    }

    /// Whether no change of the unit was under way since then.
    #[must_use]
    pub fn is_still(&self, unit: usize, since: Time) -> bool {
        !self.recent.iter().any(|id| {
            let change = &self.changes[*id];
            change.touches(since) && change.units.contains(&unit)
        })
    }

    /// Changes that were under way at or after this time.
    pub(super) fn recent_changes(&self, since: Time) -> impl Iterator<Item = (usize, &Change)> {
        let changes = self.recent.iter().map(|id| (*id, &self.changes[*id]));
        changes.filter(move |(_, change)| change.touches(since))
    }

    /// Notes every value that changes under way since then may have left in a copy taken of it.
    pub fn allow_recent(&self, copy: &mut Registers, since: Time, now: Time) {
        for id in &self.recent {
            let change = &self.changes[*id];
            if change.touches(since) {
                copy.grow(change.units.end);
                let loose = Change { failed: true, ..change.clone() };
                loose.apply(self.ordinal, copy, now);
            }
        }
    }

    /// The process died: changes under way may or may not have happened.
    pub fn killed(&mut self, now: Time) {
        for id in std::mem::take(&mut self.recent) {
            if self.changes[id].answered.is_none() {
                self.end(ChangeId(id), true, now);
            }
        }
    }

    /// Power was lost: everything no flush has covered may or may not be there.
    pub fn power_lost(&mut self, now: Time) {
        self.recent.clear();
        let mut all = std::mem::take(&mut self.unflushed);
        all.sort_by_key(|id| self.changes[*id].answered.unwrap_or(Time::MAX));
        let mut open = self.floor.clone();
        for id in &all {
            let change = &self.changes[*id];
            let loose = Change { failed: true, ..change.clone() };
            let answered = change.answered.unwrap_or(now);
            // A value that a later durable change of a unit superseded cannot come back.
            for unit in change.units.clone() {
                if !self.floor.has_superseded(unit, answered) {
                    let one = Change { units: unit..unit + 1, ..loose.clone() };
                    one.apply(self.ordinal, &mut open, answered);
                }
            }
        }
        self.live = open.clone();
        self.floor = open;
    }

    /// Records the value that a read of the whole volume after power loss returned as the only
    /// possible one.
    pub fn settle(&mut self, unit: usize, value: Value, now: Time, durable: bool) {
        self.live.settle(unit, value, now);
        if durable {
            self.floor.settle(unit, value, now);
        }
    }
}
