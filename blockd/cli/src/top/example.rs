//! A node in an example: two pools, six volumes, three devices and eight clients, for screens in
//! tests and documents. Some numbers are wide on purpose.

use blockd_api::v1::{self, Hold, Operation, Stage};

use super::history::History;
use super::model::{Answers, Snapshot};

/// How long the node has been observed, in seconds.
pub(crate) const SECONDS: u64 = 64;

/// The load of a second, in per cent of the last second's.
const FACTORS: [u64; 16] = [100, 96, 88, 71, 60, 52, 47, 55, 63, 75, 84, 98, 112, 120, 117, 108];

const MIB: u64 = 1 << 20;
const GIB: i64 = 1 << 30;
const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// The sum over seconds of something that follows the load.
fn sum(rate: u64, seconds: u64) -> u64 {
    let factor = |second: u64| FACTORS[usize::try_from((SECONDS - second) % 16).unwrap()];
    (1..=seconds).map(|second| rate * factor(second) / 100).sum()
}

/// Times in a stage: each one with how many of a second's requests had it.
type Times<'a> = (Stage, &'a [(u64, u64)]);

/// The load of a volume in the last second.
#[derive(Default)]
struct Load<'a> {
    reads: (u64, u64),
    writes: (u64, u64),
    flushes: u64,
    times: &'a [Times<'a>],
    /// Nanoseconds.
    holds: &'a [(Hold, u64)],
    parked: u64,
    blocked: u64,
    slowed: u64,
    errors: u64,
}

fn operation(operation: Operation, (count, bytes): (u64, u64), errors: u64) -> v1::OperationStats {
    v1::OperationStats { operation: operation.into(), count, bytes, errors }
}

impl Load<'_> {
    fn stats(&self, pool: &str, volume: &str, seconds: u64) -> v1::VolumeStats {
        let both = |(count, bytes)| (sum(count, seconds), sum(bytes, seconds));
        let stage = |&(stage, times): &Times<'_>| v1::StageStats {
            stage: stage.into(),
            count: times.iter().map(|&(_, count)| sum(count, seconds)).sum(),
            // Times are somewhat below the ends of their buckets.
            sum_ns: times.iter().map(|&(ns, count)| sum(count, seconds) * (ns - ns / 10)).sum(),
            buckets: times
                .iter()
                .map(|&(upper_ns, count)| v1::Bucket { upper_ns, count: sum(count, seconds) })
                .collect(),
            ..Default::default()
        };
        let hold = |&(reason, ns): &(Hold, u64)| v1::HoldStats {
            reason: reason.into(),
            count: seconds,
            ns: ns * seconds,
            now: 1,
        };
        v1::VolumeStats {
            pool: pool.to_owned(),
            volume: volume.to_owned(),
            operations: vec![
                operation(Operation::Read, both(self.reads), self.errors),
                operation(Operation::Write, both(self.writes), 0),
                operation(Operation::Flush, both((self.flushes, 0)), 0),
            ],
            stages: self.times.iter().map(stage).collect(),
            parked: self.parked,
            blocked: self.blocked,
            slowed: self.slowed * seconds,
            holds: self.holds.iter().map(hold).collect(),
            ..Default::default()
        }
    }
}

