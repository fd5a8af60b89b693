//! `blockd import --apply`: a backup onto the copy that it begins with.
//!
//! The content of a copy is recorded by a snapshot of it, whose name has the identity of the
//! snapshot that was copied: so it is known as long as the copy exists, whichever daemon serves it.
//! The difference to that snapshot shows whether the copy was written since.

mod find;
pub(super) mod receive;

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use blockd_api::v1::{
    AttachVolumeRequest, CreateSnapshotsRequest, DeleteVolumeRequest, DetachVolumeRequest,
    DiffVolumeRequest, FrontEnd, GetPoolRequest, GetVolumeRequest, RangeState, ResizeVolumeRequest,
    RollbackVolumeRequest, SnapshotMember, Volume, VolumeKind,
};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::names::check_name;
use blockd_media::units;
use serde::Serialize;

use super::{Import, address, blocking, interruptible, pool_id, settled};
use crate::answers;
use crate::client::Client;
use crate::transfer::Stop;
use crate::transfer::awaited::Awaited;
use crate::transfer::import::{self, Imported, Source};
use crate::transfer::increment::{Header, Identity, Reader, Record};
use crate::transfer::nbd::Target;
use crate::transfer::progress::Progress;
use crate::{Context, amount};

use find::Found;

/// The size of a read of the file.
const BUFFER_BYTES: usize = 1 << 20;

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Answer {
    /// False: the volume holds this already.
    changed: bool,
    created: bool,
    /// The snapshot that the file begins with; null where it begins with nothing.
    base: Option<String>,
    /// The snapshot that the volume is a copy of now.
    snapshot: String,
    /// The volume's own snapshot that records this; null with --force on a volume that is no copy.
    marker: Option<String>,
    written_bytes: u64,
    seconds: f64,
    volume: Volume,
}

type Input = Reader<Box<dyn Read + Send>>;

/// A backup that was looked at.
struct Backup {
    input: Input,
    /// Bytes of the volume that it names; none of a pipe, which can't be read twice.
    named_bytes: Option<u64>,
}

/// The volume that is to be changed.
struct Place {
    volume: Volume,
    created: bool,
    /// A snapshot that it holds exactly, to go back to.
    known: Option<String>,
}

/// Applies a backup.
pub(super) async fn run(asked: &Import, context: &Context) -> Result<(), Error> {
    let stop = Arc::new(Stop::default());
    let backup = {
        let (path, stop) = (asked.file.clone(), Arc::clone(&stop));
        let wanted = !context.output.is_json();
        interruptible(&Arc::clone(&stop), blocking(move || open(&path, wanted, &stop))).await?
    };
    let header = backup.input.header().clone();
    if header.from_bytes > 0 {
        let problem = "continues an earlier stream, which `blockd receive` is for";
        return Err(Error::in_use(asked.file.display().to_string(), problem));
    }
    let clock = Clock::start();
    let mut apply = Apply::begin(asked, context, header).await?;
    let _claim = receive::claimed(&apply).await?;
    let answer = match apply.find().await? {
        Found::Done(volume, marker) => apply.answer(volume, Some(marker), &clock),
        Found::Place(place) => {
            let created = place.created;
            let (volume, marker, written_bytes) =
                apply.change(place, backup, context, &stop).await?;
            let answer = apply.answer(volume, marker, &clock);
            Answer { changed: true, created, written_bytes, ..answer }
        }
    };
    context.output.either(&answer, || human(&answer, asked, context))
}

