//! What a volume holds beside another of its family, range by range.
//!
//! Nothing is tracked for this: volumes of a family share leaves at the same slot, and extents at
//! the same place, for as long as neither has changed there. So whoever refers to the same leaf
//! holds the same in all of it; and where both refer to the same extent, a sub-block that is valid
//! in both is the same one, since a shared extent is never written in place (R10). What is called
//! the same is the same. The other way round, data may be equal: what was written again with equal
//! bytes, and the rest of an extent that was copied because a part of it was written.

use crate::error::MapperError;
use crate::leaf::LEAF_ENTRIES;
use crate::mapping::Mapping;
use crate::mutation::{Mutation, active};
use crate::sync::Ordering;
use crate::units::{LeafId, SlotIndex, VolumeId};
use crate::volume::Volume;

use super::Engine;

/// Work of one call, counted in slots: about a millisecond. What is mapped at a slot is not looked
/// at where both sides share its leaf.
const WORK_PER_CALL: u64 = 65_536;
/// What comparing two leaves entry by entry costs, beside looking at a slot.
const LEAF_WORK: u64 = 64;
/// Ranges of one call at the most, whatever is asked for: 24 bytes each.
const MAX_RANGES: usize = 65_536;

/// How a range of a volume compares with the base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeState {
    /// It reads as it does in the base.
    Same,
    /// It was written since, and has to be read. Without a base: it has data.
    Data,
    /// It reads as zeroes, and did not in the base. Without a base: it has no data.
    Zero,
}

/// A range of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiffRange {
    /// First byte.
    pub offset: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// What it holds.
    pub state: RangeState,
}

/// What is asked of [`Engine::diff`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiffRequest {
    /// The volume or snapshot whose content is wanted.
    pub volume: VolumeId,
    /// One of the same family that the asker has already; older or newer, snapshot or not. None to
    /// learn what is allocated.
    pub base: Option<VolumeId>,
    /// First byte: 0, or [`DiffPart::next`] of the call before.
    pub from: u64,
    /// The byte behind the last; anything beyond the volume's end stands for its end.
    pub to: u64,
    /// Ranges at the most, at least one.
    pub max_ranges: usize,
}

/// An answer of [`Engine::diff`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiffPart {
    /// Ranges in order, without a gap from the first byte asked for. Neighbours differ in their
    /// state, but the last of a part may go on in the next.
    pub ranges: Vec<DiffRange>,
    /// Where to go on; none when all is said.
    pub next: Option<u64>,
    /// Bytes of the volume. Whoever applies the difference gives its copy this size.
    pub size: u64,
}

impl Engine {
    /// What a volume or snapshot holds, as a whole or since another of its family.
    ///
    /// Applying it to a copy of the base (resize to `size`, copy [`RangeState::Data`], zero
    /// [`RangeState::Zero`]) makes a copy of the volume. What lies beyond the base's end counts as
    /// zeroes there. Ranges are whole sub-blocks, cut off at the volume's end.
    ///
    /// Does a bounded amount of work, so that it can be called on the pool's thread: an answer may
    /// have no more than one range although more was asked for. `next` is a byte of the volume and
    /// may be kept for as long as one likes. A volume that is written meanwhile is told as it is
    /// when the call looks there: for a copy of one moment ask for a snapshot.
    ///
    /// # Errors
    /// If one of the two doesn't exist, if they are of different families (both are named), or if
    /// `from` lies beyond the volume's end.
    pub fn diff(&self, request: &DiffRequest) -> Result<DiffPart, MapperError> {
        let volume = self.pool.volume(request.volume)?;
        let base = request.base.map(|id| self.pool.volume(id)).transpose()?;
        if let Some(base) = &base
            && base.identity.lineage != volume.identity.lineage
        {
            return Err(MapperError::OtherFamily {
                one: volume.identity.name.to_string(),
                other: base.identity.name.to_string(),
            });
        }
        let size = volume.size.load(Ordering::Acquire);
        if request.from > size {
            let (field, value) = ("from", request.from);
            return Err(MapperError::Invalid { field, value, allowed: "within the volume" });
        }
        let end = request.to.min(size);
        let ranges = Ranges {
            ranges: Vec::new(),
            at: request.from,
            end,
            max: request.max_ranges.clamp(1, MAX_RANGES),
        };
        let (ranges, at) = self.walk(&volume, base.as_deref(), ranges);
        let next = (at < end).then_some(at);
        Ok(DiffPart { ranges, next, size })
    }

