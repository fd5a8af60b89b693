//! The extender's server: JSON over HTTP, as the scheduler speaks it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use blockd_csi_base::clock::Clock;
use blockd_csi_base::connections::{Answering, Connections};
use blockd_csi_base::error::shown;
use blockd_csi_base::metrics::OPENMETRICS;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes as Body, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::claims::Claims;
use super::decide;
use super::demand::{Demand, Reader};
use super::error::Error;
use super::fetch::{Place, Source};
use super::metrics::{Handler, Metrics};
use super::score::Rule;
use super::wire::{Args, FilterResult, HostPriority, NodeList, Pod};

/// Longest request: some thousands of whole nodes. With more, configure the scheduler to send names
/// only (`nodeCacheCapable`).
const MAX_REQUEST: usize = 32 << 20;

/// Requests whose bodies are in memory at once, for the same reason.
const REQUESTS: usize = 4;

/// Connections at once: schedulers are few, and keep theirs.
const CONNECTIONS: usize = 32;

/// How long a connection is kept.
const CONNECTION_TIME: Duration = Duration::from_secs(300);

/// How long its last request may take, and its TLS handshake before the first.
const LAST_TIME: Duration = Duration::from_secs(10);

/// How long an answer may take: the scheduler waits five seconds, unless it is configured
/// otherwise.
const ANSWER_TIME: Duration = Duration::from_secs(4);

/// How long a request's body may take: one that never ends would hold up others.
const BODY_TIME: Duration = Duration::from_secs(5);

/// All that answers depend on.
#[derive(Debug)]
pub(super) struct Extender {
    pub(super) reader: Reader,
    pub(super) claims: Claims,
    pub(super) source: Source,
    pub(super) rule: Rule,
    pub(super) metrics: Metrics,
}

/// Binds a port.
///
/// # Errors
/// The address cannot be bound.
pub(super) async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| Error::io(format_args!("listen on {address}"), error))
}

