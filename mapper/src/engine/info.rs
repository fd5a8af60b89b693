//! Queries of a pool: its space, its volumes, and the consistency of its accounts.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::entry::Entry;
use crate::format::name::VolumeName;
use crate::pool::{Pool, Space};
use crate::sync::Ordering;
use crate::units::{Epoch, LeafId, PhysicalExtent, VolumeId};
use crate::volume::{Volume, VolumeSummary};
use crate::volumes::Sums;

use super::Engine;

impl Pool {
    /// Most bytes that a volume is granted at a time.
    #[must_use]
    pub fn quantum_bytes(&self) -> u64 {
        self.quantum.load(Ordering::Relaxed).saturating_mul(self.geometry.extent_size())
    }

    /// How often extents were granted to volumes, since it was opened.
    #[must_use]
    pub fn grants(&self) -> u64 {
        self.grants.load(Ordering::Relaxed)
    }

    /// All volumes and snapshots, by id, without counting anything. May be called from any thread.
    #[must_use]
    pub fn summaries(&self) -> Vec<VolumeSummary> {
        // Counting takes locks of each volume; creating or deleting a volume does not wait for
        // that.
        let volumes: Vec<_> = self.volumes.read().values().cloned().collect();
        volumes.iter().map(|volume| volume.summary(self.geometry)).collect()
    }

    /// The volume or snapshot of that name, without counting anything.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<VolumeSummary> {
        let name = VolumeName::new(name).ok()?;
        let found = self.volumes.read().named(&name).cloned()?;
        Some(found.summary(self.geometry))
    }

    /// Whether there is a volume or snapshot of that name, quickest if it has this id.
    #[must_use]
    pub fn has(&self, id: VolumeId, name: &str) -> bool {
        let volumes = self.volumes.read();
        let has_name = |one: &Arc<Volume>| one.name().as_str() == name;
        volumes.get(&id).is_some_and(has_name)
            || VolumeName::new(name).is_ok_and(|name| volumes.named(&name).is_some())
    }

    /// The name of a volume or snapshot.
    #[must_use]
    pub fn name_of(&self, id: VolumeId) -> Option<String> {
        self.volumes.read().get(&id).map(|one| one.name().as_str().to_owned())
    }

    /// Whether others were made of a volume of this lineage, or it of others: only these share
    /// anything.
    #[must_use]
    pub fn has_relatives(&self, lineage: VolumeId) -> bool {
        self.volumes.read().family(lineage) > 1
    }

    /// A volume and all its relatives, by id, without counting anything; none if it is gone.
    #[must_use]
    pub fn family_of(&self, id: VolumeId) -> Vec<VolumeSummary> {
        let family: Vec<_> = {
            let volumes = self.volumes.read();
            let Some(volume) = volumes.get(&id) else { return Vec::new() };
            volumes.relatives(volume.identity.lineage).cloned().collect()
        };
        family.iter().map(|volume| volume.summary(self.geometry)).collect()
    }

    /// Sums over all volumes and snapshots, which are kept.
    #[must_use]
    pub fn sums(&self) -> Sums {
        self.volumes.read().sums()
    }

    /// The volumes and snapshots with these ids, as far as there are such, and all that have a
    /// quota, without counting anything.
    #[must_use]
    pub fn summaries_of(&self, ids: &[VolumeId]) -> Vec<VolumeSummary> {
        let mut found: BTreeMap<VolumeId, Arc<Volume>> = BTreeMap::new();
        {
            let volumes = self.volumes.read();
            let named = ids.iter().filter_map(|id| volumes.get(id));
            found.extend(
                named.chain(volumes.limited()).map(|one| (one.identity.id, Arc::clone(one))),
            );
        }
        found.values().map(|volume| volume.summary(self.geometry)).collect()
    }

    /// A number that rises when a volume or snapshot is added, removed or renamed.
    #[must_use]
    pub fn volumes_version(&self) -> u64 {
        self.volumes.read().version()
    }
}

