//! `blockd cell`.

use std::time::Duration;

use blockd_api::v1::{self, CreateCellRequest, ListVolumeGroupsRequest};
use blockd_media::error::{Error, shown};
use serde::Serialize;

use super::super::pool::{confirm, extent_size};
use super::super::{Context, amount, size_argument};
use super::{answered, parse, table};

/// How long a takeover may take: the lease of a host that was fenced expires after some minutes
/// where LVM does not end it sooner, and the daemon waits for that for up to 200 s.
const TAKEOVER_TIME: Duration = Duration::from_mins(5);

/// How long a hand-over may take: the other daemon's call has 40 s, and LVM's commands some more.
const HANDOVER_TIME: Duration = Duration::from_secs(100);

/// Make, take and release cells: pools that move between hosts
///
/// A cell is a pool on its own part of a volume group (`blockd vg`). One host at a time has it, and
/// serves its volumes; the pool has the cell's name there. A cell grows by itself while its group
/// has space.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd cell create --size 20G san/vm-1\n  \
                  blockd cell release san/vm-1\n  blockd cell take san/vm-1")]
pub(crate) enum CellVerb {
    List(List),
    Create(Create),
    Take(Take),
    Handover(Handover),
    Standby(Standby),
    Release(Release),
    Delete(Delete),
}

/// List cells and the hosts that have them
///
/// open: this host has it and serves it. held: this host has it, and its pool is not open. free: no
/// host has it, or none that can be seen from here.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell list\n  blockd cell list san")]
pub(crate) struct List {
    /// Only this volume group
    #[arg(default_value = "", hide_default_value = true)]
    pub group: String,
}

/// Make a cell, with an empty pool of its name, which this host has then
///
/// Refused where a pool of that name is open here. Repeating it after a crash finishes it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell create --size 20G san/vm-1")]
pub(crate) struct Create {
    /// GROUP/CELL: 1 to 64 of a-z, 0-9, '.' and '-', with a letter or digit first
    pub cell: String,

    /// Its first size: 20G, 512M. It grows by itself; its log stays as large as this size makes it
    #[arg(long)]
    pub size: String,

    /// Size of an extent: 64K to 1M [default: 256K]
    #[arg(long, value_name = "SIZE")]
    pub extent_size: Option<String>,
}

/// Take a cell that no host has, and open its pool
///
/// With --fence also from a host that is dead: first its key is removed from the reservations of
/// all disks of the group, which ends what it has sent, and refuses what it still sends to any cell
/// of the group. Then its lease is ended; or waited for, for some minutes, where another host was
/// the one to remove the key. Then the log is replayed: what the dead host has not flushed may be
/// gone. Repeating it after a crash goes on where it stopped.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd cell take san/vm-1\n  blockd cell take --fence san/vm-1"
)]
pub(crate) struct Take {
    /// GROUP/CELL
    pub cell: String,

    /// Keep the host that has it from all disks of the group, and take the cell
    #[arg(long)]
    pub fence: bool,
}

/// Fetch a cell from the host that has it, and open its pool
///
/// Run on the host that is to have it. The other host's daemon closes the pool in order and gives
/// the cell back; clients there keep their connections and devices, and their requests wait until
/// the cell comes back. Refused while a file system or another block device is on a device of the
/// cell there. A cell that no host has is taken.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell handover san/vm-1")]
pub(crate) struct Handover {
    /// GROUP/CELL
    pub cell: String,
}

/// Attach a volume whose cell another host has
///
/// Clients find it here at once: over NBD, or as a block device. Their requests wait, and the first
/// one fetches the cell as `blockd cell handover` does, so that a virtual machine can be moved
/// while it runs. Clients have to do without a cache of their own (QEMU: cache=none), and only one
/// of both hosts may use the volume at a time: two that write hand the cell to and fro. `blockd
/// detach` ends it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell standby san/vm-1 root\n  \
                  blockd cell standby --nbd san/vm-1 root")]
pub(crate) struct Standby {
    /// GROUP/CELL
    pub cell: String,

    /// The volume
    pub volume: String,

    /// Writes are refused
    #[arg(long)]
    pub read_only: bool,