fn volume_stats(seconds: u64) -> Vec<v1::VolumeStats> {
    let database = Load {
        reads: (129_412, 1011 * MIB + MIB / 5),
        writes: (8_120, 63 * MIB),
        flushes: 410,
        times: &[
            (Stage::Map, &[(448, 1_500), (896, 640)]),
            (Stage::Media, &[(112 * US, 96_000), (448 * US, 40_000), (1_792 * US, 1_900)]),
            (Stage::Commit, &[(384 * US, 400), (3_584 * US, 10)]),
            (Stage::Total, &[(112 * US, 90_000), (448 * US, 46_000), (1_792 * US, 1_942)]),
        ],
        holds: &[(Hold::Turn, 121 * MS)],
        ..Load::default()
    };
    // Most requests read what was never written, and are answered at once.
    let cache = Load {
        reads: (41_000, 160 * MIB),
        writes: (900, 3 * MIB + MIB / 2),
        times: &[
            (Stage::Map, &[(896, 650)]),
            (Stage::Media, &[(6_144 * US, 800), (7_340 * US, 600)]),
            (Stage::Total, &[(2, 40_500), (6_144 * US, 800), (7_340 * US, 600)]),
        ],
        ..Load::default()
    };
    let claim = Load {
        reads: (310, 2 * MIB),
        writes: (95, MIB),
        flushes: 12,
        times: &[
            (Stage::Map, &[(640, 6)]),
            (Stage::Media, &[(224 * US, 380), (896 * US, 25)]),
            (Stage::Commit, &[(512 * US, 12)]),
            (Stage::Total, &[(224 * US, 370), (896 * US, 47)]),
        ],
        holds: &[(Hold::Turn, 30 * MS)],
        ..Load::default()
    };
    let limited = Load {
        reads: (2_890, 45 * MIB),
        writes: (1_100, 17 * MIB),
        times: &[
            (Stage::Limit, &[(14 * MS, 310), (28 * MS, 5)]),
            (Stage::Map, &[(512, 62)]),
            (Stage::Media, &[(160 * US, 3_900), (640 * US, 90)]),
            (Stage::Total, &[(160 * US, 3_880), (640 * US, 110)]),
        ],
        holds: &[(Hold::Limit, 3_610 * MS)],
        ..Load::default()
    };
    let backup = Load {
        writes: (1_712, 214 * MIB),
        times: &[
            (Stage::Map, &[(1_792, 27)]),
            (Stage::Wait, &[(56 * MS, 700), (448 * MS, 40)]),
            (Stage::Media, &[(3_584 * US, 1_650), (28 * MS, 62)]),
            (Stage::Total, &[(3_584 * US, 900), (56 * MS, 760), (448 * MS, 52)]),
        ],
        holds: &[(Hold::Space, 412 * MS), (Hold::Memory, 20 * MS)],
        parked: 16,
        blocked: 3,
        slowed: 700,
        errors: 2,
        ..Load::default()
    };
    vec![
        database.stats("default", "db-data", seconds),
        cache.stats("default", "cache", seconds),
        claim.stats("default", CLAIM, seconds),
        limited.stats("default", "web", seconds),
        backup.stats("archive", "backup", seconds),
    ]
}

/// A name as the CSI plugin makes them.
const CLAIM: &str = "pvc-5b1f7c1e-8a0d-4ad6-9c57-d3c4b5a1f0e2";

/// A device with the reads and writes of the pool itself, and all requests of a second.
fn device(
    pool: &str,
    path: &str,
    reads: (u64, u64),
    writes: (u64, u64),
    all: u64,
    seconds: u64,
) -> v1::DeviceStats {
    let both = |(count, bytes)| (sum(count, seconds), sum(bytes, seconds));
    let count = all;
    let times =
        [(112 * US, count * 7 / 10), (448 * US, count * 28 / 100), (3_584 * US, count / 50)];
    v1::DeviceStats {
        pool: pool.to_owned(),
        path: path.to_owned(),
        reads: Some(operation(Operation::Read, both(reads), 0)),
        writes: Some(operation(Operation::Write, both(writes), 0)),
        flushes: Some(operation(Operation::Flush, both((40, 0)), u64::from(pool == "archive"))),
        in_flight: 9,
        sum_ns: times.iter().map(|&(ns, count)| sum(count, seconds) * (ns - ns / 10)).sum(),
        buckets: times
            .iter()
            .map(|&(upper_ns, count)| v1::Bucket { upper_ns, count: sum(count, seconds) })
            .collect(),
    }
}

/// The volumes of the example.
pub(crate) fn volumes() -> Vec<v1::Volume> {
    let volume = |pool: &str, name: &str, size: i64, mapped: i64| v1::Volume {
        pool: pool.to_owned(),
        name: name.to_owned(),
        kind: v1::VolumeKind::Volume.into(),
        block_size: 4096,
        size_bytes: size,
        mapped_bytes: mapped,
        valid_bytes: mapped - mapped / 16,
        exclusive_bytes: mapped,
        ..Default::default()
    };
    let served = |mut volume: v1::Volume, connections: u32| {
        volume.attached = true;
        volume.connections = connections;
        volume.front_end = v1::FrontEnd::Nbd.into();
        volume.nbd_uri = format!("nbd+unix:///{}?socket=/run/blockd/nbd.sock", volume.name);
        volume.nbd_uris = vec![volume.nbd_uri.clone()];
        volume
    };
    let mut web = served(volume("default", "web", 40 * GIB, 9 * GIB), 4);
    web.settings = Some(v1::VolumeSettings { iops: 4_000, ..Default::default() });
    let mut database = volume("default", "db-data", 2048 * GIB, 1011 * GIB + GIB / 3);
    database.attached = true;
    database.front_end = v1::FrontEnd::Ublk.into();
    database.device_path = "/dev/ublkb0".to_owned();
    (database.device_major, database.queue_count, database.queue_depth) = (259, 4, 128);
    database.zero_copy = true;
    (database.exclusive_bytes, database.shared_bytes) = (211 * GIB, 800 * GIB + GIB / 3);
    database.reserved_bytes = GIB / 64;
    database.made_unix_ms = 1_767_225_600_000;
    let mut snapshot = volume("default", "db-data@monday", 2048 * GIB, 900 * GIB);
    snapshot.kind = v1::VolumeKind::Snapshot.into();
    "db-data".clone_into(&mut snapshot.origin);
    (snapshot.exclusive_bytes, snapshot.shared_bytes) = (100 * GIB, 800 * GIB);
    vec![
        served(volume("archive", "backup", 1024 * GIB, 911 * GIB), 1),
        served(volume("default", "cache", 64 * GIB, 3 * GIB), 1),
        database,
        snapshot,
        served(volume("default", CLAIM, 8 * GIB, GIB / 2), 1),
        web,
    ]
}

