//! The parts of a worker that its connections and queues work with.

use blockd_engine::backing::Ring;
use blockd_engine::volume::Executor;

/// A worker's ring and requests.
#[derive(Debug)]
pub struct Context<'a> {
    /// The worker's ring.
    pub ring: &'a mut Ring,
    /// The worker's requests.
    pub executor: &'a mut Executor,
}
