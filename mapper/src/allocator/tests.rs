//! The allocator against a set of extents, and the shapes that its runs must have.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn filled(regions: &[(u64, u64)]) -> Allocator {
    let mut allocator = Allocator::new();
    for &(first, count) in regions {
        allocator.add_region(PhysicalExtent(first), count).unwrap();
    }
    allocator
}

#[test]
fn a_run_follows_the_one_before() {
    let mut allocator = filled(&[(100, 1000)]);
    assert_eq!(allocator.allocate_run(64), Some((PhysicalExtent(100), 64)));
    assert_eq!(allocator.allocate_run(1), Some((PhysicalExtent(164), 1)));
    assert_eq!(allocator.allocate_run(300), Some((PhysicalExtent(165), 300)));
    // Freed extents are not reused before the cursor wraps around.
    assert!(allocator.free(PhysicalExtent(100), 64));
    assert_eq!(allocator.allocate_run(64), Some((PhysicalExtent(465), 64)));
    assert_eq!(allocator.lowest_free(), Some(PhysicalExtent(100)));
}

#[test]
fn a_long_run_is_preferred_to_a_near_one() {
    let mut allocator = filled(&[(0, 256)]);
    for hole in [3, 10, 20] {
        assert!(allocator.mark_used(PhysicalExtent(hole)));
    }
    assert_eq!(allocator.allocate_run(16), Some((PhysicalExtent(21), 16)));
    // Nothing of that length is left: the longest of the next few.
    let mut allocator = filled(&[(0, 12)]);
    assert!(allocator.mark_used(PhysicalExtent(2)) && allocator.mark_used(PhysicalExtent(8)));
    assert_eq!(allocator.allocate_run(16), Some((PhysicalExtent(3), 5)));
}

#[test]
fn a_run_is_allocated_in_one_region_and_may_be_freed_over_several() {
    let mut allocator = filled(&[(0, 10), (10, 10)]);
    assert_eq!(allocator.allocate_run(8), Some((PhysicalExtent(0), 8)));
    assert_eq!(allocator.allocate_run(8), Some((PhysicalExtent(8), 2)));
    assert_eq!(allocator.allocate_run(8), Some((PhysicalExtent(10), 8)));
    assert_eq!(
        allocator.used_runs().collect::<Vec<_>>(),
        [(PhysicalExtent(0), 10), (PhysicalExtent(10), 8)]
    );
    assert_eq!(allocator.free_runs().collect::<Vec<_>>(), [(PhysicalExtent(18), 2)]);
    // Some of it is free, or beyond: nothing happens.
    assert!(!allocator.free(PhysicalExtent(8), 11) && !allocator.free(PhysicalExtent(8), 13));
    assert_eq!(allocator.free_count(), 2);
    assert!(allocator.free(PhysicalExtent(8), 4));
    assert_eq!(allocator.free_count(), 6);
    assert_eq!(
        allocator.used_runs().collect::<Vec<_>>(),
        [(PhysicalExtent(0), 8), (PhysicalExtent(12), 6)]
    );
}

#[test]
fn the_last_free_extent_of_a_full_pool_is_found() {
    let count = 64 * 64 * 64 + 17;
    for last in [0, 63, 64, 4096, count - 1] {
        let mut allocator = filled(&[(5, count)]);
        while allocator.allocate_run(u64::MAX).is_some() {}
        assert_eq!(allocator.free_count(), 0);
        assert!(allocator.free(PhysicalExtent(5 + last), 1));
        assert_eq!(allocator.allocate_run(9), Some((PhysicalExtent(5 + last), 1)));
        assert_eq!(allocator.allocate_run(9), None);
    }
}

#[test]
fn missing_extents_are_neither_freed_nor_marked() {
    let mut allocator = filled(&[(10, 10)]);
    assert!(allocator.mark_used(PhysicalExtent(12)) && !allocator.mark_used(PhysicalExtent(12)));
    assert!(!allocator.mark_used(PhysicalExtent(9)) && !allocator.mark_used(PhysicalExtent(20)));
    assert!(!allocator.free(PhysicalExtent(12), 2), "the second is free already");
    assert!(!allocator.free(PhysicalExtent(12), u64::MAX));
    assert!(!allocator.free(PhysicalExtent(u64::MAX), u64::MAX));
    assert!(allocator.is_used(PhysicalExtent(12)) && !allocator.is_used(PhysicalExtent(9)));
    assert_eq!((allocator.free_count(), allocator.total_count()), (9, 10));
    assert_eq!(Allocator::new().allocate_run(1), None);
    assert_eq!(allocator.allocate_run(0), None);
}

