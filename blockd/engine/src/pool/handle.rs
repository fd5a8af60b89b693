//! The handle of an open pool, for other threads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use blockd_mapper::engine::{
    Accounting, Control, DiffPart, DiffRequest, EvacuationStatus, Figures, FoldStatus,
    LARGEST_DEVICE, Outcome, RebalanceStatus, Releasing, Use, UsedExtent, VolumeSummary,
};
use blockd_mapper::error::MapperError;
use blockd_mapper::pool::{Pool, Space};
use blockd_mapper::space::{Marks, SpaceChange, SpaceState};
use blockd_mapper::units::VolumeId;
use blockd_media::pool::{MAX_WORKERS, PoolError};
use blockd_media::{Device, Doorbell};
use futures_channel::{mpsc, oneshot};
use parking_lot::Mutex;

use super::below::Below;
use super::join::OpenDevices;
use super::keep::Keep;
use super::name::Name;
use crate::mailbox::{Mailbox, Undelivered};
use crate::schedule::{VolumeShare, Window};
use crate::stats::MediaStats;

/// Commands that may wait for a pool's thread: more come only from a client gone wild.
pub(super) const MAX_WAITING: usize = 1024;

/// Adjacent extents of one device with one use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentRun {
    /// Position in the list of devices.
    pub device: u8,
    /// First extent on the device.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The use of the extents; `None` if free.
    pub usage: Option<Use>,
}

/// Counters of a pool since it was opened: of its thread, but for flushes.
#[derive(Debug, Default)]
pub struct PoolStats {
    /// Commits finished.
    pub commits: AtomicU64,
    /// Flushes of devices, by the pool's thread and by workers.
    pub flushes: AtomicU64,
    /// Writes of metadata.
    pub writes: AtomicU64,
    /// Bytes of them.
    pub written_bytes: AtomicU64,
    /// Discards sent to the media.
    pub discards: AtomicU64,
    /// IO of the pool's thread that failed.
    pub io_errors: AtomicU64,
    /// Times the thread was woken.
    pub wakeups: AtomicU64,
    /// IO of metadata that waits for space below.
    pub waiting_for_space: AtomicU64,
}

/// State that a pool's thread and its users share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: Name,
    pub(super) extent_size: u64,
    pub(super) epoch: u64,
    /// Identity of this open, in each superblock that it writes.
    pub(super) open_id: u64,
    pub(super) pool: Arc<Pool>,
    /// Devices that the pool had when it was opened, then the spares, then those added later.
    pub(super) devices: OpenDevices,
    pub(super) members: usize,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) below: Below,
    /// By the mapper's slot of the worker.
    pub(super) workers: [OnceLock<Arc<Doorbell>>; MAX_WORKERS],
    /// Bit per worker with a request that waits for a commit.
    pub(super) committing: AtomicU64,
    pub(super) stats: PoolStats,
    /// The changes of space, until a receiver takes them.
    pub(super) space_changes: Mutex<Option<mpsc::Receiver<SpaceChange>>>,
    /// Of volumes that are served.
    pub(super) shares: Mutex<BTreeMap<VolumeId, Weak<VolumeShare>>>,
    /// The media queue, divided among them.
    pub(super) window: Arc<Window>,
    /// Statistics of the devices: those of the pool's thread, then those of each worker.
    pub(super) media: Mutex<Vec<Arc<MediaStats>>>,
    /// The closed pool was given up, so others may take it; or its discards take long, and it is
    /// given up when they have ended.
    pub(super) released: Released,
    /// The delta ring's file; none where the pool is only read. A pool that was closed in order
    /// has nothing in it.
    pub(super) ring_file: Option<PathBuf>,
}

/// Whether a pool's thread has given the pool up, and who waits for that.
#[derive(Debug, Default)]
pub(super) struct Released(Mutex<(bool, Vec<oneshot::Sender<()>>)>);

impl Released {
    pub(super) fn is_set(&self) -> bool {
        self.0.lock().0
    }

