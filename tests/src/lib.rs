//! Whole-system tests of blockd.
#![forbid(unsafe_code)]

pub mod crash;
pub mod csi;
pub mod daemon;
pub mod kill;
pub mod model;
pub mod nbd;
pub mod rig;
pub mod sim;
pub mod story;
pub mod tools;
pub mod vm;
pub mod workload;
