//! Space that is kept for a volume on request.

use blockd_mapper::engine::{Kept, Shortage};
use blockd_mapper::units::VolumeId;
use blockd_media::pool::PoolError;
use futures_channel::oneshot;

use super::PoolHandle;
use super::handle::Ask;

/// Extents that were kept for a volume on request. Dropped before the asker has its answer, they
/// are given back.
#[derive(Debug)]
#[must_use]
pub struct Keep {
    handle: PoolHandle,
    volume: VolumeId,
    added: u64,
    shortage: Option<Shortage>,
}

impl Keep {
    /// By the pool's thread. If the asker is gone, so is this, which gives the extents back.
    pub(super) const fn new(handle: PoolHandle, volume: VolumeId, kept: Kept) -> Self {
        Self { handle, volume, added: kept.added, shortage: kept.shortage }
    }

    /// The reason, if the volume was granted nothing and has less than was asked for.
    #[must_use]
    pub const fn shortage(&self) -> Option<Shortage> {
        self.shortage
    }

    /// The asker knows of it: the extents stay kept until writes take them, the volume is detached
    /// or deleted, or the pool is closed.
    pub fn answered(mut self) {
        self.added = 0;
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if self.added > 0 {
            // A pool that is closed keeps nothing.
            let _ = self.handle.ask(Ask::ReleaseKept(self.volume, self.added));
        }
    }
}

impl PoolHandle {
    /// Keeps a quantum of the pool's space for a volume, or less: no more than `most` bytes,
    /// rounded up to extents, no more than the volume can use, and no more than its quota and the
    /// pool have.
    ///
    /// # Errors
    /// If there is no such volume, or the pool does not serve.
    pub async fn keep(&self, volume: VolumeId, most: u64) -> Result<Keep, PoolError> {
        let (send, receive) = oneshot::channel();
        let most = most.div_ceil(self.extent_size().max(1));
        self.ask(Ask::Keep(self.clone(), volume, most, send))?;
        receive.await.unwrap_or(Err(PoolError::Gone))
    }

    /// Gives back all that is kept for a volume.
    ///
    /// # Errors
    /// If the pool does not serve.
    pub fn release_kept(&self, volume: VolumeId) -> Result<(), PoolError> {
        self.ask(Ask::ReleaseKept(volume, u64::MAX))
    }
}
