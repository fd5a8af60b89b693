//! Counters and latencies, summed over workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockd_api::v1;
use blockd_engine::schedule::Hold;
use blockd_engine::stats::{Histogram, MediaOp, MediaStats, Op, Stage, VolumeStats};
use blockd_media::error::Error;
use blockd_media::units::to_wire;

use super::Control;
use super::messages::count;

/// A volume's counters, by its pool's and its own name.
type ByVolume = BTreeMap<(String, String), Vec<Arc<VolumeStats>>>;

impl Control {
    /// All counters of a pool or volume, or of all.
    pub(super) fn describe_stats(
        &self,
        pool: &str,
        volume: &str,
    ) -> Result<v1::StatsResponse, Error> {
        if !pool.is_empty() {
            self.known(pool)?;
        }
        let mut volumes = ByVolume::new();
        for stats in self.data_path().volume_stats() {
            let wanted = |asked: &str, has: &str| asked.is_empty() || asked == has;
            let key = (stats.pool.get(), stats.volume.get());
            if wanted(pool, &key.0) && wanted(volume, &key.1) {
                volumes.entry(key).or_default().push(stats);
            }
        }
        let clients = self.describe_connections(pool, volume);
        let volume_stats = |((pool, volume), workers): ((String, String), Vec<_>)| {
            let mine = clients.iter().filter(|one| one.pool == pool && one.volume == volume);
            let connections = count(mine.count());
            volume_stats(pool, volume, connections, &workers)
        };
        Ok(v1::StatsResponse {
            time_ns: self.0.clock.ns(),
            pools: self.pool_stats(pool),
            volumes: volumes.into_iter().map(volume_stats).collect(),
            resident_bytes: resident_bytes(),
            devices: self.device_stats(pool),
        })
    }

    fn device_stats(&self, pool: &str) -> Vec<v1::DeviceStats> {
        let mut list = Vec::new();
        for known in self.known_pools() {
            let Ok(handle) = known.state else { continue };
            if !pool.is_empty() && pool != known.config.name {
                continue;
            }
            let threads = handle.media_stats();
            for (at, device) in handle.used_devices() {
                let path = device.info().path.display().to_string();
                list.push(device_stats(&known.config.name, path, at, &threads));
            }
        }
        list
    }

    fn pool_stats(&self, pool: &str) -> Vec<v1::PoolStats> {
        let mut list = Vec::new();
        for known in self.known_pools() {
            let Ok(handle) = known.state else { continue };
            if !pool.is_empty() && pool != known.config.name {
                continue;
            }
            let stats = handle.stats();
            list.push(v1::PoolStats {
                pool: known.config.name,
                commits: stats.commits.load(Ordering::Relaxed),
                flushes: stats.flushes.load(Ordering::Relaxed),
                writes: stats.writes.load(Ordering::Relaxed),
                written_bytes: stats.written_bytes.load(Ordering::Relaxed),
                discards: stats.discards.load(Ordering::Relaxed),
                wakeups: stats.wakeups.load(Ordering::Relaxed),
                io_errors: stats.io_errors.load(Ordering::Relaxed),
            });
        }
        list
    }

    /// Clients of a pool or volume, or all.
    pub(super) fn describe_connections(&self, pool: &str, volume: &str) -> Vec<v1::Connection> {
        let mut names = BTreeMap::new();
        for known in self.known_pools() {
            let Ok(handle) = known.state else { continue };
            for one in handle.mapper().summaries() {
                names.insert((handle.id(), one.id), (known.config.name.clone(), one.name));
            }
        }
        let mut list = Vec::new();
        for one in self.data_path().connections() {
            let name = names.get(&(one.pool, one.volume)).cloned().unwrap_or_default();
            let wanted = |asked: &str, has: &str| asked.is_empty() || asked == has;
            if !wanted(pool, &name.0) || !wanted(volume, &name.1) {
                continue;
            }
            list.push(v1::Connection {
                id: one.number(),
                pool: name.0,
                volume: name.1,
                export: one.export,
                peer: one.peer,
                tls: one.agreed.tls,
                read_only: one.agreed.read_only,
                structured_replies: one.agreed.structured,
                extended_headers: one.agreed.extended,
                worker: count(one.worker),
                in_flight: u32::try_from(one.in_flight.get()).unwrap_or(u32::MAX),
                negotiated_bytes: to_wire(one.agreed.size),
            });
        }
        list
    }
}

