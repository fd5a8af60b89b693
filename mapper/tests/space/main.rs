//! The space policy in the real mapper: reservations, refusals and waiting writes.
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../common/mod.rs"]
mod common;
mod filling;
mod grants;
mod rollback;

use blockd_mapper::create::CreateOptions;
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::plan::{ParkReason, Plan, Step};
use blockd_mapper::space::{Mark, Marks, OnFull, VolumeSettings};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;

use common::{Media, Rig};
use filling::summary;

const MIB: usize = 1 << 20;
const EXTENT: u64 = 64 << 10;
const SECOND: u64 = 1_000_000_000;
/// How long a write is slowed down at the most.
const CAP: u64 = 10 * SECOND;

fn configure(
    rig: &mut Rig,
    volume: VolumeId,
    settings: VolumeSettings,
) -> Result<Outcome, MapperError> {
    rig.control(Control::Configure { volume, settings })
}

fn settings_of(rig: &Rig, volume: VolumeId) -> VolumeSettings {
    rig.engine.volumes().into_iter().find(|one| one.id == volume).unwrap().settings
}

/// One write of an extent's first block. Gives why it was parked.
fn try_write(rig: &mut Rig, volume: &Attachment, extent: u64, hurry: bool) -> Option<ParkReason> {
    let mut plan = Plan::with_capacity(64);
    plan.hurry(hurry);
    match rig.worker.write(volume, extent * EXTENT, 4096, false, &mut plan).unwrap() {
        Step::Issue { .. } => {
            rig.worker.complete(volume, &mut plan, Ok(())).unwrap();
            None
        }
        Step::Park(reason) => Some(reason),
        other => panic!("{other:?}"),
    }
}

/// Writes extents from `first` on until one is parked for good. Gives how many were written.
fn fill(rig: &mut Rig, volume: &Attachment, first: u64) -> u64 {
    let mut patience = 0;
    let mut written = 0;
    while patience < 8 {
        match try_write(rig, volume, first + written, false) {
            None => (written, patience) = (written + 1, 0),
            Some(_) => {
                rig.now += 2_000_000;
                rig.settle();
                patience += 1;
            }
        }
    }
    written
}

#[test]
fn settings_are_durable_when_they_are_answered_and_change_nothing_else() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[7; 4096]).unwrap();
    rig.flush(&volume).unwrap();
    let before = VolumeSettings::default();
    let settings = VolumeSettings {
        on_full: OnFull::Timeout(60_000),
        quota: 32 << 20,
        iops: 1000,
        ..VolumeSettings::default()
    };
    let outcome = configure(&mut rig, id, settings).unwrap();
    assert_eq!(outcome, Outcome::Configured { before });
    assert_eq!(configure(&mut rig, id, settings).unwrap(), Outcome::Unchanged);
    let snapshot = rig.control(Control::Snapshot { source: id, name: "s".to_owned() }).unwrap();
    let Outcome::Created(snapshot) = snapshot else { panic!("{snapshot:?}") };
    rig.control(Control::Commit).unwrap();
    // The power fails.
    let mut rig = Rig::open(rig.media.clone()).unwrap();
    assert_eq!(settings_of(&rig, id), settings);
    assert_eq!(settings_of(&rig, snapshot), before, "a snapshot has none");
    let clone = Control::Clone { source: snapshot, name: "c".to_owned(), size: None };
    let Outcome::Created(clone) = rig.control(clone).unwrap() else { panic!() };
    assert_eq!(settings_of(&rig, clone), before);
    let refused = configure(&mut rig, snapshot, settings).unwrap_err();
    assert!(matches!(refused, MapperError::Unsuitable { .. }), "{refused}");
    assert_eq!(configure(&mut rig, id, before).unwrap(), Outcome::Configured { before: settings });
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, 4096), [7; 4096]);
    rig.check();
}

