//! ublk: block devices of the kernel that this process serves.
//!
//! Two sides. A device's life (added, started, stopped, recovered) is the business of a thread of
//! its own, since any of these commands may hang in the kernel: [`control`]. Its queues are served
//! by workers, on the ring that does the IO of the media. [`QueueHost`] is all that they know of
//! each other.

pub mod control;
#[expect(unsafe_code, reason = "reads memory that the kernel shares, and copies a descriptor")]
mod descriptor;
mod host;
mod queue;
mod request;

pub use host::{QueueHost, QueueSpec, QueueStandby};
pub use queue::Queue;
