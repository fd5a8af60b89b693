//! The errors of a pool as a user gets them.

use std::io;

use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_mapper::error::MapperError;
use blockd_media::error::{Error, shown};
use blockd_media::pool::PoolError;

/// An error of this pool, as users see it.
pub fn pool_error(pool: &str, error: PoolError) -> Error {
    let text = error.to_string();
    match error {
        // The mapper knows the id of a device that is missing, and no path.
        PoolError::Mapper(MapperError::Device { name, problem })
            if problem.ends_with("is missing") =>
        {
            let problem = format!("{problem}: no path of the pool leads to it (its id is {name})");
            Error::Corrupt { what: format!("pool {pool}"), problem }
        }
        PoolError::Mapper(error) => of_pool(pool, error.into()),
        PoolError::Io { path, source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
            let problem = format!("{source}: name another one, or clear it first");
            Error::in_use(path.display().to_string(), problem)
        }
        PoolError::Io { what, path, source } => Error::file(what, &path, source),
        PoolError::Locked { waited, owner, .. } => {
            let by = match owner {
                Some(pid) => format!("process {pid}, which"),
                None => "another process, or by IO of one that has ended, which".to_owned(),
            };
            let seconds = waited.as_secs_f32();
            Error::in_use(
                format!("pool {pool}"),
                format!(
                    "is locked by {by} did not end within {seconds:.1} s: stop that process, or \
                     wait longer (pool.lock_wait)"
                ),
            )
        }
        PoolError::Claimed { path, by } => Error::in_use(
            path.display().to_string(),
            format!("is in use: {by}; unmount it or stop that program, or name another device"),
        ),
        PoolError::Foreign { node, wanted: None, .. } => Error::in_use(
            format!("pool {pool}"),
            format!(
                "was last open on another node, {node:08x}-..., which has not closed it: if that \
                 host is dead, `blockd node declare-dead` first"
            ),
        ),
        PoolError::OpenHere { path, waited } => Error::in_use(
            format!("pool {pool}"),
            format!(
                "{} has the id of a pool that is open on this host (waited {:.1} s): stop the \
                 daemon that has these devices by another path, or the pool that this one is a \
                 copy of",
                path.display(),
                waited.as_secs_f32()
            ),
        ),
        PoolError::OpenElsewhere { node, .. } => Error::in_use(
            format!("pool {pool}"),
            format!(
                "is open, or being opened, on another host (node {node:08x}-...): it renews its \
                 claim on the pool; stop the daemon there first"
            ),
        ),
        PoolError::Foreign { .. } => Error::in_use(format!("pool {pool}:"), text),
        PoolError::Invalid { field, value, allowed } => Error::invalid(field, value, allowed),
        PoolError::Exists { path } => {
            Error::in_use(path.display().to_string(), "holds a pool already")
        }
        PoolError::Busy { .. } | PoolError::Gone => Error::in_use(format!("pool {pool}:"), text),
    }
}

/// Names the pool where the mapper, which knows of one only, could not.
fn of_pool(pool: &str, error: Error) -> Error {
    let named = |what: String| if what.starts_with("pool") { format!("pool {pool}") } else { what };
    match error {
        Error::NoSpace { what, needed, free } => Error::NoSpace { what: named(what), needed, free },
        Error::InUse { what, problem } => Error::InUse { what: named(what), problem },
        Error::Io { what, source } => Error::Io { what: named(what), source },
        Error::Corrupt { what, problem } => Error::Corrupt { what: named(what), problem },
        Error::Unexpected { what, problem } => Error::Unexpected { what: named(what), problem },
        other => other,
    }
}

/// The error of a command about volumes. The mapper knows their numbers only where users know
/// their names.
pub(super) fn of(pool: &PoolHandle, error: PoolError) -> Error {
    match error {
        PoolError::Mapper(MapperError::Unsuitable { volume, problem }) => {
            let what = match name_of(pool, volume) {
                Some(name) => format!("volume {}", shown(name)),
                None => format!("a volume of pool {} that is gone", shown(pool.name())),
            };
            Error::in_use(what, problem)
        }
        PoolError::Mapper(MapperError::Exists { name, field: "origin", existing, asked }) => {
            let origin = |id: u64| match u32::try_from(id).ok().filter(|id| *id != 0) {
                None => "none".to_owned(),
                Some(id) => name_of(pool, id).map_or_else(|| "a deleted one".to_owned(), shown),
            };
            Error::Exists {
                what: "volume",
                name: shown(name),
                field: "origin".to_owned(),
                existing: origin(existing),
                asked: origin(asked),
            }
        }
        error => pool_error(pool.name(), error),
    }
}

fn name_of(pool: &PoolHandle, id: u32) -> Option<String> {
    pool.mapper().name_of(VolumeId(id))
}

/// A pool that can't be used because of an earlier failure.
pub(super) fn failed_pool(pool: &str, failure: &str) -> Error {
    Error::io(format!("pool {pool} is not served"), io::Error::other(failure.to_owned()))
}