    /// As a block device of this machine
    #[arg(long, conflicts_with = "nbd")]
    pub ublk: bool,

    /// Over NBD
    #[arg(long)]
    pub nbd: bool,
}

/// Close a cell's pool in order, and give the cell back
///
/// Any host can take it then. All that was answered is there. Refused while volumes are attached,
/// unless forced.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell release san/vm-1")]
pub(crate) struct Release {
    /// GROUP/CELL
    pub cell: String,

    /// Detach its volumes first, also those in use
    #[arg(long)]
    pub force: bool,
}

/// Delete a cell that this host has, or by force one that no host has
///
/// Refused while it has volumes, unless forced.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd cell delete san/vm-1\n  \
                  blockd cell delete --force --yes san/vm-1")]
pub(crate) struct Delete {
    /// GROUP/CELL
    pub cell: String,

    /// With all of its volumes and snapshots
    #[arg(long)]
    pub force: bool,

    /// With --force: do not ask for the name
    #[arg(long)]
    pub yes: bool,
}

/// The output of `cell list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    cells: Vec<v1::Cell>,
}

/// The output of `cell create --json`.
#[derive(Debug, Serialize)]
struct Created {
    changed: bool,
    cell: v1::Cell,
}

/// The output of `cell take --json`.
#[derive(Debug, Serialize)]
struct Taken {
    changed: bool,
    cell: v1::Cell,
    fenced_host: Option<u32>,
    log_changes: u64,
}

/// The output of `cell handover --json`.
#[derive(Debug, Serialize)]
struct HandedOver {
    changed: bool,
    cell: v1::Cell,
    former_host: Option<u32>,
}

/// The output of `cell standby --json`.
#[derive(Debug, Serialize)]
struct OnStandby {
    changed: bool,
    /// The block device's path, or the URI.
    #[serde(rename = "where")]
    place: String,
    uris: Vec<String>,
}

/// The output of `cell release --json`.
#[derive(Debug, Serialize)]
struct Released {
    changed: bool,
    cell: String,
    detached_volumes: Vec<String>,
}

/// The output of `cell delete --json`.
#[derive(Debug, Serialize)]
struct Deleted {
    changed: bool,
    cell: String,
    deleted_volumes: u32,
    deleted_snapshots: u32,
}

impl CellVerb {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(list) => list.run(context).await,
            Self::Create(create) => create.run(context).await,
            Self::Take(take) => take.run(context).await,
            Self::Handover(handover) => handover.run(context).await,
            Self::Standby(standby) => standby.run(context).await,
            Self::Release(release) => release.run(context).await,
            Self::Delete(delete) => delete.run(context).await,
        }
    }
}

impl List {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = ListVolumeGroupsRequest { name: self.group, ..Default::default() };
        let groups = context.client().await?.list_volume_groups(request).await?.groups;
        for group in groups.iter().filter(|group| !group.failure.is_empty()) {
            eprintln!("blockd: warning: {}: {}", group.name, group.failure);
        }
        let listed = Listed { cells: groups.into_iter().flat_map(|group| group.cells).collect() };
        context.output.either(&listed, || table(&listed.cells, context))
    }
}

impl Create {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, name) = parse(&self.cell)?;
        let device_bytes = size_argument("size", &self.size)?;
        let extent_size = extent_size(self.extent_size.as_deref())?;
        let request =
            CreateCellRequest { group, name, device_bytes, extent_size, only_begun: false };
        let answer = context.client().await?.create_cell(request).await?;
        let created = Created { changed: answer.changed, cell: answered(answer.cell)? };
        context.output.either(&created, || {
            let cell = &created.cell;
            let how = if created.changed { "made" } else { "unchanged" };
            let size = context.output.size(amount(cell.device_bytes));
            format!("{}/{}: {how}, {size}, pool {} is open\n", cell.group, cell.name, cell.name)
        })
    }
}

