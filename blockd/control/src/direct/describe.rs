//! Descriptions of a pool of namespaces and its volumes.

use blockd_pmem::media::{Domain, Durability};
use blockd_pmem::platform::{Device, Region, RegionKind};

use super::Usage;

/// How far a volume is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The volume can be used.
    Ready,
    /// The volume is being created.
    Creating,
    /// The volume is deleted, and is being overwritten.
    Scrubbing,
    /// The volume's namespace is being removed.
    Deleting,
}

/// A volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeView {
    /// The volume's name.
    pub name: String,
    /// Its number in the pool.
    pub id: u32,
    /// How far it is.
    pub state: State,
    /// The volume's usage.
    pub usage: Usage,
    /// Bytes that its device has.
    pub usable: u64,
    /// Bytes that it takes.
    pub charged: u64,
    /// Whether it is overwritten before its space is free.
    pub erase_after: bool,
    /// When it was made.
    pub made_unix_ms: i64,
    /// Of one that is overwritten, what is done.
    pub scrubbed: u64,
    /// Its device, where there is one.
    pub device: Option<Device>,
    /// Why there is none, of one that is ready.
    pub problem: Option<String>,
    /// Bytes of it that are known to be bad.
    pub bad_bytes: u64,
}

/// A pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolView {
    /// The pool's name.
    pub name: String,
    /// Its own uuid.
    pub id: [u8; 16],
    /// The region's key.
    pub region: String,
    /// Why it does not serve.
    pub failure: Option<String>,
    /// The region's space; `None` where the region does not exist.
    pub space: Option<Space>,
    /// The durability of answered writes.
    pub durability: Durability,
    /// Bytes of volumes, including those that are being overwritten.
    pub charged: u64,
    /// Of that, what is free once it is overwritten.
    pub scrubbing: u64,
    /// Sizes of its volumes together.
    pub promised: u64,
    /// Volumes that are not on their way out.
    pub volumes: usize,
}

/// The space of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// In all.
    pub total: u64,
    /// Free in all.
    pub available: u64,
    /// The largest piece of that.
    pub largest_piece: u64,
    /// The largest volume for use as memory that could be made, by the pool's rule.
    pub largest_volume: u64,
    /// Sizes of namespaces are multiples of this.
    pub step: u64,
    /// The smallest volume, by the pool's rule.
    pub smallest_volume: u64,
    /// Its node of processors.
    pub numa_node: Option<u32>,
    /// Bytes of it that are known to be bad.
    pub bad_bytes: u64,
}

/// The durability of writes to a region.
pub(super) fn durability(region: Option<&Region>, power_safe: bool) -> Durability {
    match region {
        Some(region) if region.kind == RegionKind::Volatile => Durability::Volatile,
        _ if power_safe => Durability::PowerSafe,
        Some(region) if region.domain != Domain::Unknown => Durability::PowerSafe,
        _ => Durability::RestartSafe,
    }
}
