//! Why a coordinator or a fence did not do what it was asked for.

use std::io;

use crate::cell::{CellName, HostNumber};

/// One error of all coordinators and fences.
#[derive(Debug, thiserror::Error)]
pub enum HostsError {
    /// The service does not answer, or not in time. Cells that are open go on (H12).
    #[error("{group}: the coordinator does not answer: {problem}")]
    Away {
        /// The group of cells.
        group: String,
        /// Its last words.
        problem: String,
    },
    /// The host that has the cell is not known.
    #[error("the lease of cell {cell} can't be read: {problem}")]
    NotKnown {
        /// Which.
        cell: CellName,
        /// Why not.
        problem: String,
    },
    /// Another host has the cell.
    #[error("cell {cell} is held by {}", holder(*.by))]
    Held {
        /// Which.
        cell: CellName,
        /// By its lease, as far as known.
        by: Option<HostNumber>,
    },
    /// This host does not have the cell.
    #[error("cell {cell} is not held by this host")]
    NotHeld {
        /// Which.
        cell: CellName,
    },
    /// There is none of that name.
    #[error("cell {cell} does not exist in {group}")]
    NotFound {
        /// Which.
        cell: CellName,
        /// The group of cells.
        group: String,
    },
    /// There is one of that name.
    #[error("cell {cell} exists in {group}")]
    Exists {
        /// Which.
        cell: CellName,
        /// The group of cells.
        group: String,
    },
    /// The group has no room.
    #[error("{group}: no space: {needed} bytes needed, {free} bytes free")]
    NoSpace {
        /// The group of cells.
        group: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The device of the cell is open.
    #[error("the device of cell {cell} is in use")]
    InUse {
        /// Which.
        cell: CellName,
    },
    /// This host was fenced: its key is gone (H5).
    #[error(
        "{group}: this host was fenced: its key is not registered any more; end what uses the \
         group's devices and restart the host"
    )]
    Fenced {
        /// The group of cells, or the device.
        group: String,
    },
    /// The host has another key than the one that was looked up: another incarnation has begun.
    #[error("host {host} has come back meanwhile, with another key")]
    CameBack {
        /// Which.
        host: HostNumber,
    },
    /// The group or its devices lack something that is needed.
    #[error("{group} {problem}")]
    Unsuitable {
        /// The group of cells, or the device.
        group: String,
        /// What, and what would help.
        problem: String,
    },
    /// A command failed for another reason.
    #[error("{command}: {problem}")]
    Command {
        /// The command as it was run.
        command: String,
        /// Its last words.
        problem: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The answer.
        #[source]
        source: io::Error,
    },
}

fn holder(by: Option<HostNumber>) -> String {
    by.map_or_else(|| "another host".to_owned(), |host| format!("host {host}"))
}

impl From<HostsError> for blockd_media::error::Error {
    fn from(error: HostsError) -> Self {
        let text = error.to_string();
        let cell_is =
            |cell: &CellName, problem: &str| Self::in_use(format!("cell {cell}"), problem);
        match error {
            HostsError::NotFound { cell, .. } => Self::not_found("cell", cell.as_str()),
            HostsError::Held { cell, by } => {
                let problem = format!(
                    "is held by {}: release it there, or take it with --fence, which keeps that \
                     host from all cells of the group",
                    holder(by)
                );
                cell_is(&cell, &problem)
            }
            HostsError::NotKnown { cell, problem } => {
                cell_is(&cell, &format!("has a lease that can't be read, try again: {problem}"))
            }
            HostsError::NotHeld { cell } => {
                cell_is(&cell, "is not held by this host: `blockd cell take` it first")
            }
            HostsError::Exists { cell, group } => cell_is(&cell, &format!("exists in {group}")),
            HostsError::InUse { cell } => cell_is(&cell, "is in use: its device is open"),
            HostsError::NoSpace { group, needed, free } => {
                Self::NoSpace { what: group, needed, free }
            }
            HostsError::Unsuitable { group, problem } => Self::in_use(group, problem),
            HostsError::CameBack { host } => {
                let problem = "has come back meanwhile, with another key: nothing more was changed";
                Self::in_use(format!("host {host}"), problem)
            }
            HostsError::Away { group, problem } => {
                Self::in_use(group, format!("can't be asked now, try again: {problem}"))
            }
            HostsError::Fenced { .. } => match text.split_once(": ") {
                Some((group, problem)) => Self::in_use(format!("{group}:"), problem),
                None => Self::in_use(text, ""),
            },
            HostsError::Command { command, problem } => {
                Self::io(command, io::Error::other(problem))
            }
            HostsError::Io { what, source } => Self::io(what, source),
        }
    }
}
