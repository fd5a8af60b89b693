//! Counters of the plugin, served over HTTP in the OpenMetrics text format.

use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use blockd_csi_base::grpc::{code_name, code_names};
use blockd_csi_base::metrics::{OPENMETRICS, register_build_info};
use blockd_http::Limits;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use crate::capability::Mode;
use crate::error::Error;

/// Upper ends of the buckets, in seconds: from an answer out of memory to the longest mkfs.
const BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// Upper ends of the buckets that other CSI drivers and sidecars have, in seconds.
const SHARED_BUCKETS: [f64; 13] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// Answered while the plugin lives, whatever its daemon does: the liveness of its container.
const HEALTHZ: &str = "/healthz";

/// There are a few scrapers, and they are quick.
const LIMITS: Limits = Limits { connections: 16, connection_time: Duration::from_secs(60) };

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct Call {
    method: &'static str,
    code: &'static str,
}

/// A call with the labels that other CSI drivers and sidecars have.
#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct Operation {
    driver_name: String,
    method_name: String,
    grpc_status_code: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct ByMode {
    mode: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, EncodeLabelSet, Debug)]
struct ByClass {
    class: String,
}

#[derive(Clone, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BUCKETS)
    }
}

#[derive(Clone, Debug)]
struct SharedSeconds;

impl MetricConstructor<Histogram> for SharedSeconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(SHARED_BUCKETS)
    }
}

/// All counters of the process.
#[derive(Clone, Debug)]
pub struct Metrics {
    driver: String,
    calls: Family<Call, Histogram, Seconds>,
    operations: Family<Operation, Histogram, SharedSeconds>,
    conflicts: Family<ByMode, Counter>,
    in_flight: Gauge,
    capacities: Family<ByClass, Gauge>,
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// At 0, for the driver of that name.
    #[must_use]
    pub fn new(driver: &str) -> Self {
        let calls = Family::new_with_constructor(Seconds);
        let (conflicts, in_flight) = (Family::default(), Gauge::default());
        let capacities = Family::<ByClass, Gauge>::default();
        let operations = Family::new_with_constructor(SharedSeconds);
        let mut all = Registry::default();
        register_build_info(&mut all);
        all.register(
            "csi_plugin_operations_seconds",
            "How long calls took, by method and gRPC code, as other CSI drivers export it",
            operations.clone(),
        );
        let label = ("driver".into(), driver.to_owned().into());
        let registry = all.sub_registry_with_prefix("blockd_csi").sub_registry_with_label(label);
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The plugin's version", version);
        registry.register(
            "operation_seconds",
            "How long calls took, by method and gRPC code",
            calls.clone(),
        );
        registry.register(
            "publish_conflicts",
            "Publishes that were refused because of others, by access mode",
            conflicts.clone(),
        );
        registry.register("operations_in_flight", "Calls that are worked on", in_flight.clone());
        registry.register(
            "class_available_bytes",
            "Bytes of a class that can still be allocated on this node, as in GetCapacity",
            capacities.clone(),
        );
        let registry = Arc::new(Mutex::new(all));
        let driver = driver.to_owned();
        Self { driver, calls, operations, conflicts, in_flight, capacities, registry }
    }

    /// A call ended.
    pub fn observe(&self, method: &'static str, code: tonic::Code, time: Duration) {
        let call = Call { method, code: code_name(code) };
        self.calls.get_or_create(&call).observe(time.as_secs_f64());
        let operation = Operation {
            driver_name: self.driver.clone(),
            method_name: full_method(method),
            grpc_status_code: code_names(code).1,
        };
        self.operations.get_or_create(&operation).observe(time.as_secs_f64());
    }

    /// A publish was refused because of others.
    pub fn publish_conflict(&self, mode: Mode) {
        self.conflicts.get_or_create(&ByMode { mode: mode.name() }).inc();
    }

    /// One call more is worked on, or one less.
    pub fn in_flight(&self, by: i64) {
        self.in_flight.inc_by(by);
    }

    /// Sets the bytes that can still be allocated of each class. Other classes are no longer
    /// exported.
    pub fn capacities(&self, of_classes: &[(String, i64)]) {
        // A concurrent scrape sees either the old or the new figures.
        let _registry = self.registry.lock();
        self.capacities.clear();
        for (class, bytes) in of_classes {
            self.capacities.get_or_create(&ByClass { class: class.clone() }).set(*bytes);
        }
    }

    /// All of them, as a scraper reads them.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // A string takes everything.
        let _ = encode(&mut text, &self.registry.lock());
        text
    }

    /// Binds a port, where an option names one.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind(
        what: &str,
        address: Option<SocketAddr>,
    ) -> Result<Option<TcpListener>, Error> {
        let Some(address) = address else { return Ok(None) };
        let bound = TcpListener::bind(address).await;
        bound.map(Some).map_err(|error| Error::io(format_args!("serve {what} on {address}"), error))
    }

    /// Serves the metrics for ever. `refresh` updates the metrics that are measured only on a
    /// scrape; whether the plugin lives is answered without it, as it waits for the daemon.
    pub async fn serve<R: Future<Output = ()> + Send + 'static>(
        self,
        listener: TcpListener,
        refresh: impl Fn() -> R + Clone + Send + Sync + 'static,
    ) {
        let page = move || {
            let (metrics, refresh) = (self.clone(), refresh.clone());
            async move {
                refresh().await;
                ([(CONTENT_TYPE, OPENMETRICS)], metrics.render())
            }
        };
        serve(listener, Router::new().route("/metrics", get(page)), "/metrics, ").await;
    }
}

