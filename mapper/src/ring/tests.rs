//! The ring after every prefix of the stores of whatever was being done to it.

use super::*;
use crate::format::VolumeName;
use crate::format::record::GroupMember;
use crate::units::{ExtentIndex, PhysicalExtent, VolumeId, WallTime};

const POOL: PoolId = [7; 16];
const BOOT: [u8; 16] = [9; 16];

fn map(extent: u64) -> Change {
    let (volume, physical) = (VolumeId(1), PhysicalExtent(extent + 100));
    Change::Map { volume, extent: ExtentIndex(extent), physical, valid: !extent }
}

fn group() -> Change {
    let member = |source| GroupMember { source, name: VolumeName::new("g").unwrap() };
    let members = [member(VolumeId(1)), member(VolumeId(2))].into();
    Change::SnapshotGroup { volume: VolumeId(10), made: WallTime(3), members }
}

fn create(letters: usize) -> Change {
    let name = Box::new(VolumeName::new(&"n".repeat(letters)).unwrap());
    let (volume, made) = (VolumeId(3), WallTime(4));
    Change::Create { volume, size: 1 << 30, block_size: 512, made, name }
}

fn new_ring(slots: usize, capacity: u64) -> (Arc<VecRingMemory>, DeltaRing) {
    let memory = Arc::new(VecRingMemory::new(slots, capacity));
    let ring = DeltaRing::format(memory.clone(), &POOL, &BOOT, slots, capacity).unwrap();
    (memory, ring)
}

fn copy(memory: &VecRingMemory) -> Arc<VecRingMemory> {
    let words = memory.0.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed)));
    Arc::new(VecRingMemory(words.collect()))
}

fn adopt(memory: &Arc<VecRingMemory>) -> Result<DeltaRing, RingProblem> {
    DeltaRing::adopt(memory.clone(), &POOL, &BOOT)
}

fn publish(ring: &DeltaRing, slot: usize, lsn: u64, change: &Change) -> u64 {
    assert!(ring.reserve(slot, change.units() as u64), "no room");
    ring.publish(slot, Lsn(lsn), change, Dropped::Extent(PhysicalExtent(lsn))).unwrap()
}

fn found(ring: &DeltaRing) -> Vec<(u64, Change)> {
    ring.recover().unwrap().iter().map(|record| (record.lsn.0, record.change.clone())).collect()
}

/// Runs `action` on copies of the memory with every number of stores, and returns the findings of a
/// process that adopts the ring. The last one is of the whole action.
fn cut_off(memory: &VecRingMemory, action: impl Fn(&DeltaRing)) -> Vec<Vec<(u64, Change)>> {
    let mut results = Vec::new();
    for stores in 0.. {
        let memory = copy(memory);
        let ring = adopt(&memory).unwrap();
        stores::stop_after(Some(stores));
        action(&ring);
        let finished = stores::stop_after(None).is_some_and(|left| left > 0);
        // A second takeover sees the same, also where the first tidied up.
        let first = found(&adopt(&memory).unwrap_or_else(|e| panic!("after {stores}: {e}")));
        let again = adopt(&memory).unwrap_or_else(|e| panic!("after {stores}, again: {e}"));
        assert_eq!(first, found(&again), "after {stores}");
        check_usable(&again, &first);
        results.push(first);
        if finished {
            return results;
        }
    }
    unreachable!("an action ends")
}

/// A ring that was taken over takes changes, and whatever lay in it stays.
fn check_usable(ring: &DeltaRing, before: &[(u64, Change)]) {
    if ring.reserve(0, 1) {
        let change = map(77);
        ring.publish(0, Lsn(1 << 40), &change, Dropped::Nothing).unwrap();
        let mut expected = before.to_vec();
        expected.push((1 << 40, change));
        assert_eq!(found(ring), expected);
    }
}

/// A slot of `capacity` units through which `passed` records went, of which `kept` are needed.
fn filled(capacity: u64, passed: u64, kept: u64) -> Arc<VecRingMemory> {
    let (memory, ring) = new_ring(2, capacity);
    for lsn in 1..=passed {
        let position = publish(&ring, 0, lsn, &map(lsn));
        ring.trim(0, (position + 1).saturating_sub(kept));
    }
    memory
}

