//! The allowed values of a unit of a volume, as a register with concurrent writers.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use crate::sim::content::Value;

/// A moment in the history. Every issue and every answer has its own.
pub type Time = u32;

/// The newest value of a unit. `more` says that others are possible beside it.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    value: Value,
    /// When the write of `value` was answered.
    answered: Time,
    /// Everything answered before this has been superseded.
    superseded: Time,
    more: bool,
}

/// Cells that two copies share until one is changed: a copy is made at each event of a process that
/// is about to die, also of large volumes.
#[derive(Clone, Debug, Default)]
struct Cells {
    chunks: Vec<Arc<Vec<Cell>>>,
    count: usize,
}

/// Cells that are copied when one of them is changed.
const CHUNK: usize = 1024;

impl Cells {
    /// Makes room for more; never smaller.
    fn grow(&mut self, count: usize) {
        if count <= self.count {
            return;
        }
        // All of them the same one, until it is changed.
        let empty = Arc::new(vec![Cell::default(); CHUNK]);
        self.chunks.resize(count.div_ceil(CHUNK), empty);
        self.count = count;
    }

    fn slice(&self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.count, "{count} units from {start} of {}", self.count);
        if start == 0 && count == self.count {
            return self.clone();
        }
        let mut cells: Vec<Cell> = (start..start + count).map(|unit| self[unit]).collect();
        cells.resize(count.next_multiple_of(CHUNK), Cell::default());
        let chunks = cells.chunks(CHUNK).map(|chunk| Arc::new(chunk.to_vec())).collect();
        Self { chunks, count }
    }
}

impl Index<usize> for Cells {
    type Output = Cell;

    fn index(&self, unit: usize) -> &Cell {
        assert!(unit < self.count, "unit {unit} of {}", self.count);
        &self.chunks[unit / CHUNK][unit % CHUNK]
    }
}

impl IndexMut<usize> for Cells {
    fn index_mut(&mut self, unit: usize) -> &mut Cell {
        assert!(unit < self.count, "unit {unit} of {}", self.count);
        &mut Arc::make_mut(&mut self.chunks[unit / CHUNK])[unit % CHUNK]
    }
}

/// The possible values of each unit of a volume.
///
/// A write answered before another was issued is superseded by it; of writes that were under way
/// together either may have come last.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    cells: Cells,
    /// Other possible values, with the time their writes were answered.
    more: BTreeMap<usize, Vec<(Value, Time)>>,
}

impl Registers {
    /// All zero.
    #[must_use]
    pub fn zeroed(units: usize) -> Self {
        let mut cells = Cells::default();
        cells.grow(units);
        Self { cells, more: BTreeMap::new() }
    }

