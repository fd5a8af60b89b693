//! Requests for more space from data paths outside of the daemon, over a Unix socket of the pool's.
//!
//! A request keeps a quantum of space for its volume, or less where the volume can use no more or
//! no more is left. It is answered when that is done, so that the volume's next first writes find
//! space also in a pool that others have filled meanwhile. While there is none at all it waits,
//! behind those that came before.

mod queue;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::IntoRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_api::extend::{Extend, MAX_MESSAGE_BYTES, Message, Parsed, Refusal, parse};
use blockd_engine::pool::{Keep, Shortage};
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::error::{Error, shown};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::{JoinHandle, JoinSet};

use crate::config::PoolConfig;

use super::closing::{How, NotClosed};
use super::server::{bind_private, check_peer};
use super::{Control, EventKind, Known};

pub(crate) use queue::Waiting;
use queue::{Queue, Verdict};

/// How often space is looked for while requests wait, and whether their clients are still there. A
/// data path that sends its request at its low mark has seconds left.
const PAUSE: Duration = Duration::from_millis(250);

/// Connections of a pool's socket at once: a data path has one for each volume that runs short, and
/// each may wait for as long as the pool is full. More than that means that a client leaks them.
const MAX_CONNECTIONS: usize = 1024;

/// How long a message may take from its first byte to its last. It is written in one piece.
const MESSAGE_TIME: Duration = Duration::from_secs(10);

/// How long a connection may be there without a message under way: it costs a place.
const IDLE_TIME: Duration = Duration::from_secs(300);

/// How long to wait when the system has no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A socket that is bound: clients can connect, and wait to be served.
#[derive(Debug)]
pub struct ExtendListener {
    pool: String,
    path: PathBuf,
    listener: UnixListener,
}

/// Binds a pool's socket, which only this user can open. Has to be called in a tokio runtime.
pub fn bind_extend(pool: &str, path: &Path) -> Result<ExtendListener, Error> {
    let listener = bind_private("pool.extend.socket", "extend", path)?;
    Ok(ExtendListener { pool: pool.to_owned(), path: path.to_owned(), listener })
}

/// A socket that is served.
#[derive(Debug)]
struct ExtendServer {
    path: PathBuf,
    task: JoinHandle<()>,
}

