//! Checks the reported differences between two volumes against their known contents.

use std::ops::Range;

use super::super::content::index;
use super::{Breach, Oracle, Value, Violation, Volume};

/// Returns the known value of a unit; none where several values are possible.
fn known(volume: &Volume, unit: usize) -> Option<Value> {
    if unit >= volume.units.min(volume.live.len()) {
        return Some(Value::ZERO);
    }
    (!volume.live.is_open(unit)).then(|| volume.live.value(unit))
}

impl Oracle {
    /// Whether two volumes have an ancestor in common.
    #[must_use]
    pub fn are_related(&self, one: u32, other: u32) -> bool {
        let family = |id: u32| {
            self.volumes.get(&id).and_then(|volume| self.families.get(index(volume.ordinal)))
        };
        family(one) == family(other)
    }

    /// Units of a volume are said to be the same as in the base (none), or to have data (`true`) or
    /// none (`false`).
    pub fn check_difference(
        &mut self,
        id: u32,
        base: Option<u32>,
        units: Range<usize>,
        has_data: Option<bool>,
    ) -> Result<(), Violation> {
        let Some(volume) = self.volumes.get(&id) else { return Ok(()) };
        let base = base.and_then(|base| self.volumes.get(&base));
        for unit in units {
            let held = base.map_or(Some(Value::ZERO), |base| known(base, unit));
            let (Some(found), Some(held)) = (known(volume, unit), held) else { continue };
            self.checks += 1;
            let right = match has_data {
                None => found == held,
                Some(false) => found == Value::ZERO,
                Some(true) => true,
            };
            if !right {
                let text = format!(
                    "volume {id} unit {unit} holds {found:?}, the base {held:?}, and is said to \
                     be {}",
                    if has_data.is_none() { "the same" } else { "zero" }
                );
                return Err(Violation::new(Breach::Difference, text));
            }
        }
        Ok(())
    }
}
