//! `blockd del`.

use blockd_api::v1::{DeleteVolumeRequest, DetachVolumeRequest, VolumeState};
use blockd_media::error::{Error, ErrorKind};
use blockd_media::units;
use serde::Serialize;

use super::client::Client;
use super::{Context, amount};

/// Detach a volume and delete it with all it holds
///
/// Refused while clients are connected or the block device is in use (mounted, open, or part of
/// another device), unless forced: then connections are closed, IO to the device fails, and so do
/// writes that wait for space. A volume that does not exist is not an error.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd del data")]
pub(crate) struct Del {
    /// The volume
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also when clients are connected or the block device is used
    #[arg(long)]
    pub force: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Deleted {
    changed: bool,
    detached: bool,
    closed_connections: u32,
    freed_bytes: u64,
}

impl Del {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let name = self.name;
        let detached =
            if self.force { false } else { detach(&mut client, &name, &self.pool).await? };
        let request =
            DeleteVolumeRequest { name: name.clone(), pool: self.pool, force: self.force };
        let answer = client.delete_volume(request).await?;
        let is_overwritten =
            answer.volume.as_ref().filter(|one| one.state() == VolumeState::Scrubbing);
        let overwritten = is_overwritten.map(|one| units::human(amount(one.charged_bytes)));
        let deleted = Deleted {
            changed: answer.changed,
            detached: detached || answer.detached,
            closed_connections: answer.closed_connections,
            freed_bytes: answer.volume.map_or(0, |volume| amount(volume.exclusive_bytes)),
        };
        context.output.either(&deleted, || match overwritten {
            Some(bytes) => format!("{name}: deleted, {bytes} come free when overwritten\n"),
            None if deleted.changed => {
                format!("{name}: deleted, {} freed\n", units::human(deleted.freed_bytes))
            }
            None => format!("{name}: there was no such volume\n"),
        })
    }
}

/// Refused by the daemon while clients are connected. Whether there is such a volume is the next
/// call's matter.
async fn detach(client: &mut Client, name: &str, pool: &str) -> Result<bool, Error> {
    let request =
        DetachVolumeRequest { name: name.to_owned(), pool: pool.to_owned(), force: false };
    match client.detach_volume(request).await {
        Ok(answer) => Ok(answer.changed),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
