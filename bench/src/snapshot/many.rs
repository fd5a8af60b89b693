//! Reads of a volume that has had more and more snapshots taken.

use anyhow::Result;
use blockd_testkit::clock::Clock;

use super::{Places, map, pool, take};
use crate::budgets::rig::{EXTENT, Rig, TIB, mix};
use crate::report::{Budget, Row};

/// Reads of one round.
const READS: u64 = 200_000;
/// Rounds at each number of snapshots, of which the quickest counts: a busy machine disturbs some.
const ROUNDS: usize = 9;
/// How much slower a read may be with a thousand snapshots than with one. A read does not depend on
/// snapshots; the rest is where leaves lie in memory.
const FLAT: f64 = 1.25;
/// Extents that are written between two snapshots.
const WRITES: u64 = 64;

/// Reads with 1, 10, 100 and 1000 snapshots.
pub fn rows(places: &Places, quick: bool) -> Result<Vec<Row>> {
    let size = (if quick { TIB / 64 } else { TIB / 10 }) / EXTENT * EXTENT;
    let path = places.memory.path().join("pool");
    let (mut rig, volume) = pool(&path, 2 * size, size)?;
    map(&mut rig, &volume, 0..size)?;
    let (mut rows, mut first, mut last) = (Vec::new(), 0.0, 0.0);
    let mut count = 0;
    for wanted in [1, 10, 100, 1000] {
        while count < wanted {
            take(&mut rig, volume.id(), &format!("s{count}"))?;
            for write in 0..WRITES {
                let extent = mix(count * WRITES + write) % (size / EXTENT);
                rig.write(&volume, extent * EXTENT)?;
            }
            count += 1;
        }
        last = reads(&mut rig, &volume, size)?;
        if wanted == 1 {
            first = last;
        }
        let name = format!("read 4 KiB, plan + complete, {wanted} snapshot(s)");
        rows.push(Row::new(name, last, "ns", Budget::None));
    }
    rows.push(Row::new("1000 snapshots / 1", last / first, "x", Budget::AtMost(FLAT)));
    rig.close(volume)?;
    std::fs::remove_file(path)?;
    Ok(rows)
}

fn reads(rig: &mut Rig, volume: &blockd_mapper::worker::Attachment, size: u64) -> Result<f64> {
    let mut quickest = f64::MAX;
    for round in 0..ROUNDS as u64 {
        let clock = Clock::start();
        for number in 0..READS {
            let extent = mix(round * READS + number) % (size / EXTENT);
            std::hint::black_box(rig.read(volume, extent * EXTENT)?);
        }
        quickest = quickest.min(clock.ns() as f64 / READS as f64);
    }
    Ok(quickest)
}
