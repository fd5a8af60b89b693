//! The state of an open pool that workers and the engine share.

mod composites;
mod free_space;
mod tuning;

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::arena::Arena;
use crate::error::MapperError;
use crate::format::placement::DeviceMark;
use crate::format::record::Change;
use crate::geometry::{Geometry, MAX_DEVICES};
use crate::io_epoch::IoEpochs;
use crate::mutation::{Mutation, active};
use crate::mutation_gate::MutationGate;
use crate::plan::CommitTicket;
use crate::read_cache::{CacheStatus, ReadCache};
use crate::ring::{DeltaRing, Dropped};
use crate::shared_counts::SharedCounts;
use crate::stripe::{MAX_IN_FLIGHT, STRIPES, Stripe, stripe_index};
use crate::sync::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, CachePadded, Ordering};
use crate::units::{DeviceIndex, LeafId, Lsn, PhysicalExtent, SlotIndex, VolumeId};
use crate::volume::Volume;
use crate::volumes::Volumes;

pub(crate) use composites::Composites;
pub(crate) use free_space::FreeSpace;
pub use free_space::split;
pub use tuning::{Space, Tuning};

/// Limit of workers of a pool: each has a bit in a word of waiters, and the engine has the last
/// one.
pub const MAX_WORKERS: usize = 63;

/// A number that is no position of a device.
pub(crate) const NO_DEVICE: u8 = u8::MAX;

/// Units of the ring that a change of an entry may take, also in pools whose entries are plain: a
/// change that is in flight while they stop being so finds its room.
pub(crate) const CHANGE_UNITS: u64 = 2;

/// Shared by the engine and all workers of one open pool.
#[derive(Debug)]
pub struct Pool {
    pub(crate) pool_id: [u8; 16],
    pub(crate) geometry: Geometry,
    pub(crate) tuning: Tuning,
    /// The caller's index of each device of the table.
    pub(crate) handles: [AtomicU8; MAX_DEVICES],
    /// The mark of each device of the table.
    pub(crate) marks: [AtomicU32; MAX_DEVICES],
    /// The same of devices whose place another one has taken since the pool was opened.
    pub(crate) former: Mutex<Vec<u8>>,
    pub(crate) arena: Arena,
    /// Per device of the table.
    pub(crate) counts: Box<[SharedCounts]>,
    /// Blocks that several volumes share.
    pub(crate) read_cache: ReadCache,
    pub(crate) stripes: Box<[Mutex<Stripe>]>,
    pub(crate) gate: MutationGate,
    pub(crate) epochs: IoEpochs,
    pub(crate) ring: DeltaRing,
    pub(crate) volumes: RwLock<Volumes>,
    pub(crate) free_space: Mutex<FreeSpace>,
    pub(crate) workers: Mutex<u64>,
    pub(crate) progress: CachePadded<Progress>,
    /// Completed writes by worker and device; each is written by its worker alone.
    pub(crate) written: Box<[CachePadded<[AtomicU64; MAX_DEVICES]>]>,
    /// The number of these that the last good flush of the device covered.
    pub(crate) flushed: CachePadded<[AtomicU64; MAX_DEVICES]>,
    /// Devices that workers are flushing, a bit each.
    flushing: CachePadded<AtomicU32>,
    /// Whether a request waits for one of these flushes to end.
    flush_awaited: AtomicBool,
    pub(crate) wake: CachePadded<Wake>,
    pub(crate) pages: CachePadded<PagePromises>,
    pub(crate) leaf_drops: Mutex<Vec<LeafDrop>>,
    /// Extents that were written to, or may have been, and that no map has shown: to be passed down
    /// to the media before they are free.
    pub(crate) unshown: Mutex<Vec<PhysicalExtent>>,
    /// Volumes with dirty slots, each of them once: a checkpoint looks at no others. Those that are
    /// gone may be among them.
    pub(crate) changed: Mutex<Vec<VolumeId>>,
    /// Copies of leaves that changed before a running checkpoint wrote them.
    pub(crate) shadows: Mutex<Vec<(LeafId, LeafId)>>,
    pub(crate) read_only: bool,
    /// Whether entries may be composite: a value of [`Composites`].
    composites: AtomicU8,
    /// A composite entry may have become one that is to be folded.
    pub(crate) fold_wanted: AtomicBool,
    /// Whether taking an extent needs an allowance.
    pub(crate) slows_down: AtomicBool,
    /// The last device that has shrunk, or [`NO_DEVICE`].
    pub(crate) shrunk: AtomicU8,
    /// Whether a rebalance has ended, and the caller has not asked since.
    pub(crate) rebalanced: AtomicBool,
    /// The last place in the order of volumes that wait for space.
    pub(crate) waiting_order: AtomicU64,
    /// Volumes that have asked for extents since the engine last looked, some of them twice.
    pub(crate) asking: Mutex<Vec<Arc<Volume>>>,
    /// Most extents granted at a time.
    pub(crate) quantum: AtomicU64,
    /// Times that extents were granted to a volume.
    pub(crate) grants: AtomicU64,
    /// Whether requests are served: then clients learn of a failure by errors.
    pub(crate) serving: AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<MapperError>>,
}

