//! `blockd export`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_api::v1::{
    AttachVolumeRequest, DetachVolumeRequest, DiffVolumeRequest, FrontEnd, GetPoolRequest,
    GetVolumeRequest, Volume, VolumeKind,
};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use serde::Serialize;

use super::output::Output;
use super::remote::{Remote, SCHEME};
use super::{address, blocking, identity, interruptible, pool_id, qemu_export, settled};
use crate::answers;
use crate::client::Client;
use crate::duration::duration;
use crate::transfer::export::{self, Backup, Exported, Sink};
use crate::transfer::format::Format;
use crate::transfer::increment::{Header, Identity, Position, Writer};
use crate::transfer::link::{Outgoing, Prompt, Shared, lock};
use crate::transfer::nbd::Target;
use crate::transfer::progress::Progress;
use crate::transfer::qemu;
use crate::{Context, amount, names, set};

/// Records of a backup gather in a buffer of this size: a head has only 24 bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Copy a volume into a disk image
///
/// Ranges that were never written become holes of the file. A volume that is not attached is
/// attached read-only meanwhile, and stays so if it has other clients at the end. Clients can write
/// during the export: their writes may be in the image or not. With --since only the changes
/// between two snapshots are written, as a backup that `blockd import --apply` applies to a copy of
/// the older one; `--format backup` without --since makes the full backup that such a copy begins
/// with. A backup has checksums and names its source.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd export data data.img\n  \
                  blockd export data - | gzip > data.gz\n  \
                  blockd export data@tuesday tuesday.blkd --since data@monday")]
pub(crate) struct Export {
    /// The volume, NAME or POOL/NAME; a snapshot for a backup
    pub name: String,

    /// The image to be made; "-" is standard output, which can't be qcow2
    pub file: PathBuf,

    /// Format of the image [default: raw; backup with --since]
    #[arg(long, value_enum)]
    pub format: Option<Format>,

    /// Only what has changed since this snapshot
    #[arg(long, value_name = "SNAPSHOT")]
    pub since: Option<String>,

    /// The pool that the volume is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Replace a file that is there already, once the new one is whole
    #[arg(long)]
    pub force: bool,

    /// How long to wait for a daemon that has gone away
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub reconnect: Duration,
}

/// The output of `--json`, unless the image goes to standard output.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    file: PathBuf,
    size_bytes: u64,
    /// The bytes that the file takes on its file system; null when it is no file.
    allocated_bytes: Option<u64>,
    /// The base of an incremental backup; null where it is none.
    since: Option<String>,
    /// Bytes of data that were written.
    pub(super) written_bytes: Option<u64>,
    seconds: f64,
}

/// How the backup is written that `blockd send` makes.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// Only what comes behind this position.
    pub(super) resume: Option<Position>,
    /// The level of compression.
    pub(super) level: Option<i32>,
    /// The receiver, if the stream goes over TCP.
    pub(super) remote: Option<Remote>,
    /// Bytes of data that were sent in all attempts.
    pub(super) sent_bytes: Arc<AtomicU64>,
}

/// A copy that is to be made.
struct Job {
    /// Of a backup.
    header: Option<Header>,
    level: Option<i32>,
    link: Option<Shared>,
    written_bytes: Arc<AtomicU64>,
}

impl Stream {
    /// Checks that the position is one in this stream, and has the header say what is in it.
    pub(super) fn apply(&self, header: &mut Header) -> Result<(), Error> {
        header.is_compressed = self.level.is_some();
        let Some(position) = &self.resume else { return Ok(()) };
        let (of, size_bytes) = (&header.snapshot.name, header.snapshot.size_bytes);
        if position.ends != header.ends() {
            let allowed = format!(
                "a position of the stream of {} since {}, which is {}",
                shown(of),
                header.base.as_ref().map_or_else(|| "nothing".to_owned(), |one| shown(&one.name)),
                header.ends()
            );
            return Err(Error::invalid("resume", position, allowed));
        }
        let is_block = position.offset.is_multiple_of(header.block_bytes.into());
        if !is_block || position.offset > size_bytes {
            let allowed = format!("at whole blocks of the {size_bytes} bytes of {}", shown(of));
            return Err(Error::invalid("resume", position, allowed));
        }
        header.from_bytes = position.offset;
        Ok(())
    }

    fn job(&self, header: Option<Header>, link: Option<Shared>) -> Job {
        Job { header, level: self.level, link, written_bytes: Arc::clone(&self.sent_bytes) }
    }

