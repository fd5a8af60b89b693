//! Carries out the space policy: queues waiting volumes, throttles writers, and reports changes of
//! state.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::error::MapperError;
use crate::format::Problem;
use crate::pool::{Pool, split};
use crate::space::{
    Marks, Observed, Placement, SpaceChange, SpaceState, SpaceWatch, VolumeSettings,
};
use crate::sync::Ordering;
use crate::units::VolumeId;
use crate::volume::Volume;
use crate::volumes::Volumes;

use super::Engine;
use super::control::Outcome;

/// How often allowances are given out while a volume waits for one.
const TICK_NS: u64 = 20_000_000;
/// How long unused allowances are kept: a pause must not allow a burst.
const CREDIT_NS: u64 = 1_000_000_000;
/// However slow, a volume gets an extent each second.
const FLOOR_NS: u64 = 1_000_000_000;
/// Leaves for each index page, including upper levels: an index page has room for more.
const LEAVES_PER_INDEX: u64 = 64;
/// Pages for the catalogue and for rounding.
const PAGES_BESIDES: u64 = 4;
/// Limit of queued changes of state: more than a pool has in the time between two polls.
const MAX_CHANGES: usize = 64;

/// A volume that asks for extents, or can't go on without.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) volume: Arc<Volume>,
    /// Order in which volumes ran out of space; the highest value for those that did not.
    pub(super) order: u64,
}

impl Waiting {
    pub(super) fn of(volume: &Arc<Volume>) -> Option<Self> {
        let order = match volume.starves.load(Ordering::Acquire) {
            0 if !volume.wants_space.load(Ordering::Acquire) => return None,
            0 => u64::MAX,
            order => order,
        };
        Some(Self { volume: Arc::clone(volume), order })
    }

    /// Whether it waits still.
    pub(super) fn is_starving(&self) -> bool {
        self.volume.starves.load(Ordering::Acquire) > 0
    }
}

/// Extents that are set aside.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SetAside {
    /// Extents that volumes do not have yet.
    pub(super) extents: u64,
    /// Extents for the pages of their leaves.
    for_pages: u64,
}

impl SetAside {
    pub(super) const fn all(self) -> u64 {
        self.extents + self.for_pages
    }

    /// Of the free extents: those that a volume may get which lacks `own` of its own. It gets these
    /// before there are others for pages, which it may have from when it had mapped all of them.
    pub(super) fn available(self, free: u64, own: u64) -> u64 {
        let others = self.extents.saturating_sub(own);
        let rest = free.saturating_sub(others);
        rest.saturating_sub(self.for_pages).max(rest.min(own))
    }
}

/// A volume after a command that is still to be checked.
#[derive(Clone, Copy)]
pub(super) struct Planned {
    pub(super) id: VolumeId,
    pub(super) size: u64,
    /// Extents that it then has, if not those that it has now.
    pub(super) places: Option<u64>,
    /// Extents that the command frees.
    pub(super) freed: u64,
}

/// The engine's state of its pool's space over time.
#[derive(Debug)]
pub(crate) struct SpacePolicy {
    watch: SpaceWatch,
    /// Bytes free below the pool, where that is limited.
    free_below: Option<u64>,
    /// Extents granted less those taken back, since the last look.
    granted: u64,
    /// Whether a volume waits for an extent and none is on its way.
    stuck: bool,
    /// Whether extents granted to another volume may become available soon.
    comes_later: bool,
    looked_ns: u64,
    /// Whether the last observation is outdated.
    outdated: bool,
    /// Bytes that may be taken, and when that was counted.
    credit: u64,
    ticked_ns: u64,
    /// Allowances that the volume has had that has had least.
    served: u64,
    /// Since when allowances have been given out in whole rounds.
    floor_ns: u64,
    changes: VecDeque<SpaceChange>,
    pub(super) waiting: Vec<Waiting>,
    /// Volumes that have asked for extents and were not seen without need of any since.
    pub(super) asking: Vec<Arc<Volume>>,
    /// Volumes that space is set aside or kept for, and some that had such.
    reserving: BTreeSet<VolumeId>,
    /// Volumes that extents were ever granted to: no others can have any left of them. It has room
    /// for all volumes, so that a grant allocates nothing.
    holders: Vec<VolumeId>,
}

