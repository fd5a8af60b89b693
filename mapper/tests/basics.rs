//! One volume, one worker, no faults: written data is read, before and after reopening.

mod common;

use blockd_mapper::engine::{Control, Outcome, Releasing};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoError, IoOp};
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::{ParkReason, Plan, Step};
use blockd_mapper::pool::Tuning;
use blockd_mapper::space::VolumeSettings;
use blockd_mapper::worker::Attachment;
use common::{Media, Rig};

const MIB: usize = 1 << 20;
const K: usize = 1024;

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..251).map(|i: u8| seed ^ i).cycle().take(len).collect()
}

#[test]
fn unwritten_space_reads_as_zeroes() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    assert!(rig.read(&volume, 0, MIB).iter().all(|&b| b == 0));
    rig.check();
}

#[test]
fn writes_of_every_shape_read_back_and_survive_a_clean_reopen() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    let mut model = vec![0; 8 * MIB];
    let shapes = [
        (0, 512),
        (512, 512),
        (3584, 1024),
        (64 * K - 512, 1024),
        (100 * K, 300 * K),
        (7 * MIB, 64 * K),
        (4096, 4096),
    ];
    for (n, &(at, len)) in shapes.iter().enumerate() {
        let data = pattern(u8::try_from(n).unwrap() + 1, len);
        rig.write(&volume, at as u64, &data).unwrap();
        model[at..at + len].copy_from_slice(&data);
    }
    assert_eq!(rig.read(&volume, 0, model.len()), model);
    rig.flush(&volume).unwrap();
    rig.check();
    rig.worker.detach(volume);
    assert_eq!(rig.control(Control::Close).unwrap(), Outcome::Closed);
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(rig.report.was_clean);
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, model.len()), model);
    rig.check();
}

#[test]
fn a_dirty_pool_replays_its_log() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    let data = pattern(5, 256 * K);
    rig.write(&volume, 32 * 1024, &data).unwrap();
    rig.discard(&volume, 96 * 1024, 64 * K);
    rig.flush(&volume).unwrap();
    rig.worker.detach(volume);
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(!rig.report.was_clean && rig.report.log_changes > 0, "{:?}", rig.report);
    let volume = rig.attach(id);
    let read = rig.read(&volume, 32 * 1024, 256 * K);
    assert_eq!(read[..64 * K], data[..64 * K]);
    assert!(read[64 * K..128 * K].iter().all(|&b| b == 0));
    assert_eq!(read[128 * K..], data[128 * K..]);
    rig.check();
}

/// A discard comes while the first write of an extent is under way: no map ever shows the extent,
/// but what was written lies there.
#[test]
fn what_was_written_and_never_shown_is_passed_down_before_it_is_free() {
    let mut media = Media::new(&[48 * MIB]);
    media.create();
    let tuning = Tuning { passdown: true, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &pattern(3, 4096)).unwrap();
    rig.settle();
    let mut plan = Plan::with_capacity(64);
    let at = 5 * 64 * K as u64;
    let step = rig.worker.write(&volume, at, 4096, false, &mut plan);
    assert_eq!(step, Ok(Step::Issue { covered: 4096 }));
    let written = plan.ops()[0].offset;
    rig.discard(&volume, at, 64 * K);
    rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
    let mut is_passed_down = false;
    while let Some(mut command) = rig.engine.poll(rig.now) {
        if let IoOp::Discard { offset, len } = command.op {
            is_passed_down |= (offset..offset + len).contains(&written);
        }
        rig.media.run(&mut command);
        rig.engine.complete(command, Ok(()));
    }
    assert!(is_passed_down, "{written} can be given out with what was written there");
    rig.check();
}

