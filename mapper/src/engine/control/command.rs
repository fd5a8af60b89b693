//! Commands to a pool, and their results.

use crate::format::Labels;
use crate::space::VolumeSettings;
use crate::units::VolumeId;

/// Names a command given to [`Engine::submit`](crate::engine::Engine::submit).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ControlId(pub u64);

/// A command to a pool. Each can be given again without harm: it returns the changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Control {
    /// A new, empty volume.
    Create {
        /// 1 to 128 bytes; see [`VolumeName::new`](crate::format::name::VolumeName::new).
        name: String,
        /// Bytes, a multiple of the block size.
        size: u64,
        /// Logical block in bytes: 512 to 4096, a power of two.
        block_size: u32,
    },
    /// Removes a volume or snapshot. Moves no data.
    Delete {
        /// Which.
        volume: VolumeId,
    },
    /// Changes a volume's size. Data beyond a smaller size is lost for good.
    Resize {
        /// Which.
        volume: VolumeId,
        /// Bytes: whole blocks to grow, whole sub-blocks to shrink.
        size: u64,
    },
    /// A read-only image of a volume as it is now.
    Snapshot {
        /// The source volume.
        source: VolumeId,
        /// The snapshot's name.
        name: String,
    },
    /// Read-only images of several volumes, all as they are at one moment: a write that was sent
    /// after another one to any of them was answered is not in the set without that other one.
    /// After a crash the set is there as a whole or not at all.
    ///
    /// Given again with the same sources and names it is [`Outcome::ExistingGroup`]. Where only
    /// some of the names exist, or all but from different moments, it is refused.
    SnapshotGroup {
        /// Volumes, each once, and the names of their snapshots: 1 to
        /// [`MAX_GROUP`](crate::geometry::MAX_GROUP).
        members: Vec<(VolumeId, String)>,
    },
    /// A writable volume that begins as a snapshot's content.
    Clone {
        /// The snapshot.
        source: VolumeId,
        /// The clone's name.
        name: String,
        /// Bytes, no fewer than the snapshot's; its size by default.
        size: Option<u64>,
    },
    /// Rolls a volume back to a snapshot of its family.
    Rollback {
        /// Which volume.
        volume: VolumeId,
        /// The snapshot.
        snapshot: VolumeId,
    },
    /// The same, with a size of the volume's own.
    Reset {
        /// Which volume.
        volume: VolumeId,
        /// The snapshot.
        snapshot: VolumeId,
        /// Bytes, no fewer than the snapshot's.
        size: u64,
    },
    /// Gives a volume or snapshot another name, which no other has. Its clients notice nothing.
    Rename {
        /// Which.
        volume: VolumeId,
        /// 1 to 128 bytes; see [`VolumeName::new`](crate::format::name::VolumeName::new).
        name: String,
    },
    /// Changes the settings of a volume.
    Configure {
        /// Which.
        volume: VolumeId,
        /// All of it.
        settings: VolumeSettings,
    },
    /// Gives a volume or snapshot these labels, in place of those that it has.
    Label {
        /// Which.
        volume: VolumeId,
        /// All of them.
        labels: Labels,
    },
    /// Makes everything answered so far durable.
    Commit,
    /// Writes the map out, so that the log is empty.
    Checkpoint,
    /// Makes a device that has grown below give its new extents.
    GrowDevice {
        /// Position in the pool's device table.
        device: u8,
        /// Bytes it has now.
        size: u64,
    },
    /// Adds a device to the pool. The caller holds its owner lock.
    AddDevice {
        /// The caller's index for it.
        handle: u8,
        /// Its identity.
        device: crate::create::NewDevice,
    },
    /// Moves everything off a device and takes it out of the pool. Answered when that has begun:
    /// it continues in the background ([`EvacuationStatus`](crate::engine::EvacuationStatus)), also
    /// when the pool is opened again. Refused where the other devices have no room.
    RemoveDevice {
        /// Position in the pool's device table; not the first.
        device: u8,
    },
    /// Makes a device smaller: moves everything that lies behind its new end. Answered when that
    /// has begun, and continued as the removal of a device is. Refused where the rest of the pool
    /// has no room.
    ShrinkDevice {
        /// Position in the pool's device table.
        device: u8,
        /// Bytes that it is to have; what is left of an extent at the end is not used.
        size: u64,
    },
    /// Keeps a device that is leaving, or the size of one that shrinks. What was moved stays where
    /// it is.
    KeepDevice {
        /// Position in the pool's device table.
        device: u8,
    },
    /// Begins to move data from fuller devices to emptier ones, until the same share of each is
    /// used, or stops doing so. Answered when it has begun
    /// ([`RebalanceStatus`](crate::engine::RebalanceStatus)). Ends with the pool, and when a device
    /// begins to leave or shrink; refused while one does.
    Rebalance {
        /// Whether data is to be moved.
        enabled: bool,
    },
    /// Turns composite entries on or off. Off is answered when it has begun: from then on no write
    /// makes one, and those that there are are folded ([`FoldStatus`](crate::engine::FoldStatus)).
    SetComposite {
        /// Whether the pool is to have them.
        enabled: bool,
    },
    /// Takes no more requests, waits for those in flight, and leaves the pool clean.
    Close,
}

/// The result of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The volume, snapshot or clone is new.
    Created(VolumeId),
    /// The volume existed already, with the requested properties.
    Existing(VolumeId),
    /// The snapshots of the group are new, in the order in which they were asked for.
    CreatedGroup(Vec<VolumeId>),
    /// The snapshots existed already, all of one cut.
    ExistingGroup(Vec<VolumeId>),
    /// The volume was deleted.
    Deleted,
    /// The volume did not exist.
    AlreadyDeleted,
    /// The size was changed from this one, in bytes.
    Resized {
        /// Bytes before.
        from: u64,
    },
    /// The volume or snapshot has another name from now on.
    Renamed,
    /// The volume has other settings from now on.
    Configured {
        /// The former settings.
        before: VolumeSettings,
    },
    /// The volume has other labels from now on.
    Labelled {
        /// The former labels.
        before: Labels,
    },
    /// The device is leaving.
    Leaving,
    /// The device is shrinking.
    Shrinking,
    /// The device stays in the pool, with its size.
    Kept,
    /// Data is being moved to emptier devices.
    Rebalancing,
    /// No more data is moved to emptier devices.
    RebalanceStopped,
    /// Entries may be composite from now on.
    Enabled,
    /// All entries are being made plain.
    Disabling,
    /// The command changed nothing.
    Unchanged,
    /// The volume has the content of the snapshot.
    RolledBack,
    /// The volume was rolled back, and has this size.
    Reset {
        /// Bytes.
        size: u64,
    },
    /// Everything answered before is durable.
    Committed,
    /// The map is written.
    Checkpointed,
    /// The number of extents by which the pool has grown.
    Grown {
        /// Extents gained.
        extents: u64,
    },
    /// The pool is clean and takes nothing more.
    Closed,
}
