//! Volume groups as this node's daemon has them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use blockd_api::v1;
use blockd_csi_base::error::shown;

use super::{CellId, is_group};
use crate::daemon::Daemon;
use crate::error::Error;

/// The file with the names of the groups that were there at the last answer.
const KNOWN: &str = "volume-groups";

/// Bytes of that file: a thousand groups.
const MAX_KNOWN: u64 = 64 * 1024;

/// How long the names are waited for, which the daemon has at hand: kubelet gives its call for them
/// no long time.
const NAMES_TIME: Duration = Duration::from_secs(3);

/// All groups with their cells. A daemon that is too old to have any has none.
///
/// # Errors
/// The daemon does not answer.
pub(crate) async fn all(daemon: &Daemon) -> Result<Vec<v1::VolumeGroup>, Error> {
    daemon.find_groups(v1::ListVolumeGroupsRequest::default()).await
}

/// Names of all groups, for which no disk is looked at.
///
/// # Errors
/// The daemon does not answer.
pub(crate) async fn names(daemon: &Daemon) -> Result<Vec<String>, Error> {
    let asked = v1::ListVolumeGroupsRequest { brief: true, ..Default::default() };
    let groups = daemon.find_groups(asked).await?;
    Ok(groups.into_iter().map(|group| group.name).collect())
}

/// The space of a group; `None`: this node's daemon does not have it.
///
/// # Errors
/// UNAVAILABLE: it can't be used now.
pub(crate) async fn space(daemon: &Daemon, name: &str) -> Result<Option<v1::VolumeGroup>, Error> {
    let asked = v1::ListVolumeGroupsRequest { brief: true, ..of(name) };
    group(daemon, asked).await
}

/// A group with one cell, if that is there, and its space; `None`: this node's daemon does not have
/// the group.
///
/// # Errors
/// As [`space`].
pub(crate) async fn with_cell(
    daemon: &Daemon,
    group: &str,
    cell: &str,
) -> Result<Option<v1::VolumeGroup>, Error> {
    let asked = v1::ListVolumeGroupsRequest { cell: cell.to_owned(), ..of(group) };
    let found = self::group(daemon, asked).await?;
    // An older daemon answers with all.
    Ok(found.map(|mut group| {
        group.cells.retain(|one| one.name == cell);
        group
    }))
}

fn of(group: &str) -> v1::ListVolumeGroupsRequest {
    v1::ListVolumeGroupsRequest { name: group.to_owned(), ..Default::default() }
}

async fn group(
    daemon: &Daemon,
    asked: v1::ListVolumeGroupsRequest,
) -> Result<Option<v1::VolumeGroup>, Error> {
    let name = asked.name.clone();
    let found = match daemon.find_groups(asked).await {
        Ok(groups) => groups.into_iter().find(|group| group.name == name),
        Err(error) if error.is_absent() => None,
        Err(error) => return Err(error),
    };
    match found {
        Some(found) if !found.failure.is_empty() => {
            let problem = format!("volume group {name}: {}", shown(&found.failure));
            Err(Error::Unavailable { address: daemon.address(), problem })
        }
        found => Ok(found),
    }
}

/// The cell of a volume; `None` where there is none. `node` is this node's name.
///
/// # Errors
/// FAILED_PRECONDITION: this node's daemon does not have the group. UNAVAILABLE: it can't be used
/// now.
pub(crate) async fn find(
    daemon: &Daemon,
    node: &str,
    id: &CellId,
) -> Result<Option<v1::Cell>, Error> {
    let Some(group) = with_cell(daemon, &id.group, &id.cell).await? else {
        let (node, name) = (shown(node), &id.group);
        let problem =
            format!("is not known to the daemon of node {node}: `blockd vg add {name}` adds it");
        return Err(Error::in_use(format_args!("volume group {name}"), problem));
    };
    Ok(group.cells.into_iter().next())
}

/// Names of the groups, for the topology of this node. While the daemon is away they are those of
/// its last answer: a node that boots is registered before its daemon serves, perhaps.
pub(crate) async fn known_names(daemon: &Daemon, state_dir: &Path) -> Vec<String> {
    let path = state_dir.join(KNOWN);
    let answer = tokio::time::timeout(NAMES_TIME, names(daemon)).await.unwrap_or_else(|_| {
        let problem = "no answer in time".to_owned();
        Err(Error::Unavailable { address: daemon.address(), problem })
    });
    let mut names = match answer {
        Ok(names) => {
            if let Err(error) = remember(&path, &names) {
                tracing::warn!(path = %path.display(), %error, "volume groups are not remembered");
            }
            names
        }
        Err(error) => {
            let names = remembered(&path);
            tracing::warn!(%error, groups = names.join(" "), "volume groups of an earlier answer");
            names
        }
    };
    names.retain(|name| {
        let fits = is_group(name);
        if !fits {
            tracing::warn!(name = shown(name), "volume group not usable: no part of a label's key");
        }
        fits
    });
    names
}

fn remembered(path: &Path) -> Vec<String> {
    let is_short = fs::metadata(path).is_ok_and(|found| found.len() <= MAX_KNOWN);
    let text = if is_short { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
    text.lines().map(str::to_owned).collect()
}

fn remember(path: &Path, names: &[String]) -> std::io::Result<()> {
    if remembered(path) == names {
        return Ok(());
    }
    let draft = path.with_extension("draft");
    fs::write(&draft, names.join("\n"))?;
    fs::rename(&draft, path)
}