/// Resident memory of this process.
pub(super) fn resident_bytes() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<i64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn volume_stats(
    pool: String,
    volume: String,
    connections: u32,
    workers: &[Arc<VolumeStats>],
) -> v1::VolumeStats {
    let sum = |of: &dyn Fn(&VolumeStats) -> u64| {
        workers.iter().map(|stats| of(stats)).fold(0_u64, u64::saturating_add)
    };
    let operation = |op: Op| v1::OperationStats {
        operation: match op {
            Op::Read => v1::Operation::Read,
            Op::Write => v1::Operation::Write,
            Op::Flush => v1::Operation::Flush,
            Op::Discard => v1::Operation::Discard,
            Op::WriteZeroes => v1::Operation::WriteZeroes,
        }
        .into(),
        count: sum(&|stats| stats.op(op).0.get()),
        bytes: sum(&|stats| stats.op(op).1.get()),
        errors: sum(&|stats| stats.op(op).2.get()),
    };
    let stage = |stage: Stage| {
        let histograms: Vec<_> = workers.iter().map(|stats| stats.stage(stage)).collect();
        stage_stats(stage, &histograms)
    };
    let hold = |hold: Hold| v1::HoldStats {
        reason: match hold {
            Hold::Turn => v1::Hold::Turn,
            Hold::Limit => v1::Hold::Limit,
            Hold::Space => v1::Hold::Space,
            Hold::Memory => v1::Hold::Memory,
        }
        .into(),
        count: sum(&|stats| stats.held[hold as usize].get()),
        ns: sum(&|stats| stats.held_ns[hold as usize].get()),
        now: sum(&|stats| stats.held_now[hold as usize].get()),
    };
    v1::VolumeStats {
        pool,
        volume,
        operations: Op::ALL.into_iter().map(operation).collect(),
        stages: Stage::ALL.into_iter().map(stage).collect(),
        parked: sum(&|stats| stats.parked.get()),
        parks: sum(&|stats| stats.parks.get()),
        starved: sum(&|stats| stats.starved.get()),
        slowed: sum(&|stats| stats.slowed.get()),
        slowed_ns: sum(&|stats| stats.slowed_ns.get()),
        limited: sum(&|stats| stats.limited.get()),
        blocked: sum(&|stats| stats.blocked.get()),
        blocked_ns: workers.iter().map(|stats| stats.blocked_ns.get()).max().unwrap_or(0),
        refused: sum(&|stats| stats.refused.get()),
        connections,
        holds: Hold::ALL.into_iter().map(hold).collect(),
    }
}

fn device_stats(
    pool: &str,
    path: String,
    at: usize,
    threads: &[Arc<MediaStats>],
) -> v1::DeviceStats {
    let seen: Vec<_> = threads.iter().filter_map(|thread| thread.device(at)).collect();
    let operation = |op: MediaOp| v1::OperationStats {
        operation: match op {
            MediaOp::Read => v1::Operation::Read,
            MediaOp::Write => v1::Operation::Write,
            MediaOp::Flush => v1::Operation::Flush,
        }
        .into(),
        count: seen.iter().map(|one| one.sent[op as usize].get()).sum(),
        bytes: seen.iter().map(|one| one.bytes[op as usize].get()).sum(),
        errors: seen.iter().map(|one| one.errors[op as usize].get()).sum(),
    };
    let histograms: Vec<_> = seen.iter().map(|one| &one.latency).collect();
    v1::DeviceStats {
        pool: pool.to_owned(),
        path,
        reads: Some(operation(MediaOp::Read)),
        writes: Some(operation(MediaOp::Write)),
        flushes: Some(operation(MediaOp::Flush)),
        in_flight: threads.iter().map(|thread| thread.in_flight(at)).sum(),
        sum_ns: histograms.iter().map(|histogram| histogram.sum_ns()).sum(),
        buckets: wire(filled(&histograms)),
    }
}

/// The buckets that are not empty, by their upper ends.
fn filled(histograms: &[&Histogram]) -> BTreeMap<u64, u64> {
    let mut buckets: BTreeMap<u64, u64> = BTreeMap::new();
    for (upper_ns, count) in histograms.iter().flat_map(|histogram| histogram.buckets()) {
        if count > 0 {
            *buckets.entry(upper_ns).or_default() += count;
        }
    }
    buckets
}

fn wire(buckets: BTreeMap<u64, u64>) -> Vec<v1::Bucket> {
    buckets.into_iter().map(|(upper_ns, count)| v1::Bucket { upper_ns, count }).collect()
}

