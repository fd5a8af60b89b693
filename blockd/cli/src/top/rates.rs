//! Rates and latencies: the difference of two answers' counters.

use std::collections::BTreeMap;

use blockd_api::v1::{self, Operation, Stage};
use serde::Serialize;

use super::model::{ClientRow, DeviceRow, VolumeRow};
use crate::amount;
use crate::holds;

/// The stages in the order that a request goes through them. It is held back by limits before it
/// arrives: the total is that of all stages between.
pub(crate) const STAGES: [(Stage, &str); 6] = [
    (Stage::Limit, "limit"),
    (Stage::Map, "map"),
    (Stage::Wait, "wait"),
    (Stage::Media, "media"),
    (Stage::Commit, "commit"),
    (Stage::Total, "total"),
];

/// The parts of the total.
const PARTS: [Stage; 4] = [Stage::Map, Stage::Wait, Stage::Media, Stage::Commit];

/// How long requests of the interval stayed in a stage; 0 when there were none.
///
/// The quantiles are those of the requests that were in the stage, the mean is that of all
/// requests: the means of map, wait, media and commit add up to no more than that of the total.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Latency {
    pub stage: &'static str,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub mean_ns: u64,
}

/// A volume's counters at both ends of the interval. One that was never served has none.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) now: Option<&'a v1::VolumeStats>,
    pub(super) then: Option<&'a v1::VolumeStats>,
    pub(super) interval_ns: u64,
}

impl Pair<'_> {
    /// The volume with its rates.
    pub(super) fn row(&self, volume: &v1::Volume) -> VolumeRow {
        let reads = self.operations(&[Operation::Read]);
        let writes = self.operations(&[Operation::Write]);
        let others = self.operations(&[Operation::Discard, Operation::WriteZeroes]);
        let flushes = self.operations(&[Operation::Flush]);
        let errors = self.now.into_iter().flat_map(|stats| &stats.operations);
        let settings = volume.settings.unwrap_or_default();
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
            latency: self.latencies(),
            is_snapshot: volume.kind() == v1::VolumeKind::Snapshot,
            blocked: self.now.map_or(0, |stats| stats.blocked),
            slowed: match (self.now, self.then) {
                (Some(now), Some(then)) => now.slowed.saturating_sub(then.slowed),
                _ => 0,
            },
            held: holds::between(self.now, self.then, self.interval_ns),
            operations_per_second: reads.0 + writes.0 + others.0 + flushes.0,
            limited_operations_per_second: reads.0 + writes.0 + others.0,
            iops_limit: settings.iops,
            bandwidth_limit_bytes: amount(settings.bandwidth_bytes),
        }
    }

    /// Requests and bytes a second.
    fn operations(&self, wanted: &[Operation]) -> (u64, u64) {
        let sum = |stats: Option<&v1::VolumeStats>| {
            let all = stats.into_iter().flat_map(|stats| &stats.operations);
            all.filter(|one| wanted.contains(&one.operation()))
                .fold((0, 0), |sum, one| (sum.0 + one.count, sum.1 + one.bytes))
        };
        let (now, then) = (sum(self.now), sum(self.then));
        let rate = |now, then| per_second(now, then, self.interval_ns);
        (rate(now.0, then.0), rate(now.1, then.1))
    }

    fn latencies(&self) -> Vec<Latency> {
        let map = self.quantiles(Stage::Map);
        let parts: u64 = PARTS.iter().map(|&stage| self.mean(stage)).sum();
        let latency = |&(stage, name): &(Stage, &'static str)| {
            let (mut quantiles, mut mean_ns) = (self.quantiles(stage), self.mean(stage));
            // Every request is planned before it is answered. Where the worker's clock, which it
            // reads once for all that it does in a row, shows less than that, it shows too little.
            if stage == Stage::Total && quantiles.1 > 0 {
                quantiles = (quantiles.0.max(map.0), quantiles.1.max(map.1));
                mean_ns = mean_ns.max(parts);
            }
            Latency { stage: name, p50_ns: quantiles.0, p99_ns: quantiles.1, mean_ns }
        };
        STAGES.iter().map(latency).collect()
    }

    /// The median and the 99th percentile.
    fn quantiles(&self, stage: Stage) -> (u64, u64) {
        if self.interval_ns == 0 {
            return (0, 0);
        }
        let buckets = |stats| find(stats, stage).map_or(&[][..], |stats| &stats.buckets[..]);
        quantiles(buckets(self.now), buckets(self.then))
    }

    /// The mean over all requests, those that were not in the stage included.
    fn mean(&self, stage: Stage) -> u64 {
        if self.interval_ns == 0 {
            return 0;
        }
        let count_and_sum = |stage| {
            let of = |stats| find(stats, stage).map_or((0, 0), |one| (one.count, one.sum_ns));
            let (now, then): ((u64, u64), (u64, u64)) = (of(self.now), of(self.then));
            (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))
        };
        let (count, sum_ns) = count_and_sum(stage);
        // Planning is measured for some requests only.
        let count = if stage == Stage::Map { count } else { count_and_sum(Stage::Total).0 };
        sum_ns.checked_div(count).unwrap_or(0)
    }
}

