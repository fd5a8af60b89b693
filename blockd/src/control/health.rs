//! How pools and volumes are.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_api::v1;
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::catalogue::VolumeKind;

use crate::clock::wall_ms;
use crate::error::{Error, shown};
use crate::health::{Code, Finding, Severity};
use crate::pool::{PoolHandle, PoolSpace, SpaceState};
use crate::units::human;

use super::attachments::Record;
use super::{Control, Known};

/// How long a pool's thread may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(1);
/// Little is left for metadata when it is less than so much of what it takes, in percent.
const METADATA_LOW_PERCENT: u64 = 10;

/// What is wrong with a pool and its volumes.
struct Looked {
    pool: Vec<Finding>,
    volumes: Vec<(String, Vec<(Finding, bool)>)>,
}

impl Control {
    /// How a pool and its volumes are, or all.
    pub(super) async fn describe_health(
        &self,
        asked: &v1::HealthRequest,
    ) -> Result<v1::HealthResponse, Error> {
        let of_one = !asked.volume.is_empty();
        let pools = match asked.pool.is_empty() && !of_one {
            true => self.known_pools(),
            false => vec![self.known(&asked.pool)?],
        };
        let mut answer = v1::HealthResponse::default();
        let is_wanted = |severity: i32| !asked.abnormal_only || severity != 0;
        for known in pools {
            let looked = self.look(&known).await;
            let pool = known.config.name;
            let now = wall_ms();
            let mine = looked.pool.into_iter().map(|finding| (finding, false)).collect();
            let (severity, causes) = told(mine, now);
            if !of_one && is_wanted(severity) {
                answer.pools.push(v1::PoolHealth {
                    pool: pool.clone(),
                    severity,
                    causes,
                    last_probe_unix_ms: now,
                    ..Default::default()
                });
            }
            for (volume, findings) in looked.volumes {
                let (severity, causes) = told(findings, now);
                if (!of_one || volume == asked.volume) && is_wanted(severity) {
                    answer.volumes.push(v1::VolumeHealth {
                        pool: pool.clone(),
                        volume,
                        severity,
                        causes,
                        last_probe_unix_ms: now,
                        ..Default::default()
                    });
                } else if volume == asked.volume {
                    return Ok(answer);
                }
            }
        }
        if of_one && answer.volumes.is_empty() {
            return Err(Error::not_found("volume", &asked.volume));
        }
        Ok(answer)
    }

    /// Ends causes that only time would end. True if there were any.
    pub(super) fn acknowledge_health(&self, pool: &str, volume: &str) -> Result<bool, Error> {
        if !pool.is_empty() || !volume.is_empty() {
            self.known(pool)?;
        }
        Ok(false)
    }

    async fn look(&self, known: &Known) -> Looked {
        let name = &known.config.name;
        let mut pool = Vec::new();
        let mut volumes: BTreeMap<String, Vec<(Finding, bool)>> = BTreeMap::new();
        let attached = self.0.attachments.list();
        let attached: Vec<&Record> =
            attached.iter().map(|one| &one.record).filter(|one| one.pool == *name).collect();
        match (&known.state, known.failure()) {
            (Ok(handle), None) => {
                let space = tokio::time::timeout(PATIENCE, handle.space()).await;
                pool = of_pool(name, handle, space.ok().and_then(Result::ok));
                for one in handle.mapper().summaries() {
                    let mine = attached.iter().find(|record| record.id == one.id.0);
                    let own = self.of_volume(handle, &one, mine.copied());
                    let own = own.into_iter().map(|finding| (finding, false));
                    let shared = pool.iter().filter(|finding| touches(finding, &one));
                    let all = own.chain(shared.map(|finding| (finding.clone(), true))).collect();
                    volumes.insert(one.name, all);
                }
                for record in &attached {
                    volumes.entry(record.volume.clone()).or_insert_with(|| {
                        let text = format!(
                            "volume {} is attached, and pool {} does not have it",
                            shown(&record.volume),
                            shown(name)
                        );
                        vec![(Finding::new(Code::VolumeMissing, Severity::Failure, &text), false)]
                    });
                }
            }
            (state, failure) => {
                let failure = failure.unwrap_or_default();
                let text = format!("pool {} has failed: {failure}", shown(name));
                pool.push(Finding::new(Code::PoolFailed, Severity::Failure, &text));
                let summaries = state.as_ref().map(|handle| handle.mapper().summaries());
                let known = summaries.unwrap_or_default().into_iter().map(|one| one.name);
                for one in known.chain(attached.iter().map(|record| record.volume.clone())) {
                    let causes = pool.iter().map(|finding| (finding.clone(), true)).collect();
                    volumes.insert(one, causes);
                }
            }
        }
        Looked { pool, volumes: volumes.into_iter().collect() }
    }