    /// Number of units.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.count
    }

    /// Whether there are no units.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells.count == 0
    }

    /// Makes room for more units, all zero.
    pub fn grow(&mut self, units: usize) {
        self.cells.grow(units);
    }

    /// Takes in a write that was under way from `issued` to `answered`.
    pub fn put(&mut self, unit: usize, value: Value, issued: Time, answered: Time) {
        let cell = &mut self.cells[unit];
        if answered < cell.superseded {
            return;
        }
        if !cell.more && cell.answered < issued {
            *cell = Cell { value, answered, superseded: issued, more: false };
            return;
        }
        let mut others =
            if cell.more { self.more.remove(&unit).unwrap_or_default() } else { Vec::new() };
        others.push((cell.value, cell.answered));
        others.retain(|(_, time)| *time >= issued);
        let superseded = cell.superseded.max(issued);
        *cell = Cell { value, answered, superseded, more: !others.is_empty() };
        if !others.is_empty() {
            self.more.insert(unit, others);
        }
    }

    /// Notes a value as possible without ruling any other out.
    pub fn allow(&mut self, unit: usize, value: Value, answered: Time) {
        let cell = &mut self.cells[unit];
        if cell.value == value {
            cell.answered = cell.answered.max(answered);
            return;
        }
        cell.more = true;
        let others = self.more.entry(unit).or_default();
        match others.iter_mut().find(|(other, _)| *other == value) {
            Some((_, time)) => *time = (*time).max(answered),
            None => others.push((value, answered)),
        }
    }

    /// Rules out every value but this one.
    pub fn settle(&mut self, unit: usize, value: Value, now: Time) {
        self.cells[unit] = Cell { value, answered: now, superseded: now, more: false };
        self.more.remove(&unit);
    }

    /// Whether more than one value is possible.
    #[must_use]
    pub fn is_open(&self, unit: usize) -> bool {
        self.cells[unit].more
    }

    /// Whether a value is possible.
    #[must_use]
    pub fn allows(&self, unit: usize, value: Value) -> bool {
        let cell = &self.cells[unit];
        cell.value == value
            || (cell.more
                && self.more.get(&unit).is_some_and(|all| all.iter().any(|(v, _)| *v == value)))
    }

    /// Whether everything answered at this time has been superseded since.
    #[must_use]
    pub fn has_superseded(&self, unit: usize, answered: Time) -> bool {
        answered < self.cells[unit].superseded
    }

    /// The possible values of a unit.
    #[must_use]
    pub fn values(&self, unit: usize) -> Vec<Value> {
        let mut all = vec![self.cells[unit].value];
        if let Some(more) = self.more.get(&unit) {
            all.extend(more.iter().map(|(value, _)| *value));
        }
        all
    }

    /// One possible value of a unit; the only one unless [`Registers::is_open`].
    #[must_use]
    pub fn value(&self, unit: usize) -> Value {
        self.cells[unit].value
    }

    /// A copy of some units, numbered from 0.
    #[must_use]
    pub fn slice(&self, start: usize, count: usize) -> Self {
        let cells = self.cells.slice(start, count);
        let more = if self.more.is_empty() {
            BTreeMap::new()
        } else {
            let found = self.more.range(start..start + count);
            found.map(|(unit, values)| (unit - start, values.clone())).collect()
        };
        Self { cells, more }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(number: u64) -> Value {
        Value::data(number, 1, 0)
    }

    #[test]
    fn a_later_write_supersedes_and_concurrent_ones_do_not() {
        let mut registers = Registers::zeroed(1);
        registers.put(0, value(1), 1, 2);
        assert_eq!(registers.values(0), [value(1)]);
        registers.put(0, value(2), 3, 6);
        registers.put(0, value(3), 4, 7);
        assert_eq!(registers.values(0), [value(3), value(2)]);
        registers.put(0, value(4), 8, 9);
        assert_eq!(registers.values(0), [value(4)]);
        registers.put(0, value(1), 1, 2);
        assert_eq!(registers.values(0), [value(4)]);
    }

    #[test]
    fn a_copy_stays_as_it_was_and_a_slice_counts_from_0() {
        let mut registers = Registers::zeroed(3000);
        registers.settle(2999, value(1), 1);
        let copy = registers.clone();
        registers.settle(2999, value(2), 2);
        registers.grow(5000);
        registers.settle(4999, value(3), 3);
        let part = registers.slice(2990, 100);
        assert_eq!((copy.len(), copy.value(2999)), (3000, value(1)));
        assert_eq!((part.len(), part.value(9), part.value(10)), (100, value(2), Value::ZERO));
        assert_eq!((registers.value(2999), registers.value(4999)), (value(2), value(3)));
        assert_eq!(registers.value(3999), Value::ZERO);
    }

    #[test]
    fn allowed_values_can_be_settled() {
        let mut registers = Registers::zeroed(2);
        registers.allow(1, value(5), 3);
        assert!(registers.is_open(1) && registers.allows(1, Value::ZERO));
        registers.settle(1, value(5), 4);
        assert_eq!(registers.values(1), [value(5)]);
        assert!(!registers.is_open(0));
    }
}