/// Reads the file to its end, so that nothing is written of one that is damaged. Of a pipe only the
/// header can be looked at.
fn open(path: &Path, wanted: bool, stop: &Arc<Stop>) -> Result<Backup, Error> {
    if path.as_os_str() == "-" {
        return begun(Awaited::new(|| Ok(std::io::stdin()), stop), "standard input", stop);
    }
    let failed = |source| Error::file("open", path, source);
    let metadata = std::fs::metadata(path).map_err(failed)?;
    let name = path.display().to_string();
    if !metadata.is_file() {
        let path = path.to_owned();
        return begun(Awaited::new(move || File::open(path), stop), &name, stop);
    }
    let file = File::open(path).map_err(failed)?;
    let buffered =
        |file| -> Box<dyn Read + Send> { Box::new(BufReader::with_capacity(BUFFER_BYTES, file)) };
    let mut again = file.try_clone().map_err(failed)?;
    let mut reader = Reader::begin(buffered(file), &name)?;
    let progress = Progress::shown("checking", metadata.len(), wanted);
    let mut named_bytes = 0;
    while let Some(record) = reader.next()? {
        named_bytes += match record {
            Record::Data { data, .. } => data.len() as u64,
            Record::Zeroes { len, .. } => len,
        };
        progress.set(reader.read_bytes());
        stop.check()?;
    }
    progress.clear();
    again.rewind().map_err(|source| Error::file("read", path, source))?;
    Ok(Backup { input: Reader::begin(buffered(again), &name)?, named_bytes: Some(named_bytes) })
}

/// A backup that comes through a pipe, its header read.
fn begun(input: Awaited, name: &str, stop: &Stop) -> Result<Backup, Error> {
    let input: Box<dyn Read + Send> = Box::new(input);
    let begun = Reader::begin(input, name);
    // A read that fails because it was stopped is no fault of the input.
    stop.check()?;
    Ok(Backup { input: begun?, named_bytes: None })
}

struct Apply<'a> {
    asked: &'a Import,
    client: Client,
    header: Header,
    /// Of the pool that the volume is in.
    pool_id: [u8; 16],
    /// Whether the command can be forced, for errors.
    is_forcible: bool,
}

impl<'a> Apply<'a> {
    async fn begin(asked: &'a Import, context: &Context, header: Header) -> Result<Self, Error> {
        let mut client = context.client().await?;
        let pool = GetPoolRequest { name: asked.pool.clone() };
        let pool_id = pool_id(&answers::pool(client.get_pool(pool).await?.pool)?)?;
        let apply = Self { asked, client, header, pool_id, is_forcible: true };
        let marker = apply.marker(&apply.header.snapshot);
        match check_name(&marker) {
            Ok(()) => Ok(apply),
            Err(allowed) => {
                let field = "the name of the snapshot to be taken";
                Err(Error::invalid(field, shown(&marker), allowed))
            }
        }
    }
}

