//! Metrics, named once, in the OpenMetrics text format.
//!
//! [`METRICS`] is the list. Values are counted elsewhere, by those who do the work; a scrape
//! collects them into a [`Snapshot`]. A few have names that are made of what they are about:
//! [`node_name`].

use std::collections::BTreeMap;
use std::fmt;

use blockd_control::node::{NodeId, uuid};
use blockd_engine::stats::Histogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

/// Kinds of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows; its name ends with `_total`.
    Counter,
    /// The present value.
    Gauge,
    /// How often something took how many seconds.
    Histogram,
}

/// A metric: its name, which is stable, and what it means.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Without the `_total` of counters.
    pub name: &'static str,
    /// Kind of its values.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// One sentence.
    pub help: &'static str,
}

const fn metric(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, help }
}

const POOL: &[&str] = &["pool"];
const VOLUME: &[&str] = &["pool", "volume"];
const REQUEST: &[&str] = &["pool", "volume", "operation"];
const STAGE: &[&str] = &["pool", "volume", "stage"];
const WORKER: &[&str] = &["worker"];
const LISTENER: &[&str] = &["address"];
const NODE: &[&str] = &["pool", "node"];
const CAUSE: &[&str] = &["pool", "volume", "code", "severity"];
const DEVICE: &[&str] = &["pool", "device"];
const DEVICE_IO: &[&str] = &["pool", "device", "operation"];
const REGION: &[&str] = &["pool", "region"];
const FAULT: &[&str] = &["pool", "volume", "operation"];
const HOLD: &[&str] = &["pool", "volume", "reason"];

use Kind::{Counter, Gauge, Histogram as Times};

