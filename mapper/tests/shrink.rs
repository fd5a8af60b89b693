//! A device of an open pool that becomes smaller.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::{DeviceState, Superblock};
use blockd_mapper::io::{IoOp, Page};
use blockd_mapper::open::OpenOptions;
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

/// A block each second: nothing ends by itself.
fn slow() -> Tuning {
    Tuning { evacuation_rate: BLOCK as u64, ..Tuning::default() }
}

fn shrink(device: u8, size: usize) -> Control {
    Control::ShrinkDevice { device, size: size as u64 }
}

fn wait_until_shrunk(rig: &mut Rig) {
    for _ in 0..2_000 {
        if rig.engine.evacuation_status().device.is_none() {
            return;
        }
        rig.now += 100_000_000;
        rig.settle();
    }
    panic!("it never ends: {:?}", rig.engine.evacuation_status());
}

fn extents_of(rig: &Rig, device: usize) -> u64 {
    rig.engine.devices().as_slice()[device].extents
}

fn created(outcome: Result<Outcome, MapperError>) -> VolumeId {
    match outcome.unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// A volume, a snapshot and a clone that share most, behind `before` bytes that become free.
fn family_behind(rig: &mut Rig, before: usize) -> Vec<(VolumeId, Vec<u8>)> {
    let filler = rig.create("filler", before as u64);
    let volume = rig.attach(filler);
    rig.write(&volume, 0, &data(9, before)).unwrap();
    rig.worker.detach(volume);
    let id = rig.create("a", 6 << 20);
    let volume = rig.attach(id);
    let mut content = data(1, 6 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    let snapshot = created(rig.control(Control::Snapshot { source: id, name: "s".into() }));
    let old = content.clone();
    for extent in (0..96).step_by(3) {
        let at = extent * EXTENT + 5 * BLOCK;
        content[at..at + BLOCK].fill(0x5C);
        rig.write(&volume, at as u64, &[0x5C; BLOCK]).unwrap();
    }
    let clone =
        created(rig.control(Control::Clone { source: snapshot, name: "c".into(), size: None }));
    rig.control(Control::Delete { volume: filler }).unwrap();
    rig.check();
    vec![(id, content), (snapshot, old.clone()), (clone, old)]
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

fn is_superblock(media: &Media, device: usize, at: usize) -> bool {
    Superblock::has_magic(&media.devices[device][at..at + BLOCK])
}

#[test]
fn a_device_is_emptied_behind_its_new_end_and_shrinks() {
    let mut rig = open(&[8 * MIB, 24 * MIB], Tuning::default());
    let all = family_behind(&mut rig, 16 * MIB);
    let before = rig.engine.space();
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Shrinking));
    let status = rig.engine.evacuation_status();
    assert_eq!((status.device, status.shrinks_to), (Some(1), Some(12 << 20)));
    assert!(status.left > 0, "{status:?}");
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Unchanged));
    let writer = rig.attach(all[0].0);
    rig.write(&writer, 0, &all[0].1[..EXTENT]).unwrap();
    wait_until_shrunk(&mut rig);
    assert_eq!((rig.pool.shrunk(), rig.engine.evacuation_status().sizes[1]), (Some(1), 12 << 20));
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Unchanged));
    assert!(!is_superblock(&rig.media, 1, 24 * MIB - EXTENT));
    rig.media.devices[1].truncate(12 * MIB);
    expect(&mut rig, &all);
    rig.check();
    let after = rig.engine.space();
    assert_eq!(after.total, before.total - (12 << 20));
    assert!(after.mapped <= before.mapped, "{after:?} {before:?}: what was shared is copied");
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!((extents_of(&rig, 1), rig.report.was_clean), (192, false));
    assert_eq!(rig.engine.devices().as_slice()[1].state, DeviceState::InUse);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn the_first_device_shrinks_and_is_found_by_the_superblock_at_its_new_end() {
    let mut rig = open(&[32 * MIB], Tuning::default());
    let all = family_behind(&mut rig, 12 * MIB);
    // Not a whole number of extents.
    assert_eq!(rig.control(shrink(0, 20 * MIB + 5)), Ok(Outcome::Shrinking));
    wait_until_shrunk(&mut rig);
    rig.media.devices[0].truncate(20 * MIB);
    rig.media.devices[0][..2 * BLOCK].fill(0);
    let mut rig = Rig::open(rig.kill()).unwrap();
    expect(&mut rig, &all);
    rig.check();
    assert_eq!(rig.engine.space().total, 20 << 20);
}

