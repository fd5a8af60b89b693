//! How many references physical extents have beyond the first.

use std::sync::OnceLock;

use crate::geometry::SLAB_EXTENTS;
use crate::sync::{AtomicU32, Ordering, zeroed_slice};
use crate::units::PhysicalExtent;

/// Extents per slab of counters; loom explores small ones.
const PER_SLAB: u64 = if cfg!(loom) { 2 } else { SLAB_EXTENTS };

/// A counter per physical extent, in slabs that exist once something in them was shared.
///
/// The holders of an extent are all at one place of one lineage, so one stripe guards its counter;
/// different counters change at the same time.
#[derive(Debug)]
pub struct SharedCounts {
    slabs: Box<[OnceLock<Box<[AtomicU32]>>]>,
}

impl SharedCounts {
    /// Counters for this many extents, all of them 0. Takes 16 bytes per 4096 extents.
    #[must_use]
    pub fn new(extent_capacity: u64) -> Self {
        Self { slabs: (0..extent_capacity.div_ceil(PER_SLAB)).map(|_| OnceLock::new()).collect() }
    }

    /// Extents there are counters for.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.slabs.len() as u64 * PER_SLAB
    }

    /// References beyond the first. Where nothing is shared, one load.
    #[must_use]
    #[inline]
    pub fn extra(&self, extent: PhysicalExtent) -> u32 {
        self.counter(extent).map_or(0, |counter| counter.load(Ordering::Acquire))
    }

    /// Adds references. The caller holds the extent's stripe.
    ///
    /// # Panics
    ///
    /// If the extent is beyond the capacity, if there is no memory for its slab, or after 2^32
    /// references, more than there can be leaves: a count that is too low gives away data.
    pub fn add(&self, extent: PhysicalExtent, references: u32) {
        let (slab, index) = place(extent).expect("extents of a pool have 40 bits");
        let slab = self.slabs.get(slab).expect("the capacity covers every extent of the pool");
        let counters = slab.get_or_init(|| {
            let count = usize::try_from(PER_SLAB).expect("a slab is small");
            zeroed_slice(count).expect("memory for 16 KiB of counters")
        });
        let before = counters[index].fetch_add(references, Ordering::AcqRel);
        assert!(before.checked_add(references).is_some(), "{extent} has 2^32 references");
    }

    /// Drops one reference and returns how many are left beyond the first. The caller holds the
    /// extent's stripe.
    ///
    /// # Panics
    ///
    /// If the extent has none beyond the first: dropping that one means to free the extent.
    pub fn sub(&self, extent: PhysicalExtent) -> u32 {
        let counter = self.counter(extent).expect("references were added");
        let before = counter.load(Ordering::Acquire);
        assert!(before > 0, "{extent} has no reference beyond the first");
        counter.fetch_sub(1, Ordering::AcqRel) - 1
    }

    /// The extents with more than one reference and how many more, in order.
    pub fn iter(&self) -> impl Iterator<Item = (PhysicalExtent, u32)> {
        self.slabs.iter().zip((0u64..).step_by(STEP)).flat_map(|(slab, first)| {
            let counters = slab.get().map_or(&[][..], |counters| counters);
            let counts = counters.iter().map(|counter| counter.load(Ordering::Acquire));
            (first..).map(PhysicalExtent).zip(counts).filter(|&(_, extra)| extra > 0)
        })
    }

    #[inline]
    fn counter(&self, extent: PhysicalExtent) -> Option<&AtomicU32> {
        let (slab, index) = place(extent)?;
        self.slabs.get(slab)?.get()?.get(index)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "4096 at most")]
const STEP: usize = PER_SLAB as usize;

#[inline]
fn place(extent: PhysicalExtent) -> Option<(usize, usize)> {
    let slab = usize::try_from(extent.0 / PER_SLAB).ok()?;
    let index = usize::try_from(extent.0 % PER_SLAB).ok()?;
    Some((slab, index))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn counts_go_up_and_down_next_to_each_other() {
        let counts = SharedCounts::new(10_000);
        assert_eq!(counts.extra(PhysicalExtent(4096)), 0);
        counts.add(PhysicalExtent(4096), 2);
        counts.add(PhysicalExtent(4095), 1);
        assert_eq!(counts.extra(PhysicalExtent(4096)), 2);
        assert_eq!(counts.extra(PhysicalExtent(4097)), 0);
        assert_eq!(
            counts.iter().collect::<Vec<_>>(),
            [(PhysicalExtent(4095), 1), (PhysicalExtent(4096), 2)]
        );
        assert_eq!(counts.sub(PhysicalExtent(4096)), 1);
        assert_eq!(counts.sub(PhysicalExtent(4096)), 0);
        assert_eq!(counts.extra(PhysicalExtent(4096)), 0);
    }

    #[test]
    fn outside_the_capacity_nothing_is_shared() {
        let counts = SharedCounts::new(1);
        assert_eq!(counts.extra(PhysicalExtent(4096)), 0);
        assert_eq!(counts.extra(PhysicalExtent(u64::MAX)), 0);
        assert_eq!(SharedCounts::new(0).extra(PhysicalExtent(0)), 0);
    }

    #[test]
    #[should_panic(expected = "no reference beyond the first")]
    fn the_first_reference_is_not_counted_here() {
        let counts = SharedCounts::new(1);
        counts.add(PhysicalExtent(0), 1);
        counts.sub(PhysicalExtent(0));
        counts.sub(PhysicalExtent(0));
    }

    #[test]
    #[should_panic(expected = "the capacity covers")]
    fn a_reference_outside_the_capacity_is_not_forgotten() {
        SharedCounts::new(1).add(PhysicalExtent(4096), 1);
    }
}
