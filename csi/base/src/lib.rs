//! The parts that the CSI plugin, the scheduler's extender and the tool for images have in common:
//! sizes as Kubernetes writes them, and options that mean the same in each.
//!
//! The extender runs without a daemon and the images need neither daemon nor Kubernetes, so both
//! are packages below the plugin and cannot import from it. Facts that only the plugin knows, such
//! as its default class, are passed to them as values.
#![forbid(unsafe_code)]

pub mod bytes;
pub mod clock;
pub mod error;
pub mod grpc;
pub mod metrics;
pub mod options;
pub mod quantity;
