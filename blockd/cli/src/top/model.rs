//! The content of `top`: the difference of two answers of the daemon, per second.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use blockd_api::v1::{self, Operation, Stage};
use serde::Serialize;

use crate::amount;
use crate::holds::{self, Held};

/// The stages in the order that a request goes through them.
pub(crate) const STAGES: [(Stage, &str); 5] = [
    (Stage::Map, "map"),
    (Stage::Wait, "wait"),
    (Stage::Media, "media"),
    (Stage::Commit, "commit"),
    (Stage::Total, "total"),
];

/// One round of questions to the daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// As `ListPools` has them.
    pub pools: Vec<v1::Pool>,
    /// As `ListVolumes` has them.
    pub volumes: Vec<v1::Volume>,
    /// Counters.
    pub stats: v1::StatsResponse,
}

/// All that is on the screen, and what `--json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Snapshot {
    /// Nanoseconds since the daemon started.
    pub time_ns: u64,
    /// The time over which the rates are computed; 0 in the first snapshot, which has no rates yet.
    pub interval_ns: u64,
    /// The daemon's memory.
    pub resident_bytes: u64,
    pub pools: Vec<PoolRow>,
    pub volumes: Vec<VolumeRow>,
}

/// A pool and its space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PoolRow {
    pub name: String,
    pub state: &'static str,
    pub size_bytes: u64,
    pub(crate) used_bytes: u64,
    pub free_bytes: u64,
    pub promised_bytes: u64,
    pub volume_count: u32,
    pub snapshot_count: u32,
    /// Bytes of deleted volumes that are still being reclaimed.
    pub releasing_bytes: u64,
    /// How full it is; nothing where the daemon doesn't say.
    pub space_state: Option<&'static str>,
    pub low_bytes: u64,
    pub very_low_bytes: u64,
    /// Bytes a second that were lately written for the first time.
    pub write_rate_bytes: u64,
    /// Until it is full at that speed.
    pub seconds_to_full: Option<u64>,
    /// Volumes with writes that wait for space.
    pub waiting_volumes: u32,
    /// Volumes with writes that were slowed down in the interval, as the pool is nearly full.
    pub slowed_volumes: u32,
}

impl PoolRow {
    /// How long until it is full, as people read it.
    #[must_use]
    pub(crate) fn full_in(&self) -> String {
        match self.seconds_to_full {
            _ if self.space_state == Some("full") => "now".to_owned(),
            None => "-".to_owned(),
            Some(seconds @ ..=99) => format!("{seconds} s"),
            Some(seconds @ ..=5_999) => format!("{} min", seconds / 60),
            Some(seconds @ ..=359_999) => format!("{} h", seconds / 3_600),
            Some(seconds) => format!("{} d", seconds / 86_400),
        }
    }
}

/// A volume and what goes on in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct VolumeRow {
    pub pool: String,
    pub name: String,
    pub size_bytes: u64,
    pub mapped_bytes: u64,
    pub reads_per_second: u64,
    pub writes_per_second: u64,
    pub read_bytes_per_second: u64,
    pub write_bytes_per_second: u64,
    /// Since the daemon started.
    pub errors: u64,
    pub connections: u32,
    pub parked: u64,
    pub latency: Vec<Latency>,
    pub is_snapshot: bool,
    /// Writes that wait for space.
    pub blocked: u64,
    /// Writes that were slowed down in the interval, as the pool is nearly full.
    pub slowed: u64,
    /// How long its connections and queues were held back, by reason.
    pub held: Vec<Held>,
}

impl VolumeRow {
    /// Its name; a snapshot says that it is one.
    #[must_use]
    pub(crate) fn label(&self) -> String {
        let kind = if self.is_snapshot { " (snapshot)" } else { "" };
        format!("{}{kind}", self.name)
    }

    /// How long its connections and queues were held back for all reasons together, and how many
    /// are now.
    #[must_use]
    pub(crate) fn held_back(&self) -> (u64, u64) {
        self.held.iter().fold((0, 0), |sum, one| (sum.0 + one.ns_per_second, sum.1 + one.now))
    }
}

/// How long requests of the interval stayed in a stage; 0 when there were none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Latency {
    pub stage: &'static str,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// By what volumes are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sort {
    #[default]
    Name,
    Operations,
    Bytes,
    Latency,
    Mapped,
}

impl Sort {
    /// The next one, round and round.
    #[must_use]
    pub(crate) fn next(self) -> Self {
        match self {
            Self::Name => Self::Operations,
            Self::Operations => Self::Bytes,
            Self::Bytes => Self::Latency,
            Self::Latency => Self::Mapped,
            Self::Mapped => Self::Name,
        }
    }

