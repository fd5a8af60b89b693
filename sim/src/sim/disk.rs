//! A simulated block device with a volatile cache.
//!
//! A write goes from *in flight* to *in the cache* (where reads see it) to *durable*. Completion
//! happens in any order; a write may be in the cache long before it is answered. A flush makes the
//! writes durable that were answered when it was submitted, and nothing else. Power loss keeps any
//! subset of the rest, whole or torn into 512-byte units, writes in flight included. Process death
//! leaves the submitted writes behind as *dead* IO that lands later in any order.

mod size;

use super::content::{Value, index};

/// An operation of a device. Positions and lengths are units of 512 bytes.
#[derive(Clone, Debug)]
pub enum Action {
    /// Read this many units from here.
    Read {
        /// First unit.
        start: u64,
        /// Units.
        count: u64,
    },
    /// Write these units.
    Write {
        /// First unit.
        start: u64,
        /// Their content.
        values: Vec<Value>,
        /// Durable when answered.
        fua: bool,
    },
    /// The content is no longer needed.
    Discard {
        /// First unit.
        start: u64,
        /// Units.
        count: u64,
    },
    /// Make answered writes durable.
    Flush,
    /// Wait until no IO of a dead owner is left.
    Fence,
}

/// How an operation ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// No fault.
    None,
    /// Media error. A write that fails may have reached any part of its units.
    Media,
    /// No data written for lack of space.
    NoSpace,
    /// Answered as done, never stored.
    Dropped,
    /// Answered as done, stored this many units further on.
    Misdirected(u64),
}

/// An operation that was submitted and not yet answered.
#[derive(Clone, Debug)]
pub struct Flight {
    /// The submitter's name for it.
    pub token: u64,
    /// The operation.
    pub action: Action,
    /// Whether it belongs to a client's data rather than to the mapper's metadata.
    pub data: bool,
    submitted: u64,
    /// The log number, once a write is in the cache.
    executed: Option<u64>,
    result: Vec<Value>,
}

/// The answer to an operation.
#[derive(Debug)]
pub struct Answered {
    /// The submitter's name for the operation.
    pub token: u64,
    /// The finished operation.
    pub action: Action,
    /// The values of a read.
    pub values: Vec<Value>,
    /// The fault: only `None`, `Media` and `NoSpace` are reported to the submitter.
    pub fault: Fault,
}

#[derive(Clone, Debug)]
struct Logged {
    number: u64,
    answered: Option<u64>,
    start: u64,
    values: Vec<Value>,
}

/// Which of the writes that are not durable survive a loss of power.
#[derive(Clone, Debug)]
pub enum Keep {
    /// None of them.
    Nothing,
    /// All of them.
    Everything,
    /// Each with this probability, whole.
    Some(f64),
    /// Each unit of each with this probability.
    Torn(f64),
    /// The units of each write from this one on.
    From(usize),
    /// The units of each write before this one.
    Until(usize),
    /// The writes of the bit mask, in [`Disk::volatile`] order, whole.
    Mask(Vec<bool>),
    /// The writes of the bit mask; of the last one only the units for which the second mask is set
    /// (repeated over its length).
    MaskTorn(Vec<bool>, u8),
}

/// One simulated device.
#[derive(Clone, Debug)]
pub struct Disk {
    media: Vec<Value>,
    /// Per unit the number of the newest write that is durable there.
    stamps: Vec<u64>,
    cache: Vec<Value>,
    log: Vec<Logged>,
    flights: Vec<Flight>,
    dead: Vec<Flight>,
    clock: u64,
    number: u64,
}

impl Disk {
    /// A device of zeroes.
    #[must_use]
    pub fn new(units: u64) -> Self {
        let len = index(units);
        Self {
            media: vec![Value::ZERO; len],
            stamps: vec![0; len],
            cache: vec![Value::ZERO; len],
            log: Vec::new(),
            flights: Vec::new(),
            dead: Vec::new(),
            clock: 0,
            number: 0,
        }
    }

