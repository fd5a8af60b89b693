//! The content of `top`: the difference of two answers of the daemon, per second.

use std::collections::BTreeMap;

use blockd_api::v1;
use serde::Serialize;

use super::rates::{self, Latency, Pair};
use super::sort::{Sort, sort_rows};
use crate::amount;
use crate::holds::Held;

/// One round of questions to the daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// As `ListPools` has them.
    pub pools: Vec<v1::Pool>,
    /// As `ListVolumes` has them.
    pub volumes: Vec<v1::Volume>,
    /// Counters.
    pub stats: v1::StatsResponse,
    /// As `ListConnections` has them.
    pub connections: Vec<v1::Connection>,
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
    /// Of all pools; empty where the daemon is too old to count their IO.
    pub devices: Vec<DeviceRow>,
    pub clients: Vec<ClientRow>,
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
    /// Of its volumes together.
    pub operations_per_second: u64,
    pub bytes_per_second: u64,
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
    /// Requests of every kind.
    pub operations_per_second: u64,
    /// Requests that a limit counts: all but flushes.
    pub limited_operations_per_second: u64,
    /// Its limits; 0 for none.
    pub iops_limit: u64,
    pub bandwidth_limit_bytes: u64,
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

    /// The latency of its requests from their arrival to their answer.
    #[must_use]
    pub(crate) fn total(&self) -> Option<&Latency> {
        self.latency.iter().find(|latency| latency.stage == "total")
    }

    /// The larger share of its limits that it uses, in thousandths; nothing without a limit.
    #[must_use]
    pub(crate) fn limit_thousandths(&self) -> Option<u64> {
        let share = |used: u64, limit: u64| {
            let share = (u128::from(used) * 1000).checked_div(u128::from(limit))?;
            Some(u64::try_from(share).unwrap_or(u64::MAX))
        };
        let bytes = self.read_bytes_per_second.saturating_add(self.write_bytes_per_second);
        let operations = share(self.limited_operations_per_second, self.iops_limit);
        operations.max(share(bytes, self.bandwidth_limit_bytes))
    }
}

/// A device of a pool, and its IO. Operations and bytes are those of the pool itself: log, metadata
/// and folds. Latency, requests in flight and errors are those of clients too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceRow {
    pub pool: String,
    /// Empty for memory.
    pub path: String,
    pub size_bytes: u64,
    pub reads_per_second: u64,
    pub writes_per_second: u64,
    pub flushes_per_second: u64,
    pub read_bytes_per_second: u64,
    pub write_bytes_per_second: u64,
    /// Of requests that concerned this device alone.
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub in_flight: u64,
    /// The mean number in flight in the interval, times 1000.
    pub mean_in_flight_thousandths: u64,
    /// Since the daemon started.
    pub errors: u64,
}

/// A client of a volume: a connection, or the kernel for a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ClientRow {
    /// The connection's number; nothing for a block device.
    pub id: Option<u64>,
    pub pool: String,
    pub volume: String,
    /// The client's address, or the path of the block device.
    pub client: String,
    pub worker: Option<u32>,
    /// Requests that are not answered yet; nothing where the daemon does not count them.
    pub in_flight: Option<u32>,
    pub tls: bool,
    pub read_only: bool,
}

impl ClientRow {
    /// The client's name among all: the number of a connection, the path of a device.
    #[must_use]
    pub(crate) fn key(&self) -> String {
        self.id.map_or_else(|| self.client.clone(), |id| id.to_string())
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
            let (now, then) = (counters.get(&key).copied(), earlier.get(&key).copied());
            let pair = Pair { now, then, interval_ns };
            pair.row(volume)
        });
        let volumes: Vec<VolumeRow> = volumes.collect();
        let mut devices = Vec::new();
        for device in &now.stats.devices {
            let is_same = |other: &&v1::DeviceStats| {
                (&other.pool, &other.path) == (&device.pool, &device.path)
            };
            let then = before.and_then(|before| before.stats.devices.iter().find(is_same));
            let pool = now.pools.iter().find(|pool| pool.name == device.pool);
            let listed = pool.into_iter().flat_map(|pool| &pool.devices);
            let size = listed.filter(|one| one.path == device.path).map(|one| one.size_bytes);
            let size_bytes = amount(size.max().unwrap_or(0));
            devices.push(rates::device_row(device, then, interval_ns, size_bytes));
        }
        Self {
            time_ns: now.stats.time_ns,
            interval_ns,
            resident_bytes: amount(now.stats.resident_bytes),
            pools: now.pools.iter().map(|pool| pool_row(pool, &volumes)).collect(),
            volumes,
            devices,
            clients: rates::clients(&now.connections, &now.volumes),
        }
    }

    /// Puts the rows in order.
    pub(crate) fn sort(&mut self, sort: Sort) {
        sort_rows(&mut self.pools, sort);
        sort_rows(&mut self.volumes, sort);
        sort_rows(&mut self.devices, sort);
        sort_rows(&mut self.clients, sort);
    }
}

