//! The specification with which a pool is created or opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_mapper::geometry::DEFAULT_EXTENT_SIZE;
use blockd_mapper::space::Marks;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use crate::DeviceSpec;

/// Where delta rings are where the runtime folder is not in memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// The runtime folder if it is in memory: a delta ring on a disk would be slow, and outlive what it
/// is about.
#[must_use]
pub fn ring_dir(runtime_dir: &Path) -> PathBuf {
    let in_memory = statfs(runtime_dir).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
    if in_memory { runtime_dir.to_path_buf() } else { PathBuf::from(SHARED_MEMORY) }
}

/// The specification with which a pool is created or opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolSpec {
    /// The pool's name.
    pub name: String,
    /// 1 to 16 devices, in any order.
    pub devices: Vec<DeviceSpec>,
    /// Devices that may join it, or have.
    pub spares: Vec<DeviceSpec>,
    /// Bytes of an extent, when it is made.
    pub extent_size: u32,
    /// Whether its entries may be composite, when it is made.
    pub composite: bool,
    /// Where the delta ring is kept: a directory in memory that outlives the process.
    pub ring_dir: PathBuf,
    /// Open it although answered writes that were not flushed may be lost.
    pub accept_loss: bool,
    /// How long a former owner, and its IO, is waited for.
    pub lock_wait: Duration,
    /// How long other hosts are watched and waited for, where several may reach the storage.
    pub claim_wait: Duration,
    /// After how long a change is committed without being asked.
    pub commit_interval: Duration,
    /// Where the states of its space begin; `None`: it is never slowed down.
    pub marks: Option<Marks>,
    /// Most bytes that a volume is granted at a time.
    pub quantum: u64,
    /// Bytes a second that folds may copy; 0: nothing is folded.
    pub fold_rate: u64,
    /// Bytes that the cache of blocks which several volumes share may hold; 0: there is none.
    pub read_cache: u64,
    /// Records of the delta ring for each worker. Half full begins a commit.
    pub ring_records: u64,
    /// Whether it is one of many, which take less memory each: `Tuning::sparing` of the mapper.
    pub sparing: bool,
    /// This host's number, which is written into the pool; 0 where it is not known.
    pub node: u32,
    /// The pool is taken over from the node with this number: it has to be the one that had it
    /// last. Without, a pool that another node has not closed is refused.
    pub taken_from: Option<u32>,
    /// Until when this host's lease of it counts, by the clock since boot: it spares a wait for
    /// other hosts (C8 of [`blockd_mapper::claim`]). 0 of a pool without leases.
    pub leased_until_ns: u64,
    /// A node that was fenced, so that its claim need not be watched (C9).
    pub fenced: Option<u32>,
}

impl PoolSpec {
    /// A pool of one device, with defaults.
    #[must_use]
    pub fn new(name: &str, device: DeviceSpec, ring_dir: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            devices: vec![device],
            spares: Vec::new(),
            extent_size: DEFAULT_EXTENT_SIZE,
            composite: true,
            ring_dir,
            accept_loss: false,
            lock_wait: Duration::from_secs(300),
            claim_wait: Duration::from_secs(2),
            commit_interval: Duration::from_secs(1),
            marks: Some(Marks::default()),
            quantum: 64 * u64::from(DEFAULT_EXTENT_SIZE),
            fold_rate: 64 << 20,
            read_cache: 0,
            ring_records: 1 << 13,
            sparing: false,
            node: 0,
            taken_from: None,
            leased_until_ns: 0,
            fenced: None,
        }
    }
}
