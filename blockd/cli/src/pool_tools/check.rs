//! `blockd pool check`.

use std::cell::RefCell;
use std::time::Duration;

use blockd_inspect::Reader;
use blockd_inspect::check::{
    Account, Finding, Progress, Report, Severity, check, check_checkpoint,
};
use blockd_media::error::Error;
use blockd_media::pool::{Access, Offline};
use serde::Serialize;

use super::{Devices, hex, reader};
use crate::Context;
use crate::output::terminal::Tone;
use crate::transfer::progress::Steps;

/// Checks of a pool that is served before it is said that it changes too fast. A checkpoint comes
/// once a minute, or when the log is half full.
const ONLINE_TRIES: u32 = 5;
/// Between two of them, for superblocks that are just being written.
const ONLINE_PAUSE: Duration = Duration::from_millis(100);

/// Check the metadata of a pool
///
/// Reads superblocks, catalogue, trees and log, and compares them with every rule they have to
/// keep: checksums, names and ids, sizes, no extent with two owners, all extents accounted for.
/// Writes nothing. Each finding names the volume and its bytes; damage is exit code 10. What a
/// crash leaves and the next start puts right is a note. A warning is left by no crash, and
/// keeps no daemon from serving the pool. No daemon may serve the pool meanwhile, but with
/// --online.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool check /var/lib/blockd/default.pool\n  \
                  blockd pool check --online /var/lib/blockd/default.pool")]
pub(crate) struct Check {
    #[command(flatten)]
    devices: Devices,

    /// While a daemon serves the pool: check its last checkpoint
    ///
    /// Takes no lock and delays no request. The log is not checked, and so neither are changes
    /// since the checkpoint. The data is read from the media instead of the host's page cache if
    /// the file system supports that. If a new checkpoint replaces the old one during the check,
    /// the check begins again with the new one, up to five times.
    #[arg(long)]
    online: bool,
}

/// The output of `pool check --json`.
#[derive(Debug, Serialize)]
struct Checked {
    pool_id: String,
    damaged: bool,
    online: bool,
    generation: u64,
    checkpoint_lsn: u64,
    clean: bool,
    volumes: u64,
    snapshots: u64,
    pages: u64,
    leaves: u64,
    leaf_references: u64,
    log_blocks: u64,
    log_changes: u64,
    log_pending: u64,
    space: Space,
    findings: Vec<FindingShape>,
    more_findings: u64,
}

#[derive(Debug, Serialize)]
struct Space {
    total_bytes: u64,
    data_bytes: u64,
    metadata_bytes: u64,
    free_bytes: u64,
}

#[derive(Debug, Serialize)]
struct FindingShape {
    severity: &'static str,
    kind: &'static str,
    volume: Option<String>,
    volume_id: Option<u32>,
    first_byte: Option<u64>,
    end_byte: Option<u64>,
    text: String,
}

impl Check {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let access = if self.online { Access::Look } else { Access::Read };
        let mut devices = self.devices.open(access)?;
        let steps = Steps::shown("check", !context.output.is_json());
        let found = if self.online {
            self.settled(&mut devices, &steps)
        } else {
            self.once(&mut devices, &steps)
        };
        steps.clear();
        let (report, shape) = found?;
        if context.output.is_json() {
            context.output.last_json(&shape)?;
        } else {
            context.output.text(&text(&shape, context))?;
        }
        judge(&report)
    }

    fn once(&self, devices: &mut Offline, steps: &Steps) -> Result<(Report, Checked), Error> {
        let mut reader = reader(devices)?;
        let mut progress = |now: Progress| {
            steps.at(now.volumes, now.of, now.pages);
            Ok(())
        };
        let report = if self.online {
            check_checkpoint(&mut reader, &mut progress)?
        } else {
            check(&mut reader, &mut progress)?
        };
        let shape = Checked { online: self.online, ..shape(&reader, &report) };
        Ok((report, shape))
    }

    fn settled(&self, devices: &mut Offline, steps: &Steps) -> Result<(Report, Checked), Error> {
        let devices = RefCell::new(devices);
        let once = || {
            let (report, shape) = self.once(&mut devices.borrow_mut(), steps)?;
            let (damaged, generation) = (report.damaged, shape.generation);
            Ok(Found { damaged, generation, what: (report, shape) })
        };
        let newest = || newest_generation(&mut devices.borrow_mut());
        let settled = settle(once, newest, || std::thread::sleep(ONLINE_PAUSE))?;
        settled.ok_or_else(|| {
            let what = format!("pool on {}", self.devices.paths[0].display());
            let problem = "writes checkpoints faster than one can be read: try again when less is \
                           written";
            Error::in_use(what, problem)
        })
    }
}

