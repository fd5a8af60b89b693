//! How pools and volumes are: looked at now and then, and answered from what was found.

mod device;
mod find;
mod watch;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use blockd_api::v1;
use blockd_mapper::engine::VolumeSummary;
use blockd_media::error::Error;
use blockd_media::finding::{Code, Severity};

use crate::health::{Cause, State, Subject};

use super::{Control, Known};
use watch::{touches, wire};

pub(super) use watch::Book;

/// The health of one pool or volume, for metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HealthSummary {
    /// The pool.
    pub pool: String,
    /// Empty for the pool itself.
    pub volume: String,
    /// Names of codes, without those that a volume has from its pool, and of severities.
    pub causes: Vec<(&'static str, &'static str)>,
    /// Something is wrong with it, or with its pool as far as it is touched.
    pub abnormal: bool,
}

impl Control {
    /// Describes the health of one pool and its volumes, or of all. Waits for no other thread.
    pub(super) fn describe_health(
        &self,
        asked: &v1::HealthRequest,
    ) -> Result<v1::HealthResponse, Error> {
        let of_one = !asked.volume.is_empty();
        let pools = match asked.pool.is_empty() && !of_one {
            true => self.known_pools(),
            false => vec![self.known(&asked.pool)?],
        };
        let mut answer = v1::HealthResponse::default();
        for known in pools {
            let (pool, volumes) = self.health_of(&known, &asked.volume);
            if !of_one {
                answer.pools.push(pool);
            } else if volumes.is_empty() {
                return Err(Error::not_found("volume", &asked.volume));
            }
            answer.volumes.extend(volumes);
        }
        if asked.abnormal_only {
            answer.pools.retain(|one| one.severity != 0);
            answer.volumes.retain(|one| one.severity != 0);
        }
        Ok(answer)
    }

    /// The health of all pools and volumes for metrics; empty where health checks are off.
    #[must_use]
    pub fn health_summaries(&self) -> Vec<HealthSummary> {
        let mut all = Vec::new();
        if !self.0.health.options.enabled {
            return all;
        }
        let names = |causes: &[v1::Cause]| {
            let own = causes.iter().filter(|cause| !cause.of_pool);
            own.filter_map(|cause| {
                let code = Code::of_wire(cause.code())?.name();
                let all = [Severity::Unknown, Severity::Warning, Severity::Failure];
                let severity = all.into_iter().find(|one| one.wire() == cause.severity())?;
                Some((code, severity.name()))
            })
            .collect()
        };
        for known in self.known_pools() {
            let (pool, volumes) = self.health_of(&known, "");
            all.push(HealthSummary {
                causes: names(&pool.causes),
                abnormal: pool.severity != 0,
                volume: String::new(),
                pool: pool.pool,
            });
            all.extend(volumes.into_iter().map(|one| HealthSummary {
                causes: names(&one.causes),
                abnormal: one.severity != 0,
                volume: one.volume,
                pool: one.pool,
            }));
        }
        all
    }

    /// A pool, and its volumes by name; with a name, that one alone.
    fn health_of(&self, known: &Known, only: &str) -> (v1::PoolHealth, Vec<v1::VolumeHealth>) {
        let name = &known.config.name;
        let subject = |volume: &str| Subject { pool: name.clone(), volume: volume.to_owned() };
        let is_failed = known.failure().is_some() && !known.is_closed();
        let is_old = match self.0.health.pages.lock().ledger.state(&subject("")) {
            None => true,
            Some(state) => {
                let mut codes = state.causes().into_iter().map(|cause| cause.finding.code);
                is_failed && !codes.any(|code| code == Code::PoolFailed)
            }
        };
        if is_old && self.0.health.options.enabled {
            // It was created, or has failed, since the last look: a client whose request just
            // failed must not be answered that the pool is healthy.
            self.take_stock();
        }
        let mut volumes: BTreeMap<String, Option<VolumeSummary>> = BTreeMap::new();
        let attached = match only.is_empty() {
            true => self.0.attachments.of_pool(name),
            false => self.0.attachments.get(name, only).into_iter().collect(),
        };
        if !known.is_closed() {
            volumes.extend(attached.iter().map(|one| (one.record.volume.clone(), None)));
        }
        if let Ok(handle) = &known.state {
            let found = match only.is_empty() {
                true => handle.mapper().summaries(),
                false => handle.mapper().find(only).into_iter().collect(),
            };
            volumes.extend(found.into_iter().map(|one| (one.name.clone(), Some(one))));
        }
        let pages = self.0.health.pages.lock();
        let healthy = State::default();
        let state = |volume: &str| pages.ledger.state(&subject(volume)).unwrap_or(&healthy);
        let pool = state("");
        let causes = pool.causes();
        let of = |(volume, summary): (String, Option<VolumeSummary>)| {
            let own = state(&volume);
            let touched = |cause: &&&Cause| match &summary {
                Some(summary) => touches(cause.finding.code, summary),
                None => true,
            };
            let mut all: Vec<(&Cause, bool)> =
                own.causes().into_iter().map(|cause| (cause, false)).collect();
            all.extend(causes.iter().filter(touched).map(|cause| (*cause, true)));
            all.sort_by_key(|(one, _)| (Reverse(one.finding.severity), one.finding.code));
            let worst = all.first().map(|(cause, _)| cause.finding.severity);
            let shared = all.iter().filter(|(_, of_pool)| *of_pool).map(|(cause, _)| *cause);
            let since = shared.map(|cause| cause.last_transition).max().unwrap_or(0);
            v1::VolumeHealth {
                pool: name.clone(),
                volume,
                severity: wire(worst),
                // A volume that is newer than the last look is as its pool was then.
                last_probe_unix_ms: own.last_probe.max(pool.last_probe),
                last_transition_unix_ms: own.last_transition.max(since),
                causes: all.into_iter().map(|(cause, of_pool)| sent(cause, of_pool)).collect(),
            }
        };
        let volumes = volumes.into_iter().map(of).collect();
        let pool = v1::PoolHealth {
            pool: name.clone(),
            severity: wire(pool.severity()),
            causes: causes.iter().map(|cause| sent(cause, false)).collect(),
            last_probe_unix_ms: pool.last_probe,
            last_transition_unix_ms: pool.last_transition,
        };
        (pool, volumes)
    }
}

fn sent(cause: &Cause, of_pool: bool) -> v1::Cause {
    let finding = &cause.finding;
    v1::Cause {
        code: finding.code.wire().into(),
        severity: finding.severity.wire().into(),
        message: finding.message.clone(),
        device: finding.device.clone(),
        count: finding.count,
        first_seen_unix_ms: cause.first_seen,
        last_probe_unix_ms: cause.last_probe,
        last_transition_unix_ms: cause.last_transition,
        of_pool,
        reason: finding.reason.to_owned(),
    }
}

#[cfg(test)]
mod tests;