/// All metrics there are.
pub const METRICS: &[Metric] = &[
    metric("blockd_build", Gauge, &["version"], "1, with the daemon's version"),
    metric("build_info", Gauge, &["version"], "The same as blockd_build, under the common name"),
    metric("blockd_ready", Gauge, &[], "1 when everything is served"),
    metric(
        "blockd_start_time_seconds",
        Gauge,
        &[],
        "Start time of the daemon in seconds since 1970",
    ),
    metric("blockd_resident_bytes", Gauge, &[], "Resident memory of the daemon"),
    metric("blockd_ublk_devices", Gauge, &[], "Served block devices"),
    metric("blockd_ublk_recoveries", Counter, &[], "Block devices served again after a start"),
    metric("blockd_ublk_hangs", Counter, &[], "Commands to the ublk driver that did not return"),
    metric("blockd_pool_up", Gauge, POOL, "1 when the pool serves, 0 when it has failed"),
    metric("blockd_pool_closed", Gauge, POOL, "1 when the pool was closed on request"),
    metric("blockd_pool_missing", Gauge, POOL, "1 when a pool that was served before is missing"),
    metric("blockd_pool_size_bytes", Gauge, POOL, "Bytes of all devices of the pool"),
    metric("blockd_pool_free_bytes", Gauge, POOL, "Free bytes for first writes"),
    metric("blockd_pool_mapped_bytes", Gauge, POOL, "Bytes of extents that volumes refer to"),
    metric("blockd_pool_reserved_bytes", Gauge, POOL, "Bytes granted to volumes and not used yet"),
    metric("blockd_pool_pending_bytes", Gauge, POOL, "Bytes released and not reusable yet"),
    metric("blockd_pool_metadata_bytes", Gauge, POOL, "Bytes of metadata in use"),
    metric("blockd_pool_metadata_free_bytes", Gauge, POOL, "Bytes free for metadata"),
    metric("blockd_pool_backing_free_bytes", Gauge, POOL, "Bytes free below a sparse pool"),
    metric("blockd_pool_promised_bytes", Gauge, POOL, "Sum of the sizes of the pool's volumes"),
    metric("blockd_pool_volumes", Gauge, POOL, "Volumes and snapshots of the pool"),
    metric("blockd_pool_snapshots", Gauge, POOL, "Snapshots of the pool"),
    metric(
        "blockd_pool_releasing_volumes",
        Gauge,
        POOL,
        "Deleted volumes whose space is still being reclaimed",
    ),
    metric(
        "blockd_pool_releasing_bytes",
        Gauge,
        POOL,
        "Bytes of these that are still to be reclaimed",
    ),
    metric(
        "blockd_pool_space_state",
        Gauge,
        POOL,
        "State of the free space: 0 normal, 1 low, 2 very low, 3 full",
    ),
    metric("blockd_pool_low_bytes", Gauge, POOL, "Free bytes below which the pool is low"),
    metric(
        "blockd_pool_very_low_bytes",
        Gauge,
        POOL,
        "Free bytes below which the pool is very low",
    ),
    metric(
        "blockd_pool_write_rate_bytes",
        Gauge,
        POOL,
        "Bytes per second of first writes, averaged over ten seconds",
    ),
    metric(
        "blockd_pool_time_to_full_seconds",
        Gauge,
        POOL,
        "Seconds until the pool is full at that rate; absent while nothing is written",
    ),
    metric(
        "pmem_amount_total",
        Gauge,
        REGION,
        "Bytes of the region of persistent memory that the pool is in",
    ),
    metric("pmem_amount_managed", Gauge, REGION, "Bytes of these that volumes of the pool can use"),
    metric("pmem_amount_available", Gauge, REGION, "Bytes of these that are free"),
    metric(
        "pmem_amount_max_volume_size",
        Gauge,
        REGION,
        "Bytes of the largest volume that can be created",
    ),
    metric(
        "blockd_pmem_largest_piece_bytes",
        Gauge,
        REGION,
        "Bytes of the largest free piece in the pool's region",
    ),
    metric(
        "blockd_pmem_charged_bytes",
        Gauge,
        REGION,
        "Bytes that volumes take, including their overhead",
    ),
    metric(
        "blockd_pmem_scrubbing_bytes",
        Gauge,
        REGION,
        "Bytes of deleted volumes that become free once overwritten",
    ),
    metric("blockd_pmem_bad_bytes", Gauge, REGION, "Bytes of the region that are known to be bad"),
    metric("blockd_pool_set_aside_bytes", Gauge, POOL, "Bytes set aside for single volumes"),
    metric(
        "blockd_reserve_free_extents",
        Gauge,
        NODE,
        "Extents that the node holds for its volumes and has not used",
    ),
    metric(
        "blockd_reserve_refills",
        Counter,
        NODE,
        "Number of times that extents were granted to a volume",
    ),
    metric("blockd_pool_commits", Counter, POOL, "Finished commits"),
    metric("blockd_pool_flushes", Counter, POOL, "Device flushes of the pool's thread"),
    metric("blockd_pool_metadata_writes", Counter, POOL, "Writes of metadata"),
    metric("blockd_pool_metadata_written_bytes", Counter, POOL, "Bytes of metadata written"),
    metric("blockd_pool_discards", Counter, POOL, "Discards sent to the pool's devices"),
    metric("blockd_pool_io_errors", Counter, POOL, "Failed IO operations of the pool's thread"),
    metric("blockd_pool_wakeups", Counter, POOL, "Wake-ups of the pool's thread"),
    metric(
        "blockd_pool_metadata_waiting_for_space",
        Gauge,
        POOL,
        "Metadata writes that wait for space below the pool",
    ),
    metric("blockd_volume_size_bytes", Gauge, VOLUME, "Size of the volume"),
    metric(
        "blockd_volume_mapped_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that the volume refers to",
    ),
    metric("blockd_volume_valid_bytes", Gauge, VOLUME, "Bytes written and not discarded"),
    metric(
        "blockd_volume_exclusive_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that only this volume refers to, as last counted",
    ),
    metric(
        "blockd_volume_shared_bytes",
        Gauge,
        VOLUME,
        "Bytes of extents that other volumes refer to as well, as last counted",
    ),
    metric(
        "blockd_volume_reserved_bytes",
        Gauge,
        VOLUME,
        "Bytes granted to the volume and not used yet",
    ),
    metric(
        "blockd_volume_refills",
        Counter,
        VOLUME,
        "Number of times that extents were granted to the volume",
    ),
    metric(
        "blockd_volume_refill_waits",
        Counter,
        VOLUME,
        "Number of times that writes waited because no granted extent was left",
    ),
    metric(
        "blockd_volume_passed_reserves",
        Counter,
        VOLUME,
        "Number of these waits although an extent was left: 0",
    ),
    metric("blockd_volume_attached", Gauge, VOLUME, "1 when the volume is attached"),
    metric("blockd_volume_connections", Gauge, VOLUME, "Clients that are connected to the volume"),
    metric("blockd_requests", Counter, REQUEST, "Requests answered"),
    metric("blockd_request_bytes", Counter, REQUEST, "Bytes of requests answered"),
    metric("blockd_request_errors", Counter, REQUEST, "Requests answered with an error"),
    metric(
        "blockd_request_seconds",
        Times,
        STAGE,
        "Time of requests by stage: map (lookup, one request in 64), limit (held back by limits), \
         wait (parked), media, commit, total",
    ),
    metric("blockd_parked_requests", Gauge, VOLUME, "Requests that are parked now"),
    metric("blockd_parks", Counter, VOLUME, "Requests that were parked"),
    metric("blockd_starved_writes", Counter, VOLUME, "Writes that found no space below the pool"),
    metric("blockd_blocked_writes", Gauge, VOLUME, "Writes that wait for space now"),
    metric("blockd_refused_writes", Counter, VOLUME, "Writes that failed for lack of space"),
    metric(
        "blockd_throttled_writes",
        Counter,
        VOLUME,
        "Writes slowed down because the pool is nearly full",
    ),
    metric("blockd_throttle_seconds", Counter, VOLUME, "Time that writes were slowed down for"),
    metric("blockd_limited_requests", Counter, VOLUME, "Requests delayed by limits"),
    metric(
        "blockd_holds",
        Counter,
        HOLD,
        "Number of times that a connection or queue was held back before a request was taken, for: \
         turn (other volumes have their turn on the worker or the media), limit, space (a full \
         pool), memory",
    ),
    metric(
        "blockd_hold_seconds",
        Counter,
        HOLD,
        "Total time that connections and queues were held back",
    ),
    metric("blockd_held_back", Gauge, HOLD, "Connections and queues that are held back now"),
    metric(
        "blockd_pool_health_abnormal",
        Gauge,
        POOL,
        "1 when the pool has a fault of any severity",
    ),
    metric(
        "blockd_volume_health_abnormal",
        Gauge,
        VOLUME,
        "1 when the volume has a fault, or its pool has one that affects the volume",
    ),
    metric(
        "blockd_health_cause",
        Gauge,
        CAUSE,
        "1 for each fault of the volume, or of the pool if the volume is empty",
    ),
    metric(
        "blockd_volume_faults",
        Counter,
        FAULT,
        "Requests that failed because of devices or the pool: read, or write for all others",
    ),
    metric("blockd_device_errors", Counter, DEVICE_IO, "Failed IO operations of the device"),
    metric("blockd_device_io_seconds", Times, DEVICE, "Duration of IO operations of the device"),
    metric("blockd_worker_enters", Counter, WORKER, "System calls that entered io_uring"),
    metric("blockd_worker_media_operations", Counter, WORKER, "Operations sent to devices"),
    metric("blockd_worker_wakeups", Counter, WORKER, "Wake-ups of the worker by another thread"),
    metric("blockd_worker_connections", Gauge, WORKER, "Connections that the worker serves"),
    metric("blockd_worker_free_memory_bytes", Gauge, WORKER, "Bytes of IO memory that are free"),
    metric(
        "blockd_worker_memory_waits",
        Counter,
        WORKER,
        "Number of times that a connection waited for memory",
    ),
    metric(
        "blockd_worker_send_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client did not read its replies",
    ),
    metric(
        "blockd_worker_receive_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client stopped in the middle of a request",
    ),
    metric(
        "blockd_worker_idle_timeouts",
        Counter,
        WORKER,
        "Connections closed as the client sent no request",
    ),
    metric("blockd_listener_accepted", Counter, LISTENER, "Connections accepted"),
    metric("blockd_listener_negotiated", Counter, LISTENER, "Connections passed to a worker"),
    metric("blockd_listener_timed_out", Counter, LISTENER, "Handshakes that took too long"),
    metric("blockd_listener_displaced", Counter, LISTENER, "Handshakes ended to make room"),
    metric("blockd_listener_failed", Counter, LISTENER, "Handshakes ended for another reason"),
    metric(
        "blockd_listener_peer_refused",
        Counter,
        LISTENER,
        "Connections closed at once, as their host had max_connections_per_peer",
    ),
    metric(
        "blockd_listener_full_refused",
        Counter,
        LISTENER,
        "Connections refused, as there were max_connections and none was idle",
    ),
    metric(
        "blockd_listener_idle_displaced",
        Counter,
        LISTENER,
        "Idle connections closed to make room for new ones",
    ),
    metric("blockd_listener_handshakes", Gauge, LISTENER, "Handshakes under way"),
];

