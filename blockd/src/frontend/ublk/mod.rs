//! ublk: block devices of the kernel that this process serves.
//!
//! Two sides. A device's life (added, started, stopped, recovered) is the business of a thread of
//! its own, since any of these commands may hang in the kernel. Its queues are served by workers,
//! on the ring that does the IO of the media. [`QueueHost`] is all that they know of each other.

mod host;

pub use host::{QueueHost, QueueSpec};
