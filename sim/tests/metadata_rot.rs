//! Damage to each page, log block and superblock copy of small pools: opening gives the right
//! content, or an error that names a structure or a device. Never other content, never a panic.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use blockd_mapper::engine::Control;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Labels;
use blockd_mapper::units::VolumeId;
use blockd_sim::rig::{BLOCK, Media, Rig};

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const GIB: u64 = 1 << 30;
/// Bits turned over in a structure, by byte: all kinds of header fields, body and end.
const BITS: [usize; 12] = [0, 5, 9, 20, 36, 41, 50, 57, 64, 100, 1600, 4095];

/// Names, sizes, and every block that isn't zero.
type Contents = BTreeMap<String, (u64, BTreeMap<u64, Vec<u8>>)>;
/// A structure's place: device and byte.
type Spot = (usize, usize);

/// A pool, with its expected content.
struct World {
    rig: Rig,
    ids: BTreeMap<String, VolumeId>,
    expected: Contents,
    random: fastrand::Rng,
    /// Media as they were, for writes that get lost.
    history: Vec<Media>,
}

impl World {
    fn new(devices: &[usize], seed: u64) -> Self {
        let media = Media::create(64 << 10, devices, Some(EXTENT as u64)).unwrap();
        let (ids, expected) = (BTreeMap::new(), BTreeMap::new());
        let random = fastrand::Rng::with_seed(seed);
        Self { rig: Rig::open(media).unwrap(), ids, expected, random, history: Vec::new() }
    }

    fn create(&mut self, name: &str, size: u64) {
        let control = Control::Create { name: name.to_owned(), size, block_size: 4096 };
        let id = self.rig.make(control).unwrap();
        self.ids.insert(name.to_owned(), id);
        self.expected.insert(name.to_owned(), (size, BTreeMap::new()));
    }

    fn write(&mut self, name: &str, block: u64, count: usize) {
        let mut data = vec![0; count * BLOCK];
        self.random.fill(&mut data);
        self.rig.write(self.ids[name], block * BLOCK as u64, &data).unwrap();
        let blocks = &mut self.expected.get_mut(name).unwrap().1;
        blocks.extend((block..).zip(data.chunks(BLOCK).map(<[u8]>::to_vec)));
    }

    fn share(&mut self, source: &str, name: &str, snapshot: bool) {
        let (id, to) = (self.ids[source], name.to_owned());
        let made = self.rig.make(if snapshot {
            Control::Snapshot { source: id, name: to }
        } else {
            Control::Clone { source: id, name: to, size: None }
        });
        self.ids.insert(name.to_owned(), made.unwrap());
        let same = self.expected[source].clone();
        self.expected.insert(name.to_owned(), same);
    }

    fn label(&mut self, name: &str, labels: &[(&str, &str)]) {
        let labels = Labels::new(labels.iter().copied()).unwrap();
        self.rig.control(Control::Label { volume: self.ids[name], labels }).unwrap();
        self.history.push(self.rig.media.clone());
    }

    fn flush(&mut self, name: &str) {
        self.rig.flush(self.ids[name]).unwrap();
        self.history.push(self.rig.media.clone());
    }

    fn checkpoint(&mut self) {
        self.rig.control(Control::Checkpoint).unwrap();
        self.history.push(self.rig.media.clone());
    }

    /// Several commits behind the last checkpoint, the last of them in one block of the log.
    fn commits(mut self, name: &str, last_first_block: u64) -> Sample {
        self.flush(name);
        let before = self.expected.clone();
        let earlier = self.rig.media.clone();
        self.write(name, last_first_block, 2);
        self.flush(name);
        let media = self.rig.media.clone();
        let changed = |spot: &Spot| block(&earlier, *spot) != block(&media, *spot);
        let last: Vec<Spot> = found(&media, b"BDwl").into_iter().filter(changed).collect();
        assert_eq!(last.len(), 1, "the last commit is one block");
        Sample { media, history: self.history, expected: self.expected, before, last: last[0] }
    }
}

