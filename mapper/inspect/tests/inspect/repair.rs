//! Repairs, and trees at random.

use blockd_inspect::dump::Lost;
use blockd_inspect::repair::{RepairOptions, repair};
use blockd_mapper::engine::Control;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Place;
use blockd_mapper::format::page::{self, PageExpect, PageStamp};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoOp, Page};
use blockd_mapper::units::{Epoch, SlotIndex, VolumeId};

use super::common::{BOOT, Media, POOL, Rig};
use super::differences;
use super::tools::{
    Cut, Fading, MIB, PAGE, SPAN, Target, checked, closed, contents, dumped, family, found, made,
    repaired, restored, scanned,
};

#[test]
fn repair_of_a_sound_pool_does_nothing_and_reports_that() {
    let rig = family(&[16 * MIB], 100 << 20);
    for mut media in [rig.media.clone(), closed(rig)] {
        let before = media.devices.clone();
        let report = repaired(&mut media, RepairOptions::default());
        assert!(!report.damaged && !report.changed && report.volumes == 3, "{report:?}");
        assert!(media.devices == before);
    }
}

#[test]
fn repair_keeps_sound_structures_and_names_lost_ones() {
    let mut losses = [0, 0];
    for size in [100 << 20, 66 << 30] {
        let rig = family(&[16 * MIB], size);
        for media in [rig.media.clone(), closed(rig)] {
            let expected = contents(media.clone());
            for spot in found(&media, b"BDpg") {
                for strict in [false, true] {
                    let mut bad = media.clone();
                    bad.devices[spot.0][spot.1 + 200] ^= 1;
                    if !checked(&bad).damaged {
                        continue;
                    }
                    let dry = RepairOptions { dry_run: true, strict, ..RepairOptions::default() };
                    let before = bad.devices.clone();
                    let would = repaired(&mut bad, dry);
                    assert!(bad.devices == before, "a dry run writes nothing");
                    let options = RepairOptions { strict, ..RepairOptions::default() };
                    let report = repaired(&mut bad, options);
                    assert!(report.changed, "{report:?}");
                    assert_eq!((&report.lost, &report.salvaged), (&would.lost, &would.salvaged));
                    let after = checked(&bad);
                    assert!(after.findings.is_empty() && after.clean, "{after:?}");
                    let found = contents(bad);
                    for (name, at) in differences(&expected, &found) {
                        losses[usize::from(strict)] += 1;
                        let reported = report.lost.iter().chain(&report.salvaged);
                        let named = |part: &Lost| {
                            let volume = name.starts_with(&format!("{} ", part.name));
                            part.volume.0 == 0 || (volume && part.range.contains(&at))
                        };
                        assert!(reported.clone().any(named), "{spot:?} {name} {at}: {report:?}");
                    }
                }
            }
        }
    }
    assert!(losses[0] < losses[1], "looking for pages brings something back: {losses:?}");
}

#[test]
fn repair_drops_the_delta_ring_of_this_boot_only_where_that_loss_is_accepted() {
    let mut media = family(&[16 * MIB], 100 << 20).kill();
    damage_index(&mut media, VolumeId(1));
    let before = media.devices.clone();
    let here = RepairOptions { boot_id: Some(BOOT), ..RepairOptions::default() };
    let would = repaired(&mut media, RepairOptions { dry_run: true, ..here });
    assert!(would.damaged && would.drops_ring, "{would:?}");
    let devices = media.open_options().devices;
    let refused = repair(&mut Target(&mut media), &devices, here, &mut |_| {});
    assert!(matches!(refused, Err(MapperError::RingLost { .. })), "{refused:?}");
    assert!(media.devices == before, "something was written");
    // The memory of another boot is gone.
    for options in [RepairOptions { accept_loss: true, ..here }, RepairOptions::default()] {
        let mut media = media.clone();
        let report = repaired(&mut media, options);
        assert!(report.changed && report.drops_ring == options.accept_loss, "{report:?}");
        assert!(checked(&media).clean);
    }
}

