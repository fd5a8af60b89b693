//! A device that leaves the pool: everything on it is moved to other devices, in the background,
//! while volumes are used.
//!
//! The device table says that it is leaving, on the media too, so that a crash only delays it. From
//! then on nothing new is put on it. A walk over all volumes moves data (see [`moving`]) and has
//! the next checkpoint write metadata pages elsewhere, until nothing but the superblocks is on the
//! device. Then a superblock without it is written to the others. In all this the device stays a
//! part of the pool: only that last superblock ends it.
//!
//! Extents that a volume holds for writes to come go back; those that were taken for writes in
//! flight become entries, which a later walk finds. So walks are repeated until one finds nothing.

use std::sync::Arc;

use crate::error::MapperError;
use crate::format::superblock::{DeviceState, DeviceTable};
use crate::geometry::PAGE_BYTES;
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

use moving::Move;

/// A superblock area at either end is all that stays on a device.
const SUPERBLOCKS: u64 = 2;

/// Figures of the device that is leaving.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EvacuationStatus {
    /// Its place in the device table; `None` where no device is leaving.
    pub device: Option<u8>,
    /// Bytes in use on it.
    pub left: u64,
    /// Bytes copied off it since the pool was opened, or since it began to leave.
    pub moved: u64,
    /// Extents moved in that time.
    pub extents: u64,
    /// Bytes a second that may be copied; 0: nothing is moved.
    pub rate: u64,
    /// Whether it waits for free space on the other devices.
    pub waits_for_space: bool,
    /// Copies that met an IO error in that time. Their extents stay, and are tried again.
    pub errors: u64,
}

/// The evacuation of a device.
#[derive(Debug, Default)]
pub(crate) struct Evacuation {
    /// The device that is leaving.
    device: Option<usize>,
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
    /// The walk found no space on the other devices, and begins no more moves.
    is_full: bool,
    /// How often the wait of moves for older IO is doubled.
    doublings: u32,
    /// The superblock without the device is on its way: it is done with this many checkpoints.
    last: Option<u64>,
}

fn is_on(extent: PhysicalExtent, device: usize) -> bool {
    crate::pool::split(extent).0 == device
}

impl Evacuation {
    pub(crate) fn new(rate: u64, device: Option<usize>) -> Self {
        Self { rate, device, again_ns: device.map(|_| 0), ..Self::default() }
    }

    /// Whether nothing is under way, and nothing waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.device.is_none() && self.running.is_empty()
    }

    /// Whether an extent is being moved: no fold may change what is in it.
    pub(super) fn moves(&self, extent: PhysicalExtent) -> bool {
        self.running.iter().any(|one| one.concerns(extent))
    }

    /// Whether the superblock without the device is on its way.
    pub(super) const fn is_ending(&self) -> bool {
        self.last.is_some()
    }

    fn begin_walk(&mut self) {
        self.walk = Some((VolumeId(0), SlotIndex(0), 0));
        self.again_ns = None;
        self.pages_moved = false;
        self.is_full = false;
    }

    /// Begins no more moves in this walk, as the other devices have no space.
    const fn wait_for_space(&mut self) {
        self.is_full = true;
        self.status.waits_for_space = true;
    }

    /// Whether an extent lies on the leaving device.
    fn is_leaving(&self, extent: PhysicalExtent) -> bool {
        self.device.is_some_and(|device| is_on(extent, device))
    }
}

