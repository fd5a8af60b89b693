//! Whole-system tests of blockd.
#![forbid(unsafe_code)]

pub mod clock;
pub mod csi;
pub mod daemon;
pub mod kill;
pub mod nbd;
pub mod neighbours;
pub mod other_host;
pub mod story;
pub mod threads;
pub mod tools;
pub mod vm;
pub mod workload;
