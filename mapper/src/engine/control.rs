//! Commands to a pool: checked, gated, drained, applied, and answered when durable (R16).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::error::MapperError;
use crate::format::VolumeName;
use crate::format::catalogue::VolumeKind;
use crate::format::record::Change;
use crate::format::superblock::{DeviceTable, Superblock, VOLUME_SETTINGS};
use crate::geometry::{MAX_VOLUME_SIZE, MIN_BLOCK_SIZE, PAGE_BYTES};
use crate::mutation::{Mutation, active};
use crate::plan::CommitTicket;
use crate::pool::Pool;
use crate::ring::Dropped;
use crate::space::VolumeSettings;
use crate::sync::Ordering;
use crate::units::{VolumeId, WallTime};
use crate::volume::{GATED, OPEN, Volume};

use super::Engine;

/// Names a command given to [`Engine::submit`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ControlId(pub u64);

/// A command to a pool. Each can be given again without harm: it returns the changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Control {
    /// A new, empty volume.
    Create {
        /// 1 to 128 bytes; see [`VolumeName::new`].
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
    /// Changes the settings of a volume.
    Configure {
        /// Which.
        volume: VolumeId,
        /// All of it.
        settings: VolumeSettings,
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
    /// The volume has other settings from now on.
    Configured {
        /// The former settings.
        before: VolumeSettings,
    },
    /// The command changed nothing.
    Unchanged,
    /// The volume has the content of the snapshot.
    RolledBack,
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

/// A command under way.
#[derive(Debug)]
enum Current {
    /// Volumes are gated; waiting for their writes to end.
    Draining {
        id: ControlId,
        change: Change,
        gated: Vec<Arc<Volume>>,
        outcome: Outcome,
    },
    /// Waiting for a checkpoint begun after this many.
    Checkpoint {
        id: ControlId,
        after: u64,
        outcome: Outcome,
    },
    Closing {
        id: ControlId,
        final_begun: bool,
    },
}

/// A command done and not yet durable.
#[derive(Debug)]
struct Undurable {
    id: ControlId,
    ticket: CommitTicket,
    outcome: Outcome,
}

/// A prepared command.
pub(super) enum Prepared {
    Change(Change, Vec<Arc<Volume>>, Outcome),
    /// No change is needed; answered once all earlier changes are durable.
    Already(Outcome),
}

/// Commands of a pool, waiting, under way and done.
#[derive(Debug, Default)]
pub(crate) struct Controls {
    queue: VecDeque<(ControlId, Control)>,
    current: Option<Current>,
    undurable: Vec<Undurable>,
    outcomes: VecDeque<(ControlId, Result<Outcome, MapperError>)>,
    next: u64,
    /// The last wall time from the caller; 0 if there was none.
    pub(super) now: WallTime,
    pub(crate) next_volume_id: u32,
    /// First ancestors, also of volumes that are gone: records of theirs may be under way.
    pub(crate) lineages: BTreeMap<VolumeId, VolumeId>,
    /// The device table that the next superblock names.
    pub(super) devices: Option<DeviceTable>,
    /// Some volume has been given settings: the next superblock says that there are such.
    pub(super) has_settings: bool,
}

impl Controls {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.current.is_none() && self.undurable.is_empty()
    }

    /// A structure change is under way: the map's shape is about to change.
    pub(super) fn holds_checkpoints(&self) -> bool {
        matches!(self.current, Some(Current::Draining { .. } | Current::Closing { .. }))
    }

    pub(super) fn go_on_draining(
        &mut self,
        id: ControlId,
        change: Change,
        gated: Vec<Arc<Volume>>,
        outcome: Outcome,
    ) {
        self.current = Some(Current::Draining { id, change, gated, outcome });
    }

    pub(super) fn lineage_of(&self, pool: &Pool, volume: VolumeId) -> VolumeId {
        self.lineages
            .get(&volume)
            .copied()
            .unwrap_or_else(|| pool.volume(volume).map_or(volume, |v| v.identity.lineage))
    }

    /// The present superblock with the decisions of commands.
    pub(super) fn next_superblock(&self, present: &Superblock) -> Superblock {
        let mut next = present.clone();
        if let Some(devices) = self.devices {
            next.devices = devices;
        }
        if self.has_settings {
            next.compat |= VOLUME_SETTINGS;
        }
        next
    }

    /// The pool has failed: waiting commands will not be carried out.
    pub(super) fn fail_all(&mut self, pool: &Pool) {
        let error = pool.failure().unwrap_or(MapperError::Closed);
        let current = self.current.take().map(|current| match current {
            Current::Draining { id, .. }
            | Current::Checkpoint { id, .. }
            | Current::Closing { id, .. } => id,
        });
        let waiting = self.queue.drain(..).map(|(id, _)| id);
        let undurable = self.undurable.drain(..).map(|u| u.id);
        for id in undurable.chain(current).chain(waiting) {
            self.outcomes.push_back((id, Err(error.clone())));
        }
    }
}

impl Engine {
    /// Sets the wall time of the host's clock, which new volumes and snapshots record.
    pub fn set_wall_time(&mut self, now: WallTime) {
        self.controls.now = now;
    }

    /// Takes a command. They are carried out one after the other.
    pub fn submit(&mut self, control: Control) -> ControlId {
        self.controls.next += 1;
        let id = ControlId(self.controls.next);
        self.controls.queue.push_back((id, control));
        id
    }

    /// The next command that has ended.
    pub fn take_outcome(&mut self) -> Option<(ControlId, Result<Outcome, MapperError>)> {
        self.controls.outcomes.pop_front()
    }

    pub(super) fn step_controls(&mut self) {
        self.answer_durable();
        loop {
            let went_on = match self.controls.current.take() {
                Some(current) => self.go_on(current),
                None => self.begin_next(),
            };
            if !went_on {
                break;
            }
        }
        self.answer_durable();
    }

    fn end(&mut self, id: ControlId, result: Result<Outcome, MapperError>) {
        self.controls.outcomes.push_back((id, result));
    }

    fn answer_durable(&mut self) {
        let undurable = std::mem::take(&mut self.controls.undurable);
        for waiting in undurable {
            let early = active(Mutation::StructureEarly);
            match self.pool.commit_state(&waiting.ticket) {
                None if !early => self.controls.undurable.push(waiting),
                Some(Err(error)) => self.end(waiting.id, Err(error)),
                _ => self.end(waiting.id, Ok(waiting.outcome)),
            }
        }
    }

    /// R16: the outcome waits until everything numbered so far is durable.
    pub(super) fn end_when_durable(&mut self, id: ControlId, outcome: Outcome) {
        let sequence = self.pool.progress.0.captured.load(Ordering::SeqCst);
        let ticket = CommitTicket { lsn: self.pool.gate.last_assigned().0, sequence };
        self.controls.undurable.push(Undurable { id, ticket, outcome });
        self.pool.want_commit();
    }

    fn begin_next(&mut self) -> bool {
        // A checkpoint writes the volumes of its cut: their number and shape stay until it ends.
        let shape_stays = self.checkpoint.is_running() && !active(Mutation::FuzzyCheckpoint);
        if !(self.opened || self.pool.read_only) || shape_stays {
            return false;
        }
        if matches!(self.controls.queue.front(), Some((_, Control::Close)))
            && !self.controls.undurable.is_empty()
        {
            // Commands are answered in the order in which they were done.
            self.pool.want_commit();
            return false;
        }
        let Some((id, control)) = self.controls.queue.pop_front() else { return false };
        if self.pool.read_only && control != Control::Close {
            self.end(id, Err(MapperError::ReadOnly));
            return true;
        }
        match control {
            Control::Commit => self.end_when_durable(id, Outcome::Committed),
            Control::Checkpoint => self.begin_checkpoint_for(id, Outcome::Checkpointed),
            Control::Close => {
                self.closing = true;
                self.pool.stop(MapperError::Closed);
                crate::sync::fence(Ordering::SeqCst);
                self.controls.current = Some(Current::Closing { id, final_begun: false });
            }
            Control::Configure { volume, settings } => match self.configure(volume, settings) {
                Ok(before) if before == settings => self.end_when_durable(id, Outcome::Unchanged),
                Ok(before) => self.begin_checkpoint_for(id, Outcome::Configured { before }),
                Err(error) => self.end(id, Err(error)),
            },
            Control::GrowDevice { device, size } => match self.prepare_grow(device, size) {
                Ok(0) => self.end_when_durable(id, Outcome::Unchanged),
                Ok(extents) => self.begin_checkpoint_for(id, Outcome::Grown { extents }),
                Err(error) => self.end(id, Err(error)),
            },
            Control::AddDevice { handle, device } => match self.prepare_add(handle, &device) {
                Ok(0) => self.end_when_durable(id, Outcome::Unchanged),
                Ok(extents) => self.begin_checkpoint_for(id, Outcome::Grown { extents }),
                Err(error) => self.end(id, Err(error)),
            },
            other => match self.prepare(&other) {
                Err(error) => self.end(id, Err(error)),
                Ok(Prepared::Already(outcome)) => self.end_when_durable(id, outcome),
                Ok(Prepared::Change(change, gated, outcome)) => {
                    if let Err(error) = self.ensure_leaves(1) {
                        self.end(id, Err(error));
                        return true;
                    }
                    // Before the gate: while a change waits, no checkpoint can make room in the
                    // log that a commit needs to make room in the ring.
                    let slot = self.pool.tuning.workers;
                    if !self.pool.ring.reserve(slot, change.units() as u64) {
                        self.controls.queue.push_front((id, other));
                        self.pool.want_commit();
                        return false;
                    }
                    for volume in &gated {
                        volume.state.store(GATED, Ordering::SeqCst);
                    }
                    crate::sync::fence(Ordering::SeqCst);
                    self.controls.current = Some(Current::Draining { id, change, gated, outcome });
                }
            },
        }
        true
    }

    fn begin_checkpoint_for(&mut self, id: ControlId, outcome: Outcome) {
        self.checkpoint.request();
        self.pool.want_engine();
        let after = self.checkpoint.finished;
        self.controls.current = Some(Current::Checkpoint { id, after, outcome });
    }

    fn go_on(&mut self, current: Current) -> bool {
        match current {
            Current::Draining { id, change, gated, outcome } => {
                self.drain_and_apply(id, change, gated, outcome)
            }
            Current::Checkpoint { id, after, outcome } => {
                if self.checkpoint.finished <= after {
                    self.controls.current = Some(Current::Checkpoint { id, after, outcome });
                    return false;
                }
                if matches!(outcome, Outcome::Grown { .. }) {
                    self.use_new_extents();
                }
                self.end(id, Ok(outcome));
                true
            }
            Current::Closing { id, final_begun } => self.close(id, final_begun),
        }
    }

    fn drain_and_apply(
        &mut self,
        id: ControlId,
        change: Change,
        gated: Vec<Arc<Volume>>,
        outcome: Outcome,
    ) -> bool {
        let undrained = match change {
            Change::Snapshot { .. } | Change::SnapshotGroup { .. } => {
                active(Mutation::SnapshotUndrained)
            }
            _ => active(Mutation::StructureUndrained),
        };
        let busy = gated.iter().any(|v| v.writes_in_flight() > 0) && !undrained;
        if active(Mutation::GroupOneByOne)
            && let Change::SnapshotGroup { .. } = &change
        {
            return self.cut_one_by_one(id, change, gated, outcome);
        }
        let slot = self.pool.tuning.workers;
        let units = change.units() as u64;
        if busy {
            self.controls.current = Some(Current::Draining { id, change, gated, outcome });
            return false;
        }
        let pool = Arc::clone(&self.pool);
        let applied = {
            let gate = pool.gate.close();
            let lsn = gate.take_lsn(1);
            if active(Mutation::NoStructureRecord) {
                pool.ring.release(slot, units);
            } else if active(Mutation::GroupInPieces) {
                self.publish_in_pieces(|| gate.take_lsn(1), lsn, &change);
            } else {
                pool.publish(slot, lsn, &change, Dropped::Nothing);
            }
            self.apply_structure(&change, lsn)
        };
        for volume in &gated {
            // A deleted volume stays deleted.
            let _ = volume.state.compare_exchange(GATED, OPEN, Ordering::SeqCst, Ordering::SeqCst);
        }
        pool.bump();
        match applied {
            Ok(()) => self.end_when_durable(id, outcome),
            // The record is out and can't be taken back: its statement will not hold.
            Err(error) => pool.fail(error),
        }
        true
    }

    /// Waits for all IO to end, then writes the last checkpoint, which says so.
    fn close(&mut self, id: ControlId, final_begun: bool) -> bool {
        let again = |engine: &mut Self, final_begun| {
            engine.controls.current = Some(Current::Closing { id, final_begun });
            false
        };
        if self.checkpoint.is_running() || !self.supers.is_idle() {
            return again(self, final_begun);
        }
        if final_begun || self.pool.read_only {
            self.end(id, Ok(Outcome::Closed));
            // The pool may have another owner from now on: nothing more is done to it.
            self.closed = true;
            self.controls.fail_all(&self.pool);
            return false;
        }
        if !self.pool.epochs.is_idle() || !self.commit.is_idle() {
            return again(self, false);
        }
        if self.uncommitted() > 0 || self.pool.wake.0.commit.load(Ordering::SeqCst) {
            self.pool.want_commit();
            return again(self, false);
        }
        self.begin_checkpoint(true);
        // The checkpoint's step of this poll is over: ask for another poll.
        self.pool.want_engine();
        again(self, true)
    }

    fn prepare(&self, control: &Control) -> Result<Prepared, MapperError> {
        match control {
            Control::Create { name, size, block_size } => {
                self.prepare_create(name, *size, *block_size)
            }
            Control::Delete { volume } => self.prepare_delete(*volume),
            Control::Resize { volume, size } => self.prepare_resize(*volume, *size),
            Control::Snapshot { source, name } => self.prepare_share(*source, name, None),
            Control::SnapshotGroup { members } => self.prepare_group(members),
            Control::Clone { source, name, size } => {
                let from = self.pool.volume(*source)?;
                let size = size.unwrap_or_else(|| from.size.load(Ordering::Acquire));
                self.prepare_share(*source, name, Some(size))
            }
            Control::Rollback { volume, snapshot } => self.prepare_rollback(*volume, *snapshot),
            _ => Err(MapperError::Internal("not a structure command")),
        }
    }

    pub(super) fn by_name(&self, name: &VolumeName) -> Option<Arc<Volume>> {
        self.pool.volumes.read().values().find(|v| v.identity.name == *name).cloned()
    }

    /// Returns the first of `count` consecutive ids that were never used.
    pub(super) fn next_ids(&self, count: u32) -> Result<VolumeId, MapperError> {
        let limit = super::structure::MAX_VOLUMES;
        let next = self.controls.next_volume_id.max(1);
        if self.trees.len() + count as usize > limit || next > u32::MAX - count {
            return Err(MapperError::Limit { what: "volumes", limit: limit as u64 });
        }
        Ok(VolumeId(next))
    }

    fn prepare_create(
        &self,
        name: &str,
        size: u64,
        block_size: u32,
    ) -> Result<Prepared, MapperError> {
        let name = VolumeName::new(name)?;
        check_block_size(block_size)?;
        check_size(size, u64::from(block_size))?;
        let device_block = self.superblock.devices.as_slice().iter().map(|d| d.block_size).max();
        if device_block.is_some_and(|block| block > block_size) {
            return Err(MapperError::Invalid {
                field: "block_size",
                value: u64::from(block_size),
                allowed: "no smaller than the logical block of the pool's devices",
            });
        }
        if let Some(existing) = self.by_name(&name) {
            same(&name, "size in bytes", existing.size.load(Ordering::Acquire), size)?;
            let block = u64::from(existing.identity.block_size);
            same(&name, "block size in bytes", block, u64::from(block_size))?;
            same(&name, "origin", u64::from(existing.identity.origin.0), 0)?;
            return Ok(Prepared::Already(Outcome::Existing(existing.identity.id)));
        }
        let volume = self.next_ids(1)?;
        let change = Change::Create { volume, size, block_size, made: self.controls.now, name };
        Ok(Prepared::Change(change, Vec::new(), Outcome::Created(volume)))
    }

    fn prepare_delete(&self, id: VolumeId) -> Result<Prepared, MapperError> {
        let Ok(volume) = self.pool.volume(id) else {
            if id.0 == 0 || id.0 >= self.controls.next_volume_id {
                return Err(MapperError::NoVolume(id.to_string()));
            }
            return Ok(Prepared::Already(Outcome::AlreadyDeleted));
        };
        Ok(Prepared::Change(Change::Delete { volume: id }, vec![volume], Outcome::Deleted))
    }

    fn prepare_resize(&self, id: VolumeId, size: u64) -> Result<Prepared, MapperError> {
        let volume = self.writable(id)?;
        check_size(size, u64::from(volume.identity.block_size))?;
        let from = volume.size.load(Ordering::Acquire);
        if size == from {
            return Ok(Prepared::Already(Outcome::Unchanged));
        }
        if size < from && !size.is_multiple_of(self.pool.geometry.sub_block_size()) {
            return Err(MapperError::Invalid {
                field: "size",
                value: size,
                allowed: "a multiple of the pool's sub-block (4 KiB or extent / 64) to shrink to",
            });
        }
        if size > from {
            self.check_set_aside(Some((id, size)))?;
        }
        let change = Change::Resize { volume: id, size };
        Ok(Prepared::Change(change, vec![volume], Outcome::Resized { from }))
    }

    fn prepare_share(
        &self,
        source: VolumeId,
        name: &str,
        size: Option<u64>,
    ) -> Result<Prepared, MapperError> {
        let name = VolumeName::new(name)?;
        let from = self.pool.volume(source)?;
        let is_snapshot = from.identity.kind == VolumeKind::Snapshot;
        if is_snapshot != size.is_some() {
            let problem = if is_snapshot { "is a snapshot already" } else { "is not a snapshot" };
            return Err(MapperError::Unsuitable { volume: source.0, problem });
        }
        let source_size = from.size.load(Ordering::Acquire);
        if let Some(size) = size {
            check_size(size, u64::from(from.identity.block_size))?;
            if size < source_size {
                return Err(MapperError::Invalid {
                    field: "size",
                    value: size,
                    allowed: "no smaller than the snapshot's size",
                });
            }
        }
        if let Some(existing) = self.by_name(&name) {
            let origin = u64::from(existing.identity.origin.0);
            same(&name, "origin", origin, u64::from(source.0))?;
            if let Some(size) = size {
                same(&name, "size in bytes", existing.size.load(Ordering::Acquire), size)?;
            }
            return Ok(Prepared::Already(Outcome::Existing(existing.identity.id)));
        }
        self.check_room_for_trees(&[source])?;
        let volume = self.next_ids(1)?;
        let (outcome, made) = (Outcome::Created(volume), self.controls.now);
        Ok(match size {
            None => {
                let change = Change::Snapshot { volume, source, made, name };
                Prepared::Change(change, vec![from], outcome)
            }
            Some(size) => {
                let change = Change::Clone { volume, source, size, made, name };
                Prepared::Change(change, Vec::new(), outcome)
            }
        })
    }

    /// New trees' pages must be found before they are promised.
    pub(super) fn check_room_for_trees(&self, like: &[VolumeId]) -> Result<(), MapperError> {
        // A clone that is larger may have a level or two more above.
        let tree = |id| self.trees.get(id).map_or(0, |t| t.tree.present_pages() + 2);
        let needed = like.iter().map(tree).sum::<u64>() + self.new_tree_pages;
        let geometry = self.pool.geometry;
        let free = self.pool.free_space.lock().free_count() * geometry.pages_per_extent()
            + self.pages.free_pages().saturating_sub(self.pages.reserve_pages());
        if needed > free {
            let (needed, free) = (needed * PAGE_BYTES, free * PAGE_BYTES);
            return Err(MapperError::NoSpace { needed, free });
        }
        Ok(())
    }

    fn prepare_rollback(&self, id: VolumeId, snapshot: VolumeId) -> Result<Prepared, MapperError> {
        let volume = self.writable(id)?;
        let from = self.pool.volume(snapshot)?;
        if from.identity.kind != VolumeKind::Snapshot {
            let problem = "is not a snapshot";
            return Err(MapperError::Unsuitable { volume: snapshot.0, problem });
        }
        if from.identity.lineage != volume.identity.lineage {
            let problem = "is of another family than the volume";
            return Err(MapperError::Unsuitable { volume: snapshot.0, problem });
        }
        self.check_room_for_trees(&[snapshot])?;
        let change = Change::Rollback { volume: id, snapshot };
        Ok(Prepared::Change(change, vec![volume], Outcome::RolledBack))
    }

    pub(super) fn writable(&self, id: VolumeId) -> Result<Arc<Volume>, MapperError> {
        let volume = self.pool.volume(id)?;
        if volume.identity.kind == VolumeKind::Snapshot {
            return Err(MapperError::Unsuitable { volume: id.0, problem: "is a snapshot" });
        }
        Ok(volume)
    }
}

/// The same name means the same volume, or an error that says where it differs.
pub(super) fn same(
    name: &VolumeName,
    field: &'static str,
    existing: u64,
    asked: u64,
) -> Result<(), MapperError> {
    if existing == asked {
        return Ok(());
    }
    Err(MapperError::Exists { name: name.as_str().to_owned(), field, existing, asked })
}

fn check_block_size(block_size: u32) -> Result<(), MapperError> {
    if block_size.is_power_of_two() && (MIN_BLOCK_SIZE..=4096).contains(&block_size) {
        return Ok(());
    }
    Err(MapperError::Invalid {
        field: "block_size",
        value: u64::from(block_size),
        allowed: "512, 1024, 2048 or 4096 bytes",
    })
}

fn check_size(size: u64, block: u64) -> Result<(), MapperError> {
    if size > 0 && size <= MAX_VOLUME_SIZE && size.is_multiple_of(block) {
        return Ok(());
    }
    Err(MapperError::Invalid {
        field: "size",
        value: size,
        allowed: "a multiple of the block size, from one block to 2^50 bytes",
    })
}
