//! Volumes coming, going and changing their size or content as a whole; and crashes.

use std::rc::Rc;

use super::{
    BTreeMap, Breach, Intent, Listed, Oracle, Payload, Pending, Registers, Time, Value, Violation,
    Volume,
};

impl Oracle {
    /// A structure change is asked for under this number.
    pub fn begin_control(&mut self, number: u64, intent: Intent) {
        let since = self.tick();
        let all = match intent {
            Intent::Group { members } => {
                let copy = |(source, name): (u32, String)| {
                    let units = self.volumes.get(&source).map_or(0, |volume| volume.units);
                    Intent::Copy { source, name, units, snapshot: true }
                };
                members.into_iter().map(copy).collect()
            }
            single => vec![single],
        };
        let all = all.into_iter().map(|intent| self.begin_single(intent, since)).collect();
        self.pending.insert(number, all);
    }

    fn begin_single(&mut self, intent: Intent, since: Time) -> Pending {
        let mut copy = None;
        let mut change = None;
        match &intent {
            Intent::Copy { source, units, .. } => {
                if let Some(volume) = self.volumes.get(source) {
                    let held = volume.live.slice(0, volume.units.min(volume.live.len()));
                    copy = Some(held);
                }
                let _ = units;
                self.watchers.entry(*source).or_default().push(since);
            }
            Intent::Resize { volume, units } => {
                if let Some(found) = self.volumes.get_mut(volume)
                    && *units < found.units
                {
                    let cut = *units..found.units;
                    change = Some(found.begin(cut, Payload::Zeroes, since));
                }
            }
            Intent::Rollback { volume, snapshot } => {
                change = self.begin_rollback(*volume, *snapshot, since);
            }
            Intent::Create { .. }
            | Intent::Delete { .. }
            | Intent::Group { .. }
            | Intent::Rename { .. }
            | Intent::Label { .. } => {}
        }
        Pending { intent, since, copy, seen: BTreeMap::new(), change }
    }

    fn begin_rollback(&mut self, id: u32, snapshot: u32, since: u32) -> Option<super::ChangeId> {
        let mut content = self.volumes.get(&snapshot)?.live.clone();
        let volume = self.volumes.get_mut(&id)?;
        let units = volume.live.len().max(content.len());
        content.grow(units);
        Some(volume.begin(0..units, Payload::Copy(Rc::new(content)), since))
    }

    /// A structure change was answered. `ids` are the volumes that it made.
    pub fn end_control(&mut self, number: u64, done: Result<&[u32], ()>) {
        let Some(mut all) = self.pending.remove(&number) else { return };
        let Ok(ids) = done else {
            return all.iter().for_each(|pending| self.give_up(pending));
        };
        let now = self.tick();
        all.iter_mut().for_each(|pending| self.note_copy(pending, now));
        self.note_members(&mut all, ids);
        for (number, pending) in all.into_iter().enumerate() {
            self.carry_out(pending, ids.get(number).copied(), None);
        }
    }

    /// Several snapshots by one command are a group.
    fn note_members(&mut self, all: &mut [Pending], ids: &[u32]) {
        if let [first, _, ..] = &*all {
            let since = first.since;
            let seen = all.iter_mut().map(|pending| std::mem::take(&mut pending.seen));
            self.note_group(since, ids.iter().copied().zip(seen).collect());
        }
    }

    /// The size of a volume after a rollback is the one that the mapper reports.
    pub fn set_units(&mut self, id: u32, units: usize) {
        let now = self.clock;
        if let Some(volume) = self.volumes.get_mut(&id) {
            if units < volume.units {
                volume.cut_at = now;
            }
            volume.live.grow(units);
            volume.floor.grow(units);
            volume.units = units;
        }
    }

    /// Copies under way may hold whatever was written while they were.
    fn note_copies(&mut self) {
        let now = self.tick();
        let mut all = std::mem::take(&mut self.pending);
        all.values_mut().flatten().for_each(|pending| self.note_copy(pending, now));
        self.pending = all;
    }

    fn note_copy(&self, pending: &mut Pending, now: Time) {
        if let Intent::Copy { source, .. } = &pending.intent
            && let Some(copy) = &mut pending.copy
            && let Some(origin) = self.volumes.get(source)
        {
            origin.allow_recent(copy, pending.since, now);
            origin.note_seen(pending.since, &mut pending.seen);
        }
    }

