//! Labels of volumes: how long they stay, and what damage, crashes and older releases do to them.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::{LABELS, Superblock};
use blockd_mapper::format::{Labels, Place};
use blockd_mapper::io::IoOp;
use blockd_mapper::open::Opening;
use blockd_mapper::units::VolumeId;

use common::{Media, Rig};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
const EXTENT: usize = 64 << 10;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    Labels::new(pairs.iter().copied()).unwrap()
}

fn label(rig: &mut Rig, volume: VolumeId, labels: &Labels) -> Result<Outcome, MapperError> {
    rig.control(Control::Label { volume, labels: labels.clone() })
}

fn set(rig: &mut Rig, volume: VolumeId, to: &Labels) {
    let outcome = label(rig, volume, to).unwrap();
    assert!(matches!(outcome, Outcome::Labelled { .. }), "{outcome:?}");
}

fn found(rig: &Rig, id: VolumeId) -> Labels {
    rig.pool.summaries().into_iter().find(|one| one.id == id).unwrap().labels
}

fn made(outcome: Result<Outcome, MapperError>) -> VolumeId {
    match outcome.unwrap() {
        Outcome::Created(id) => id,
        other => panic!("{other:?}"),
    }
}

/// Where pages of a kind lie that any superblock may name, live or not: device and byte.
fn pages(media: &Media, kind: u8) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (device, bytes) in media.devices.iter().enumerate() {
        let is_one = |page: &[u8]| page.starts_with(&[b'B', b'D', b'p', b'g', kind]);
        let places = bytes.chunks(PAGE).enumerate().filter(|(_, page)| is_one(page));
        found.extend(places.map(|(at, _)| (device, at * PAGE)));
    }
    found
}

/// Changes every copy of the superblock that `which` accepts, by its number.
fn edit(media: &mut Media, which: impl Fn(usize) -> bool, change: impl Fn(&mut [u8])) {
    let mut number = 0;
    for device in &mut media.devices {
        for page in device.chunks_mut(PAGE).filter(|page| page.starts_with(b"BLOCKDsb")) {
            number += 1;
            if which(number) {
                change(page);
                page[8..12].fill(0);
                let crc = crc32c::crc32c(page);
                page[8..12].copy_from_slice(&crc.to_le_bytes());
            }
        }
    }
}

#[test]
fn labels_stay_over_a_close_and_over_a_crash() {
    let mut rig = Rig::new(&[8 * MIB]);
    let [a, b] = ["a", "b"].map(|name| rig.create(name, 1 << 20));
    let (of_a, of_b) = (labels(&[("team", "db"), ("x.y/z", "")]), labels(&[("k", "ä b=c")]));
    set(&mut rig, a, &of_a);
    set(&mut rig, b, &of_b);
    assert_eq!(label(&mut rig, b, &of_b), Ok(Outcome::Unchanged));
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!([found(&rig, a), found(&rig, b)], [of_a.clone(), of_b]);
    assert_eq!(rig.report.labels_lost, 0);
    set(&mut rig, b, &Labels::default());
    rig.control(Control::Close).unwrap();
    let mut rig = Rig::open(rig.kill()).unwrap();
    assert_eq!([found(&rig, a), found(&rig, b)], [of_a, Labels::default()]);
    rig.check();
}

#[test]
fn the_feature_is_noted_while_there_are_labels() {
    let word = |media: &Media| u64::from_le_bytes(media.devices[0][16..24].try_into().unwrap());
    let mut rig = Rig::new(&[8 * MIB]);
    let id = rig.create("a", 1 << 20);
    rig.control(Control::Checkpoint).unwrap();
    assert_eq!(word(&rig.media) & LABELS, 0);
    set(&mut rig, id, &labels(&[("a", "b")]));
    assert_eq!(word(&rig.media) & LABELS, LABELS);
    set(&mut rig, id, &Labels::default());
    assert_eq!(word(&rig.media) & LABELS, 0);
    rig.check();
}

/// The media after each write of a command, in the order of the writes.
fn after_each_write(rig: &mut Rig, control: Control) -> Vec<Media> {
    let id = rig.engine.submit(control);
    let mut states = vec![rig.media.clone()];
    for _ in 0..1000 {
        while let Some(mut command) = rig.engine.poll(rig.now) {
            rig.media.run(&mut command);
            if matches!(command.op, IoOp::Write { .. }) {
                states.push(rig.media.clone());
            }
            rig.engine.complete(command, Ok(()));
        }
        if let Some((ended, outcome)) = rig.engine.take_outcome() {
            assert_eq!(ended, id);
            outcome.unwrap();
            states.push(rig.media.clone());
            return states;
        }
        rig.now += 1_000_000;
    }
    panic!("the command never ended");
}

