//! Images of the format, kept as files: whatever reads today's pools has to read them, with the
//! same answers. An image that exists is never written again.
//!
//! `BLOCKD_WRITE_GOLDEN=1 cargo test -p blockd-inspect --test golden images_of` writes those that
//! are not there: of a new feature, or of a new version.
#![allow(clippy::unwrap_used, reason = "test code")]

#[path = "../../tests/common/mod.rs"]
mod common;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use blockd_inspect::Reader;
use blockd_inspect::check::check;
use blockd_inspect::dump::dump;
use blockd_mapper::create::CreateOptions;
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Labels;
use blockd_mapper::format::checksum::sum;
use blockd_mapper::io::IoError;
use blockd_mapper::open::{OpenMode, OpenOptions, Opening};
use blockd_mapper::space::VolumeSettings;
use blockd_mapper::units::{DeviceIndex, VolumeId, WallTime};
use common::{Media, Rig};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// The content of media that were never written.
const FILLER: u8 = 0xEE;

struct Image<'a>(&'a Media);

impl blockd_inspect::Media for Image<'_> {
    fn read(&mut self, device: DeviceIndex, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let at = usize::try_from(offset).unwrap();
        let from = self.0.devices[usize::from(device.0)].get(at..at + bytes.len());
        bytes.copy_from_slice(from.ok_or(IoError::Media)?);
        Ok(())
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

/// One line for each block that was written: device, byte, and the bytes, where `*N` repeats the
/// byte before N times.
fn written(media: &Media) -> String {
    let mut text = String::new();
    for (device, bytes) in media.devices.iter().enumerate() {
        writeln!(text, "device {}", bytes.len()).unwrap();
        for (number, block) in bytes.chunks(PAGE).enumerate() {
            if block.iter().all(|byte| *byte == FILLER) {
                continue;
            }
            write!(text, "{device} {} ", number * PAGE).unwrap();
            let mut at = 0;
            while at < block.len() {
                let run = block[at..].iter().take_while(|byte| **byte == block[at]).count();
                write!(text, "{:02x}", block[at]).unwrap();
                if run > 3 {
                    write!(text, "*{} ", run - 1).unwrap();
                    at += run;
                } else {
                    at += 1;
                }
            }
            text.push('\n');
        }
    }
    text
}

fn image(text: &str) -> Media {
    let mut media = Media::default();
    for line in text.lines() {
        if let Some(size) = line.strip_prefix("device ") {
            media.devices.push(vec![FILLER; size.parse().unwrap()]);
            continue;
        }
        let mut words = line.splitn(3, ' ');
        let [device, at] = [(); 2].map(|()| words.next().unwrap().parse::<usize>().unwrap());
        let (mut bytes, mut rest) = (Vec::new(), words.next().unwrap());
        while !rest.is_empty() {
            if let Some(repeat) = rest.strip_prefix('*') {
                let (count, after) = repeat.split_once(' ').unwrap();
                let last = *bytes.last().unwrap();
                bytes.extend(std::iter::repeat_n(last, count.parse().unwrap()));
                rest = after;
                continue;
            }
            bytes.push(u8::from_str_radix(&rest[..2], 16).unwrap());
            rest = &rest[2..];
        }
        assert_eq!(bytes.len(), PAGE, "{line}");
        media.devices[device][at..at + PAGE].copy_from_slice(&bytes);
    }
    media
}

/// Returns a reader's view of an image: its dump, the counts of the check, and the volumes' bytes.
fn answers(media: &Media) -> String {
    let devices = media.open_options().devices;
    let mut text = String::new();
    let mut source = Image(media);
    let mut reader = Reader::open(&mut source, &devices).unwrap();
    let mut put = |piece: &str| {
        text.push_str(piece);
        Ok(())
    };
    let report = dump(&mut reader, &mut put, &mut |_| {});
    assert!(report.unwrap().lost.is_empty());
    let report = check(&mut reader, &mut |_| Ok(())).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
    let account = report.account;
    let (log, pending) = (report.log.changes, report.log.pending);
    writeln!(text, "check clean {} log {log} {pending}", report.clean).unwrap();
    writeln!(text, "space {} data {} free {}", account.total, account.data, account.free).unwrap();
    let mut rig = Rig::open(media.clone()).unwrap();
    rig.check();
    for volume in rig.engine.volumes() {
        let attached = rig.attach(volume.id);
        let data = rig.read(&attached, 0, usize::try_from(volume.size).unwrap());
        rig.worker.detach(attached);
        writeln!(text, "bytes {} {:016x}", volume.name, sum(&data)).unwrap();
    }
    text
}

fn data(seed: u8, blocks: usize) -> Vec<u8> {
    (0..blocks * PAGE).map(|at| u8::try_from(at / PAGE % 200).unwrap() ^ seed).collect()
}

/// Two volumes, a snapshot, a clone; sizes and discards of all kinds.
fn family(sizes: &[usize]) -> Rig {
    let mut rig = Rig::new(sizes);
    rig.engine.set_wall_time(WallTime(1_700_000_000_000));
    let [base, other] = ["base", "other \u{fc}"].map(|name| rig.create(name, 40 << 20));
    let [first, second] = [base, other].map(|id| rig.attach(id));
    rig.write(&first, 0, &data(1, 20)).unwrap();
    rig.write(&first, 17 << 20, &data(2, 3)).unwrap();
    rig.write(&second, 5 << 16, &data(3, 40)).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.engine.set_wall_time(WallTime(1_700_000_086_401));
    let taken = rig.control(Control::Snapshot { source: base, name: "snapshot".to_owned() });
    let Outcome::Created(source) = taken.unwrap() else { panic!("there was one already") };
    rig.write(&first, 8192, &data(4, 2)).unwrap();
    rig.discard(&second, 5 << 16, 3 * PAGE);
    let name = "clone".to_owned();
    rig.control(Control::Clone { source, name, size: Some(48 << 20) }).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.engine.set_wall_time(WallTime(1_800_000_000_000));
    let members = vec![(base, "group-a".to_owned()), (other, "group-b".to_owned())];
    rig.control(Control::SnapshotGroup { members }).unwrap();
    rig.write(&second, 30 << 20, &data(5, 1)).unwrap();
    rig.flush(&second).unwrap();
    rig.worker.detach(first);
    rig.worker.detach(second);
    rig
}

fn closed(mut rig: Rig) -> Media {
    rig.control(Control::Close).unwrap();
    rig.kill()
}

/// Written until nothing is free.
fn full() -> Rig {
    let mut rig = Rig::new(&[5 * MIB]);
    let id = rig.create("full", 8 << 20);
    let volume = rig.attach(id);
    let mut at = 0;
    while rig.engine.space().free > 0 || rig.engine.space().reserved > 0 {
        rig.write(&volume, at << 16, &[at.to_le_bytes()[0] | 1; PAGE]).unwrap();
        at += 1;
    }
    rig.flush(&volume).unwrap();
    rig.worker.detach(volume);
    rig
}

const EXTENT: usize = 64 << 10;

fn snapshot(rig: &mut Rig, source: VolumeId, name: &str) -> VolumeId {
    let taken = rig.control(Control::Snapshot { source, name: name.to_owned() });
    let Outcome::Created(id) = taken.unwrap() else { panic!("there was one already") };
    id
}

/// Composite entries in a checkpoint, and in the log all that makes, changes and ends one. Two
/// snapshots and a clone share overlays and bases.
fn composite() -> Rig {
    let mut media = Media::new(&[8 * MIB]);
    let options = CreateOptions { composite: true, ..media.options() };
    media.create_with(&options);
    let mut rig = Rig::open(media).unwrap();
    rig.engine.set_wall_time(WallTime(1_900_000_000_000));
    let base = rig.create("base", 40 << 20);
    let first = rig.attach(base);
    let place = |extent: usize, block: usize| (extent * EXTENT + block * PAGE) as u64;
    rig.write(&first, 0, &data(1, 3 * 16)).unwrap();
    rig.write(&first, place(300, 2), &data(2, 5)).unwrap();
    snapshot(&mut rig, base, "before");
    rig.write(&first, place(0, 3), &data(3, 1)).unwrap();
    rig.write(&first, place(1, 4), &data(4, 2)).unwrap();
    rig.write(&first, place(300, 3), &data(5, 1)).unwrap();
    let source = snapshot(&mut rig, base, "between");
    let clone = Control::Clone { source, name: "clone".to_owned(), size: None };
    let Outcome::Created(clone) = rig.control(clone).unwrap() else { panic!("no clone") };
    rig.write(&first, place(0, 9), &data(6, 1)).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    let second = rig.attach(clone);
    // A redirect, a shared overlay copied, an overlay that grows, a sub-block of both discarded,
    // and two entries discarded as a whole.
    rig.write(&second, place(2, 1), &data(7, 2)).unwrap();
    rig.write(&first, place(1, 12), &data(8, 1)).unwrap();
    rig.write(&first, place(0, 11), &data(9, 1)).unwrap();
    rig.discard(&first, place(0, 3), PAGE);
    rig.discard(&second, place(0, 0), EXTENT);
    rig.discard(&second, place(300, 0), EXTENT);
    rig.flush(&first).unwrap();
    rig.worker.detach(first);
    rig.worker.detach(second);
    rig
}

/// A family on three devices, with more than the first one has room for.
fn spread() -> Rig {
    let mut rig = family(&[4 * MIB, 4 * MIB, 6 * MIB]);
    let id = rig.create("bulk", 4 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &data(6, 4 * MIB / PAGE)).unwrap();
    rig.flush(&volume).unwrap();
    rig.worker.detach(volume);
    rig
}

/// The same while one of them is emptied, or the end of one.
fn moving(command: Control) -> Rig {
    let mut rig = spread();
    // An extent in four seconds: the crash comes before all is moved.
    rig.engine.set_evacuation_rate(16 << 10);
    rig.control(command).unwrap();
    for _ in 0..20 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    let status = rig.engine.evacuation_status();
    assert!(status.moved > 0 && status.left > 0, "{status:?}");
    rig
}

/// The place of a device that has left, and one that has shrunk.
fn moved() -> Media {
    let mut rig = spread();
    for command in [
        Control::RemoveDevice { device: 1 },
        Control::ShrinkDevice { device: 2, size: 5 * MIB as u64 },
    ] {
        rig.control(command).unwrap();
        while rig.engine.evacuation_status().device.is_some() {
            rig.now += 100_000_000;
            rig.settle();
        }
    }
    let mut media = closed(rig);
    media.devices[2].truncate(5 * MIB);
    media.devices.remove(1);
    media
}

/// Labels of volumes and a snapshot, one with settings too, and what the log does to them.
fn labels() -> Rig {
    let mut rig = Rig::new(&[6 * MIB]);
    let ids = ["first", "second", "third", "bare"].map(|name| rig.create(name, 1 << 20));
    let taken = snapshot(&mut rig, ids[0], "taken");
    for (at, id) in ids[..3].iter().chain([&taken]).enumerate() {
        let value = "v".repeat(at * 85);
        let labels = Labels::new([("example.org/at", value.as_str()), ("\u{41}.b_c-0", "ü =")]);
        rig.control(Control::Label { volume: *id, labels: labels.unwrap() }).unwrap();
    }
    let settings = VolumeSettings { iops: 500, ..VolumeSettings::default() };
    rig.control(Control::Configure { volume: ids[1], settings }).unwrap();
    snapshot(&mut rig, ids[0], "without");
    rig.control(Control::Delete { volume: ids[2] }).unwrap();
    rig.control(Control::Rename { volume: ids[1], name: "other".to_owned() }).unwrap();
    rig
}

/// An image by its name.
type Sample = (&'static str, fn() -> Media);

const SAMPLES: [Sample; 11] = [
    ("new", || {
        let mut media = Media::new(&[5 * MIB]);
        media.create();
        media
    }),
    ("clean", || closed(family(&[8 * MIB]))),
    ("dirty", || family(&[8 * MIB]).kill()),
    ("devices", || closed(family(&[6 * MIB, 4 * MIB, 4 * MIB]))),
    ("devices-dirty", || family(&[6 * MIB, 4 * MIB, 4 * MIB]).kill()),
    ("full", || closed(full())),
    ("composite", || composite().kill()),
    ("leaving", || moving(Control::RemoveDevice { device: 1 }).kill()),
    ("shrinking", || moving(Control::ShrinkDevice { device: 1, size: 2 * MIB as u64 }).kill()),
    ("moved", moved),
    ("labels", || labels().kill()),
];

#[test]
fn images_of_the_format_give_the_answers_they_always_gave() {
    for (name, make) in SAMPLES {
        let [stored, answer] =
            ["image", "answers"].map(|kind| folder().join(format!("{name}.{kind}")));
        if std::env::var_os("BLOCKD_WRITE_GOLDEN").is_some() && !stored.exists() {
            let media = make();
            std::fs::create_dir_all(folder()).unwrap();
            std::fs::write(&stored, written(&media)).unwrap();
            std::fs::write(&answer, answers(&media)).unwrap();
        }
        let media = image(&std::fs::read_to_string(stored).unwrap());
        assert_eq!(answers(&media), std::fs::read_to_string(answer).unwrap(), "{name}");
    }
}

/// A new image is read by the code that reads the golden images, and has the same volumes. The
/// layout may differ.
#[test]
fn new_pools_have_the_content_of_the_images() {
    for (name, make) in SAMPLES {
        let stored = std::fs::read_to_string(folder().join(format!("{name}.answers"))).unwrap();
        let bytes = |text: &str| {
            let lines = text.lines().filter(|line| line.starts_with("bytes "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&answers(&make())), bytes(&stored), "{name}");
    }
}

/// The image has each structure of composite entries, and the mapper finds the content that was
/// written: all of it is repeated here.
#[test]
fn the_image_of_composite_entries_has_all_of_them_and_the_right_content() {
    let media = image(&std::fs::read_to_string(folder().join("composite.image")).unwrap());
    let blocks: Vec<&[u8]> = media.devices[0].chunks(PAGE).collect();
    let starting = |start: &[u8]| blocks.iter().filter(|block| block.starts_with(start)).count();
    assert!(starting(b"BDpg\x01\0\x02\0") > 1, "leaf pages of version 2");
    assert!(starting(b"BDpg\x04") > 1, "under pages");
    let units = blocks.iter().filter(|block| block.starts_with(b"BDwl")).flat_map(|block| {
        let count = u16::from_le_bytes([block[36], block[37]]);
        block[64..].chunks(32).take(count.into())
    });
    assert!(units.filter(|unit| unit[0] == 67).count() > 3, "records");

    let mut base = data(1, 3 * 16);
    base.resize(40 << 20, 0);
    let put = |content: &mut Vec<u8>, extent: usize, block: usize, bytes: &[u8]| {
        let at = extent * EXTENT + block * PAGE;
        content[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(&mut base, 300, 2, &data(2, 5));
    let before = base.clone();
    put(&mut base, 0, 3, &data(3, 1));
    put(&mut base, 1, 4, &data(4, 2));
    put(&mut base, 300, 3, &data(5, 1));
    let (between, mut clone) = (base.clone(), base.clone());
    put(&mut clone, 2, 1, &data(7, 2));
    put(&mut clone, 0, 0, &[0; EXTENT]);
    put(&mut clone, 300, 0, &[0; EXTENT]);
    put(&mut base, 0, 9, &data(6, 1));
    put(&mut base, 1, 12, &data(8, 1));
    put(&mut base, 0, 11, &data(9, 1));
    put(&mut base, 0, 3, &[0; PAGE]);
    let mut rig = Rig::open(media).unwrap();
    for (name, content) in
        [("base", base), ("before", before), ("between", between), ("clone", clone)]
    {
        let volumes = rig.engine.volumes();
        let id = volumes.iter().find(|volume| volume.name == name).unwrap().id;
        let attached = rig.attach(id);
        assert!(rig.read(&attached, 0, 40 << 20) == content, "{name}");
    }
    rig.check();
}

/// Sets feature words of every copy of the superblock.
fn with_features(media: &Media, at: usize, bits: u64) -> Media {
    let mut media = media.clone();
    for device in &mut media.devices {
        for copy in (0..device.len()).step_by(PAGE) {
            let page = &mut device[copy..copy + PAGE];
            if page.starts_with(b"BLOCKDsb") {
                page[at..at + 8].copy_from_slice(&bits.to_le_bytes());
                let crc = crc32c::crc32c_append(crc32c::crc32c(&page[..8]), &[0; 4]);
                let crc = crc32c::crc32c_append(crc, &page[12..]);
                page[8..12].copy_from_slice(&crc.to_le_bytes());
            }
        }
    }
    media
}

#[test]
fn features_of_later_versions_are_read_ignored_or_refused_by_name() {
    let text = std::fs::read_to_string(folder().join("clean.image")).unwrap();
    let clean = image(&text);
    let compat = with_features(&clean, 16, 1 << 40);
    Rig::open(compat).unwrap();

    let read_only = with_features(&clean, 24, 1 << 41);
    let error = Rig::open(read_only.clone()).unwrap_err();
    assert_eq!(error, MapperError::Unsupported { features: 1 << 41 });
    let options = OpenOptions { mode: OpenMode::ReadOnly, ..read_only.open_options() };
    let (mut media, before) = (read_only.clone(), read_only.devices.clone());
    let mut opening = Opening::new(options).unwrap();
    while let Some(mut command) = opening.poll() {
        media.run(&mut command);
        opening.complete(command, Ok(()));
    }
    assert_eq!(opening.finish().unwrap().engine.volumes().len(), 6);
    assert!(media.devices == before, "and nothing is written");
    let mut source = Image(&read_only);
    let mut reader = Reader::open(&mut source, &read_only.open_options().devices).unwrap();
    let report = check(&mut reader, &mut |_| Ok(())).unwrap();
    assert!(!report.damaged && report.findings[0].text.contains("unknown"), "{report:?}");

    let error = Rig::open(with_features(&clean, 32, 1 << 42)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("incompatible features 0x40000000000"), "{text}");
    // Another major version is refused; another minor is ignored.
    let words = |at: usize, version: u64| {
        let words = u64::from_le_bytes(clean.devices[0][at..at + 8].try_into().unwrap());
        with_features(&clean, at, words & !0xFFFF | version)
    };
    let error = Rig::open(words(12, 7)).unwrap_err().to_string();
    assert!(error.contains("format 7.0"), "{error}");
    Rig::open(words(14, 9)).unwrap();
}
