//! Certificates of both ends of a link.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_media::error::Error;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

use super::Duplex;
use super::socket::Socket;

/// How a connection is protected.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct TlsArguments {
    /// This side's certificate, in PEM, followed by those up to the root, if any
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,

    /// The key of that certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Certificates, in PEM, one of which has to have signed the other side's
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,

    /// Without certificates also beyond this host: anyone on the way can read and change the data
    #[arg(long, conflicts_with = "tls_cert")]
    pub insecure: bool,
}

/// The contents of the files.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
}

impl TlsArguments {
    /// Refuses a connection without certificates that leaves this host.
    pub(super) fn check(
        &self,
        field: &str,
        address: &str,
        all: &[SocketAddr],
    ) -> Result<(), Error> {
        if self.tls_cert.is_some() || self.insecure || all.iter().all(|one| one.ip().is_loopback())
        {
            return Ok(());
        }
        let allowed = "of this host without --tls-cert, --tls-key and --tls-ca, or --insecure";
        Err(Error::invalid(field, address, allowed))
    }

    fn identity(&self) -> Result<Option<Identity>, Error> {
        let (Some(chain), Some(key), Some(ca)) = (&self.tls_cert, &self.tls_key, &self.tls_ca)
        else {
            return Ok(None);
        };
        let mut roots = RootCertStore::empty();
        for one in certificates("tls-ca", ca)? {
            roots.add(one).map_err(|error| unusable("tls-ca", ca, &error))?;
        }
        let chain = certificates("tls-cert", chain)?;
        let key =
            PrivateKeyDer::from_pem_file(key).map_err(|error| unusable("tls-key", key, &error))?;
        Ok(Some(Identity { chain, key, roots: Arc::new(roots) }))
    }

    /// A sender's end.
    pub(super) fn client(&self, tcp: Socket, host: &str) -> Result<Box<dyn Duplex>, Error> {
        let Some(Identity { chain, key, roots }) = self.identity()? else {
            return Ok(Box::new(tcp));
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone());
        let name = name.map_err(|_| Error::invalid("TARGET", &host, "a host's name or address"))?;
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(failed)?;
        let connection = ClientConnection::new(Arc::new(config), name).map_err(failed)?;
        Ok(Box::new(StreamOwned::new(connection, tcp)))
    }

    /// Reads the files once, so that a mistake in them is reported before a sender connects.
    pub(super) fn check_server(&self) -> Result<(), Error> {
        self.server_config().map(drop)
    }

    /// A receiver's end.
    pub(super) fn server(&self, tcp: Socket) -> Result<Box<dyn Duplex>, Error> {
        let Some(config) = self.server_config()? else { return Ok(Box::new(tcp)) };
        let connection = ServerConnection::new(Arc::new(config)).map_err(failed)?;
        Ok(Box::new(StreamOwned::new(connection, tcp)))
    }

    fn server_config(&self) -> Result<Option<ServerConfig>, Error> {
        let Some(Identity { chain, key, roots }) = self.identity()? else { return Ok(None) };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|error| Error::Unexpected {
            what: "the certificates of --tls-ca".to_owned(),
            problem: error.to_string(),
        })?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(failed)?;
        Ok(Some(config))
    }
}

fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.map_err(|error| unusable(field, path, &error))?;
    if found.is_empty() {
        return Err(Error::invalid(field, path.display(), "a file with a certificate in PEM"));
    }
    Ok(found)
}

fn unusable(field: &str, path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::invalid(field, path.display(), format!("a usable file in PEM ({error})"))
}

/// The error of certificate and key that do not fit, most often.
fn failed(error: rustls::Error) -> Error {
    Error::Unexpected {
        what: "the certificate of --tls-cert and its --tls-key".to_owned(),
        problem: error.to_string(),
    }
}
