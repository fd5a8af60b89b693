//! The oracle: records the promises to clients, and checks that they are kept.
//!
//! Power loss: everything before the last answered flush or FUA write is there, anything later may
//! be, unit by unit. Process death with the ring accepted: every answered write is there. Always:
//! never another volume's bytes, a snapshot never changes, and volumes are there or gone as
//! answered. The oracle knows nothing of extents, logs or commits.

mod register;
mod volume;

use std::collections::BTreeMap;
use std::ops::Range;

pub use register::{Registers, Time};
pub use volume::{ChangeId, Payload, Volume};

use super::content::{Kind, Value};

/// How a promise was broken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Breach {
    /// Zeroes where data had to be.
    Lost,
    /// Older data of the same place.
    Stale,
    /// Data of another place of the volume.
    Misplaced,
    /// Data of another volume.
    Foreign,
    /// The content of a discarded unit.
    Garbage,
    /// Metadata handed to a client.
    Metadata,
    /// A group of snapshots is not of one moment.
    Torn,
    /// Two volumes differ otherwise than was said.
    Difference,
    /// Deleting a volume gave back something else than was said.
    GivenBack,
    /// A volume is missing, back again, or of the wrong size.
    Volumes,
    /// The mapper's own recount failed.
    Invariant,
    /// Requests that nothing will ever answer.
    NoProgress,
    /// A call failed that had to work.
    Error,
    /// The mapper refused to open a pool it had to open.
    Refused,
    /// A request that had to be refused was accepted.
    Accepted,
    /// The mapper panicked.
    Panic,
}

/// A broken promise, with its context.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// How.
    pub breach: Breach,
    /// The place, and the expected values.
    pub text: String,
}

impl Violation {
    /// A violation.
    #[must_use]
    pub fn new(breach: Breach, text: String) -> Self {
        Self { breach, text }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.breach, self.text)
    }
}

/// A structure change that was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Intent {
    /// A new empty volume.
    Create {
        /// Its name.
        name: String,
        /// Its units.
        units: usize,
        /// Units of its logical block.
        block_units: usize,
    },
    /// The end of a volume.
    Delete {
        /// Which.
        volume: u32,
    },
    /// Another size.
    Resize {
        /// Which volume.
        volume: u32,
        /// Units it is to have.
        units: usize,
    },
    /// A copy: read-only for a snapshot.
    Copy {
        /// The source volume.
        source: u32,
        /// The copy's name.
        name: String,
        /// Units it is to have.
        units: usize,
        /// Whether it may never change.
        snapshot: bool,
    },
    /// Snapshots of several volumes in one cut.
    Group {
        /// Volumes, and the names of their snapshots.
        members: Vec<(u32, String)>,
    },
    /// A volume's content becomes that of a snapshot.
    Rollback {
        /// Which volume.
        volume: u32,
        /// To which snapshot.
        snapshot: u32,
    },
    /// Another name.
    Rename {
        /// Which volume.
        volume: u32,
        /// Its new name.
        name: String,
    },
    /// Another label, or none.
    Label {
        /// Which volume.
        volume: u32,
        /// The value of its one label.
        label: Option<String>,
    },
}

#[derive(Clone, Debug)]
struct Pending {
    intent: Intent,
    since: Time,
    /// The content of the source when a copy was requested.
    copy: Option<Registers>,
    /// The allowed contents of a copy, for a group.
    seen: BTreeMap<usize, group::Seen>,
    /// The change of content that comes with it.
    change: Option<ChangeId>,
}

/// A read under way.
#[derive(Clone, Debug)]
pub struct Reading {
    volume: u32,
    units: Range<usize>,
    since: Time,
    seen: Registers,
}

/// A volume as the mapper lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its units.
    pub units: usize,
    /// Whether it is a snapshot.
    pub snapshot: bool,
    /// The value of its one label.
    pub label: Option<String>,
}

/// Everything promised so far.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    volumes: BTreeMap<u32, Volume>,
    /// Pending changes by number of the command: one change, or the members of a group.
    pending: BTreeMap<u64, Vec<Pending>>,
    cuts: Vec<group::Cut>,
    /// Root of the family of each volume, by ordinal.
    families: Vec<u64>,
    /// When each read and copy under way began, by volume.
    watchers: BTreeMap<u32, Vec<Time>>,
    clock: Time,
    next_write: u64,
    checks: u64,
}

impl Oracle {
    /// Units compared so far.
    #[must_use]
    pub fn checks(&self) -> u64 {
        self.checks
    }

    /// The volumes there are, by id.
    #[must_use]
    pub fn volumes(&self) -> &BTreeMap<u32, Volume> {
        &self.volumes
    }

    /// Whether a structure change involving this volume is under way.
    #[must_use]
    pub fn is_busy(&self, id: u32) -> bool {
        self.pending.values().flatten().any(|pending| match &pending.intent {
            Intent::Create { .. } | Intent::Group { .. } => false,
            Intent::Delete { volume }
            | Intent::Resize { volume, .. }
            | Intent::Rename { volume, .. }
            | Intent::Label { volume, .. } => *volume == id,
            Intent::Copy { source, .. } => *source == id,
            Intent::Rollback { volume, snapshot } => *volume == id || *snapshot == id,
        })
    }