#[test]
fn a_device_goes_on_to_shrink_after_a_crash() {
    let mut rig = open(&[8 * MIB, 24 * MIB], slow());
    let all = family_behind(&mut rig, 16 * MIB);
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Shrinking));
    for _ in 0..64 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    let status = rig.engine.evacuation_status();
    assert!(status.device == Some(1) && status.moved > 0, "{status:?}");
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(rig.engine.evacuation_status().shrinks_to, Some(12 << 20));
    wait_until_shrunk(&mut rig);
    rig.media.devices[1].truncate(12 * MIB);
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn nothing_is_put_behind_the_new_end_while_a_device_shrinks() {
    let mut rig = open(&[8 * MIB, 24 * MIB], Tuning { evacuation_rate: 0, ..Tuning::default() });
    rig.check();
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Shrinking));
    let before = rig.media.devices[1][12 * MIB - EXTENT..].to_vec();
    let id = rig.create("a", 14 << 20);
    let volume = rig.attach(id);
    let content = data(3, 14 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let changed: Vec<usize> = (0..before.len() / BLOCK)
        .filter(|page| {
            let at = page * BLOCK;
            let now = 12 * MIB - EXTENT + at;
            before[at..at + BLOCK] != rig.media.devices[1][now..now + BLOCK]
        })
        .collect();
    let superblocks = (before.len() - EXTENT) / BLOCK;
    assert_eq!(changed, [superblocks, superblocks + 1]);
    expect(&mut rig, &[(id, content)]);
}

#[test]
fn a_device_keeps_its_size_after_all() {
    let mut rig = open(&[8 * MIB, 24 * MIB], slow());
    let all = family_behind(&mut rig, 16 * MIB);
    let (total, free) = (rig.engine.space().total, rig.engine.space().free);
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Shrinking));
    assert!(rig.engine.space().free < free);
    let other = rig.control(shrink(1, 13 * MIB));
    assert!(matches!(other, Err(MapperError::Invalid { field: "device", .. })), "{other:?}");
    let leaving = rig.control(Control::RemoveDevice { device: 1 });
    assert!(matches!(leaving, Err(MapperError::Invalid { field: "device", .. })), "{leaving:?}");
    assert_eq!(rig.control(Control::KeepDevice { device: 1 }), Ok(Outcome::Kept));
    assert_eq!((rig.engine.evacuation_status().device, rig.engine.space().total), (None, total));
    rig.check();
    let big = rig.create("big", 24 << 20);
    let volume = rig.attach(big);
    let content = data(9, 14 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    expect(&mut rig, &all);
    rig.check();
}