    /// What is wrong with a volume itself.
    fn of_volume(
        &self,
        handle: &PoolHandle,
        volume: &VolumeSummary,
        attached: Option<&Record>,
    ) -> Vec<Finding> {
        let mut found = Vec::new();
        let name = shown(&volume.name);
        if attached.is_some_and(|record| record.ublk.is_some()) {
            let view = self.described_device(&handle.id(), volume.id);
            if let Some(problem) = view.problem {
                let text = format!("the device of volume {name} is not served: {problem}");
                found.push(Finding::new(Code::DeviceNotServed, Severity::Failure, &text));
            }
        }
        let stats = self.data_path().volume_stats();
        let mine = stats.iter().filter(|one| one.pool == handle.name());
        let mine = mine.filter(|one| one.volume == volume.name);
        let blocked: u64 = mine.map(|one| one.blocked.get()).sum();
        let quota = volume.settings.quota;
        if quota > 0 && volume.mapped.saturating_add(handle.extent_size()) > quota {
            let text = format!("volume {name} has used up its quota of {}", human(quota));
            found.push(Finding::new(Code::QuotaFull, Severity::Failure, &text));
        }
        if blocked > 0 || volume.out_of_space {
            let writes = blocked.max(1);
            let text = format!("{writes} writes of volume {name} wait for space");
            let finding = Finding::new(Code::WritesBlocked, Severity::Failure, &text);
            found.push(finding.counted(writes));
        }
        found
    }
}

/// What is wrong with an open pool.
fn of_pool(name: &str, handle: &PoolHandle, space: Option<PoolSpace>) -> Vec<Finding> {
    let mut found = Vec::new();
    let name = shown(name);
    if handle.is_read_only() {
        let text = format!("pool {name} is open to be read only");
        found.push(Finding::new(Code::PoolReadOnly, Severity::Failure, &text));
    }
    let Some(space) = space else {
        let text = format!("pool {name} has not answered for {} s", PATIENCE.as_secs());
        found.push(Finding::new(Code::ProbeLate, Severity::Unknown, &text));
        return found;
    };
    let (free, total) = (human(space.free()), human(space.pool.total));
    let (code, severity) = match space.now.state {
        SpaceState::Normal => (None, Severity::Warning),
        SpaceState::Low => (Some(Code::SpaceLow), Severity::Warning),
        SpaceState::VeryLow => (Some(Code::SpaceVeryLow), Severity::Warning),
        SpaceState::Full => (Some(Code::SpaceFull), Severity::Failure),
    };
    if let Some(code) = code {
        let text = format!("pool {name} has {free} free of {total}");
        found.push(Finding::new(code, severity, &text));
    }
    found.extend(of_metadata(&name, handle, &space));
    found
}

