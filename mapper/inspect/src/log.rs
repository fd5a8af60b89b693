//! The write-ahead log behind the last checkpoint, block by block.

use blockd_mapper::format::record::Change;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::format::wal::{
    WalExpect, WalStop, begins_later_commit, block_position, decode_block,
};
use blockd_mapper::format::{Place, Problem, Structure};
use blockd_mapper::geometry::{PAGE_BYTES, PAGE_SIZE};
use blockd_mapper::units::{Epoch, Lsn, PhysicalExtent};

use super::{Fault, Reader};

/// A change of the log, and where it stands.
#[derive(Debug, Clone, Copy)]
pub struct LogEntry<'a> {
    /// The block's number.
    pub sequence: u64,
    /// The open that wrote the block.
    pub epoch: Epoch,
    /// The change's number.
    pub lsn: Lsn,
    /// The trees hold it already: replay skips it.
    pub in_checkpoint: bool,
    /// The change that it describes.
    pub change: &'a Change,
}

/// How the reading of the log ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEnd {
    /// Blocks that are part of the log.
    pub blocks: u64,
    /// Changes in them.
    pub changes: u64,
    /// The number of these that the trees do not contain.
    pub pending: u64,
    /// LSN of the last change of log and trees.
    pub last_lsn: Lsn,
    /// The sequence after the last block.
    pub next_sequence: u64,
    /// The sum of the last block.
    pub last_sum: u64,
    /// Where it broke. Without it the log ended as every log does.
    pub broken: Option<Fault>,
}

impl LogEnd {
    /// A log that was not read.
    pub(crate) const fn unread(superblock: &Superblock) -> Self {
        Self {
            blocks: 0,
            changes: 0,
            pending: 0,
            last_lsn: superblock.checkpoint_lsn,
            next_sequence: superblock.wal_tail_sequence,
            last_sum: superblock.wal_tail_hash,
            broken: None,
        }
    }
}

/// Reads the log from its tail to its end, or to where it is broken. The log of a pool that was
/// closed cleanly is empty and not read.
pub fn read_log(reader: &mut Reader<'_>, mut each: impl FnMut(&LogEntry<'_>)) -> LogEnd {
    let superblock = reader.superblock().clone();
    let blocks = superblock.wal_blocks();
    let mut expect = WalExpect {
        pool_id: superblock.pool_id,
        sequence: superblock.wal_tail_sequence,
        previous: superblock.wal_tail_hash,
        min_epoch: Epoch(0),
        max_epoch: superblock.epoch,
        after: Lsn(0),
    };
    let mut end = LogEnd {
        blocks: 0,
        changes: 0,
        pending: 0,
        last_lsn: superblock.checkpoint_lsn,
        next_sequence: expect.sequence,
        last_sum: expect.previous,
        broken: None,
    };
    if superblock.clean {
        return end;
    }
    let limits = *reader.limits();
    let mut bytes = vec![0; PAGE_SIZE];
    while end.blocks < blocks {
        let place = match block(reader, superblock.wal_start, expect.sequence, &mut bytes) {
            Ok(place) => place,
            Err(fault) => {
                end.broken = Some(fault);
                return end;
            }
        };
        let decoded = match decode_block(&bytes, &expect, &limits, place) {
            Ok(decoded) => decoded,
            Err(WalStop::Corrupt(error)) => {
                end.broken = Some(error.into());
                return end;
            }
            Err(WalStop::End(_)) => break,
        };
        for (lsn, change) in &decoded {
            let in_checkpoint = lsn <= superblock.checkpoint_lsn;
            let (sequence, epoch) = (decoded.sequence(), decoded.epoch());
            each(&LogEntry { sequence, epoch, lsn, in_checkpoint, change: &change });
            end.changes += 1;
            end.pending += u64::from(!in_checkpoint);
        }
        end.last_lsn = end.last_lsn.max(decoded.last_lsn());
        expect = decoded.next(&expect);
        end.blocks += 1;
        end.next_sequence = expect.sequence;
        end.last_sum = expect.previous;
    }
    end.broken = lost_commit(reader, &expect, blocks, end.blocks, &mut bytes);
    end
}

/// A later commit behind the end means that the block at the end was durable, and has rotted.
fn lost_commit(
    reader: &mut Reader<'_>,
    expect: &WalExpect,
    blocks: u64,
    read: u64,
    bytes: &mut [u8],
) -> Option<Fault> {
    let start = reader.superblock().wal_start;
    for ahead in 1..blocks.saturating_sub(read) {
        // An unreadable block proves nothing: it may never have been written.
        if block(reader, start, expect.sequence + ahead, bytes).is_ok()
            && begins_later_commit(bytes, expect, blocks)
        {
            let problem =
                Problem::field("sequence", expect.sequence, "durable before a later commit");
            let at = block(reader, start, expect.sequence, bytes);
            let place = at.unwrap_or(Place::Memory);
            return Some(problem.of(Structure::WalBlock, place).into());
        }
    }
    None
}

/// Reads the block with this sequence.
fn block(
    reader: &mut Reader<'_>,
    start: PhysicalExtent,
    sequence: u64,
    bytes: &mut [u8],
) -> Result<Place, Fault> {
    let blocks = reader.superblock().wal_blocks();
    let at = block_position(sequence, blocks) * PAGE_BYTES;
    let extent_size = reader.geometry().extent_size();
    let extent = PhysicalExtent(start.0 + at / extent_size);
    let (device, offset) = reader.bytes(extent, at % extent_size, bytes, Structure::WalBlock)?;
    Ok(Place::Device { device, offset })
}