/// How far commits have come.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Everything up to this LSN survives power loss.
    pub(crate) durable: AtomicU64,
    /// Commits captured.
    pub(crate) captured: AtomicU64,
    /// Commits finished.
    pub(crate) finished: AtomicU64,
}

/// Wake-up state of workers and the engine.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    /// Rises whenever a parked request may now succeed.
    pub(crate) events: AtomicU64,
    /// Bit per worker that parked something.
    pub(crate) parked: AtomicU64,
    /// Bit per worker that should try again.
    pub(crate) wakeups: AtomicU64,
    /// The engine has something to do.
    pub(crate) engine: AtomicBool,
    /// The engine knows that there are changes to commit.
    pub(crate) dirty_noted: AtomicBool,
    /// A flush waits for a commit, or a ring is half full.
    pub(crate) commit: AtomicBool,
    /// A worker waits for leaves.
    pub(crate) leaves: AtomicBool,
    /// A change that dropped the last reference to something was published since the last commit's
    /// cut.
    pub(crate) dropped: AtomicBool,
    /// The IO epoch that parked writes wait for; 0 for none.
    pub(crate) epoch: AtomicU64,
}

/// Pages promised to leaves that will be dirty, so that a checkpoint can always be written.
#[derive(Debug, Default)]
pub(crate) struct PagePromises {
    /// Slots dirty since the last checkpoint's cut.
    pub(crate) dirty: AtomicU64,
    /// Slow writes in flight that will dirty a clean slot.
    pub(crate) promised: AtomicI64,
    /// Most dirty slots while writes that allocate are let in.
    pub(crate) limit: AtomicU64,
    /// Most dirty slots while changes that free space are let in: uses the reserve too.
    pub(crate) limit_freeing: AtomicU64,
    /// A checkpoint waits for slow writes in flight on dirty slots, which have no promise and
    /// would dirty their slots once more: no more of them are let in.
    pub(crate) strict: AtomicBool,
    /// Whether a change parked for lack of a page since the last checkpoint began.
    pub(crate) wanted: AtomicBool,
}

/// A reference to a leaf that a directory no longer holds, and not yet dropped (R10).
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafDrop {
    pub(crate) leaf: LeafId,
    pub(crate) stripe: usize,
    /// IO epoch at the time.
    pub(crate) tag: u64,
}

impl Pool {
    /// Extent and sub-block size.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The pool's UUID.
    #[must_use]
    pub const fn id(&self) -> [u8; 16] {
        self.pool_id
    }

    /// Everything up to this LSN survives power loss.
    #[must_use]
    pub fn durable_lsn(&self) -> Lsn {
        Lsn(self.progress.0.durable.load(Ordering::SeqCst))
    }

    /// Changes whenever a parked request may now succeed. Read it *before* the request is tried:
    /// if it differs after [`crate::plan::Step::Park`], try again at once.
    #[must_use]
    #[inline]
    pub fn events(&self) -> u64 {
        self.wake.0.events.load(Ordering::SeqCst)
    }

