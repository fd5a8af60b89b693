//! A device that leaves the pool: everything on it is moved to other devices, in the background,
//! while volumes are used. Or one that shrinks: everything behind its new end is moved, to the rest
//! of it too (see [`shrink`]). Or data that is moved to emptier devices (see [`rebalance`]).
//!
//! The device table says that it is leaving, on the media too, so that a crash only delays it. From
//! then on nothing new is put there. A walk over all volumes moves data (see [`moving`]) and has
//! the next checkpoint write metadata pages elsewhere, until nothing but superblocks is in the
//! leaving extents. Then a superblock without them is written. In all this they stay a part of the
//! pool: only that last superblock ends it.
//!
//! Extents that a volume holds for writes to come go back; those that were taken for writes in
//! flight become entries, which a later walk finds. So walks are repeated until one finds nothing.

use std::sync::Arc;

use crate::error::MapperError;
use crate::format::superblock::{DeviceRecord, DeviceState, DeviceTable, Leaving};
use crate::geometry::{MAX_DEVICES, PAGE_BYTES};
use crate::leaf::LEAF_ENTRIES;
use crate::mutation::{Mutation, Situation, active, met};
use crate::sync::Ordering;
use crate::units::{PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;

use super::control::{ControlId, Outcome};
use super::feature::pages_of_leaves;
use super::pace::Pace;
use super::{DRAIN_POLL_NS, Engine};

mod find;
mod moving;
mod rebalance;
mod shrink;

use moving::Move;
pub(crate) use rebalance::Rebalance;
pub use rebalance::{RebalanceState, RebalanceStatus};

/// Figures of the device that is leaving or shrinking.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EvacuationStatus {
    /// Its place in the device table; `None` where no device is leaving or shrinking.
    pub device: Option<u8>,
    /// Bytes that it will have when it has shrunk; `None` where it leaves.
    pub shrinks_to: Option<u64>,
    /// Bytes in use on it, or behind its new end.
    pub left: u64,
    /// Bytes copied off it since the pool was opened, or since it began to leave or shrink.
    pub moved: u64,
    /// Extents moved in that time.
    pub extents: u64,
    /// Bytes a second that may be copied; 0: nothing is moved.
    pub rate: u64,
    /// Whether it waits for free space elsewhere.
    pub waits_for_space: bool,
    /// Copies that met an IO error in that time. Their extents stay, and are tried again.
    pub errors: u64,
    /// Bytes of each device by its place in the table, as the superblock on the media has them.
    pub sizes: [u64; MAX_DEVICES],
}

/// The evacuation of a device, or of a part of it.
#[derive(Debug, Default)]
pub(crate) struct Evacuation {
    /// The extents that everything is moved off.
    leaving: Option<Leaving>,
    /// The next entry to be examined; `None` between two walks.
    walk: Option<(VolumeId, SlotIndex, usize)>,
    /// When the next walk begins.
    again_ns: Option<u64>,
    running: Vec<Move>,
    next_token: u64,
    pace: Pace,
    rate: u64,
    status: EvacuationStatus,
    /// A page was sent to another place during the walk: a checkpoint has to write it.
    pages_moved: bool,
    /// The walk found no space elsewhere, and begins no more moves.
    is_full: bool,
    /// How often the wait of moves for older IO is doubled.
    doublings: u32,
    /// The superblock without the extents is on its way: it is done with this many checkpoints.
    last: Option<u64>,
}

/// Superblock areas are all that stays: at either end of a device, or at the former end.
fn superblocks(leaving: Leaving) -> u64 {
    if leaving.is_whole() { 2 } else { 1 }
}

/// The space that the rest of a pool needs for leaving extents, and what is free there.
#[derive(Clone, Copy, Debug)]
struct Room {
    needed: u64,
    free: u64,
    /// Leaving extents that volumes hold for writes to come.
    granted: u64,
}