/// Serves for ever whether the plugin lives, and nothing else.
pub async fn serve_health(listener: TcpListener) {
    serve(listener, Router::new(), "").await;
}

/// Serves these pages and whether the plugin lives. `pages` names the former.
async fn serve(listener: TcpListener, router: Router, pages: &'static str) {
    let router = router
        .route(HEALTHZ, get(async || "alive\n"))
        .fallback(async move || (StatusCode::NOT_FOUND, format!("{pages}{HEALTHZ}\n")))
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n"));
    blockd_http::serve(listener, router, LIMITS, |stream| ready(Some(stream))).await;
}

/// The method as gRPC sends it, with its service.
fn full_method(method: &str) -> String {
    let service = match method {
        "GetPluginInfo" | "GetPluginCapabilities" | "Probe" => "Identity",
        "GetMetadataAllocated" | "GetMetadataDelta" => "SnapshotMetadata",
        name if name.starts_with("Node") => "Node",
        name if name.contains("Group") => "GroupController",
        _ => "Controller",
    };
    format!("/csi.v1.{service}/{method}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_conflicts_are_counted_by_method_code_and_mode() {
        let metrics = Metrics::new("csi.blockd.io");
        metrics.observe("CreateVolume", tonic::Code::Ok, Duration::from_millis(3));
        metrics.observe("CreateVolume", tonic::Code::Aborted, Duration::from_millis(300));
        metrics.publish_conflict(Mode::SingleWriter);
        metrics.in_flight(1);
        let text = metrics.render();
        let has = |line: &str| assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        let driver = "driver=\"csi.blockd.io\"";
        for code in ["OK", "ABORTED"] {
            has(&format!(
                "blockd_csi_operation_seconds_count{{{driver},method=\"CreateVolume\",\
                 code=\"{code}\"}} 1"
            ));
        }
        has(&format!(
            "blockd_csi_publish_conflicts_total{{{driver},mode=\"SINGLE_NODE_SINGLE_WRITER\"}} 1"
        ));
        has(&format!("blockd_csi_operations_in_flight{{{driver}}} 1"));
        for code in ["OK", "Aborted"] {
            has(&format!(
                "csi_plugin_operations_seconds_count{{driver_name=\"csi.blockd.io\",\
                 method_name=\"/csi.v1.Controller/CreateVolume\",grpc_status_code=\"{code}\"}} 1"
            ));
        }
        has(&format!("build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")));
        assert!(text.ends_with("# EOF\n"));
    }

    #[tokio::test]
    async fn half_requests_do_not_block_metrics_and_liveness() {
        use tokio::io::AsyncWriteExt as _;
        use tokio::net::TcpStream;

        let listener = bound().await;
        let address = listener.local_addr().unwrap();
        let server = Metrics::new("csi.blockd.io");
        tokio::spawn(server.serve(listener, || std::future::ready(())));
        let mut held = Vec::new();
        for _ in 0..3 * LIMITS.connections {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // It may be closed by now.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n").await;
            held.push(stream);
        }
        for path in ["/healthz", "/metrics"] {
            let answer = answer(address, path).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
    }

    #[tokio::test]
    async fn the_address_of_health_has_no_metrics() {
        let listener = bound().await;
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve_health(listener));
        assert!(answer(address, "/healthz").await.ends_with("\r\n\r\nalive\n"));
        let said = answer(address, "/metrics").await;
        assert!(said.starts_with("HTTP/1.1 404 ") && said.ends_with("/healthz\n"), "{said}");
        assert!(!said.contains("/metrics"), "{said}");
    }

    async fn bound() -> TcpListener {
        let any = ([127, 0, 0, 1], 0).into();
        Metrics::bind("metrics", Some(any)).await.unwrap().unwrap()
    }

    /// The answer to a request, in less than the time limit of half a request.
    async fn answer(address: SocketAddr, path: &str) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let exchange = async {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        tokio::time::timeout(Duration::from_secs(5), exchange).await.unwrap()
    }

    /// Row: P49.
    #[test]
    fn each_method_has_the_service_that_the_specification_has() {
        let mut service = "";
        let mut count = 0;
        for line in include_str!("../proto/csi.proto").lines().map(str::trim) {
            let word = |keyword: &str| {
                let rest = line.strip_prefix(keyword)?;
                rest.split(|c: char| !c.is_ascii_alphanumeric()).next()
            };
            if let Some(name) = word("service ") {
                service = name;
            } else if let Some(method) = word("rpc ") {
                assert_eq!(full_method(method), format!("/csi.v1.{service}/{method}"));
                count += 1;
            }
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn each_metric_is_in_the_documentation() {
        const DOCUMENTS: &str = concat!(
            include_str!("../../docs/KUBERNETES.md"),
            include_str!("../../docs/METRICS.md")
        );
        let metrics = Metrics::new("csi.blockd.io");
        // Events that never happened are not exported.
        metrics.observe("Probe", tonic::Code::Ok, Duration::ZERO);
        metrics.publish_conflict(Mode::SingleWriter);
        metrics.capacities(&[("thin".to_owned(), 1)]);
        let text = metrics.render();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let mut count = 0;
        for (name, kind) in types.filter_map(|line| line.split_once(' ')) {
            let total = if kind == "counter" { "_total" } else { "" };
            let shown = format!("`{name}{total}`");
            assert!(kind == "info" || DOCUMENTS.contains(&shown), "{shown} is not explained");
            count += 1;
        }
        assert!(count >= 7, "{text}");
    }
}
