//! The latency of writes while a device is emptied, beside that of the same writes before it.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::claims::Medium;
use super::fio::{Jobs, Settings};
use super::first_touch::{Place, write_file};
use super::measure::run;
use super::ours;
use super::print::Claim;
use super::server::{Image, Server};
use crate::stats::{Ratio, median};

/// Bytes of the pool's first device, which stays: not enough for the volume.
const FIRST: u64 = 512 << 20;
/// Seconds of a run, enough for hundreds of writes beyond the 99th percentile.
const SECONDS: f64 = 5.0;
/// Runs before the device leaves, one of them to warm up.
const BEFORE: usize = 7;
/// The latency before, beside the one meanwhile: it may double.
const TARGET: f64 = 0.5;
/// Runs at the least until the device has left: fewer say nothing.
const LEAST: usize = 5;
/// Runs at the most until the device has left.
const MOST: usize = 400;

/// The results.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes of the volume.
    size: u64,
    /// Writes a second.
    rate: u64,
    /// Microseconds, the 99th percentile of each run.
    before: Vec<f64>,
    meanwhile: Vec<f64>,
}

impl Outcome {
    /// Each run beside the median of those before.
    fn ratio(&self) -> Option<Ratio> {
        let before = median(&self.before)?;
        Ratio::of(&self.meanwhile.iter().map(|p99| before / p99).collect::<Vec<_>>())
    }

    /// The claim.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        Some(Claim {
            workload: "evacuation".to_owned(),
            claim: "p99 of writes, before a device leaves / meanwhile".to_owned(),
            ratio: self.ratio()?,
            target: TARGET,
            pairs: self.meanwhile.len(),
        })
    }

    /// Prints the table.
    pub fn print(&self) {
        println!(
            "\n### evacuation\n\n{} random writes of 4 KiB a second, half of what is possible, while \
             a device with the {} MiB of the volume is emptied at the default rate\n",
            self.rate,
            self.size >> 20
        );
        println!("| p99, us | runs | median | highest |\n|---|---:|---:|---:|");
        for (name, runs) in [("before", &self.before), ("meanwhile", &self.meanwhile)] {
            let middle = median(runs).unwrap_or(f64::NAN);
            let highest = runs.iter().copied().fold(f64::NAN, f64::max);
            println!("| {name} | {} | {middle:.0} | {highest:.0} |", runs.len());
        }
    }
}

/// Fills a volume on one device, and empties that onto another under load.
pub fn measure(jobs: &Jobs, place: &Place<'_>) -> Result<Option<Outcome>> {
    let Some(blockd) = place.blockd else { return Ok(None) };
    let bytes = place.size + place.size / 32 + (64 << 20);
    let devices = ["from", "to"].map(|name| place.file.with_extension(name));
    let mut written = Vec::new();
    for device in &devices {
        written.push(write_file(device, bytes)?);
        clear(device, bytes)?;
    }
    let image = Image {
        folder: place.folder.to_owned(),
        file: place.file.clone(),
        size: FIRST,
        snapshots: 0,
        medium: Medium::Disk,
    };
    let server = ours::start_empty(&image, blockd, None)?.with_image_removed(&image);
    let device = |words: &[&str], path: &PathBuf| {
        let path = path.to_string_lossy();
        ours::ask(
            &image,
            blockd,
            &[&["pool", "device"], words, &[&*path, "--pool", "bench"]].concat(),
        )
    };
    device(&["add"], &devices[0])?;
    let uri = ours::add_volume(&image, blockd, "data", place.size)?;
    let settings = |seed| Settings { uri: &uri, seconds: SECONDS, connections: 1, seed, bytes: 0 };
    run(jobs, "fill", &server, settings(0))?;
    let most = run(jobs, "randwrite", &server, settings(1))?.iops;
    let rate = (most / 2.0).round();
    ensure!(rate.is_finite() && rate >= 1.0, "{most} writes a second");
    let rate = format!("{rate}").parse::<u64>().context("writes a second")?;
    let p99 = |seed| percentile(&jobs.report("half-load", settings(seed), rate)?);
    let mut before = Vec::new();
    for seed in 0..BEFORE {
        before.push(p99(seed as u64)?);
    }
    before.remove(0);
    device(&["add"], &devices[1])?;
    device(&["remove", "--no-wait"], &devices[0])?;
    let mut meanwhile = Vec::new();
    while is_leaving(&image, blockd, &server)? {
        ensure!(meanwhile.len() < MOST, "the device does not leave");
        meanwhile.push(p99((BEFORE + meanwhile.len()) as u64)?);
    }
    // It ended in the middle of the last one.
    meanwhile.pop();
    let runs = meanwhile.len();
    ensure!(runs >= LEAST, "the device has left within {runs} runs: use a larger volume");
    Ok(Some(Outcome { size: place.size, rate, before, meanwhile }))
}

fn clear(path: &Path, bytes: u64) -> Result<()> {
    super::first_touch::clear_ends(path, bytes, &[])?;
    OpenOptions::new().write(true).open(path)?.sync_all().context("a device of the pool")
}

fn is_leaving(image: &Image, blockd: &Path, server: &Server) -> Result<bool> {
    let answer = ours::ask(image, blockd, &["pool", "show", "bench", "--json"]);
    let answer: Value = serde_json::from_str(&answer.with_context(|| server.words())?)?;
    Ok(!answer["pool"]["evacuation"].is_null())
}

/// Microseconds that the slowest of a hundred writes take at least.
fn percentile(report: &Value) -> Result<f64> {
    let found = report["write"]["clat_ns"]["percentile"]["99.000000"].as_f64();
    found.map(|ns| ns / 1000.0).context("fio's report has no percentiles")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_that_is_doubled_is_the_limit() {
        let outcome = Outcome {
            size: 1 << 30,
            rate: 1000,
            before: vec![90.0, 100.0, 110.0],
            meanwhile: vec![200.0; 9],
        };
        assert_eq!(outcome.claim().unwrap().ratio.median, TARGET);
    }
}
