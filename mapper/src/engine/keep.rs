//! Extents that are granted to a volume on request, before it writes, and kept for it. Kept extents
//! go into the volume's reserve, as every grant does. Other volumes that run out of space do not
//! get them; the pages that mapping them takes are set aside as well. The reserve is not durable:
//! like every reserve it is free again when the pool is opened.

use std::sync::Arc;

use crate::error::MapperError;
use crate::sync::Ordering;
use crate::units::VolumeId;

use super::Engine;

/// The reason why nothing is granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortage {
    /// The pool has no extent for the volume.
    Pool,
    /// The volume has all that its quota allows.
    Quota,
}

/// The result of [`Engine::keep_reserve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// Extents kept by this call that were not kept before: as many as [`Engine::release_kept`]
    /// has to be called with to undo it.
    pub added: u64,
    /// The reason if nothing was granted although the volume has less than requested; the kept
    /// amount is unchanged then.
    pub shortage: Option<Shortage>,
}

impl Engine {
    /// Keeps a quantum for a volume, or less: no more than `most` extents, no more than the volume
    /// can still use, and no more than its quota and the pool have. Extents that its reserve holds
    /// already count, so that repeated calls do not add up.
    ///
    /// Extents stay kept until writes take them, until [`Self::release_kept`], or until the volume
    /// is deleted or the pool closed.
    ///
    /// # Errors
    /// If there is no such volume, it is a snapshot, or the pool has stopped.
    pub fn keep_reserve(&mut self, id: VolumeId, most: u64) -> Result<Kept, MapperError> {
        self.pool.check_alive()?;
        let volume = self.writable(id)?;
        if self.pool.read_only {
            return Ok(Kept { added: 0, shortage: Some(Shortage::Pool) });
        }
        let pool = Arc::clone(&self.pool);
        let volumes = pool.volumes.read();
        let reserved = volume.reserved();
        let size = volume.size.load(Ordering::Acquire).div_ceil(pool.geometry.extent_size());
        let useful = reserved.saturating_add(self.room_in_size(&volume, &volumes)).min(size);
        let wanted = pool.quantum.load(Ordering::Relaxed).min(most).min(useful);
        self.space.note_reserving(&volumes, id);
        let mut added = volume.keep(reserved.min(wanted));
        let missing = wanted.saturating_sub(reserved);
        let allowed = missing.min(self.room_in_quota(&volume));
        let mut granted = self.grant_available(&volume, allowed, &volumes);
        // Before anything is taken back from reserves: its own stays.
        added += volume.keep((reserved + granted).min(wanted));
        if granted < allowed && self.take_reserves(&volumes).0 {
            granted += self.grant_available(&volume, allowed - granted, &volumes);
            added += volume.keep((reserved + granted).min(wanted));
        }
        drop(volumes);
        if granted > 0 {
            volume.starves.store(0, Ordering::Release);
            volume.misses.clear();
            volume.drop_wait.end();
            volume.out_of_space.store(false, Ordering::Release);
            volume.wants_space.store(false, Ordering::Release);
            pool.bump();
        }
        // A reserve that consists of too many pieces to take more counts as complete.
        let is_short = missing > 0 && granted == 0 && volume.reserve.lock().has_room();
        if is_short {
            volume.keep_less(added);
            let shortage = if allowed == 0 { Shortage::Quota } else { Shortage::Pool };
            return Ok(Kept { added: 0, shortage: Some(shortage) });
        }
        Ok(Kept { added, shortage: None })
    }

    /// Keeps this many extents less for a volume, and frees the others of its reserve.
    pub fn release_kept(&mut self, id: VolumeId, extents: u64) {
        let Ok(volume) = self.pool.volume(id) else { return };
        if volume.kept() == 0 {
            volume.keep_less(extents);
            return;
        }
        volume.keep_less(extents);
        let mut taken = 0;
        volume.take_back(|first, count| {
            taken += count;
            self.pool.free_space.lock().free(first, count);
        });
        self.space.returned(taken);
        if taken > 0 {
            self.pool.bump();
            self.pool.want_engine();
        }
    }
}
