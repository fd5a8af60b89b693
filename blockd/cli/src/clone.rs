//! `blockd clone`.

use blockd_api::v1::{CloneVolumeRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::labels::LabelArguments;
use super::{Context, amount, answers, names, size_argument};

/// Make a volume that begins as a snapshot's content
///
/// Nothing is copied: what the two have in common takes its space once, until one of them is
/// written. The snapshot can be deleted at any time. A volume that is there already, made from this
/// snapshot with this size, is left as it is, but gets the labels that are named; of the snapshot's
/// labels it has none. `blockd attach` makes it reachable.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd clone data-monday test\n  blockd clone golden vm1 --size 40G"
)]
pub(crate) struct Clone {
    /// The snapshot, NAME or POOL/NAME
    pub snapshot: String,

    /// The new volume's name: 1 to 128 bytes without '/'
    pub name: String,

    /// How much clients see, no less than of the snapshot [default: as much]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: Option<String>,

    #[command(flatten)]
    pub labels: LabelArguments,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Cloned {
    changed: bool,
    volume: Volume,
}

impl Clone {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.snapshot, &mut self.name])?;
        let size = self.size.as_deref().map(|text| size_argument("size", text)).transpose()?;
        if size == Some(0) {
            return Err(Error::invalid("size", 0, "more than 0"));
        }
        let request = CloneVolumeRequest {
            name: self.name,
            pool: self.pool,
            snapshot: self.snapshot,
            size_bytes: size.unwrap_or(0),
            labels: self.labels.pairs()?,
            ..Default::default()
        };
        let answer = context.client().await?.clone_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        let cloned = Cloned { changed: answer.changed, volume };
        context.output.either(&cloned, || {
            let volume = &cloned.volume;
            let from = match volume.origin.as_str() {
                "" => "a snapshot that is gone",
                origin => origin,
            };
            let size = context.output.size(amount(volume.size_bytes));
            let how = if cloned.changed { "cloned" } else { "was there already," };
            format!("{}: {how} from {from}, {size}\n", volume.name)
        })
    }
}