impl Take {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, name) = parse(&self.cell)?;
        let mut client = match self.fence {
            true => context.patient_client(TAKEOVER_TIME).await?,
            false => context.client().await?,
        };
        let fence = self.fence;
        let request = v1::TakeCellRequest { group, name, fence, ..Default::default() };
        let answer = client.take_cell(request).await?;
        let taken = Taken {
            changed: answer.changed,
            cell: answered(answer.cell)?,
            fenced_host: (answer.fenced_host != 0).then_some(answer.fenced_host),
            log_changes: answer.log_changes,
        };
        context.output.either(&taken, || {
            let how = if taken.changed { "taken" } else { "unchanged" };
            let fenced = taken.fenced_host.map_or_else(String::new, |host| {
                let changes = taken.log_changes;
                format!(", host {host} fenced, {changes} change(s) replayed from its log")
            });
            let cell = &taken.cell;
            format!("{}/{}: {how}{fenced}, pool {} is open\n", cell.group, cell.name, cell.name)
        })
    }
}

impl Handover {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, name) = parse(&self.cell)?;
        let mut client = context.patient_client(HANDOVER_TIME).await?;
        let handover = true;
        let request = v1::TakeCellRequest { group, name, handover, ..Default::default() };
        let answer = client.take_cell(request).await?;
        let handed = HandedOver {
            changed: answer.changed,
            cell: answered(answer.cell)?,
            former_host: (answer.former_host != 0).then_some(answer.former_host),
        };
        context.output.either(&handed, || {
            let cell = &handed.cell;
            let how = match (handed.changed, handed.former_host) {
                (false, _) => "unchanged".to_owned(),
                (true, None) => "taken, no host had it".to_owned(),
                (true, Some(host)) => format!("handed over by host {host}"),
            };
            format!("{}/{}: {how}, pool {} is open\n", cell.group, cell.name, cell.name)
        })
    }
}

impl Standby {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, cell) = parse(&self.cell)?;
        let front_end = match (self.ublk, self.nbd) {
            (true, _) => v1::FrontEnd::Ublk,
            (false, true) => v1::FrontEnd::Nbd,
            (false, false) => v1::FrontEnd::Unspecified,
        };
        let request = v1::StandByRequest {
            group,
            cell,
            volume: self.volume.clone(),
            read_only: self.read_only,
            front_end: front_end.into(),
        };
        let answer = context.client().await?.stand_by(request).await?;
        let place = match answer.device.as_str() {
            "" => answer.uris.first().cloned().unwrap_or_default(),
            device => device.to_owned(),
        };
        let standby = OnStandby { changed: answer.changed, place, uris: answer.uris };
        context.output.either(&standby, || {
            let how = if standby.changed { "" } else { "unchanged, " };
            format!("{}/{}: {how}{}\n", self.cell, self.volume, standby.place)
        })
    }
}

impl Release {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, name) = parse(&self.cell)?;
        let request = v1::ReleaseCellRequest { group, name, force: self.force };
        let answer = context.client().await?.release_cell(request).await?;
        let released = Released {
            changed: answer.changed,
            cell: self.cell,
            detached_volumes: answer.detached_volumes,
        };
        context.output.either(&released, || {
            let cell = &released.cell;
            if !released.changed {
                return format!("{cell}: this host did not have it\n");
            }
            let volumes: Vec<_> = released.detached_volumes.iter().map(shown).collect();
            let detached = match volumes.as_slice() {
                [] => String::new(),
                volumes => format!(", detached {}", volumes.join(", ")),
            };
            format!("{cell}: closed and released{detached}\n")
        })
    }
}

impl Delete {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let (group, name) = parse(&self.cell)?;
        if self.force && !self.yes {
            confirm(&self.cell, "cell")?;
        }
        let request = v1::DeleteCellRequest { group, name, force: self.force };
        let answer = context.client().await?.delete_cell(request).await?;
        let deleted = Deleted {
            changed: answer.changed,
            cell: self.cell,
            deleted_volumes: answer.deleted_volumes,
            deleted_snapshots: answer.deleted_snapshots,
        };
        context.output.either(&deleted, || {
            let cell = &deleted.cell;
            match (deleted.changed, deleted.deleted_volumes, deleted.deleted_snapshots) {
                (false, ..) => format!("{cell}: there was no such cell\n"),
                (true, 0, 0) => format!("{cell}: deleted\n"),
                (true, volumes, snapshots) => {
                    format!("{cell}: deleted, with {volumes} volume(s), {snapshots} snapshot(s)\n")
                }
            }
        })
    }
}
