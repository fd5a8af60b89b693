//! A device that leaves an open pool.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::{CreateOptions, NewDevice};
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::DeviceState;
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::{Plan, Step};
use blockd_mapper::pool::Tuning;
use blockd_mapper::space::VolumeSettings;
use blockd_mapper::units::VolumeId;

use common::{Media, Rig};

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const BLOCK: usize = 4096;

/// A pool of three devices whose entries may be composite. The first has hardly room for data.
fn pool(sizes: &[usize]) -> Media {
    let mut media = Media::new(sizes);
    let options = CreateOptions { composite: true, ..media.options() };
    media.create_with(&options);
    media
}

fn data(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / BLOCK * 7 + seed * 31 + at % 13) % 251).unwrap()).collect()
}

/// Lets the time pass until the device is gone.
fn wait_until_gone(rig: &mut Rig) {
    for _ in 0..2_000 {
        if rig.engine.evacuation_status().device.is_none() {
            return;
        }
        rig.now += 100_000_000;
        rig.settle();
    }
    panic!("it never ends: {:?}", rig.engine.evacuation_status());
}

fn remove(rig: &mut Rig, device: u8) {
    assert_eq!(rig.control(Control::RemoveDevice { device }), Ok(Outcome::Leaving));
}

fn garble(rig: &mut Rig, device: usize) {
    let len = rig.media.devices[device].len();
    // The superblocks stay: the caller may open the pool with the device.
    rig.media.devices[device][2 * BLOCK..len - EXTENT].fill(0xD7);
}

