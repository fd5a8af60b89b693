//! Front ends that clients connect to, and the threads that serve them.
//!
//! [`worker`] has the threads, each with a ring and an executor; [`nbd`] accepts connections and
//! has their sessions, [`ublk`] has the queues of block devices and their life in the kernel.
#![deny(unsafe_code)]

mod context;
pub mod demands;
mod error;
pub mod nbd;
pub mod ublk;
pub mod worker;

pub use context::Context;
pub use error::FrontendError;
