//! The table of slow writes in flight, in stripes. A *slow write* is one whose completion changes
//! the map. The mutex of a stripe guards the leaves, leaf references and extra references of every
//! volume of a lineage at the slots that fall on it.

use crate::units::{ExtentIndex, PhysicalExtent, SlotIndex, VolumeId};

/// Stripes of a pool. Writers of different leaves meet on one in a few hundred cases.
pub(crate) const STRIPES: usize = 256;

/// Slow writes in flight on one stripe. A sequential writer keeps all of its queue on one leaf, so
/// this bounds its useful queue depth.
pub(crate) const MAX_IN_FLIGHT: usize = 256;

/// Groups of extents, by the last bits of their number: the usual queue's writes, in sequence, have
/// one each. Each pool has 256 times as many counts.
const GROUPS: usize = 32;

/// The stripe of a slot. Multiplicative hashing: neighbouring slots land far apart.
pub(crate) fn stripe_index(lineage: VolumeId, slot: SlotIndex) -> usize {
    let key = (u64::from(lineage.0) << 32) | u64::from(slot.0);
    usize::from(key.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[7])
}

/// One extent's part of a write in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlowWrite {
    pub(crate) token: u64,
    pub(crate) volume: VolumeId,
    pub(crate) extent: ExtentIndex,
    /// Where the data goes.
    pub(crate) target: PhysicalExtent,
    /// The shared extent that is being copied away from, or that the target comes to lie over.
    pub(crate) source: Option<PhysicalExtent>,
    /// Whether the target comes to lie over the source, instead of taking its place.
    pub(crate) redirects: bool,
    /// Sub-blocks that the write makes valid.
    pub(crate) own: u64,
    /// Sub-blocks copied from the source, or left in it.
    pub(crate) copied: u64,
    /// Sub-blocks that this write fills up around its own bytes, with zeroes or with what the base
    /// has there: no other write may touch them meanwhile.
    pub(crate) filled: u64,
    /// Sub-blocks that a discard has cleared since (R5c).
    pub(crate) cancelled: u64,
    /// A request parked because of this one.
    pub(crate) awaited: bool,
    /// A metadata page was promised for its leaf.
    pub(crate) page_promised: bool,
    /// Its target was taken from the volume's reserve for it.
    pub(crate) allocated: bool,
}

impl SlowWrite {
    /// A copy of the engine's, from one extent to another: every other write of the volume's extent
    /// waits for it.
    pub(crate) const fn of_engine(
        token: u64,
        (volume, extent): (VolumeId, ExtentIndex),
        (source, target): (PhysicalExtent, PhysicalExtent),
        copied: u64,
    ) -> Self {
        Self {
            token,
            volume,
            extent,
            target,
            source: Some(source),
            redirects: false,
            own: 0,
            copied,
            filled: 0,
            cancelled: 0,
            awaited: false,
            page_promised: false,
            allocated: false,
        }
    }

    /// Whether it copies an extent away: no other write of the extent may be in flight.
    pub(crate) const fn copies(&self) -> bool {
        self.source.is_some() && !self.redirects
    }
}

/// The slow writes in flight of one stripe.
#[derive(Debug)]
pub(crate) struct Stripe {
    in_flight: Vec<SlowWrite>,
    /// How many of them are on extents of each group. Most writes have an extent to themselves, and
    /// many are in flight: this shows it without a look at each.
    on_group: [u16; GROUPS],
    /// A request parked because the table was full.
    awaited: bool,
}

impl Stripe {
    /// An empty one with memory for `room` writes. More of them make it grow.
    pub(crate) fn new(room: usize) -> Self {
        Self { in_flight: Vec::with_capacity(room), on_group: [0; GROUPS], awaited: false }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.in_flight.len() >= MAX_IN_FLIGHT
    }

    /// Records that a request waits for room in the table.
    pub(crate) fn await_room(&mut self) {
        self.awaited = true;
    }

    /// Whether a request waited for room; clears the flag.
    pub(crate) fn take_awaited(&mut self) -> bool {
        std::mem::take(&mut self.awaited)
    }

    /// Slow writes in flight on one extent of one volume, to be marked.
    pub(crate) fn on_mut(
        &mut self,
        volume: VolumeId,
        extent: ExtentIndex,
    ) -> impl Iterator<Item = &mut SlowWrite> {
        let all = if self.is_on_group(extent) { &mut self.in_flight[..] } else { &mut [] };
        all.iter_mut().filter(move |w| w.volume == volume && w.extent == extent)
    }