    /// Structure changes under way.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// The time now; every call is a moment of its own.
    pub fn tick(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// A number for a new write.
    pub fn write_number(&mut self) -> u64 {
        self.next_write += 1;
        self.next_write
    }

    /// A client asks for a change of content.
    pub fn begin_change(
        &mut self,
        id: u32,
        units: Range<usize>,
        payload: Payload,
    ) -> Option<ChangeId> {
        let now = self.tick();
        self.volumes.get_mut(&id).map(|volume| volume.begin(units, payload, now))
    }

    /// A change of content was answered; `durable` if the answer promises durability.
    pub fn end_change(&mut self, id: u32, change: ChangeId, failed: bool, durable: bool) {
        let now = self.tick();
        let oldest = self.oldest(id);
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.end(change, failed, now);
            if durable && !failed {
                volume.durable(change);
            }
            volume.prune(oldest.unwrap_or(now));
        }
    }

    /// A flush that arrived at `since` was answered.
    pub fn end_flush(&mut self, id: u32, since: Time) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.flushed(since);
        }
    }

    /// A client asks for a read.
    pub fn begin_read(&mut self, id: u32, units: Range<usize>) -> Option<Reading> {
        let since = self.tick();
        let volume = self.volumes.get_mut(&id)?;
        volume.live.grow(units.end);
        volume.floor.grow(units.end);
        let seen = volume.live.slice(units.start, units.len());
        self.watchers.entry(id).or_default().push(since);
        Some(Reading { volume: id, units, since, seen })
    }

    /// A read failed or was abandoned.
    pub fn drop_read(&mut self, reading: &Reading) {
        self.unwatch(reading.volume, reading.since);
    }

    /// Checks the result of a read.
    pub fn end_read(&mut self, reading: &Reading, found: &[Value]) -> Result<(), Violation> {
        let now = self.tick();
        self.unwatch(reading.volume, reading.since);
        let Some(volume) = self.volumes.get_mut(&reading.volume) else { return Ok(()) };
        for (at, value) in found.iter().enumerate() {
            let unit = reading.units.start + at;
            self.checks += 1;
            let simple = reading.seen.value(at) == *value && !reading.seen.is_open(at);
            if simple {
                continue;
            }
            let legal =
                reading.seen.allows(at, *value) || volume.may_read(unit, *value, reading.since);
            if !legal {
                let id = reading.volume;
                let expected = reading.seen.values(at);
                return Err(breach(&self.families, volume, id, unit, *value, &expected));
            }
            if volume.live.is_open(unit) && volume.is_still(unit, reading.since) {
                let durable = volume.snapshot;
                volume.settle(unit, *value, now, durable);
            }
        }
        self.note_all_found(reading.volume, reading.units.start, found)
    }

    fn note_all_found(&mut self, id: u32, start: usize, found: &[Value]) -> Result<(), Violation> {
        if self.cuts.is_empty() {
            return Ok(());
        }
        (start..).zip(found).try_for_each(|(unit, value)| self.note_found(id, unit, *value))
    }

    /// Adopts the values that a read of a pool at rest found after its opening. `durable`: the pool
    /// was opened after a loss of power, so all of it is on the media.
    pub fn settle(
        &mut self,
        id: u32,
        start: usize,
        found: &[Value],
        durable: bool,
    ) -> Result<(), Violation> {
        let now = self.tick();
        let Some(volume) = self.volumes.get_mut(&id) else { return Ok(()) };
        volume.live.grow(start + found.len());
        volume.floor.grow(start + found.len());
        for (at, value) in found.iter().enumerate() {
            let unit = start + at;
            self.checks += 1;
            if !volume.live.allows(unit, *value) {
                let expected = volume.live.values(unit);
                return Err(breach(&self.families, volume, id, unit, *value, &expected));
            }
            if durable || volume.live.is_open(unit) {
                volume.settle(unit, *value, now, durable || volume.snapshot);
            }
        }
        self.note_all_found(id, start, found)
    }

    /// The change was refused before anything was done.
    pub fn withdraw(&mut self, id: u32, change: ChangeId) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.withdraw(change);
        }
    }

    /// Whether the volume lost units at its end since then.
    #[must_use]
    pub fn was_cut(&self, id: u32, since: Time) -> bool {
        self.volumes.get(&id).is_some_and(|volume| volume.cut_at >= since)
    }

    fn oldest(&self, id: u32) -> Option<Time> {
        self.watchers.get(&id).and_then(|all| all.iter().min().copied())
    }

    fn unwatch(&mut self, id: u32, since: Time) {
        if let Some(all) = self.watchers.get_mut(&id)
            && let Some(at) = all.iter().position(|time| *time == since)
        {
            all.swap_remove(at);
        }
    }
}

/// Classifies a wrong value.
fn breach(
    families: &[u64],
    volume: &Volume,
    id: u32,
    unit: usize,
    found: Value,
    expected: &[Value],
) -> Violation {
    let family = |ordinal: u64| families.get(usize::try_from(ordinal).unwrap_or(usize::MAX));
    let breach = match found.kind() {
        Kind::Zero => Breach::Lost,
        Kind::Garbage => Breach::Garbage,
        Kind::Metadata(_) => Breach::Metadata,
        Kind::Data { volume: from, unit: at, .. } => {
            if family(from) != family(volume.ordinal) {
                Breach::Foreign
            } else if at == unit as u64 {
                Breach::Stale
            } else {
                Breach::Misplaced
            }
        }
    };
    let text = format!(
        "volume {id} {:?} (v{}) unit {unit}: found {found:?}, allowed {expected:?}",
        volume.name, volume.ordinal
    );
    Violation::new(breach, text)
}

mod difference;
mod group;
mod structure;

#[cfg(test)]
mod tests;
