//! A type per unit, so that an extent of a volume is never taken for an extent of the pool.

/// Entries of a leaf: with 16 bytes each a leaf is one page of memory.
pub const LEAF_ENTRIES: u64 = 256;

/// Defines an index type over an unsigned integer, printed with its name.
macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit!(
    /// Stable identity of a volume or snapshot in its pool. Never reused; 0 names none.
    VolumeId(u32)
);
unit!(
    /// Position of an extent in a volume, from 0.
    ExtentIndex(u64)
);
unit!(
    /// Position of an extent in the pool, over all its devices, from 0.
    PhysicalExtent(u64)
);
unit!(
    /// Position of a leaf in a volume's directory: logical extent / 256.
    SlotIndex(u32)
);
unit!(
    /// Position of a leaf in the arena. 0 names none.
    LeafId(u32)
);
unit!(
    /// Log sequence number: orders every mapping change of a pool. 0 is before the first.
    Lsn(u64)
);
unit!(
    /// Position of a 4 KiB metadata page in the pool: physical extent times pages per extent,
    /// plus the page in the extent. 0 names none (it lies in a superblock area).
    PageAddress(u64)
);
unit!(
    /// Position of a device in the list that the caller opened the pool with.
    DeviceIndex(u8)
);
unit!(
    /// Rises by one each time the pool is opened for writing.
    Epoch(u64)
);

unit!(
    /// Milliseconds since 1970 began in UTC, by the host's clock. 0 where it isn't known.
    WallTime(u64)
);

impl WallTime {
    /// The last one that a record of the log has room for, in the year 2285428.
    pub const LAST: Self = Self((1 << 56) - 1);

    /// A time, or the last one there is.
    #[must_use]
    pub const fn from_ms(ms: u64) -> Self {
        if ms < Self::LAST.0 { Self(ms) } else { Self::LAST }
    }
}

impl Lsn {
    /// The number after this one. Numbers are 64 bits: at a billion a second they last 584 years.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl ExtentIndex {
    /// The directory slot whose leaf holds this extent.
    #[must_use]
    pub fn slot(self) -> SlotIndex {
        // A volume is at most 1 PiB of 64 KiB extents: 2^34 extents, 2^26 slots.
        SlotIndex(u32::try_from(self.0 / LEAF_ENTRIES).unwrap_or(u32::MAX))
    }

    /// The entry within its leaf.
    #[must_use]
    pub const fn entry(self) -> usize {
        (self.0 % LEAF_ENTRIES) as usize
    }
}

impl SlotIndex {
    /// The first extent that the slot covers.
    #[must_use]
    pub const fn first_extent(self) -> ExtentIndex {
        ExtentIndex(self.0 as u64 * LEAF_ENTRIES)
    }
}
