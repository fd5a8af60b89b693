//! Metrics, health and readiness over HTTP: an axum router behind limits on connections and time.
//!
//! Clients need no permission to connect, so a client that connects and sends nothing, or half a
//! request, must not keep others out: connections are always accepted, and when there are too many,
//! the oldest one without a complete request is closed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use blockd_control::services::Control;
use blockd_media::error::Error;
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tower::ServiceExt as _;

use super::collect::{Listening, collect};
use super::figures::Figures;

/// Open connections. There are a few scrapers and probes, and each takes milliseconds.
const CONNECTIONS: usize = 64;

/// How long a request's head may take, and how long a connection may be idle between requests.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// How long the answer to one request may take to make. A scrape queries pool threads, which answer
/// within milliseconds; Prometheus waits 10 s by default.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// How long a connection may live, which limits a client that reads its answers slowly. A scraper
/// connects again.
const CONNECTION_TIME: Duration = Duration::from_secs(60);

/// Longest head of a request.
const HEAD_BYTES: usize = 16 << 10;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A port that is bound.
#[derive(Debug)]
pub(super) struct HttpListener(TcpListener);

impl HttpListener {
    /// Has to be called in a tokio runtime.
    pub(super) async fn bind(address: SocketAddr) -> Result<Self, Error> {
        let bound = TcpListener::bind(address).await;
        bound.map(Self).map_err(|error| Error::io(format!("serve metrics on {address}"), error))
    }

    /// Where it listens.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.0.local_addr().ok()
    }

    /// Serves for ever.
    pub(super) async fn serve(self, control: Control, listeners: Vec<Listening>) {
        let figures = Arc::new(Figures::default());
        let router = router(Served { control, listeners: listeners.into(), figures });
        let mut open = Connections::default();
        loop {
            match self.0.accept().await {
                Ok((stream, _)) => {
                    open.make_room();
                    let answering = Arc::new(AtomicBool::new(false));
                    let task = converse(stream, router.clone(), Arc::clone(&answering));
                    let task = tokio::spawn(task).abort_handle();
                    open.0.push_back(Connection { answering, task });
                }
                Err(error) => {
                    tracing::warn!(%error, "metrics: accepting failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// An open connection.
struct Connection {
    /// A complete request has arrived, and its answer is being made.
    answering: Arc<AtomicBool>,
    task: AbortHandle,
}

/// All open connections, the oldest first.
#[derive(Default)]
struct Connections(VecDeque<Connection>);

impl Connections {
    /// Closes a connection if there are too many: the oldest that has no complete request, or else
    /// the oldest.
    fn make_room(&mut self) {
        self.0.retain(|one| !one.task.is_finished());
        if self.0.len() < CONNECTIONS {
            return;
        }
        let is_waiting = |one: &Connection| !one.answering.load(Ordering::Relaxed);
        let at = self.0.iter().position(is_waiting).unwrap_or(0);
        if let Some(oldest) = self.0.remove(at) {
            oldest.task.abort();
            tracing::debug!(limit = CONNECTIONS, "metrics: closed the oldest waiting connection");
        }
    }
}

/// One connection, with all of its limits.
async fn converse(stream: TcpStream, router: Router, answering: Arc<AtomicBool>) {
    let service = service_fn(move |request| {
        let (router, answering) = (router.clone(), Arc::clone(&answering));
        async move {
            answering.store(true, Ordering::Relaxed);
            let answer = answer(request, router).await;
            answering.store(false, Ordering::Relaxed);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let _ = tokio::time::timeout(CONNECTION_TIME, connection).await;
}

async fn answer(request: Request<Incoming>, router: Router) -> Response<Body> {
    if !request.body().is_end_stream() {
        // Nothing here takes a body, so none is read: the connection ends.
        let text = "requests have no body here\n";
        return (StatusCode::PAYLOAD_TOO_LARGE, [(CONNECTION, "close")], text).into_response();
    }
    match tokio::time::timeout(ANSWER_TIME, router.oneshot(request)).await {
        Ok(Ok(answer)) => answer,
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "took too long\n").into_response(),
    }
}

/// The state from which answers are made.
#[derive(Clone)]
struct Served {
    control: Control,
    listeners: Arc<[Listening]>,
    figures: Arc<Figures>,
}

fn router(served: Served) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .fallback(async || (StatusCode::NOT_FOUND, "/metrics, /healthz, /readyz\n"))
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n"))
        .with_state(served)
}

async fn metrics(State(served): State<Served>) -> impl IntoResponse {
    let Served { control, listeners, figures } = served;
    let text = collect(&control, &listeners, &figures).await.render();
    ([(CONTENT_TYPE, OPENMETRICS)], text)
}

async fn readyz(State(served): State<Served>) -> (StatusCode, String) {
    match served.control.why_not_ready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
    }
}
