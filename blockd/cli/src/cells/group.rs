//! `blockd vg`.

use std::path::PathBuf;

use blockd_api::v1::{self, AddVolumeGroupRequest, ListVolumeGroupsRequest};
use blockd_hosts::Coordinator as _;
use blockd_hosts::lvm::Lvm;
use blockd_media::error::{Error, ErrorKind};
use serde::Serialize;

use super::super::pool::path_argument;
use super::super::{Context, amount};
use crate::output::table::{Cell as Field, Side, Table};

/// Use a volume group that several hosts share, or forget it
///
/// The group is a shared volume group of LVM (lvmlockd with sanlock), on disks that all of its
/// hosts reach and that have persistent reservations. Each of its cells is a pool that one host at
/// a time has. `blockd cell` makes them and moves them between hosts.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd vg add san\n  blockd vg list")]
pub(crate) enum GroupVerb {
    Add(Add),
    List(List),
    Remove(Remove),
}

/// Use a volume group from now on
///
/// Registers this host with the reservations of the group's disks, so that other hosts can keep it
/// off them when it is dead. Needs no locks of the group: on all hosts but the first they can be
/// started afterwards only (vgchange --lockstart). Refused where a disk has no reservations, or
/// other software reserved it. Repeating it is no error.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd vg add san\n  blockd vg add --folder /srv/cells local")]
pub(crate) struct Add {
    /// The volume group, or with --folder any name
    pub group: String,

    /// Cells are files in this folder, of this machine alone: to try cells without a shared disk
    #[arg(long, value_name = "PATH")]
    pub folder: Option<PathBuf>,

    /// This daemon's number among those that use the folder, 1 to 2000 [default: 1]
    #[arg(long, value_name = "NUMBER", requires = "folder")]
    pub host: Option<u32>,
}

/// List volume groups with their space
///
/// A group whose coordinator (lvmlockd, sanlock) does not answer is listed with the reason. Cells
/// that are open go on all the same. Hosts that were declared dead here and have not come back are
/// listed by their numbers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd vg list")]
pub(crate) struct List {}

/// Forget a volume group of which this host has no cell
///
/// Removes this host's registration from the group's disks. The group's locks have to be stopped
/// before (vgchange --lockstop), which need the disks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd vg remove san")]
pub(crate) struct Remove {
    /// The volume group
    pub group: String,
}

/// The output of `vg add --json`.
#[derive(Debug, Serialize)]
struct Added {
    changed: bool,
    group: v1::VolumeGroup,
}

/// The output of `vg list --json`.
#[derive(Debug, Serialize)]
struct Listed {
    groups: Vec<v1::VolumeGroup>,
}

/// The output of `vg remove --json`.
#[derive(Debug, Serialize)]
struct Removed {
    changed: bool,
    group: String,
}

/// The output of `node lost --json`.
#[derive(Debug, Serialize)]
struct Lost {
    changed: bool,
    group: String,
    cells: Vec<String>,
}

impl GroupVerb {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Error> {
        match self {
            Self::Add(add) => add.run(context).await,
            Self::List(_) => list(context).await,
            Self::Remove(remove) => remove.run(context).await,
        }
    }
}

impl Add {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let folder = self.folder.as_deref().map(path_argument).transpose()?;
        let request = AddVolumeGroupRequest {
            name: self.group.clone(),
            folder: folder.unwrap_or_default(),
            host: self.host.unwrap_or_default(),
        };
        let answer = context.client().await?.add_volume_group(request).await?;
        let group = answer.group.unwrap_or_default();
        let added = Added { changed: answer.changed, group };
        context.output.either(&added, || {
            let group = &added.group;
            let how = if added.changed { "added" } else { "unchanged" };
            let free = context.output.size(amount(group.free_bytes));
            let cells = group.cells.len();
            format!(
                "{}: {how}, this is host {}, {cells} cell(s), {free} free\n",
                group.name, group.host
            )
        })
    }
}

async fn list(context: &Context) -> Result<(), Error> {
    let request = ListVolumeGroupsRequest::default();
    let groups = context.client().await?.list_volume_groups(request).await?.groups;
    let listed = Listed { groups };
    context.output.either(&listed, || {
        let columns = [
            ("group", Side::Left),
            ("host", Side::Right),
            ("cells", Side::Right),
            ("size", Side::Right),
            ("free", Side::Right),
            ("dead hosts", Side::Left),
        ];
        let mut table = Table::new(&columns);
        let mut failures = String::new();
        for group in &listed.groups {
            let size = |bytes| context.output.size(amount(bytes));
            let dead: Vec<_> = group.dead.iter().map(|dead| dead.host.to_string()).collect();
            table.row([
                Field::from(group.name.clone()),
                group.host.to_string().into(),
                group.cells.len().to_string().into(),
                size(group.total_bytes).into(),
                size(group.free_bytes).into(),
                dead.join(" ").into(),
            ]);
            if !group.failure.is_empty() {
                failures.push_str(&format!("{}: {}\n", group.name, group.failure));
            }
        }
        table.render(context.output.terminal()) + &failures
    })
}

impl Remove {
    async fn run(self, context: &Context) -> Result<(), Error> {
        let request = v1::RemoveVolumeGroupRequest { name: self.group.clone() };
        let answer = context.client().await?.remove_volume_group(request).await?;
        let removed = Removed { changed: answer.changed, group: self.group };
        context.output.either(&removed, || match removed.changed {
            true => format!("{}: removed\n", removed.group),
            false => format!("{}: there was no such volume group\n", removed.group),
        })
    }
}

/// `blockd node lost`.
pub(crate) async fn lose(context: &Context, group: String) -> Result<(), Error> {
    let request = v1::LoseVolumeGroupRequest { name: group.clone() };
    let answer = match context.client().await {
        Ok(mut client) => client.lose_volume_group(request).await?,
        // No daemon has a cell open: what the kernel still has of them ends.
        Err(error) if error.kind() == ErrorKind::Unreachable => {
            Lvm::new(&group).cut_off()?;
            v1::LoseVolumeGroupResponse { changed: true, cells: Vec::new() }
        }
        Err(error) => return Err(error),
    };
    let lost = Lost { changed: answer.changed, group, cells: answer.cells };
    context.output.either(&lost, || match lost.cells.as_slice() {
        [] => format!("{}: lost, no cell of it was open\n", lost.group),
        cells => format!("{}: lost, dropped {}\n", lost.group, cells.join(", ")),
    })
}