/// Upper ends of the buckets that are shown: powers of two from 2^10 ns to 2^34 ns, 17 s. The data
/// path counts in finer ones.
const SHOWN_POWERS: std::ops::RangeInclusive<u32> = 10..=34;

/// Values of labels, in the order of the metric's names of labels.
type Labels = Vec<String>;

#[derive(Clone, PartialEq, Debug)]
enum Value {
    Number(u64),
    /// Nanoseconds of a counter of seconds.
    Nanoseconds(u64),
    /// In the order of [`SHOWN_POWERS`], and what is above.
    Times {
        sum_ns: u64,
        counts: Vec<u64>,
    },
}

/// The values of one moment.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Snapshot {
    values: BTreeMap<&'static str, Vec<(Labels, Value)>>,
    /// By names that are made of identities.
    named: BTreeMap<String, u64>,
}

/// The name of a metric about a node's part of a pool: `sr_POOL_NODE_WHAT`, with their UUIDs.
/// Prometheus allows letters, digits, `_` and `:` in a name, so whatever else is in there, which is
/// the `-` of the UUIDs, becomes `_`.
#[must_use]
pub fn node_name(pool: [u8; 16], node: NodeId, what: &str) -> String {
    let pool = uuid(u128::from_be_bytes(pool));
    let name = format!("sr_{pool}_{node}_{what}");
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
    name.chars().map(|c| if is_allowed(c) { c } else { '_' }).collect()
}

