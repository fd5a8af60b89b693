//! Rows of docs/REQUIREMENTS.md that have no other test: sizes to the byte, space used and granted.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Outcome, Use, UsedExtent};
use blockd_mapper::plan::{ParkReason, Plan, Step};
use blockd_mapper::units::DeviceIndex;
use common::Rig;

const MIB: usize = 1 << 20;
const EXTENT: u64 = 64 << 10;

#[test]
fn a_hundred_small_volumes_share_a_small_pool() {
    let mut rig = Rig::new(&[64 * MIB]);
    for n in 0..100_u8 {
        let id = rig.create(&format!("v{n}"), 8 << 20);
        let volume = rig.attach(id);
        rig.write(&volume, 0, &[n; 4096]).unwrap();
        rig.worker.detach(volume);
    }
    for info in rig.engine.volumes() {
        assert_eq!((info.size, info.mapped, info.valid), (8 << 20, EXTENT, 4096));
        let volume = rig.attach(info.id);
        let number: u8 = info.name[1..].parse().unwrap();
        assert_eq!(rig.read(&volume, 0, 4096), [number; 4096]);
    }
    rig.check();
}

#[test]
fn sizes_are_exact_to_the_block() {
    let mut rig = Rig::new(&[16 * MIB]);
    let sizes =
        [512, 1024, 4096 + 512, 38_797_312, (1 << 30) - 512, 1 << 30, (1 << 40) + 512, 1 << 50];
    for size in sizes {
        let id = rig.create(&format!("s{size}"), size);
        let volume = rig.attach(id);
        assert_eq!(volume.size(), size);
        rig.write(&volume, size - 512, &[7; 512]).unwrap();
        assert_eq!(rig.read(&volume, size - 512, 512), [7; 512]);
        let mut plan = Plan::with_capacity(64);
        assert!(rig.worker.read(&volume, size, 512, &mut plan).is_err());
        rig.worker.detach(volume);
    }
    rig.check();
    let listed: Vec<u64> = rig.engine.volumes().iter().map(|v| v.size).collect();
    assert_eq!(listed, sizes);
}

#[test]
fn a_volume_takes_its_written_extents_and_at_most_a_quantum() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 40);
    let volume = rig.attach(id);
    rig.write(&volume, 3 << 30, &vec![1; MIB]).unwrap();
    let info = rig.engine.volumes().remove(0);
    assert_eq!((info.mapped, info.valid), (1 << 20, 1 << 20));
    // A quantum of 64 extents, and the half of one that a refill ahead of need may add.
    assert!(info.reserved <= 96 * EXTENT, "{info:?}");
    rig.check();
}

#[test]
fn within_a_grant_no_write_needs_the_engine() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    for n in 0..64 {
        rig.write(&volume, n * EXTENT, &[1; 4096]).unwrap();
    }
    let granted = rig.engine.volumes()[0].reserved / EXTENT;
    assert!(granted >= 32, "only {granted} extents are granted");
    let mut plan = Plan::with_capacity(64);
    for n in 64..64 + granted {
        let step = rig.worker.write(&volume, n * EXTENT, 4096, false, &mut plan).unwrap();
        assert_eq!(step, Step::Issue { covered: 4096 }, "write {n}");
        rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
    }
    let step = rig.worker.write(&volume, 1 << 29, 4096, false, &mut plan).unwrap();
    assert_eq!(step, Step::Park(ParkReason::Space));
    rig.check();
}

#[test]
fn an_orderly_close_leaves_nothing_to_replay() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &vec![5; MIB]).unwrap();
    rig.worker.detach(volume);
    assert_eq!(rig.control(Control::Close).unwrap(), Outcome::Closed);
    let rig = Rig::open(rig.kill()).unwrap();
    let report = &rig.report;
    assert!(report.was_clean, "{report:?}");
    assert_eq!((report.log_blocks, report.log_changes, report.ring_changes), (0, 0, 0));
}

#[test]
fn opening_twice_without_a_close_replays_the_same() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 8 << 20);
    let volume = rig.attach(id);
    let data: Vec<u8> = (0..199).cycle().take(MIB).collect();
    rig.write(&volume, 12_288, &data).unwrap();
    rig.flush(&volume).unwrap();
    let first = rig.kill();
    let mut once = Rig::open(first.clone()).unwrap();
    let mut twice = Rig::open(Rig::open(first).unwrap().kill()).unwrap();
    for rig in [&mut once, &mut twice] {
        let volume = rig.attach(id);
        assert_eq!(rig.read(&volume, 12_288, MIB), data);
        rig.check();
    }
    assert_eq!(once.engine.volumes(), twice.engine.volumes());
}

