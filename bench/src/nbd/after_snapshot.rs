//! Writes to a volume that snapshots share everything with, beside qcow2 with snapshots in its
//! file.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::claims::Medium;
use super::client::Client;
use super::fio::{Jobs, Settings};
use super::first_touch::{self, Place};
use super::measure::run;
use super::ours;
use super::print::Claim;
use super::server::{Image, Kind, Server};
use crate::after_snapshot::{self, BETWEEN, Round, SNAPSHOTS, Subject};
use crate::load::{Order, Pattern, exactly};

/// Bytes for each written block: a multiple of the extent size, so that most writes are the first
/// of an extent.
const PER_OPERATION: u64 = 512 << 10;
/// Bytes of an operation.
const OPERATION: u64 = 4096;
/// Jobs by the depth that they have.
const JOBS: [(&str, &str); 2] = [("32", "first-touch"), ("1", "first-touch-qd1")];
const KINDS: [Kind; 3] = [Kind::Blockd, Kind::Qcow2, Kind::Qcow2Extended];

/// The results at a depth.
#[derive(Clone, Debug)]
pub struct Outcome {
    name: String,
    /// Bytes of the volume.
    size: u64,
    /// Ours first, if it takes part.
    rounds: Vec<(Kind, Vec<Round>)>,
}

impl Outcome {
    /// Claims of ours.
    pub fn claims(&self) -> impl Iterator<Item = Claim> {
        let ours = self.rounds.iter().filter(|(kind, _)| *kind == Kind::Blockd);
        ours.flat_map(move |(_, rounds)| {
            after_snapshot::claim(rounds).map(move |(claim, ratio)| Claim {
                workload: self.name.clone(),
                claim,
                ratio,
                target: after_snapshot::TARGET,
                pairs: rounds.len(),
            })
        })
    }

    /// Prints the table.
    pub fn print(&self) {
        println!(
            "\n### {}\n\n{} random writes of 4 KiB to {} MiB that were written before; chunks as \
             each has them: ours 256 KiB, qcow2 64 KiB, with sub-clusters of 4 KiB in 128 KiB\n",
            self.name,
            self.size / PER_OPERATION,
            self.size >> 20
        );
        let all = self.rounds.iter().map(|(kind, rounds)| (kind.name().to_owned(), rounds.clone()));
        after_snapshot::print(&all.collect::<Vec<_>>());
    }
}

/// Measures some rounds, after one that warms up, at each depth whose name is wanted. The servers
/// take turns within a round.
pub fn measure(
    jobs: &Jobs,
    place: &Place<'_>,
    rounds: usize,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Outcome>> {
    let kinds = KINDS.into_iter().filter(|kind| *kind != Kind::Blockd || place.blockd.is_some());
    let kinds: Vec<Kind> = kinds.collect();
    let mut found = Vec::new();
    for (depth, job) in JOBS {
        let name = format!("after-snapshot/{depth}");
        if !wanted(&name) {
            continue;
        }
        let mut all: Vec<_> = kinds.iter().map(|kind| (*kind, Vec::new())).collect();
        // The pool's file is written before, so that it is like a disk: a file system does more at
        // the first write of each place of a file that is only allocated.
        let pool = place.file.with_extension("pool");
        let written = place.blockd.map(|_| first_touch::write_file(&pool, pool_bytes(place)));
        let written = written.transpose()?;
        for round in 0..=rounds {
            for (kind, samples) in &mut all {
                let iops = once(jobs, place, (*kind, depth, job), round)?;
                if round > 0 {
                    samples.push(iops);
                }
            }
        }
        drop(written);
        found.push(Outcome { name, size: place.size, rounds: all });
    }
    Ok(found)
}

/// Bytes for snapshots: each keeps the extents of a run at most, one in two.
const fn kept(place: &Place<'_>) -> u64 {
    SNAPSHOTS * place.size / 2
}

fn pool_bytes(place: &Place<'_>) -> u64 {
    ours::pool_bytes(place.size) + kept(place)
}

/// A round on a new image.
fn once(
    jobs: &Jobs,
    place: &Place<'_>,
    (kind, depth, job): (Kind, &str, &str),
    round: usize,
) -> Result<Round> {
    // A daemon remembers the pools that it had, by its folder.
    let folder = place.folder.join(format!("{}-{depth}-{round}", kind as u8));
    std::fs::create_dir_all(&folder)?;
    let is_ours = kind == Kind::Blockd;
    let file = if is_ours { place.file.with_extension("pool") } else { place.file.clone() };
    let (size, snapshots, medium) = (place.size, kept(place), Medium::Disk);
    let image = Image { folder, file, size, snapshots, medium };
    let blockd = place.blockd.unwrap_or_else(|| Path::new(""));
    let runs = || {
        if is_ours {
            first_touch::clear_ends(&image.file, pool_bytes(place), &[])?;
        }
        let server = Server::start(kind, &image, blockd)?;
        let mut served = Served { jobs, image: &image, blockd, job, server: Some(server) };
        let settings = served.settings(0, 0)?;
        run(jobs, "fill", served.server()?, settings)?;
        after_snapshot::round(&mut served, round)
    };
    let runs = runs();
    if !is_ours {
        let _ = std::fs::remove_file(&place.file);
    }
    runs
}

/// An image that is served.
struct Served<'a> {
    jobs: &'a Jobs,
    image: &'a Image,
    blockd: &'a Path,
    job: &'a str,
    /// Absent while a snapshot is taken without it.
    server: Option<Server>,
}

impl Served<'_> {
    fn server(&self) -> Result<&Server> {
        self.server.as_ref().context("no server")
    }

    fn settings(&self, seed: u64, bytes: u64) -> Result<Settings<'_>> {
        let uri = &self.server()?.uri;
        Ok(Settings { uri, seconds: 0.0, connections: 1, seed, bytes })
    }

    fn operations(&self) -> u64 {
        self.image.size / PER_OPERATION
    }
}

impl Subject for Served<'_> {
    type Sample = f64;

    fn write(&mut self, seed: u64) -> Result<f64> {
        let settings = self.settings(seed, self.operations() * OPERATION)?;
        run(self.jobs, self.job, self.server()?, settings).map(|sample| sample.iops)
    }

    fn write_between(&mut self, seed: u64) -> Result<()> {
        let order = Order::Random(seed);
        let bytes = usize::try_from(OPERATION)?;
        let pattern = Pattern { write: true, bytes, depth: 32, span: self.image.size, order };
        let mut client = Client::connect(&self.server()?.uri)?;
        client.run(&pattern, exactly(self.operations() / BETWEEN))?;
        client.leave()
    }

    /// Takes one; qemu-nbd is started anew for that, as its image must not be open elsewhere.
    fn snapshot(&mut self, number: u64) -> Result<()> {
        let name = format!("kept{number}");
        let kind = self.server()?.kind;
        if kind == Kind::Blockd {
            return ours::snapshot(self.image, self.blockd, ours::VOLUME, &name);
        }
        drop(self.server.take());
        let mut command = Command::new("qemu-img");
        command.args(["snapshot", "-c", &name]).arg(&self.image.file);
        let output = command.output().context("qemu-img: `cargo ci bench nbd` installs it")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "qemu-img snapshot: {errors}");
        self.server = Some(Server::start(kind, self.image, self.blockd)?);
        Ok(())
    }
}
