//! The end of an open pool: in order, or after a failure.

use blockd_mapper::engine::Control;
use blockd_mapper::error::MapperError;
use blockd_mapper::pool::Pool;
use blockd_media::pool::PoolError;

use super::handle::{Ask, PoolHandle};

impl PoolHandle {
    /// Takes no more requests, waits for those in flight, leaves the pool clean, ends its thread,
    /// and releases its locks and its claim.
    pub async fn close(&self) -> Result<(), PoolError> {
        self.control(Control::Close).await?;
        self.shared.released.wait().await;
        Ok(())
    }

    /// Ends the thread of a pool that has failed, and releases its locks, when all of its IO has
    /// ended. Nothing is written: the next open reads the media, and the delta ring if no flush has
    /// poisoned it. Workers must have forgotten the pool. Returns at once where it has not failed.
    pub async fn abandon(&self) {
        // A pool whose thread has ended is given up already.
        if self.failure().is_some() && self.ask(Ask::Abandon).is_ok() {
            self.shared.released.wait().await;
        }
    }

    /// Why it has failed, if it has. A pool that was closed in order has stopped, and not failed.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        failure_of(&self.shared.pool).map(|error| error.to_string())
    }

    /// Stops the pool for good, as another program has written to its devices, or as IO does not
    /// end. The delta ring stays valid: no device has dropped anything.
    pub fn halt(&self, error: MapperError) {
        self.shared.pool.halt(error);
        self.shared.doorbell.ring();
    }
}

/// Why a pool has stopped, if that was not to close it.
pub(super) fn failure_of(pool: &Pool) -> Option<MapperError> {
    pool.failure().filter(|error| *error != MapperError::Closed)
}
