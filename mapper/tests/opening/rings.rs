//! Opening with the delta ring of a process that was killed, or with none or another one.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use blockd_mapper::create::{CreateOptions, Creating};
use blockd_mapper::engine::{Control, Kept, Outcome, Use, UsedExtent};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoError, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opening};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::{RingMemory, VecRingMemory};

use super::MIB;
use super::common::{BOOT, Media, Rig};

/// A pool left open, with a ring, and writes that were answered and not flushed.
fn killed_with_ring() -> (Media, Arc<VecRingMemory>, Vec<u8>) {
    let memory = Arc::new(VecRingMemory::new(3, 256));
    let mut media = Media::new(&[16 * MIB]);
    media.create();
    let mut rig = Rig::with_ring(memory.clone(), media).unwrap();
    let id = rig.create("data", 4 << 20);
    let volume = rig.attach(id);
    let data: Vec<u8> = (3..200).cycle().take(MIB).collect();
    rig.write(&volume, 0, &data).unwrap();
    rig.discard(&volume, 0, 64 << 10);
    (rig.kill(), memory, data)
}

#[test]
fn a_killed_process_loses_nothing_that_was_answered() {
    let (media, memory, data) = killed_with_ring();
    let mut rig = Rig::with_ring(memory, media).unwrap();
    assert!(rig.report.ring_changes > 0 && rig.report.ring_problem.is_none(), "{:?}", rig.report);
    let id = rig.engine.volumes()[0].id;
    let volume = rig.attach(id);
    let read = rig.read(&volume, 0, data.len());
    assert!(read[..64 << 10].iter().all(|&b| b == 0));
    assert_eq!(read[64 << 10..], data[64 << 10..]);
    rig.check();
}

/// A first write after a crash, in a pool with a hole of 6 free extents among those of a volume.
struct FirstGrant {
    /// The extent that was written.
    place: u64,
    /// The free extents below it.
    free_below: Vec<u64>,
    /// The extents of the hole.
    hole: Vec<u64>,
    /// The highest extent that the volume had before.
    last: u64,
}