impl Apply<'_> {
    /// The name of the snapshot that marks a volume as a copy.
    fn marker(&self, of: &Identity) -> String {
        let (volume, mark) = (&self.asked.name, self.mark_of(of));
        let tag = of.name.rsplit('@').next().unwrap_or_default();
        let whole = format!("{volume}@{tag}{mark}");
        match check_name(&whole) {
            Ok(()) => whole,
            Err(_) => format!("{volume}@{mark}"),
        }
    }

    /// How the names of such snapshots end, whatever the volume: the beginning of the pool's id,
    /// the id of what it is a copy of, and when that was made.
    fn mark_of(&self, of: &Identity) -> String {
        let begin = self.mark_without_time(of);
        if of.made_unix_ms == 0 { begin } else { format!("{begin}-{:x}", of.made_unix_ms) }
    }

    fn mark_without_time(&self, of: &Identity) -> String {
        format!("{}{}", self.mark_of_pool(), of.id)
    }

    fn mark_of_pool(&self) -> String {
        format!(".{}-", units::hex(&self.header.pool_id[..6]))
    }

    fn what(&self) -> String {
        format!("volume {}", shown(&self.asked.name))
    }

    /// The snapshot by which the volume is a copy of something, and in how many bytes it differs
    /// from it by now. A snapshot of a copy that this one is a clone of will do, and so will the
    /// thing itself.
    async fn copies(
        &mut self,
        volume: &Volume,
        of: &Identity,
        all: &[Volume],
    ) -> Result<Option<(String, u64)>, Error> {
        let here = self.pool_id == self.header.pool_id;
        let mut best = None;
        for one in all.iter().filter(|one| one.kind() == VolumeKind::Snapshot) {
            let is_itself = here && one.id == of.id && of.fits_time(amount(one.made_unix_ms));
            let is_it = is_itself || self.is_marked(&one.name, of);
            if !is_it || amount(one.size_bytes) != of.size_bytes {
                continue;
            }
            let Some(changed) = changed_bytes(&mut self.client, volume, one).await? else {
                continue;
            };
            if best.as_ref().is_none_or(|(_, least)| changed < *least) {
                best = Some((one.name.clone(), changed));
            }
        }
        Ok(best)
    }

    /// Writes what the file has. The volume afterwards, the snapshot that was taken, and the bytes
    /// that were written.
    async fn change(
        &mut self,
        place: Place,
        backup: Backup,
        context: &Context,
        stop: &Arc<Stop>,
    ) -> Result<(Volume, Option<String>, u64), Error> {
        let is_copy = place.created || place.known.is_some() || self.header.base.is_none();
        let attached = place.volume.attached;
        let done = match self.write(&place, backup, context, stop).await {
            Ok(done) => done,
            Err(error) => return Err(self.give_up(&place, &error).await),
        };
        let volume = settled(&mut self.client, &place.volume, 0).await?;
        if volume.connections > 0 {
            let error =
                Error::in_use(self.what(), "has other clients, which may have written".to_owned());
            let of = shown(&self.header.snapshot.name);
            let note = format!("it holds {of} otherwise, and no snapshot says so");
            return Err(error.with_note(&note));
        }
        if !attached && !place.created {
            self.detach().await?;
        }
        // With --force onto another base, the content is unknown.
        let marker =
            if is_copy && !self.is_forced(&place) { Some(self.mark(&volume).await?) } else { None };
        let request = GetVolumeRequest { name: volume.name, pool: volume.pool };
        let volume = answers::volume(self.client.get_volume(request).await?.volume)?;
        Ok((volume, marker, done.written_bytes))
    }

    /// Whether the volume was not empty, where the file begins with an empty one.
    fn is_forced(&self, place: &Place) -> bool {
        self.header.base.is_none() && !place.created && place.volume.valid_bytes > 0
    }

    async fn write(
        &mut self,
        place: &Place,
        backup: Backup,
        context: &Context,
        stop: &Arc<Stop>,
    ) -> Result<Imported, Error> {
        let size_bytes = self.header.snapshot.size_bytes;
        let (name, pool) = (self.asked.name.clone(), self.asked.pool.clone());
        if amount(place.volume.size_bytes) != size_bytes {
            let request = ResizeVolumeRequest {
                name: name.clone(),
                pool: pool.clone(),
                size_bytes: units::to_wire(size_bytes),
                shrink: true,
                ..Default::default()
            };
            self.client.resize_volume(request).await?;
        }
        let request = AttachVolumeRequest {
            name,
            pool,
            front_end: FrontEnd::Nbd.into(),
            ..Default::default()
        };
        let volume = answers::volume(self.client.attach_volume(request).await?.volume)?;
        let target = Target::new(address(&volume)?, size_bytes);
        let block_bytes = usize::try_from(volume.block_size).unwrap_or(512).max(512);
        let total = backup.named_bytes.unwrap_or(size_bytes);
        let progress = Progress::shown("applying", total, !context.output.is_json());
        let (patience, stop_there) = (self.asked.reconnect, Arc::clone(stop));
        let work = move || {
            let import = import::Import {
                target: &target,
                size_bytes,
                block_bytes,
                empty: false,
                is_first: true,
                patience,
                stop: &stop_there,
                progress: &progress,
            };
            let mut input = backup.input;
            let done = import.run(Source::Records(Box::new(move || input.next())));
            progress.clear();
            done
        };
        interruptible(stop, blocking(work)).await
    }

    async fn detach(&mut self) -> Result<(), Error> {
        let (name, pool) = (self.asked.name.clone(), self.asked.pool.clone());
        let request = DetachVolumeRequest { name, pool, force: true };
        self.client.detach_volume(request).await.map(drop)
    }

    /// Takes the snapshot that says what the volume holds.
    async fn mark(&mut self, volume: &Volume) -> Result<String, Error> {
        let (marker, pool) = (self.marker(&self.header.snapshot), volume.pool.clone());
        // One that was taken when the volume held this before says nothing of it now.
        let request = DeleteVolumeRequest {
            name: marker.clone(),
            pool: pool.clone(),
            force: false,
            ..Default::default()
        };
        self.client.delete_volume(request).await?;
        let members = vec![SnapshotMember { volume: volume.name.clone(), name: marker.clone() }];
        self.client
            .create_snapshots(CreateSnapshotsRequest { pool, members, ..Default::default() })
            .await?;
        Ok(marker)
    }

    /// The volume goes back to what it held, where that is known.
    async fn give_up(&mut self, place: &Place, error: &Error) -> Error {
        let (name, pool) = (place.volume.name.clone(), place.volume.pool.clone());
        if place.created {
            let request =
                DeleteVolumeRequest { name: name.clone(), pool, force: true, ..Default::default() };
            return match self.client.delete_volume(request).await {
                Ok(_) => error.with_note(&format!("volume {name} was incomplete and is deleted")),
                Err(_) => error.with_note(&format!("volume {name} is incomplete")),
            };
        }
        let Some(snapshot) = place.known.clone() else {
            if !place.volume.attached {
                let _ = self.detach().await;
            }
            return error.with_note(&format!("volume {name} is incomplete"));
        };
        let note = format!("volume {name} is rolled back to {snapshot}");
        let request = RollbackVolumeRequest { name: name.clone(), pool, snapshot, force: true };
        let rolled_back = self.client.rollback_volume(request).await;
        if !place.volume.attached {
            // Its state before; if it stays attached, nothing is lost.
            let _ = self.detach().await;
        }
        match rolled_back {
            Ok(_) => error.with_note(&note),
            Err(_) => error.with_note(&format!("volume {name} is incomplete")),
        }
    }

    /// The answer that nothing was to be done, with the time that the check took.
    fn answer(&self, volume: Volume, marker: Option<String>, clock: &Clock) -> Answer {
        Answer {
            changed: false,
            created: false,
            base: self.header.base.as_ref().map(|base| base.name.clone()),
            snapshot: self.header.snapshot.name.clone(),
            marker,
            written_bytes: 0,
            seconds: clock.elapsed().as_secs_f64(),
            volume,
        }
    }
}

