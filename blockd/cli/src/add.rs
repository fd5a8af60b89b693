//! `blockd add`: the common case in one command, a volume that clients can use.

use blockd_api::v1::{
    AddVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, PmemUsage, SizeSemantics, Volume,
};
use blockd_media::error::Error;
use blockd_media::units;
use serde::Serialize;

use super::answers::{self, is_namespace};
use super::attach::FrontEndArguments;
use super::client::Client;
use super::encryption::{Encryption, EncryptionArguments};
use super::labels::LabelArguments;
use super::set::{self, SettingArguments};
use super::{Context, amount, names, size_argument};

/// Make a volume and attach it
///
/// The volume takes space from its pool as it is written. What is printed is where it is served: a
/// block device like /dev/ublkb0, also called /dev/blockd/POOL/NAME, or where the kernel has no
/// ublk driver an NBD URI, for qemu, nbdcopy, nbd-client and the like. A volume that is there
/// already, with this size, is kept, and gets the settings and labels that are named. A volume of a
/// pool of namespaces takes its space at once, and its device is the kernel's own. If a part of it
/// fails, nothing is changed.
///
/// With --encrypt the volume has LUKS2 above its block device, and the mapping to use is printed. A
/// volume that was never written gets a header, which takes 16 MiB on top of the size; one that was
/// added with --encrypt before is opened again, with the key that it was made with. Without the key
/// its data is lost.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd add --size 10G data\n  blockd add --size 1T --pool fast db\n  \
                  blockd add --size 10G data --label team=db\n  \
                  blockd add --size 10G data --encrypt --key-file key"
)]
pub(crate) struct Add {
    /// Its name, 1 to 128 bytes without '/', or POOL/NAME
    pub name: String,

    /// How much clients see, like 512M, 10G, 1T (powers of 1024)
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: String,

    /// The pool that it takes space from [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// The least that clients can address: 512 to 4096 [default: 512, or what the pool's disks
    /// have]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub block_size: Option<String>,

    /// Use of a volume in persistent memory [default: app-direct in a pool of namespaces]
    #[arg(long, value_enum)]
    pub usage: Option<Usage>,

    /// The most that it may take once its size was rounded up
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<String>,

    /// The size is what is taken of persistent memory, and clients see less
    #[arg(long)]
    pub charged: bool,

    /// Leave what is in it when it is deleted, instead of overwriting it
    #[arg(long)]
    pub no_erase: bool,

    #[command(flatten)]
    pub front_end: FrontEndArguments,

    #[command(flatten)]
    pub encryption: EncryptionArguments,

    #[command(flatten)]
    pub labels: LabelArguments,

    #[command(flatten)]
    pub settings: SettingArguments,
}

/// The usage of a volume in persistent memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Usage {
    /// Mapped by applications
    AppDirect,
    /// Read and written; a sector is never torn
    FileIo,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Added {
    changed: bool,
    created: bool,
    configured: bool,
    attached: bool,
    /// The block device's path, or the URI.
    #[serde(rename = "where")]
    place: String,
    uri: String,
    volume: Volume,
    warnings: Vec<String>,
}

impl Add {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        names::check_visible(&self.name)?;
        let mut size_bytes = size_argument("size", &self.size)?;
        let encryption = self.encryption.read()?;
        let mut set_labels = self.labels.pairs()?;
        if encryption.is_some() {
            size_bytes = Encryption::device_bytes(&self.size, size_bytes)?;
            Encryption::label(&mut set_labels);
            self.front_end.ublk = true;
        }
        let block_size = block_size_argument(self.block_size.as_deref())?;
        let create = CreateVolumeRequest {
            name: self.name.clone(),
            pool: self.pool.clone(),
            block_size,
            size_bytes,
            usage: match self.usage {
                None => PmemUsage::Unspecified,
                Some(Usage::AppDirect) => PmemUsage::AppDirect,
                Some(Usage::FileIo) => PmemUsage::FileIo,
            }
            .into(),
            limit_bytes: match &self.limit {
                Some(text) => size_argument("limit", text)?,
                None => 0,
            },
            size_semantics: match self.charged {
                true => SizeSemantics::Charged,
                false => SizeSemantics::Unspecified,
            }
            .into(),
            erase_after: self.no_erase.then_some(false),
            ..Default::default()
        };
        let mut client = context.client().await?;
        if encryption.is_some() {
            Encryption::check(&mut client, &self.name, &self.pool).await?;
        }
        let request = AddVolumeRequest {
            create: Some(create),
            configure: set::request(&self.settings, &self.name, &self.pool, (set_labels, vec![]))?,
            attach: Some(self.front_end.request(self.name, self.pool, false)),
        };
        let answer = client.add_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        let (mut place, mut opened) = (answers::place(&volume).to_owned(), false);
        if let Some(encryption) = &encryption {
            (place, opened) = match encryption.open(&mut client, &volume).await {
                Err(error) if answer.created => {
                    return Err(undone(&mut client, volume, error).await);
                }
                result => result?,
            };
        }
        let warnings = set::warnings(&volume);
        set::warn(&warnings);
        let added = Added {
            warnings,
            changed: answer.changed || opened,
            created: answer.created,
            configured: answer.configured,
            attached: answer.attached,
            place,
            uri: volume.nbd_uri.clone(),
            volume,
        };
        context.output.either(&added, || human(&added, context))
    }
}

/// Deletes a volume that was made and can't be encrypted. Returns the error with what is left.
async fn undone(client: &mut Client, volume: Volume, error: Error) -> Error {
    let request =
        DeleteVolumeRequest { name: volume.name, pool: volume.pool, force: false, detach: true };
    match client.delete_volume(request).await {
        Ok(_) => error,
        Err(left) => error.with_note(&format!("the new volume is still there: {left}")),
    }
}

fn human(added: &Added, context: &Context) -> String {
    if !context.output.terminal().interactive {
        return format!("{}\n", added.place);
    }
    let volume = &added.volume;
    let name = &volume.name;
    let is_thick = volume.settings.is_some_and(|settings| settings.thick);
    let what = match (added.created, added.attached) {
        (true, _) if is_namespace(volume) => format!(
            "{name}: {} in pool {}, a namespace of {}",
            units::human(amount(volume.size_bytes)),
            volume.pool,
            units::human(amount(volume.charged_bytes))
        ),
        (false, _) if is_namespace(volume) => format!("{name}: was there already"),
        (true, _) => format!(
            "{name}: {} in pool {}, {}, attached",
            units::human(amount(volume.size_bytes)),
            volume.pool,
            if is_thick { "thick" } else { "thin" }
        ),
        (false, true) => format!("{name}: was there already, attached"),
        (false, false) => format!("{name}: was there and attached already"),
    };
    format!("{what}\n{}\n", added.place)
}

/// A block size, or 0 where the daemon is to choose.
pub(super) fn block_size_argument(text: Option<&str>) -> Result<u32, Error> {
    let Some(text) = text else {
        return Ok(0);
    };
    let bytes = size_argument("block-size", text)?;
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| bytes.is_power_of_two() && (512..=4096).contains(bytes))
        .ok_or_else(|| Error::invalid("block-size", text, "512, 1024, 2048 or 4096"))
}