/// Leaves that another worker gives back serve one that waits for some.
#[test]
fn a_worker_that_waits_for_leaves_is_woken_however_they_come() {
    let mut media = Media::new(&[48 * MIB]);
    media.create();
    let options = OpenOptions { tuning: Tuning::sparing(), ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    rig.engine.keep_reserve(id, 200).unwrap();
    rig.write(&volume, 0, &pattern(3, 4096)).unwrap();
    rig.settle();
    let mut other = rig.pool.worker().unwrap();
    let attached = other.attach(id).unwrap();
    let mut plans = Vec::new();
    while rig.pool.spare_leaves() > 0 {
        let mut plan = Plan::with_capacity(64);
        let at = (1 + plans.len() as u64) * 64 * K as u64;
        let step = other.write(&attached, at, 4096, false, &mut plan).unwrap();
        assert!(matches!(step, Step::Issue { .. }), "{step:?} with {}", rig.pool.spare_leaves());
        plans.push(plan);
    }
    let mut plan = Plan::with_capacity(64);
    let at = 31 * MIB as u64;
    let write = |rig: &mut Rig, plan: &mut Plan| rig.worker.write(&volume, at, 4096, false, plan);
    // It has some of its own.
    let mut own = Vec::new();
    loop {
        let mut plan = Plan::with_capacity(64);
        let at = at - (1 + own.len() as u64) * 64 * K as u64;
        match rig.worker.write(&volume, at, 4096, false, &mut plan).unwrap() {
            Step::Park(reason) => break assert_eq!(reason, ParkReason::Leaves),
            _ => own.push(plan),
        }
    }
    for plan in &mut plans {
        other.complete(&attached, plan, Ok(())).unwrap();
    }
    other.detach(attached);
    drop(other);
    assert!(rig.pool.spare_leaves() >= 16, "{}", rig.pool.spare_leaves());
    let _ = rig.pool.take_wakeups();
    assert!(rig.pool.engine_wanted());
    assert_eq!(rig.engine.poll(rig.now).map(drop), None);
    assert_eq!(rig.pool.take_wakeups(), 1 << rig.worker.slot());
    assert!(matches!(write(&mut rig, &mut plan), Ok(Step::Issue { .. })));
    for plan in own.iter_mut().chain([&mut plan]) {
        rig.worker.complete(&volume, plan, Ok(())).unwrap();
    }
    rig.check();
}

#[test]
fn discard_gives_space_back_and_whole_leaves_take_one_record() {
    let mut rig = Rig::new(&[48 * MIB]);
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    let before = {
        rig.check();
        rig.engine.space()
    };
    for at in (0..32).step_by(1) {
        rig.write(&volume, at << 20, &pattern(3, MIB)).unwrap();
    }
    rig.flush(&volume).unwrap();
    rig.discard(&volume, 0, 32 * MIB);
    assert!(rig.read(&volume, 5 << 20, MIB).iter().all(|&b| b == 0));
    rig.flush(&volume).unwrap();
    rig.check();
    let after = rig.engine.space();
    assert_eq!(after.mapped, 0, "{after:?}");
    assert!(
        after.free + after.reserved + (8 << 20) >= before.free + before.reserved,
        "{before:?} {after:?}"
    );
}

#[test]
fn zeroes_keep_space_or_give_it_back() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 4 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &pattern(9, 256 * K)).unwrap();
    rig.write_zeroes(&volume, 512, 128 * K, false);
    let info = |rig: &Rig| rig.engine.volumes()[0].clone();
    assert_eq!(info(&rig).mapped, 256 << 10);
    let read = rig.read(&volume, 0, 256 * K);
    assert_eq!(read[..512], pattern(9, 256 * K)[..512]);
    assert!(read[512..512 + 128 * K].iter().all(|&b| b == 0));
    assert_eq!(read[512 + 128 * K..], pattern(9, 256 * K)[512 + 128 * K..]);
    rig.write_zeroes(&volume, 0, 4 * MIB, true);
    assert_eq!(info(&rig).mapped, 0);
    rig.write_zeroes(&volume, 0, MIB, false);
    assert_eq!((info(&rig).mapped, info(&rig).valid), (1 << 20, 0));
    assert!(rig.read(&volume, 0, MIB).iter().all(|&b| b == 0));
    rig.check();
}

