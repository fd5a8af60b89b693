//! The volumes of a pool, found by id and by name, with sums over them: a call that needs a sum
//! takes the same time however many volumes there are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use crate::format::catalogue::VolumeKind;
use crate::format::name::VolumeName;
use crate::sync::Ordering;
use crate::units::VolumeId;
use crate::volume::Volume;

/// Sums over the volumes and snapshots of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sums {
    /// How many there are.
    pub count: usize,
    /// How many of these are snapshots.
    pub snapshots: usize,
    /// Bytes that they have together.
    pub size: u64,
    /// Bytes that the volumes have together, snapshots not counted: these are promised to clients.
    pub promised: u64,
    /// Bytes that are set aside for them, those that they have included.
    pub set_aside: u64,
}

/// The part of the sums that one volume accounts for.
#[derive(Clone, Copy, Debug)]
struct Part {
    size: u64,
    set_aside: u64,
    is_snapshot: bool,
}

/// The sums without the count. Sizes of all volumes together may exceed 64 bits.
#[derive(Debug, Default)]
struct Totals {
    snapshots: usize,
    size: u128,
    promised: u128,
    set_aside: u128,
}

impl Totals {
    fn add(&mut self, part: Part) {
        self.snapshots += usize::from(part.is_snapshot);
        self.size += u128::from(part.size);
        self.promised += if part.is_snapshot { 0 } else { u128::from(part.size) };
        self.set_aside += u128::from(part.set_aside);
    }

    fn subtract(&mut self, part: Part) {
        self.snapshots -= usize::from(part.is_snapshot);
        self.size -= u128::from(part.size);
        self.promised -= if part.is_snapshot { 0 } else { u128::from(part.size) };
        self.set_aside -= u128::from(part.set_aside);
    }
}

/// All volumes and snapshots, by id.
#[derive(Debug, Default)]
pub(crate) struct Volumes {
    by_id: BTreeMap<VolumeId, Arc<Volume>>,
    by_name: HashMap<VolumeName, VolumeId>,
    /// The volumes of each lineage.
    families: HashMap<VolumeId, BTreeSet<VolumeId>>,
    /// The part of the totals that each accounts for.
    parts: HashMap<VolumeId, Part>,
    totals: Totals,
    /// Volumes with a quota.
    limited: BTreeSet<VolumeId>,
    /// Rises when a volume is added, removed or renamed.
    version: u64,
}

impl Volumes {
    pub(crate) fn insert(&mut self, volume: Arc<Volume>) {
        let identity = &volume.identity;
        self.by_name.insert(volume.name(), identity.id);
        self.families.entry(identity.lineage).or_default().insert(identity.id);
        let id = identity.id;
        self.by_id.insert(id, volume);
        self.version += 1;
        self.recount(id);
    }

    /// Counts a volume again, whose size or settings have changed.
    pub(crate) fn recount(&mut self, id: VolumeId) {
        if let Some(part) = self.parts.remove(&id) {
            self.totals.subtract(part);
        }
        self.limited.remove(&id);
        let Some(volume) = self.by_id.get(&id) else { return };
        let (size, settings) = (volume.size.load(Ordering::Acquire), *volume.settings.lock());
        let is_snapshot = volume.identity.kind == VolumeKind::Snapshot;
        let part = Part { size, set_aside: settings.set_aside(size), is_snapshot };
        self.totals.add(part);
        self.parts.insert(id, part);
        if settings.quota > 0 {
            self.limited.insert(id);
        }
    }

    pub(crate) fn remove(&mut self, id: VolumeId) {
        let Some(volume) = self.by_id.remove(&id) else { return };
        self.version += 1;
        self.recount(id);
        let identity = &volume.identity;
        self.forget_name(&volume);
        if let Some(family) = self.families.get_mut(&identity.lineage) {
            family.remove(&id);
            if family.is_empty() {
                self.families.remove(&identity.lineage);
            }
        }
    }

    /// Gives a volume another name.
    pub(crate) fn rename(&mut self, id: VolumeId, name: VolumeName) {
        let Some(volume) = self.by_id.get(&id).cloned() else { return };
        self.forget_name(&volume);
        volume.set_name(name);
        self.by_name.insert(name, id);
        self.version += 1;
    }

    fn forget_name(&mut self, volume: &Volume) {
        let name = volume.name();
        if self.by_name.get(&name) == Some(&volume.identity.id) {
            self.by_name.remove(&name);
        }
    }

    pub(crate) fn named(&self, name: &VolumeName) -> Option<&Arc<Volume>> {
        self.by_id.get(self.by_name.get(name)?)
    }

    /// How many volumes and snapshots there are of a lineage.
    pub(crate) fn family(&self, lineage: VolumeId) -> usize {
        self.families.get(&lineage).map_or(0, BTreeSet::len)
    }

