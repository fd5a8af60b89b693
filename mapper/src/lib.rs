//! The thin extent mapper of blockd.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod allocator;
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod directory;
pub mod error;
pub mod format;
pub mod geometry;
pub mod io;
#[doc(hidden)]
pub mod io_epoch;
#[doc(hidden)]
pub mod leaf;
pub mod mapping;
#[doc(hidden)]
pub mod mutation_gate;
pub mod ring;
#[doc(hidden)]
pub mod shared_counts;
pub(crate) mod sync;
pub mod units;
