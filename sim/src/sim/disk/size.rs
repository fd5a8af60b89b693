//! A device that becomes larger or smaller.

use super::super::content::{Value, index};
use super::{Action, Disk, Flight};

impl Disk {
    /// Makes the device larger.
    pub fn grow(&mut self, units: u64) {
        let len = index(units).max(self.media.len());
        self.media.resize(len, Value::ZERO);
        self.stamps.resize(len, 0);
        self.cache.resize(len, Value::ZERO);
    }

    /// Makes the device smaller. Operations that wait in the cache, or of a dead owner, are lost
    /// with its end.
    pub fn shrink(&mut self, units: u64) {
        let is_kept = |start: u64, count: usize| start + count as u64 <= units;
        let is_under_way = |flight: &Flight| match &flight.action {
            Action::Write { start, values, .. } => !is_kept(*start, values.len()),
            Action::Read { start, count } | Action::Discard { start, count } => {
                start + count > units
            }
            Action::Flush | Action::Fence => false,
        };
        assert!(!self.flights.iter().any(is_under_way), "IO is under way behind the new end");
        self.dead.retain(|flight| !is_under_way(flight));
        self.log.retain(|entry| is_kept(entry.start, entry.values.len()));
        let len = index(units).min(self.media.len());
        self.media.truncate(len);
        self.stamps.truncate(len);
        self.cache.truncate(len);
    }
}
