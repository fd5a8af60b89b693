//! The space policy of pools as it is configured: checked against the pools, and applied while
//! they are served.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::path::Path;

use blockd_engine::pool::{Policy, PoolHandle};
use blockd_media::error::{Error, shown};
use blockd_media::pool::is_there;
use blockd_media::units::exact;

use crate::config::{DeviceConfig, PoolConfig, SizeWish, SpaceConfig};

use super::Control;

impl Control {
    /// Applies the configured space policy of pools from now on. Pools that were made at run time,
    /// and are in no file, get that of the first. Where one is refused, nothing is changed. Returns
    /// the names of those that it changed.
    pub fn apply_space(&self, configured: &[PoolConfig]) -> Result<Vec<String>, Error> {
        let Some(first) = configured.first() else { return Ok(Vec::new()) };
        let mut changes = Vec::new();
        for known in self.known_pools() {
            let name = known.config.name.clone();
            let space = match configured.iter().find(|pool| pool.name == name) {
                Some(pool) => pool.space.clone(),
                None => self.space_at(&known.config.devices[0].path, first.space.clone()),
            };
            if space == known.config.space {
                continue;
            }
            if let Ok(handle) = &known.state {
                let total = handle.devices().iter().map(|device| device.size).sum();
                check_quantum(&name, space.quantum, total)?;
            }
            changes.push((name, space));
        }
        *self.0.space_of_new_pools.write() = first.space.clone();
        let mut changed = Vec::new();
        for (name, space) in changes {
            let mut pools = self.0.pools.write();
            let Some(known) = pools.get_mut(&name) else { continue };
            let before = known.config.read_cache();
            known.config.space = space;
            let cache = known.config.read_cache();
            let handle = known.state.as_ref().ok().cloned();
            if let Some(handle) = &handle {
                apply(handle, &known.config.space);
            }
            drop(pools);
            // It is emptied by that. To give its memory back may take long, and nothing waits.
            if let Some(handle) = handle.filter(|_| cache != before) {
                handle.mapper().set_read_cache(cache);
                // Reads that waited for pages of the former one look again.
                handle.pass_on();
            }
            changed.push(name);
        }
        Ok(changed)
    }

    /// The space policy of a pool that is made or found at this path.
    pub(super) fn space_of_new(&self, path: &Path) -> SpaceConfig {
        self.space_at(path, self.0.space_of_new_pools.read().clone())
    }

    /// The space policy of a pool at this path that no file names. A cell has no read cache: a host
    /// may have hundreds of them, and their sum no limit.
    pub(super) fn space_at(&self, path: &Path, first: SpaceConfig) -> SpaceConfig {
        match self.is_in_cell(path) {
            true => SpaceConfig { read_cache: 0, ..first },
            false => first,
        }
    }

    /// The present space policy of a pool.
    pub(super) fn space_of(&self, pool: &str) -> Option<SpaceConfig> {
        self.0.pools.read().get(pool).map(|known| known.config.space.clone())
    }
}

fn apply(handle: &PoolHandle, space: &SpaceConfig) {
    let SpaceConfig { marks, quantum, fold_rate, .. } = *space;
    for policy in [Policy::Marks(marks), Policy::Quantum(quantum), Policy::FoldRate(fold_rate)] {
        if let Err(error) = handle.set_policy(policy) {
            tracing::warn!(pool = handle.name(), %error, "its space policy was not taken up");
        }
    }
}

/// Refuses a quantum that is more than the whole pool. The default is for pools of all sizes: less
/// is granted where many share little.
fn check_quantum(pool: &str, quantum: u64, total: u64) -> Result<(), Error> {
    if quantum <= total || quantum <= SpaceConfig::default().quantum {
        return Ok(());
    }
    let allowed = format!("at most the pool's size, {}", exact(total));
    Err(Error::invalid(format!("space.quantum of pool {}", shown(pool)), quantum, allowed))
}

/// The same for a pool that isn't open yet, as far as its size is known.
pub(super) fn check_before_opening(pool: &PoolConfig) -> Result<(), Error> {
    let sizes: Option<Vec<u64>> = pool.devices.iter().map(size).collect();
    sizes.map_or(Ok(()), |sizes| check_quantum(&pool.name, pool.space.quantum, sizes.iter().sum()))
}

fn size(device: &DeviceConfig) -> Option<u64> {
    match device.size {
        SizeWish::Bytes(bytes) if !is_there(&device.path) => Some(bytes),
        // The size of a block device is where its end is. A character device does not report one.
        _ => File::open(&device.path).ok()?.seek(SeekFrom::End(0)).ok().filter(|&size| size > 0),
    }
}

#[cfg(test)]
mod tests {
    use blockd_api::v1;
    use blockd_engine::pool::{Mark, Marks};
    use tonic::Code;

    use super::*;
    use crate::services::testing::{Folder, Rig, folder, folder_on_disk, memory_pool};
    use crate::services::tests::{MIB, create, refused};
    use crate::services::tests_of_cells::creation;

    fn pool(name: &str, space: SpaceConfig) -> PoolConfig {
        PoolConfig { space, ..memory_pool(name) }
    }

