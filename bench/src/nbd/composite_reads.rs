//! Random reads of a volume with composite entries, beside those of one without. Both are full and
//! share everything with a snapshot; one in ten extents of the first was half written since.

use anyhow::{Context, Result, ensure};

use super::claims::Medium;
use super::client::Client;
use super::fio::{Jobs, Settings};
use super::first_touch::Place;
use super::measure::{Effort, Sample, run};
use super::ours;
use super::print::Claim;
use super::server::Image;
use crate::load::{Order, Pattern, exactly};
use crate::stats::{Ratio, median};

/// Bytes of an extent.
const EXTENT: u64 = 256 << 10;
/// One extent in ten becomes composite.
const EACH: u64 = 10;
/// Reads of the volume with composite entries, beside those of the other.
const TARGET: f64 = 0.9;
/// Jobs by the depth that they have.
const JOBS: [(&str, &str); 2] = [("32", "randread"), ("1", "randread-qd1")];
const VOLUMES: [&str; 2] = ["plain", "composite"];

/// The results at a depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    name: String,
    /// Composite entries of all.
    entries: (u64, u64),
    /// IOPS of the volume without, of that with composite entries, and of the first once more.
    rounds: Vec<[f64; 3]>,
}

impl Outcome {
    fn ratio(&self, of: usize) -> Option<Ratio> {
        Ratio::of(&self.rounds.iter().map(|all| all[of] / all[0]).collect::<Vec<_>>())
    }

    /// The claim.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        Some(Claim {
            workload: self.name.clone(),
            claim: "IOPS of reads, with composite entries / without".to_owned(),
            ratio: self.ratio(1)?,
            target: TARGET,
            pairs: self.rounds.len(),
        })
    }

    /// Prints the table.
    pub fn print(&self) {
        let (composite, all) = self.entries;
        println!("\n### {}\n\n4 KiB random read; {composite} of {all} entries\n", self.name);
        println!(
            "| IOPS | without composite entries | with | without, again |\n|---|---:|---:|---:|"
        );
        let of = |run: usize| median(&self.rounds.iter().map(|all| all[run]).collect::<Vec<_>>());
        let medians = [0, 1, 2].map(|run| format!("{:.0}", of(run).unwrap_or(f64::NAN)));
        println!("| blockd | {} |", medians.join(" | "));
        if let Some(control) = self.ratio(2) {
            println!("\nA/A control, without beside without: {control}");
        }
    }
}

/// Measures pairs at each depth whose name is wanted.
pub fn measure(
    jobs: &Jobs,
    place: &Place<'_>,
    effort: Effort,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Outcome>> {
    let cases = JOBS.map(|(depth, job)| (format!("after-snapshot/reads-{depth}"), job));
    let cases: Vec<_> = cases.into_iter().filter(|(name, _)| wanted(name)).collect();
    let Some(blockd) = place.blockd.filter(|_| !cases.is_empty()) else { return Ok(Vec::new()) };
    let image = Image {
        folder: place.folder.join("reads"),
        file: place.file.clone(),
        size: place.size,
        // The other volume, and what was written since the snapshots.
        snapshots: place.size + place.size / 5,
        medium: Medium::Disk,
    };
    let server = ours::start_empty(&image, blockd, None)?.with_image_removed(&image);
    let mut uris = Vec::new();
    for volume in VOLUMES {
        let uri = ours::add_volume(&image, blockd, volume, image.size)?;
        let settings = Settings { uri: &uri, seconds: 0.0, connections: 1, seed: 1, bytes: 0 };
        run(jobs, "fill", &server, settings)?;
        ours::snapshot(&image, blockd, volume, &format!("{volume}-kept"))?;
        uris.push(uri);
    }
    let [plain, composite] = uris.as_slice() else { return Ok(Vec::new()) };
    let entries = image.size / (EACH * EXTENT);
    overlay(composite, image.size, entries)?;
    let found = ours::composite_entries(&image, blockd)?;
    ensure!(found == entries, "{found} composite entries, not {entries}");
    let mut outcomes = Vec::new();
    for (name, job) in cases {
        let mut rounds = Vec::new();
        // The first warms up.
        for round in 0..=effort.pairs {
            let once = |uri: &str| -> Result<f64> {
                let (seconds, seed) = (effort.seconds, round as u64);
                let settings = Settings { uri, seconds, connections: 1, seed, bytes: 0 };
                run(jobs, job, &server, settings).map(|Sample { iops, .. }| iops)
            };
            rounds.push([once(plain)?, once(composite)?, once(plain)?]);
        }
        rounds.remove(0);
        outcomes.push(Outcome { name, entries: (entries, image.size / EXTENT), rounds });
    }
    Ok(outcomes)
}

/// Writes half of one extent in ten.
fn overlay(uri: &str, span: u64, count: u64) -> Result<()> {
    let bytes = usize::try_from(EXTENT / 2)?;
    let order = Order::Strided(0, EACH * EXTENT);
    let pattern = Pattern { write: true, bytes, depth: 4, span, order };
    let mut client = Client::connect(uri)?;
    client.run(&pattern, exactly(count)).context("write to the shared extents")?;
    client.leave()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_is_the_ratio_of_neighbours() {
        let rounds = (1..=9).map(|n| [100.0 * f64::from(n), 95.0 * f64::from(n), 1.0]).collect();
        let outcome = Outcome { name: "x".to_owned(), entries: (1, 10), rounds };
        let claim = outcome.claim().unwrap();
        assert_eq!((claim.ratio.median, claim.target, claim.pairs), (0.95, 0.9, 9));
    }
}
