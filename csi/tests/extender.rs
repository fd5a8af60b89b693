//! The plugin and the scheduler's extender mean the same by a metric.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::collections::BTreeMap;

use blockd_csi::metrics::Metrics;
use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::options::DEFAULT_DRIVER;
use blockd_extender::fetch::parse;

/// Row: P35.
#[test]
fn the_metrics_of_a_plugin_are_parsed() {
    let metrics = Metrics::new(DEFAULT_DRIVER);
    let reported = [("thin", 524_288_000), ("a.b-c", 0), ("thick", i64::MAX)];
    metrics.capacities(&reported.map(|(class, bytes)| (class.to_owned(), bytes)));
    let read = parse(&metrics.render(), DEFAULT_DRIVER).unwrap();
    let expected: BTreeMap<String, Bytes> =
        reported.map(|(class, bytes)| (class.to_owned(), Bytes::new(bytes).unwrap())).into();
    assert_eq!(read, expected);
    assert!(parse(&metrics.render(), "other.example.com").is_err());
    // Without the daemon no figure is exported, instead of an outdated one.
    metrics.capacities(&[]);
    assert!(parse(&metrics.render(), DEFAULT_DRIVER).unwrap_err().contains("does not answer"));
}