/// The result of one check of a served pool.
struct Found<T> {
    damaged: bool,
    generation: u64,
    what: T,
}

/// Repeats the check until its result counts. A sound result counts: each page was the one that its
/// parent names. Damage counts if it is found a second time without a newer checkpoint in between,
/// since pages that are being written look damaged for a moment. `None` where a newer checkpoint
/// came each time.
fn settle<T>(
    mut once: impl FnMut() -> Result<Found<T>, Error>,
    mut newest: impl FnMut() -> Result<u64, Error>,
    mut pause: impl FnMut(),
) -> Result<Option<T>, Error> {
    let mut before = None;
    for tries in 1..=ONLINE_TRIES {
        let last = tries == ONLINE_TRIES;
        match once() {
            Ok(found) if !found.damaged => return Ok(Some(found.what)),
            // Superblocks that can't be read may be just being written: that is tried again. Where
            // it stays so, what was found before is still true.
            Ok(found) => match newest() {
                Ok(generation) if generation != found.generation => {}
                Ok(generation) if before == Some(generation) || last => {
                    return Ok(Some(found.what));
                }
                Err(_) if last => return Ok(Some(found.what)),
                Ok(_) | Err(_) => before = Some(found.generation),
            },
            Err(error) if last => return Err(error),
            Err(_) => {}
        }
        if !last {
            pause();
        }
    }
    Ok(None)
}

fn newest_generation(devices: &mut Offline) -> Result<u64, Error> {
    Ok(reader(devices)?.superblock().generation)
}

fn judge(report: &Report) -> Result<(), Error> {
    if !report.damaged {
        return Ok(());
    }
    let damage = report.findings.iter().filter(|f| f.severity == Severity::Damage).count();
    let count = damage as u64 + report.more;
    Err(Error::Corrupt { what: "pool".to_owned(), problem: format!("{count} damage(s) found") })
}

fn shape(reader: &Reader<'_>, report: &Report) -> Checked {
    let extent = reader.geometry().extent_size();
    let Account { total, fixed, reserve, pages, data, free } = report.account;
    Checked {
        pool_id: hex(&reader.superblock().pool_id),
        damaged: report.damaged,
        online: false,
        generation: reader.superblock().generation,
        checkpoint_lsn: reader.superblock().checkpoint_lsn.0,
        clean: report.clean,
        volumes: report.volumes,
        snapshots: report.snapshots,
        pages: report.pages,
        leaves: report.leaves,
        leaf_references: report.leaf_references,
        log_blocks: report.log.blocks,
        log_changes: report.log.changes,
        log_pending: report.log.pending,
        space: Space {
            total_bytes: total * extent,
            data_bytes: data * extent,
            metadata_bytes: (fixed + reserve + pages) * extent,
            free_bytes: free * extent,
        },
        findings: report.findings.iter().map(finding).collect(),
        more_findings: report.more,
    }
}

fn finding(found: &Finding) -> FindingShape {
    FindingShape {
        severity: match found.severity {
            Severity::Damage => "damage",
            Severity::Warning => "warning",
            Severity::Note => "note",
        },
        kind: found.kind,
        volume: found.name.clone(),
        volume_id: found.volume.map(|id| id.0),
        first_byte: found.range.as_ref().map(|range| range.start),
        end_byte: found.range.as_ref().map(|range| range.end),
        text: found.text.clone(),
    }
}