#[test]
fn space_set_aside_is_available_in_a_full_pool() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, thin) = (rig.create("thick", 16 << 20), rig.create("thin", 1 << 40));
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(&mut rig, thick, settings).unwrap();
    let (thick, thin) = (rig.attach(thick), rig.attach(thin));
    let written = fill(&mut rig, &thin, 0);
    assert!((300..700).contains(&written), "{written}");
    assert!(thin.is_out_of_space());
    for extent in 0..256 {
        for _ in 0..4 {
            if try_write(&mut rig, &thick, extent, false).is_none() {
                break;
            }
            rig.settle();
        }
        let last = try_write(&mut rig, &thick, extent, false);
        assert_eq!(last, None, "extent {extent} of the thick volume");
    }
    assert!(!thick.is_out_of_space());
    rig.check();
}

/// Space that a discard has given back is on its way from the first moment on: what comes right
/// after the discard waits for the commit, and is not refused.
#[test]
fn a_write_right_after_a_discard_is_not_refused() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("thin", 1 << 40);
    let volume = rig.attach(id);
    let written = fill(&mut rig, &volume, 0);
    assert!(volume.is_out_of_space());
    volume.ask_again();
    rig.settle();
    assert!(volume.is_out_of_space(), "a volume whose writes were refused is out of space at rest");
    for extent in 0..4 {
        rig.discard(&volume, extent * EXTENT, 64 << 10);
        let mut tries = 0;
        while try_write(&mut rig, &volume, written + extent, false).is_some() {
            rig.settle();
            assert!(!volume.is_out_of_space(), "after {tries} tries");
            tries += 1;
            assert!(tries < 8, "the space does not come without time passing");
        }
    }
    // And none is on its way after that.
    assert_eq!(fill(&mut rig, &volume, written + 4), 0);
    assert!(volume.is_out_of_space());
    rig.check();
}

/// A neighbour whose space is set aside discards and writes anew without a pause. All of it stays
/// its own, so that others are out of space.
#[test]
fn drops_of_a_neighbour_that_never_pauses_do_not_hold_up_the_verdict() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, thin) = (rig.create("thick", 16 << 20), rig.create("thin", 1 << 40));
    configure(&mut rig, thick, VolumeSettings { thick: true, ..VolumeSettings::default() })
        .unwrap();
    let (thick, thin) = (rig.attach(thick), rig.attach(thin));
    assert_eq!(fill_some(&mut rig, &thick, 256), 256);
    let written = fill(&mut rig, &thin, 0);
    thin.ask_again();
    let start = rig.now;
    for turn in 0_u64.. {
        if thin.is_out_of_space() {
            break;
        }
        assert!(rig.now - start < 10 * SECOND, "it still counts on them after 10 s");
        rig.discard(&thick, turn % 128 * EXTENT, 64 << 10);
        assert!(try_write(&mut rig, &thin, written, false).is_some());
        // One step of the engine, and never until it is at rest.
        if let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            rig.engine.complete(command, Ok(()));
        }
        rig.now += 2_000_000;
        try_write(&mut rig, &thick, (turn + 64) % 128, false);
    }
    assert!(rig.now - start > SECOND / 2, "what is dropped may be for others, for a moment");
    rig.check();
}

#[test]
fn a_thick_volume_writes_again_where_it_discarded_unless_a_snapshot_keeps_the_extents() {
    for (discarded, has_snapshot) in [(1, false), (256, false), (256, true)] {
        let mut rig = Rig::new(&[64 * MIB]);
        let (id, thin) = (rig.create("thick", 16 << 20), rig.create("thin", 1 << 40));
        let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
        configure(&mut rig, id, settings).unwrap();
        let (thick, thin) = (rig.attach(id), rig.attach(thin));
        assert_eq!(fill_some(&mut rig, &thick, 256), 256);
        if has_snapshot {
            rig.control(Control::Snapshot { source: id, name: "s".to_owned() }).unwrap();
        }
        let written = fill(&mut rig, &thin, 0);
        rig.discard(&thick, 0, discarded << 16);
        rig.flush(&thick).unwrap();
        // The other one goes on to wait, also for extents that are free for the moment.
        assert_eq!(write_in_the_end(&mut rig, &thin, written), Some(ParkReason::Space));
        for extent in 0..if has_snapshot { 1 } else { discarded as u64 } {
            let last = write_in_the_end(&mut rig, &thick, extent);
            assert_eq!(last, has_snapshot.then_some(ParkReason::Space), "{extent} of {discarded}");
        }
        rig.check();
    }
}