/// A pool that is damaged again and again.
struct Sample {
    media: Media,
    history: Vec<Media>,
    expected: Contents,
    /// Without the last commit, whose damage looks like a loss of power in it.
    before: Contents,
    last: Spot,
}

/// The outcome.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Ending {
    Right,
    Refused,
    WithoutLastCommit,
}

fn block(media: &Media, (device, at): Spot) -> &[u8] {
    &media.devices[device][at..at + BLOCK]
}

/// Every block that begins with these bytes.
fn found(media: &Media, magic: &[u8]) -> Vec<Spot> {
    let starts = |device: usize| (0..media.devices[device].len()).step_by(BLOCK);
    let spots = (0..media.devices.len()).flat_map(|d| starts(d).map(move |at| (d, at)));
    spots.filter(|spot| block(media, *spot).starts_with(magic)).collect()
}

fn damaged(media: &Media, changes: &[(Spot, Vec<u8>)]) -> Media {
    let mut media = media.clone();
    for ((device, at), bytes) in changes {
        media.devices[*device][*at..at + BLOCK].copy_from_slice(bytes);
    }
    media
}

fn contents(media: Media) -> Result<Contents, MapperError> {
    let mut rig = Rig::open(media)?;
    let mut all = Contents::new();
    for volume in rig.engine().volumes() {
        let blocks = rig.blocks(volume.id, volume.size)?;
        all.insert(volume.name, (volume.size, blocks));
    }
    assert_eq!(rig.check(), Ok(()));
    Ok(all)
}

impl Sample {
    /// Opens a damaged pool and checks the outcome.
    fn ending(&self, case: &str, changes: &[(Spot, Vec<u8>)]) -> Ending {
        let media = damaged(&self.media, changes);
        let result = catch_unwind(AssertUnwindSafe(|| contents(media)));
        match result.unwrap_or_else(|_| panic!("{case}: panicked")) {
            Ok(contents) if contents == self.expected => Ending::Right,
            Ok(contents) if contents == self.before && changes[0].0 == self.last => {
                Ending::WithoutLastCommit
            }
            Ok(_) => panic!("{case}: other content"),
            Err(MapperError::Format(_) | MapperError::Device { .. }) => Ending::Refused,
            Err(error) => panic!("{case}: names no structure: {error:?}"),
        }
    }

    /// The ways in which one structure goes bad.
    fn kinds(&self, spot: Spot, magic: &[u8]) -> Vec<(String, Vec<u8>)> {
        let bytes = block(&self.media, spot).to_vec();
        let mut kinds = vec![("zeroed".to_owned(), vec![0; BLOCK])];
        for at in BITS {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            kinds.push((format!("byte {at} rotten"), flipped));
        }
        let others = found(&self.media, magic);
        let at = others.iter().position(|other| *other == spot).unwrap_or(0);
        for step in [1, others.len() / 2, others.len() - 1] {
            let other = others[(at + step) % others.len()];
            kinds.push((format!("misplaced from {other:?}"), block(&self.media, other).to_vec()));
        }
        let older = self.history.iter().rev().map(|media| block(media, spot));
        let older: BTreeSet<&[u8]> = older.filter(|old| *old != bytes).collect();
        kinds.extend(older.into_iter().map(|old| ("older".to_owned(), old.to_vec())));
        kinds.retain(|(_, damage)| *damage != bytes);
        kinds
    }

    /// Damages pages of labels, in every way: it costs labels at the most.
    fn damage_labels(&self) {
        let mut lost = 0;
        for spot in found(&self.media, b"BDpg\x05") {
            for (kind, damage) in self.kinds(spot, b"BDpg") {
                let media = damaged(&self.media, &[(spot, damage)]);
                let rig = Rig::open(media.clone()).unwrap_or_else(|e| panic!("{kind}: {e}"));
                let labels = rig.engine().volumes().into_iter().map(|one| one.labels);
                let labels: BTreeSet<_> = labels.map(|one| one.text().to_owned()).collect();
                assert!(labels.iter().all(|text| text.is_empty() || text == "k=v\n"), "{labels:?}");
                lost += u64::from(!labels.contains("k=v\n"));
                assert!(contents(media).unwrap() == self.expected, "{spot:?} {kind}");
            }
        }
        assert!(lost > 10, "{lost}: the page in use is among them");
    }