/// Serves for ever.
pub(super) async fn serve(
    extender: Arc<Extender>,
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
) {
    let mut connections = Connections::new(CONNECTIONS);
    let bodies = Arc::new(Semaphore::new(REQUESTS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "accepting failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (extender, bodies, acceptor) =
            (Arc::clone(&extender), Arc::clone(&bodies), acceptor.clone());
        connections.serve(|answering| async move {
            match acceptor {
                None => converse(extender, bodies, answering, stream).await,
                Some(acceptor) => {
                    match tokio::time::timeout(LAST_TIME, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => converse(extender, bodies, answering, stream).await,
                        Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
                        Err(_) => tracing::debug!("no TLS in time"),
                    }
                }
            }
        });
    }
}

async fn converse(
    extender: Arc<Extender>,
    bodies: Arc<Semaphore>,
    answering: Answering,
    stream: impl AsyncRead + AsyncWrite + Unpin,
) {
    let service = service_fn(move |request| {
        let (extender, bodies) = (Arc::clone(&extender), Arc::clone(&bodies));
        let answering = answering.clone();
        async move {
            let answer = extender.answer(request, &bodies);
            Ok::<_, Infallible>(answering.while_making(answer).await)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(LAST_TIME)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    if tokio::time::timeout(CONNECTION_TIME, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = tokio::time::timeout(LAST_TIME, connection).await;
    }
}

impl Extender {
    async fn answer(&self, request: Request<Incoming>, bodies: &Semaphore) -> Response<Full<Body>> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let is_get = matches!(method, Method::GET | Method::HEAD);
        if path == "/metrics" && is_get {
            return self.page();
        }
        let handler = match path.as_str() {
            "/predicate" => Some(Handler::Filter),
            "/prioritize" => Some(Handler::Prioritize),
            "/status" => Some(Handler::Status),
            _ => None,
        };
        let served = handler.map(|handler| self.metrics.begin(handler, &method));
        let response = if path == "/status" && is_get {
            said(StatusCode::OK, "ok\n")
        } else {
            self.decide((method, &path), request, bodies).await
        };
        if let Some(served) = served {
            served.end(response.status(), response.body().size_hint().lower());
        }
        response
    }

    /// The metrics of the process.
    fn page(&self) -> Response<Full<Body>> {
        let mut response = said(StatusCode::OK, &self.metrics.render());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS));
        response
    }

    async fn decide(
        &self,
        (method, path): (Method, &str),
        request: Request<Incoming>,
        bodies: &Semaphore,
    ) -> Response<Full<Body>> {
        let _body = bodies.acquire().await;
        match (method, path) {
            (Method::POST, "/predicate") => match arguments(request).await {
                Ok(arguments) => json(&self.predicate(arguments).await),
                Err(refused) => refused,
            },
            (Method::POST, "/prioritize") => match arguments(request).await {
                Ok(arguments) => match self.prioritize(arguments).await {
                    Ok(scores) => json(&scores),
                    Err(error) => {
                        tracing::warn!(%error, "prioritize");
                        let status = if error.is_of_request() {
                            StatusCode::BAD_REQUEST
                        } else {
                            StatusCode::SERVICE_UNAVAILABLE
                        };
                        said(status, &format!("{error}\n"))
                    }
                },
                Err(refused) => refused,
            },
            (_, "/status" | "/metrics") => said(StatusCode::METHOD_NOT_ALLOWED, "GET\n"),
            (_, "/predicate" | "/prioritize") => said(StatusCode::METHOD_NOT_ALLOWED, "POST\n"),
            _ => said(StatusCode::NOT_FOUND, "/predicate, /prioritize, /status, /metrics\n"),
        }
    }

    /// The bytes that a pod needs, by class.
    async fn demand(&self, pod: &Pod) -> Result<Demand, Error> {
        let claims = self.claims.unbound(pod).await?;
        self.reader.read(pod, &claims)
    }

    /// Which nodes remain.
    async fn predicate(&self, arguments: Args) -> FilterResult {
        let clock = Clock::start();
        let demand = match self.demand(&arguments.pod.unwrap_or_default()).await {
            Ok(demand) => demand,
            Err(error) => {
                tracing::warn!(%error, "predicate");
                return FilterResult { error: error.to_string(), ..FilterResult::default() };
            }
        };
        let mut result = FilterResult::default();
        match arguments.nodes {
            Some(NodeList { metadata, items }) => {
                let items = items.unwrap_or_default();
                let places = items.iter().map(whole).collect();
                let passes = self.filter(&demand, places, clock, &mut result).await;
                let kept = items.into_iter().zip(passes).filter(|(_, passes)| *passes);
                let items = Some(kept.map(|(item, _)| item).collect());
                result.nodes = Some(NodeList { metadata, items });
            }
            None => {
                let names = arguments.node_names.unwrap_or_default();
                let places = names.iter().cloned().map(Place::named).collect();
                let passes = self.filter(&demand, places, clock, &mut result).await;
                let kept = names.into_iter().zip(passes).filter(|(_, passes)| *passes);
                result.node_names = Some(kept.map(|(name, _)| name).collect());
            }
        }
        result
    }

    async fn filter(
        &self,
        demand: &Demand,
        nodes: Vec<Place>,
        clock: Clock,
        result: &mut FilterResult,
    ) -> Vec<bool> {
        let figures = self.source.figures(&nodes, demand, remaining(clock)).await;
        let decided =
            nodes.into_iter().zip(&figures).map(|(node, figures)| {
                match decide::predicate(demand, figures) {
                    Ok(()) => true,
                    Err(why) => {
                        tracing::debug!(node = node.name, why, "refused");
                        result.failed_nodes.insert(node.name, why);
                        false
                    }
                }
            });
        decided.collect()
    }

    /// Returns the scores of the nodes.
    async fn prioritize(&self, arguments: Args) -> Result<Vec<HostPriority>, Error> {
        let clock = Clock::start();
        let demand = self.demand(&arguments.pod.unwrap_or_default()).await?;
        let nodes: Vec<Place> = match arguments.nodes {
            Some(nodes) => nodes.items.unwrap_or_default().iter().map(whole).collect(),
            None => {
                let names = arguments.node_names.unwrap_or_default();
                names.into_iter().map(Place::named).collect()
            }
        };
        let figures = self.source.figures(&nodes, &demand, remaining(clock)).await;
        let scores = decide::prioritize(&demand, &figures, &self.rule);
        let named = nodes.into_iter().zip(scores);
        Ok(named.map(|(node, score)| HostPriority { host: node.name, score }).collect())
    }
}

/// The part of the time for an answer that remains.
fn remaining(clock: Clock) -> Duration {
    ANSWER_TIME.saturating_sub(clock.elapsed())
}

/// The relevant parts of a node. A node that cannot be parsed has no figures, which is the reason
/// that is reported for it.
fn whole(node: &Value) -> Place {
    use serde::Deserialize as _;
    Place::of(super::wire::Node::deserialize(node).unwrap_or_default())
}

async fn arguments(request: Request<Incoming>) -> Result<Args, Response<Full<Body>>> {
    let collected = Limited::new(request.into_body(), MAX_REQUEST).collect();
    let Ok(collected) = tokio::time::timeout(BODY_TIME, collected).await else {
        return Err(said(StatusCode::REQUEST_TIMEOUT, "the request does not end\n"));
    };
    let body = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            let text = format!("more than {MAX_REQUEST} bytes\n");
            return Err(said(StatusCode::PAYLOAD_TOO_LARGE, &text));
        }
        Err(error) => return Err(said(StatusCode::BAD_REQUEST, &format!("{}\n", shown(error)))),
    };
    match serde_json::from_slice::<Args>(&body) {
        Ok(arguments) if arguments.pod.is_some() => Ok(arguments),
        Ok(_) => {
            let missing = Error::Missing { field: "Pod" };
            Err(said(StatusCode::BAD_REQUEST, &format!("{missing}\n")))
        }
        Err(error) => Err(said(StatusCode::BAD_REQUEST, &format!("{}\n", shown(error)))),
    }
}

fn json(value: &impl Serialize) -> Response<Full<Body>> {
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            let mut response = Response::new(Full::new(bytes.into()));
            let kind = HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Err(error) => said(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
    }
}

fn said(status: StatusCode, text: &str) -> Response<Full<Body>> {
    let mut response = Response::new(Full::new(Body::copy_from_slice(text.as_bytes())));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests;
