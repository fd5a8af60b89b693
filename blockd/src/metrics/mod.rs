//! Metrics, named once, in the OpenMetrics text format.
//!
//! [`METRICS`] is the list. Values are counted elsewhere, by those who do the work; a scrape
//! collects them into a [`Snapshot`]. A few have names that are made of what they are about:
//! [`node_name`].

mod table;

use std::collections::BTreeMap;
use std::fmt;

use blockd_control::node::{NodeId, uuid};
use blockd_engine::stats::Histogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

pub use table::{Kind, METRICS, Metric};

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
