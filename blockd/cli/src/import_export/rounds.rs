//! `blockd move` and `blockd replicate`: snapshots of a volume that are sent one after the other,
//! each since the one before.

use std::path::Path;
use std::time::Duration;

use blockd_api::v1::{
    ConfigureVolumeRequest, CreateSnapshotsRequest, CreateSnapshotsResponse, DeleteVolumeRequest,
    DetachVolumeRequest, GetVolumeRequest, ListVolumesRequest, SnapshotMember, Volume, VolumeKind,
};
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::names::REPLICATED_LABEL;
use serde::Serialize;

use super::apply::changed_bytes;
use super::export::{Export, Stream};
use super::remote::Remote;
use super::send::{level, send};
use crate::client::Client;
use crate::duration::duration;
use crate::labels::Pairs;
use crate::transfer::link::TlsArguments;
use crate::{Context, answers, encryption, names, set};

/// The label of a snapshot that is to be sent, with the address of its receiver. It is set when the
/// snapshot is taken: one without it is not of these commands, whatever its name.
const SENDING: &str = "blockd.io/sending-to";
/// The label that takes the place of the former once the whole snapshot was sent.
const SENT: &str = "blockd.io/sent-to";
/// How the names of snapshots of either command go on behind the volume's name. One command goes on
/// where the other has sent a volume to.
const MOVE: &str = "@move-";
const REPLICA: &str = "@replica-";
/// Rounds before the last of a move. Each takes a part of the time of the one before, unless the
/// volume is written faster than it can be sent: then more of them are of no use.
const MAX_ROUNDS: u32 = 8;
/// Snapshots that others may take between a look and one of this command: more than a volume has
/// receivers whose commands start at one time.
const MAX_TAKEN: u32 = 64;
/// A round that had so little to send is followed by the last.
const SMALL_BYTES: u64 = 64 << 20;

/// Arguments of both.
#[derive(Debug, clap::Args)]
pub(crate) struct Receiving {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The receiver: tcp://HOST:PORT of a `blockd receive --listen`, with /NAME where the volume
    /// has another name there
    pub target: String,

    /// Compress the data: zstd, or zstd:LEVEL with a level from 1 to 19 [default level: 3]
    #[arg(long, value_name = "zstd[:LEVEL]", value_parser = level)]
    pub compress: Option<i32>,

    /// The pool that the volume is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// How long to wait for a daemon or receiver that has gone away
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub reconnect: Duration,

    #[command(flatten)]
    pub tls: TlsArguments,
}

/// Move a volume to another host, which has it attached at the end
///
/// Snapshots are sent while the volume is in use, each with what changed since the one before. The
/// last is taken once the volume is detached here, so that nothing is written behind it, and the
/// receiver attaches its copy. While the volume is in use here that is refused: end the programs
/// that use it, and repeat the command. The volume here stays, detached, until it is deleted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd move data tcp://HOST:7010 --tls-cert host.pem \
                        --tls-key host.key --tls-ca ca.pem")]
pub(crate) struct Move {
    #[command(flatten)]
    pub to: Receiving,
}

/// Send what changed since the last time, and keep a few snapshots
///
/// Takes a snapshot, sends it since the newest that was sent, and deletes older ones beyond --keep.
/// A snapshot whose transfer was cut off is sent first. To be run by a timer; the receiver's own
/// snapshots are limited by its --keep.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd replicate data tcp://HOST:7010 --keep 3 --tls-cert \
                        host.pem --tls-key host.key --tls-ca ca.pem")]
pub(crate) struct Replicate {
    #[command(flatten)]
    pub to: Receiving,

    /// How many snapshots that were sent stay; the newest is the base of the next
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub keep: u32,
}

/// A snapshot that was sent, in the output of `--json`.
#[derive(Debug, Serialize)]
struct Round {
    snapshot: String,
    since: Option<String>,
    /// Null where the receiver had it already.
    written_bytes: Option<u64>,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Done {
    target: String,
    rounds: Vec<Round>,
    deleted_snapshots: Vec<String>,
    warnings: Vec<String>,
}

/// The command whose snapshots are deleted. Those of the other one may be the base of what it sends
/// just now, and go when the volume was moved away.
#[derive(Clone, Copy)]
enum Whose {
    Own,
    All,
}

impl Move {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut rounds = Rounds::begin(self.to, MOVE, context).await?;
        loop {
            let small = rounds.round(false).await? <= SMALL_BYTES;
            rounds.retain(1, Whose::Own).await;
            if small || rounds.done.rounds.len() >= MAX_ROUNDS as usize {
                break;
            }
        }
        let (name, target) = (rounds.to.name.clone(), rounds.to.target.clone());
        let behind = rounds.newest();
        rounds.detach().await.map_err(|error| {
            error.with_note(&format!(
                "{target} has it up to {behind}: end the programs that use it, and repeat this"
            ))
        })?;
        rounds.round(true).await.map_err(|error| {
            error.with_note(&format!(
                "the volume is detached: look at {target} first, which may have it attached, then \
                 repeat this, or attach it here again"
            ))
        })?;
        rounds.check_unchanged().await?;
        rounds.retain(1, Whose::All).await;
        context.output.either(&rounds.done, || {
            let last = rounds.newest();
            format!(
                "{name}: {target} has it, attached; here it stays, detached, with {last}: \
                 `blockd del` deletes it\n"
            )
        })
    }
}

