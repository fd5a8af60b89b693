//! Blocks of the write-ahead log: 126 units behind a header that chains each block to the last.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::checksum::{page_crc, sum};
use crate::format::page::short;
use crate::format::record::{self, Change, UNIT_SIZE};
use crate::format::{
    FormatError, Limits, Place, PoolId, Problem, STRUCTURE_VERSION, Structure, as_page,
    check_reserved,
};
use crate::geometry::PAGE_SIZE;
use crate::io::Page;
use crate::units::{Epoch, Lsn};

/// Units of a block.
pub const WAL_UNITS: usize = 126;
/// In the count of units: the block is the first of its commit.
const BEGINS_COMMIT: u16 = 1 << 15;
const HEADER_SIZE: usize = 64;
const MAGIC: [u8; 4] = *b"BDwl";
const CRC_AT: usize = 4;

/// Returns the position of the block with this sequence in a WAL of `blocks` blocks.
#[must_use]
pub const fn block_position(sequence: u64, wal_blocks: u64) -> u64 {
    // A WAL has at least one extent of blocks; the check keeps the function total.
    if wal_blocks == 0 { 0 } else { sequence % wal_blocks }
}

/// The stamp that the writer puts on a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalStamp {
    /// The pool.
    pub pool_id: PoolId,
    /// The open that writes it.
    pub epoch: Epoch,
    /// The node that writes it.
    pub node: u32,
    /// Its number; blocks of a pool are numbered without gaps over all its opens.
    pub sequence: u64,
    /// Sum of the block before.
    pub previous: u64,
    /// The block is the first of its commit: when it was written, all before it was durable.
    pub begins_commit: bool,
}

/// Collects the changes of a block.
#[derive(Debug, Clone)]
pub struct WalBlockBuilder {
    page: Page,
    units: usize,
    base: Lsn,
    last: Lsn,
}

impl Default for WalBlockBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl WalBlockBuilder {
    /// A block without changes.
    #[must_use]
    pub const fn new() -> Self {
        Self { page: Page::zeroed(), units: 0, base: Lsn(0), last: Lsn(0) }
    }

    /// Appends a change. `false`, and nothing appended, when it has no room, lies 65,536 or more
    /// above the first, or not above the last: then it belongs to the next block.
    #[must_use]
    pub fn push(&mut self, change: &Change, lsn: Lsn) -> bool {
        let base = if self.units == 0 { lsn } else { self.base };
        if self.units != 0 && lsn <= self.last {
            return false;
        }
        let Ok(delta) = u16::try_from(lsn.0 - base.0) else { return false };
        let free = &mut self.page.0[HEADER_SIZE + self.units * UNIT_SIZE..];
        let Some(units) = record::encode(change, delta, free) else { return false };
        self.units += units;
        (self.base, self.last) = (base, lsn);
        true
    }

    /// Whether there are no changes in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.units == 0
    }

    /// Units that are still free.
    #[must_use]
    pub const fn free_units(&self) -> usize {
        WAL_UNITS - self.units
    }

    /// LSN of the last change, if there is one.
    #[must_use]
    pub const fn last_lsn(&self) -> Option<Lsn> {
        if self.units == 0 { None } else { Some(self.last) }
    }

    /// Writes the sealed block and begins the next. Returns the sum that the next block names.
    pub fn finish(&mut self, page: &mut Page, stamp: &WalStamp) -> u64 {
        let flag = if stamp.begins_commit { BEGINS_COMMIT } else { 0 };
        let units = u16::try_from(self.units).unwrap_or(0) | flag;
        let raw = RawHeader {
            magic: MAGIC,
            crc: 0.into(),
            pool_id: stamp.pool_id,
            epoch: stamp.epoch.0.into(),
            node: stamp.node.into(),
            units: units.into(),
            version: STRUCTURE_VERSION.into(),
            sequence: stamp.sequence.into(),
            base_lsn: self.base.0.into(),
            previous: stamp.previous.into(),
        };
        let end = HEADER_SIZE + self.units * UNIT_SIZE;
        page.0[..HEADER_SIZE].copy_from_slice(raw.as_bytes());
        page.0[HEADER_SIZE..].copy_from_slice(&self.page.0[HEADER_SIZE..]);
        let crc = crc32c::crc32c(&page.0);
        page.0[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        self.page.0[HEADER_SIZE..end].fill(0);
        (self.units, self.base, self.last) = (0, Lsn(0), Lsn(0));
        sum(&page.0)
    }
}

