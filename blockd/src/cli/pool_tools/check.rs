//! `blockd pool check`.

use blockd_mapper::inspect::Reader;
use blockd_mapper::inspect::check::{Account, Finding, Progress, Report, Severity, check};
use serde::Serialize;

use super::{Devices, hex, reader};
use crate::cli::Context;
use crate::cli::output::terminal::Tone;
use crate::cli::transfer::progress::Steps;
use crate::error::Error;
use crate::pool::Access;

/// Check the metadata of a pool that no daemon serves
///
/// Reads superblocks, catalogue, trees and log, and compares them with every rule they have to
/// keep: checksums, names and ids, sizes, no extent with two owners, all extents accounted for.
/// Writes nothing. Each finding names the volume and its bytes; damage is exit code 10. What a
/// crash leaves and the next start puts right is a note.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool check /var/lib/blockd/default.pool")]
pub(crate) struct Check {
    #[command(flatten)]
    devices: Devices,
}

/// What `pool check --json` prints.
#[derive(Debug, Serialize)]
struct Checked {
    pool_id: String,
    damaged: bool,
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
    pub(in crate::cli) fn run(&self, context: &Context) -> Result<(), Error> {
        let mut devices = self.devices.open(Access::Read)?;
        let mut reader = reader(&mut devices)?;
        let steps = Steps::shown("check", !context.output.is_json());
        let report = check(&mut reader, &mut |now: Progress| {
            steps.at(now.volumes, now.of, now.pages);
            Ok(())
        });
        steps.clear();
        let report = report?;
        let shape = shape(&reader, &report);
        if context.output.is_json() {
            context.output.last_json(&shape)?;
        } else {
            context.output.text(&text(&shape, context))?;
        }
        judge(&report)
    }
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
        let tone = if found.severity == "damage" { Tone::Bad } else { Tone::Plain };
        let mut line = format!("{}: {}", paint.text(tone, found.severity), found.kind);
        if let Some(name) = &found.volume {
            line.push_str(&format!(": volume {}", crate::error::shown(name)));
        }
        if let (Some(first), Some(end)) = (found.first_byte, found.end_byte) {
            line.push_str(&format!(", bytes {first} to {}", end.saturating_sub(1)));
        }
        lines.push(format!("{line}: {}", found.text));
    }
    if checked.more_findings > 0 {
        lines.push(format!("and {} more", checked.more_findings));
    }
    let state = if checked.clean { "closed in order" } else { "not closed in order" };
    lines.push(format!("pool {}: {state}", checked.pool_id));
    lines.push(format!(
        "{} volume(s), {} snapshot(s), {} leaves in {} places, {} pages",
        checked.volumes, checked.snapshots, checked.leaves, checked.leaf_references, checked.pages
    ));
    if !checked.clean {
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
