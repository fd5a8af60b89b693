//! Tools that read a pool without opening it.
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../../../tests/common/mod.rs"]
mod common;
mod composite;
mod labels;
mod repair;
#[path = "../tools/mod.rs"]
mod tools;

use std::collections::BTreeSet;

use blockd_inspect::check::{Severity, check, check_checkpoint};
use blockd_inspect::repair::RepairOptions;
use blockd_inspect::rmap::rmap;
use blockd_inspect::thin_xml::thin_xml;
use blockd_inspect::{DumpError, Reader};
use blockd_mapper::engine::Control;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoError, IoOp, Page};
use blockd_mapper::open::{OpenReport, Opening};
use blockd_mapper::space::{DeviceMark, Placement, VolumeSettings};
use blockd_mapper::units::DeviceIndex;

use common::{Media, Rig};
use tools::{
    Image, MIB, PAGE, SPAN, WRITTEN, checked, closed, contents, dumped, family, found, made,
    repaired, restored, scanned,
};

/// Bytes of an extent of these pools.
const EXTENT: usize = 64 << 10;

#[test]
fn a_reverse_map_reports_that_owners_behind_a_broken_log_are_not_known() {
    let mut media = family(&[16 * MIB], 100 << 20).kill();
    let owners = |media: &Media| {
        let mut image = Image(media);
        let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
        rmap(&mut reader, 0, &(0..16 << 20)).unwrap()
    };
    let whole = owners(&media);
    assert!(whole.lost.is_empty(), "{:?}", whole.lost);
    let mut blocks = found(&media, b"BDwl").into_iter();
    let broken = blocks.find(|&(device, at)| {
        let mut bad = media.clone();
        bad.devices[device][at + 90] ^= 1;
        checked(&bad).damaged
    });
    let (device, at) = broken.unwrap();
    media.devices[device][at + 90] ^= 1;
    let report = owners(&media);
    assert!(report.claims.len() < whole.claims.len(), "no owner is lost: the test has no meaning");
    let [lost] = &report.lost[..] else { panic!("{:?}", report.lost) };
    assert!(lost.text.ends_with("changes behind it"), "{}", lost.text);
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
    rig.control(Control::Rename { volume: b, name: "b".repeat(100) }).unwrap();
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

/// Returns a check's findings on the copies of the superblock, offline and for a pool that is
/// served.
fn findings_on_copies(media: &Media) -> [Vec<Severity>; 2] {
    let mut image = Image(media);
    let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
    let served = check_checkpoint(&mut reader, &mut |_| Ok(())).unwrap();
    [checked(media), served].map(|report| {
        let of_superblocks = report.findings.iter().filter(|f| f.kind == "superblock");
        assert_eq!(report.findings.len(), of_superblocks.clone().count(), "{report:?}");
        of_superblocks.map(|finding| finding.severity).collect()
    })
}

/// In a pool that was not closed, a crash may have left a copy torn or outdated. Other damage is
/// the disk's fault; none of it justifies a repair, which would ignore the delta ring.
#[test]
fn a_copy_that_no_crash_leaves_so_is_warned_of() {
    use Severity::{Damage, Note, Warning};
    let rig = family(&[16 * MIB], 100 << 20);
    let media = rig.kill();
    let spots = found(&media, b"BLOCKDsb");
    let own = |at: usize| Superblock::decode(&media.devices[0][at..][..PAGE], Place::Memory);
    type Change<'a> = &'a dyn Fn(&mut [u8], &Superblock);
    let encoded = |page: &mut [u8], superblock: Superblock| {
        let mut bytes = Page::zeroed();
        superblock.encode(&mut bytes);
        page.copy_from_slice(&bytes.0);
    };
    let cases: [(&str, Change<'_>, Severity, Severity); 8] = [
        ("a bit of an unused area", &|page, _| page[300] ^= 1, Warning, Damage),
        ("a bit behind the table", &|page, _| page[2000] ^= 1, Warning, Damage),
        ("its root", &|page, _| page[170] ^= 1, Warning, Damage),
        ("its magic", &|page, _| page.fill(0), Warning, Damage),
        // Torn while the next was written: the first sector is that of the next, the rest is not.
        ("its first sector", &|page, _| page[72] += 1, Note, Damage),
        ("its table", &|page, _| page[700] ^= 1, Note, Damage),
        (
            "one behind",
            &|page, own| {
                encoded(page, Superblock { generation: own.generation - 1, ..own.clone() })
            },
            Note,
            Note,
        ),
        (
            "two behind",
            &|page, own| {
                encoded(page, Superblock { generation: own.generation - 2, ..own.clone() })
            },
            Warning,
            Damage,
        ),
    ];
    for (what, change, left, served) in cases {
        // The copy at the front, which is where it is whatever the device's size.
        let mut bad = media.clone();
        let (device, at) = spots[0];
        change(&mut bad.devices[device][at..at + PAGE], &own(at).unwrap());
        assert_eq!(findings_on_copies(&bad), [vec![left], vec![served]], "{what}");
        assert!(!checked(&bad).damaged, "{what}");
        let report = repaired(&mut bad, RepairOptions::default());
        assert!(!report.changed, "{what}: a repair would drop the changes in the delta ring");
    }
}

/// Media one page of which can't be read.
struct Deaf<'a>(&'a Media, u64);

impl blockd_inspect::Media for Deaf<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        if (offset..offset + bytes.len() as u64).contains(&self.1) {
            return Err(IoError::Media);
        }
        Image(self.0).read(device, offset, bytes)
    }
}

