//! A volume as the data path sees it: its directory, its gate, its granted extents.

mod drop_wait;
mod misses;
mod reserve;
mod spread;

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::directory::Directory;
use crate::error::MapperError;
use crate::format::catalogue::VolumeKind;
use crate::format::{Labels, VolumeName};
use crate::geometry::Geometry;
use crate::space::VolumeSettings;
use crate::sync::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, CachePadded, Ordering};
use crate::units::{Lsn, PhysicalExtent, VolumeId, WallTime};

use drop_wait::DropWait;
use misses::Misses;
use reserve::{Reserve, Slice};
pub(crate) use spread::Spread;

/// Requests are taken.
pub(crate) const OPEN: u8 = 0;
/// A structure change waits for writes in flight; new writes park.
pub(crate) const GATED: u8 = 1;
/// The volume was deleted; remaining holders receive an error.
pub(crate) const DELETED: u8 = 2;

/// Extents of a volume's first grant: of many clones that are each written once, each has three
/// that it does not use. The fifth grant is of 64.
const FIRST_GRANT: u64 = 4;

/// The immutable properties of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: VolumeId,
    /// First ancestor: volumes of one lineage share leaves, always at the same slot.
    pub(crate) lineage: VolumeId,
    /// The volume or snapshot this one was made from; 0 for none.
    pub(crate) origin: VolumeId,
    pub(crate) kind: VolumeKind,
    /// Logical block in bytes.
    pub(crate) block_size: u32,
    pub(crate) created: Lsn,
    pub(crate) made: WallTime,
}

/// A volume or snapshot as lists show it: its properties and its space.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeSummary {
    /// Identity.
    pub id: VolumeId,
    /// Name, unique in the pool.
    pub name: String,
    /// Volume or snapshot.
    pub kind: VolumeKind,
    /// First ancestor: volumes with the same lineage were made from one another, and can be
    /// compared.
    pub lineage: VolumeId,
    /// The volume that it was made from; 0 for none.
    pub origin: VolumeId,
    /// LSN of the change that made it. Snapshots of one group have the same, and no others do.
    pub created: Lsn,
    /// Time of that change; 0 where it is not known.
    pub made: WallTime,
    /// Bytes a client sees.
    pub size: u64,
    /// Logical block in bytes.
    pub block_size: u32,
    /// Bytes of mapped extents.
    pub mapped: u64,
    /// Bytes of valid sub-blocks.
    pub valid: u64,
    /// Bytes of mapped extents that no other volume refers to; `None` unless they were counted.
    pub exclusive: Option<u64>,
    /// Bytes granted and not used yet.
    pub reserved: u64,
    /// Bytes that are set aside for it and that it doesn't have yet.
    pub unmet: u64,
    /// Its settings.
    pub settings: VolumeSettings,
    /// Its labels.
    pub labels: Labels,
    /// A write of it waits for an extent, and none is on its way.
    pub out_of_space: bool,
    /// How often extents were granted to it, since the pool was opened.
    pub grants: u64,
    /// How often its granted extents were used up, and writes waited for more.
    pub grant_waits: u64,
    /// How often there was something left after all: no write waits while a reserve lasts.
    pub passed_reserves: u64,
}

impl VolumeSummary {
    /// Bytes of mapped extents that other volumes refer to as well, once they were counted.
    #[must_use]
    pub fn shared(&self) -> Option<u64> {
        self.exclusive.map(|exclusive| self.mapped.saturating_sub(exclusive))
    }
}

/// Counts of a map, or of a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Totals {
    /// Extents.
    pub(crate) mapped: u64,
    /// Valid sub-blocks.
    pub(crate) valid: u64,
    /// Composite entries.
    pub(crate) composite: u64,
}

