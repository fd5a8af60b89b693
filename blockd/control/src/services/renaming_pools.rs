//! Pools that get another name while they are open. Names are not on the media.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_media::error::{Error, shown};
use blockd_media::names::check_new_name;

use super::making::Lock;
use super::volumes::checked_name;
use super::{Control, blocking, errors, hex};

/// Waiting for calls on the pool, while others wait for this one.
const LOCK_LIMIT: Duration = Duration::from_secs(20);

impl Control {
    /// Gives an open pool another name. A call that was carried out before changes nothing.
    pub(super) async fn rename_pool(
        &self,
        asked: v1::RenamePoolRequest,
    ) -> Result<v1::RenamePoolResponse, Error> {
        let v1::RenamePoolRequest { name: former, new_name: name } = asked;
        checked_name(&former)?;
        check_new_name(&name).map_err(|allowed| Error::invalid("new_name", &name, allowed))?;
        self.not_for_direct(&former)?;
        let names = self.0.making_pools.lock_all(vec![former.clone(), name.clone()]);
        let _names = tokio::time::timeout(LOCK_LIMIT, names).await.map_err(|_| {
            let problem = "is opened, closed or changed by another call: repeat this one";
            Error::in_use(format!("pool {}", shown(&former)), problem)
        })?;
        let is_known = |name: &str| self.is_direct(name) || self.0.pools.read().contains_key(name);
        let changed = match (is_known(&former), is_known(&name)) {
            (false, false) => return Err(Error::not_found("pool", &former)),
            (false, true) => false,
            (true, true) if former == name => false,
            (true, true) => {
                let problem = "exists: choose another name, or rename or delete that one first";
                return Err(Error::in_use(format!("pool {}", shown(&name)), problem));
            }
            (true, false) => {
                let handle = self.pool(&former)?;
                self.refuse_configured_names(&former, &name)?;
                self.refuse_remembered(&handle, &name).await?;
                let _locks = self.locks_to_rename(&handle, LOCK_LIMIT).await?;
                self.rename_locked_pool(&handle, &former, &name).await?;
                true
            }
        };
        let pool = Some(self.kind(&name).describe(&name).await?);
        Ok(v1::RenamePoolResponse { changed, pool })
    }

    /// Waits for calls on the pool's volumes and devices, for a limited time: some wait for space,
    /// which other calls add.
    pub(super) async fn locks_to_rename(
        &self,
        pool: &PoolHandle,
        limit: Duration,
    ) -> Result<[Lock; 2], Error> {
        let locks = async { [self.lock_volumes_of(pool).await, self.lock_devices_of(pool).await] };
        tokio::time::timeout(limit, locks).await.map_err(|_| {
            let problem = format!(
                "has calls on its volumes or devices that have not ended within {limit:?}: repeat \
                 the call"
            );
            Error::in_use(format!("pool {}", shown(pool.name())), problem)
        })
    }

    /// Refuses names of the configuration: the next start would open that pool by its name there.
    fn refuse_configured_names(&self, former: &str, name: &str) -> Result<(), Error> {
        let configured = self.0.configured.read();
        let problem = if configured.contains(former) || *former == self.0.options.default_pool {
            "is named by the configuration: change the name there ([[pool]], and default_pool if \
             that names it) and restart the daemon; the pool keeps its attachments, as it is known \
             by its identity"
        } else if configured.contains(name) {
            let problem = "is named by the configuration: choose another name, or restart the \
                           daemon to open that pool";
            return Err(Error::in_use(format!("pool {}", shown(name)), problem));
        } else {
            return Ok(());
        };
        Err(Error::in_use(format!("pool {}", shown(former)), problem))
    }

    /// Refuses a name by which another pool is remembered that is not there now.
    async fn refuse_remembered(&self, pool: &PoolHandle, name: &str) -> Result<(), Error> {
        let (served, id, wanted) = (Arc::clone(&self.0.served), hex(&pool.id()), name.to_owned());
        let known = blocking(move || served.id_of(&wanted)).await?;
        let is_other = |known: &str| !known.is_empty() && known != id;
        let attached = self.0.attachments.of_pool(name);
        if known.is_some_and(|known| is_other(&known))
            || attached.iter().any(|one| is_other(&one.record.pool_id))
        {
            let problem = "is the name of another pool that was served here and may come back: \
                           choose another name";
            return Err(Error::in_use(format!("pool {}", shown(name)), problem));
        }
        Ok(())
    }

