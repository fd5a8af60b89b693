//! `blockd pool dump`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use blockd_inspect::dump::{DumpReport, dump};
use blockd_inspect::thin_xml::{Gap, thin_xml};
use blockd_inspect::{MediaMut, Reader, Stopped};
use blockd_mapper::error::MapperError;
use blockd_mapper::units::DeviceIndex;
use blockd_media::error::Error;
use blockd_media::pool::{Access, Offline};
use serde::Serialize;

use super::{ClaimWait, Devices, LostShape, lost_text, reader};
use crate::Context;
use crate::transfer::progress::Steps;

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

    /// As XML for `thin_restore` of dm-thin instead; the pool must be sound
    ///
    /// A volume becomes the thin device with its id; the data device is the pool's devices, the
    /// whole extents of each, one after the other.
    #[arg(long)]
    thin_xml: bool,

    /// First make zero on the media what was never written in extents that are mapped
    ///
    /// dm-thin shows what lies there; blockd shows zeroes before and after. The pool must have been
    /// closed in order.
    #[arg(long, requires = "thin_xml")]
    fill: bool,

    /// Write to this new file instead of standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    claim: ClaimWait,
}

/// The output of `pool dump --json`, when the dump goes to a file.
#[derive(Debug, Serialize)]
struct Dumped {
    output: String,
    volumes: u64,
    leaves: u64,
    log_changes: u64,
    lost: Vec<LostShape>,
}

/// The output of `pool dump --thin-xml --json`.
#[derive(Debug, Serialize)]
struct ThinDumped {
    output: String,
    gaps: usize,
    filled: bool,
}

/// The way on for a pool that has composite entries.
const FOLD: &str =
    "while the daemon has the pool, `blockd pool feature disable composite` folds them";

impl Dump {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        if context.output.is_json() && self.output.is_none() {
            return Err(Error::invalid("output", "", "a file where --json is given"));
        }
        if self.thin_xml {
            return self.thin(context);
        }
        let mut devices = self.devices.open(Access::Read)?;
        let mut reader = reader(&mut devices)?;
        let report = match &self.output {
            None => {
                let steps = Steps::shown("dump", false);
                write(&mut reader, &mut |text| context.output.text(text), &steps)?
            }
            Some(path) => {
                let steps = Steps::shown("dump", !context.output.is_json());
                let report = into_new(path, |file| to_file(&mut reader, file, path, &steps));
                steps.clear();
                let report = report?;
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

    fn thin(&self, context: &Context) -> Result<(), Error> {
        let mut devices = match self.fill {
            true => self.devices.open_as(Access::Write, self.claim)?,
            false => self.devices.open(Access::Read)?,
        };
        let gaps = match &self.output {
            None => {
                let gaps = self.thin_text(&mut devices, &mut |text| context.output.text(text))?;
                self.fill(&mut devices, &gaps)?;
                gaps
            }
            Some(path) => into_new(path, |file| {
                let failed = |source| Error::io("writing the XML", source);
                let mut out = BufWriter::new(file);
                let gaps = self.thin_text(&mut devices, &mut |text| {
                    out.write_all(text.as_bytes()).map_err(failed)
                })?;
                let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
                file.sync_all().map_err(failed)?;
                self.fill(&mut devices, &gaps)?;
                Ok(gaps)
            })?,
        };
        if !self.fill && !gaps.is_empty() && !context.output.is_json() {
            eprintln!(
                "{} range(s) on the media have to be zeroed before dm-thin shows them: see --fill",
                gaps.len()
            );
        }
        match &self.output {
            Some(path) if context.output.is_json() => context.output.last_json(&ThinDumped {
                output: path.display().to_string(),
                gaps: gaps.len(),
                filled: self.fill,
            }),
            _ => Ok(()),
        }
    }

    /// The XML in pieces. Returns the ranges that have to be zero on the media.
    fn thin_text(
        &self,
        devices: &mut Offline,
        out: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<Vec<Gap>, Error> {
        let mut failure = None;
        let mut reader = reader(devices)?;
        self.may_fill(&reader)?;
        let gaps = thin_xml(&mut reader, &mut |piece| {
            out(piece).map_err(|error| {
                failure = Some(error);
                Stopped
            })
        });
        if let Some(error) = failure {
            return Err(error);
        }
        let gaps = gaps.map_err(|error| match error {
            MapperError::Invalid { field: "composite entries", .. } => {
                Error::from(error).with_note(FOLD)
            }
            error => error.into(),
        })?;
        if gaps.torn > 0 {
            let problem = format!(
                "{} extent(s) hold what one volume has discarded and a snapshot of it has not: \
                 there the volume would show the old data in dm-thin",
                gaps.torn
            );
            return Err(Error::Corrupt { what: "XML".to_owned(), problem });
        }
        Ok(gaps.gaps)
    }

    /// Makes these ranges zero on the media, with --fill.
    fn fill(&self, devices: &mut Offline, gaps: &[Gap]) -> Result<(), Error> {
        if !self.fill {
            return Ok(());
        }
        let failed = |error| Error::io("filling gaps", std::io::Error::other(error));
        let mut zeroes = Vec::new();
        for gap in gaps {
            zeroes.resize(usize::try_from(gap.len).unwrap_or(0), 0);
            devices.write(gap.device, gap.offset, &zeroes).map_err(failed)?;
        }
        for device in (0..).take(devices.present().len()) {
            devices.flush(DeviceIndex(device)).map_err(failed)?;
        }
        Ok(())
    }

    /// Answered writes that are only in the delta ring look like never written here.
    fn may_fill(&self, reader: &Reader<'_>) -> Result<(), Error> {
        let superblock = reader.superblock();
        let features = superblock.unknown_ro_compat();
        if self.fill && features != 0 {
            return Err(MapperError::Unsupported { features }.into());
        }
        if self.fill && !superblock.clean {
            let what = format!("pool on {}", self.devices.paths[0].display());
            let problem = "was not closed in order: run `blockd journal replay` before --fill";
            return Err(Error::in_use(what, problem));
        }
        Ok(())
    }
}

/// Makes a new file with this content. After an error there is none, so that the command can be
/// repeated.
fn into_new<T>(path: &Path, write: impl FnOnce(File) -> Result<T, Error>) -> Result<T, Error> {
    let file = File::create_new(path).map_err(|source| Error::file("make", path, source))?;
    let written = write(file);
    if written.is_err() {
        // The error of the content says more than that of its removal.
        let _ = std::fs::remove_file(path);
    }
    written
}

fn to_file(
    reader: &mut Reader<'_>,
    file: File,
    path: &Path,
    steps: &Steps,
) -> Result<DumpReport, Error> {
    let failed = |source| Error::file("write", path, source);
    let mut out = BufWriter::new(file);
    let report = write(reader, &mut |text| out.write_all(text.as_bytes()).map_err(failed), steps)?;
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    Ok(report)
}

/// The dump in pieces; an error of their receiver takes precedence.
fn write(
    reader: &mut Reader<'_>,
    out: &mut dyn FnMut(&str) -> Result<(), Error>,
    steps: &Steps,
) -> Result<DumpReport, Error> {
    let mut failure = None;
    let mut put = |text: &str| {
        out(text).map_err(|error| {
            failure = Some(error);
            Stopped
        })
    };
    let report = dump(reader, &mut put, &mut |now| steps.at(now.volumes, now.of, now.pages));
    match failure {
        Some(error) => Err(error),
        None => Ok(report?),
    }
}
