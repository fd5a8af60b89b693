//! Commands to a pool: checked, gated, drained, applied, and answered when durable (R16).

mod command;
mod prepare;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::Engine;
use crate::error::MapperError;
use crate::format::record::Change;
use crate::format::superblock::{DeviceTable, PLACEMENT, Superblock, VOLUME_SETTINGS};
use crate::mutation::{Mutation, active};
use crate::plan::CommitTicket;
use crate::pool::Pool;
use crate::ring::Dropped;
use crate::sync::Ordering;
use crate::units::{Lsn, VolumeId, WallTime};
use crate::volume::{GATED, OPEN, Volume};

pub use command::{Control, ControlId, Outcome};
pub(super) use prepare::same;

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
    /// Volumes that are gone, and the LSN of that. Rising.
    gone: VecDeque<(Lsn, VolumeId)>,
    /// The device table that the next superblock names.
    pub(super) devices: Option<DeviceTable>,
    /// Some volume has been given settings: the next superblock says that there are such.
    pub(super) has_settings: bool,
    /// Some volume has been given a placement: likewise.
    pub(super) has_placement: bool,
}

impl Controls {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.current.is_none() && self.undurable.is_empty()
    }

    /// Whether no command is under way.
    pub(super) fn is_free(&self) -> bool {
        self.current.is_none()
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

    /// A volume is gone with this LSN.
    pub(super) fn note_gone(&mut self, volume: VolumeId, lsn: Lsn) {
        self.gone.push_back((lsn, volume));
    }

    /// Forgets volumes that are gone and have no record left after this LSN.
    pub(super) fn forget_gone(&mut self, consumed: Lsn) {
        while let Some((_, volume)) = self.gone.pop_front_if(|(lsn, _)| *lsn <= consumed) {
            self.lineages.remove(&volume);
        }
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
        if self.has_placement {
            next.compat |= PLACEMENT;
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

    pub(super) fn end(&mut self, id: ControlId, result: Result<Outcome, MapperError>) {
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
        // The superblock being written would not have the devices that a command adds or changes.
        let devices_stay = self.evacuation.is_ending();
        if !(self.opened || self.pool.read_only) || shape_stays || devices_stay {
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
            Control::Configure { .. } | Control::Label { .. } => self.change_record(id, control),
            Control::GrowDevice { device, size } => {
                let gained = self.prepare_grow(device, size);
                self.begin_to_grow(id, gained);
            }
            Control::AddDevice { handle, device } => {
                let gained = self.prepare_add(handle, &device);
                self.begin_to_grow(id, gained);
            }
            Control::RemoveDevice { device } => self.remove_device(id, device),
            Control::ShrinkDevice { device, size } => self.shrink_device(id, device, size),
            Control::KeepDevice { device } => self.keep_device(id, device),
            Control::Rebalance { enabled } => self.rebalance(id, enabled),
            Control::SetComposite { enabled: true } => self.enable_composite(id),
            Control::SetComposite { enabled: false } => match self.disable_composite() {
                Ok(outcome) => self.end_when_durable(id, outcome),
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

    /// Carries out a command whose result only a checkpoint makes durable.
    fn change_record(&mut self, id: ControlId, control: Control) {
        let changed = match control {
            Control::Configure { volume, settings } => self.configure(volume, settings),
            Control::Label { volume, labels } => self.label(volume, &labels),
            _ => Err(MapperError::Internal("not a command about a record")),
        };
        match changed {
            Ok(Outcome::Unchanged) => self.end_when_durable(id, Outcome::Unchanged),
            Ok(outcome) => self.begin_checkpoint_for(id, outcome),
            Err(error) => self.end(id, Err(error)),
        }
    }

    pub(super) fn begin_checkpoint_for(&mut self, id: ControlId, outcome: Outcome) {
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
                match outcome {
                    Outcome::Enabled => self.finish_enabling(id),
                    Outcome::Grown { .. } => {
                        self.use_new_extents();
                        self.end(id, Ok(outcome));
                    }
                    Outcome::Leaving | Outcome::Shrinking | Outcome::Kept => {
                        self.follow_device_states();
                        self.end(id, Ok(outcome));
                    }
                    _ => self.end(id, Ok(outcome)),
                }
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
        let lineages = self.families(&change);
        let folds = self.folds_are_in_the_way(&lineages) && !active(Mutation::FoldUnderStructure);
        self.folds.bar(if busy || folds { lineages } else { Vec::new() });
        if busy || folds {
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
        if pool.is_leaving() {
            // A volume or snapshot may have composite entries that it had not.
            pool.want_folds();
        }
        pool.bump();
        match applied {
            Ok(()) => self.end_when_durable(id, outcome),
            // The record is out and can't be taken back: its statement will not hold.
            Err(error) => pool.fail(error),
        }
        true
    }

    /// The families of volumes that a structure change is about.
    fn families(&self, change: &Change) -> Vec<VolumeId> {
        let volumes = match change {
            Change::SnapshotGroup { members, .. } => members.iter().map(|one| one.source).collect(),
            Change::Snapshot { source, .. } | Change::Clone { source, .. } => vec![*source],
            Change::Delete { volume }
            | Change::Resize { volume, .. }
            | Change::Rollback { volume, .. } => vec![*volume],
            _ => Vec::new(),
        };
        volumes.into_iter().map(|id| self.controls.lineage_of(&self.pool, id)).collect()
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
        if !self.end_folds()
            || !self.end_moves()
            || !self.pool.epochs.is_idle()
            || !self.commit.is_idle()
        {
            return again(self, false);
        }
        if self.uncommitted() > 0 || self.pool.wake.0.commit.load(Ordering::SeqCst) {
            self.pool.want_commit();
            // No commit begins in a full log, and while the pool closes no other checkpoint.
            if self.wal.free() == 0 && self.uncommitted() > 0 {
                self.begin_checkpoint(false);
                self.pool.want_engine();
            }
            return again(self, false);
        }
        self.begin_checkpoint(true);
        // The checkpoint's step of this poll is over: ask for another poll.
        self.pool.want_engine();
        again(self, true)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// A daemon that makes and deletes volumes for years does not grow by them.
    #[test]
    fn volumes_that_are_gone_are_forgotten_with_their_last_record() {
        let mut controls = Controls::default();
        for id in 1..=3 {
            controls.lineages.insert(VolumeId(id), VolumeId(1));
        }
        controls.note_gone(VolumeId(1), Lsn(10));
        controls.note_gone(VolumeId(3), Lsn(20));
        controls.forget_gone(Lsn(9));
        assert_eq!(controls.lineages.len(), 3);
        controls.forget_gone(Lsn(19));
        assert!(controls.lineages.keys().eq([&VolumeId(2), &VolumeId(3)]));
        controls.forget_gone(Lsn(20));
        assert!(controls.lineages.keys().eq([&VolumeId(2)]));
    }
}
