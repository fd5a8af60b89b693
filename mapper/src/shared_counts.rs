//! How many references physical extents have beyond the first.

use std::sync::OnceLock;

use crate::geometry::{DEVICE_SHIFT, SLAB_EXTENTS};
use crate::sync::{AtomicU32, Ordering, zeroed_slice};
use crate::units::PhysicalExtent;

/// Extents per slab of counters; loom explores small ones.
const PER_SLAB: u64 = if cfg!(loom) { 2 } else { SLAB_EXTENTS };
/// Segments that a device of the largest size has: the first is one slab, and each later one as
/// many as all before it together.
const SEGMENTS: usize = 1 + (DEVICE_SHIFT - PER_SLAB.trailing_zeros()) as usize;

/// Counters of 4096 extents.
type Slab = OnceLock<Box<[AtomicU32]>>;

/// A counter per physical extent of a device, in slabs that exist once something in them was
/// shared. A segment of the table of slabs exists once one of its slabs does, so that the table has
/// room for the largest device and takes memory for those extents alone that were shared.
///
/// The holders of an extent are all at one place of one lineage, so one stripe guards its counter;
/// different counters change at the same time.
#[derive(Debug)]
pub struct SharedCounts {
    segments: [OnceLock<Box<[Slab]>>; SEGMENTS],
}

impl Default for SharedCounts {
    /// Counters of no extent yet, all of them 0.
    fn default() -> Self {
        Self { segments: std::array::from_fn(|_| OnceLock::new()) }
    }
}

impl SharedCounts {
    /// References beyond the first. Where nothing is shared, one load or two.
    #[must_use]
    #[inline]
    pub fn extra(&self, extent: PhysicalExtent) -> u32 {
        self.known(extent).unwrap_or(0)
    }

    /// The same; `None` where nothing near the extent was ever shared.
    #[must_use]
    #[inline]
    pub fn known(&self, extent: PhysicalExtent) -> Option<u32> {
        self.counter(extent).map(|counter| counter.load(Ordering::Acquire))
    }

    /// Adds references. The caller holds the extent's stripe.
    ///
    /// # Panics
    ///
    /// If the extent lies beyond the largest device, if there is no memory for its slab, or after
    /// 2^32 references, more than there can be leaves: a count that is too low gives away data.
    pub fn add(&self, extent: PhysicalExtent, references: u32) {
        let place = Place::of(extent);
        let before = self.slab(place)[place.index].fetch_add(references, Ordering::AcqRel);
        assert!(before.checked_add(references).is_some(), "{extent} has 2^32 references");
    }

    /// Adds a reference to each of some extents in a row, as [`Self::add`] to one. The caller holds
    /// the stripe of each.
    ///
    /// # Panics
    ///
    /// As [`Self::add`].
    pub fn add_to_each(&self, first: PhysicalExtent, count: u64) {
        let (mut next, end) = (first.0, first.0.saturating_add(count));
        while next < end {
            let place = Place::of(PhysicalExtent(next));
            for counter in &self.slab(place)[place.index..] {
                if next == end {
                    return;
                }
                let before = counter.fetch_add(1, Ordering::AcqRel);
                assert!(before < u32::MAX, "{} has 2^32 references", PhysicalExtent(next));
                next += 1;
            }
        }
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
        // Ordered with the look of a reader that fills the read cache, and with the writer's look
        // there afterwards.
        counter.fetch_sub(1, Ordering::SeqCst) - 1
    }

    /// The extents with more than one reference and how many more, in order.
    pub fn iter(&self) -> impl Iterator<Item = (PhysicalExtent, u32)> {
        self.segments.iter().enumerate().flat_map(|(segment, slabs)| {
            let slabs = slabs.get().map_or(&[][..], |slabs| slabs);
            let first = first_slab(segment) * PER_SLAB;
            slabs.iter().zip((first..).step_by(STEP)).flat_map(|(slab, first)| {
                let counters = slab.get().map_or(&[][..], |counters| counters);
                let counts = counters.iter().map(|counter| counter.load(Ordering::Acquire));
                (first..).map(PhysicalExtent).zip(counts).filter(|&(_, extra)| extra > 0)
            })
        })
    }