fn find(stats: Option<&v1::VolumeStats>, stage: Stage) -> Option<&v1::StageStats> {
    stats?.stages.iter().find(|one| one.stage() == stage)
}

/// A device's rates. `size_bytes` is 0 where the pool does not list it.
pub(super) fn device_row(
    now: &v1::DeviceStats,
    then: Option<&v1::DeviceStats>,
    interval_ns: u64,
    size_bytes: u64,
) -> DeviceRow {
    let empty = v1::DeviceStats::default();
    // Without an interval there are no rates.
    let then = then.unwrap_or(&empty);
    let reads = moved(now.reads, then.reads, interval_ns);
    let writes = moved(now.writes, then.writes, interval_ns);
    let flushes = moved(now.flushes, then.flushes, interval_ns);
    let all = [now.reads, now.writes, now.flushes];
    let (p50_ns, p99_ns) = match interval_ns {
        0 => (0, 0),
        _ => quantiles(&now.buckets, &then.buckets),
    };
    let busy_ns = u128::from(now.sum_ns.saturating_sub(then.sum_ns)) * 1000;
    let mean = busy_ns.checked_div(u128::from(interval_ns)).unwrap_or(0);
    DeviceRow {
        pool: now.pool.clone(),
        path: now.path.clone(),
        size_bytes,
        reads_per_second: reads.0,
        writes_per_second: writes.0,
        flushes_per_second: flushes.0,
        read_bytes_per_second: reads.1,
        write_bytes_per_second: writes.1,
        p50_ns,
        p99_ns,
        in_flight: now.in_flight,
        mean_in_flight_thousandths: u64::try_from(mean).unwrap_or(u64::MAX),
        errors: all.iter().flatten().map(|one| one.errors).sum(),
    }
}

fn moved(
    now: Option<v1::OperationStats>,
    then: Option<v1::OperationStats>,
    interval_ns: u64,
) -> (u64, u64) {
    let (now, then) = (now.unwrap_or_default(), then.unwrap_or_default());
    let rate = |now, then| per_second(now, then, interval_ns);
    (rate(now.count, then.count), rate(now.bytes, then.bytes))
}

/// The clients of volumes: connections, and the kernel for each block device.
pub(super) fn clients(connections: &[v1::Connection], volumes: &[v1::Volume]) -> Vec<ClientRow> {
    let connected = connections.iter().map(|one| ClientRow {
        id: Some(one.id),
        pool: one.pool.clone(),
        volume: one.volume.clone(),
        client: one.peer.clone(),
        worker: Some(one.worker),
        in_flight: Some(one.in_flight),
        tls: one.tls,
        read_only: one.read_only,
    });
    let served = |volume: &&v1::Volume| volume.attached && volume.queue_count > 0;
    let devices = volumes.iter().filter(served).map(|volume| ClientRow {
        id: None,
        pool: volume.pool.clone(),
        volume: volume.name.clone(),
        client: volume.device_path.clone(),
        worker: None,
        in_flight: None,
        tls: false,
        read_only: volume.read_only,
    });
    connected.chain(devices).collect()
}

