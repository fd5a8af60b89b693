//! Extents kept for a volume on request: how many, against which other volumes, and for how long.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Kept, Shortage, Use, UsedExtent};
use blockd_mapper::plan::{ParkReason, Plan, Step};
use blockd_mapper::space::{Mark, Marks, VolumeSettings};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use common::Rig;

const MIB: usize = 1 << 20;
const EXTENT: u64 = 64 << 10;
const QUANTUM: u64 = 64;
/// More than a quantum: no limit of the asker's own.
const ANY: u64 = u64::MAX;

/// One write of an extent's first block. Returns why it was parked.
fn try_write(rig: &mut Rig, volume: &Attachment, extent: u64) -> Option<ParkReason> {
    let mut plan = Plan::with_capacity(64);
    match rig.worker.write(volume, extent * EXTENT, 4096, false, &mut plan).unwrap() {
        Step::Issue { .. } => {
            rig.worker.complete(volume, &mut plan, Ok(())).unwrap();
            None
        }
        Step::Park(reason) => Some(reason),
        other => panic!("{other:?}"),
    }
}

/// Writes extents from `first` on until one parks for good. Returns how many were written.
fn fill(rig: &mut Rig, volume: &Attachment, first: u64) -> u64 {
    let (mut patience, mut written) = (0, 0);
    while patience < 8 {
        match try_write(rig, volume, first + written) {
            None => (written, patience) = (written + 1, 0),
            Some(_) => {
                rig.now += 200_000_000;
                rig.settle();
                patience += 1;
            }
        }
    }
    written
}

fn reserved(rig: &Rig, id: VolumeId) -> u64 {
    let all = rig.engine.volumes();
    all.into_iter().find(|one| one.id == id).unwrap().reserved / EXTENT
}

fn keep(rig: &mut Rig, id: VolumeId, most: u64) -> Kept {
    let kept = rig.engine.keep_reserve(id, most).unwrap();
    rig.settle();
    kept
}

const fn kept(added: u64) -> Kept {
    Kept { added, shortage: None }
}

const fn short(shortage: Shortage) -> Kept {
    Kept { added: 0, shortage: Some(shortage) }
}

#[test]
fn kept_extents_can_be_mapped_in_a_full_pool_each_in_a_leaf_of_its_own() {
    let mut rig = Rig::new(&[64 * MIB]);
    let span = rig.pool.geometry().leaf_span();
    let (id, thin) = (rig.create("asker", QUANTUM * span), rig.create("thin", 1 << 40));
    let (asker, thin) = (rig.attach(id), rig.attach(thin));
    assert_eq!(keep(&mut rig, id, ANY), kept(QUANTUM));
    fill(&mut rig, &thin, 0);
    assert!(thin.is_out_of_space());
    assert_eq!(reserved(&rig, id), QUANTUM, "a full pool takes nothing of it back");
    for leaf in 0..QUANTUM {
        let extent = leaf * span / EXTENT;
        for _ in 0..20 {
            if try_write(&mut rig, &asker, extent).is_none() {
                break;
            }
            rig.control(Control::Checkpoint).unwrap();
        }
        assert_eq!(try_write(&mut rig, &asker, extent), None, "leaf {leaf}");
    }
    assert!(!asker.is_out_of_space());
    rig.check();
}

/// The first extents of the reserve that a volume holds, in order.
fn reserved_extents(rig: &Rig, id: VolumeId) -> Vec<u64> {
    let of = |one: &UsedExtent| one.usage == Use::Reserved(id);
    let mut extents: Vec<u64> =
        rig.pool.volume_extents().iter().filter(|one| of(one)).map(|one| one.extent).collect();
    extents.sort_unstable();
    extents
}

#[test]
fn requests_are_granted_the_first_free_extents_behind_the_last_grant() {
    let mut rig = Rig::new(&[64 * MIB]);
    let ids = ["first", "second"].map(|name| rig.create(name, 1 << 30));
    keep(&mut rig, ids[0], ANY);
    keep(&mut rig, ids[1], ANY);
    let first = reserved_extents(&rig, ids[0])[0];
    for (at, id) in (0..).zip(ids) {
        let run = first + at * QUANTUM..first + (at + 1) * QUANTUM;
        assert_eq!(reserved_extents(&rig, id), run.collect::<Vec<_>>());
    }
    rig.check();
}

#[test]
fn repeated_requests_do_not_add_up() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("asker", 1 << 30);
    let volume = rig.attach(id);
    assert_eq!(keep(&mut rig, id, 10), kept(10));
    assert_eq!(keep(&mut rig, id, 10), kept(0));
    assert_eq!(keep(&mut rig, id, ANY), kept(QUANTUM - 10));
    for _ in 0..20 {
        assert_eq!(keep(&mut rig, id, ANY), kept(0));
    }
    assert_eq!(reserved(&rig, id), QUANTUM);
    for extent in 0..5 {
        assert_eq!(try_write(&mut rig, &volume, extent), None);
    }
    assert_eq!(keep(&mut rig, id, ANY), kept(5), "used extents are granted again");
    rig.check();
}

#[test]
fn used_extents_are_no_longer_kept() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (id, thin) = (rig.create("asker", 1 << 30), rig.create("thin", 1 << 40));
    let (asker, thin) = (rig.attach(id), rig.attach(thin));
    keep(&mut rig, id, ANY);
    for extent in 0..QUANTUM {
        for _ in 0..3 {
            if try_write(&mut rig, &asker, extent).is_none() {
                break;
            }
            rig.settle();
        }
    }
    rig.settle();
    assert!(reserved(&rig, id) > 0, "its reserve was filled up as ever");
    fill(&mut rig, &thin, 0);
    assert_eq!(reserved(&rig, id), 0, "and serves others as ever");
    rig.check();
}