impl SpacePolicy {
    pub(super) fn new(marks: Option<Marks>) -> Self {
        Self {
            watch: SpaceWatch::new(marks, 0),
            free_below: None,
            granted: 0,
            stuck: false,
            comes_later: false,
            looked_ns: 0,
            outdated: false,
            credit: 0,
            ticked_ns: 0,
            served: 0,
            floor_ns: 0,
            changes: VecDeque::with_capacity(MAX_CHANGES),
            waiting: Vec::with_capacity(64),
            asking: Vec::with_capacity(64),
            reserving: BTreeSet::new(),
            holders: Vec::new(),
        }
    }

    /// Makes room for the grants of this many volumes.
    pub(super) fn expect_holders(&mut self, volumes: usize) {
        self.holders.reserve(volumes.saturating_sub(self.holders.len()));
    }

    /// Notes the first grant to a volume.
    pub(super) fn note_holder(&mut self, id: VolumeId) {
        self.holders.push(id);
    }

    pub(super) fn forget_holder(&mut self, id: VolumeId) {
        if let Some(at) = self.holders.iter().position(|one| *one == id) {
            self.holders.swap_remove(at);
        }
    }

    /// Volumes that may have extents that they have not used.
    pub(super) fn holders<'a>(
        &'a self,
        volumes: &'a Volumes,
    ) -> impl Iterator<Item = &'a Arc<Volume>> {
        self.holders.iter().filter_map(|id| volumes.get(id))
    }

    /// Notes all volumes that space is set aside for, when the pool is opened.
    pub(super) fn note_all_reserving(&mut self, volumes: &Volumes) {
        let reserving = volumes.iter().filter(|(_, volume)| volume.reserves());
        self.reserving = reserving.map(|(id, _)| *id).collect();
    }

    /// Notes that space is, or soon will be, set aside or kept for a volume.
    pub(super) fn note_reserving(&mut self, volumes: &Volumes, id: VolumeId) {
        let reserves = |id: &VolumeId| volumes.get(id).is_some_and(|volume| volume.reserves());
        self.reserving.retain(reserves);
        self.reserving.insert(id);
    }

    /// Takes over those that have asked since the last time, each of them once.
    pub(super) fn ask(&mut self, pool: &Pool) {
        let mut new = pool.asking.lock();
        if !new.is_empty() {
            self.asking.append(&mut new);
            self.asking.sort_unstable_by_key(|volume| volume.identity.id);
            self.asking.dedup_by_key(|volume| volume.identity.id);
        }
    }

    pub(super) fn granted(&mut self, extents: u64) {
        self.granted += extents;
    }

    /// Extents have come back without having been used.
    pub(super) fn returned(&mut self, extents: u64) {
        self.granted = self.granted.saturating_sub(extents);
    }
}

impl Engine {
    /// Where the pool's states begin from now on; `None`: nowhere.
    pub fn set_marks(&mut self, marks: Option<Marks>) {
        self.space.watch.set_marks(marks);
        self.look_at_space();
    }

    /// Sets the most extents that a volume is granted at a time from now on; at least 1.
    pub fn set_quantum(&mut self, extents: u64) {
        self.pool.quantum.store(extents.max(1), Ordering::Relaxed);
    }

    /// Sets the free bytes below the pool, if its devices are sparse. Less than an extent is none:
    /// a write of a whole one fails.
    pub fn set_free_below(&mut self, free: Option<u64>) {
        let extent = self.pool.geometry.extent_size();
        self.space.free_below = free.map(|bytes| bytes / extent * extent);
        self.look_at_space();
    }

    /// Sets the devices, by the caller's numbers, that have no space below for a first write: as
    /// long as others have extents, volumes get theirs.
    pub fn set_full_below(&mut self, handles: &[u8]) {
        let places = handles.iter().filter_map(|handle| self.pool.position_of(*handle));
        let full = places.fold(0, |full, place| full | 1_u32 << place);
        self.pool.free_space.lock().set_full_below(full);
        self.replace_grants(|extent| full >> split(extent).0 & 1 == 1);
    }

    /// At the next poll, however short a time ago that was done.
    fn look_at_space(&mut self) {
        self.space.outdated = true;
        self.pool.want_engine();
    }

    /// Records how long an extension took.
    pub fn note_extension(&mut self, took_ns: u64) {
        self.space.watch.extended(took_ns);
    }

