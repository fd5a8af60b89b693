//! Passes requests of the control service, and connections of listeners, to the workers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use blockd_control::services::{self, Answer, Connection, DataPath};
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_media::error::Error;
use blockd_serve::FrontendError;
use blockd_serve::nbd::{Session, Sessions};
use blockd_serve::worker::{self, ConnectionInfo, Workers};

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

    fn connections(&self) -> Vec<Connection> {
        self.0.connections().into_iter().map(connection).collect()
    }

    fn volume_stats(&self) -> Vec<Arc<VolumeStats>> {
        self.0.stats()
    }

    fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.0.worker_stats()
    }
}

fn connection(info: ConnectionInfo) -> Connection {
    Connection {
        // Workers count their own.
        id: ((info.worker as u64) << 48) | info.id,
        pool: info.pool,
        volume: info.volume,
        export: info.export,
        peer: info.peer,
        tls: info.agreed.tls,
        read_only: info.agreed.read_only,
        structured: info.agreed.structured,
        extended: info.agreed.extended,
        worker: info.worker,
        size: info.agreed.size,
        in_flight: info.in_flight.get(),
    }
}

impl Sessions<services::Target> for Serving {
    fn connect(&self, stream: OwnedFd, session: Session<services::Target>) {
        let Session { volume: target, export, negotiated, peer, origin, guard } = session;
        let (pool, volume, name) = (target.pool.clone(), target.volume, target.name.clone());
        let volume = worker::Target { pool, volume, name };
        let session = Session { volume, export, negotiated, peer, origin, guard };
        target.if_attached(|| self.0.connect(stream, session));
    }

    async fn displace_idle(&self, listener: u64, idle: Duration) -> bool {
        self.0.displace_idle(listener, idle).await
    }
}
