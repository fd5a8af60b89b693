//! `blockd receive`: a stream into a volume that changes in one step, at the end.
//!
//! All writes go to a hidden volume: a new one for a whole stream, a clone of the base for an
//! increment. A label of it says how far it is durable, so that a stream that was cut off goes on
//! there. At the end a snapshot of it is taken. Then it is renamed, or the volume rolled back to
//! that snapshot: each is one record of the pool's log. A receive that ended before that record is
//! finished by another one, which finds the hidden volume; behind it only the hidden volume is
//! left, to be deleted.

mod listen;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockd_api::v1::{
    AddVolumeRequest, AttachVolumeRequest, CloneVolumesRequest, ConfigureVolumeRequest,
    CreateVolumeRequest, DeleteVolumeRequest, DetachVolumeRequest, FrontEnd, GetVolumeRequest,
    RenameVolumeRequest, ResizeVolumeRequest, RollbackVolumeRequest, Volume, VolumeKind,
};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::names::check_name;
use blockd_media::units;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;

use super::super::{Import, address, blocking, interruptible, settled, taken};
use super::{Answer, Apply, Input, human, open};
use crate::client::Client;
use crate::duration::duration;
use crate::labels::Pairs;
use crate::transfer::Stop;
use crate::transfer::import::{self, Source};
use crate::transfer::increment::{Position, Record};
use crate::transfer::link::TlsArguments;
use crate::transfer::nbd::Target;
use crate::transfer::port::{self, Port};
use crate::transfer::progress::Progress;
use crate::{Context, amount, answers, names, set};

/// The label of a hidden volume that has the [`Position`].
const LABEL: &str = "blockd.io/receive";

/// Receive a stream of `blockd send` into a volume
///
/// A whole stream makes a new volume; one since an earlier snapshot changes the volume that holds
/// exactly that snapshot, and was not written since. Until all has come the volume stays as it is:
/// the data goes to a hidden volume, .receive-NAME, and NAME changes at once at the end. Afterwards
/// a snapshot marks what the volume holds, for the next stream. A receive that was cut off keeps
/// what it has: --position prints what to give `blockd send --resume`, and `blockd del
/// .receive-NAME` gives it up. With --listen the streams come over TCP, from `blockd send
/// tcp://HOST:PORT`, and go on by themselves after a cut.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd receive copy monday.blkd\n  \
                  blockd send data@monday | ssh HOST blockd receive copy\n  \
                  blockd receive copy --position\n  \
                  blockd receive --listen [::]:7010 --tls-cert host.pem --tls-key host.key \
                  --tls-ca ca.pem")]
pub(crate) struct Receive {
    /// The volume to be made or changed, NAME or POOL/NAME; without it --listen takes any, under
    /// the name that its sender says
    #[arg(required_unless_present = "listen")]
    pub name: Option<String>,

    /// Where from: a file, or "-" for standard input
    #[arg(default_value = "-")]
    pub source: PathBuf,

    /// Wait here for senders, one after the other, until a signal. Without certificates only at
    /// an address of this host
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["source", "position"])]
    pub listen: Option<String>,

    /// Keep only the newest N snapshots of NAME that mark what came from the same pool; delete
    /// older ones after a stream [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub keep: Option<u32>,

    /// End after the first stream that was received whole
    #[arg(long, requires = "listen")]
    pub once: bool,

    /// Print how far an earlier receive came, and receive nothing
    #[arg(long, conflicts_with = "source")]
    pub position: bool,

    /// How much data may have to be sent again after a cut: each time as much has come it is
    /// made durable
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub sync_every: String,

    /// The pool that the volume is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// How long to wait for a daemon that has gone away, or for space in a full pool, where it is
    /// 30 s at the least
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub reconnect: Duration,

    #[command(flatten)]
    pub tls: TlsArguments,
}

/// The output of `--position --json`.
#[derive(Debug, Serialize)]
struct Progressed {
    position: String,
    received_bytes: u64,
    size_bytes: u64,
}