impl Engine {
    /// Space of the pool, in bytes.
    #[must_use]
    pub fn space(&self) -> Space {
        let extent = self.pool.geometry.extent_size();
        let (total, free) = {
            let space = self.pool.free_space.lock();
            (space.total_count(), space.free_count())
        };
        // This thread alone makes and deletes volumes: no other one waits for the lock.
        let reserved: u64 =
            self.space.holders(&self.pool.volumes.read()).map(|volume| volume.reserved()).sum();
        let supers = 2 * self.superblock.devices.present().count() as u64;
        let wal = u64::from(self.superblock.wal_extents);
        let metadata = supers + wal + self.pages.extent_count();
        let unshown = self.pool.unshown.lock().len() as u64;
        let pending = self.releases.pending_extents() + unshown;
        let mapped = total.saturating_sub(free + reserved + metadata + pending);
        Space {
            total: total * extent,
            free: free * extent,
            reserved: reserved * extent,
            mapped: mapped * extent,
            pending: pending * extent,
            metadata: metadata * extent,
            metadata_free: self.pages.free_pages() * crate::geometry::PAGE_BYTES,
            log: self.wal.blocks * crate::geometry::PAGE_BYTES,
            log_used: self.wal.used() * crate::geometry::PAGE_BYTES,
        }
    }

    /// Identity of this open, in each superblock that it writes.
    #[must_use]
    pub const fn open_id(&self) -> u64 {
        self.superblock.open_id
    }

    /// The open that this is, counted over the pool's life.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.superblock.epoch
    }

    /// Deleted volumes whose extents are still being reclaimed, a bounded number at each poll.
    #[must_use]
    pub fn releasing(&self) -> Vec<super::Releasing> {
        self.releases.releasing().collect()
    }

    /// All volumes and snapshots, by id. Takes time in proportion to the mapped extents: exclusive
    /// and shared are counted, not kept. Where others wait for this thread, [`Pool::summaries`] and
    /// [`Engine::account`] are for that.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeSummary> {
        let volumes: Vec<_> = self.pool.volumes.read().values().cloned().collect();
        let counted = |volume: &Arc<Volume>| {
            let summary = volume.summary(self.pool.geometry);
            // A volume without relatives shares nothing.
            let exclusive = match self.pool.has_relatives(volume.identity.lineage) {
                false => summary.mapped,
                true => self.exclusive_extents(volume) * self.pool.geometry.extent_size(),
            };
            VolumeSummary { exclusive: Some(exclusive), ..summary }
        };
        volumes.iter().map(counted).collect()
    }

    pub(super) fn exclusive_extents(&self, volume: &Volume) -> u64 {
        let directory = volume.directory.load();
        let mut count = 0;
        for (_, leaf) in directory.iter() {
            if self.pool.arena.meta(leaf).references.load(Ordering::Acquire) > 1 {
                continue;
            }
            let extents = self.pool.arena.entries(leaf).flat_map(|entry| entry.extents());
            count += extents.filter(|&extent| self.pool.extra(extent) == 0).count() as u64;
        }
        count
    }

    /// Counts everything again and compares: references, leaves, free space, accounting. For
    /// tests and tools; the pool must be at rest ([`Engine::is_idle`]) and no worker may call.
    pub fn check_invariants(&self) -> Result<(), String> {
        let recount = self.recount()?;
        let space = self.pool.free_space.lock();
        let geometry = self.pool.geometry;
        let mut used = self.fixed_extents();
        used.extend(self.pages.extents());
        for volume in self.pool.volumes.read().values() {
            used.extend(held_extents(volume));
        }
        used.extend(recount.extents.keys());
        for (&physical, &references) in &recount.extents {
            let extra = self.pool.extra(physical);
            if extra + 1 != references {
                return Err(format!(
                    "extent {physical}: {references} references, counted {extra} + 1"
                ));
            }
            if !space.is_used(physical) {
                return Err(format!("extent {physical} is referenced and free"));
            }
        }
        let pending = self.recovered.iter().map(|run| run.1).sum::<u64>();
        let unshown = self.pool.unshown.lock().len() as u64;
        let known = used.len() as u64 + pending + self.releases.pending_extents() + unshown;
        used.sort_unstable();
        if let Some(pair) = used.windows(2).find(|pair| pair[0] == pair[1]) {
            let extent = pair[0];
            let mapped = recount.extents.contains_key(&extent);
            let metadata = self.pages.extents().any(|other| other == extent);
            return Err(format!(
                "extent {extent} has two owners: mapped {mapped}, metadata {metadata}"
            ));
        }
        let taken = space.total_count() - space.free_count();
        if taken != known {
            return Err(format!("{taken} extents are taken, {known} are accounted for"));
        }
        let dirty_cover = self.pages.used_pages();
        if dirty_cover > self.pages.extent_count() * geometry.pages_per_extent() {
            return Err("more metadata pages are used than there are".to_owned());
        }
        self.check_promises()
    }

    /// Whether the pages that are promised are those of writes in flight.
    fn check_promises(&self) -> Result<(), String> {
        let promised = self.pool.pages.0.promised.load(Ordering::Relaxed);
        let of_writes: usize = self.pool.stripes.iter().map(|one| one.lock().promised()).sum();
        if i64::try_from(of_writes) == Ok(promised) {
            return Ok(());
        }
        Err(format!("{promised} metadata pages are promised, {of_writes} to writes in flight"))
    }

    fn recount(&self) -> Result<Recount, String> {
        let mut recount = Recount::default();
        for volume in self.pool.volumes.read().values() {
            for (slot, leaf) in volume.directory.load().iter() {
                let first = recount.leaves.entry(leaf).or_insert((0, slot));
                first.0 += 1;
                if first.1 != slot {
                    return Err(format!("leaf {leaf} is held at slots {} and {slot}", first.1));
                }
            }
            let counted = crate::change::totals_of(&self.pool.arena, &volume.directory.load());
            let recorded = volume.totals();
            if recorded != counted {
                let id = volume.identity.id;
                return Err(format!("volume {id}: accounts {recorded:?}, counted {counted:?}"));
            }
        }
        for (&leaf, &(references, _)) in &recount.leaves {
            let counted = self.pool.arena.meta(leaf).references.load(Ordering::Acquire);
            if counted != references {
                return Err(format!("leaf {leaf}: {references} references, counted {counted}"));
            }
            self.check_counts(leaf)?;
            for physical in self.pool.arena.entries(leaf).flat_map(|entry| entry.extents()) {
                *recount.extents.entry(physical).or_insert(0) += 1;
            }
        }
        Ok(recount)
    }

    /// Whether a leaf's numbers of entries are those that it has.
    fn check_counts(&self, leaf: LeafId) -> Result<(), String> {
        let arena = &self.pool.arena;
        let mapped = arena.entries(leaf).filter(Entry::is_mapped).count();
        let composite = arena.entries(leaf).filter(|entry| entry.base().is_mapped()).count();
        let recorded = (arena.meta(leaf).mapped.load(Ordering::Relaxed), arena.composites(leaf));
        let counted = [mapped, composite].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        if <[u32; 2]>::from(recorded) == counted {
            return Ok(());
        }
        Err(format!("leaf {leaf}: {recorded:?} entries and bases, counted {counted:?}"))
    }

    /// Superblock areas and the log.
    pub(crate) fn fixed_extents(&self) -> Vec<PhysicalExtent> {
        fixed_extents(&self.superblock)
    }
}