/// The number of bytes in which a volume differs from a snapshot; `None` where they are of
/// different families. Another size is a difference, too: data that a shrunk volume has lost is
/// in no range of it.
pub(super) async fn changed_bytes(
    client: &mut Client,
    volume: &Volume,
    since: &Volume,
) -> Result<Option<u64>, Error> {
    let request = DiffVolumeRequest {
        name: volume.name.clone(),
        pool: volume.pool.clone(),
        since: since.name.clone(),
        from_bytes: 0,
    };
    let mut stream = match client.diff_volume(request).await {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::InUse => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut changed = volume.size_bytes.abs_diff(since.size_bytes);
    while let Some(part) = client.next(&mut stream).await? {
        let differs = part.ranges.iter().filter(|one| one.state() != RangeState::Same);
        changed += differs.map(|one| amount(one.length_bytes)).sum::<u64>();
    }
    Ok(Some(changed))
}

fn human(answer: &Answer, asked: &Import, context: &Context) -> String {
    let (volume, of) = (&asked.name, shown(&answer.snapshot));
    let marker = answer.marker.as_deref();
    match (answer.changed, marker) {
        (false, _) => format!("{volume}: holds {of} already\n"),
        (true, Some(marker)) => {
            let size = context.output.size(answer.written_bytes);
            format!("{volume}: {size} written, holds {of} now; snapshot {marker}\n")
        }
        (true, None) => {
            let size = context.output.size(answer.written_bytes);
            format!("{volume}: {size} written; it was no copy of what the backup begins with\n")
        }
    }
}