#[test]
fn what_lies_over_shared_extents_takes_nothing_of_the_space_set_aside() {
    let mut media = Media::new(&[64 * MIB]);
    media.create_with(&CreateOptions { composite: true, ..media.options() });
    let mut rig = Rig::open(media).unwrap();
    let (id, thin) = (rig.create("thick", 16 << 20), rig.create("thin", 1 << 40));
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(&mut rig, id, settings).unwrap();
    let (thick, thin) = (rig.attach(id), rig.attach(thin));
    let write = |rig: &mut Rig, extents: std::ops::Range<u64>| {
        for extent in extents {
            for _ in 0..4 {
                if try_write(rig, &thick, extent, false).is_none() {
                    break;
                }
                rig.settle();
            }
            let last = try_write(rig, &thick, extent, false);
            assert_eq!(last, None, "extent {extent} of the thick volume");
        }
    };
    // Extents with a second block, which a redirect leaves to the base.
    for extent in 0..64 {
        rig.write(&thick, extent * EXTENT, &[1; 2 * 4096]).unwrap();
    }
    rig.control(Control::Snapshot { source: id, name: "s".to_owned() }).unwrap();
    write(&mut rig, 0..64);
    assert_eq!(rig.engine.fold_status().composite, 64);
    fill(&mut rig, &thin, 0);
    assert!(thin.is_out_of_space());
    write(&mut rig, 64..256);
    assert!(!thick.is_out_of_space());
    rig.check();
}

#[test]
fn more_than_there_is_can_not_be_set_aside() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (one, two) = (rig.create("one", 1 << 30), rig.create("two", 1 << 30));
    let some = |bytes| VolumeSettings { reservation: bytes, ..VolumeSettings::default() };
    configure(&mut rig, one, some(32 << 20)).unwrap();
    let refused = configure(&mut rig, two, some(32 << 20)).unwrap_err();
    let MapperError::NoSpace { needed, free } = refused else { panic!("{refused}") };
    assert!((64 << 20..66 << 20).contains(&needed) && free < 64 << 20, "{needed} {free}");
    assert_eq!(settings_of(&rig, two), VolumeSettings::default(), "nothing was changed");
    // A volume that is deleted, or deflated, returns the space set aside for it to others.
    configure(&mut rig, one, some(1 << 20)).unwrap();
    configure(&mut rig, two, some(32 << 20)).unwrap();
    rig.control(Control::Delete { volume: two }).unwrap();
    configure(&mut rig, one, some(32 << 20)).unwrap();
    rig.check();
}

#[test]
fn a_thick_volume_grows_only_into_free_space() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (thick, other) = (rig.create("thick", 16 << 20), rig.create("other", 1 << 30));
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    configure(&mut rig, thick, settings).unwrap();
    let reserve = VolumeSettings { reservation: 30 << 20, ..VolumeSettings::default() };
    configure(&mut rig, other, reserve).unwrap();
    let refused = rig.control(Control::Resize { volume: thick, size: 48 << 20 }).unwrap_err();
    assert!(matches!(refused, MapperError::NoSpace { .. }), "{refused}");
    assert_eq!(rig.engine.volumes()[0].size, 16 << 20, "nothing was changed");
    rig.control(Control::Resize { volume: thick, size: 20 << 20 }).unwrap();
    // Space beyond its quota is not set aside either.
    let settings = VolumeSettings { quota: 24 << 20, ..settings };
    configure(&mut rig, thick, settings).unwrap();
    rig.control(Control::Resize { volume: thick, size: 1 << 30 }).unwrap();
    rig.check();
}