impl Evacuation {
    pub(crate) fn new(rate: u64, leaving: Option<Leaving>) -> Self {
        Self { rate, leaving, again_ns: leaving.map(|_| 0), ..Self::default() }
    }

    /// Whether an extent is being moved: no fold may change what is in it.
    pub(super) fn moves(&self, extent: PhysicalExtent) -> bool {
        self.running.iter().any(|one| one.concerns(extent))
    }

    /// Whether the superblock without the extents is on its way.
    pub(super) const fn is_ending(&self) -> bool {
        self.last.is_some()
    }

    fn begin_walk(&mut self) {
        self.walk = Some((VolumeId(0), SlotIndex(0), 0));
        self.again_ns = None;
        self.pages_moved = false;
        self.is_full = false;
    }

    /// Begins no more moves in this walk, as there is no space elsewhere.
    const fn wait_for_space(&mut self) {
        self.is_full = true;
        self.status.waits_for_space = true;
    }

    pub(super) fn is_leaving(&self, extent: PhysicalExtent) -> bool {
        self.leaving.is_some_and(|leaving| leaving.holds(extent))
    }
}

impl Engine {
    /// Whether no move is under way, and none waits.
    pub(super) fn moves_nothing(&self) -> bool {
        !self.has_to_move() && self.evacuation.running.is_empty()
    }

    fn has_to_move(&self) -> bool {
        self.evacuation.leaving.is_some() || self.rebalance.is_running()
    }

    /// Figures of the device that is leaving or shrinking.
    #[must_use]
    pub fn evacuation_status(&self) -> EvacuationStatus {
        let (evacuation, extent) = (&self.evacuation, self.pool.geometry.extent_size());
        let used = self.pool.free_space.lock().used_leaving();
        let left = evacuation.leaving.map_or(0, |one| used.saturating_sub(superblocks(one)));
        let shrinks = evacuation.leaving.filter(|leaving| !leaving.is_whole());
        let mut sizes = [0; MAX_DEVICES];
        for (size, record) in sizes.iter_mut().zip(self.superblock.devices.as_slice()) {
            *size = record.size;
        }
        let status = if evacuation.leaving.is_some() { evacuation.status } else { <_>::default() };
        EvacuationStatus {
            sizes,
            device: evacuation.leaving.and_then(|one| u8::try_from(one.device).ok()),
            shrinks_to: shrinks.map(|leaving| (leaving.from + 1) * extent),
            left: left * extent,
            rate: evacuation.rate,
            ..status
        }
    }

    /// The devices of the pool, as the superblock on the media has them.
    #[must_use]
    pub const fn devices(&self) -> &DeviceTable {
        &self.superblock.devices
    }

    /// Sets the bytes a second that may be copied off a leaving device. With 0 no more moves begin,
    /// and those that have begun end.
    pub fn set_evacuation_rate(&mut self, rate: u64) {
        self.evacuation.rate = rate;
        self.evacuation.pace.end_pause();
        self.pool.want_engine();
    }

    /// Begins to take a device out of the pool, with the next superblock.
    pub(super) fn remove_device(&mut self, id: ControlId, device: u8) {
        match self.prepare_remove(usize::from(device)) {
            Ok(false) => self.end_when_durable(id, Outcome::Unchanged),
            Ok(true) => self.begin_checkpoint_for(id, Outcome::Leaving),
            Err(error) => self.end(id, Err(error)),
        }
    }

    /// Checks it, and has nothing new put on the device. `false`: it is leaving already.
    fn prepare_remove(&mut self, device: usize) -> Result<bool, MapperError> {
        let (leaving, record) = (Leaving { device, from: 0 }, self.present_device(device)?);
        if self.is_leaving_alone(leaving)? {
            return Ok(false);
        }
        if device == 0 {
            let allowed = "another one than the first, which holds the log and the reserve";
            return Err(invalid_device(device, allowed));
        }
        let Room { needed, free, .. } = self.room_without(leaving);
        if needed > free {
            return Err(self.no_space(needed, free));
        }
        self.begin_to_leave(leaving, DeviceRecord { state: DeviceState::Leaving, ..record })?;
        Ok(true)
    }

