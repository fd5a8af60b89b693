//! Data that is moved to emptier devices of an open pool.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::NewDevice;
use blockd_mapper::engine::{Control, Outcome, RebalanceState};
use blockd_mapper::error::MapperError;
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::{Plan, Step};
use blockd_mapper::pool::Tuning;
use blockd_mapper::space::{Mark, Marks, VolumeSettings};
use blockd_mapper::units::VolumeId;

use common::{Media, Rig};

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const BLOCK: usize = 4096;

fn data(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / BLOCK * 7 + seed * 31 + at % 13) % 251).unwrap()).collect()
}

fn open(sizes: &[usize], tuning: Tuning) -> Rig {
    let mut media = Media::new(sizes);
    let options = blockd_mapper::create::CreateOptions { composite: true, ..media.options() };
    media.create_with(&options);
    let options = OpenOptions { tuning, ..media.open_options() };
    Rig::open_with(media, options).unwrap()
}

/// Moves at this many bytes a second.
fn paced(rate: usize) -> Tuning {
    Tuning { evacuation_rate: rate as u64, ..Tuning::default() }
}

const BEGIN: Control = Control::Rebalance { enabled: true };
const STOP: Control = Control::Rebalance { enabled: false };

fn state(rig: &Rig) -> RebalanceState {
    rig.engine.rebalance_status().state
}

/// Lets the time pass until no rebalance is running. Returns how the last one has ended.
fn wait_until_ended(rig: &mut Rig) -> RebalanceState {
    for _ in 0..5_000 {
        if state(rig) != RebalanceState::Running {
            return state(rig);
        }
        rig.now += 100_000_000;
        rig.settle();
    }
    panic!("it never ends: {:?}", rig.engine.rebalance_status());
}

/// Adds an empty device at the end.
fn add(rig: &mut Rig, size: usize) {
    let handle = u8::try_from(rig.media.devices.len()).unwrap();
    rig.media.devices.push(vec![0xEE; size]);
    let (name, uuid) = (format!("disk{handle}"), [0x70 + handle; 16]);
    let device = NewDevice { name, uuid, size: size as u64, block_size: 512, class: 0 };
    let added = rig.control(Control::AddDevice { handle, device });
    assert!(matches!(added, Ok(Outcome::Grown { .. })), "{added:?}");
}

/// The used shares of the devices, in thousandths.
fn shares(rig: &Rig) -> Vec<u64> {
    let status = rig.engine.rebalance_status();
    let devices = rig.engine.devices().as_slice().iter().zip(status.used);
    devices.map(|(device, used)| used * 1000 / device.size).collect()
}

fn spread(rig: &Rig) -> u64 {
    let shares = shares(rig);
    shares.iter().max().unwrap() - shares.iter().min().unwrap()
}

