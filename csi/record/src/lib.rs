//! A recorder of CSI calls: it listens where the kubelet and the sidecars call, passes each call on
//! to the plugin unchanged, and writes a line of JSON for it, without secrets. `docs/RECORDINGS.md`
//! describes the file.
//!
//! ```text
//! kubelet, sidecars --> [socket] --> [proxy] --> the plugin's socket
//!                                      | bytes that pass
//!                                      v
//!                       [frames] --> [schema] --> [recording]
//! ```
#![forbid(unsafe_code)]

pub mod frames;
mod options;
mod proxy;
pub mod recording;
pub mod schema;
mod socket;

use std::future::Future;
use std::sync::Arc;

use blockd_csi_base::error::Invalid;
use tokio::net::UnixListener;
use tonic::transport::Server;

pub use self::options::Options;
use self::proxy::Proxy;
use self::recording::Recorder;

/// Why nothing is recorded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option is out of range.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The proxy's server failed.
    #[error("cannot serve on --listen: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// Passes calls on and records them until `stop` ends. `program` is the recorder's name and
/// version.
///
/// # Errors
/// An option is wrong, or the server failed.
pub async fn serve(
    options: &Options,
    program: &str,
    listener: UnixListener,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let recorder = Arc::new(Recorder::create(options, program)?);
    let (listen, to) = (options.listen.display(), options.to.display());
    tracing::info!(%listen, %to, "passing calls on");
    let proxy = Proxy::new(&options.to, Arc::clone(&recorder));
    let server = Server::builder().add_routes(proxy.routes());
    let ended = tokio::select! {
        ended = server.serve_with_incoming(socket::incoming(listener)) => ended,
        () = stop => Ok(()),
    };
    let _ = std::fs::remove_file(&options.listen);
    let calls = recorder.end("the recorder was stopped");
    tracing::info!(calls, "ended");
    Ok(ended?)
}
