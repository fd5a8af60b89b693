//! blockd: thin-provisioned block devices from user space.
//!
//! This package composes the others: `config` reads the configuration, `daemon` starts and stops
//! the data path (`blockd-engine`, `blockd-serve`) and the services over it (`blockd-control`), and
//! `program` is what the command line (`blockd-cli`) runs in this process.
#![forbid(unsafe_code)]

pub mod config;
pub mod daemon;
pub mod metrics;
pub mod program;