/// A volume with 1 MiB written and flushed: overwrites change no map.
fn mapped() -> (Rig, Attachment) {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &pattern(1, MIB)).expect("no fault");
    rig.flush(&volume).expect("no fault");
    (rig, volume)
}

/// Plans of a flush that is under way, and of one that waits for it.
fn one_behind_the_other(rig: &mut Rig, volume: &Attachment) -> [Plan; 2] {
    rig.write(volume, 0, &pattern(2, 4096)).expect("no fault");
    let mut plans = [Plan::with_capacity(0), Plan::with_capacity(0)];
    assert!(matches!(rig.worker.flush(volume, &mut plans[0]), Ok(Step::Issue { .. })));
    assert!(matches!(rig.worker.flush(volume, &mut plans[1]), Ok(Step::Park(_))));
    plans
}

#[test]
fn flushes_that_come_together_are_one_flush_of_the_device() {
    let (mut rig, volume) = mapped();
    let mut plans: Vec<_> = (0..16).map(|_| Plan::with_capacity(0)).collect();
    let waits = Step::Park(ParkReason::InFlight);
    let sent = Step::Issue { covered: 0 };
    let done = Step::Done { covered: 0 };

    // The first one finds a write to flush; the others each follow a write that it may not cover.
    for (n, plan) in (0..).zip(&mut plans) {
        rig.write(&volume, n * 4096, &pattern(2, 4096)).unwrap();
        plan.begin();
        let expected = if n == 0 { sent } else { waits };
        assert_eq!(rig.worker.flush(&volume, plan).unwrap(), expected, "{n}");
    }
    let before = rig.pool.events();
    rig.worker.complete(&volume, &mut plans[0], Ok(())).unwrap();
    assert_ne!(rig.pool.events(), before, "those that wait are not tried again");

    // One of those that waited flushes for all of them.
    assert_eq!(rig.worker.flush(&volume, &mut plans[7]).unwrap(), sent);
    assert_eq!(rig.worker.flush(&volume, &mut plans[1]).unwrap(), waits);
    // What is written from now on is none of theirs.
    rig.write(&volume, 0, &pattern(3, 4096)).unwrap();
    rig.worker.complete(&volume, &mut plans[7], Ok(())).unwrap();
    for n in (1..16).filter(|n| *n != 7) {
        assert_eq!(rig.worker.flush(&volume, &mut plans[n]).unwrap(), done, "{n}");
    }
    plans[0].begin();
    assert_eq!(rig.worker.flush(&volume, &mut plans[0]).unwrap(), sent);
    rig.worker.complete(&volume, &mut plans[0], Ok(())).unwrap();
}

#[test]
fn a_flush_that_waits_fails_with_the_one_under_way() {
    let (mut rig, volume) = mapped();
    let mut plans = one_behind_the_other(&mut rig, &volume);
    let before = rig.pool.events();
    assert!(rig.worker.complete(&volume, &mut plans[0], Err(IoError::Media)).is_err());
    assert_ne!(rig.pool.events(), before, "the one that waits is not tried again");
    assert!(rig.worker.flush(&volume, &mut plans[1]).is_err());
}

#[test]
fn a_flush_that_was_given_up_leaves_nothing_to_the_next_one() {
    let (mut rig, volume) = mapped();
    let mut plans = one_behind_the_other(&mut rig, &volume);
    rig.worker.complete(&volume, &mut plans[0], Ok(())).unwrap();
    rig.write(&volume, 0, &pattern(3, 4096)).unwrap();
    plans[1].begin();
    assert!(matches!(rig.worker.flush(&volume, &mut plans[1]), Ok(Step::Issue { .. })));
    rig.worker.complete(&volume, &mut plans[1], Ok(())).unwrap();
}

