//! Which physical extents are used: a bitmap per region, with levels of "all used" above it.
//!
//! A bit of a level says that the word below it is all ones, so finding a free extent is a walk up
//! and down a tree with 64 children per node, however full the pool is. Allocation goes on from
//! where the last one ended (next fit), so that extents written together are adjacent and freed
//! space is not reused at once.

use crate::units::PhysicalExtent;

/// Free runs that one allocation examines to find one of the requested length. Few, because each
/// costs a walk; at 90 % used at random, runs are 1.1 extents long on average.
const RUNS_TRIED: u32 = 4;

/// A range of extents that can't be a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{count} extents from {first} on are empty, too many, or overlap another region")]
pub struct BadRegion {
    /// First extent.
    pub first: PhysicalExtent,
    /// Extents.
    pub count: u64,
}

/// Free and used extents of a pool. Threads that share it use a lock.
#[derive(Clone, Debug, Default)]
pub struct Allocator {
    /// In the order of their extents, not overlapping. A pool has one per device and growth.
    regions: Vec<Region>,
    /// Region at which the next allocation starts.
    cursor: usize,
    free_count: u64,
    total_count: u64,
}

#[derive(Clone, Debug)]
struct Region {
    first: u64,
    count: u64,
    /// Where in the region the next allocation starts.
    cursor: u64,
    bits: BitTree,
}

impl Allocator {
    /// An allocator without extents.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds free extents: a device's, or the part by which a device has grown. No run crosses from
    /// one region to another.
    pub fn add_region(&mut self, first: PhysicalExtent, count: u64) -> Result<(), BadRegion> {
        let bad = BadRegion { first, count };
        let end = first.0.checked_add(count).ok_or(bad)?;
        let place = self.regions.partition_point(|region| region.first < first.0);
        let overlaps = place.checked_sub(1).is_some_and(|at| self.regions[at].end() > first.0)
            || self.regions.get(place).is_some_and(|next| next.first < end);
        if count == 0 || overlaps {
            return Err(bad);
        }
        let bits = BitTree::new(count).ok_or(bad)?;
        self.regions.insert(place, Region { first: first.0, count, cursor: 0, bits });
        self.cursor = if self.total_count == 0 || self.cursor < place {
            self.cursor
        } else {
            self.cursor + 1
        };
        self.free_count += count;
        self.total_count += count;
        Ok(())
    }

    /// Takes the extents from `from` on out of it, into an allocator of their own.
    pub fn split_off(&mut self, from: PhysicalExtent) -> Result<Self, BadRegion> {
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        for region in &self.regions {
            if region.end() <= from.0 {
                head.push(region.clone());
            } else if region.first >= from.0 {
                tail.push(region.clone());
            } else {
                head.push(region.part(region.first, from.0)?);
                tail.push(region.part(from.0, region.end())?);
            }
        }
        *self = Self::of(head);
        Ok(Self::of(tail))
    }

    /// Takes all extents of another one in, which lie behind its own.
    pub fn append(&mut self, tail: Self) {
        let begin = tail.regions.first().map_or(u64::MAX, |region| region.first);
        let is_behind = self.regions.last().is_none_or(|region| region.end() <= begin);
        debug_assert!(is_behind, "the other one's extents lie behind");
        self.regions.extend(tail.regions);
        self.free_count += tail.free_count;
        self.total_count += tail.total_count;
    }

    fn of(regions: Vec<Region>) -> Self {
        let total_count = regions.iter().map(|region| region.count).sum();
        let mut made = Self { regions, cursor: 0, free_count: 0, total_count };
        let used: u64 = made.used_runs().map(|(_, count)| count).sum();
        made.free_count = total_count - used;
        made
    }

    /// Marks one extent as used. `false`, and nothing happens, if it is or there is no such extent.
    #[must_use]
    pub fn mark_used(&mut self, extent: PhysicalExtent) -> bool {
        let Some((index, offset)) = self.find(extent) else { return false };
        if self.regions[index].bits.get(offset) {
            return false;
        }
        self.regions[index].bits.set_run(offset, 1);
        self.free_count -= 1;
        true
    }

    /// Allocates a run of 1 to `max` extents: as long as asked for if one of the next few free
    /// runs is, else the longest of them. `None` if nothing is free or `max` is 0.
    pub fn allocate_run(&mut self, max: u64) -> Option<(PhysicalExtent, u64)> {
        if self.free_count == 0 || max == 0 {
            return None;
        }
        let regions = self.regions.len();
        // The region of the cursor is searched again at the end, for extents before the cursor.
        for step in 0..=regions {
            let index = (self.cursor + step) % regions;
            let region = &mut self.regions[index];
            let from = if step == 0 { region.cursor } else { 0 };
            if let Some((offset, len)) = region.bits.longest_clear_run(from, max) {
                region.bits.set_run(offset, len);
                region.cursor = offset + len;
                self.cursor = index;
                self.free_count -= len;
                return Some((PhysicalExtent(region.first + offset), len));
            }
        }
        None
    }

