//! Data moved from fuller devices of a pool to emptier ones, until the same share of each is used.
//!
//! The moves are those of an evacuation (see [`super::moving`]). A plan says how many extents are
//! to leave each device or to come to it; a walk over all volumes moves as many, and the next walk
//! has a plan of its own. Only data moves: superblocks, log and metadata pages stay, so that more
//! than the common share may be in use where they lie.
//!
//! A rebalance ends when the shares are even, when nothing more can be moved, when a device begins
//! to leave or shrink, and with the pool: nothing about it is on the media.

use crate::engine::Engine;
use crate::engine::control::{ControlId, Outcome};
use crate::error::MapperError;
use crate::geometry::MAX_DEVICES;
use crate::mutation::{Mutation, Situation, active, met};
use crate::pool::{Pool, split};
use crate::sync::Ordering;
use crate::units::PhysicalExtent;
use crate::volume::Volume;

use super::{EvacuationStatus, invalid_device};

/// Difference of a device from its part that counts as even: a hundredth of the device, or this
/// many extents. A rebalance that has begun moves the rest as well.
const TOLERANCE: u64 = 4;
/// Walks in a row that move nothing, after which the rest stays where it is.
const IDLE_WALKS: u32 = 4;
/// Times in a row that moves are put off, as older IO does not end: some minutes.
const PUT_OFFS: u32 = 60;
/// Walks at the most: writers may fill one device as fast as it is emptied.
const MAX_WALKS: u32 = 64;

/// How far the rebalance of a pool has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RebalanceState {
    /// None has begun since the pool was opened.
    #[default]
    Never,
    /// Extents are moved.
    Running,
    /// The same share of each device is used, but for what can't be moved.
    Even,
    /// Ended with the rest in place: nothing more could be moved.
    Rest,
    /// Stopped by a command.
    Stopped,
    /// A device began to leave or to shrink.
    Displaced,
}

/// Figures of the present rebalance, or of the last one since the pool was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RebalanceStatus {
    /// How far it has come.
    pub state: RebalanceState,
    /// Bytes that the present walk still has to move.
    pub left: u64,
    /// Bytes copied.
    pub moved: u64,
    /// Extents moved.
    pub extents: u64,
    /// Bytes a second that may be copied; 0: nothing is moved.
    pub rate: u64,
    /// Whether it waits until the pool is no longer low.
    pub waits_for_space: bool,
    /// Copies that met an IO error. Their extents stay, and are tried again.
    pub errors: u64,
    /// Bytes in use when it began, by the place of the device in the table.
    pub before: [u64; MAX_DEVICES],
    /// Bytes in use now.
    pub used: [u64; MAX_DEVICES],
}

/// The rebalance of a pool's devices.
#[derive(Debug, Default)]
pub(crate) struct Rebalance {
    state: RebalanceState,
    plan: Plan,
    /// Extents in use when it began.
    before: [u64; MAX_DEVICES],
    walks: u32,
    idle_walks: u32,
    put_offs: u32,
    /// Extents moved before the present walk.
    moved_before: u64,
    /// Figures of one that has ended.
    last: EvacuationStatus,
}

/// Extents that are to leave each device, or to come to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Plan {
    excess: [u64; MAX_DEVICES],
    room: [u64; MAX_DEVICES],
    is_even: bool,
}

/// A device in extents.
#[derive(Clone, Copy, Debug, Default)]
struct Filled {
    size: u64,
    used: u64,
    /// Of these, those that stay.
    fixed: u64,
}