/// Superblock areas and the log of a pool.
pub fn fixed_extents(superblock: &crate::format::superblock::Superblock) -> Vec<PhysicalExtent> {
    let mut extents = Vec::new();
    for (_, device) in superblock.devices.present() {
        extents.push(device.first);
        extents.push(PhysicalExtent(device.first.0 + device.extents - 1));
    }
    let wal = superblock.wal_start.0;
    extents.extend((wal..wal + u64::from(superblock.wal_extents)).map(PhysicalExtent));
    extents
}

/// References counted from the directories down.
#[derive(Default)]
struct Recount {
    leaves: BTreeMap<LeafId, (u32, crate::units::SlotIndex)>,
    /// Extents by leaf references, not by volumes, since sharing is stored that way.
    extents: BTreeMap<PhysicalExtent, u32>,
}

fn held_extents(volume: &Volume) -> Vec<PhysicalExtent> {
    let mut held = Vec::new();
    volume.for_each_reserved(|extent| held.push(extent));
    held
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::time::Duration;

    use super::super::testing;
    use super::*;

    #[test]
    fn listing_volumes_does_not_wait_for_their_accounting() {
        let (pool, volume) = (testing::pool(), testing::volume(1, "a"));
        pool.volumes.write().insert(Arc::clone(&volume));
        let held = volume.reserve.lock();
        let counting = std::thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.summaries()
        });
        // Two references are held here; the third belongs to the counting thread, which waits for
        // the lock.
        for _ in 0..1_000_000 {
            if Arc::strong_count(&volume) > 2 {
                break;
            }
            std::thread::yield_now();
        }
        assert!(pool.volumes.try_write_for(Duration::from_secs(10)).is_some());
        drop(held);
        assert_eq!(counting.join().unwrap().len(), 1);
    }
}