    /// The record of a device of the pool.
    fn present_device(&self, device: usize) -> Result<DeviceRecord, MapperError> {
        let record = self.superblock.devices.as_slice().get(device).copied();
        record
            .filter(DeviceRecord::is_present)
            .ok_or_else(|| invalid_device(device, "the position of one of the pool's devices"))
    }

    /// Whether these extents are leaving already. Refuses where others are.
    fn is_leaving_alone(&self, leaving: Leaving) -> Result<bool, MapperError> {
        match self.superblock.devices.leaving() {
            None => Ok(false),
            Some(present) if present == leaving => Ok(true),
            Some(present) if present.device == leaving.device => {
                let allowed = "a device that neither leaves nor shrinks";
                Err(invalid_device(leaving.device, allowed))
            }
            Some(_) => {
                let allowed = "the device that is leaving or shrinking: one at a time";
                Err(invalid_device(leaving.device, allowed))
            }
        }
    }

    /// Has nothing new put on these extents; the next superblock has this record of their device.
    fn begin_to_leave(
        &mut self,
        leaving: Leaving,
        record: DeviceRecord,
    ) -> Result<(), MapperError> {
        self.pool.free_space.lock().leave(leaving)?;
        self.pages.leave(Some(leaving));
        self.update_limits();
        if let Err(error) = self.replace_pages() {
            self.stay();
            return Err(error);
        }
        self.end_rebalance(RebalanceState::Displaced);
        let mut records = self.superblock.devices.as_slice().to_vec();
        records[leaving.device] = record;
        self.controls.devices = DeviceTable::new(&records);
        Ok(())
    }

    /// Everything may be used again.
    fn stay(&mut self) {
        self.pool.free_space.lock().stay();
        self.pages.leave(None);
        self.update_limits();
    }

    fn no_space(&self, needed: u64, free: u64) -> MapperError {
        let extent = self.pool.geometry.extent_size();
        MapperError::NoSpace { needed: needed * extent, free: free * extent }
    }

    /// The room that the rest has for what is in these extents.
    fn room_without(&self, leaving: Leaving) -> Room {
        let set_aside = self.set_aside(&self.pool.volumes.read());
        // What is kept or set aside has to be found elsewhere.
        let granted: u64 = {
            let volumes = self.pool.volumes.read();
            let free_to_go = volumes.values().filter(|volume| !volume.reserves());
            free_to_go.map(|volume| volume.reserved_of(|extent| leaving.holds(extent))).sum()
        };
        // Each holder of a shared leaf gets its own.
        let leaves = pages_of_leaves(self.new_leaves(|leaf| {
            let extents = |entry| self.pool.arena.entry(leaf, entry).extents();
            (0..LEAF_ENTRIES).flat_map(extents).any(|extent| leaving.holds(extent))
        }));
        let page_extents = leaves.div_ceil(self.pool.geometry.pages_per_extent());
        let space = self.pool.free_space.lock();
        let (used, free_there) = space.counts_of(leaving);
        let to_move = used.saturating_sub(superblocks(leaving) + granted);
        let needed = to_move.saturating_add(set_aside).saturating_add(page_extents);
        Room { needed, free: space.free_count() - free_there, granted }
    }

    /// Adds pages elsewhere until those that were promised can be written without leaving ones.
    fn replace_pages(&mut self) -> Result<(), MapperError> {
        if self.make_pages(0) {
            self.update_limits();
            return Ok(());
        }
        let needed = self.pages.free_on_leaving() * PAGE_BYTES;
        Err(MapperError::NoSpace { needed, free: 0 })
    }

    /// Adds pages until what was promised can be written, and this many slots more. Promises
    /// nothing to workers until the limits are updated.
    pub(super) fn make_pages(&mut self, slots: u64) -> bool {
        self.make_pages_beside(slots, 0)
    }

