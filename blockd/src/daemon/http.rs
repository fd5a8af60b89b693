//! Metrics, health and readiness over HTTP: small answers, with limits on who asks.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::control::Control;
use crate::error::Error;

use super::collect::{Listening, collect};
use super::figures::Figures;

/// Connections at once. There are a few scrapers, and they are quick.
const CONNECTIONS: usize = 32;

/// How long a request's head may take, and an idle connection live.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// How long a connection may live: a scraper that wants more comes again.
const CONNECTION_TIME: Duration = Duration::from_secs(300);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

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
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let listeners: Arc<[Listening]> = listeners.into();
        let figures = Arc::new(Figures::default());
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let stream = match self.0.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "metrics: accepting failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let asked = (control.clone(), Arc::clone(&listeners), Arc::clone(&figures));
            let service = service_fn(move |request| {
                let (control, listeners, figures) = asked.clone();
                async move {
                    let answer = answer(&request, &control, &listeners, &figures).await;
                    Ok::<_, Infallible>(answer)
                }
            });
            tokio::spawn(async move {
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIME)
                    .max_buf_size(16 << 10)
                    .serve_connection(TokioIo::new(stream), service);
                let _ = tokio::time::timeout(CONNECTION_TIME, connection).await;
                drop(place);
            });
        }
    }
}

async fn answer(
    request: &Request<Incoming>,
    control: &Control,
    listeners: &[Listening],
    figures: &Figures,
) -> Response<Full<Bytes>> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => {
            (StatusCode::OK, OPENMETRICS, collect(control, listeners, figures).await.render())
        }
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, PLAIN, "ok\n".to_owned()),
        (&Method::GET | &Method::HEAD, "/readyz") => match control.why_not_ready() {
            None => (StatusCode::OK, PLAIN, "ready\n".to_owned()),
            Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, PLAIN, format!("{problem}\n")),
        },
        (_, "/metrics" | "/healthz" | "/readyz") => {
            (StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET or HEAD\n".to_owned())
        }
        _ => (StatusCode::NOT_FOUND, PLAIN, "/metrics, /healthz, /readyz\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