#[test]
fn each_prefix_of_a_publish_leaves_the_old_records_or_the_new_one_too() {
    for capacity in [4_u64, 7, 8] {
        for (change, units) in [(map(5), 1), (create(1), 2), (group(), 5), (create(128), 7)] {
            for passed in 0..=2 * capacity {
                for kept in 0..=passed.min(capacity.saturating_sub(units)) {
                    if units > capacity {
                        continue;
                    }
                    let memory = filled(capacity, passed, kept);
                    let before = found(&adopt(&memory).unwrap());
                    assert_eq!(before.len() as u64, kept);
                    let mut after = before.clone();
                    after.push((1000, change.clone()));
                    let results = cut_off(&memory, |ring| {
                        publish(ring, 0, 1000, &change);
                    });
                    let (last, cut) = results.split_last().unwrap();
                    assert_eq!(*last, after);
                    // The last store alone makes it be there: one result is of all its stores.
                    let (whole, cut) = cut.split_last().unwrap();
                    assert_eq!(*whole, after);
                    assert_eq!(cut.len() as u64, units * 8);
                    assert!(cut.iter().all(|result| *result == before));
                }
            }
        }
    }
}

#[test]
fn a_change_cut_off_is_forgotten_also_when_forgetting_is_cut_off() {
    for cut in 0..=7 * 8 {
        let memory = filled(8, 13, 1);
        stores::stop_after(Some(cut));
        // The ring object dies with its process.
        publish(&adopt_without_limit(&memory), 0, 1000, &create(128));
        stores::stop_after(None);
        for stores in 0..8 {
            let memory = copy(&memory);
            stores::stop_after(Some(stores));
            let _ = adopt(&memory).unwrap();
            stores::stop_after(None);
            let ring = adopt(&memory).unwrap();
            let before = found(&ring);
            assert_eq!(before.len(), if cut == 56 { 2 } else { 1 }, "cut {cut}");
            check_usable(&ring, &before);
        }
    }
}

/// Adopts without using up the stores that are left.
fn adopt_without_limit(memory: &Arc<VecRingMemory>) -> DeltaRing {
    let left = stores::stop_after(None);
    let ring = adopt(memory).unwrap();
    stores::stop_after(left);
    ring
}

#[test]
fn each_prefix_of_trimming_and_of_the_ids_leaves_the_records() {
    let memory = filled(8, 20, 5);
    let all = found(&adopt(&memory).unwrap());
    let trimmed = cut_off(&memory, |ring| ring.trim(0, ring.first_needed(0) + 2));
    assert_eq!(trimmed, [all.clone(), all[2..].to_vec(), all[2..].to_vec()]);
    let ids = cut_off(&memory, |ring| {
        ring.set_next(5);
        ring.set_current(5);
    });
    assert!(ids.iter().all(|records| *records == all));
}

#[test]
fn each_prefix_of_formatting_leaves_no_ring_or_the_old_or_an_empty_one() {
    let memory = filled(4, 9, 2);
    let old = found(&adopt(&memory).unwrap());
    for stores in 0.. {
        let memory = copy(&memory);
        stores::stop_after(Some(stores));
        DeltaRing::format(memory.clone(), &POOL, &BOOT, 2, 4).unwrap();
        let finished = stores::stop_after(None).is_some_and(|left| left > 0);
        match adopt(&memory) {
            Ok(ring) if stores == 0 => assert_eq!(found(&ring), old),
            Ok(ring) => assert_eq!(found(&ring), []),
            Err(problem) => assert_eq!(problem, RingProblem::Missing),
        }
        if finished {
            break;
        }
    }
}

#[test]
fn each_prefix_of_emptying_an_ignored_ring_leaves_it_ignored() {
    for is_next in [false, true] {
        let memory = filled(4, 9, 2);
        let ring = adopt(&memory).unwrap();
        if is_next {
            ring.set_next(5)
        } else {
            ring.set_current(5)
        }
        ring.poison();
        for stores in 0.. {
            let memory = copy(&memory);
            stores::stop_after(Some(stores));
            let given: Arc<dyn RingMemory> = memory.clone();
            DeltaRing::format_for(given, &POOL, &BOOT, (2, 4), None, Some(5)).unwrap();
            let finished = stores::stop_after(None).is_some_and(|left| left > 0);
            assert!(is_ignored(&*memory, 5), "after {stores}");
            assert!(matches!(adopt(&memory), Err(RingProblem::Missing | RingProblem::Poisoned)));
            if finished {
                memory.0[W_POISONED].store(0, Ordering::Relaxed);
                let ring = adopt(&memory).unwrap();
                assert_eq!((found(&ring), ring.current(), ring.next()), (vec![], 5, 0));
                break;
            }
        }
    }
}