    pub(super) fn set(&self) {
        let mut released = self.0.lock();
        released.0 = true;
        for waiting in released.1.drain(..) {
            // A receiver that is gone waits no more.
            let _ = waiting.send(());
        }
    }

    pub(super) async fn wait(&self) {
        let receive = {
            let mut released = self.0.lock();
            if released.0 {
                return;
            }
            let (send, receive) = oneshot::channel();
            released.1.push(send);
            receive
        };
        // It fails only without a sender, and a released pool keeps none waiting.
        let _ = receive.await;
    }
}

/// A command to a pool's thread.
#[derive(Debug)]
pub(super) enum Ask {
    Control(Control, oneshot::Sender<Result<Outcome, PoolError>>),
    Space(oneshot::Sender<(Space, SpaceNow)>),
    Policy(Policy),
    Releasing(oneshot::Sender<Vec<Releasing>>),
    /// Figures of folds; with `true`, entries to be folded are looked for now.
    Folds(bool, oneshot::Sender<FoldStatus>),
    /// Figures of the device that is leaving; before, bytes a second that may be copied off it.
    Evacuation(Option<u64>, oneshot::Sender<EvacuationStatus>),
    /// Figures of the rebalance of the pool's devices.
    Rebalance(oneshot::Sender<RebalanceStatus>),
    Count(Box<Count>, oneshot::Sender<Count>),
    Metadata(oneshot::Sender<Vec<UsedExtent>>),
    Diff(DiffRequest, oneshot::Sender<Result<DiffPart, PoolError>>),
    /// Makes devices that were opened since then known to the thread's ring.
    TakeUp(oneshot::Sender<std::io::Result<()>>),
    /// Keeps up to this many extents for a volume.
    Keep(PoolHandle, VolumeId, u64, oneshot::Sender<Result<Keep, PoolError>>),
    /// Keeps this many extents less.
    ReleaseKept(VolumeId, u64),
    /// Ends the thread of a pool that has failed, once its IO has ended.
    Abandon,
}

/// A change of a pool's space policy, to which its thread sends no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Where its states begin.
    Marks(Option<Marks>),
    /// Bytes that a volume is granted at a time.
    Quantum(u64),
    /// Bytes a second that folds may copy; 0: nothing is folded.
    FoldRate(u64),
    /// Bytes free below it, where its devices don't have all of theirs.
    FreeBelow(Option<u64>),
    /// Other devices than before have no space below for a first write, by the last look.
    FullBelow,
    /// More space was added, this many nanoseconds after it was requested.
    Extended(u64),
}

/// How full a pool is, and how fast it fills.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpaceNow {
    /// Its state.
    pub state: SpaceState,
    /// Bytes a second that were lately written for the first time, or what is left of a peak.
    pub rate: u64,
    /// The average of the last ten seconds alone.
    pub average: u64,
    /// Seconds until it is full if it goes on like that; `None` while nothing is written.
    pub seconds_to_full: Option<u64>,
    /// Bytes below which it is low.
    pub low: u64,
    /// Bytes below which it is very low.
    pub very_low: u64,
    /// The time that is expected to pass until more space comes, in nanoseconds.
    pub horizon_ns: u64,
    /// Bytes that can be granted to a volume for which nothing is set aside.
    pub available: u64,
}

/// A count over some volumes, and its progress. The pool's thread advances it by a step and returns
/// it, so that no other command waits for the whole count.
#[derive(Debug)]
pub(super) struct Count {
    /// The sets that are counted together; the last first.
    pub(super) todo: Vec<Vec<VolumeId>>,
    /// The one that is being counted.
    pub(super) walk: Option<Accounting>,
    /// In the order that they were asked for.
    pub(super) done: Vec<Result<Figures, PoolError>>,
}

impl Count {
    pub(super) fn is_done(&self) -> bool {
        self.todo.is_empty() && self.walk.is_none()
    }
}

/// An open pool. Clones name the same one.
#[derive(Clone, Debug)]
pub struct PoolHandle {
    pub(super) shared: Arc<Shared>,
    pub(super) asks: Mailbox<Ask>,
}

