//! What front-ends and volumes say to each other; no IO.

mod buffer;
mod error;
mod request;

pub use buffer::Buffer;
pub(crate) use buffer::Place;
pub use error::BlockError;
pub use request::{Completion, Operation, Request};
