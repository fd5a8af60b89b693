//! TLS: certificates from files, and the relay between an encrypted connection and a worker.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, getsockopt, send, setsockopt, sockopt};
use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::WriteHalf;
use tokio_rustls::TlsAcceptor;

/// Bytes in flight in each direction of a relay: a TLS record has at most 16 KiB, and a few of
/// them are worth one write.
const RELAY_BUFFER_BYTES: usize = 64 << 10;

/// How often it is looked whether a client is still there whose requests the worker does not take.
const CLIENT_LOOK: Duration = Duration::from_millis(200);
/// Most room that a client which is gone gets for what it has sent, as the kernel counts it: twice
/// what Linux takes from a TCP connection that nothing is read from.
const MOST_SENT: usize = 16 << 20;

/// Where a server's identity comes from, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, followed by those up to the root, if any.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Clients have to show a certificate that one of these signed. Without it, all may come.
    pub client_ca: Option<PathBuf>,
}

/// An error in the files of certificates and keys.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("can't read {path}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is not PEM", path = path.display())]
    NotPem { path: PathBuf, source: pem::Error },
    #[error("{path} has no {what} in it", path = path.display())]
    Missing { path: PathBuf, what: &'static str },
    #[error("{path} can't be used", path = path.display())]
    Unusable { path: PathBuf, source: rustls::Error },
    #[error("{path} can't be used to verify clients", path = path.display())]
    Verifier { path: PathBuf, source: rustls::server::VerifierBuilderError },
}

/// Reads the files. TLS 1.2 and 1.3, as the protocol's document requires.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates(&files.certificate)?;
    let key = private_key(&files.key)?;
    let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(unusable(&files.certificate))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(unusable(path))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|source| TlsError::Verifier { path: path.clone(), source })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(unusable(&files.key))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn unusable(path: &Path) -> impl FnOnce(rustls::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::Unusable { path, source }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|source| TlsError::NotPem { path: path.to_owned(), source })?;
    if found.is_empty() {
        return Err(TlsError::Missing { path: path.to_owned(), what: "certificate" });
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|source| match source {
        pem::Error::NoItemsFound => {
            TlsError::Missing { path: path.to_owned(), what: "private key" }
        }
        source => TlsError::NotPem { path: path.to_owned(), source },
    })
}

/// A pair of sockets: the plain end for a worker, and a task that carries bytes between the
/// other end and `encrypted`. Has to be called within a runtime.
///
/// `client` is another descriptor of the encrypted socket. The relay holds it and `held` until it
/// has ended. A client that takes no byte for `send_limit` ends it: the worker's own limit says
/// nothing here, as what the worker has sent may be in the relay.
pub(super) fn relay(
    encrypted: impl AsyncRead + AsyncWrite + Send + 'static,
    client: OwnedFd,
    send_limit: Duration,
    held: impl Send + 'static,
) -> io::Result<OwnedFd> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let ours = UnixStream::from_std(ours)?;
    tokio::spawn(async move {
        carry(encrypted, &client, ours, send_limit).await;
        drop(held);
    });
    Ok(theirs.into())
}

/// Ends when the worker's end is closed, whatever the client does: a worker closes when it has sent
/// all its answers. A client that sends no more still gets its answers. Any error ends both, and so
/// does a client that does not read.
async fn carry(
    encrypted: impl AsyncRead + AsyncWrite,
    client: &OwnedFd,
    mut plain: UnixStream,
    send_limit: Duration,
) {
    let (mut from_client, mut to_client) = tokio::io::split(encrypted);
    let (mut from_worker, mut to_worker) = plain.split();
    let requests = async {
        carry_requests(&mut from_client, client, &mut to_worker).await?;
        // The replies are still to come.
        std::future::pending::<io::Result<()>>().await
    };
    let ended = tokio::select! {
        ended = requests => ended,
        ended = pump(&mut from_worker, &mut to_client, send_limit) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "encrypted connection ended");
    }
}

/// Carries requests until they end, then closes the worker's side. A worker that does not receive
/// is waiting for room or limits, for as long as that takes. If the client has closed its socket
/// meanwhile, all that it has sent is handed on at once: its end comes behind that, and the worker
/// frees what such a client holds.
async fn carry_requests(
    from: &mut (impl AsyncRead + Unpin),
    client: &OwnedFd,
    to: &mut WriteHalf<'_>,
) -> io::Result<()> {
    let mut has_ended = false;
    loop {
        let buffer = read_some(from).await?;
        if buffer.is_empty() {
            return to.shutdown().await;
        }
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            if has_ended {
                rest = &rest[send_at_once(to.as_ref(), rest)?..];
                if rest.is_empty() {
                    break;
                }
            }
            match tokio::time::timeout(CLIENT_LOOK, to.write(rest)).await {
                Ok(written) => match written? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    count => rest = &rest[count..],
                },
                Err(_) => {
                    if !has_ended && sends_no_more(client)? {
                        has_ended = true;
                        make_room(to.as_ref(), client, rest.len())?;
                    }
                }
            }
        }
    }
}

