//! The header of a pool's device in persistent memory: its owner, and the place of its lanes.
//!
//! Described in `docs/ON_DISK_FORMAT.md`. Two copies, each of a page with a checksum; the one with
//! the higher generation counts, and the other one is written next.

use std::ops::Range;

/// Bytes at the front of a device that the pool doesn't see: a huge page, so that what follows is
/// aligned to one.
pub const HEADER_BYTES: u64 = 2 << 20;
/// Bytes of a copy.
pub(super) const COPY_BYTES: usize = 4096;
/// Where the copies are: too far apart for one bad block to take both.
pub(super) const COPIES: [u64; 2] = [0, 1 << 20];
/// Where lanes may be: between the copies.
pub(super) const LANES: Range<u64> = (64 << 10)..(1 << 20);

const MAGIC: [u8; 8] = *b"BLOCKDpm";
const VERSION: u16 = 1;
/// Where the checksum is.
const SUM_AT: usize = 12;
/// Where what is known of ends.
const END: usize = 88;
const ERASE_UNDER_WAY: u32 = 1;

/// The content of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// The device's identity.
    pub(super) uuid: [u8; 16],
    /// The set cookie of the region that it was made in; 0 for none.
    pub(super) region: u64,
    /// Bytes of the device when it was made.
    pub(super) size: u64,
    /// Where lanes begin; 0 for none.
    pub(super) lanes_at: u64,
    /// Bytes that they have.
    pub(super) lanes_len: u64,
    /// How many there are.
    pub(super) lanes: u32,
    /// Freed extents may not have been overwritten yet.
    pub(super) erase_under_way: bool,
    /// Rises with each copy that is written.
    pub(super) generation: u64,
}

/// The content of a page that is no valid header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoHeader {
    /// The page begins with another mark.
    #[error("holds something that is no pool in persistent memory")]
    Foreign,
    /// The page has the mark and is damaged.
    #[error("both copies of its header are damaged")]
    Damaged,
    /// A later release made it.
    #[error("its header has version {0}: this release knows version {VERSION}")]
    Version(u16),
}