/// Of all metrics whose names [`node_name`] makes.
const NAMED_HELP: &str = "See blockd_reserve_free_extents and blockd_reserve_refills";

impl Snapshot {
    /// Adds a value of the metric, which has to be in the list.
    pub fn set(&mut self, name: &str, labels: &[&str], value: u64) {
        self.add(name, labels, Value::Number(value));
    }

    /// Adds a value whose name [`node_name`] has made.
    pub fn set_named(&mut self, name: String, value: u64) {
        self.named.insert(name, value);
    }

    /// Adds a value of a counter of seconds.
    pub fn set_ns(&mut self, name: &str, labels: &[&str], ns: u64) {
        self.add(name, labels, Value::Nanoseconds(ns));
    }

    /// Adds the sum of some histograms.
    pub fn times<'a>(
        &mut self,
        name: &str,
        labels: &[&str],
        histograms: impl Iterator<Item = &'a Histogram>,
    ) {
        let mut counts = vec![0_u64; SHOWN_POWERS.clone().count() + 1];
        let mut total_ns = 0_u64;
        for histogram in histograms {
            total_ns = total_ns.saturating_add(histogram.sum_ns());
            for (upper_ns, count) in histogram.buckets().filter(|(_, count)| *count > 0) {
                let at = SHOWN_POWERS.clone().position(|power| upper_ns <= 1 << power);
                let at = at.unwrap_or(counts.len() - 1);
                counts[at] = counts[at].saturating_add(count);
            }
        }
        self.add(name, labels, Value::Times { sum_ns: total_ns, counts });
    }

    fn add(&mut self, name: &str, labels: &[&str], value: Value) {
        let metric = METRICS.iter().find(|metric| metric.name == name);
        debug_assert!(metric.is_some_and(|metric| metric.labels.len() == labels.len()), "{name}");
        let Some(metric) = metric else { return };
        let labels = labels.iter().map(|&label| label.to_owned()).collect();
        self.values.entry(metric.name).or_default().push((labels, value));
    }

    /// The text that a scrape gets.
    #[must_use]
    pub fn render(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        for metric in METRICS {
            let Some(values) = self.values.get(metric.name) else { continue };
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut family = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            for (labels, value) in values {
                let labels: Vec<(&str, &str)> =
                    metric.labels.iter().copied().zip(labels.iter().map(String::as_str)).collect();
                let labels = labels.as_slice();
                if labels.is_empty() {
                    encode_value(&mut family, metric.kind, value)?;
                } else {
                    encode_value(&mut family.encode_family(&labels)?, metric.kind, value)?;
                }
            }
        }
        for (name, value) in &self.named {
            // A counter's name would have to end differently.
            let kind = MetricType::Unknown;
            encoder.encode_descriptor(name, NAMED_HELP, None, kind)?.encode_gauge(value)?;
        }
        Ok(())
    }
}

fn encode_value(
    encoder: &mut MetricEncoder<'_>,
    kind: Kind,
    value: &Value,
) -> Result<(), fmt::Error> {
    match (kind, value) {
        (Kind::Counter, Value::Number(value)) => {
            encoder.encode_counter::<NoLabelSet, _, f64>(value, None)
        }
        (_, Value::Number(value)) => encoder.encode_gauge(value),
        (_, Value::Nanoseconds(ns)) => {
            encoder.encode_counter::<NoLabelSet, _, f64>(&seconds(*ns), None)
        }
        (_, Value::Times { sum_ns, counts }) => {
            let ends = SHOWN_POWERS.clone().map(|power| seconds(1 << power));
            let ends = ends.chain([f64::INFINITY]);
            let buckets: Vec<_> = ends.zip(counts.iter().copied()).collect();
            let (sum, count) = (seconds(*sum_ns), counts.iter().sum());
            encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        }
    }
}

