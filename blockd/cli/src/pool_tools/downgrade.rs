//! `blockd pool downgrade`.

use blockd_inspect::check::check;
use blockd_mapper::format::superblock::COMPOSITE;
use blockd_mapper::format::{FORMAT_MAJOR, FORMAT_MINOR};
use blockd_media::error::Error;
use blockd_media::pool::Access;
use serde::Serialize;

use super::{Devices, reader};
use crate::Context;

/// Make a pool one that older releases open
///
/// Refused for a pool that was not closed in order, that is damaged, or that uses what the older
/// version of the format does not know; nothing is changed then. There is one version of the
/// format so far.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool downgrade --to 1.0 /var/lib/blockd/default.pool")]
pub(crate) struct Downgrade {
    #[command(flatten)]
    devices: Devices,

    /// The version of the format, like 1.0
    #[arg(long, value_name = "VERSION")]
    to: String,
}

/// The output of `pool downgrade --json`.
#[derive(Debug, Serialize)]
struct Downgraded {
    changed: bool,
    version: String,
}

impl Downgrade {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let wanted = version(&self.to)?;
        let mut devices = self.devices.open(Access::Read)?;
        let mut reader = reader(&mut devices)?;
        let superblock = reader.superblock().clone();
        let what = format!("pool on {}", self.devices.paths[0].display());
        let present = (superblock.major, superblock.minor);
        let (major, minor) = present;
        if wanted > present {
            let allowed = format!("no more than {major}.{minor}, the pool's own");
            return Err(Error::invalid("to", &self.to, allowed));
        }
        if !superblock.clean {
            let problem = "was not closed in order: run `blockd journal replay` first";
            return Err(Error::in_use(what, problem));
        }
        // Version 1 and those before it know no feature at all.
        let features = superblock.incompat | superblock.ro_compat;
        if features != 0 {
            let mut problem =
                format!("uses features {features:#x}, which {} doesn't know", self.to);
            if features == COMPOSITE {
                problem.push_str(": run `blockd pool feature disable composite` first");
            }
            return Err(Error::in_use(what, problem));
        }
        let report = check(&mut reader, &mut |_| Ok(()))?;
        if report.damaged {
            let problem = "is damaged: `blockd pool check` says where".to_owned();
            return Err(Error::Corrupt { what, problem });
        }
        if wanted != present {
            let allowed = format!("{FORMAT_MAJOR}.{FORMAT_MINOR}, the one that this build writes");
            return Err(Error::invalid("to", &self.to, allowed));
        }
        let downgraded = Downgraded { changed: false, version: self.to.clone() };
        context
            .output
            .either(&downgraded, || format!("the pool is of version {} already\n", self.to))
    }
}

fn version(text: &str) -> Result<(u16, u16), Error> {
    let parts = text
        .split_once('.')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| Error::invalid("to", text, "a version of the format, like 1.0"))
}
