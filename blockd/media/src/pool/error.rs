//! Why something could not be done with a pool.

use std::path::PathBuf;
use std::time::Duration;

use blockd_mapper::error::MapperError;

/// Why something could not be done with a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The mapper refuses, or has failed.
    #[error(transparent)]
    Mapper(#[from] MapperError),
    /// The operating system refuses.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The failed step.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// Another process owns the pool, or its IO has not ended yet.
    #[error(
        "{} is in use by {} (waited {:.1} s)",
        path.display(),
        match owner {
            Some(pid) => format!("process {pid}"),
            None => "another process, or by IO of one that has ended".to_owned(),
        },
        waited.as_secs_f32()
    )]
    Locked {
        /// The device.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
        /// The process that has it, where it lives and is seen from here.
        owner: Option<u32>,
    },
    /// A pool with the same id is open on this host, by another path or another process.
    #[error(
        "{} has the id of a pool that is open on this host, after {:.1} s: the same devices by \
         another path, or a copy",
        path.display(),
        waited.as_secs_f32()
    )]
    OpenHere {
        /// The first device.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A block device has a file system that is mounted, is part of another device, or is open
    /// exclusively.
    #[error("{} is in use: {by}", path.display())]
    Claimed {
        /// The device.
        path: PathBuf,
        /// By what.
        by: String,
    },
    /// Another node had the pool last.
    #[error(
        "{} was last open on node {node:08x}, {}",
        path.display(),
        match wanted {
            Some(wanted) => format!("not on node {wanted:08x}"),
            None => "which has not closed it".to_owned(),
        }
    )]
    Foreign {
        /// The device.
        path: PathBuf,
        /// The number of the node that had it.
        node: u32,
        /// The number of the node that was to have had it.
        wanted: Option<u32>,
    },
    /// Another host has the pool open, or opens it at this moment.
    #[error("{} is open, or being opened, on another host (node {node:08x})", path.display())]
    OpenElsewhere {
        /// The device.
        path: PathBuf,
        /// The number of the node; 0 where it is not known.
        node: u32,
    },
    /// Something is outside what is allowed.
    #[error("{field} is {value}: must be {allowed}")]
    Invalid {
        /// Its name.
        field: &'static str,
        /// The invalid value.
        value: String,
        /// The allowed values.
        allowed: String,
    },
    /// There is something on a device that a new pool would destroy.
    #[error("{} holds a pool already", path.display())]
    Exists {
        /// The device.
        path: PathBuf,
    },
    /// Too many commands wait for the pool's thread.
    #[error("pool is busy: {limit} commands wait already")]
    Busy {
        /// How many may wait.
        limit: usize,
    },
    /// The pool's thread has ended.
    #[error("pool is closed")]
    Gone,
}

impl PoolError {
    /// Whether another process or host has the devices, and what lies on them.
    #[must_use]
    pub const fn is_of_another_opener(&self) -> bool {
        matches!(
            self,
            Self::Locked { .. }
                | Self::OpenHere { .. }
                | Self::OpenElsewhere { .. }
                | Self::Claimed { .. }
                | Self::Exists { .. }
        )
    }

    /// Attaches what was being done to an error of the operating system.
    pub fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}
