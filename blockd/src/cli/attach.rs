//! `blockd attach` and `blockd detach`.

use blockd_api::v1::{AttachVolumeRequest, DetachVolumeRequest};
use serde::Serialize;

use super::Context;
use super::shapes::{self, VolumeShape};
use crate::error::Error;

/// Make a volume reachable for clients
///
/// Prints where it is served, an NBD URI. The daemon remembers it: after its next start the volume
/// is attached again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd attach data --read-only")]
pub(crate) struct Attach {
    /// The volume
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Clients cannot write to it
    #[arg(long)]
    pub read_only: bool,
}

/// End a volume's connections and make it unreachable
///
/// What the volume holds stays. Refused while clients are connected, unless forced. A volume that
/// is not attached is left as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd detach data")]
pub(crate) struct Detach {
    /// The volume
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also when clients are connected
    #[arg(long)]
    pub force: bool,
}

/// What `attach --json` prints.
#[derive(Debug, Serialize)]
struct Attached {
    changed: bool,
    uri: String,
    volume: VolumeShape,
}

/// What `detach --json` prints.
#[derive(Debug, Serialize)]
struct Detached {
    changed: bool,
    closed_connections: u32,
    volume: VolumeShape,
}

impl Attach {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request =
            AttachVolumeRequest { name: self.name, pool: self.pool, read_only: self.read_only };
        let answer = client.attach_volume(request).await?;
        let volume = shapes::volume(answer.volume)?;
        let attached = Attached {
            changed: answer.changed,
            uri: shapes::place(&volume).to_owned(),
            volume: VolumeShape::from(&volume),
        };
        context.output.either(&attached, || {
            if !context.output.terminal().interactive {
                return format!("{}\n", attached.uri);
            }
            let already = if attached.changed { "" } else { " already" };
            let how = if volume.read_only { ", read-only" } else { "" };
            format!("{}: attached{already}{how}\n{}\n", volume.name, attached.uri)
        })
    }
}

impl Detach {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request =
            DetachVolumeRequest { name: self.name.clone(), pool: self.pool, force: self.force };
        let answer = client.detach_volume(request).await?;
        let detached = Detached {
            changed: answer.changed,
            closed_connections: answer.closed_connections,
            volume: VolumeShape::from(&shapes::volume(answer.volume)?),
        };
        context.output.either(&detached, || match (detached.changed, detached.closed_connections) {
            (false, _) => format!("{}: was not attached\n", self.name),
            (true, 0) => format!("{}: detached\n", self.name),
            (true, count) => format!("{}: detached, {count} connection(s) ended\n", self.name),
        })
    }
}
