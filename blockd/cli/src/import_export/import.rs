//! `blockd import`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1::{
    AddVolumeRequest, AttachVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, FrontEnd,
    GetPoolRequest, GetVolumeRequest, Volume,
};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind};
use blockd_media::units;
use serde::Serialize;

use super::{address, apply, blocking, interruptible, qemu_export, settled, taken};
use crate::answers;
use crate::client::Client;
use crate::duration::duration;
use crate::transfer::format::{ImageFormat, WantedFormat};
use crate::transfer::image::{self, Gated};
use crate::transfer::import::{self, Imported, Source};
use crate::transfer::nbd::Target;
use crate::transfer::progress::Progress;
use crate::transfer::{Stop, qemu};
use crate::{Context, amount, names};

/// Copy a disk image into a new volume
///
/// The volume is made as large as the image, rounded up to whole blocks, attached, and written over
/// NBD. Holes and zeroes of the image take no space. When the daemon goes away meanwhile, the
/// import waits for it and goes on. An import that fails deletes the volume again if it made it.
///
/// An untrusted image may name files of this host, so its header is read first. An image that names
/// a backing file, an external data file, other extents or a parent, or that is encrypted, is
/// refused with that name. qemu-img then runs with an explicit driver on the file that was checked,
/// without network, and with no other file in reach where the kernel has Landlock.
///
/// With --apply the file is a backup (`blockd export --since`, `--format backup`). It is read to
/// its end and judged before anything is written, unless it comes from a pipe. It goes onto what
/// it begins with: a new volume for a whole backup; for an increment the copy that the one before
/// was applied to, or a clone of the base itself. Afterwards a snapshot is taken that marks what
/// the volume holds, for the next one. A copy that was written since is refused; one on which an
/// import fails halfway is rolled back.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd import debian.qcow2 debian\n  \
                  zcat disk.gz | blockd import - disk --size 20G\n  \
                  blockd import tuesday.blkd copy --apply")]
pub(crate) struct Import {
    /// The image, or a block device; "-" is standard input, which has to be raw
    pub file: PathBuf,

    /// The volume to be made, or to be changed with --apply: NAME or POOL/NAME
    pub name: String,

    /// Format of the image
    #[arg(long, value_enum, default_value_t = WantedFormat::Auto)]
    pub format: WantedFormat,

    /// Also read the local files that the image names: backing files, an external data file,
    /// extents. Only for images that you trust
    #[arg(long, conflicts_with = "apply")]
    pub follow_backing: bool,

    /// The pool that the volume takes space from [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// The volume's size, like 512M, 10G [default: that of the image; needed for "-"]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: Option<String>,

    /// Write into a volume that is there already; all it holds is lost
    #[arg(long)]
    pub overwrite: bool,

    /// The file is a backup: change the volume by it
    #[arg(long, conflicts_with_all = ["size", "overwrite", "format"])]
    pub apply: bool,

    /// Apply it whatever the volume holds: what the file does not name stays as it is
    #[arg(long, requires = "apply")]
    pub force: bool,

    /// How long to wait for a daemon that has gone away, or for space in a full pool, where it is
    /// 30 s at the least
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub reconnect: Duration,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Answer {
    changed: bool,
    created: bool,
    uri: String,
    /// As --format has it.
    format: &'static str,
    /// Whether the format was detected in the image, and not given.
    format_detected: bool,
    /// Files that were read beside the image, by --follow-backing.
    other_files: Vec<String>,
    source_bytes: u64,
    /// Null unless the image is raw: qemu-img does not report it.
    written_bytes: Option<u64>,
    /// Zeroes after the image's end, to a whole block.
    padded_bytes: u64,
    seconds: f64,
    volume: Volume,
}

/// The image, opened.
struct Image {
    source: Source,
    path: PathBuf,
    format: ImageFormat,
    /// The input of qemu-img; `None` for raw bytes.
    gated: Option<Gated>,
    /// None for a stream.
    size_bytes: Option<u64>,
}

/// The volume to be written.
struct Place {
    volume: Volume,
    created: bool,
}

impl Import {
    /// A backup that is applied.
    pub(super) fn backup(file: PathBuf, name: String, pool: String, reconnect: Duration) -> Self {
        Self {
            file,
            name,
            format: WantedFormat::Auto,
            follow_backing: false,
            pool,
            size: None,
            overwrite: false,
            apply: true,
            force: false,
            reconnect,
        }
    }

