//! Becoming the only owner of a pool's devices and of its delta ring.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::ring::RingMemory;
use blockd_mapper::units::DeviceIndex;
use blockd_media::pool::newest::{newest_of_pool, superblock};
use blockd_media::pool::ownership::Ownership;
use blockd_media::pool::ring_file::{RingFile, ring_path};
use blockd_media::pool::storage::Disk;
use blockd_media::pool::{MAX_WORKERS, PoolError, PoolSpec, boot_id, storage};
use blockd_media::{Device, Gate};

use super::driver::Served;
use super::lock::lock;

/// The delta ring of a pool whose devices are owned.
pub(super) struct OwnRing {
    pub(super) memory: Arc<dyn RingMemory>,
    pub(super) path: PathBuf,
    /// Why the ring that was there is not used, where that is known before it is opened.
    pub(super) problem: Option<String>,
}

/// Takes the locks and the claim of the pool's devices, then opens the delta ring: its file may be
/// grown to the dimensions of this start, which only the owner may do.
pub(super) fn own_ring(
    spec: &PoolSpec,
    served: &[Served],
    open_id: u64,
    gate: Option<&Arc<Gate>>,
) -> Result<(OwnRing, Ownership), PoolError> {
    for one in served {
        lock(&one.device, spec.lock_wait)?;
        one.device.start().map_err(PoolError::io("take up", &one.device.info().path))?;
    }
    let newest = || -> Result<Option<Superblock>, PoolError> {
        let copies = served.iter().filter_map(|one| superblock(&one.device));
        let newest = newest_of_pool(copies);
        newest.iter().try_for_each(|superblock| refuse_foreign(spec, superblock))?;
        Ok(newest)
    };
    let mut found = newest()?;
    let mut ownership = Ownership::default();
    let first = served.iter().find_map(|one| {
        let copy = superblock(&one.device).filter(|copy| copy.this_device == DeviceIndex(0))?;
        let is_own = found.as_ref().is_some_and(|newest| newest.pool_id == copy.pool_id);
        is_own.then_some((&one.device, copy.pool_id))
    });
    // Without its first device the mapper refuses the pool, and the gate stays closed.
    if let Some((first, pool_id)) = first {
        // A pool of a later release is only read: its claim page is not written either.
        let is_written = found.as_ref().is_none_or(|copy| copy.unknown_ro_compat() == 0);
        let gate = gate.filter(|_| is_written);
        ownership = Ownership::take(spec, first, pool_id, open_id, gate)?;
        if gate.is_some() {
            served.iter().try_for_each(|one| pass_cache(spec, &one.device))?;
        }
        // Another host may have had the pool open meanwhile.
        found = newest()?;
    }
    // Without a superblock the mapper says what is wrong; the ring is not asked for.
    let id = found.as_ref().map_or([0; 16], |superblock| superblock.pool_id);
    let path = ring_path(&spec.ring_dir, &id);
    let problem = match &found {
        Some(superblock) => check_storage(spec, served, superblock, &path, open_id)?,
        None => None,
    };
    let file = RingFile::open(&path, MAX_WORKERS, spec.ring_records)?;
    if !file.is_locked() {
        tracing::warn!(path = %path.display(), "delta ring can't be locked in memory");
    }
    Ok((OwnRing { memory: file, path, problem }, ownership))
}

/// Sees that what is read of a device is what other hosts have written.
fn pass_cache(spec: &PoolSpec, device: &Device) -> Result<(), PoolError> {
    let info = device.info();
    if !info.direct && device.memory().is_none() {
        let (pool, path) = (&spec.name, info.path.display());
        tracing::warn!(%pool, %path, "shared storage without O_DIRECT: late writes can follow a \
                       claim that was lost");
    }
    device.forget_cache().map_err(PoolError::io("drop page cache of", &info.path))
}

/// Refuses a ring that would be replayed over disks that were restarted since it was written, or
/// removes it where the loss is accepted; then remembers the disks for this open. Returns the
/// reason why the ring was removed.
fn check_storage(
    spec: &PoolSpec,
    served: &[Served],
    newest: &Superblock,
    ring: &Path,
    open_id: u64,
) -> Result<Option<String>, PoolError> {
    let sequences = served.iter().filter_map(|one| {
        let sequence = one.device.disk_sequence()?;
        Disk::of(&superblock(&one.device)?, sequence, &one.device.info().path)
    });
    let sequences: Vec<_> = sequences.collect();
    let problem = storage::check(spec, ring, newest, &boot_id()?, &sequences)?;
    if newest.unknown_ro_compat() != 0 {
        // Such a pool is only read, and its ring stays as it is.
        return Ok(problem);
    }
    if problem.is_some() {
        match std::fs::remove_file(ring) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(PoolError::io("remove delta ring", ring)(error));
            }
            _ => {}
        }
    }
    let former = storage::replayed(newest, &boot_id()?).filter(|_| problem.is_none());
    storage::remember(ring, former, open_id, &sequences)?;
    Ok(problem)
}

/// A pool that another node has not closed may be in use there, where no lock of ours is seen. A
/// takeover has to name the former owner.
fn refuse_foreign(spec: &PoolSpec, found: &Superblock) -> Result<(), PoolError> {
    let others = found.node != 0 && spec.node != 0 && found.node != spec.node;
    let refused = match spec.taken_from {
        Some(wanted) => found.node != wanted,
        None => others && !found.clean,
    };
    if !refused {
        return Ok(());
    }
    let path = spec.devices.first().map(|device| device.path.clone()).unwrap_or_default();
    Err(PoolError::Foreign { path, node: found.node, wanted: spec.taken_from })
}