fn created(outcome: Result<Outcome, MapperError>) -> VolumeId {
    match outcome.unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// A volume, a snapshot and a clone that share most, with entries of all kinds on two devices.
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
fn a_device_is_emptied_while_its_data_stays_shared_and_leaves() {
    let media = pool(&[4 * MIB, 16 * MIB, 24 * MIB]);
    let mut rig = Rig::open(media).unwrap();
    let all = family(&mut rig);
    let before = rig.engine.space();
    remove(&mut rig, 1);
    let status = rig.engine.evacuation_status();
    assert!(status.device == Some(1) && status.left > 0, "{status:?}");
    assert_eq!(rig.control(Control::RemoveDevice { device: 1 }), Ok(Outcome::Unchanged));
    wait_until_gone(&mut rig);
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
    let after = rig.engine.space();
    assert_eq!(after.total, before.total - (16 << 20));
    assert!(after.mapped <= before.mapped, "{after:?} {before:?}: what was shared is copied");
    // With the device, and without it.
    let media = rig.kill();
    let mut rig = Rig::open(media).unwrap();
    expect(&mut rig, &all);
    rig.check();
    let mut media = rig.kill();
    media.devices.remove(1);
    let mut rig = Rig::open(media).unwrap();
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_device_that_was_leaving_goes_on_to_leave_after_a_crash() {
    // A block each second: nothing is finished before the crash.
    let tuning = Tuning { evacuation_rate: BLOCK as u64, ..Tuning::default() };
    let media = pool(&[4 * MIB, 16 * MIB, 24 * MIB]);
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let all = family(&mut rig);
    let volume = rig.attach(all[0].0);
    rig.flush(&volume).unwrap();
    remove(&mut rig, 1);
    for _ in 0..64 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    let status = rig.engine.evacuation_status();
    assert!(status.device == Some(1) && status.moved > 0, "{status:?}");
    let media = rig.kill();
    let mut rig = Rig::open(media).unwrap();
    assert_eq!(rig.engine.evacuation_status().device, Some(1));
    wait_until_gone(&mut rig);
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_device_leaves_under_writes_snapshots_and_discards() {
    let tuning = Tuning { evacuation_rate: 256 << 10, ..Tuning::default() };
    let media = pool(&[4 * MIB, 16 * MIB, 80 * MIB]);
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let mut all = family(&mut rig);
    let volume = rig.attach(all[0].0);
    remove(&mut rig, 1);
    let mut round = 0;
    while rig.engine.evacuation_status().device.is_some() {
        assert!(round < 4_000, "{:?}", rig.engine.evacuation_status());
        let at = round * 37 % 128 * EXTENT + round % 16 * BLOCK;
        let byte = u8::try_from(round % 250).unwrap();
        rig.write(&volume, at as u64, &[byte; BLOCK]).unwrap();
        all[0].1[at..at + BLOCK].fill(byte);
        if round % 50 == 20 {
            let (at, len) = (round % 128 * EXTENT, EXTENT);
            rig.discard(&volume, at as u64, len);
            all[0].1[at..at + len].fill(0);
        }
        if round % 100 == 50 && all.len() < 8 {
            let name = format!("s{round}");
            let id = created(rig.control(Control::Snapshot { source: all[0].0, name }));
            let content = all[0].1.clone();
            all.push((id, content));
        }
        rig.now += 30_000_000;
        rig.settle();
        round += 1;
    }
    assert!(round > 20, "it took {round} rounds");
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_device_that_stays_after_all_is_used_again() {
    let tuning = Tuning { evacuation_rate: BLOCK as u64, ..Tuning::default() };
    let media = pool(&[4 * MIB, 16 * MIB, 24 * MIB]);
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let all = family(&mut rig);
    let (total, free) = (rig.engine.space().total, rig.engine.space().free);
    remove(&mut rig, 1);
    assert!(rig.engine.space().free < free);
    let keep = |device| Control::KeepDevice { device };
    assert!(matches!(rig.control(keep(3)), Err(MapperError::Invalid { field: "device", .. })));
    assert_eq!(rig.control(keep(2)), Ok(Outcome::Unchanged));
    assert_eq!(rig.control(keep(1)), Ok(Outcome::Kept));
    assert_eq!((rig.engine.evacuation_status().device, rig.engine.space().total), (None, total));
    expect(&mut rig, &all);
    rig.check();
    let big = rig.create("big", 24 << 20);
    let volume = rig.attach(big);
    let content = data(9, 20 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_device_that_cannot_leave_is_refused_and_nothing_changes() {
    let mut rig = Rig::open(pool(&[4 * MIB, 16 * MIB, 12 * MIB])).unwrap();
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    let content = data(3, 14 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    let before = rig.engine.space();
    for device in [0, 3, 200] {
        let refused = rig.control(Control::RemoveDevice { device });
        assert!(
            matches!(refused, Err(MapperError::Invalid { field: "device", .. })),
            "{refused:?}"
        );
    }
    for device in [1, 2] {
        let used = rig.control(Control::RemoveDevice { device });
        match used {
            Ok(Outcome::Leaving) => {
                let other = Control::RemoveDevice { device: 3 - device };
                let refused = rig.control(other);
                assert!(matches!(refused, Err(MapperError::Invalid { .. })), "{refused:?}");
                rig.control(Control::KeepDevice { device }).unwrap();
            }
            Err(MapperError::NoSpace { needed, free }) => assert!(needed > free),
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.engine.space().total, before.total);
    }
    let all = [(id, content)];
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn the_place_of_a_removed_device_is_used_again() {
    let mut rig = Rig::open(pool(&[4 * MIB, 8 * MIB, 24 * MIB])).unwrap();
    let all = family(&mut rig);
    remove(&mut rig, 1);
    wait_until_gone(&mut rig);
    let states = |rig: &Rig| -> Vec<_> {
        rig.engine.devices().as_slice().iter().map(|device| device.state).collect()
    };
    assert_eq!(states(&rig), [DeviceState::InUse, DeviceState::Removed, DeviceState::InUse]);
    let mut media = rig.kill();
    let former = media.devices.remove(1);
    let mut rig = Rig::open(media).unwrap();
    rig.media.devices.push(vec![0xEE; 30 * MIB]);
    let (name, uuid) = ("new".to_owned(), [0x77; 16]);
    let device = NewDevice { name, uuid, size: 30 << 20, block_size: 512, class: 0 };
    let added = rig.control(Control::AddDevice { handle: 2, device });
    assert_eq!(added, Ok(Outcome::Grown { extents: 480 }));
    assert_eq!(states(&rig), [DeviceState::InUse; 3]);
    let big = rig.create("big", 40 << 20);
    let volume = rig.attach(big);
    let content = data(5, 30 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    rig.flush(&volume).unwrap();
    rig.check();
    // The caller may still name the former device.
    let mut media = rig.kill();
    media.devices.insert(1, former);
    let mut rig = Rig::open(media).unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|handle| rig.pool.position_of(handle)),
        [Some(0), None, Some(2), Some(1)]
    );
    expect(&mut rig, &all);
    expect(&mut rig, &[(big, content)]);
    rig.check();
}

#[test]
fn the_place_of_a_removed_device_is_used_again_while_the_pool_is_open() {
    let mut rig = Rig::open(pool(&[4 * MIB, 8 * MIB, 24 * MIB])).unwrap();
    let all = family(&mut rig);
    remove(&mut rig, 1);
    wait_until_gone(&mut rig);
    rig.media.devices.push(vec![0xEE; 40 * MIB]);
    let (name, uuid) = ("new".to_owned(), [0x77; 16]);
    let device = NewDevice { name, uuid, size: 40 << 20, block_size: 512, class: 0 };
    let added = rig.control(Control::AddDevice { handle: 3, device });
    assert_eq!(added, Ok(Outcome::Grown { extents: 640 }));
    let positions = |rig: &Rig| [0, 1, 2, 3].map(|handle| rig.pool.position_of(handle));
    assert_eq!(positions(&rig), [Some(0), None, Some(2), Some(1)]);
    assert!(rig.pool.has_known(1) && rig.pool.has_known(3) && !rig.pool.has_known(4));
    // What is shared lies there now.
    remove(&mut rig, 2);
    wait_until_gone(&mut rig);
    for device in [1, 2] {
        garble(&mut rig, device);
    }
    expect(&mut rig, &all);
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(positions(&rig), [Some(0), None, None, Some(1)]);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_leaf_that_hundreds_of_snapshots_share_leaves_the_device() {
    let mut rig = Rig::open(pool(&[4 * MIB, 8 * MIB, 64 * MIB])).unwrap();
    let id = rig.create("a", 1 << 20);
    let volume = rig.attach(id);
    let content = data(2, MIB);
    rig.write(&volume, 0, &content).unwrap();
    let mut all = vec![(id, content.clone())];
    for number in 0..700 {
        let name = format!("s{number}");
        let snapshot = created(rig.control(Control::Snapshot { source: id, name }));
        if number % 100 == 0 {
            all.push((snapshot, content.clone()));
        }
    }
    rig.control(Control::Checkpoint).unwrap();
    remove(&mut rig, 1);
    wait_until_gone(&mut rig);
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
}

/// A request that takes very long, of another volume, holds up writers for a moment only, and the
/// engine looks from time to time.
#[test]
fn moves_do_not_wait_for_slow_requests_for_ever() {
    let mut rig = Rig::open(pool(&[4 * MIB, 16 * MIB, 24 * MIB])).unwrap();
    let all = family(&mut rig);
    let other = rig.create("other", 1 << 20);
    let other = rig.attach(other);
    rig.write(&other, 0, &[1; BLOCK]).unwrap();
    rig.check();
    let mut slow = Plan::with_capacity(64);
    let step = rig.worker.read(&other, 0, BLOCK as u64, &mut slow).unwrap();
    assert!(matches!(step, Step::Issue { .. }));
    rig.engine.submit(Control::RemoveDevice { device: 1 });
    for _ in 0..50 {
        rig.now += 1_000_000;
        rig.settle();
    }
    assert!(!rig.pool.engine_wanted(), "the engine is called without an event");
    let next = rig.engine.next_deadline().unwrap();
    assert!(next >= rig.now + 100_000, "{next} is no pause after {}", rig.now);
    let volume = rig.attach(all[0].0);
    let mut plan = Plan::with_capacity(64);
    let mut parks = |rig: &mut Rig| {
        let mut parked = 0;
        for extent in 0..128 {
            let at = (extent * EXTENT) as u64;
            match rig.worker.write(&volume, at, BLOCK as u64, false, &mut plan).unwrap() {
                Step::Issue { .. } => {
                    let io = Err(blockd_mapper::io::IoError::NoSpace);
                    rig.worker.complete(&volume, &mut plan, io).unwrap_err();
                }
                Step::Park(_) => parked += 1,
                _ => {}
            }
        }
        parked
    };
    assert!(parks(&mut rig) > 0, "no move is under way");
    let mut free = 0;
    for _ in 0..100 {
        rig.now += 20_000_000;
        rig.settle();
        free += u32::from(parks(&mut rig) == 0);
    }
    assert!(free > 50, "writers wait for the moves {} times of 100", 100 - free);
    rig.worker.complete(&other, &mut slow, Ok(())).unwrap();
    wait_until_gone(&mut rig);
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
}

/// A checkpoint promises a page to each write in flight, and a move stands among them.
#[test]
fn checkpoints_while_moves_wait_leave_no_page_promised() {
    let mut rig = Rig::open(pool(&[4 * MIB, 16 * MIB, 24 * MIB])).unwrap();
    let all = family(&mut rig);
    let other = rig.create("other", 1 << 20);
    let other = rig.attach(other);
    rig.write(&other, 0, &[1; BLOCK]).unwrap();
    rig.check();
    let mut slow = Plan::with_capacity(64);
    let step = rig.worker.read(&other, 0, BLOCK as u64, &mut slow).unwrap();
    assert!(matches!(step, Step::Issue { .. }));
    remove(&mut rig, 1);
    for _ in 0..50 {
        rig.now += 1_000_000;
        rig.settle();
        assert_eq!(rig.control(Control::Checkpoint), Ok(Outcome::Checkpointed));
    }
    rig.worker.complete(&other, &mut slow, Ok(())).unwrap();
    wait_until_gone(&mut rig);
    expect(&mut rig, &all);
    rig.check();
}

/// The extents of moves are discarded while a checkpoint waits for pages, and lets nothing promise
/// any: the moves end, and it is written.
#[test]
fn moves_that_a_discard_empties_hold_no_checkpoint_up() {
    let mut media = Media::new(&[4 * MIB, 16 * MIB, 160 * MIB]);
    let options = CreateOptions { reserve_size: Some(EXTENT as u64), ..media.options() };
    media.create_with(&options);
    let mut rig = Rig::open(media).unwrap();
    let (a, wide) = (rig.create("a", 16 << 20), rig.create("wide", 1 << 40));
    let (a, wide) = (rig.attach(a), rig.attach(wide));
    rig.write(&a, 0, &data(1, 8 * MIB)).unwrap();
    // More slots than there are pages for.
    let place = |slot: u64| slot * 256 * EXTENT as u64;
    for slot in 0..1600 {
        rig.write(&wide, place(slot), &[1; BLOCK]).unwrap();
        rig.settle();
    }
    rig.engine.set_evacuation_rate(0);
    remove(&mut rig, 1);
    let filler = rig.create("filler", 1 << 40);
    let filler = rig.attach(filler);
    let mut plan = Plan::with_capacity(64);
    for at in (0_u64..).step_by(EXTENT) {
        rig.settle();
        match rig.worker.write(&filler, at, BLOCK as u64, false, &mut plan).unwrap() {
            Step::Issue { .. } => drop(rig.worker.complete(&filler, &mut plan, Ok(())).unwrap()),
            _ if filler.is_out_of_space() => break,
            _ => rig.now += 2_000_000,
        }
    }
    rig.control(Control::Checkpoint).unwrap();
    let mut slow = Plan::with_capacity(64);
    let step = rig.worker.read(&wide, 0, BLOCK as u64, &mut slow).unwrap();
    assert!(matches!(step, Step::Issue { .. }));
    rig.engine.set_evacuation_rate(64 << 20);
    rig.now += 100_000_000;
    rig.settle();
    rig.discard(&a, 0, 8 * MIB);
    let discard = |rig: &mut Rig, slot| rig.worker.discard(&wide, place(slot), EXTENT as u64);
    let discarded =
        (0..1600).take_while(|slot| matches!(discard(&mut rig, *slot), Ok(Step::Done { .. })));
    let discarded = discarded.count();
    assert!((100..1600).contains(&discarded), "{discarded}");
    rig.settle();
    rig.worker.complete(&wide, &mut slow, Ok(())).unwrap();
    for _ in 0..100 {
        rig.now += 10_000_000;
        rig.settle();
    }
    for slot in discarded as u64..1600 {
        rig.discard(&wide, place(slot), EXTENT);
    }
    wait_until_gone(&mut rig);
    rig.check();
}

/// References that are dropped all the time, elsewhere, do not keep it.
#[test]
fn an_empty_device_leaves_while_space_elsewhere_is_being_given_back() {
    let mut rig = Rig::open(pool(&[4 * MIB, 16 * MIB, 40 * MIB])).unwrap();
    let all = family(&mut rig);
    remove(&mut rig, 1);
    let other = rig.create("other", 1 << 20);
    let other = rig.attach(other);
    rig.write(&other, 0, &[1; EXTENT]).unwrap();
    for _ in 0..2_000 {
        if rig.engine.evacuation_status().left == 0 {
            break;
        }
        rig.now += 1_000_000;
        rig.settle();
    }
    let status = rig.engine.evacuation_status();
    assert!(status.device.is_some() && status.left == 0, "{status:?}");
    let mut slow = Plan::with_capacity(64);
    let step = rig.worker.read(&other, 0, BLOCK as u64, &mut slow).unwrap();
    assert!(matches!(step, Step::Issue { .. }));
    rig.discard(&other, 0, EXTENT);
    rig.flush(&other).unwrap();
    wait_until_gone(&mut rig);
    rig.worker.complete(&other, &mut slow, Ok(())).unwrap();
    rig.settle();
    garble(&mut rig, 1);
    expect(&mut rig, &all);
    rig.check();
}

/// Zeroes were written that keep the extent: its space stays the volume's.
#[test]
fn an_extent_without_data_is_kept_on_another_device() {
    let mut rig = Rig::open(pool(&[4 * MIB, 16 * MIB, 40 * MIB])).unwrap();
    let id = rig.create("a", 16 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &data(1, 16 * MIB)).unwrap();
    rig.write_zeroes(&volume, 0, 16 * MIB, false);
    let before = rig.engine.space().mapped;
    remove(&mut rig, 1);
    wait_until_gone(&mut rig);
    assert_eq!(rig.engine.space().mapped, before);
    expect(&mut rig, &[(id, vec![0; 16 * MIB])]);
    rig.check();
}

/// A thin volume has grown meanwhile: the moves wait, and the thick volume has its space.
#[test]
fn moves_wait_where_the_rest_is_set_aside() {
    let tuning = Tuning { evacuation_rate: 1, ..Tuning::default() };
    let media = pool(&[4 * MIB, 16 * MIB, 40 * MIB]);
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let all = family(&mut rig);
    let thick = rig.create("thick", 8 << 20);
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: thick, settings }).unwrap();
    remove(&mut rig, 1);
    let thin = rig.create("thin", 1 << 40);
    let volume = rig.attach(thin);
    let mut plan = Plan::with_capacity(64);
    for extent in 0_u64.. {
        rig.settle();
        let step = rig.worker.write(&volume, extent * EXTENT as u64, 4096, false, &mut plan);
        match step.unwrap() {
            Step::Issue { .. } => drop(rig.worker.complete(&volume, &mut plan, Ok(())).unwrap()),
            Step::Park(_) if volume.is_out_of_space() => break,
            _ => {}
        }
    }
    rig.engine.set_evacuation_rate(1 << 40);
    for _ in 0..100 {
        rig.now += 100_000_000;
        rig.settle();
    }
    let status = rig.engine.evacuation_status();
    assert!(status.waits_for_space && status.device == Some(1), "{status:?}");
    let volume = rig.attach(thick);
    let content = data(4, 8 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    expect(&mut rig, &all);
    expect(&mut rig, &[(thick, content)]);
    rig.control(Control::Delete { volume: thin }).unwrap();
    wait_until_gone(&mut rig);
    expect(&mut rig, &all);
}
