//! Deleting a pool: it is closed, forgotten, and erased from its devices, in this order. A crash in
//! between leaves it whole, or forgotten. A cell is marked as new before its pool is erased: from
//! there on it is made anew or deleted, wherever the erasure stops.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_api::v1;
use blockd_mapper::claim::Claimant;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::error::{Error, shown};
use blockd_media::pool::ring_file::ring_path;
use blockd_media::pool::{Erasing, is_there, ring_dir, storage};
use blockd_media::units::counted;

use super::closing::How;
use super::messages::count;
use super::opening::Remembered;
use super::volumes::checked_name;
use super::{Control, EventKind, Known, blocking, hex, pool_error};
use crate::config::PoolConfig;

/// The state of a pool whose cell could not be marked.
const NOT_ERASED: &str =
    "the pool is forgotten and was not erased: `blockd cell take` opens it again";

/// A pool that is not open any more and is about to be erased.
pub(super) struct Doomed {
    config: PoolConfig,
    /// The paths of its devices; none of a pool in memory.
    paths: Vec<PathBuf>,
    /// Its identity, where that is known.
    id: Option<[u8; 16]>,
    /// Files that were made for it.
    made: Vec<PathBuf>,
    runtime_dir: PathBuf,
    /// As of `PoolSpec`.
    pub(super) leased_until_ns: u64,
}

impl Control {
    /// Deletes a pool, if there is one of that name.
    pub(super) async fn delete_pool(
        &self,
        asked: v1::DeletePoolRequest,
    ) -> Result<v1::DeletePoolResponse, Error> {
        let v1::DeletePoolRequest { name, force } = asked;
        checked_name(&name)?;
        self.not_for_direct(&name)?;
        let _name = self.0.making_pools.lock(&name).await;
        let known = self.0.pools.read().get(&name).cloned();
        let Some(known) = known else { return Ok(v1::DeletePoolResponse::default()) };
        self.refuse_configured(&name)?;
        let (volumes, snapshots) = volumes_of(&known);
        if !force {
            refuse_content(&known, volumes, snapshots)?;
        }
        let doomed = self.doomed(&known).await?;
        self.close_locked(&name, How::Delete).await?;
        if !force {
            // One may have been made since, and answered.
            self.refuse_new_content(&known).await?;
        }
        let devices = self.erase(doomed).await?;
        let text = format!("pool {} was deleted", shown(&name));
        self.events().publish(EventKind::PoolDeleted, &name, "", text);
        Ok(v1::DeletePoolResponse {
            changed: true,
            deleted_volumes: count(volumes),
            deleted_snapshots: count(snapshots),
            devices,
        })
    }

    /// Opens a pool again in which a volume was created while it was to be deleted, and serves it
    /// as before. The caller has the name's lock.
    async fn refuse_new_content(&self, known: &Known) -> Result<(), Error> {
        let Ok(handle) = &known.state else { return Ok(()) };
        if handle.mapper().summaries().is_empty() {
            return Ok(());
        }
        let name = &known.config.name;
        self.reopen_extents(name).await?;
        let problem = "has a volume that was created meanwhile: delete it first, or use force";
        Err(Error::in_use(format!("pool {}", shown(name)), problem))
    }

    pub(super) async fn doomed(&self, known: &Known) -> Result<Doomed, Error> {
        let config = known.config.clone();
        let (paths, id) = match &known.state {
            Ok(handle) => (known.paths(), Some(handle.id())),
            Err(_) => {
                let (served, name) = (Arc::clone(&self.0.served), config.name.clone());
                let id = blocking(move || served.id_of(&name)).await?;
                (known.paths(), id.as_deref().and_then(parse_id))
            }
        };
        let remembered = self.0.remembered.clone();
        let all: Vec<Remembered> = blocking(move || remembered.read()).await?;
        let made = all.into_iter().filter(|one| one.name == config.name);
        let made = made.filter_map(Remembered::made_file).collect();
        let runtime_dir = self.0.options.runtime_dir.clone();
        // This call does not look whether this host still has the lease.
        let mut groups = paths.iter().filter_map(|path| self.0.groups.cell_at(path));
        let is_leased = groups.any(|(group, _)| group.has_keys());
        let leased_until_ns = if is_leased { Claimant::UNLEASED } else { 0 };
        Ok(Doomed { config, paths, id, made, runtime_dir, leased_until_ns })
    }