impl Header {
    /// As a page.
    #[must_use]
    pub(super) fn encode(&self) -> [u8; COPY_BYTES] {
        let mut page = [0; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.uuid);
        put(32, &self.region.to_le_bytes());
        put(40, &self.size.to_le_bytes());
        put(48, &HEADER_BYTES.to_le_bytes());
        put(56, &self.lanes_at.to_le_bytes());
        put(64, &self.lanes_len.to_le_bytes());
        put(72, &self.lanes.to_le_bytes());
        let flags = if self.erase_under_way { ERASE_UNDER_WAY } else { 0 };
        put(76, &flags.to_le_bytes());
        put(80, &self.generation.to_le_bytes());
        let sum = crc32c::crc32c(&page);
        page[SUM_AT..SUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// Reads one copy.
    pub(super) fn decode(page: &[u8; COPY_BYTES]) -> Result<Self, NoHeader> {
        if page[..8] != MAGIC {
            return Err(NoHeader::Foreign);
        }
        let mut zeroed = *page;
        zeroed[SUM_AT..SUM_AT + 4].fill(0);
        if crc32c::crc32c(&zeroed).to_le_bytes() != page[SUM_AT..SUM_AT + 4] {
            return Err(NoHeader::Damaged);
        }
        let version = u16::from_le_bytes(field(page, 8));
        if version != VERSION {
            return Err(NoHeader::Version(version));
        }
        let number = |at| u64::from_le_bytes(field(page, at));
        let flags = u32::from_le_bytes(field(page, 76));
        let header = Self {
            uuid: field(page, 16),
            region: number(32),
            size: number(40),
            lanes_at: number(56),
            lanes_len: number(64),
            lanes: u32::from_le_bytes(field(page, 72)),
            erase_under_way: flags & ERASE_UNDER_WAY != 0,
            generation: number(80),
        };
        let reserved = page[10..12].iter().chain(&page[END..]).any(|&byte| byte != 0);
        let end = header.lanes_at.checked_add(header.lanes_len);
        let inside = header.lanes == 0
            || end.is_some_and(|end| LANES.start <= header.lanes_at && end <= LANES.end);
        if reserved || flags & !ERASE_UNDER_WAY != 0 || number(48) != HEADER_BYTES || !inside {
            return Err(NoHeader::Damaged);
        }
        Ok(header)
    }

    /// The newer of two copies that can be read, or why there is none. A copy that could not even
    /// be read is `None`.
    pub(super) fn newest(copies: [Option<&[u8; COPY_BYTES]>; 2]) -> Result<Self, NoHeader> {
        let read = copies.map(|copy| copy.map_or(Err(NoHeader::Damaged), Self::decode));
        match read {
            [Ok(first), Ok(second)] if second.generation > first.generation => Ok(second),
            [Ok(first), _] => Ok(first),
            [_, Ok(second)] => Ok(second),
            [Err(NoHeader::Foreign), Err(other)] | [Err(other), _] => Err(other),
        }
    }

    /// Where the copy of this generation is.
    #[must_use]
    pub(super) const fn place(&self) -> u64 {
        COPIES[if self.generation.is_multiple_of(2) { 0 } else { 1 }]
    }
}

fn field<const N: usize>(page: &[u8; COPY_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[at..at + N]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Header = Header {
        uuid: *b"sample device id",
        region: 0x1122_3344_5566_7788,
        size: 0x4000_0000,
        lanes_at: 0x1_0000,
        lanes_len: 0x2_2000,
        lanes: 17,
        erase_under_way: true,
        generation: 5,
    };

    /// The rows of 32 bytes that aren't all zero.
    const GOLDEN: &str = "
0000: 424c4f43 4b44706d 01000000 62171f85 73616d70 6c652064 65766963 65206964
0020: 88776655 44332211 00000040 00000000 00002000 00000000 00000100 00000000
0040: 00200200 00000000 11000000 01000000 05000000 00000000 00000000 00000000";

    fn dump(page: &[u8]) -> String {
        let mut text = String::new();
        for (row, bytes) in page.chunks(32).enumerate().filter(|row| row.1.iter().any(|&b| b > 0)) {
            let words: Vec<String> = bytes
                .chunks(4)
                .map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect())
                .collect();
            text += &format!("\n{:04x}: {}", row * 32, words.join(" "));
        }
        text
    }

    /// Row: P11.
    #[test]
    fn the_header_has_the_bytes_that_are_written_down() {
        assert_eq!(dump(&SAMPLE.encode()), GOLDEN);
        assert_eq!(Header::decode(&SAMPLE.encode()), Ok(SAMPLE));
    }

    /// Row: P11.
    #[test]
    fn each_flipped_bit_of_a_header_is_seen() {
        let page = SAMPLE.encode();
        for bit in (0..COPY_BYTES * 8).step_by(7) {
            let mut flipped = page;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    /// Row: P11.
    #[test]
    fn foreign_headers_are_distinct_from_damaged_or_newer_ones() {
        let (zeroes, page) = ([0; COPY_BYTES], SAMPLE.encode());
        let mut torn = page;
        torn[40] ^= 1;
        let mut later = page;
        later[8] = 2;
        later[SUM_AT..SUM_AT + 4].fill(0);
        let sum = crc32c::crc32c(&later).to_le_bytes();
        later[SUM_AT..SUM_AT + 4].copy_from_slice(&sum);
        let newest = |first, second| Header::newest([first, second]);
        assert_eq!(newest(Some(&zeroes), Some(&zeroes)), Err(NoHeader::Foreign));
        assert_eq!(newest(Some(&torn), Some(&zeroes)), Err(NoHeader::Damaged));
        assert_eq!(newest(Some(&zeroes), Some(&torn)), Err(NoHeader::Damaged));
        assert_eq!(newest(Some(&later), Some(&later)), Err(NoHeader::Version(2)));
        // One of two will do, torn, wiped or not to be read at all.
        for other in [None, Some(&torn), Some(&zeroes)] {
            assert_eq!(newest(other, Some(&page)), Ok(SAMPLE));
            assert_eq!(newest(Some(&page), other), Ok(SAMPLE));
        }
        let newer = Header { generation: 6, erase_under_way: false, ..SAMPLE };
        assert_eq!(newest(Some(&newer.encode()), Some(&page)), Ok(newer));
        assert_ne!(newer.place(), SAMPLE.place());
    }
}
