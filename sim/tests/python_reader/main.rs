//! A reader written from `docs/ON_DISK_FORMAT.md` alone, in another language, against the output of
//! the mapper: if both agree, byte for byte, the document matches the code.

#![allow(clippy::unwrap_used, reason = "test code")]

mod composite;
mod world;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockd_mapper::engine::Control;
use blockd_mapper::format::Labels;
use blockd_sim::rig::Media;

use world::{Expected, KIB, MIB, PAGE, World};

/// The reader's description of a pool.
struct Info {
    clean: bool,
    pages: u64,
    log_blocks: u64,
}

impl Info {
    fn of(text: &str) -> Self {
        let line = text.lines().find(|line| line.contains("pages read")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (pages, log_blocks) = (words[0].parse().unwrap(), words[3].parse().unwrap());
        Self { clean: text.contains(", clean"), pages, log_blocks }
    }
}

/// A directory with the images of a pool.
#[derive(Debug)]
struct Place {
    directory: PathBuf,
    devices: usize,
}

impl Place {
    fn new(name: &str, devices: usize) -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python_reader").join(name);
        fs::create_dir_all(&directory).unwrap();
        Self { directory, devices }
    }

    fn image(&self, device: usize) -> PathBuf {
        self.directory.join(format!("disk{device}"))
    }

    fn put(&self, media: &Media) {
        for (device, bytes) in media.devices.iter().enumerate() {
            fs::write(self.image(device), bytes).unwrap();
        }
    }

    /// Turns one bit of an image over.
    fn flip(&self, device: usize, byte: usize) {
        let file = File::options().read(true).write(true).open(self.image(device)).unwrap();
        let mut bytes = [0];
        file.read_exact_at(&mut bytes, byte as u64).unwrap();
        file.write_all_at(&[bytes[0] ^ 0x10], byte as u64).unwrap();
    }

    /// Runs the reader. The error is its output on standard error.
    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("reader/blockd_reader.py");
        let mut command = Command::new("python3");
        // Any order of the devices must do.
        let images = (0..self.devices).rev().map(|device| self.image(device));
        command.args(["-B", "-E", "-S"]).arg(script).args(images).args(arguments);
        let output = match command.output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                panic!("this test needs python3: install the package `python3`")
            }
            other => other.unwrap(),
        };
        let said = String::from_utf8(output.stderr).unwrap();
        if output.status.success() {
            return Ok(String::from_utf8(output.stdout).unwrap());
        }
        assert!(said.starts_with("blockd_reader: "), "not an error by name: {said}");
        Err(said)
    }

    fn compare(&self, volumes: &BTreeMap<String, Expected>) -> Result<(), String> {
        let contents = self.directory.join("contents");
        let _ = fs::remove_dir_all(&contents);
        fs::create_dir(&contents).unwrap();
        let list = self.run(&["dump", contents.to_str().unwrap()])?;
        let names = list.lines().map(|line| line.rsplit('\t').next().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        assert!(names.iter().eq(volumes.keys()), "{list}");
        for (name, expected) in volumes {
            self.check_content(&contents.join(name), name, expected);
        }
        Ok(())
    }

    fn compare_one(&self, name: &str, expected: &Expected) -> Result<(), String> {
        let out = self.directory.join("content");
        self.run(&["read", name, "--out", out.to_str().unwrap()])?;
        self.check_content(&out, name, expected);
        Ok(())
    }

    fn check_content(&self, file: &Path, name: &str, expected: &Expected) {
        let content = fs::read(file).unwrap();
        assert_eq!(content.len(), expected.data.len(), "size of {name}");
        // Byte by byte only where it fails: that takes most of a test's time.
        let differs = || content.iter().zip(&expected.data).position(|(a, b)| a != b);
        assert!(content == expected.data, "{self:?}: first wrong byte of {name}: {:?}", differs());
    }
}

