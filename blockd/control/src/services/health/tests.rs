//! From counters and files to the answers to a client.

use std::sync::Arc;
use std::time::Duration;

use blockd_engine::stats::{MediaOp, MediaStats, VolumeStats};
use blockd_media::clock::Clock;

use super::*;
use crate::config::{HealthConfig, PoolConfig, SizeWish};
use crate::health::Moment;
use crate::services::EventKind;
use crate::services::attachments::Record;
use crate::services::testing::{Rig, file_pool, folder, memory_pool};
use crate::services::tests::{MIB, attach, create};

const SECOND: u64 = 1_000_000_000;

impl Rig {
    async fn health(&mut self) -> v1::HealthResponse {
        self.client.health(v1::HealthRequest::default()).await.unwrap().into_inner()
    }

    /// Looks as if this many seconds had passed since the daemon's start. Returns how many volumes
    /// were examined.
    fn look_later(&self, seconds: u64) -> usize {
        let unix_ms = 1_700_000_000_000 + i64::try_from(seconds).unwrap() * 1000;
        self.control.take_stock_at(Moment { ns: seconds * SECOND, unix_ms })
    }

    fn count_faults(&self, volume: &str) -> Arc<VolumeStats> {
        let (pool, volume) = ("default".to_owned().into(), volume.to_owned().into());
        let stats = Arc::new(VolumeStats { pool, volume, ..VolumeStats::default() });
        self.data_path.volumes.lock().push(Arc::clone(&stats));
        stats
    }

    /// The numbers of reported problems and of reported recoveries.
    async fn notified(&self) -> (usize, usize) {
        self.control.events().publish(EventKind::Ready, "", "", "the last");
        let mut reader = self.control.events().reader(true, String::new());
        let mut counts = (0, 0);
        while let Some(event) = reader.next().await {
            match event.kind() {
                EventKind::HealthAbnormal => counts.0 += 1,
                EventKind::HealthRecovered => counts.1 += 1,
                EventKind::Ready => break,
                _ => {}
            }
        }
        counts
    }
}

fn codes(causes: &[v1::Cause]) -> Vec<v1::HealthCode> {
    causes.iter().map(v1::Cause::code).collect()
}

#[tokio::test]
async fn a_pool_and_its_volumes_are_healthy_until_something_is_wrong() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.attach_volume(attach("a")).await.unwrap();
    rig.control.look_at_health().await;
    let all = rig.health().await;
    assert_eq!((all.pools.len(), all.volumes.len()), (1, 1));
    assert!(all.pools[0].causes.is_empty() && all.volumes[0].severity == 0, "{all:?}");
    assert!(all.volumes[0].last_probe_unix_ms > 0 && all.volumes[0].last_transition_unix_ms == 0);
    // Deleted behind the daemon's back: it is attached, and the pool has none.
    let record = rig.control.0.attachments.get("default", "a").unwrap().record.clone();
    let gone = Record { volume: "gone".to_owned(), id: 77, ..record };
    rig.control.0.attachments.add(gone).await.unwrap();
    rig.control.look_at_health().await;
    let abnormal = v1::HealthRequest { abnormal_only: true, ..Default::default() };
    let all = rig.client.health(abnormal).await.unwrap().into_inner();
    assert_eq!((all.pools.len(), all.volumes.len()), (0, 1), "{all:?}");
    assert_eq!(codes(&all.volumes[0].causes), [v1::HealthCode::VolumeMissing]);
    assert_eq!(all.volumes[0].severity(), v1::Severity::Failure);
}

#[tokio::test]
async fn a_look_examines_no_volume_with_which_nothing_can_be_wrong() {
    let mut rig = Rig::new().await;
    for name in (0..30).map(|number| format!("v{number}")) {
        rig.client.create_volume(create(&name, MIB)).await.unwrap();
        rig.client.attach_volume(attach(&name)).await.unwrap();
        rig.count_faults(&name);
    }
    assert_eq!([rig.look_later(1), rig.look_later(2)], [0, 0]);
    let asked = v1::ConfigureVolumeRequest {
        name: "v9".to_owned(),
        quota_bytes: Some(MIB),
        ..Default::default()
    };
    rig.client.configure_volume(asked).await.unwrap();
    let stats = rig.count_faults("v7");
    stats.faults[0].add(1);
    rig.count_faults("v8").blocked.set(1);
    assert_eq!(rig.look_later(3), 3, "one with a quota, one with faults, one that waits");
    let record = rig.control.0.attachments.get("default", "v1").unwrap().record.clone();
    let gone = Record { volume: "gone".to_owned(), id: 77, ..record };
    rig.control.0.attachments.add(gone).await.unwrap();
    assert_eq!([rig.look_later(4), rig.look_later(5)], [4, 4]);
    // Volumes that are gone are forgotten, whatever was wrong with them.
    let place = ("default".to_owned(), "gone".to_owned());
    rig.control.0.attachments.remove(vec![place]).await.unwrap();
    rig.client.delete_volume(crate::services::tests::delete("v8", true)).await.unwrap();
    assert_eq!(rig.look_later(6), 2);
    let abnormal = v1::HealthRequest { abnormal_only: true, ..Default::default() };
    let all = rig.client.health(abnormal).await.unwrap().into_inner();
    let names: Vec<&str> = all.volumes.iter().map(|one| one.volume.as_str()).collect();
    assert_eq!(names, ["v7"]);
}

