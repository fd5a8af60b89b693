//! The control API of blockd, `blockd.v1`: generated from `proto/blockd/v1/control.proto`.
//!
//! Beside it, [`extend`] is the protocol by which data paths outside of the daemon request space.
#![forbid(unsafe_code)]

pub mod extend;
mod json;
mod words;

/// Version 1 of the control API.
#[allow(
    clippy::all,
    clippy::too_many_lines,
    missing_debug_implementations,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("blockd.v1");
}

/// Encodes messages as bytes. Code that returns an error encodes its details with this.
pub use prost::Message;