    /// In words.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Operations => "operations",
            Self::Bytes => "bytes",
            Self::Latency => "latency",
            Self::Mapped => "mapped",
        }
    }

    fn compare(self, one: &VolumeRow, other: &VolumeRow) -> Ordering {
        // The busiest first; equals by name, so that idle volumes keep their places.
        let weight = |row: &VolumeRow| match self {
            Self::Name => 0,
            Self::Operations => row.reads_per_second + row.writes_per_second,
            Self::Bytes => row.read_bytes_per_second + row.write_bytes_per_second,
            Self::Latency => row.latency.last().map_or(0, |latency| latency.p99_ns),
            Self::Mapped => row.mapped_bytes,
        };
        let key = |row: &VolumeRow| (Reverse(weight(row)), row.pool.clone(), row.name.clone());
        key(one).cmp(&key(other))
    }
}

impl Snapshot {
    /// The activity between two answers; without an earlier one, the state alone.
    #[must_use]
    pub(crate) fn between(before: Option<&Answers>, now: &Answers) -> Self {
        // A daemon that was started anew counts from 0 again.
        let before = before.filter(|before| before.stats.time_ns < now.stats.time_ns);
        let interval_ns = before.map_or(0, |before| now.stats.time_ns - before.stats.time_ns);
        let counters = by_name(&now.stats.volumes);
        let earlier = before.map(|before| by_name(&before.stats.volumes)).unwrap_or_default();
        let volumes = now.volumes.iter().map(|volume| {
            let key = (volume.pool.as_str(), volume.name.as_str());
            let pair = Pair { now: counters.get(&key), then: earlier.get(&key), interval_ns };
            pair.row(volume)
        });
        let volumes: Vec<VolumeRow> = volumes.collect();
        Self {
            time_ns: now.stats.time_ns,
            interval_ns,
            resident_bytes: amount(now.stats.resident_bytes),
            pools: now.pools.iter().map(|pool| pool_row(pool, &volumes)).collect(),
            volumes,
        }
    }

    /// Puts the volumes in order.
    pub(crate) fn sort(&mut self, sort: Sort) {
        self.volumes.sort_by(|one, other| sort.compare(one, other));
    }
}

fn by_name(stats: &[v1::VolumeStats]) -> BTreeMap<(&str, &str), &v1::VolumeStats> {
    stats.iter().map(|stats| ((stats.pool.as_str(), stats.volume.as_str()), stats)).collect()
}

fn pool_row(pool: &v1::Pool, volumes: &[VolumeRow]) -> PoolRow {
    let count = |is_so: &dyn Fn(&VolumeRow) -> bool| {
        let count = volumes.iter().filter(|one| one.pool == pool.name && is_so(one)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    };
    let size_bytes = amount(pool.size_bytes);
    let free_bytes = amount(pool.free_bytes);
    PoolRow {
        name: pool.name.clone(),
        state: pool.state().word(),
        size_bytes,
        used_bytes: size_bytes.saturating_sub(free_bytes),
        free_bytes,
        promised_bytes: amount(pool.promised_bytes),
        volume_count: pool.volume_count,
        snapshot_count: pool.snapshot_count,
        releasing_bytes: amount(pool.releasing_bytes),
        space_state: pool.space_state().word(),
        low_bytes: amount(pool.low_bytes),
        very_low_bytes: amount(pool.very_low_bytes),
        write_rate_bytes: amount(pool.write_rate_bytes),
        seconds_to_full: u64::try_from(pool.seconds_to_full).ok(),
        waiting_volumes: count(&|one| one.blocked > 0),
        slowed_volumes: count(&|one| one.slowed > 0),
    }
}

/// A volume's counters at both ends of the interval. One that was never served has none.
struct Pair<'a> {
    now: Option<&'a &'a v1::VolumeStats>,
    then: Option<&'a &'a v1::VolumeStats>,
    interval_ns: u64,
}