/// Prometheus counts in seconds. What is lost beyond 2^53 ns, 104 days, is below a nanosecond in a
/// million.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = include_str!("../../../docs/METRICS.md");

    /// A row of the table in the document.
    fn row(metric: &Metric) -> String {
        let (kind, suffix) = match metric.kind {
            Kind::Counter => ("counter", "_total"),
            Kind::Gauge => ("gauge", ""),
            Kind::Histogram => ("histogram", ""),
        };
        let name = metric.name;
        format!("| `{name}{suffix}` | {kind} | {} | {} |", metric.labels.join(", "), metric.help)
    }

    #[test]
    fn each_metric_is_documented_and_nothing_else() {
        let is_row = |line: &&str| {
            ["| `blockd_", "| `pmem_", "| `build_"].iter().any(|begin| line.starts_with(begin))
        };
        let rows: Vec<&str> = DOCUMENT.lines().filter(is_row).collect();
        let expected: Vec<String> = METRICS.iter().map(row).collect();
        assert_eq!(rows, expected, "docs/METRICS.md has:\n{}", expected.join("\n"));
    }

    /// Words of a text that are names of metrics.
    fn names(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.filter(|word| word.starts_with("blockd_"))
    }

    #[test]
    fn alerts_and_dashboard_know_no_other_metrics() {
        let endings = |kind| match kind {
            Kind::Counter => &["_total"][..],
            Kind::Gauge => &[""],
            Kind::Histogram => &["_bucket", "_sum", "_count"],
        };
        let of =
            |metric: &Metric| endings(metric.kind).iter().map(|end| metric.name.to_owned() + end);
        let known: Vec<String> = METRICS.iter().flat_map(of).collect();
        for (file, text) in [
            ("alerts.yml", include_str!("../../../deploy/alerts.yml")),
            ("alerts_test.yml", include_str!("../../../deploy/alerts_test.yml")),
            ("grafana.json", include_str!("../../../deploy/grafana.json")),
        ] {
            let unknown: Vec<&str> =
                names(text).filter(|name| known.iter().all(|known| known != name)).collect();
            assert_eq!(unknown, [""; 0], "{file}");
            assert!(names(text).count() > 5, "{file}");
        }
    }

    #[test]
    fn names_are_unique_and_say_their_unit() {
        for metric in METRICS {
            let same = METRICS.iter().filter(|other| other.name == metric.name);
            assert_eq!(same.count(), 1, "{}", metric.name);
            // What is known by this name elsewhere keeps it.
            let is_known = metric.name == "pmem_amount_total";
            assert!(is_known || !metric.name.ends_with("_total"), "{}", metric.name);
            let is_time = metric.kind == Kind::Histogram;
            assert!(!is_time || metric.name.ends_with("_seconds"), "{}", metric.name);
        }
    }

    #[test]
    fn a_scrape_has_types_labels_and_values() {
        let mut snapshot = Snapshot::default();
        let node = NodeId::parse("3f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f").unwrap();
        snapshot.set_named(node_name([0xab; 16], node, "free"), 12);
        snapshot.set("blockd_ready", &[], 1);
        snapshot.set("blockd_requests", &["p", "a \"b\" \\", "read"], 7);
        snapshot.set_ns("blockd_throttle_seconds", &["p", "v"], 1_500_000_000);
        let histogram = Histogram::default();
        histogram.record(1500);
        histogram.record(3_000_000_000_000);
        let labels = ["p", "v", "media"];
        snapshot.times("blockd_request_seconds", &labels, [&histogram].into_iter());
        let text = snapshot.render();
        for line in [
            "# TYPE blockd_ready gauge",
            "blockd_ready 1",
            "# TYPE blockd_requests counter",
            r#"blockd_requests_total{pool="p",volume="a \"b\" \\",operation="read"} 7"#,
            r#"blockd_throttle_seconds_total{pool="p",volume="v"} 1.5"#,
            "# TYPE blockd_request_seconds histogram",
            r#"blockd_request_seconds_count{pool="p",volume="v",stage="media"} 2"#,
            r#"blockd_request_seconds_bucket{le="0.000002048",pool="p",volume="v",stage="media"} 1"#,
            r#"blockd_request_seconds_bucket{le="+Inf",pool="p",volume="v",stage="media"} 2"#,
            "sr_abababab_abab_abab_abab_abababababab_3f2b8c1d_0e4a_4d5b_9c6f_7a8b9c0d1e2f_free 12",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