#[test]
fn regions_don_t_overlap() {
    let mut allocator = filled(&[(10, 10), (30, 10)]);
    for (first, count) in [(5, 6), (10, 1), (19, 2), (15, 30), (29, 2), (39, 1), (50, 0)] {
        assert!(allocator.add_region(PhysicalExtent(first), count).is_err(), "{first}+{count}");
    }
    assert!(allocator.add_region(PhysicalExtent(u64::MAX), 2).is_err());
    assert!(allocator.add_region(PhysicalExtent(100), u64::MAX - 100).is_err());
    allocator.add_region(PhysicalExtent(20), 10).unwrap();
    assert_eq!((allocator.free_count(), allocator.total_count()), (30, 30));
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(u64, u64),
    Mark(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop_oneof![1..4u64, 60..200u64].prop_map(Step::Allocate),
        (0..700u64, 1..130u64).prop_map(|(first, count)| Step::Free(first, count)),
        (0..700u64).prop_map(Step::Mark),
    ]
}

proptest! {
    #[test]
    fn the_allocator_agrees_with_a_set(steps in prop::collection::vec(step(), 1..200)) {
        // Borders in the middle of a word, at a word's end, a gap, and a region of one extent.
        let regions = [(3, 130), (133, 64), (300, 1), (310, 333)];
        let mut allocator = filled(&regions);
        let mut free: BTreeSet<u64> =
            regions.iter().flat_map(|&(first, count)| first..first + count).collect();
        let all = free.clone();
        for step in steps {
            apply(&mut allocator, &mut free, &all, &step);
            prop_assert_eq!(allocator.free_count(), free.len() as u64);
            prop_assert_eq!(allocator.lowest_free().map(|p| p.0), free.first().copied());
        }
        let listed: BTreeSet<u64> = allocator.free_runs().flat_map(|(p, n)| p.0..p.0 + n).collect();
        prop_assert_eq!(&listed, &free);
        let used: BTreeSet<u64> = allocator.used_runs().flat_map(|(p, n)| p.0..p.0 + n).collect();
        prop_assert_eq!(used, &all - &free);
        for extent in 0..700 {
            let used = all.contains(&extent) && !free.contains(&extent);
            prop_assert_eq!(allocator.is_used(PhysicalExtent(extent)), used);
        }
    }
}

fn apply(allocator: &mut Allocator, free: &mut BTreeSet<u64>, all: &BTreeSet<u64>, step: &Step) {
    match *step {
        Step::Allocate(max) => match allocator.allocate_run(max) {
            None => assert!(free.is_empty()),
            Some((first, len)) => {
                assert!((1..=max).contains(&len));
                assert!((first.0..first.0 + len).all(|extent| free.remove(&extent)));
            }
        },
        Step::Free(first, count) => {
            let run = first..first + count;
            let used = run.clone().all(|extent| all.contains(&extent) && !free.contains(&extent));
            assert_eq!(allocator.free(PhysicalExtent(first), count), used);
            if used {
                free.extend(run);
            }
        }
        Step::Mark(extent) => {
            assert_eq!(allocator.mark_used(PhysicalExtent(extent)), free.remove(&extent));
        }
    }
}

#[test]
fn free_extents_are_found_in_order() {
    let mut space = filled(&[(10, 100), (200, 70)]);
    for used in [10, 11, 40, 109, 230] {
        assert!(space.mark_used(PhysicalExtent(used)));
    }
    let (mut found, mut from) = (Vec::new(), PhysicalExtent(0));
    while let Some((first, count)) = space.allocate_from(from, 64) {
        found.push((first.0, count));
        from = PhysicalExtent(first.0 + count);
        assert!(space.free(first, count));
    }
    assert_eq!(found, [(12, 28), (41, 64), (105, 4), (200, 30), (231, 39)]);
    assert_eq!(space.free_count(), 165);
}

proptest! {
    #[test]
    fn a_part_that_is_taken_out_and_back_is_as_it_was(
        marks in prop::collection::vec(0..700u64, 1..300),
        from in 0..700u64,
    ) {
        let mut whole = filled(&[(3, 130), (133, 64), (300, 1), (310, 333)]);
        for extent in marks {
            let _ = whole.mark_used(PhysicalExtent(extent));
        }
        let mut head = whole.clone();
        let mut tail = head.split_off(PhysicalExtent(from)).unwrap();
        prop_assert_eq!(head.free_count() + tail.free_count(), whole.free_count());
        prop_assert_eq!(head.total_count() + tail.total_count(), whole.total_count());
        for extent in (0..700).map(PhysicalExtent) {
            let (there, elsewhere) = if extent.0 < from { (&head, &tail) } else { (&tail, &head) };
            prop_assert_eq!(there.is_used(extent), whole.is_used(extent));
            prop_assert_eq!(there.contains(extent), whole.contains(extent));
            prop_assert!(!elsewhere.contains(extent));
        }
        // Neither gives out what is the other's.
        while let Some((first, count)) = head.allocate_run(7) {
            prop_assert!(first.0 + count <= from && head.free(first, 1));
            prop_assert!(head.mark_used(first));
        }
        while let Some((first, _)) = tail.allocate_run(7) {
            prop_assert!(first.0 >= from);
        }
        head.append(tail);
        prop_assert_eq!((head.free_count(), head.total_count()), (0, whole.total_count()));
        prop_assert!((0..700).map(PhysicalExtent).all(|e| head.is_used(e) == whole.contains(e)));
        prop_assert!(head.free(PhysicalExtent(3), 194), "over the cut too");
    }
}