/// One volume, shared by the engine and every worker that has it attached.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) identity: Identity,
    /// Written by the engine alone, while it holds the list of volumes for writing.
    name: Mutex<VolumeName>,
    /// Written by the engine alone.
    labels: Mutex<Labels>,
    /// Bytes.
    pub(crate) size: AtomicU64,
    pub(crate) state: AtomicU8,
    pub(crate) directory: ArcSwap<Directory>,
    /// Rises after each swap of the directory.
    pub(crate) shape: AtomicU64,
    /// Whether a slot may have changed since the last checkpoint's cut, so that the volume is in
    /// the pool's list of those.
    pub(crate) changed: AtomicBool,
    /// Mapped extents.
    pub(crate) mapped: AtomicU64,
    /// Valid sub-blocks.
    pub(crate) valid: AtomicU64,
    /// Composite entries.
    pub(crate) composites: AtomicU64,
    /// The last change that took sub-blocks of an extent back and left it mapped.
    pub(crate) cleared_lsn: AtomicU64,
    /// From this IO epoch on, no write is in flight that found sub-blocks valid which such a change
    /// has cleared since (R5f). Not of the pool: the discards of one volume do not hold another up.
    pub(crate) cleared_until: AtomicU64,
    pub(crate) reserve: Mutex<Reserve>,
    /// Extents of the reserve, the workers' slices included, that other volumes do not get: each
    /// extent that a write takes makes it one less. May exceed the rest of the reserve.
    kept: AtomicU64,
    /// The reserve is below its low mark and the engine has not answered yet.
    pub(crate) wants_space: AtomicBool,
    /// Extents of the largest grant since its reserve was last taken back, 0 for none.
    grant_size: AtomicU64,
    /// Whether the last grant has not been used yet, and its time.
    pub(crate) fresh: AtomicBool,
    pub(crate) granted_ns: AtomicU64,
    /// A write has found no extent since the last grant: its place in the order of those that wait,
    /// 0 for none.
    pub(crate) starves: AtomicU64,
    /// How many such writes there are.
    pub(crate) misses: Misses,
    /// Whether the engine checked the waiting requests and no extent is available or on its way.
    pub(crate) out_of_space: AtomicBool,
    /// How long it has waited for extents that others have dropped.
    pub(crate) drop_wait: DropWait,
    /// Extents that it may take while the pool is slowed down.
    pub(crate) allowance: AtomicI64,
    /// A write was slowed down since the last allowance: its place in the order of those that wait,
    /// 0 for none.
    pub(crate) slowed: AtomicU64,
    /// Allowances that it has had while the pool was slow, or would have had.
    pub(crate) served: AtomicU64,
    /// Extents set aside for it, those that are mapped included.
    pub(crate) set_aside: AtomicU64,
    /// Extents that it may map at the most; 0 for no limit.
    pub(crate) quota: AtomicU64,
    /// Times that extents were granted to it.
    pub(crate) grants: AtomicU64,
    /// Times that it had nothing left of them, and writes waited for more.
    pub(crate) grant_waits: AtomicU64,
    /// How often one of these had a granted extent left after all: never.
    pub(crate) passed_reserves: AtomicU64,
    pub(crate) settings: Mutex<VolumeSettings>,
    /// Where it is spread over devices: whose turn it is.
    pub(crate) spread: Mutex<Spread>,
    /// Rises after each change of the settings.
    pub(crate) settings_version: AtomicU64,
    pub(crate) attachments: Mutex<Vec<Arc<AttachmentShared>>>,
}

impl Volume {
    /// The counts of its map.
    pub(crate) fn totals(&self) -> Totals {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Totals {
            mapped: load(&self.mapped),
            valid: load(&self.valid),
            composite: load(&self.composites),
        }
    }

    /// Notes what the volume maps, all of which was counted or is another volume's too.
    pub(crate) fn set_totals(&self, totals: Totals) {
        self.mapped.store(totals.mapped, Ordering::Relaxed);
        self.valid.store(totals.valid, Ordering::Relaxed);
        self.composites.store(totals.composite, Ordering::Relaxed);
    }

    /// A part of the map is gone.
    pub(crate) fn count_less(&self, part: Totals) {
        self.mapped.fetch_sub(part.mapped, Ordering::Relaxed);
        self.valid.fetch_sub(part.valid, Ordering::Relaxed);
        self.composites.fetch_sub(part.composite, Ordering::Relaxed);
    }

    pub(crate) fn new(
        identity: Identity,
        name: VolumeName,
        size: u64,
        directory: Directory,
    ) -> Self {
        Self {
            identity,
            name: Mutex::new(name),
            labels: Mutex::default(),
            size: AtomicU64::new(size),
            state: AtomicU8::new(OPEN),
            directory: ArcSwap::from_pointee(directory),
            shape: AtomicU64::new(0),
            changed: AtomicBool::new(false),
            mapped: AtomicU64::new(0),
            valid: AtomicU64::new(0),
            composites: AtomicU64::new(0),
            cleared_lsn: AtomicU64::new(0),
            cleared_until: AtomicU64::new(0),
            reserve: Mutex::new(Reserve::default()),
            kept: AtomicU64::new(0),
            wants_space: AtomicBool::new(false),
            grant_size: AtomicU64::new(0),
            fresh: AtomicBool::new(false),
            granted_ns: AtomicU64::new(0),
            starves: AtomicU64::new(0),
            misses: Misses::default(),
            drop_wait: DropWait::default(),
            out_of_space: AtomicBool::new(false),
            allowance: AtomicI64::new(0),
            slowed: AtomicU64::new(0),
            served: AtomicU64::new(0),
            set_aside: AtomicU64::new(0),
            quota: AtomicU64::new(0),
            grants: AtomicU64::new(0),
            grant_waits: AtomicU64::new(0),
            passed_reserves: AtomicU64::new(0),
            settings: Mutex::new(VolumeSettings::default()),
            spread: Mutex::new(Spread::default()),
            settings_version: AtomicU64::new(0),
            attachments: Mutex::new(Vec::new()),
        }
    }

