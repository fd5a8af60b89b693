//! The kernel's list of bad blocks of a device, as sysfs has it.

/// Runs that are taken from a list: the kernel keeps no more than 512.
pub const MAX_RUNS: usize = 512;
/// The unit of the list, whatever the device's block is.
const SECTOR_BYTES: u64 = 512;

/// Bad blocks of a device, in bytes of that device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BadBlocks {
    /// First byte and length; in order, without overlap.
    pub runs: Vec<(u64, u64)>,
}

impl BadBlocks {
    /// Reads a list: on each line the first sector and how many, in sectors of 512 bytes. Lines
    /// that are not like that are left out.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut runs: Vec<(u64, u64)> = text.lines().filter_map(run).take(MAX_RUNS).collect();
        runs.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, len) in runs {
            match joined.last_mut() {
                Some((first, present)) if start <= *first + *present => {
                    *present = (*present).max(start.saturating_add(len) - *first);
                }
                _ => joined.push((start, len)),
            }
        }
        Self { runs: joined }
    }

    /// The bad blocks of a part of the device, which begins at its byte `start` and has `len`
    /// bytes, in bytes of the part.
    #[must_use]
    pub fn within(&self, start: u64, len: u64) -> Self {
        let end = start.saturating_add(len);
        let cut = |&(first, bytes): &(u64, u64)| {
            let last = first.saturating_add(bytes).min(end);
            let first = first.max(start);
            (first < last).then(|| (first - start, last - first))
        };
        Self { runs: self.runs.iter().filter_map(cut).collect() }
    }

    /// How many sectors of 512 bytes they are.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.runs.iter().fold(0, |sum, run| sum.saturating_add(run.1 / SECTOR_BYTES))
    }

    /// The extents of `extent_bytes` bytes that they overlap, as first index and count; in order,
    /// without overlap.
    #[must_use]
    pub fn extents(&self, extent_bytes: u64) -> Vec<(u64, u64)> {
        let extent_bytes = extent_bytes.max(1);
        let mut extents: Vec<(u64, u64)> = Vec::new();
        for &(first, bytes) in &self.runs {
            let start = first / extent_bytes;
            let end = first.saturating_add(bytes).div_ceil(extent_bytes);
            match extents.last_mut() {
                Some((at, count)) if start <= *at + *count => {
                    *count = (*count).max(end.saturating_sub(*at));
                }
                _ => extents.push((start, end - start)),
            }
        }
        extents
    }
}

fn run(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_whitespace();
    let (start, count) = (words.next()?.parse::<u64>().ok()?, words.next()?.parse::<u64>().ok()?);
    let run = (start.checked_mul(SECTOR_BYTES)?, count.checked_mul(SECTOR_BYTES)?);
    (words.next().is_none() && count > 0 && run.0.checked_add(run.1).is_some()).then_some(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row: H11.
    #[test]
    fn the_kernels_list_is_read_and_cut_to_a_partition() {
        let list = BadBlocks::parse("2048 8\n16 8\n24 8\nnonsense\n7\n1 0\n9 9 9\n");
        assert_eq!(list.runs, [(16 * 512, 16 * 512), (2048 * 512, 8 * 512)]);
        assert_eq!(list.sectors(), 24);
        // A partition from sector 20 on, of 2030 sectors: it ends within the second run.
        let part = list.within(20 * 512, 2030 * 512);
        assert_eq!(part.runs, [(0, 12 * 512), (2028 * 512, 2 * 512)]);
        assert!(list.within(1 << 30, 1 << 30).runs.is_empty());
        assert!(BadBlocks::parse("").runs.is_empty());
    }

    /// Row: H11.
    #[test]
    fn bad_blocks_meet_extents() {
        let list = BadBlocks::parse("127 2\n300 1\n1000 1\n");
        // Extents of 64 KiB are 128 sectors.
        assert_eq!(list.extents(65_536), [(0, 3), (7, 1)]);
    }

    #[test]
    fn the_list_of_the_kernel_is_bounded() {
        let long: String = (0..10_000).map(|n| format!("{} 1\n", n * 2)).collect();
        assert_eq!(BadBlocks::parse(&long).runs.len(), MAX_RUNS);
        let huge = format!("{} {}\n{} 1\n", u64::MAX, u64::MAX, u64::MAX / 512);
        assert!(BadBlocks::parse(&huge).extents(4096).len() <= 1);
    }
}
