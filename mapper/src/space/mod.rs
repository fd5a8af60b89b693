//! Space policy: what a volume may take, what state a pool is in, and how fast it may be filled.
//!
//! Pure: time and figures come in, decisions go out. The engine carries them out.

pub mod watch;

pub use crate::format::settings::{OnFull, VolumeSettings};
pub use watch::{Mark, Marks, Observed, SpaceChange, SpaceState, SpaceWatch};
