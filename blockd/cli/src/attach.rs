//! `blockd attach` and `blockd detach`.

use blockd_api::v1::{AttachVolumeRequest, DetachVolumeRequest, FrontEnd, Volume};
use blockd_media::error::Error;
use clap::value_parser;
use serde::Serialize;

use super::{Context, answers, encryption, names};

/// Make a volume reachable for clients
///
/// Prints where it is served: a block device like /dev/ublkb0, or an NBD URI. The daemon remembers
/// it: after its next start the volume is attached again, and the device is the same one, whatever
/// ended the daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd attach data --read-only\n  blockd attach data --nbd")]
pub(crate) struct Attach {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Clients cannot write to it
    #[arg(long)]
    pub read_only: bool,

    #[command(flatten)]
    pub front_end: FrontEndArguments,
}

/// How clients reach a volume.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct FrontEndArguments {
    /// As a block device of this machine [default where the kernel has the ublk driver]
    #[arg(long, conflicts_with = "nbd")]
    pub ublk: bool,

    /// As an export of the NBD server [default elsewhere]
    #[arg(long)]
    pub nbd: bool,

    /// Queues of the block device, at most as many as workers [default: ublk.queues of the
    /// configuration]
    #[arg(long, value_name = "N", conflicts_with = "nbd", value_parser = value_parser!(u32).range(1..))]
    pub queues: Option<u32>,

    /// Requests that each queue can have in flight, at most 1024 [default: ublk.depth of the
    /// configuration]
    #[arg(long, value_name = "N", conflicts_with = "nbd", value_parser = value_parser!(u32).range(1..))]
    pub depth: Option<u32>,
}

impl FrontEndArguments {
    /// Whether anything is asked for.
    pub(super) const fn is_any(&self) -> bool {
        self.ublk || self.nbd || self.queues.is_some() || self.depth.is_some()
    }

    /// The request for the attachment.
    pub(super) fn request(
        &self,
        name: String,
        pool: String,
        read_only: bool,
    ) -> AttachVolumeRequest {
        let front_end = match (self.ublk, self.nbd) {
            (true, _) => FrontEnd::Ublk,
            (false, true) => FrontEnd::Nbd,
            (false, false) => FrontEnd::Unspecified,
        };
        AttachVolumeRequest {
            name,
            pool,
            read_only,
            front_end: front_end.into(),
            queue_count: self.queues.unwrap_or(0),
            queue_depth: self.depth.unwrap_or(0),
        }
    }
}

/// End a volume's connections, or take its block device away
///
/// The volume keeps its data. Refused while clients are connected or the block device is in use,
/// unless forced: then IO to the device fails. A volume that is not attached is left unchanged. The
/// mapping of a volume that was added with --encrypt is closed first, which is refused while it is
/// in use.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd detach data")]
pub(crate) struct Detach {
    /// The volume, NAME or POOL/NAME
    pub name: String,

    /// The pool that it is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Also when clients are connected or the block device is used
    #[arg(long)]
    pub force: bool,
}

/// The output of `attach --json`.
#[derive(Debug, Serialize)]
struct Attached {
    changed: bool,
    /// The block device's path, or the URI.
    #[serde(rename = "where")]
    place: String,
    uri: String,
    volume: Volume,
}

/// The output of `detach --json`.
#[derive(Debug, Serialize)]
struct Detached {
    changed: bool,
    closed_connections: u32,
    /// `null` where its cell is on another host, or its pool is not served.
    volume: Option<Volume>,
}

impl Attach {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let mut client = context.client().await?;
        let request = self.front_end.request(self.name, self.pool, self.read_only);
        let answer = client.attach_volume(request).await?;
        let volume = answers::volume(answer.volume)?;
        let attached = Attached {
            changed: answer.changed,
            place: answers::place(&volume).to_owned(),
            uri: volume.nbd_uri.clone(),
            volume,
        };
        context.output.either(&attached, || {
            if !context.output.terminal().interactive {
                return format!("{}\n", attached.place);
            }
            let already = if attached.changed { "" } else { " already" };
            let how = if attached.volume.read_only { ", read-only" } else { "" };
            let name = &attached.volume.name;
            let full = names::full(&attached.volume);
            let sealed = match encryption::is_encrypted(&attached.volume) {
                true => format!(
                    "its data is encrypted: `blockd add {full} --encrypt` opens it, with its size \
                     and key\n"
                ),
                false => String::new(),
            };
            format!("{name}: attached{already}{how}\n{}\n{sealed}", attached.place)
        })
    }
}

impl Detach {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let mut client = context.client().await?;
        encryption::close(&mut client, &self.name, &self.pool, self.force).await?;
        let request =
            DetachVolumeRequest { name: self.name.clone(), pool: self.pool, force: self.force };
        let answer = client.detach_volume(request).await?;
        let detached = Detached {
            changed: answer.changed,
            closed_connections: answer.closed_connections,
            volume: answer.volume,
        };
        context.output.either(&detached, || match (detached.changed, detached.closed_connections) {
            (false, _) => format!("{}: was not attached\n", self.name),
            (true, 0) => format!("{}: detached\n", self.name),
            (true, count) => format!("{}: detached, {count} connection(s) ended\n", self.name),
        })
    }
}