impl ExtendServer {
    /// Ends connections without an answer, and removes the socket.
    async fn stop(self) {
        self.task.abort();
        // It was aborted, and that is how it ends.
        let _ = self.task.await;
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Queues and sockets of all pools, and whether the daemon is to end by a request on one.
#[derive(Debug, Default)]
pub(super) struct Extends {
    queues: Mutex<BTreeMap<String, Arc<Queue>>>,
    servers: Mutex<BTreeMap<String, ExtendServer>>,
    /// Where the socket of each pool is to be, also while the pool is closed.
    paths: Mutex<BTreeMap<String, PathBuf>>,
    stop: Notify,
}

/// The parts that a connection needs.
struct Server {
    control: Control,
    pool: String,
    queue: Arc<Queue>,
}

/// A connected client.
#[derive(Clone, Debug)]
struct Peer {
    user: u32,
    text: String,
}

impl Control {
    /// Serves a pool's socket from now on. The pool need not be open: requests wait for that too.
    pub fn serve_extend(&self, socket: ExtendListener) {
        let ExtendListener { pool, path, listener } = socket;
        let extends = &self.0.extends;
        let queue = Arc::new(Queue::default());
        extends.queues.lock().insert(pool.clone(), Arc::clone(&queue));
        extends.paths.lock().insert(pool.clone(), path.clone());
        let server = Arc::new(Server { control: self.clone(), pool: pool.clone(), queue });
        let task = tokio::spawn(async move {
            // Both end together, when this task is aborted.
            tokio::join!(accept(Arc::clone(&server), listener), server.answer());
        });
        extends.servers.lock().insert(pool, ExtendServer { path, task });
    }

    /// Serves the socket of a pool that was closed and is open again.
    pub(super) fn serve_extend_again(&self, pool: &str) -> Result<(), Error> {
        let extends = &self.0.extends;
        let path = extends.paths.lock().get(pool).cloned();
        let is_served = extends.servers.lock().contains_key(pool);
        if let Some(path) = path.filter(|_| !is_served) {
            self.serve_extend(bind_extend(pool, &path)?);
        }
        Ok(())
    }

    /// Serves the sockets of this configuration, and no others. Those of closed pools follow when
    /// the pools are opened.
    pub async fn follow_extend_sockets(&self, pools: &[PoolConfig]) {
        let wanted: BTreeMap<String, PathBuf> = pools
            .iter()
            .filter_map(|pool| Some((pool.name.clone(), pool.extend_socket.clone()?)))
            .collect();
        let is_other = |pool: &str, path: &Path| wanted.get(pool).is_none_or(|one| one != path);
        let others: Vec<String> = {
            let servers = self.0.extends.servers.lock();
            let others = servers.iter().filter(|(pool, one)| is_other(pool, &one.path));
            others.map(|(pool, _)| pool.clone()).collect()
        };
        for pool in others {
            self.stop_extend(&pool).await;
        }
        (*self.0.extends.paths.lock()).clone_from(&wanted);
        let closed = |known: Known| known.is_closed().then_some(known.config.name);
        let closed: BTreeSet<String> = self.known_pools().into_iter().filter_map(closed).collect();
        for pool in wanted.into_keys().filter(|pool| !closed.contains(pool)) {
            if let Err(error) = self.serve_extend_again(&pool) {
                tracing::error!(%error, "SIGHUP: the socket is not served");
            }
        }
    }

    /// Ends the connections of a pool's socket without an answer, and removes the socket.
    pub(super) async fn stop_extend(&self, pool: &str) {
        let server = self.0.extends.servers.lock().remove(pool);
        if let Some(server) = server {
            server.stop().await;
        }
    }

    /// The same for a pool that is forgotten.
    pub(super) async fn forget_extend(&self, pool: &str) {
        self.stop_extend(pool).await;
        self.0.extends.paths.lock().remove(pool);
        self.0.extends.queues.lock().remove(pool);
    }

    /// The same for all sockets.
    pub async fn stop_extends(&self) {
        let servers = std::mem::take(&mut *self.0.extends.servers.lock());
        for server in servers.into_values() {
            server.stop().await;
        }
    }

    /// Closes a pool for a client that has asked for it. The connection ends when the pool is
    /// closed and its socket removed. While a block device is in use it waits, as long as the
    /// client does.
    async fn shut_down(self, pool: String, stream: UnixStream) {
        let mut is_logged = false;
        loop {
            match self.close_pool(&pool, How::Shutdown).await {
                Ok(_) => break,
                Err(NotClosed::Failed(error)) => {
                    return tracing::error!(pool, %error, "extend: the pool is not closed");
                }
                Err(NotClosed::InUse(error)) => {
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(pool, %error, "extend: the pool is closed later");
                    }
                    if has_hung_up(&stream).await {
                        return tracing::warn!(pool, "extend: hung up, the pool stays open");
                    }
                }
            }
        }
        drop(stream);
    }

    /// Returns once an authorised client has requested the daemon's end.
    pub async fn stop_requested(&self) {
        self.0.extends.stop.notified().await;
    }

    /// A volume has another name: requests for it keep waiting.
    pub(super) fn rename_extends(&self, pool: &str, former: &str, name: &str) {
        let queue = self.0.extends.queues.lock().get(pool).cloned();
        if let Some(queue) = queue {
            queue.rename(former, name);
        }
    }

    /// Requests of a pool that wait for space, the first first.
    pub(crate) fn extends_waiting(&self, pool: &str) -> Vec<Waiting> {
        let queue = self.0.extends.queues.lock().get(pool).cloned();
        queue.map(|queue| queue.waiting()).unwrap_or_default()
    }
}

async fn accept(server: Arc<Server>, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(pool = server.pool, %error, "can't accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let peer = match admitted(&stream) {
            Ok(peer) => peer,
            Err(peer) => {
                let pool = &server.pool;
                tracing::warn!(
                    pool,
                    "extend: {peer} was turned away: root and the daemon's user may"
                );
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            let peer = &peer.text;
            tracing::warn!(
                pool = server.pool,
                "extend: {peer} was turned away: {MAX_CONNECTIONS} connections at once"
            );
            continue;
        };
        let server = Arc::clone(&server);
        connections.spawn(async move {
            if let Err(problem) = server.serve(stream, &peer).await {
                // Once for each connection, which is over now.
                tracing::warn!(
                    pool = server.pool,
                    "extend: {} sent nonsense: {problem}",
                    peer.text
                );
            }
            drop(place);
        });
    }
}

/// Root and the user of this process may connect; others are named.
fn admitted(stream: &UnixStream) -> Result<Peer, String> {
    let peer = stream.peer_cred().ok();
    let user = peer.as_ref().map(tokio::net::unix::UCred::uid);
    let pid = peer.and_then(|peer| peer.pid()).unwrap_or(0);
    let text = format!("unix uid {} pid {pid}", user.unwrap_or(u32::MAX));
    match check_peer(user, nix::unistd::geteuid().as_raw()) {
        Ok(()) => Ok(Peer { user: user.unwrap_or(u32::MAX), text }),
        Err(_) => Err(text),
    }
}

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("a message was cut after {0} bytes")]
    Cut(usize),
    #[error("a message was not whole after {limit} s, {have} bytes of it came", limit = MESSAGE_TIME.as_secs())]
    Slow { have: usize },
    #[error("volume {0} does not exist in this pool")]
    NoVolume(String),
    #[error("user {0} may not close the pool: must be root")]
    NotRoot(u32),
}

impl Server {
    /// Serves a connection until it ends. An error is the client's.
    async fn serve(&self, mut stream: UnixStream, peer: &Peer) -> Result<(), Problem> {
        while let Some(message) = read_message(&mut stream).await? {
            let request = match message {
                Message::Extend(request) => request,
                Message::Shutdown(_) => return self.shutdown(stream, peer),
            };
            let Some(keep) = self.extend(&stream, &request, peer).await? else { return Ok(()) };
            if stream.write_all(&[request.form.answer()]).await.is_err() {
                return Ok(());
            }
            keep.answered();
        }
        Ok(())
    }

