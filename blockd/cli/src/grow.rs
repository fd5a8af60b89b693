//! `blockd pool grow`.

use blockd_api::v1::{GetPoolRequest, GrowPoolRequest, Pool};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, amount, answers, size_argument};

/// Make a pool larger
///
/// A file is made longer; a disk is taken as long as it has become. Writes that wait for space go
/// on. With +SIZE, by so much. A pool in memory stays as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool grow --size 200G\n  \
                  blockd pool grow fast --size +50G")]
pub(crate) struct Grow {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// New size of the device, like 200G, or an increment, like +50G; not needed for a disk
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Option<String>,

    /// Which of its devices, counted from 0 as `pool show` lists them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Grown {
    changed: bool,
    gained_bytes: u64,
    pool: Pool,
}

impl Grow {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let wanted_bytes = match self.size.as_deref().map(|text| (text, text.strip_prefix('+'))) {
            None => 0,
            Some((_, Some(more))) => {
                let more = size_argument("size", more)?;
                let request = GetPoolRequest { name: self.pool.clone() };
                let pool = answers::pool(client.get_pool(request).await?.pool)?;
                let at = usize::try_from(self.device).unwrap_or(usize::MAX);
                let present = pool.devices.get(at).ok_or_else(|| {
                    let allowed = format!("below {}", pool.devices.len());
                    Error::invalid("device", self.device, allowed)
                })?;
                present
                    .size_bytes
                    .checked_add(more)
                    .ok_or_else(|| Error::invalid("size", more, "less than 2^63 bytes in all"))?
            }
            Some((text, None)) => size_argument("size", text)?,
        };
        let request = GrowPoolRequest { name: self.pool, device: self.device, wanted_bytes };
        let answer = client.grow_pool(request).await?;
        let grown = Grown {
            changed: answer.changed,
            gained_bytes: amount(answer.gained_bytes),
            pool: answers::pool(answer.pool)?,
        };
        context.output.either(&grown, || {
            let Pool { name, size_bytes, .. } = &grown.pool;
            let size = context.output.size(amount(*size_bytes));
            let gained = context.output.size(grown.gained_bytes);
            if grown.changed {
                format!("{name}: {size}, {gained} more\n")
            } else {
                format!("{name}: has {size} already\n")
            }
        })
    }
}
