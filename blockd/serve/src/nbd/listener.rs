//! Listeners: sockets that strangers connect to, and the limits on what they can take.
//!
//! A connection is negotiated by a task of the control runtime, then given to a worker. Until then
//! its cost is bounded: the number of negotiations is limited, each has a time limit, and when all
//! places are taken, the oldest negotiation of the peer that has the most is closed. Connections
//! with an export are limited too, for each host and for all together; when all places are taken,
//! an idle connection is closed.

mod greetings;
mod handshakes;
mod socket;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::handshake::{self, Accepted, Failure, Server, Stream, Tls};
use super::places::{Hosts, Places};
use super::{Exports, Origin, Peer, Sessions};
use greetings::Greetings;
use handshakes::Handshakes;
use socket::SocketFile;

/// How often connections that wait to negotiate are looked at, while there are any.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The least time between two lines of the log about refused connections.
const LOG_PAUSE: Duration = Duration::from_secs(10);

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

/// The limits for all clients of a listener together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that have an export.
    pub connections: usize,
    /// Connections of one host over TCP, from accept on.
    pub connections_per_peer: usize,
    /// Connections that are negotiating.
    pub handshakes: usize,
    /// How long one may negotiate, from accept to the first request.
    pub handshake_time: Duration,
    /// A connection without a request for this long gives way when all places are taken.
    pub idle_time: Duration,
    /// How long the client of an encrypted connection may leave replies unread.
    pub send_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 8192,
            connections_per_peer: 1024,
            handshakes: 128,
            handshake_time: Duration::from_secs(10),
            // Longer than clients that are at work pause, short enough for a newcomer.
            idle_time: Duration::from_secs(10),
            send_time: Duration::from_secs(60),
        }
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
    #[error("cannot listen at {address}: another process does")]
    InUse { address: Address },
    #[error("can't listen at {address}")]
    Io { address: Address, source: io::Error },
}

/// Statistics of a listener. All counters but the last only grow.
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
    /// Closed at once, as their host had as many as it may.
    pub peer_refused: AtomicU64,
    /// Refused, as all places were taken and no connection was idle.
    pub full_refused: AtomicU64,
    /// Idle connections that were closed to make room for others.
    pub idle_displaced: AtomicU64,
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
    /// The next connection, with its peer for logs and for limits. May be dropped at any time.
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, String, Peer)> {
        match self {
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                let (name, peer) = match stream.peer_cred() {
                    Ok(who) => {
                        let pid = who.pid().unwrap_or(0);
                        (format!("unix uid {} pid {pid}", who.uid()), Peer::Process(pid))
                    }
                    Err(_) => ("unix".to_owned(), Peer::Unknown),
                };
                Ok((Box::new(stream), name, peer))
            }
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                socket::prepare_tcp(&stream)?;
                let host = Peer::Host(peer.ip().to_canonical());
                Ok((Box::new(stream), peer.to_string(), host))
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
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (limits, stats) = (self.limits, Arc::new(ListenerStats::default()));
        let places = Places::new(limits.connections, number, limits.idle_time, Arc::clone(&stats));
        let server = Arc::new(Server {
            exports,
            sessions,
            tls: self.tls,
            places,
            time_limit: limits.handshake_time,
            send_limit: limits.send_time,
        });
        let task = tokio::spawn(accept(self.socket, limits, server, Arc::clone(&stats), number));
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

    /// The listener's statistics.
    #[must_use]
    pub fn stats(&self) -> Arc<ListenerStats> {
        Arc::clone(&self.stats)
    }

    /// Accepts no more, drops those that still negotiate, and removes the socket's file.
    /// Connections that workers have are not touched.
    pub async fn stop(self) {
        self.task.abort();
        // The listener has ended, as requested.
        let _ = self.task.await;
    }
}

async fn accept<E: Exports, S: Sessions<E::Volume>>(
    socket: Socket,
    limits: Limits,
    server: Arc<Server<E, S>>,
    stats: Arc<ListenerStats>,
    listener: u64,
) {
    let hosts = Hosts::new(limits.connections_per_peer);
    let mut refusals = Refusals::default();
    let greetings = Arc::new(Greetings::default());
    let mut handshakes =
        Handshakes::new(limits.handshakes, limits.connections, limits.handshake_time);
    let ended = Arc::new(Notify::new());
    loop {
        tokio::select! {
            accepted = socket.accept() => match accepted {
                Ok((stream, name, peer)) => {
                    stats.accepted.fetch_add(1, Ordering::Relaxed);
                    let origin = Origin { listener, peer };
                    if let Some(place) = hosts.admit(peer) {
                        handshakes.accept(Accepted { stream, peer: name, origin, place }, &stats);
                    } else {
                        stats.peer_refused.fetch_add(1, Ordering::Relaxed);
                        refusals.note(&name, limits.connections_per_peer);
                    }
                }
                Err(error) if is_shortage(&error) => {
                    tracing::warn!(%error, "can't accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection ended before it was accepted");
                    // In case that it is something else, which comes again at once.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            },
            () = ended.notified() => {}
            () = tokio::time::sleep(LOOK_PAUSE), if handshakes.has_waiting() => {}
        }
        while let Some(accepted) = handshakes.next(&stats) {
            let peer = accepted.origin.peer;
            let (server, stats, ended) = (Arc::clone(&server), Arc::clone(&stats), ended.clone());
            let greetings = Arc::clone(&greetings);
            let task = tokio::spawn(async move {
                serve_one(&server, &stats, &greetings, accepted).await;
                ended.notify_one();
            });
            handshakes.started(peer, task.abort_handle());
        }
    }
}

/// Whether the system has no descriptor or memory for another connection.
fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// Logs connections beyond the limit of their peer, but no more than one line for each
/// [`LOG_PAUSE`]: strangers can cause as many of these as they like.
struct Refusals {
    clock: Clock,
    logged: Option<Duration>,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { clock: Clock::start(), logged: None }
    }
}

impl Refusals {
    fn note(&mut self, peer: &str, limit: usize) {
        let now = self.clock.elapsed();
        if self.logged.is_none_or(|logged| now - logged >= LOG_PAUSE) {
            self.logged = Some(now);
            tracing::warn!(peer, limit, "refused: nbd.max_connections_per_peer is reached");
        }
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
    server: &Server<E, S>,
    stats: &ListenerStats,
    greetings: &Greetings,
    accepted: Accepted,
) {
    let (peer, origin) = (accepted.peer.clone(), accepted.origin.peer);
    stats.handshakes.fetch_add(1, Ordering::Relaxed);
    let counted = Counted(&stats.handshakes);
    let work = handshake::negotiate(accepted, server);
    let result = tokio::time::timeout(server.time_limit, work).await;
    drop(counted);
    match result {
        Ok(Ok((stream, session))) => {
            stats.negotiated.fetch_add(1, Ordering::Relaxed);
            greetings.connected(&peer, origin, &session.export);
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
