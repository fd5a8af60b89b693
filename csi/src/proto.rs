//! The messages and services of the interface: generated from `proto/csi.proto`.

#![allow(
    clippy::all,
    clippy::too_many_lines,
    missing_debug_implementations,
    reason = "generated code"
)]

tonic::include_proto!("csi.v1");