#[test]
fn a_crash_at_any_write_leaves_the_old_labels_or_the_new_ones() {
    let mut rig = Rig::new(&[4 * MIB]);
    let [a, other] = ["a", "other"].map(|name| rig.create(name, 1 << 20));
    let kept = labels(&[("kept", "1")]);
    set(&mut rig, other, &kept);
    let steps =
        [labels(&[("k", "old")]), labels(&[("k", "new"), ("l", "more")]), Labels::default()];
    let mut before = Labels::default();
    for next in steps {
        let control = Control::Label { volume: a, labels: next.clone() };
        let states = after_each_write(&mut rig, control);
        assert!(states.len() > 6, "pages, and two pairs of superblocks");
        let mut seen_new = false;
        for media in states {
            let mut rig = Rig::open(media).unwrap();
            let now = found(&rig, a);
            assert!(now == before || now == next, "{now:?}");
            assert!(!seen_new || now == next, "the change is not taken back");
            seen_new = now == next;
            assert_eq!((found(&rig, other), rig.report.labels_lost), (kept.clone(), 0));
            rig.check();
        }
        assert!(seen_new, "what is answered is durable");
        before = next;
    }
}

#[test]
fn a_snapshot_or_clone_begins_without_labels_and_a_volume_keeps_its_own() {
    let mut rig = Rig::new(&[8 * MIB]);
    let id = rig.create("a", 1 << 20);
    let own = labels(&[("own", "1")]);
    set(&mut rig, id, &own);
    let snapshot = made(rig.control(Control::Snapshot { source: id, name: "s".to_owned() }));
    let clone = Control::Clone { source: snapshot, name: "c".to_owned(), size: Some(4 << 20) };
    let clone = made(rig.control(clone));
    assert!(found(&rig, snapshot).is_empty() && found(&rig, clone).is_empty());
    let of_snapshot = labels(&[("kind", "nightly")]);
    set(&mut rig, snapshot, &of_snapshot);
    rig.control(Control::Rename { volume: id, name: "b".to_owned() }).unwrap();
    rig.control(Control::Rollback { volume: id, snapshot }).unwrap();
    rig.control(Control::Resize { volume: id, size: 2 << 20 }).unwrap();
    let rig = Rig::open(rig.kill()).unwrap();
    let all = [id, snapshot, clone].map(|id| found(&rig, id));
    assert_eq!(all, [own, of_snapshot, Labels::default()]);
}

#[test]
fn a_place_of_a_deleted_volume_has_none_of_its_labels_and_pages_are_used_again() {
    let mut rig = Rig::new(&[8 * MIB]);
    let of = |round: usize| labels(&[("round", round.to_string().as_str())]);
    let mut used = Vec::new();
    for round in 0..40 {
        let id = rig.create("a", 1 << 20);
        assert!(found(&rig, id).is_empty());
        set(&mut rig, id, &of(round));
        rig.control(Control::Delete { volume: id }).unwrap();
        rig.check();
        used.push(rig.engine.space().metadata_free);
        if round % 10 == 3 {
            rig = Rig::open(rig.kill()).unwrap();
            assert_eq!((rig.pool.summaries().len(), rig.report.labels_lost), (0, 0));
        }
    }
    assert_eq!(used[5], used[39], "no page is lost: {used:?}");
}

/// With the 253rd place the tree gets another level.
#[test]
fn labels_of_many_volumes_outlive_the_growth_of_their_tree() {
    let mut rig = Rig::new(&[24 * MIB]);
    let of = |at: usize| labels(&[("at", at.to_string().as_str())]);
    let ids: Vec<_> = (0..270).map(|at| rig.create(&format!("v{at}"), 1 << 20)).collect();
    for (at, &id) in ids.iter().enumerate().filter(|(at, _)| at % 9 == 0 || *at > 250) {
        set(&mut rig, id, &of(at));
    }
    rig.check();
    let mut rig = Rig::open(rig.kill()).unwrap();
    for (at, &id) in ids.iter().enumerate() {
        let expected = if at % 9 == 0 || at > 250 { of(at) } else { Labels::default() };
        assert_eq!(found(&rig, id), expected, "{at}");
    }
    // The other way round: labels first, then the places.
    let mut small = Rig::new(&[24 * MIB]);
    let first = small.create("first", 1 << 20);
    set(&mut small, first, &of(1));
    (0..300).for_each(|at| {
        small.create(&format!("v{at}"), 1 << 20);
    });
    small.control(Control::Checkpoint).unwrap();
    let mut small = Rig::open(small.kill()).unwrap();
    assert_eq!(found(&small, first), of(1));
    rig.check();
    small.check();
}

