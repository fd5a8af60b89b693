//! Volume groups as this node's daemon has them.

use std::fs;
use std::path::Path;

use blockd_api::v1;
use blockd_csi_base::error::shown;

use super::{CellId, is_group};
use crate::daemon::Daemon;
use crate::error::Error;

/// The file with the names of the groups that were there at the last answer.
const KNOWN: &str = "volume-groups";

/// Bytes of that file: a thousand groups.
const MAX_KNOWN: u64 = 64 * 1024;

/// All groups with their cells. A daemon that is too old to have any has none.
///
/// # Errors
/// The daemon does not answer.
pub(crate) async fn all(daemon: &Daemon) -> Result<Vec<v1::VolumeGroup>, Error> {
    let asked = v1::ListVolumeGroupsRequest { name: String::new() };
    daemon.find_groups(asked).await
}

/// A group with its cells. `node` is this node's name.
///
/// # Errors
/// FAILED_PRECONDITION: this node's daemon does not have it. UNAVAILABLE: it can't be used now.
pub(crate) async fn group(
    daemon: &Daemon,
    node: &str,
    name: &str,
) -> Result<v1::VolumeGroup, Error> {
    let asked = v1::ListVolumeGroupsRequest { name: name.to_owned() };
    let found = match daemon.find_groups(asked).await {
        Ok(groups) => groups.into_iter().find(|group| group.name == name),
        Err(error) if error.is_absent() => None,
        Err(error) => return Err(error),
    };
    let found = found.ok_or_else(|| {
        let node = shown(node);
        let problem =
            format!("is not known to the daemon of node {node}: `blockd vg add {name}` adds it");
        Error::in_use(format_args!("volume group {name}"), problem)
    })?;
    if found.failure.is_empty() {
        return Ok(found);
    }
    let problem = format!("volume group {name}: {}", shown(&found.failure));
    Err(Error::Unavailable { address: daemon.address(), problem })
}

/// The cell of a volume; `None` where there is none.
///
/// # Errors
/// As [`group`].
pub(crate) async fn find(
    daemon: &Daemon,
    node: &str,
    id: &CellId,
) -> Result<Option<v1::Cell>, Error> {
    let group = group(daemon, node, &id.group).await?;
    Ok(group.cells.into_iter().find(|cell| cell.name == id.cell))
}

/// Names of the groups, for the topology of this node. While the daemon is away they are those of
/// its last answer: a node that boots is registered before its daemon serves, perhaps.
pub(crate) async fn known_names(daemon: &Daemon, state_dir: &Path) -> Vec<String> {
    let path = state_dir.join(KNOWN);
    let mut names: Vec<String> = match all(daemon).await {
        Ok(groups) => {
            let names: Vec<String> = groups.into_iter().map(|group| group.name).collect();
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