/// Whether the peer of a socket has shut down its sending side, or closed the socket. An error if
/// it takes nothing any more either.
fn sends_no_more(client: &OwnedFd) -> io::Result<bool> {
    // `nix` has no name for this event, and returns `None` for a set of events with one.
    let has = |wanted| {
        let mut polled = [PollFd::new(client.as_fd(), wanted)];
        poll(&mut polled, PollTimeout::ZERO)?;
        io::Result::Ok(polled[0].revents().is_none_or(|events| !events.is_empty()))
    };
    // That it is closed as a whole is always reported.
    if has(PollFlags::empty())? {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    has(PollFlags::from_bits_retain(libc::POLLRDHUP))
}

/// Lets the way to the worker take all that a client has sent: these bytes are in the kernel's
/// memory already, and only change their place in it. Without the right to exceed the system's
/// limit it takes as much as that allows.
fn make_room(to: &UnixStream, client: &OwnedFd, more: usize) -> io::Result<()> {
    let sent = rustix::io::ioctl_fionread(client)?;
    // Beside what is on the way already. The kernel counts its own structures too.
    let bytes = usize::try_from(sent).unwrap_or(usize::MAX).saturating_add(more).saturating_mul(2);
    let bytes = bytes.saturating_add(getsockopt(to, sockopt::SndBuf)?).min(MOST_SENT);
    if setsockopt(to, sockopt::SndBufForce, &bytes).is_err() {
        setsockopt(to, sockopt::SndBuf, &bytes)?;
    }
    Ok(())
}

/// Sends as many bytes as there is room for.
fn send_at_once(to: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    match send(to.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
        Ok(count) => Ok(count),
        Err(Errno::EAGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Carries bytes one way until they end, then closes the other side, which takes some within each
/// `limit`.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    limit: Duration,
) -> io::Result<()> {
    loop {
        let buffer = read_some(from).await?;
        if buffer.is_empty() {
            return in_time(limit, to.shutdown()).await;
        }
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            let count = in_time(limit, to.write(rest)).await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            rest = &rest[count..];
        }
        in_time(limit, to.flush()).await?;
    }
}

/// The next bytes; none at the end. There is no buffer while it waits, so that an idle connection
/// takes no memory for one.
async fn read_some(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    std::future::poll_fn(|context| {
        let mut buffer = Vec::with_capacity(RELAY_BUFFER_BYTES);
        std::task::ready!(std::pin::pin!(from.read_buf(&mut buffer)).poll(context))?;
        Poll::Ready(Ok(buffer))
    })
    .await
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A relay for a client over TCP, and the worker's end of it.
    fn relayed() -> (TcpStream, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // All that a test sends has room in the socket. What has none stays with the client's
        // kernel, and its end behind it.
        setsockopt(&listener, sockopt::RcvBuf, &(2 << 20)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        let other = server.try_clone().unwrap().into();
        let server = tokio::net::TcpStream::from_std(server).unwrap();
        (client, relay(server, other, Duration::from_secs(60), ()).unwrap())
    }

    async fn until(what: &str, holds: impl Fn() -> bool) {
        for _ in 0..500 {
            if holds() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within 5 s: {what}");
    }

    #[tokio::test]
    async fn the_end_of_a_client_is_seen_although_the_worker_does_not_receive() {
        let (mut client, worker) = relayed();
        // More than the way to a worker takes.
        client.write_all(&[7; 300 << 10]).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!sends_no_more(&worker).unwrap(), "it may send more");
        client.shutdown(std::net::Shutdown::Write).unwrap();
        until("the end is handed on", || sends_no_more(&worker).is_ok_and(|ended| ended)).await;
        // It may still wait for answers to all of this.
        let mut plain = std::os::unix::net::UnixStream::from(worker);
        let mut received = Vec::new();
        std::io::Read::read_to_end(&mut plain, &mut received).unwrap();
        assert_eq!(received, [7; 300 << 10]);
    }

    #[tokio::test]
    async fn a_client_that_is_reset_ends_the_relay() {
        let (mut client, worker) = relayed();
        client.write_all(&[7; 300 << 10]).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        // An answer that is not read makes closing a reset.
        nix::unistd::write(&worker, b"answer").unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(client);
        until("the worker's end is closed", || sends_no_more(&worker).is_err()).await;
    }
}
