//! Whole-system tests of blockd.
#![deny(unsafe_code)]

pub mod cluster;
pub mod csi;
pub mod kill;
pub mod neighbours;
pub mod packing;
pub mod story;
pub mod threads;
pub mod vm;
pub mod workload;