    pub(crate) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        names::check_visible(&self.name)?;
        if self.apply {
            return apply::run(&self, context).await;
        }
        // Errors in the image or the arguments are reported before anything is created.
        let image = self.open()?;
        let mut client = context.client().await?;
        let block_bytes = self.block_bytes(&mut client).await?;
        let size_bytes = self.volume_size(&image, block_bytes)?;
        let clock = Clock::start();
        let place = self.place(&mut client, size_bytes).await?;
        let progress = Progress::shown("importing", size_bytes, !context.output.is_json());
        let (source_bytes, format) = (image.size_bytes, image.format);
        let others = image.gated.iter().flat_map(|gated| &gated.others);
        let other_files = others.map(|path| path.display().to_string()).collect();
        let copied = self.copy(&place, image, progress).await;
        let (done, written_bytes) = match copied {
            Ok(done) => done,
            Err(error) => return Err(give_up(&mut client, &place, &error).await),
        };
        let volume = settled(&mut client, &place.volume, 0).await?;
        let source_bytes = source_bytes.unwrap_or(done.source_bytes);
        let rounded = place.created && self.size.is_none();
        let rest_bytes = amount(volume.size_bytes).saturating_sub(source_bytes);
        let answer = Answer {
            changed: true,
            created: place.created,
            uri: answers::place(&volume).to_owned(),
            format: format.name(),
            format_detected: self.format == WantedFormat::Auto && self.file.as_os_str() != "-",
            other_files,
            source_bytes,
            written_bytes,
            padded_bytes: if rounded { rest_bytes } else { 0 },
            seconds: clock.elapsed().as_secs_f64(),
            volume,
        };
        context.output.either(&answer, || human(&answer, context))
    }

    fn open(&self) -> Result<Image, Error> {
        let path = self.file.clone();
        if path.as_os_str() == "-" {
            if !matches!(self.format, WantedFormat::Auto | WantedFormat::Raw) {
                let given = format!("{:?}", self.format).to_lowercase();
                return Err(Error::invalid("format", given, "raw for standard input"));
            }
            if self.size.is_none() {
                return Err(Error::missing("size", "given as --size for standard input"));
            }
            let source = Source::Stream(Box::new(std::io::stdin()));
            let format = ImageFormat::Raw;
            return Ok(Image { source, path, format, gated: None, size_bytes: None });
        }
        let file = image::open("FILE", &path)?;
        let format = self.format.of(&file, &path)?;
        let (gated, size_bytes) = if format == ImageFormat::Raw {
            let size = image::size_of(&file);
            (None, size.map_err(|source| Error::file("find the end of", &path, source))?)
        } else {
            let gated = image::gate(&file, &path, format, self.follow_backing)?;
            let size =
                qemu::virtual_size(&qemu::Image { file: &file, path: &path, gated: &gated })?;
            (Some(gated), size)
        };
        let name = path.display().to_string();
        let source = Source::File { file, size_bytes, name };
        Ok(Image { source, path, format, gated, size_bytes: Some(size_bytes) })
    }

    /// The smallest block that a volume of the pool can have.
    async fn block_bytes(&self, client: &mut Client) -> Result<u64, Error> {
        let request = GetPoolRequest { name: self.pool.clone() };
        let pool = answers::pool(client.get_pool(request).await?.pool)?;
        let largest = pool.devices.iter().map(|device| device.block_size).max();
        Ok(u64::from(largest.unwrap_or(0)).max(MIN_BLOCK_BYTES))
    }

    /// The size of the volume: the requested one, or that of the image in whole blocks.
    fn volume_size(&self, image: &Image, block_bytes: u64) -> Result<u64, Error> {
        let asked = self.size.as_deref().map(|size| units::parse_size("size", size)).transpose()?;
        match (asked, image.size_bytes) {
            (Some(asked), Some(image)) if asked < image => {
                let allowed = format!("at least the image's {image} bytes");
                Err(Error::invalid("size", asked, allowed))
            }
            (Some(asked), _) => Ok(asked),
            (None, Some(0)) => {
                let allowed = "more than 0 bytes long, or --size given";
                Err(Error::invalid("FILE", image.path.display(), allowed))
            }
            (None, Some(size)) => Ok(size.next_multiple_of(block_bytes)),
            (None, None) => Err(Error::invalid("size", "", "given for standard input")),
        }
    }