    /// Units of the device.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.media.len() as u64
    }

    /// Hands an operation to the device.
    pub fn submit(&mut self, token: u64, action: Action, data: bool) {
        self.clock += 1;
        let submitted = self.clock;
        self.flights.push(Flight {
            token,
            action,
            data,
            submitted,
            executed: None,
            result: Vec::new(),
        });
    }

    /// Operations not yet answered.
    #[must_use]
    pub fn flights(&self) -> &[Flight] {
        &self.flights
    }

    /// IO of a dead owner that has still to land.
    #[must_use]
    pub fn dead(&self) -> usize {
        self.dead.len()
    }

    /// Whether operation `at` could be answered now.
    #[must_use]
    pub fn ready(&self, at: usize) -> bool {
        !matches!(self.flights[at].action, Action::Fence) || self.dead.is_empty()
    }

    /// Carries operation `at` out without answering it yet: a write is in the cache, a read has its
    /// values. Flushes and fences do their work when answered.
    pub fn execute(&mut self, at: usize, garbage: u64) {
        if self.flights[at].executed.is_some() {
            return;
        }
        self.number += 1;
        let number = self.number;
        let flight = &mut self.flights[at];
        flight.executed = Some(number);
        match &flight.action {
            Action::Read { start, count } => {
                let from = index(*start);
                flight.result.extend_from_slice(&self.cache[from..from + index(*count)]);
            }
            Action::Write { start, values, .. } => {
                let (start, values) = (*start, values.clone());
                self.cached(number, start, values);
            }
            Action::Discard { start, count } => {
                let (start, count) = (*start, *count);
                let values = match garbage % 3 {
                    0 => return,
                    1 => vec![Value::ZERO; index(count)],
                    _ => vec![Value::garbage(garbage); index(count)],
                };
                self.cached(number, start, values);
            }
            Action::Flush | Action::Fence => {}
        }
    }

    /// Carries operation `at` out, if that has not happened, and answers it.
    pub fn answer(&mut self, at: usize, fault: Fault, random: &mut fastrand::Rng) -> Answered {
        debug_assert!(self.ready(at), "a fence waits for dead IO");
        self.clock += 1;
        if fault == Fault::None || self.flights[at].executed.is_some() {
            self.execute(at, random.u64(..));
            let flight = self.flights.swap_remove(at);
            self.settle(&flight);
            let Flight { token, action, result, .. } = flight;
            return Answered { token, action, values: result, fault: Fault::None };
        }
        let flight = self.flights.swap_remove(at);
        self.fail(&flight, fault, random);
        Answered { token: flight.token, action: flight.action, values: Vec::new(), fault }
    }

    /// How many writes are in the cache and not durable: the first of [`Disk::volatile`].
    #[must_use]
    pub fn cached_writes(&self) -> usize {
        self.log.len()
    }

    /// How many writes a loss of power could keep or lose now, oldest first.
    #[must_use]
    pub fn volatile(&self) -> usize {
        self.log.len() + self.landing().count()
    }

    /// Loses power: the cache and all IO are gone but for what `keep` says.
    pub fn lose_power(&mut self, keep: &Keep, random: &mut fastrand::Rng) {
        let mut pending: Vec<(u64, u64, Vec<Value>)> =
            self.log.drain(..).map(|entry| (entry.number, entry.start, entry.values)).collect();
        let mut landing: Vec<(u64, Vec<Value>)> = self
            .landing()
            .filter_map(|flight| match &flight.action {
                Action::Write { start, values, .. } => Some((*start, values.clone())),
                _ => None,
            })
            .collect();
        if matches!(keep, Keep::Some(_) | Keep::Torn(_)) {
            random.shuffle(&mut landing);
        }
        for (start, values) in landing {
            self.number += 1;
            pending.push((self.number, start, values));
        }
        let chosen = |at: usize, mask: &[bool]| mask.get(at).copied().unwrap_or(false);
        let last = match keep {
            Keep::MaskTorn(mask, _) => mask.iter().rposition(|kept| *kept),
            _ => None,
        };
        for (at, (number, start, values)) in pending.into_iter().enumerate() {
            for (offset, value) in values.into_iter().enumerate() {
                let kept = match keep {
                    Keep::Nothing => false,
                    Keep::Everything => true,
                    Keep::Some(share) => {
                        // One decision per write, made at its first unit.
                        if offset == 0 && random.f64() >= *share {
                            break;
                        }
                        true
                    }
                    Keep::Torn(share) => random.f64() < *share,
                    Keep::From(first) => offset >= *first,
                    Keep::Until(end) => offset < *end,
                    Keep::Mask(mask) => chosen(at, mask),
                    Keep::MaskTorn(mask, units) => {
                        chosen(at, mask) && (Some(at) != last || units & (1 << (offset % 8)) != 0)
                    }
                };
                if kept {
                    self.persist(index(start) + offset, number, value);
                }
            }
        }
        self.flights.clear();
        self.dead.clear();
        self.cache.clone_from(&self.media);
    }

    /// The owner dies: its submitted operations that the device has not done yet become dead IO.
    pub fn lose_owner(&mut self) {
        for flight in self.flights.drain(..) {
            let lands = matches!(flight.action, Action::Write { .. } | Action::Discard { .. });
            if lands && flight.executed.is_none() {
                self.dead.push(flight);
            }
        }
        self.complete_cached();
    }

    /// Writes in the cache whose submitter is gone are complete for the device: a flush submitted
    /// from now on covers them.
    fn complete_cached(&mut self) {
        self.clock += 1;
        for entry in &mut self.log {
            entry.answered.get_or_insert(self.clock);
        }
        self.clock += 1;
    }

    /// Forgets operations that were submitted under this token or a later one: it turns out that
    /// their owner died before.
    pub fn forget_since(&mut self, token: u64) {
        self.flights.retain(|flight| flight.token < token);
    }

    /// Executes or cancels one dead operation. Returns whether it changed anything.
    pub fn land(&mut self, random: &mut fastrand::Rng) -> bool {
        if self.dead.is_empty() {
            return false;
        }
        let flight = self.dead.swap_remove(random.usize(..self.dead.len()));
        if random.u8(..16) == 0 {
            return false;
        }
        self.flights.push(flight);
        let at = self.flights.len() - 1;
        self.execute(at, random.u64(..));
        let landed = self.flights.pop().and_then(|flight| flight.executed);
        self.clock += 1;
        if let Some(entry) = self.log.iter_mut().rfind(|entry| Some(entry.number) == landed) {
            entry.answered = Some(self.clock);
        }
        true
    }

    /// Returns the present value of a unit.
    #[must_use]
    pub fn peek(&self, unit: u64) -> Value {
        self.cache[index(unit)]
    }

    /// An operation in flight belongs to a client's data.
    pub fn is_data(&mut self, token: u64) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.token == token) {
            flight.data = true;
        }
    }

    /// Changes a unit silently and durably: rot.
    pub fn rot(&mut self, unit: u64, value: Value) {
        self.media[index(unit)] = value;
        self.cache[index(unit)] = value;
    }

    fn landing(&self) -> impl Iterator<Item = &Flight> {
        self.flights.iter().chain(&self.dead).filter(|flight| {
            flight.executed.is_none() && matches!(flight.action, Action::Write { .. })
        })
    }

    fn cached(&mut self, number: u64, start: u64, values: Vec<Value>) {
        let from = index(start);
        self.cache[from..from + values.len()].copy_from_slice(&values);
        self.log.push(Logged { number, answered: None, start, values });
    }

    fn persist(&mut self, unit: usize, number: u64, value: Value) {
        if self.stamps[unit] < number {
            self.stamps[unit] = number;
            self.media[unit] = value;
        }
    }

    /// The end of an operation that went well.
    fn settle(&mut self, flight: &Flight) {
        match &flight.action {
            Action::Write { fua, .. } => {
                let clock = self.clock;
                let number = flight.executed;
                let found = self.log.iter().rposition(|entry| Some(entry.number) == number);
                // Not found: a flush error threw it away meanwhile.
                let Some(at) = found else { return };
                if *fua {
                    let entry = self.log.remove(at);
                    self.persist_all(&entry);
                } else {
                    self.log[at].answered = Some(clock);
                }
            }
            Action::Discard { .. } => {
                let number = flight.executed;
                let clock = self.clock;
                if let Some(entry) = self.log.iter_mut().find(|entry| Some(entry.number) == number)
                {
                    entry.answered = Some(clock);
                }
            }
            Action::Flush => self.flushed(flight.submitted),
            Action::Read { .. } | Action::Fence => {}
        }
    }

    fn flushed(&mut self, submitted: u64) {
        let mut log = std::mem::take(&mut self.log);
        log.retain(|entry| {
            let covered = entry.answered.is_some_and(|answered| answered < submitted);
            if covered {
                self.persist_all(entry);
            }
            !covered
        });
        self.log = log;
    }

    fn persist_all(&mut self, entry: &Logged) {
        for (offset, value) in entry.values.iter().enumerate() {
            self.persist(index(entry.start) + offset, entry.number, *value);
        }
    }

    /// The end of an operation that went wrong.
    fn fail(&mut self, flight: &Flight, fault: Fault, random: &mut fastrand::Rng) {
        self.number += 1;
        let number = self.number;
        match (&flight.action, fault) {
            (Action::Write { start, values, .. }, Fault::Media) => {
                for (offset, value) in values.iter().enumerate() {
                    if random.bool() {
                        self.cached(number, start + offset as u64, vec![*value]);
                    }
                }
                // A failed write has ended, too: a flush covers its part in the cache.
                let clock = self.clock;
                for entry in self.log.iter_mut().filter(|entry| entry.number == number) {
                    entry.answered = Some(clock);
                }
            }
            (Action::Write { start, values, .. }, Fault::Misdirected(by)) => {
                let room = self.units().saturating_sub(values.len() as u64);
                self.cached(number, (start + by).min(room), values.clone());
                let clock = self.clock;
                if let Some(entry) = self.log.last_mut() {
                    entry.answered = Some(clock);
                }
            }
            (Action::Flush, Fault::Media) => self.drop_cached(random),
            _ => {}
        }
    }

    /// A flush error: the device may have thrown away any write that was not durable.
    fn drop_cached(&mut self, random: &mut fastrand::Rng) {
        let share = [0.0, 0.5, 1.0][random.usize(..3)];
        let mut log = std::mem::take(&mut self.log);
        log.retain(|entry| {
            let lost = random.f64() < share;
            if lost {
                let from = index(entry.start);
                let to = from + entry.values.len();
                self.cache[from..to].copy_from_slice(&self.media[from..to]);
            }
            !lost
        });
        for entry in &log {
            for (offset, value) in entry.values.iter().enumerate() {
                let unit = index(entry.start) + offset;
                if self.stamps[unit] < entry.number {
                    self.cache[unit] = *value;
                }
            }
        }
        self.log = log;
    }
}

#[cfg(test)]
mod tests;
