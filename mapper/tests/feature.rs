//! Composite entries turned on and off in an open pool.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::create::CreateOptions;
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::IoOp;
use blockd_mapper::open::OpenOptions;
use blockd_mapper::plan::*;
use blockd_mapper::pool::Tuning;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use common::*;

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
const BLOCK: usize = 4096;
const ON: Control = Control::SetComposite { enabled: true };
const OFF: Control = Control::SetComposite { enabled: false };

fn media_of(size: usize, composite: bool) -> Media {
    let mut media = Media::new(&[size]);
    let options = CreateOptions { composite, ..media.options() };
    media.create_with(&options);
    media
}

/// Incompatible features in the first copy of the superblock.
fn features(media: &Media) -> u64 {
    u64::from_le_bytes(media.devices[0][32..40].try_into().unwrap())
}

/// A volume or snapshot with what it holds.
struct Held {
    id: VolumeId,
    bytes: Vec<u8>,
}

impl Rig {
    fn made(&mut self, control: Control) -> VolumeId {
        match self.control(control).unwrap() {
            Outcome::Created(id) => id,
            other => panic!("{other:?}"),
        }
    }

    fn snapshot(&mut self, held: &Held, name: &str) -> Held {
        let id = self.made(Control::Snapshot { source: held.id, name: name.to_owned() });
        Held { id, bytes: held.bytes.clone() }
    }

    fn put(&mut self, held: &mut Held, at: usize, len: usize, value: u8) {
        let volume = self.attach(held.id);
        self.write(&volume, at as u64, &vec![value; len]).unwrap();
        held.bytes[at..at + len].fill(value);
    }

    fn clear(&mut self, held: &mut Held, at: usize, len: usize) {
        let volume = self.attach(held.id);
        self.discard(&volume, at as u64, len);
        held.bytes[at..at + len].fill(0);
    }

    /// Bytes that a write of a block copies.
    fn copied(&mut self, held: &mut Held, at: usize) -> u64 {
        let volume = self.attach(held.id);
        let mut plan = self.planned(&volume, at);
        let copies = plan.ops().iter().filter(|op| matches!(op.kind, OpKind::Copy { .. }));
        let copied = copies.map(|op| op.len).sum();
        let failed = Err(blockd_mapper::io::IoError::Media);
        assert!(self.worker.complete(&volume, &mut plan, failed).is_err());
        self.put(held, at, BLOCK, 77);
        copied
    }

    fn planned(&mut self, volume: &Attachment, at: usize) -> Plan {
        let mut plan = Plan::with_capacity(64);
        let len = BLOCK as u64;
        let mut step = self.worker.write(volume, at as u64, len, false, &mut plan).unwrap();
        if step == Step::Park(ParkReason::Space) {
            self.settle();
            step = self.worker.write(volume, at as u64, len, false, &mut plan).unwrap();
        }
        assert_eq!(step, Step::Issue { covered: len });
        plan
    }

    fn holds(&mut self, all: &[Held], when: &str) {
        for held in all {
            let volume = self.attach(held.id);
            let found = self.read(&volume, 0, held.bytes.len());
            let differs =
                found.chunks(BLOCK).zip(held.bytes.chunks(BLOCK)).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{when}: a block of {} differs", held.id);
        }
    }

    /// Lets folds go on until the pool is without composite entries.
    fn be_plain(&mut self) {
        for _ in 0..200 {
            if !self.pool.has_composite() {
                return;
            }
            self.now += 100_000_000;
            self.settle();
        }
        panic!("{:?}", self.engine.fold_status());
    }
}

/// Volumes and snapshots with entries of all kinds: shared bases and shared overlays, leaves of one
/// holder and of several, of a clone too; and one that discards have reached.
fn family(rig: &mut Rig) -> Vec<Held> {
    const SIZE: usize = 8 * EXTENT;
    let id = rig.create("a", SIZE as u64);
    let mut a = Held { id, bytes: vec![0; SIZE] };
    rig.put(&mut a, 0, SIZE, 1);
    let first = rig.snapshot(&a, "first");
    for extent in 0..6 {
        rig.put(&mut a, extent * EXTENT + 2 * BLOCK, (extent + 1) * BLOCK, 2);
    }
    let second = rig.snapshot(&a, "second");
    let clone = Control::Clone { source: second.id, name: "c".to_owned(), size: None };
    let mut c = Held { id: rig.made(clone), bytes: a.bytes.clone() };
    let third = rig.snapshot(&a, "third");
    // The leaf is the volume's own from here on, its overlays are shared.
    rig.put(&mut a, 0, BLOCK, 3);
    rig.clear(&mut a, EXTENT, 3 * BLOCK);
    rig.put(&mut a, 7 * EXTENT, BLOCK, 4);
    rig.clear(&mut c, 2 * EXTENT + BLOCK, EXTENT / 2);
    let fourth = rig.snapshot(&c, "fourth");
    let volume = rig.attach(a.id);
    rig.flush(&volume).unwrap();
    vec![a, first, second, c, third, fourth]
}