    fn walk(
        &self,
        volume: &Volume,
        base: Option<&Volume>,
        mut ranges: Ranges,
    ) -> (Vec<DiffRange>, u64) {
        let geometry = self.pool.geometry;
        let new = volume.directory.load();
        let old = base.map(|base| base.directory.load());
        let mut work = 0;
        while ranges.at < ranges.end && work < WORK_PER_CALL {
            let slot = geometry.slot_of(ranges.at);
            let slot_end = (u64::from(slot.0) + 1).saturating_mul(geometry.leaf_span());
            let leaf = new.load(slot);
            let known = old.as_ref().map(|old| old.load(slot));
            work += 1;
            let all = match (leaf, known) {
                (None, None) => Some(RangeState::Zero),
                (leaf, Some(known)) if self.is_shared(leaf, known) => Some(RangeState::Same),
                _ => None,
            };
            let went_on = if let Some(state) = all {
                ranges.put(slot_end, state)
            } else {
                work += LEAF_WORK;
                self.compare_leaves(slot, leaf, known, &mut ranges)
            };
            if !went_on {
                break;
            }
        }
        (ranges.ranges, ranges.at)
    }

    /// Whether both slots are one leaf, or both empty.
    fn is_shared(&self, leaf: Option<LeafId>, known: Option<LeafId>) -> bool {
        let held = |leaf| self.pool.arena.meta(leaf).references.load(Ordering::Acquire);
        leaf == known || (active(Mutation::DiffTrustsShared) && leaf.is_some_and(|l| held(l) > 1))
    }

    /// `false`: there are ranges enough.
    fn compare_leaves(
        &self,
        slot: SlotIndex,
        leaf: Option<LeafId>,
        known: Option<Option<LeafId>>,
        ranges: &mut Ranges,
    ) -> bool {
        let geometry = self.pool.geometry;
        let entry = |leaf: Option<LeafId>, entry: usize| {
            leaf.map_or(Mapping::UNMAPPED, |leaf| self.pool.arena.leaf(leaf).load(entry))
        };
        let first = geometry.extent_of(ranges.at).entry();
        for at in first..LEAF_ENTRIES {
            let start = (slot.first_extent().0 + at as u64) * geometry.extent_size();
            if start >= ranges.end {
                break;
            }
            let (new, old) = (entry(leaf, at), known.map(|known| entry(known, at)));
            let mut bit = geometry.within(ranges.at.max(start)) / geometry.sub_block_size();
            let count = u64::from(geometry.sub_blocks());
            while bit < count {
                let state = state_of(new, old, bit);
                let mut next = bit + 1;
                while next < count && state_of(new, old, next) == state {
                    next += 1;
                }
                if !ranges.put(start + next * geometry.sub_block_size(), state) {
                    return false;
                }
                bit = next;
            }
        }
        true
    }
}

/// What a sub-block holds, beside what it held.
fn state_of(new: Mapping, old: Option<Mapping>, bit: u64) -> RangeState {
    let is_set = |mapping: Mapping| mapping.valid >> bit & 1 == 1;
    match (is_set(new), old) {
        (true, Some(old)) if is_set(old) && old.physical == new.physical => RangeState::Same,
        (true, _) => RangeState::Data,
        (false, Some(old)) if !is_set(old) => RangeState::Same,
        (false, _) => RangeState::Zero,
    }
}

/// Ranges found so far.
struct Ranges {
    ranges: Vec<DiffRange>,
    /// Behind the last.
    at: u64,
    end: u64,
    max: usize,
}

impl Ranges {
    /// Goes on to `to` in this state. `false`, and nothing done, if that would be a range too many.
    fn put(&mut self, to: u64, state: RangeState) -> bool {
        let to = to.min(self.end);
        let len = to.saturating_sub(self.at);
        if len == 0 {
            return true;
        }
        let full = self.ranges.len() >= self.max;
        match self.ranges.last_mut() {
            Some(last) if last.state == state => last.len += len,
            _ if full => return false,
            _ => self.ranges.push(DiffRange { offset: self.at, len, state }),
        }
        self.at = to;
        true
    }
}