#[test]
fn pages_of_labels_leave_a_device_with_everything_else() {
    let mut media = Media::new(&[6 * MIB, 8 * MIB, 8 * MIB]);
    media.create();
    let mut rig = Rig::open(media).unwrap();
    let of = |at: usize| labels(&[("at", "x".repeat(at).as_str())]);
    let mut ids = Vec::new();
    // Until some lie on the second device.
    while !pages(&rig.media, 5).iter().any(|(device, _)| *device == 1) {
        assert!(ids.len() < 250, "all on the first device");
        let id = rig.create(&format!("v{}", ids.len()), 1 << 20);
        set(&mut rig, id, &of(ids.len()));
        let volume = rig.attach(id);
        rig.write(&volume, 0, &[1; EXTENT]).unwrap();
        rig.worker.detach(volume);
        ids.push(id);
    }
    rig.control(Control::RemoveDevice { device: 1 }).unwrap();
    for _ in 0..2000 {
        if rig.engine.evacuation_status().device.is_none() {
            break;
        }
        rig.now += 100_000_000;
        rig.settle();
    }
    assert_eq!(rig.engine.evacuation_status().device, None);
    rig.check();
    let mut media = rig.kill();
    media.devices.remove(1);
    let mut rig = Rig::open(media).unwrap();
    for (at, id) in ids.iter().enumerate() {
        assert_eq!(found(&rig, *id), of(at));
    }
    rig.check();
}

fn two_labelled() -> (Rig, [VolumeId; 2]) {
    let mut rig = Rig::new(&[8 * MIB]);
    let ids = ["a", "b"].map(|name| rig.create(name, 1 << 20));
    for (id, value) in ids.into_iter().zip(["1", "2"]) {
        set(&mut rig, id, &labels(&[("k", value)]));
        let volume = rig.attach(id);
        rig.write(&volume, 0, &[7; EXTENT]).unwrap();
        rig.worker.detach(volume);
    }
    rig.control(Control::Close).unwrap();
    (rig, ids)
}

#[test]
fn a_damaged_page_of_labels_costs_the_labels_and_nothing_else() {
    let (rig, ids) = two_labelled();
    let sound = rig.kill();
    let all = pages(&sound, 5).into_iter().chain(pages(&sound, 2));
    let mut losses = Vec::new();
    for (device, at) in all {
        let mut media = sound.clone();
        media.devices[device][at + 70] ^= 1;
        // Pages of an older checkpoint, and those of the volumes' own trees.
        let Ok(mut rig) = Rig::open(media) else { continue };
        let lost = rig.report.labels_lost;
        if lost == 0 {
            continue;
        }
        let kept = ids.iter().filter(|id| !found(&rig, **id).is_empty()).count();
        losses.push((lost, kept));
        for id in ids {
            let volume = rig.attach(id);
            assert!(rig.read(&volume, 0, EXTENT).iter().all(|byte| *byte == 7));
            rig.worker.detach(volume);
        }
        // The next checkpoint leaves the page out, and another label gets a new one.
        set(&mut rig, ids[0], &labels(&[("again", "1")]));
        rig.check();
        let rig = Rig::open(rig.kill()).unwrap();
        assert_eq!(rig.report.labels_lost, 0);
        assert_eq!(found(&rig, ids[0]), labels(&[("again", "1")]));
    }
    losses.sort_unstable();
    assert_eq!(losses, [(1, 0), (1, 1), (1, 1)], "both pages, and the index above them");
}

/// An error of reading may pass: the page stays where it is.
#[test]
fn labels_that_cannot_be_read_for_once_are_back_the_next_time() {
    let (rig, ids) = two_labelled();
    let mut media = rig.kill();
    let sound = media.clone();
    let bad = pages(&media, 5);
    let mut opening = Opening::new(media.open_options()).unwrap();
    while let Some(mut command) = opening.poll() {
        media.run(&mut command);
        let mut result = Ok(());
        if let IoOp::Read { offset, buffer } = &command.op {
            let first = usize::try_from(*offset).unwrap();
            let range = first..first + buffer.as_bytes().len();
            let is_label = |bytes: &[u8]| bytes.starts_with(b"BDpg\x05");
            if bad.iter().any(|(_, at)| range.contains(at)) && is_label(buffer.as_bytes()) {
                result = Err(blockd_mapper::io::IoError::Media);
            }
        }
        opening.complete(command, result);
    }
    let opened = opening.finish().unwrap();
    assert_eq!(opened.report.labels_lost, 2);
    assert_eq!(opened.pool.summaries().len(), 2);
    drop(opened);
    assert_ne!(media.devices, sound.devices, "the opening has written a superblock");
    let rig = Rig::open(media).unwrap();
    assert!(ids.iter().all(|id| !found(&rig, *id).is_empty()));
}

