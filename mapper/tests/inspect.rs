//! Tools that read a pool without opening it.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::inspect::check::{Report, Severity, check};
use blockd_mapper::inspect::{self, Reader};
use blockd_mapper::io::IoError;
use blockd_mapper::units::{DeviceIndex, VolumeId};
use common::{Media, Rig};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Media that can't be written, and count their reads.
struct Image<'a>(&'a Media);

impl inspect::Media for Image<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let at = usize::try_from(offset).unwrap();
        let from = self.0.devices[usize::from(device.0)].get(at..at + bytes.len());
        bytes.copy_from_slice(from.ok_or(IoError::Media)?);
        Ok(())
    }
}

fn checked(media: &Media) -> Report {
    let mut image = Image(media);
    let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
    check(&mut reader, &mut |_| Ok(())).unwrap()
}

fn made(rig: &mut Rig, control: Control) -> VolumeId {
    match rig.control(control).unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// A volume with leaves at several slots, a snapshot, a clone, and changes of each.
fn family(sizes: &[usize], size: u64) -> Rig {
    let mut rig = Rig::new(sizes);
    let base = rig.create("base", size);
    let span = 16 << 20;
    let attached = rig.attach(base);
    for slot in 0..(size / span).min(6) {
        rig.write(&attached, slot * span + 8192, &[1; 3 * PAGE]).unwrap();
    }
    rig.control(Control::Checkpoint).unwrap();
    let snapshot = made(&mut rig, Control::Snapshot { source: base, name: "snap".to_owned() });
    rig.write(&attached, 4096, &[2; PAGE]).unwrap();
    let source = snapshot;
    let copy = made(&mut rig, Control::Clone { source, name: "copy".to_owned(), size: None });
    let clone = rig.attach(copy);
    rig.write(&clone, span + 65536, &[3; PAGE]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.write(&attached, 70_000 & !4095, &[4; PAGE]).unwrap();
    rig.write(&clone, 100 * 4096, &[5; PAGE]).unwrap();
    rig.flush(&attached).unwrap();
    for extent in 20..23 {
        rig.write(&attached, extent << 16, &[6; PAGE]).unwrap();
        rig.flush(&attached).unwrap();
    }
    rig.worker.detach(attached);
    rig.worker.detach(clone);
    rig
}

fn closed(mut rig: Rig) -> Media {
    rig.control(Control::Close).unwrap();
    rig.kill()
}

/// Blocks that begin with these bytes.
fn found(media: &Media, magic: &[u8]) -> Vec<(usize, usize)> {
    let mut spots = Vec::new();
    for (device, bytes) in media.devices.iter().enumerate() {
        let starts = (0..bytes.len()).step_by(PAGE);
        spots.extend(starts.filter(|&at| bytes[at..].starts_with(magic)).map(|at| (device, at)));
    }
    spots
}

#[test]
fn a_new_pool_is_sound() {
    let mut media = Media::new(&[8 * MIB]);
    media.create();
    let report = checked(&media);
    assert!(!report.damaged && report.findings.is_empty(), "{report:?}");
    let account = report.account;
    assert_eq!(account.total, account.fixed + account.reserve + account.free);
}

#[test]
fn pools_that_are_closed_or_left_are_sound_and_all_of_their_space_is_accounted_for() {
    for sizes in [&[16 * MIB][..], &[12 * MIB, 8 * MIB]] {
        let rig = family(sizes, 100 << 20);
        let left = rig.media.clone();
        let mut reports = vec![checked(&left)];
        assert!(!reports[0].clean && reports[0].log.pending > 0, "{:?}", reports[0]);
        let mapped: u64 = rig.engine.space().mapped / (64 << 10);
        reports.push(checked(&closed(rig)));
        assert!(reports[1].clean);
        for report in reports {
            assert!(!report.damaged && report.findings.is_empty(), "{report:?}");
            assert_eq!((report.volumes, report.snapshots), (2, 1));
            let account = report.account;
            assert_eq!(account.data, mapped);
            let used = account.fixed + account.reserve + account.pages + account.data;
            assert_eq!(account.total, used + account.free);
        }
    }
}

#[test]
fn a_log_with_every_kind_of_change_is_followed() {
    let mut rig = Rig::new(&[16 * MIB]);
    let [a, b] = ["a", "b"].map(|name| rig.create(name, 64 << 20));
    let [first, second] = [a, b].map(|id| rig.attach(id));
    for slot in 0..3 {
        rig.write(&first, slot << 24, &[1; 5 * PAGE]).unwrap();
        rig.write(&second, (slot << 24) + 65536, &[2; PAGE]).unwrap();
    }
    rig.control(Control::Checkpoint).unwrap();
    let group = [(a, "a1".to_owned()), (b, "b1".to_owned())].to_vec();
    rig.control(Control::SnapshotGroup { members: group }).unwrap();
    rig.write(&first, 4096, &[3; PAGE]).unwrap();
    rig.discard(&second, 0, 32 << 20);
    let snapshot = made(&mut rig, Control::Snapshot { source: a, name: "a2".to_owned() });
    rig.write(&first, 1 << 24, &[4; PAGE]).unwrap();
    let (source, name) = (snapshot, "c".to_owned());
    let copy = made(&mut rig, Control::Clone { source, name, size: Some(96 << 20) });
    rig.create("late", 1 << 20);
    rig.worker.detach(first);
    rig.control(Control::Resize { volume: copy, size: (16 << 20) + 3 * 4096 }).unwrap();
    rig.control(Control::Rollback { volume: a, snapshot }).unwrap();
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.flush(&second).unwrap();
    rig.worker.detach(second);
    let left = checked(&rig.media);
    assert!(left.log.pending > 9 && left.findings.is_empty(), "{left:?}");
    assert_eq!((left.volumes, left.snapshots), (4, 2));
    let mut opened = Rig::open(rig.kill()).unwrap();
    opened.check();
    assert_eq!(left.account.data << 16, opened.engine.space().mapped);
}

#[test]
fn reading_writes_nothing() {
    let media = family(&[16 * MIB], 100 << 20).kill();
    let before = media.devices.clone();
    checked(&media);
    assert_eq!(media.devices, before);
}

/// Opening is the judge: where it refuses, the check must find damage, and the other way round.
#[test]
fn damage_of_each_page_that_is_in_use_is_found() {
    for size in [100 << 20, 66 << 30] {
        let rig = family(&[16 * MIB], size);
        let mut kinds = std::collections::BTreeMap::new();
        for media in [rig.media.clone(), closed(rig)] {
            for spot in found(&media, b"BDpg") {
                let mut bad = media.clone();
                let page = &mut bad.devices[spot.0][spot.1..spot.1 + PAGE];
                let kind = (page[4], page[5]);
                page[200] ^= 1;
                let report = checked(&bad);
                let opens = Rig::open(bad).is_ok();
                assert_eq!(report.damaged, !opens, "{spot:?} {kind:?}: {report:?}");
                *kinds.entry((kind, opens)).or_insert(0) += 1;
            }
        }
        let top = if size > 65 << 30 { 2 } else { 1 };
        for kind in [(1, 0), (2, 1), (2, top), (3, 0)] {
            assert!(kinds.contains_key(&(kind, false)), "{kinds:?}");
        }
    }
}

#[test]
fn findings_name_the_volume_and_the_bytes() {
    let media = closed(family(&[16 * MIB], 100 << 20));
    let mut named = std::collections::BTreeSet::new();
    for spot in found(&media, b"BDpg") {
        let mut bad = media.clone();
        bad.devices[spot.0][spot.1 + 100] ^= 4;
        for finding in checked(&bad).findings {
            if let (Some(name), Some(range)) = (finding.name, finding.range) {
                named.insert((name, range.start, range.end));
            }
        }
    }
    let mib = 1 << 20;
    for name in ["base", "snap", "copy"] {
        assert!(named.contains(&(name.to_owned(), 0, 16 * mib)), "{named:?}");
        assert!(named.contains(&(name.to_owned(), 80 * mib, 96 * mib)), "{named:?}");
        assert!(named.contains(&(name.to_owned(), 0, 100 * mib)), "{named:?}");
    }
}

#[test]
fn damage_of_the_log_is_found_where_opening_finds_it() {
    let media = family(&[16 * MIB], 100 << 20).kill();
    let (mut refused, mut accepted) = (0, 0);
    for spot in found(&media, b"BDwl") {
        let mut bad = media.clone();
        bad.devices[spot.0][spot.1 + 90] ^= 1;
        let report = checked(&bad);
        let opens = Rig::open(bad).is_ok();
        assert_eq!(report.damaged, !opens, "{spot:?}: {report:?}");
        if opens { accepted += 1 } else { refused += 1 }
    }
    assert!(refused > 0 && accepted > 0, "{refused} {accepted}");
}

#[test]
fn copies_of_the_superblock_are_looked_at_one_by_one() {
    let media = closed(family(&[12 * MIB, 8 * MIB], 100 << 20));
    let copies = found(&media, b"BLOCKDsb");
    assert_eq!(copies.len(), 8);
    for spot in copies {
        let mut bad = media.clone();
        bad.devices[spot.0][spot.1 + 700] ^= 1;
        let report = checked(&bad);
        assert_eq!(report.findings.len(), 1, "{report:?}");
        let finding = &report.findings[0];
        let at = format!("byte {} of device {}", spot.1, spot.0);
        assert_eq!((finding.kind, finding.severity), ("superblock", Severity::Damage));
        assert!(finding.text.contains(&at), "{finding:?}");
    }
}
