//! Costs of snapshots: to take, to delete, to compare, and to keep.

pub mod compare;
pub mod file;
pub mod many;
pub mod memory;

use std::path::Path;

use anyhow::{Result, bail};
use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use blockd_testkit::folder::Folder;

use crate::budgets::rig::{EXTENT, Media, Rig, Timed};
use crate::report::Row;

/// A part of the bench: its name for `--only`, its title, and its function.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// For `--only`.
    pub name: &'static str,
    /// The title of its table.
    pub title: &'static str,
    /// Measures it. The files go to the first folder if they are to be in memory, else to the
    /// second; `quick` is for a look whether it works.
    pub measure: fn(&Places, bool) -> Result<Vec<Row>>,
}

/// All parts, in the order in which they are run.
pub const PARTS: [Part; 4] = [
    Part {
        name: "memory",
        title: "taking and deleting, metadata in a sparse file in memory",
        measure: memory::rows,
    },
    Part { name: "diff", title: "differences, 1 TiB mapped", measure: compare::rows },
    Part { name: "reads", title: "reads with many snapshots", measure: many::rows },
    Part {
        name: "file",
        title: "taking and deleting under writes, 100 GiB mapped, a sparse file on disk",
        measure: file::rows,
    },
];

/// Where files go; removed in the end.
#[derive(Debug)]
pub struct Places {
    /// In memory, if there is such a folder.
    pub memory: Folder,
    /// On a disk.
    pub disk: Folder,
}

impl Places {
    /// Folders for this run.
    pub fn new() -> Result<Self> {
        let shared = Path::new("/dev/shm");
        let disk = Folder::new("snapshot")?;
        let memory = Folder::below(if shared.is_dir() { shared } else { disk.path() }, "memory")?;
        Ok(Self { memory, disk })
    }
}

/// A pool of this size with one volume, nothing mapped yet.
fn pool(path: &Path, bytes: u64, volume: u64) -> Result<(Rig, Attachment)> {
    let mut rig = Rig::create(Media::create(path, bytes)?, None)?;
    let attached = rig.volume("data", volume)?;
    Ok((rig, attached))
}

/// Maps the extents of a range, one block each.
fn map(rig: &mut Rig, volume: &Attachment, bytes: std::ops::Range<u64>) -> Result<()> {
    for extent in bytes.start / EXTENT..bytes.end / EXTENT {
        rig.write(volume, extent * EXTENT)?;
    }
    Ok(())
}

/// Takes a snapshot.
fn take(rig: &mut Rig, source: VolumeId, name: &str) -> Result<(VolumeId, Timed)> {
    let timed = rig.timed(Control::Snapshot { source, name: name.to_owned() })?;
    match timed.outcome {
        Outcome::Created(id) => Ok((id, timed)),
        other => bail!("taking a snapshot: {other:?}"),
    }
}

/// The middle one of some figures.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}

/// The largest of some figures.
fn largest(figures: &[f64]) -> f64 {
    figures.iter().copied().fold(0.0, f64::max)
}

/// Nanoseconds in milliseconds.
fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
