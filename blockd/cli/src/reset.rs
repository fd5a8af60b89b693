//! `blockd reset`.

use blockd_api::v1::{ResetVolumeRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, answers, names};

/// Make a clone what the snapshot holds that it was made of
///
/// All that was written to it since is lost. Its attachment, its block device and its size stay,
/// unless it is smaller than the snapshot: then it becomes as large. Nothing is copied, and it
/// takes milliseconds, whatever was written. Refused while it is in use:
/// while a client is connected, or its block device is open or mounted. A mounted file system does
/// not survive --force. A clone whose snapshot is deleted can't be reset.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd reset vm1")]
pub(crate) struct Reset {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also while it is in use: clients find other data below them
    #[arg(long)]
    pub force: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Done {
    snapshot: String,
    volume: Volume,
}

impl Reset {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let request = ResetVolumeRequest { name: self.name, pool: self.pool, force: self.force };
        let answer = context.client().await?.reset_volume(request).await?;
        let done = Done { snapshot: answer.snapshot, volume: answers::volume(answer.volume)? };
        context
            .output
            .either(&done, || format!("{}: holds what {} holds\n", done.volume.name, done.snapshot))
    }
}
