//! Pools to be read: histories of volumes, and what they hold.

use std::collections::BTreeMap;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::units::VolumeId;
use blockd_sim::rig::{Media, Rig};

use super::{Info, Place};

pub(super) const KIB: usize = 1 << 10;

pub(super) const MIB: usize = 1 << 20;

pub(super) const PAGE: usize = 4096;

/// The expected content of a volume.
#[derive(Clone)]
pub(super) struct Expected {
    pub(super) id: VolumeId,
    block: usize,
    pub(super) data: Vec<u8>,
}

/// A pool and, beside it, plain memory that the same requests were done to.
pub(super) struct World {
    pub(super) rig: Rig,
    pub(super) volumes: BTreeMap<String, Expected>,
    pub(super) random: fastrand::Rng,
}

impl World {
    pub(super) fn new(extent_size: usize, devices: &[usize], log: Option<u64>, seed: u64) -> Self {
        let media = Media::create(u32::try_from(extent_size).unwrap(), devices, log).unwrap();
        let random = fastrand::Rng::with_seed(seed);
        Self { rig: Rig::open(media).unwrap(), volumes: BTreeMap::new(), random }
    }

    fn id(&self, name: &str) -> VolumeId {
        self.volumes[name].id
    }

    fn data(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.volumes.get_mut(name).unwrap().data
    }

    pub(super) fn create(&mut self, name: &str, size: usize, block: usize) {
        let block_size = u32::try_from(block).unwrap();
        let control = Control::Create { name: name.to_owned(), size: size as u64, block_size };
        let id = self.rig.make(control).unwrap();
        self.volumes.insert(name.to_owned(), Expected { id, block, data: vec![0; size] });
    }

    pub(super) fn write(&mut self, name: &str, at: usize, len: usize) {
        let mut data = vec![0; len];
        self.random.fill(&mut data);
        self.rig.write(self.id(name), at as u64, &data).unwrap();
        self.data(name)[at..at + len].copy_from_slice(&data);
    }

    /// Writes of whole blocks at places of their own choice.
    pub(super) fn scatter(&mut self, name: &str, writes: usize) {
        let (block, size) = (self.volumes[name].block, self.volumes[name].data.len());
        for _ in 0..writes {
            let at = self.random.usize(..size / block) * block;
            let len = (self.random.usize(1..40) * block).min(size - at);
            self.write(name, at, len);
        }
    }

    /// Whole sub-blocks: the rest of a discarded range is undefined.
    fn discard(&mut self, name: &str, at: usize, len: usize) {
        self.rig.discard(self.id(name), at as u64, len).unwrap();
        self.data(name)[at..at + len].fill(0);
    }

    fn zero(&mut self, name: &str, at: usize, len: usize, unmap: bool) {
        self.rig.write_zeroes(self.id(name), at as u64, len, unmap).unwrap();
        self.data(name)[at..at + len].fill(0);
    }

    pub(super) fn resize(&mut self, name: &str, size: usize) {
        let control = Control::Resize { volume: self.id(name), size: size as u64 };
        self.rig.control(control).unwrap();
        self.data(name).resize(size, 0);
    }

    pub(super) fn snapshot(&mut self, source: &str, name: &str) {
        let control = Control::Snapshot { source: self.id(source), name: name.to_owned() };
        let id = self.rig.make(control).unwrap();
        self.volumes.insert(name.to_owned(), Expected { id, ..self.volumes[source].clone() });
    }

    pub(super) fn clone(&mut self, source: &str, name: &str, size: usize) {
        let (source_id, size64) = (self.id(source), Some(size as u64));
        let control = Control::Clone { source: source_id, name: name.to_owned(), size: size64 };
        let id = self.rig.make(control).unwrap();
        let from = self.volumes[source].clone();
        self.volumes.insert(name.to_owned(), Expected { id, ..from });
        self.data(name).resize(size, 0);
    }

    fn group(&mut self, members: &[(&str, &str)]) {
        let asked = members.iter().map(|(source, name)| (self.id(source), (*name).to_owned()));
        let control = Control::SnapshotGroup { members: asked.collect() };
        let Ok(Outcome::CreatedGroup(ids)) = self.rig.control(control) else { panic!("no group") };
        for ((source, name), id) in members.iter().zip(ids) {
            let expected = Expected { id, ..self.volumes[*source].clone() };
            self.volumes.insert((*name).to_owned(), expected);
        }
    }