impl Receive {
    pub(crate) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, &mut self.name)?;
        self.name.iter().try_for_each(|name| names::check_visible(name))?;
        let sync_bytes = units::parse_size("sync-every", &self.sync_every)?;
        if sync_bytes == 0 {
            return Err(Error::invalid("sync-every", 0, "more than 0"));
        }
        if let Some(address) = self.listen.clone() {
            return listen::run(&self, &address, sync_bytes, context).await;
        }
        let Some(name) = self.name.clone() else { return Err(Error::missing("NAME", "given")) };
        if self.position {
            return self.say_position(&name, context).await;
        }
        let stop = Arc::new(Stop::default());
        let backup = {
            let (path, stop) = (self.source.clone(), Arc::clone(&stop));
            let wanted = !context.output.is_json();
            interruptible(&Arc::clone(&stop), blocking(move || open(&path, wanted, &stop))).await?
        };
        let asked = Import::backup(self.source, name, self.pool, self.reconnect);
        let clock = Clock::start();
        let header = backup.input.header().clone();
        let apply = Apply::begin(&asked, context, header).await?;
        let mut receiver = Receiver::new(apply, sync_bytes, !context.output.is_json()).await?;
        receiver.keep = self.keep;
        let answer = match receiver.prepare().await? {
            Prepared::Done(volume, marker) => receiver.apply.answer(volume, Some(marker), &clock),
            Prepared::Hidden(hidden) => receiver.take(hidden, backup.input, &stop, &clock).await?,
        };
        context.output.either(&answer, || human(&answer, &asked, context))
    }

    async fn say_position(&self, name: &str, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let hidden = found(&mut client, &names::hidden(name), &self.pool).await?;
        let hidden = hidden.ok_or_else(|| Error::not_found("partly received volume", name))?;
        let position = position(&hidden).ok_or_else(|| unreadable(&hidden))?;
        let progressed = Progressed {
            received_bytes: position.offset,
            position: position.to_string(),
            size_bytes: amount(hidden.size_bytes),
        };
        context.output.either(&progressed, || format!("{}\n", progressed.position))
    }
}

/// The state before a stream is read.
enum Prepared {
    /// The volume has the content of the stream already, as a snapshot of it records.
    Done(Volume, String),
    Hidden(Volume),
}

/// A stream that is received.
struct Receiver<'a> {
    apply: Apply<'a>,
    /// The name of the hidden volume.
    name: String,
    /// Data between two positions.
    sync_bytes: u64,
    /// Whether progress is shown.
    shows: bool,
    /// How many snapshots that record a content stay; all where it is absent.
    keep: Option<u32>,
    /// Held by one receive of the volume, as long as it lives.
    _claim: Option<Flock<File>>,
}

impl<'a> Receiver<'a> {
    async fn new(apply: Apply<'a>, sync_bytes: u64, shows: bool) -> Result<Self, Error> {
        let name = names::hidden(&apply.asked.name);
        if let Err(allowed) = check_name(&name) {
            return Err(Error::invalid("the name of the hidden volume", shown(&name), allowed));
        }
        let claim = claimed(&apply).await?;
        Ok(Self {
            apply: Apply { is_forcible: false, ..apply },
            name,
            sync_bytes,
            shows,
            keep: None,
            _claim: claim,
        })
    }

    /// Receives what is left of a stream.
    async fn take(
        &mut self,
        hidden: Volume,
        input: Input,
        stop: &Arc<Stop>,
        clock: &Clock,
    ) -> Result<Answer, Error> {
        let created = self.apply.header.base.is_none();
        let written_bytes = self.fill(&hidden, input, stop).await?;
        let (volume, marker) = self.show(hidden).await?;
        let retained = self.retain(&volume).await;
        warned("older snapshots of it stay", retained);
        let answer = self.apply.answer(volume, Some(marker), clock);
        Ok(Answer { changed: true, created, written_bytes, ..answer })
    }

