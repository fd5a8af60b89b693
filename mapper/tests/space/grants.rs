//! How much a volume is granted: little at first, and more as it is written.

use blockd_mapper::engine::{Control, Outcome, VolumeSummary};
use blockd_mapper::pool::Tuning;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;

use super::common::Rig;
use super::{EXTENT, MIB, SECOND, fill, fill_some, try_write};

/// Extents of a first grant, and of the quantum.
const FIRST: u64 = 4;
const QUANTUM: u64 = 64;

fn summary_of(rig: &Rig, id: VolumeId) -> VolumeSummary {
    rig.pool.summaries().into_iter().find(|one| one.id == id).unwrap()
}

fn reserved(rig: &Rig, id: VolumeId) -> u64 {
    summary_of(rig, id).reserved / EXTENT
}

/// Writes extents one after the other until the volume is granted more. Returns the next extent and
/// the size of the grant.
fn next_grant(rig: &mut Rig, volume: &Attachment, mut extent: u64) -> (u64, u64) {
    let id = volume.id();
    let before = summary_of(rig, id);
    let held = before.mapped / EXTENT + reserved(rig, id);
    while summary_of(rig, id).grants == before.grants {
        extent += u64::from(try_write(rig, volume, extent, false).is_none());
        rig.settle();
    }
    let now = summary_of(rig, id);
    assert_eq!(now.grants, before.grants + 1);
    let granted = now.mapped / EXTENT + reserved(rig, id) - held;
    (extent, granted)
}

#[test]
fn volumes_and_clones_that_were_written_once_hold_at_most_four_unused_extents() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("image", 1 << 30);
    let image = rig.attach(id);
    assert_eq!(fill_some(&mut rig, &image, 1), 1);
    rig.settle();
    assert!((1..=FIRST).contains(&reserved(&rig, id)), "{}", reserved(&rig, id));
    let snapshot = Control::Snapshot { source: id, name: "s".to_owned() };
    let Outcome::Created(snapshot) = rig.control(snapshot).unwrap() else { panic!() };
    let free = rig.engine.space().free;
    for n in 0..50 {
        let clone = Control::Clone { source: snapshot, name: format!("c{n}"), size: None };
        let Outcome::Created(clone) = rig.control(clone).unwrap() else { panic!() };
        let volume = rig.attach(clone);
        assert_eq!(fill_some(&mut rig, &volume, 1), 1);
        rig.settle();
        assert!((1..=FIRST).contains(&reserved(&rig, clone)), "{}", reserved(&rig, clone));
    }
    let space = rig.engine.space();
    assert!(space.reserved <= 50 * FIRST * EXTENT, "{space:?}");
    assert!(free - space.free <= 50 * (1 + FIRST) * EXTENT, "{space:?}");
    rig.check();
}

#[test]
fn grants_double_up_to_the_quantum() {
    let mut rig = Rig::new(&[128 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    let (mut extent, mut granted) = (0, Vec::new());
    for _ in 0..8 {
        let (next, extents) = next_grant(&mut rig, &volume, extent);
        extent = next;
        granted.push(extents);
    }
    assert_eq!(granted, [4, 8, 16, 32, QUANTUM, QUANTUM, QUANTUM, QUANTUM]);
    assert_eq!(rig.pool.quantum_bytes(), QUANTUM * EXTENT);
    // A smaller quantum counts at once.
    rig.engine.set_quantum(10);
    assert_eq!(next_grant(&mut rig, &volume, extent).1, 10);
    rig.check();
}

#[test]
fn a_grant_has_an_extent_for_each_write_that_waits() {
    let mut rig = Rig::new(&[128 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    // Each is longer than the one before by less than twice.
    for (first, waiting, expected) in [(0, 24, 24), (24, 30, 48), (72, 1, QUANTUM)] {
        for extent in first..first + waiting {
            assert!(try_write(&mut rig, &volume, extent, false).is_some(), "{extent}");
        }
        rig.settle();
        assert_eq!(reserved(&rig, id), expected);
        // All are used, so that the next ones wait again.
        for extent in first..first + expected {
            assert!(try_write(&mut rig, &volume, extent, false).is_none(), "{extent}");
        }
    }
    rig.check();
}

#[test]
fn after_an_idle_reserve_was_taken_back_grants_begin_small_again() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (idle, busy) = (rig.create("idle", 1 << 30), rig.create("busy", 1 << 30));
    let idle_volume = rig.attach(idle);
    assert_eq!(fill_some(&mut rig, &idle_volume, 100), 100);
    assert!(reserved(&rig, idle) > FIRST);
    let busy_volume = rig.attach(busy);
    let written = fill(&mut rig, &busy_volume, 0);
    assert_eq!((reserved(&rig, idle), rig.engine.space().free), (0, 0));
    rig.discard(&busy_volume, 0, usize::try_from(written * EXTENT).unwrap());
    rig.flush(&busy_volume).unwrap();
    rig.now += SECOND;
    rig.settle();
    assert_eq!(next_grant(&mut rig, &idle_volume, 100).1, FIRST);
    // So does one that was frozen, which gives its reserve back as well.
    rig.control(Control::Snapshot { source: idle, name: "s".to_owned() }).unwrap();
    assert_eq!(reserved(&rig, idle), 0);
    assert_eq!(next_grant(&mut rig, &idle_volume, 200).1, FIRST);
    rig.check();
}

/// How often the engine is asked for space, and how often a write waits for it, while as many
/// extents are written as 1 GiB has: with an engine that runs after each write, or only when a
/// write waits.
fn asks_of_a_gibibyte(is_prompt: bool) -> (u64, u64) {
    const EXTENTS: u64 = (1 << 30) / (256 << 10);
    let mut rig = Rig::new(&[320 * MIB]);
    assert_eq!(Tuning::default().quantum, QUANTUM);
    let id = rig.create("a", 1 << 40);
    let volume = rig.attach(id);
    for extent in 0..EXTENTS {
        while try_write(&mut rig, &volume, extent, false).is_some() {
            rig.settle();
        }
        if is_prompt {
            rig.settle();
        }
    }
    rig.check();
    let seen = summary_of(&rig, id);
    assert_eq!((seen.mapped, seen.passed_reserves), (EXTENTS * EXTENT, 0));
    (seen.grants, seen.grant_waits)
}

#[test]
fn a_gibibyte_in_sequence_asks_for_space_hardly_more_often_than_it_has_quanta() {
    let (grants, waits) = asks_of_a_gibibyte(true);
    println!("prompt: {grants} grants, {waits} waits");
    assert!(grants <= 64 + 5, "{grants}");
    assert_eq!(waits, 1, "the first write alone");
    // Here each grant is used up before the next.
    let (grants, waits) = asks_of_a_gibibyte(false);
    println!("late: {grants} grants, {waits} waits");
    assert!(grants <= 64 + 5 && waits <= grants, "{grants} {waits}");
}
