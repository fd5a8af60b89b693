//! The superblock by which the kernel makes a namespace of a range of persistent memory, `nd_pfn`
//! version 0.2: pages are described in ordinary memory, so that all of the rest is data.

/// Where it is, from the beginning of the range.
pub(super) const AT: u64 = 4096;

/// Bytes of it.
pub(super) const BYTES: usize = 4096;

const SIGNATURE: [u8; 16] = *b"NVDIMM_PFN_INFO\0";

/// Offsets of its fields, all little-endian. Those that are not here are zero: both ids, flags, the
/// count of pages, the bytes cut off at both ends, and the rest up to the checksum.
const MAJOR_MINOR: usize = 52;
const DATA_OFFSET: usize = 56;
const MODE: usize = 72;
const ALIGN: usize = 84;
const CHECKSUM: usize = BYTES - 8;

/// Major version 0, minor version 2: the first that has an alignment, and one that every kernel
/// since 4.8 reads.
const VERSION: [u8; 4] = [0, 0, 2, 0];

/// Pages are described in ordinary memory.
const MODE_RAM: u32 = 1;

/// The superblock of data that begins at `data` and is so aligned.
pub(super) fn encode(data: u64) -> [u8; BYTES] {
    let mut block = [0; BYTES];
    block[..SIGNATURE.len()].copy_from_slice(&SIGNATURE);
    put(&mut block, MAJOR_MINOR, &VERSION);
    put(&mut block, DATA_OFFSET, &data.to_le_bytes());
    put(&mut block, MODE, &MODE_RAM.to_le_bytes());
    put(&mut block, ALIGN, &u32::try_from(data).unwrap_or_default().to_le_bytes());
    let sum = fletcher64(&block);
    put(&mut block, CHECKSUM, &sum.to_le_bytes());
    block
}

/// Where the data begins, if it is one of ours.
pub(super) fn decode(block: &[u8; BYTES]) -> Option<u64> {
    let data = block.get(DATA_OFFSET..DATA_OFFSET + 8)?;
    let data = u64::from_le_bytes(data.try_into().ok()?);
    (*block == encode(data)).then_some(data)
}

fn put(block: &mut [u8; BYTES], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the kernel's checksum: over 32-bit words, the checksum's own counting as zero.
fn fletcher64(block: &[u8; BYTES]) -> u64 {
    let (mut low, mut high) = (0_u32, 0_u32);
    for word in block.chunks_exact(4) {
        let word: [u8; 4] = word.try_into().unwrap_or_default();
        low = low.wrapping_add(u32::from_le_bytes(word));
        high = high.wrapping_add(low);
    }
    u64::from(high) << 32 | u64::from(low)
}