fn first_grant_after_a_crash(quantum: u64) -> FirstGrant {
    let memory = Arc::new(VecRingMemory::new(3, 256));
    let mut media = Media::new(&[16 * MIB]);
    media.create();
    let mut rig = Rig::with_ring(memory.clone(), media).unwrap();
    let id = rig.create("data", 8 << 20);
    let volume = rig.attach(id);
    let extent = 64 << 10;
    rig.write(&volume, 0, &vec![1; 20 * extent]).unwrap();
    let places = |rig: &Rig| -> BTreeSet<u64> {
        let mapped = |one: &UsedExtent| one.usage == Use::Mapped(id);
        rig.pool.volume_extents().into_iter().filter(mapped).map(|one| one.extent).collect()
    };
    let before = places(&rig);
    rig.discard(&volume, 3 * extent as u64, 6 * extent);
    rig.flush(&volume).unwrap();
    rig.settle();
    let after = places(&rig);
    let hole: Vec<u64> = before.difference(&after).copied().collect();
    assert_eq!(hole.len(), 6);
    let media = rig.kill();
    let tuning = Tuning { quantum, ..Tuning::default() };
    let options = OpenOptions { ring: Some(memory), tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let kept = rig.engine.keep_reserve(id, quantum).unwrap();
    assert_eq!(kept, Kept { added: quantum, shortage: None });
    let volume = rig.attach(id);
    rig.write(&volume, 40 * extent as u64, &vec![2; extent]).unwrap();
    let new: Vec<u64> = places(&rig).difference(&after).copied().collect();
    assert_eq!(new.len(), 1);
    let used = rig.engine.metadata_extents().into_iter().chain(rig.pool.volume_extents());
    let used: BTreeSet<u64> = used.map(|one| one.extent).collect();
    let free_below = (0..new[0]).filter(|extent| !used.contains(extent)).collect();
    rig.check();
    FirstGrant { place: new[0], free_below, hole, last: *before.last().unwrap() }
}

#[test]
fn after_a_crash_the_lowest_free_extents_are_granted_first() {
    let first = first_grant_after_a_crash(4);
    assert_eq!((first.place, first.free_below), (first.hole[0], vec![]));
    // A run that is long enough comes before a lower one that is not.
    let first = first_grant_after_a_crash(16);
    assert_eq!((first.place, first.free_below), (first.last + 1, first.hole));
}

/// Every word of a ring's memory.
pub(super) fn words(memory: &VecRingMemory) -> Vec<u64> {
    memory.words().iter().map(|word| word.load(Ordering::Relaxed)).collect()
}

#[test]
fn a_reader_sees_answered_writes_and_leaves_the_ring_unchanged() {
    let (media, memory, data) = killed_with_ring();
    let (device, ring) = (media.devices[0].clone(), words(&memory));
    let options = OpenOptions {
        mode: OpenMode::ReadOnly,
        ring: Some(memory.clone()),
        accept_loss: false,
        ..media.open_options()
    };
    let mut rig = Rig::open_with(media, options).unwrap();
    assert!(rig.report.ring_changes > 0 && rig.report.ring_problem.is_none(), "{:?}", rig.report);
    let id = rig.engine.volumes()[0].id;
    let volume = rig.attach(id);
    let read = rig.read(&volume, 0, data.len());
    assert!(read[..64 << 10].iter().all(|&b| b == 0));
    assert_eq!(read[64 << 10..], data[64 << 10..]);
    // A read-only pool cannot be made durable, and no timer may try.
    assert_eq!(rig.flush(&volume), Err(MapperError::ReadOnly));
    rig.now += 3_600_000_000_000;
    rig.settle();
    assert_eq!(rig.engine.next_deadline(), None);
    rig.worker.detach(volume);
    assert_eq!(rig.control(Control::Close), Ok(Outcome::Closed));
    let media = rig.kill();
    assert!(media.devices[0] == device && words(&memory) == ring, "a reader changed something");
    let rig = Rig::with_ring(memory, media).unwrap();
    assert!(rig.report.ring_changes > 0, "{:?}", rig.report);
}

#[test]
fn a_reader_is_refused_where_answered_writes_cannot_be_shown() {
    let (media, memory, _) = killed_with_ring();
    let look = |ring: Option<Arc<VecRingMemory>>, accept_loss| {
        let ring = ring.map(|memory| -> Arc<dyn RingMemory> { memory });
        let options = media.open_options();
        let options = OpenOptions { mode: OpenMode::ReadOnly, ring, accept_loss, ..options };
        Rig::open_with(media.clone(), options)
    };
    let strangers = Arc::new(VecRingMemory::new(3, 256));
    let said = look(Some(strangers.clone()), false).unwrap_err().to_string();
    assert!(said.contains("missing") && said.contains("answered writes"), "{said}");
    assert!(words(&strangers).iter().all(|&word| word == 0), "a reader made a ring");
    assert!(matches!(look(None, false), Err(MapperError::RingLost { .. })));
    let rig = look(None, true).unwrap();
    assert!(rig.report.ring_problem.is_some() && rig.report.ring_changes == 0);
    assert!(look(Some(memory), false).is_ok());
}

#[test]
fn a_lost_or_foreign_ring_needs_accept_loss_and_is_reported() {
    let (media, _, _) = killed_with_ring();
    let strangers = Arc::new(VecRingMemory::new(3, 256));
    let said = Rig::with_ring(strangers, media.clone()).unwrap_err().to_string();
    assert!(said.contains("missing") && said.contains("answered writes"), "{said}");
    let none = OpenOptions { accept_loss: false, ..media.open_options() };
    assert!(matches!(Rig::open_with(media.clone(), none), Err(MapperError::RingLost { .. })));
    let mut rig = Rig::open(media).unwrap();
    assert!(rig.report.ring_problem.is_some());
    rig.check();
}

#[test]
fn the_log_and_the_ring_of_another_pool_are_not_replayed() {
    const BLOCK: usize = 4096;
    let (theirs, memory, _) = killed_with_ring();
    let mut ours = Media::new(&[16 * MIB]);
    let options = CreateOptions { pool_id: [8; 16], ..ours.options() };
    let mut creating = Creating::new(&options).unwrap();
    while let Some(mut command) = creating.poll() {
        ours.run(&mut command);
        creating.complete(command, Ok(()));
    }
    creating.finish().unwrap();
    // Both lie at the same places: they differ in nothing but whose they are.
    let mut copied = 0;
    for at in (0..16 * MIB).step_by(BLOCK) {
        let block = &theirs.devices[0][at..at + BLOCK];
        if block.starts_with(b"BDwl") {
            ours.devices[0][at..at + BLOCK].copy_from_slice(block);
            copied += 1;
        }
    }
    assert!(copied > 0);
    assert!(!Rig::open(theirs).unwrap().engine.volumes().is_empty(), "they mean something there");
    let said = Rig::with_ring(memory, ours.clone()).map(|rig| rig.report.ring_changes);
    assert!(!matches!(said, Ok(1..)), "{said:?}");
    let mut rig = Rig::open(ours).unwrap();
    assert_eq!((rig.report.log_changes, rig.engine.volumes().len()), (0, 0), "{:?}", rig.report);
    rig.check();
}

#[test]
fn no_flush_happens_before_the_ring_is_identified_as_the_pools() {
    // A flush that fails may drop data that the ring calls valid, and only a ring that is present
    // can be marked. A ring that comes back later would bring stale data.
    let (mut media, memory, data) = killed_with_ring();
    let strangers = Arc::new(VecRingMemory::new(3, 256));
    let options = OpenOptions { ring: Some(strangers), accept_loss: false, ..media.open_options() };
    let mut opening = Opening::new(options).unwrap();
    while let Some(mut command) = opening.poll() {
        assert!(!matches!(command.op, IoOp::Flush | IoOp::Write { .. }), "{:?}", command.op);
        media.run(&mut command);
        opening.complete(command, Ok(()));
    }
    assert!(matches!(opening.finish(), Err(MapperError::RingLost { .. })));
    let mut rig = Rig::with_ring(memory, media).unwrap();
    let id = rig.engine.volumes()[0].id;
    let volume = rig.attach(id);
    assert_eq!(rig.read(&volume, 64 << 10, data.len() - (64 << 10)), data[64 << 10..]);
    rig.check();
}

/// A pool with trees and a ring, whose flush failed while it served.
fn failed_while_serving() -> (Media, Arc<VecRingMemory>) {
    let memory = Arc::new(VecRingMemory::new(3, 256));
    let mut media = Media::new(&[16 * MIB]);
    media.create();
    let mut rig = Rig::with_ring(memory.clone(), media).unwrap();
    let id = rig.create("data", 4 << 20);
    let volume = rig.attach(id);
    rig.write(&volume, 0, &[1; MIB]).unwrap();
    rig.control(Control::Checkpoint).unwrap();
    rig.write(&volume, 0, &[2; 2 * MIB]).unwrap();
    rig.now += 10_000_000_000;
    while let Some(mut command) = rig.engine.poll(rig.now) {
        let fails = matches!(command.op, IoOp::Flush);
        if !fails {
            rig.media.run(&mut command);
        }
        rig.engine.complete(command, if fails { Err(IoError::Media) } else { Ok(()) });
    }
    assert!(rig.pool.failure().is_some());
    (rig.kill(), memory)
}

/// Opens with an error for the command of this number, which is carried out all the same or not.
/// Returns the error; `None` if there is no such command.
fn failing_at(
    number: usize,
    is_carried_out: bool,
    media: &mut Media,
    memory: &Arc<VecRingMemory>,
) -> Option<Result<OpenReport, MapperError>> {
    let ring: Arc<dyn RingMemory> = memory.clone();
    let (ring, options) = (Some(ring), media.open_options());
    let options = OpenOptions { ring, open_id: 0x77, accept_loss: false, ..options };
    let mut opening = Opening::new(options).unwrap();
    let mut count = 0;
    while let Some(mut command) = opening.poll() {
        let fails = count == number;
        if is_carried_out || !fails {
            media.run(&mut command);
        }
        opening.complete(command, if fails { Err(IoError::Media) } else { Ok(()) });
        count += 1;
    }
    (count > number).then(|| opening.finish().map(|opened| opened.report))
}

/// A ring with the same words.
fn copy_of(memory: &VecRingMemory) -> Arc<VecRingMemory> {
    let copy = VecRingMemory::new(3, 256);
    copy.words().iter().zip(words(memory)).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
    Arc::new(copy)
}

#[test]
fn an_opening_that_fails_after_clients_received_errors_loses_nothing_more() {
    let (failed, poisoned) = failed_while_serving();
    let mut failures = 0;
    let both = (0..).flat_map(|number| [(number, false), (number, true)]);
    for (number, is_carried_out) in both {
        let (mut media, memory) = (failed.clone(), copy_of(&poisoned));
        let Some(ended) = failing_at(number, is_carried_out, &mut media, &memory) else { break };
        failures += usize::from(ended.is_err());
        let third = OpenOptions { open_id: 0x99, ..media.open_options() };
        let third = OpenOptions { ring: Some(memory.clone()), accept_loss: false, ..third };
        let opened = Rig::open_with(media, third);
        let mut rig = opened.unwrap_or_else(|error| panic!("after command {number}: {error}"));
        // It is said once: by the second opening where that went on without what it could not read.
        let said = ended.as_ref().map_or(&rig.report, |second| second);
        assert!(said.ring_problem.is_some() && rig.report.ring_changes == 0, "{number}");
        // From now on it counts.
        let id = rig.engine.volumes()[0].id;
        let volume = rig.attach(id);
        rig.write(&volume, 3 << 20, &[3; 4096]).unwrap();
        let mut rig = Rig::with_ring(memory, rig.kill()).unwrap();
        assert!(rig.report.ring_changes > 0, "{:?}", rig.report);
        let volume = rig.attach(id);
        assert_eq!(rig.read(&volume, 3 << 20, 4096), [3; 4096]);
        rig.check();
    }
    assert!(failures > 20, "{failures}");
}

/// A ring's memory that is copied whenever a part of it is about to be cleared: as a process leaves
/// it that is killed then.
#[derive(Debug)]
struct Killed {
    memory: Arc<VecRingMemory>,
    copies: Mutex<Vec<Arc<VecRingMemory>>>,
}

impl RingMemory for Killed {
    fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    fn clear(&self, words: Range<usize>) {
        self.copies.lock().unwrap().push(copy_of(&self.memory));
        self.memory.clear(words);
    }
}

#[test]
fn a_kill_while_a_ring_that_is_ignored_is_emptied_loses_nothing_more() {
    let (media, poisoned) = failed_while_serving();
    let killed = Arc::new(Killed { memory: copy_of(&poisoned), copies: Mutex::default() });
    let rig = Rig::with_ring(killed.clone(), media.clone()).unwrap();
    assert!(rig.report.ring_problem.is_some(), "{:?}", rig.report);
    let copies = std::mem::take(&mut *killed.copies.lock().unwrap());
    assert!(!copies.is_empty());
    for memory in copies {
        let mut rig = Rig::with_ring(memory, media.clone()).unwrap();
        assert!(rig.report.ring_problem.is_some() && rig.report.ring_changes == 0);
        rig.check();
    }
}

#[test]
fn a_flush_that_fails_while_opening_counts_as_a_loss_where_clients_received_no_error() {
    let (media, memory, _) = killed_with_ring();
    let mut lost = 0;
    for number in 0.. {
        let (mut media, memory) = (media.clone(), copy_of(&memory));
        match failing_at(number, false, &mut media, &memory) {
            None => break,
            Some(Err(MapperError::Io { operation: "flush", .. })) => {}
            Some(_) => continue,
        }
        lost += 1;
        let third = Rig::with_ring(memory, media);
        assert!(matches!(third, Err(MapperError::RingLost { .. })), "{number}");
    }
    assert!(lost > 0);
}

#[test]
fn after_another_boot_the_ring_means_nothing() {
    let (media, memory, _) = killed_with_ring();
    let options = OpenOptions {
        ring: Some(memory),
        boot_id: [0x77; 16],
        accept_loss: false,
        ..media.open_options()
    };
    assert_ne!(options.boot_id, BOOT);
    let mut rig = Rig::open_with(media, options).unwrap();
    assert_eq!((rig.report.ring_changes, rig.report.ring_problem.clone()), (0, None));
    rig.check();
}
