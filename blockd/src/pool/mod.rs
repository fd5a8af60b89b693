//! An open pool: its thread, and the handle that others have of it.

mod claim;
mod discard;
mod error;
mod find;
mod handle;
mod host_lock;
mod keep;
mod offline;
mod open;
mod ownership;
mod rehearse;
#[expect(unsafe_code, reason = "memory shared with the process before this one")]
mod ring_file;
mod spec;
mod storage;
mod thread;
mod watch;

pub use error::PoolError;
pub use find::{exists, identity};
pub use handle::{ExtentRun, Policy, PoolHandle, PoolSpace, PoolStats, SpaceNow};
pub use keep::Keep;
pub use offline::{Access, Offline, kind_of};
pub use open::{Created, boot_id, create, open, open_created};
pub use rehearse::rehearse;
pub use spec::{PoolSpec, ring_dir};

/// Threads that can serve one pool. The delta ring has a slot for each, used or not, so that a
/// process killed with fewer threads is followed by one with more.
pub const MAX_WORKERS: usize = 16;

const _: () = assert!(MAX_WORKERS < crate::backing::pmem::LANE_COUNT);

pub use blockd_mapper::engine::{Control, Figures, Outcome, Releasing, Shortage, Use, VolumeInfo};
pub use blockd_mapper::open::OpenReport;
pub use blockd_mapper::space::{Mark, Marks, OnFull, SpaceChange, SpaceState, VolumeSettings};
pub use blockd_mapper::units::VolumeId;

pub use crate::backing::pmem::has_header as has_pmem_header;
pub use crate::backing::pmem::namespace::{
    is_there, of_path as namespace_of_path, path_of as path_of_namespace,
};
pub use crate::backing::pmem::nodes;
pub use crate::backing::pmem::{HEADER_BYTES as PMEM_HEADER_BYTES, Medium, PmemInfo, PmemOptions};
pub use crate::backing::{Device, DeviceInfo, DeviceKind, DeviceSpec, Durability};
