//! The thin extent mapper of blockd.
#![forbid(unsafe_code)]

pub mod error;
pub mod format;
pub mod geometry;
pub mod io;
pub mod units;