    fn roll_back(&mut self, name: &str, snapshot: &str) {
        let (volume, from) = (self.id(name), self.id(snapshot));
        self.rig.control(Control::Rollback { volume, snapshot: from }).unwrap();
        *self.data(name) = self.volumes[snapshot].data.clone();
    }

    fn rename(&mut self, name: &str, to: &str) {
        let control = Control::Rename { volume: self.id(name), name: to.to_owned() };
        assert_eq!(self.rig.control(control), Ok(Outcome::Renamed));
        let expected = self.volumes.remove(name).unwrap();
        self.volumes.insert(to.to_owned(), expected);
    }

    pub(super) fn delete(&mut self, name: &str) {
        self.rig.control(Control::Delete { volume: self.id(name) }).unwrap();
        self.volumes.remove(name);
    }

    pub(super) fn flush(&mut self, name: &str) {
        self.rig.flush(self.id(name)).unwrap();
    }

    /// The process dies and another takes over.
    pub(super) fn reopen(&mut self) {
        self.rig = Rig::open(self.rig.media.clone()).unwrap();
    }

    pub(super) fn first_history(&mut self) {
        let long = "ü".repeat(64);
        self.create("plain", 5 * MIB + 3 * 512, 512);
        self.create("four", 40 * MIB, 4096);
        self.create("tail", MIB + 512, 512);
        self.create(&long, 3 * MIB, 512);
        self.create("empty", 20 * MIB, 4096);
        self.create("gone", 2 * MIB, 512);
        for name in ["plain", "four", "tail", &long, "gone"] {
            self.scatter(name, 12);
            self.flush(name);
        }
        self.write("plain", 2 * MIB, MIB);
        self.write("four", 0, 2 * MIB);
        self.write("tail", MIB, 512);
        self.discard("four", 128 * KIB, 512 * KIB);
        self.discard("plain", 2 * MIB + 8 * KIB, 100 * KIB);
        self.zero("plain", 2 * MIB + 700 * KIB + 512, 3 * 512, true);
        self.zero("plain", 2 * MIB + 300 * KIB + 512, 200 * KIB, false);
        self.snapshot("plain", "monday");
        self.scatter("plain", 8);
        self.clone("monday", "copy", 7 * MIB);
        self.scatter("copy", 8);
        self.write("copy", 6 * MIB, 512);
        self.delete("gone");
        self.rename("empty", "gone");
        self.flush("plain");
    }

    pub(super) fn second_history(&mut self) {
        self.resize("tail", MIB + 4096 + 512);
        self.resize("four", 20 * MIB + 12 * KIB);
        self.resize("four", 37 * MIB);
        self.snapshot("plain", "tuesday");
        self.group(&[("four", "of four"), ("tail", "a tail in a group"), ("copy", "copy's")]);
        self.scatter("plain", 8);
        self.scatter("four", 8);
        self.roll_back("plain", "monday");
        self.scatter("plain", 8);
        self.delete("monday");
        self.create("late", 3 * MIB, 512);
        self.scatter("late", 8);
        self.rename("tuesday", "wednesday");
        self.rename("gone", "tuesday");
        self.snapshot("tail", "of tail");
        self.clone("of tail", "copy of tail", 2 * MIB);
        self.discard("four", 0, 36 * MIB);
        self.scatter("four", 2);
        self.flush("late");
    }

    pub(super) fn third_history(&mut self) {
        self.resize("copy", 2 * MIB);
        self.resize("copy", 4 * MIB);
        self.roll_back("plain", "wednesday");
        self.scatter("plain", 4);
        self.delete("copy of tail");
        self.create("gone", 4 * MIB, 4096);
        self.scatter("gone", 4);
        self.flush("gone");
    }

    /// Compares every volume: the mapper's own reads, then the reader's view of the media.
    pub(super) fn compare(&mut self, place: &Place) -> Info {
        for (name, expected) in &self.volumes {
            let read = self.rig.read(expected.id, 0, expected.data.len()).unwrap();
            assert!(read == expected.data, "{place:?}: the mapper reads {name} wrong");
        }
        place.put(&self.rig.media);
        place.compare(&self.volumes).unwrap();
        Info::of(&place.run(&["check"]).unwrap())
    }
}
