//! Conditions of volumes as the controller reports them. They come from the daemon's state, without
//! IO and with one call for a whole list.

use std::collections::BTreeMap;

use blockd_api::v1::{self, HealthCode};

use crate::error::Error;
use crate::health::split::{Side, causes_for};
use crate::health::{condition, unknown};
use crate::plugin::Plugin;
use crate::proto::VolumeCondition;

/// The message of conditions while the daemon is older than this plugin.
const OLD_DAEMON: &str = "the daemon is older than its plugin and does not report conditions";

/// The conditions of volumes that are not healthy.
#[derive(Debug)]
pub(super) struct Conditions {
    volumes: BTreeMap<(String, String), Vec<v1::Cause>>,
    /// Whether the daemon supports conditions.
    are_known: bool,
}

impl Conditions {
    /// Fetches the conditions of one volume, or of all volumes for `None`. Returns `None` when
    /// conditions are disabled.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(super) async fn fetch(
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
        let are_known = answer.is_some();
        let volumes = answer.unwrap_or_default().volumes.into_iter();
        let volumes = volumes.map(|one| ((one.pool, one.volume), one.causes));
        Ok(Some(Self { volumes: volumes.collect(), are_known }))
    }

    /// Returns the condition of a volume.
    pub(super) fn of(&self, pool: &str, name: &str) -> VolumeCondition {
        if !self.are_known {
            return unknown(OLD_DAEMON);
        }
        let causes = self.volumes.get(&(pool.to_owned(), name.to_owned()));
        condition(causes_for(Side::Controller, causes.map_or(&[], Vec::as_slice)))
    }

    /// Volumes of failed pools that the daemon still knows: it no longer lists them, but they still
    /// exist.
    pub(super) fn lost(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_lost = |causes: &[v1::Cause]| {
            causes.iter().any(|cause| cause.code() == HealthCode::PoolFailed)
        };
        let lost = self.volumes.iter().filter(move |(_, causes)| is_lost(causes));
        lost.map(|((pool, name), _)| (pool.as_str(), name.as_str()))
    }
}
