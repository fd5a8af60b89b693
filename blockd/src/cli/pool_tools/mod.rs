//! Tools for a pool's metadata. They work on the files or disks themselves, with no daemon.

mod check;

use std::path::PathBuf;

use blockd_mapper::inspect::Reader;

use crate::error::Error;
use crate::pool::{Access, Offline, PoolError};

pub(crate) use check::Check;

/// Which pool.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Devices {
    /// Files or disks of the pool: all of them, in any order
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

impl Devices {
    fn open(&self, access: Access) -> Result<Offline, Error> {
        Offline::open(&self.paths, access).map_err(failed)
    }
}

/// The pool on these devices.
fn reader(devices: &mut Offline) -> Result<Reader<'_>, Error> {
    let present = devices.present().to_vec();
    Ok(Reader::open(devices, &present)?)
}

fn failed(error: PoolError) -> Error {
    match error {
        PoolError::Locked { path, .. } => {
            let what = path.display().to_string();
            Error::in_use(what, "is in use by a daemon or another tool: stop that first")
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
