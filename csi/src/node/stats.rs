//! `NodeGetVolumeStats`: what the daemon and this machine know of a volume, with a limit of time.

use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;

use super::look::{self, Shown, Stats};
use super::looks::Seen;
use super::records::Place;
use super::world::{Result, Usage};
use super::{Layers, Service, absent, judge, request, through};
use crate::error::Error;
use crate::health::split::{self, Side};
use crate::health::{Cause, condition, unknown};
use crate::proto;
use crate::proto::volume_usage::Unit;

impl Service {
    pub(super) async fn stats(
        &self,
        asked: proto::NodeGetVolumeStatsRequest,
        limit: Duration,
    ) -> Result<proto::NodeGetVolumeStatsResponse> {
        request::id(&asked.volume_id)?;
        request::plain_paths(&asked.volume_path, &asked.staging_target_path)?;
        let id = asked.volume_id.clone();
        let place = self.place_of_any(&id)?;
        let health = self.plugin.settings.config.health;
        let volume = match self.world.volume_now(&place).await {
            Err(error) if health && error.is_of_media() => {
                return self.unserved(asked, error).await;
            }
            volume => volume?,
        };
        // Existence comes first; a path that is none of ours was never one of this volume.
        let path = match self.path("volume_path", &asked.volume_path) {
            Err(_) if volume.is_none() => return Err(Error::not_found("volume", &id)),
            path => absent(path, &asked.volume_path)?,
        };
        let daemon_causes = match &volume {
            Some(_) if health => self.daemon_causes(&place).await?,
            _ => Vec::new(),
        };
        let (world, volume_id) = (Arc::clone(&self.world), id.clone());
        let work = move || {
            through(&world.as_world(), &volume_id, &place, Layers::default(), |world| {
                let volume =
                    volume.map(|volume| world.volumes.inside(&place, volume)).transpose()?;
                look::stats(world, &volume_id, &place, &path, volume.as_ref())
            })
        };
        let mut stats = match self.looks.look(&id, limit, work).await? {
            Seen::Done(stats) => stats?,
            Seen::Silent(time) if health => Stats::unseen(judge::silent(time.as_secs())),
            Seen::Crowded if health => Stats::unseen(judge::crowded()),
            Seen::Silent(_) | Seen::Crowded => {
                return Err(Error::Late { milliseconds: limit.as_millis() });
            }
        };
        stats.causes.extend(daemon_causes);
        if health {
            return Ok(answer(stats, true));
        }
        // With conditions disabled the call can only report that nothing is mounted.
        stats.usage.ok_or_else(|| Error::not_found("path", &asked.volume_path))?;
        Ok(answer(stats, false))
    }

    /// A volume in a failed pool, at a path that is known to belong to it: it is not checked, and
    /// the controller reports the failed pool.
    async fn unserved(
        &self,
        asked: proto::NodeGetVolumeStatsRequest,
        error: Error,
    ) -> Result<proto::NodeGetVolumeStatsResponse> {
        let path = self.path("volume_path", &asked.volume_path);
        let path = absent(path, &asked.volume_path)?;
        let record = self.blocking(move |world| Ok(world.volumes.record(&asked.volume_id))).await?;
        if judge::known(record.as_ref(), &path).is_none() {
            return Err(error);
        }
        let volume_condition = Some(unknown(&format!("the daemon does not serve it: {error}")));
        Ok(proto::NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition })
    }

    /// Returns the daemon's causes for a volume that the node reports.
    async fn daemon_causes(&self, place: &Place) -> Result<Vec<Cause>> {
        let request = v1::HealthRequest {
            pool: place.pool.clone(),
            volume: place.name.clone(),
            abnormal_only: true,
        };
        let health = match self.plugin.daemon.find_health(request).await {
            Ok(health) => health.unwrap_or_default(),
            // It was deleted just now: the next call reports that.
            Err(error) if error.is_absent() => v1::HealthResponse::default(),
            Err(error) => return Err(error),
        };
        let causes = health.volumes.iter().flat_map(|volume| &volume.causes);
        let causes: Vec<v1::Cause> = causes.cloned().collect();
        Ok(split::causes_for(Side::Node, &causes))
    }
}

fn answer(stats: Stats, health: bool) -> proto::NodeGetVolumeStatsResponse {
    let of = |usage: Usage, unit: Unit| proto::VolumeUsage {
        available: usage.available,
        total: usage.total,
        used: usage.used,
        unit: unit.into(),
    };
    let usage = match stats.usage {
        None => Vec::new(),
        Some(Shown::Mount(bytes, inodes)) => vec![of(bytes, Unit::Bytes), of(inodes, Unit::Inodes)],
        Some(Shown::Block(bytes)) => vec![of(bytes, Unit::Bytes)],
    };
    let volume_condition = health.then(|| condition(stats.causes));
    proto::NodeGetVolumeStatsResponse { usage, volume_condition }
}