fn stage_stats(stage: Stage, histograms: &[&Histogram]) -> v1::StageStats {
    let buckets = filled(histograms);
    let count = buckets.values().sum();
    let quantile = |per_mille: u64| quantile(&buckets, count, per_mille);
    v1::StageStats {
        stage: match stage {
            Stage::Map => v1::Stage::Map,
            Stage::Limit => v1::Stage::Limit,
            Stage::Wait => v1::Stage::Wait,
            Stage::Media => v1::Stage::Media,
            Stage::Commit => v1::Stage::Commit,
            Stage::Total => v1::Stage::Total,
        }
        .into(),
        count,
        sum_ns: histograms.iter().map(|histogram| histogram.sum_ns()).sum(),
        p50_ns: quantile(500),
        p90_ns: quantile(900),
        p99_ns: quantile(990),
        p999_ns: quantile(999),
        buckets: wire(buckets),
    }
}

/// The upper end of the bucket below which this part of all lies.
fn quantile(buckets: &BTreeMap<u64, u64>, count: u64, per_mille: u64) -> u64 {
    // In 128 bits, as counts may be anything.
    let rank = (u128::from(count) * u128::from(per_mille)).div_ceil(1000);
    let mut below = 0_u128;
    for (upper_ns, count) in buckets {
        below += u128::from(*count);
        if below >= rank {
            return *upper_ns;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use blockd_media::clock::Clock;

    use super::*;

    #[test]
    fn workers_are_summed() {
        let worker = |worker| VolumeStats { worker, ..VolumeStats::default() };
        let workers = [Arc::new(worker(0)), Arc::new(worker(1))];
        for stats in &workers {
            stats.op(Op::Write).0.add(3);
            stats.op(Op::Write).1.add(4096);
            stats.stage(Stage::Media).record(1000);
        }
        workers[1].stage(Stage::Media).record(1_000_000);
        for (at, hold) in Hold::ALL.into_iter().enumerate() {
            let n = at as u64;
            workers[at % 2].held[hold as usize].add(10 + n);
            workers[at % 2].held_ns[hold as usize].add(100 + n);
            workers[at % 2].held_now[hold as usize].add(1 + n);
        }
        let sum = volume_stats("p".to_owned(), "v".to_owned(), 1, &workers);
        let write = sum.operations.iter().find(|op| op.operation() == v1::Operation::Write);
        assert_eq!(write.map(|op| (op.count, op.bytes, op.errors)), Some((6, 8192, 0)));
        let media = sum.stages.iter().find(|stage| stage.stage() == v1::Stage::Media).unwrap();
        assert_eq!((media.count, media.sum_ns), (3, 1_002_000));
        assert_eq!(media.buckets.len(), 2);
        assert!(media.p50_ns >= 1000 && media.p50_ns < 2000, "{media:?}");
        assert!(media.p99_ns >= 1_000_000 && media.p99_ns < 2_000_000, "{media:?}");
        let holds: Vec<_> =
            sum.holds.iter().map(|one| (one.reason(), one.count, one.ns, one.now)).collect();
        let expected = [
            (v1::Hold::Turn, 10, 100, 1),
            (v1::Hold::Limit, 11, 101, 2),
            (v1::Hold::Space, 12, 102, 3),
            (v1::Hold::Memory, 13, 103, 4),
        ];
        assert_eq!(holds, expected);
    }

    #[test]
    fn devices_are_summed_over_threads() {
        let thread = || Arc::new(MediaStats::new(2, 4, Clock::start()));
        let threads = [thread(), thread()];
        for stats in &threads {
            stats.sent(1, MediaOp::Write, 4096);
            stats.failed(1, MediaOp::Flush, 5);
            stats.begin(0, 1, 256);
            stats.begin(1, 1, 256);
            stats.end(1, 1256);
        }
        let device = device_stats("p", "/dev/vdb".to_owned(), 1, &threads);
        let writes = device.writes.unwrap();
        assert_eq!(
            (writes.operation(), writes.count, writes.bytes),
            (v1::Operation::Write, 2, 8192)
        );
        assert_eq!(device.flushes.map(|flushes| (flushes.count, flushes.errors)), Some((0, 2)));
        assert_eq!((device.in_flight, device.sum_ns), (2, 2000));
        assert_eq!(device.buckets, [v1::Bucket { upper_ns: 1024, count: 2 }]);
        assert_eq!(device_stats("p", String::new(), 0, &threads).in_flight, 0);
    }

    #[test]
    fn nothing_has_no_quantile() {
        assert_eq!(quantile(&BTreeMap::new(), 0, 990), 0);
        let one = BTreeMap::from([(7, 1)]);
        assert_eq!([1, 500, 999].map(|part| quantile(&one, 1, part)), [7; 3]);
    }

    #[test]
    fn this_process_takes_memory() {
        assert!(resident_bytes() > 1 << 20);
    }
}