/// The clients of the example after so long.
pub(crate) fn connections(seconds: u64) -> Vec<v1::Connection> {
    let load = sum(100, seconds) - sum(100, seconds.saturating_sub(1));
    let client = |id, volume: &str, peer: &str, worker, in_flight| v1::Connection {
        id,
        pool: if volume == "backup" { "archive" } else { "default" }.to_owned(),
        volume: volume.to_owned(),
        export: volume.to_owned(),
        peer: peer.to_owned(),
        worker,
        in_flight: in_flight * u32::try_from(load).unwrap() / 100,
        tls: volume == "backup",
        ..Default::default()
    };
    vec![
        client(17, "backup", "192.168.122.201:51422", 1, 16),
        client(18, "cache", "unix 4711", 0, 64),
        client(21, CLAIM, "unix 5120", 1, 2),
        client(23, "web", "[2001:db8::17]:40112", 0, 31),
        client(24, "web", "[2001:db8::17]:40114", 1, 24),
        client(25, "web", "[2001:db8::17]:40116", 0, 30),
        client(26, "web", "[2001:db8::17]:40118", 1, 28),
    ]
}

fn pools() -> Vec<v1::Pool> {
    let device = |path: &str, size_bytes| v1::Device {
        path: path.to_owned(),
        size_bytes,
        ..Default::default()
    };
    let pool = v1::Pool {
        state: v1::PoolState::Open.into(),
        low_bytes: 20 * GIB,
        very_low_bytes: 5 * GIB,
        ..Default::default()
    };
    vec![
        v1::Pool {
            name: "archive".to_owned(),
            size_bytes: 912 * GIB,
            free_bytes: 1011 * (1 << 20) + (1 << 20) / 5,
            promised_bytes: 1024 * GIB,
            volume_count: 1,
            space_state: v1::SpaceState::VeryLow.into(),
            write_rate_bytes: 214 << 20,
            seconds_to_full: 4,
            devices: vec![device("/srv/archive.pool", 912 * GIB)],
            ..pool.clone()
        },
        v1::Pool {
            name: "default".to_owned(),
            size_bytes: 3725 * GIB,
            free_bytes: 2600 * GIB,
            promised_bytes: 2160 * GIB,
            volume_count: 5,
            snapshot_count: 1,
            releasing_bytes: 3 * GIB,
            space_state: v1::SpaceState::Normal.into(),
            write_rate_bytes: 12 << 20,
            seconds_to_full: 221_000,
            devices: vec![
                device("/dev/vdb", 1862 * GIB + GIB / 2),
                device("/dev/vdc", 1862 * GIB + GIB / 2),
            ],
            ..pool
        },
    ]
}

/// The daemon's answers after so long.
fn answers(seconds: u64) -> Answers {
    Answers {
        pools: pools(),
        volumes: volumes(),
        stats: v1::StatsResponse {
            time_ns: seconds * 1_000_000_000,
            volumes: volume_stats(seconds),
            resident_bytes: 80 << 20,
            devices: vec![
                device("archive", "/srv/archive.pool", (4, MIB), (96, 2 * MIB), 1_734, seconds),
                // Folds copy many extents.
                device(
                    "default",
                    "/dev/vdb",
                    (4_045, 1011 * MIB + MIB / 5),
                    (4_390, 1013 * MIB),
                    97_100,
                    seconds,
                ),
                device("default", "/dev/vdc", (12, 3 * MIB), (310, 5 * MIB), 24_600, seconds),
            ],
            ..Default::default()
        },
        connections: connections(seconds),
    }
}

/// The last second of the example, and the history up to it.
pub(super) fn shown() -> (Snapshot, History) {
    let (mut history, mut before) = (History::default(), answers(0));
    let mut snapshot = Snapshot::between(None, &before);
    for second in 1..=SECONDS {
        let now = answers(second);
        snapshot = Snapshot::between(Some(&before), &now);
        history.note(&snapshot);
        before = now;
    }
    (snapshot, history)
}