    /// Damages every structure of a kind, each in every way. Whether one is in use is known by
    /// whether the pool opens without it; then no other damage to it may pass either.
    fn damage_all(&self, magic: &[u8]) -> BTreeMap<Ending, u64> {
        let mut counts = BTreeMap::new();
        for spot in found(&self.media, magic) {
            let used = self.ending("gone", &[(spot, vec![0; BLOCK])]);
            assert!(magic != b"BDpg" || used != Ending::WithoutLastCommit, "{spot:?}");
            for (kind, damage) in self.kinds(spot, magic) {
                let case = format!("{spot:?} {kind}");
                let ending = self.ending(&case, &[(spot, damage)]);
                assert_eq!(ending, used, "{case}");
                *counts.entry(ending).or_default() += 1;
            }
        }
        counts
    }

    /// Damages one to all four superblock copies of a device. While one is left the pool opens.
    fn damage_superblocks(&self) -> BTreeMap<Ending, u64> {
        let mut counts = BTreeMap::new();
        let copies = found(&self.media, b"BLOCKDsb");
        for device in 0..self.media.devices.len() {
            let own: Vec<Spot> = copies.iter().copied().filter(|c| c.0 == device).collect();
            assert_eq!(own.len(), 4);
            for chosen in 1_u8..16 {
                let bad: Vec<Spot> =
                    (0..4).filter(|bit| chosen >> bit & 1 == 1).map(|bit| own[bit]).collect();
                let kinds: Vec<_> = bad.iter().map(|spot| self.superblock_kinds(*spot)).collect();
                for number in 0..kinds[0].len() {
                    let changes = bad.iter().zip(&kinds);
                    let changes: Vec<_> =
                        changes.map(|(spot, kinds)| (*spot, kinds[number].1.clone())).collect();
                    let case = format!("superblocks {bad:?} {}", kinds[0][number].0);
                    let ending = self.ending(&case, &changes);
                    let wanted = if bad.len() == 4 { Ending::Refused } else { Ending::Right };
                    assert_eq!(ending, wanted, "{case}");
                    *counts.entry(ending).or_default() += 1;
                }
            }
        }
        counts
    }

    /// The replacements of a copy: rotten, zero, a page, an older generation of itself. (All copies
    /// of the only device at their older generation would be the older pool, so the last is left
    /// out.)
    fn superblock_kinds(&self, spot: Spot) -> Vec<(String, Vec<u8>)> {
        let mut kinds = vec![("zeroed".to_owned(), vec![0; BLOCK])];
        for at in [0, 8, 41, 72, 88, 137, 165, 530, 4095] {
            let mut flipped = block(&self.media, spot).to_vec();
            flipped[at] ^= 0x20;
            kinds.push((format!("byte {at} rotten"), flipped));
        }
        let page = found(&self.media, b"BDpg")[0];
        kinds.push(("a page".to_owned(), block(&self.media, page).to_vec()));
        kinds
    }