    /// A crash: whether a cut under way has happened is for the size found afterwards to say. Until
    /// then nothing is cut.
    fn leave_cuts_open(&mut self) {
        for pending in self.pending.values_mut().flatten() {
            if let Intent::Resize { volume, .. } = &pending.intent
                && let Some(change) = pending.change.take()
                && let Some(volume) = self.volumes.get_mut(volume)
            {
                volume.withdraw(change);
            }
        }
    }

    /// The process died: operations in flight may or may not have happened.
    pub fn killed(&mut self) {
        self.note_copies();
        self.leave_cuts_open();
        let now = self.tick();
        for volume in self.volumes.values_mut() {
            volume.killed(now);
        }
        self.watchers.clear();
    }

    /// The pool was closed in order: every answered change is durable.
    pub fn closed(&mut self) {
        let now = self.tick();
        for volume in self.volumes.values_mut() {
            volume.flushed(now);
        }
        self.watchers.clear();
    }

    /// Power was lost, or the state is the same as after a power loss.
    pub fn power_lost(&mut self) {
        self.note_copies();
        self.leave_cuts_open();
        let now = self.tick();
        for volume in self.volumes.values_mut() {
            volume.power_lost(now);
        }
        self.watchers.clear();
    }

    /// Some labels could not be read: until each is set again, volumes may be without them.
    pub fn labels_lost(&mut self) {
        for volume in self.volumes.values_mut() {
            volume.is_label_known = false;
        }
    }

    /// The pool was opened: compares the volumes it has with those that were promised. Structure
    /// changes in flight have happened or not, as the list shows.
    pub fn opened(&mut self, listed: &[Listed]) -> Result<(), Violation> {
        for (_, mut all) in std::mem::take(&mut self.pending) {
            let found: Vec<Option<u32>> =
                all.iter().map(|pending| self.made(pending, listed)).collect();
            let ids: Vec<u32> = found.iter().flatten().copied().collect();
            if all.len() > 1 && !ids.is_empty() {
                if ids.len() < all.len() {
                    let text = format!("of a group of {} only {ids:?} are there", all.len());
                    return Err(Violation::new(Breach::Volumes, text));
                }
                self.note_members(&mut all, &ids);
            }
            all.into_iter().for_each(|pending| self.resolve(pending, listed));
        }
        for found in listed {
            let Some(volume) = self.volumes.get(&found.id) else {
                let text = format!("{found:?} is there, and must not be");
                return Err(Violation::new(Breach::Volumes, text));
            };
            self.checks += 1;
            let same = volume.name == found.name
                && volume.units == found.units
                && volume.snapshot == found.snapshot
                && (volume.label == found.label || !volume.is_label_known);
            if !same {
                let text = format!(
                    "{found:?} should be {:?} of {} units, snapshot {}, label {:?}",
                    volume.name, volume.units, volume.snapshot, volume.label
                );
                return Err(Violation::new(Breach::Volumes, text));
            }
        }
        if let Some((id, volume)) =
            self.volumes.iter().find(|(id, _)| !listed.iter().any(|found| found.id == **id))
        {
            let text = format!("volume {id} {:?} is missing", volume.name);
            return Err(Violation::new(Breach::Volumes, text));
        }
        Ok(())
    }

    /// The volume that a change under way has made.
    fn made(&self, pending: &Pending, listed: &[Listed]) -> Option<u32> {
        let (Intent::Create { name, .. } | Intent::Copy { name, .. }) = &pending.intent else {
            return None;
        };
        let is_new = |found: &&Listed| !self.volumes.contains_key(&found.id);
        listed.iter().find(|found| found.name == *name && is_new(found)).map(|found| found.id)
    }

