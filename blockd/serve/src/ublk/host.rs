//! Requests of a device's thread to the workers that serve its queues.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::VolumeId;

use crate::FrontendError;

/// A queue of a device that was added and not started yet (or is being recovered).
#[derive(Clone, Debug)]
pub struct QueueSpec {
    /// The device's number: N of `/dev/ublkbN`.
    pub device: u32,
    /// Which of its queues.
    pub queue: u16,
    /// Requests that the queue can have in flight.
    pub depth: u16,
    /// Most bytes of a read or write; a multiple of 4096.
    pub max_bytes: u32,
    /// The kernel puts the requests' own pages into the ring's table of buffers
    /// (`UBLK_F_AUTO_BUF_REG`), so that nothing is copied.
    pub zero_copy: bool,
    /// The open `/dev/ublkcN`.
    pub device_file: Arc<File>,
    /// The identity of the pool.
    pub pool: [u8; 16],
    /// Which of its volumes.
    pub volume: VolumeId,
    /// The volume's name, for messages and metrics.
    pub name: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Whether its pool is open here.
    pub standby: QueueStandby,
}

/// Whether the pool of a queue's volume is open here when the queue starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum QueueStandby {
    /// The pool is open.
    #[default]
    No,
    /// The pool is not open: requests wait until it is.
    Waits,
    /// The same, and requests fail until [`QueueHost::let_wait`]: the kernel's own look for
    /// partitions, which the start of a device waits for.
    Fails,
}

/// Serves queues. Its calls block and belong on a device's own thread.
pub trait QueueHost: Send + Sync {
    /// How many workers there are; queues are spread over them.
    fn workers(&self) -> usize;

    /// Serves a queue from now on. Comes back when the kernel has all its fetch commands, which
    /// is what `START_DEV` and `END_USER_RECOVERY` wait for.
    fn start_queue(&self, worker: usize, queue: QueueSpec) -> Result<(), FrontendError>;

    /// Waits until no queue of the device is served any more and its file is closed, as after
    /// `STOP_DEV`, when the kernel gives all fetch commands back. `false` when that took longer
    /// than the limit.
    fn await_end(&self, device: u32, limit: Duration) -> bool;

    /// Has the requests of a device on standby wait, which failed while it was started.
    fn let_wait(&self, device: u32);

    /// Fails what waits for the pool or for space in the queues of a device, now and from now on,
    /// so that `STOP_DEV` need not wait for it: for a deletion by force.
    fn fail_waiting(&self, device: u32);
}
