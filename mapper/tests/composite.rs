//! Composite entries: the first write of a shared extent lays an extent over it.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::CreateOptions;

use blockd_mapper::engine::{Control, DiffRequest, Outcome, RangeState};
use blockd_mapper::io::{IoError, IoOp};
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::*;
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::{RingMemory, VecRingMemory};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use common::*;
use std::sync::Arc;

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const BLOCK: usize = 4096;

fn pool_of(composite: bool) -> Media {
    let mut media = Media::new(&[64 * MIB]);
    let options = CreateOptions { composite, ..media.options() };
    media.create_with(&options);
    media
}

impl Rig {
    fn snapshot(&mut self, source: VolumeId, name: &str) -> VolumeId {
        match self.control(Control::Snapshot { source, name: name.to_owned() }).unwrap() {
            Outcome::Created(id) => id,
            other => panic!("{other:?}"),
        }
    }

    /// Plans a write, returns the bytes that its operations copy and write, and does it.
    fn cost(&mut self, volume: &Attachment, offset: usize, data: &[u8]) -> (u64, u64) {
        let (offset, len) = (offset as u64, data.len() as u64);
        let mut plan = Plan::with_capacity(64);
        let mut step = self.worker.write(volume, offset, len, false, &mut plan).unwrap();
        if step == Step::Park(ParkReason::Space) {
            self.settle();
            step = self.worker.write(volume, offset, len, false, &mut plan).unwrap();
        }
        assert_eq!(step, Step::Issue { covered: len });
        let sum = |is_meant: fn(&OpKind) -> bool| {
            plan.ops().iter().filter(|op| is_meant(&op.kind)).map(|op| op.len).sum()
        };
        let costs = (
            sum(|kind| matches!(kind, OpKind::Copy { .. })),
            sum(|kind| matches!(kind, OpKind::Write { .. } | OpKind::WriteZeroes { .. })),
        );
        let failed = self.worker.complete(volume, &mut plan, Err(IoError::Media));
        assert!(failed.is_err());
        self.write(volume, offset, data).unwrap();
        costs
    }

    /// A volume with an extent full of ones, and a snapshot of it.
    fn shared(&mut self) -> (VolumeId, Attachment, VolumeId) {
        let id = self.create("a", 1 << 30);
        let volume = self.attach(id);
        self.write(&volume, 0, &[1; EXTENT]).unwrap();
        let snapshot = self.snapshot(id, "s");
        (id, volume, snapshot)
    }

    fn mapped(&self, id: VolumeId) -> u64 {
        self.pool.summaries().iter().find(|one| one.id == id).unwrap().mapped / EXTENT as u64
    }
}

/// An extent of ones with some blocks of another value.
fn ones_with(blocks: &[(usize, u8)]) -> Vec<u8> {
    let mut bytes = vec![1; EXTENT];
    for &(block, value) in blocks {
        bytes[block * BLOCK..(block + 1) * BLOCK].fill(value);
    }
    bytes
}

#[test]
fn the_first_write_after_a_snapshot_copies_nothing() {
    for (composite, copied) in [(false, EXTENT - BLOCK), (true, 0)] {
        let mut rig = Rig::open(pool_of(composite)).unwrap();
        let (id, volume, snapshot) = rig.shared();
        let costs = rig.cost(&volume, 3 * BLOCK, &[2; BLOCK]);
        assert_eq!(costs, (copied as u64, BLOCK as u64), "composite {composite}");
        assert_eq!(rig.cost(&volume, 5 * BLOCK, &[3; BLOCK]), (0, BLOCK as u64));
        assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(3, 2), (5, 3)]));
        let old = rig.attach(snapshot);
        assert_eq!(rig.read(&old, 0, EXTENT), ones_with(&[]));
        assert_eq!(rig.mapped(id), if composite { 2 } else { 1 });
        rig.check();
    }
}

#[test]
fn a_block_written_in_part_takes_the_rest_from_below() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (_, volume, _) = rig.shared();
    assert_eq!(rig.cost(&volume, 512, &[2; 512]), (BLOCK as u64, 512));
    // In the overlay by now.
    assert_eq!(rig.cost(&volume, 1024, &[3; 512]), (0, 512));
    // Another block of the overlay, which still takes its rest from the base.
    assert_eq!(rig.cost(&volume, 7 * BLOCK, &[4; 512]), (BLOCK as u64, 512));
    let mut expected = ones_with(&[]);
    expected[512..1024].fill(2);
    expected[1024..1536].fill(3);
    expected[7 * BLOCK..7 * BLOCK + 512].fill(4);
    assert_eq!(rig.read(&volume, 0, EXTENT), expected);
    rig.check();
}