    /// Bytes of data that earlier attempts have sent, if there were any.
    fn sent(&self) -> Option<u64> {
        Some(self.sent_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }
}

impl Export {
    /// A whole backup.
    pub(super) fn backup(name: &str, file: &Path, pool: &str, reconnect: Duration) -> Self {
        Self {
            name: name.to_owned(),
            file: file.to_owned(),
            format: Some(Format::Backup),
            since: None,
            pool: pool.to_owned(),
            force: false,
            reconnect,
        }
    }

    pub(crate) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name].into_iter().chain(&mut self.since))?;
        let answer = self.write(context, &Stream::default()).await?;
        self.say(context, &answer)
    }

    /// Makes the image, or the backup as `stream` has it.
    pub(super) async fn write(&self, context: &Context, stream: &Stream) -> Result<Answer, Error> {
        let to_stdout = self.file.as_os_str() == "-";
        let format = self.format()?;
        if to_stdout && format == Format::Qcow2 {
            return Err(Error::invalid("format", "qcow2", "raw or backup for standard output"));
        }
        let mut client = context.client().await?;
        let request = GetVolumeRequest { name: self.name.clone(), pool: self.pool.clone() };
        let mut volume = answers::volume(client.get_volume(request).await?.volume)?;
        if volume.front_end() == FrontEnd::Ublk {
            let device = &volume.device_path;
            let problem = format!("is a block device now: copy {device}, or detach it first");
            return Err(Error::in_use(format!("volume {}", volume.name), problem));
        }
        let mut header = match format {
            Format::Backup => Some(self.header(&mut client, &volume).await?),
            Format::Raw | Format::Qcow2 => None,
        };
        header.as_mut().map_or(Ok(()), |header| stream.apply(header))?;
        // Before anything is attached: most often it is this that is wrong.
        let (output, link) = match (&stream.remote, &mut header) {
            (Some(remote), Some(header)) => match remote.begin(header, &volume).await? {
                Some(link) => (Output::Stdout, Some(link)),
                None => return Ok(self.answer(&volume, stream.sent(), &Clock::start())),
            },
            _ => (Output::open(&self.file, self.force)?, None),
        };
        let asked_for = identity(&volume);
        let attached = !volume.attached;
        if attached {
            let request = AttachVolumeRequest {
                name: volume.name.clone(),
                pool: volume.pool.clone(),
                read_only: true,
                front_end: FrontEnd::Nbd.into(),
                ..Default::default()
            };
            volume = answers::volume(client.attach_volume(request).await?.volume)?;
        }
        let clock = Clock::start();
        let job = stream.job(header.clone(), link.clone());
        let copied = match self.copy(context, &volume, &output, job).await {
            Ok(copied) => {
                let base = header.as_ref().and_then(|header| header.base.as_ref());
                let same = self.check_same(&mut client, &asked_for, base).await;
                self.finish(copied, same).await
            }
            Err(error) => Err(error),
        };
        let detached = if attached { self.detach(&mut client, &volume).await } else { Ok(()) };
        let written_bytes = match (&stream.remote, link) {
            (Some(remote), Some(link)) => remote.finish(link, copied).await?,
            _ => copied.map_err(|error| error.with_note(&output.given_up()))?,
        };
        output.place()?;
        detached?;
        if !attached {
            settled(&mut client, &volume, volume.connections).await?;
        }
        Ok(self.answer(&volume, written_bytes, &clock))
    }

    fn format(&self) -> Result<Format, Error> {
        match (self.format, &self.since) {
            (None, None) => Ok(Format::Raw),
            (None | Some(Format::Backup), Some(_)) => Ok(Format::Backup),
            (Some(format), None) => Ok(format),
            (Some(format), Some(_)) => {
                let shown = format!("{format:?}").to_lowercase();
                Err(Error::invalid("format", shown, "backup with --since"))
            }
        }
    }

    /// The header of a backup of this snapshot.
    pub(super) async fn header(
        &self,
        client: &mut Client,
        volume: &Volume,
    ) -> Result<Header, Error> {
        let what = |volume: &Volume| format!("volume {}", shown(&volume.name));
        if volume.kind() != VolumeKind::Snapshot {
            let problem = "changes while it is copied: take a snapshot of it, and export that";
            return Err(Error::in_use(what(volume), problem));
        }
        let base = match &self.since {
            None => None,
            Some(since) => {
                if *since == volume.name {
                    return Err(Error::invalid("since", shown(since), "another snapshot"));
                }
                let request = GetVolumeRequest { name: since.clone(), pool: self.pool.clone() };
                let base = answers::volume(client.get_volume(request).await?.volume)?;
                if base.kind() != VolumeKind::Snapshot {
                    let problem = "is not a snapshot: an incremental export needs one as its base";
                    return Err(Error::in_use(what(&base), problem));
                }
                // Of another family: refused here, with both named.
                let request = DiffVolumeRequest {
                    name: volume.name.clone(),
                    pool: self.pool.clone(),
                    since: since.clone(),
                    from_bytes: volume.size_bytes,
                };
                client.diff_volume(request).await?;
                Some(base)
            }
        };
        let pool = GetPoolRequest { name: self.pool.clone() };
        let pool = answers::pool(client.get_pool(pool).await?.pool)?;
        Ok(Header {
            pool_id: pool_id(&pool)?,
            block_bytes: volume.block_size,
            snapshot: identity(volume),
            base: base.as_ref().map(identity),
            from_bytes: 0,
            is_compressed: false,
        })
    }

    /// Checks that the same snapshot was copied throughout, as it was looked up by name several
    /// times. Ids are not reused: a snapshot with this name and id now had both all the time.
    async fn check_same(
        &self,
        client: &mut Client,
        volume: &Identity,
        base: Option<&Identity>,
    ) -> Result<(), Error> {
        for Identity { id, name, .. } in [Some(volume), base].into_iter().flatten() {
            let request = GetVolumeRequest { name: name.clone(), pool: self.pool.clone() };
            let now = match client.get_volume(request).await {
                Ok(answer) => Some(answers::volume(answer.volume)?.id),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            if now != Some(*id) {
                let problem = match now {
                    Some(_) => "was replaced by another one while it was exported",
                    None => "was deleted while it was exported",
                };
                return Err(Error::in_use(format!("volume {}", shown(name)), problem));
            }
        }
        Ok(())
    }

    /// Writes the end of a backup, unless something else was copied. Returns the bytes that were
    /// written.
    async fn finish(
        &self,
        copied: Option<Exported>,
        same: Result<(), Error>,
    ) -> Result<Option<u64>, Error> {
        let path = self.file.clone();
        // A backup that is dropped blocks as well, while its buffer is written.
        blocking(move || {
            let Some(Exported { written_bytes, backup }) = copied else {
                return same.map(|()| None);
            };
            same?;
            let finished = backup.map_or(Ok(()), |backup| backup.finish().map(drop));
            finished.map_err(|source| Error::file("write", &path, source))?;
            Ok(Some(written_bytes))
        })
        .await
    }

    /// Detaches the volume, unless it has other clients by now.
    async fn detach(&self, client: &mut Client, volume: &Volume) -> Result<(), Error> {
        settled(client, volume, 0).await?;
        let (name, pool) = (volume.name.clone(), volume.pool.clone());
        match client.detach_volume(DetachVolumeRequest { name, pool, force: false }).await {
            Err(error) if error.kind() == ErrorKind::InUse => {
                set::warn(&[format!("it stays attached: {error}")]);
                Ok(())
            }
            detached => detached.map(drop),
        }
    }

    async fn copy(
        &self,
        context: &Context,
        volume: &Volume,
        output: &Output,
        Job { header, level, link, written_bytes }: Job,
    ) -> Result<Option<Exported>, Error> {
        let stop = link.as_ref().map_or_else(Arc::default, |link| Arc::clone(lock(link).stop()));
        let size_bytes = amount(volume.size_bytes);
        let progress = Progress::shown("exporting", size_bytes, !context.output.is_json());
        let work = {
            let (stop, patience, path) = (Arc::clone(&stop), self.reconnect, self.file.clone());
            let (source, qemu_source) = (address(volume)?, qemu_export(volume, patience));
            let (format, file) = (self.format()?, output.file()?);
            let written_at = output.written_at(&self.file).to_owned();
            let target = match &self.since {
                Some(since) => Target::since(source, size_bytes, since),
                None => Target::new(source, size_bytes),
            };
            move || {
                let done = match format {
                    Format::Raw | Format::Backup => {
                        let export = export::Export {
                            source: &target,
                            size_bytes,
                            from_bytes: header.as_ref().map_or(0, |header| header.from_bytes),
                            name: &path.display().to_string(),
                            patience,
                            stop: &stop,
                            progress: &progress,
                            written_bytes: &written_bytes,
                        };
                        let sink = match header {
                            // The base may have had data there, and a receiver has to see that
                            // the stream goes on, and how far.
                            Some(header) => {
                                let has_zeroes = header.base.is_some() || link.is_some();
                                let writer = backup(out(file, link), &header, level, &path);
                                writer.map(|writer| Sink::Increment(writer, has_zeroes))
                            }
                            None => sink(file, size_bytes, &path),
                        };
                        sink.and_then(|sink| export.run(sink)).map(Some)
                    }
                    Format::Qcow2 => qemu_source.and_then(|source| {
                        let run = qemu::Run { stop: &stop, size_bytes, progress: &progress };
                        qemu::export(&source, &written_at, &run).map(|()| None)
                    }),
                };
                progress.clear();
                done
            }
        };
        interruptible(&stop, blocking(work)).await
    }

    /// No bytes were written where the receiver has the snapshot already.
    fn answer(&self, volume: &Volume, written_bytes: Option<u64>, clock: &Clock) -> Answer {
        let metadata = std::fs::metadata(&self.file).ok().filter(std::fs::Metadata::is_file);
        Answer {
            file: self.file.clone(),
            size_bytes: amount(volume.size_bytes),
            allocated_bytes: metadata.map(|metadata| metadata.blocks() * 512),
            since: self.since.clone(),
            written_bytes,
            seconds: clock.elapsed().as_secs_f64(),
        }
    }

    /// Prints the answer, unless the image went to standard output.
    pub(super) fn say(&self, context: &Context, answer: &Answer) -> Result<(), Error> {
        if self.file.as_os_str() == "-" {
            return Ok(());
        }
        let is_remote = self.file.as_os_str().as_encoded_bytes().starts_with(SCHEME.as_bytes());
        context.output.either(answer, || {
            let size = |bytes| context.output.size(bytes);
            let (name, file) = (&self.name, answer.file.display());
            let written = answer.written_bytes.map(size);
            match (is_remote, &answer.since, written) {
                (true, _, None) => format!("{name}: {file} has it already\n"),
                (true, None, Some(bytes)) => format!("{name}: {bytes} sent to {file}\n"),
                (true, Some(since), Some(bytes)) => {
                    format!("{name}: {bytes} since {since} sent to {file}\n")
                }
                (false, Some(since), written) => {
                    let changed = written.unwrap_or_else(|| size(0));
                    format!("{name}: {changed} since {since} exported to {file}\n")
                }
                (false, None, _) => {
                    let takes =
                        answer.allocated_bytes.map(|bytes| format!(", takes {}", size(bytes)));
                    let size = size(answer.size_bytes);
                    format!("{name}: {size} exported to {file}{}\n", takes.unwrap_or_default())
                }
            }
        })
    }
}