#[test]
fn a_size_that_is_impossible_is_refused_with_the_least() {
    let mut rig = open(&[8 * MIB, 24 * MIB], Tuning::default());
    let id = rig.create("a", 32 << 20);
    let volume = rig.attach(id);
    let content = data(3, 14 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    let before = rig.engine.space();
    let larger = rig.control(shrink(1, 25 * MIB));
    assert!(matches!(larger, Err(MapperError::Invalid { field: "size", .. })), "{larger:?}");
    for (device, size) in [(0, 0), (0, 2 * MIB), (1, 2 * EXTENT)] {
        let refused = rig.control(shrink(device, size));
        assert!(matches!(refused, Err(MapperError::TooSmall { .. })), "{refused:?}");
    }
    let refused = rig.control(shrink(1, 4 * MIB));
    let Err(MapperError::TooSmall { size, least, .. }) = refused else { panic!("{refused:?}") };
    assert!(size == 4 << 20 && least > size && least < 24 << 20, "{refused:?}");
    assert_eq!(rig.engine.space().total, before.total);
    let least = usize::try_from(least).unwrap();
    assert_eq!(rig.control(shrink(1, least)), Ok(Outcome::Shrinking));
    wait_until_shrunk(&mut rig);
    rig.media.devices[1].truncate(least);
    expect(&mut rig, &[(id, content)]);
    rig.check();
}

#[test]
fn space_that_is_set_aside_or_below_the_low_mark_stays() {
    let marks = Marks { low: Mark::Percent(20), very_low: Mark::Percent(5) };
    let mut rig = open(&[8 * MIB, 32 * MIB], Tuning { evacuation_rate: 0, ..Tuning::default() });
    rig.check();
    let least = |rig: &mut Rig| match rig.control(shrink(1, 3 * EXTENT)) {
        Err(MapperError::TooSmall { least, .. }) => usize::try_from(least).unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(rig.control(shrink(1, 3 * EXTENT)), Ok(Outcome::Shrinking));
    rig.control(Control::KeepDevice { device: 1 }).unwrap();
    let bytes = Marks { low: Mark::Bytes(16 << 20), very_low: Mark::Bytes(1 << 20) };
    rig.engine.set_marks(Some(bytes));
    let for_mark = least(&mut rig);
    assert!((8 * MIB..17 * MIB).contains(&for_mark), "{for_mark}");
    let thick = rig.create("thick", 8 << 20);
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: thick, settings }).unwrap();
    let with_thick = least(&mut rig);
    assert!(with_thick >= for_mark + 8 * MIB, "{for_mark} {with_thick}");
    rig.engine.set_marks(Some(marks));
    let percent = least(&mut rig);
    assert_eq!(rig.control(shrink(1, percent)), Ok(Outcome::Shrinking));
    rig.engine.set_evacuation_rate(1 << 40);
    wait_until_shrunk(&mut rig);
    let space = rig.engine.space();
    let free = space.free - (8 << 20);
    assert!(free * 5 >= space.total, "{space:?}: the pool is low");
    assert!(free * 5 < space.total + (4 << 20), "{space:?}: more would have been possible");
}

#[test]
fn a_device_that_has_shrunk_grows_again() {
    let mut rig = open(&[8 * MIB, 24 * MIB], Tuning::default());
    let all = family_behind(&mut rig, 16 * MIB);
    assert_eq!(rig.control(shrink(1, 12 * MIB)), Ok(Outcome::Shrinking));
    let grow = Control::GrowDevice { device: 1, size: 24 << 20 };
    let refused = rig.control(grow.clone());
    assert!(matches!(refused, Err(MapperError::Invalid { field: "device", .. })), "{refused:?}");
    wait_until_shrunk(&mut rig);
    rig.media.devices[1].truncate(12 * MIB);
    rig.media.devices[1].resize(24 * MIB, 0xEE);
    assert_eq!(rig.control(grow), Ok(Outcome::Grown { extents: 192 }));
    assert_eq!(rig.pool.shrunk(), None);
    let big = rig.create("big", 24 << 20);
    let volume = rig.attach(big);
    let content = data(9, 14 * MIB);
    rig.write(&volume, 0, &content).unwrap();
    rig.flush(&volume).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    expect(&mut rig, &all);
    expect(&mut rig, &[(big, content)]);
    rig.check();
}