fn per_second(now: u64, then: u64, interval_ns: u64) -> u64 {
    let rate = u128::from(now.saturating_sub(then)) * 1_000_000_000;
    let rate = rate.checked_div(u128::from(interval_ns)).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The median and the 99th percentile of what came to the buckets meanwhile.
fn quantiles(now: &[v1::Bucket], then: &[v1::Bucket]) -> (u64, u64) {
    let mut counts: BTreeMap<u64, u64> =
        now.iter().map(|bucket| (bucket.upper_ns, bucket.count)).collect();
    for bucket in then {
        let count = counts.entry(bucket.upper_ns).or_default();
        *count = count.saturating_sub(bucket.count);
    }
    (quantile(&counts, 50), quantile(&counts, 99))
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
mod tests {
    use super::*;

    fn stage(stage: Stage, sum_ns: u64, buckets: &[(u64, u64)]) -> v1::StageStats {
        v1::StageStats {
            stage: stage.into(),
            count: buckets.iter().map(|bucket| bucket.1).sum(),
            sum_ns,
            buckets: buckets
                .iter()
                .map(|&(upper_ns, count)| v1::Bucket { upper_ns, count })
                .collect(),
            ..Default::default()
        }
    }

    fn latencies(stages: Vec<v1::StageStats>) -> Vec<Latency> {
        let stats = v1::VolumeStats { stages, ..Default::default() };
        Pair { now: Some(&stats), then: None, interval_ns: 1_000_000_000 }.latencies()
    }

    #[test]
    fn the_total_is_no_less_than_planning_which_another_clock_measures() {
        // Most requests were answered before the worker read its clock again.
        let shown = latencies(vec![
            stage(Stage::Map, 10 * 800, &[(896, 10)]),
            stage(Stage::Media, 100 * 7_000_000, &[(7_340_032, 100)]),
            stage(Stage::Total, 100 * 7_000_000, &[(2, 540), (7_340_032, 100)]),
        ]);
        let total = shown.last().unwrap();
        assert_eq!((total.p50_ns, total.p99_ns), (896, 7_340_032));
        // The mean of the part counts the requests that were not in it.
        let media = &shown[3];
        assert_eq!((media.stage, media.p50_ns, media.mean_ns), ("media", 7_340_032, 1_093_750));
        assert_eq!(total.mean_ns, 1_093_750 + 800);
    }

    #[test]
    fn without_requests_there_is_no_total() {
        let shown = latencies(vec![stage(Stage::Map, 800, &[(896, 1)])]);
        assert_eq!((shown[5].p50_ns, shown[5].p99_ns, shown[5].mean_ns), (0, 0, 0));
    }

    #[test]
    fn a_device_has_its_rates_and_its_mean_in_flight() {
        let operations = |count, bytes| {
            Some(v1::OperationStats { count, bytes, errors: count / 100, ..Default::default() })
        };
        let stats = |scale: u64| v1::DeviceStats {
            pool: "default".to_owned(),
            path: "/dev/vdb".to_owned(),
            reads: operations(100 * scale, 409_600 * scale),
            writes: operations(50 * scale, 4096 * scale),
            in_flight: 3,
            sum_ns: 2_500_000_000 * scale,
            buckets: vec![v1::Bucket { upper_ns: 1 << 20, count: 150 * scale }],
            ..Default::default()
        };
        let row = device_row(&stats(3), Some(&stats(1)), 2_000_000_000, 7);
        assert_eq!((row.reads_per_second, row.read_bytes_per_second), (100, 409_600));
        assert_eq!((row.writes_per_second, row.flushes_per_second), (50, 0));
        assert_eq!((row.mean_in_flight_thousandths, row.in_flight), (2500, 3));
        assert_eq!((row.p50_ns, row.errors), (1 << 20, 4));
        let first = device_row(&stats(3), None, 0, 7);
        assert_eq!((first.reads_per_second, first.p99_ns), (0, 0));
        assert_eq!(first.mean_in_flight_thousandths, 0);
    }

    #[test]
    fn block_devices_are_clients_too() {
        let volume = v1::Volume {
            pool: "default".to_owned(),
            name: "data".to_owned(),
            attached: true,
            device_path: "/dev/ublkb0".to_owned(),
            queue_count: 2,
            ..Default::default()
        };
        let connection = v1::Connection { id: 7, peer: "unix".to_owned(), ..Default::default() };
        let detached = v1::Volume { attached: false, ..volume.clone() };
        let rows = clients(&[connection], &[volume, detached]);
        let names: Vec<_> = rows.iter().map(|row| (row.id, row.client.as_str())).collect();
        assert_eq!(names, [(Some(7), "unix"), (None, "/dev/ublkb0")]);
    }
}
