//! Pools on their devices, before they are open and without opening them: their devices, their
//! content, and the locks against other daemons and other hosts.

mod boot;
mod claim;
mod erase;
mod error;
mod find;
mod host_lock;
pub mod newest;
mod offline;
pub mod ownership;
mod rehearse;
#[expect(unsafe_code, reason = "memory shared with the process before this one")]
pub mod ring_file;
mod spec;
pub mod storage;

pub use boot::boot_id;
pub use erase::Erasing;
pub use error::PoolError;
pub use find::{exists, holds_pool, identity};
pub use offline::{Access, Offline, kind_of};
pub use rehearse::rehearse;
pub use spec::{PoolSpec, ring_dir};

/// Threads that can serve one pool. The delta ring has a slot for each, used or not, so that a
/// process killed with fewer threads is followed by one with more.
pub const MAX_WORKERS: usize = 16;

const _: () = assert!(MAX_WORKERS < crate::pmem::LANE_COUNT);

pub use crate::pmem::has_header as has_pmem_header;
pub use crate::pmem::namespace::{
    is_there, of_path as namespace_of_path, path_of as path_of_namespace,
};
pub use crate::pmem::nodes;
pub use crate::pmem::{HEADER_BYTES as PMEM_HEADER_BYTES, Medium, PmemInfo, PmemOptions};
