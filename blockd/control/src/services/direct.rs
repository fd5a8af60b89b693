//! Pools of namespaces beside those of extents: the same calls, carried out without the data path.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockd_api::v1;
use blockd_media::clock::wall_ms;
use blockd_media::error::{Error, shown};
use blockd_media::units::{from_wire, human};
use blockd_pmem::media::Durability;
use blockd_pmem::platform::Platform;
use parking_lot::RwLock;

use super::errors::failed_pool;
use super::messages::{self, size_of_request};
use super::{Control, EventKind, blocking};
use crate::direct::{
    CreateWish, DirectConfig, DirectPool, PoolView, SizeRule, State, Usage, VolumeView,
};

/// A pool of namespaces that was named, or why it could not be opened.
#[derive(Clone, Debug)]
struct Known {
    config: DirectConfig,
    state: Result<DirectPool, String>,
}

/// All of them, by name.
#[derive(Debug, Default)]
pub(super) struct DirectPools(RwLock<BTreeMap<String, Arc<Known>>>);

/// The error of a call about volumes that is not supported for namespaces.
fn refused(what: &str, problem: String) -> Error {
    Error::in_use(what.to_owned(), problem)
}

impl Control {
    /// Opens a pool of namespaces. One that can't be opened stays known, with the reason.
    pub async fn open_direct(
        &self,
        config: &DirectConfig,
        platform: Platform,
    ) -> Result<(), Error> {
        let (wanted, state_dir) = (config.clone(), self.0.options.state_dir.clone());
        let opened = blocking(move || DirectPool::open(wanted, platform, &state_dir)).await;
        let name = config.name.clone();
        let (state, result) = match opened {
            Ok(pool) => (Ok(pool), Ok(())),
            Err(error) => (Err(error.to_string()), Err(error)),
        };
        let failure = match &state {
            Ok(pool) => pool.failure(),
            Err(failure) => Some(failure.clone()),
        };
        match failure {
            None => {
                let text = format!("pool {name} is open: its volumes are namespaces");
                self.events().publish(EventKind::PoolOpened, &name, "", text);
            }
            Some(failure) => {
                let text = format!("pool {name} does not serve: {failure}");
                self.events().publish(EventKind::PoolFailed, &name, "", text);
            }
        }
        let known = Arc::new(Known { config: config.clone(), state });
        self.0.direct.0.write().insert(name, known);
        result
    }

    /// Opens a pool of namespaces that could not be opened. False if it is open.
    pub(super) async fn reopen_direct(&self, name: &str) -> Result<bool, Error> {
        let known = self.0.direct.0.read().get(name).cloned();
        let known = known.ok_or_else(|| Error::not_found("pool", name))?;
        match known.state.as_ref().map(DirectPool::failure) {
            Ok(None) => return Ok(false),
            Ok(Some(failure)) => return Err(failed_pool(name, &failure)),
            Err(_) => self.open_direct(&known.config, Platform::default()).await?,
        }
        Ok(true)
    }

    /// Names of the pools of namespaces that could not be opened.
    pub(super) fn unopened_direct(&self) -> Vec<String> {
        let all = self.0.direct.0.read();
        let unopened = all.iter().filter(|(_, known)| known.state.is_err());
        unopened.map(|(name, _)| name.clone()).collect()
    }

    /// Ends what pools of namespaces do in the background.
    pub(super) async fn close_direct(&self) {
        let pools: Vec<_> = self.0.direct.0.read().values().cloned().collect();
        for known in pools {
            let close = move || {
                if let Ok(pool) = &known.state {
                    pool.close();
                }
                Ok(())
            };
            if let Err(error) = blocking(close).await {
                tracing::warn!(%error, "a pool of namespaces was not closed");
            }
        }
    }

    /// Whether the pool of that name, or the default one without, is made of namespaces.
    pub(super) fn is_direct(&self, pool: &str) -> bool {
        self.0.direct.0.read().contains_key(self.pool_name(pool))
    }