    /// The same, with a number of pages left over.
    pub(super) fn make_pages_beside(&mut self, slots: u64, beside: u64) -> bool {
        // As for a shrink: nothing is promised on the strength of pages that do not count any more.
        let pool = Arc::clone(&self.pool);
        let limits = &pool.pages.0;
        limits.limit.store(0, Ordering::SeqCst);
        limits.limit_freeing.store(0, Ordering::SeqCst);
        crate::sync::fence(Ordering::SeqCst);
        loop {
            let free = self.pages.free_pages().saturating_sub(beside);
            let limit = self.dirty_limit(free);
            // Without anything dirty a checkpoint has pages to write, too.
            let is_enough = free >= self.fixed_pages();
            if is_enough && limit >= self.dirty_or_promised().saturating_add(slots) {
                if !limits.strict.load(Ordering::Relaxed) {
                    limits.limit_freeing.store(limit, Ordering::SeqCst);
                }
                return true;
            }
            // Space set aside for thick volumes is theirs.
            if !self.has_more_than_set_aside() || !self.add_page_extent() {
                return false;
            }
        }
    }

    /// A device that is leaving stays in the pool, or one that shrinks keeps its size. One that has
    /// left or shrunk meanwhile is beyond that.
    pub(super) fn keep_device(&mut self, id: ControlId, device: u8) {
        let at = usize::from(device);
        let mut records = self.superblock.devices.as_slice().to_vec();
        if at >= records.len() {
            return self.end(id, Err(invalid_device(at, "the position of a device of the pool")));
        }
        let leaving = self.superblock.devices.leaving().map(|leaving| leaving.device);
        if leaving != Some(at) || self.evacuation.last.is_some() {
            return self.end_when_durable(id, Outcome::Unchanged);
        }
        (records[at].state, records[at].keeps) = (DeviceState::InUse, 0);
        self.controls.devices = DeviceTable::new(&records);
        self.begin_checkpoint_for(id, Outcome::Kept);
    }

    /// The superblock says that the device is leaving or shrinking, or that it stays.
    pub(super) fn follow_device_states(&mut self) {
        let leaving = self.superblock.devices.leaving();
        if self.evacuation.leaving == leaving {
            return;
        }
        self.pool.note_shrunk(None);
        let running = std::mem::take(&mut self.evacuation.running);
        let evacuation = Evacuation::new(self.evacuation.rate, leaving);
        let next_token = self.evacuation.next_token;
        self.evacuation = Evacuation { running, next_token, ..evacuation };
        if leaving.is_none() {
            self.stay();
            self.pool.bump();
        }
        self.pool.want_engine();
    }

    /// The time until which moves wait at the latest, if they wait for the time.
    #[cold]
    pub(super) fn evacuation_deadline(&self) -> Option<u64> {
        let evacuation = &self.evacuation;
        // Moves that have begun end, whatever is asked meanwhile.
        let retried = evacuation.running.iter().filter_map(Move::retried_at).min();
        if !self.has_to_move() || evacuation.rate == 0 || self.closing {
            return retried;
        }
        let paced =
            evacuation.walk.and_then(|_| evacuation.pace.deadline(self.now_ns, evacuation.rate));
        let again = evacuation.again_ns.filter(|_| evacuation.walk.is_none());
        [paced, again, retried].into_iter().flatten().min()
    }

    #[cold]
    pub(super) fn step_evacuation(&mut self) {
        if self.pool.read_only || !self.opened {
            return;
        }
        let (rate, least) = (self.evacuation.rate, self.pool.geometry.extent_size());
        self.evacuation.pace.refill(self.now_ns, rate, least);
        self.step_moves();
        if self.closing || !self.has_to_move() {
            self.evacuation.walk = None;
            return;
        }
        let Some(leaving) = self.evacuation.leaving else { return self.step_rebalance() };
        if let Some(finished) = self.evacuation.last {
            if self.checkpoint.finished > finished {
                self.forget_leaving();
            }
            return;
        }
        let is_time = self.evacuation.again_ns.is_some_and(|at| at <= self.now_ns);
        if is_time && self.evacuation.walk.is_none() && rate > 0 {
            self.return_grants();
            self.evacuation.begin_walk();
            let early =
                if leaving.is_whole() { Mutation::RemovedEarly } else { Mutation::ShrunkEarly };
            if active(early) {
                return self.remove_leaving(leaving);
            }
        }
        if self.evacuation.walk.is_some() {
            self.walk_leaving();
        }
    }