#[tokio::test]
async fn a_volume_that_is_not_there_is_not_found() {
    let mut rig = Rig::new().await;
    let asked = v1::HealthRequest { volume: "none".to_owned(), ..Default::default() };
    assert_eq!(rig.client.health(asked).await.unwrap_err().code(), tonic::Code::NotFound);
    let volume = "none".to_owned();
    let asked = v1::AcknowledgeHealthRequest { volume, ..Default::default() };
    let refused = rig.client.acknowledge_health(asked).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

/// Row: H7.
#[tokio::test]
async fn faults_of_a_volume_are_reported_until_they_are_acknowledged() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.create_volume(create("b", MIB)).await.unwrap();
    let stats = rig.count_faults("a");
    stats.faults[0].add(2);
    // Invalid requests of clients, and requests refused for lack of space, are no faults.
    stats.errors[1].add(7);
    stats.refused.add(7);
    rig.look_later(1);
    let all = rig.health().await;
    let cause = &all.volumes[0].causes[0];
    assert_eq!((cause.code(), cause.count), (v1::HealthCode::IoErrors, 2));
    assert_eq!(cause.message, "volume a: 2 reads failed");
    assert_eq!((all.volumes[1].severity, all.pools[0].severity), (0, 0));
    let asked = v1::AcknowledgeHealthRequest { volume: "a".to_owned(), ..Default::default() };
    let answer = rig.client.acknowledge_health(asked.clone()).await.unwrap().into_inner();
    assert!(answer.changed);
    assert_eq!(rig.health().await.volumes[0].severity, 0);
    rig.look_later(6);
    assert_eq!(rig.health().await.volumes[0].severity, 0, "they are known");
    assert!(!rig.client.acknowledge_health(asked).await.unwrap().into_inner().changed);
    stats.faults[1].add(1);
    rig.look_later(11);
    assert_eq!(rig.health().await.volumes[0].causes[0].message, "volume a: 1 write failed");
    assert_eq!(rig.notified().await, (2, 1));
}

/// Row: H7.
#[tokio::test]
async fn a_volume_that_takes_a_name_over_does_not_take_its_errors() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let stats = rig.count_faults("a");
    stats.faults[0].add(2);
    rig.look_later(1);
    rig.client.delete_volume(crate::services::tests::delete("a", false)).await.unwrap();
    rig.look_later(6);
    assert!(rig.health().await.volumes.is_empty());
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.look_later(11);
    assert_eq!(rig.health().await.volumes[0].severity, 0);
    stats.faults[0].add(1);
    rig.look_later(16);
    assert_eq!(rig.health().await.volumes[0].causes[0].count, 1);
}

/// Row: H3.
#[tokio::test]
async fn errors_of_a_device_are_reported_of_its_pool_and_touch_its_volumes() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let stats = Arc::new(MediaStats::new(1, 1, Clock::start()));
    rig.control.pool("").unwrap().add_media_stats(&stats);
    stats.failed(0, MediaOp::Write, libc::EIO);
    rig.look_later(1);
    let all = rig.health().await;
    assert_eq!(codes(&all.pools[0].causes), [v1::HealthCode::DeviceErrors]);
    assert_eq!(codes(&all.volumes[0].causes), [v1::HealthCode::DeviceErrors]);
    assert!(all.volumes[0].causes[0].of_pool && !all.pools[0].causes[0].of_pool);
    // They stay away for ten minutes.
    rig.look_later(600);
    assert_eq!(rig.health().await.pools[0].severity(), v1::Severity::Failure);
    rig.look_later(602);
    let all = rig.health().await;
    assert_eq!((all.pools[0].severity, all.volumes[0].severity), (0, 0));
    assert_eq!(rig.notified().await, (1, 1), "of the pool, and not again of each volume");
}