    /// Only root may close the pool, also where another user runs the daemon. A daemon that was
    /// started for one pool ends with it.
    fn shutdown(&self, stream: UnixStream, peer: &Peer) -> Result<(), Problem> {
        if peer.user != 0 {
            return Err(Problem::NotRoot(peer.user));
        }
        tracing::info!(pool = self.pool, "extend: shutdown requested by {}", peer.text);
        if !self.control.is_only_pool(&self.pool) {
            // A task of its own: this one ends with the socket.
            tokio::spawn(self.control.clone().shut_down(self.pool.clone(), stream));
            return Ok(());
        }
        // Left to the end of the process: when this connection ends, the daemon has.
        let _ = stream.into_std().map(|stream| stream.into_raw_fd());
        self.control.0.extends.stop.notify_one();
        Ok(())
    }

    /// Waits until space is kept; `None` when the client or the daemon has gone before.
    async fn extend(
        &self,
        stream: &UnixStream,
        request: &Extend,
        peer: &Peer,
    ) -> Result<Option<Keep>, Problem> {
        let Ok(volume) = String::from_utf8(request.name.clone()) else {
            return Err(Problem::NoVolume(request.name.escape_ascii().to_string()));
        };
        let mut place = self.queue.enter(volume.clone(), request.room(), peer.text.clone());
        loop {
            tokio::select! {
                verdict = &mut place.verdict => return match verdict {
                    Ok(Verdict::Granted(keep)) => Ok(Some(keep)),
                    Ok(Verdict::NoVolume) => Err(Problem::NoVolume(shown(&volume))),
                    Err(_) => Ok(None),
                },
                gone = has_hung_up(stream) => if gone {
                    tracing::info!(pool = self.pool, volume, "extend: {} hung up", peer.text);
                    return Ok(None);
                }
            }
        }
    }

    /// Answers requests for ever, as space comes.
    async fn answer(&self) {
        loop {
            if self.queue.is_empty() {
                self.queue.entered().await;
            } else {
                // A new request is checked at once: its volume may not exist.
                let _ = tokio::time::timeout(PAUSE, self.queue.entered()).await;
            }
            self.pass().await;
        }
    }

    /// Looks at each request once: space goes to those that came first, but a request that only
    /// its volume's quota holds back holds back no other.
    async fn pass(&self) {
        // A pool that is not open, or has failed, has no space; its volumes are not known.
        let Ok(handle) = self.control.pool(&self.pool) else { return };
        let mut is_full = false;
        for (id, waiting) in self.queue.entries() {
            let found = handle.mapper().find(&waiting.volume);
            let Some(volume) = found.filter(|one| one.kind == VolumeKind::Volume) else {
                self.queue.end(id, Verdict::NoVolume);
                continue;
            };
            let mut why = "the pool is full";
            if !is_full {
                match handle.keep(volume.id, waiting.room).await {
                    Ok(keep) => match keep.shortage() {
                        None => {
                            self.queue.end(id, Verdict::Granted(keep));
                            continue;
                        }
                        Some(Shortage::Pool) => is_full = true,
                        Some(Shortage::Quota) => why = "its quota is used up",
                    },
                    // The volume was deleted, or the pool closed: the next look shows it.
                    Err(_) => is_full = true,
                }
            }
            if self.queue.refuse(id) {
                let text = format!("volume {} waits for space: {why}", shown(&waiting.volume));
                let kind = EventKind::ExtendWaiting;
                self.control.events().publish(kind, &self.pool, &waiting.volume, text);
            }
        }
    }
}

/// Whether a client that waits for its answer has gone, after a while. One that has only ended what
/// it sends still waits.
async fn has_hung_up(stream: &UnixStream) -> bool {
    tokio::time::sleep(PAUSE).await;
    let ready = stream.ready(Interest::WRITABLE).await;
    ready.is_ok_and(|ready| ready.is_write_closed())
}

/// The next message; `None` when the client is done. Nothing behind the message is read.
async fn read_message(stream: &mut UnixStream) -> Result<Option<Message>, Problem> {
    let mut bytes = [0; MAX_MESSAGE_BYTES];
    let first = tokio::time::timeout(IDLE_TIME, stream.read(&mut bytes[..1])).await;
    if !matches!(first, Ok(Ok(1))) {
        return Ok(None);
    }
    let mut have = 1;
    let read = async {
        loop {
            let missing = match parse(&bytes[..have]) {
                Parsed::Message(message, _) => return Ok(message),
                Parsed::Refused(refusal) => return Err(Problem::Refused(refusal)),
                Parsed::Need(count) => count,
            };
            match stream.read(&mut bytes[have..have + missing]).await {
                Ok(count @ 1..) => have += count,
                _ => return Err(Problem::Cut(have)),
            }
        }
    };
    let ended = tokio::time::timeout(MESSAGE_TIME, read).await;
    match ended {
        Ok(result) => result.map(Some),
        Err(_) => Err(Problem::Slow { have }),
    }
}