    /// Makes the volume, or finds it, and attaches it.
    async fn place(&self, client: &mut Client, size_bytes: u64) -> Result<Place, Error> {
        let request = GetVolumeRequest { name: self.name.clone(), pool: self.pool.clone() };
        let existing = match client.get_volume(request).await {
            Ok(answer) => Some(answers::volume(answer.volume)?),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if let Some(volume) = &existing {
            self.check_existing(volume, size_bytes)?;
        }
        let attach = AttachVolumeRequest {
            name: self.name.clone(),
            pool: self.pool.clone(),
            front_end: FrontEnd::Nbd.into(),
            ..Default::default()
        };
        if existing.is_some() {
            let volume = answers::volume(client.attach_volume(attach).await?.volume)?;
            return Ok(Place { volume, created: false });
        }
        let create = CreateVolumeRequest {
            name: self.name.clone(),
            pool: self.pool.clone(),
            size_bytes: units::to_wire(size_bytes),
            ..Default::default()
        };
        let (create, attach) = (Some(create), Some(attach));
        let request = AddVolumeRequest { create, attach, configure: None };
        let answer = client.add_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        if !answer.created {
            // Made by another command since.
            self.check_existing(&volume, size_bytes)?;
        }
        Ok(Place { volume, created: answer.created })
    }

    fn check_existing(&self, volume: &Volume, size_bytes: u64) -> Result<(), Error> {
        let what = format!("volume {}", volume.name);
        if !self.overwrite {
            let problem = "exists: choose another name, or --overwrite to lose what it holds";
            return Err(taken(&volume.name, problem));
        }
        if volume.connections > 0 {
            return Err(Error::in_use(what, "has clients that are connected"));
        }
        if amount(volume.size_bytes) < size_bytes {
            let allowed = format!("at most the {} bytes of {what}", volume.size_bytes);
            return Err(Error::invalid("size", size_bytes, allowed));
        }
        Ok(())
    }

    /// Moves the bytes. Returns how many were written where that is known.
    async fn copy(
        &self,
        place: &Place,
        image: Image,
        progress: Progress,
    ) -> Result<(Imported, Option<u64>), Error> {
        let stop = Arc::new(Stop::default());
        let size_bytes = amount(place.volume.size_bytes);
        let (empty, patience) = (place.created, self.reconnect);
        let target = Target::new(address(&place.volume)?, size_bytes);
        let block_bytes = usize::try_from(place.volume.block_size).unwrap_or(512).max(512);
        let moving = Arc::clone(&stop);
        let write = move |source, progress: &Progress| {
            let import = import::Import {
                target: &target,
                size_bytes,
                block_bytes,
                empty,
                is_first: true,
                patience,
                stop: &moving,
                progress,
            };
            import.run(source)
        };
        let work: Work = match (image.gated, image.source) {
            (Some(gated), Source::File { file, size_bytes: image_bytes, .. }) => {
                let target = qemu_export(&place.volume, patience)?;
                let stop = Arc::clone(&stop);
                Box::new(move || {
                    // qemu-img ends with the image, and leaves the bytes behind it as they are.
                    // Zeroed first, the last block needs no care where the image ends within it.
                    if !empty {
                        write(Source::Zeroes { from: image_bytes }, &Progress::none())?;
                    }
                    let run = qemu::Run { stop: &stop, size_bytes, progress: &progress };
                    let image = qemu::Image { file: &file, path: &image.path, gated: &gated };
                    let done = qemu::import(&image, &target, empty, &run);
                    progress.clear();
                    done.map(|()| (Imported::default(), None))
                })
            }
            (_, source) => Box::new(move || {
                let done = write(source, &progress);
                progress.clear();
                done.map(|done| (done, Some(done.written_bytes)))
            }),
        };
        interruptible(&stop, blocking(work)).await
    }
}

/// No volume has smaller blocks.
const MIN_BLOCK_BYTES: u64 = 512;

/// The function that moves the bytes.
type Work = Box<dyn FnOnce() -> Result<(Imported, Option<u64>), Error> + Send>;

/// A volume that was made for this import goes again; another one is said to be incomplete.
async fn give_up(client: &mut Client, place: &Place, error: &Error) -> Error {
    let name = &place.volume.name;
    if !place.created {
        return error.with_note(&format!("volume {name} is incomplete"));
    }
    let request = DeleteVolumeRequest {
        name: name.clone(),
        pool: place.volume.pool.clone(),
        force: true,
        ..Default::default()
    };
    match client.delete_volume(request).await {
        Ok(_) => error.with_note(&format!("volume {name} was incomplete and is deleted")),
        Err(_) => {
            let note = format!("volume {name} is incomplete: `blockd del {name}` deletes it");
            error.with_note(&note)
        }
    }
}

fn human(answer: &Answer, context: &Context) -> String {
    let volume = &answer.volume;
    let size = |bytes| context.output.size(bytes);
    let padded = match answer.padded_bytes {
        0 => String::new(),
        padded => format!(", {padded} zero bytes added to make whole blocks"),
    };
    let written =
        answer.written_bytes.map_or(String::new(), |bytes| format!(", {} written", size(bytes)));
    let detected = if answer.format_detected { ", detected" } else { "" };
    format!(
        "{}: {} imported (format {}{detected}){written}, {} mapped{padded}\n{}\n",
        volume.name,
        size(answer.source_bytes),
        answer.format,
        size(amount(volume.mapped_bytes)),
        answer.uri
    )
}