#[test]
fn a_copy_that_cannot_be_read_is_warned_of() {
    let media = family(&[16 * MIB], 100 << 20).kill();
    let mut deaf = Deaf(&media, PAGE as u64);
    let mut reader = Reader::open(&mut deaf, &media.open_options().devices).unwrap();
    let report = check(&mut reader, &mut |_| Ok(())).unwrap();
    assert_eq!(report.findings[0].severity, Severity::Warning, "{report:?}");
}

/// Opens a pool of which one page can't be read.
fn opened_without(media: &Media, page: u64) -> Result<OpenReport, MapperError> {
    let mut media = media.clone();
    let mut opening = Opening::new(media.open_options())?;
    while let Some(mut command) = opening.poll() {
        media.run(&mut command);
        let is_read = matches!(&command.op, IoOp::Read { offset, buffer }
            if (*offset..*offset + buffer.as_bytes().len() as u64).contains(&page));
        opening.complete(command, if is_read { Err(IoError::Media) } else { Ok(()) });
    }
    opening.finish().map(|opened| opened.report)
}

/// With all that is in it: the log is as long as it was.
#[test]
fn a_pool_opens_although_a_page_cannot_be_read_that_is_not_damage_to_the_check() {
    let media = family(&[16 * MIB], 100 << 20).kill();
    let whole = opened_without(&media, u64::MAX).unwrap();
    let (mut opened, mut refused) = (0, 0);
    // Superblocks and log, and extents with metadata pages. A page of data is no metadata's.
    let mut extents: BTreeSet<_> = (0..17).chain([255]).collect();
    extents.extend(found(&media, b"BDpg").into_iter().map(|(_, at)| at / EXTENT));
    let pages = extents.into_iter().flat_map(|extent| (extent * EXTENT..).step_by(PAGE).take(16));
    for page in pages.map(|page| page as u64) {
        let mut deaf = Deaf(&media, page);
        let reader = Reader::open(&mut deaf, &media.open_options().devices);
        let checked = reader.and_then(|mut reader| check(&mut reader, &mut |_| Ok(())));
        match (checked, opened_without(&media, page)) {
            (Ok(report), Ok(found)) if !report.damaged => {
                assert_eq!(found, whole, "without the page at {page}");
                opened += 1;
            }
            (Ok(report), Err(error)) if !report.damaged => {
                panic!("without the page at {page}: {error}, and the check has {report:?}")
            }
            (_, found) => refused += u64::from(found.is_err()),
        }
    }
    assert!(opened > 250 && refused > 3, "{opened} opened, {refused} refused");
}

/// Media of which a device can't be read at all.
struct Dead<'a>(&'a Media, u8);

impl blockd_inspect::Media for Dead<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        if device.0 == self.1 {
            return Err(IoError::Media);
        }
        Image(self.0).read(device, offset, bytes)
    }
}

#[test]
fn a_device_that_cannot_be_read_is_named_as_such_and_not_as_damaged() {
    for sizes in [&[16 * MIB][..], &[12 * MIB, 8 * MIB]] {
        let media = family(sizes, 100 << 20).kill();
        let dead = u8::try_from(sizes.len() - 1).unwrap();
        let mut media_of = Dead(&media, dead);
        let error = Reader::open(&mut media_of, &media.open_options().devices).unwrap_err();
        let expected = MapperError::Io { operation: "read", device: dead, error: IoError::Media };
        assert_eq!(error, expected);
    }
}

