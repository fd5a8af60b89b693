//! The one error type of the mapper: the problem, its place, and the expected state.

use crate::format::{FormatError, InvalidLabel, InvalidName};
use crate::geometry::{EXTENT_SIZES, InvalidExtentSize};
use crate::io::IoError;

/// Why a call of the mapper failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapperError {
    /// An argument is out of range. Nothing was changed.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// The argument's name.
        field: &'static str,
        /// The given value.
        value: u64,
        /// The accepted values.
        allowed: &'static str,
    },
    /// A volume name breaks a rule. Nothing was changed.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A label breaks a rule. Nothing was changed.
    #[error(transparent)]
    Label(#[from] InvalidLabel),
    /// No such volume.
    #[error("volume {0} does not exist")]
    NoVolume(String),
    /// The name is taken by a volume with other properties.
    #[error("volume {name:?} exists with {field} {existing}, asked for {asked}")]
    Exists {
        /// The name.
        name: String,
        /// The property that differs.
        field: &'static str,
        /// Its present value.
        existing: u64,
        /// The value asked for.
        asked: u64,
    },
    /// Only some snapshots of a group exist, so that they cannot belong to one cut any more.
    #[error(
        "of the group, snapshot {existing:?} exists and {missing:?} does not: a group is one cut"
    )]
    GroupPartly {
        /// One that is there.
        existing: String,
        /// One that is not.
        missing: String,
    },
    /// All snapshots of a group are there, and were taken at different times.
    #[error("snapshots {first:?} and {other:?} exist and were not taken in one cut")]
    GroupApart {
        /// One of them.
        first: String,
        /// One that was taken at another time.
        other: String,
    },
    /// A group of snapshots names the same volume or the same name twice. Nothing was changed.
    #[error("the group has {what} {which} twice")]
    GroupTwice {
        /// The duplicate object: a volume or a name.
        what: &'static str,
        /// Which one.
        which: String,
    },
    /// Two volumes that have no ancestor in common can't be compared.
    #[error("volumes {one:?} and {other:?} are of different families: they share nothing")]
    OtherFamily {
        /// One of them.
        one: String,
        /// The other.
        other: String,
    },
    /// The volume can't do that: it is a snapshot, in use, or of another family.
    #[error("volume {volume}: {problem}")]
    Unsuitable {
        /// Which volume.
        volume: u32,
        /// Why not.
        problem: &'static str,
    },
    /// A request leaves the volume or isn't made of whole blocks.
    #[error(
        "request at byte {offset} of {len} bytes: volume has {size} bytes in blocks of {block_size}"
    )]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the volume.
        size: u64,
        /// Its logical block in bytes.
        block_size: u32,
    },
    /// Another open has claimed the pool on its media: this one writes to it no more.
    #[error("pool was claimed by another open (node {node:08x}): this one has stopped writing")]
    ClaimLost {
        /// The other open's node; 0 where it is not known.
        node: u32,
    },
    /// Writing to a snapshot or to a pool opened read-only.
    #[error("read-only")]
    ReadOnly,
    /// A limit of the mapper is reached.
    #[error("{what}: the limit is {limit}")]
    Limit {
        /// The exhausted resource.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// The memory of the delta ring can't be had: its folder is full.
    #[error("no memory for the delta ring: its folder is full")]
    NoRingMemory,
    /// Not enough space for a request, in bytes.
    #[error("no space: {needed} bytes needed, {free} bytes free")]
    NoSpace {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A device cannot become as small as that.
    #[error("{size} bytes are too few: at least {least} are needed {why}")]
    TooSmall {
        /// Bytes that the device was to have.
        size: u64,
        /// Bytes that it must have.
        least: u64,
        /// The use of these.
        why: &'static str,
    },
    /// A structure on the media is damaged.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A new device of a pool has a size that none can have. Nothing was changed.
    #[error("device {name:?} has {size} bytes: must be {allowed}")]
    DeviceSize {
        /// The caller's name for it.
        name: String,
        /// Its bytes.
        size: u64,
        /// The accepted sizes.
        allowed: String,
    },
    /// A device of the pool isn't the one the pool knows, or isn't there.
    #[error("device {name:?}: {problem}")]
    Device {
        /// The caller's name for it, or the UUID of one that is missing.
        name: String,
        /// The problem.
        problem: String,
    },
    /// The pool uses features that this build may only read.
    #[error("features {features:#x} are unknown to this build: open it read-only")]
    Unsupported {
        /// The unknown bits of the ro-compat word.
        features: u64,
    },
    /// The delta ring of a pool that was not closed can't be used, and answered writes may be lost.
    #[error("{problem}; opening without it loses answered writes that were not flushed")]
    RingLost {
        /// Why the ring can't be used.
        problem: String,
    },
    /// An IO of the mapper itself failed. Final until the pool is opened again (R8).
    #[error("{operation} on device {device} failed: {error}")]
    Io {
        /// The failed operation.
        operation: &'static str,
        /// The caller's index of the device.
        device: u8,
        /// The media's answer.
        error: IoError,
    },
    /// The pool has failed earlier and must be opened again (R8).
    #[error("pool failed earlier and must be opened again: {0}")]
    Failed(String),
    /// The pool has been closed.
    #[error("pool is closed")]
    Closed,
    /// An internal rule was found broken; the pool stops rather than go on.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

impl From<InvalidExtentSize> for MapperError {
    fn from(InvalidExtentSize(size): InvalidExtentSize) -> Self {
        Self::Invalid { field: "extent_size", value: u64::from(size), allowed: EXTENT_SIZES }
    }
}