impl Plan {
    /// The plan by which the same share of each device is used. Where more is fixed, that stays,
    /// and the others share the rest.
    fn of(devices: &[Filled; MAX_DEVICES]) -> Self {
        let mut is_level = devices.map(|device| device.size > 0);
        let level = loop {
            let sum = devices.iter().zip(is_level).fold((0, 0), |sum, (one, is_level)| {
                let (used, size) = if is_level { (0, one.size) } else { (one.fixed, 0) };
                (sum.0 + one.used.saturating_sub(used), sum.1 + size)
            });
            let is_above = |one: &Filled| {
                u128::from(one.fixed) * u128::from(sum.1) > u128::from(sum.0) * u128::from(one.size)
            };
            let above =
                devices.iter().zip(is_level).position(|(one, level)| level && is_above(one));
            match above {
                Some(at) => is_level[at] = false,
                None => break sum,
            }
        };
        let mut plan = Self { is_even: true, ..Self::default() };
        for (at, device) in devices.iter().enumerate() {
            let share = u128::from(level.0) * u128::from(device.size) / u128::from(level.1.max(1));
            let part = if is_level[at] { u64::try_from(share).unwrap_or(0) } else { device.fixed };
            plan.excess[at] = device.used.saturating_sub(part);
            plan.room[at] = part.saturating_sub(device.used);
            plan.is_even &= part.abs_diff(device.used) <= (device.size / 100).max(TOLERANCE);
        }
        plan
    }

    fn is_done(&self) -> bool {
        self.excess.iter().all(|count| *count == 0) || self.room.iter().all(|count| *count == 0)
    }
}

impl Rebalance {
    pub(crate) fn is_running(&self) -> bool {
        self.state == RebalanceState::Running
    }

    /// Whether the present walk has nothing more to begin.
    pub(super) fn is_done(&self) -> bool {
        self.is_running() && self.plan.is_done()
    }

    /// Whether an extent is to go to another device.
    pub(super) fn moves_off(&self, extent: PhysicalExtent) -> bool {
        self.is_running() && self.plan.excess.get(split(extent).0).is_some_and(|count| *count > 0)
    }

    /// The move of an extent has begun.
    pub(super) fn began(&mut self, from: PhysicalExtent) {
        if let Some(excess) = self.plan.excess.get_mut(split(from).0) {
            *excess = excess.saturating_sub(1);
        }
    }

    /// Older IO has ended in time.
    pub(super) const fn drained(&mut self) {
        self.put_offs = 0;
    }

    /// A move has ended without a change, where it has the target already.
    pub(super) fn came_to_nothing(&mut self, from: PhysicalExtent, to: Option<PhysicalExtent>) {
        let back = [(&mut self.plan.excess, Some(from)), (&mut self.plan.room, to)];
        for (counts, extent) in back {
            if let Some(count) = extent.and_then(|extent| counts.get_mut(split(extent).0)) {
                *count += 1;
            }
        }
    }
}

impl Pool {
    /// Whether a rebalance has ended since this was asked last. May be called from any thread.
    #[must_use]
    pub fn take_rebalanced(&self) -> bool {
        self.rebalanced.swap(false, Ordering::SeqCst)
    }
}

impl Engine {
    /// Figures of the present rebalance, or of the last one since the pool was opened.
    #[must_use]
    pub fn rebalance_status(&self) -> RebalanceStatus {
        let (one, extent) = (&self.rebalance, self.pool.geometry.extent_size());
        let now = if one.is_running() { &self.evacuation.status } else { &one.last };
        let left: u64 = if one.is_running() { one.plan.excess.iter().sum() } else { 0 };
        let space = self.pool.free_space.lock();
        RebalanceStatus {
            state: one.state,
            left: left * extent,
            moved: now.moved,
            extents: now.extents,
            rate: self.evacuation.rate,
            waits_for_space: one.is_running() && now.waits_for_space,
            errors: now.errors,
            before: one.before.map(|count| count * extent),
            used: std::array::from_fn(|at| space.used_on(at) * extent),
        }
    }

    /// Begins to even out the use of the devices, or stops doing so. Moves that have begun end.
    pub(in super::super) fn rebalance(&mut self, id: ControlId, enabled: bool) {
        let outcome = match (enabled, self.rebalance.is_running()) {
            (true, false) => self.begin_rebalance(),
            (false, true) => {
                self.end_rebalance(RebalanceState::Stopped);
                Ok(Outcome::RebalanceStopped)
            }
            _ => Ok(Outcome::Unchanged),
        };
        self.end(id, outcome);
    }

