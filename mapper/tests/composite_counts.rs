//! Bytes that composite entries cost, counted at the devices: of folds after a snapshot is
//! deleted, and of writes to clones of one image.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::BTreeSet;

use blockd_mapper::create::CreateOptions;
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use common::*;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

/// An empty pool on a device of this size, whose untouched bytes take no memory.
fn pool(size: usize, extent: u32, composite: bool) -> Rig {
    let mut media = Media { devices: vec![vec![0; size]], ..Media::default() };
    let options = CreateOptions { extent_size: extent, composite, ..media.options() };
    media.create_with(&options);
    Rig::open(media).unwrap()
}

impl Rig {
    fn created(&mut self, control: Control) -> VolumeId {
        match self.control(control).unwrap() {
            Outcome::Created(id) => id,
            other => panic!("{other:?}"),
        }
    }

    fn snapshot(&mut self, source: VolumeId) -> VolumeId {
        self.created(Control::Snapshot { source, name: "s".to_owned() })
    }

    /// A volume of this size, full of data.
    fn filled(&mut self, size: usize) -> (VolumeId, Attachment) {
        let id = self.create("a", size as u64);
        let volume = self.attach(id);
        for at in (0..size).step_by(MIB) {
            self.write(&volume, at as u64, &[1; MIB]).unwrap();
        }
        (id, volume)
    }

    /// Until no composite entry is left.
    fn fold_all(&mut self) {
        for _ in 0..10_000 {
            self.now += 10_000_000;
            self.settle();
            if self.engine.fold_status().composite == 0 {
                return self.check();
            }
        }
        panic!("composite entries are left: {:?}", self.engine.fold_status());
    }

    /// Bytes that the device has read and written so far.
    fn moved(&self) -> (u64, u64) {
        (self.media.read_bytes, self.media.written_bytes)
    }
}

/// Counted is everything that the device reads and writes from the deletion on: the folds' data,
/// and the log and the pages of the map too. No client reads or writes meanwhile.
#[test]
fn deleting_a_snapshot_and_folding_moves_at_most_three_times_the_changed_bytes() {
    for extent_size in [64 << 10, 256 << 10] {
        let extent = usize::try_from(extent_size).unwrap();
        let size = 64 * extent;
        let mut rig = pool(2 * size + 16 * MIB, extent_size, true);
        let (id, volume) = rig.filled(size);
        let snapshot = rig.snapshot(id);
        let mut random = fastrand::Rng::with_seed(7);
        let mut expected = vec![1; size];
        let mut changed = BTreeSet::new();
        for _ in 0..200 {
            let at = random.usize(..size / BLOCK) * BLOCK;
            rig.write(&volume, at as u64, &[2; BLOCK]).unwrap();
            expected[at..at + BLOCK].fill(2);
            changed.insert(at);
        }
        rig.control(Control::Checkpoint).unwrap();
        let extents: BTreeSet<usize> = changed.iter().map(|at| at / extent).collect();
        assert_eq!(rig.engine.fold_status().folded, 0);
        let (read, written) = rig.moved();
        rig.control(Control::Delete { volume: snapshot }).unwrap();
        rig.fold_all();
        let (read, written) = (rig.moved().0 - read, rig.moved().1 - written);
        let status = rig.engine.fold_status();
        let folded = (status.folded, status.composite, status.settled);
        assert_eq!(folded, (extents.len() as u64, 0, true), "{status:?}");
        let changed = (changed.len() * BLOCK) as u64;
        println!("{extent}: {changed} bytes changed, {read} read, {written} written");
        assert!(read >= status.bytes && written >= status.bytes && status.bytes > 0, "{status:?}");
        assert!(read + written <= 3 * changed, "{read} read, {written} written, {changed} changed");
        assert!(rig.read(&volume, 0, size) == expected, "extents of {extent} bytes");
    }
}

/// Bytes that the device writes for each byte that a client writes, and bytes allocated for each:
/// 1,000 random blocks, spread over 20 clones of an image. All metadata up to the end of a
/// checkpoint is in the first.
fn of_clones(composite: bool) -> (f64, f64) {
    const CLONES: usize = 20;
    const WRITES: usize = 1000;
    const IMAGE: usize = 64 * MIB;
    let mut rig = pool(512 * MIB, 256 << 10, composite);
    let (id, volume) = rig.filled(IMAGE);
    let source = rig.snapshot(id);
    let clones: Vec<_> = (0..CLONES)
        .map(|number| {
            let name = format!("clone{number}");
            let clone = rig.created(Control::Clone { source, name, size: None });
            rig.attach(clone)
        })
        .collect();
    rig.control(Control::Checkpoint).unwrap();
    rig.worker.detach(volume);
    let (_, written) = rig.moved();
    let mapped = rig.engine.space().mapped;
    let mut random = fastrand::Rng::with_seed(3);
    for number in 0..WRITES {
        let at = random.usize(..IMAGE / BLOCK) * BLOCK;
        rig.write(&clones[number % CLONES], at as u64, &[2; BLOCK]).unwrap();
    }
    for clone in clones {
        rig.flush(&clone).unwrap();
    }
    rig.control(Control::Checkpoint).unwrap();
    let bytes = (WRITES * BLOCK) as f64;
    let written = (rig.moved().1 - written) as f64 / bytes;
    let allocated = (rig.engine.space().mapped - mapped) as f64 / bytes;
    println!("composite {composite}: {written:.2} times written, {allocated:.1} times allocated");
    (written, allocated)
}

#[test]
fn a_write_to_a_clone_costs_the_device_that_write_and_allocates_an_extent() {
    let (copied, allocated) = of_clones(false);
    assert!((50.0..70.0).contains(&copied) && (50.0..=64.0).contains(&allocated));
    let (written, same) = of_clones(true);
    assert!(written < 1.5, "{written}");
    assert_eq!(same, allocated, "an overlay is a whole extent, as a copy is");
}
