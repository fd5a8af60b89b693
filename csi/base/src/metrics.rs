//! The metric that every program exports, and the form of the page.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The type of a page of metrics.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct ByVersion {
    version: &'static str,
}

/// Adds `build_info`, the version of the program.
pub fn register_build_info(registry: &mut Registry) {
    let builds = Family::<ByVersion, Gauge>::default();
    builds.get_or_create(&ByVersion { version: env!("CARGO_PKG_VERSION") }).set(1);
    registry.register("build_info", "1, with the version of the program", builds);
}