/// Row: H6.
#[tokio::test]
async fn io_that_takes_too_long_is_a_slow_device() {
    let mut rig = Rig::new().await;
    let stats = Arc::new(MediaStats::new(1, 1, Clock::start()));
    rig.control.pool("").unwrap().add_media_stats(&stats);
    for _ in 0..4 {
        stats.begin(0, 0, 0);
        stats.end(0, SECOND);
    }
    rig.look_later(1);
    let cause = rig.health().await.pools[0].causes[0].clone();
    assert_eq!(cause.code(), v1::HealthCode::DeviceSlow);
    assert_eq!((cause.severity(), cause.reason.as_str()), (v1::Severity::Warning, "latency"));
}

/// Row: H5.
#[tokio::test]
async fn writes_that_wait_for_space_are_reported_of_the_volume_and_the_pool() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let stats = rig.count_faults("a");
    stats.blocked.set(3);
    stats.blocked_ns.set(7 * SECOND);
    rig.look_later(1);
    let all = rig.health().await;
    let message = |cause: &v1::Cause| cause.message.clone();
    let messages: Vec<String> = all.volumes[0].causes.iter().map(message).collect();
    assert_eq!(messages, ["3 writes of volume a wait for space, the first for 7 s"]);
    assert_eq!(codes(&all.pools[0].causes), [v1::HealthCode::WritesBlocked]);
    stats.blocked.set(0);
    rig.look_later(6);
    let all = rig.health().await;
    assert_eq!((all.pools[0].severity, all.volumes[0].severity), (0, 0), "as the metric says");
    rig.look_later(11);
    assert_eq!(rig.notified().await, (2, 2));
}

/// Row: H26.
#[tokio::test]
async fn a_cause_that_comes_and_goes_is_reported_once() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let stats = rig.count_faults("a");
    for second in (0..120).step_by(5) {
        stats.blocked.set(u64::from(second % 10 == 0));
        rig.look_later(second);
    }
    stats.blocked.set(0);
    rig.look_later(200);
    // Of the volume, and of its pool.
    assert_eq!(rig.notified().await, (2, 2));
}

/// Row: H2.
#[tokio::test]
async fn a_pool_whose_file_was_deleted_says_so_with_its_name() {
    let folder = folder();
    let path = folder.path().join("p.pool");
    let mut rig = Rig::new().await;
    rig.control.open_pool(&file_pool("p", &path)).await.unwrap();
    rig.control.look_at_health().await;
    // A busy disk may be found slow at any time, also before the file is gone.
    let gone = |health: &v1::HealthResponse| {
        let mut causes = health.pools[1].causes.iter();
        causes.find(|cause| cause.code() == v1::HealthCode::DeviceGone).cloned()
    };
    assert_eq!(gone(&rig.health().await), None);
    std::fs::remove_file(&path).unwrap();
    // The first look may not wait for the operating system to the end.
    let clock = Clock::start();
    let cause = loop {
        rig.control.look_at_health().await;
        if let Some(cause) = gone(&rig.health().await) {
            break cause;
        }
        assert!(clock.elapsed() < Duration::from_secs(60), "{:?}", rig.health().await);
    };
    assert_eq!((cause.reason.as_str(), cause.device.as_str()), ("deleted", path.to_str().unwrap()));
    assert!(cause.message.contains("p.pool"), "{}", cause.message);
}

/// Row: H4.
#[tokio::test]
async fn a_pool_that_could_not_be_opened_says_which_kind_of_reason() {
    let folder = folder();
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    let mut rig = Rig::new().await;
    for (name, path) in [("p", &one), ("q", &other)] {
        let made = Rig::without_pool(crate::services::testing::folder()).await;
        made.control.open_pool(&file_pool(name, path)).await.unwrap();
        made.control.close_pools().await.unwrap();
    }
    let mut both = file_pool("wrong", &one);
    both.devices.extend(file_pool("wrong", &other).devices);
    let refused = |config: PoolConfig| {
        let control = rig.control.clone();
        async move { control.open_pool(&config).await.unwrap_err() }
    };
    refused(both).await;
    std::fs::write(&other, vec![7; 64 << 20]).unwrap();
    let mut foreign = file_pool("foreign", &other);
    foreign.devices[0].size = SizeWish::Existing;
    refused(foreign).await;
    let mut absent = file_pool("absent", &folder.path().join("none/pool"));
    absent.devices[0].size = SizeWish::Bytes(64 << 20);
    refused(absent).await;
    rig.control.look_at_health().await;
    let all = rig.health().await;
    let reasons: Vec<_> = all
        .pools
        .iter()
        .flat_map(|pool| pool.causes.iter().map(|cause| (pool.pool.as_str(), cause)))
        .map(|(pool, cause)| (pool, cause.code(), cause.reason.as_str()))
        .collect();
    let failed = v1::HealthCode::PoolFailed;
    let expected = [
        ("absent", failed, "device-missing"),
        ("foreign", failed, "in-use"),
        ("wrong", failed, "wrong-pool"),
    ];
    assert_eq!(reasons, expected);
    // Attached volumes there are known, and affected.
    let record =
        Record { pool: "absent".to_owned(), volume: "v".to_owned(), id: 1, ..Record::default() };
    rig.control.0.attachments.add(record).await.unwrap();
    let volume = rig.health().await.volumes.pop().unwrap();
    assert_eq!((volume.volume.as_str(), codes(&volume.causes)), ("v", vec![failed]));
}