    /// Allocates the first run of 1 to `max` free extents that begins at `from` or behind it.
    pub fn allocate_from(
        &mut self,
        from: PhysicalExtent,
        max: u64,
    ) -> Option<(PhysicalExtent, u64)> {
        let first = self.regions.partition_point(|region| region.end() <= from.0);
        for region in &mut self.regions[first..] {
            let offset = from.0.saturating_sub(region.first);
            let Some(start) = region.bits.next_clear(offset) else { continue };
            let len = region.bits.clear_run_len(start, max.min(region.count - start));
            region.bits.set_run(start, len);
            self.free_count -= len;
            return (len > 0).then_some((PhysicalExtent(region.first + start), len));
        }
        None
    }

    /// Frees a run of used extents. `false`, and nothing happens, if any of them is free already
    /// or in no region.
    #[must_use]
    pub fn free(&mut self, first: PhysicalExtent, count: u64) -> bool {
        let Some((index, offset)) = self.find(first) else { return false };
        // A region ends where a device did before it grew, and a run may go on in the next one.
        let (mut left, mut from, mut end) = (count, offset, index);
        while left > 0 {
            let Some(region) = self.regions.get(end) else { return false };
            let goes_on = end == index || self.regions[end - 1].end() == region.first;
            let here = left.min(region.count - from);
            if !goes_on || region.bits.set_run_len(from, here) < here {
                return false;
            }
            (left, from, end) = (left - here, 0, end + 1);
        }
        let (mut left, mut from) = (count, offset);
        for region in &mut self.regions[index..end] {
            let here = left.min(region.count - from);
            region.bits.clear_run(from, here);
            (left, from) = (left - here, 0);
        }
        self.free_count += count;
        true
    }

    /// Whether an extent is used. `false` if there is no such extent.
    #[must_use]
    pub fn is_used(&self, extent: PhysicalExtent) -> bool {
        self.find(extent).is_some_and(|(index, offset)| self.regions[index].bits.get(offset))
    }

    /// Whether an extent is in a region.
    #[must_use]
    pub fn contains(&self, extent: PhysicalExtent) -> bool {
        self.find(extent).is_some()
    }

    /// Free extents.
    #[must_use]
    pub fn free_count(&self) -> u64 {
        self.free_count
    }

    /// Extents, free or used.
    #[must_use]
    pub fn total_count(&self) -> u64 {
        self.total_count
    }

    /// The lowest free extent.
    #[must_use]
    pub fn lowest_free(&self) -> Option<PhysicalExtent> {
        self.regions.iter().find_map(|region| {
            region.bits.next_clear(0).map(|offset| PhysicalExtent(region.first + offset))
        })
    }

    /// Runs of used extents, in order. A run ends where its region does.
    pub fn used_runs(&self) -> impl Iterator<Item = (PhysicalExtent, u64)> {
        self.regions.iter().flat_map(|region| {
            let mut from = 0;
            std::iter::from_fn(move || {
                let start = region.bits.next_set(from, region.count)?;
                let len = region.bits.set_run_len(start, region.count - start);
                from = start + len;
                Some((PhysicalExtent(region.first + start), len))
            })
        })
    }

    /// Runs of free extents, in order. A run ends where its region does.
    pub fn free_runs(&self) -> impl Iterator<Item = (PhysicalExtent, u64)> {
        self.regions.iter().flat_map(|region| {
            let mut from = 0;
            std::iter::from_fn(move || {
                let start = region.bits.next_clear(from)?;
                let len = region.bits.clear_run_len(start, region.count - start);
                from = start + len;
                Some((PhysicalExtent(region.first + start), len))
            })
        })
    }

    /// The region of an extent and its place there.
    fn find(&self, extent: PhysicalExtent) -> Option<(usize, u64)> {
        let index = self.regions.partition_point(|r| r.first <= extent.0).checked_sub(1)?;
        let offset = extent.0 - self.regions[index].first;
        (offset < self.regions[index].count).then_some((index, offset))
    }
}

impl Region {
    fn end(&self) -> u64 {
        self.first + self.count
    }

    /// A copy of its extents from `first` to `end`.
    fn part(&self, first: u64, end: u64) -> Result<Self, BadRegion> {
        let (offset, count) = (first - self.first, end - first);
        let bad = BadRegion { first: PhysicalExtent(first), count };
        let mut bits = BitTree::new(count).ok_or(bad)?;
        let mut from = offset;
        while let Some(start) = self.bits.next_set(from, offset + count) {
            let len = self.bits.set_run_len(start, offset + count - start);
            bits.set_run(start - offset, len);
            from = start + len;
        }
        Ok(Self { first, count, cursor: 0, bits })
    }
}

/// Bits with a tree of "this word is all ones" above them. The padding bits of the last word of a
/// level are set, so that they are never found.
#[derive(Clone, Debug)]
struct BitTree {
    /// The bits first, then each level above; the last has one word.
    levels: Vec<Vec<u64>>,
}

