//! The devices that the extents of a volume come from.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::NewDevice;
use blockd_mapper::engine::{Control, Outcome, STRIPE_BYTES, Use};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::{PLACEMENT, Superblock};
use blockd_mapper::io::IoError;
use blockd_mapper::plan::{Plan, Step};
use blockd_mapper::space::{DeviceMark, Placement, VolumeSettings};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;

use common::{Media, Rig};

const MIB: usize = 1 << 20;
const EXTENT: u64 = 64 << 10;

/// The placement of a volume that is pinned to a device which was in the pool from the start.
fn pin(device: u8) -> Placement {
    Placement::Pin(DeviceMark::of(&[device + 1; 16]))
}

fn place(rig: &mut Rig, volume: VolumeId, placement: Placement) -> Result<Outcome, MapperError> {
    let settings = VolumeSettings { placement, ..settings_of(rig, volume) };
    rig.control(Control::Configure { volume, settings })
}

fn settings_of(rig: &Rig, volume: VolumeId) -> VolumeSettings {
    rig.engine.volumes().into_iter().find(|one| one.id == volume).unwrap().settings
}

/// A new volume with a placement.
fn placed(rig: &mut Rig, name: &str, size: usize, placement: Placement) -> VolumeId {
    let id = rig.create(name, size as u64);
    if placement != Placement::Fill {
        place(rig, id, placement).unwrap();
    }
    id
}

/// Writes whole mebibytes in sequence, with content of their own.
fn write(rig: &mut Rig, volume: &Attachment, mebibytes: std::ops::Range<usize>) {
    for at in mebibytes {
        let byte = u8::try_from(at % 251 + 1).unwrap();
        rig.write(volume, (at * MIB) as u64, &vec![byte; MIB]).unwrap();
    }
    rig.flush(volume).unwrap();
}

fn expect(rig: &mut Rig, volume: &Attachment, mebibytes: std::ops::Range<usize>) {
    for at in mebibytes {
        let byte = u8::try_from(at % 251 + 1).unwrap();
        let found = rig.read(volume, (at * MIB) as u64, MIB);
        assert!(found.iter().all(|found| *found == byte), "MiB {at}");
    }
}

/// The devices that a read takes, in the order of what is read, each once for neighbours.
fn devices(rig: &mut Rig, volume: &Attachment, offset: usize, len: usize) -> Vec<u8> {
    let (mut plan, mut found) = (Plan::with_capacity(64), Vec::new());
    let (mut at, end) = (offset as u64, (offset + len) as u64);
    while at < end {
        match rig.worker.read(volume, at, end - at, &mut plan).unwrap() {
            Step::Issue { covered } => {
                found.extend(plan.ops().iter().map(|op| op.device.0));
                rig.worker.complete(volume, &mut plan, Ok(())).unwrap();
                at += covered;
            }
            other => panic!("{other:?}"),
        }
    }
    found.dedup();
    found
}

/// Extents that a volume maps, by device.
fn mapped(rig: &Rig, volume: VolumeId) -> Vec<u64> {
    let mut counts = vec![0; rig.media.devices.len()];
    let extents = rig.pool.volume_extents().into_iter();
    for one in extents.filter(|one| one.usage == Use::Mapped(volume)) {
        counts[usize::from(one.device.0)] += 1;
    }
    counts
}

/// Extents that nothing uses yet, by device.
fn free(rig: &Rig) -> Vec<u64> {
    let sizes = rig.media.devices.iter().map(|device| device.len() as u64 / EXTENT);
    let mut free: Vec<u64> = sizes.collect();
    for used in rig.engine.metadata_extents() {
        free[usize::from(used.device.0)] -= 1;
    }
    free
}

fn superblock(media: &Media) -> Superblock {
    Superblock::decode(&media.devices[0][..4096], Place::Memory).unwrap()
}

#[test]
fn stripes_of_a_spread_volume_take_all_devices_in_proportion_to_their_free_space() {
    let mut rig = Rig::new(&[32 * MIB, 40 * MIB, 56 * MIB]);
    let id = placed(&mut rig, "a", 128 * MIB, Placement::Spread);
    let volume = rig.attach(id);
    let free = free(&rig);
    write(&mut rig, &volume, 0..64);
    let stripes: Vec<u8> = (0..64)
        .map(|at| {
            let found = devices(&mut rig, &volume, at * MIB, MIB);
            assert_eq!(found.len(), 1, "stripe {at} lies on one device: {found:?}");
            found[0]
        })
        .collect();
    assert!(stripes.windows(2).all(|two| two[0] != two[1]), "{stripes:?}");
    assert_eq!(STRIPE_BYTES, MIB as u64);
    let mapped = mapped(&rig, id);
    let share = 1024.0 / free.iter().sum::<u64>() as f64;
    for (mapped, free) in mapped.iter().zip(&free) {
        let ratio = *mapped as f64 / *free as f64 / share;
        assert!((0.9..1.1).contains(&ratio), "{mapped} of {free} extents, {ratio}");
    }
    expect(&mut rig, &volume, 0..64);
    rig.check();
}