#[test]
fn flush_counts_are_one_flush_and_no_write_or_one_log_block() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &pattern(1, MIB)).unwrap();
    rig.flush(&volume).unwrap();
    rig.check();
    let before = (rig.media.flushes, rig.media.writes);
    rig.write(&volume, 0, &pattern(2, 4096)).unwrap();
    rig.flush(&volume).unwrap();
    assert_eq!((rig.media.flushes - before.0, rig.media.writes - before.1), (1, 0));
    let before = (rig.media.flushes, rig.media.writes);
    for extent in 0..126 {
        rig.write(&volume, (2 << 20) + extent * (64 << 10), &pattern(4, 4096)).unwrap();
    }
    rig.flush(&volume).unwrap();
    assert_eq!((rig.media.flushes - before.0, rig.media.writes - before.1), (1, 1));
    assert_eq!(
        rig.media.fua_writes,
        1 + u64::from(rig.media.fua_writes > 1) * (rig.media.fua_writes - 1)
    );
    rig.check();
}

#[test]
fn snapshots_and_clones_share_and_part() {
    let mut rig = Rig::new(&[32 * MIB]);
    let id = rig.create("a", 4 << 20);
    let volume = rig.attach(id);
    let (first, second) = (pattern(1, MIB), pattern(2, 128 * K));
    rig.write(&volume, 0, &first).unwrap();
    let Outcome::Created(snapshot) =
        rig.control(Control::Snapshot { source: id, name: "s".into() }).unwrap()
    else {
        panic!("not created")
    };
    rig.write(&volume, 32 * 1024 + 512, &second).unwrap();
    let Outcome::Created(clone) =
        rig.control(Control::Clone { source: snapshot, name: "c".into(), size: None }).unwrap()
    else {
        panic!("not created")
    };
    let (frozen, copy) = (rig.attach(snapshot), rig.attach(clone));
    rig.write(&copy, 0, &second).unwrap();
    assert_eq!(rig.read(&frozen, 0, MIB), first);
    let mut expect = first.clone();
    expect[32 * K + 512..160 * K + 512].copy_from_slice(&second);
    assert_eq!(rig.read(&volume, 0, MIB), expect);
    let mut cloned = first.clone();
    cloned[..128 * K].copy_from_slice(&second);
    assert_eq!(rig.read(&copy, 0, MIB), cloned);
    rig.check();
    rig.control(Control::Rollback { volume: id, snapshot }).unwrap();
    assert_eq!(rig.read(&volume, 0, MIB), first);
    rig.check();
    rig.worker.detach(frozen);
    assert_eq!(rig.control(Control::Delete { volume: snapshot }).unwrap(), Outcome::Deleted);
    assert_eq!(rig.control(Control::Delete { volume: snapshot }).unwrap(), Outcome::AlreadyDeleted);
    rig.check();
    assert_eq!(rig.read(&copy, 0, MIB), cloned);
    rig.flush(&volume).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    let (volume, copy) = (rig.attach(id), rig.attach(clone));
    assert_eq!(rig.read(&copy, 0, MIB), cloned);
    assert_eq!(rig.read(&volume, 0, MIB), first);
    rig.check();
}

