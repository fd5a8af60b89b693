//! `blockd pool dump`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use blockd_mapper::inspect::Stopped;
use blockd_mapper::inspect::dump::{DumpReport, dump};
use serde::Serialize;

use super::{Devices, LostShape, lost_text, reader};
use crate::cli::Context;
use crate::error::Error;
use crate::pool::Access;

/// Write the metadata of a pool that no daemon serves as text
///
/// Volumes, snapshots and where each of their extents lies, as they are at the end of the log; not
/// the data itself. `pool restore` reads it. What is damaged is left out and named, with exit code
/// 10; the rest is in the dump all the same. The last line has a sum over all others.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool dump --output default.dump \
                  /var/lib/blockd/default.pool")]
pub(crate) struct Dump {
    #[command(flatten)]
    devices: Devices,

    /// Write to this new file instead of standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What `pool dump --json` prints, when the dump goes to a file.
#[derive(Debug, Serialize)]
struct Dumped {
    output: String,
    volumes: u64,
    leaves: u64,
    log_changes: u64,
    lost: Vec<LostShape>,
}

impl Dump {
    pub(in crate::cli) fn run(&self, context: &Context) -> Result<(), Error> {
        if context.output.is_json() && self.output.is_none() {
            return Err(Error::invalid("output", "", "a file where --json is given"));
        }
        let mut devices = self.devices.open(Access::Read)?;
        let mut reader = reader(&mut devices)?;
        let report = match &self.output {
            None => write(&mut reader, &mut |text| context.output.text(text))?,
            Some(path) => {
                let file = File::create_new(path);
                let file = file.map_err(|source| Error::file("make", path, source))?;
                let report = to_file(&mut reader, file, path)?;
                let shape = Dumped {
                    output: path.display().to_string(),
                    volumes: report.volumes,
                    leaves: report.leaves,
                    log_changes: report.log_changes,
                    lost: report.lost.iter().map(LostShape::from).collect(),
                };
                if context.output.is_json() {
                    context.output.last_json(&shape)?;
                }
                report
            }
        };
        if report.lost.is_empty() {
            return Ok(());
        }
        for lost in &report.lost {
            eprintln!("{}", lost_text("lost", lost));
        }
        let problem =
            format!("{} part(s) can't be read and are not in the dump", report.lost.len());
        Err(Error::Corrupt { what: "pool".to_owned(), problem })
    }
}

fn to_file(
    reader: &mut blockd_mapper::inspect::Reader<'_>,
    file: File,
    path: &Path,
) -> Result<DumpReport, Error> {
    let failed = |source| Error::file("write", path, source);
    let mut out = BufWriter::new(file);
    let report = write(reader, &mut |text| out.write_all(text.as_bytes()).map_err(failed))?;
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    Ok(report)
}

/// The dump in pieces; an error of who takes them is what counts.
fn write(
    reader: &mut blockd_mapper::inspect::Reader<'_>,
    out: &mut dyn FnMut(&str) -> Result<(), Error>,
) -> Result<DumpReport, Error> {
    let mut failure = None;
    let report = dump(reader, &mut |text| {
        out(text).map_err(|error| {
            failure = Some(error);
            Stopped
        })
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(report?),
    }
}
