//! The overhead of a namespace: the part that its device lacks, since the kernel keeps page
//! metadata there.

use super::namespace::{Mode, PageMap};

/// At the front of a namespace with pages: labels of the kernel.
const INFO_BYTES: u64 = 8 << 10;
/// The kernel's metadata for each page, in bytes.
const PAGE_NOTE_BYTES: u64 = 64;
const PAGE: u64 = 4096;

/// Sector namespaces are made of arenas of at most so much, and the last of at least so much.
const ARENA_MAX: u64 = 512 << 30;
const ARENA_MIN: u64 = 16 << 20;
/// Overhead of an arena: two info blocks, the log of free blocks, and blocks that are kept free.
const ARENA_INFO: u64 = 2 * PAGE;
const ARENA_LOG: u64 = 16 << 10;
const ARENA_SPARE_BLOCKS: u64 = 256;
const MAP_ENTRY: u64 = 4;
/// Before the first arena.
const SECTOR_FRONT: u64 = PAGE;

/// Bytes of the device that a namespace of `size` bytes has, at least; 0 where nothing is left.
#[must_use]
pub fn usable_of(mode: Mode, map: PageMap, align: u64, size: u64) -> u64 {
    match mode {
        Mode::Raw => size,
        Mode::Sector => sectors_of(size),
        Mode::Fsdax | Mode::Devdax => {
            let notes = match map {
                PageMap::Memory => 0,
                PageMap::Device => size / PAGE * PAGE_NOTE_BYTES,
            };
            let front = notes.saturating_add(INFO_BYTES).checked_next_multiple_of(align.max(1));
            size.saturating_sub(front.unwrap_or(u64::MAX))
        }
    }
}

fn sectors_of(size: u64) -> u64 {
    let (mut left, mut usable) = (size.saturating_sub(SECTOR_FRONT), 0);
    while left >= ARENA_MIN {
        let arena = left.min(ARENA_MAX);
        let room = arena - ARENA_INFO - ARENA_LOG - PAGE;
        let blocks = room / (PAGE + MAP_ENTRY);
        usable += blocks.saturating_sub(ARENA_SPARE_BLOCKS) * PAGE;
        left -= arena;
    }
    usable
}

/// The smallest size that is a multiple of `step` and whose device has `usable` bytes or more.
#[must_use]
pub fn raw_size_for(
    mode: Mode,
    map: PageMap,
    align: u64,
    usable: u64,
    step: super::step::Step,
) -> Option<u64> {
    let mut size = step.round_up(usable)?;
    // The metadata of the added pages needs metadata itself; the missing part shrinks sixtyfold
    // each time.
    loop {
        let has = usable_of(mode, map, align, size);
        if has >= usable {
            return Some(size);
        }
        size = step.round_up(size.checked_add(usable - has)?)?;
    }
}

#[cfg(test)]
mod tests {
    use super::super::step::{HUGE_PAGE, Rule, Step};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Seen with Linux 6.12.
    ///
    /// Row: P19.
    #[test]
    fn the_kernels_overhead_matches_the_measured_one() {
        let with_map =
            [(16, 14), (32, 30), (64, 62), (128, 124), (256, 250), (512, 502), (896, 880)];
        for (size, usable) in with_map {
            let found = usable_of(Mode::Fsdax, PageMap::Device, HUGE_PAGE, size * MIB);
            assert_eq!(found, usable * MIB, "{size}");
        }
        let found = usable_of(Mode::Fsdax, PageMap::Memory, HUGE_PAGE, 128 * MIB);
        assert_eq!(found, 126 * MIB);
        let found = usable_of(Mode::Sector, PageMap::Memory, HUGE_PAGE, 128 * MIB);
        assert_eq!(found * 100 / MIB, 12684);
        assert_eq!(usable_of(Mode::Raw, PageMap::Memory, HUGE_PAGE, 5), 5);
    }

    /// Row: P19.
    #[test]
    fn the_usable_size_is_never_below_the_requested_one() {
        for (ways, rule) in [(1, Rule::Formula), (2, Rule::Formula), (6, Rule::Coarse)] {
            let step = Step::new(ways, Some(16 * MIB), HUGE_PAGE, rule).unwrap();
            for usable in [1, 14 * MIB, 15 * MIB, 127 * MIB, 1 << 30, 3 << 40] {
                for (mode, map) in [
                    (Mode::Fsdax, PageMap::Device),
                    (Mode::Devdax, PageMap::Memory),
                    (Mode::Sector, PageMap::Memory),
                ] {
                    let size = raw_size_for(mode, map, HUGE_PAGE, usable, step).unwrap();
                    assert!(size.is_multiple_of(step.bytes()));
                    assert!(usable_of(mode, map, HUGE_PAGE, size) >= usable);
                    let less = size - step.bytes();
                    assert!(usable_of(mode, map, HUGE_PAGE, less) < usable, "{mode} {usable}");
                }
            }
        }
        let step = Step::new(1, Some(16 * MIB), HUGE_PAGE, Rule::Formula).unwrap();
        let most = raw_size_for(Mode::Fsdax, PageMap::Device, HUGE_PAGE, u64::MAX - 1, step);
        assert_eq!(most, None);
    }
}