impl Pair<'_> {
    fn row(&self, volume: &v1::Volume) -> VolumeRow {
        let reads = self.operations(&[Operation::Read]);
        let writes = self.operations(&[Operation::Write]);
        let errors = self.now.into_iter().flat_map(|stats| &stats.operations);
        VolumeRow {
            pool: volume.pool.clone(),
            name: volume.name.clone(),
            size_bytes: amount(volume.size_bytes),
            mapped_bytes: amount(volume.mapped_bytes),
            reads_per_second: reads.0,
            writes_per_second: writes.0,
            read_bytes_per_second: reads.1,
            write_bytes_per_second: writes.1,
            errors: errors.map(|operation| operation.errors).sum(),
            connections: volume.connections,
            parked: self.now.map_or(0, |stats| stats.parked),
            latency: STAGES.iter().map(|&(stage, name)| self.latency(stage, name)).collect(),
            is_snapshot: volume.kind() == v1::VolumeKind::Snapshot,
            blocked: self.now.map_or(0, |stats| stats.blocked),
            slowed: match (self.now, self.then) {
                (Some(now), Some(then)) => now.slowed.saturating_sub(then.slowed),
                _ => 0,
            },
            held: holds::between(self.now.copied(), self.then.copied(), self.interval_ns),
        }
    }

    /// Requests and bytes a second.
    fn operations(&self, wanted: &[Operation]) -> (u64, u64) {
        let sum = |stats: Option<&&v1::VolumeStats>| {
            let all = stats.into_iter().flat_map(|stats| &stats.operations);
            all.filter(|one| wanted.contains(&one.operation()))
                .fold((0, 0), |sum, one| (sum.0 + one.count, sum.1 + one.bytes))
        };
        let (now, then) = (sum(self.now), sum(self.then));
        (self.rate(now.0, then.0), self.rate(now.1, then.1))
    }

    fn rate(&self, now: u64, then: u64) -> u64 {
        if self.interval_ns == 0 {
            return 0;
        }
        let rate =
            u128::from(now.saturating_sub(then)) * 1_000_000_000 / u128::from(self.interval_ns);
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    fn latency(&self, stage: Stage, name: &'static str) -> Latency {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        if self.interval_ns > 0 {
            for bucket in buckets(self.now, stage) {
                counts.insert(bucket.upper_ns, bucket.count);
            }
            for bucket in buckets(self.then, stage) {
                let count = counts.entry(bucket.upper_ns).or_default();
                *count = count.saturating_sub(bucket.count);
            }
        }
        let quantile = |percent| quantile(&counts, percent);
        Latency { stage: name, p50_ns: quantile(50), p99_ns: quantile(99) }
    }
}

fn buckets<'a>(
    stats: Option<&'a &'a v1::VolumeStats>,
    stage: Stage,
) -> impl Iterator<Item = &'a v1::Bucket> {
    let stages = stats.into_iter().flat_map(|stats| &stats.stages);
    stages.filter(move |one| one.stage() == stage).flat_map(|one| &one.buckets)
}