    /// How full the pool is and how fast it fills. As long as it isn't normal, [`Self::poll`] is to
    /// be called once a second: it may become so by itself, and its state is reported again.
    #[must_use]
    pub const fn space_watch(&self) -> &SpaceWatch {
        &self.space.watch
    }

    /// The next change of the pool's state.
    pub fn take_space_change(&mut self) -> Option<SpaceChange> {
        self.space.changes.pop_front()
    }

    /// Changes the settings of a volume; they are durable with the next checkpoint.
    pub(super) fn configure(
        &mut self,
        id: VolumeId,
        settings: VolumeSettings,
    ) -> Result<Outcome, MapperError> {
        settings.check().map_err(|problem| match problem {
            Problem::Field { field, found, allowed } => {
                MapperError::Invalid { field, value: found, allowed }
            }
            _ => MapperError::Internal("settings are wrong in an unknown way"),
        })?;
        let volume = self.writable(id)?;
        let before = *volume.settings.lock();
        if before == settings {
            return Ok(Outcome::Unchanged);
        }
        let is_moved = settings.placement != before.placement;
        self.check_placement(settings.placement, is_moved)?;
        volume.set(settings, self.pool.geometry);
        let pool = Arc::clone(&self.pool);
        pool.volumes.write().recount(id);
        self.space.note_reserving(&pool.volumes.read(), id);
        if let Err(error) = self.check_set_aside(None) {
            volume.set(before, self.pool.geometry);
            pool.volumes.write().recount(id);
            return Err(error);
        }
        self.controls.has_settings = true;
        self.controls.has_placement |= settings.placement != Placement::default();
        self.mark_record(id);
        if is_moved {
            self.place_anew(&volume);
        }
        // Waiting writes may continue with another quota or policy.
        volume.out_of_space.store(false, Ordering::Release);
        self.pool.want_engine();
        self.pool.bump();
        Ok(Outcome::Configured { before })
    }

    /// Refuses to set more aside than there is, unused reserves of others included: as it would be
    /// after the planned change of a volume.
    pub(super) fn check_set_aside(&self, planned: Option<Planned>) -> Result<(), MapperError> {
        let pool = &self.pool;
        let volumes = pool.volumes.read();
        let after = |volume: &Volume| {
            let planned = planned.filter(|planned| planned.id == volume.identity.id);
            let size = planned.map_or_else(|| volume.size.load(Ordering::Acquire), |one| one.size);
            let places = planned.and_then(|one| one.places).unwrap_or_else(|| volume.places());
            (size, places, volume.set_aside_at(size, pool.geometry))
        };
        let unmet = self.reserving(&volumes).map(|volume| {
            let (size, places, set_aside) = after(volume);
            let unmet = set_aside.saturating_sub(places);
            (unmet, unmet + volume.kept(), size)
        });
        let needed = with_pages(pool, unmet).all();
        if needed == 0 {
            return Ok(());
        }
        // A reserve that the volume needs after the change is in its places already.
        let spare = |volume: &Arc<Volume>| {
            let (_, places, set_aside) = after(volume);
            volume.spare_with(places, set_aside)
        };
        let spare: u64 = self.space.holders(&volumes).map(spare).sum();
        let freed = planned.map_or(0, |planned| planned.freed);
        let free = pool.free_space.lock().free_count() + spare + freed;
        if needed > free {
            let extent = pool.geometry.extent_size();
            return Err(MapperError::NoSpace { needed: needed * extent, free: free * extent });
        }
        Ok(())
    }

    /// Extents that are to stay free for volumes that they are set aside for.
    pub(super) fn set_aside(&self, volumes: &Volumes) -> u64 {
        self.set_aside_parts(volumes).all()
    }

    /// The same in parts.
    pub(super) fn set_aside_parts(&self, volumes: &Volumes) -> SetAside {
        let size = |volume: &Volume| volume.size.load(Ordering::Acquire);
        let of = |volume: &Arc<Volume>| {
            let unmet = volume.unmet();
            (unmet, unmet + volume.kept(), size(volume))
        };
        with_pages(&self.pool, self.reserving(volumes).map(of))
    }

    /// Extents that have to be free in a pool of this many, so that it is not low.
    pub(super) fn low_mark(&self, total: u64) -> u64 {
        let extent = self.pool.geometry.extent_size();
        self.space.watch.low_at(total.saturating_mul(extent)).div_ceil(extent)
    }

