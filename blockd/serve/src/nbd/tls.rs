//! TLS: certificates from files, and the relay between an encrypted connection and a worker.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_rustls::TlsAcceptor;

/// Bytes in flight in each direction of a relay: a TLS record has at most 16 KiB, and a few of
/// them are worth one write.
const RELAY_BUFFER_BYTES: usize = 64 << 10;

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
/// The relay holds `held` until it has ended. A client that takes no byte for `send_limit` ends it:
/// the worker's own limit says nothing here, as what the worker has sent may be in the relay.
pub(super) fn relay(
    encrypted: impl AsyncRead + AsyncWrite + Send + 'static,
    send_limit: Duration,
    held: impl Send + 'static,
) -> io::Result<OwnedFd> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let ours = UnixStream::from_std(ours)?;
    tokio::spawn(async move {
        carry(encrypted, ours, send_limit).await;
        drop(held);
    });
    Ok(theirs.into())
}

/// Ends when the worker's end is closed, whatever the client does: a worker closes when it has sent
/// all its answers. A client that sends no more still gets its answers. Any error ends both, and so
/// does a client that does not read.
async fn carry(
    encrypted: impl AsyncRead + AsyncWrite,
    mut plain: UnixStream,
    send_limit: Duration,
) {
    let (mut from_client, mut to_client) = tokio::io::split(encrypted);
    let (mut from_worker, mut to_worker) = plain.split();
    let requests = async {
        // A worker that does not receive is waiting for room or limits, for as long as that takes.
        pump(&mut from_client, &mut to_worker, None).await?;
        // The replies are still to come.
        std::future::pending::<io::Result<()>>().await
    };
    let ended = tokio::select! {
        ended = requests => ended,
        ended = pump(&mut from_worker, &mut to_client, Some(send_limit)) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "encrypted connection ended");
    }
}

/// Carries bytes one way until they end, then closes the other side. `limit`: how long the other
/// side may take none.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    limit: Option<Duration>,
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

async fn in_time<T>(
    limit: Option<Duration>,
    work: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match limit {
        None => work.await,
        Some(limit) => match tokio::time::timeout(limit, work).await {
            Ok(result) => result,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        },
    }
}