    #[tokio::test]
    async fn a_policy_is_taken_up_by_all_pools_or_by_none() {
        let rig = Rig::new().await;
        for name in ["other", "unnamed"] {
            rig.control.open_pool(&memory_pool(name)).await.unwrap();
        }
        let marks = Some(Marks { low: Mark::Percent(9), very_low: Mark::Percent(3) });
        let fold_rate = 1 << 20;
        let quantum = |quantum| SpaceConfig { quantum, marks, fold_rate, ..SpaceConfig::default() };
        let before = SpaceConfig::default();
        // The pools have 64 MiB.
        let wrong = [pool("default", quantum(1 << 20)), pool("other", quantum(65 << 20))];
        let error = rig.control.apply_space(&wrong).unwrap_err().to_string();
        assert!(error.starts_with("space.quantum of pool other is 68157440"), "{error}");
        for name in ["default", "other", "unnamed"] {
            assert_eq!(rig.control.space_of(name), Some(before.clone()), "{name}");
        }
        let right = [pool("default", quantum(1 << 20)), pool("other", before.clone())];
        assert_eq!(rig.control.apply_space(&right).unwrap(), ["default", "unnamed"]);
        assert_eq!(rig.control.apply_space(&right).unwrap(), [""; 0]);
        // One that is made from now on goes by the first, too.
        assert_eq!(*rig.control.0.space_of_new_pools.read(), quantum(1 << 20));
        let granted = |name| rig.control.pool(name).unwrap().mapper().quantum_bytes();
        // Each thread handles its messages in order.
        rig.control.pool("default").unwrap().own_space().await.unwrap();
        assert_eq!((granted("default"), granted("other")), (1 << 20, 16 << 20));
        for (name, rate) in [("default", 1 << 20), ("unnamed", 1 << 20), ("other", 64 << 20)] {
            let folds = rig.control.pool(name).unwrap().folds(false).await.unwrap();
            assert_eq!(folds.rate, rate, "{name}");
        }
    }

    /// A daemon with a cell of 64 MiB, the pool `one`.
    async fn with_cell(place: &Folder) -> Rig {
        let mut rig = Rig::without_pool(folder()).await;
        let request = v1::AddVolumeGroupRequest {
            name: "san".to_owned(),
            folder: place.path().display().to_string(),
            ..Default::default()
        };
        rig.client.add_volume_group(request).await.unwrap();
        rig.client.create_cell(creation("one")).await.unwrap();
        rig
    }

    #[tokio::test]
    async fn volumes_of_a_cell_are_not_limited_by_its_first_size() {
        let place = folder_on_disk();
        let mut rig = with_cell(&place).await;
        let space = SpaceConfig { overprovision_percent: Some(200), ..SpaceConfig::default() };
        rig.control.apply_space(&[pool("default", space)]).unwrap();
        let large = v1::CreateVolumeRequest { pool: "one".to_owned(), ..create("v", 1000 * MIB) };
        rig.client.create_volume(large).await.unwrap();
    }

    #[tokio::test]
    async fn cells_have_no_read_cache_whatever_the_first_pool_has() {
        let (place, read_cache) = (folder_on_disk(), 64 << 20);
        let mut rig = with_cell(&place).await;
        let space = SpaceConfig { read_cache, ..SpaceConfig::default() };
        rig.control.apply_space(&[pool("default", space)]).unwrap();
        rig.client.create_cell(creation("two")).await.unwrap();
        let (name, group) = ("two".to_owned(), "san".to_owned());
        let release = v1::ReleaseCellRequest { group: group.clone(), name, force: false };
        rig.client.release_cell(release).await.unwrap();
        let name = "two".to_owned();
        let take = v1::TakeCellRequest { group, name, ..Default::default() };
        rig.client.take_cell(take).await.unwrap();
        for name in ["one", "two"] {
            let handle = rig.control.pool(name).unwrap();
            assert_eq!(handle.mapper().read_cache_status().limit, 0, "{name}");
        }
        // Nor at the next start.
        let mut options = rig.control.0.options.clone();
        options.template.space.read_cache = read_cache;
        let next = Control::new(options, std::sync::Arc::clone(&rig.data_path) as _).unwrap();
        next.start_groups().await.unwrap();
        let remembered = next.remembered_pools().unwrap();
        assert!(remembered.len() == 2 && remembered.iter().all(|one| one.read_cache() == 0));
    }

    #[tokio::test]
    async fn a_refusal_for_want_of_space_names_what_is_needed_and_what_is_free() {
        let mut rig = Rig::new().await;
        rig.client.create_volume(create("v", 1000 * MIB)).await.unwrap();
        let shown = v1::GetPoolRequest { name: String::new() };
        let shown = rig.client.get_pool(shown).await.unwrap().into_inner().pool.unwrap();
        let asked = v1::ConfigureVolumeRequest {
            name: "v".to_owned(),
            reservation_bytes: Some(100 * MIB),
            ..Default::default()
        };
        let answer = rig.client.configure_volume(asked).await;
        // The space of its leaves is reserved with it: five extents of 64 KiB.
        let wanted = (100 * MIB + 5 * (64 << 10)).to_string();
        let said = refused(answer, Code::ResourceExhausted, "pool default", &wanted).to_string();
        let numbers = format!("{wanted} bytes needed, {} bytes free", shown.free_bytes);
        assert!(said.ends_with(&numbers), "{said}");

        let space = SpaceConfig { overprovision_percent: Some(1600), ..SpaceConfig::default() };
        rig.control.apply_space(&[pool("default", space)]).unwrap();
        let answer = rig.client.create_volume(create("w", 25 * MIB)).await;
        let pool = "pool default, whose volumes may have 1600 % of its size together";
        let wanted = (25 * MIB).to_string();
        let said = refused(answer, Code::ResourceExhausted, pool, &wanted).to_string();
        // Sixteen times 64 MiB, less the 1000 of the other.
        let numbers = format!("{wanted} bytes needed, {} bytes free", 24 * MIB);
        assert!(said.ends_with(&numbers), "{said}");
        rig.client.create_volume(create("w", 24 * MIB)).await.unwrap();
    }
}