impl Engine {
    /// Figures of the device that is leaving.
    #[must_use]
    pub fn evacuation_status(&self) -> EvacuationStatus {
        let evacuation = &self.evacuation;
        let used = |device| self.pool.free_space.lock().used_on(device);
        let left = evacuation.device.map_or(0, used).saturating_sub(SUPERBLOCKS);
        EvacuationStatus {
            device: evacuation.device.and_then(|at| u8::try_from(at).ok()),
            left: left * self.pool.geometry.extent_size(),
            rate: evacuation.rate,
            ..evacuation.status
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
        let table = self.superblock.devices;
        let invalid =
            |allowed| MapperError::Invalid { field: "device", value: device as u64, allowed };
        let record = table.as_slice().get(device).copied();
        let Some(record) = record.filter(|record| record.is_present()) else {
            return Err(invalid("the position of one of the pool's devices"));
        };
        match table.leaving() {
            Some(leaving) if leaving == device => return Ok(false),
            Some(_) => return Err(invalid("the device that is leaving: one at a time")),
            None => {}
        }
        if device == 0 {
            return Err(invalid("another one than the first, which holds the log and the reserve"));
        }
        self.check_room_without(device)?;
        self.leave(Some(device));
        if let Err(error) = self.replace_pages(device) {
            self.leave(None);
            return Err(error);
        }
        let mut records = table.as_slice().to_vec();
        records[device].state = DeviceState::Leaving;
        debug_assert_eq!(record.state, DeviceState::InUse);
        self.controls.devices = DeviceTable::new(&records);
        Ok(true)
    }

    /// Refuses where the other devices have no room for what is on this one.
    fn check_room_without(&self, device: usize) -> Result<(), MapperError> {
        let set_aside = self.set_aside(&self.pool.volumes.read());
        // What is kept or set aside has to be found elsewhere.
        let granted: u64 = {
            let volumes = self.pool.volumes.read();
            let free_to_go = volumes.values().filter(|volume| !volume.reserves());
            free_to_go.map(|volume| volume.reserved_of(|extent| is_on(extent, device))).sum()
        };
        // Each holder of a shared leaf gets its own.
        let leaves = pages_of_leaves(self.new_leaves(|leaf| {
            let extents = |entry| self.pool.arena.entry(leaf, entry).extents();
            (0..LEAF_ENTRIES).flat_map(extents).any(|extent| is_on(extent, device))
        }));
        let page_extents = leaves.div_ceil(self.pool.geometry.pages_per_extent());
        let space = self.pool.free_space.lock();
        let on_it = space.used_on(device).saturating_sub(SUPERBLOCKS + granted);
        let free_on_it = space.devices[device].free_count();
        let free = space.free_count() - free_on_it;
        let needed = on_it.saturating_add(set_aside).saturating_add(page_extents);
        if needed <= free {
            return Ok(());
        }
        let extent = self.pool.geometry.extent_size();
        Err(MapperError::NoSpace { needed: needed * extent, free: free * extent })
    }

    /// Nothing is put on a device any more; with `None` everything may be used again.
    fn leave(&mut self, device: Option<usize>) {
        self.pool.free_space.lock().leaving = device;
        self.pages.leave(device);
        self.update_limits();
    }

    /// Adds pages elsewhere until those that were promised can be written without the device's.
    fn replace_pages(&mut self, device: usize) -> Result<(), MapperError> {
        if self.make_pages(0) {
            self.update_limits();
            return Ok(());
        }
        let needed = self.pages.free_on(device) * PAGE_BYTES;
        Err(MapperError::NoSpace { needed, free: 0 })
    }

    /// Adds pages until what was promised can be written, and this many slots more. Promises
    /// nothing to workers until the limits are updated.
    fn make_pages(&mut self, slots: u64) -> bool {
        // As for a shrink: nothing is promised on the strength of pages that do not count any more.
        let pool = Arc::clone(&self.pool);
        let limits = &pool.pages.0;
        limits.limit.store(0, Ordering::SeqCst);
        limits.limit_freeing.store(0, Ordering::SeqCst);
        crate::sync::fence(Ordering::SeqCst);
        loop {
            let limit = self.dirty_limit(self.pages.free_pages());
            if limit >= self.dirty_or_promised().saturating_add(slots) {
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

    /// A device that is leaving stays in the pool.
    pub(super) fn keep_device(&mut self, id: ControlId, device: u8) {
        let at = usize::from(device);
        if self.superblock.devices.leaving() != Some(at) || self.evacuation.last.is_some() {
            let error = MapperError::Invalid {
                field: "device",
                value: u64::from(device),
                allowed: "the position of the device that is leaving",
            };
            return self.end(id, Err(error));
        }
        let mut records = self.superblock.devices.as_slice().to_vec();
        records[at].state = DeviceState::InUse;
        self.controls.devices = DeviceTable::new(&records);
        self.begin_checkpoint_for(id, Outcome::Kept);
    }

    /// The superblock says that the device is leaving, or that it stays.
    pub(super) fn follow_device_states(&mut self) {
        let leaving = self.superblock.devices.leaving();
        if self.evacuation.device == leaving {
            return;
        }
        let running = std::mem::take(&mut self.evacuation.running);
        let evacuation = Evacuation::new(self.evacuation.rate, leaving);
        let next_token = self.evacuation.next_token;
        self.evacuation = Evacuation { running, next_token, ..evacuation };
        if leaving.is_none() {
            self.leave(None);
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
        if evacuation.device.is_none() || evacuation.rate == 0 || self.closing {
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
        if self.evacuation.device.is_none() || self.closing {
            self.evacuation.walk = None;
            return;
        }
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
            if let Some(device) = self.evacuation.device.filter(|_| active(Mutation::RemovedEarly))
            {
                return self.remove_leaving(device);
            }
        }
        if self.evacuation.walk.is_some() {
            self.walk_leaving();
        }
    }

    /// A walk has ended: another one follows, unless nothing is left.
    fn end_walk(&mut self) {
        let evacuation = &mut self.evacuation;
        evacuation.walk = None;
        evacuation.status.waits_for_space = evacuation.is_full;
        let Some(device) = evacuation.device else { return };
        if !self.checkpoint.is_running() {
            self.move_index_pages(device);
        }
        if self.evacuation.pages_moved {
            self.want_checkpoint();
        }
        let pool = Arc::clone(&self.pool);
        let mut space = pool.free_space.lock();
        if self.pages.leave_empty(&mut space) > 0 {
            met(Situation::PagesLeft);
        }
        let is_empty = space.used_on(device) <= SUPERBLOCKS;
        drop(space);
        if is_empty && self.evacuation.running.is_empty() && self.releases.is_idle() {
            self.remove_leaving(device);
        } else {
            self.evacuation.again_ns = Some(self.later());
        }
    }

    /// Writes the superblock without the device.
    fn remove_leaving(&mut self, device: usize) {
        if !self.controls.is_free() || self.checkpoint.is_running() {
            self.evacuation.again_ns = Some(self.now_ns.saturating_add(DRAIN_POLL_NS));
            return;
        }
        let mut records = self.superblock.devices.as_slice().to_vec();
        let record = &mut records[device];
        record.state = DeviceState::Removed;
        (record.size, record.extents) = (0, 0);
        self.controls.devices = DeviceTable::new(&records);
        self.evacuation.last = Some(self.checkpoint.finished);
        self.want_checkpoint();
    }

    /// The superblock without the device is durable.
    fn forget_leaving(&mut self) {
        let Some(device) = self.evacuation.device.take() else { return };
        let mut space = self.pool.free_space.lock();
        space.leaving = None;
        if let Some(one) = space.devices.get_mut(device) {
            *one = crate::allocator::Allocator::new();
        }
        drop(space);
        self.pages.leave(None);
        let rate = self.evacuation.rate;
        self.evacuation = Evacuation::new(rate, None);
        met(Situation::DeviceRemoved);
        self.pool.bump();
    }

    /// Takes back what volumes hold on the device for writes to come; they get as much elsewhere.
    fn return_grants(&mut self) {
        let Some(device) = self.evacuation.device else { return };
        let pool = Arc::clone(&self.pool);
        let volumes: Vec<Arc<Volume>> = pool.volumes.read().values().cloned().collect();
        for volume in volumes {
            let mut taken = 0;
            volume.take_back_of(
                |extent| is_on(extent, device),
                |first, count| {
                    taken += count;
                    pool.free_space.lock().free(first, count);
                },
            );
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