#[test]
fn a_rename_is_durable_when_answered_and_its_clients_notice_nothing() {
    let mut rig = Rig::new(&[32 * MIB]);
    let [a, b] = ["a", "b"].map(|name| rig.create(name, 4 << 20));
    let volume = rig.attach(a);
    rig.write(&volume, 0, &pattern(1, 4096)).unwrap();
    let rename = |volume, name: &str| Control::Rename { volume, name: name.into() };
    let taken = rig.control(rename(a, "b")).unwrap_err().to_string();
    assert_eq!(taken, "volume \"b\" exists with id 2, asked for 1");
    assert_eq!(rig.control(rename(a, "c")), Ok(Outcome::Renamed));
    assert_eq!(rig.control(rename(a, "c")), Ok(Outcome::Unchanged));
    // The former name is free at once.
    let snapshot = Control::Snapshot { source: b, name: "a".into() };
    let Ok(Outcome::Created(snapshot)) = rig.control(snapshot) else { panic!("not created") };
    assert_eq!(rig.control(rename(snapshot, "d")), Ok(Outcome::Renamed));
    rig.write(&volume, 4096, &pattern(2, 4096)).unwrap();
    rig.flush(&volume).unwrap();
    let names = |rig: &Rig| rig.engine.volumes().into_iter().map(|one| (one.id, one.name));
    let expected = [(a, "c"), (b, "b"), (snapshot, "d")].map(|(id, name)| (id, name.to_owned()));
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(names(&rig).eq(expected.clone()), "by the log");
    rig.control(Control::Checkpoint).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(names(&rig).eq(expected), "by the catalogue");
    let volume = rig.attach(a);
    assert_eq!(rig.read(&volume, 0, 4096), pattern(1, 4096));
    assert_eq!(rig.read(&volume, 4096, 4096), pattern(2, 4096));
    rig.check();
}

#[test]
fn data_beyond_a_smaller_size_never_comes_back() {
    let mut rig = Rig::new(&[32 * MIB]);
    let id = rig.create("a", 20 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &pattern(1, 20 * MIB)).unwrap();
    rig.control(Control::Resize { volume: id, size: (1 << 20) + 4096 }).unwrap();
    assert!(rig.worker.read(&volume, 2 << 20, 4096, &mut rig.plan).is_err());
    rig.control(Control::Resize { volume: id, size: 20 << 20 }).unwrap();
    let read = rig.read(&volume, 0, 20 * MIB);
    assert_eq!(read[..MIB + 4096], pattern(1, 20 * MIB)[..MIB + 4096]);
    assert!(read[MIB + 4096..].iter().all(|&b| b == 0));
    rig.check();
    assert_eq!(rig.engine.volumes()[0].mapped, (1 << 20) + (64 << 10));
}

#[test]
fn checkpoints_under_writes_take_no_leaves_for_good() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    for slot in 0..32 {
        rig.write(&volume, slot << 24, &pattern(1, 4096)).unwrap();
    }
    rig.check();
    let spare = rig.pool.spare_leaves();
    for round in 0..2000_u64 {
        let at = ((round % 32) << 24) + (round / 32 % 15 + 1) * 4096;
        rig.write(&volume, at, &pattern(2, 4096)).unwrap();
        rig.flush(&volume).unwrap();
    }
    rig.check();
    // The worker itself keeps a few ready.
    assert!(
        rig.pool.spare_leaves() + 8 >= spare,
        "{} of {spare} are left",
        rig.pool.spare_leaves()
    );
}

