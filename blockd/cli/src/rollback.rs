//! `blockd rollback`.

use blockd_api::v1::{RollbackVolumeRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, amount, answers, names};

/// Make a volume what a snapshot of it holds
///
/// Later writes are lost, unless another snapshot has them; the volume's size becomes the
/// snapshot's. Any snapshot of its family will do: of the volume, of what it was cloned from, or of
/// a clone. Refused while the volume is attached, unless forced: then requests in flight end first,
/// and clients find other data below them, which a mounted file system does not survive.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd rollback data data-monday")]
pub(crate) struct Rollback {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The snapshot
    pub snapshot: String,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also when it is attached
    #[arg(long)]
    pub force: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct RolledBack {
    previous_size_bytes: u64,
    volume: Volume,
}

impl Rollback {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name, &mut self.snapshot])?;
        let snapshot = self.snapshot.clone();
        let request = RollbackVolumeRequest {
            name: self.name,
            pool: self.pool,
            snapshot: self.snapshot,
            force: self.force,
        };
        let answer = context.client().await?.rollback_volume(request).await?;
        let done = RolledBack {
            previous_size_bytes: amount(answer.previous_size_bytes),
            volume: answers::volume(answer.volume)?,
        };
        context.output.either(&done, || {
            let volume = &done.volume;
            let (now, before) = (amount(volume.size_bytes), done.previous_size_bytes);
            let size = if before == now {
                String::new()
            } else {
                let (now, before) = (context.output.size(now), context.output.size(before));
                format!("; {now} now, was {before}")
            };
            format!("{}: holds what {snapshot} holds{size}\n", volume.name)
        })
    }
}
