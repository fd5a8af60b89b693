//! The server's certificate, from files.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use super::error::Error;

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
