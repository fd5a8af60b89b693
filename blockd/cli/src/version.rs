//! `blockd version`.

use blockd_api::v1::{VersionRequest, VersionResponse};
use blockd_media::error::{Error, ErrorKind};
use serde::Serialize;

use super::Context;

/// The output of `--json`. `daemon` is null when none answers.
#[derive(Debug, Serialize)]
struct Versions {
    version: &'static str,
    /// The version with its commit, as far as the build knows it.
    build: &'static str,
    daemon: Option<VersionResponse>,
}

pub(super) async fn run(context: &Context) -> Result<(), Error> {
    let asked = async { context.client().await?.version(VersionRequest {}).await };
    let daemon = match asked.await {
        Ok(daemon) => Some(daemon),
        Err(error) if error.kind() == ErrorKind::Unreachable => None,
        Err(error) => return Err(error),
    };
    let build = context.program.version();
    let versions = Versions { version: env!("CARGO_PKG_VERSION"), build, daemon };
    context.output.either(&versions, || {
        let mut text = format!("blockd {}\n", versions.build);
        if let Some(daemon) = &versions.daemon {
            text.push_str(&format!("daemon {}, process {}\n", daemon.version, daemon.pid));
        }
        text
    })
}
