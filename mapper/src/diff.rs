//! Differences between two volumes of a family, range by range.
//!
//! Nothing is tracked for this: volumes of a family share leaves at the same slot, and extents at
//! the same place, for as long as neither has changed there. So volumes that refer to the same leaf
//! have the same content in all of it; and where both refer to the same extent, a sub-block that is
//! valid in both is the same one, since a shared extent is never written in place (R10). A range
//! reported as the same is the same. The reverse does not hold: a range reported as changed may
//! have equal data, if it was written again with equal bytes, or copied with an extent of which
//! another part was written.

use crate::directory::Directory;
use crate::entry::Entry;
use crate::error::MapperError;
use crate::leaf::LEAF_ENTRIES;
use crate::mutation::{Mutation, active};
use crate::pool::Pool;
use crate::sync::Ordering;
use crate::units::{LeafId, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;

/// The cost of comparing two leaves entry by entry, in slots.
const LEAF_WORK: u64 = 64;

/// How a range of a volume compares with the base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeState {
    /// The range reads as in the base.
    Same,
    /// The range was written since, and has to be read. Without a base: it has data.
    Data,
    /// The range reads as zeroes, and did not in the base. Without a base: it has no data.
    Zero,
}

/// A range of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiffRange {
    /// First byte.
    pub offset: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// The state of the range.
    pub state: RangeState,
}

/// A request to [`Engine::diff`](crate::engine::Engine::diff).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiffRequest {
    /// The volume or snapshot whose content is wanted.
    pub volume: VolumeId,
    /// One of the same family that the asker has already; older or newer, snapshot or not. None for
    /// the allocated ranges.
    pub base: Option<VolumeId>,
    /// First byte: 0, or [`DiffPart::next`] of the call before.
    pub from: u64,
    /// The byte behind the last; anything beyond the volume's end stands for its end.
    pub to: u64,
    /// Ranges at the most, at least one.
    pub max_ranges: usize,
}

/// An answer of [`Engine::diff`](crate::engine::Engine::diff).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiffPart {
    /// Ranges in order, without a gap from the first byte asked for. Neighbours differ in their
    /// state, but the last of a part may go on in the next.
    pub ranges: Vec<DiffRange>,
    /// Where to go on; none when all is said.
    pub next: Option<u64>,
    /// Bytes of the volume, to which a copy is resized when the difference is applied.
    pub size: u64,
}

/// Refuses to compare volumes that have no ancestor in common, naming both.
pub(crate) fn check_family(volume: &Volume, base: &Volume) -> Result<(), MapperError> {
    if base.identity.lineage == volume.identity.lineage {
        return Ok(());
    }
    Err(MapperError::OtherFamily { one: volume.name().to_string(), other: base.name().to_string() })
}

/// Two directories of a family; without the older one everything valid counts as new.
pub(crate) struct Comparison<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) new: &'a Directory,
    pub(crate) old: Option<&'a Directory>,
}

impl Comparison<'_> {
    /// Continues until the ranges are complete or full, or `most_work` is done (counted in slots;
    /// an examined leaf counts as 64). The leaves must stay meanwhile: on the pool's thread they
    /// do, elsewhere by an IO epoch.
    pub(crate) fn walk(&self, ranges: &mut Ranges<'_>, most_work: u64) {
        let geometry = self.pool.geometry;
        let mut work = 0;
        while ranges.at < ranges.end && work < most_work {
            let slot = geometry.slot_of(ranges.at);
            let slot_end = (u64::from(slot.0) + 1).saturating_mul(geometry.leaf_span());
            let leaf = self.new.load(slot);
            let known = self.old.map(|old| old.load(slot));
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
                self.compare_leaves(slot, leaf, known, ranges)
            };
            if !went_on {
                break;
            }
        }
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
        ranges: &mut Ranges<'_>,
    ) -> bool {
        let geometry = self.pool.geometry;
        let entry = |leaf: Option<LeafId>, entry: usize| {
            leaf.map_or(Entry::Unmapped, |leaf| self.pool.arena.entry(leaf, entry))
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
                let (state, run) = run_of(new, old, bit);
                let next = (bit + run).min(count);
                if !ranges.put(start + next * geometry.sub_block_size(), state) {
                    return false;
                }
                bit = next;
            }
        }
        true
    }
}

/// Compares a sub-block with its old state. Returns the result, and the number of sub-blocks from
/// it on with the same one.
fn run_of(new: Entry, old: Option<Entry>, bit: u64) -> (RangeState, u64) {
    let same = old.map_or(0, |old| {
        let kept = parts(old).into_iter().fold(0, |kept, (place, bits)| {
            let also = parts(new).into_iter().filter(|part| part.0.is_some() && part.0 == place);
            also.fold(kept, |kept, part| kept | (part.1 & bits))
        });
        kept | !(new.valid() | old.valid())
    });
    let data = new.valid() & !same;
    let (state, mask) = if same >> bit & 1 == 1 {
        (RangeState::Same, same)
    } else if data >> bit & 1 == 1 {
        (RangeState::Data, data)
    } else {
        (RangeState::Zero, !(same | data))
    };
    (state, u64::from((mask >> bit).trailing_ones()))
}

/// The extents of an entry, each with the sub-blocks that are read from it.
fn parts(entry: Entry) -> [(Option<PhysicalExtent>, u64); 2] {
    let (top, base) = (entry.top(), entry.base());
    [(top.physical, top.valid), (base.physical, base.valid & !top.valid)]
}

/// Ranges found so far.
pub(crate) struct Ranges<'a> {
    pub(crate) ranges: &'a mut Vec<DiffRange>,
    /// The byte after the last range.
    pub(crate) at: u64,
    pub(crate) end: u64,
    pub(crate) max: usize,
}

impl Ranges<'_> {
    /// Extends the ranges to `to` in this state. Returns `false`, without a change, if that would
    /// exceed the limit of ranges.
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
