//! Refusals of an opening and their messages; its report; more space while open.

#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../common/mod.rs"]
mod common;
mod rings;

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::{Superblock, copy_offsets};
use blockd_mapper::format::{Place, VolumeName};
use blockd_mapper::geometry::Geometry;
use blockd_mapper::io::Page;
use blockd_mapper::open::{OpenMode, OpenOptions, Opening};
use blockd_mapper::plan::{ParkReason, Plan, Step};
use blockd_mapper::pool::Tuning;
use blockd_mapper::units::VolumeId;

use common::{Media, Rig};

const MIB: usize = 1 << 20;

/// Four copies per device: two at the front, two at the end.
fn copies(media: &Media, device: usize) -> Vec<usize> {
    let geometry = Geometry::new(64 << 10).unwrap();
    let offsets = copy_offsets(geometry, media.devices[device].len() as u64 / (64 << 10));
    let all = offsets.first_pair.into_iter().chain(offsets.second_pair);
    all.map(|offset| usize::try_from(offset).unwrap()).collect()
}

/// Rewrites every copy of the superblock.
fn edit(media: &mut Media, change: impl Fn(&mut Superblock)) {
    for device in 0..media.devices.len() {
        for at in copies(media, device) {
            let bytes = &media.devices[device][at..at + 4096];
            let mut superblock = Superblock::decode(bytes, Place::Memory).unwrap();
            change(&mut superblock);
            let mut page = Page::zeroed();
            superblock.encode(&mut page);
            media.devices[device][at..at + 4096].copy_from_slice(&page.0);
        }
    }
}

fn pool_with_data(sizes: &[usize]) -> (Media, Vec<u8>) {
    let mut rig = Rig::new(sizes);
    let id = rig.create("data", 4 << 20);
    let volume = rig.attach(id);
    let data: Vec<u8> = (0..251).cycle().take(2 * MIB).collect();
    rig.write(&volume, 0, &data).unwrap();
    rig.worker.detach(volume);
    assert_eq!(rig.control(Control::Close).unwrap(), Outcome::Closed);
    (rig.kill(), data)
}

fn refusal(media: Media) -> String {
    match Rig::open(media) {
        Ok(_) => panic!("the pool opened"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_missing_device_is_refused_by_its_identity() {
    let (mut media, _) = pool_with_data(&[16 * MIB, 8 * MIB]);
    media.devices.pop();
    let said = refusal(media);
    assert!(said.contains("device 1 of the pool is missing") && said.contains("0202"), "{said}");
}

#[test]
fn a_swapped_device_is_refused_by_name() {
    let (mut media, _) = pool_with_data(&[16 * MIB, 8 * MIB]);
    let mut other = Media::new(&[8 * MIB]);
    let options = CreateOptions { pool_id: [3; 16], ..other.options() };
    let mut creating = Creating::new(&options).unwrap();
    while let Some(mut command) = creating.poll() {
        other.run(&mut command);
        creating.complete(command, Ok(()));
    }
    media.devices[1] = other.devices.remove(0);
    let said = refusal(media);
    assert!(said.contains("disk") && said.contains("belongs to pool"), "{said}");
}

#[test]
fn the_same_device_given_twice_is_refused() {
    let (mut media, _) = pool_with_data(&[16 * MIB, 8 * MIB]);
    media.devices[1] = media.devices[0].clone();
    assert!(refusal(media).contains("is the same device as another one"));
}

#[test]
fn a_shrunk_device_is_refused_with_both_sizes() {
    let (mut media, _) = pool_with_data(&[16 * MIB, 8 * MIB]);
    media.devices[1].truncate(7 * MIB);
    let said = refusal(media);
    assert!(said.contains("has shrunk from 8388608 to 7340032 bytes"), "{said}");
}

#[test]
fn devices_in_another_order_are_the_same_pool() {
    let (mut media, data) = pool_with_data(&[16 * MIB, 8 * MIB]);
    media.devices.swap(0, 1);
    let mut rig = Rig::open(media).unwrap();
    let id = rig.engine.volumes()[0].id;
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, data.len()), data);
    rig.check();
}

#[test]
fn a_newer_format_is_refused_with_its_version() {
    let (mut media, _) = pool_with_data(&[16 * MIB]);
    edit(&mut media, |superblock| superblock.major = 7);
    let said = refusal(media);
    assert!(said.contains("format 7.0"), "{said}");
}

#[test]
fn an_unknown_incompatible_feature_is_refused_by_its_bit() {
    let (mut media, _) = pool_with_data(&[16 * MIB]);
    edit(&mut media, |superblock| superblock.incompat = 1 << 9);
    let said = refusal(media);
    assert!(said.contains("0x200"), "{said}");
}

#[test]
fn an_unknown_ro_compatible_feature_opens_to_read_only() {
    let (mut media, data) = pool_with_data(&[16 * MIB]);
    edit(&mut media, |superblock| superblock.ro_compat = 1 << 3);
    assert!(refusal(media.clone()).contains("0x8"));
    let options = OpenOptions { mode: OpenMode::ReadOnly, ..media.open_options() };
    let before = media.devices[0].clone();
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.engine.volumes()[0].id;
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, data.len()), data);
    assert_eq!(rig.write(&volume, 0, &data), Err(MapperError::ReadOnly));
    let create = Control::Create { name: "x".into(), size: 4096, block_size: 512 };
    assert_eq!(rig.control(create), Err(MapperError::ReadOnly));
    assert!(rig.kill().devices[0] == before, "a read-only open wrote to the media");
}