#[test]
fn a_snapshot_sends_the_unused_reserve_back() {
    let mut rig = Rig::new(&[64 * MIB]);
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; 4096]).unwrap();
    assert!(rig.engine.volumes()[0].reserved > 0);
    rig.control(Control::Snapshot { source: id, name: "s".into() }).unwrap();
    let infos = rig.engine.volumes();
    assert_eq!((infos[0].reserved, infos[1].reserved), (0, 0));
    assert_eq!((infos[1].mapped, infos[1].shared()), (EXTENT, Some(EXTENT)));
    rig.check();
}

#[test]
fn a_volume_as_large_as_the_free_space_is_taken_as_it_is() {
    let mut rig = Rig::new(&[24 * MIB]);
    let free = rig.engine.space().free;
    let id = rig.create("all", free);
    assert_eq!(rig.engine.volumes()[0].size, free);
    let volume = rig.attach(id);
    rig.write(&volume, free - 4096, &[1; 4096]).unwrap();
    rig.check();
}

#[test]
fn a_full_pool_that_grows_goes_on() {
    let mut rig = Rig::new(&[8 * MIB]);
    let id = rig.create("a", 64 << 20);
    let volume = rig.attach(id);
    let (mut plan, mut written) = (Plan::with_capacity(64), 0);
    let block = vec![3; 64 << 10];
    let parked_at = loop {
        rig.settle();
        let probe = rig.worker.write(&volume, written, EXTENT, false, &mut plan).unwrap();
        if matches!(probe, Step::Park(_)) && rig.engine.space().free == 0 {
            break written;
        }
        if plan.is_armed() {
            // Not this one: the write below does it with its data.
            rig.worker
                .complete(&volume, &mut plan, Err(blockd_mapper::io::IoError::Media))
                .unwrap_err();
        }
        rig.write(&volume, written, &block).unwrap();
        written += EXTENT;
    };
    let events = rig.pool.events();
    rig.media.devices[0].resize(16 * MIB, 0xEE);
    rig.control(Control::GrowDevice { device: 0, size: 16 << 20 }).unwrap();
    assert!(rig.pool.events() > events && rig.pool.take_wakeups() != 0, "no worker was woken");
    rig.write(&volume, parked_at, &block).unwrap();
    let all = rig.read(&volume, 0, usize::try_from(parked_at + EXTENT).unwrap());
    assert!(all.iter().all(|&b| b == 3));
    rig.check();
}

/// Row: H11.
#[test]
fn volumes_are_found_by_the_places_of_their_extents() {
    let mut rig = Rig::new(&[32 * MIB, 32 * MIB]);
    let ids = ["a", "b"].map(|name| rig.create(name, 1 << 30));
    for (at, id) in ids.into_iter().enumerate() {
        let volume = rig.attach(id);
        rig.write(&volume, 0, &vec![7; (at + 1) * 10 * (64 << 10)]).unwrap();
        rig.worker.detach(volume);
    }
    let mapped: Vec<_> = rig.pool.volume_extents();
    let of = |id| {
        let mine = |one: &&UsedExtent| one.usage == Use::Mapped(id);
        mapped.iter().filter(mine).map(|one| (one.device, one.extent, 1)).collect::<Vec<_>>()
    };
    for (at, id) in ids.into_iter().enumerate() {
        assert_eq!(rig.pool.who_maps(&of(id)), [(id, 10 * (at as u64 + 1))]);
        assert_eq!(rig.pool.who_maps(&of(id)[3..5]), [(id, 2)]);
    }
    let all = [(DeviceIndex(0), 0, 1 << 40), (DeviceIndex(1), 0, 1 << 40)];
    assert_eq!(rig.pool.who_maps(&all), [(ids[0], 10), (ids[1], 20)]);
    assert_eq!(rig.pool.who_maps(&[]), []);
    // Offsets beyond all devices.
    assert_eq!(rig.pool.who_maps(&[(DeviceIndex(0), 1 << 30, 5)]), []);
}
