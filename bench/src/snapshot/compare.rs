//! Speed of finding the differences between a volume and its snapshot.

use anyhow::{Result, ensure};
use blockd_mapper::engine::{Control, DiffRequest, RangeState};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;
use blockd_testkit::clock::Clock;

use super::{Places, map, pool, take};
use crate::budgets::rig::{EXTENT, Rig, TIB};
use crate::report::{Budget, Row};

/// Ranges of one question, as the daemon asks.
const RANGES: usize = 4096;

/// Measures comparisons with no change, an extent of each leaf, and all extents changed.
pub fn rows(places: &Places, quick: bool) -> Result<Vec<Row>> {
    let size = if quick { TIB / 16 } else { TIB };
    let path = places.memory.path().join("pool");
    let (mut rig, volume) = pool(&path, 4 * size, size)?;
    map(&mut rig, &volume, 0..size)?;
    let mut rows = vec![rate(&rig, &volume, None, "allocated", size)?];
    let (id, _) = take(&mut rig, volume.id(), "base")?;
    rows.push(rate(&rig, &volume, Some(id), "nothing changed", 0)?);
    let leaf = EXTENT * 256;
    for slot in 0..size / leaf {
        rig.write(&volume, slot * leaf)?;
    }
    rows.push(rate(&rig, &volume, Some(id), "one extent of each leaf changed", size / 256)?);
    map(&mut rig, &volume, 0..size)?;
    rows.push(rate(&rig, &volume, Some(id), "every extent changed", size)?);
    rig.control(Control::Delete { volume: id })?;
    rig.close(volume)?;
    std::fs::remove_file(path)?;
    Ok(rows)
}

/// Extents of the volume by the time it takes to compare all of it. One block of each extent that
/// was written holds data.
fn rate(
    rig: &Rig,
    volume: &Attachment,
    base: Option<VolumeId>,
    what: &str,
    changed: u64,
) -> Result<Row> {
    let (clock, mut from, mut found) = (Clock::start(), Some(0), 0);
    while let Some(at) = from {
        let request =
            DiffRequest { volume: volume.id(), base, from: at, to: u64::MAX, max_ranges: RANGES };
        let part = rig.engine().diff(&request)?;
        let data = part.ranges.iter().filter(|range| range.state == RangeState::Data);
        found += data.map(|range| range.len).sum::<u64>();
        from = part.next;
    }
    let seconds = clock.seconds();
    let expected = changed / EXTENT * 4096;
    ensure!(found == expected, "{what}: {found} bytes of data were reported, not {expected}");
    let rate = (volume.size() / EXTENT) as f64 / seconds / 1e6;
    Ok(Row::new(what, rate, "M extents/s", Budget::None))
}
