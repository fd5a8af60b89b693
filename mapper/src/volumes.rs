//! The volumes of a pool, found by id and by name.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use crate::format::name::VolumeName;
use crate::units::VolumeId;
use crate::volume::Volume;

/// All volumes and snapshots, by id.
#[derive(Debug, Default)]
pub(crate) struct Volumes {
    by_id: BTreeMap<VolumeId, Arc<Volume>>,
    by_name: HashMap<VolumeName, VolumeId>,
    /// How many there are of each lineage.
    families: HashMap<VolumeId, usize>,
}

impl Volumes {
    pub(crate) fn insert(&mut self, volume: Arc<Volume>) {
        let identity = &volume.identity;
        self.by_name.insert(identity.name, identity.id);
        *self.families.entry(identity.lineage).or_default() += 1;
        self.by_id.insert(identity.id, volume);
    }

    pub(crate) fn remove(&mut self, id: VolumeId) {
        let Some(volume) = self.by_id.remove(&id) else { return };
        let identity = &volume.identity;
        if self.by_name.get(&identity.name) == Some(&id) {
            self.by_name.remove(&identity.name);
        }
        if let Some(count) = self.families.get_mut(&identity.lineage) {
            *count -= 1;
            if *count == 0 {
                self.families.remove(&identity.lineage);
            }
        }
    }

    pub(crate) fn named(&self, name: &VolumeName) -> Option<&Arc<Volume>> {
        self.by_id.get(self.by_name.get(name)?)
    }

    /// How many volumes and snapshots there are of a lineage.
    pub(crate) fn family(&self, lineage: VolumeId) -> usize {
        self.families.get(&lineage).copied().unwrap_or(0)
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
    use crate::format::catalogue::VolumeKind;
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
            name: VolumeName::new(name).unwrap(),
        };
        Arc::new(Volume::new(identity, 4096, Directory::new(1).unwrap()))
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
}
