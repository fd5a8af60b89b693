//! Time to take and to delete a snapshot by mapped size. Metadata goes to a sparse file in memory,
//! data nowhere, so that the figures are the mapper's own.

use anyhow::Result;
use blockd_mapper::engine::Control;
use blockd_mapper::worker::Attachment;
use blockd_testkit::clock::Clock;

use super::{Places, largest, map, median, ms, pool, take};
use crate::budgets::rig::{EXTENT, Rig, TIB};
use crate::cpu::thread_cpu;
use crate::report::{Budget, Row};

/// Snapshots of each size; all are printed by their middle one, stops by their longest.
const ROUNDS: usize = 9;
/// Milliseconds for which writes may be stopped.
const STOP_MS: f64 = 5.0;
/// Seconds of CPU to delete a snapshot of 1 TiB.
const DELETE_CPU: f64 = 1.0;

/// Takes and deletes snapshots of 0.1, 1 and 2 TiB.
pub fn rows(places: &Places, quick: bool) -> Result<Vec<Row>> {
    let sizes = [(TIB / 10) / EXTENT * EXTENT, TIB, 2 * TIB];
    let sizes = if quick { &sizes[..1] } else { &sizes[..] };
    let most = sizes.iter().copied().max().unwrap_or(TIB);
    // Twice: one size is written over whole while a snapshot has the old extents.
    let path = places.memory.path().join("pool");
    let (mut rig, volume) = pool(&path, most + TIB + TIB / 4, most)?;
    let (mut rows, mut mapped) = (Vec::new(), 0);
    for &size in sizes {
        map(&mut rig, &volume, mapped..size)?;
        mapped = size;
        rig.control(Control::Checkpoint)?;
        let tib = size as f64 / TIB as f64;
        rows.extend(clean(&mut rig, &volume, &format!("{tib:.1} TiB"))?);
        if size == TIB {
            rows.extend(dirty(&mut rig, &volume, size)?);
            rows.extend(rewritten(&mut rig, &volume, size)?);
        }
    }
    rig.close(volume)?;
    std::fs::remove_file(path)?;
    Ok(rows)
}

/// Right after a checkpoint, several times.
fn clean(rig: &mut Rig, volume: &Attachment, size: &str) -> Result<Vec<Row>> {
    let (mut create, mut stop, mut delete, mut gone) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let (id, taken) = take(rig, volume.id(), "taken")?;
        create.push(ms(taken.ns));
        stop.push(ms(taken.longest_step_ns));
        let clock = Clock::start();
        delete.push(ms(rig.timed(Control::Delete { volume: id })?.ns));
        rig.release()?;
        gone.push(ms(clock.ns()));
    }
    let row = |name: String, figure, budget| Row::new(name, figure, "ms", budget);
    Ok(vec![
        row(format!("{size}: snapshot, until answered"), median(create), Budget::None),
        row(
            format!("{size}: writes stopped, median"),
            median(stop.clone()),
            Budget::AtMost(STOP_MS),
        ),
        row(format!("{size}: writes stopped, longest of {ROUNDS}"), largest(&stop), Budget::None),
        row(format!("{size}: delete, until answered"), median(delete), Budget::None),
        row(format!("{size}: delete, until all is reclaimed"), median(gone), Budget::None),
    ])
}

/// Every leaf was changed since the last checkpoint.
fn dirty(rig: &mut Rig, volume: &Attachment, size: u64) -> Result<Vec<Row>> {
    let leaf = EXTENT * 256;
    for slot in 0..size / leaf {
        rig.write(volume, slot * leaf + EXTENT / 2)?;
    }
    let (id, taken) = take(rig, volume.id(), "dirty")?;
    rig.control(Control::Delete { volume: id })?;
    rig.release()?;
    let stop = ms(taken.longest_step_ns);
    Ok(vec![
        Row::new("1.0 TiB, all leaves dirty: writes stopped", stop, "ms", Budget::AtMost(STOP_MS)),
        Row::new("1.0 TiB, all leaves dirty: until answered", ms(taken.ns), "ms", Budget::None),
    ])
}

/// Everything was rewritten since the snapshot, so that all its extents are its own.
fn rewritten(rig: &mut Rig, volume: &Attachment, size: u64) -> Result<Vec<Row>> {
    let (id, _) = take(rig, volume.id(), "old")?;
    map(rig, volume, 0..size)?;
    rig.control(Control::Checkpoint)?;
    let free = rig.engine().space().free;
    let (reads, discards) = (rig.media.reads, rig.media.discards);
    let (before, written) = (thread_cpu()?, rig.media.writes);
    let answered = rig.timed(Control::Delete { volume: id })?.ns;
    rig.release()?;
    let cpu = thread_cpu()?.saturating_sub(before).as_secs_f64();
    let back = rig.engine().space().free.saturating_sub(free);
    let (reads, discards) = (rig.media.reads - reads, rig.media.discards - discards);
    let title = "1.0 TiB, all written anew";
    Ok(vec![
        Row::new(format!("{title}: delete, until answered"), ms(answered), "ms", Budget::None),
        Row::new(format!("{title}: delete, CPU"), cpu, "s", Budget::AtMost(DELETE_CPU)),
        Row::new(
            format!("{title}: given back"),
            back as f64 / EXTENT as f64,
            "extents",
            Budget::Exactly((size / EXTENT) as f64),
        ),
        Row::new(format!("{title}: reads"), reads as f64, "", Budget::Exactly(0.0)),
        Row::new(format!("{title}: discards"), discards as f64, "", Budget::Exactly(0.0)),
        Row::new(
            format!("{title}: writes of metadata"),
            (rig.media.writes - written) as f64,
            "",
            Budget::None,
        ),
    ])
}
