//! Export and import of pools: a pool is closed in order and forgotten here, and opened and
//! remembered where its devices are then.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_inspect::newest_copy;
use blockd_mapper::format::superblock::{COMPOSITE, Superblock};
use blockd_mapper::units::DeviceIndex;
use blockd_media::error::{Error, shown};
use blockd_media::pool::{Access, Offline, PmemOptions, is_there, kind_of};
use blockd_media::{lock_owner, same_device};

use super::begun::unmade;
use super::closing::How;
use super::places::paths_of;
use super::served::ServedPools;
use super::volumes::checked_name;
use super::{Control, EventKind, Known, blocking, hex, pool_error};
use crate::config::{DeviceConfig, DeviceKind, PoolConfig, SizeWish};

/// A pool that was found on its devices.
struct Found {
    newest: Superblock,
    devices: Vec<DeviceConfig>,
}

impl Control {
    /// Closes a pool in order and forgets it, if there is one of that name.
    pub(super) async fn export_pool(
        &self,
        asked: v1::ExportPoolRequest,
    ) -> Result<v1::ExportPoolResponse, Error> {
        let v1::ExportPoolRequest { name, force } = asked;
        checked_name(&name)?;
        self.not_for_direct(&name)?;
        let _name = self.0.making_pools.lock(&name).await;
        let known = self.0.pools.read().get(&name).cloned();
        let Some(known) = known else { return Ok(v1::ExportPoolResponse::default()) };
        self.refuse_configured(&name)?;
        if known.failure().is_some() && !known.is_closed() {
            let problem = "is not open, and can't be left clean: open it first";
            return Err(Error::in_use(format!("pool {}", shown(&name)), problem));
        }
        self.close_locked(&name, How::Call { force }).await?;
        let served = Arc::clone(&self.0.served);
        let found = blocking(move || found_again(&known, &served)).await?;
        if !found.newest.clean {
            let problem = "was not closed in order: open it first";
            return Err(Error::in_use(format!("pool {}", shown(&name)), problem));
        }
        // With those of a pool that was closed before.
        let attached = self.0.attachments.of_pool(&name);
        let detached_volumes = attached.iter().map(|one| one.record.volume.clone()).collect();
        self.forget_pool(&name).await?;
        let text = format!("pool {} was closed and forgotten, to be imported", shown(&name));
        self.events().publish(EventKind::PoolExported, &name, "", text);
        Ok(v1::ExportPoolResponse {
            changed: true,
            detached_volumes,
            id: hex(&found.newest.pool_id),
            paths: found.devices.iter().map(|one| one.path.display().to_string()).collect(),
        })
    }

    /// Opens a pool that lies on these devices, and remembers it.
    pub(super) async fn import_pool(
        &self,
        asked: v1::ImportPoolRequest,
    ) -> Result<v1::ImportPoolResponse, Error> {
        let v1::ImportPoolRequest { name, paths } = asked;
        checked_name(&name)?;
        self.not_for_direct(&name)?;
        let paths = checked_paths(&paths)?;
        let _name = self.0.making_pools.lock(&name).await;
        let known = self.0.pools.read().get(&name).cloned();
        if let Some(known) = known {
            let same = known.clone();
            blocking(move || same_devices(&same, &paths)).await?;
            self.remember_again(&known.config).await?;
            let pool = Some(self.describe_pool(&known).await?);
            return Ok(v1::ImportPoolResponse { changed: false, pool });
        }
        let places = paths.iter().map(|path| path.display().to_string()).collect();
        let _places = self.0.making_pools.lock_all(places).await;
        self.refuse_known_devices(&name, &paths).await?;
        let (pool, places) = (name.clone(), paths.clone());
        let found = blocking(move || {
            let found = found(&pool, &places)?;
            refuse_owned(&places)?;
            Ok(found)
        })
        .await?;
        refuse_incomplete(&name, &found)?;
        let id = found.newest.pool_id;
        self.open_found(self.config_of_found(&name, found), id).await?;
        let pool = Some(self.describe_pool(&self.known(&name)?).await?);
        Ok(v1::ImportPoolResponse { changed: true, pool })
    }

    fn config_of_found(&self, name: &str, found: Found) -> PoolConfig {
        PoolConfig {
            name: name.to_owned(),
            extent_size: found.newest.extent_size,
            composite: found.newest.incompat & COMPOSITE != 0,
            space: self.space_of_new(&found.devices[0].path),
            devices: found.devices,
            spares: Vec::new(),
            region: None,
            volatile: false,
            accept_loss: false,
            extend_socket: None,
            ..self.0.options.template.clone()
        }
    }