#[test]
fn a_write_that_leaves_little_of_the_extent_copies_that() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, _) = rig.shared();
    // Sixteen blocks: with one left, an eighth is not.
    assert_eq!(rig.cost(&volume, 0, &[2; 15 * BLOCK]), (BLOCK as u64, 15 * BLOCK as u64));
    assert_eq!(rig.mapped(id), 1);
    rig.check();
}

#[test]
fn a_base_of_which_nothing_is_read_any_more_is_dropped() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, snapshot) = rig.shared();
    for block in 0..16 {
        assert_eq!(rig.mapped(id), if block == 0 { 1 } else { 2 });
        rig.write(&volume, (block * BLOCK) as u64, &[2; BLOCK]).unwrap();
    }
    assert_eq!(rig.mapped(id), 1);
    rig.check();
    let old = rig.attach(snapshot);
    assert_eq!(rig.read(&old, 0, EXTENT), ones_with(&[]));
    assert_eq!(rig.read(&volume, 0, EXTENT), [2; EXTENT]);
}

#[test]
fn a_second_snapshot_copies_the_overlay_and_not_the_base() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, first) = rig.shared();
    rig.write(&volume, 0, &[2; 2 * BLOCK]).unwrap();
    let second = rig.snapshot(id, "t");
    assert_eq!(rig.cost(&volume, 9 * BLOCK, &[3; BLOCK]), (2 * BLOCK as u64, BLOCK as u64));
    let expected = [
        (first, ones_with(&[])),
        (second, ones_with(&[(0, 2), (1, 2)])),
        (id, ones_with(&[(0, 2), (1, 2), (9, 3)])),
    ];
    for (id, content) in &expected {
        let attached = rig.attach(*id);
        assert_eq!(&rig.read(&attached, 0, EXTENT), content, "{id}");
    }
    rig.check();
    for id in [first, second] {
        rig.control(Control::Delete { volume: id }).unwrap();
        rig.check();
    }
    assert_eq!(rig.read(&volume, 0, EXTENT), expected[2].1);
    assert_eq!(rig.mapped(id), 1, "folded");
}

#[test]
fn a_discard_reaches_overlay_and_base() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, snapshot) = rig.shared();
    rig.write(&volume, 0, &[2; 2 * BLOCK]).unwrap();
    // A block of both, one of the overlay alone to come, one of the base alone.
    rig.discard(&volume, 0, BLOCK);
    rig.discard(&volume, (4 * BLOCK) as u64, BLOCK);
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 0), (1, 2), (4, 0)]));
    assert_eq!(rig.mapped(id), 2);
    // Nothing of the base is left.
    rig.discard(&volume, (2 * BLOCK) as u64, 14 * BLOCK);
    let mut expected = vec![0; EXTENT];
    expected[BLOCK..2 * BLOCK].fill(2);
    assert_eq!(rig.read(&volume, 0, EXTENT), expected);
    assert_eq!(rig.mapped(id), 1);
    rig.check();
    // All of an extent in one go.
    rig.write(&volume, EXTENT as u64, &[1; EXTENT]).unwrap();
    rig.control(Control::Snapshot { source: id, name: "t".to_owned() }).unwrap();
    rig.write(&volume, EXTENT as u64, &[5; BLOCK]).unwrap();
    assert_eq!(rig.mapped(id), 3);
    rig.discard(&volume, EXTENT as u64, EXTENT);
    assert_eq!((rig.mapped(id), rig.read(&volume, EXTENT as u64, EXTENT)), (1, vec![0; EXTENT]));
    rig.check();
    let old = rig.attach(snapshot);
    assert_eq!(rig.read(&old, 0, EXTENT), ones_with(&[]));
}