    /// Forgets a pool that is closed, and erases it. Nothing is forgotten when its devices can't be
    /// locked.
    async fn erase(&self, doomed: Doomed) -> Result<Vec<v1::ErasedDevice>, Error> {
        let (name, paths) = (doomed.config.name.clone(), doomed.paths.clone());
        let (erasing, doomed) = blocking(move || Ok((doomed.lock()?, doomed))).await?;
        self.forget_pool(&name).await?;
        let Some(erasing) = erasing else {
            return Ok(paths.iter().map(|path| erased(path, &[], &doomed.made)).collect());
        };
        self.mark_cell(&paths).await?;
        let done = blocking(move || {
            let gone = erasing.erase(&doomed.made).map_err(|error| {
                let error = pool_error(&doomed.config.name, error);
                let problem = format!(
                    "is forgotten, and erased in part or not at all: {error}; zero the first \
                     and last 2 MiB of its devices yourself, or remove the files"
                );
                Error::in_use(format!("pool {}", shown(&doomed.config.name)), problem)
            })?;
            doomed.remove_ring();
            Ok(paths.iter().map(|path| erased(path, &gone, &doomed.made)).collect())
        });
        done.await
    }

    /// Marks the cell in which a pool lies as new. The pool is forgotten before, and no other is
    /// made or opened there: `blockd cell create` clears a cell that has the mark.
    async fn mark_cell(&self, paths: &[PathBuf]) -> Result<(), Error> {
        let found = paths.iter().find_map(|path| self.0.groups.cell_at(path));
        let Some((group, cell)) = found else { return Ok(()) };
        let marked = self.coordinate(&group, move |leases| leases.mark_new(&cell)).await;
        marked.map_err(|error| error.with_note(NOT_ERASED))
    }

    /// Forgets a pool durably. With an error before the list of pools is written, the next start
    /// has the whole pool, with its attachments.
    pub(super) async fn forget_pool(&self, name: &str) -> Result<(), Error> {
        let attached = self.0.attachments.of_pool(name);
        self.forget_but_attachments(name).await?;
        let places = attached.iter().map(|one| (name.to_owned(), one.record.volume.clone()));
        self.0.attachments.remove(places.collect()).await?;
        Ok(())
    }

    /// The same of one whose clients wait for it: it is open on another host.
    pub(super) async fn forget_but_attachments(&self, name: &str) -> Result<(), Error> {
        let (served, regions) = (Arc::clone(&self.0.served), Arc::clone(&self.0.regions));
        let pool = name.to_owned();
        blocking(move || {
            served.forget(&pool)?;
            regions.forget(&pool)
        })
        .await?;
        let pool = name.to_owned();
        self.change_remembered(move |list| list.retain(|one| one.name != pool)).await?;
        self.note_closed(name, false).await?;
        self.forget_extend(name).await;
        self.0.pools.write().remove(name);
        Ok(())
    }

    /// Sets the names of the pools that the configuration has.
    pub fn set_configured(&self, names: impl IntoIterator<Item = String>) {
        *self.0.configured.write() = names.into_iter().collect();
    }

    /// Whether there is a pool of this name, or one is remembered, on other devices.
    ///
    /// # Errors
    /// If the list of remembered pools can't be read.
    pub fn has_pool_elsewhere(&self, config: &PoolConfig) -> Result<bool, Error> {
        let known = self.0.pools.read().get(&config.name).map(|known| known.config.clone());
        let mut all = self.remembered_pools()?;
        all.extend(known);
        Ok(all.iter().any(|one| lies_elsewhere(one, config)))
    }

    /// Refuses to forget a pool that the configuration names: the next start would open it, or make
    /// another one in its place.
    pub(super) fn refuse_configured(&self, name: &str) -> Result<(), Error> {
        if !self.0.configured.read().contains(name) {
            return Ok(());
        }
        let problem = "is named by the configuration, or is the pool of one without any: remove \
                       its [[pool]] table, or name another pool, and reload the daemon first \
                       (systemctl reload blockd, or SIGHUP)";
        Err(Error::in_use(format!("pool {}", shown(name)), problem))
    }
}