impl BitTree {
    /// `count` clear bits. `None` if they don't fit into memory's address space.
    fn new(count: u64) -> Option<Self> {
        let mut levels = Vec::new();
        let mut bits = count;
        loop {
            let words = usize::try_from(bits.div_ceil(64)).ok()?;
            let mut level = Vec::new();
            level.try_reserve_exact(words).ok()?;
            level.resize(words, 0);
            if !bits.is_multiple_of(64) {
                *level.last_mut()? = u64::MAX << (bits % 64);
            }
            levels.push(level);
            if words == 1 {
                return Some(Self { levels });
            }
            bits = bits.div_ceil(64);
        }
    }

    fn get(&self, bit: u64) -> bool {
        let (word, shift) = split(bit);
        self.levels[0][word] >> shift & 1 == 1
    }

    /// The first clear bit at or after `from`.
    fn next_clear(&self, from: u64) -> Option<u64> {
        let mut at = from;
        let mut height = 0;
        loop {
            let (word, shift) = split(at);
            // Past the end on one level is past the end on all levels above it.
            let clear = !self.levels[height].get(word)? & (u64::MAX << shift);
            if clear != 0 {
                at = word as u64 * 64 + u64::from(clear.trailing_zeros());
                break;
            }
            at = word as u64 + 1;
            height += 1;
            if height == self.levels.len() {
                return None;
            }
        }
        while height > 0 {
            height -= 1;
            let (word, _) = split(at * 64);
            at = at * 64 + u64::from(self.levels[height][word].trailing_ones());
        }
        Some(at)
    }

    /// The first set bit at or after `from` and before `end`. Looks at every word between.
    fn next_set(&self, from: u64, end: u64) -> Option<u64> {
        let at = from + self.clear_run_len(from, end - from);
        (at < end).then_some(at)
    }

    /// Clear bits from `from` on, at most `max`.
    fn clear_run_len(&self, from: u64, max: u64) -> u64 {
        self.run_len(from, max, 0)
    }

    /// Set bits from `from` on, at most `max`.
    fn set_run_len(&self, from: u64, max: u64) -> u64 {
        self.run_len(from, max, u64::MAX)
    }

    /// Bits from `from` on that equal those of `flip`, at most `max`.
    fn run_len(&self, from: u64, max: u64, flip: u64) -> u64 {
        let (first_word, shift) = split(from);
        let mut len = 0;
        let mut shift = shift;
        for word in self.levels[0].get(first_word..).unwrap_or_default() {
            // Shifting brings in zeroes, which count as equal; `min` takes them off again.
            let equal = u64::from(((word ^ flip) >> shift).trailing_zeros().min(64 - shift));
            len += equal;
            if len >= max || equal < u64::from(64 - shift) {
                break;
            }
            shift = 0;
        }
        len.min(max)
    }

    /// The first run of `max` clear bits among the next few runs from `from` on, else the longest
    /// of these. Never wraps.
    fn longest_clear_run(&self, from: u64, max: u64) -> Option<(u64, u64)> {
        let mut longest: Option<(u64, u64)> = None;
        let mut from = from;
        for _ in 0..RUNS_TRIED {
            let Some(start) = self.next_clear(from) else { break };
            let len = self.clear_run_len(start, max);
            if longest.is_none_or(|(_, best)| len > best) {
                longest = Some((start, len));
            }
            if len == max {
                break;
            }
            from = start + len;
        }
        longest
    }

    /// Sets `len` bits from `from` on, and above them the bits of words that become all ones.
    fn set_run(&mut self, from: u64, len: u64) {
        for (word, mask) in masks(from, len) {
            let mut word = word;
            let mut mask = mask;
            for level in &mut self.levels {
                level[word] |= mask;
                if level[word] != u64::MAX {
                    break;
                }
                mask = 1 << (word % 64);
                word /= 64;
            }
        }
    }

    /// Clears `len` bits from `from` on, and above them the bits of words that were all ones.
    fn clear_run(&mut self, from: u64, len: u64) {
        for (word, mask) in masks(from, len) {
            let mut word = word;
            let mut mask = mask;
            for level in &mut self.levels {
                let was_full = level[word] == u64::MAX;
                level[word] &= !mask;
                if !was_full {
                    break;
                }
                mask = 1 << (word % 64);
                word /= 64;
            }
        }
    }
}

/// The words that a run of bits touches, and its bits in each.
fn masks(from: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
    let mut from = from;
    let mut len = len;
    std::iter::from_fn(move || {
        if len == 0 {
            return None;
        }
        let (word, shift) = split(from);
        let here = len.min(u64::from(64 - shift));
        from += here;
        len -= here;
        Some((word, u64::MAX >> (64 - here) << shift))
    })
}

/// A bit's word and its place there.
fn split(bit: u64) -> (usize, u32) {
    ((bit / 64) as usize, (bit % 64) as u32)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