#[test]
fn an_index_page_that_cannot_be_read_for_once_takes_all_labels_and_no_extent_with_it() {
    let (rig, ids) = two_labelled();
    let mut media = rig.kill();
    let superblock = Superblock::decode(&media.devices[0][..PAGE], Place::Memory).unwrap();
    let root = superblock.labels_root.address.0 * PAGE as u64;
    let mut opening = Opening::new(media.open_options()).unwrap();
    while let Some(mut command) = opening.poll() {
        media.run(&mut command);
        let mut result = Ok(());
        if matches!(command.op, IoOp::Read { offset, .. } if offset == root) {
            result = Err(blockd_mapper::io::IoError::Media);
        }
        opening.complete(command, result);
    }
    let opened = opening.finish().unwrap();
    assert!(opened.report.labels_lost > 0);
    assert!(opened.pool.summaries().iter().all(|one| one.labels.is_empty()));
    drop(opened);
    // The pages that were below it may have other uses by the next opening.
    for (device, at) in pages(&media, 5) {
        media.devices[device][at..at + PAGE].fill(0x55);
    }
    let mut rig = Rig::open(media).unwrap();
    assert_eq!(rig.report.labels_lost, 0, "no superblock names them any more");
    assert!(ids.iter().all(|id| found(&rig, *id).is_empty()));
    set(&mut rig, ids[0], &labels(&[("k", "v")]));
    rig.check();
}

/// A release that does not know labels keeps the bit and writes zeroes in place of the root.
#[test]
fn a_release_that_does_not_know_labels_loses_them_and_nothing_else() {
    let (rig, ids) = two_labelled();
    let sound = rig.kill();
    let forget = |page: &mut [u8]| page[192..208].fill(0);
    let mut media = sound.clone();
    edit(&mut media, |_| true, forget);
    let mut rig = Rig::open(media).unwrap();
    assert!(ids.iter().all(|id| found(&rig, *id).is_empty()) && rig.report.labels_lost == 0);
    set(&mut rig, ids[0], &labels(&[("k", "v")]));
    rig.check();
    // It was killed while it wrote a superblock anew: some copies still have the root.
    let mut media = sound.clone();
    edit(&mut media, |number| number == 2, forget);
    let mut rig = Rig::open(media).unwrap();
    assert!(ids.iter().all(|id| found(&rig, *id).is_empty()));
    rig.check();
    // Two roots are two writers, as two of anything are.
    let mut media = sound;
    edit(&mut media, |number| number == 2, |page| page[192] ^= 1);
    let error = Rig::open(media).unwrap_err().to_string();
    assert!(error.contains("exists in two versions"), "{error}");
}

#[test]
fn a_full_pool_takes_labels_or_refuses_them_and_goes_on() {
    let mut rig = Rig::new(&[5 * MIB]);
    // Their labels would take more than the pool has.
    let ids: Vec<_> = (0..1400).map(|at| rig.create(&format!("v{at}"), 1 << 20)).collect();
    set(&mut rig, ids[0], &labels(&[("k", "first")]));
    let big = rig.create("big", 8 << 20);
    let volume = rig.attach(big);
    let mut at = 0;
    while rig.engine.space().free > 0 || rig.engine.space().reserved > 0 {
        rig.write(&volume, at << 16, &[1; PAGE]).unwrap();
        at += 1;
    }
    rig.flush(&volume).unwrap();
    rig.worker.detach(volume);
    // Its page is replaced, and free again.
    set(&mut rig, ids[0], &labels(&[("k", "other")]));
    let mut taken = 1;
    for &id in &ids[1..] {
        match label(&mut rig, id, &labels(&[("k", "v")])) {
            Ok(_) => taken += 1,
            Err(MapperError::NoSpace { .. }) => assert!(found(&rig, id).is_empty()),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(taken < ids.len(), "the reserve is for changes that free space");
    rig.control(Control::Checkpoint).unwrap();
    rig.control(Control::Delete { volume: big }).unwrap();
    rig.check();
    let rig = Rig::open(rig.kill()).unwrap();
    assert_eq!(ids.iter().filter(|id| !found(&rig, **id).is_empty()).count(), taken);
}
