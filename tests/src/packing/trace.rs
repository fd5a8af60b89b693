//! The writes of a guest, by stages.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_testkit::nbd::{Connection, Kind, Request};

use crate::workload::replay::Log;

/// Bytes of a file system's block, the unit in which distinct bytes are counted.
const BLOCK: u64 = 4096;

/// A log, and how far it was at the end of each stage.
#[derive(Debug, Default)]
pub(super) struct Trace {
    log: Option<Log>,
    ends: Vec<usize>,
}

/// How much was written since the clone was made.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Written {
    /// Bytes of all writes.
    pub(super) all: u64,
    /// Bytes of the blocks that were written, each counted once.
    pub(super) distinct: u64,
    /// Bytes of these that were not discarded afterwards.
    pub(super) held: u64,
}

impl Trace {
    /// The guest has ended a stage, and its writes are in the log.
    pub(super) fn reached(&mut self, log: &Path) -> Result<()> {
        let log = Log::open(log)?;
        self.ends.push(log.entries.len());
        self.log = Some(log);
        Ok(())
    }

    /// Writes what the guest wrote in a stage.
    pub(super) fn repeat(&self, stage: usize, connection: &mut Connection) -> Result<()> {
        let log = self.log.as_ref().context("a log")?;
        let begin = stage.checked_sub(1).map_or(0, |before| self.ends[before]);
        for entry in &log.entries[begin..self.ends[stage]] {
            let Range { start, end } = entry.range();
            if entry.is_discard() {
                trim(connection, start, end - start)?;
            } else if start < end {
                connection.write(start, &log.data(entry)?)?;
            }
            if entry.is_flush() {
                connection.flush()?;
            }
        }
        connection.flush()
    }

    /// How much was written up to the end of a stage.
    pub(super) fn written(&self, stage: usize) -> Written {
        let entries = self.log.iter().flat_map(|log| &log.entries[..self.ends[stage]]);
        written(entries.map(|entry| (entry.range(), entry.is_discard())))
    }
}

/// Counts the bytes of writes, and of discards where the flag is set.
fn written(entries: impl Iterator<Item = (Range<u64>, bool)>) -> Written {
    let mut all = 0;
    let mut blocks = BTreeMap::new();
    for (range, is_discard) in entries {
        if is_discard {
            // Blocks that are discarded in part stay.
            let whole = range.start.div_ceil(BLOCK)..range.end / BLOCK;
            for (_, held) in blocks.range_mut(whole.start..whole.end.max(whole.start)) {
                *held = false;
            }
        } else {
            all += range.end - range.start;
            blocks.extend((range.start / BLOCK..range.end.div_ceil(BLOCK)).map(|at| (at, true)));
        }
    }
    let bytes = |count: usize| BLOCK * u64::try_from(count).unwrap_or(u64::MAX);
    let held = blocks.values().filter(|held| **held).count();
    Written { all, distinct: bytes(blocks.len()), held: bytes(held) }
}

fn trim(connection: &mut Connection, offset: u64, bytes: u64) -> Result<()> {
    let len = u32::try_from(bytes).context("the length of a discard")?;
    let request = Request { kind: Kind::Trim, flags: 0, cookie: offset, offset, len };
    connection.send(&request, &[])?;
    let errno = connection.receive()?.errno;
    ensure!(errno == 0, "discarding {len} bytes at {offset}: error {errno}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_counts_once_until_all_of_it_is_discarded() {
        let entries =
            [(0..8192, false), (4096..12288, false), (4096..8192, true), (9000..12288, true)];
        let found = written(entries.into_iter());
        assert_eq!(found, Written { all: 16384, distinct: 12288, held: 8192 });
        // Written again after its discard.
        let again = written([(0..512, false), (0..4096, true), (512..1024, false)].into_iter());
        assert_eq!(again, Written { all: 1024, distinct: 4096, held: 4096 });
    }
}