    /// Finds what an earlier receive has left, or makes the hidden volume. Refuses a stream that
    /// the volume is not for.
    async fn prepare(&mut self) -> Result<Prepared, Error> {
        let (name, pool) = (self.apply.asked.name.clone(), self.apply.asked.pool.clone());
        let volume = found(&mut self.apply.client, &name, &pool).await?;
        let hidden = found(&mut self.apply.client, &self.name, &pool).await?;
        let known = match &volume {
            None if self.apply.header.base.is_some() => {
                return Err(Error::not_found("volume", &name));
            }
            None => None,
            Some(volume) => {
                self.apply.check_usable(volume)?;
                let all = self.apply.all(volume).await?;
                let after = self.apply.header.snapshot.clone();
                if let Some((marker, 0)) = self.apply.copies(volume, &after, &all).await? {
                    // Another receive's, or the beginning of another stream, stays.
                    let is_left = match &hidden {
                        Some(hidden) if self.position(hidden).is_some() => {
                            settled(&mut self.apply.client, hidden, 0).await?.connections == 0
                        }
                        _ => false,
                    };
                    if is_left {
                        self.delete_hidden().await?;
                    }
                    self.unlabel(volume).await?;
                    return Ok(Prepared::Done(volume.clone(), marker));
                }
                if self.apply.header.base.is_none() {
                    let problem = "exists, and the stream begins with nothing: choose another name";
                    return Err(taken(&name, problem));
                }
                self.apply.check_base(volume, &all).await?
            }
        };
        let received = match &hidden {
            Some(hidden) => {
                self.check_unused(hidden).await?;
                self.position(hidden)
            }
            None => None,
        };
        let from_bytes = self.apply.header.from_bytes;
        let so_far = received.as_ref().map_or(0, |position| position.offset);
        if from_bytes > so_far {
            let of = shown(&self.apply.header.snapshot.name);
            let problem = format!(
                "has {so_far} bytes of {of} so far, and the stream begins at {from_bytes}: send it \
                 with the --resume that `blockd receive --position` prints"
            );
            return Err(Error::in_use(self.apply.what(), problem));
        }
        let hidden = match (received, hidden) {
            (Some(_), Some(hidden)) => hidden,
            _ => {
                self.delete_hidden().await?;
                self.make(known).await?
            }
        };
        self.sized(hidden).await.map(Prepared::Hidden)
    }

    /// How far a hidden volume is, if it is this stream's.
    fn position(&self, hidden: &Volume) -> Option<Position> {
        position(hidden).filter(|one| one.ends == self.apply.header.ends())
    }

    /// Makes the hidden volume.
    async fn make(&mut self, known: Option<String>) -> Result<Volume, Error> {
        let (name, pool) = (self.name.clone(), self.apply.asked.pool.clone());
        let header = &self.apply.header;
        let labels = label(&Position { offset: 0, ends: header.ends() });
        let Some(snapshot) = known else {
            let create = CreateVolumeRequest {
                name,
                pool,
                size_bytes: units::to_wire(header.snapshot.size_bytes),
                limit_bytes: units::to_wire(header.snapshot.size_bytes),
                block_size: header.block_bytes,
                ..Default::default()
            };
            let configure = ConfigureVolumeRequest { set_labels: labels, ..Default::default() };
            let request = AddVolumeRequest {
                create: Some(create),
                configure: Some(configure),
                ..Default::default()
            };
            let made = self.apply.client.add_volume(request).await;
            let made = made.map_err(|error| self.resizable(self.apply.of_size(error)))?;
            if !made.created {
                return Err(claimed_by_another(&self.apply));
            }
            return answers::volume(made.volume);
        };
        let names = vec![name];
        let request = CloneVolumesRequest { pool, snapshot, names, labels, ..Default::default() };
        let mut made = self.apply.client.clone_volumes(request).await?;
        if made.created == 0 {
            return Err(claimed_by_another(&self.apply));
        }
        answers::volume(made.volumes.pop())
    }