#[test]
fn a_grant_is_limited_by_size_quota_and_pool_and_partial_before_none() {
    let mut rig = Rig::new(&[64 * MIB]);
    let small = rig.create("small", 3 * EXTENT);
    assert_eq!(keep(&mut rig, small, ANY), kept(3));
    assert_eq!(keep(&mut rig, small, ANY), kept(0), "it can use no more");
    rig.control(Control::Snapshot { source: small, name: "then".to_owned() }).unwrap();
    assert_eq!(keep(&mut rig, small, ANY), kept(0), "also where it may have to copy");

    let id = rig.create("quota", 1 << 30);
    let volume = rig.attach(id);
    let quota = |extents| VolumeSettings { quota: extents * EXTENT, ..VolumeSettings::default() };
    let configure = |rig: &mut Rig, extents| {
        rig.control(Control::Configure { volume: id, settings: quota(extents) }).unwrap();
    };
    configure(&mut rig, 5);
    assert_eq!(keep(&mut rig, id, ANY), kept(5));
    assert_eq!(keep(&mut rig, id, ANY), short(Shortage::Quota));
    configure(&mut rig, 7);
    assert_eq!(keep(&mut rig, id, ANY), kept(2));

    let thin = rig.create("thin", 1 << 40);
    let thin = rig.attach(thin);
    let written = fill(&mut rig, &thin, 0);
    configure(&mut rig, 1000);
    assert_eq!(keep(&mut rig, id, ANY), short(Shortage::Pool));
    rig.discard(&thin, (written - 6) * EXTENT, 6 * usize::try_from(EXTENT).unwrap());
    rig.flush(&thin).unwrap();
    rig.settle();
    let partial = keep(&mut rig, id, ANY);
    assert!((1..QUANTUM - 7).contains(&partial.added), "{partial:?}");
    assert_eq!(partial.shortage, None);
    assert_eq!(reserved(&rig, id), 7 + partial.added);
    assert_eq!(try_write(&mut rig, &volume, 0), None);
    rig.check();
}

#[test]
fn reserves_that_are_not_used_serve_a_request_and_kept_ones_do_not() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (id, idle, thin) =
        (rig.create("asker", 1 << 30), rig.create("idle", 1 << 30), rig.create("thin", 1 << 40));
    let (idle_volume, thin) = (rig.attach(idle), rig.attach(thin));
    // Its grants have grown to a quantum.
    fill_some(&mut rig, &idle_volume, 100);
    rig.settle();
    // Until the last extents are granted, and before the writer waits for more.
    let mut extent = 0;
    while rig.engine.space().free > 0 {
        extent += u64::from(try_write(&mut rig, &thin, extent).is_none());
        rig.settle();
    }
    assert!(reserved(&rig, idle) > 20);
    rig.now += 1_000_000_000;
    rig.settle();
    let got = keep(&mut rig, id, ANY).added;
    assert!(got > 20, "{got}");
    assert_eq!(reserved(&rig, idle), 0);
    fill(&mut rig, &thin, extent);
    assert_eq!(keep(&mut rig, idle, ANY), short(Shortage::Pool));
    assert_eq!(reserved(&rig, id), got);
    rig.check();
}

#[test]
fn released_and_deleted_extents_are_free_again() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (id, other) = (rig.create("asker", 1 << 30), rig.create("other", 1 << 30));
    let free = rig.engine.space().free;
    keep(&mut rig, id, 20);
    let more = keep(&mut rig, id, ANY).added;
    rig.engine.release_kept(id, more);
    assert_eq!(reserved(&rig, id), 20, "only the second request's extents are released");
    rig.engine.release_kept(id, u64::MAX);
    assert_eq!((reserved(&rig, id), rig.engine.space().free), (0, free));
    keep(&mut rig, other, ANY);
    rig.control(Control::Delete { volume: other }).unwrap();
    rig.settle();
    assert!(rig.engine.space().free >= free);
    rig.check();
}

#[test]
fn kept_extents_outlive_a_worker_and_a_snapshot_and_end_with_the_pool() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("asker", 1 << 30);
    keep(&mut rig, id, ANY);
    let volume = rig.attach(id);
    assert_eq!(try_write(&mut rig, &volume, 0), None);
    rig.worker.detach(volume);
    assert_eq!(reserved(&rig, id), QUANTUM - 1, "a client that disconnects costs nothing");
    rig.control(Control::Snapshot { source: id, name: "then".to_owned() }).unwrap();
    assert_eq!(reserved(&rig, id), QUANTUM - 1);
    rig.control(Control::Commit).unwrap();
    rig.check();
    let rig = Rig::open(rig.media.clone()).unwrap();
    assert_eq!(reserved(&rig, id), 0);
}

#[test]
fn kept_extents_are_not_slowed_down() {
    let mut rig = Rig::new(&[64 * MIB]);
    let (id, other) = (rig.create("asker", 1 << 30), rig.create("other", 1 << 30));
    let (asker, other) = (rig.attach(id), rig.attach(other));
    keep(&mut rig, id, ANY);
    fill_some(&mut rig, &other, 200);
    let marks = Marks { low: Mark::Percent(99), very_low: Mark::Percent(98) };
    rig.engine.set_marks(Some(marks));
    rig.now += 1_000_000_000;
    rig.settle();
    assert!(rig.pool.slows_down());
    for extent in 0..QUANTUM {
        assert_eq!(try_write(&mut rig, &asker, extent), None, "extent {extent}");
    }
    rig.check();
}

fn fill_some(rig: &mut Rig, volume: &Attachment, count: u64) {
    let mut written = 0;
    while written < count {
        match try_write(rig, volume, written) {
            None => written += 1,
            Some(_) => rig.settle(),
        }
    }
}