    /// Its present name.
    pub(crate) fn name(&self) -> VolumeName {
        *self.name.lock()
    }

    /// Gives it another name. Through the list of volumes, which finds it by name.
    pub(crate) fn set_name(&self, name: VolumeName) {
        *self.name.lock() = name;
    }

    /// Its present labels.
    pub(crate) fn labels(&self) -> Labels {
        self.labels.lock().clone()
    }

    /// Gives it these labels in place of those that it has.
    pub(crate) fn set_labels(&self, labels: Labels) {
        *self.labels.lock() = labels;
    }

    /// Its properties and space, without those that have to be counted.
    pub(crate) fn summary(&self, geometry: Geometry) -> VolumeSummary {
        let identity = &self.identity;
        let extents = |count: u64| count * geometry.extent_size();
        VolumeSummary {
            id: identity.id,
            name: self.name().as_str().to_owned(),
            kind: identity.kind,
            lineage: identity.lineage,
            origin: identity.origin,
            created: identity.created,
            made: identity.made,
            size: self.size.load(Ordering::Acquire),
            block_size: identity.block_size,
            mapped: extents(self.mapped.load(Ordering::Relaxed)),
            valid: self.valid.load(Ordering::Relaxed) * geometry.sub_block_size(),
            exclusive: None,
            reserved: extents(self.reserved()),
            unmet: extents(self.unmet()),
            settings: *self.settings.lock(),
            labels: self.labels(),
            out_of_space: self.out_of_space.load(Ordering::Acquire),
            grants: self.grants.load(Ordering::Relaxed),
            grant_waits: self.grant_waits.load(Ordering::Relaxed),
            passed_reserves: self.passed_reserves.load(Ordering::Relaxed),
        }
    }

    /// Refuses a request that isn't whole blocks within the volume.
    pub(crate) fn check_range(&self, offset: u64, len: u64) -> Result<(), MapperError> {
        let size = self.size.load(Ordering::Acquire);
        let block = u64::from(self.identity.block_size);
        let inside = offset.checked_add(len).is_some_and(|end| end <= size);
        if inside && offset.is_multiple_of(block) && len.is_multiple_of(block) {
            return Ok(());
        }
        let block_size = self.identity.block_size;
        Err(MapperError::OutOfRange { offset, len, size, block_size })
    }

    /// Changes the settings.
    pub(crate) fn set(&self, settings: VolumeSettings, geometry: Geometry) {
        *self.settings.lock() = settings;
        self.settings_version.fetch_add(1, Ordering::Release);
        let quota = settings.quota.div_ceil(geometry.extent_size());
        self.quota.store(quota, Ordering::Relaxed);
        self.follow_size(geometry);
    }

    /// Updates the space set aside for a thick volume, which depends on its size.
    pub(crate) fn follow_size(&self, geometry: Geometry) {
        let extents = self.set_aside_at(self.size.load(Ordering::Acquire), geometry);
        self.set_aside.store(extents, Ordering::Relaxed);
    }

    /// Extents that are set aside for it if it has this size: never more than it may map.
    pub(crate) fn set_aside_at(&self, size: u64, geometry: Geometry) -> u64 {
        let bytes = self.settings.lock().set_aside(size);
        let extents = bytes.div_ceil(geometry.extent_size());
        match self.quota.load(Ordering::Relaxed) {
            0 => extents,
            quota => extents.min(quota),
        }
    }

    /// Extents that it has: mapped, granted, or between the two.
    pub(crate) fn held(&self) -> u64 {
        let taken = |one: &Arc<AttachmentShared>| one.taken.load(Ordering::Acquire);
        let taken: i64 = self.attachments.lock().iter().map(taken).sum();
        let taken = u64::try_from(taken).unwrap_or(0);
        taken + self.mapped.load(Ordering::Relaxed) + self.reserved()
    }

    /// Extents that it has for as many places. Of the two of a composite entry one counts: like one
    /// that a snapshot keeps, the other takes nothing of what is set aside for first writes.
    pub(crate) fn places(&self) -> u64 {
        self.held().saturating_sub(self.composites.load(Ordering::Relaxed))
    }

