//! Settings of an open pool, and its space in figures.

use crate::space::Marks;

/// Settings of an open pool that its format doesn't fix.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Workers that may be made, 1 to [`MAX_WORKERS`](super::MAX_WORKERS).
    pub workers: usize,
    /// Most extents granted to a volume at a time: grants begin small, and double up to this.
    pub quantum: u64,
    /// Nanoseconds after which a change is committed without being asked.
    pub commit_interval_ns: u64,
    /// Nanoseconds after which a changed map is checkpointed.
    pub checkpoint_interval_ns: u64,
    /// Leaves the arena keeps ready.
    pub spare_leaves: u32,
    /// Leaves at the most. The default is for 64 TiB fully mapped at the default extent.
    pub max_leaves: u32,
    /// Whether freed extents are passed down to the media.
    pub passdown: bool,
    /// An error of a write-through on these devices is of that write alone. Where there is a page
    /// cache above them it may be of an earlier one, which is lost with it: then writes are made
    /// durable by flushes, whose errors are final (R8).
    pub write_through: bool,
    /// A write on these devices has ended well or not at all, and nothing of it is left to a flush:
    /// a failed write through does not concern others (R8 is about data that a flush drops).
    pub synchronous: bool,
    /// Blocks are written at once and in no order, so that of two writes to a sub-block that is not
    /// valid yet the second has to wait: whatever happens, it holds one of them and no mixture.
    pub whole_blocks: bool,
    /// Log blocks of one commit, at the most; also the pages of one metadata write.
    pub commit_blocks: usize,
    /// One of many pools: memory for requests and commits is taken when it is used first, and not
    /// from the start.
    pub sparing: bool,
    /// Where the pool's states begin. `None`: it is never slowed down, and only full when it is.
    pub marks: Option<Marks>,
    /// Bytes a second that folds may copy; 0: nothing is folded.
    pub fold_rate: u64,
    /// Bytes a second that may be copied off a device that is leaving; 0: nothing is moved.
    pub evacuation_rate: u64,
    /// Bytes that the cache of blocks which several volumes share may hold; 0: it is off.
    pub read_cache: u64,
    /// The caller renews a claim page on the first device. The superblock says so from then on.
    pub claimed: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            workers: 2,
            quantum: 64,
            commit_interval_ns: 1_000_000_000,
            checkpoint_interval_ns: 60_000_000_000,
            spare_leaves: 512,
            max_leaves: 1 << 20,
            passdown: false,
            write_through: true,
            synchronous: false,
            whole_blocks: false,
            commit_blocks: 64,
            sparing: false,
            marks: None,
            fold_rate: 64 << 20,
            evacuation_rate: 64 << 20,
            read_cache: 0,
            claimed: false,
        }
    }
}

impl Tuning {
    /// For a pool that is one of many: less memory from the start, and allocations on the path of
    /// a first write. The next block of leaves is made when the free leaves are those of 1 GiB at
    /// the default extent, and a commit has up to 64 KiB. All leaves together map 16 TiB at the
    /// default extent, and take 1 GiB.
    #[must_use]
    pub fn sparing() -> Self {
        Self {
            spare_leaves: 16,
            max_leaves: 1 << 18,
            commit_blocks: 16,
            sparing: true,
            ..Self::default()
        }
    }
}

/// Space of a pool in bytes; everything a space policy needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Whole extents of all devices.
    pub total: u64,
    /// Extents without an owner: new grants come from here.
    pub free: u64,
    /// Granted to volumes and not used yet.
    pub reserved: u64,
    /// Referenced by volumes and snapshots.
    pub mapped: u64,
    /// Dropped by volumes and not yet reusable (R4).
    pub pending: u64,
    /// Superblock areas, log and metadata extents, the reserve for metadata included.
    pub metadata: u64,
    /// Pages of `metadata` that a checkpoint can still use.
    pub metadata_free: u64,
    /// The log.
    pub log: u64,
    /// The part of it that a replay would need.
    pub log_used: u64,
}