/// A client may have written what looks like a superblock where the new end will be. After a crash
/// before or after any write of the last superblock the pool is the one that it was.
#[test]
fn a_crash_between_the_last_writes_leaves_the_pool_whole() {
    let mut rig = open(&[24 * MIB], Tuning::default());
    let all = family_behind(&mut rig, 12 * MIB);
    let (new_end, old_end) = (12 * MIB - EXTENT, 24 * MIB - EXTENT);
    let place = Place::Memory;
    let mut planted = Superblock::decode(&rig.media.devices[0][..BLOCK], place).unwrap();
    let mut records = planted.devices.as_slice().to_vec();
    (records[0].extents, records[0].size) = (192, 12 << 20);
    planted.devices = blockd_mapper::format::superblock::DeviceTable::new(&records).unwrap();
    planted.generation += 1000;
    let mut page = Page::zeroed();
    planted.encode(&mut page);
    for at in [new_end, new_end + BLOCK] {
        rig.media.devices[0][at..at + BLOCK].copy_from_slice(&page.0);
    }
    rig.engine.submit(shrink(0, 12 * MIB));
    let mut states = Vec::new();
    for _ in 0..2_000 {
        while let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            let is_super = matches!(&command.op, IoOp::Write { offset, .. }
                if [0, BLOCK, new_end, new_end + BLOCK, old_end, old_end + BLOCK]
                    .contains(&usize::try_from(*offset).unwrap()));
            rig.engine.complete(command, Ok(()));
            if is_super {
                states.push(rig.media.clone());
            }
        }
        if extents_of(&rig, 0) == 192 {
            break;
        }
        rig.now += 100_000_000;
    }
    assert_eq!(extents_of(&rig, 0), 192);
    // The last superblock: two copies ahead, two pairs, two copies cleared.
    let mut smaller = 0;
    for (at, media) in states.into_iter().rev().take(12).enumerate() {
        let mut rig = Rig::open(media).unwrap_or_else(|error| panic!("state {at}: {error}"));
        let has_shrunk = extents_of(&rig, 0) == 192;
        smaller += u32::from(has_shrunk);
        assert!(!has_shrunk || !is_superblock(&rig.media, 0, old_end), "state {at}");
        assert!(!has_shrunk || !is_superblock(&rig.media, 0, old_end + BLOCK), "state {at}");
        expect(&mut rig, &all);
        wait_until_shrunk(&mut rig);
        rig.media.devices[0].truncate(12 * MIB);
        expect(&mut rig, &all);
        rig.check();
    }
    assert!((5..10).contains(&smaller), "{smaller} of the states have the new size");
}

/// Space that an idle volume holds for writes to come is taken back, also where it lies on both
/// sides of the new end.
#[test]
fn what_an_idle_volume_holds_behind_the_new_end_is_taken_back() {
    let mut shrunk = 0;
    for extents in 24..120 {
        let mut rig = open(&[16 * MIB], Tuning::default());
        let id = rig.create("idle", 8 << 20);
        let volume = rig.attach(id);
        let content = data(3, 6 * EXTENT);
        rig.write(&volume, 0, &content).unwrap();
        match rig.control(shrink(0, extents * EXTENT)) {
            Ok(outcome) => assert_eq!(outcome, Outcome::Shrinking),
            Err(MapperError::TooSmall { .. }) => continue,
            other => panic!("{extents} extents: {other:?}"),
        }
        wait_until_shrunk(&mut rig);
        assert_eq!(rig.read(&volume, 0, content.len()), content);
        rig.check();
        shrunk += 1;
    }
    assert!(shrunk > 10, "{shrunk} sizes were possible");
}

/// An operator may ask for it at any moment, also when a device has shrunk just now.
#[test]
fn that_a_device_keeps_its_size_can_be_asked_at_each_step_of_its_shrinking() {
    let (mut kept, mut unchanged) = (0, 0);
    for steps in 0.. {
        let mut rig = open(&[4 * MIB, 16 * MIB], Tuning::default());
        let id = rig.create("a", 8 << 20);
        let volume = rig.attach(id);
        rig.write(&volume, 0, &data(1, 4 * MIB)).unwrap();
        rig.control(shrink(1, 12 * MIB)).unwrap();
        let mut left = steps;
        while left > 0 && rig.engine.evacuation_status().device.is_some() {
            match rig.engine.poll(rig.now) {
                Some(mut command) => {
                    rig.media.run(&mut command);
                    rig.engine.complete(command, Ok(()));
                    left -= 1;
                }
                None => rig.now += 100_000_000,
            }
        }
        match rig.control(Control::KeepDevice { device: 1 }) {
            Ok(Outcome::Kept) => kept += 1,
            Ok(Outcome::Unchanged) => unchanged += 1,
            other => panic!("step {steps}: {other:?}"),
        }
        if left > 0 {
            break;
        }
    }
    assert!(kept > 0 && unchanged > 1, "{kept} {unchanged}");
}