#[test]
fn composite_entries_survive_the_process_and_a_loss_of_power() {
    let mut media = pool_of(true);
    for checkpoint in [false, true] {
        let ring = Arc::new(VecRingMemory::new(4, 256));
        let options = OpenOptions { ring: Some(ring.clone()), ..media.open_options() };
        let mut rig = Rig::open_with(media, options).unwrap();
        let name = format!("a{checkpoint}");
        let id = rig.create(&name, 1 << 30);
        let volume = rig.attach(id);
        rig.write(&volume, 0, &[1; 2 * EXTENT]).unwrap();
        rig.snapshot(id, &format!("s{checkpoint}"));
        rig.write(&volume, 0, &[2; BLOCK]).unwrap();
        rig.flush(&volume).unwrap();
        if checkpoint {
            rig.control(Control::Checkpoint).unwrap();
        }
        // In the ring only.
        rig.write(&volume, BLOCK as u64, &[3; BLOCK]).unwrap();
        rig.write(&volume, EXTENT as u64, &[4; BLOCK]).unwrap();
        let mut rig = Rig::with_ring(ring, rig.kill()).unwrap();
        let volume = rig.attach(id);
        assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2), (1, 3)]));
        assert_eq!(rig.read(&volume, EXTENT as u64, EXTENT), ones_with(&[(0, 4)]));
        rig.check();
        rig.flush(&volume).unwrap();
        // Without the ring.
        let mut rig = Rig::open(rig.kill()).unwrap();
        let volume = rig.attach(id);
        assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2), (1, 3)]));
        assert_eq!(rig.read(&volume, EXTENT as u64, EXTENT), ones_with(&[(0, 4)]));
        assert_eq!(rig.mapped(id), 4);
        rig.check();
        media = rig.kill();
    }
}

#[test]
fn a_difference_is_that_of_the_blocks_and_not_of_their_extents() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; MIB]).unwrap();
    let snapshot = rig.snapshot(id, "s");
    for extent in 0..16 {
        rig.write(&volume, (extent * EXTENT + 5 * BLOCK) as u64, &[2; BLOCK]).unwrap();
    }
    let request =
        DiffRequest { volume: id, base: Some(snapshot), from: 0, to: MIB as u64, max_ranges: 1000 };
    let part = rig.engine.diff(&request).unwrap();
    let changed = part.ranges.iter().filter(|range| range.state == RangeState::Data);
    assert_eq!(changed.map(|range| range.len).sum::<u64>(), 16 * BLOCK as u64);
}

#[test]
fn a_base_with_one_holder_left_takes_what_was_written_over_it() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, snapshot) = rig.shared();
    rig.write(&volume, 3 * BLOCK as u64, &[2; 2 * BLOCK]).unwrap();
    rig.flush(&volume).unwrap();
    rig.check();
    assert_eq!((rig.mapped(id), rig.engine.fold_status().folded), (2, 0), "it is shared");
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.check();
    let status = rig.engine.fold_status();
    assert_eq!((status.folded, status.bytes), (1, 2 * BLOCK as u64));
    assert_eq!((rig.mapped(id), status.composite, status.settled), (1, 0, true));
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(3, 2), (4, 2)]));
    let mut rig = Rig::open(rig.kill()).unwrap();
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(3, 2), (4, 2)]));
}

#[test]
fn a_crowded_overlay_takes_the_rest_of_its_base() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, snapshot) = rig.shared();
    for block in 0..12 {
        rig.write(&volume, block * BLOCK as u64, &[2; BLOCK]).unwrap();
    }
    rig.check();
    assert_eq!((rig.mapped(id), rig.engine.fold_status().folded), (2, 0), "three quarters");
    rig.write(&volume, 12 * BLOCK as u64, &[2; BLOCK]).unwrap();
    rig.check();
    let status = rig.engine.fold_status();
    assert_eq!((status.folded, status.bytes), (1, 3 * BLOCK as u64));
    assert_eq!(rig.mapped(id), 1);
    let mut expected = vec![2; EXTENT];
    expected[13 * BLOCK..].fill(1);
    assert_eq!(rig.read(&volume, 0, EXTENT), expected);
    let old = rig.attach(snapshot);
    assert_eq!(rig.read(&old, 0, EXTENT), ones_with(&[]));
}

// K5: a durable map has to hide what the fold writes over.
#[test]
fn nothing_is_folded_down_before_its_entry_is_durable() {
    let media = pool_of(true);
    // No fold for a second, and no commit that is not asked for.
    let tuning = Tuning { fold_rate: 1, commit_interval_ns: 1 << 40, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let (id, volume, snapshot) = rig.shared();
    rig.write(&volume, 0, &[2; BLOCK]).unwrap();
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.write(&volume, BLOCK as u64, &[3; BLOCK]).unwrap();
    rig.now += 2_000_000_000;
    rig.settle();
    assert_eq!((rig.mapped(id), rig.engine.fold_status().folded), (2, 0));
    rig.flush(&volume).unwrap();
    // The checkpoint that is due comes first.
    for _ in 0..2 {
        rig.now += 1 << 41;
        rig.settle();
    }
    assert_eq!((rig.mapped(id), rig.engine.fold_status().folded), (1, 1));
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2), (1, 3)]));
}