/// The upper bound of the bucket in which the quantile lies.
fn quantile(counts: &BTreeMap<u64, u64>, percent: u64) -> u64 {
    let total: u64 = counts.values().sum();
    let rank = (total * percent).div_ceil(100).max(1);
    let mut seen = 0;
    for (&upper_ns, count) in counts {
        seen += count;
        if seen >= rank {
            return upper_ns;
        }
    }
    0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn stats(volume: &str, reads: u64, bytes: u64, slow: u64) -> v1::VolumeStats {
        let bucket = |upper_ns, count| v1::Bucket { upper_ns, count };
        let stage = |stage: Stage, factor: u64| v1::StageStats {
            stage: stage.into(),
            buckets: vec![bucket(1_000 * factor, reads), bucket(2_000_000 * factor, slow)],
            ..Default::default()
        };
        let operation = |operation: Operation, count, bytes| v1::OperationStats {
            operation: operation.into(),
            count,
            bytes,
            errors: 0,
        };
        v1::VolumeStats {
            pool: "default".to_owned(),
            volume: volume.to_owned(),
            operations: vec![
                operation(Operation::Read, reads, bytes),
                operation(Operation::Write, 2 * reads, 2 * bytes),
                operation(Operation::Flush, 7, 0),
            ],
            stages: vec![stage(Stage::Map, 1), stage(Stage::Media, 40), stage(Stage::Total, 50)],
            parked: 3,
            blocked: 2,
            slowed: slow,
            holds: vec![v1::HoldStats {
                reason: v1::Hold::Limit.into(),
                count: reads,
                ns: slow * 45_000_000,
                now: 1,
            }],
            ..Default::default()
        }
    }

    pub(crate) fn answers(seconds: u64) -> Answers {
        let volume = |name: &str, mapped: i64, connections| v1::Volume {
            name: name.to_owned(),
            kind: match name {
                "archive" => v1::VolumeKind::Snapshot,
                _ => v1::VolumeKind::Volume,
            }
            .into(),
            pool: "default".to_owned(),
            size_bytes: 10 << 30,
            mapped_bytes: mapped << 20,
            connections,
            ..Default::default()
        };
        let pool = v1::Pool {
            name: "default".to_owned(),
            size_bytes: 48 << 30,
            free_bytes: 40 << 30,
            promised_bytes: 20 << 30,
            state: v1::PoolState::Open.into(),
            volume_count: 2,
            snapshot_count: 1,
            releasing_bytes: 3 << 30,
            space_state: v1::SpaceState::Low.into(),
            low_bytes: 41 << 30,
            very_low_bytes: 1 << 30,
            write_rate_bytes: 200 << 20,
            seconds_to_full: 204,
            ..Default::default()
        };
        let busy = stats("data", 1000 * seconds, seconds << 22, 20 * seconds);
        Answers {
            pools: vec![pool],
            volumes: vec![volume("archive", 900, 0), volume("data", 512, 2)],
            stats: v1::StatsResponse {
                time_ns: seconds * 1_000_000_000,
                volumes: vec![busy],
                resident_bytes: 80 << 20,
                ..Default::default()
            },
        }
    }

    #[test]
    fn rates_are_per_second_of_the_daemons_clock() {
        let snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        let data = &snapshot.volumes[1];
        assert_eq!((data.reads_per_second, data.writes_per_second), (1000, 2000));
        assert_eq!((data.read_bytes_per_second, data.write_bytes_per_second), (1 << 22, 2 << 22));
        let media = &data.latency[2];
        assert_eq!((media.stage, media.p50_ns, media.p99_ns), ("media", 40_000, 80_000_000));
        assert_eq!(data.latency[3].p99_ns, 0);
        assert_eq!(snapshot.volumes[0].reads_per_second, 0);
    }

    #[test]
    fn there_are_no_rates_without_an_earlier_answer_or_across_a_restart() {
        for before in [None, Some(&answers(9))] {
            let snapshot = Snapshot::between(before, &answers(4));
            assert_eq!(snapshot.interval_ns, 0);
            assert_eq!(snapshot.volumes[1].reads_per_second, 0);
            assert_eq!(snapshot.volumes[1].latency[4].p50_ns, 0);
        }
    }

    #[test]
    fn volumes_are_sorted_by_each_key() {
        let mut snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        let mut sort = Sort::default();
        let mut first = Vec::new();
        for _ in 0..5 {
            snapshot.sort(sort);
            first.push((sort.name(), snapshot.volumes[0].name.clone()));
            sort = sort.next();
        }
        let expected = ["archive", "data", "data", "data", "archive"];
        assert_eq!(first.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>(), expected);
        assert_eq!(sort, Sort::Name);
    }

    #[test]
    fn the_time_until_it_is_full_is_printed_in_common_units() {
        let mut pool = Snapshot::between(None, &answers(4)).pools.remove(0);
        let mut printed = |state, seconds| {
            (pool.space_state, pool.seconds_to_full) = (Some(state), seconds);
            pool.full_in()
        };
        assert_eq!([printed("normal", None), printed("full", Some(7))], ["-", "now"]);
        let times = [0, 99, 100, 5_999, 6_000, 359_999, 360_000];
        let expected = ["0 s", "99 s", "1 min", "99 min", "1 h", "99 h", "4 d"];
        assert_eq!(times.map(|seconds| printed("low", Some(seconds))), expected);
    }

    #[test]
    fn the_json_has_this_shape() {
        let mut snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        snapshot.volumes.remove(0);
        snapshot.volumes[0].latency.truncate(1);
        let expected = concat!(
            r#"{"time_ns":4000000000,"interval_ns":2000000000,"resident_bytes":83886080,"#,
            r#""pools":[{"name":"default","state":"open","size_bytes":51539607552,"#,
            r#""used_bytes":8589934592,"free_bytes":42949672960,"promised_bytes":21474836480,"#,
            r#""volume_count":2,"snapshot_count":1,"releasing_bytes":3221225472,"#,
            r#""space_state":"low","low_bytes":44023414784,"very_low_bytes":1073741824,"#,
            r#""write_rate_bytes":209715200,"seconds_to_full":204,"waiting_volumes":1,"#,
            r#""slowed_volumes":1}],"volumes":[{"pool":"default","name":"data","#,
            r#""size_bytes":10737418240,"mapped_bytes":536870912,"reads_per_second":1000,"#,
            r#""writes_per_second":2000,"read_bytes_per_second":4194304,"#,
            r#""write_bytes_per_second":8388608,"errors":0,"connections":2,"parked":3,"#,
            r#""latency":[{"stage":"map","p50_ns":1000,"p99_ns":2000000}],"#,
            r#""is_snapshot":false,"blocked":2,"slowed":40,"held":["#,
            r#"{"reason":"turn","ns_per_second":0,"now":0},"#,
            r#"{"reason":"limit","ns_per_second":900000000,"now":1},"#,
            r#"{"reason":"space","ns_per_second":0,"now":0},"#,
            r#"{"reason":"memory","ns_per_second":0,"now":0}]}]}"#,
        );
        assert_eq!(serde_json::to_string(&snapshot).unwrap(), expected);
    }
}