    /// Workers (a bit each) that parked a request which may now succeed. Each is reported once;
    /// the caller wakes their threads. To be asked after every call of `complete` and `poll`.
    #[must_use]
    #[inline]
    pub fn take_wakeups(&self) -> u64 {
        if self.wake.0.wakeups.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.wake.0.wakeups.swap(0, Ordering::AcqRel)
    }

    /// Whether the engine has something to do; asking clears it.
    #[must_use]
    #[inline]
    pub fn engine_wanted(&self) -> bool {
        self.wake.0.engine.load(Ordering::Relaxed)
            && self.wake.0.engine.swap(false, Ordering::AcqRel)
    }

    /// The result of the commit a flush waits for; `None` while it is on its way.
    #[must_use]
    pub fn commit_state(&self, ticket: &CommitTicket) -> Option<Result<(), MapperError>> {
        let progress = &self.progress.0;
        let finished = progress.finished.load(Ordering::SeqCst) > ticket.sequence;
        let early = active(Mutation::AnswerBeforeLog)
            && progress.captured.load(Ordering::SeqCst) > ticket.sequence;
        if early || (finished && progress.durable.load(Ordering::SeqCst) >= ticket.lsn) {
            return Some(Ok(()));
        }
        self.failure().map(Err)
    }

    /// Commits finished so far: when it rises, a flush that waits may have its result.
    #[must_use]
    pub fn commits_finished(&self) -> u64 {
        self.progress.0.finished.load(Ordering::SeqCst)
    }

    /// Whether it was opened to look only.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Why the pool has stopped, if it has (R8).
    #[must_use]
    pub fn failure(&self) -> Option<MapperError> {
        if self.failed.load(Ordering::SeqCst) { self.failure.lock().clone() } else { None }
    }

    /// Leaves the arena could still give out, in leaves; for metrics.
    #[must_use]
    pub fn spare_leaves(&self) -> u32 {
        self.arena.free_count()
    }