#[test]
fn space_set_aside_for_one_volume_is_not_granted_to_another() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (one, two) = (rig.create("one", 1 << 30), rig.create("two", 1 << 30));
    let some = |bytes| VolumeSettings { reservation: bytes, ..VolumeSettings::default() };
    configure(&mut rig, one, some(40 << 20)).unwrap();
    let volume = rig.attach(one);
    // It holds a quantum now that is part of the space set aside for it.
    assert_eq!(fill_some(&mut rig, &volume, 64), 64);
    assert!(rig.engine.volumes()[0].reserved >= 32 * EXTENT);
    // Its mapped space is set aside, and so is the rest of its reservation: 40 MiB together.
    let space = rig.engine.space();
    let others = space.free + space.reserved + space.mapped - (40 << 20);
    let refused = configure(&mut rig, two, some(others + EXTENT));
    assert!(matches!(refused, Err(MapperError::NoSpace { .. })), "{refused:?}");
    configure(&mut rig, two, some(others - (1 << 20))).unwrap();
    rig.check();
}

#[test]
fn all_that_was_set_aside_can_be_mapped_in_a_full_pool() {
    // One first write in each leaf: a page of metadata for each, and the only pages left for those
    // were set aside with the extents.
    let mut rig = Rig::new(&[64 * MIB]);
    let span = rig.pool.geometry().leaf_span();
    let (wide, thin) = (rig.create("wide", 200 * span), rig.create("thin", 1 << 40));
    let reserve = VolumeSettings { reservation: 200 * EXTENT, ..VolumeSettings::default() };
    configure(&mut rig, wide, reserve).unwrap();
    let (wide, thin) = (rig.attach(wide), rig.attach(thin));
    fill(&mut rig, &thin, 0);
    assert!(thin.is_out_of_space());
    for leaf in 0..200 {
        let extent = leaf * span / EXTENT;
        for _ in 0..20 {
            if try_write(&mut rig, &wide, extent, false).is_none() {
                break;
            }
            rig.control(Control::Checkpoint).unwrap();
        }
        assert_eq!(try_write(&mut rig, &wide, extent, false), None, "leaf {leaf}");
    }
    assert!(!wide.is_out_of_space());
    rig.check();
}

/// Writes an extent, however often it has to be tried.
fn write_in_the_end(rig: &mut Rig, volume: &Attachment, extent: u64) -> Option<ParkReason> {
    for _ in 0..8 {
        try_write(rig, volume, extent, false)?;
        rig.now += 2_000_000;
        rig.settle();
    }
    try_write(rig, volume, extent, false)
}

#[test]
fn granted_extents_of_one_worker_serve_another_one_of_the_same_volume() {
    for thick in [true, false] {
        let mut rig = Rig::new(&[64 * MIB]);
        let (id, thin) = (rig.create("a", 16 * EXTENT), rig.create("thin", 1 << 40));
        let quota = if thick { 0 } else { 12 * EXTENT };
        configure(&mut rig, id, VolumeSettings { thick, quota, ..VolumeSettings::default() })
            .unwrap();
        let one = rig.attach(id);
        let mut second = rig.pool.worker().unwrap();
        std::mem::swap(&mut rig.worker, &mut second);
        let two = rig.attach(id);
        std::mem::swap(&mut rig.worker, &mut second);
        assert_eq!(write_in_the_end(&mut rig, &one, 0), None);
        if thick {
            let thin = rig.attach(thin);
            fill(&mut rig, &thin, 0);
            assert!(thin.is_out_of_space());
        }
        // The first worker has more at hand, and uses none of it.
        std::mem::swap(&mut rig.worker, &mut second);
        let last = if thick { 16 } else { 12 };
        for extent in 1..last {
            assert_eq!(write_in_the_end(&mut rig, &two, extent), None, "{thick} {extent}");
        }
        assert!(!two.is_out_of_space());
        if !thick {
            assert_eq!(write_in_the_end(&mut rig, &two, last), Some(ParkReason::Space));
            assert!(two.is_out_of_space(), "the quota is used up");
        }
        rig.check();
    }
}

