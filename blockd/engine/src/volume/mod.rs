//! Serves requests of volumes: plan, IO, answer. One [`Executor`] for each worker's thread.

mod admission;
mod copy;
mod executor;
mod media;
mod pools;
mod slot;
mod states;
mod waiting;

pub use executor::{Executor, VolumeRef};

/// Tokens of the executor's operations in a ring are below this; a front-end uses those above.
pub const FIRST_FREE_TOKEN: u64 = 1 << 40;