    fn direct(&self, pool: &str) -> Result<DirectPool, Error> {
        let name = self.pool_name(pool);
        let known = self.0.direct.0.read().get(name).cloned();
        let known = known.ok_or_else(|| Error::not_found("pool", name))?;
        known.state.clone().map_err(|failure| {
            refused(&format!("pool {}", known.config.name), format!("does not serve: {failure}"))
        })
    }

    /// Rejects calls that are not supported for namespaces.
    pub(super) fn not_for_direct(&self, pool: &str) -> Result<(), Error> {
        if !self.is_direct(pool) {
            return Ok(());
        }
        let problem = "is of kind pmem-direct: its volumes are namespaces with the kernel's own \
                       devices, without snapshots, quotas, NBD and whatever else needs a map"
            .to_owned();
        Err(refused(&format!("pool {}", self.pool_name(pool)), problem))
    }

    /// Refuses a name that no pool has, of either kind.
    pub(super) fn check_pool(&self, pool: &str) -> Result<(), Error> {
        if !pool.is_empty() && !self.is_direct(pool) {
            self.known(pool)?;
        }
        Ok(())
    }

    /// The health of pools of namespaces and their volumes. The daemon does no IO on them that it
    /// could watch: it checks whether they exist.
    pub(super) async fn health_of_direct(
        &self,
        asked: &v1::HealthRequest,
    ) -> Result<v1::HealthResponse, Error> {
        let all = asked.pool.is_empty() && asked.volume.is_empty();
        let views = self.direct_views((!all).then_some(asked.pool.as_str())).await?;
        let mut answer = v1::HealthResponse::default();
        for pool in views {
            let failure = pool.failure.as_deref();
            let of = |of_pool| {
                failure.map(|text| cause(v1::HealthCode::PoolFailed, text, of_pool)).into_iter()
            };
            for volume in self.list_direct(&pool.name).await.unwrap_or_default() {
                if !asked.volume.is_empty() && asked.volume != volume.name {
                    continue;
                }
                let mut causes: Vec<_> = of(true).collect();
                if causes.is_empty() && !volume.device_problem.is_empty() {
                    let text = &volume.device_problem;
                    causes.push(cause(v1::HealthCode::DeviceNotServed, text, false));
                }
                answer.volumes.push(v1::VolumeHealth {
                    pool: pool.name.clone(),
                    volume: volume.name,
                    severity: severity(&causes),
                    causes,
                    last_probe_unix_ms: wall_ms(),
                    ..v1::VolumeHealth::default()
                });
            }
            if !asked.volume.is_empty() {
                if answer.volumes.is_empty() {
                    return Err(Error::not_found("volume", &asked.volume));
                }
                continue;
            }
            let causes: Vec<_> = of(false).collect();
            answer.pools.push(v1::PoolHealth {
                pool: pool.name,
                severity: severity(&causes),
                causes,
                last_probe_unix_ms: wall_ms(),
                ..v1::PoolHealth::default()
            });
        }
        if asked.abnormal_only {
            answer.pools.retain(|one| one.severity != 0);
            answer.volumes.retain(|one| one.severity != 0);
        }
        Ok(answer)
    }

    /// Names of the devices of all volumes that are namespaces. Those of a pool that can't be read
    /// now keep no other from being served.
    pub async fn names_of_direct_devices(&self) -> Result<Vec<String>, Error> {
        let all: Vec<_> = self.0.direct.0.read().values().cloned().collect();
        let pools: Vec<_> = all.iter().filter_map(|known| known.state.clone().ok()).collect();
        let names_of = |pool: &DirectPool| {
            pool.device_names().unwrap_or_else(|error| {
                let pool = pool.name();
                tracing::warn!(pool, %error, "its devices are not known: mounts of them may stay");
                Vec::new()
            })
        };
        blocking(move || Ok(pools.iter().flat_map(names_of).collect())).await
    }

    /// Whether there are pools of namespaces.
    pub(super) fn has_direct_pools(&self) -> bool {
        !self.0.direct.0.read().is_empty()
    }