/// Every stage of a pool's life, read from its media alone.
fn whole_life(name: &str, extent_size: usize, devices: &[usize]) {
    let place = Place::new(name, devices.len());
    let mut world = World::new(extent_size, devices, None, 1);
    world.first_history();
    let info = world.compare(&place);
    assert!(!info.clean && info.pages == 0 && info.log_blocks > 4, "all is in the log");
    world.rig.control(Control::Checkpoint).unwrap();
    let info = world.compare(&place);
    assert!(!info.clean && info.pages > 4 && info.log_blocks == 0, "all is in the trees");
    world.second_history();
    let info = world.compare(&place);
    assert!(!info.clean && info.pages > 4 && info.log_blocks > 0, "some is in either");
    world.reopen();
    world.third_history();
    assert!(world.compare(&place).log_blocks > 1, "the log goes on over the opens");
    world.rig.control(Control::Close).unwrap();
    place.put(&world.rig.media);
    place.compare(&world.volumes).unwrap();
    let info = Info::of(&place.run(&["info"]).unwrap());
    assert!(info.clean && info.log_blocks == 0, "closed in order");
}

#[test]
fn one_device_small_extents() {
    whole_life("one", 64 * KIB, &[32 * MIB + 5000 * 512]);
}

#[test]
fn one_device_larger_extents() {
    whole_life("larger", 256 * KIB, &[48 * MIB]);
}

#[test]
fn two_devices() {
    whole_life("two", 256 * KIB, &[20 * MIB, 33 * MIB + 512]);
}

#[test]
fn two_devices_small_extents() {
    whole_life("small", 64 * KIB, &[12 * MIB, 21 * MIB]);
}

#[test]
fn a_log_that_has_gone_round() {
    let (place, blocks) = (Place::new("round", 1), 16);
    let mut world = World::new(64 * KIB, &[8 * MIB], Some(64 << 10), 3);
    world.create("a", 4 * MIB, 512);
    for round in 0..3 * blocks {
        world.scatter("a", 1);
        world.flush("a");
        if round == blocks / 2 || round == 2 * blocks {
            world.reopen();
        }
        if round % 11 == 10 {
            assert!(world.compare(&place).log_blocks < blocks);
        }
    }
}

/// A small pool with something in the trees and something in the log.
fn small_world() -> World {
    let mut world = World::new(64 * KIB, &[12 * MIB, 9 * MIB], None, 2);
    world.create("a", 20 * MIB, 512);
    world.create("b", MIB, 4096);
    world.scatter("a", 10);
    world.snapshot("a", "s");
    world.scatter("b", 3);
    world.rig.control(Control::Checkpoint).unwrap();
    for _ in 0..3 {
        world.scatter("a", 2);
        world.flush("a");
    }
    world
}

/// Where pages with these first bytes lie: device and byte.
fn pages_with(media: &Media, magic: &[u8]) -> Vec<(usize, usize)> {
    let devices = media.devices.iter().enumerate();
    let pages = devices
        .flat_map(|(device, bytes)| (0..bytes.len() / PAGE).map(move |page| (device, page * PAGE)));
    pages.filter(|&(device, at)| media.devices[device][at..].starts_with(magic)).collect()
}

#[test]
fn damaged_superblocks() {
    let place = Place::new("superblocks", 2);
    let mut world = small_world();
    world.compare(&place);
    let found = pages_with(&world.rig.media, b"BLOCKDsb");
    assert_eq!(found.len(), 8, "four copies on each device");
    let (name, expected) = world.volumes.first_key_value().unwrap();
    for &(device, at) in &found {
        let byte = at + world.random.usize(..PAGE);
        place.flip(device, byte);
        place.compare_one(name, expected).unwrap();
        place.flip(device, byte);
    }
    // Each device from its end alone, then one of them not at all.
    for &(device, at) in found.iter().filter(|(_, at)| *at <= PAGE) {
        place.flip(device, at + 300);
    }
    place.compare(&world.volumes).unwrap();
    for &(device, at) in &found[6..] {
        place.flip(device, at + 300);
    }
    let error = place.compare(&world.volumes).unwrap_err();
    assert!(error.contains("no superblock copy is sound"), "{error}");
}

