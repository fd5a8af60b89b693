//! The extender's server: JSON over HTTP, as the scheduler speaks it.

use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody as _;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use blockd_csi_base::clock::Clock;
use blockd_csi_base::error::shown;
use blockd_csi_base::metrics::OPENMETRICS;
use blockd_http::Limits;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde_json::Value;
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
use super::tls;
use super::wire::{Args, FilterResult, HostPriority, NodeList, Pod};

/// Longest request: some thousands of whole nodes. With more, configure the scheduler to send names
/// only (`nodeCacheCapable`).
const MAX_REQUEST: usize = 32 << 20;

/// Requests whose bodies are in memory at once, for the same reason.
const REQUESTS: usize = 4;

/// Schedulers are few, and keep their connections.
const LIMITS: Limits = Limits { connections: 32, connection_time: Duration::from_secs(300) };

/// How long an answer may take: the scheduler waits five seconds, unless it is configured
/// otherwise.
const ANSWER_TIME: Duration = Duration::from_secs(4);

/// How long a request's body may take: one that never ends would hold up others.
const BODY_TIME: Duration = Duration::from_secs(5);

/// The answer for any other path.
const PATHS: &str = "/predicate, /prioritize, /status, /metrics\n";

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
    extender: Extender,
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
) {
    let router = router(extender);
    match acceptor {
        None => blockd_http::serve(listener, router, LIMITS, |stream| ready(Some(stream))).await,
        Some(acceptor) => {
            let accept = |stream| tls::accept(acceptor.clone(), stream);
            blockd_http::serve(listener, router, LIMITS, accept).await;
        }
    }
}

/// The extender, and places for bodies of requests.
#[derive(Clone)]
struct Served {
    extender: Arc<Extender>,
    bodies: Arc<Semaphore>,
}

fn router(extender: Extender) -> Router {
    let served =
        Served { extender: Arc::new(extender), bodies: Arc::new(Semaphore::new(REQUESTS)) };
    let counted = |handler| from_fn_with_state((Arc::clone(&served.extender), handler), count);
    let only_get = async || (StatusCode::METHOD_NOT_ALLOWED, "GET\n");
    let only_post = async || (StatusCode::METHOD_NOT_ALLOWED, "POST\n");
    Router::new()
        .route("/predicate", post(predicate).fallback(only_post).layer(counted(Handler::Filter)))
        .route(
            "/prioritize",
            post(prioritize).fallback(only_post).layer(counted(Handler::Prioritize)),
        )
        .route("/status", get(async || "ok\n").fallback(only_get).layer(counted(Handler::Status)))
        .route("/metrics", get(metrics).fallback(only_get))
        .fallback(async || (StatusCode::NOT_FOUND, PATHS))
        .with_state(served)
}

/// Counts a handler's requests, with their time and the length of their answers.
async fn count(
    State((extender, handler)): State<(Arc<Extender>, Handler)>,
    request: Request,
    next: Next,
) -> Response {
    let counted = extender.metrics.begin(handler, request.method());
    let response = next.run(request).await;
    counted.end(response.status(), response.body().size_hint().lower());
    response
}

async fn metrics(State(served): State<Served>) -> impl IntoResponse {
    ([(CONTENT_TYPE, OPENMETRICS)], served.extender.metrics.render())
}

/// A status, and its reason in a line.
type Refused = (StatusCode, String);

async fn predicate(
    State(served): State<Served>,
    request: Request,
) -> Result<Json<FilterResult>, Refused> {
    let _body = served.bodies.acquire().await;
    let arguments = arguments(request).await?;
    Ok(Json(served.extender.predicate(arguments).await))
}

async fn prioritize(
    State(served): State<Served>,
    request: Request,
) -> Result<Json<Vec<HostPriority>>, Refused> {
    let _body = served.bodies.acquire().await;
    let arguments = arguments(request).await?;
    served.extender.prioritize(arguments).await.map(Json).map_err(|error| {
        tracing::warn!(%error, "prioritize");
        let status = if error.is_of_request() {
            StatusCode::BAD_REQUEST
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        (status, format!("{error}\n"))
    })
}

impl Extender {
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

async fn arguments(request: Request) -> Result<Args, Refused> {
    let refused = |error: String| (StatusCode::BAD_REQUEST, format!("{error}\n"));
    let collected = Limited::new(request.into_body(), MAX_REQUEST).collect();
    let Ok(collected) = tokio::time::timeout(BODY_TIME, collected).await else {
        return Err((StatusCode::REQUEST_TIMEOUT, "the request does not end\n".to_owned()));
    };
    let body = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            let text = format!("more than {MAX_REQUEST} bytes\n");
            return Err((StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        Err(error) => return Err(refused(shown(error))),
    };
    match serde_json::from_slice::<Args>(&body) {
        Ok(arguments) if arguments.pod.is_some() => Ok(arguments),
        Ok(_) => Err(refused(Error::Missing { field: "Pod" }.to_string())),
        Err(error) => Err(refused(shown(error))),
    }
}

#[cfg(test)]
mod tests;