    /// Volumes that space is set aside or kept for, and some others.
    fn reserving<'a>(&'a self, volumes: &'a Volumes) -> impl Iterator<Item = &'a Arc<Volume>> {
        let reserving = &self.space.reserving;
        debug_assert!(
            volumes.iter().all(|(id, volume)| reserving.contains(id) || !volume.reserves()),
            "a volume has space set aside that is not counted"
        );
        reserving.iter().filter_map(|id| volumes.get(id))
    }

    pub(super) fn space_deadline(&self) -> Option<u64> {
        let waits = self.space.comes_later || self.throttles_a_volume();
        waits.then(|| self.space.looked_ns.saturating_add(TICK_NS))
    }

    fn throttles_a_volume(&self) -> bool {
        self.pool.slows_down.load(Ordering::Relaxed)
            && self.pool.volumes.read().values().any(|v| v.slowed.load(Ordering::Acquire) > 0)
    }

    /// Observes the free space, and gives out allowances.
    pub(super) fn step_space(&mut self) {
        let policy = &self.space;
        let watch = &policy.watch;
        let is_full = watch.state() == SpaceState::Full;
        let is_news = policy.outdated || policy.granted > 0 || policy.stuck != is_full;
        if !is_news && self.now_ns.saturating_sub(policy.looked_ns) < TICK_NS {
            return;
        }
        let extent = self.pool.geometry.extent_size();
        let total = self.pool.free_space.lock().total_count() * extent;
        let free = self.available();
        let policy = &mut self.space;
        (policy.looked_ns, policy.outdated) = (self.now_ns, false);
        let watch = &mut policy.watch;
        watch.granted(std::mem::take(&mut policy.granted) * extent);
        let seen = Observed { total, free, stuck: policy.stuck };
        if let Some(change) = watch.observe(self.now_ns, seen) {
            if policy.changes.len() == MAX_CHANGES {
                policy.changes.pop_front();
            }
            policy.changes.push_back(change);
        }
        let slow = watch.state() == SpaceState::VeryLow;
        if slow != self.pool.slows_down.load(Ordering::Relaxed) {
            self.begin_or_end_slowness(slow);
        }
        if slow {
            self.give_allowances();
        }
    }

    /// Bytes that can be granted to a volume without space set aside.
    #[must_use]
    pub fn available(&self) -> u64 {
        let set_aside = self.set_aside(&self.pool.volumes.read());
        let free = self.pool.free_space.lock().free_count().saturating_sub(set_aside);
        let free = free * self.pool.geometry.extent_size();
        free.min(self.space.free_below.unwrap_or(u64::MAX))
    }

    fn begin_or_end_slowness(&mut self, slow: bool) {
        for volume in self.pool.volumes.read().values() {
            volume.allowance.store(0, Ordering::Release);
            volume.slowed.store(0, Ordering::Release);
            volume.served.store(0, Ordering::Relaxed);
        }
        self.space.served = 0;
        self.space.credit = 0;
        self.space.ticked_ns = self.now_ns;
        self.space.floor_ns = self.now_ns;
        self.pool.slows_down.store(slow, Ordering::SeqCst);
        self.pool.bump();
    }

    /// Extents for those that are slowed down, one each in the order in which they came to wait,
    /// then another each, as long as the pool's speed allows it.
    fn give_allowances(&mut self) {
        let limit = self.space.watch.limit().unwrap_or(0);
        let passed = self.now_ns.saturating_sub(self.space.ticked_ns);
        if passed < TICK_NS {
            return;
        }
        self.space.ticked_ns = self.now_ns;
        let extent = self.pool.geometry.extent_size();
        let earned = u128::from(limit) * u128::from(passed) / 1_000_000_000;
        let most =
            (u128::from(limit) * u128::from(CREDIT_NS) / 1_000_000_000).max(u128::from(extent));
        let credit = (u128::from(self.space.credit) + earned).min(most);
        self.space.credit = u64::try_from(credit).unwrap_or(u64::MAX);

        let mut waiting = std::mem::take(&mut self.space.waiting);
        // A new volume starts with the share of the others: the past is not compensated.
        let had = self.space.served;
        let slowed = |volume: &Arc<Volume>| {
            let waits = volume.slowed.load(Ordering::Acquire) > 0;
            let order = volume.served.load(Ordering::Relaxed).max(had);
            waits.then(|| Waiting { volume: Arc::clone(volume), order })
        };
        waiting.extend(self.pool.volumes.read().values().filter_map(slowed));
        waiting.sort_unstable_by_key(|one| one.order);
        let mut extents = self.space.credit / extent;
        if self.now_ns.saturating_sub(self.space.floor_ns) >= FLOOR_NS {
            self.space.floor_ns = self.now_ns;
            extents = extents.max(waiting.len() as u64);
        }
        let any = extents > 0 && !waiting.is_empty();
        if any {
            self.space.credit = self.space.credit.saturating_sub(extents * extent);
            self.space.served = share(&waiting, extents).max(self.space.served);
        }
        waiting.clear();
        self.space.waiting = waiting;
        if any {
            self.pool.bump();
        }
    }

