//! Pools whose volumes are namespaces: each in one piece in a region of persistent memory, with
//! the kernel's own device. Nothing of theirs goes through the data path.
//!
//! The intended state of a volume is in the journal before a change begins, and a volume is ready
//! when it is clean. So after a crash every volume is found by its uuid, and its change is
//! completed: an unfinished creation is removed, an unfinished removal goes on. Namespaces that are
//! not in the journal belong to others, and are never changed.
//!
//! All of it blocks.

mod busy;
mod config;
mod describe;
mod growth;
mod journal;
mod pool;
mod scrub;
#[cfg(test)]
mod tests;

pub use config::{DirectConfig, SizeRule};
pub use describe::{PoolView, State, VolumeView};
pub use pool::{CreateWish, DirectPool, Usage};
