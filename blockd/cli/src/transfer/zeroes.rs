//! Finding zeroes in data, so that they take no space.

use std::ops::Range;

/// Zeroes are looked for in blocks of this size: the smallest unit that a volume keeps.
const GRAIN_BYTES: usize = 4096;

/// Shorter stretches of zeroes are sent along: a request more costs more than they do.
const MIN_RUN_BYTES: usize = 64 << 10;

/// Whether there is nothing but zeroes.
pub(super) fn is_zero(data: &[u8]) -> bool {
    // Compares with itself, shifted by one: the library does that with vector instructions.
    data.first().is_none_or(|first| *first == 0 && data[1..] == data[..data.len() - 1])
}

/// A stretch of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Where it is.
    pub(super) range: Range<usize>,
    /// Whether the stretch holds nothing but zeroes.
    pub(super) zero: bool,
}

/// The buffer as stretches of data and of zeroes, one after another.
pub(super) fn stretches(data: &[u8]) -> Vec<Stretch> {
    let mut found: Vec<Stretch> = Vec::new();
    let mut start = 0;
    for grain in data.chunks(GRAIN_BYTES) {
        let end = start + grain.len();
        let zero = is_zero(grain);
        match found.last_mut() {
            Some(last) if last.zero == zero => last.range.end = end,
            _ => found.push(Stretch { range: start..end, zero }),
        }
        start = end;
    }
    for stretch in &mut found {
        stretch.zero &= stretch.range.len() >= MIN_RUN_BYTES || stretch.range.len() == data.len();
    }
    found.dedup_by(|next, previous| {
        let same = next.zero == previous.zero;
        if same {
            previous.range.end = next.range.end;
        }
        same
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_zeroes_to_the_last_byte() {
        assert!(is_zero(&[]) && is_zero(&[0]) && is_zero(&[0; 4097]));
        let mut data = [0; 4097];
        for at in [0, 2000, 4096] {
            data[at] = 1;
            assert!(!is_zero(&data));
            data[at] = 0;
        }
        assert!(!is_zero(&[7; 100]));
    }

    #[test]
    fn only_long_runs_of_zeroes_are_left_out() {
        let mut data = vec![0; 256 << 10];
        data[4096] = 1;
        data[12 << 10] = 1;
        let found = stretches(&data);
        let zeroes: Vec<_> = found.iter().filter(|stretch| stretch.zero).collect();
        assert_eq!(zeroes.len(), 1);
        assert_eq!(zeroes[0].range, 16 << 10..256 << 10);
        assert_eq!(found[0].range, 0..16 << 10);
    }

    #[test]
    fn a_short_buffer_of_zeroes_is_left_out_whole() {
        assert_eq!(stretches(&[0; 512]), [Stretch { range: 0..512, zero: true }]);
        assert_eq!(stretches(&[]), []);
    }
}
