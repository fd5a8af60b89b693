//! What front-ends and volumes say to each other; no IO.

mod buffer;
mod error;
mod request;

pub use buffer::Buffer;
pub use error::BlockError;
pub use request::{Completion, Operation, Request};
