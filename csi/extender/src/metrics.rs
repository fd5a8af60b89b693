//! Metrics of the extender's requests, under the names that PMEM-CSI uses.

use axum::http::{Method, StatusCode};
use blockd_csi_base::clock::Clock;
use blockd_csi_base::metrics::register_build_info;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper ends of the buckets, in seconds. The scheduler waits five by default.
const SECONDS: [f64; 11] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// Upper ends of the buckets, in bytes: from `ok` to thousands of whole nodes.
const BYTES: [f64; 8] = [200.0, 500.0, 900.0, 1500.0, 1e4, 1e5, 1e6, 1e7];

/// A part of the server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Handler {
    Filter,
    Prioritize,
    Status,
}

impl Handler {
    const fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Prioritize => "prioritize",
            Self::Status => "status",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct Answer {
    code: u16,
    method: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct Served {
    handler: &'static str,
    method: &'static str,
}

#[derive(Clone, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(SECONDS)
    }
}

/// All counters of the process.
#[derive(Debug)]
pub(super) struct Metrics {
    requests: Family<Answer, Counter>,
    durations: Family<Served, Histogram, Seconds>,
    in_flight: Gauge,
    sizes: Histogram,
    registry: Mutex<Registry>,
}

/// A request that is served.
#[derive(Debug)]
pub(super) struct Request<'a> {
    metrics: &'a Metrics,
    served: Served,
    clock: Clock,
}

impl Metrics {
    /// At 0.
    pub(super) fn new() -> Self {
        let (requests, in_flight) = (Family::default(), Gauge::default());
        let durations = Family::new_with_constructor(Seconds);
        let sizes = Histogram::new(BYTES);
        let mut registry = Registry::default();
        register_build_info(&mut registry);
        registry.register(
            "scheduler_requests",
            "Requests that the extender answered, by HTTP code and method",
            requests.clone(),
        );
        registry.register(
            "scheduler_in_flight_requests",
            "Requests that the extender works on",
            in_flight.clone(),
        );
        registry.register(
            "scheduler_request_duration_seconds",
            "How long requests took: filter, prioritize and status",
            durations.clone(),
        );
        registry.register("scheduler_response_size_bytes", "Bytes of the answers", sizes.clone());
        Self { requests, durations, in_flight, sizes, registry: Mutex::new(registry) }
    }

    /// A request has come.
    pub(super) fn begin(&self, handler: Handler, method: &Method) -> Request<'_> {
        self.in_flight.inc();
        let served = Served { handler: handler.name(), method: method_name(method) };
        Request { metrics: self, served, clock: Clock::start() }
    }

    /// All of them, as a scraper reads them.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        // A string takes everything.
        let _ = encode(&mut text, &self.registry.lock());
        text
    }
}

impl Request<'_> {
    /// The request is answered with this status and a body of this length in bytes.
    pub(super) fn end(self, status: StatusCode, bytes: u64) {
        let metrics = self.metrics;
        let answer = Answer { code: status.as_u16(), method: self.served.method };
        metrics.requests.get_or_create(&answer).inc();
        let time = self.clock.elapsed().as_secs_f64();
        metrics.durations.get_or_create(&self.served).observe(time);
        // No answer exceeds the exact range of a double, nor four gigabytes.
        metrics.sizes.observe(f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)));
    }
}

impl Drop for Request<'_> {
    /// Counts the end of a request, also if the client disconnected before its answer.
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
    }
}

/// A bounded number of values for a label, whatever clients send.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::HEAD => "head",
        Method::POST => "post",
        Method::PUT => "put",
        Method::DELETE => "delete",
        Method::OPTIONS => "options",
        Method::PATCH => "patch",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row: P49.
    #[test]
    fn a_request_is_in_flight_until_it_is_answered_or_given_up() {
        let metrics = Metrics::new();
        let has = |line: &str| {
            let text = metrics.render();
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        };
        let first = metrics.begin(Handler::Filter, &Method::POST);
        let second = metrics.begin(Handler::Prioritize, &Method::POST);
        has("scheduler_in_flight_requests 2");
        first.end(StatusCode::OK, 700);
        drop(second);
        has("scheduler_in_flight_requests 0");
        has("scheduler_requests_total{code=\"200\",method=\"post\"} 1");
        has("scheduler_request_duration_seconds_count{handler=\"filter\",method=\"post\"} 1");
        has("scheduler_response_size_bytes_bucket{le=\"500.0\"} 0");
        has("scheduler_response_size_bytes_bucket{le=\"900.0\"} 1");
        has("scheduler_response_size_bytes_sum 700.0");
    }

    /// Row: P49.
    #[test]
    fn each_metric_of_the_extender_is_in_the_documentation() {
        const DOCUMENT: &str = include_str!("../../../docs/METRICS.md");
        let metrics = Metrics::new();
        metrics.begin(Handler::Status, &Method::GET).end(StatusCode::OK, 3);
        let text = metrics.render();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let mut names = Vec::new();
        for (name, kind) in types.filter_map(|line| line.split_once(' ')) {
            let total = if kind == "counter" { "_total" } else { "" };
            let row = format!("| `{name}{total}` | {kind} |");
            assert!(DOCUMENT.contains(&row), "{row} is not in the table");
            names.push(name);
        }
        assert_eq!(names.len(), 5, "{text}");
    }
}