    /// First all that is remembered, then all that is kept in memory.
    async fn rename_locked_pool(
        &self,
        pool: &PoolHandle,
        former: &str,
        name: &str,
    ) -> Result<(), Error> {
        if let Some(failure) = pool.failure() {
            return Err(errors::failed_pool(former, &failure));
        }
        if !pool.may_be_renamed() {
            let problem = "was renamed too often since it was opened: close it and open it first";
            return Err(Error::in_use(format!("pool {}", shown(former)), problem));
        }
        if pool.devices().iter().any(|device| self.is_in_cell(&device.path)) {
            let problem = "is a cell's, which has the same name on all hosts";
            return Err(Error::in_use(format!("pool {}", shown(former)), problem));
        }
        let _renaming = self.0.renaming.lock().await;
        // Crashes may have left the notes of earlier pools of these names.
        for name in [former, name] {
            self.note_closed(name, false).await?;
        }
        if let Err(error) = self.remember_name(pool, former, name).await {
            let Err(problem) = self.remember_name(pool, name, former).await else {
                return Err(error);
            };
            let problem = format!(
                "the next start of the daemon may open the pool as {}: {problem}; repeat the call",
                shown(name)
            );
            return Err(error.with_note(&problem));
        }
        self.0.health.rename_pool(pool, name);
        {
            let mut pools = self.0.pools.write();
            if let Some(mut known) = pools.remove(former) {
                name.clone_into(&mut known.config.name);
                pools.insert(name.to_owned(), known);
            }
        }
        self.data_path().each_volume(&mut |stats| {
            if stats.pool.is(former) {
                stats.pool.set(name);
            }
        });
        self.forget_extend(former).await;
        // The pool has its new name by now, whatever becomes of its devices' names.
        let text = format!("pool {} was renamed to {}", shown(former), shown(name));
        self.events().publish_renamed(former, name, text);
        self.rename_devices_of(pool, former, name).await
    }

    /// Remembers a pool by another name. A crash may come between any two of the files: the next
    /// start opens the pool by the name in the list of pools, and the other two follow that by the
    /// pool's place and identity.
    async fn remember_name(
        &self,
        pool: &PoolHandle,
        former: &str,
        name: &str,
    ) -> Result<(), Error> {
        let (served, id) = (Arc::clone(&self.0.served), hex(&pool.id()));
        let names = || (former.to_owned(), name.to_owned());
        let (known, (old, new)) = (id.clone(), names());
        blocking(move || served.rename(&old, &known, new)).await?;
        let (old, new) = names();
        self.change_remembered(move |list| {
            for one in list.iter_mut().filter(|one| one.name == old) {
                new.clone_into(&mut one.name);
            }
        })
        .await?;
        let (old, new) = names();
        self.0.attachments.rename_pool(old, id, new).await.map(drop)
    }

    /// The stable names of the block devices follow.
    async fn rename_devices_of(
        &self,
        pool: &PoolHandle,
        former: &str,
        name: &str,
    ) -> Result<(), Error> {
        let Some(devices) = self.ublk().map(Arc::clone) else { return Ok(()) };
        let attached = self.0.attachments.of_pool(name);
        let (id, former, name) = (pool.id(), former.to_owned(), name.to_owned());
        blocking(move || {
            for record in attached.iter().map(|one| &one.record) {
                let (volume, id_of_volume) = (record.volume.as_str(), VolumeId(record.id));
                devices.rename(&id, id_of_volume, (&former, volume), (&name, volume));
            }
            Ok(())
        })
        .await
    }

    /// Has attachments follow open pools that have another name than when they were written: it was
    /// changed in the configuration, or the daemon died while it renamed them.
    pub(super) async fn follow_renamed_pools(&self) -> Result<(), Error> {
        let known = self.known_pools().into_iter();
        let open: BTreeMap<String, String> =
            known.filter_map(|one| Some((hex(&one.state.ok()?.id()), one.config.name))).collect();
        let mut moved = BTreeSet::new();
        for attachment in self.0.attachments.list() {
            let record = &attachment.record;
            if let Some(name) = open.get(&record.pool_id).filter(|name| **name != record.pool) {
                moved.insert((record.pool.clone(), record.pool_id.clone(), name.clone()));
            }
        }
        for (former, id, name) in moved {
            let count = self.0.attachments.rename_pool(former.clone(), id, name.clone()).await?;
            tracing::info!(former, pool = name, count, "attachments follow a pool to its name");
        }
        Ok(())
    }
}