impl Replicate {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Error> {
        let keep = self.keep as usize;
        let mut rounds = Rounds::begin(self.to, REPLICA, context).await?;
        rounds.round(false).await?;
        let newest = rounds.sent.last();
        let made = newest.map_or(0, |one| one.made_unix_ms);
        let request = ConfigureVolumeRequest {
            name: rounds.to.name.clone(),
            pool: rounds.to.pool.clone(),
            set_labels: Pairs::from([(REPLICATED_LABEL.to_owned(), made.to_string())]),
            ..Default::default()
        };
        rounds.client.configure_volume(request).await?;
        rounds.retain(keep, Whose::Own).await;
        context.output.either(&rounds.done, || {
            let to = &rounds.to.target;
            let one = |round: &Round| {
                let bytes = round.written_bytes.map_or(0, |bytes| bytes);
                let since =
                    round.since.as_ref().map_or(String::new(), |one| format!(" since {one}"));
                format!("{}: {}{since} sent to {to}\n", round.snapshot, context.output.size(bytes))
            };
            rounds.done.rounds.iter().map(one).collect()
        })
    }
}

/// Snapshots of a volume that are sent.
struct Rounds<'a> {
    to: Receiving,
    context: &'a Context,
    client: Client,
    /// How the names of its snapshots begin.
    prefix: String,
    /// The highest number behind that; 0 where there is none.
    last_number: u64,
    /// Snapshots that this receiver has, the oldest first.
    sent: Vec<Volume>,
    /// Snapshots for this receiver that were not sent, or not to their end.
    unsent: Vec<Volume>,
    done: Done,
}

impl<'a> Rounds<'a> {
    async fn begin(mut to: Receiving, tag: &str, context: &'a Context) -> Result<Self, Error> {
        names::place(&mut to.pool, [&mut to.name])?;
        if Remote::parse(&to.target, false, &to.tls)?.is_none() {
            return Err(Error::invalid("TARGET", &to.target, "like tcp://HOST:PORT"));
        }
        let mut client = context.client().await?;
        let request = GetVolumeRequest { name: to.name.clone(), pool: to.pool.clone() };
        let volume = answers::volume(client.get_volume(request).await?.volume)?;
        if volume.kind() == VolumeKind::Snapshot {
            let problem = "is a snapshot: send it with `blockd send`";
            return Err(Error::in_use(format!("volume {}", shown(&volume.name)), problem));
        }
        let prefixes = [MOVE, REPLICA].map(|tag| format!("{}{tag}", to.name));
        let prefix = format!("{}{tag}", to.name);
        let request = ListVolumesRequest { pool: volume.pool.clone(), brief: true };
        let mut own = client.list_volumes(request).await?.volumes;
        own.retain(|one| one.kind() == VolumeKind::Snapshot);
        own.retain(|one| prefixes.iter().any(|prefix| number(&one.name, prefix).is_some()));
        own.sort_by_key(|one| one.id);
        let last_number = own.iter().filter_map(|one| number(&one.name, &prefix)).max();
        let last_number = last_number.unwrap_or(0);
        let labelled = |label: &str| -> Vec<Volume> {
            let here = |one: &&Volume| one.labels.get(label) == Some(&to.target);
            own.iter().filter(here).cloned().collect()
        };
        let (sent, unsent) = (labelled(SENT), labelled(SENDING));
        let done = Done {
            target: to.target.clone(),
            rounds: Vec::new(),
            deleted_snapshots: Vec::new(),
            warnings: Vec::new(),
        };
        Ok(Self { to, context, client, prefix, last_number, sent, unsent, done })
    }

    fn newest(&self) -> String {
        self.sent.last().map_or_else(String::new, |one| shown(&one.name))
    }

    /// Sends what an earlier command did not, then a new snapshot. Returns the bytes of the latter.
    async fn round(&mut self, is_last: bool) -> Result<u64, Error> {
        for one in std::mem::take(&mut self.unsent) {
            self.send(one, false).await?;
        }
        let mut taken = self.take().await?;
        let bytes = self.send(answers::volume(taken.snapshots.pop())?, is_last).await?;
        Ok(bytes)
    }