#[test]
fn a_missing_device() {
    let mut place = Place::new("missing", 2);
    place.put(&small_world().rig.media);
    place.devices = 1;
    let error = place.run(&["info"]).unwrap_err();
    assert!(error.contains("device 1 ") && error.contains("is missing"), "{error}");
}

/// The log says where data of snapshots has been moved to.
#[test]
fn a_device_that_leaves() {
    let mut place = Place::new("leaves", 3);
    let mut world = World::new(64 * KIB, &[4 * MIB, 16 * MIB, 24 * MIB], None, 4);
    world.create("a", 12 * MIB, 512);
    world.write("a", 0, 12 * MIB);
    world.snapshot("a", "s");
    world.scatter("a", 10);
    world.rig.control(Control::Checkpoint).unwrap();
    world.rig.control(Control::RemoveDevice { device: 1 }).unwrap();
    compare_moves(&mut world, &place);
    world.rig.media.devices.remove(1);
    world.reopen();
    place.devices = 2;
    world.compare(&place);
}

/// Compares until everything has been moved.
fn compare_moves(world: &mut World, place: &Place) {
    let (mut in_log, mut rounds) = (0, 0);
    while world.rig.engine().evacuation_status().device.is_some() {
        assert!(rounds < 5_000, "{:?}", world.rig.engine().evacuation_status());
        world.rig.pass(150_000_000);
        world.flush("a");
        if world.rig.engine().evacuation_status().device.is_some() {
            in_log += u64::from(world.compare(place).log_blocks > 0);
        }
        rounds += 1;
    }
    assert!(in_log > 0, "no record of a move was in the log");
}

#[test]
fn a_device_that_shrinks() {
    let place = Place::new("shrinks", 2);
    let mut world = World::new(64 * KIB, &[4 * MIB, 32 * MIB], None, 5);
    for name in ["before", "a"] {
        world.create(name, 12 * MIB, 512);
        world.write(name, 0, 12 * MIB);
    }
    world.snapshot("a", "s");
    world.scatter("a", 10);
    world.delete("before");
    world.rig.control(Control::Checkpoint).unwrap();
    world.rig.control(Control::ShrinkDevice { device: 1, size: 20 << 20 }).unwrap();
    compare_moves(&mut world, &place);
    world.compare(&place);
    world.rig.media.devices[1].truncate(20 * MIB);
    world.reopen();
    world.compare(&place);
}

#[test]
fn labels_and_what_damage_costs() {
    let place = Place::new("labels", 2);
    let mut world = small_world();
    for (name, value) in [("a", "1"), ("s", "2")] {
        let (volume, labels) = (world.volumes[name].id, Labels::new([("k", value)]).unwrap());
        world.rig.control(Control::Label { volume, labels }).unwrap();
    }
    world.compare(&place);
    let sound = "a\tk=1\ns\tk=2\n0 pages of labels are damaged\n";
    assert_eq!(place.run(&["labels"]), Ok(sound.to_owned()));
    let mut outcomes = Vec::new();
    for (device, at) in pages_with(&world.rig.media.clone(), b"BDpg\x05") {
        place.flip(device, at + 66);
        outcomes.push(place.run(&["labels"]).unwrap().lines().count());
        place.compare(&world.volumes).unwrap();
        place.flip(device, at + 66);
    }
    // A former page of the first may be there as well.
    let lost = outcomes.iter().filter(|lines| **lines == 2).count();
    assert!(lost == 2 && outcomes.iter().all(|lines| (2..=3).contains(lines)), "{outcomes:?}");
}

#[test]
fn damaged_pages_and_log() {
    let place = Place::new("pages", 2);
    let mut world = small_world();
    world.compare(&place);
    let media = world.rig.media.clone();
    let mut errors = BTreeMap::new();
    for magic in [b"BDpg\x01", &b"BDpg\x02"[..], b"BDpg\x03", b"BDwl"] {
        for (device, at) in pages_with(&media, magic) {
            let byte = at + world.random.usize(..PAGE);
            place.flip(device, byte);
            // A page or block that is no longer needed may rot.
            if let Err(error) = place.run(&["volumes"]) {
                let allowed = match magic {
                    b"BDwl" => ["is damaged: block", "is damaged: block"],
                    _ => ["CRC doesn't fit", "no page is there"],
                };
                assert!(allowed.iter().any(|words| error.contains(words)), "{error}");
                *errors.entry(magic).or_insert(0) += 1;
            }
            place.flip(device, byte);
        }
    }
    assert_eq!(errors.len(), 4, "{errors:?}");
    place.compare(&world.volumes).unwrap();
}

