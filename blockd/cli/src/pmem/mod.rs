//! `blockd pmem`.

mod adopt;
mod create;
mod list;
mod shapes;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use blockd_media::error::Error;
use blockd_pmem::platform::{HostKernel, Places, Platform, RegionKey};

use super::Context;

pub(crate) use adopt::Adopt;
pub(crate) use create::Create;
pub(crate) use list::{List, Show};

/// List, show, make and adopt namespaces of persistent memory
///
/// Reads and writes sysfs, and needs no daemon. Regions are named by the cookie of their
/// interleave set and namespaces by their UUID, which stay the same over reboots; what the kernel
/// numbers does not.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd pmem list")]
pub(crate) enum Pmem {
    List(List),
    Show(Show),
    Create(Create),
    Adopt(Adopt),
}

/// Which host.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Host {
    /// A folder that stands for the host's root, for tests
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub sysfs_root: Option<PathBuf>,
}

impl Host {
    fn platform(&self) -> Platform {
        match &self.sysfs_root {
            Some(root) => Platform::new(Places::under(root), Arc::new(HostKernel)),
            None => Platform::default(),
        }
    }
}

impl Pmem {
    pub(super) fn run(&self, context: &Context) -> Result<(), Error> {
        match self {
            Self::List(list) => list.run(&list.host.platform(), context),
            Self::Show(show) => show.run(&show.host.platform(), context),
            Self::Create(create) => create.run(&create.host.platform(), context),
            Self::Adopt(adopt) => adopt.run(&adopt.host.platform(), context),
        }
    }
}

fn region_key(text: &str) -> Result<RegionKey, Error> {
    text.parse().map_err(|allowed| Error::invalid("region", text, allowed))
}
