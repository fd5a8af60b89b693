//! The allowed observations of a client: for each logical cell the written values and their times.
//!
//! A cell is a sub-block, the size of a volume, or its existence. Each change is a *version* with
//! the time it was submitted, ended, was promised against process death (answered or seen) and
//! against power loss. A version is *superseded* by another that began after it ended; it is
//! allowed unless a promised version supersedes it. Versions that overlapped in time are never
//! ordered, so the oracle accepts every order that a client could not distinguish.

use super::list::List;

/// Not yet.
pub const NEVER: u16 = u16::MAX;
/// Index of the cell that holds a volume's size.
pub const SIZE: usize = 6;
/// Index of the cell that holds a volume's existence.
pub const EXISTS: usize = 7;
/// Cells of one volume.
pub const VOLUME_CELLS: usize = 8;
/// Versions of one cell that a history keeps.
pub const VERSIONS: usize = 6;

/// One value of a cell.
#[derive(Clone, Copy, Debug)]
pub struct Version {
    /// The value.
    pub value: u16,
    /// When its request was submitted.
    pub start: u16,
    /// When its request ended, or `NEVER`.
    pub end: u16,
    /// When it was promised to outlive the process, or `NEVER`.
    pub answered: u16,
    /// When a read that was one moment last found it; 0 if never.
    pub seen: u16,
    /// Promised to outlive power loss.
    pub durable: bool,
}

/// Fills unused places.
pub const NO_VERSION: Version =
    Version { value: 0, start: 0, end: 0, answered: 0, seen: 0, durable: true };

/// Which promise holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Everything answered.
    Answered,
    /// Everything flushed.
    Flushed,
}

/// The versions of one cell.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    versions: List<Version, VERSIONS>,
}

impl Cell {
    /// A cell that surely holds `value`.
    pub fn settled(value: u16, now: u16) -> Self {
        let mut versions = List::new(NO_VERSION);
        versions.push(Version {
            value,
            start: now,
            end: now,
            answered: now,
            seen: 0,
            durable: true,
        });
        Self { versions }
    }

    /// True if one more version can be kept; drops those that can never come back, neither to a
    /// recovery nor to a read in flight since `oldest_read`.
    pub fn has_room(&mut self, oldest_read: u16) -> bool {
        if self.versions.len() + 1 >= VERSIONS {
            let old = self.versions;
            self.versions.retain(|y| {
                !old.all().iter().any(|x| {
                    let known = x.durable && x.answered.max(x.seen) <= oldest_read;
                    known && x.start != y.start && supersedes(x, y)
                })
            });
        }
        self.versions.len() + 1 < VERSIONS
    }

    /// A change begins.
    pub fn begin(&mut self, value: u16, now: u16) {
        self.push(value, now, NEVER);
    }

    /// A change that happens at this moment, and is promised later.
    pub fn instant(&mut self, value: u16, now: u16) {
        self.push(value, now, now);
    }

    fn push(&mut self, value: u16, start: u16, end: u16) {
        self.versions.push(Version { value, start, end, answered: NEVER, seen: 0, durable: false });
    }

    /// The change begun at `start` is answered.
    pub fn answer(&mut self, start: u16, now: u16, durable: bool) {
        for x in self.versions.all_mut() {
            if x.start == start {
                x.end = x.end.min(now);
                x.answered = x.answered.min(now);
                x.durable |= durable;
            }
        }
    }

    /// A flush submitted at `moment` is answered.
    pub fn flushed(&mut self, moment: u16) {
        for x in self.versions.all_mut() {
            x.durable |= x.answered <= moment;
        }
    }

    /// The value found is promised against power loss (an idempotent answer).
    pub fn promise_found(&mut self, value: u16, moment: u16) {
        if let Some(x) = self.only(value) {
            x.durable = true;
            x.answered = x.answered.min(moment);
            x.seen = moment;
        }
    }

    /// Requests in flight ended with the process.
    pub fn end_all(&mut self, now: u16) {
        for x in self.versions.all_mut() {
            x.end = x.end.min(now);
        }
    }

    /// May a read that began at `began` return `value`?
    pub fn allows(&self, value: u16, promise: Promise, began: u16) -> bool {
        let all = self.versions.all();
        all.iter().any(|y| {
            y.value == value
                && !all.iter().any(|x| {
                    let promised = match promise {
                        Promise::Answered => x.answered <= began && x.seen <= began,
                        Promise::Flushed => x.durable,
                    };
                    promised && x.start != y.start && supersedes(x, y)
                })
        })
    }

    /// A read of one moment found `value`: from now on it may not go back.
    pub fn found(&mut self, value: u16, now: u16) {
        if let Some(x) = self.only(value) {
            x.answered = x.answered.min(now);
            x.seen = now;
        }
    }

    // Which version was found is known only if the value is there once.
    fn only(&mut self, value: u16) -> Option<&mut Version> {
        let mut hits = self.versions.all_mut().iter_mut().filter(|x| x.value == value);
        let first = hits.next();
        if hits.next().is_some() { None } else { first }
    }
}

fn supersedes(x: &Version, y: &Version) -> bool {
    y.end < x.start.max(x.seen)
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A flushed change is gone after power loss.
    FlushedLost,
    /// An answered change is gone.
    AnsweredLost,
    /// Another volume's bytes, or a previous tenant's.
    Foreign,
    /// The size of a volume is wrong.
    WrongSize,
    /// A volume is there or missing against the promise.
    WrongExistence,
    /// Only some snapshots of a group exist.
    TornGroup,
    /// Reference counts differ from a recount.
    Refcount,
    /// An extent is free and in use, or used twice.
    DoubleUse,
    /// An extent is neither free nor in use at rest.
    Leak,
    /// An extent has two places in one volume, or places of different families or positions.
    Aliased,
    /// A completion found an entry that no rule covers.
    Unexpected,
    /// A request was never answered.
    Stuck,
    /// No superblock or checkpoint can be read.
    Unreadable,
}

/// A violation.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The kind of a fault.
    pub kind: FaultKind,
    /// Volume or extent.
    pub at: u8,
    /// Cell of the volume.
    pub cell: usize,
    /// The value found.
    pub found: u16,
}
