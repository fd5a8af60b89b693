//! Snapshots of several volumes in one cut.
//!
//! Every source is gated before any is drained, and the cut comes when no write is in flight on any
//! of them: a write that was answered before is in the set, one that was asked for afterwards is
//! not. One record describes all of it, so that log, ring and replay have it whole or not at all
//! (R6).

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::MapperError;
use crate::format::VolumeName;
use crate::format::catalogue::VolumeKind;
use crate::format::record::{Change, GroupMember};
use crate::geometry::MAX_GROUP;
use crate::ring::Dropped;
use crate::sync::Ordering;
use crate::units::{Lsn, VolumeId, WallTime};
use crate::volume::{OPEN, Volume};

use super::Engine;
use super::control::{ControlId, Outcome, Prepared, same};

impl Engine {
    pub(super) fn prepare_group(
        &self,
        members: &[(VolumeId, String)],
    ) -> Result<Prepared, MapperError> {
        let (members, gated) = self.check_group(members)?;
        let existing: Vec<Option<Arc<Volume>>> =
            members.iter().map(|member| self.by_name(&member.name)).collect();
        if existing.iter().any(Option::is_some) {
            return existing_group(&members, &existing);
        }
        let sources: Vec<VolumeId> = members.iter().map(|member| member.source).collect();
        self.check_room_for_trees(&sources)?;
        self.check_room_for_records(sources.len())?;
        let count = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let volume = self.next_ids(count)?;
        let outcome =
            Outcome::CreatedGroup((volume.0..).take(members.len()).map(VolumeId).collect());
        let made = self.controls.now;
        let change = match members[..] {
            // One alone is an ordinary snapshot.
            [GroupMember { source, name }] => {
                Change::Snapshot { volume, source, made, name: Box::new(name) }
            }
            _ => Change::SnapshotGroup { volume, made, members: members.into() },
        };
        let (units, limit) = (change.units() as u64, self.pool.ring.capacity());
        if units > limit {
            // It would wait for room for ever.
            return Err(MapperError::Limit { what: "units of a record in the delta ring", limit });
        }
        Ok(Prepared::Change(change, gated, outcome))
    }

    /// Checks a group without a look at whether any of the snapshots exists.
    fn check_group(
        &self,
        members: &[(VolumeId, String)],
    ) -> Result<(Vec<GroupMember>, Vec<Arc<Volume>>), MapperError> {
        if !(1..=MAX_GROUP).contains(&members.len()) {
            return Err(MapperError::Invalid {
                field: "members",
                value: members.len() as u64,
                allowed: "from 1 to 16 volumes",
            });
        }
        let (mut checked, mut gated) = (Vec::new(), Vec::new());
        let (mut sources, mut names) = (BTreeSet::new(), BTreeSet::new());
        for (source, name) in members {
            let name = VolumeName::new(name)?;
            let volume = self.pool.volume(*source)?;
            if volume.identity.kind == VolumeKind::Snapshot {
                let problem = "is a snapshot already";
                return Err(MapperError::Unsuitable { volume: source.0, problem });
            }
            if !sources.insert(*source) {
                let which = source.to_string();
                return Err(MapperError::GroupTwice { what: "volume", which });
            }
            if !names.insert(name.as_str().to_owned()) {
                let which = name.to_string();
                return Err(MapperError::GroupTwice { what: "name", which });
            }
            checked.push(GroupMember { source: *source, name });
            gated.push(volume);
        }
        Ok((checked, gated))
    }
}

/// A group of which at least one name is taken: done already, or refused.
fn existing_group(
    members: &[GroupMember],
    existing: &[Option<Arc<Volume>>],
) -> Result<Prepared, MapperError> {
    let mut there = Vec::new();
    for (member, found) in members.iter().zip(existing) {
        let Some(volume) = found else { continue };
        let (origin, source) = (volume.identity.origin, member.source);
        same(&member.name, "origin", origin.0.into(), source.0.into())?;
        there.push(volume);
    }
    let missing = members.iter().zip(existing).find(|(_, found)| found.is_none());
    let Some(first) = there.first() else {
        return Err(MapperError::Internal("a group that is not there"));
    };
    let text = |volume: &Volume| volume.name().to_string();
    if let Some((member, _)) = missing {
        let missing = member.name.to_string();
        return Err(MapperError::GroupPartly { existing: text(first), missing });
    }
    // One record made them if it was one cut, and all of them carry its LSN.
    if let Some(other) = there.iter().find(|v| v.identity.created != first.identity.created) {
        return Err(MapperError::GroupApart { first: text(first), other: text(other) });
    }
    let ids = there.iter().map(|volume| volume.identity.id).collect();
    Ok(Prepared::Already(Outcome::ExistingGroup(ids)))
}

// Rules taken out, for tests that must notice.
impl Engine {
    /// A record for each snapshot of a group in place of one for all.
    pub(super) fn publish_in_pieces(&self, more: impl Fn() -> Lsn, lsn: Lsn, change: &Change) {
        let slot = self.pool.tuning.workers;
        let Change::SnapshotGroup { volume, made, members } = change else {
            self.pool.publish(slot, lsn, change, Dropped::Nothing);
            return;
        };
        for (member, id) in members.iter().zip(volume.0..) {
            let lsn = if id == volume.0 { lsn } else { more() };
            self.pool.publish(slot, lsn, &piece(id, *made, member), Dropped::Nothing);
        }
        self.pool.ring.release(slot, 1);
    }

    /// Drains and cuts one volume of a group, and goes on with the next at another time. Nothing
    /// is gated meanwhile.
    pub(super) fn cut_one_by_one(
        &mut self,
        id: ControlId,
        change: Change,
        mut gated: Vec<Arc<Volume>>,
        outcome: Outcome,
    ) -> bool {
        let Change::SnapshotGroup { volume, made, members } = change else { return false };
        for source in &gated {
            source.state.store(OPEN, Ordering::SeqCst);
        }
        let pool = Arc::clone(&self.pool);
        pool.bump();
        if gated.first().is_some_and(|source| source.writes_in_flight() > 0) {
            let change = Change::SnapshotGroup { volume, made, members };
            self.controls.go_on_draining(id, change, gated, outcome);
            return false;
        }
        let slot = pool.tuning.workers;
        let applied = {
            let gate = pool.gate.close();
            let (lsn, piece) = (gate.take_lsn(1), piece(volume.0, made, &members[0]));
            pool.publish(slot, lsn, &piece, Dropped::Nothing);
            self.apply_structure(&piece, lsn)
        };
        if let Err(error) = applied {
            pool.fail(error);
        }
        gated.remove(0);
        if gated.is_empty() {
            pool.ring.release(slot, 1);
            self.end_when_durable(id, outcome);
            return true;
        }
        let (volume, members) = (VolumeId(volume.0 + 1), members[1..].into());
        let change = Change::SnapshotGroup { volume, made, members };
        self.controls.go_on_draining(id, change, gated, outcome);
        false
    }
}

fn piece(id: u32, made: WallTime, member: &GroupMember) -> Change {
    let GroupMember { source, name } = *member;
    Change::Snapshot { volume: VolumeId(id), source, made, name: Box::new(name) }
}