#[test]
fn an_empty_device_is_no_pool() {
    let said = refusal(Media::new(&[16 * MIB]));
    assert!(said.contains("superblock"), "{said}");
    let said = refusal(Media::new(&[64 << 10]));
    assert!(said.contains("too small"), "{said}");
}

#[test]
fn any_three_superblock_copies_may_be_lost() {
    let (media, data) = pool_with_data(&[16 * MIB]);
    for keep in 0..4 {
        let mut damaged = media.clone();
        for (n, at) in copies(&media, 0).into_iter().enumerate() {
            if n != keep {
                damaged.devices[0][at + 100] ^= 1;
            }
        }
        let mut rig = Rig::open(damaged).unwrap();
        let id = rig.engine.volumes()[0].id;
        let volume = rig.attach(id);
        assert_eq!(rig.read(&volume, 0, data.len()), data);
        rig.check();
    }
}

#[test]
fn bad_options_name_the_field() {
    let media = Media::new(&[16 * MIB]);
    let refused = |change: &dyn Fn(&mut OpenOptions)| {
        let mut options = media.open_options();
        change(&mut options);
        Opening::new(options).unwrap_err().to_string()
    };
    assert!(refused(&|o| o.open_id = 0).contains("open_id"));
    assert!(refused(&|o| o.tuning.workers = 64).contains("workers is 64"));
    assert!(refused(&|o| o.devices.clear()).contains("devices is 0"));
    let refused = |change: &dyn Fn(&mut CreateOptions)| {
        let mut options = media.options();
        change(&mut options);
        Creating::new(&options).unwrap_err().to_string()
    };
    assert!(refused(&|o| o.extent_size = 5000).contains("extent_size is 5000"));
    assert!(refused(&|o| o.wal_size = Some(1)).contains("wal_size is 1"));
    assert!(refused(&|o| o.devices[0].size = 1 << 20).contains("at least"));
    assert!(refused(&|o| o.devices[0].block_size = 3).contains("logical block of 3 bytes"));
    assert!(refused(&|o| o.devices.push(o.devices[0].clone())).contains("identity of another"));
}

#[test]
fn bad_commands_name_the_value_and_change_nothing() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("a", 1 << 20);
    let before = rig.engine.volumes();
    let create =
        |name: &str, size, block_size| Control::Create { name: name.into(), size, block_size };
    for (control, words) in [
        (create("b", 0, 512), "size is 0"),
        (create("b", 1000, 512), "size is 1000"),
        (create("b", u64::MAX, 512), "size is 18446744073709551615"),
        (create("b", 4096, 100), "block_size is 100"),
        (create("b", 4096, 256), "block_size is 256"),
        (create("", 4096, 512), "volume name"),
        (create("a/b", 4096, 512), "volume name"),
        (create("a\0b", 4096, 512), "volume name"),
        (create("node-x", 4096, 512), "volume name"),
        (create(&"x".repeat(129), 4096, 512), "volume name"),
        (create("a", 2 << 20, 512), "exists with size in bytes 1048576, asked for 2097152"),
        (Control::Resize { volume: id, size: 5000 }, "size is 5000"),
        (Control::Resize { volume: id, size: 512 }, "size is 512"),
        (Control::Delete { volume: VolumeId(99) }, "99"),
        (Control::Clone { source: id, name: "c".into(), size: None }, "is not a snapshot"),
        (Control::Rollback { volume: id, snapshot: id }, "is not a snapshot"),
        (Control::Rename { volume: id, name: "a/b".into() }, "volume name"),
        (Control::Rename { volume: VolumeId(99), name: "b".into() }, "99"),
        (Control::GrowDevice { device: 3, size: 1 << 30 }, "device is 3"),
        (Control::GrowDevice { device: 0, size: 1 }, "no smaller"),
    ] {
        let said = rig.control(control.clone()).unwrap_err().to_string();
        assert!(said.contains(words), "{control:?}: {said}");
    }
    assert_eq!(rig.engine.volumes(), before);
    assert_eq!(rig.control(create("a", 1 << 20, 512)), Ok(Outcome::Existing(id)));
    assert!(VolumeName::new("ok").is_ok());
    rig.check();
}