/// Whether two pools have one name, and lie in different places.
pub(super) fn lies_elsewhere(one: &PoolConfig, other: &PoolConfig) -> bool {
    let path = |config: &PoolConfig| config.devices.first().map(|device| device.path.clone());
    one.name == other.name && path(one) != path(other)
}

impl Doomed {
    /// Locks the devices that are there; `None` where nothing can be erased. Blocks.
    fn lock(&self) -> Result<Option<Erasing>, Error> {
        let present: Vec<_> = self.paths.iter().filter(|path| is_there(path)).cloned().collect();
        let (Some(id), false) = (self.id, present.is_empty()) else { return Ok(None) };
        let erasing = Erasing::open(&present, &id, self.config.claim_wait, self.leased_until_ns);
        erasing.map_err(|error| pool_error(&self.config.name, error))
    }

    /// Removes the delta ring of a pool that was not closed in order.
    fn remove_ring(&self) {
        let Some(id) = self.id else { return };
        let ring = ring_path(&ring_dir(&self.runtime_dir), &id);
        let _ = std::fs::remove_file(storage::file_of(&ring));
        let _ = std::fs::remove_file(ring);
    }
}

fn erased(path: &Path, gone: &[PathBuf], made: &[PathBuf]) -> v1::ErasedDevice {
    let is_in = |list: &[PathBuf]| list.iter().any(|one| one == path);
    let erased = is_in(gone);
    v1::ErasedDevice { path: path.display().to_string(), removed: erased && is_in(made), erased }
}

/// The number of volumes and snapshots of a pool that serves.
fn volumes_of(known: &Known) -> (usize, usize) {
    let (Ok(handle), None) = (&known.state, known.failure()) else { return (0, 0) };
    let all = handle.mapper().summaries();
    let snapshots = all.iter().filter(|one| one.kind == VolumeKind::Snapshot).count();
    (all.len() - snapshots, snapshots)
}

/// Refuses a pool that has volumes, or may have some as it is not open.
fn refuse_content(known: &Known, volumes: usize, snapshots: usize) -> Result<(), Error> {
    let problem = match (known.failure(), volumes + snapshots) {
        (None, 0) => return Ok(()),
        (None, _) => format!(
            "has {} and {}: delete them first, or use force",
            counted(volumes, "volume"),
            counted(snapshots, "snapshot")
        ),
        (Some(_), _) => "is not open, and may have volumes: open it first, or use force".to_owned(),
    };
    Err(Error::in_use(format!("pool {}", shown(&known.config.name)), problem))
}

/// An identity of 32 hexadecimal digits.
fn parse_id(text: &str) -> Option<[u8; 16]> {
    let id = u128::from_str_radix(text, 16).ok()?.to_be_bytes();
    (hex(&id) == text).then_some(id)
}

#[cfg(test)]
mod tests {
    use blockd_serve::nbd::Exports as _;

    use super::*;
    use crate::services::testing::{Rig, file_pool, folder};
    use crate::services::tests::{MIB, attach, create};

    #[tokio::test]
    async fn a_pool_with_a_new_volume_is_served_again_with_its_attachments() {
        let mut rig = Rig::without_pool(folder()).await;
        let config = file_pool("default", &rig.folder.path().join("pool"));
        rig.control.open_pool(&config).await.unwrap();
        let known = rig.control.known("default").unwrap();
        // A call creates and attaches a volume when the pool was found empty.
        rig.client.create_volume(create("a", MIB)).await.unwrap();
        rig.client.attach_volume(attach("a")).await.unwrap();
        rig.control.close_locked("default", How::Delete).await.unwrap();
        let error = rig.control.refuse_new_content(&known).await.unwrap_err();
        assert!(error.to_string().contains("created meanwhile"), "{error}");
        let exported = rig.control.open("a").await.unwrap().volume;
        let mut is_connected = false;
        exported.if_attached(|_| is_connected = true);
        assert!(is_connected, "no client can connect to an attached volume");
    }
}