    /// Takes the next snapshot. One of that number may have been taken meanwhile, for another
    /// receiver: that is left alone.
    async fn take(&mut self) -> Result<CreateSnapshotsResponse, Error> {
        let mut tries = 0;
        loop {
            self.last_number = self.last_number.saturating_add(1);
            let name = format!("{}{}", self.prefix, self.last_number);
            let members = vec![SnapshotMember { volume: self.to.name.clone(), name: name.clone() }];
            let labels = Pairs::from([(SENDING.to_owned(), self.to.target.clone())]);
            let request = CreateSnapshotsRequest { pool: self.to.pool.clone(), members, labels };
            match self.client.create_snapshots(request).await {
                Ok(taken) if taken.changed => return Ok(taken),
                // It has this label.
                Ok(_) => {
                    let problem =
                        "was taken by another command meanwhile: repeat this once that has ended";
                    return Err(Error::in_use(format!("snapshot {}", shown(&name)), problem));
                }
                Err(error) if error.kind() == ErrorKind::Exists && tries < MAX_TAKEN => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    async fn send(&mut self, snapshot: Volume, is_last: bool) -> Result<u64, Error> {
        let since = self.sent.last().map(|one| one.name.clone());
        let (target, pool) = (Path::new(&self.to.target), &self.to.pool);
        let export = Export {
            since: since.clone(),
            ..Export::backup(&snapshot.name, target, pool, self.to.reconnect)
        };
        let remote = Remote::parse(&self.to.target, is_last, &self.to.tls)?;
        let stream = Stream { level: self.to.compress, remote, ..Stream::default() };
        let written_bytes = send(&export, self.context, &stream).await?.written_bytes;
        let request = ConfigureVolumeRequest {
            name: snapshot.name.clone(),
            pool: self.to.pool.clone(),
            set_labels: Pairs::from([(SENT.to_owned(), self.to.target.clone())]),
            remove_labels: vec![SENDING.to_owned()],
            ..Default::default()
        };
        let labelled = self.client.configure_volume(request).await?.volume;
        self.sent.push(answers::volume(labelled)?);
        self.done.rounds.push(Round { snapshot: snapshot.name, since, written_bytes });
        Ok(written_bytes.unwrap_or(0))
    }

    /// Detaches the volume, and closes an encryption above it, as `blockd detach` does.
    async fn detach(&mut self) -> Result<(), Error> {
        let (name, pool) = (self.to.name.clone(), self.to.pool.clone());
        encryption::close(&mut self.client, &name, &pool, false).await?;
        let request = DetachVolumeRequest { name, pool, force: false };
        self.client.detach_volume(request).await.map(drop)
    }

    /// Checks that the volume is as the receiver has it, which has attached it.
    async fn check_unchanged(&mut self) -> Result<(), Error> {
        let Some(last) = self.sent.last() else { return Ok(()) };
        let request = GetVolumeRequest { name: self.to.name.clone(), pool: self.to.pool.clone() };
        let has_it =
            |error: Error| error.with_note(&format!("{} has the volume attached", self.to.target));
        let volume = self.client.get_volume(request).await.map_err(has_it)?.volume;
        let volume = answers::volume(volume)?;
        let changed = changed_bytes(&mut self.client, &volume, last).await.map_err(has_it)?;
        if !volume.attached && changed == Some(0) {
            return Ok(());
        }
        let attached = if volume.attached { "is attached again" } else { "is detached" };
        let changed = match changed {
            None => "has another content".to_owned(),
            Some(0) => "was not written".to_owned(),
            Some(bytes) => format!("was written in {bytes} bytes"),
        };
        let problem = format!(
            "{attached}, and {changed} since {}, which {} has, attached: go on with one of the two",
            shown(&last.name),
            self.to.target
        );
        Err(Error::in_use(format!("volume {}", shown(&volume.name)), problem))
    }

    /// Deletes all but the newest that were sent. Where that fails there is a warning: all was
    /// sent, and the next command deletes what stays.
    async fn retain(&mut self, count: usize, whose: Whose) {
        let is_meant = |one: &Volume| match whose {
            Whose::Own => number(&one.name, &self.prefix).is_some(),
            Whose::All => true,
        };
        let (meant, mut kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.sent).into_iter().partition(is_meant);
        let old = meant.len().saturating_sub(count);
        let mut meant = meant.into_iter();
        let old: Vec<_> = meant.by_ref().take(old).collect();
        kept.extend(meant);
        kept.sort_by_key(|one| one.id);
        self.sent = kept;
        for one in old {
            let request = DeleteVolumeRequest {
                name: one.name.clone(),
                pool: one.pool,
                // A command that was killed has left it attached.
                detach: true,
                ..Default::default()
            };
            match self.client.delete_volume(request).await {
                Ok(_) => self.done.deleted_snapshots.push(one.name),
                Err(error) => {
                    let warning = format!("snapshot {} stays: {error}", shown(&one.name));
                    set::warn(std::slice::from_ref(&warning));
                    self.done.warnings.push(warning);
                }
            }
        }
    }
}

/// The number of a snapshot of these commands; `None` for another name that begins like that, as
/// those of snapshots have that record what was received.
fn number(name: &str, prefix: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix)?;
    digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}
