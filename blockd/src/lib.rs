//! blockd: thin-provisioned block devices from user space.
//!
//! The command line is the package `blockd-cli`, and `program` is what it runs in this process.
//! The data path is the package `blockd-engine`, and `blockd-serve` the threads that serve clients.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod daemon;
pub mod direct;
pub mod health;
pub mod hook;
pub mod metrics;
pub mod node;
pub mod program;
