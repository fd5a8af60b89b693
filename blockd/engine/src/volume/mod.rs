//! Serves requests of volumes: plan, IO, answer. One [`Executor`] for each worker's thread.

mod admission;
mod cached;
mod copy;
mod executor;
mod media;
mod pools;
mod slot;
mod states;
mod token;
mod waiting;

pub use executor::{Executor, VolumeRef};
pub use token::{Step, Token};
