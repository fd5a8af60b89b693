//! An open pool: its thread, and the handle that others have of it.

mod discard;
mod handle;
mod keep;
mod open;
mod thread;
mod watch;

pub use handle::{ExtentRun, Policy, PoolHandle, PoolSpace, PoolStats, SpaceNow};
pub use keep::Keep;
pub use open::{Created, create, open, open_created};

pub use blockd_mapper::engine::{
    Control, Figures, Outcome, Releasing, Shortage, Use, VolumeSummary,
};
pub use blockd_mapper::open::OpenReport;
pub use blockd_mapper::space::{Mark, Marks, OnFull, SpaceChange, SpaceState, VolumeSettings};
pub use blockd_mapper::units::VolumeId;