    /// The hidden volume with the size of the snapshot.
    async fn sized(&mut self, hidden: Volume) -> Result<Volume, Error> {
        let size_bytes = units::to_wire(self.apply.header.snapshot.size_bytes);
        if hidden.size_bytes == size_bytes {
            return Ok(hidden);
        }
        let (name, pool) = (hidden.name, hidden.pool);
        let request =
            ResizeVolumeRequest { name, pool, size_bytes, shrink: true, ..Default::default() };
        // The sub-blocks of the sender's pool are smaller.
        let resized = self.apply.client.resize_volume(request).await;
        let resized = answers::volume(resized.map_err(|error| self.resizable(error))?.volume)?;
        if resized.size_bytes != size_bytes {
            return Err(self.resizable(self.apply.rounded(amount(resized.size_bytes))));
        }
        Ok(resized)
    }

    /// An error of a size that volumes here can't have, with what helps.
    fn resizable(&self, error: Error) -> Error {
        let of = shown(&self.apply.header.snapshot.name);
        let note = format!(
            "delete {of} at the sender, resize its volume to such a size, and send a new snapshot"
        );
        if error.kind() == ErrorKind::Invalid { error.with_note(&note) } else { error }
    }

    /// Writes the stream to the hidden volume, piece by piece: each is durable before the position
    /// behind it is. Returns the bytes that were written.
    async fn fill(
        &mut self,
        hidden: &Volume,
        input: Input,
        stop: &Arc<Stop>,
    ) -> Result<u64, Error> {
        let request = AttachVolumeRequest {
            name: hidden.name.clone(),
            pool: hidden.pool.clone(),
            front_end: FrontEnd::Nbd.into(),
            ..Default::default()
        };
        let volume = answers::volume(self.apply.client.attach_volume(request).await?.volume)?;
        self.check_same(hidden, &volume)?;
        let filled = self.fill_attached(&volume, input, stop).await;
        // Connections of a transfer that failed may still be there.
        let settled = settled(&mut self.apply.client, hidden, 0).await;
        if let Err((error, true)) = &filled {
            return Err(match self.delete_hidden().await {
                Ok(()) => error.with_note("what has come of it is deleted: send it again"),
                Err(_) => error.with_note(&format!("delete {} before it is sent again", self.name)),
            });
        }
        let (name, pool) = (hidden.name.clone(), hidden.pool.clone());
        let request = DetachVolumeRequest { name, pool, force: true };
        let detached = self.apply.client.detach_volume(request).await;
        let written_bytes = filled.map_err(|(error, _)| {
            let note = format!(
                "what has come stays: `blockd receive {} --position` says how far it is",
                self.apply.asked.name
            );
            error.with_note(&note)
        })?;
        settled?;
        detached?;
        Ok(written_bytes)
    }

    /// The flag of an error is true where what has come may be something else than was sent.
    async fn fill_attached(
        &mut self,
        volume: &Volume,
        input: Input,
        stop: &Arc<Stop>,
    ) -> Result<u64, (Error, bool)> {
        let keeps = |error| (error, false);
        let size_bytes = amount(volume.size_bytes);
        let progress = Arc::new(Progress::shown("receiving", size_bytes, self.shows));
        progress.skip(input.header().from_bytes);
        let target = Arc::new(Target::new(address(volume).map_err(keeps)?, size_bytes));
        let pieces = Arc::new(Mutex::new(Pieces { input, left_bytes: 0, ended: None }));
        let block_bytes = usize::try_from(volume.block_size).unwrap_or(512).max(512);
        let empty = self.apply.header.base.is_none();
        let patience = self.apply.asked.reconnect;
        let mut written_bytes = 0;
        let mut held = self.hold(&target, volume).await.map_err(keeps)?;
        loop {
            let work = {
                let (pieces, sync_bytes) = (Arc::clone(&pieces), self.sync_bytes);
                let (target, stop, progress) =
                    (Arc::clone(&target), Arc::clone(stop), Arc::clone(&progress));
                move || {
                    lock(&pieces).left_bytes = sync_bytes;
                    let import = import::Import {
                        target: &*target,
                        size_bytes,
                        block_bytes,
                        empty,
                        // The volume is held.
                        is_first: false,
                        patience,
                        stop: &stop,
                        progress: &progress,
                    };
                    import.run(Source::Records(Box::new(move || lock(&pieces).next())))
                }
            };
            let written = interruptible(stop, blocking(work)).await;
            let (offset, is_strange, ended) = {
                let mut pieces = lock(&pieces);
                (pieces.input.at(), pieces.input.is_strange(), pieces.ended.take())
            };
            if ended.is_some() {
                progress.clear();
            }
            let ended = match ended {
                // Before failures of the daemon, which would keep what has come.
                Some(Err(error)) if is_strange => return Err((error, true)),
                ended => ended,
            };
            written_bytes += written.map_err(keeps)?.written_bytes;
            // A daemon that was started anew meanwhile has lost the former.
            let again = interruptible(stop, self.hold_at(offset, &target, volume, stop)).await;
            drop(std::mem::replace(&mut held, again.map_err(keeps)?));
            if let Some(ended) = ended {
                return ended.map(|()| written_bytes).map_err(keeps);
            }
        }
    }