    /// Why a pool of namespaces does not serve, if one does not.
    pub(super) fn failed_direct(&self) -> Option<String> {
        let pools: Vec<_> = self.0.direct.0.read().values().cloned().collect();
        pools.into_iter().find_map(|known| match &known.state {
            Ok(pool) => pool.failure(),
            Err(failure) => Some(format!("pool {} has failed: {failure}", known.config.name)),
        })
    }

    /// All pools of namespaces, or the one of that name.
    pub(super) async fn describe_direct(&self, pool: Option<&str>) -> Result<Vec<v1::Pool>, Error> {
        let default = self.0.options.default_pool.clone();
        let views = self.direct_views(pool).await?;
        Ok(views.into_iter().map(|view| messages::pool_of_namespaces(view, &default)).collect())
    }

    /// The same pools and volumes as in metrics.
    pub async fn direct_views(&self, pool: Option<&str>) -> Result<Vec<PoolView>, Error> {
        let wanted = pool.map(|pool| self.pool_name(pool).to_owned());
        let pools: Vec<_> = self.0.direct.0.read().values().cloned().collect();
        let is_wanted = move |known: &Arc<Known>| {
            wanted.as_ref().is_none_or(|wanted| known.config.name == *wanted)
        };
        let pools: Vec<_> = pools.into_iter().filter(is_wanted).collect();
        blocking(move || Ok(pools.iter().map(|known| view(known)).collect())).await
    }

    /// Makes a volume. True if it is new.
    #[expect(deprecated, reason = "older clients send size_gb")]
    pub(super) async fn create_direct(
        &self,
        asked: v1::CreateVolumeRequest,
    ) -> Result<(bool, v1::Volume), Error> {
        let pool = self.direct(&asked.pool)?;
        if !matches!(asked.block_size, 0 | 512 | 4096) {
            let allowed = "512, 4096 or left out: it is that of the kernel's device";
            return Err(Error::invalid("block_size", asked.block_size, allowed));
        }
        let wish = CreateWish {
            name: asked.name.clone(),
            size: size_of_request(asked.size_bytes, asked.size_gb)?,
            limit: from_wire(asked.limit_bytes, 0)?,
            usage: match asked.usage() {
                v1::PmemUsage::AppDirect | v1::PmemUsage::Unspecified => Usage::AppDirect,
                v1::PmemUsage::FileIo => Usage::FileIo,
            },
            erase_after: asked.erase_after.unwrap_or(true),
            size_rule: match asked.size_semantics() {
                v1::SizeSemantics::Unspecified => None,
                v1::SizeSemantics::Usable => Some(SizeRule::Usable),
                v1::SizeSemantics::Charged => Some(SizeRule::Charged),
            },
        };
        let name = pool.name().to_owned();
        let durability = self.durability_of(&pool).await?;
        let (changed, made) = blocking(move || pool.create(&wish)).await?;
        if changed {
            let text =
                format!("volume {} was created with {}", shown(&made.name), human(made.usable));
            self.events().publish(EventKind::VolumeCreated, &name, &made.name, text);
        }
        Ok((changed, messages::namespace(&name, made, durability)))
    }

    async fn durability_of(&self, pool: &DirectPool) -> Result<Durability, Error> {
        let pool = pool.clone();
        blocking(move || Ok(pool.describe().durability)).await
    }

    /// Removes a volume; nothing if there was none.
    pub(super) async fn delete_direct(
        &self,
        pool: &str,
        volume: &str,
    ) -> Result<Option<v1::Volume>, Error> {
        let found = self.direct(pool)?;
        let (name, wanted) = (found.name().to_owned(), volume.to_owned());
        let durability = self.durability_of(&found).await?;
        let deleted = blocking(move || found.delete(&wanted)).await?;
        let Some(deleted) = deleted else { return Ok(None) };
        let text = deleted_text(&deleted);
        self.events().publish(EventKind::VolumeDeleted, &name, volume, text);
        Ok(Some(messages::namespace(&name, deleted, durability)))
    }