    /// Extents that are set aside for it and that it doesn't have yet.
    pub(crate) fn unmet(&self) -> u64 {
        match self.set_aside.load(Ordering::Relaxed) {
            0 => 0,
            set_aside => set_aside.saturating_sub(self.places()),
        }
    }

    /// Whether space is set aside or kept for it.
    pub(crate) fn reserves(&self) -> bool {
        self.set_aside.load(Ordering::Relaxed) > 0 || self.kept.load(Ordering::Acquire) > 0
    }

    /// Extents granted and not used that others may have: all but the space set aside for it, and
    /// the space that is kept.
    pub(crate) fn spare(&self) -> u64 {
        self.spare_with(self.places(), self.set_aside.load(Ordering::Relaxed))
    }

    /// The same if it had this many places, and this many extents set aside.
    pub(crate) fn spare_with(&self, places: u64, set_aside: u64) -> u64 {
        let unkept = self.reserved().saturating_sub(self.kept.load(Ordering::Acquire));
        unkept.min(places.saturating_sub(set_aside))
    }

    /// Extents granted and not used that others do not get.
    pub(crate) fn kept(&self) -> u64 {
        match self.kept.load(Ordering::Acquire) {
            0 => 0,
            kept => kept.min(self.reserved()),
        }
    }

    /// Keeps at least this many extents of the reserve. Returns by how many more than before.
    pub(crate) fn keep(&self, extents: u64) -> u64 {
        extents.saturating_sub(self.kept.fetch_max(extents, Ordering::AcqRel))
    }