#[test]
fn a_pool_gets_composite_entries_while_it_is_open() {
    let mut rig = Rig::open(media_of(64 * MIB, false)).unwrap();
    let mut all = family(&mut rig);
    assert_eq!(rig.copied(&mut all[0], 5 * EXTENT), (EXTENT - BLOCK) as u64);
    assert_eq!(features(&rig.media), 0);
    assert_eq!(rig.control(ON), Ok(Outcome::Enabled));
    assert_eq!((features(&rig.media), rig.engine.fold_status().is_enabled), (1, true));
    assert_eq!(rig.control(ON), Ok(Outcome::Unchanged));
    let snapshot = rig.snapshot(&all[0], "later");
    all.push(snapshot);
    assert_eq!(rig.copied(&mut all[0], 6 * EXTENT), 0);
    assert_eq!(rig.engine.fold_status().composite, 1);
    rig.check();
    rig.holds(&all, "enabled");
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(rig.pool.has_composite());
    rig.holds(&all[1..], "opened");
}

#[test]
fn a_write_in_flight_while_they_are_turned_on_copies_and_keeps_its_room() {
    let mut rig = Rig::open(media_of(64 * MIB, false)).unwrap();
    let mut all = family(&mut rig);
    let volume = rig.attach(all[0].id);
    let mut plan = rig.planned(&volume, 5 * EXTENT);
    assert_eq!(rig.control(ON), Ok(Outcome::Enabled));
    // Another extent, at once.
    let snapshot = rig.snapshot(&all[3], "of-c");
    all.push(snapshot);
    rig.put(&mut all[3], 6 * EXTENT, BLOCK, 9);
    assert_eq!(rig.engine.fold_status().composite, 1);
    let failed = Err(blockd_mapper::io::IoError::Media);
    assert!(rig.worker.complete(&volume, &mut plan, failed).is_err());
    rig.put(&mut all[0], 5 * EXTENT, BLOCK, 8);
    rig.check();
    rig.holds(&all, "enabled under a write");
}

#[test]
fn every_entry_becomes_plain_also_where_snapshots_share_it() {
    let mut rig = Rig::open(media_of(64 * MIB, true)).unwrap();
    let mut all = family(&mut rig);
    rig.check();
    let before = rig.engine.fold_status();
    assert!(before.composite > 20, "{before:?}");
    let mapped = rig.engine.space().mapped;
    assert_eq!(rig.control(OFF), Ok(Outcome::Disabling));
    rig.be_plain();
    let status = rig.engine.fold_status();
    assert_eq!((status.composite, status.is_enabled, status.is_leaving), (0, false, false));
    // The extents that several refer to are still one: each of six is copied once or twice.
    let copied = status.bytes - before.bytes;
    assert!(copied < 12 * EXTENT as u64, "{copied}");
    assert_eq!(features(&rig.media), 0);
    rig.check();
    rig.holds(&all, "disabled");
    let now = rig.engine.space().mapped;
    assert!(now <= mapped, "folds take no space of the pool: {mapped} {now}");
    assert_eq!(rig.control(OFF), Ok(Outcome::Unchanged));
    assert_eq!(rig.copied(&mut all[0], 6 * EXTENT), (EXTENT - BLOCK) as u64);
    rig.holds(&all, "written");
    // Without the bit, a reader takes no page of version 2, and no record of a composite entry.
    let volume = rig.attach(all[0].id);
    rig.flush(&volume).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(!rig.pool.has_composite());
    rig.holds(&all, "opened");
    rig.check();
    // And on again.
    assert_eq!(rig.control(ON), Ok(Outcome::Enabled));
    let snapshot = rig.snapshot(&all[3], "again");
    all.push(snapshot);
    assert_eq!(rig.copied(&mut all[3], 7 * EXTENT), 0);
    rig.check();
    rig.holds(&all, "enabled again");
}

