//! `blockd pool repair`.

use blockd_inspect::repair::{RepairOptions, repair};
use blockd_media::error::Error;
use blockd_media::pool::{Access, boot_id};
use serde::Serialize;

use super::{ClaimWait, Devices, LostShape, failed, lost_text};
use crate::Context;
use crate::transfer::progress::Steps;

/// Repair the metadata of a pool that no daemon serves
///
/// Keeps sound metadata, and writes it as new trees beside the old ones; a sound pool is left
/// unchanged. Lost pages are searched for among all pages on the media. A page that is found by its
/// header alone is reported as salvaged: it was right at some time, and may be older than the lost
/// one. Ranges that are not found read as zeroes. The delta ring is not read: where a
/// daemon was killed since the host's boot, --accept-loss drops it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool repair --dry-run /var/lib/blockd/default.pool\n  \
                  blockd pool repair /var/lib/blockd/default.pool")]
pub(crate) struct Repair {
    #[command(flatten)]
    devices: Devices,

    /// Only say what would be lost and salvaged
    #[arg(long)]
    dry_run: bool,

    /// Salvage nothing: what is not proven to be the last state reads as zeroes
    #[arg(long)]
    strict: bool,

    /// Take a path without a superblock for the pool's missing device, and write to it
    #[arg(long)]
    force: bool,

    /// Drop the delta ring of a daemon that was killed: answered writes that were not flushed are
    /// lost
    #[arg(long)]
    accept_loss: bool,

    #[command(flatten)]
    claim: ClaimWait,
}

/// The output of `pool repair --json`.
#[derive(Debug, Serialize)]
struct Repaired {
    damaged: bool,
    changed: bool,
    volumes: u64,
    lost: Vec<LostShape>,
    salvaged: Vec<LostShape>,
    identified: Option<String>,
    drops_ring: bool,
}

impl Repair {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let access = if self.force { Access::Complete } else { Access::Write };
        let mut devices = match self.dry_run {
            true => self.devices.open(Access::Read)?,
            false => self.devices.open_as(access, self.claim)?,
        };
        let present = devices.present().to_vec();
        let options = RepairOptions {
            dry_run: self.dry_run,
            strict: self.strict,
            force: self.force,
            boot_id: Some(boot_id().map_err(failed)?),
            accept_loss: self.accept_loss,
        };
        let steps = Steps::shown("repair", !context.output.is_json());
        let report = repair(&mut devices, &present, options, &mut |now| {
            steps.at(now.volumes, now.of, now.pages);
        });
        steps.clear();
        let report = report?;
        let shapes = |parts: &[_]| parts.iter().map(LostShape::from).collect();
        let repaired = Repaired {
            damaged: report.damaged,
            changed: report.changed,
            volumes: report.volumes,
            lost: shapes(&report.lost),
            salvaged: shapes(&report.salvaged),
            identified: report.identified.clone(),
            drops_ring: report.drops_ring,
        };
        context.output.either(&repaired, || {
            if !report.damaged {
                return "the pool is sound: there is nothing to repair\n".to_owned();
            }
            let mut text = String::new();
            if let Some(path) = &report.identified {
                text.push_str(&format!(
                    "{path} has no superblock, and is taken for the missing device\n"
                ));
            }
            if report.drops_ring {
                text.push_str("lost: answered writes in the delta ring that were not flushed\n");
            }
            for lost in &report.lost {
                text.push_str(&format!("{}\n", lost_text("lost", lost)));
            }
            for salvaged in &report.salvaged {
                text.push_str(&format!("{}\n", lost_text("salvaged", salvaged)));
            }
            let word = if report.changed { "repaired" } else { "damaged" };
            text.push_str(&format!("{word}: {} volume(s) and snapshot(s)\n", report.volumes));
            text
        })
    }
}