fn text(checked: &Checked, context: &Context) -> String {
    let (output, paint) = (&context.output, context.output.paint());
    let mut lines = Vec::new();
    for found in &checked.findings {
        let tone = match found.severity {
            "damage" => Tone::Bad,
            "warning" => Tone::Warning,
            _ => Tone::Plain,
        };
        let mut line = format!("{}: {}", paint.text(tone, found.severity), found.kind);
        if let Some(name) = &found.volume {
            line.push_str(&format!(": volume {}", blockd_media::error::shown(name)));
        }
        if let (Some(first), Some(end)) = (found.first_byte, found.end_byte) {
            line.push_str(&format!(", bytes {first} to {}", end.saturating_sub(1)));
        }
        lines.push(format!("{line}: {}", found.text));
    }
    if checked.more_findings > 0 {
        lines.push(format!("and {} more", checked.more_findings));
    }
    let (generation, lsn) = (checked.generation, checked.checkpoint_lsn);
    let state = match (checked.online, checked.clean) {
        (true, _) => format!("as of its last checkpoint (generation {generation}, LSN {lsn})"),
        (false, true) => "closed in order".to_owned(),
        (false, false) => "not closed in order".to_owned(),
    };
    lines.push(format!("pool {}: {state}", checked.pool_id));
    lines.push(format!(
        "{} volume(s), {} snapshot(s), {} leaves in {} places, {} pages",
        checked.volumes, checked.snapshots, checked.leaves, checked.leaf_references, checked.pages
    ));
    if checked.online {
        lines.push("what was written since, in the log and the delta ring, was not checked".into());
    } else if !checked.clean {
        lines.push(format!(
            "log: {} block(s), {} change(s), {} of them behind the checkpoint",
            checked.log_blocks, checked.log_changes, checked.log_pending
        ));
        lines.push("answered writes that were not flushed may be in the delta ring".to_owned());
    }
    let space = &checked.space;
    lines.push(format!(
        "{}: {} data, {} metadata, {} free",
        output.size(space.total_bytes),
        output.size(space.data_bytes),
        output.size(space.metadata_bytes),
        output.size(space.free_bytes)
    ));
    let (tone, word) = if checked.damaged { (Tone::Bad, "damaged") } else { (Tone::Good, "sound") };
    lines.push(paint.text(tone, word));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it was checked, and what came of it. `newest` is what is read after each.
    fn settled(damaged: bool, newest: &[Option<u64>]) -> (u32, Result<Option<u32>, Error>) {
        let gone = || Error::in_use("superblock", "can't be read");
        let (checks, mut looks) = (std::cell::Cell::new(0), newest.iter());
        let once = || {
            checks.set(checks.get() + 1);
            Ok(Found { damaged, generation: 7, what: checks.get() })
        };
        let settled = settle(once, || looks.next().copied().flatten().ok_or_else(gone), || ());
        (checks.get(), settled)
    }

    #[test]
    fn a_superblock_that_cannot_be_read_for_a_moment_ends_no_check() {
        assert!(matches!(settled(true, &[None, Some(7)]), (2, Ok(Some(2)))));
        // For good: the last result counts.
        assert!(matches!(settled(true, &[None; 5]), (5, Ok(Some(5)))));
    }

    #[test]
    fn damage_counts_where_no_newer_checkpoint_has_come() {
        assert!(matches!(settled(false, &[]), (1, Ok(Some(1)))));
        assert!(matches!(settled(true, &[Some(7), Some(7)]), (2, Ok(Some(2)))));
        assert!(matches!(settled(true, &[Some(8), Some(7), Some(7)]), (3, Ok(Some(3)))));
        assert!(matches!(settled(true, &[Some(8); 5]), (5, Ok(None))));
    }
}
