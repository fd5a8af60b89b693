//! Content for volumes. This package is optimized in builds for tests too: in a test's own code a
//! loop over each byte takes ten times as long.

/// Bytes that differ from place to place, and are not zero.
#[must_use]
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes.iter_mut().for_each(|byte| *byte = (*byte).max(1));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_has_no_zero_and_is_the_seeds_own() {
        let bytes = pattern(10_000, 1);
        assert!(bytes.len() == 10_000 && !bytes.contains(&0));
        assert_eq!(bytes, pattern(10_000, 1));
        assert_ne!(bytes, pattern(10_000, 2));
        assert_ne!(bytes[..4096], bytes[4096..8192]);
    }
}