#[test]
fn a_dump_brings_back_a_pool_whose_metadata_is_gone() {
    for sizes in [&[16 * MIB][..], &[12 * MIB, 8 * MIB]] {
        for size in [100 << 20, 66 << 30] {
            let rig = family(sizes, size);
            for media in [rig.media.clone(), closed(rig)] {
                let (text, report) = dumped(&media);
                assert_eq!((report.volumes, report.lost.len()), (3, 0), "{report:?}");
                let expected = contents(media.clone());
                let mut bad = media.clone();
                for magic in [&b"BDpg"[..], b"BDwl", b"BLOCKDsb"] {
                    // One superblock of each device stays, to say which it is.
                    let spots = found(&bad, magic).into_iter();
                    for (device, at) in spots.filter(|spot| magic != b"BLOCKDsb" || spot.1 != 0) {
                        bad.devices[device][at..at + PAGE].fill(0x5A);
                    }
                }
                restored(&mut bad, &text);
                let report = checked(&bad);
                assert!(report.findings.is_empty() && report.clean, "{report:?}");
                let again = dumped(&bad).0;
                let body = |text: &str| {
                    let from = text.find("\nvolume ").unwrap();
                    text[from..text.rfind("end ").unwrap()].to_owned()
                };
                assert_eq!(body(&again), body(&text), "the same by its own dump");
                assert!(contents(bad) == expected, "the same by content");
            }
        }
    }
}

#[test]
fn a_restored_pool_continues() {
    let mut media = closed(family(&[16 * MIB], 100 << 20));
    let (text, _) = dumped(&media);
    restored(&mut media, &text);
    let mut rig = Rig::open(media).unwrap();
    let id = rig.create("more", 1 << 20);
    let attached = rig.attach(id);
    rig.write(&attached, 0, &[9; PAGE]).unwrap();
    rig.flush(&attached).unwrap();
    rig.worker.detach(attached);
    let left = rig.kill();
    assert!(checked(&left).findings.is_empty());
    assert!(contents(left).iter().any(|volume| volume.2[0] == 9));
}

#[test]
fn settings_and_placements_come_back_from_a_dump() {
    let mut rig = family(&[16 * MIB, 12 * MIB], 100 << 20);
    let pin = Placement::Pin(DeviceMark::of(&[2; 16]));
    let wanted = [("base", pin, 500), ("copy", Placement::Spread, 0)];
    for (name, placement, iops) in wanted {
        let volume = rig.engine.volumes().into_iter().find(|one| one.name == name).unwrap().id;
        let settings = VolumeSettings { placement, iops, ..VolumeSettings::default() };
        rig.control(Control::Configure { volume, settings }).unwrap();
    }
    let mut media = closed(rig);
    assert!(checked(&media).findings.is_empty());
    let (text, _) = dumped(&media);
    restored(&mut media, &text);
    let rig = Rig::open(media).unwrap();
    for volume in rig.engine.volumes() {
        let set = wanted.into_iter().find(|(name, ..)| *name == volume.name);
        let (_, placement, iops) = set.unwrap_or(("snap", Placement::Fill, 0));
        let settings = VolumeSettings { placement, iops, ..VolumeSettings::default() };
        assert_eq!(volume.settings, settings, "{}", volume.name);
    }
}

#[test]
fn a_dump_that_is_not_whole_is_refused_by_name() {
    let (text, _) = dumped(&closed(family(&[16 * MIB], 100 << 20)));
    scanned(&text).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for end in 0..lines.len() {
        let cut: String = lines[..end].iter().map(|line| format!("{line}\n")).collect();
        let error = scanned(&cut).unwrap_err();
        let named = if end == 0 { DumpError::NoDump } else { DumpError::Cut { lines: end as u64 } };
        assert_eq!(error, named);
    }
    for (number, line) in lines.iter().enumerate().take(lines.len() - 1).skip(1) {
        for edit in ["1", " ", "x"] {
            let mut edited = lines.clone();
            let changed = format!("{line}{edit}");
            edited[number] = &changed;
            let error = scanned(&edited.join("\n")).unwrap_err();
            assert!(matches!(error, DumpError::Edited { .. }), "{changed}: {error}");
        }
    }
    let newer = text.replacen("blockd dump 1", "blockd dump 2", 1);
    assert_eq!(scanned(&newer).unwrap_err(), DumpError::Version { found: "2".to_owned() });
    assert_eq!(scanned("<superblock>").unwrap_err(), DumpError::NoDump);
}

