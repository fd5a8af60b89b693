//! Snapshots of several volumes in one cut: refusals, repeats and snapshots.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

mod common;

use std::sync::Arc;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::geometry::MAX_GROUP;
use blockd_mapper::plan::{Answer, OpKind, Step};
use blockd_mapper::ring::{RingMemory, VecRingMemory};
use blockd_mapper::units::VolumeId;
use common::Rig;

const MIB: usize = 1 << 20;

fn group(members: &[(VolumeId, &str)]) -> Control {
    let members = members.iter().map(|(id, name)| (*id, (*name).to_owned())).collect();
    Control::SnapshotGroup { members }
}

fn created(outcome: Result<Outcome, MapperError>) -> Vec<VolumeId> {
    match outcome {
        Ok(Outcome::CreatedGroup(ids)) => ids,
        other => panic!("no group was made: {other:?}"),
    }
}

#[test]
fn a_group_is_made_once_and_named_in_the_requested_order() {
    let mut rig = Rig::new(&[32 * MIB]);
    let (a, b) = (rig.create("a", 4 << 20), rig.create("b", 4 << 20));
    let (one, two) = (rig.attach(a), rig.attach(b));
    rig.write(&one, 0, &[1; 4096]).unwrap();
    rig.write(&two, 0, &[2; 4096]).unwrap();
    let ids = created(rig.control(group(&[(b, "of b"), (a, "of a")])));
    rig.write(&one, 0, &[3; 4096]).unwrap();
    rig.write(&two, 0, &[4; 4096]).unwrap();
    let frozen: Vec<_> = ids.iter().map(|id| rig.attach(*id)).collect();
    assert_eq!(rig.read(&frozen[0], 0, 4096), [2; 4096]);
    assert_eq!(rig.read(&frozen[1], 0, 4096), [1; 4096]);
    let again = rig.control(group(&[(a, "of a"), (b, "of b")]));
    assert_eq!(again, Ok(Outcome::ExistingGroup(vec![ids[1], ids[0]])));
    rig.check();
    // State that only the log holds survives a loss of power.
    let mut rig = Rig::open(rig.kill()).unwrap();
    let again = rig.control(group(&[(a, "of a"), (b, "of b")]));
    assert_eq!(again, Ok(Outcome::ExistingGroup(vec![ids[1], ids[0]])));
    let frozen = rig.attach(ids[1]);
    assert_eq!(rig.read(&frozen, 0, 4096), [1; 4096]);
    rig.check();
}

#[test]
fn a_group_that_can_not_be_one_cut_is_refused() {
    let mut rig = Rig::new(&[32 * MIB]);
    let (a, b) = (rig.create("a", 4 << 20), rig.create("b", 4 << 20));
    rig.control(Control::Snapshot { source: a, name: "of a".into() }).unwrap();
    let partly = rig.control(group(&[(b, "of b"), (a, "of a")]));
    let text = partly.unwrap_err().to_string();
    assert!(text.contains("\"of a\" exists and \"of b\" does not"), "{text}");
    rig.control(Control::Snapshot { source: b, name: "of b".into() }).unwrap();
    let apart = rig.control(group(&[(b, "of b"), (a, "of a")]));
    assert!(matches!(apart, Err(MapperError::GroupApart { .. })), "{apart:?}");
    let other = rig.control(group(&[(b, "of a"), (a, "of b")]));
    assert!(matches!(other, Err(MapperError::Exists { field: "origin", .. })), "{other:?}");
}

