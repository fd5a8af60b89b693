//! `blockd pool rename`.

use blockd_api::v1::{self, RenamePoolRequest};
use blockd_media::error::Error;
use serde::Serialize;

use super::super::{Context, answers};

/// Give an open pool another name
///
/// Its volumes, their attachments and their clients stay. New clients find the volumes by the new
/// name, over NBD and below /dev/blockd. The command can be repeated: without a pool of the old
/// name, and with one of the new name, nothing is changed. A pool that the configuration names gets
/// its name there. The CSI plugin finds volumes by their pool: do not rename a pool that it uses.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool rename fast archive")]
pub(crate) struct Rename {
    /// The pool
    #[arg(value_name = "OLD")]
    pub pool: String,

    /// The new name, which no other pool has: 1 to 128 bytes without '/'
    pub new: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Renamed {
    changed: bool,
    pool: v1::Pool,
}

impl Rename {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = RenamePoolRequest { name: self.pool.clone(), new_name: self.new };
        let answer = context.client().await?.rename_pool(request).await?;
        let renamed = Renamed { changed: answer.changed, pool: answers::pool(answer.pool)? };
        context.output.either(&renamed, || {
            let name = &renamed.pool.name;
            match renamed.changed {
                true => format!("{}: is {name} now\n", self.pool),
                false => format!("{name}: unchanged, it has this name\n"),
            }
        })
    }
}