    /// The volumes and snapshots of a lineage, by id.
    pub(crate) fn relatives(&self, lineage: VolumeId) -> impl Iterator<Item = &Arc<Volume>> {
        let family = self.families.get(&lineage).into_iter().flatten();
        family.filter_map(|id| self.by_id.get(id))
    }

    pub(crate) fn sums(&self) -> Sums {
        let bytes = |sum: u128| u64::try_from(sum).unwrap_or(u64::MAX);
        Sums {
            count: self.by_id.len(),
            snapshots: self.totals.snapshots,
            size: bytes(self.totals.size),
            promised: bytes(self.totals.promised),
            set_aside: bytes(self.totals.set_aside),
        }
    }

    /// Volumes with a quota.
    pub(crate) fn limited(&self) -> impl Iterator<Item = &Arc<Volume>> {
        self.limited.iter().filter_map(|id| self.by_id.get(id))
    }

    /// A number that rises when a volume is added, removed or renamed.
    pub(crate) const fn version(&self) -> u64 {
        self.version
    }
}

impl Deref for Volumes {
    type Target = BTreeMap<VolumeId, Arc<Volume>>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Directory;
    use crate::geometry::Geometry;
    use crate::space::VolumeSettings;
    use crate::units::{Lsn, WallTime};
    use crate::volume::Identity;

    fn volume(id: u32, lineage: u32, name: &str) -> Arc<Volume> {
        let identity = Identity {
            id: VolumeId(id),
            lineage: VolumeId(lineage),
            origin: VolumeId(0),
            kind: VolumeKind::Volume,
            block_size: 512,
            created: Lsn(1),
            made: WallTime::default(),
        };
        let name = VolumeName::new(name).unwrap();
        Arc::new(Volume::new(identity, name, 4096, Directory::new(1).unwrap()))
    }

    #[test]
    fn volumes_are_found_by_name_until_they_are_gone() {
        let mut all = Volumes::default();
        let found = |all: &Volumes, name: &str| {
            all.named(&VolumeName::new(name).unwrap()).map(|one| one.identity.id.0)
        };
        all.insert(volume(1, 1, "a"));
        all.insert(volume(2, 1, "b"));
        all.insert(volume(3, 3, "c"));
        assert_eq!(
            [found(&all, "a"), found(&all, "b"), found(&all, "d")],
            [Some(1), Some(2), None]
        );
        assert_eq!([1, 2, 3].map(|lineage| all.family(VolumeId(lineage))), [2, 0, 1]);
        all.remove(VolumeId(1));
        all.remove(VolumeId(7));
        assert_eq!((found(&all, "a"), all.family(VolumeId(1)), all.len()), (None, 1, 2));
        // The name of one that was removed is free.
        all.insert(volume(4, 4, "a"));
        assert_eq!(found(&all, "a"), Some(4));
        all.remove(VolumeId(2));
        assert_eq!(all.family(VolumeId(1)), 0);
    }

    #[test]
    fn a_renamed_volume_is_found_by_its_new_name_alone() {
        let mut all = Volumes::default();
        let name = |text: &str| VolumeName::new(text).unwrap();
        let found = |all: &Volumes, text: &str| all.named(&name(text)).map(|one| one.identity.id.0);
        all.insert(volume(1, 1, "a"));
        let before = all.version();
        all.rename(VolumeId(1), name("b"));
        all.rename(VolumeId(9), name("c"));
        assert_eq!(["a", "b", "c"].map(|text| found(&all, text)), [None, Some(1), None]);
        assert_eq!(all[&VolumeId(1)].name(), name("b"));
        assert!(all.version() > before);
        // Another one may have the former name, and the end of one leaves that of the other.
        all.insert(volume(2, 2, "a"));
        all.remove(VolumeId(1));
        assert_eq!((found(&all, "a"), found(&all, "b")), (Some(2), None));
    }

    #[test]
    fn sums_follow_each_change() {
        let mut all = Volumes::default();
        let geometry = Geometry::new(64 << 10).unwrap();
        let sums = |all: &Volumes| {
            let Sums { count, size, promised, set_aside, .. } = all.sums();
            (count, size, promised, set_aside, all.limited().count())
        };
        all.insert(volume(1, 1, "a"));
        all.insert(volume(2, 2, "b"));
        assert_eq!((sums(&all), all.version()), ((2, 8192, 8192, 0, 0), 2));
        let settings =
            VolumeSettings { reservation: 4096, quota: 1 << 20, ..VolumeSettings::default() };
        all[&VolumeId(2)].set(settings, geometry);
        all[&VolumeId(2)].size.store(16384, Ordering::Release);
        all.recount(VolumeId(2));
        assert_eq!((sums(&all), all.version()), ((2, 20480, 20480, 4096, 1), 2));
        all.remove(VolumeId(2));
        assert_eq!(sums(&all), (1, 4096, 4096, 0, 0));
        all.remove(VolumeId(1));
        assert_eq!((sums(&all), all.version()), ((0, 0, 0, 0, 0), 4));
    }
}
