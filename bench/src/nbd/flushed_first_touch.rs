//! First writes with a flush after each, beside a sparse raw file of the same file system. Each
//! flush makes new space durable with both.

use std::path::Path;

use anyhow::Result;

use super::claims::{Figure, Medium};
use super::client;
use super::first_touch::{self, Place};
use super::measure::{Sample, ratio};
use super::ours;
use super::print::Claim;
use super::server::{Image, Kind, Server};
use crate::stats::median;

/// At least this share of the writes of a sparse raw file.
const TARGET: f64 = 0.9;
/// Bytes that each write stands for: those of an extent, so that each is the first of one.
const PER_WRITE: u64 = 256 << 10;
/// Writes of a run: a second or more on a disk that flushes fast.
const WRITES: u64 = 2048;
/// Bytes of a volume.
pub const SIZE: u64 = WRITES * PER_WRITE;
/// Ours, and a sparse raw file past the page cache and through it.
const KINDS: [Kind; 3] = [Kind::Blockd, Kind::QemuDirect, Kind::NbdkitFile];

/// The results.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Ours first, if it takes part.
    samples: Vec<(Kind, Vec<Sample>)>,
}

impl Outcome {
    /// Claims of ours.
    pub fn claims(&self) -> impl Iterator<Item = Claim> {
        let ours = self.samples.iter().find(|(kind, _)| *kind == Kind::Blockd);
        ours.into_iter().flat_map(|(_, ours)| {
            let others = self.samples.iter().filter(|(kind, _)| *kind != Kind::Blockd);
            others.filter_map(|(kind, theirs)| {
                let pairs: Vec<_> = ours.iter().copied().zip(theirs.iter().copied()).collect();
                Some(Claim {
                    workload: "flushed-first-touch".to_owned(),
                    claim: format!("writes, ours/it; {}, sparse", kind.name()),
                    ratio: ratio(&pairs, Figure::Iops)?,
                    target: TARGET,
                    pairs: pairs.len(),
                })
            })
        })
    }

    /// Prints the table.
    pub fn print(&self) {
        println!(
            "\n### flushed-first-touch\n\n{WRITES} writes of 4 KiB, each the first of its 256 KiB, \
             and a flush after each; one at a time. The files of others are sparse, ours is \
             allocated and written beforehand\n"
        );
        println!("| server | writes/s | CPU us/op |\n|---|---:|---:|");
        for (kind, samples) in &self.samples {
            let of = |figure: fn(&Sample) -> f64| {
                median(&samples.iter().map(figure).collect::<Vec<_>>()).unwrap_or(f64::NAN)
            };
            println!("| {} | {:.0} | {:.2} |", kind.name(), of(|s| s.iops), of(|s| s.cpu));
        }
    }
}

/// Measures some rounds, after one that warms up. The servers take turns within a round, and each
/// begins with a new volume or file.
pub fn measure(place: &Place<'_>, rounds: usize) -> Result<Outcome> {
    let pool = place.file.with_extension("pool");
    let written =
        place.blockd.map(|_| first_touch::write_file(&pool, ours::pool_bytes(place.size)));
    let written = written.transpose()?;
    let kinds = KINDS.into_iter().filter(|kind| *kind != Kind::Blockd || place.blockd.is_some());
    let mut samples: Vec<_> = kinds.map(|kind| (kind, Vec::new())).collect();
    for round in 0..=rounds {
        for (kind, samples) in &mut samples {
            let sample = once(place, &pool, *kind, round)?;
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    drop(written);
    Ok(Outcome { samples })
}

fn once(place: &Place<'_>, pool: &Path, kind: Kind, round: usize) -> Result<Sample> {
    // A daemon remembers the pools that it had, by its folder.
    let folder = place.folder.join(format!("flushed-{}-{round}", kind as u8));
    let is_ours = kind == Kind::Blockd;
    let file = if is_ours { pool.to_owned() } else { place.file.with_extension("sparse") };
    let image = Image { folder, file, size: place.size, snapshots: 0, medium: Medium::Disk };
    if is_ours {
        first_touch::clear_ends(&image.file, ours::pool_bytes(place.size), &[])?;
    }
    let server = Server::start(kind, &image, place.blockd.unwrap_or_else(|| Path::new("")))?;
    let server = if is_ours { server } else { server.with_image_removed(&image) };
    let mut offsets: Vec<u64> = (0..WRITES).map(|number| number * PER_WRITE).collect();
    fastrand::Rng::with_seed(round as u64).shuffle(&mut offsets);
    let before = server.tree.cpu()?;
    let iops = client::commit_each(&server.uri, &offsets)?.iops;
    let cpu = server.tree.cpu()?.saturating_sub(before);
    Ok(Sample { iops, cpu: cpu.as_secs_f64() * 1e6 / WRITES as f64 })
}
