//! The state of the pool outside the process: WAL blocks, checkpoint images, superblocks, the ring.

use super::list::List;
use super::map::{Map, NO_RECORD, Record};

/// A WAL block.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Place in the sequence of blocks.
    pub seq: u16,
    /// Open epoch that wrote it.
    pub epoch: u16,
    /// Hash of the block before.
    pub prev: u32,
    /// Hash of this block: of its content, never of the moment it was written.
    pub hash: u32,
    /// Its records.
    pub records: List<Record, 3>,
}

/// A torn block, at index 0 of the arena.
pub fn torn_block() -> Block {
    Block { seq: u16::MAX, epoch: 0, prev: 0, hash: 0, records: List::new(NO_RECORD) }
}

fn mix(hash: u32, word: u32) -> u32 {
    (hash ^ word).wrapping_mul(0x9E37_79B1).rotate_left(13)
}

impl Block {
    /// A block whose hash covers its content; `with_epoch` is false under a mutation.
    pub fn new(seq: u16, epoch: u16, prev: u32, records: &[Record], with_epoch: bool) -> Self {
        let mut block = Self { seq, epoch, prev, hash: 0, records: List::new(NO_RECORD) };
        let mut hash = mix(prev, u32::from(seq));
        if with_epoch {
            hash = mix(hash, u32::from(epoch));
        }
        for r in records {
            block.records.push(*r);
            hash = mix(hash, u32::from(r.lsn) << 8 | u32::from(r.kind as u8));
            hash = mix(hash, u32::from_le_bytes([r.v, r.e, r.p, r.bits]));
            hash = mix(hash, u32::from_le_bytes([r.base, r.under, 0, 0]));
        }
        block.hash = hash;
        block
    }
}

/// The map at one LSN.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// The map of the checkpoint.
    pub map: Map,
    /// The LSN of the checkpoint.
    pub lsn: u16,
}

/// A superblock copy.
#[derive(Clone, Copy, Debug)]
pub struct Superblock {
    /// The higher one of two valid copies counts.
    pub seq: u16,
    /// Where its checkpoint image lies.
    pub place: u8,
    /// Which image must lie there (stands for its checksum).
    pub image: u16,
    /// First WAL block to replay.
    pub head_seq: u16,
    /// The hash that the first block must chain to.
    pub head_hash: u32,
    /// Open epoch.
    pub epoch: u16,
    /// Open id, which the ring is stamped with.
    pub open_id: u16,
}

/// Fills unused places, and the torn superblock at index 0.
pub const NO_SUPERBLOCK: Superblock =
    Superblock { seq: 0, place: 0, image: 0, head_seq: 0, head_hash: 0, epoch: 0, open_id: 0 };

/// Records in one queue's ring, at most.
pub const RING_MAX: usize = 8;

/// The delta ring: survives the process, not the machine.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// False if the memory is not there.
    pub present: bool,
    /// Set by a flush error.
    pub poisoned: bool,
    /// Open id the records belong to.
    pub current: u16,
    /// Open id the records will belong to once the superblock has it.
    pub next: u16,
    /// Identifies the ring memory, for the oracle only.
    pub life: u16,
    /// Records of each queue.
    pub queues: [List<Record, RING_MAX>; 2],
}

impl Ring {
    /// No ring memory.
    pub fn absent() -> Self {
        Self {
            present: false,
            poisoned: false,
            current: 0,
            next: 0,
            life: 0,
            queues: [List::new(NO_RECORD); 2],
        }
    }

    /// Fresh ring memory.
    pub fn fresh() -> Self {
        Self { present: true, ..Self::absent() }
    }
}