fn by_name(stats: &[v1::VolumeStats]) -> BTreeMap<(&str, &str), &v1::VolumeStats> {
    stats.iter().map(|stats| ((stats.pool.as_str(), stats.volume.as_str()), stats)).collect()
}

fn pool_row(pool: &v1::Pool, volumes: &[VolumeRow]) -> PoolRow {
    let of_pool: Vec<_> = volumes.iter().filter(|one| one.pool == pool.name).collect();
    let count = |is_so: &dyn Fn(&VolumeRow) -> bool| {
        let count = of_pool.iter().filter(|one| is_so(one)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    };
    let sum = |of: &dyn Fn(&VolumeRow) -> u64| of_pool.iter().map(|one| of(one)).sum();
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
        operations_per_second: sum(&|one| one.operations_per_second),
        bytes_per_second: sum(&|one| one.read_bytes_per_second + one.write_bytes_per_second),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use blockd_api::v1::{Operation, Stage};

    use super::*;

    fn stats(volume: &str, reads: u64, bytes: u64, slow: u64) -> v1::VolumeStats {
        let bucket = |upper_ns, count| v1::Bucket { upper_ns, count };
        let stage = |stage: Stage, factor: u64| v1::StageStats {
            stage: stage.into(),
            count: reads + slow,
            sum_ns: factor * (1_000 * reads + 2_000_000 * slow),
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
            connections: Vec::new(),
        }
    }

    #[test]
    fn rates_are_per_second_of_the_daemons_clock() {
        let snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        let data = &snapshot.volumes[1];
        assert_eq!((data.reads_per_second, data.writes_per_second), (1000, 2000));
        assert_eq!((data.read_bytes_per_second, data.write_bytes_per_second), (1 << 22, 2 << 22));
        let media = &data.latency[3];
        assert_eq!((media.stage, media.p50_ns, media.p99_ns), ("media", 40_000, 80_000_000));
        assert_eq!(data.latency[4].p99_ns, 0);
        assert_eq!(snapshot.volumes[0].reads_per_second, 0);
    }

    #[test]
    fn there_are_no_rates_without_an_earlier_answer_or_across_a_restart() {
        for before in [None, Some(&answers(9))] {
            let snapshot = Snapshot::between(before, &answers(4));
            assert_eq!(snapshot.interval_ns, 0);
            assert_eq!(snapshot.volumes[1].reads_per_second, 0);
            assert_eq!(snapshot.volumes[1].latency[5].p50_ns, 0);
        }
    }

    #[test]
    fn a_volume_uses_the_larger_share_of_its_limits() {
        let mut data = Snapshot::between(Some(&answers(2)), &answers(4)).volumes.remove(1);
        assert_eq!(data.limit_thousandths(), None);
        data.iops_limit = 4000;
        assert_eq!(data.limit_thousandths(), Some(750));
        data.bandwidth_limit_bytes = 15 << 20;
        assert_eq!(data.limit_thousandths(), Some(800));
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
        snapshot.volumes[0].latency.drain(..1);
        snapshot.volumes[0].latency.truncate(1);
        let expected = concat!(
            r#"{"time_ns":4000000000,"interval_ns":2000000000,"resident_bytes":83886080,"#,
            r#""pools":[{"name":"default","state":"open","size_bytes":51539607552,"#,
            r#""used_bytes":8589934592,"free_bytes":42949672960,"promised_bytes":21474836480,"#,
            r#""volume_count":2,"snapshot_count":1,"releasing_bytes":3221225472,"#,
            r#""space_state":"low","low_bytes":44023414784,"very_low_bytes":1073741824,"#,
            r#""write_rate_bytes":209715200,"seconds_to_full":204,"waiting_volumes":1,"#,
            r#""slowed_volumes":1,"operations_per_second":3000,"bytes_per_second":12582912}],"#,
            r#""volumes":[{"pool":"default","name":"data","#,
            r#""size_bytes":10737418240,"mapped_bytes":536870912,"reads_per_second":1000,"#,
            r#""writes_per_second":2000,"read_bytes_per_second":4194304,"#,
            r#""write_bytes_per_second":8388608,"errors":0,"connections":2,"parked":3,"#,
            r#""latency":[{"stage":"map","p50_ns":1000,"p99_ns":2000000,"mean_ns":40196}],"#,
            r#""is_snapshot":false,"blocked":2,"slowed":40,"held":["#,
            r#"{"reason":"turn","ns_per_second":0,"now":0},"#,
            r#"{"reason":"limit","ns_per_second":900000000,"now":1},"#,
            r#"{"reason":"space","ns_per_second":0,"now":0},"#,
            r#"{"reason":"memory","ns_per_second":0,"now":0}],"operations_per_second":3000,"#,
            r#""limited_operations_per_second":3000,"iops_limit":0,"bandwidth_limit_bytes":0}],"#,
            r#""devices":[],"clients":[]}"#,
        );
        assert_eq!(serde_json::to_string(&snapshot).unwrap(), expected);
    }
}