impl PoolHandle {
    /// The pool's present name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.name.get()
    }

    /// Whether its name may change once more before it is closed.
    #[must_use]
    pub fn may_be_renamed(&self) -> bool {
        self.shared.name.may_change()
    }

    /// Changes its name, which is not on the media. Nothing else changes.
    pub fn rename(&self, name: &str) {
        self.shared.name.set(name);
    }

    /// The processors near its memory (P5); none where nothing is nearer than the rest.
    #[must_use]
    pub fn nearby(&self) -> Vec<usize> {
        self.shared.nearby()
    }

    /// Its identity.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.shared.pool.id()
    }

    /// Bytes of an extent.
    #[must_use]
    pub fn extent_size(&self) -> u64 {
        self.shared.extent_size
    }

    /// How many times it was opened, this time included.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// Identity of this open, in each superblock that it writes.
    pub(super) fn open_id(&self) -> u64 {
        self.shared.open_id
    }

    /// The mapper's side of it.
    #[must_use]
    pub fn mapper(&self) -> &Arc<Pool> {
        &self.shared.pool
    }

    /// Whether every write is as durable as a flush could make it when it is answered, so that
    /// there is nothing to flush.
    #[must_use]
    pub fn is_write_through(&self) -> bool {
        let through = |device: &Arc<Device>| {
            device.info().pmem.as_ref().is_some_and(|pmem| pmem.write_through)
        };
        self.shared.devices().all(through)
    }

    /// Whether it is in persistent memory.
    #[must_use]
    pub fn is_pmem(&self) -> bool {
        self.shared.devices().all(|device| device.pmem().is_some())
    }

    /// Whether what is freed is overwritten with zeroes before it is used again.
    #[must_use]
    pub fn erases(&self) -> bool {
        let erases = |device: &Arc<Device>| {
            device.info().pmem.as_ref().is_some_and(|pmem| pmem.options.erase)
        };
        self.shared.devices().all(erases)
    }

    /// Why it has stopped, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.shared.pool.failure().map(|error| error.to_string())
    }

    /// Whether it has features that this build must not write to.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.shared.pool.is_read_only()
    }

    /// Whether its writes wait, as its claim was not renewed in time.
    #[must_use]
    pub fn is_claim_late(&self) -> bool {
        let gate = self.shared.devices().find_map(|device| device.gate());
        let is_late = gate.is_some_and(|gate| !gate.is_open() && !gate.has_ended());
        is_late && !self.is_read_only()
    }

    /// Counters of the pool's thread.
    #[must_use]
    pub fn stats(&self) -> &PoolStats {
        &self.shared.stats
    }

    /// The smallest logical block that its volumes can have, in bytes.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.joined().map(|d| d.info().block_size).max().unwrap_or(512)
    }

    /// State that the workers that serve a volume share.
    #[must_use]
    pub fn share(&self, volume: VolumeId) -> Arc<VolumeShare> {
        let mut shares = self.shared.shares.lock();
        if let Some(share) = shares.get(&volume).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, one| one.strong_count() > 0);
        let share = Arc::default();
        shares.insert(volume, Arc::downgrade(&share));
        share
    }

    /// The pool's media queue, divided among its volumes.
    #[must_use]
    pub fn window(&self) -> &Arc<Window> {
        &self.shared.window
    }

    /// Adds a thread's statistics of the devices.
    pub fn add_media_stats(&self, stats: &Arc<MediaStats>) {
        self.shared.media.lock().push(Arc::clone(stats));
    }

    /// Statistics of the devices: those of the pool's thread, then those of each worker.
    #[must_use]
    pub fn media_stats(&self) -> Vec<Arc<MediaStats>> {
        self.shared.media.lock().clone()
    }

    /// Carries a command out; true when it is durable.
    pub async fn control(&self, control: Control) -> Result<Outcome, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Control(control, send))?;
        receive.await.unwrap_or(Err(PoolError::Gone))
    }

    /// Carries commands out, one after the other, and makes them durable together. Returns when
    /// each has ended, in their order.
    pub async fn control_all(&self, controls: Vec<Control>) -> Vec<Result<Outcome, PoolError>> {
        let ask = |control| {
            let (send, receive) = oneshot::channel();
            self.ask(Ask::Control(control, send)).map(|()| receive)
        };
        let asked: Vec<_> = controls.into_iter().map(ask).collect();
        let mut outcomes = Vec::with_capacity(asked.len());
        for answer in asked {
            outcomes.push(match answer {
                Ok(receive) => receive.await.unwrap_or(Err(PoolError::Gone)),
                Err(error) => Err(error),
            });
        }
        outcomes
    }

    /// All volumes and snapshots, with their exclusive space.
    pub async fn volumes(&self) -> Result<Vec<VolumeSummary>, PoolError> {
        self.counted(self.shared.pool.summaries()).await
    }

    /// The volume of that name.
    pub async fn volume(&self, name: &str) -> Result<Option<VolumeSummary>, PoolError> {
        let found = self.shared.pool.find(name).into_iter().collect();
        Ok(self.counted(found).await?.pop())
    }

    /// Volumes with their exclusive space. A volume without relatives shares nothing; the others
    /// are counted.
    async fn counted(&self, volumes: Vec<VolumeSummary>) -> Result<Vec<VolumeSummary>, PoolError> {
        let (mut infos, mut related) = (Vec::new(), Vec::new());
        for one in volumes {
            if self.shared.pool.has_relatives(one.lineage) {
                related.push(one);
            } else {
                infos.push(VolumeSummary { exclusive: Some(one.mapped), ..one });
            }
        }
        let sets = related.iter().map(|one| vec![one.id]).collect();
        for (one, figures) in related.into_iter().zip(self.figures(sets).await?) {
            // Volumes that are gone by now are left out.
            let Ok(figures) = figures else { continue };
            let exclusive = Some(figures.exclusive.min(one.mapped));
            infos.push(VolumeSummary { exclusive, ..one });
        }
        infos.sort_unstable_by_key(|one| one.id);
        Ok(infos)
    }

    /// The space that each of these sets of volumes takes, one answer for each set.
    pub async fn figures(
        &self,
        mut sets: Vec<Vec<VolumeId>>,
    ) -> Result<Vec<Result<Figures, PoolError>>, PoolError> {
        sets.reverse();
        let mut count = Count { todo: sets, walk: None, done: Vec::new() };
        // At least once, also for nothing: a closed pool then returns its error.
        loop {
            let (send, receive) = oneshot::channel();
            self.ask(Ask::Count(Box::new(count), send))?;
            count = receive.await.map_err(|_| PoolError::Gone)?;
            if count.is_done() {
                return Ok(count.done);
            }
        }
    }

    /// Volumes that are gone and whose extents are still being let go.
    pub async fn releasing(&self) -> Result<Vec<Releasing>, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Releasing(send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// Figures of composite entries and their folds. With `begin`, entries to be folded are looked
    /// for now. Settled means that no released extent may allow further folds, either.
    pub async fn folds(&self, begin: bool) -> Result<FoldStatus, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Folds(begin, send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// Figures of the device that is leaving the pool; before, bytes a second that may be copied
    /// off it.
    pub async fn evacuation(&self, rate: Option<u64>) -> Result<EvacuationStatus, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Evacuation(rate, send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// Figures of the present rebalance of the pool's devices, or of the last one since the pool
    /// was opened.
    pub async fn rebalance(&self) -> Result<RebalanceStatus, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Rebalance(send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// A part of what a volume holds beside another, in bounded time.
    pub async fn diff(&self, request: DiffRequest) -> Result<DiffPart, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Diff(request, send))?;
        receive.await.unwrap_or(Err(PoolError::Gone))
    }

    /// Space of the pool as its thread knows it, without what is below.
    pub async fn own_space(&self) -> Result<(Space, SpaceNow), PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Space(send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// Changes the space policy of the pool's thread.
    pub fn set_policy(&self, policy: Policy) -> Result<(), PoolError> {
        self.ask(Ask::Policy(policy))
    }

    /// Changes of the state of the pool's space, for the first caller.
    #[must_use]
    pub fn take_space_changes(&self) -> Option<mpsc::Receiver<SpaceChange>> {
        self.shared.space_changes.lock().take()
    }

    /// The extents that hold metadata, as the pool's thread knows them.
    pub async fn metadata_extents(&self) -> Result<Vec<UsedExtent>, PoolError> {
        let (send, receive) = oneshot::channel();
        self.ask(Ask::Metadata(send))?;
        receive.await.map_err(|_| PoolError::Gone)
    }

    /// The uses of all extents, in order, without gaps: those of `metadata` and of the volumes.
    /// Takes time with the size of the map.
    #[must_use]
    pub fn extents(&self, metadata: Vec<UsedExtent>) -> Vec<ExtentRun> {
        let mut used = self.shared.pool.volume_extents();
        used.extend(metadata);
        used.sort_unstable();
        super::members::runs(&used, &self.shared)
    }

    /// A device that is to be extended to `size` bytes, or by whatever it has become longer, and
    /// its position in the pool.
    ///
    /// # Errors
    /// If the pool has no such device, or it cannot have that size.
    pub fn growable(
        &self,
        device: usize,
        size: Option<u64>,
    ) -> Result<(Arc<Device>, u8), PoolError> {
        let wanted = size.unwrap_or(0);
        let invalid = |field, value, allowed| Err(MapperError::Invalid { field, value, allowed });
        let found = self.joined_at(device);
        let position = found.and_then(|(at, _)| self.shared.pool.position_of(at));
        let (Some((_, found)), Some(position)) = (found, position) else {
            let allowed = "the position of one of the pool's devices";
            return Ok(invalid("device", device as u64, allowed)?);
        };
        if size.is_some_and(|size| size < found.size()) {
            return Ok(invalid("size", wanted, "no smaller than the device is")?);
        }
        if wanted > self.shared.pool.largest_size() {
            return Ok(invalid("size", wanted, LARGEST_DEVICE)?);
        }
        Ok((Arc::clone(found), position))
    }

    pub(super) fn ask(&self, ask: Ask) -> Result<(), PoolError> {
        self.asks.send(ask).map_err(|error| match error {
            Undelivered::Full(_) => PoolError::Busy { limit: MAX_WAITING },
            Undelivered::Gone => PoolError::Gone,
        })?;
        self.shared.doorbell.ring();
        Ok(())
    }

    /// A worker's thread is woken with this doorbell from now on.
    pub fn add_worker(&self, slot: usize, doorbell: &Arc<Doorbell>) {
        if let Some(place) = self.shared.workers.get(slot) {
            let _ = place.set(Arc::clone(doorbell));
        }
    }

    /// To be called by a worker before it looks whether a commit has ended, so that it is woken
    /// when one has.
    pub fn await_commit(&self, slot: usize) {
        self.shared.committing.fetch_or(1 << slot, Ordering::SeqCst);
    }

    /// Wakes the threads that have work after a worker's calls to the mapper. Workers call it after
    /// such calls.
    #[inline]
    pub fn pass_on(&self) {
        if self.shared.pool.engine_wanted() {
            self.shared.doorbell.ring();
        }
        self.shared.wake_workers(self.shared.pool.take_wakeups());
    }
}

impl Shared {
    /// The processors near its memory, if it is in persistent memory and the kernel reports them.
    pub(super) fn nearby(&self) -> Vec<usize> {
        let pmem = self.devices().filter_map(|device| device.pmem());
        pmem.flat_map(|one| one.nearby()).collect()
    }

    pub(super) fn wake_workers(&self, mut slots: u64) {
        while slots != 0 {
            let slot = slots.trailing_zeros() as usize;
            slots &= slots - 1;
            if let Some(doorbell) = self.workers.get(slot).and_then(OnceLock::get) {
                doorbell.ring();
            }
        }
    }
}
