//! Other servers, whose operations are counted in the same way on the same kind of disk.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Served, Target, VOLUME, Volume};
use crate::nbd::claims::Medium;
use crate::nbd::client::Client;
use crate::nbd::server::{Image, Kind, Server};
use crate::ublk::Mode;
use crate::ublk::backing::Disk;
use crate::ublk::peers::Rublk;

/// A server that is not ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// Over NBD.
    Nbd(Kind),
    /// rublk's loop target.
    Rublk(Mode),
}

/// rublk's program in the machine.
const RUBLK: &str = "/usr/bin/rublk";

impl Peer {
    /// All servers that are compared.
    pub const ALL: [Self; 6] = [
        Self::Nbd(Kind::NbdkitFile),
        Self::Nbd(Kind::NbdkitMemory),
        Self::Nbd(Kind::NbdServer),
        Self::Nbd(Kind::QemuDirect),
        Self::Rublk(Mode::Copy),
        Self::Rublk(Mode::ZeroCopy),
    ];

    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd(kind) => kind.name(),
            Self::Rublk(_) => "rublk loop",
        }
    }

    /// How it is reached.
    #[must_use]
    pub fn target(self) -> Target {
        match self {
            Self::Nbd(_) => Target::Nbd,
            Self::Rublk(mode) => Target::Ublk(mode),
        }
    }

    /// Starts it. Its disk is not used by ours.
    pub(super) fn start(self, scratch: &Path) -> Result<Served> {
        let folder = scratch.join(format!("peer-{self:?}").replace(['(', ')'], "-"));
        match self {
            Self::Nbd(kind) => {
                let file = Disk::Plain.path();
                let image =
                    Image { folder, file, size: VOLUME, snapshots: 0, medium: Medium::Disk };
                let server = Server::start(kind, &image, &PathBuf::new())?;
                let uri = server.uri.clone();
                let volume = Volume::Export { client: Client::connect(&uri)?, uri };
                let pid = server.tree.root();
                Ok(Served { pid, volume, server: Box::new(server) })
            }
            Self::Rublk(mode) => {
                std::fs::create_dir_all(&folder)?;
                let log = folder.join("log");
                let server = Rublk::start(Path::new(RUBLK), Disk::Plain, mode, &log)?;
                let device = server.device();
                let pid = device.server.context("rublk has no process")?;
                Ok(Served { pid, volume: Volume::Device(device.path), server: Box::new(server) })
            }
        }
    }
}
