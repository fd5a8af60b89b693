//! The two checksums: CRC-32C inside a structure, XXH3-64 from outside.

use crate::geometry::PAGE_SIZE;

/// CRC-32C of a page whose own checksum field, four bytes from `FIELD` on, counts as zeroes.
#[must_use]
pub fn page_crc<const FIELD: usize>(page: &[u8; PAGE_SIZE]) -> u32 {
    // The prefix is copied, since three calls over odd pieces cost more than one over 64 bytes.
    const { assert!(FIELD + 4 <= 64) }
    let mut prefix = [0; 64];
    prefix.copy_from_slice(&page[..64]);
    prefix[FIELD..FIELD + 4].fill(0);
    crc32c::crc32c_append(crc32c::crc32c(&prefix), &page[64..])
}

/// XXH3-64 with seed 0: parent sums and the chain of the WAL.
#[must_use]
pub fn sum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