#[test]
fn zeroes_that_keep_their_room_are_let_through_when_they_have_waited_long_enough() {
    let marks = Marks { low: Mark::Percent(50), very_low: Mark::Percent(40) };
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    fill_some(&mut rig, &volume, 800);
    rig.engine.set_marks(Some(marks));
    rig.now += SECOND;
    rig.settle();
    assert!(rig.pool.slows_down());
    let mut plan = Plan::with_capacity(64);
    let mut zeroes = |rig: &mut Rig, hurry| {
        plan.hurry(hurry);
        rig.worker.write_zeroes(&volume, 900 * EXTENT, EXTENT, false, &mut plan).unwrap()
    };
    for _ in 0..100 {
        if !matches!(zeroes(&mut rig, false), Step::Done { .. }) {
            break;
        }
        rig.discard(&volume, 900 * EXTENT, usize::try_from(EXTENT).unwrap());
    }
    assert!(matches!(zeroes(&mut rig, false), Step::Park(ParkReason::Slowed)));
    assert!(matches!(zeroes(&mut rig, true), Step::Done { .. }));
    rig.check();
}

#[test]
fn a_quota_stops_its_volume_and_no_other() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (small, other) = (rig.create("small", 1 << 30), rig.create("other", 1 << 30));
    let quota = |bytes| VolumeSettings { quota: bytes, ..VolumeSettings::default() };
    configure(&mut rig, small, quota(1 << 20)).unwrap();
    let (volume, free) = (rig.attach(small), rig.attach(other));
    assert_eq!(fill(&mut rig, &volume, 0), 16);
    assert!(volume.is_out_of_space());
    // Mapped extents can be written; discarded ones can be mapped again.
    assert_eq!(try_write(&mut rig, &volume, 3, false), None);
    rig.discard(&volume, 5 * EXTENT, usize::try_from(EXTENT).unwrap());
    rig.flush(&volume).unwrap();
    assert_eq!(fill(&mut rig, &volume, 20), 1);
    assert!(fill(&mut rig, &free, 0) > 300);
    rig.discard(&free, 0, 8 * MIB);
    rig.flush(&free).unwrap();
    configure(&mut rig, small, quota(2 << 20)).unwrap();
    assert!(!volume.is_out_of_space());
    assert_eq!(fill(&mut rig, &volume, 100), 16);
    rig.check();
}

#[test]
fn an_unused_reserve_serves_waiting_volumes() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (idle, busy) = (rig.create("idle", 1 << 30), rig.create("busy", 1 << 30));
    let (idle, busy) = (rig.attach(idle), rig.attach(busy));
    assert_eq!(fill_some(&mut rig, &idle, 64), 64);
    let reserved = rig.engine.volumes()[0].reserved;
    assert!(reserved >= 32 * EXTENT, "{reserved}");
    let written = fill(&mut rig, &busy, 0);
    let left = rig.engine.space();
    assert_eq!((left.free, left.reserved), (0, 0), "after {written}: {left:?}");
    rig.check();
}

#[test]
fn a_grant_is_no_more_than_the_volume_can_use() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("small", 10 * EXTENT);
    let volume = rig.attach(id);
    // Its second grant would be of eight.
    assert_eq!(fill_some(&mut rig, &volume, 5), 5);
    let info = rig.engine.volumes().remove(0);
    assert_eq!(info.mapped + info.reserved, 10 * EXTENT, "{info:?}");
    assert_eq!(fill_some(&mut rig, &volume, 10), 10);
    assert_eq!(rig.engine.volumes()[0].reserved, 0);
    rig.check();
}

fn fill_some(rig: &mut Rig, volume: &Attachment, count: u64) -> u64 {
    let mut written = 0;
    while written < count {
        match try_write(rig, volume, written, false) {
            None => written += 1,
            Some(_) => rig.settle(),
        }
    }
    written
}