    fn begin_rebalance(&mut self) -> Result<Outcome, MapperError> {
        if let Some(leaving) = self.superblock.devices.leaving() {
            let allowed = "a pool of which no device is leaving or shrinking";
            return Err(invalid_device(leaving.device, allowed));
        }
        let devices = self.superblock.devices.present().count() as u64;
        if devices < 2 {
            let allowed = "2 or more: there is no other device to move data to";
            return Err(MapperError::Invalid { field: "devices", value: devices, allowed });
        }
        let plan = self.plan_rebalance();
        if plan.is_even {
            return Ok(Outcome::Unchanged);
        }
        let before = {
            let space = self.pool.free_space.lock();
            std::array::from_fn(|at| space.used_on(at))
        };
        let state = RebalanceState::Running;
        self.rebalance = Rebalance { state, plan, before, ..Rebalance::default() };
        self.evacuation.status = EvacuationStatus::default();
        self.evacuation.again_ns = Some(0);
        self.pool.rebalanced.store(false, Ordering::SeqCst);
        self.pool.want_engine();
        Ok(Outcome::Rebalancing)
    }

    /// Ends the present rebalance. Moves that have begun end by themselves.
    pub(super) fn end_rebalance(&mut self, state: RebalanceState) {
        if !self.rebalance.is_running() {
            return;
        }
        self.rebalance.state = state;
        self.rebalance.last = std::mem::take(&mut self.evacuation.status);
        (self.evacuation.walk, self.evacuation.again_ns) = (None, None);
        if active(Mutation::MovesForgotten) && state == RebalanceState::Stopped {
            self.evacuation.running.clear();
        }
        self.pool.rebalanced.store(true, Ordering::SeqCst);
        met(Situation::RebalanceEnded);
    }

    /// The plan for what is in use now, without what is about to be free.
    fn plan_rebalance(&self) -> Plan {
        let mut devices = [Filled::default(); MAX_DEVICES];
        let pending = self.releases.pending_by_device(&self.pool);
        let space = self.pool.free_space.lock();
        for (at, _) in self.superblock.devices.present() {
            let used = space.used_on(at).saturating_sub(pending[at]);
            devices[at] = Filled { size: space.count_on(at), used, fixed: 0 };
        }
        for extent in self.fixed_extents().into_iter().chain(self.pages.extents()) {
            if let Some(device) = devices.get_mut(split(extent).0) {
                device.fixed += 1;
            }
        }
        Plan::of(&devices)
    }

    pub(super) fn step_rebalance(&mut self) {
        let is_time = self.evacuation.again_ns.is_some_and(|at| at <= self.now_ns);
        if is_time && self.evacuation.walk.is_none() && self.evacuation.rate > 0 {
            self.rebalance.plan = self.plan_rebalance();
            if self.rebalance.plan.is_even {
                met(Situation::Rebalanced);
                return self.end_rebalance(RebalanceState::Even);
            }
            self.rebalance.moved_before = self.evacuation.status.extents;
            self.evacuation.begin_walk();
        }
        if self.evacuation.walk.is_some() {
            self.walk_leaving();
        }
    }

    /// Older IO did not end in time for the moves that began together.
    pub(super) fn note_put_off(&mut self) {
        self.rebalance.put_offs += 1;
        if self.rebalance.put_offs >= PUT_OFFS {
            self.end_rebalance(RebalanceState::Rest);
        }
    }