    /// Reads the superblocks of the pool on one device, and gives how it is opened by this name.
    pub(super) async fn found_pool(
        &self,
        name: &str,
        path: &Path,
    ) -> Result<(PoolConfig, Superblock), Error> {
        let (pool, paths) = (name.to_owned(), vec![path.to_owned()]);
        let found = blocking(move || found(&pool, &paths)).await?;
        refuse_incomplete(name, &found)?;
        let newest = found.newest.clone();
        Ok((self.config_of_found(name, found), newest))
    }

    /// Refuses devices that a pool of another name has, open or not, under whatever path. And those
    /// of cells that are marked as new: `blockd cell create` would clear a pool in them.
    pub(super) async fn refuse_known_devices(
        &self,
        name: &str,
        paths: &[PathBuf],
    ) -> Result<(), Error> {
        let others: Vec<_> =
            self.known_pools().into_iter().filter(|known| known.config.name != name).collect();
        for path in paths {
            let Some((group, cell)) = self.0.groups.cell_at(path) else { continue };
            let found = self.find_cell(&group, &cell).await?;
            if let Some(new) = found.filter(|found| found.is_new) {
                return Err(unmade(&group, &new));
            }
        }
        let paths = paths.to_vec();
        blocking(move || {
            for known in others {
                let own = [known.paths(), paths_of(&known.config.spares)].concat();
                let is_own = |path: &&PathBuf| own.iter().any(|one| is_same(one, path));
                if let Some(path) = paths.iter().find(is_own) {
                    let problem = format!("belongs to pool {}", shown(&known.config.name));
                    return Err(Error::in_use(path.display().to_string(), problem));
                }
            }
            Ok(())
        })
        .await
    }
}

/// Whether two paths lead to the same place; what is not there is compared by its path. Blocks.
fn is_same(one: &Path, other: &Path) -> bool {
    one == other || same_device(one, other)
}

fn checked_paths(paths: &[String]) -> Result<Vec<PathBuf>, Error> {
    if paths.is_empty() {
        return Err(Error::invalid("paths", "", "the paths of all files or disks of the pool"));
    }
    let mut checked: Vec<PathBuf> = Vec::new();
    for text in paths {
        let path = PathBuf::from(text);
        if !path.is_absolute() || text.contains('\0') || checked.contains(&path) {
            return Err(Error::invalid("paths", text, "an absolute path, named once"));
        }
        checked.push(path);
    }
    Ok(checked)
}

