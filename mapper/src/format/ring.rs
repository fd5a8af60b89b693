//! Layout of the delta ring, in 64-bit words of the host's byte order: the ring never leaves the
//! host's memory.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::format::PoolId;
use crate::format::record::Unit;
use crate::units::{LeafId, PhysicalExtent};

/// Words of the header.
pub const HEADER_WORDS: usize = 512;
/// Words of a slot's line, so that no two slots share a cache line.
pub const LINE_WORDS: usize = 8;
/// Words of a record.
pub const RECORD_WORDS: usize = 8;
/// Slots of a ring at most: 63 workers and the engine.
pub const MAX_SLOTS: usize = 64;
/// Records of a slot at least. A change of seven units would never fit into fewer than 7, but
/// rings this small exist in tests only.
pub const MIN_CAPACITY: u64 = 4;
/// Records of a slot at most: 64 slots of these are 256 GiB, far beyond any use.
pub const MAX_CAPACITY: u64 = 1 << 26;

/// "BDring" and the layout's version.
pub(crate) const MAGIC: u64 = u64::from_be_bytes(*b"BDring\0\x01");
/// The part of [`MAGIC`] that stays in every version.
pub(crate) const MAGIC_MASK: u64 = !0xffff;

pub(crate) const W_MAGIC: usize = 0;
pub(crate) const W_POOL: usize = 1;
pub(crate) const W_BOOT: usize = 3;
pub(crate) const W_SLOTS: usize = 5;
pub(crate) const W_CAPACITY: usize = 6;
pub(crate) const W_SUM: usize = 7;
pub const W_CURRENT: usize = 8;
pub(crate) const W_NEXT: usize = 16;
pub const W_POISONED: usize = 24;

pub(crate) const R_LSN: usize = 4;
pub(crate) const R_DROPPED: usize = 5;
pub(crate) const R_POSITION: usize = 6;
pub(crate) const R_SUM: usize = 7;

const LEAF_BIT: u64 = 1 << 63;

/// The reference that a change dropped: needed after process death, since it is stored nowhere
/// else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dropped {
    /// No reference.
    #[default]
    Nothing,
    /// One reference to an extent.
    Extent(PhysicalExtent),
    /// One reference to a leaf.
    Leaf(LeafId),
}

impl Dropped {
    /// Encodes it as one word: 0, the extent plus 1, or the leaf with the highest bit set.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Extent(extent) => (extent.0 & !LEAF_BIT).wrapping_add(1),
            Self::Leaf(leaf) => LEAF_BIT | leaf.0 as u64,
        }
    }

    /// Reads the word. `None` if no value gives it.
    #[must_use]
    pub fn from_word(word: u64) -> Option<Self> {
        if word & LEAF_BIT != 0 {
            return u32::try_from(word & !LEAF_BIT).ok().map(|leaf| Self::Leaf(LeafId(leaf)));
        }
        Some(
            word.checked_sub(1)
                .map_or(Self::Nothing, |extent| Self::Extent(PhysicalExtent(extent))),
        )
    }
}

/// Words of memory for a ring.
#[must_use]
pub const fn words_needed(slots: usize, capacity: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^26, and usize has 64 bits")]
    let capacity = (if capacity > MAX_CAPACITY { MAX_CAPACITY } else { capacity }) as usize;
    HEADER_WORDS + slots * (LINE_WORDS + capacity * RECORD_WORDS)
}

/// Seed of all checksums of a pool's ring.
#[must_use]
pub(crate) fn seed(pool_id: &PoolId) -> u64 {
    xxh3_64_with_seed(pool_id, 0)
}

/// A record without its checksum: unit, LSN, dropped, position.
pub(crate) type Body = [u64; R_SUM];

pub(crate) fn body(unit: Unit, lsn: u64, dropped: u64, position: u64) -> Body {
    let [a, b, c, d] = unit;
    [a, b, c, d, lsn, dropped, position]
}

/// XXH3-64 of seven words as little-endian bytes.
#[inline]
pub(crate) fn record_sum(body: &Body, seed: u64) -> u64 {
    let mut bytes = [0; R_SUM * 8];
    for (word, bytes) in body.iter().zip(bytes.as_chunks_mut::<8>().0) {
        *bytes = word.to_le_bytes();
    }
    xxh3_64_with_seed(&bytes, seed)
}

/// The two words of a 16-byte identity.
pub(crate) fn identity_words(id: &[u8; 16]) -> [u64; 2] {
    let mut words = [0; 2];
    for (word, bytes) in words.iter_mut().zip(id.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}