    /// Whether the pool has failed or is closing.
    pub(crate) fn has_stopped(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check_alive(&self) -> Result<(), MapperError> {
        if !self.failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(self.failure().unwrap_or(MapperError::Closed))
    }

    /// Stops the pool for good. The ring is poisoned first: after a failed flush the device may
    /// have lost data that the ring calls valid (R8). While the pool is being opened, only a failed
    /// flush does that, and no client has received an error.
    pub(crate) fn fail(&self, error: MapperError) {
        let flush = matches!(error, MapperError::Io { operation: "flush", .. });
        match self.serving.load(Ordering::SeqCst) {
            _ if active(Mutation::RingAfterFailure) => {}
            true => self.ring.poison(),
            false if flush => self.ring.poison_unreported(),
            false => {}
        }
        // A pool that is closing has stopped already, but its close must not succeed now.
        if let Some(closed @ MapperError::Closed) = &mut *self.failure.lock() {
            *closed = error.clone();
        }
        self.stop(error);
    }

    /// Stops the pool for good on behalf of its caller, who found its devices changed by another
    /// program. The ring stays valid: no flush has failed, and all that was answered is in it.
    pub fn halt(&self, error: MapperError) {
        self.stop(error);
    }

    /// Stops the pool, whose claim was lost to another open: the caller submits no more writes. The
    /// ring's contents may still be needed, if that open ends before it writes.
    pub fn lose_claim(&self, node: u32) {
        self.stop(MapperError::ClaimLost { node });
    }

    /// Stops the pool without a word about the ring: it has been closed.
    pub(crate) fn stop(&self, error: MapperError) {
        self.failure.lock().get_or_insert(error);
        self.failed.store(true, Ordering::SeqCst);
        self.bump();
    }

    /// Wakes all workers with parked requests to retry them.
    pub(crate) fn bump(&self) {
        self.wake.0.events.fetch_add(1, Ordering::SeqCst);
        let parked = self.wake.0.parked.swap(0, Ordering::SeqCst);
        if parked != 0 {
            self.wake.0.wakeups.fetch_or(parked, Ordering::AcqRel);
        }
    }

    /// Gives a waiting volume its place in the queue, if it has none yet. Returns whether it had
    /// none.
    pub(crate) fn queue_up(&self, place: &AtomicU64) -> bool {
        if place.load(Ordering::Acquire) > 0 {
            return false;
        }
        let last = self.waiting_order.fetch_add(1, Ordering::AcqRel) + 1;
        // Another worker may have been first: either place is fine.
        place.compare_exchange(0, last, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Adds a volume to those that the engine looks at when it grants extents, after one of them
    /// was found missing or low for the first time since it did.
    pub(crate) fn ask_for_space(&self, volume: &Arc<Volume>) {
        self.asking.lock().push(Arc::clone(volume));
    }

    /// Makes the engine check the waiting volumes once more, after
    /// [`crate::worker::Attachment::ask_again`] was called.
    pub fn look_again(&self) {
        self.want_engine();
    }

    pub(crate) fn want_engine(&self) {
        // Always written: a look first could miss that the engine is just taking the flag away.
        self.wake.0.engine.store(true, Ordering::SeqCst);
    }

    /// Makes the engine advance the IO epoch up to this one. Each advance is an event. Where it is
    /// awaited already, the engine polls by a timer.
    pub(crate) fn await_epoch(&self, epoch: u64) {
        if self.wake.0.epoch.fetch_max(epoch, Ordering::SeqCst) < epoch {
            self.want_engine();
        }
    }

    /// Makes the engine look for composite entries that are to be folded.
    pub(crate) fn want_folds(&self) {
        self.fold_wanted.store(true, Ordering::Release);
        self.want_engine();
    }

    pub(crate) fn want_commit(&self) {
        self.wake.0.commit.store(true, Ordering::SeqCst);
        self.want_engine();
    }

    /// The position in the device table of the device that the caller knows by this index; `None`
    /// where that is not of the pool, or not any more.
    #[must_use]
    pub fn position_of(&self, handle: u8) -> Option<u8> {
        let space = self.free_space.lock();
        let known = self.handles.iter().take(space.device_count()).enumerate();
        // A removed device has no extent.
        let mut present =
            known.map(|(at, one)| (space.count_on(at) > 0).then(|| one.load(Ordering::Relaxed)));
        u8::try_from(present.position(|one| one == Some(handle))?).ok()
    }

    /// Bytes of extents that can be given out on the device that the caller knows by this index.
    #[must_use]
    pub fn free_on(&self, handle: u8) -> u64 {
        let Some(place) = self.position_of(handle) else { return 0 };
        let free = self.free_space.lock().free_by_device().nth(usize::from(place));
        free.unwrap_or(0) * self.geometry.extent_size()
    }

    /// The mark of the device at a place of the device table, by which a volume is pinned to it;
    /// `None` where there is none.
    #[must_use]
    pub fn mark_at(&self, place: u8) -> Option<DeviceMark> {
        let is_present = self.free_space.lock().count_on(usize::from(place)) > 0;
        let mark = self.marks.get(usize::from(place)).filter(|_| is_present)?;
        Some(DeviceMark(mark.load(Ordering::Relaxed)))
    }

    /// Whether a device that the caller knows by this index is, or was, of the pool since it was
    /// opened.
    #[must_use]
    pub fn has_known(&self, handle: u8) -> bool {
        let devices = self.free_space.lock().device_count();
        self.handles.iter().take(devices).any(|one| one.load(Ordering::Relaxed) == handle)
            || self.former.lock().contains(&handle)
    }

    /// The caller's index of a physical extent's device, and the extent's first byte on it.
    pub(crate) fn place(&self, extent: PhysicalExtent) -> (DeviceIndex, u64) {
        let (device, local) = split(extent);
        let handle = self.handles[device % MAX_DEVICES].load(Ordering::Relaxed);
        (DeviceIndex(handle), local.0 * self.geometry.extent_size())
    }

    /// References of an extent beyond the first.
    pub(crate) fn extra(&self, extent: PhysicalExtent) -> u32 {
        let (device, local) = split(extent);
        self.counts.get(device).map_or(0, |counts| counts.extra(local))
    }

    /// The same; `None` for an extent that never had more than one.
    #[inline]
    pub(crate) fn known_extra(&self, extent: PhysicalExtent) -> Option<u32> {
        let (device, local) = split(extent);
        self.counts.get(device)?.known(local)
    }

    pub(crate) fn counts_of(
        &self,
        extent: PhysicalExtent,
    ) -> Option<(&SharedCounts, PhysicalExtent)> {
        let (device, local) = split(extent);
        Some((self.counts.get(device)?, local))
    }

    /// Whether reads are to be planned by [`read_cached`](crate::worker::Worker::read_cached).
    #[must_use]
    #[inline]
    pub fn caches_reads(&self) -> bool {
        self.read_cache.is_on()
    }

    /// Lets the cache of shared blocks hold up to this many bytes from now on; with 0 it is off.
    /// What it holds is dropped.
    pub fn set_read_cache(&self, limit: u64) {
        if self.read_cache.set_limit(limit) {
            self.bump();
        }
    }

    /// Figures of the cache of shared blocks.
    #[must_use]
    pub fn read_cache_status(&self) -> CacheStatus {
        self.read_cache.status()
    }

    /// Drops what the cache has of an extent that is about to change, or to be free.
    #[inline]
    pub(crate) fn drop_cached(&self, extent: PhysicalExtent) {
        if self.read_cache.drop_pages(extent) {
            self.bump();
        }
    }

    /// Keeps an extent out of the cache, before a reference is added to it under writes in flight
    /// (C4).
    pub(crate) fn hold_uncached(&self, extent: PhysicalExtent) {
        if self.read_cache.hold(extent) {
            self.bump();
        }
    }

    pub(crate) fn stripe(&self, lineage: VolumeId, slot: SlotIndex) -> &Mutex<Stripe> {
        &self.stripes[stripe_index(lineage, slot)]
    }

    pub(crate) fn new_stripes(room: usize) -> Box<[Mutex<Stripe>]> {
        (0..STRIPES).map(|_| Mutex::new(Stripe::new(room))).collect()
    }

    /// Puts a change into the ring. Its room was reserved; without, the pool must not go on.
    pub(crate) fn publish(&self, slot: usize, lsn: Lsn, change: &Change, dropped: Dropped) {
        if self.ring.publish(slot, lsn, change, dropped).is_none() {
            self.fail(MapperError::Internal("a change without room in the delta ring"));
        }
        // After the change itself: the commit that clears the mark captures it. The engine looks
        // once more for each commit, as a volume may wait for what becomes free.
        if self.may_free(dropped) && !self.wake.0.dropped.swap(true, Ordering::SeqCst) {
            self.want_engine();
        }
    }

    /// Whether something becomes free with this reference, as far as that can be seen.
    fn may_free(&self, dropped: Dropped) -> bool {
        match dropped {
            Dropped::Nothing => false,
            Dropped::Extent(physical) => self.extra(physical) == 0,
            Dropped::Leaf(leaf) => self.arena.meta(leaf).references.load(Ordering::Relaxed) <= 1,
        }
    }

    /// Whether space was dropped that no commit has captured yet: it is on its way to being free.
    #[must_use]
    pub fn has_dropped_space(&self) -> bool {
        self.wake.0.dropped.load(Ordering::SeqCst)
    }

    /// Completed writes of a device over all workers.
    pub(crate) fn written_on(&self, device: usize) -> u64 {
        self.written.iter().map(|w| w.0[device].load(Ordering::SeqCst)).sum()
    }

    /// Notes that a flush of a device has covered this many completed writes.
    pub(crate) fn note_flushed(&self, device: usize, covered: u64) {
        self.flushed.0[device].fetch_max(covered, Ordering::SeqCst);
    }

    /// Begins to flush devices (a bit each) for a worker. `false`: one of them is being flushed,
    /// and the end of that is an event.
    pub(crate) fn begin_flush(&self, devices: u32) -> bool {
        let free = |running: u32| (running & devices == 0).then_some(running | devices);
        let begin = || self.flushing.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free);
        if begin().is_ok() {
            return true;
        }
        self.flush_awaited.store(true, Ordering::SeqCst);
        // It may have ended before that was set.
        begin().is_ok()
    }

    /// A worker has flushed these devices, or tried to.
    pub(crate) fn end_flush(&self, devices: u32) {
        self.flushing.0.fetch_and(!devices, Ordering::SeqCst);
        if self.flush_awaited.swap(false, Ordering::SeqCst) {
            self.bump();
        }
    }

    /// Promises a page to a clean slot. `freeing` changes may use the reserve that is kept for
    /// them.
    pub(crate) fn promise_page(&self, freeing: bool) -> bool {
        let pages = &self.pages.0;
        let limit = if freeing { &pages.limit_freeing } else { &pages.limit };
        let promised = pages.promised.load(Ordering::Relaxed).max(0).unsigned_abs();
        let used = pages.dirty.load(Ordering::Relaxed) + promised;
        if used >= limit.load(Ordering::Relaxed) {
            pages.wanted.store(true, Ordering::Relaxed);
            return false;
        }
        pages.promised.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Counts a slot of a volume that was clean until now. Inside the mutation gate, which no cut
    /// of a checkpoint passes.
    pub(crate) fn note_dirty(&self, volume: &Volume) {
        self.pages.0.dirty.fetch_add(1, Ordering::Relaxed);
        if !volume.changed.swap(true, Ordering::AcqRel) {
            self.changed.lock().push(volume.identity.id);
        }
    }

    pub(crate) fn return_page(&self) {
        self.pages.0.promised.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn volume(&self, id: VolumeId) -> Result<Arc<Volume>, MapperError> {
        let found = self.volumes.read().get(&id).cloned();
        found.ok_or_else(|| MapperError::NoVolume(id.to_string()))
    }

    pub(crate) fn assemble(parts: PoolParts) -> Self {
        let PoolParts {
            pool_id,
            geometry,
            tuning,
            handles,
            arena,
            ring,
            next_lsn,
            read_only,
            composite,
        } = parts;
        let slots = tuning.workers + 1;
        Self {
            pool_id,
            geometry,
            handles: handles.map(AtomicU8::new),
            marks: std::array::from_fn(|_| AtomicU32::new(0)),
            former: Mutex::default(),
            arena,
            counts: (0..MAX_DEVICES).map(|_| SharedCounts::default()).collect(),
            read_cache: ReadCache::new(geometry, tuning.read_cache),
            stripes: Self::new_stripes(if tuning.sparing { 0 } else { MAX_IN_FLIGHT }),
            gate: MutationGate::new(slots, next_lsn),
            epochs: IoEpochs::new(slots),
            ring,
            volumes: RwLock::new(Volumes::default()),
            free_space: Mutex::new(FreeSpace::default()),
            workers: Mutex::new(0),
            progress: CachePadded::default(),
            written: (0..slots).map(|_| CachePadded::default()).collect(),
            flushed: CachePadded::default(),
            flushing: CachePadded::default(),
            flush_awaited: AtomicBool::new(false),
            wake: CachePadded::default(),
            pages: CachePadded::default(),
            leaf_drops: Mutex::new(Vec::with_capacity(1024)),
            unshown: Mutex::new(Vec::new()),
            changed: Mutex::new(Vec::with_capacity(1024)),
            shadows: Mutex::new(Vec::with_capacity(1024)),
            read_only,
            composites: Composites::at_open(composite),
            fold_wanted: AtomicBool::new(composite),
            slows_down: AtomicBool::new(false),
            shrunk: AtomicU8::new(NO_DEVICE),
            rebalanced: AtomicBool::new(false),
            waiting_order: AtomicU64::new(0),
            asking: Mutex::new(Vec::with_capacity(64)),
            quantum: AtomicU64::new(tuning.quantum),
            grants: AtomicU64::new(0),
            serving: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            tuning,
        }
    }
}

/// The parameters of [`Pool::assemble`].
#[derive(Debug)]
pub(crate) struct PoolParts {
    pub(crate) pool_id: [u8; 16],
    pub(crate) geometry: Geometry,
    pub(crate) tuning: Tuning,
    pub(crate) handles: [u8; MAX_DEVICES],
    pub(crate) arena: Arena,
    pub(crate) ring: DeltaRing,
    pub(crate) next_lsn: Lsn,
    pub(crate) read_only: bool,
    pub(crate) composite: bool,
}
