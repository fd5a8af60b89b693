//! Requests of the control service to the threads that serve clients.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_media::error::Error;
use blockd_serve::demands::Demands;
use blockd_serve::worker::ConnectionInfo;

/// A future of a trait that has to be an object.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Workers, as the control service sees them.
pub trait DataPath: Send + Sync + 'static {
    /// Makes a pool known to every worker, before a client of it comes.
    fn add_pool<'a>(&'a self, pool: &'a PoolHandle) -> Answer<'a, Result<(), Error>>;

    /// Makes workers forget a pool whose volumes are not served any more. Ends when all have.
    fn remove_pool(&self, pool: [u8; 16]) -> Answer<'_, ()>;

    /// Ends a volume's connections once what they have in flight is answered. How many there were.
    fn close_volume(&self, pool: [u8; 16], volume: VolumeId) -> Answer<'_, usize>;

    /// Has the clients of a pool's volumes wait, once what they have in flight is answered. False
    /// if that takes too long: then nothing has changed.
    fn stand_by(&self, pool: [u8; 16]) -> Answer<'_, bool>;

    /// Answers flushes of a pool's clients that stand by: it was closed in order.
    fn answer_flushes(&self, pool: [u8; 16]) -> Answer<'_, ()>;

    /// Serves the clients of a pool's volumes again, which is open now.
    fn serve(&self, pool: [u8; 16]) -> Answer<'_, ()>;

    /// The pools that clients on standby wait for.
    fn demands(&self) -> Arc<Demands>;

    /// Clients that are connected now.
    fn connections(&self) -> Vec<ConnectionInfo>;

    /// How many clients a volume has. Takes far less time than a list of all.
    fn connections_of(&self, pool: [u8; 16], volume: VolumeId) -> usize;

    /// Shows the counters of each worker and volume, one after the other, without a list of them.
    fn each_volume(&self, see: &mut dyn FnMut(&VolumeStats));

    /// Counters of each worker and volume since the start.
    fn volume_stats(&self) -> Vec<Arc<VolumeStats>>;

    /// Counters of each worker.
    fn worker_stats(&self) -> Vec<Arc<WorkerStats>>;
}
