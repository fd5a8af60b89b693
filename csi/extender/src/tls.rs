//! The server's certificate, from files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::error::Error;

/// How long a handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Returns an acceptor for any client: capacities are not secret, so that clients need no
/// certificate.
///
/// # Errors
/// A file can't be read, is no PEM, or the two don't belong together.
pub(super) fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, Error> {
    let failed = |path: &Path, error: &dyn std::fmt::Display| {
        Error::unexpected(format_args!("use {}:", path.display()), error)
    };
    let read = |path: &Path| {
        let bytes = std::fs::read(path);
        bytes.map_err(|error| Error::io(format_args!("read {}", path.display()), error))
    };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(certificate)?).collect();
    let chain = chain.map_err(|error| failed(certificate, &error))?;
    if chain.is_empty() {
        return Err(failed(certificate, &"there is no certificate in it"));
    }
    let secret = PrivateKeyDer::from_pem_slice(&read(key)?);
    let secret = secret.map_err(|error| failed(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(certificate, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| failed(key, &error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Returns the encrypted stream of a connection, or `None` if the client does not make one.
pub(super) async fn accept(
    acceptor: TlsAcceptor,
    stream: TcpStream,
) -> Option<TlsStream<TcpStream>> {
    match tokio::time::timeout(HANDSHAKE_TIME, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
        Err(_) => tracing::debug!("no TLS in time"),
    }
    None
}
