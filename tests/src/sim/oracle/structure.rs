//! Volumes coming, going and changing their size or content as a whole; and crashes.

use std::rc::Rc;

use super::{
    BTreeMap, Breach, Intent, Listed, Oracle, Payload, Pending, Registers, Value, Violation, Volume,
};

impl Oracle {
    /// A structure change is asked for under this number.
    pub fn begin_control(&mut self, number: u64, intent: Intent) {
        let since = self.tick();
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
            Intent::Create { .. } | Intent::Delete { .. } => {}
        }
        self.pending.insert(number, Pending { intent, since, copy, change });
    }

    fn begin_rollback(&mut self, id: u32, snapshot: u32, since: u32) -> Option<super::ChangeId> {
        let mut content = self.volumes.get(&snapshot)?.live.clone();
        let volume = self.volumes.get_mut(&id)?;
        let units = volume.live.len().max(content.len());
        content.grow(units);
        Some(volume.begin(0..units, Payload::Copy(Rc::new(content)), since))
    }

    /// A structure change was answered. `id` names the volume that it made, if it made one.
    pub fn end_control(&mut self, number: u64, done: Result<Option<u32>, ()>) {
        let Some(pending) = self.pending.remove(&number) else { return };
        match done {
            Ok(id) => self.carry_out(pending, id, None),
            Err(()) => self.give_up(&pending),
        }
    }

    /// The size of a volume after a rollback is what the mapper says it is.
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
        for pending in self.pending.values_mut() {
            if let Intent::Copy { source, .. } = &pending.intent
                && let Some(copy) = &mut pending.copy
                && let Some(origin) = self.volumes.get(source)
            {
                origin.allow_recent(copy, pending.since, now);
            }
        }
    }

    /// A crash: whether a cut under way has happened is for the size found afterwards to say. Until
    /// then nothing is cut.
    fn leave_cuts_open(&mut self) {
        for pending in self.pending.values_mut() {
            if let Intent::Resize { volume, .. } = &pending.intent
                && let Some(change) = pending.change.take()
                && let Some(volume) = self.volumes.get_mut(volume)
            {
                volume.withdraw(change);
            }
        }
    }

    /// The process died: what was under way may or may not have happened.
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

    /// Power was lost, or all that is left is what power loss leaves.
    pub fn power_lost(&mut self) {
        self.note_copies();
        self.leave_cuts_open();
        let now = self.tick();
        for volume in self.volumes.values_mut() {
            volume.power_lost(now);
        }
        self.watchers.clear();
    }

    /// The pool was opened: compares the volumes it has with those that were promised. Structure
    /// changes that were under way have happened or not; the list tells.
    pub fn opened(&mut self, listed: &[Listed]) -> Result<(), Violation> {
        for (_, pending) in std::mem::take(&mut self.pending) {
            self.resolve(pending, listed);
        }
        for found in listed {
            let Some(volume) = self.volumes.get(&found.id) else {
                let text = format!("{found:?} is there, and must not be");
                return Err(Violation::new(Breach::Volumes, text));
            };
            self.checks += 1;
            let same = volume.name == found.name
                && volume.units == found.units
                && volume.snapshot == found.snapshot;
            if !same {
                let text = format!(
                    "{found:?} should be {:?} of {} units, snapshot {}",
                    volume.name, volume.units, volume.snapshot
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

    fn resolve(&mut self, pending: Pending, listed: &[Listed]) {
        let there = |id: &u32| listed.iter().find(|found| found.id == *id);
        match &pending.intent {
            Intent::Create { name, .. } | Intent::Copy { name, .. } => {
                let new = listed
                    .iter()
                    .find(|found| found.name == *name && !self.volumes.contains_key(&found.id));
                let units = new.map(|found| found.units);
                match new.map(|found| found.id) {
                    Some(id) => self.carry_out(pending, Some(id), units),
                    None => self.give_up(&pending),
                }
            }
            Intent::Delete { volume } => {
                if there(volume).is_none() {
                    self.carry_out(pending, None, None);
                }
            }
            Intent::Resize { volume, units } => {
                // It happened as a whole or not at all, and the size tells which.
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
            Intent::Create { .. } | Intent::Delete { .. } => {}
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