    /// Connects to the hidden volume, and checks that it is the same. As long as one connection
    /// lasts, no other receive takes the volume for one that is left over, also between two pieces.
    async fn hold(
        &mut self,
        target: &Arc<Target>,
        volume: &Volume,
    ) -> Result<Box<dyn Port>, Error> {
        let target = Arc::clone(target);
        let held = blocking(move || port::connect(&*target)).await?;
        let request = GetVolumeRequest { name: volume.name.clone(), pool: volume.pool.clone() };
        let now = answers::volume(self.apply.client.get_volume(request).await?.volume)?;
        self.check_same(volume, &now).map(|()| held)
    }

    /// The same, and keeps a position, once a daemon that has gone away is back.
    async fn hold_at(
        &mut self,
        offset: u64,
        target: &Arc<Target>,
        volume: &Volume,
        stop: &Stop,
    ) -> Result<Box<dyn Port>, Error> {
        const PAUSE: Duration = Duration::from_millis(200);

        let clock = Clock::start();
        loop {
            let held = match self.hold(target, volume).await {
                Ok(held) => self.advance(volume, offset).await.map(|()| held),
                Err(error) => Err(error),
            };
            // One that is starting may refuse a connection that it will take later.
            let is_away =
                |error: &Error| matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Io);
            if !held.as_ref().is_err_and(is_away) || clock.elapsed() >= self.apply.asked.reconnect {
                return held;
            }
            stop.check()?;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Keeps a position, unless an earlier stream came further.
    async fn advance(&mut self, hidden: &Volume, offset: u64) -> Result<(), Error> {
        if position(hidden).is_some_and(|position| position.offset >= offset) {
            return Ok(());
        }
        let position = Position { offset, ends: self.apply.header.ends() };
        let request = ConfigureVolumeRequest {
            name: hidden.name.clone(),
            pool: hidden.pool.clone(),
            set_labels: label(&position),
            ..Default::default()
        };
        self.apply.client.configure_volume(request).await.map(drop)
    }

    /// Takes the snapshot that records the content, and makes it that of the volume. Returns the
    /// volume and the snapshot.
    async fn show(&mut self, hidden: Volume) -> Result<(Volume, String), Error> {
        let (name, pool) = (self.apply.asked.name.clone(), hidden.pool.clone());
        self.check_still_same(&hidden).await?;
        let marker = self.apply.mark(&hidden).await?;
        // No connection keeps other receives away from it here, where they have another socket.
        if let Err(error) = self.check_still_same(&hidden).await {
            let request = DeleteVolumeRequest { name: marker, pool, ..Default::default() };
            self.apply.client.delete_volume(request).await?;
            return Err(error);
        }
        if self.apply.header.base.is_none() {
            let volume = self.rename(&hidden, &hidden.name, &name).await?;
            if let Err(error) = self.check_same(&hidden, &volume) {
                self.rename(&volume, &name, &hidden.name).await?;
                return Err(error);
            }
            let unlabelled = self.unlabel(&volume).await;
            return Ok((warned("its label stays", unlabelled).unwrap_or(volume), marker));
        }
        let request = GetVolumeRequest { name: name.clone(), pool: pool.clone() };
        let volume = answers::volume(self.apply.client.get_volume(request).await?.volume)?;
        self.apply.check_usable(&volume)?;
        let all = self.apply.all(&volume).await?;
        self.apply.check_base(&volume, &all).await?;
        let (snapshot, force) = (marker.clone(), volume.attached);
        let request = RollbackVolumeRequest { name, pool, snapshot, force };
        let rolled_back = self.apply.client.rollback_volume(request).await?.volume;
        let deleted = self.delete_hidden().await;
        warned("the hidden volume stays", deleted);
        Ok((answers::volume(rolled_back)?, marker))
    }

    async fn rename(&mut self, volume: &Volume, from: &str, to: &str) -> Result<Volume, Error> {
        let (name, new_name) = (from.to_owned(), to.to_owned());
        let request = RenameVolumeRequest { name, pool: volume.pool.clone(), new_name };
        answers::volume(self.apply.client.rename_volume(request).await?.volume)
    }

    /// Deletes older snapshots that record what came from the stream's pool.
    async fn retain(&mut self, volume: &Volume) -> Result<(), Error> {
        let Some(keep) = self.keep else { return Ok(()) };
        let (begin, mark) = (format!("{}@", volume.name), self.apply.mark_of_pool());
        let mut all = self.apply.all(volume).await?;
        all.retain(|one| {
            // A name with one more is of a volume whose own name begins like that.
            let tag = one.name.strip_prefix(&begin).filter(|tag| !tag.contains('@'));
            tag.is_some_and(|tag| tag.contains(&mark)) && one.kind() == VolumeKind::Snapshot
        });
        all.sort_by_key(|one| one.id);
        let old = all.len().saturating_sub(keep as usize);
        for one in all.drain(..old) {
            let request = DeleteVolumeRequest {
                name: one.name,
                pool: one.pool,
                force: false,
                ..Default::default()
            };
            let deleted = self.apply.client.delete_volume(request).await;
            warned("an older snapshot stays", deleted);
        }
        Ok(())
    }

    /// Refuses a hidden volume that another receive writes. The connections of one that was killed
    /// end a moment after it.
    async fn check_unused(&mut self, hidden: &Volume) -> Result<(), Error> {
        if settled(&mut self.apply.client, hidden, 0).await?.connections == 0 {
            return Ok(());
        }
        Err(claimed_by_another(&self.apply))
    }

    /// Refuses a hidden volume that was replaced meanwhile: what this receive wrote is elsewhere.
    fn check_same(&self, hidden: &Volume, now: &Volume) -> Result<(), Error> {
        if now.id == hidden.id { Ok(()) } else { Err(claimed_by_another(&self.apply)) }
    }

    /// The same, as the daemon has it now.
    async fn check_still_same(&mut self, hidden: &Volume) -> Result<(), Error> {
        let (name, pool) = (hidden.name.clone(), hidden.pool.clone());
        let request = GetVolumeRequest { name, pool };
        let now = answers::volume(self.apply.client.get_volume(request).await?.volume)?;
        self.check_same(hidden, &now)
    }

    /// Deletes the hidden volume, unless another receive is connected to it by now.
    async fn delete_hidden(&mut self) -> Result<(), Error> {
        let request = DeleteVolumeRequest {
            name: self.name.clone(),
            pool: self.apply.asked.pool.clone(),
            force: false,
            detach: true,
        };
        self.apply.client.delete_volume(request).await.map(drop)
    }

    /// Takes the label away that the volume has from when it was hidden.
    async fn unlabel(&mut self, volume: &Volume) -> Result<Volume, Error> {
        if !volume.labels.contains_key(LABEL) {
            return Ok(volume.clone());
        }
        let request = ConfigureVolumeRequest {
            name: volume.name.clone(),
            pool: volume.pool.clone(),
            remove_labels: vec![LABEL.to_owned()],
            ..Default::default()
        };
        answers::volume(self.apply.client.configure_volume(request).await?.volume)
    }
}

/// A warning in place of a failure to clean up: the volume has its content by then, and a sender
/// that was refused would send no more.
fn warned<T>(stays: &str, done: Result<T, Error>) -> Option<T> {
    let of = |error: Error| set::warn(&[format!("the stream was received, but {stays}: {error}")]);
    done.map_err(of).ok()
}

/// A stream that is read in pieces.
struct Pieces {
    input: Input,
    /// Bytes until the end of the present piece.
    left_bytes: u64,
    /// The end of the stream, or why there is no more of it. What came before is good.
    ended: Option<Result<(), Error>>,
}

impl Pieces {
    fn next(&mut self) -> Result<Option<Record>, Error> {
        if self.left_bytes == 0 {
            return Ok(None);
        }
        let record = match self.input.next() {
            Ok(Some(record)) => record,
            Ok(None) => {
                self.ended = Some(Ok(()));
                return Ok(None);
            }
            Err(error) => {
                self.ended = Some(Err(error));
                return Ok(None);
            }
        };
        let bytes = match &record {
            Record::Data { data, .. } => data.len() as u64,
            // A request as well, which takes no part of a piece of any size.
            Record::Zeroes { .. } => 0,
        };
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
        Ok(Some(record))
    }
}

/// Claims a volume for one receive or import on this host, by a lock that ends with its process,
/// however that ends. Its file is beside the control socket, where no other user can hold it.
/// Without one, where files can't be made there, commands are kept apart by the hidden volume's
/// connections alone.
pub(super) async fn claimed(apply: &Apply<'_>) -> Result<Option<Flock<File>>, Error> {
    /// How long one that was cut off may take to end: as long as its connections are waited for.
    const MAX_LOOKS: u32 = 20;
    const LOOK: Duration = Duration::from_millis(100);

    // A hash, as names of volumes are longer than those of files may be.
    let of = [&apply.pool_id[..], apply.asked.name.as_bytes()].concat();
    let name = format!("receive-{:032x}.lock", xxhash_rust::xxh3::xxh3_128(&of));
    let path = apply.client.folder().join(name);
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let Ok(mut file) = options.open(&path) else { return Ok(None) };
    for _ in 0..MAX_LOOKS {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(claim) => return Ok(Some(claim)),
            Err((file, Errno::EWOULDBLOCK)) => file,
            Err((_, error)) => return Err(Error::file("lock", &path, error.into())),
        };
        tokio::time::sleep(LOOK).await;
    }
    Err(claimed_by_another(apply))
}

fn claimed_by_another(apply: &Apply<'_>) -> Error {
    Error::in_use(apply.what(), "is being received or imported by another command")
}

fn lock(pieces: &Mutex<Pieces>) -> std::sync::MutexGuard<'_, Pieces> {
    pieces.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A volume, if it exists.
async fn found(client: &mut Client, name: &str, pool: &str) -> Result<Option<Volume>, Error> {
    let request = GetVolumeRequest { name: name.to_owned(), pool: pool.to_owned() };
    match client.get_volume(request).await {
        Ok(answer) => answers::volume(answer.volume).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// How far a hidden volume is, if it says so.
fn position(hidden: &Volume) -> Option<Position> {
    hidden.labels.get(LABEL)?.parse().ok()
}

fn label(position: &Position) -> Pairs {
    Pairs::from([(LABEL.to_owned(), position.to_string())])
}

fn unreadable(hidden: &Volume) -> Error {
    let problem = format!("has no label {LABEL} that a receive has set: delete it");
    Error::in_use(format!("volume {}", shown(&hidden.name)), problem)
}
