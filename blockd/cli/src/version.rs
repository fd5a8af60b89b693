//! `blockd version`.

use blockd_api::v1::VersionRequest;
use blockd_media::error::{Error, ErrorKind};
use serde::Serialize;

use super::Context;

/// The output of `--json`. `daemon` is null when none answers.
#[derive(Debug, Serialize)]
struct Versions {
    version: &'static str,
    daemon: Option<DaemonShape>,
}

#[derive(Debug, Serialize)]
struct DaemonShape {
    version: String,
    pid: u32,
    started_unix_seconds: i64,
    ready: bool,
    nbd_addresses: Vec<String>,
}

pub(super) async fn run(context: &Context) -> Result<(), Error> {
    let daemon = match daemon(context).await {
        Ok(daemon) => Some(daemon),
        Err(error) if error.kind() == ErrorKind::Unreachable => None,
        Err(error) => return Err(error),
    };
    let versions = Versions { version: env!("CARGO_PKG_VERSION"), daemon };
    context.output.either(&versions, || {
        let mut text = format!("blockd {}\n", versions.version);
        if let Some(daemon) = &versions.daemon {
            text.push_str(&format!("daemon {}, process {}\n", daemon.version, daemon.pid));
        }
        text
    })
}

async fn daemon(context: &Context) -> Result<DaemonShape, Error> {
    let answer = context.client().await?.version(VersionRequest {}).await?;
    Ok(DaemonShape {
        version: answer.version,
        pid: answer.pid,
        started_unix_seconds: answer.started_unix_seconds,
        ready: answer.ready,
        nbd_addresses: answer.nbd_addresses,
    })
}