    /// A walk has ended: another one follows, unless it is of no use.
    pub(super) fn end_rebalance_walk(&mut self) {
        self.evacuation.walk = None;
        self.evacuation.status.waits_for_space = self.evacuation.is_full;
        let has_moved = self.evacuation.status.extents > self.rebalance.moved_before;
        let one = &mut self.rebalance;
        // One that waits for space is tried again and again, as that of a device that leaves.
        if !self.evacuation.is_full {
            one.walks += 1;
            one.idle_walks = if has_moved { 0 } else { one.idle_walks + 1 };
        }
        if one.idle_walks >= IDLE_WALKS || one.walks >= MAX_WALKS {
            return self.end_rebalance(RebalanceState::Rest);
        }
        if has_moved {
            // The sources become free.
            self.pool.want_commit();
        }
        self.evacuation.again_ns = Some(self.later());
    }

    /// Takes an extent to copy to: of those for a volume, where its placement is not the default.
    pub(super) fn take_target(&mut self, placed: Option<&Volume>) -> Option<PhysicalExtent> {
        if self.evacuation.leaving.is_none() {
            return self.take_emptier();
        }
        // Space set aside for thick volumes is theirs.
        let has_room = self.has_more_than_set_aside();
        let allocate = || {
            let mut space = self.pool.free_space.lock();
            match placed {
                Some(volume) => self.run_for(volume, &mut space, 1),
                None => space.allocate(1),
            }
        };
        let to = has_room.then(allocate).flatten();
        if to.is_none() {
            self.evacuation.wait_for_space();
        }
        to.map(|(first, _)| first)
    }

    /// Whether the pool is not low: such space is for writes.
    pub(super) fn has_room_to_even_out(&self) -> bool {
        let extent = self.pool.geometry.extent_size();
        let low = self.low_mark(self.pool.free_space.lock().total_count());
        self.available() / extent > low
    }

    /// An extent of one of the emptier devices, for an extent of a fuller one. None while the pool
    /// is low, or would be: such space is for writes.
    fn take_emptier(&mut self) -> Option<PhysicalExtent> {
        if !self.rebalance.is_running() {
            return None;
        }
        if !self.has_room_to_even_out() {
            self.evacuation.wait_for_space();
            return None;
        }
        let room = &mut self.rebalance.plan.room;
        let mut space = self.pool.free_space.lock();
        loop {
            let (at, most) = room.iter_mut().enumerate().max_by_key(|(_, count)| **count)?;
            if *most == 0 {
                return None;
            }
            if let Some((to, _)) = space.allocate_on(at, 1) {
                *most -= 1;
                return Some(to);
            }
            *most = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(devices: &[(u64, u64, u64)]) -> Plan {
        let mut filled = [Filled::default(); MAX_DEVICES];
        for (at, &(size, used, fixed)) in devices.iter().enumerate() {
            filled[at] = Filled { size, used, fixed };
        }
        Plan::of(&filled)
    }

    #[test]
    fn each_device_gets_the_same_share() {
        let plan = plan(&[(1000, 900, 10), (1000, 500, 10), (3000, 100, 2)]);
        assert_eq!((plan.excess[..3].to_vec(), plan.room[..3].to_vec()), {
            (vec![600, 200, 0], vec![0, 0, 800])
        });
        assert!(!plan.is_even && !plan.is_done());
    }

    #[test]
    fn a_device_with_more_fixed_than_its_share_keeps_it() {
        let plan = plan(&[(100, 90, 80), (1000, 400, 2), (1000, 0, 2)]);
        assert_eq!((plan.excess[..3].to_vec(), plan.room[..3].to_vec()), {
            (vec![10, 195, 0], vec![0, 0, 205])
        });
    }

    #[test]
    fn a_hundredth_of_a_device_or_four_extents_count_as_even() {
        assert!(plan(&[(1000, 510, 2), (1000, 490, 2)]).is_even);
        assert!(!plan(&[(1000, 511, 2), (1000, 489, 2)]).is_even);
        assert!(plan(&[(20, 14, 2), (20, 6, 2)]).is_even);
        assert!(!plan(&[(20, 15, 2), (20, 5, 2)]).is_even);
        // Where nothing can be moved.
        assert!(plan(&[(20, 15, 15), (20, 5, 2)]).is_even);
    }
}