    /// A walk has ended: another one follows, unless nothing is left.
    fn end_walk(&mut self) {
        if self.rebalance.is_running() {
            return self.end_rebalance_walk();
        }
        let evacuation = &mut self.evacuation;
        evacuation.walk = None;
        evacuation.status.waits_for_space = evacuation.is_full;
        let Some(leaving) = evacuation.leaving else { return };
        if !self.checkpoint.is_running() {
            self.move_index_pages();
        }
        if self.evacuation.pages_moved {
            self.want_checkpoint();
        }
        let pool = Arc::clone(&self.pool);
        let mut space = pool.free_space.lock();
        if self.pages.leave_empty(&mut space) > 0 {
            met(Situation::PagesLeft);
        }
        let is_empty = space.used_leaving() <= superblocks(leaving);
        drop(space);
        if is_empty && self.evacuation.running.is_empty() {
            self.remove_leaving(leaving);
        } else {
            self.evacuation.again_ns = Some(self.later());
        }
    }

    /// Writes the superblock without the device, or with its new size.
    fn remove_leaving(&mut self, leaving: Leaving) {
        if !self.controls.is_free() || self.checkpoint.is_running() {
            self.evacuation.again_ns = Some(self.now_ns.saturating_add(DRAIN_POLL_NS));
            return;
        }
        let mut records = self.superblock.devices.as_slice().to_vec();
        let record = &mut records[leaving.device];
        record.extents = record.keeps;
        record.size = record.keeps * self.pool.geometry.extent_size();
        record.keeps = 0;
        record.state = if leaving.is_whole() { DeviceState::Removed } else { DeviceState::InUse };
        self.controls.devices = DeviceTable::new(&records);
        self.evacuation.last = Some(self.checkpoint.finished);
        self.want_checkpoint();
    }

    /// The superblock without the extents is durable.
    fn forget_leaving(&mut self) {
        let Some(leaving) = self.evacuation.leaving.take() else { return };
        self.pool.free_space.lock().forget_leaving();
        self.pages.leave(None);
        let rate = self.evacuation.rate;
        self.evacuation = Evacuation::new(rate, None);
        if !leaving.is_whole() {
            self.pool.note_shrunk(u8::try_from(leaving.device).ok());
        }
        met(if leaving.is_whole() { Situation::DeviceRemoved } else { Situation::DeviceShrunk });
        self.pool.bump();
    }

    fn return_grants(&mut self) {
        if let Some(leaving) = self.evacuation.leaving {
            self.replace_grants(|extent| leaving.holds(extent));
        }
    }

    /// Takes back the extents of a kind that volumes hold for writes to come; they get as many
    /// elsewhere.
    pub(super) fn replace_grants(&mut self, kind: impl Fn(PhysicalExtent) -> bool) {
        let pool = Arc::clone(&self.pool);
        let volumes: Vec<Arc<Volume>> = pool.volumes.read().values().cloned().collect();
        for volume in volumes {
            let mut taken = 0;
            volume.take_back_of(&kind, |first, count| {
                taken += count;
                pool.free_space.lock().free(first, count);
            });
            if taken > 0 {
                self.space.returned(taken);
                if volume.reserves() {
                    let volumes = pool.volumes.read();
                    self.grant_available(&volume, taken, &volumes);
                }
                met(Situation::GrantsMoved);
            }
        }
    }
}

fn invalid_device(device: usize, allowed: &'static str) -> MapperError {
    MapperError::Invalid { field: "device", value: device as u64, allowed }
}
