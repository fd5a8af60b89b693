//! `blockd resize`.

use blockd_api::v1::{ResizeVolumeRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, amount, answers, encryption, names, size_argument};

/// Change a volume's size
///
/// Growing takes no space. Shrinking loses what lies beyond the new size, and has to be asked for.
/// A block device shows the new size at once where the kernel can do that (6.16 or newer), and else
/// after `detach` and `attach`. Clients that are connected over NBD see it when they connect again.
/// Of a volume that was added with --encrypt the size is that of its data, as it is for `add`, and
/// the mapping shows it after `add` with the new size and the key.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd resize data --size 20G")]
pub(crate) struct Resize {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The new size, like 512M, 10G, 1T (powers of 1024)
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// The size may be smaller than it is: what it cuts off is lost
    #[arg(long)]
    pub shrink: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Resized {
    changed: bool,
    previous_size_bytes: u64,
    connections_with_old_size: u32,
    device_has_old_size: bool,
    volume: Volume,
}

impl Resize {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let size_bytes = size_argument("size", &self.size)?;
        let mut client = context.client().await?;
        let (volume, size) = ((&*self.name, &*self.pool), (&*self.size, size_bytes));
        let size_bytes = encryption::resized_bytes(&mut client, volume, size).await?;
        let request = ResizeVolumeRequest {
            name: self.name.clone(),
            pool: self.pool,
            shrink: self.shrink,
            size_bytes,
            ..Default::default()
        };
        let answer = client.resize_volume(request).await?;
        let resized = Resized {
            changed: answer.changed,
            previous_size_bytes: amount(answer.previous_size_bytes),
            connections_with_old_size: answer.connections_with_old_size,
            device_has_old_size: answer.device_has_old_size,
            volume: answers::volume(answer.volume)?,
        };
        context.output.either(&resized, || human(&resized, context))
    }
}

fn human(resized: &Resized, context: &Context) -> String {
    let name = &resized.volume.name;
    let shown = |bytes| context.output.size(encryption::data_bytes(&resized.volume, bytes));
    let now = shown(amount(resized.volume.size_bytes));
    if !resized.changed {
        return format!("{name}: has {now} already\n");
    }
    let before = shown(resized.previous_size_bytes);
    let full = names::full(&resized.volume);
    let late = match resized.connections_with_old_size {
        0 if resized.device_has_old_size => {
            let device = match resized.volume.device_path.as_str() {
                "" => "the device",
                path => path,
            };
            format!("; {device} shows it after `blockd detach {full}` and `blockd attach {full}`")
        }
        0 => String::new(),
        count => format!("; {count} connection(s) see it when they connect again"),
    };
    let sealed = match encryption::is_encrypted(&resized.volume) {
        true => {
            format!("; the mapping shows it after `blockd add {full} --encrypt`, with size and key")
        }
        false => String::new(),
    };
    format!("{name}: {now}, was {before}{late}{sealed}\n")
}
