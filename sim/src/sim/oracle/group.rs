//! Groups of snapshots: whether the contents of their members can belong to one moment.
//!
//! Each value that is found in a member says something about the moment of the cut: it came after
//! the write of that value was asked for, and before the answer of any write that is not there.
//! Over all members these two have to leave a moment between them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::volume::{Payload, Volume};
use super::{Breach, Oracle, Time, Value, Violation};

/// A change of a source that was under way while the group was taken, or came about then.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    units: Range<usize>,
    /// The write's number and the volume's ordinal; none if it left no mark of its own.
    tag: Option<(u64, u64)>,
    issued: Time,
    answered: Option<Time>,
}

/// The bounds of the moment at which a group was taken.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// When it was asked for.
    since: Time,
    members: BTreeMap<u32, BTreeMap<usize, Seen>>,
    after: Time,
    before: Time,
}

impl Volume {
    /// Notes the changes that a cut asked for at `since` may or may not contain.
    pub(super) fn note_seen(&self, since: Time, seen: &mut BTreeMap<usize, Seen>) {
        for (id, change) in self.recent_changes(since) {
            let tag = match change.payload {
                Payload::Tags(write) => Some((write, self.ordinal)),
                _ => None,
            };
            let answered = change.answered.filter(|_| !change.failed);
            let units = change.units.clone();
            seen.insert(id, Seen { units, tag, issued: change.issued, answered });
        }
    }
}

impl Oracle {
    /// Notes snapshots that were taken in one cut.
    pub(super) fn note_group(
        &mut self,
        since: Time,
        members: BTreeMap<u32, BTreeMap<usize, Seen>>,
    ) {
        self.cuts.push(Cut { since, members, after: 0, before: Time::MAX });
    }

    /// A unit of a snapshot was found to hold this.
    pub(super) fn note_found(
        &mut self,
        id: u32,
        unit: usize,
        value: Value,
    ) -> Result<(), Violation> {
        for cut in &mut self.cuts {
            let Some(seen) = cut.members.get(&id) else { continue };
            let over = || seen.values().filter(|change| change.units.contains(&unit));
            if over().next().is_none() || over().any(|change| change.tag.is_none()) {
                continue;
            }
            let is_its = |change: &&Seen| {
                change.tag.is_some_and(|(write, of)| Value::data(write, of, unit as u64) == value)
            };
            let found = over().find(is_its);
            let older = |change: &&Seen| match found {
                Some(found) => found.answered.is_some_and(|at| at < change.issued),
                None => change.issued >= cut.since,
            };
            let missing = over().filter(older).filter_map(|change| change.answered).min();
            cut.after = cut.after.max(found.map_or(0, |found| found.issued));
            cut.before = cut.before.min(missing.unwrap_or(Time::MAX));
            self.checks += 1;
            if cut.after >= cut.before {
                let text = format!(
                    "snapshots {:?} are not of one moment: snapshot {id} unit {unit} holds \
                     {value:?}; the cut is after {} and before {}",
                    cut.members.keys(),
                    cut.after,
                    cut.before
                );
                return Err(Violation::new(Breach::Torn, text));
            }
        }
        Ok(())
    }
}