    /// Makes a volume larger, where that is possible: whether it was, and its size before.
    pub(super) async fn resize_direct(
        &self,
        pool: &str,
        volume: &str,
        size: u64,
    ) -> Result<(bool, u64, v1::Volume), Error> {
        let found = self.direct(pool)?;
        let (name, wanted) = (found.name().to_owned(), volume.to_owned());
        let durability = self.durability_of(&found).await?;
        let resized = blocking(move || found.resize(&wanted, size)).await?;
        let (changed, before, now) = resized;
        if changed {
            let (from, to) = (human(before), human(now.usable));
            let text = format!("volume {} was resized from {from} to {to}", shown(volume));
            self.events().publish(EventKind::VolumeResized, &name, volume, text);
        }
        Ok((changed, before, messages::namespace(&name, now, durability)))
    }

    /// One volume.
    pub(super) async fn get_direct(&self, pool: &str, name: &str) -> Result<v1::Volume, Error> {
        let found = self.direct(pool)?;
        let (pool, wanted) = (found.name().to_owned(), name.to_owned());
        let durability = self.durability_of(&found).await?;
        let view = blocking(move || found.get(&wanted)).await?;
        Ok(messages::namespace(&pool, view, durability))
    }

    /// Volumes of that pool, or of all that are made of namespaces.
    pub(super) async fn list_direct(&self, pool: &str) -> Result<Vec<v1::Volume>, Error> {
        let pools = match pool {
            "" => {
                let all: Vec<_> = self.0.direct.0.read().values().cloned().collect();
                all.iter().filter_map(|known| known.state.clone().ok()).collect()
            }
            name => vec![self.direct(name)?],
        };
        let mut volumes = Vec::new();
        for pool in pools {
            let durability = self.durability_of(&pool).await?;
            let name = pool.name().to_owned();
            let list = blocking(move || Ok(pool.list())).await?;
            volumes.extend(list.into_iter().map(|one| messages::namespace(&name, one, durability)));
        }
        Ok(volumes)
    }
}

/// A cause of a pool or a volume.
fn cause(code: v1::HealthCode, message: &str, of_pool: bool) -> v1::Cause {
    let now = wall_ms();
    v1::Cause {
        code: code.into(),
        severity: v1::Severity::Failure.into(),
        message: message.to_owned(),
        of_pool,
        last_probe_unix_ms: now,
        ..v1::Cause::default()
    }
}

fn severity(causes: &[v1::Cause]) -> i32 {
    causes.first().map_or(0, |worst| worst.severity)
}

fn view(known: &Known) -> PoolView {
    match &known.state {
        Ok(pool) => pool.describe(),
        Err(failure) => PoolView {
            name: known.config.name.clone(),
            id: [0; 16],
            region: known.config.region.to_string(),
            failure: Some(failure.clone()),
            space: None,
            durability: Durability::Volatile,
            charged: 0,
            scrubbing: 0,
            promised: 0,
            volumes: 0,
        },
    }
}

/// The message for a volume that was just deleted.
fn deleted_text(view: &VolumeView) -> String {
    let (volume, charged) = (shown(&view.name), human(view.charged));
    if view.state == State::Scrubbing {
        format!("volume {volume} was deleted, {charged} are overwritten before they are free")
    } else {
        format!("volume {volume} was deleted, {charged} came free")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_that_is_being_overwritten_is_not_reported_as_free() {
        let view = |state| VolumeView {
            name: "a".to_owned(),
            id: 1,
            state,
            usage: Usage::AppDirect,
            usable: 14 << 20,
            charged: 16 << 20,
            erase_after: true,
            made_unix_ms: 0,
            scrubbed: 0,
            device: None,
            problem: None,
            bad_bytes: 0,
        };
        for (state, text, freed) in [
            (State::Scrubbing, "16 MiB are overwritten before they are free", 0),
            (State::Deleting, "16 MiB came free", 16 << 20),
        ] {
            assert_eq!(deleted_text(&view(state)), format!("volume a was deleted, {text}"));
            let message = messages::namespace("p", view(state), Durability::PowerSafe);
            assert_eq!(message.exclusive_bytes, freed);
        }
    }
}