    /// Every slow write.
    pub(crate) fn all(&self) -> impl Iterator<Item = &SlowWrite> {
        self.in_flight.iter()
    }

    /// Every slow write without a page promised for its leaf.
    pub(crate) fn unpromised(&mut self) -> impl Iterator<Item = &mut SlowWrite> {
        self.in_flight.iter_mut().filter(|w| !w.page_promised)
    }

    /// The number of slow writes with one.
    pub(crate) fn promised(&self) -> usize {
        self.in_flight.iter().filter(|w| w.page_promised).count()
    }

    /// Whether a write in flight may make an entry composite.
    pub(crate) fn redirects(&self) -> bool {
        self.in_flight.iter().any(|w| w.redirects)
    }

    pub(crate) fn add(&mut self, write: SlowWrite) {
        debug_assert!(!self.is_full(), "callers ask is_full first");
        self.on_group[group(write.extent)] += 1;
        self.in_flight.push(write);
    }

    pub(crate) fn remove(&mut self, token: u64) -> Option<SlowWrite> {
        let at = self.in_flight.iter().position(|w| w.token == token)?;
        let write = self.in_flight.swap_remove(at);
        self.on_group[group(write.extent)] -= 1;
        Some(write)
    }

    /// Slow writes in flight on one extent of one volume.
    pub(crate) fn on(
        &self,
        volume: VolumeId,
        extent: ExtentIndex,
    ) -> impl Iterator<Item = &SlowWrite> {
        let all = if self.is_on_group(extent) { &self.in_flight[..] } else { &[] };
        all.iter().filter(move |w| w.volume == volume && w.extent == extent)
    }

    /// Whether any slow write is in flight on a slot of a volume.
    pub(crate) fn any_on_slot(&self, volume: VolumeId, slot: SlotIndex) -> bool {
        self.in_flight.iter().any(|w| w.volume == volume && w.extent.slot() == slot)
    }

    /// Removes sub-blocks from those that slow writes on the extent will make valid (R5c).
    pub(crate) fn cancel(&mut self, volume: VolumeId, extent: ExtentIndex, bits: u64) -> bool {
        let mut any = false;
        for write in self.on_mut(volume, extent) {
            write.cancelled |= bits;
            any = true;
        }
        any
    }

    /// Whether any is in flight on an extent of the same group.
    fn is_on_group(&self, extent: ExtentIndex) -> bool {
        self.on_group[group(extent)] > 0
    }
}

fn group(extent: ExtentIndex) -> usize {
    usize::from(extent.0.to_le_bytes()[0]) % GROUPS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_an_extent_are_found_among_others_of_its_group() {
        let mut stripe = Stripe::new(0);
        let (volume, other) = (VolumeId(1), VolumeId(2));
        let near = ExtentIndex(5);
        let far = ExtentIndex(near.0 + GROUPS as u64);
        let all = [(volume, near), (volume, far), (other, near), (volume, near)];
        for (of, token) in all.into_iter().zip(1..) {
            let extents = (PhysicalExtent(7), PhysicalExtent(8));
            stripe.add(SlowWrite::of_engine(token, of, extents, 1));
        }
        let on = |stripe: &mut Stripe, volume, extent| {
            let found: Vec<u64> = stripe.on(volume, extent).map(|write| write.token).collect();
            let marked: Vec<u64> = stripe.on_mut(volume, extent).map(|write| write.token).collect();
            assert_eq!(found, marked);
            found
        };
        assert_eq!(on(&mut stripe, volume, near), [1, 4]);
        assert_eq!(on(&mut stripe, volume, far), [2]);
        assert_eq!(on(&mut stripe, volume, ExtentIndex(6)), []);
        assert!(stripe.cancel(other, near, 2) && !stripe.cancel(other, far, 2));
        assert!(stripe.remove(1).is_some() && stripe.remove(1).is_none());
        assert_eq!(on(&mut stripe, volume, near), [4]);
        for token in 2..=4 {
            assert!(stripe.remove(token).is_some());
        }
        assert_eq!((stripe.on_group, stripe.all().count()), ([0; GROUPS], 0));
    }

    #[test]
    fn slots_spread_over_the_stripes() {
        let mut seen = [0u32; STRIPES];
        for slot in 0..1024 {
            seen[stripe_index(VolumeId(1), SlotIndex(slot))] += 1;
        }
        assert!(seen.iter().filter(|&&n| n > 0).count() > 200);
    }
}