/// The properties of the next block that a reader of the log expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalExpect {
    /// The pool.
    pub pool_id: PoolId,
    /// The next sequence.
    pub sequence: u64,
    /// Sum of the block before, or `wal_tail_hash` of the superblock for the first.
    pub previous: u64,
    /// Epoch of the block before, or 0 for the first.
    pub min_epoch: Epoch,
    /// Epoch of the superblock.
    pub max_epoch: Epoch,
    /// Last LSN of the block before, or 0 for the first.
    pub after: Lsn,
}

/// Why reading the log stops at a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WalStop {
    /// The block isn't the successor of the one before: the log ends before it, as every log does.
    #[error("the log ends: {0}")]
    End(FormatError),
    /// The block is the successor, whole as it was written, and can't be understood. To stop
    /// before it would lose changes that were answered as durable.
    #[error(transparent)]
    Corrupt(FormatError),
}

/// A block that continues the chain and whose every change has been checked.
#[derive(Debug, Clone, Copy)]
pub struct WalBlock<'a> {
    raw: &'a RawHeader,
    units: &'a [u8],
    limits: Limits,
    last: Lsn,
    sum: u64,
}

impl<'a> WalBlock<'a> {
    /// Its number.
    #[must_use]
    pub const fn sequence(&self) -> u64 {
        self.raw.sequence.get()
    }

    /// The open that wrote it.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        Epoch(self.raw.epoch.get())
    }

    /// The node that wrote it.
    #[must_use]
    pub const fn node(&self) -> u32 {
        self.raw.node.get()
    }

    /// LSN of its first change.
    #[must_use]
    pub const fn base_lsn(&self) -> Lsn {
        Lsn(self.raw.base_lsn.get())
    }

    /// LSN of its last change.
    #[must_use]
    pub const fn last_lsn(&self) -> Lsn {
        self.last
    }

    /// Returns the sum that the next block must name.
    #[must_use]
    pub const fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the expected properties of the next block.
    #[must_use]
    pub const fn next(&self, expect: &WalExpect) -> WalExpect {
        WalExpect {
            sequence: self.sequence().wrapping_add(1),
            previous: self.sum,
            min_epoch: self.epoch(),
            after: self.last,
            ..*expect
        }
    }

    /// Its changes in rising order of their LSN.
    #[must_use]
    pub const fn iter(&self) -> Changes<'a> {
        Changes { units: self.units, base: self.base_lsn().0, limits: self.limits }
    }
}

impl<'a> IntoIterator for &WalBlock<'a> {
    type Item = (Lsn, Change);
    type IntoIter = Changes<'a>;

    fn into_iter(self) -> Changes<'a> {
        self.iter()
    }
}

/// The changes of a [`WalBlock`].
#[derive(Debug, Clone)]
pub struct Changes<'a> {
    units: &'a [u8],
    base: u64,
    limits: Limits,
}

impl Changes<'_> {
    fn try_next(&mut self) -> Result<Option<(Lsn, Change)>, Problem> {
        if self.units.is_empty() {
            return Ok(None);
        }
        let (change, delta, units) = record::try_decode(self.units, &self.limits)?;
        self.units = &self.units[units * UNIT_SIZE..];
        let lsn = self.base.checked_add(delta.into());
        let lsn =
            lsn.ok_or_else(|| Problem::field("base LSN", self.base, "such that no LSN overflows"))?;
        Ok(Some((Lsn(lsn), change)))
    }
}

impl Iterator for Changes<'_> {
    type Item = (Lsn, Change);

    fn next(&mut self) -> Option<(Lsn, Change)> {
        // Decoding the block has seen that every change is sound.
        self.try_next().ok().flatten()
    }
}

/// Checks that a block is the next of the chain, and every change of it.
pub fn decode_block<'a>(
    bytes: &'a [u8],
    expect: &WalExpect,
    limits: &Limits,
    place: Place,
) -> Result<WalBlock<'a>, WalStop> {
    let of = |problem: Problem| problem.of(Structure::WalBlock, place);
    let (raw, units) = open(bytes, expect).map_err(|problem| WalStop::End(of(problem)))?;
    check(raw, units, expect, limits)
        .map(|last| WalBlock {
            raw,
            units: &units[..raw.units_in_use() * UNIT_SIZE],
            limits: *limits,
            last,
            sum: sum(bytes),
        })
        .map_err(|problem| WalStop::Corrupt(of(problem)))
}

