//! A client of the Kubernetes API server that reads single objects, over HTTPS and with the token
//! of a service account. Only the extender has one: the plugin contacts no API server.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockd_csi_base::error::shown;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes as Body;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::error::Error;

/// Longest answer. etcd holds objects of up to 1.5 MiB in a shorter form than JSON.
const MAX_OBJECT: usize = 4 << 20;

/// Longest name of an object, as Kubernetes has it.
const MAX_NAME: usize = 253;

const AGENT: &str = concat!("blockd-csi-extender/", env!("CARGO_PKG_VERSION"));

/// The address of the API server, and the files of the service account.
#[derive(Clone, Debug)]
pub(super) struct Cluster {
    host: String,
    port: u16,
    account: PathBuf,
}

/// A connection, on which one object is read after the other.
pub(super) struct Session {
    address: String,
    authorization: HeaderValue,
    sender: SendRequest<Empty<Body>>,
    /// Ends with the session.
    _connection: JoinSet<Result<(), hyper::Error>>,
}

impl Cluster {
    /// The API server at this host and port. `account` is the folder with `token` and `ca.crt`.
    pub(super) fn new((host, port): (String, u16), account: &Path) -> Self {
        Self { host, port, account: account.to_owned() }
    }

    /// An error of this API server.
    pub(super) fn failed(&self, problem: impl Display) -> Error {
        Error::unexpected(format_args!("API server {}", self.address()), problem)
    }

    fn address(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Connects. Token and certificate are read each time, since the kubelet replaces them.
    ///
    /// # Errors
    /// A file can't be read, or the server can't be reached or shows another certificate.
    pub(super) async fn connect(&self) -> Result<Session, Error> {
        let token = self.read("token").await?;
        let token = String::from_utf8_lossy(&token);
        let mut authorization = HeaderValue::try_from(format!("Bearer {}", token.trim()))
            .map_err(|_| Error::unexpected(self.file("token").display(), "is not a token"))?;
        authorization.set_sensitive(true);
        let connector = self.connector(&self.read("ca.crt").await?)?;
        let name = ServerName::try_from(self.host.clone()).map_err(|error| self.failed(error))?;
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| self.failed(error))?;
        let stream = connector.connect(name, stream).await.map_err(|error| self.failed(error))?;
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| self.failed(error))?;
        let mut running = JoinSet::new();
        running.spawn(connection);
        Ok(Session { address: self.address(), authorization, sender, _connection: running })
    }

    fn connector(&self, authority: &[u8]) -> Result<TlsConnector, Error> {
        let mut roots = rustls::RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(authority).filter_map(Result::ok);
        if roots.add_parsable_certificates(certificates).0 == 0 {
            return Err(Error::unexpected(self.file("ca.crt").display(), "has no certificate"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| self.failed(error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(TlsConnector::from(Arc::new(config)))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.account.join(name)
    }

    async fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let path = self.file(name);
        let read = tokio::fs::read(&path).await;
        read.map_err(|error| Error::io(format_args!("read {}", path.display()), error))
    }
}

impl Session {
    /// Reads the object at this path of the API, or `None` if there is none.
    ///
    /// # Errors
    /// The server refuses, or its answer is not such an object.
    pub(super) async fn get<T: DeserializeOwned>(
        &mut self,
        path: &str,
    ) -> Result<Option<T>, Error> {
        let what = format!("read {path} from API server {}", self.address);
        let failed = |problem: &dyn Display| Error::unexpected(&what, problem);
        let request = Request::get(path)
            .header(HOST, &self.address)
            .header(AUTHORIZATION, &self.authorization)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, AGENT)
            .body(Empty::<Body>::new())
            .map_err(|error| failed(&error))?;
        self.sender.ready().await.map_err(|error| failed(&error))?;
        let answer = self.sender.send_request(request).await.map_err(|error| failed(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_OBJECT).collect().await;
        let body = body.map_err(|error| failed(&error))?.to_bytes();
        match status {
            StatusCode::OK => {
                serde_json::from_slice(&body).map(Some).map_err(|error| failed(&error))
            }
            StatusCode::NOT_FOUND => Ok(None),
            refused => {
                let status: Value = serde_json::from_slice(&body).unwrap_or_default();
                let reason = status["message"].as_str().unwrap_or("no reason given");
                Err(failed(&format_args!("{refused}: {}", shown(reason))))
            }
        }
    }
}

/// Returns a name as it can stand in a path of the API.
///
/// # Errors
/// The name is not valid in Kubernetes.
pub(super) fn segment<'a>(field: &str, name: &'a str) -> Result<&'a str, Error> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_inner = |byte: u8| is_plain(byte) || byte == b'-' || byte == b'.';
    let bytes = name.as_bytes();
    let has_plain_ends =
        [bytes.first(), bytes.last()].iter().all(|end| end.copied().is_some_and(is_plain));
    if has_plain_ends && name.len() <= MAX_NAME && bytes.iter().copied().all(is_inner) {
        return Ok(name);
    }
    Err(Error::invalid(field, name, "a name of Kubernetes: a-z, 0-9, - and ., at most 253"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_kubernetes_get_into_a_path() {
        for name in ["a", "data", "web-0-cache", "a.b-c.d", "0"] {
            assert_eq!(segment("claim", name).unwrap(), name);
        }
        let long = "a".repeat(MAX_NAME + 1);
        for name in ["", ".", "..", "../x", "a/b", "a?b", "A", "-a", "a-", "a b", "ä", &long] {
            let error = segment("claim", name).unwrap_err().to_string();
            assert!(error.starts_with("claim is "), "{error}");
        }
    }

    #[test]
    fn an_address_of_version_6_has_brackets_and_its_name_has_none() {
        let cluster = Cluster::new(("fd00::1".to_owned(), 443), Path::new("/nowhere"));
        assert_eq!(cluster.address(), "[fd00::1]:443");
        assert!(ServerName::try_from(cluster.host).is_ok());
    }
}
