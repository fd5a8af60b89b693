//! A partition table of the oldest kind, with one partition.

/// Its bytes, and the unit in which it counts.
pub(super) const SECTOR: usize = 512;

const SECTOR_BYTES: u64 = 512;

/// Its first entry.
const ENTRY: usize = 446;

/// The mark of its end.
const MARK: [u8; 2] = [0x55, 0xaa];

/// A partition with a file system of Linux.
const LINUX: u8 = 0x83;

/// Where it begins and ends in cylinders, heads and sectors: beyond the range of these fields.
const BEYOND: [u8; 3] = [0xfe, 0xff, 0xff];

/// The partition's position, in sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Table {
    first: u32,
    count: u32,
}

impl Table {
    /// Describes a partition by its first byte and its length in bytes. Values beyond the range of
    /// a field are stored as the largest value, as partitioning tools do.
    pub(super) fn new(first: u64, bytes: u64) -> Self {
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        Self { first: sectors(first), count: sectors(bytes) }
    }

    pub(super) fn encode(self) -> [u8; SECTOR] {
        let mut sector = [0; SECTOR];
        let entry = &mut sector[ENTRY..ENTRY + 16];
        entry[1..4].copy_from_slice(&BEYOND);
        entry[4] = LINUX;
        entry[5..8].copy_from_slice(&BEYOND);
        entry[8..12].copy_from_slice(&self.first.to_le_bytes());
        entry[12..16].copy_from_slice(&self.count.to_le_bytes());
        sector[SECTOR - 2..].copy_from_slice(&MARK);
        sector
    }

    /// Decodes a sector that this driver wrote.
    pub(super) fn decode(sector: &[u8; SECTOR]) -> Option<Self> {
        let number = |at: usize| {
            let bytes = sector.get(ENTRY + at..ENTRY + at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let table = Self { first: number(8)?, count: number(12)? };
        (*sector == table.encode()).then_some(table)
    }
}