#[test]
fn a_sparing_pool_makes_more_leaves_only_when_few_are_left() {
    let mut media = Media::new(&[128 * MIB]);
    media.create();
    let options = OpenOptions { tuning: Tuning::sparing(), ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    assert!(rig.pool.spare_leaves() <= 32, "{} leaves are ready", rig.pool.spare_leaves());
    let id = rig.create("a", 600 << 24);
    let volume = rig.attach(id);
    let of = |slot: u64| pattern(u8::try_from(slot % 251).unwrap(), 4096);
    for slot in 0..400 {
        rig.write(&volume, slot << 24, &of(slot)).unwrap();
    }
    rig.settle();
    // Another pool makes blocks until as many are ready.
    assert!(rig.pool.spare_leaves() < 512, "{} leaves are ready", rig.pool.spare_leaves());
    for slot in 400..600 {
        rig.write(&volume, slot << 24, &of(slot)).unwrap();
    }
    rig.check();
    for slot in 0..600 {
        assert!(rig.read(&volume, slot << 24, 4096) == of(slot), "slot {slot}");
    }
}

#[test]
fn a_deleted_volume_is_let_go_of_in_pieces_and_only_after_reads_of_it() {
    let mut rig = Rig::new(&[128 * MIB]);
    let id = rig.create("a", 600 << 24);
    let volume = rig.attach(id);
    for slot in 0..600 {
        rig.write(&volume, slot << 24, &pattern(1, 4096)).unwrap();
    }
    rig.check();
    let free = rig.engine.space().free;
    let step = rig.worker.read(&volume, 0, 4096, &mut rig.plan).unwrap();
    assert!(matches!(step, Step::Issue { .. }), "{step:?}");
    assert_eq!(rig.control(Control::Delete { volume: id }).unwrap(), Outcome::Deleted);
    let all = Releasing { volume: id, extents: 600, left: 600 };
    assert_eq!(rig.engine.releasing(), [all]);
    rig.worker.complete(&volume, &mut rig.plan, Ok(())).unwrap();
    let mut left = 600;
    for _ in 0..100 {
        while let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            rig.engine.complete(command, Ok(()));
        }
        let now = rig.engine.releasing().first().map_or(0, |releasing| releasing.left);
        // Eight steps of 64 leaves in one poll.
        assert!(now <= left && left - now <= 512, "{left} were left, and now {now}");
        left = now;
    }
    assert_eq!((left, rig.engine.releasing().len()), (0, 0));
    rig.worker.detach(volume);
    rig.check();
    assert!(rig.engine.space().free >= free + 600 * (64 << 10));
}