// K5: folds of a leaf do not wait for each other, but for a write among them.
#[test]
fn a_write_after_a_fold_holds_the_folds_of_its_leaf_up() {
    let media = pool_of(true);
    let tuning = Tuning { fold_rate: 0, commit_interval_ns: 1 << 50, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; 40 * EXTENT]).unwrap();
    let snapshot = rig.snapshot(id, "s");
    for extent in 0..40 {
        rig.write(&volume, (extent * EXTENT) as u64, &[2; BLOCK]).unwrap();
    }
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    for _ in 0..4 {
        rig.flush(&volume).unwrap();
        rig.now += 1_000_000_000;
        rig.settle();
    }
    // At first for sixteen blocks.
    rig.engine.set_fold_rate(16 * BLOCK as u64);
    rig.settle();
    assert_eq!(rig.engine.fold_status().folded, 16);
    rig.write(&volume, (39 * EXTENT + BLOCK) as u64, &[3; BLOCK]).unwrap();
    for _ in 0..5 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    assert_eq!(rig.engine.fold_status().folded, 16, "an entry is not durable");
    rig.flush(&volume).unwrap();
    rig.engine.fold_now();
    for _ in 0..5 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    assert_eq!(rig.engine.fold_status().folded, 40);
}

#[test]
fn without_a_rate_nothing_is_folded() {
    let media = pool_of(true);
    let tuning = Tuning { fold_rate: 0, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let (id, volume, snapshot) = rig.shared();
    rig.write(&volume, 0, &[2; BLOCK]).unwrap();
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.check();
    let status = rig.engine.fold_status();
    assert_eq!((rig.mapped(id), status.composite, status.settled), (2, 1, false));
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2)]));
    rig.engine.set_fold_rate(64 << 20);
    rig.now += 1_000_000_000;
    rig.settle();
    let status = rig.engine.fold_status();
    assert_eq!((rig.mapped(id), status.composite, status.settled), (1, 0, true));
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2)]));
}

#[test]
fn a_fold_ends_without_a_change_when_older_io_goes_on() {
    let media = pool_of(true);
    // No fold for a second.
    let tuning = Tuning { fold_rate: 1, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let (_, volume, snapshot) = rig.shared();
    let other = rig.create("b", 1 << 20);
    let other = rig.attach(other);
    rig.write(&other, 0, &[9; BLOCK]).unwrap();
    rig.write(&volume, 0, &[2; BLOCK]).unwrap();
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    let (mut stuck, mut waiting) = (Plan::with_capacity(64), Plan::with_capacity(64));
    let step = rig.worker.read(&other, 0, BLOCK as u64, &mut stuck);
    assert!(matches!(step, Ok(Step::Issue { .. })), "{step:?}");
    rig.now += 2_000_000_000;
    rig.settle();
    assert_eq!(rig.engine.fold_status().running, 1);
    let step = rig.worker.write(&volume, 0, BLOCK as u64, false, &mut waiting);
    assert_eq!(step, Ok(Step::Park(ParkReason::InFlight)));
    let events = rig.pool.events();
    rig.now += 200_000_000;
    rig.settle();
    assert_eq!(rig.engine.fold_status().running, 0);
    assert!(rig.pool.events() != events && rig.pool.take_wakeups() != 0, "nothing wakes it");
    rig.write(&volume, 0, &[3; BLOCK]).unwrap();
    rig.worker.complete(&other, &mut stuck, Ok(())).unwrap();
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 3)]));
}

#[test]
fn a_volume_that_always_has_something_to_fold_leaves_others_their_turn() {
    let media = pool_of(true);
    // A block a second.
    let tuning = Tuning { fold_rate: BLOCK as u64, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let ids = ["busy", "quiet"].map(|name| rig.create(name, 1 << 30));
    let volumes = ids.map(|id| rig.attach(id));
    for volume in &volumes {
        rig.write(volume, 0, &[1; EXTENT]).unwrap();
    }
    for round in 0..8 {
        let names = ids.map(|id| format!("{id}-{round}"));
        let busy = if round == 0 { &ids[..] } else { &ids[..1] };
        let taken: Vec<_> = busy.iter().zip(&names).map(|(id, n)| rig.snapshot(*id, n)).collect();
        for volume in &volumes[..busy.len()] {
            rig.write(volume, 0, &[2; BLOCK]).unwrap();
        }
        for snapshot in taken {
            rig.control(Control::Delete { volume: snapshot }).unwrap();
        }
        rig.now += 1_000_000_000;
        rig.settle();
    }
    assert_eq!(rig.mapped(ids[1]), 1, "{:?}", rig.engine.fold_status());
}

/// Completes the engine's commands, those of the kind that `fails` means with an error.
fn settle_failing(rig: &mut Rig, fails: fn(&IoOp) -> bool) {
    for _ in 0..8 {
        while let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            let result = if fails(&command.op) { Err(IoError::Media) } else { Ok(()) };
            rig.engine.complete(command, result);
        }
    }
}