#[test]
fn repair_writes_to_no_extent_that_may_be_of_a_lost_leaf() {
    let mut media = closed(family(&[16 * MIB], 100 << 20));
    damage_index(&mut media, VolumeId(1));
    let before = media.devices[0].clone();
    let superblock = Superblock::decode(&before[..PAGE], Place::Memory).unwrap();
    let report = repaired(&mut media, RepairOptions { strict: true, ..RepairOptions::default() });
    assert!(!report.lost.is_empty());
    let size = usize::try_from(superblock.extent_size).unwrap();
    let first = usize::try_from(superblock.reserve_start.0).unwrap();
    let reserve = first..first + usize::try_from(superblock.reserve_extents).unwrap();
    let last = before.len() / size - 1;
    for (extent, (was, is)) in before.chunks(size).zip(media.devices[0].chunks(size)).enumerate() {
        let is_kept = extent == 0 || extent == last || reserve.contains(&extent);
        assert!(is_kept || was == is, "extent {extent} was written");
    }
}

#[test]
fn repair_follows_the_log_as_far_as_it_goes() {
    let media = family(&[16 * MIB], 100 << 20).kill();
    let mut repairs = 0;
    for spot in found(&media, b"BDwl") {
        let mut bad = media.clone();
        bad.devices[spot.0][spot.1 + 90] ^= 1;
        if checked(&bad).damaged {
            let report = repaired(&mut bad, RepairOptions::default());
            assert_eq!(report.lost.len(), 1, "{report:?}");
            assert!(report.lost[0].text.ends_with("changes behind it"), "{report:?}");
            assert!(checked(&bad).findings.is_empty());
            assert_eq!(contents(bad).len(), 3);
            repairs += 1;
        }
    }
    assert!(repairs > 0);
}

#[test]
fn repair_replays_the_log_over_volumes_of_a_lost_catalogue_page() {
    let mut rig = Rig::new(&[16 * MIB]);
    let [data, other] = ["data", "other"].map(|name| rig.create(name, 8 << 20));
    rig.control(Control::Checkpoint).unwrap();
    rig.control(Control::Delete { volume: other }).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let attached = rig.attach(data);
    rig.write(&attached, 0, &[1; PAGE]).unwrap();
    rig.flush(&attached).unwrap();
    made(&mut rig, Control::Snapshot { source: data, name: "snap".to_owned() });
    rig.control(Control::Rename { volume: data, name: "renamed".to_owned() }).unwrap();
    let mut media = rig.kill();
    let expected = contents(media.clone());
    let (device, at) = found(&media, b"BLOCKDsb")[0];
    let superblock = &media.devices[device][at..at + PAGE];
    let superblock = Superblock::decode(superblock, Place::Memory).unwrap();
    let root = usize::try_from(superblock.catalogue_root.address.0).unwrap() * PAGE;
    media.devices[0][root + 200] ^= 1;
    assert!(checked(&media).damaged);
    let report = repaired(&mut media, RepairOptions::default());
    let salvaged: Vec<_> = report.salvaged.iter().map(|part| part.name.as_str()).collect();
    assert_eq!((salvaged, report.lost.len()), (vec!["renamed", "other"], 1), "{report:?}");
    assert!(checked(&media).findings.is_empty());
    let found = contents(media);
    assert!(expected.iter().all(|volume| found.contains(volume)), "the log's changes are lost");
}

#[test]
fn a_device_without_a_superblock_is_identified_by_elimination_where_that_is_asked_for() {
    for is_clean in [true, false] {
        let rig = family(&[12 * MIB, 8 * MIB], 100 << 20);
        let mut media = if is_clean { closed(rig) } else { rig.kill() };
        let expected = contents(media.clone());
        let copies = found(&media, b"BLOCKDsb").into_iter().filter(|spot| spot.0 == 1);
        for (device, at) in copies.collect::<Vec<_>>() {
            media.devices[device][at..at + PAGE].fill(0);
        }
        assert!(Rig::open(media.clone()).is_err());
        // Any disk that is as large looks like it.
        let before = media.devices.clone();
        let devices = media.open_options().devices;
        let mut target = Target(&mut media);
        let refused = repair(&mut target, &devices, RepairOptions::default(), &mut |_| {});
        let Err(MapperError::Device { name, problem }) = refused else { panic!("{refused:?}") };
        assert!(name == "disk1" && problem.contains("--force"), "{problem}");
        let options = RepairOptions { dry_run: true, ..RepairOptions::default() };
        let would = repaired(&mut media, options);
        assert!(media.devices == before, "a disk that may be another's was written");
        let options = RepairOptions { force: true, ..RepairOptions::default() };
        let report = repaired(&mut media, options);
        assert!(would.damaged && !would.changed && report.damaged && report.changed, "{report:?}");
        for report in [&would, &report] {
            assert_eq!(report.identified.as_deref(), Some("disk1"));
            assert!(report.lost.is_empty() && report.salvaged.is_empty(), "{report:?}");
        }
        let after = checked(&media);
        assert!(after.findings.is_empty() && after.clean == is_clean, "{after:?}");
        assert!(contents(media) == expected, "{is_clean}");
    }
}

