//! Differences, as far as the pool's thread finds them: for the control API.

use crate::diff::{Comparison, DiffPart, DiffRequest, Ranges, check_family};
use crate::error::MapperError;
use crate::sync::Ordering;

use super::Engine;

/// Work of one call, counted in slots: about a millisecond. Entries of a slot are not examined if
/// both sides share its leaf.
const WORK_PER_CALL: u64 = 65_536;
/// Ranges of one call at the most, whatever is asked for: 24 bytes each.
const MAX_RANGES: usize = 65_536;

impl Engine {
    /// Returns the ranges of a volume or snapshot, all of them or those changed since another of
    /// its family.
    ///
    /// Applying it to a copy of the base (resize to `size`, copy `RangeState::Data`, zero
    /// `RangeState::Zero`) makes a copy of the volume. The area beyond the base's end counts as
    /// zeroes. Ranges are whole sub-blocks, cut off at the volume's end.
    ///
    /// Does a bounded amount of work, so that it can be called on the pool's thread: an answer may
    /// have only one range although more were requested. `next` is a byte of the volume and may be
    /// kept for as long as one likes. A volume that is written meanwhile is described as it is
    /// during the call: use a snapshot for a consistent copy.
    ///
    /// # Errors
    /// If one of the two doesn't exist, if they are of different families (both are named), or if
    /// `from` lies beyond the volume's end.
    pub fn diff(&self, request: &DiffRequest) -> Result<DiffPart, MapperError> {
        let volume = self.pool.volume(request.volume)?;
        let base = request.base.map(|id| self.pool.volume(id)).transpose()?;
        if let Some(base) = &base {
            check_family(&volume, base)?;
        }
        let size = volume.size.load(Ordering::Acquire);
        if request.from > size {
            let (field, value) = ("from", request.from);
            return Err(MapperError::Invalid { field, value, allowed: "within the volume" });
        }
        let end = request.to.min(size);
        let mut found = Vec::new();
        let mut ranges = Ranges {
            ranges: &mut found,
            at: request.from,
            end,
            max: request.max_ranges.clamp(1, MAX_RANGES),
        };
        let new = volume.directory.load();
        let old = base.as_ref().map(|base| base.directory.load());
        let pool = &*self.pool;
        let comparison = Comparison { pool, new: &new, old: old.as_ref().map(|old| &***old) };
        comparison.walk(&mut ranges, WORK_PER_CALL);
        let next = (ranges.at < end).then_some(ranges.at);
        Ok(DiffPart { ranges: found, next, size })
    }
}
