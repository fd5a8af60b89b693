//! An HTTP/1 server of a few routes, behind limits on connections and time.
//!
//! Clients need no permission to connect, so a client that connects and sends nothing, or half a
//! request, must not keep others out: connections are always accepted, and with too many, the
//! oldest one without a complete request is closed.
#![forbid(unsafe_code)]

mod connections;

use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt as _;

use crate::connections::{Answering, Connections};

/// How long the head of a request may take, how long a connection may be idle between requests, and
/// how long its last request may take.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Longest head of a request.
const HEAD_BYTES: usize = 16 * 1024;

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once.
    pub connections: usize,
    /// Longest life of a connection, except for its last request. A client reconnects after that.
    pub connection_time: Duration,
}

/// Serves for ever. `accept` makes a stream of a connection, by TLS for one; it logs why if it has
/// none.
pub async fn serve<S, F>(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    accept: impl Fn(TcpStream) -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = Option<S>> + Send + 'static,
{
    let mut connections = Connections::new(limits.connections);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => accept(stream),
            Err(error) => {
                tracing::warn!(%error, "accepting an HTTP connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let router = router.clone();
        connections.serve(|answering| async move {
            if let Some(stream) = stream.await {
                converse(stream, router, answering, limits.connection_time).await;
            }
        });
    }
}

/// One connection, with all of its limits.
async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    answering: Answering,
    time: Duration,
) {
    let service = service_fn(move |request| {
        let (router, answering) = (router.clone(), answering.clone());
        async move { answering.while_making(router.oneshot(request)).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    if tokio::time::timeout(time, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = tokio::time::timeout(HEAD_TIME, connection).await;
    }
}