    /// Copies of an older generation, or of another device: never other content.
    fn stale_superblocks(&self) -> BTreeMap<Ending, u64> {
        let mut counts = BTreeMap::new();
        let copies = found(&self.media, b"BLOCKDsb");
        for spot in &copies {
            let own: Vec<Spot> = copies.iter().copied().filter(|c| c.0 == spot.0).collect();
            for old in &self.history {
                // Lost writes of this copy alone, and of all but this one.
                let rest: Vec<Spot> = own.iter().copied().filter(|c| c != spot).collect();
                for stale in [vec![*spot], rest] {
                    let changes: Vec<_> =
                        stale.iter().map(|s| (*s, block(old, *s).to_vec())).collect();
                    let ending = self.ending(&format!("{stale:?} not written"), &changes);
                    assert_eq!(ending, Ending::Right, "{stale:?}");
                    *counts.entry(ending).or_default() += 1;
                }
            }
            for other in copies.iter().filter(|other| other.0 != spot.0) {
                let change = (*spot, block(&self.media, *other).to_vec());
                let ending = self.ending(&format!("{other:?} written to {spot:?}"), &[change]);
                *counts.entry(ending).or_default() += 1;
            }
        }
        counts
    }

    /// Everything, with the least number of pages that must be in use.
    fn damage_everything(&self, name: &str, levels: u64) {
        assert_eq!(self.ending("undamaged", &[(self.last, self.copy(self.last))]), Ending::Right);
        for (magic, what) in [(&b"BDpg"[..], "pages"), (b"BDwl", "log")] {
            let counts = self.damage_all(magic);
            println!("{name}, {what}: {counts:?}");
            assert!(counts[&Ending::Refused] > 20, "{what}");
            assert!(counts[&Ending::Right] > 20, "{what}");
            assert_eq!(counts.contains_key(&Ending::WithoutLastCommit), what == "log");
        }
        let tops = found(&self.media, b"BDpg").into_iter().map(|spot| block(&self.media, spot)[5]);
        assert_eq!(tops.max().map(u64::from), Some(levels), "levels of index pages");
        println!("{name}, superblocks: {:?}", self.damage_superblocks());
        println!("{name}, superblocks not written: {:?}", self.stale_superblocks());
    }

    fn copy(&self, spot: Spot) -> Vec<u8> {
        block(&self.media, spot).to_vec()
    }
}

/// A volume, its snapshot and a clone of that, over two checkpoints and some commits.
fn family(devices: &[usize], seed: u64) -> Sample {
    let mut world = World::new(devices, seed);
    world.create("base", 40 * MIB as u64);
    world.write("base", 0, 20);
    world.write("base", 5000, 4);
    world.write("base", 9000, 4);
    world.checkpoint();
    world.share("base", "snapshot", true);
    world.write("base", 3, 2);
    world.share("snapshot", "copy", false);
    world.write("copy", 5001, 3);
    world.checkpoint();
    world.write("copy", 40, 2);
    world.checkpoint();
    for round in 0..4 {
        world.write("base", 5100 + 16 * round, 3);
        world.flush("base");
    }
    world.create("late", MIB as u64);
    world.write("late", 7, 1);
    world.commits("late", 32)
}

#[test]
fn one_device() {
    family(&[6 * MIB], 1).damage_everything("one device", 1);
}

#[test]
fn labels() {
    let mut world = World::new(&[6 * MIB], 4);
    world.create("a", MIB as u64);
    world.create("b", MIB as u64);
    world.write("a", 3, 2);
    world.label("b", &[("k", "v")]);
    world.commits("a", 8).damage_labels();
}

#[test]
fn two_devices() {
    family(&[4 * MIB, 3 * MIB], 2).damage_everything("two devices", 1);
}

#[test]
fn index_of_two_levels() {
    let mut world = World::new(&[6 * MIB], 3);
    world.create("wide", 65 * GIB);
    let per_leaf = 256 * (EXTENT / BLOCK) as u64;
    for slot in [0, 1, 251, 252, 2000, 4159] {
        world.write("wide", slot * per_leaf + 5, 3);
    }
    world.checkpoint();
    world.share("wide", "snapshot", true);
    for slot in [1, 252, 3000] {
        world.write("wide", slot * per_leaf + 6, 4);
    }
    world.checkpoint();
    for slot in [251, 2000, 4000] {
        world.write("wide", slot * per_leaf, 1);
        world.flush("wide");
    }
    world.commits("wide", 2001 * per_leaf).damage_everything("two levels", 2);
}
