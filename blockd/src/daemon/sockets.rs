//! Sockets and ports: bound before anything is served.

use blockd_control::services::{self, ControlListener, ExtendListener, PeerListener};
use blockd_media::error::Error;
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{self, Address, Bound, Limits, ListenError};
use blockd_serve::nbd::tls::{TlsFiles, acceptor};

use super::http::HttpListener;
use crate::config::{Config, ListenAddress, ListenerConfig, TlsUse, with_causes};

/// Sockets that are bound and not served yet.
pub(super) struct Sockets {
    pub(super) nbd: Vec<(Bound, TlsUse)>,
    pub(super) control: ControlListener,
    pub(super) extend: Vec<ExtendListener>,
    pub(super) metrics: Option<HttpListener>,
    pub(super) peers: Option<PeerListener>,
}

pub(super) async fn bind(config: &Config) -> Result<Sockets, Error> {
    let control = services::bind(&config.control_socket)?;
    let certificate = config.nbd.tls.as_ref().map(|tls| TlsFiles {
        certificate: tls.certificate.clone(),
        key: tls.key.clone(),
        client_ca: tls.client_ca.clone(),
    });
    let acceptor = certificate.map(|files| acceptor(&files)).transpose();
    let acceptor = acceptor.map_err(|error| Error::Corrupt {
        what: "nbd.tls".to_owned(),
        problem: with_causes(&error),
    })?;
    let mut nbd = Vec::new();
    for one in &config.nbd.listeners {
        let tls = match (one.tls, &acceptor) {
            (TlsUse::Off, _) | (_, None) => Tls::Off,
            (TlsUse::Allowed, Some(acceptor)) => Tls::On(acceptor.clone()),
            (TlsUse::Required, Some(acceptor)) => Tls::Required(acceptor.clone()),
        };
        let bound = listener::bind(listener_options(one, config, tls)).map_err(listen_error)?;
        nbd.push((bound, one.tls));
    }
    let metrics = match config.metrics {
        None => None,
        Some(address) => Some(HttpListener::bind(address).await?),
    };
    let peers = match config.hosts.listen {
        None => None,
        Some(address) => Some(PeerListener::bind(address, config.hosts.tls.as_ref()).await?),
    };
    let extend = config.pools.iter().filter_map(|pool| {
        pool.extend_socket.as_ref().map(|path| services::bind_extend(&pool.name, path))
    });
    let extend = extend.collect::<Result<_, _>>()?;
    Ok(Sockets { nbd, control, extend, metrics, peers })
}

fn listener_options(one: &ListenerConfig, config: &Config, tls: Tls) -> listener::ListenerOptions {
    let address = match &one.address {
        ListenAddress::Unix { path, mode } => Address::Unix { path: path.clone(), mode: *mode },
        ListenAddress::Tcp(address) => Address::Tcp(*address),
    };
    let limits = Limits {
        connections: one.max_connections,
        connections_per_peer: config.nbd.max_connections_per_peer,
        handshakes: config.nbd.max_handshakes,
        handshake_time: config.nbd.handshake_timeout,
        send_time: config.nbd.send_timeout,
        ..Limits::default()
    };
    listener::ListenerOptions { address, limits, tls }
}

fn listen_error(error: ListenError) -> Error {
    let text = error.to_string();
    match error {
        ListenError::PathTooLong { path, .. } => {
            let allowed = blockd_media::names::check_socket_path(&path).err().unwrap_or_default();
            Error::invalid("nbd.listener.unix", path.display(), allowed)
        }
        ListenError::NotASocket { path } => {
            Error::in_use(path.display().to_string(), "is there already, and is no socket")
        }
        ListenError::InUse { address } => {
            Error::in_use(address.to_string(), "is in use: another process listens there")
        }
        ListenError::Io { source, .. } => Error::io(text, source),
    }
}
