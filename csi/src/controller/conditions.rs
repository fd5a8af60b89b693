//! Conditions of volumes as the controller tells them: by what the daemon knows, which takes no IO
//! and one call for a whole list.

use std::collections::BTreeMap;

use blockd_api::v1::{self, HealthCode};

use crate::error::Error;
use crate::health::split::{Side, told_by};
use crate::health::{condition, unknown};
use crate::plugin::Plugin;
use crate::proto::VolumeCondition;

/// What is said while the daemon is older than this plugin.
const OLD_DAEMON: &str = "the daemon is older than its plugin and does not tell";

/// How volumes are. Only those that are not well are in it.
#[derive(Debug)]
pub(super) struct Conditions {
    volumes: BTreeMap<(String, String), Vec<v1::Cause>>,
    /// The daemon tells of them.
    are_told: bool,
}

impl Conditions {
    /// Of one volume, or of all where that is `None`. `None` when nobody is to hear of them.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(super) async fn ask(
        plugin: &Plugin,
        volume: Option<(&str, &str)>,
    ) -> Result<Option<Self>, Error> {
        if !plugin.settings.config.health {
            return Ok(None);
        }
        let (pool, volume) = volume.unwrap_or_default();
        let (pool, volume) = (pool.to_owned(), volume.to_owned());
        let request = v1::HealthRequest { pool, volume, abnormal_only: true };
        let answer = plugin.daemon.find_health(request).await?;
        let are_told = answer.is_some();
        let volumes = answer.unwrap_or_default().volumes.into_iter();
        let volumes = volumes.map(|one| ((one.pool, one.volume), one.causes));
        Ok(Some(Self { volumes: volumes.collect(), are_told }))
    }

    /// That of a volume.
    pub(super) fn of(&self, pool: &str, name: &str) -> VolumeCondition {
        if !self.are_told {
            return unknown(OLD_DAEMON);
        }
        let causes = self.volumes.get(&(pool.to_owned(), name.to_owned()));
        condition(told_by(Side::Controller, causes.map_or(&[], Vec::as_slice)))
    }

    /// Volumes of pools that failed, as far as the daemon still knows of them: it lists them no
    /// more, and they are not gone.
    pub(super) fn lost(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_lost = |causes: &[v1::Cause]| {
            causes.iter().any(|cause| cause.code() == HealthCode::PoolFailed)
        };
        let lost = self.volumes.iter().filter(move |(_, causes)| is_lost(causes));
        lost.map(|((pool, name), _)| (pool.as_str(), name.as_str()))
    }
}