/// Refuses a pool of that name with other devices, and one that only an opening can serve. Blocks.
fn same_devices(known: &Known, asked: &[PathBuf]) -> Result<(), Error> {
    let own = known.paths();
    let is_own = |path: &PathBuf| own.iter().any(|one| is_same(one, path));
    let name = shown(&known.config.name);
    let text = |paths: &[PathBuf]| {
        paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    if own.len() != asked.len() || !asked.iter().all(is_own) {
        let (field, existing, asked) = ("path".to_owned(), text(&own), text(asked));
        return Err(Error::Exists { what: "pool", name, field, existing, asked });
    }
    match known.failure() {
        None => Ok(()),
        Some(_) => {
            let problem = "is known here and not open: open it with `blockd pool open`";
            Err(Error::in_use(format!("pool {name}"), problem))
        }
    }
}

/// Reads the superblocks of a pool that was closed, and refuses another pool in its place. Of the
/// spares, those belong to it that it has taken. Blocks.
fn found_again(known: &Known, served: &ServedPools) -> Result<Found, Error> {
    let name = &known.config.name;
    let (mut paths, spares, id) = match &known.state {
        Ok(handle) => (known.paths(), Vec::new(), Some(hex(&handle.id()))),
        Err(_) => {
            let spares = paths_of(&known.config.spares);
            (paths_of(&known.config.devices), spares, served.id_of(name)?)
        }
    };
    let pool = found(name, &paths)?;
    let present = hex(&pool.newest.pool_id);
    if id.is_some_and(|id| !id.is_empty() && id != present) {
        let path = paths.iter().map(|path| path.display().to_string()).next().unwrap_or_default();
        let problem = format!("holds another pool, {present}, and not pool {}", shown(name));
        return Err(Error::in_use(path, problem));
    }
    let is_taken = |spare: &PathBuf| {
        let found = found(name, std::slice::from_ref(spare));
        found.is_ok_and(|found| found.newest.pool_id == pool.newest.pool_id)
    };
    let taken: Vec<_> = spares.into_iter().filter(is_taken).collect();
    if taken.is_empty() {
        return Ok(pool);
    }
    paths.extend(taken);
    found(name, &paths)
}

/// Reads the superblocks of a pool's devices, without a lock. Blocks.
fn found(pool: &str, paths: &[PathBuf]) -> Result<Found, Error> {
    if let Some(absent) = paths.iter().find(|path| !is_there(path)) {
        return Err(Error::not_found("path", &absent.display().to_string()));
    }
    let opened = Offline::open(paths, Access::Look, Duration::ZERO);
    let mut offline = opened.map_err(|error| pool_error(pool, error))?;
    let present = offline.present().to_vec();
    let (mut newest, mut devices): (Option<Superblock>, Vec<_>) = (None, Vec::new());
    for (at, (path, one)) in paths.iter().zip(&present).enumerate() {
        let device = DeviceIndex(u8::try_from(at).unwrap_or(u8::MAX));
        let Some(copy) = newest_copy(&mut offline, device, one) else {
            let problem = "holds no pool that can be read";
            return Err(Error::in_use(path.display().to_string(), problem));
        };
        if newest.as_ref().is_some_and(|other| other.pool_id != copy.pool_id) {
            let problem = format!("holds another pool, {}", hex(&copy.pool_id));
            return Err(Error::in_use(path.display().to_string(), problem));
        }
        if newest.as_ref().is_none_or(|other| other.generation < copy.generation) {
            newest = Some(copy);
        }
        devices.push(device_config(path)?);
    }
    let newest = newest.ok_or_else(|| Error::not_found("pool", pool))?;
    Ok(Found { newest, devices })
}

fn device_config(path: &Path) -> Result<DeviceConfig, Error> {
    let kind = kind_of(path).map_err(|error| Error::file("examine", path, error))?;
    let kind = match kind {
        blockd_media::DeviceKind::Pmem(_) => DeviceKind::Pmem(PmemOptions::default()),
        _ => DeviceKind::Auto,
    };
    let size = SizeWish::Existing;
    Ok(DeviceConfig { path: path.to_owned(), kind, size, preallocate: false, direct: true })
}

/// Refuses what a living process has, at once: an opening would wait for its end. Blocks.
pub(super) fn refuse_owned(paths: &[PathBuf]) -> Result<(), Error> {
    for path in paths {
        let owner = File::open(path).ok().and_then(|file| lock_owner(&file));
        if let Some(process) = owner {
            let problem =
                format!("is in use by process {process}: close or export its pool there first");
            return Err(Error::in_use(path.display().to_string(), problem));
        }
    }
    Ok(())
}

fn refuse_incomplete(name: &str, found: &Found) -> Result<(), Error> {
    let (all, given) = (found.newest.devices.present().count(), found.devices.len());
    if all == given {
        return Ok(());
    }
    let problem = format!(
        "has {all} devices, and {given} are named: name all of them (`blockd pool scan` finds them)"
    );
    Err(Error::in_use(format!("pool {}", shown(name)), problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::testing::{Rig, memory_pool};

    #[tokio::test]
    async fn another_pool_than_the_one_that_was_found_is_not_imported() {
        let mut rig = Rig::new().await;
        let path = rig.folder.path().join("p.pool");
        let (kind, size) = (DeviceKind::Auto, SizeWish::Bytes(64 << 20));
        let device =
            DeviceConfig { path: path.clone(), kind, size, preallocate: false, direct: true };
        let config = PoolConfig { devices: vec![device], volatile: true, ..memory_pool("p") };
        rig.control.create_pool(config.clone(), false).await.unwrap();
        let name = "p".to_owned();
        let export = v1::ExportPoolRequest { name: name.clone(), force: false };
        rig.client.export_pool(export).await.unwrap();
        // The device was exchanged after it was read and before it was opened.
        let error = rig.control.open_found(config, [7; 16]).await.unwrap_err();
        assert!(error.to_string().contains("holds another pool than"), "{error}");
        assert!(rig.control.known("p").is_err());
        let paths = vec![path.display().to_string()];
        let import = v1::ImportPoolRequest { name, paths };
        assert!(rig.client.import_pool(import).await.unwrap().into_inner().changed);
    }
}
