//! Extents granted to a volume and not used yet: its reserve, and the part of one worker.

use crate::units::PhysicalExtent;

/// Extents of one worker's slice of a volume's reserve. Small, so that an idle worker holds at most
/// 2 MiB at the default extent; large enough that the reserve's lock is taken once in eight first
/// writes.
const SLICE: usize = 8;

/// Separate runs that a reserve may hold; a grant stops when the list is full.
const MAX_RUNS: usize = 64;

/// Extents granted to a volume and not yet used, as runs.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    pub(super) runs: Vec<(PhysicalExtent, u64)>,
}

impl Reserve {
    pub(crate) fn total(&self) -> u64 {
        self.runs.iter().map(|run| run.1).sum()
    }

    pub(crate) fn has_room(&self) -> bool {
        self.runs.len() < MAX_RUNS
    }

    pub(crate) fn add(&mut self, first: PhysicalExtent, count: u64) {
        if self.runs.capacity() == 0 {
            self.runs.reserve_exact(MAX_RUNS);
        }
        match self.runs.last_mut() {
            Some(last) if last.0.0 + last.1 == first.0 => last.1 += count,
            _ => self.runs.push((first, count)),
        }
    }

    /// Takes this many extents out, the newest first.
    pub(super) fn take_last(&mut self, mut count: u64, mut give: impl FnMut(PhysicalExtent, u64)) {
        while count > 0
            && let Some(run) = self.runs.last_mut()
        {
            let taken = run.1.min(count);
            run.1 -= taken;
            give(PhysicalExtent(run.0.0 + run.1), taken);
            count -= taken;
            if run.1 == 0 {
                self.runs.pop();
            }
        }
    }

    /// Moves up to a slice of extents out, lowest first within the oldest run. At most
    /// half is moved: a later fill finds the reserve low while something is left of it.
    pub(super) fn fill(&mut self, slice: &mut Slice) {
        let half = usize::try_from(self.total().div_ceil(2)).unwrap_or(SLICE);
        let most = half.min(SLICE);
        while let Some(run) = self.runs.first_mut() {
            while run.1 > 0 && slice.len() < most {
                slice.push_last(run.0);
                run.0.0 += 1;
                run.1 -= 1;
            }
            if run.1 > 0 || slice.len() == most {
                if run.1 == 0 {
                    self.runs.remove(0);
                }
                return;
            }
            self.runs.remove(0);
        }
    }
}

/// A few extents from which one worker allocates without synchronisation.
#[derive(Debug, Default)]
pub(crate) struct Slice {
    pub(super) extents: [PhysicalExtent; SLICE],
    pub(super) next: usize,
    pub(super) end: usize,
}

impl Slice {
    pub(crate) const fn len(&self) -> usize {
        self.end - self.next
    }

    pub(crate) fn pop(&mut self) -> Option<PhysicalExtent> {
        (self.next < self.end).then(|| {
            self.next += 1;
            self.extents[self.next - 1]
        })
    }

    /// Puts an extent back that was taken and not used. `false` when there is no room.
    pub(crate) fn push_first(&mut self, extent: PhysicalExtent) -> bool {
        if self.next == 0 {
            return false;
        }
        self.next -= 1;
        self.extents[self.next] = extent;
        true
    }

    /// Takes the extents of a kind out.
    pub(super) fn take_out(
        &mut self,
        kind: impl Fn(PhysicalExtent) -> bool,
        mut give: impl FnMut(PhysicalExtent),
    ) {
        let held = std::mem::take(self);
        for &extent in &held.extents[held.next..held.end] {
            if kind(extent) { give(extent) } else { self.push_last(extent) }
        }
    }

    fn push_last(&mut self, extent: PhysicalExtent) {
        if self.next == self.end {
            (self.next, self.end) = (0, 0);
        }
        if self.end < SLICE {
            self.extents[self.end] = extent;
            self.end += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_taken_back_from_the_newest_run() {
        let mut reserve = Reserve::default();
        reserve.add(PhysicalExtent(10), 3);
        reserve.add(PhysicalExtent(100), 2);
        let mut taken = Vec::new();
        reserve.take_last(3, |first, count| taken.push((first.0, count)));
        assert_eq!((taken, reserve.total()), (vec![(100, 2), (12, 1)], 2));
        reserve.take_last(9, |_, _| {});
        assert_eq!(reserve.total(), 0);
    }

    #[test]
    fn a_slice_takes_at_most_eight_and_keeps_order() {
        let mut reserve = Reserve::default();
        reserve.add(PhysicalExtent(10), 3);
        reserve.add(PhysicalExtent(100), 20);
        let mut slice = Slice::default();
        reserve.fill(&mut slice);
        assert_eq!((slice.len(), reserve.total()), (8, 15));
        let first: Vec<u64> = std::iter::from_fn(|| slice.pop()).map(|e| e.0).collect();
        assert_eq!(first, [10, 11, 12, 100, 101, 102, 103, 104]);
        reserve.fill(&mut slice);
        assert_eq!(slice.pop(), Some(PhysicalExtent(105)));
        assert!(slice.push_first(PhysicalExtent(105)));
        assert_eq!(slice.pop(), Some(PhysicalExtent(105)));
    }

    #[test]
    fn of_a_small_reserve_a_slice_takes_half() {
        let mut reserve = Reserve::default();
        reserve.add(PhysicalExtent(10), 1);
        reserve.add(PhysicalExtent(100), 3);
        let sizes = [2, 1, 1, 0].map(|expected| {
            let mut slice = Slice::default();
            reserve.fill(&mut slice);
            assert_eq!(slice.len(), expected);
            reserve.total()
        });
        assert_eq!(sizes, [2, 1, 0, 0]);
    }
}