/// Row: H43.
#[tokio::test]
async fn a_pool_that_does_not_answer_holds_no_answer_up_and_is_late() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.control.look_at_health().await;
    // A query is in flight and gets no answer: no second one is sent.
    rig.control.0.health.pretend_silence("default");
    let probed = rig.health().await.pools[0].last_probe_unix_ms;
    rig.look_later(10);
    assert_eq!(rig.health().await.pools[0].severity, 0, "that is not long");
    rig.look_later(100);
    let all = rig.health().await;
    assert_eq!(codes(&all.pools[0].causes), [v1::HealthCode::ProbeLate]);
    assert_eq!(all.volumes[0].severity(), v1::Severity::Unknown);
    assert_ne!(all.pools[0].last_probe_unix_ms, probed, "it was looked at all the same");
    assert_eq!(all.pools[0].causes[0].reason, "pool-thread");
}

#[tokio::test]
async fn without_checks_no_volume_is_reported_as_checked() {
    let mut rig =
        Rig::with_health(HealthConfig { enabled: false, ..HealthConfig::default() }).await;
    rig.control.open_pool(&memory_pool("default")).await.unwrap();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.count_faults("a").faults[0].add(1);
    rig.control.look_at_health().await;
    let all = rig.health().await;
    assert_eq!((all.pools[0].last_probe_unix_ms, all.volumes[0].last_probe_unix_ms), (0, 0));
    assert_eq!((all.volumes[0].severity, rig.control.health_summaries().len()), (0, 0));
}

/// Row: H41.
#[tokio::test]
async fn a_volume_that_is_new_is_reported_at_once_and_one_that_is_gone_no_more() {
    let mut rig = Rig::new().await;
    rig.control.look_at_health().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let all = rig.health().await;
    assert_eq!((all.volumes[0].severity, all.volumes[0].last_probe_unix_ms > 0), (0, true));
    rig.client.delete_volume(crate::services::tests::delete("a", false)).await.unwrap();
    assert!(rig.health().await.volumes.is_empty());
}

/// Row: H31.
#[tokio::test]
async fn metrics_have_every_volume_and_the_causes_of_its_own() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.client.create_volume(create("b", MIB)).await.unwrap();
    rig.count_faults("b").faults[1].add(1);
    rig.look_later(1);
    let summaries = rig.control.health_summaries();
    let shown: Vec<_> = summaries
        .iter()
        .map(|one| (one.volume.as_str(), one.abnormal, one.causes.clone()))
        .collect();
    let errors = vec![("io-errors", "failure")];
    assert_eq!(shown, [("", false, vec![]), ("a", false, vec![]), ("b", true, errors)]);
}

/// The log as text.
#[derive(Clone, Default)]
struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Row: H44.
#[tokio::test]
async fn begin_and_end_of_a_cause_are_logged_with_time_and_names() {
    let mut rig = Rig::new().await;
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    rig.count_faults("a").faults[0].add(1);
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(move || writer.clone())
        .finish();
    // While a process has one subscriber, a call site that another thread, which has none, meets
    // first is switched off for all threads.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::subscriber::with_default(subscriber, || {
        rig.look_later(1);
        rig.look_later(2000);
    });
    let text = String::from_utf8(lines.0.lock().clone()).unwrap();
    let found = |wanted: &str| {
        let all = text.lines().filter(|line| line.contains(wanted));
        let named = |line: &&str| {
            line.contains(r#""timestamp""#)
                && line.contains(r#""pool":"default""#)
                && line.contains(r#""volume":"a""#)
        };
        all.filter(named).count()
    };
    assert_eq!(found("failure: io-errors: volume a: 1 read failed"), 1, "{text}");
    assert_eq!(found("is healthy again after"), 1, "{text}");
    assert_eq!(found(r#""level":"DEBUG""#), 1, "{text}");
}
