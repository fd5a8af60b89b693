//! Tools for a pool's metadata. They work on the files or disks themselves, with no daemon.

mod check;
mod downgrade;
mod dump;
mod journal;
mod repair;
mod restore;
mod rmap;
mod scan;

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_inspect::Reader;
use blockd_inspect::dump::Lost;
use blockd_mapper::error::MapperError;
use blockd_media::error::Error;
use blockd_media::pool::{Access, Offline, PoolError};
use serde::Serialize;

use crate::duration::duration;

pub(crate) use check::Check;
pub(crate) use downgrade::Downgrade;
pub(crate) use dump::Dump;
pub(crate) use journal::Journal;
pub(crate) use repair::Repair;
pub(crate) use restore::Restore;
pub(crate) use rmap::Rmap;
pub(crate) use scan::Scan;

/// Which pool.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Devices {
    /// Files or disks of the pool: all of them, in any order
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

impl Devices {
    /// For tools that only read.
    fn open(&self, access: Access) -> Result<Offline, Error> {
        Offline::open(&self.paths, access, Duration::ZERO).map_err(failed)
    }

    fn open_as(&self, access: Access, claim: ClaimWait) -> Result<Offline, Error> {
        Offline::open(&self.paths, access, claim.claim_wait).map_err(failed)
    }
}

/// Of tools that write.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ClaimWait {
    /// How long other hosts that may have the pool open are watched, at least 2s: the claim_wait of
    /// the pool's configuration
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub claim_wait: Duration,
}

/// The pool on these devices.
fn reader(devices: &mut Offline) -> Result<Reader<'_>, Error> {
    let present = devices.present().to_vec();
    Reader::open(devices, &present).map_err(|error| match error {
        MapperError::Io { device, error, .. } if usize::from(device) < present.len() => {
            let path = Path::new(&present[usize::from(device)].name);
            Error::file("read", path, std::io::Error::other(error))
        }
        error => error.into(),
    })
}

fn failed(error: PoolError) -> Error {
    match error {
        PoolError::OpenHere { path, .. } => {
            let problem = "has the id of a pool that is open on this host, by another path or as \
                           a copy: stop that first";
            Error::in_use(path.display().to_string(), problem)
        }
        PoolError::Locked { path, .. } => {
            let what = path.display().to_string();
            let problem =
                "is in use by a daemon or another tool: stop that first, or `pool check --online`";
            Error::in_use(what, problem)
        }
        PoolError::Claimed { path, by } => {
            Error::in_use(path.display().to_string(), format!("is in use: {by}; stop that first"))
        }
        PoolError::OpenElsewhere { path, node } => {
            let problem = format!(
                "is open, or being opened, on another host (node {node:08x}-...): stop that first"
            );
            Error::in_use(path.display().to_string(), problem)
        }
        PoolError::Io { what, path, source } => Error::file(what, &path, source),
        PoolError::Invalid { field, value, allowed } => Error::invalid(field, value, allowed),
        PoolError::Mapper(error) => error.into(),
        other => Error::Unexpected { what: "pool".to_owned(), problem: other.to_string() },
    }
}

fn hex(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

/// A part of a volume that can't be read any more, in JSON.
#[derive(Debug, Serialize)]
struct LostShape {
    volume: Option<String>,
    volume_id: Option<u32>,
    first_byte: u64,
    end_byte: u64,
    text: String,
}

impl From<&Lost> for LostShape {
    fn from(lost: &Lost) -> Self {
        let of_volume = lost.volume.0 != 0;
        Self {
            volume: of_volume.then(|| lost.name.clone()),
            volume_id: of_volume.then_some(lost.volume.0),
            first_byte: lost.range.start,
            end_byte: lost.range.end,
            text: lost.text.clone(),
        }
    }
}

/// The same in a line.
fn lost_text(word: &str, lost: &Lost) -> String {
    if lost.volume.0 == 0 {
        return format!("{word}: {}", lost.text);
    }
    let (name, last) = (blockd_media::error::shown(&lost.name), lost.range.end.saturating_sub(1));
    format!("{word}: volume {name}, bytes {} to {last}: {}", lost.range.start, lost.text)
}