#[test]
fn no_write_waits_while_its_volume_has_a_reserve() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let settings = VolumeSettings { quota: 12 * EXTENT, ..VolumeSettings::default() };
    configure(&mut rig, id, settings).unwrap();
    let first = rig.attach(id);
    assert_eq!(fill_some(&mut rig, &first, 5), 5);
    let mut other = rig.pool.worker().unwrap();
    let second = other.attach(id).unwrap();
    let mut plan = Plan::with_capacity(64);
    let mut write = |extent: u64| match other
        .write(&second, extent * EXTENT, 4096, false, &mut plan)
        .unwrap()
    {
        Step::Issue { .. } => {
            other.complete(&second, &mut plan, Ok(())).unwrap();
            None
        }
        Step::Park(reason) => Some(reason),
        other => panic!("{other:?}"),
    };
    // All that is left, including the extents that the first worker took.
    for extent in 100..107 {
        assert_eq!(write(extent), None, "extent {extent}");
    }
    assert_eq!(write(107), Some(ParkReason::Space));
    let seen = summary(&rig);
    assert_eq!((seen.grants, seen.grant_waits, seen.passed_reserves), (2, 3, 0));
    other.detach(second);
    rig.check();
}

#[test]
fn refills_come_before_they_are_needed() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    assert_eq!(fill_some(&mut rig, &volume, 1), 1);
    for extent in 1..500 {
        assert_eq!(try_write(&mut rig, &volume, extent, false), None, "extent {extent}");
        rig.settle();
    }
    let seen = summary(&rig);
    assert!(seen.grants > 5 && rig.pool.grants() == seen.grants, "{seen:?}");
    assert_eq!((seen.grant_waits, seen.passed_reserves), (1, 0), "the first one alone");
    rig.check();
}

#[test]
fn free_extents_are_granted_by_the_engine_alone_and_on_demand() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (one, two, idle) =
        (rig.create("a", 1 << 30), rig.create("b", 1 << 30), rig.create("c", 1 << 30));
    let (one, two, idle) = (rig.attach(one), rig.attach(two), rig.attach(idle));
    for volume in [&one, &two] {
        assert_eq!(fill_some(&mut rig, volume, 40), 40);
    }
    let before = rig.engine.space();
    for extent in 40..60 {
        for volume in [&one, &two] {
            assert_eq!(try_write(&mut rig, volume, extent, false), None);
        }
    }
    let between = rig.engine.space();
    assert_eq!(between.free, before.free, "a write takes nothing from it");
    rig.settle();
    assert_eq!(fill_some(&mut rig, &one, 100), 100);
    let after = rig.engine.space();
    let held = |space: &blockd_mapper::pool::Space| space.reserved + space.mapped;
    assert!(after.free < before.free);
    assert_eq!(before.free - after.free, held(&after) - held(&before));
    // A volume without requests has no reserve.
    assert_eq!((rig.pool.summaries()[2].grants, rig.pool.summaries()[2].reserved), (0, 0));
    drop(idle);
    // Nothing has two owners.
    rig.check();
}

#[test]
fn writes_continue_from_the_reserve_without_grants() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (one, two) = (rig.create("a", 1 << 30), rig.create("b", 1 << 30));
    let volumes = [rig.attach(one), rig.attach(two)];
    for volume in &volumes {
        assert_eq!(fill_some(&mut rig, volume, 64), 64);
    }
    let reserves: Vec<u64> = rig.pool.summaries().iter().map(|one| one.reserved / EXTENT).collect();
    assert!(reserves.iter().all(|&reserve| reserve >= 32), "{reserves:?}");
    // From here on the engine does not run.
    rig.now += 600 * SECOND;
    for (volume, reserve) in volumes.iter().zip(reserves) {
        for extent in 64..64 + reserve {
            assert_eq!(try_write(&mut rig, volume, extent, false), None, "extent {extent}");
        }
        assert_eq!(try_write(&mut rig, volume, 1000, false), Some(ParkReason::Space));
        // Requests that need no space do not wait.
        assert_eq!(try_write(&mut rig, volume, 0, false), None);
        let mut plan = Plan::with_capacity(64);
        let read = rig.worker.read(volume, EXTENT, 4096, &mut plan).unwrap();
        assert!(matches!(read, Step::Issue { covered: 4096 }), "{read:?}");
        rig.worker.complete(volume, &mut plan, Ok(())).unwrap();
    }
    rig.settle();
    for volume in &volumes {
        assert_eq!(try_write(&mut rig, volume, 1000, false), None);
    }
    rig.check();
}