    /// Keeps this many extents less.
    pub(crate) fn keep_less(&self, extents: u64) {
        let less = |kept: u64| (kept > 0).then(|| kept.saturating_sub(extents));
        // There is nothing to be done where none is kept.
        let _ = self.kept.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    /// Returns an extent to the reserve that a worker's slice held, if extents are kept. `false`:
    /// the caller frees it.
    pub(crate) fn put_back(&self, extent: PhysicalExtent) -> bool {
        // The count is read under the lock: a volume that is deleted sets it to 0 before it
        // empties the reserve.
        let mut reserve = self.reserve.lock();
        let returned = self.kept.load(Ordering::Acquire) > 0 && reserve.has_room();
        if returned {
            reserve.add(extent, 1);
        }
        returned
    }

    /// Whether the next extent that it maps is one that was set aside for it: it takes nothing that
    /// others could have.
    pub(crate) fn lives_on_its_own(&self) -> bool {
        if self.kept.load(Ordering::Relaxed) > 0 {
            return true;
        }
        match self.set_aside.load(Ordering::Relaxed) {
            0 => false,
            set_aside => self.places().saturating_sub(self.reserved()) < set_aside,
        }
    }

    /// Takes one extent's allowance. A hurried request may overdraw it, which delays later
    /// requests.
    pub(crate) fn take_allowance(&self, hurried: bool) -> bool {
        let least = if hurried { i64::MIN + 1 } else { 1 };
        let take = |left: i64| (left >= least).then(|| left - 1);
        self.allowance.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    /// Writes in flight over all workers. Exact once the gate is closed.
    pub(crate) fn writes_in_flight(&self) -> u64 {
        self.attachments.lock().iter().map(|a| a.writes.0.load(Ordering::SeqCst)).sum()
    }

    /// Extents of its next grant, with a quantum of `most`: twice as many as were granted before,
    /// so that a volume that is written much asks rarely, and one that is not holds little; and one
    /// for each write that waits.
    pub(crate) fn next_grant(&self, most: u64) -> u64 {
        let doubled = self.grant_size.load(Ordering::Relaxed).saturating_mul(2);
        doubled.max(FIRST_GRANT).max(self.misses.count()).min(most)
    }

    /// Notes the size of a grant.
    pub(crate) fn note_grant(&self, extents: u64) {
        self.grant_size.fetch_max(extents, Ordering::Relaxed);
    }

    /// A reserve below this asks for more: half of a grant, with a quantum of `most`. An empty one
    /// always does.
    pub(crate) fn low_mark(&self, most: u64) -> u64 {
        (self.grant_size.load(Ordering::Relaxed).min(most) / 2).max(1)
    }

    /// Takes every granted extent back that is not kept, of the reserve and of every worker's
    /// slice. Where extents are kept, those in slices count first. Grants begin small again.
    pub(crate) fn take_back(&self, mut give: impl FnMut(PhysicalExtent, u64)) {
        self.grant_size.store(0, Ordering::Relaxed);
        let kept = self.kept.load(Ordering::Acquire);
        if kept > 0 {
            let slices: usize = self.attachments.lock().iter().map(|a| a.slice.lock().len()).sum();
            let mut reserve = self.reserve.lock();
            let surplus = reserve.total().saturating_sub(kept.saturating_sub(slices as u64));
            reserve.take_last(surplus, give);
            return;
        }
        for attachment in self.attachments.lock().iter() {
            let mut slice = attachment.slice.lock();
            while let Some(extent) = slice.pop() {
                give(extent, 1);
            }
        }
        for (first, count) in self.reserve.lock().runs.drain(..) {
            give(first, count);
        }
    }

    /// An extent that one of its workers has in its slice: grants belong to the whole volume.
    pub(crate) fn take_from_slices(&self) -> Option<PhysicalExtent> {
        self.attachments.lock().iter().find_map(|one| one.slice.lock().pop())
    }

    /// Counts a write that found no extent and waits for a grant, after `grants` grants. Called by
    /// the thread that queued the volume.
    pub(crate) fn count_grant_wait(&self, grants: u64) {
        self.grant_waits.fetch_add(1, Ordering::Relaxed);
        // Later grants were not visible to the write.
        if self.reserved() > 0 && self.grants.load(Ordering::Acquire) == grants {
            self.passed_reserves.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Every granted extent not used yet.
    pub(crate) fn for_each_reserved(&self, mut see: impl FnMut(PhysicalExtent)) {
        for attachment in self.attachments.lock().iter() {
            let slice = attachment.slice.lock();
            slice.extents[slice.next..slice.end].iter().for_each(|&extent| see(extent));
        }
        for &(first, count) in &self.reserve.lock().runs {
            (first.0..first.0 + count).map(PhysicalExtent).for_each(&mut see);
        }
    }

    /// How many granted extents are of this kind.
    pub(crate) fn reserved_of(&self, kind: impl Fn(PhysicalExtent) -> bool) -> u64 {
        let mut found = 0;
        self.for_each_reserved(|extent| found += u64::from(kind(extent)));
        found
    }

    /// Takes every granted extent of a kind back; in a run, all that follow one of them are of it.
    pub(crate) fn take_back_of(
        &self,
        kind: impl Fn(PhysicalExtent) -> bool,
        mut give: impl FnMut(PhysicalExtent, u64),
    ) {
        for attachment in self.attachments.lock().iter() {
            attachment.slice.lock().take_out(&kind, |extent| give(extent, 1));
        }
        self.reserve.lock().runs.retain_mut(|(first, count)| {
            let extents = (first.0..first.0 + *count).map(PhysicalExtent);
            let stay = extents.take_while(|extent| !kind(*extent)).count() as u64;
            if stay < *count {
                give(PhysicalExtent(first.0 + stay), *count - stay);
            }
            *count = stay;
            stay > 0
        });
    }

    /// How many extents are granted and not used yet.
    pub(crate) fn reserved(&self) -> u64 {
        if self.grants.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let slices: usize = self.attachments.lock().iter().map(|a| a.slice.lock().len()).sum();
        self.reserve.lock().total() + slices as u64
    }
}

/// The part of a worker's attachment that the engine may read.
#[derive(Debug, Default)]
pub(crate) struct AttachmentShared {
    /// Writes of this worker on this volume in flight. Written by the worker alone.
    pub(crate) writes: CachePadded<AtomicU64>,
    /// Extents that writes in flight have taken, and that are not mapped yet. Written by the worker
    /// alone.
    taken: AtomicI64,
    pub(crate) slice: Mutex<Slice>,
}

impl AttachmentShared {
    /// A write has taken an extent, or has ended. By its worker.
    pub(crate) fn count_taken(&self, by: i64) {
        self.taken.store(self.taken.load(Ordering::Relaxed) + by, Ordering::Release);
    }

    /// An extent to write into, and whether the engine should top the reserve up, which it should
    /// below `low`.
    pub(crate) fn allocate(
        &self,
        volume: &Volume,
        low: impl FnOnce() -> u64,
    ) -> (Option<PhysicalExtent>, bool) {
        let mut slice = self.slice.lock();
        if let Some(extent) = slice.pop() {
            return (Some(extent), false);
        }
        if volume.fresh.load(Ordering::Relaxed) {
            volume.fresh.store(false, Ordering::Relaxed);
        }
        let mut reserve = volume.reserve.lock();
        reserve.fill(&mut slice);
        (slice.pop(), reserve.total() < low())
    }
}
