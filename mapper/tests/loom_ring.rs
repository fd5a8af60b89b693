//! Producer and consumer of a slot under every interleaving:
//! `RUSTFLAGS="--cfg loom" cargo test -p blockd-mapper --release --test loom_ring`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::sync::Arc;

use blockd_mapper::format::VolumeName;
use blockd_mapper::format::record::Change;
use blockd_mapper::ring::{DeltaRing, Dropped, VecRingMemory};
use blockd_mapper::units::{ExtentIndex, Lsn, PhysicalExtent, VolumeId, WallTime};

const MAP: Change = Change::Map {
    volume: VolumeId(1),
    extent: ExtentIndex(2),
    physical: PhysicalExtent(3),
    valid: 4,
};

/// Formatting alone stores more words than loom allows a run by default.
fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000;
    builder.check(run);
}

fn ring() -> Arc<DeltaRing> {
    let memory = Arc::new(VecRingMemory::new(1, 4));
    Arc::new(DeltaRing::format(memory, &[1; 16], &[2; 16], 1, 4).unwrap())
}

#[test]
fn loom_a_reader_sees_whole_records_or_none() {
    model(|| {
        let ring = ring();
        let name = Box::new(VolumeName::new("n").unwrap());
        let (volume, made) = (VolumeId(9), WallTime(5));
        let create = Change::Create { volume, size: 512, block_size: 512, made, name };
        let producer = loom::thread::spawn({
            let (ring, create) = (Arc::clone(&ring), create.clone());
            move || {
                assert!(ring.reserve(0, 3));
                assert_eq!(ring.publish(0, Lsn(1), &MAP, Dropped::Nothing), Some(1));
                assert_eq!(ring.publish(0, Lsn(2), &create, Dropped::Nothing), Some(2));
            }
        });
        let second = ring.read(0, 2);
        let first = ring.read(0, 1);
        if let Some(record) = second {
            assert_eq!((record.lsn, record.change), (Lsn(2), create));
            assert!(first.is_some(), "records published before must be there");
        }
        if let Some(record) = first {
            assert_eq!((record.lsn, record.change), (Lsn(1), MAP));
        }
        producer.join().unwrap();
        assert!(ring.read(0, 1).is_some() && ring.read(0, 2).is_some());
    });
}

#[test]
fn loom_room_is_used_again_only_after_it_was_read() {
    model(|| {
        let ring = ring();
        for lsn in 1..=4 {
            assert!(ring.reserve(0, 1));
            ring.publish(0, Lsn(lsn), &MAP, Dropped::Nothing).unwrap();
        }
        let producer = loom::thread::spawn({
            let ring = Arc::clone(&ring);
            move || {
                if ring.reserve(0, 1) {
                    let delete = Change::Delete { volume: VolumeId(9) };
                    ring.publish(0, Lsn(5), &delete, Dropped::Nothing).unwrap();
                }
            }
        });
        let record = ring.read(0, 1).unwrap();
        assert_eq!((record.lsn, record.change), (Lsn(1), MAP));
        ring.trim(0, 2);
        producer.join().unwrap();
        assert_eq!(ring.recover().unwrap().len() as u64, ring.used(0));
    });
}
