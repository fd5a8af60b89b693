//! Pools whose volumes are namespaces: each in one piece in a region of persistent memory, with
//! the kernel's own device. Nothing of theirs goes through the data path.
//!
//! What a volume is to become is in the journal before it is begun, and a volume is ready when it
//! is clean. So after a crash everything is found again by its uuid, and brought to its end: what
//! was being made is removed, what was being removed goes on. Namespaces that the journal does not
//! have are others', and never touched.
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