/// Whether a block, behind the one where the log ended, began a later commit. Then the log did
/// not end there: when that commit was written all before it was durable, and has rotted since.
#[must_use]
pub fn begins_later_commit(bytes: &[u8], expect: &WalExpect, wal_blocks: u64) -> bool {
    let Ok(page) = as_page(bytes) else { return false };
    let Ok((raw, _)) = RawHeader::ref_from_prefix(page) else { return false };
    let later = raw.sequence.get().checked_sub(expect.sequence);
    raw.magic == MAGIC
        && raw.pool_id == expect.pool_id
        && later.is_some_and(|later| (1..wal_blocks).contains(&later))
        && raw.units.get() & BEGINS_COMMIT != 0
        && (expect.min_epoch.0..=expect.max_epoch.0).contains(&raw.epoch.get())
        && raw.crc.get() == page_crc::<CRC_AT>(page)
}

/// Checks that the block was sealed as the next of the chain.
fn open<'a>(bytes: &'a [u8], expect: &WalExpect) -> Result<(&'a RawHeader, &'a [u8]), Problem> {
    let page = as_page(bytes)?;
    let (raw, units) = RawHeader::ref_from_prefix(page).map_err(|_| short(bytes))?;
    if raw.magic != MAGIC {
        return Err(Problem::Magic {
            found: u64::from(u32::from_be_bytes(raw.magic)),
            expected: u64::from(u32::from_be_bytes(MAGIC)),
        });
    }
    let (found, computed) = (raw.crc.get(), page_crc::<CRC_AT>(page));
    if found != computed {
        return Err(Problem::Checksum { found: found.into(), computed: computed.into() });
    }
    if raw.pool_id != expect.pool_id {
        return Err(Problem::ForeignPool { found: raw.pool_id, expected: expect.pool_id });
    }
    for (field, found, expected) in [
        ("sequence", raw.sequence.get(), expect.sequence),
        ("sum of the block before", raw.previous.get(), expect.previous),
    ] {
        if found != expected {
            return Err(Problem::Mismatch { field, found, expected });
        }
    }
    if raw.epoch.get() < expect.min_epoch.0 {
        let allowed = "no less than that of the block before";
        return Err(Problem::field("epoch", raw.epoch.get(), allowed));
    }
    Ok((raw, units))
}

/// Checks the content of a block that continues the chain. Returns its last LSN.
fn check(
    raw: &RawHeader,
    units: &[u8],
    expect: &WalExpect,
    limits: &Limits,
) -> Result<Lsn, Problem> {
    if raw.version.get() != STRUCTURE_VERSION {
        let found = u64::from(raw.version.get());
        return Err(Problem::UnsupportedKind { what: "WAL version", found });
    }
    if raw.epoch.get() > expect.max_epoch.0 {
        // The superblock of an epoch is durable before the epoch's first block is written.
        return Err(Problem::field("epoch", raw.epoch.get(), "no more than the superblock's"));
    }
    let used = raw.units_in_use();
    if !(1..=WAL_UNITS).contains(&used) {
        return Err(Problem::field("units", used as u64, "from 1 to 126"));
    }
    let (used, unused) = units.split_at(used * UNIT_SIZE);
    check_reserved(unused, HEADER_SIZE + used.len())?;
    let base = raw.base_lsn.get();
    if base <= expect.after.0 {
        return Err(Problem::field("base LSN", base, "above the last of the block before"));
    }
    let mut changes = Changes { units: used, base, limits: *limits };
    let mut last = base - 1;
    while let Some((lsn, _)) = changes.try_next()? {
        let first = last < base;
        if lsn.0 <= last || (first && lsn.0 != base) {
            return Err(Problem::field("LSN", lsn.0, "the base for the first change, then rising"));
        }
        last = lsn.0;
    }
    Ok(Lsn(last))
}

#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    crc: U32,
    pool_id: PoolId,
    epoch: U64,
    node: U32,
    units: U16,
    version: U16,
    sequence: U64,
    base_lsn: U64,
    previous: U64,
}

impl RawHeader {
    fn units_in_use(&self) -> usize {
        usize::from(self.units.get() & !BEGINS_COMMIT)
    }
}

const _: () = {
    assert!(size_of::<RawHeader>() == HEADER_SIZE);
    assert!(HEADER_SIZE + WAL_UNITS * UNIT_SIZE == PAGE_SIZE);
};