/// The devices of a golden image: a line for each block that was written, where `*N` repeats the
/// byte before N times. Unwritten bytes are 0xEE.
fn golden(text: &str) -> Media {
    let mut media = Media::default();
    for line in text.lines() {
        if let Some(size) = line.strip_prefix("device ") {
            media.devices.push(vec![0xEE; size.parse().unwrap()]);
            continue;
        }
        let mut words = line.splitn(3, ' ');
        let [device, at] = [(); 2].map(|()| words.next().unwrap().parse::<usize>().unwrap());
        let (mut block, mut rest) = (Vec::new(), words.next().unwrap());
        while !rest.is_empty() {
            if let Some(repeat) = rest.strip_prefix('*') {
                let (count, behind) = repeat.split_once(' ').unwrap();
                let last = block[block.len() - 1];
                block.resize(block.len() + count.parse::<usize>().unwrap(), last);
                rest = behind;
            } else {
                block.push(u8::from_str_radix(&rest[..2], 16).unwrap());
                rest = &rest[2..];
            }
        }
        media.devices[device][at..at + PAGE].copy_from_slice(&block);
    }
    media
}

/// The images that every release has to read, by the answers that the mapper gave when they were
/// made: names, kinds, times, and the bytes of each volume, snapshot and clone.
#[test]
fn golden_images() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mapper/tests/golden");
    let (mut volumes, mut snapshots) = (0, 0);
    for name in ["new", "clean", "dirty", "devices", "devices-dirty", "full", "composite", "labels"]
    {
        let read = |kind: &str| fs::read_to_string(folder.join(format!("{name}.{kind}"))).unwrap();
        let (media, answers) = (golden(&read("image")), read("answers"));
        let place = Place::new(&format!("golden-{name}"), media.devices.len());
        place.put(&media);
        let contents = place.directory.join("contents");
        let _ = fs::remove_dir_all(&contents);
        fs::create_dir(&contents).unwrap();
        let list = place.run(&["dump", contents.to_str().unwrap()]).unwrap();
        place.run(&["check"]).unwrap();
        let mut printed = 0;
        for line in answers.lines() {
            if let Some((volume, sum)) =
                line.strip_prefix("bytes ").and_then(|rest| rest.rsplit_once(' '))
            {
                let bytes = fs::read(contents.join(volume)).unwrap();
                let found = format!("{:016x}", blockd_mapper::format::checksum::sum(&bytes));
                assert_eq!(found, sum, "{name}: {volume}");
                printed += 1;
            }
            let kind = line.split(' ').next().unwrap();
            if let ("volume" | "snapshot", Some((head, volume))) = (kind, line.split_once(" name "))
            {
                let made = head.rsplit(' ').next().unwrap();
                let found =
                    list.lines().find(|line| line.ends_with(&format!("\t{made}\t{volume}")));
                assert!(found.is_some_and(|line| line.contains(kind)), "{name}: {line}: {list}");
                snapshots += usize::from(kind == "snapshot");
            }
        }
        assert_eq!(printed, list.lines().count(), "{name}: {list}");
        let mut labels = String::new();
        let mut volume = "";
        for line in answers.lines() {
            if let Some((_, named)) = line.split_once(" name ") {
                volume = named;
            } else if let Some(label) = line.strip_prefix("label ") {
                labels.push_str(&format!("{volume}\t{label}\n"));
            }
        }
        assert_eq!(labels.is_empty(), name != "labels");
        labels.push_str("0 pages of labels are damaged\n");
        assert_eq!(place.run(&["labels"]), Ok(labels), "{name}");
        volumes += printed;
    }
    assert!(volumes >= 29 && snapshots >= 14, "{volumes} volumes, {snapshots} snapshots");
}