#[test]
fn a_device_without_space_below_is_passed_over_while_another_has_extents() {
    for placement in [Placement::Fill, Placement::Spread, pin(0)] {
        let mut rig = Rig::new(&[16 * MIB, 8 * MIB]);
        let id = placed(&mut rig, "a", 24 * MIB, placement);
        let volume = rig.attach(id);
        write(&mut rig, &volume, 0..1);
        let before = mapped(&rig, id);
        // One write is under way meanwhile, and ends after the next one.
        let (mut plan, mut early) = (Plan::with_capacity(64), Plan::with_capacity(64));
        let (mut at, mut failed) = (MIB as u64, 0);
        let issued = rig.worker.write(&volume, 8 * MIB as u64, EXTENT, false, &mut early).unwrap();
        assert!(matches!(issued, Step::Issue { .. }), "{issued:?}");
        let is_full = |plan: &Plan| plan.ops().iter().any(|op| op.device.0 == 0);
        rig.engine.set_full_below(&[0]);
        rig.write(&volume, 9 * MIB as u64, &[9; 4096]).unwrap();
        if is_full(&early) {
            rig.worker.complete(&volume, &mut early, Err(IoError::NoSpace)).unwrap_err();
        } else {
            rig.worker.complete(&volume, &mut early, Ok(())).unwrap();
        }
        while at < 4 * MIB as u64 {
            match rig.worker.write(&volume, at, EXTENT, false, &mut plan).unwrap() {
                Step::Issue { covered } => {
                    let result = if is_full(&plan) { Err(IoError::NoSpace) } else { Ok(()) };
                    match rig.worker.complete(&volume, &mut plan, result) {
                        Ok(_) => at += covered,
                        Err(error) => {
                            failed += 1;
                            assert!(failed < 100, "{placement:?} at {at}: {error}");
                        }
                    }
                }
                Step::Park(_) => rig.settle(),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((failed, mapped(&rig, id)[0]), (0, before[0]), "{placement:?}");
        write(&mut rig, &volume, 1..12);
        assert!(mapped(&rig, id)[0] > before[0], "{placement:?}: the other one has none left");
        expect(&mut rig, &volume, 0..12);
        rig.check();
    }
}

#[test]
fn a_long_read_of_a_spread_volume_takes_both_devices() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let (filled, spread) = (rig.create("f", 16 << 20), rig.create("s", 16 << 20));
    place(&mut rig, spread, Placement::Spread).unwrap();
    for (id, changes) in [(filled, 0..=0), (spread, 5..=7)] {
        let volume = rig.attach(id);
        write(&mut rig, &volume, 0..8);
        // Neighbours on one device count once.
        let found = devices(&mut rig, &volume, 0, 8 * MIB);
        assert!(changes.contains(&(found.len() - 1)), "{id}: {found:?}");
    }
    rig.check();
}

#[test]
fn volumes_that_are_written_by_turns_are_each_spread_over_all_devices() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let ids = ["a", "b"].map(|name| placed(&mut rig, name, 16 * MIB, Placement::Spread));
    let volumes = ids.map(|id| rig.attach(id));
    for at in 0..10 {
        for volume in &volumes {
            write(&mut rig, volume, at..at + 1);
        }
    }
    for id in ids {
        let mapped = mapped(&rig, id);
        assert!(mapped.iter().all(|count| (64..=96).contains(count)), "{id}: {mapped:?}");
    }
    rig.check();
}

#[test]
fn a_spread_volume_takes_all_that_there_is() {
    let mut rig = Rig::new(&[16 * MIB, 8 * MIB, 24 * MIB]);
    let id = placed(&mut rig, "a", 64 * MIB, Placement::Spread);
    let volume = rig.attach(id);
    let whole = usize::try_from(free(&rig).iter().sum::<u64>() * EXTENT).unwrap() / MIB - 2;
    write(&mut rig, &volume, 0..whole);
    expect(&mut rig, &volume, 0..whole);
    rig.check();
}

#[test]
fn a_filling_volume_takes_one_device_after_the_other() {
    let mut rig = Rig::new(&[16 * MIB, 16 * MIB, 32 * MIB]);
    let id = placed(&mut rig, "a", 64 * MIB, Placement::Fill);
    let volume = rig.attach(id);
    write(&mut rig, &volume, 0..30);
    assert_eq!(devices(&mut rig, &volume, 0, 30 * MIB), [0, 1, 2]);
    assert_eq!(superblock(&rig.media).compat & PLACEMENT, 0, "no volume has a placement");
    rig.check();
}

