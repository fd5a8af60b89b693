//! Sizes of a pool's parts, their limits, and the arithmetic between them.

pub use crate::units::LEAF_ENTRIES;
use crate::units::{ExtentIndex, PageAddress, PhysicalExtent, SlotIndex};

/// Bytes of a metadata page, a WAL block and a superblock copy.
pub const PAGE_SIZE: usize = 4096;
/// [`PAGE_SIZE`] in the type of byte offsets.
pub const PAGE_BYTES: u64 = 4096;
/// Extents of a slab, the unit in which space goes to a node when several share a pool.
pub const SLAB_EXTENTS: u64 = 4096;
/// Devices of a pool. The table of 16 fits into the superblock's page with room to spare.
pub const MAX_DEVICES: usize = 16;
/// Bytes of a volume name.
pub const MAX_NAME: usize = 128;
/// Snapshots taken in one cut: their record fits into one block of the log even with the longest
/// names, and a block is there as a whole or not at all. (17 would fit; 16 is easier to keep.)
pub const MAX_GROUP: usize = 16;
/// Bytes of a volume: at the smallest extent its directory has 2^26 slots, 256 MiB of addresses.
pub const MAX_VOLUME_SIZE: u64 = 1 << 50;
/// Physical extents are 40 bits in an entry.
pub const MAX_PHYSICAL_EXTENTS: u64 = 1 << 40;
/// Each device has a window of 2^36 physical extents (4 PiB of the smallest), so that one can grow
/// without renumbering the others: the device's place in the table is the number's high bits.
pub const DEVICE_SHIFT: u32 = 36;
/// Smallest and largest extent, in bytes.
pub const EXTENT_SIZE_RANGE: std::ops::RangeInclusive<u32> = (64 << 10)..=(1 << 20);
/// The extent sizes that a pool can have, for messages.
pub const EXTENT_SIZES: &str = "a power of two from 65536 to 1048576 bytes";
/// The default extent size of a pool, in bytes.
pub const DEFAULT_EXTENT_SIZE: u32 = 256 << 10;
/// Smallest logical block, in bytes.
pub const MIN_BLOCK_SIZE: u32 = 512;

const MIB: u64 = 1 << 20;

/// A number of bytes that no pool can have as its extent size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("extent_size is {0}: must be {EXTENT_SIZES}")]
pub struct InvalidExtentSize(pub u32);

/// Extent and sub-block size of a pool and derived sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    extent_size: u32,
    extent_shift: u32,
    sub_block_shift: u32,
}

impl Geometry {
    /// Checks an extent size: a power of two from 64 KiB to 1 MiB.
    pub fn new(extent_size: u32) -> Result<Self, InvalidExtentSize> {
        if !extent_size.is_power_of_two() || !EXTENT_SIZE_RANGE.contains(&extent_size) {
            return Err(InvalidExtentSize(extent_size));
        }
        let extent_shift = extent_size.trailing_zeros();
        Ok(Self { extent_size, extent_shift, sub_block_shift: (extent_shift - 6).max(12) })
    }

    /// Bytes of an extent.
    #[must_use]
    pub const fn extent_size(self) -> u64 {
        self.extent_size as u64
    }

    /// Bytes of an extent as the superblock stores them.
    #[must_use]
    pub const fn extent_size_u32(self) -> u32 {
        self.extent_size
    }

    /// Bytes of a sub-block, the unit of validity: max(4 KiB, extent / 64).
    #[must_use]
    pub const fn sub_block_size(self) -> u64 {
        1 << self.sub_block_shift
    }

    /// Sub-blocks of an extent: 16 to 64.
    #[must_use]
    pub const fn sub_blocks(self) -> u32 {
        1 << (self.extent_shift - self.sub_block_shift)
    }

    /// The bitmap with every sub-block of an extent set.
    #[must_use]
    pub const fn full_bitmap(self) -> u64 {
        u64::MAX >> (64 - self.sub_blocks())
    }

    /// Bytes that one leaf maps.
    #[must_use]
    pub const fn leaf_span(self) -> u64 {
        self.extent_size() * LEAF_ENTRIES
    }

    /// The logical extent that holds a byte of a volume.
    #[must_use]
    pub const fn extent_of(self, offset: u64) -> ExtentIndex {
        ExtentIndex(offset >> self.extent_shift)
    }