/// Parts of an interrupted write that a map can show have to stay whole.
///
/// Row: P24.
#[test]
fn only_writes_that_no_map_shows_may_be_interrupted() {
    let mut rig = Rig::new(&[32 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    let unseen = |rig: &mut Rig, at: u64, len: u64| {
        let mut step = rig.worker.write(&volume, at, len, false, &mut rig.plan).unwrap();
        if matches!(step, Step::Park(_)) {
            rig.settle();
            step = rig.worker.write(&volume, at, len, false, &mut rig.plan).unwrap();
        }
        assert_eq!(step, Step::Issue { covered: len });
        let all: Vec<bool> = rig.plan.ops().iter().map(|op| op.unseen).collect();
        assert!(rig.worker.complete(&volume, &mut rig.plan, Ok(())).is_ok());
        all
    };
    // So that it is granted extents.
    rig.write(&volume, 4 << 20, &[1; 4096]).unwrap();
    // The first of an extent, with zeroes around it; the next one of it; a second one over it.
    assert_eq!(unseen(&mut rig, 512, 512), [true; 3]);
    assert_eq!(unseen(&mut rig, 4096, 4096), [true]);
    assert_eq!(unseen(&mut rig, 4096, 4096), [false]);
    // Half of it is shown.
    assert_eq!(unseen(&mut rig, 4096, 8192), [false]);
    // A discard that isn't durable could be undone: the removed data is shown again then.
    rig.flush(&volume).unwrap();
    rig.discard(&volume, 8192, 4096);
    assert_eq!(unseen(&mut rig, 8192, 4096), [false]);
    rig.discard(&volume, 8192, 4096);
    rig.flush(&volume).unwrap();
    assert_eq!(unseen(&mut rig, 8192, 4096), [true]);
    // The target of a copy had no owner.
    let snapshot = Control::Snapshot { source: id, name: "s".into() };
    assert!(matches!(rig.control(snapshot).unwrap(), Outcome::Created(_)));
    let copied = unseen(&mut rig, 8192, 4096);
    assert!(copied.len() > 1 && copied.iter().all(|&one| one), "{copied:?}");
    assert_eq!(unseen(&mut rig, 8192, 4096), [false]);
    rig.check();
}

/// Two writes to a block that isn't there yet: where they are carried out byte by byte, the second
/// one waits, so that neither is in the middle when the other one shows the block.
///
/// Row: P24.
#[test]
fn two_first_writes_to_a_block_do_not_meet() {
    for whole_blocks in [false, true] {
        let mut media = common::Media::new(&[16 * MIB]);
        media.create();
        let mut options = media.open_options();
        options.tuning.whole_blocks = whole_blocks;
        let mut rig = Rig::open_with(media, options).unwrap();
        let id = rig.create("a", 8 << 20);
        let volume = rig.attach(id);
        let mut other = rig.pool.worker().unwrap();
        let second = other.attach(id).unwrap();
        let mut plan = blockd_mapper::plan::Plan::with_capacity(64);
        rig.write(&volume, 4 << 20, &[1; 4096]).unwrap();
        let first = rig.worker.write(&volume, 0, 8192, false, &mut rig.plan).unwrap();
        assert_eq!(first, Step::Issue { covered: 8192 });
        let step = other.write(&second, 4096, 4096, false, &mut plan).unwrap();
        assert_eq!(matches!(step, Step::Park(_)), whole_blocks, "{step:?}");
        rig.worker.complete(&volume, &mut rig.plan, Ok(())).unwrap();
        if whole_blocks {
            let again = other.write(&second, 4096, 4096, false, &mut plan).unwrap();
            assert_eq!(again, Step::Issue { covered: 4096 });
            assert_eq!(plan.ops().iter().map(|op| op.unseen).collect::<Vec<_>>(), [false]);
        }
        other.complete(&second, &mut plan, Ok(())).unwrap();
        other.detach(second);
    }
}

/// A write through that fails stops the pool where its error may be a flush's, and only there.
///
/// Row: P24.
#[test]
fn a_store_that_fails_is_that_write_alone() {
    for synchronous in [false, true] {
        let mut media = common::Media::new(&[16 * MIB]);
        media.create();
        let mut options = media.open_options();
        options.tuning.synchronous = synchronous;
        let mut rig = Rig::open_with(media, options).unwrap();
        let id = rig.create("a", 8 << 20);
        let volume = rig.attach(id);
        rig.write_fua(&volume, 0, &[1; 4096]).unwrap();
        let step = rig.worker.write(&volume, 0, 4096, true, &mut rig.plan).unwrap();
        assert_eq!(step, Step::Issue { covered: 4096 });
        let media = Err(blockd_mapper::io::IoError::Media);
        assert!(rig.worker.complete(&volume, &mut rig.plan, media).is_err());
        assert_eq!(rig.pool.failure().is_none(), synchronous);
    }
}

#[test]
fn a_reset_has_the_snapshots_content_and_keeps_a_larger_size_also_without_free_space() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 1 << 20);
    let volume = rig.attach(id);
    let first = pattern(1, MIB);
    rig.write(&volume, 0, &first).unwrap();
    rig.worker.detach(volume);
    let created = |outcome| match outcome {
        Ok(Outcome::Created(id)) => id,
        other => panic!("{other:?}"),
    };
    let snapshot = created(rig.control(Control::Snapshot { source: id, name: "s".into() }));
    let clone = Control::Clone { source: snapshot, name: "c".into(), size: Some(8 << 20) };
    let clone = created(rig.control(clone));
    // All of it is set aside, and most of it is written.
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: clone, settings }).unwrap();
    let copy = rig.attach(clone);
    rig.write(&copy, 0, &pattern(2, 7 * MIB)).unwrap();
    let reset = |size| Control::Reset { volume: clone, snapshot, size };
    assert!(matches!(rig.control(reset(4096)), Err(MapperError::Invalid { field: "size", .. })));
    assert_eq!(rig.control(reset(8 << 20)), Ok(Outcome::Reset { size: 8 << 20 }));
    let mut expect = first;
    expect.resize(8 * MIB, 0);
    assert_eq!(rig.read(&copy, 0, 8 * MIB), expect);
    rig.check();
    rig.worker.detach(copy);
    let mut rig = Rig::open(rig.kill()).unwrap();
    let copy = rig.attach(clone);
    assert_eq!(rig.read(&copy, 0, 8 * MIB), expect);
    rig.check();
}
