//! Listeners: sockets that strangers connect to, and the limits on what they can take.
//!
//! A connection is negotiated by a task of the control runtime, then given to a worker. Until
//! then it can cost little: there are only so many negotiations at once, each has a time limit,
//! and when all places are taken, the oldest makes room for the newest.

mod socket;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinHandle};

use super::handshake::{self, Failure, Stream, Tls};
use super::{Exports, Sessions};
use crate::clock::Clock;
use socket::SocketFile;

/// How long a negotiation is left alone before it may have to make room for another. Those that
/// do anything are done in milliseconds.
const GRACE: Duration = Duration::from_secs(1);

/// How long to wait when the system has no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Unix {
        path: PathBuf,
        /// Permission bits of the socket.
        mode: u32,
    },
    /// Port 0 lets the system choose.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix { path, .. } => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// What all clients of a listener together can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that have an export.
    pub connections: usize,
    /// Connections that are negotiating.
    pub handshakes: usize,
    /// How long one may negotiate, from accept to the first request.
    pub handshake_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 1024, handshakes: 128, handshake_time: Duration::from_secs(10) }
    }
}

/// A listener as it is configured.
#[derive(Clone, Debug)]
pub struct ListenerOptions {
    pub address: Address,
    pub limits: Limits,
    pub tls: Tls,
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "the socket's path has {length} bytes: {path}: must be at most {max}",
        path = path.display(),
        max = socket::MAX_PATH_BYTES
    )]
    PathTooLong { path: PathBuf, length: usize },
    #[error("{path} exists and is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("somebody listens at {address} already")]
    InUse { address: Address },
    #[error("can't listen at {address}")]
    Io { address: Address, source: io::Error },
}

/// What a listener has seen. All counters but the last only grow.
#[derive(Debug, Default)]
pub struct ListenerStats {
    pub accepted: AtomicU64,
    /// Given to a worker.
    pub negotiated: AtomicU64,
    /// Ended by the time limit.
    pub timed_out: AtomicU64,
    /// Ended to make room.
    pub displaced: AtomicU64,
    /// Ended by a client, or because of what it sent.
    pub failed: AtomicU64,
    /// Negotiating now.
    pub handshakes: AtomicU64,
}

/// A socket that is bound: clients can connect, and wait to be served.
#[derive(Debug)]
pub struct Bound {
    socket: Socket,
    address: Address,
    limits: Limits,
    tls: Tls,
}

#[derive(Debug)]
enum Socket {
    Unix { listener: UnixListener, _file: SocketFile },
    Tcp(TcpListener),
}

impl Socket {
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, String)> {
        match self {
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                let peer = match stream.peer_cred() {
                    Ok(who) => format!("unix uid {} pid {}", who.uid(), who.pid().unwrap_or(0)),
                    Err(_) => "unix".to_owned(),
                };
                Ok((Box::new(stream), peer))
            }
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                socket::prepare_tcp(&stream)?;
                Ok((Box::new(stream), peer.to_string()))
            }
        }
    }
}

/// Binds the socket. Has to be called within a runtime.
pub fn bind(options: ListenerOptions) -> Result<Bound, ListenError> {
    let ListenerOptions { mut address, limits, tls } = options;
    let socket = match &address {
        Address::Unix { path, mode } => {
            let (listener, file) = socket::bind_unix(path, *mode)?;
            Socket::Unix { listener, _file: file }
        }
        Address::Tcp(wanted) => {
            let listener = socket::bind_tcp(*wanted)?;
            let bound = listener.local_addr();
            let source = |source| ListenError::Io { address: Address::Tcp(*wanted), source };
            address = Address::Tcp(bound.map_err(source)?);
            Socket::Tcp(listener)
        }
    };
    Ok(Bound { socket, address, limits, tls })
}

impl Bound {
    /// Where it listens; a port of 0 has become the one that was chosen.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Begins to accept connections. Has to be called within a runtime.
    pub fn serve<E: Exports>(
        self,
        exports: Arc<E>,
        sessions: Arc<impl Sessions<E::Volume>>,
    ) -> Listener {
        let stats = Arc::new(ListenerStats::default());
        let server = Arc::new(Server {
            exports,
            sessions,
            tls: self.tls,
            time_limit: self.limits.handshake_time,
            places: Arc::new(Semaphore::new(self.limits.connections)),
            stats: Arc::clone(&stats),
        });
        let slots = Arc::new(Semaphore::new(self.limits.handshakes.max(1)));
        let task = tokio::spawn(accept(self.socket, slots, server));
        Listener { address: self.address, stats, task }
    }
}

