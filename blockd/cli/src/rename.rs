//! `blockd rename`.

use blockd_api::v1::{RenameVolumeRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, answers, names};

/// Give a volume or snapshot another name
///
/// Its content, snapshots, settings and attachment stay, and so do its block device and connected
/// clients. New clients find it by the new name, over NBD and below /dev/blockd. The command can be
/// repeated: without a volume of the old name, and with one of the new name, nothing is changed.
/// The CSI plugin finds its volumes by their names: do not rename these.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd rename data archive")]
pub(crate) struct Rename {
    /// The volume or snapshot, NAME or POOL/NAME
    pub old: String,

    /// The new name, which the pool does not have yet: 1 to 128 bytes without '/'
    pub new: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Renamed {
    changed: bool,
    volume: Volume,
}

impl Rename {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.old, &mut self.new])?;
        names::check_visible(&self.new)?;
        let old = self.old;
        let request =
            RenameVolumeRequest { name: old.clone(), pool: self.pool, new_name: self.new };
        let answer = context.client().await?.rename_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        let renamed = Renamed { changed: answer.changed, volume };
        context.output.either(&renamed, || {
            let name = &renamed.volume.name;
            match renamed.changed {
                true => format!("{old}: is {name} now\n"),
                false => format!("{name}: unchanged, it has this name\n"),
            }
        })
    }
}