#[test]
fn turning_them_on_again_ends_their_folding() {
    let media = media_of(64 * MIB, true);
    // No fold for a second.
    let tuning = Tuning { fold_rate: 1, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let mut all = family(&mut rig);
    assert_eq!(rig.control(OFF), Ok(Outcome::Disabling));
    assert_eq!(rig.control(OFF), Ok(Outcome::Unchanged));
    assert!(rig.engine.fold_status().is_leaving);
    let snapshot = rig.snapshot(&all[0], "meanwhile");
    all.push(snapshot);
    assert_ne!(rig.copied(&mut all[0], 6 * EXTENT), 0);
    assert_eq!(rig.control(ON), Ok(Outcome::Enabled));
    assert!(!rig.engine.fold_status().is_leaving);
    let snapshot = rig.snapshot(&all[0], "afterwards");
    all.push(snapshot);
    assert_eq!(rig.copied(&mut all[0], 6 * EXTENT), 0);
    rig.engine.set_fold_rate(64 << 20);
    rig.check();
    assert!(rig.pool.has_composite() && features(&rig.media) == 1);
    rig.holds(&all, "on again");
}

#[test]
fn a_redirect_in_flight_while_they_are_turned_off_is_waited_for() {
    let mut rig = Rig::open(media_of(64 * MIB, true)).unwrap();
    let id = rig.create("a", 4 * EXTENT as u64);
    let mut a = Held { id, bytes: vec![0; 4 * EXTENT] };
    rig.put(&mut a, 0, 4 * EXTENT, 1);
    let snapshot = rig.snapshot(&a, "s");
    let volume = rig.attach(id);
    for succeeds in [false, true] {
        let mut plan = rig.planned(&volume, EXTENT);
        assert_eq!(rig.control(OFF), Ok(Outcome::Disabling));
        for _ in 0..20 {
            rig.now += 1_000_000_000;
            rig.settle();
        }
        assert!(rig.engine.fold_status().is_leaving);
        let write = plan.ops().iter().find(|op| op.len == BLOCK as u64).unwrap();
        let at = usize::try_from(write.offset).unwrap();
        if succeeds {
            rig.media.devices[0][at..at + BLOCK].fill(5);
            a.bytes[EXTENT..EXTENT + BLOCK].fill(5);
        }
        let result = if succeeds { Ok(()) } else { Err(blockd_mapper::io::IoError::Media) };
        assert_eq!(rig.worker.complete(&volume, &mut plan, result).is_ok(), succeeds);
        assert_eq!(rig.engine.fold_status().composite, u64::from(succeeds));
        rig.be_plain();
        rig.check();
        if !succeeds {
            assert_eq!(rig.control(ON), Ok(Outcome::Enabled));
        }
    }
    rig.holds(&[a, snapshot], "disabled under a write");
}

// The superblock without the bit says that a reader needs to know no record of such an entry.
#[test]
fn no_record_of_a_composite_entry_is_in_the_log_that_the_pool_without_them_has() {
    let media = media_of(12 * MIB, true);
    let tuning = Tuning { commit_interval_ns: 1 << 50, ..Tuning::default() };
    let options = OpenOptions { tuning, ..media.open_options() };
    let mut rig = Rig::open_with(media, options).unwrap();
    let id = rig.create("a", 4 * EXTENT as u64);
    let mut a = Held { id, bytes: vec![0; 4 * EXTENT] };
    rig.put(&mut a, 0, 4 * EXTENT, 1);
    let snapshot = rig.snapshot(&a, "s");
    let volume = rig.attach(id);
    let mut plan = rig.planned(&volume, EXTENT);
    assert_eq!(rig.control(OFF), Ok(Outcome::Disabling));
    // From here on the record is in the delta ring, and no commit comes by itself.
    rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
    assert_eq!(rig.engine.fold_status().composite, 1);
    let mut plain = 0;
    for _ in 0..400 {
        if let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            rig.engine.complete(command, Ok(()));
        } else {
            rig.now += 50_000_000;
        }
        let is_decided = features(&rig.media) == 0;
        if is_decided || rig.engine.fold_status().composite == 0 {
            // A client asks for a commit at each moment.
            let mut plan = Plan::with_capacity(64);
            let step = rig.worker.flush(&volume, &mut plan).unwrap();
            if matches!(step, Step::Issue { .. }) {
                rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
            }
        }
        if is_decided {
            let mut opened = Rig::open(rig.media.clone()).unwrap();
            assert!(!opened.pool.has_composite());
            opened.holds(std::slice::from_ref(&snapshot), "without the bit");
            opened.check();
            plain += 1;
        }
        if plain > 10 {
            return;
        }
    }
    panic!("{:?}", rig.engine.fold_status());
}

