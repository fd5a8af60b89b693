//! Passes requests of the control service, and connections of listeners, to the workers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use blockd_control::services::{Answer, DataPath, Exported};
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_media::error::Error;
use blockd_serve::FrontendError;
use blockd_serve::nbd::{Session, Sessions};
use blockd_serve::worker::{ConnectionInfo, Workers};

/// The workers, for the control service and for listeners.
#[derive(Debug)]
pub(super) struct Serving(pub(super) Workers);

/// The error of a worker as a user gets it.
pub(super) fn frontend_error(error: FrontendError) -> Error {
    match error {
        FrontendError::Invalid { field, value, allowed } => Error::invalid(field, value, allowed),
        FrontendError::Io { what, source } => Error::io(what, source),
        FrontendError::Mapper(error) => error.into(),
        error => Error::Unexpected { what: "workers".to_owned(), problem: error.to_string() },
    }
}

impl DataPath for Serving {
    fn add_pool<'a>(&'a self, pool: &'a PoolHandle) -> Answer<'a, Result<(), Error>> {
        Box::pin(async move { self.0.add_pool(pool).await.map_err(frontend_error) })
    }

    fn remove_pool(&self, pool: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(self.0.remove_pool(pool))
    }

    fn close_volume(&self, pool: [u8; 16], volume: VolumeId) -> Answer<'_, usize> {
        Box::pin(self.0.close_volume(pool, volume))
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        self.0.connections()
    }

    fn connections_of(&self, pool: [u8; 16], volume: VolumeId) -> usize {
        self.0.connections_of(pool, volume)
    }

    fn each_volume(&self, see: &mut dyn FnMut(&VolumeStats)) {
        self.0.each_volume(see);
    }

    fn volume_stats(&self) -> Vec<Arc<VolumeStats>> {
        self.0.stats()
    }

    fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.0.worker_stats()
    }
}

impl Sessions<Exported> for Serving {
    fn connect(&self, stream: OwnedFd, session: Session<Exported>) {
        let Session { volume: exported, export, negotiated, peer, origin, guard } = session;
        exported.if_attached(|volume| {
            let session = Session { volume, export, negotiated, peer, origin, guard };
            self.0.connect(stream, session);
        });
    }

    async fn displace_idle(&self, listener: u64, idle: Duration) -> bool {
        self.0.displace_idle(listener, idle).await
    }
}
