//! An open pool: its thread, and the handle that others have of it.

mod below;
mod create;
mod devices;
mod discard;
mod driver;
mod ending;
mod handle;
mod join;
mod keep;
mod lock;
mod members;
mod name;
mod open;
mod own;
mod thread;
mod watch;

pub use below::BelowLook;
pub use create::{Created, create};
pub use devices::new_device;
pub use handle::{ExtentRun, Policy, PoolHandle, PoolStats, SpaceNow};
pub use keep::Keep;
pub use members::Membership;
pub use open::{open, open_created};

pub use blockd_mapper::engine::{
    Control, EvacuationStatus, Figures, FoldStatus, Outcome, RebalanceState, RebalanceStatus,
    Releasing, Shortage, Use, VolumeSummary,
};
pub use blockd_mapper::open::OpenReport;
pub use blockd_mapper::space::{
    Mark, Marks, OnFull, Placement, SpaceChange, SpaceState, VolumeSettings,
};
pub use blockd_mapper::units::VolumeId;