#[test]
fn a_repaired_pool_survives_power_lost_at_any_write_of_the_repair() {
    let media = closed(family(&[16 * MIB], 100 << 20));
    let expected = contents(media.clone());
    let spot = *found(&media, b"BLOCKDsb").first().unwrap();
    let mut bad = media;
    bad.devices[spot.0][spot.1 + 700] ^= 1;
    for writes in 0.. {
        let mut cut = bad.clone();
        let devices = cut.open_options().devices;
        let mut target = Cut { media: &mut cut, left: writes };
        let done = repair(&mut target, &devices, RepairOptions::default(), &mut |_| {}).is_ok();
        assert!(contents(cut) == expected, "after {writes} writes");
        if done {
            assert!(writes > 4);
            return;
        }
    }
}

#[test]
fn a_page_that_fails_while_the_new_trees_are_written_ends_a_repair_and_leaves_the_old_ones() {
    let media = closed(family(&[16 * MIB], 100 << 20));
    let mut rotten = media.clone();
    let superblock = *found(&rotten, b"BLOCKDsb").first().unwrap();
    rotten.devices[superblock.0][superblock.1 + 700] ^= 1;
    let mut salvaged = media;
    damage_index(&mut salvaged, VolumeId(1));
    for bad in [rotten, salvaged] {
        let mut whole = bad.clone();
        let without_fault = repaired(&mut whole, RepairOptions::default());
        let expected = contents(whole);
        let mut refused = 0;
        for spot in found(&bad, b"BDpg") {
            let mut media = bad.clone();
            let devices = media.open_options().devices;
            let mut target = Fading { media: &mut media, spot, has_faded: false };
            match repair(&mut target, &devices, RepairOptions::default(), &mut |_| {}) {
                Ok(report) => {
                    assert_eq!(report, without_fault);
                    assert!(contents(media) == expected, "{spot:?}");
                }
                Err(MapperError::Device { name, problem }) => {
                    assert!(name == "disk0" && problem.contains("repeat the repair"), "{problem}");
                    for (device, at) in found(&bad, b"BLOCKDsb") {
                        let copies = [&bad, &media].map(|of| &of.devices[device][at..at + PAGE]);
                        assert!(copies[0] == copies[1], "a superblock was written");
                    }
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(refused > 0);
    }
}

/// The stamps of sound leaf pages of a slot.
fn leaf_stamps(media: &Media, slot: u32) -> Vec<PageStamp> {
    let expect = PageExpect { sum: None, ..PageExpect::leaf(POOL, SlotIndex(slot), 0) };
    let opened = |(device, at): (usize, usize)| {
        let page = &media.devices[device][at..at + PAGE];
        Some(page::open(page, &expect, Place::Memory).ok()?.stamp)
    };
    found(media, b"BDpg\x01").into_iter().filter_map(opened).collect()
}

/// Damages the index pages of a volume's tree.
fn damage_index(media: &mut Media, volume: VolumeId) {
    let mut count = 0;
    for (device, at) in found(media, b"BDpg\x02") {
        let page = &mut media.devices[device][at..at + PAGE];
        if page[12..16] == volume.0.to_le_bytes() {
            page[200] ^= 1;
            count += 1;
        }
    }
    assert!(count > 0);
}

/// LSNs that were not durable are used again after power loss. The pages of a checkpoint that did
/// not end stay on the media, and may have a higher one than pages of later checkpoints.
#[test]
fn repair_does_not_take_the_page_of_a_checkpoint_that_never_ended_for_a_newer_one() {
    const SLOT: u64 = 30;
    let (at, extent) = (SLOT * SPAN, 64 << 10);
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("v", (SLOT + 1) * SPAN);
    let volume = rig.attach(id);
    rig.write(&volume, at, &[1; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    for slot in 0..=SLOT {
        rig.write(&volume, slot * SPAN + extent, &[2; PAGE]).unwrap();
    }
    rig.engine.submit(Control::Checkpoint);
    while let Some(mut command) = rig.engine.poll(rig.now) {
        if matches!(command.op, IoOp::Flush) {
            break;
        }
        rig.media.run(&mut command);
        rig.engine.complete(command, Ok(()));
    }
    // The delta ring is gone as well.
    let mut rig = Rig::open(rig.kill()).unwrap();
    let volume = rig.attach(id);
    assert!(rig.read(&volume, at + extent, PAGE) == [0; PAGE], "it was not durable");
    rig.write(&volume, at + 2 * extent, &[3; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    for extents in 1..=SLOT {
        rig.write(&volume, extents * extent, &[4; PAGE]).unwrap();
    }
    rig.worker.detach(volume);
    let mut media = closed(rig);
    let stamps = leaf_stamps(&media, 30);
    let newest = stamps.iter().max_by_key(|stamp| stamp.epoch).unwrap();
    assert!(stamps.iter().any(|s| s.epoch < newest.epoch && s.lsn > newest.lsn), "{stamps:?}");

    damage_index(&mut media, id);
    let report = repaired(&mut media, RepairOptions::default());
    assert!(report.salvaged.iter().any(|part| part.range.start == at), "{report:?}");
    let mut rig = Rig::open(media).unwrap();
    let volume = rig.attach(id);
    for (extents, byte) in [1, 0, 3].into_iter().enumerate() {
        let offset = at + extents as u64 * extent;
        assert!(rig.read(&volume, offset, PAGE) == [byte; PAGE], "extent {extents}");
    }
}

#[test]
fn repair_takes_no_page_of_a_restore_that_did_not_end() {
    let mut rig = Rig::new(&[16 * MIB]);
    let id = rig.create("v", 8 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let (text, _) = dumped(&rig.media);
    rig.write(&volume, 1 << 20, &[2; PAGE]).unwrap();
    rig.worker.detach(volume);
    let mut media = closed(rig);
    let expected = contents(media.clone());
    let plan = scanned(&text).unwrap();
    let devices = media.open_options().devices;
    let mut target = Cut { media: &mut media, left: 2 };
    let found = plan.target(&mut target, &devices).unwrap();
    let mut restoring = plan.begin(&mut target, found).unwrap();
    let all = text.lines().try_for_each(|line| restoring.line(line));
    assert!(all.and_then(|()| restoring.finish().map(|_| ())).is_err(), "it was not cut off");
    assert!(contents(media.clone()) == expected);
    // Also after the pool was served again.
    let served = closed(Rig::open(media.clone()).unwrap());
    for mut media in [media, served] {
        damage_index(&mut media, id);
        let report = repaired(&mut media, RepairOptions::default());
        assert_eq!((report.salvaged.len(), report.lost), (1, vec![]));
        assert!(contents(media) == expected);
    }
}

#[test]
fn repair_gives_a_clone_no_page_that_another_of_its_family_wrote_for_itself() {
    for by_other in [true, false] {
        let mut rig = Rig::new(&[16 * MIB]);
        let base = rig.create("base", 8 << 20);
        let attached = rig.attach(base);
        rig.write(&attached, 0, &[1; PAGE]).unwrap();
        rig.control(Control::Checkpoint).unwrap();
        rig.worker.detach(attached);
        let source = made(&mut rig, Control::Snapshot { source: base, name: "snap".to_owned() });
        let clone = |rig: &mut Rig, name: &str| {
            made(rig, Control::Clone { source, name: name.to_owned(), size: None })
        };
        let other = clone(&mut rig, "other");
        let written = rig.attach(if by_other { other } else { base });
        rig.write(&written, 0, &[9; PAGE]).unwrap();
        rig.control(Control::Checkpoint).unwrap();
        rig.worker.detach(written);
        let clone = clone(&mut rig, "clone");
        let mut media = closed(rig);
        let expected = contents(media.clone());
        damage_index(&mut media, clone);
        let report = repaired(&mut media, RepairOptions::default());
        let salvaged: Vec<_> = report.salvaged.iter().map(|part| part.name.as_str()).collect();
        assert_eq!((salvaged, report.lost), (vec!["clone"], vec![]));
        assert!(contents(media) == expected, "{by_other}");
    }
}

#[test]
fn repair_gives_a_clone_no_page_of_a_clone_beside_it() {
    let mut rig = Rig::new(&[16 * MIB]);
    let base = rig.create("base", 3 * SPAN);
    let attached = rig.attach(base);
    rig.write(&attached, 0, &[1; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.worker.detach(attached);
    let source = made(&mut rig, Control::Snapshot { source: base, name: "snap".to_owned() });
    let [clone, other] = ["clone", "other"]
        .map(|name| made(&mut rig, Control::Clone { source, name: name.to_owned(), size: None }));
    let written = rig.attach(other);
    rig.write(&written, SPAN, &[9; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.worker.detach(written);
    let mut media = closed(rig);
    let expected = contents(media.clone());
    for volume in [base, clone] {
        let mut media = media.clone();
        damage_index(&mut media, volume);
        repaired(&mut media, RepairOptions::default());
        assert!(contents(media) == expected, "{volume}");
    }
    // It is named where a page is of another volume's tree.
    damage_index(&mut media, clone);
    let report = repaired(&mut media, RepairOptions::default());
    let [part] = &report.salvaged[..] else { panic!("{report:?}") };
    assert!(part.text.ends_with("of the tree of volume 1"), "{}", part.text);
}

/// The clone of a clone, as made by a backup of a restored volume: its origin is a snapshot that
/// is deleted, and no longer names the volume whose pages the clone has.
#[test]
fn repair_gives_a_clone_the_pages_from_before_an_origin_that_is_deleted() {
    let mut rig = Rig::new(&[16 * MIB]);
    let base = rig.create("base", 8 << 20);
    let snapshot = |rig: &mut Rig, source, name: &str| {
        made(rig, Control::Snapshot { source, name: name.to_owned() })
    };
    let clone = |rig: &mut Rig, source, name: &str| {
        made(rig, Control::Clone { source, name: name.to_owned(), size: None })
    };
    let first = snapshot(&mut rig, base, "first");
    let restored = clone(&mut rig, first, "restored");
    let attached = rig.attach(restored);
    rig.write(&attached, 0, &[1; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.worker.detach(attached);
    let second = snapshot(&mut rig, restored, "second");
    let clone = clone(&mut rig, second, "clone");
    rig.control(Control::Delete { volume: second }).unwrap();
    let mut media = closed(rig);
    let expected = contents(media.clone());
    damage_index(&mut media, clone);
    let report = repaired(&mut media, RepairOptions::default());
    assert_eq!((report.salvaged.len(), report.lost), (1, vec![]));
    assert!(contents(media) == expected);
}

#[test]
fn repair_gives_a_volume_that_the_log_has_rolled_back_no_page_from_before_that() {
    let mut rig = Rig::new(&[16 * MIB]);
    let volume = rig.create("v", 8 << 20);
    let attached = rig.attach(volume);
    rig.write(&attached, 0, &[1; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let snapshot = made(&mut rig, Control::Snapshot { source: volume, name: "snap".to_owned() });
    rig.write(&attached, 0, &[2; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.worker.detach(attached);
    rig.control(Control::Rollback { volume, snapshot }).unwrap();
    let mut media = rig.kill();
    let expected = contents(media.clone());
    damage_index(&mut media, snapshot);
    let report = repaired(&mut media, RepairOptions::default());
    assert_eq!((report.salvaged.len(), report.lost), (2, vec![]));
    assert!(contents(media) == expected);
}

#[test]
fn a_superblock_whose_numbers_are_at_their_end_is_not_repaired_to_a_wrong_one() {
    let ends: [fn(&mut Superblock); 3] = [
        |last| last.generation = u64::MAX,
        |last| last.epoch = Epoch(u64::MAX),
        |last| last.wal_tail_sequence = u64::MAX,
    ];
    for end in ends {
        let mut media = closed(family(&[16 * MIB], 100 << 20));
        for (device, at) in found(&media, b"BLOCKDsb") {
            let bytes = &mut media.devices[device][at..at + PAGE];
            let mut superblock = Superblock::decode(bytes, Place::Memory).unwrap();
            end(&mut superblock);
            let mut page = Page::zeroed();
            superblock.encode(&mut page);
            bytes.copy_from_slice(&page.0);
        }
        for (device, at) in found(&media, b"BDpg\x01") {
            media.devices[device][at + 100] ^= 1;
        }
        assert!(checked(&media).damaged);
        let before = media.devices.clone();
        let devices = media.open_options().devices;
        let done = repair(&mut Target(&mut media), &devices, RepairOptions::default(), &mut |_| {});
        assert!(matches!(done, Err(MapperError::Limit { limit: u64::MAX, .. })), "{done:?}");
        let opened = Rig::open(media.clone()).unwrap_err();
        assert!(matches!(opened, MapperError::Limit { .. }), "{opened}");
        assert!(media.devices == before, "something was written");
    }
}

/// Random volumes, snapshots, clones and operations.
fn random_tree(seed: u64) -> Rig {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut rig = Rig::new(&[24 * MIB, 12 * MIB]);
    let mut volumes = vec![rig.create("v0", 40 << 20)];
    let mut snapshots: Vec<(VolumeId, VolumeId)> = Vec::new();
    for step in 1..30 {
        let volume = volumes[random.usize(..volumes.len())];
        let name = format!("v{step}");
        match random.u8(..10) {
            0 => volumes.push(rig.create(&name, random.u64(1..80) << 19)),
            1 | 2 => {
                snapshots
                    .push((made(&mut rig, Control::Snapshot { source: volume, name }), volume));
            }
            3 if !snapshots.is_empty() => {
                let (source, _) = snapshots[random.usize(..snapshots.len())];
                volumes.push(made(&mut rig, Control::Clone { source, name, size: None }));
            }
            4 if !snapshots.is_empty() => {
                let (snapshot, _) = snapshots.swap_remove(random.usize(..snapshots.len()));
                rig.control(Control::Delete { volume: snapshot }).unwrap();
            }
            5 => {
                if let Some((snapshot, of)) = snapshots.iter().find(|(_, of)| *of == volume) {
                    let (volume, snapshot) = (*of, *snapshot);
                    rig.control(Control::Rollback { volume, snapshot }).unwrap();
                }
            }
            6 => {
                let size = random.u64(1..90) << 19;
                rig.control(Control::Resize { volume, size }).unwrap();
            }
            7 => drop(rig.control(Control::Checkpoint).unwrap()),
            _ => {}
        }
        let attached = rig.attach(volume);
        let size = rig.engine.volumes().iter().find(|v| v.id == volume).unwrap().size;
        for _ in 0..3 {
            let at = random.u64(..size / 4096 - 4) * 4096;
            let (len, byte) = (random.usize(1..4) * PAGE, random.u8(1..));
            if random.u8(..5) == 0 {
                rig.discard(&attached, at, len);
            } else {
                rig.write(&attached, at, &vec![byte; len]).unwrap();
            }
        }
        if random.u8(..3) == 0 {
            rig.flush(&attached).unwrap();
        }
        rig.worker.detach(attached);
    }
    rig
}

fn whole(media: Media) -> Vec<(String, u64, Vec<u8>)> {
    let mut rig = Rig::open(media).unwrap();
    rig.check();
    let mut all = Vec::new();
    for volume in rig.engine.volumes() {
        let attached = rig.attach(volume.id);
        let data = rig.read(&attached, 0, usize::try_from(volume.size).unwrap());
        all.push((format!("{} {:?}", volume.name, volume.origin), volume.size, data));
        rig.worker.detach(attached);
    }
    all
}

#[test]
fn random_trees_are_sound_and_come_back_from_their_dump() {
    let mut snapshots = 0;
    for seed in 0..12 {
        let rig = random_tree(seed);
        for media in [rig.media.clone(), closed(rig)] {
            let report = checked(&media);
            assert!(report.findings.is_empty(), "seed {seed}: {report:?}");
            snapshots += report.snapshots;
            let expected = whole(media.clone());
            let (text, _) = dumped(&media);
            let mut bad = media;
            for (device, at) in found(&bad, b"BDpg") {
                bad.devices[device][at..at + PAGE].fill(0xA5);
            }
            restored(&mut bad, &text);
            let again = checked(&bad);
            assert!(again.findings.is_empty(), "seed {seed}: {again:?}");
            let same = (again.volumes, again.snapshots, again.leaves, again.account.data);
            assert_eq!(
                same,
                (report.volumes, report.snapshots, report.leaves, report.account.data)
            );
            assert!(whole(bad) == expected, "seed {seed}");
        }
    }
    assert!(snapshots > 20, "{snapshots}");
}