    /// Offset of a byte within its extent.
    #[must_use]
    pub const fn within(self, offset: u64) -> u64 {
        offset & (self.extent_size() - 1)
    }

    /// Extents needed for a volume of this many bytes.
    #[must_use]
    pub const fn extents_for(self, size: u64) -> u64 {
        size.div_ceil(self.extent_size())
    }

    /// Directory slots needed for a volume of this many bytes.
    #[must_use]
    pub fn slots_for(self, size: u64) -> u32 {
        u32::try_from(size.div_ceil(self.leaf_span())).unwrap_or(u32::MAX)
    }

    /// The slot that holds a byte of a volume.
    #[must_use]
    pub fn slot_of(self, offset: u64) -> SlotIndex {
        self.extent_of(offset).slot()
    }

    /// Bits of the sub-blocks that bytes `from..to` of an extent touch, in whole or in part.
    #[must_use]
    pub const fn touched(self, from: u64, to: u64) -> u64 {
        if from >= to {
            return 0;
        }
        let first = from >> self.sub_block_shift;
        let last = (to - 1) >> self.sub_block_shift;
        Self::bits(first, last + 1)
    }

    /// Bits of the sub-blocks that bytes `from..to` of an extent cover in whole.
    #[must_use]
    pub const fn covered(self, from: u64, to: u64) -> u64 {
        let first = from.div_ceil(self.sub_block_size());
        let end = to >> self.sub_block_shift;
        if first >= end { 0 } else { Self::bits(first, end) }
    }

    /// Metadata pages of an extent.
    #[must_use]
    pub const fn pages_per_extent(self) -> u64 {
        self.extent_size() / PAGE_BYTES
    }

    /// The address of a page of a physical extent.
    #[must_use]
    pub const fn page_address(self, extent: PhysicalExtent, page: u64) -> PageAddress {
        PageAddress(extent.0 * self.pages_per_extent() + page)
    }

    /// The physical extent that holds a metadata page, and the page's place in it.
    #[must_use]
    pub const fn page_place(self, address: PageAddress) -> (PhysicalExtent, u64) {
        let pages = self.pages_per_extent();
        (PhysicalExtent(address.0 / pages), address.0 % pages)
    }

    /// Bytes of the WAL of a pool of this size: 1/128, at least 1 MiB, at most 64 MiB.
    #[must_use]
    pub fn default_wal_size(self, pool_size: u64) -> u64 {
        (pool_size / 128).clamp(MIB, 64 * MIB).next_multiple_of(self.extent_size())
    }

    /// Bytes kept for metadata when everything else is used: 1/256, at least 1 MiB, at most 64.
    #[must_use]
    pub fn default_reserve_size(self, pool_size: u64) -> u64 {
        (pool_size / 256).clamp(MIB, 64 * MIB).next_multiple_of(self.extent_size())
    }

    const fn bits(first: u64, end: u64) -> u64 {
        let high = if end >= 64 { u64::MAX } else { (1 << end) - 1 };
        high & !((1 << first) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extent_sizes_outside_the_range_are_refused() {
        for size in [0, 1, 4096, 32 << 10, 65537, 2 << 20, u32::MAX] {
            assert!(Geometry::new(size).is_err(), "{size}");
        }
    }

    #[test]
    fn sub_blocks_follow_the_extent() {
        for (extent, sub_block, count) in [
            (64 << 10, 4096, 16),
            (128 << 10, 4096, 32),
            (256 << 10, 4096, 64),
            (1 << 20, 16384, 64),
        ] {
            let geometry = Geometry::new(extent).unwrap();
            assert_eq!((geometry.sub_block_size(), geometry.sub_blocks()), (sub_block, count));
            assert_eq!(geometry.full_bitmap().count_ones(), count);
        }
    }

    #[test]
    fn touched_and_covered_bits() {
        let geometry = Geometry::new(256 << 10).unwrap();
        assert_eq!(geometry.touched(0, 1), 1);
        assert_eq!(geometry.covered(0, 1), 0);
        assert_eq!(geometry.touched(4095, 8193), 0b111);
        assert_eq!(geometry.covered(4095, 8193), 0b10);
        assert_eq!(geometry.touched(0, 256 << 10), u64::MAX);
        assert_eq!(geometry.covered(0, 256 << 10), u64::MAX);
        assert_eq!(geometry.touched(252 << 10, 256 << 10), 1 << 63);
        assert_eq!(geometry.touched(5, 5), 0);
    }
}
