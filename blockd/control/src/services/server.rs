//! The control socket: its access control and its service.

use std::future::Future;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use blockd_api::v1::control_server::ControlServer;
use blockd_media::error::Error;
use blockd_media::names::check_socket_path;
use tokio::net::UnixListener;
use tokio::net::unix::UCred;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use super::Control;
use super::authority::AnyAuthority;

/// Calls of one client at once: more wait.
const CALLS_AT_ONCE: usize = 64;

/// Largest request: 1,000 names of clones, each with 128 bytes.
const MAX_REQUEST_BYTES: usize = 256 << 10;

/// A control socket that is bound: clients can connect, and wait to be served.
#[derive(Debug)]
pub struct ControlListener {
    listener: UnixListener,
    path: PathBuf,
}

/// Binds the control socket, which only this user can open. Has to be called in a tokio runtime.
pub fn bind(path: &Path) -> Result<ControlListener, Error> {
    let listener = bind_private("control_socket", "control", path)?;
    Ok(ControlListener { listener, path: path.to_path_buf() })
}

/// Binds a Unix socket that only this user can open. A stale socket of a dead daemon is removed; a
/// socket with a listener, or a file that is no socket, is not.
pub(super) fn bind_private(
    field: &'static str,
    what: &str,
    path: &Path,
) -> Result<UnixListener, Error> {
    check_socket_path(path).map_err(|allowed| Error::invalid(field, path.display(), allowed))?;
    let name = || format!("{what} socket {}", path.display());
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(Error::in_use(name(), "is there already, and is no socket"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(Error::in_use(name(), "is served by another daemon"));
        }
        fs::remove_file(path).map_err(|error| Error::file("remove", path, error))?;
    }
    let failed = |error: io::Error| Error::io(format!("bind {}", name()), error);
    let listener = UnixListener::bind(path).map_err(failed)?;
    // Until then others can connect, and are refused by their credentials.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

impl ControlListener {
    /// Serves the control API until `stop` ends, and a little longer for calls that have begun.
    /// Then the socket is gone.
    pub async fn serve(
        self,
        control: Control,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        let service = ControlServer::new(control).max_decoding_message_size(MAX_REQUEST_BYTES);
        let service = tonic::service::interceptor::InterceptedService::new(service, allowed);
        let incoming = UnixListenerStream::new(self.listener);
        let incoming = incoming.map(|accepted| accepted.map(AnyAuthority::new));
        let served = Server::builder()
            .concurrency_limit_per_connection(CALLS_AT_ONCE)
            .http2_keepalive_interval(Some(Duration::from_secs(60)))
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, stop)
            .await;
        let _ = fs::remove_file(&self.path);
        served.map_err(|error| Error::Unexpected {
            what: format!("control socket {}", self.path.display()),
            problem: error.to_string(),
        })
    }
}

/// Root and the user of this process may.
fn allowed(request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    check_peer(peer.as_ref().map(UCred::uid), nix::unistd::geteuid().as_raw())?;
    Ok(request)
}

pub(super) fn check_peer(peer: Option<u32>, own: u32) -> Result<(), Error> {
    match peer {
        Some(user) if user == 0 || user == own => Ok(()),
        other => Err(Error::Denied {
            who: other.map_or_else(|| "unknown user".to_owned(), |user| format!("user {user}")),
            allowed: if own == 0 { "root".to_owned() } else { format!("user {own} or root") },
        }),
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::error::ErrorKind;

    use super::*;
    use crate::services::testing::folder;

    #[test]
    fn root_and_the_daemons_user_are_served_and_no_other_user() {
        for (peer, own) in [(0, 0), (0, 1000), (1000, 1000)] {
            assert!(check_peer(Some(peer), own).is_ok());
        }
        for (peer, own) in [(Some(1000), 0), (Some(1), 1000), (None, 0)] {
            let error = check_peer(peer, own).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied);
            assert_eq!(error.to_status().code(), tonic::Code::PermissionDenied);
        }
    }

    #[tokio::test]
    async fn the_socket_is_for_its_owner_alone() {
        let folder = folder();
        let path = folder.path().join("c");
        let _listener = bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_is_refused_with_its_length() {
        let path = Path::new("/").join("x".repeat(108));
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("it has 109"), "{error}");
    }

    #[tokio::test]
    async fn the_socket_of_a_dead_daemon_is_replaced_and_a_live_one_is_not() {
        let folder = folder();
        let path = folder.path().join("c");
        drop(bind(&path).unwrap());
        let alive = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::InUse);
        drop(alive);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::InUse);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
