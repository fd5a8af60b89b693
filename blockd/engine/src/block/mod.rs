//! The interface between front ends and volumes; no IO.

mod buffer;
mod error;
mod request;

pub use buffer::Buffer;
pub(crate) use buffer::Place;
pub use error::BlockError;
pub use request::{Completion, Operation, Request};
