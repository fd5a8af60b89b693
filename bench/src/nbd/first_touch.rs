//! First-touch: writes to blocks that no write has reached before, on a file that the file system
//! below has allocated and written. Beside the same blocks once more, and beside qcow2.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::claims::Medium;
use super::fio::{Jobs, Settings};
use super::measure::{Effort, Sample, run};
use super::ours;
use super::server::{self, Image, Kind, Server};
use crate::pump::place;
use crate::stats::Ratio;

/// Bytes that each operation stands for: those of an extent. So there are as many operations as
/// extents.
const PER_OPERATION: u64 = 256 << 10;
/// Bytes of an operation.
const OPERATION: u64 = 4096;

/// The results.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes of the volume.
    pub size: u64,
    /// First-touch beside an overwrite of the same blocks.
    pub overwrite: Ratio,
    /// An overwrite beside an overwrite.
    pub control: Ratio,
    /// First-touch beside that of a qcow2 image.
    pub qcow2: Vec<(Kind, Ratio)>,
    /// IOPS of each, by name.
    pub samples: Vec<(String, Vec<Sample>)>,
}

/// Where it works.
#[derive(Debug)]
pub struct Place<'a> {
    /// For sockets.
    pub folder: &'a Path,
    /// The one file, on a disk.
    pub file: PathBuf,
    /// Bytes of a volume.
    pub size: u64,
    /// The daemon, if it takes part.
    pub blockd: Option<&'a Path>,
}

/// Measures as many pairs as the effort demands.
pub fn measure(jobs: &Jobs, place: &Place<'_>, effort: Effort) -> Result<Outcome> {
    let written = write_file(&place.file, ours::pool_bytes(place.size))?;
    let mut samples: Vec<(String, Vec<Sample>)> = Vec::new();
    let mut keep = |name: &str, sample: Sample| match samples.iter_mut().find(|s| s.0 == name) {
        Some((_, all)) => all.push(sample),
        None => samples.push((name.to_owned(), vec![sample])),
    };
    let (mut overwrite, mut control) = (Vec::new(), Vec::new());
    let mut qcow2 = [(Kind::Qcow2, Vec::new()), (Kind::Qcow2Extended, Vec::new())];
    for seed in 0..effort.pairs as u64 {
        let ours = match place.blockd {
            Some(blockd) => Some(ours_once(jobs, place, blockd, seed)?),
            None => None,
        };
        if let Some([first, second, third]) = ours {
            keep("blockd, first touch", first);
            keep("blockd, overwrite", second);
            overwrite.push(first.iops / second.iops);
            control.push(third.iops / second.iops);
        }
        for (kind, ratios) in &mut qcow2 {
            let sample = qcow2_once(jobs, place, *kind, seed)?;
            keep(kind.name(), sample);
            if let Some([first, ..]) = ours {
                ratios.push(first.iops / sample.iops);
            }
        }
    }
    drop(written);
    let nothing = || Ratio { median: f64::NAN, low: f64::NAN, high: f64::NAN };
    let ratio = |ratios: &[f64]| Ratio::of(ratios).unwrap_or_else(nothing);
    Ok(Outcome {
        size: place.size,
        overwrite: ratio(&overwrite),
        control: ratio(&control),
        qcow2: qcow2.iter().map(|(kind, ratios)| (*kind, ratio(ratios))).collect(),
        samples,
    })
}

/// The file, removed in the end.
pub(super) struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Allocates and writes all of the file, so that no server's figures contain the file system's
/// allocation.
pub(super) fn write_file(path: &Path, size: u64) -> Result<Written> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options.custom_flags(libc::O_DIRECT).open(path);
    let file = file.with_context(|| format!("create {}", path.display()))?;
    let written = Written(path.to_owned());
    place::fill(&file, size).with_context(|| format!("fill {}", path.display()))?;
    Ok(written)
}

fn once(jobs: &Jobs, server: &Server, size: u64, seed: u64) -> Result<Sample> {
    let bytes = size / PER_OPERATION * OPERATION;
    let settings = Settings { uri: &server.uri, seconds: 0.0, connections: 1, seed, bytes };
    run(jobs, "first-touch", server, settings)
}

/// A fresh volume: first touch, the same again, and again.
pub(super) fn ours_once(
    jobs: &Jobs,
    place: &Place<'_>,
    blockd: &Path,
    seed: u64,
) -> Result<[Sample; 3]> {
    let image = image(place);
    renew(place, &[])?;
    let server = Server::start(Kind::Blockd, &image, blockd)?;
    let first = once(jobs, &server, place.size, seed)?;
    let second = once(jobs, &server, place.size, seed)?;
    Ok([first, second, once(jobs, &server, place.size, seed)?])
}

/// An empty image whose clusters will lie where the file has been written.
fn qcow2_once(jobs: &Jobs, place: &Place<'_>, kind: Kind, seed: u64) -> Result<Sample> {
    let image = image(place);
    renew(place, &server::qcow2_header(kind, place.folder, place.size)?)?;
    let server = Server::start(kind, &image, Path::new(""))?;
    once(jobs, &server, place.size, seed)
}

fn image(place: &Place<'_>) -> Image {
    let (folder, file) = (place.folder.to_owned(), place.file.clone());
    Image { folder, file, size: place.size, snapshots: 0, medium: Medium::Disk }
}

/// Makes the file look like a new one, without giving up any of its space: both ends are zeroes,
/// where a pool has its superblocks, and the header stands at its beginning. The state of the
/// daemon is removed, too: a daemon that has seen a pool in the file would report it as missing.
fn renew(place: &Place<'_>, header: &[u8]) -> Result<()> {
    match fs::remove_dir_all(place.folder.join("state")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    clear_ends(&place.file, ours::pool_bytes(place.size), header)
}

/// Clears both ends of a file of this size: it looks new to the daemon.
pub(super) fn clear_ends(path: &Path, size: u64, header: &[u8]) -> Result<()> {
    const ENDS: usize = 4 << 20;
    let file = OpenOptions::new().write(true).open(path)?;
    let zeroes = vec![0; ENDS];
    file.write_all_at(&zeroes, 0)?;
    file.write_all_at(&zeroes, size - ENDS as u64)?;
    file.write_all_at(header, 0)?;
    Ok(file.sync_all()?)
}
