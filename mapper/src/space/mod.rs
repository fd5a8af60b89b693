//! Space policy: limits of volumes, the state of a pool, and the rate at which it may be filled.
//!
//! Pure: time and figures come in, decisions go out. The engine carries them out.

pub mod watch;

pub use crate::format::placement::{DeviceMark, Placement};
pub use crate::format::settings::{OnFull, VolumeSettings};
pub use watch::{Mark, Marks, Observed, SpaceChange, SpaceState, SpaceWatch};