#[test]
fn bad_groups_are_refused_with_the_reason() {
    let mut rig = Rig::new(&[32 * MIB]);
    let (a, b) = (rig.create("a", 4 << 20), rig.create("b", 4 << 20));
    let many: Vec<_> = (0..=MAX_GROUP).map(|_| (a, "x")).collect();
    for (members, expected) in [
        (vec![], "members is 0: must be from 1 to 16 volumes"),
        (many, "members is 17: must be from 1 to 16 volumes"),
        (vec![(a, "x"), (a, "y")], "the group has volume 1 twice"),
        (vec![(a, "x"), (b, "x")], "the group has name x twice"),
        (vec![(a, "x"), (VolumeId(99), "y")], "volume 99 does not exist"),
        (vec![(a, "x"), (b, "y/z")], "volume name \"y/z\": must not contain"),
    ] {
        let error = rig.control(group(&members)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let snapshot = created(rig.control(group(&[(a, "x")])));
    let refused = rig.control(group(&[(b, "y"), (snapshot[0], "z")]));
    assert!(matches!(refused, Err(MapperError::Unsuitable { .. })), "{refused:?}");
    assert_eq!(rig.engine.volumes().len(), 3);
}

#[test]
fn the_largest_group_fits_and_one_that_the_ring_can_not_hold_is_refused() {
    let long = |number: usize| format!("{number:0>128}");
    let mut rig = Rig::new(&[32 * MIB]);
    let ids: Vec<_> =
        (0..MAX_GROUP).map(|number| rig.create(&format!("v{number}"), 1 << 20)).collect();
    let names: Vec<String> = (0..MAX_GROUP).map(long).collect();
    let members: Vec<_> = ids.iter().copied().zip(names.iter().map(String::as_str)).collect();
    assert_eq!(created(rig.control(group(&members))).len(), MAX_GROUP);
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert!(matches!(rig.control(group(&members)), Ok(Outcome::ExistingGroup(_))));
    rig.control(Control::Close).unwrap();
    let small: Arc<dyn RingMemory> = Arc::new(VecRingMemory::new(3, 16));
    let mut rig = Rig::with_ring(small, rig.kill()).unwrap();
    let others: Vec<_> = ids.iter().map(|id| (*id, "n")).collect();
    let names: Vec<String> = (0..MAX_GROUP).map(|number| format!("other{number}")).collect();
    let others: Vec<_> =
        others.iter().zip(&names).map(|((id, _), name)| (*id, name.as_str())).collect();
    let refused = rig.control(group(&others)).unwrap_err().to_string();
    assert_eq!(refused, "units of a record in the delta ring: the limit is 16");
    assert_eq!(created(rig.control(group(&others[..7]))).len(), 7);
}

#[test]
fn a_group_waits_for_writes_in_flight_on_every_source_and_admits_no_new_ones() {
    let mut rig = Rig::new(&[32 * MIB]);
    let (a, b) = (rig.create("a", 4 << 20), rig.create("b", 4 << 20));
    let (one, two) = (rig.attach(a), rig.attach(b));
    rig.write(&two, 0, &[7; 4096]).unwrap();
    let step = rig.worker.write(&two, 0, 4096, false, &mut rig.plan).unwrap();
    assert!(matches!(step, Step::Issue { .. }), "{step:?}");
    rig.engine.submit(group(&[(a, "of a"), (b, "of b")]));
    rig.settle();
    assert_eq!(rig.engine.take_outcome(), None);
    let mut plan = blockd_mapper::plan::Plan::with_capacity(8);
    let parked = rig.worker.write(&one, 0, 4096, false, &mut plan).unwrap();
    assert!(matches!(parked, Step::Park(_)), "{parked:?}");
    for op in rig.plan.ops().iter().filter(|op| matches!(op.kind, OpKind::Write { .. })) {
        let at = usize::try_from(op.offset).unwrap();
        rig.media.devices[0][at..at + 4096].fill(9);
    }
    let answer = rig.worker.complete(&two, &mut rig.plan, Ok(())).unwrap();
    assert!(matches!(answer, Answer::Done), "{answer:?}");
    rig.settle();
    let (_, outcome) = rig.engine.take_outcome().unwrap();
    let frozen = rig.attach(created(outcome)[1]);
    assert_eq!(rig.read(&frozen, 0, 4096), [9; 4096]);
    rig.check();
}
