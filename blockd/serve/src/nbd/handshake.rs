//! One connection's negotiation: does for `codec::handshake` what it cannot do itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blockd_nbd::ExportError;
use blockd_nbd::codec::handshake::{Event, Handshake, Next, Reason, TlsMode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::places::{Held, PeerPlace, Place, Places};
use super::{Exports, Opened, Origin, Session, Sessions, tls};

/// Whether a listener has TLS, and insists on it.
#[derive(Clone, Default)]
pub enum Tls {
    #[default]
    Off,
    On(TlsAcceptor),
    Required(TlsAcceptor),
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.mode())
    }
}

impl Tls {
    fn mode(&self) -> TlsMode {
        match self {
            Self::Off => TlsMode::Off,
            Self::On(_) => TlsMode::On,
            Self::Required(_) => TlsMode::Required,
        }
    }

    fn acceptor(&self) -> Option<&TlsAcceptor> {
        match self {
            Self::Off => None,
            Self::On(acceptor) | Self::Required(acceptor) => Some(acceptor),
        }
    }
}

/// Why a negotiation came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Protocol(#[from] Reason),
    #[error("connection failed")]
    Io(#[from] io::Error),
    #[error("TLS failed")]
    Tls(#[source] io::Error),
}

/// A socket that can be given away.
pub(super) trait Stream: AsyncRead + AsyncWrite + AsFd + Unpin + Send {
    /// The socket, blocking: a ring gives an error for one that isn't, instead of waiting.
    fn into_fd(self: Box<Self>) -> io::Result<OwnedFd>;
}

impl Stream for UnixStream {
    fn into_fd(self: Box<Self>) -> io::Result<OwnedFd> {
        let stream = self.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream.into())
    }
}

impl Stream for TcpStream {
    fn into_fd(self: Box<Self>) -> io::Result<OwnedFd> {
        let stream = self.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream.into())
    }
}

enum Channel {
    Plain(Box<dyn Stream>),
    Encrypted(Box<TlsStream<Box<dyn Stream>>>),
}

impl Channel {
    async fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.read_exact(bytes).await?,
            Self::Encrypted(stream) => stream.read_exact(bytes).await?,
        };
        Ok(())
    }

    async fn skip(&mut self, count: u32) -> io::Result<()> {
        let mut scratch = [0; 4096];
        let mut left = usize::try_from(count).unwrap_or(usize::MAX);
        while left > 0 {
            let part = left.min(scratch.len());
            self.read_exact(&mut scratch[..part]).await?;
            left -= part;
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self {
            Self::Plain(stream) => stream.write_all(bytes).await,
            Self::Encrypted(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
        }
    }

    async fn encrypt(self, tls: &Tls) -> Result<Self, Failure> {
        match (self, tls.acceptor()) {
            (Self::Plain(stream), Some(acceptor)) => {
                let stream = acceptor.accept(stream).await.map_err(Failure::Tls)?;
                Ok(Self::Encrypted(Box::new(stream)))
            }
            _ => Err(Reason::OutOfStep.into()),
        }
    }

    async fn close(mut self) {
        // Whether the client notices is up to the client.
        let _ = match &mut self {
            Self::Plain(stream) => stream.shutdown().await,
            Self::Encrypted(stream) => stream.shutdown().await,
        };
    }

    /// `held` and `send_limit` are for the relay of an encrypted connection: its places, and how
    /// long the client may leave replies unread.
    fn into_fd(self, held: &Arc<Held>, send_limit: Duration) -> io::Result<OwnedFd> {
        match self {
            Self::Plain(stream) => stream.into_fd(),
            Self::Encrypted(stream) => {
                let client = stream.get_ref().0.as_fd().try_clone_to_owned()?;
                tls::relay(*stream, client, send_limit, Arc::clone(held))
            }
        }
    }
}

/// An accepted connection that has not negotiated yet.
pub(super) struct Accepted {
    pub(super) stream: Box<dyn Stream>,
    /// The peer's address, for logs and lists.
    pub(super) peer: String,
    pub(super) origin: Origin,
    pub(super) place: PeerPlace,
}

/// The parts of a listener that a negotiation needs.
pub(super) struct Server<E, S> {
    pub(super) exports: Arc<E>,
    pub(super) sessions: Arc<S>,
    pub(super) tls: Tls,
    pub(super) places: Places,
    /// How long a negotiation may take.
    pub(super) time_limit: Duration,
    /// How long a client may leave its replies unread.
    pub(super) send_limit: Duration,
}

/// Negotiates until a session starts or the connection ends. A connection takes a place only once
/// its client requests an export, and the client gets an error if none is free.
pub(super) async fn negotiate<E: Exports, S: Sessions<E::Volume>>(
    accepted: Accepted,
    server: &Server<E, S>,
) -> Result<(OwnedFd, Session<E::Volume>), Failure> {
    let Accepted { stream, peer, origin, place: peer_place } = accepted;
    let Server { exports, tls, places, .. } = server;
    let mut channel = Channel::Plain(stream);
    let mut handshake = Handshake::new(tls.mode());
    let mut opened: Option<Opened<E::Volume>> = None;
    let mut place: Option<Place> = None;
    let mut step = handshake.handle(Event::Connected);
    loop {
        channel.send(&step.send).await?;
        step = match step.next {
            Next::Read(count) => {
                let mut bytes = vec![0; count];
                channel.read_exact(&mut bytes).await?;
                handshake.handle(Event::Bytes(&bytes))
            }
            Next::Skip(count) => {
                channel.skip(count).await?;
                handshake.handle(Event::Skipped)
            }
            Next::List => handshake.handle(Event::Exports(&exports.list().await)),
            Next::Open(name) => {
                // Whatever was opened before is let go first.
                opened = None;
                if place.is_none() {
                    place = places.take(server.sessions.as_ref(), origin.peer).await;
                }
                let result = match &place {
                    Some(_) => exports.open(&name).await,
                    None => Err(ExportError::Refused("too many connections".to_owned())),
                };
                let event = match result {
                    Ok(export) => Ok(&opened.insert(export).info),
                    Err(ref error) => Err(error),
                };
                handshake.handle(Event::Opened(event))
            }
            Next::Contexts => {
                let Some(export) = &opened else { return Err(Reason::OutOfStep.into()) };
                let contexts = exports.contexts(&export.volume).await;
                handshake.handle(Event::Contexts(&contexts))
            }
            Next::StartTls => {
                (opened, place) = (None, None);
                channel = channel.encrypt(tls).await?;
                handshake.handle(Event::Encrypted)
            }
            Next::Enter(negotiated) => {
                let Some(Opened { info, volume }) = opened else {
                    return Err(Reason::OutOfStep.into());
                };
                let held = Arc::new(Held::new(place, peer_place));
                let stream = channel.into_fd(&held, server.send_limit)?;
                let (export, guard) = (info.name, Some(Box::new(held) as Box<dyn Send>));
                let session = Session { volume, export, negotiated, peer, origin, guard };
                return Ok((stream, session));
            }
            Next::Close(reason) => {
                channel.close().await;
                return Err(reason.into());
            }
        };
    }
}
