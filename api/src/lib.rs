//! The control API of blockd, `blockd.v1`: generated from `proto/blockd/v1/control.proto`.
//!
//! Beside it, [`extend`] is the protocol by which data paths outside of the daemon request space,
//! and [`lookup`] is for the start of each program.
#![deny(unsafe_code)]

pub mod extend;
mod json;
#[allow(unsafe_code, reason = "a call of the C library that no package has")]
pub mod lookup;
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