    /// Records the volumes that wait for an extent without one on its way. Returns whether they
    /// have to be woken.
    pub(super) fn note_stuck(&mut self, waiting: &[Waiting], comes_later: bool) -> bool {
        self.space.stuck = false;
        self.space.comes_later = comes_later;
        let mut news = false;
        let pool = Arc::clone(&self.pool);
        let awaits_commit = pool.has_dropped_space() || self.releases.awaits_commit();
        let coming = comes_later
            || awaits_commit
            || self.commits_drops()
            || !self.releases.is_idle()
            || !pool.unshown.lock().is_empty();
        let commits = pool.progress.0.finished.load(Ordering::SeqCst);
        let mut is_deleting = None;
        for volume in waiting.iter().filter(|one| one.is_starving()).map(|one| &one.volume) {
            let quota = volume.quota.load(Ordering::Relaxed);
            let by_quota = quota > 0 && volume.held() >= quota;
            if coming && !by_quota {
                // Dropped extents can be granted again once their change is durable (R4).
                if awaits_commit && !pool.wake.0.commit.load(Ordering::SeqCst) {
                    pool.want_commit();
                }
                let deletes = || *is_deleting.get_or_insert_with(|| self.releases.is_deleting());
                if volume.drop_wait.lasts(self.now_ns, commits, deletes) {
                    volume.out_of_space.store(false, Ordering::Release);
                    continue;
                }
            } else {
                volume.drop_wait.end();
            }
            self.space.stuck |= !by_quota;
            news |= !volume.out_of_space.swap(true, Ordering::AcqRel);
        }
        news
    }
}

/// Extents that volumes do not have yet, with those for the pages of their leaves: an extent is of
/// no use to a volume that can't map it. Of each volume: the extents that it does not have yet,
/// those that it is still to map, which may be more, and its size.
fn with_pages(pool: &Pool, volumes: impl Iterator<Item = (u64, u64, u64)>) -> SetAside {
    let (mut extents, mut leaves) = (0_u64, 0_u64);
    for (unmet, to_map, size) in volumes.filter(|one| one.1 > 0) {
        extents += unmet;
        leaves += to_map.min(u64::from(pool.geometry.slots_for(size)));
    }
    if leaves == 0 {
        return SetAside::default();
    }
    let pages = leaves + leaves / LEAVES_PER_INDEX + PAGES_BESIDES;
    SetAside { extents, for_pages: pages.div_ceil(pool.geometry.pages_per_extent()) }
}

/// Shares `extents` among these volumes as evenly as possible: the remainder goes to those with the
/// smallest share. Returns the smallest share afterwards.
fn share(waiting: &[Waiting], extents: u64) -> u64 {
    let each = extents / waiting.len() as u64;
    let more = extents % waiting.len() as u64;
    let mut least = u64::MAX;
    for (at, one) in (0..).zip(waiting) {
        let share = each + u64::from(at < more);
        let served = one.order + share;
        least = least.min(served);
        if share > 0 {
            one.volume.served.store(served, Ordering::Relaxed);
            one.volume.slowed.store(0, Ordering::Release);
            let share = i64::try_from(share).unwrap_or(i64::MAX);
            one.volume.allowance.fetch_add(share, Ordering::AcqRel);
        }
    }
    least
}

impl Pool {
    /// Whether writes that need extents are being slowed down.
    #[must_use]
    pub fn slows_down(&self) -> bool {
        self.slows_down.load(Ordering::Relaxed)
    }
}