#[test]
fn a_pinned_volume_lies_on_its_device_until_that_is_full_and_then_elsewhere_too() {
    let mut rig = Rig::new(&[32 * MIB, 16 * MIB, 32 * MIB]);
    let (id, other) = (placed(&mut rig, "a", 48 * MIB, pin(1)), rig.create("b", 8 << 20));
    let volume = rig.attach(id);
    let there = free(&rig)[1];
    write(&mut rig, &volume, 0..12);
    assert_eq!(devices(&mut rig, &volume, 0, 12 * MIB), [1]);
    // Others are not drawn to that device.
    let beside = rig.attach(other);
    write(&mut rig, &beside, 0..2);
    assert_eq!(devices(&mut rig, &beside, 0, 2 * MIB), [0]);
    write(&mut rig, &volume, 12..36);
    let found = mapped(&rig, id);
    assert_eq!((found[1], found[1] + found[0] + found[2]), (there, 36 * 16), "{found:?}");
    expect(&mut rig, &volume, 0..36);
    // Space that is freed there is taken again.
    rig.discard(&volume, 0, 4 * MIB);
    rig.flush(&volume).unwrap();
    rig.check();
    let before = mapped(&rig, id)[1];
    write(&mut rig, &volume, 40..46);
    let after = mapped(&rig, id)[1];
    assert!(after > before, "{before} extents, then {after}");
    rig.check();
}

#[test]
fn placements_are_durable_and_others_of_the_settings_stay() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let (spread, pinned) = (rig.create("s", 32 << 20), rig.create("p", 32 << 20));
    let limits = VolumeSettings { iops: 500, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: pinned, settings: limits }).unwrap();
    assert_eq!(superblock(&rig.media).compat & PLACEMENT, 0);
    let outcome = place(&mut rig, pinned, pin(1)).unwrap();
    assert_eq!(outcome, Outcome::Configured { before: limits });
    assert_eq!(place(&mut rig, pinned, pin(1)).unwrap(), Outcome::Unchanged);
    assert_ne!(superblock(&rig.media).compat & PLACEMENT, 0);
    place(&mut rig, spread, Placement::Spread).unwrap();
    // The process dies, or the power fails.
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(settings_of(&rig, pinned), VolumeSettings { placement: pin(1), ..limits });
    assert_eq!(settings_of(&rig, spread).placement, Placement::Spread);
    let (one, two) = (rig.attach(spread), rig.attach(pinned));
    write(&mut rig, &one, 0..8);
    write(&mut rig, &two, 0..4);
    assert_eq!(devices(&mut rig, &one, 0, 8 * MIB).len(), 8);
    assert_eq!(devices(&mut rig, &two, 0, 4 * MIB), [1]);
    // A snapshot has no settings, and neither has a clone that is made of it.
    let snapshot = Control::Snapshot { source: pinned, name: "x".to_owned() };
    let Outcome::Created(snapshot) = rig.control(snapshot).unwrap() else { panic!() };
    let clone = Control::Clone { source: snapshot, name: "c".to_owned(), size: None };
    let Outcome::Created(clone) = rig.control(clone).unwrap() else { panic!() };
    assert_eq!(settings_of(&rig, clone), VolumeSettings::default());
    rig.control(Control::Close).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(settings_of(&rig, pinned).placement, pin(1));
    // Copies of shared extents lie where the volume's others do.
    let two = rig.attach(pinned);
    write(&mut rig, &two, 0..4);
    assert_eq!(mapped(&rig, pinned)[0], 0);
    rig.check();
}

#[test]
fn another_placement_counts_from_the_next_write_on_and_an_unknown_device_is_refused() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let id = rig.create("a", 32 << 20);
    let settings = VolumeSettings { thick: true, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: id, settings }).unwrap();
    let volume = rig.attach(id);
    write(&mut rig, &volume, 0..3);
    let before = settings_of(&rig, id);
    let refused = place(&mut rig, id, pin(2)).unwrap_err();
    assert!(matches!(refused, MapperError::Invalid { field: "placement", .. }), "{refused}");
    assert_eq!(settings_of(&rig, id), before);
    place(&mut rig, id, pin(1)).unwrap();
    write(&mut rig, &volume, 3..6);
    assert_eq!(devices(&mut rig, &volume, 0, 3 * MIB), [0], "what is there stays");
    assert_eq!(devices(&mut rig, &volume, 3 * MIB, 3 * MIB), [1]);
    place(&mut rig, id, Placement::Fill).unwrap();
    write(&mut rig, &volume, 6..9);
    assert_eq!(devices(&mut rig, &volume, 6 * MIB, 3 * MIB), [0]);
    expect(&mut rig, &volume, 0..9);
    rig.check();
}

