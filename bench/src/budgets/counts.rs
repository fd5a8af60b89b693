//! Counts, which no noise touches: flushes and writes of a FLUSH, allocations of the data path.

use anyhow::Result;
use blockd_mapper::engine::Control;
use blockd_mapper::worker::Attachment;
use blockd_testkit::folder::Folder;

use super::rig::{BLOCK, EXTENT, Media, Rig, shuffled};
use crate::alloc_count::allocations;
use crate::report::{Budget, Row};

/// Operations of each kind that are counted.
const OPERATIONS: usize = 20_000;

/// Extents of the volume: twice as many as operations, so that half are there for warming up.
const EXTENTS: u64 = 1 << 16;

/// Everything counted.
pub fn rows(scratch: &Folder) -> Result<Vec<Row>> {
    let media = Media::create(&scratch.path().join("counts"), 64 << 30)?;
    let mut rig = Rig::create(media, None)?;
    let volume = rig.volume("a", EXTENTS * EXTENT)?;
    let mut rows = flush_rows(&mut rig, &volume)?;
    rows.extend(allocation_rows(&mut rig, &volume)?);
    rig.close(volume)?;
    Ok(rows)
}

fn flush_rows(rig: &mut Rig, volume: &Attachment) -> Result<Vec<Row>> {
    let first = EXTENTS - 256;
    rig.write(volume, first * EXTENT)?;
    rig.flush(volume)?;
    rig.settle()?;
    let steady = flush_after(rig, volume, first..first + 1)?;
    let mapping = flush_after(rig, volume, first + 1..first + 127)?;
    let exact = |name: &str, count: u64, expected: f64| {
        Row::new(name, count as f64, "", Budget::Exactly(expected))
    };
    Ok(vec![
        exact("FLUSH after an overwrite: data flushes", steady[0], 1.0),
        exact("FLUSH after an overwrite: writes", steady[1], 0.0),
        exact("FLUSH after 126 new mappings: data flushes", mapping[0], 1.0),
        exact("FLUSH after 126 new mappings: log blocks", mapping[2], 1.0),
        exact("FLUSH after 126 new mappings: writes", mapping[1], 1.0),
    ])
}

/// Flushes, writes and log blocks of one FLUSH after a write to each of these extents.
fn flush_after(
    rig: &mut Rig,
    volume: &Attachment,
    extents: std::ops::Range<u64>,
) -> Result<[u64; 3]> {
    for extent in extents {
        rig.write(volume, extent * EXTENT)?;
    }
    let before = [rig.media.flushes, rig.media.writes, rig.media.log_blocks];
    rig.flush(volume)?;
    let after = [rig.media.flushes, rig.media.writes, rig.media.log_blocks];
    Ok([0, 1, 2].map(|at| after[at] - before[at]))
}

fn allocation_rows(rig: &mut Rig, volume: &Attachment) -> Result<Vec<Row>> {
    let order = shuffled(EXTENTS - 256, 3);
    let (warm, measured) = order.split_at(order.len() / 2);
    let measured = &measured[..measured.len().min(OPERATIONS)];
    let first = |rig: &mut Rig, extents: &[u32]| -> Result<()> {
        for extent in extents {
            rig.write(volume, u64::from(*extent) * EXTENT)?;
        }
        Ok(())
    };
    let flushed = |rig: &mut Rig, extents: &[u32]| -> Result<()> {
        for (extent, block) in extents.iter().zip(1..) {
            // Another block of an extent that is mapped: its record is one of the bitmap.
            rig.write(volume, u64::from(*extent) * EXTENT + block % 63 * BLOCK + BLOCK)?;
            rig.flush(volume)?;
        }
        Ok(())
    };
    first(rig, warm)?;
    // Long enough for the log to fill by halves: warm means that checkpoints have run while
    // writes went on, with the leaves and lists that takes.
    for _ in 0..2 {
        flushed(rig, &warm[..warm.len().min(20_000)])?;
        rig.control(Control::Checkpoint)?;
    }
    let mut rows = Vec::new();
    rows.extend(count(rig, "first write", |rig| first(rig, measured))?);
    rows.extend(count(rig, "overwrite", |rig| first(rig, measured))?);
    rows.extend(count(rig, "first write of a block and FLUSH", |rig| flushed(rig, measured))?);
    Ok(rows)
}

/// Allocations of the worker and of the engine while something is done.
fn count(
    rig: &mut Rig,
    name: &str,
    mut work: impl FnMut(&mut Rig) -> Result<()>,
) -> Result<[Row; 2]> {
    let (all, engine) = (allocations(), rig.engine_allocations);
    work(rig)?;
    let engine = rig.engine_allocations - engine;
    let worker = allocations() - all - engine;
    let zero = Budget::Exactly(0.0);
    let title = |part: &str| format!("allocations in {OPERATIONS} x {name}: {part}");
    Ok([
        Row::new(title("worker"), worker as f64, "", zero),
        Row::new(title("engine"), engine as f64, "", zero),
    ])
}
