//! A pool and volumes without an engine, for unit tests of its parts.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::sync::Arc;

use crate::arena::Arena;
use crate::directory::Directory;
use crate::format::VolumeName;
use crate::format::catalogue::VolumeKind;
use crate::geometry::{Geometry, MAX_DEVICES};
use crate::pool::{Pool, PoolParts, Tuning};
use crate::ring::{DeltaRing, VecRingMemory};
use crate::units::{Lsn, VolumeId, WallTime};
use crate::volume::{Identity, Volume};

pub(crate) fn pool() -> Arc<Pool> {
    let memory = Arc::new(VecRingMemory::new(1, 16));
    Arc::new(Pool::assemble(PoolParts {
        pool_id: [1; 16],
        geometry: Geometry::new(64 << 10).unwrap(),
        tuning: Tuning { workers: 1, ..Tuning::default() },
        handles: [0; MAX_DEVICES],
        arena: Arena::new(1),
        ring: DeltaRing::format(memory, &[1; 16], &[2; 16], 1, 16).unwrap(),
        next_lsn: Lsn(1),
        read_only: false,
        composite: false,
    }))
}

/// A volume of 4 KiB without relatives.
pub(crate) fn volume(id: u32, name: &str) -> Arc<Volume> {
    let identity = Identity {
        id: VolumeId(id),
        lineage: VolumeId(id),
        origin: VolumeId(0),
        kind: VolumeKind::Volume,
        block_size: 512,
        created: Lsn(1),
        made: WallTime::default(),
    };
    let name = VolumeName::new(name).unwrap();
    Arc::new(Volume::new(identity, name, 4096, Directory::new(1).unwrap()))
}
