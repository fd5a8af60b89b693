//! Writes to a volume that a snapshot shares everything with, beside qcow2 with a snapshot in its
//! file: before it, the first after it, and the same blocks once more. Nothing is claimed.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::claims::Medium;
use super::fio::{Jobs, Settings};
use super::first_touch::Place;
use super::measure::{Sample, run};
use super::ours;
use super::server::{Image, Kind, Server};
use crate::stats::median;

/// Bytes for each written block: a multiple of the extent size, so that most writes copy an extent.
const PER_OPERATION: u64 = 512 << 10;
/// Bytes of an operation.
const OPERATION: u64 = 4096;
/// Rounds, after one that warms up.
const ROUNDS: usize = 5;

/// IOPS before the snapshot, first after it, and again.
pub type Three = [f64; 3];

/// Medians of some rounds, by server.
pub fn measure(jobs: &Jobs, place: &Place<'_>) -> Result<Vec<(Kind, Three)>> {
    let kinds = [Kind::Blockd, Kind::Qcow2, Kind::Qcow2Extended];
    let mut found = Vec::new();
    for kind in kinds.into_iter().filter(|kind| *kind != Kind::Blockd || place.blockd.is_some()) {
        let mut rounds = Vec::new();
        for round in 0..=ROUNDS as u64 {
            let three = once(jobs, place, kind, round);
            let _ = std::fs::remove_file(&place.file);
            rounds.push(three?);
        }
        let of = |run: usize| median(&rounds[1..].iter().map(|all| all[run]).collect::<Vec<_>>());
        let medians = || Some([of(0)?, of(1)?, of(2)?]);
        found.push((kind, medians().context("no rounds")?));
    }
    Ok(found)
}

fn once(jobs: &Jobs, place: &Place<'_>, kind: Kind, seed: u64) -> Result<Three> {
    let (folder, file) = (place.folder.to_owned(), place.file.clone());
    let image = Image { folder, file, size: place.size, medium: Medium::Disk };
    let blockd = place.blockd.unwrap_or_else(|| Path::new(""));
    let mut server = Server::start(kind, &image, blockd)?;
    let settings = Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed, bytes: 0 };
    run(jobs, "fill", &server, settings)?;
    let write = |server: &Server| -> Result<f64> {
        let bytes = place.size / PER_OPERATION * OPERATION;
        let settings = Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed, bytes };
        run(jobs, "first-touch", server, settings).map(|Sample { iops, .. }| iops)
    };
    let before = write(&server)?;
    if kind == Kind::Blockd {
        ours::snapshot(&image, blockd)?;
    } else {
        // The image must not be open elsewhere meanwhile.
        drop(server);
        let mut command = Command::new("qemu-img");
        let output = command.args(["snapshot", "-c", "kept"]).arg(&image.file).output();
        let output = output.context("qemu-img: `cargo ci bench nbd` installs it")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "qemu-img snapshot: {errors}");
        server = Server::start(kind, &image, blockd)?;
    }
    Ok([before, write(&server)?, write(&server)?])
}

/// The table.
pub fn print(size: u64, found: &[(Kind, Three)]) {
    println!(
        "\n### after-snapshot\n\n{} random writes of 4 KiB at depth 32 to {} MiB that were \
         written before; chunks as each has them: ours 256 KiB, qcow2 64 KiB, with sub-clusters \
         of 4 KiB in 128 KiB\n",
        size / PER_OPERATION,
        size >> 20
    );
    println!("| IOPS | before | first write after | again |\n|---|---:|---:|---:|");
    for (kind, [before, first, again]) in found {
        println!("| {} | {before:.0} | {first:.0} | {again:.0} |", kind.name());
    }
}