/// Where the bytes go: a regular file gets its size, and with it one large hole.
fn sink(output: Option<File>, size_bytes: u64, path: &Path) -> Result<Sink, Error> {
    let Some(file) = output else {
        return Ok(Sink::Stream(Box::new(Stdout)));
    };
    let failed = |source| Error::file("write", path, source);
    if !file.metadata().map_err(failed)?.is_file() {
        return Ok(Sink::Stream(Box::new(Special(file))));
    }
    file.set_len(size_bytes).map_err(failed)?;
    Ok(Sink::File(file))
}

/// Where a backup goes.
fn out(file: Option<File>, link: Option<Shared>) -> Box<dyn Write + Send> {
    match (link, file) {
        (Some(link), _) => Box::new(Prompt::new(Outgoing(link))),
        (None, Some(file)) => Box::new(BufWriter::with_capacity(BUFFER_BYTES, Special(file))),
        (None, None) => Box::new(BufWriter::with_capacity(BUFFER_BYTES, Stdout)),
    }
}

/// Begins a backup.
fn backup(
    out: Box<dyn Write + Send>,
    header: &Header,
    level: Option<i32>,
    path: &Path,
) -> Result<Backup, Error> {
    let writer = Writer::begin(out, header).and_then(|writer| match level {
        Some(level) => writer.compressing(level),
        None => Ok(writer),
    });
    writer.map_err(|source| Error::file("write", path, source))
}

/// A block device, or whatever else has a path and is no regular file. Written data is durable
/// after a flush, where the file supports that.
struct Special(File);

impl Write for Special {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.write(data)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self.0.sync_all() {
            // A pipe or a terminal keeps nothing.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
            result => result,
        }
    }
}

/// Standard output, locked for each write.
struct Stdout;

impl Write for Stdout {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        std::io::stdout().write(data)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stdout().flush()
    }
}
