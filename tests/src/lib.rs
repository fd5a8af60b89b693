//! Whole-system tests of blockd.
#![forbid(unsafe_code)]

pub mod crash;
pub mod model;
pub mod rig;
pub mod sim;