/// A dump with this instead of that, and a last line that fits.
fn forged(text: &str, from: &str, to: &str) -> Result<(), DumpError> {
    assert!(text.contains(from), "{from}");
    let text = text.replacen(from, to, 1);
    let body = &text[..text.rfind("end ").unwrap()];
    let sum = blockd_mapper::format::checksum::sum(body.as_bytes());
    scanned(&format!("{body}end {} {sum:016x}\n", body.lines().count())).map(|_| ())
}

#[test]
fn a_dump_that_makes_no_pool_is_refused_by_line() {
    let (text, _) = dumped(&closed(family(&[16 * MIB], 100 << 20)));
    let map = text.lines().find(|line| line.starts_with("map 0 ")).unwrap();
    let first = map.split(' ').nth(3).unwrap();
    let elsewhere = |extent: &str| map.replacen(first, extent, 1);
    for (from, to, message) in [
        (map, elsewhere("0").as_str(), "belongs to something else"),
        (map, elsewhere("99999999").as_str(), "belongs to something else"),
        (map, &map.replacen("map 0", "map 300", 1), "beyond the leaf"),
        ("name snap", "name base", "used twice"),
        ("name snap", "name a/b", "must not contain"),
        ("snapshot 2", "snapshot 1", "used twice"),
        ("snapshot 2", "snapshot 77", "not below the next id"),
        ("extent 65536", "extent 65537", "power of two"),
        ("features 0 0 0", "features 0 0 4", "unknown to this build"),
        ("features 0 0 0", "featuers 0 0 4", "no word of a dump"),
        ("leaf 1 ", "leaf 7 ", "out of order or beyond"),
    ] {
        let error = forged(&text, from, to).unwrap_err().to_string();
        assert!(error.starts_with("line ") && error.contains(message), "{to}: {error}");
    }
}

#[test]
fn the_xml_for_dm_thin_names_every_mapping_of_every_volume() {
    let rig = family(&[12 * MIB, 8 * MIB], 100 << 20);
    let mapped: Vec<_> = rig.engine.volumes().iter().map(|v| (v.id, v.mapped >> 16)).collect();
    let media = rig.kill();
    let mut image = Image(&media);
    let mut reader = Reader::open(&mut image, &media.open_options().devices).unwrap();
    let mut text = String::new();
    let gaps = thin_xml(&mut reader, &mut |piece| {
        text.push_str(piece);
        Ok(())
    });
    let gaps = gaps.unwrap();
    assert!(text.contains("data_block_size=\"128\" nr_data_blocks=\"320\""), "{text}");
    for (id, blocks) in mapped {
        let from = text.find(&format!("dev_id=\"{id}\" mapped_blocks=\"{blocks}\"")).unwrap();
        let device = &text[from..from + text[from..].find("</device>").unwrap()];
        let lengths = device.split("length=\"").skip(1);
        let lengths = lengths.map(|rest| rest.split('"').next().unwrap().parse::<u64>().unwrap());
        assert_eq!(lengths.sum::<u64>(), blocks, "{device}");
    }
    // Zeroes where nothing is valid change nothing that a volume shows.
    assert!(!gaps.gaps.is_empty() && gaps.torn == 0, "{gaps:?}");
    let expected = contents(media.clone());
    let mut filled = media;
    for gap in gaps.gaps {
        let at = usize::try_from(gap.offset).unwrap();
        let len = usize::try_from(gap.len).unwrap();
        filled.devices[usize::from(gap.device.0)][at..at + len].fill(0);
    }
    assert!(contents(filled) == expected);
}

/// Bytes that differ between two volumes of one name.
fn differences(a: &[(String, u64, Vec<u8>)], b: &[(String, u64, Vec<u8>)]) -> Vec<(String, u64)> {
    let mut differences = Vec::new();
    for (name, size, bytes) in a {
        let Some(other) = b.iter().find(|other| other.0 == *name) else {
            differences.push((name.clone(), u64::MAX));
            continue;
        };
        assert_eq!(*size, other.1);
        let blocks = bytes.chunks(PAGE).zip(other.2.chunks(PAGE)).enumerate();
        let differ = blocks.filter(|(_, (a, b))| a != b);
        let place = |at: u64| at / WRITTEN * SPAN + at % WRITTEN;
        differences.extend(differ.map(|(at, _)| (name.clone(), place((at * PAGE) as u64))));
    }
    differences
}
