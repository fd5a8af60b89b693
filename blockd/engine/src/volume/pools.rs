//! The pools that an executor serves.

use std::collections::VecDeque;
use std::sync::Arc;

use blockd_mapper::error::MapperError;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{DiffRange, Look, Stretch, Worker};
use blockd_media::Device;

use super::executor::{Executor, FIRST_SLOTS, MARKED_REQUESTS, VolumeRef};
use crate::backing::{FileSlot, Ring};
use crate::block::BlockError;
use crate::pool::PoolHandle;
use crate::stats::MediaStats;

/// A device as this thread's ring knows it.
#[derive(Debug)]
pub(super) struct Media {
    pub(super) device: Arc<Device>,
    pub(super) file: FileSlot,
}

/// A pool as this thread uses it.
#[derive(Debug)]
pub(super) struct PoolPart {
    pub(super) handle: PoolHandle,
    pub(super) worker: Worker,
    /// Set if clients do not flush: every change is durable when it is answered.
    pub(super) through: bool,
    pub(super) media: Vec<Media>,
    pub(super) seen: Arc<MediaStats>,
    /// Slots that wait for the pool, in order.
    pub(super) parked: VecDeque<usize>,
    /// The pool's events before the first of them was tried.
    pub(super) events: u64,
    /// When one of them has waited for long enough.
    pub(super) patience: Option<u64>,
    /// Slots that wait for a commit.
    pub(super) committing: Vec<usize>,
    /// Commits that were finished when those were looked at.
    pub(super) commits: u64,
}

impl PoolPart {
    /// The lane of this thread on the pool's devices.
    pub(super) const fn lane(&self) -> usize {
        self.worker.slot()
    }

    /// Whether something that a slot waits for may have happened since it was looked at.
    pub(super) fn moved(&self) -> bool {
        let mapper = self.handle.mapper();
        if !self.parked.is_empty() && mapper.events() != self.events {
            return true;
        }
        if self.committing.is_empty() {
            return false;
        }
        // Before the look: a commit that ends after it wakes this thread.
        self.handle.await_commit(self.worker.slot());
        mapper.commits_finished() != self.commits || mapper.failure().is_some()
    }
}

/// Makes the open devices of a pool known to the ring that it does not know yet.
fn take_up(
    handle: &PoolHandle,
    media: &mut Vec<Media>,
    ring: &mut Ring,
) -> Result<(), MapperError> {
    let known = media.len();
    for device in handle.open_devices().skip(known) {
        let file = ring.add_device(device);
        let file = file.map_err(|_| MapperError::Limit { what: "files", limit: 4096 })?;
        media.push(Media { device: Arc::clone(device), file });
    }
    Ok(())
}

impl Executor {
    /// Serves a pool from now on: takes one of its workers, and makes its devices known to the
    /// ring. For a pool that is served, the same for devices that were opened since then. Gives the
    /// worker's slot.
    pub fn add_pool(&mut self, handle: &PoolHandle, ring: &mut Ring) -> Result<usize, MapperError> {
        if let Some(part) = self.pools.iter_mut().find(|part| part.handle.id() == handle.id()) {
            let known = part.media.len();
            let taken_up = take_up(handle, &mut part.media, ring);
            (known..part.media.len()).for_each(|_| part.seen.add_device());
            taken_up?;
            return Ok(part.worker.slot());
        }
        let worker = handle.mapper().worker()?;
        let slot = worker.slot();
        let mut media = Vec::new();
        take_up(handle, &mut media, ring)?;
        let reserved = self.copies.reserve(ring);
        self.scheduler.reserve_memory(reserved);
        let requests = MARKED_REQUESTS;
        let seen = Arc::new(MediaStats::new(media.len(), requests, self.clock));
        handle.add_media_stats(&seen);
        self.pools.push(PoolPart {
            through: handle.is_write_through(),
            handle: handle.clone(),
            worker,
            media,
            seen,
            parked: VecDeque::with_capacity(FIRST_SLOTS),
            events: 0,
            patience: None,
            committing: Vec::with_capacity(FIRST_SLOTS),
            commits: 0,
        });
        Ok(slot)
    }

    /// Ends the service of pools that have been closed.
    #[inline]
    pub fn drop_pools(&mut self) {
        if self.volumes.iter().all(Option::is_none) {
            self.pools.clear();
        }
    }

    /// Ends the service of a pool: its devices leave the ring, and its worker is free. False as
    /// long as a volume of it is served.
    pub fn remove_pool(&mut self, pool: [u8; 16], ring: &mut Ring) -> bool {
        let Some(at) = self.pools.iter().position(|part| part.handle.id() == pool) else {
            return true;
        };
        let is_served = self.volumes.iter().flatten().any(|volume| volume.pool == at);
        if is_served || self.unfenced.is_some() {
            return false;
        }
        for media in self.pools.remove(at).media {
            ring.remove(media.file);
        }
        // Volumes name their pool by its place.
        for volume in self.volumes.iter_mut().flatten().filter(|volume| volume.pool > at) {
            volume.pool -= 1;
        }
        true
    }

    /// The handle of a pool that is served.
    #[must_use]
    #[inline]
    pub fn pool(&self, pool: [u8; 16]) -> Option<&PoolHandle> {
        let part = self.pools.iter().find(|part| part.handle.id() == pool);
        part.map(|part| &part.handle)
    }

    /// Whether some device of a volume's pool is memory of this process, so that requests need
    /// memory that it can reach.
    #[must_use]
    #[inline]
    pub fn is_mapped(&self, volume: VolumeRef) -> bool {
        let attached = self.volumes.get(volume.0).and_then(Option::as_ref);
        let pool = attached.and_then(|attached| self.pools.get(attached.pool));
        pool.is_some_and(|part| part.media.iter().any(|media| media.device.memory().is_some()))
    }

    /// Bytes of a volume at present.
    #[must_use]
    #[inline]
    pub fn size(&self, volume: VolumeRef) -> u64 {
        self.volumes[volume.0].as_ref().map_or(0, |attached| attached.attachment.size())
    }

    /// Describes a range of a volume; see [`Worker::stretches`].
    pub fn stretches(
        &mut self,
        volume: VolumeRef,
        offset: u64,
        len: u64,
        limit: usize,
        out: &mut Vec<Stretch>,
    ) -> Result<(), BlockError> {
        let Some(attached) = &self.volumes[volume.0] else { return Err(BlockError::Gone) };
        let worker = &mut self.pools[attached.pool].worker;
        let result = worker.stretches(&attached.attachment, offset, len, limit, out);
        result.map_err(|error| BlockError::from(&error))
    }

    /// Describes a range of a volume beside a snapshot; see [`Worker::changes`].
    pub fn changes(
        &mut self,
        volume: VolumeRef,
        since: Option<VolumeId>,
        look: &Look,
        out: &mut Vec<DiffRange>,
    ) -> Result<bool, BlockError> {
        let Some(attached) = &self.volumes[volume.0] else { return Err(BlockError::Gone) };
        let worker = &mut self.pools[attached.pool].worker;
        let result = worker.changes(&attached.attachment, since, look, out);
        result.map_err(|error| BlockError::from(&error))
    }
}
