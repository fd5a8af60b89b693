//! The content of sectors: each has its volume, its place and the write that it comes from, so that
//! a wrong one can be explained.

/// The unit in which volumes are written and compared.
pub const SECTOR: usize = 512;

const MAGIC: u64 = 0x5345_4354_4f52_2121;
const WORDS: usize = SECTOR / 8;

/// The number of a write. 0 stands for zeroes: never written, or given back.
pub type Generation = u32;

/// Fills a sector. Generation 0 gives zeroes.
pub fn fill(sector: &mut [u8], volume: u32, index: u64, generation: Generation) {
    if generation == 0 {
        sector.fill(0);
        return;
    }
    for (word, bytes) in words(volume, index, generation).zip(sector.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// Whether a sector holds exactly this.
#[must_use]
pub fn holds(sector: &[u8], volume: u32, index: u64, generation: Generation) -> bool {
    if generation == 0 {
        return sector.iter().all(|&byte| byte == 0);
    }
    words(volume, index, generation)
        .zip(sector.chunks_exact(8))
        .all(|(word, bytes)| bytes == word.to_le_bytes())
}

/// Whether each byte of a sector is that of one or of the other: a copy was cut short in it.
#[must_use]
pub fn mixes(sector: &[u8], volume: u32, index: u64, one: Generation, other: Generation) -> bool {
    let [mut first, mut second] = [[0; SECTOR]; 2];
    fill(&mut first, volume, index, one);
    fill(&mut second, volume, index, other);
    sector.iter().zip(first.iter().zip(&second)).all(|(byte, (a, b))| byte == a || byte == b)
}

/// Describes the content of a sector.
#[must_use]
pub fn describe(sector: &[u8]) -> String {
    if sector.iter().all(|&byte| byte == 0) {
        return "zeroes".to_owned();
    }
    let word = |at: usize| {
        let bytes = sector[at * 8..at * 8 + 8].try_into().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    if word(0) != MAGIC {
        return format!("no content of ours: {:02x?}", &sector[..16]);
    }
    let (volume, generation) = (word(1) >> 32, word(1) & 0xffff_ffff);
    let whole = holds(
        sector,
        u32::try_from(volume).unwrap_or_default(),
        word(2),
        u32::try_from(generation).unwrap_or_default(),
    );
    let torn = if whole { "" } else { ", damaged" };
    format!("write {generation} of volume {volume} at sector {}{torn}", word(2))
}

fn words(volume: u32, index: u64, generation: Generation) -> impl Iterator<Item = u64> {
    let who = u64::from(volume) << 32 | u64::from(generation);
    let start = (who ^ index.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..WORDS as u64).map(move |at| match at {
        0 => MAGIC,
        1 => who,
        2 => index,
        _ => start.wrapping_add(at.wrapping_mul(0xd6e8_feb8_6659_fd93)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_differs_from_any_other() {
        let mut sector = [0; SECTOR];
        assert!(holds(&sector, 1, 2, 0));
        fill(&mut sector, 1, 2, 3);
        assert!(holds(&sector, 1, 2, 3));
        assert!(!holds(&sector, 1, 2, 4) && !holds(&sector, 1, 3, 3) && !holds(&sector, 2, 2, 3));
        assert_eq!(describe(&sector), "write 3 of volume 1 at sector 2");
        let mut other = [0; SECTOR];
        fill(&mut other, 1, 2, 4);
        other[..100].copy_from_slice(&sector[..100]);
        assert!(mixes(&other, 1, 2, 3, 4) && !mixes(&other, 1, 2, 3, 5));
        sector[511] ^= 1;
        assert_eq!(describe(&sector), "write 3 of volume 1 at sector 2, damaged");
    }
}