/// A listener at work.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    stats: Arc<ListenerStats>,
    task: JoinHandle<()>,
}

impl Listener {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What it has seen so far.
    #[must_use]
    pub fn stats(&self) -> Arc<ListenerStats> {
        Arc::clone(&self.stats)
    }

    /// Accepts no more, drops those that still negotiate, and removes the socket's file.
    /// Connections that workers have are not touched.
    pub async fn stop(self) {
        self.task.abort();
        // It was told to end, and has.
        let _ = self.task.await;
    }
}

/// What a negotiation needs of its listener.
struct Server<E, S> {
    exports: Arc<E>,
    sessions: Arc<S>,
    tls: Tls,
    time_limit: Duration,
    places: Arc<Semaphore>,
    stats: Arc<ListenerStats>,
}

/// Negotiations that are under way, the oldest first. Ends them when it goes.
struct Handshakes {
    clock: Clock,
    started: VecDeque<(Duration, AbortHandle)>,
}

impl Handshakes {
    /// A place for one more, at once or after the oldest has had its time.
    async fn place(
        &mut self,
        slots: &Arc<Semaphore>,
        stats: &ListenerStats,
    ) -> Option<OwnedSemaphorePermit> {
        self.started.retain(|(_, task)| !task.is_finished());
        let slot = Arc::clone(slots).acquire_owned();
        if let Some((started, oldest)) = self.started.front() {
            let wait = (*started + GRACE).saturating_sub(self.clock.elapsed());
            tokio::pin!(slot);
            if let Ok(slot) = tokio::time::timeout(wait, &mut slot).await {
                return slot.ok();
            }
            oldest.abort();
            stats.displaced.fetch_add(1, Ordering::Relaxed);
            return slot.await.ok();
        }
        slot.await.ok()
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        for (_, task) in &self.started {
            task.abort();
        }
    }
}

async fn accept<E: Exports, S: Sessions<E::Volume>>(
    socket: Socket,
    slots: Arc<Semaphore>,
    server: Arc<Server<E, S>>,
) {
    let mut handshakes = Handshakes { clock: Clock::start(), started: VecDeque::new() };
    loop {
        let (stream, peer) = match socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        server.stats.accepted.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = handshakes.place(&slots, &server.stats).await else { return };
        let started = handshakes.clock.elapsed();
        let task = tokio::spawn(serve_one(Arc::clone(&server), stream, peer, slot));
        handshakes.started.push_back((started, task.abort_handle()));
    }
}

/// Counts a negotiation while it lives.
struct Counted<'a>(&'a AtomicU64);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve_one<E: Exports, S: Sessions<E::Volume>>(
    server: Arc<Server<E, S>>,
    stream: Box<dyn Stream>,
    peer: String,
    slot: OwnedSemaphorePermit,
) {
    let stats = &server.stats;
    stats.handshakes.fetch_add(1, Ordering::Relaxed);
    let counted = Counted(&stats.handshakes);
    let work = handshake::negotiate(
        stream,
        peer.clone(),
        &server.tls,
        server.exports.as_ref(),
        &server.places,
    );
    let result = tokio::time::timeout(server.time_limit, work).await;
    drop((slot, counted));
    match result {
        Ok(Ok((stream, session))) => {
            stats.negotiated.fetch_add(1, Ordering::Relaxed);
            tracing::info!(peer, export = session.export, "connected");
            server.sessions.connect(stream, session);
        }
        Ok(Err(failure)) => {
            stats.failed.fetch_add(1, Ordering::Relaxed);
            // Strangers can cause as many of these as they like.
            match failure {
                Failure::Protocol(reason) => tracing::debug!(peer, %reason, "not connected"),
                Failure::Io(error) | Failure::Tls(error) => {
                    tracing::debug!(peer, %error, "not connected");
                }
            }
        }
        Err(_) => {
            stats.timed_out.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(peer, "took too long to negotiate");
        }
    }
}