fn remove(rig: &mut Rig, device: u8) {
    assert_eq!(rig.control(Control::RemoveDevice { device }), Ok(Outcome::Leaving));
    for _ in 0..2_000 {
        if rig.engine.evacuation_status().device.is_none() {
            return;
        }
        rig.now += 100_000_000;
        rig.settle();
    }
    panic!("it never ends: {:?}", rig.engine.evacuation_status());
}

#[test]
fn data_that_is_moved_off_a_device_goes_where_the_placement_has_it() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB, 32 * MIB]);
    let (pinned, spread) = (placed(&mut rig, "p", 8 * MIB, pin(2)), rig.create("s", 8 << 20));
    place(&mut rig, spread, pin(2)).unwrap();
    let volumes = [pinned, spread].map(|id| rig.attach(id));
    for volume in &volumes {
        write(&mut rig, volume, 0..8);
    }
    assert_eq!(mapped(&rig, pinned), [0, 0, 128]);
    place(&mut rig, pinned, pin(1)).unwrap();
    place(&mut rig, spread, Placement::Spread).unwrap();
    remove(&mut rig, 2);
    assert_eq!(mapped(&rig, pinned), [0, 128, 0]);
    let found = mapped(&rig, spread);
    assert!(found[0] >= 48 && found[1] >= 48, "{found:?}");
    for volume in &volumes {
        expect(&mut rig, volume, 0..8);
    }
    rig.check();
}

#[test]
fn a_pin_ends_with_its_device_and_never_means_another_one_in_its_place() {
    let mut rig = Rig::new(&[32 * MIB, 16 * MIB, 16 * MIB]);
    let id = placed(&mut rig, "a", 32 * MIB, pin(2));
    let volume = rig.attach(id);
    write(&mut rig, &volume, 0..4);
    remove(&mut rig, 2);
    assert_eq!(mapped(&rig, id)[2], 0);
    write(&mut rig, &volume, 4..6);
    let mut media = rig.kill();
    media.devices.remove(2);
    // Another device takes the place.
    let mut rig = Rig::open(media).unwrap();
    rig.media.devices.push(vec![0xEE; 16 * MIB]);
    let device = NewDevice {
        name: "new".to_owned(),
        uuid: [9; 16],
        size: 16 << 20,
        block_size: 512,
        class: 0,
    };
    let added = rig.control(Control::AddDevice { handle: 2, device }).unwrap();
    assert!(matches!(added, Outcome::Grown { .. }), "{added:?}");
    assert_eq!(rig.engine.devices().as_slice().len(), 3, "it has the place of the one that left");
    let volume = rig.attach(id);
    write(&mut rig, &volume, 6..10);
    assert_eq!(mapped(&rig, id)[2], 0, "{:?}", mapped(&rig, id));
    assert_eq!(settings_of(&rig, id).placement, pin(2), "it says what it was pinned to");
    // To keep it so is allowed, to set it anew is not.
    let settings = VolumeSettings { iops: 9, ..settings_of(&rig, id) };
    rig.control(Control::Configure { volume: id, settings }).unwrap();
    place(&mut rig, id, Placement::Fill).unwrap();
    assert!(place(&mut rig, id, pin(2)).is_err());
    place(&mut rig, id, Placement::Pin(DeviceMark::of(&[9; 16]))).unwrap();
    write(&mut rig, &volume, 10..12);
    assert_eq!(devices(&mut rig, &volume, 10 * MIB, 2 * MIB), [2]);
    expect(&mut rig, &volume, 0..12);
    rig.check();
}

#[test]
fn a_rebalance_leaves_what_is_pinned_on_its_device() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let [pinned, other] = [("a", pin(0)), ("b", Placement::Fill)]
        .map(|(name, placement)| placed(&mut rig, name, 12 * MIB, placement));
    for id in [pinned, other] {
        let volume = rig.attach(id);
        write(&mut rig, &volume, 0..12);
        rig.worker.detach(volume);
    }
    assert_eq!([pinned, other].map(|id| mapped(&rig, id)), [[192, 0], [192, 0]]);
    // It shares all that is pinned, and is not pinned itself.
    rig.control(Control::Snapshot { source: pinned, name: "s".to_owned() }).unwrap();
    assert_eq!(rig.control(Control::Rebalance { enabled: true }), Ok(Outcome::Rebalancing));
    for _ in 0..1000 {
        rig.now += 100_000_000;
        rig.settle();
    }
    let volume = rig.attach(pinned);
    assert_eq!(devices(&mut rig, &volume, 0, 12 * MIB), [0]);
    rig.worker.detach(volume);
    assert!(mapped(&rig, other)[1] > 150, "{:?}", mapped(&rig, other));
    for id in [pinned, other] {
        let volume = rig.attach(id);
        expect(&mut rig, &volume, 0..12);
        rig.worker.detach(volume);
    }
    rig.check();
}
