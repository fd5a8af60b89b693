//! `blockd pool restore`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;

use blockd_inspect::Reader;
use blockd_inspect::check::check;
use blockd_inspect::restore::{Plan, Scan, Target};
use blockd_media::error::Error;
use blockd_media::pool::{Access, Offline};
use serde::Serialize;

use super::{ClaimWait, Devices, hex};
use crate::Context;
use crate::transfer::progress::Progress;

/// Write the metadata of a pool anew from a dump
///
/// The data stays where it is: the dump must be of this pool, and no older than the last write,
/// discard or snapshot. All of the dump is judged before anything is written. Without --force the
/// pool has to be damaged, and each device has to say by a superblock of its own that it is the
/// one of the dump, and that no later release has used it in a way that this one doesn't know.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool restore --from default.dump \
                  /var/lib/blockd/default.pool")]
pub(crate) struct Restore {
    #[command(flatten)]
    devices: Devices,

    /// The dump
    #[arg(long, value_name = "FILE")]
    from: PathBuf,

    /// Also over a pool that is sound, over one with features of a later release, and on devices
    /// that don't say what they are
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    claim: ClaimWait,
}

/// The output of `pool restore --json`.
#[derive(Debug, Serialize)]
struct Restored {
    pool_id: String,
    volumes: u64,
    pages: u64,
    lost_slots: u64,
}

impl Restore {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        let found = std::fs::metadata(&self.from);
        let found = found.map_err(|source| Error::file("read", &self.from, source))?;
        // It is read twice: judged, then carried out. A pipe has nothing the second time.
        if !found.is_file() {
            return Err(Error::invalid("--from", self.from.display(), "a file, not a pipe"));
        }
        let len = found.len();
        let bar = Progress::shown("restore", len.saturating_mul(2), !context.output.is_json());
        let done = self.restore(&bar);
        bar.clear();
        let restored = done?;
        context.output.either(&restored, || {
            let (volumes, pages) = (restored.volumes, restored.pages);
            let mut text = format!(
                "pool {}: {volumes} volume(s) and snapshot(s) restored, {pages} pages written\n",
                restored.pool_id
            );
            if restored.lost_slots > 0 {
                let more = "parts of leaves were lost when it was dumped: they read as zeroes";
                text.push_str(&format!("{} {more}\n", restored.lost_slots));
            }
            text
        })
    }

    fn restore(&self, bar: &Progress) -> Result<Restored, Error> {
        let plan = self.plan(bar)?;
        let access = if self.force { Access::Replace } else { Access::Write };
        let mut devices = self.devices.open_as(access, self.claim)?;
        let present = devices.present().to_vec();
        let target = plan.target(&mut devices, &present)?;
        if !self.force {
            self.refuse(&mut devices, &target)?;
        }
        let (volumes, lost_slots, pool_id) = (plan.volumes(), plan.lost_slots(), plan.pool_id());
        let mut restoring = plan.begin(&mut devices, target)?;
        self.lines(bar, |line| restoring.line(line).map(|()| true).map_err(Error::from))?;
        let pages = restoring.finish()?;
        Ok(Restored { pool_id: hex(&pool_id), volumes, pages, lost_slots })
    }

    fn plan(&self, bar: &Progress) -> Result<Plan, Error> {
        let mut scan = Scan::new();
        self.lines(bar, |line| Ok(scan.line(line)))?;
        scan.finish().map_err(|error| Error::Corrupt {
            what: self.from.display().to_string(),
            problem: error.to_string(),
        })
    }

    fn lines(
        &self,
        bar: &Progress,
        mut each: impl FnMut(&str) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let failed = |source| Error::file("read", &self.from, source);
        let file = File::open(&self.from).map_err(failed)?;
        for line in BufReader::new(file).lines() {
            let line = line.map_err(failed)?;
            if !each(&line)? {
                break;
            }
            bar.add(line.len() as u64 + 1);
        }
        Ok(())
    }

    fn refuse(&self, devices: &mut Offline, target: &Target) -> Result<(), Error> {
        let what = format!("pool on {}", self.devices.paths[0].display());
        if let Some(later) = &target.later {
            let problem = format!(
                "was used by a later release: {later}; --force writes over what only that one knows"
            );
            return Err(Error::in_use(what, problem));
        }
        if !target.known {
            let problem = "has devices without a readable superblock: are they the right ones? \
                           Then --force restores to them, in the order given";
            return Err(Error::in_use(what, problem));
        }
        let present = devices.present().to_vec();
        // One that can't be opened at all is damaged for sure.
        let sound = Reader::open(devices, &present)
            .and_then(|mut reader| check(&mut reader, &mut |_| Ok(())))
            .is_ok_and(|report| !report.damaged);
        if sound {
            let problem = "is sound: --force would lose what has changed since the dump";
            return Err(Error::in_use(what, problem));
        }
        Ok(())
    }
}