#[test]
fn a_fold_that_meets_a_media_error_is_not_tried_for_ever() {
    let mut rig = Rig::open(pool_of(true)).unwrap();
    let (id, volume, snapshot) = rig.shared();
    rig.write(&volume, 0, &[2; BLOCK]).unwrap();
    rig.engine.submit(Control::Delete { volume: snapshot });
    for _ in 0..20 {
        rig.now += 500_000_000;
        settle_failing(&mut rig, |op| matches!(op, IoOp::Read { .. }));
    }
    let status = rig.engine.fold_status();
    assert!(rig.pool.failure().is_none());
    assert_eq!((status.composite, status.folded, status.settled), (1, 0, true), "{status:?}");
    assert!((1..=2).contains(&status.abandoned), "{status:?}");
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2)]));
    // It is tried again when someone asks.
    rig.engine.fold_now();
    rig.check();
    assert_eq!((rig.mapped(id), rig.engine.fold_status().folded), (1, 1));
    assert_eq!(rig.read(&volume, 0, EXTENT), ones_with(&[(0, 2)]));
}

/// A structure change waits for folds, and holds back the checkpoint that a full log needs: a fold
/// that has begun must not wait for either of them.
#[test]
fn folds_end_without_a_commit_also_where_the_ring_is_full() {
    let media = pool_of(true);
    // No fold for a second.
    let tuning = Tuning { fold_rate: 1, workers: 2, ..Tuning::default() };
    let ring: Arc<dyn RingMemory> = Arc::new(VecRingMemory::new(4, 8));
    let options = OpenOptions { ring: Some(ring), tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 1 << 30);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; 40 * EXTENT]).unwrap();
    let snapshot = rig.snapshot(id, "s");
    for extent in 0..40 {
        rig.write(&volume, (extent * EXTENT) as u64, &[2; BLOCK]).unwrap();
    }
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.now += 100_000_000_000_000;
    // The log stands still: its writes are not answered.
    let mut held = Vec::new();
    for _ in 0..1000 {
        let Some(mut command) = rig.engine.poll(rig.now) else { break };
        if matches!(command.op, IoOp::Write { fua: true, .. }) {
            held.push(command);
        } else {
            rig.media.run(&mut command);
            rig.engine.complete(command, Ok(()));
        }
    }
    let status = rig.engine.fold_status();
    assert!(!held.is_empty() && status.folded > 4, "{status:?}");
    assert_eq!(status.running, 0, "{status:?}");
    for mut command in held {
        rig.media.run(&mut command);
        rig.engine.complete(command, Ok(()));
    }
    rig.engine.set_fold_rate(64 << 20);
    for _ in 0..40 {
        rig.now += 1_000_000_000;
        rig.settle();
    }
    let status = rig.engine.fold_status();
    assert!(status.folded == 40 && status.settled, "{status:?}");
    rig.check();
}

#[test]
fn no_fold_begins_in_a_family_that_is_about_to_change() {
    let media = pool_of(true);
    // No fold for a second.
    let tuning = Tuning { fold_rate: 1, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 1 << 30);
    let empty = rig.snapshot(id, "empty");
    let clone = Control::Clone { source: empty, name: "sibling".to_owned(), size: None };
    let Ok(Outcome::Created(sibling)) = rig.control(clone) else { panic!("no clone") };
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; 40 * EXTENT]).unwrap();
    let snapshot = rig.snapshot(id, "s");
    for extent in 0..40 {
        rig.write(&volume, (extent * EXTENT) as u64, &[2; BLOCK]).unwrap();
    }
    let mut stuck = Plan::with_capacity(64);
    rig.control(Control::Delete { volume: snapshot }).unwrap();
    let step = rig.worker.read(&volume, 0, BLOCK as u64, &mut stuck);
    assert!(matches!(step, Ok(Step::Issue { .. })));
    // Enough for sixteen folds.
    rig.now += 100_000_000_000_000;
    rig.settle();
    assert_eq!(rig.engine.fold_status().running, 4);
    rig.snapshot(sibling, "t");
    let abandoned = rig.engine.fold_status().abandoned;
    assert_eq!(abandoned, 4, "folds began in vain");
    rig.worker.complete(&volume, &mut stuck, Ok(())).unwrap();
}