fn created(outcome: Result<Outcome, MapperError>) -> VolumeId {
    match outcome.unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// A volume, a snapshot and a clone that share most, with entries of all kinds.
fn family(rig: &mut Rig) -> Vec<(VolumeId, Vec<u8>)> {
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    let mut content = data(1, 8 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    let snapshot = created(rig.control(Control::Snapshot { source: id, name: "s".into() }));
    let old = content.clone();
    for extent in (0..128).step_by(3) {
        let at = extent * EXTENT + 5 * BLOCK;
        content[at..at + BLOCK].fill(0x5C);
        rig.write(&volume, at as u64, &[0x5C; BLOCK]).unwrap();
    }
    let clone =
        created(rig.control(Control::Clone { source: snapshot, name: "c".into(), size: None }));
    let attached = rig.attach(clone);
    let mut cloned = old.clone();
    cloned[..EXTENT].fill(0x33);
    rig.write(&attached, 0, &[0x33; EXTENT]).unwrap();
    vec![(id, content), (snapshot, old), (clone, cloned)]
}

fn expect(rig: &mut Rig, all: &[(VolumeId, Vec<u8>)]) {
    for (id, content) in all {
        let volume = rig.attach(*id);
        let found = rig.read(&volume, 0, content.len());
        let at = found.iter().zip(content).position(|(a, b)| a != b);
        assert_eq!(at, None, "volume {id}");
        rig.worker.detach(volume);
    }
}

#[test]
fn devices_are_evened_out_while_data_stays_shared() {
    let mut rig = open(&[8 * MIB, 12 * MIB], Tuning::default());
    let all = family(&mut rig);
    add(&mut rig, 24 * MIB);
    let (before, uneven) = (rig.engine.space(), shares(&rig));
    assert!(spread(&rig) > 300, "{uneven:?}");
    assert_eq!(rig.control(BEGIN), Ok(Outcome::Rebalancing));
    let status = rig.engine.rebalance_status();
    assert!(status.state == RebalanceState::Running && status.left > 0, "{status:?}");
    assert_eq!(rig.control(BEGIN), Ok(Outcome::Unchanged));
    assert!(!rig.pool.take_rebalanced());
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Even);
    assert!(rig.pool.take_rebalanced() && !rig.pool.take_rebalanced());
    let status = rig.engine.rebalance_status();
    assert!(status.moved > 0 && status.extents > 0 && status.left == 0, "{status:?}");
    let total = |of: &[u64]| of.iter().sum::<u64>();
    assert!(total(&status.before) > 0 && status.before[2] < status.used[2], "{status:?}");
    // Four extents of the smallest device are three hundredths of it.
    assert!(spread(&rig) <= 32, "{:?} were {uneven:?}", shares(&rig));
    let after = rig.engine.space();
    assert!(after.mapped <= before.mapped, "{after:?} {before:?}: what was shared is copied");
    assert_eq!(rig.control(BEGIN), Ok(Outcome::Unchanged));
    assert_eq!(rig.control(STOP), Ok(Outcome::Unchanged));
    expect(&mut rig, &all);
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(state(&rig), RebalanceState::Never);
    expect(&mut rig, &all);
    rig.check();
}

/// Some rounds of writes, discards and snapshots beside a rebalance.
fn write_beside(rig: &mut Rig, all: &mut Vec<(VolumeId, Vec<u8>)>, rounds: std::ops::Range<usize>) {
    let volume = rig.attach(all[0].0);
    for round in rounds {
        let at = round * 37 % 128 * EXTENT + round % 16 * BLOCK;
        let byte = u8::try_from(round % 250).unwrap();
        rig.write(&volume, at as u64, &[byte; BLOCK]).unwrap();
        all[0].1[at..at + BLOCK].fill(byte);
        if round % 50 == 20 {
            let (at, len) = (round % 128 * EXTENT, EXTENT);
            rig.discard(&volume, at as u64, len);
            all[0].1[at..at + len].fill(0);
        }
        if round % 100 == 50 && all.len() < 6 {
            let snapshot = Control::Snapshot { source: all[0].0, name: format!("s{round}") };
            let id = created(rig.control(snapshot));
            let content = all[0].1.clone();
            all.push((id, content.clone()));
            let name = format!("c{round}");
            let clone = created(rig.control(Control::Clone { source: id, name, size: None }));
            all.push((clone, content));
        }
        rig.now += 30_000_000;
        rig.settle();
    }
    rig.flush(&volume).unwrap();
    rig.worker.detach(volume);
}

#[test]
fn devices_are_evened_out_under_writes_snapshots_and_discards_also_after_a_crash() {
    let mut rig = open(&[8 * MIB, 24 * MIB], paced(256 << 10));
    let mut all = family(&mut rig);
    add(&mut rig, 48 * MIB);
    for begin in [0, 150, 300] {
        assert_eq!(rig.control(BEGIN), Ok(Outcome::Rebalancing));
        write_beside(&mut rig, &mut all, begin..begin + 150);
        let status = rig.engine.rebalance_status();
        assert!(status.state == RebalanceState::Running && status.extents > 0, "{status:?}");
        // In the middle of it.
        let media = rig.kill();
        let options = OpenOptions { tuning: paced(256 << 10), ..media.open_options() };
        rig = Rig::open_with(media, options).unwrap();
        assert_eq!(state(&rig), RebalanceState::Never);
        expect(&mut rig, &all);
        rig.check();
    }
    rig.engine.set_evacuation_rate(64 << 20);
    assert_eq!(rig.control(BEGIN), Ok(Outcome::Rebalancing));
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Even);
    assert!(spread(&rig) <= 32, "{:?}", shares(&rig));
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_rebalance_that_is_stopped_leaves_what_was_moved_and_nothing_held() {
    let mut rig = open(&[8 * MIB, 12 * MIB], paced(256 << 10));
    let all = family(&mut rig);
    add(&mut rig, 24 * MIB);
    rig.control(BEGIN).unwrap();
    for _ in 0..10 {
        rig.now += 100_000_000;
        rig.settle();
    }
    assert_eq!(rig.control(STOP), Ok(Outcome::RebalanceStopped));
    assert!(rig.pool.take_rebalanced());
    let status = rig.engine.rebalance_status();
    assert!(status.state == RebalanceState::Stopped && status.extents > 0, "{status:?}");
    let used = status.used[2];
    for _ in 0..50 {
        rig.now += 100_000_000;
        rig.settle();
    }
    let more = rig.engine.rebalance_status().used[2] - used;
    assert!(more <= 8 * EXTENT as u64, "{more} bytes were moved after it was stopped");
    assert!(rig.engine.is_idle());
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_device_that_leaves_or_shrinks_ends_a_rebalance_and_keeps_another_from_beginning() {
    let mut rig = open(&[8 * MIB, 12 * MIB], paced(256 << 10));
    let refused = |rig: &mut Rig, field| match rig.control(BEGIN) {
        Err(MapperError::Invalid { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{other:?}"),
    };
    let all = family(&mut rig);
    add(&mut rig, 40 * MIB);
    let shrink = Control::ShrinkDevice { device: 2, size: 36 << 20 };
    for (command, outcome) in [
        (Control::RemoveDevice { device: 1 }, Outcome::Leaving),
        (shrink, Outcome::Shrinking),
        (Control::RemoveDevice { device: 2 }, Outcome::Leaving),
    ] {
        rig.control(BEGIN).unwrap();
        for _ in 0..5 {
            rig.now += 100_000_000;
            rig.settle();
        }
        let device = match &command {
            Control::RemoveDevice { device } | Control::ShrinkDevice { device, .. } => *device,
            other => panic!("{other:?}"),
        };
        // It stays so.
        rig.engine.set_evacuation_rate(0);
        assert_eq!(rig.control(command), Ok(outcome));
        assert_eq!(state(&rig), RebalanceState::Displaced);
        refused(&mut rig, "device");
        assert_eq!(rig.control(Control::KeepDevice { device }), Ok(Outcome::Kept));
        rig.engine.set_evacuation_rate(256 << 10);
    }
    rig.engine.set_evacuation_rate(1 << 40);
    rig.control(Control::RemoveDevice { device: 2 }).unwrap();
    for _ in 0..200 {
        rig.now += 100_000_000;
        rig.settle();
    }
    assert_eq!(rig.engine.evacuation_status().device, None);
    rig.media.devices[2][2 * BLOCK..40 * MIB - EXTENT].fill(0xD7);
    expect(&mut rig, &all);
    rig.check();
    let mut alone = open(&[16 * MIB], Tuning::default());
    refused(&mut alone, "devices");
}

/// Extents can't be moved before an older request ends: they stay where they are.
#[test]
fn a_rebalance_ends_where_a_request_never_does() {
    let mut rig = open(&[8 * MIB, 12 * MIB], Tuning::default());
    let all = family(&mut rig);
    add(&mut rig, 24 * MIB);
    let other = rig.create("other", 1 << 20);
    let other = rig.attach(other);
    rig.write(&other, 0, &[1; BLOCK]).unwrap();
    let mut slow = Plan::with_capacity(64);
    let step = rig.worker.read(&other, 0, BLOCK as u64, &mut slow).unwrap();
    assert!(matches!(step, Step::Issue { .. }));
    rig.engine.submit(BEGIN);
    rig.settle();
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Rest);
    rig.worker.complete(&other, &mut slow, Ok(())).unwrap();
    rig.worker.detach(other);
    let _ = rig.engine.take_outcome();
    assert_eq!(rig.control(BEGIN), Ok(Outcome::Rebalancing));
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Even);
    expect(&mut rig, &all);
    rig.check();
}

fn expect_wait(rig: &mut Rig) {
    rig.control(BEGIN).unwrap();
    for _ in 0..100 {
        rig.now += 100_000_000;
        rig.settle();
    }
    let status = rig.engine.rebalance_status();
    assert!(status.waits_for_space && status.state == RebalanceState::Running, "{status:?}");
    assert_eq!(status.extents, 0, "{status:?}");
}

#[test]
fn moves_wait_while_the_pool_is_low() {
    let low = Marks { low: Mark::Bytes(1 << 40), very_low: Mark::Bytes(1 << 20) };
    let tuning = Tuning { marks: Some(low), ..Tuning::default() };
    let mut rig = open(&[8 * MIB, 12 * MIB], tuning);
    let all = family(&mut rig);
    add(&mut rig, 24 * MIB);
    expect_wait(&mut rig);
    rig.engine.set_marks(None);
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Even);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn moves_wait_while_all_that_is_free_is_set_aside() {
    let mut rig = open(&[8 * MIB, 12 * MIB], Tuning::default());
    let all = family(&mut rig);
    add(&mut rig, 24 * MIB);
    // As large as can be.
    let extents = rig.engine.available() / EXTENT as u64;
    let sizes = (1..extents).rev().map(|extents| extents * EXTENT as u64);
    let thick = sizes.take(100).enumerate().find_map(|(at, size)| {
        let id = rig.create(&format!("thick{at}"), size);
        let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
        let set = rig.control(Control::Configure { volume: id, settings });
        if set.is_err() {
            rig.control(Control::Delete { volume: id }).unwrap();
        }
        set.is_ok().then_some((id, usize::try_from(size).unwrap()))
    });
    let (thick, size) = thick.unwrap();
    assert_eq!(rig.engine.available(), 0);
    expect_wait(&mut rig);
    let volume = rig.attach(thick);
    let content = data(4, size);
    rig.write(&volume, 0, &content).unwrap();
    rig.worker.detach(volume);
    expect(&mut rig, &all);
    expect(&mut rig, &[(thick, content)]);
    rig.control(Control::Delete { volume: thick }).unwrap();
    assert_eq!(wait_until_ended(&mut rig), RebalanceState::Even);
    expect(&mut rig, &all);
    rig.check();
}