    /// The counters of a place, which exist from now on.
    fn slab(&self, Place { segment, slab, .. }: Place) -> &[AtomicU32] {
        let present = self.segments.get(segment).expect("a device has at most 2^36 extents");
        let slabs = present.get_or_init(|| (0..slabs_of(segment)).map(|_| Slab::new()).collect());
        slabs[slab].get_or_init(|| {
            let count = usize::try_from(PER_SLAB).expect("a slab is small");
            zeroed_slice(count).expect("memory for 16 KiB of counters")
        })
    }

    #[inline]
    fn counter(&self, extent: PhysicalExtent) -> Option<&AtomicU32> {
        let Place { segment, slab, index } = Place::of(extent);
        self.segments.get(segment)?.get()?.get(slab)?.get()?.get(index)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "4096 at most")]
const STEP: usize = PER_SLAB as usize;

/// The position of an extent's counter.
#[derive(Clone, Copy)]
struct Place {
    segment: usize,
    slab: usize,
    index: usize,
}

impl Place {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "an index of less than 2^36 slabs")]
    const fn of(extent: PhysicalExtent) -> Self {
        let (slab, index) = (extent.0 / PER_SLAB, extent.0 % PER_SLAB);
        let segment = (u64::BITS - slab.leading_zeros()) as usize;
        Self { segment, slab: (slab - first_slab(segment)) as usize, index: index as usize }
    }
}

/// The first slab of a segment.
const fn first_slab(segment: usize) -> u64 {
    (1 << segment) >> 1
}

const fn slabs_of(segment: usize) -> u64 {
    (1_u64 << segment) - first_slab(segment)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn counts_go_up_and_down_next_to_each_other() {
        let counts = SharedCounts::default();
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
    fn each_extent_has_its_own_counter_up_to_the_last_of_the_largest_device() {
        let counts = SharedCounts::default();
        // Around the ends of segments, where they are small, and in one that is not.
        let extents: Vec<_> = [0, 1, 2, 4, 8, 1000]
            .into_iter()
            .flat_map(|slab| [slab * 4096, slab * 4096 + 4095])
            .map(PhysicalExtent)
            .collect();
        let holders = || extents.iter().copied().zip(1..);
        holders().for_each(|(extent, references)| counts.add(extent, references));
        assert!(holders().all(|(extent, references)| counts.extra(extent) == references));
        assert_eq!(counts.iter().collect::<Vec<_>>(), holders().collect::<Vec<_>>());
        let last = Place::of(PhysicalExtent((1 << DEVICE_SHIFT) - 1));
        assert_eq!((last.segment, last.index), (SEGMENTS - 1, 4095));
        assert_eq!(last.slab as u64, slabs_of(SEGMENTS - 1) - 1);
    }

    #[test]
    fn extents_in_a_row_get_a_reference_each() {
        let counts = SharedCounts::default();
        counts.add(PhysicalExtent(4097), 1);
        // Over the ends of two slabs.
        counts.add_to_each(PhysicalExtent(4094), 4100);
        let held = counts.iter().collect::<Vec<_>>();
        let expected = (4094..8194).map(|extent| {
            let references = if extent == 4097 { 2 } else { 1 };
            (PhysicalExtent(extent), references)
        });
        assert_eq!(held, expected.collect::<Vec<_>>());
        counts.add_to_each(PhysicalExtent(0), 0);
        assert_eq!(counts.extra(PhysicalExtent(0)), 0);
    }

    #[test]
    fn outside_a_device_nothing_is_shared() {
        let counts = SharedCounts::default();
        counts.add(PhysicalExtent(0), 1);
        assert_eq!(counts.extra(PhysicalExtent(4096)), 0);
        assert_eq!(counts.extra(PhysicalExtent((1 << DEVICE_SHIFT) - 1)), 0);
        assert_eq!(counts.extra(PhysicalExtent(u64::MAX)), 0);
    }

    #[test]
    #[should_panic(expected = "no reference beyond the first")]
    fn the_first_reference_is_not_counted_here() {
        let counts = SharedCounts::default();
        counts.add(PhysicalExtent(0), 1);
        counts.sub(PhysicalExtent(0));
        counts.sub(PhysicalExtent(0));
    }

    #[test]
    #[should_panic(expected = "at most 2^36 extents")]
    fn a_reference_outside_a_device_is_not_forgotten() {
        SharedCounts::default().add(PhysicalExtent(1 << DEVICE_SHIFT), 1);
    }
}
