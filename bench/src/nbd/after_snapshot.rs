//! Writes to a volume that snapshots share everything with, beside qcow2 with snapshots in its
//! file. The same blocks are written before the first snapshot, after it, once more, after a second
//! one, and after a tenth. Claimed is that the first writes after a snapshot are not much slower
//! than the writes before it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::claims::Medium;
use super::fio::{Jobs, Settings};
use super::first_touch::Place;
use super::measure::{Sample, run};
use super::ours;
use super::print::Claim;
use super::server::{Image, Kind, Server};
use crate::stats::{Ratio, median};

/// Bytes for each written block: a multiple of the extent size, so that most writes are the first
/// of an extent.
const PER_OPERATION: u64 = 512 << 10;
/// Bytes of an operation.
const OPERATION: u64 = 4096;
/// Rounds, after one that warms up.
const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 2;
/// Snapshots taken, each of which keeps the extents of a run: one in two.
const SNAPSHOTS: u64 = 10;
/// First writes after a snapshot, beside those before it.
const TARGET: f64 = 0.8;
/// Jobs by the depth that they have.
const JOBS: [(&str, &str); 2] = [("32", "first-touch"), ("1", "first-touch-qd1")];

/// The runs of a round, as the table has them.
const RUNS: [&str; 5] = ["before", "first after it", "again", "after a second", "after a tenth"];

/// IOPS of the runs of each round.
type Rounds = Vec<[f64; RUNS.len()]>;

/// The results of a server at a depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    depth: &'static str,
    kind: Kind,
    rounds: Rounds,
}

impl Outcome {
    /// Claims of ours: each first write beside the writes before the snapshots.
    fn claims(&self) -> impl Iterator<Item = Claim> + '_ {
        let ours = [1, 3, 4].into_iter().filter(|_| self.kind == Kind::Blockd);
        ours.filter_map(|at| {
            let ratios: Vec<f64> = self.rounds.iter().map(|all| all[at] / all[0]).collect();
            Some(Claim {
                workload: format!("after-snapshot-{}", self.depth),
                claim: format!("IOPS of writes {} / before", RUNS[at]),
                ratio: Ratio::of(&ratios)?,
                target: TARGET,
                pairs: self.rounds.len(),
            })
        })
    }
}

/// Medians of some rounds, by depth and server.
pub fn measure(jobs: &Jobs, place: &Place<'_>, quick: bool) -> Result<Vec<Outcome>> {
    let last = if quick { ROUNDS_QUICK } else { ROUNDS };
    let kinds = [Kind::Blockd, Kind::Qcow2, Kind::Qcow2Extended];
    let mut found = Vec::new();
    for (depth, job) in JOBS {
        for kind in kinds.into_iter().filter(|kind| *kind != Kind::Blockd || place.blockd.is_some())
        {
            let mut rounds = Vec::new();
            for round in 0..=last {
                // A daemon remembers the pools that it had, by its folder.
                let folder = place.folder.join(format!("{}-{depth}-{round}", kind as u8));
                std::fs::create_dir_all(&folder)?;
                let image = Image {
                    folder,
                    file: place.file.clone(),
                    size: place.size,
                    snapshots: SNAPSHOTS * place.size / 2,
                    medium: Medium::Disk,
                };
                let runs = once(jobs, &image, (kind, job), place.blockd, round as u64);
                let _ = std::fs::remove_file(&place.file);
                rounds.push(runs?);
            }
            rounds.remove(0);
            found.push(Outcome { depth, kind, rounds });
        }
    }
    Ok(found)
}

fn once(
    jobs: &Jobs,
    image: &Image,
    (kind, job): (Kind, &str),
    blockd: Option<&Path>,
    seed: u64,
) -> Result<[f64; RUNS.len()]> {
    let blockd = blockd.unwrap_or_else(|| Path::new(""));
    let mut server = Server::start(kind, image, blockd)?;
    let settings = Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed, bytes: 0 };
    run(jobs, "fill", &server, settings)?;
    let write = |server: &Server| -> Result<f64> {
        let bytes = image.size / PER_OPERATION * OPERATION;
        let settings = Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed, bytes };
        run(jobs, job, server, settings).map(|Sample { iops, .. }| iops)
    };
    let before = write(&server)?;
    server = snapshot(server, image, blockd, 1)?;
    let (first, again) = (write(&server)?, write(&server)?);
    server = snapshot(server, image, blockd, 2)?;
    let second = write(&server)?;
    let mut tenth = second;
    for number in 3..=SNAPSHOTS {
        server = snapshot(server, image, blockd, number)?;
        tenth = write(&server)?;
    }
    Ok([before, first, again, second, tenth])
}

/// Takes a snapshot; qemu-nbd is started anew for that.
fn snapshot(server: Server, image: &Image, blockd: &Path, number: u64) -> Result<Server> {
    if server.kind == Kind::Blockd {
        ours::snapshot(image, blockd, number)?;
        return Ok(server);
    }
    // The image must not be open elsewhere meanwhile.
    let kind = server.kind;
    drop(server);
    let mut command = Command::new("qemu-img");
    command.args(["snapshot", "-c", &format!("kept{number}")]).arg(&image.file);
    let output = command.output().context("qemu-img: `cargo ci bench nbd` installs it")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img snapshot: {errors}");
    Server::start(kind, image, blockd)
}

/// The table, and the claims on it.
#[must_use]
pub fn print(size: u64, found: &[Outcome]) -> Vec<Claim> {
    println!(
        "\n### after-snapshot\n\n{} random writes of 4 KiB to {} MiB that were written before, the \
         same blocks in each run; chunks as each has them: ours 256 KiB, qcow2 64 KiB, with \
         sub-clusters of 4 KiB in 128 KiB\n",
        size / PER_OPERATION,
        size >> 20
    );
    println!("| IOPS, depth | {} |\n|---|{}", RUNS.join(" | "), "---:|".repeat(RUNS.len()));
    for Outcome { depth, kind, rounds } in found {
        let of = |run: usize| median(&rounds.iter().map(|all| all[run]).collect::<Vec<_>>());
        let medians = (0..RUNS.len()).map(|run| format!("{:.0}", of(run).unwrap_or(f64::NAN)));
        println!("| {}, {depth} | {} |", kind.name(), medians.collect::<Vec<_>>().join(" | "));
    }
    found.iter().flat_map(Outcome::claims).collect()
}