/// Writes to a volume of one leaf until the pool has no free extent.
fn fill(rig: &mut Rig) {
    let id = rig.create("filler", (256 * EXTENT) as u64);
    let volume = rig.attach(id);
    let mut parked = 0;
    let mut at = 0;
    while parked < 2 && at < 256 * EXTENT as u64 {
        let mut plan = Plan::with_capacity(64);
        match rig.worker.write(&volume, at, EXTENT as u64, false, &mut plan).unwrap() {
            Step::Issue { covered } => {
                rig.worker.complete(&volume, &mut plan, Ok(())).unwrap();
                at += covered;
                parked = 0;
            }
            step => {
                assert_eq!(step, Step::Park(ParkReason::Space));
                rig.settle();
                parked += 1;
            }
        }
    }
    assert_eq!((parked, rig.engine.space().free), (2, 0));
}

#[track_caller]
fn is_refused_for_space(rig: &mut Rig, enabled: bool) {
    let before = rig.engine.fold_status();
    let refused = rig.control(Control::SetComposite { enabled });
    let Err(MapperError::NoSpace { needed, free }) = refused else { panic!("{refused:?}") };
    assert!(needed > free, "{needed} {free}");
    let now = rig.engine.fold_status();
    let had = (before.is_enabled, before.is_leaving, before.composite);
    assert_eq!((now.is_enabled, now.is_leaving, now.composite), had);
    rig.control(Control::Checkpoint).unwrap();
    assert_eq!(features(&rig.media), u64::from(!enabled));
}

#[test]
fn without_pages_for_bases_they_are_not_turned_on() {
    let mut rig = Rig::open(media_of(12 * MIB, false)).unwrap();
    fill(&mut rig);
    rig.create("large", 1 << 40);
    is_refused_for_space(&mut rig, true);
}

#[test]
fn without_pages_for_the_leaves_of_snapshots_they_are_not_turned_off() {
    let mut rig = Rig::open(media_of(16 * MIB, true)).unwrap();
    let id = rig.create("a", 24 << 24);
    let volume = rig.attach(id);
    for (value, len) in [(1, 2 * BLOCK), (2, BLOCK)] {
        for slot in 0..24 {
            rig.write(&volume, slot << 24, &vec![value; len]).unwrap();
        }
        rig.made(Control::Snapshot { source: id, name: format!("s{value}") });
    }
    for name in 0..60 {
        rig.made(Control::Snapshot { source: id, name: format!("t{name}") });
    }
    fill(&mut rig);
    assert_eq!(rig.engine.fold_status().composite, 24 * 62);
    is_refused_for_space(&mut rig, false);
}

/// Turns them on or off, and opens the media as they would be after a crash at each operation:
/// with all writes so far, and with those that were flushed.
fn crash_at_each_operation(enabled: bool) {
    let mut rig = Rig::open(media_of(12 * MIB, !enabled)).unwrap();
    let all = family(&mut rig);
    rig.check();
    let (mut durable, mut seen) = (rig.media.clone(), [0, 0]);
    let mut look = |media: &Media, at: usize| {
        let mut crashed = Rig::open(media.clone()).unwrap();
        let is_on = crashed.pool.has_composite();
        seen[usize::from(is_on)] += 1;
        crashed.holds(&all, &format!("crash at operation {at}"));
        crashed.check();
        let outcome = crashed.control(Control::SetComposite { enabled }).unwrap();
        assert_eq!(outcome == Outcome::Unchanged, is_on == enabled, "{outcome:?}");
        if !enabled {
            crashed.be_plain();
        }
        crashed.holds(&all, &format!("repeated after a crash at operation {at}"));
        crashed.check();
    };
    rig.engine.submit(Control::SetComposite { enabled });
    let (mut operations, mut idle) = (0, 0);
    while rig.pool.has_composite() != enabled || idle < 3 {
        let Some(mut command) = rig.engine.poll(rig.now) else {
            rig.now += 50_000_000;
            idle += 1;
            assert!(idle < 1000, "{:?}", rig.engine.fold_status());
            continue;
        };
        rig.media.run(&mut command);
        match &command.op {
            IoOp::Flush => durable = rig.media.clone(),
            IoOp::Write { offset, buffer, fua: true } => {
                let (at, bytes) = (usize::try_from(*offset).unwrap(), buffer.as_bytes());
                durable.devices[0][at..at + bytes.len()].copy_from_slice(bytes);
            }
            _ => {}
        }
        if !matches!(command.op, IoOp::Read { .. }) {
            look(&rig.media, operations);
            look(&durable, operations);
        }
        operations += 1;
        rig.engine.complete(command, Ok(()));
    }
    assert!(seen[0] > 1 && seen[1] > 1, "{seen:?} of {operations}");
    rig.holds(&all, "at the end");
    rig.check();
}

#[test]
fn a_crash_while_they_are_turned_on_leaves_them_on_or_off() {
    crash_at_each_operation(true);
}

#[test]
fn a_crash_while_they_are_turned_off_leaves_them_on_or_off() {
    crash_at_each_operation(false);
}