    fn resolve(&mut self, pending: Pending, listed: &[Listed]) {
        let there = |id: &u32| listed.iter().find(|found| found.id == *id);
        match &pending.intent {
            Intent::Create { .. } | Intent::Copy { .. } => match self.made(&pending, listed) {
                Some(id) => {
                    let units = there(&id).map(|found| found.units);
                    self.carry_out(pending, Some(id), units);
                }
                None => self.give_up(&pending),
            },
            Intent::Group { .. } => {}
            Intent::Delete { volume } => {
                if there(volume).is_none() {
                    self.carry_out(pending, None, None);
                }
            }
            Intent::Resize { volume, units } => {
                // The change happened as a whole or not at all, as the size shows.
                if there(volume).is_some_and(|found| found.units == *units) {
                    self.cut(*volume, *units);
                }
            }
            Intent::Rollback { volume, .. } => {
                // Content: the change stays possible. Size: as listed.
                if let Some(units) = there(volume).map(|found| found.units) {
                    self.set_units(*volume, units);
                }
            }
            Intent::Rename { volume, name } => {
                // The old name or the new one: any other is found out below.
                if there(volume).is_some_and(|found| found.name == *name) {
                    self.carry_out(pending, None, None);
                }
            }
            Intent::Label { volume, label } => {
                let is_known = self.volumes.get(volume).is_some_and(|one| one.is_label_known);
                if is_known && there(volume).is_some_and(|found| found.label == *label) {
                    self.carry_out(pending, None, None);
                }
            }
        }
    }

    fn cut(&mut self, id: u32, units: usize) {
        let now = self.tick();
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.live.grow(units);
        volume.floor.grow(units);
        for unit in units..volume.live.len().min(volume.floor.len()) {
            volume.settle(unit, Value::ZERO, now, true);
        }
        volume.units = units;
    }

    fn carry_out(&mut self, pending: Pending, id: Option<u32>, listed: Option<usize>) {
        let now = self.tick();
        match pending.intent {
            Intent::Create { name, units, block_units } => {
                let Some(id) = id else { return };
                let ordinal = self.ordinal(None);
                let content = Registers::zeroed(units);
                let volume = Volume::new(name, ordinal, units, block_units, content);
                self.volumes.insert(id, volume);
            }
            Intent::Delete { volume } => {
                self.volumes.remove(&volume);
                self.watchers.remove(&volume);
            }
            Intent::Resize { volume, units } => {
                if let Some(change) = pending.change {
                    self.end_change(volume, change, false, true);
                }
                if let Some(found) = self.volumes.get_mut(&volume) {
                    if units < found.units {
                        found.cut_at = now;
                    }
                    found.live.grow(units);
                    found.floor.grow(units);
                    found.units = units;
                }
            }
            Intent::Copy { source, name, units, snapshot } => {
                self.unwatch(source, pending.since);
                let (Some(id), Some(mut copy)) = (id, pending.copy) else { return };
                let ordinal = self.ordinal(Some(source));
                let Some(origin) = self.volumes.get(&source) else { return };
                origin.allow_recent(&mut copy, pending.since, now);
                let units = listed.unwrap_or(units);
                copy.grow(units);
                let mut volume = Volume::new(name, ordinal, units, origin.block_units, copy);
                volume.snapshot = snapshot;
                self.volumes.insert(id, volume);
            }
            Intent::Rollback { volume, .. } => {
                if let Some(change) = pending.change {
                    self.end_change(volume, change, false, true);
                }
            }
            Intent::Rename { volume, name } => {
                if let Some(found) = self.volumes.get_mut(&volume) {
                    found.name = name;
                }
            }
            Intent::Label { volume, label } => {
                if let Some(found) = self.volumes.get_mut(&volume) {
                    (found.label, found.is_label_known) = (label, true);
                }
            }
            Intent::Group { .. } => {}
        }
    }

    fn give_up(&mut self, pending: &Pending) {
        match &pending.intent {
            Intent::Copy { source, .. } => self.unwatch(*source, pending.since),
            Intent::Resize { volume, .. } | Intent::Rollback { volume, .. } => {
                if let Some(change) = pending.change {
                    self.end_change(*volume, change, true, false);
                }
            }
            Intent::Create { .. }
            | Intent::Delete { .. }
            | Intent::Group { .. }
            | Intent::Rename { .. }
            | Intent::Label { .. } => {}
        }
    }

    fn ordinal(&mut self, source: Option<u32>) -> u64 {
        let ordinal = self.families.len() as u64;
        let parent = source.and_then(|id| self.volumes.get(&id)).map(|volume| volume.ordinal);
        let family = parent
            .and_then(|parent| self.families.get(super::super::content::index(parent)).copied());
        self.families.push(family.unwrap_or(ordinal));
        ordinal
    }

    /// Forgets the names of watchers; for a copy of the oracle taken at a crash.
    pub fn unwatch_all(&mut self) {
        self.watchers = BTreeMap::new();
    }
}