#[test]
fn a_full_slot_refuses_and_nothing_is_overwritten() {
    let (memory, ring) = new_ring(1, 4);
    for lsn in 1..=4 {
        publish(&ring, 0, lsn, &map(lsn));
    }
    assert!(!ring.reserve(0, 1));
    assert_eq!(ring.publish(0, Lsn(5), &map(5), Dropped::Nothing), None);
    assert_eq!((ring.used(0), ring.half_full(0)), (4, true));
    assert_eq!(found(&adopt(&memory).unwrap()).len(), 4);
    ring.trim(0, 2);
    assert!(ring.reserve(0, 1));
    assert!(!ring.reserve(0, 1), "promised room is not given twice");
    ring.release(0, 1);
    assert!(ring.reserve(0, 1));
}

#[test]
fn records_come_back_in_lsn_order_over_slots() {
    let (memory, ring) = new_ring(3, 16);
    for lsn in 1..=30 {
        let slot = usize::try_from(lsn * 7 % 3).unwrap();
        publish(&ring, slot, lsn, &map(lsn));
    }
    let records = adopt(&memory).unwrap().recover().unwrap();
    let lsns: Vec<u64> = records.iter().map(|record| record.lsn.0).collect();
    assert_eq!(lsns, (1..=30).collect::<Vec<_>>());
    assert!(records.iter().all(|r| r.dropped == Dropped::Extent(PhysicalExtent(r.lsn.0))));
    let record = ring.read(records[4].slot, records[4].position).unwrap();
    assert_eq!(record, records[4]);
    assert_eq!(ring.read(0, ring.head(0) + 1), None);
}

#[test]
fn a_lost_record_before_others_is_seen() {
    for passed in [4, 9] {
        for lost in 0..3 {
            let memory = filled(8, passed, 4);
            let ring = adopt(&memory).unwrap();
            let word = ring.cell(0, ring.first_needed(0) + lost) + 2;
            memory.0[word].fetch_xor(1 << 13, Ordering::Relaxed);
            assert!(matches!(adopt(&memory), Err(RingProblem::Corrupt(_))), "{passed} {lost}");
        }
    }
}

#[test]
fn a_wrong_trim_position_is_seen() {
    // Large enough that no change that was cut off can have reached the cell before the trim.
    let memory = filled(256, 1000, 4);
    for (trim, sound) in [(997, true), (996, false), (0, false), (1003, false), (1 << 40, false)] {
        // Lower positions hold records that are gone; higher ones would skip records.
        memory.0[HEADER_WORDS].store(trim, Ordering::Relaxed);
        assert_eq!(adopt(&memory).is_ok(), sound || trim == 996, "{trim}");
    }
}

#[test]
fn rings_of_other_pools_are_refused() {
    let memory = filled(4, 3, 3);
    let adopt = |pool, boot| DeltaRing::adopt(memory.clone(), &pool, &boot).map(|_| ());
    assert_eq!(adopt([1; 16], BOOT), Err(RingProblem::Foreign));
    assert_eq!(adopt(POOL, [1; 16]), Err(RingProblem::OtherBoot));
    let ring = DeltaRing::adopt(memory.clone(), &POOL, &BOOT).unwrap();
    ring.poison();
    assert!(ring.is_poisoned());
    assert_eq!(adopt(POOL, BOOT), Err(RingProblem::Poisoned));
    memory.0[6].store(1 << 20, Ordering::Relaxed);
    assert!(matches!(adopt(POOL, BOOT), Err(RingProblem::Corrupt(_))));
    memory.0[0].fetch_xor(1, Ordering::Relaxed);
    assert_eq!(adopt(POOL, BOOT), Err(RingProblem::Unsupported { found: 0 }));
    memory.0[0].store(0, Ordering::Relaxed);
    assert_eq!(adopt(POOL, BOOT), Err(RingProblem::Missing));
}