/// What is left for metadata: what it has, and what is free, as it takes of that.
fn of_metadata(name: &str, handle: &PoolHandle, space: &PoolSpace) -> Option<Finding> {
    let waiting = handle.stats().waiting_for_space.load(Ordering::Relaxed);
    if waiting > 0 {
        let text = format!("{waiting} writes of metadata of pool {name} wait for space below it");
        let finding = Finding::new(Code::MetadataLow, Severity::Failure, &text);
        return Some(finding.because("no-space-below").counted(waiting));
    }
    let (used, free) = (space.pool.metadata, space.pool.free);
    let left = space.pool.metadata_free.saturating_add(free);
    if left.saturating_mul(100) >= used.saturating_mul(METADATA_LOW_PERCENT) {
        return None;
    }
    let severity = if left == 0 { Severity::Failure } else { Severity::Warning };
    let (left, used) = (human(left), human(used));
    let text = format!("pool {name} has {left} left for metadata, which takes {used}");
    Some(Finding::new(Code::MetadataLow, severity, &text))
}

/// Whether a pool's cause is one of a volume's as well. Who has all of its space, and who needs
/// none, does not suffer from a want of it.
fn touches(finding: &Finding, volume: &VolumeSummary) -> bool {
    let is_volume = volume.kind == VolumeKind::Volume;
    match finding.code {
        Code::SpaceLow | Code::SpaceVeryLow | Code::SpaceFull => {
            let has_all = volume.settings.set_aside(volume.size) >= volume.size;
            is_volume && !has_all
        }
        Code::PoolReadOnly | Code::MetadataLow => is_volume,
        Code::WritesBlocked | Code::BadBlocks => false,
        _ => true,
    }
}

/// Findings as they are sent, the worst first, and the severity of that.
fn told(mut findings: Vec<(Finding, bool)>, now: i64) -> (i32, Vec<v1::Cause>) {
    findings.sort_by_key(|(finding, _)| (std::cmp::Reverse(finding.severity), finding.code));
    let causes: Vec<v1::Cause> = findings
        .into_iter()
        .map(|(finding, of_pool)| v1::Cause {
            code: finding.code.wire().into(),
            severity: finding.severity.wire().into(),
            message: finding.message,
            device: finding.device,
            count: finding.count,
            first_seen_unix_ms: now,
            last_probe_unix_ms: now,
            last_transition_unix_ms: now,
            of_pool,
            reason: finding.reason.to_owned(),
        })
        .collect();
    (causes.first().map_or(0, |cause| cause.severity), causes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::Rig;
    use crate::control::tests::{MIB, attach, create};

    #[tokio::test]
    async fn a_pool_and_its_volumes_are_healthy_until_something_is_wrong() {
        let mut rig = Rig::new().await;
        rig.client.create_volume(create("a", MIB)).await.unwrap();
        rig.client.attach_volume(attach("a")).await.unwrap();
        let all = rig.client.health(v1::HealthRequest::default()).await.unwrap().into_inner();
        assert_eq!((all.pools.len(), all.volumes.len()), (1, 1));
        assert!(all.pools[0].causes.is_empty() && all.volumes[0].severity == 0, "{all:?}");
        // Deleted behind the daemon's back: it is attached, and the pool has none.
        let record = rig.control.0.attachments.get("default", "a").unwrap().record.clone();
        let gone = Record { volume: "gone".to_owned(), id: 77, ..record };
        rig.control.0.attachments.add(gone).await.unwrap();
        let abnormal = v1::HealthRequest { abnormal_only: true, ..Default::default() };
        let all = rig.client.health(abnormal).await.unwrap().into_inner();
        assert_eq!((all.pools.len(), all.volumes.len()), (0, 1), "{all:?}");
        let cause = &all.volumes[0].causes[0];
        assert_eq!(cause.code(), v1::HealthCode::VolumeMissing);
        assert_eq!(all.volumes[0].severity(), v1::Severity::Failure);
    }

    #[tokio::test]
    async fn a_volume_that_is_not_there_is_not_found() {
        let mut rig = Rig::new().await;
        let asked = v1::HealthRequest { volume: "none".to_owned(), ..Default::default() };
        assert_eq!(rig.client.health(asked).await.unwrap_err().code(), tonic::Code::NotFound);
    }
}