#[test]
fn a_device_grows_and_another_joins_while_the_pool_is_open() {
    let mut rig = Rig::new(&[8 * MIB]);
    let id = rig.create("a", 64 << 20);
    let volume = rig.attach(id);
    let total = rig.engine.space().total;
    rig.media.devices[0].resize(16 * MIB, 0xEE);
    let grown = rig.control(Control::GrowDevice { device: 0, size: 16 << 20 }).unwrap();
    assert_eq!(grown, Outcome::Grown { extents: 128 });
    assert_eq!(
        rig.control(Control::GrowDevice { device: 0, size: 16 << 20 }),
        Ok(Outcome::Unchanged)
    );
    rig.media.devices.push(vec![0xEE; 8 * MIB]);
    let device = NewDevice {
        name: "disk1".into(),
        uuid: [0x55; 16],
        size: 8 << 20,
        block_size: 512,
        class: 1,
    };
    let add = Control::AddDevice { handle: 1, device };
    assert_eq!(rig.control(add.clone()).unwrap(), Outcome::Grown { extents: 128 });
    assert_eq!(rig.control(add), Ok(Outcome::Unchanged));
    assert_eq!(rig.engine.space().total, total + (16 << 20));
    let data: Vec<u8> = (0..253).cycle().take(18 * MIB).collect();
    rig.write(&volume, 0, &data).unwrap();
    assert_eq!(rig.read(&volume, 0, data.len()), data);
    rig.flush(&volume).unwrap();
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, data.len()), data);
    rig.check();
}

#[test]
fn a_full_pool_parks_allocating_requests_and_can_be_emptied() {
    let mut rig = Rig::new(&[8 * MIB]);
    let id = rig.create("a", 64 << 20);
    let volume = rig.attach(id);
    let mut at = 0;
    let block = vec![0x5A; 64 << 10];
    let mut plan = Plan::with_capacity(64);
    loop {
        rig.settle();
        match rig.worker.write(&volume, at, 64 << 10, false, &mut plan).unwrap() {
            Step::Park(reason) => {
                assert!(matches!(reason, ParkReason::Space | ParkReason::Metadata), "{reason:?}");
                rig.settle();
                if rig.engine.space().free == 0 && rig.engine.space().reserved == 0 {
                    break;
                }
            }
            _ => {
                rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
                at += 64 << 10;
            }
        }
    }
    assert!(at >= 4 << 20, "only {at} bytes fit");
    rig.write(&volume, 0, &block).unwrap();
    rig.flush(&volume).unwrap();
    let snapshot = rig.control(Control::Snapshot { source: id, name: "s".into() });
    if let Ok(Outcome::Created(snapshot)) = snapshot {
        rig.control(Control::Delete { volume: snapshot }).unwrap();
    }
    rig.discard(&volume, 0, 8 * MIB);
    rig.flush(&volume).unwrap();
    rig.check();
    rig.write(&volume, 0, &block).unwrap();
    assert_eq!(rig.read(&volume, 0, block.len()), block);
    rig.check();
}

#[test]
fn workers_are_limited_and_names_come_back() {
    let media = {
        let mut media = Media::new(&[16 * MIB]);
        media.create();
        media
    };
    let tuning = Tuning { workers: 1, ..Tuning::default() };
    let rig =
        Rig::open_with(media.clone(), OpenOptions { tuning, ..media.open_options() }).unwrap();
    assert!(matches!(rig.pool.worker(), Err(MapperError::Limit { what: "workers", limit: 1 })));
    let pool = Arc::clone(&rig.pool);
    drop(rig);
    assert_eq!(pool.worker().unwrap().slot(), 0);
}

/// A guest may write pages that look like this pool's superblock, far newer.
#[test]
fn a_superblock_planted_by_a_client_is_data() {
    for front in [true, false] {
        let (mut media, _) = pool_with_data(&[12 * MIB, 21 * MIB]);
        let mut planted = Page::zeroed();
        let at = copies(&media, 0)[0];
        let bytes = &media.devices[0][at..at + 4096];
        let genuine = Superblock::decode(bytes, Place::Memory).unwrap();
        Superblock { generation: 1 << 40, ..genuine }.encode(&mut planted);
        // Every extent for data may hold the page; log and reserve come before them.
        let keep: Vec<Vec<usize>> = (0..2).map(|device| copies(&media, device)).collect();
        let metadata = 33 << 16;
        for (device, keep) in keep.iter().enumerate() {
            let start = if device == 0 { metadata } else { 1 << 16 };
            let end = media.devices[device].len() / (64 << 10) * (64 << 10) - (64 << 10);
            for at in (start..end).step_by(64 << 10) {
                media.devices[device][at..at + 4096].copy_from_slice(&planted.0);
            }
            if !front {
                for &at in keep.iter().filter(|&&at| at < 8192) {
                    media.devices[device][at] ^= 0xff;
                }
            }
        }
        let rig = Rig::open(media).unwrap();
        assert_eq!(rig.engine.volumes()[0].name, "data");
    }
}
