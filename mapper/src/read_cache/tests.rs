use super::*;
use crate::geometry::{DEFAULT_EXTENT_SIZE, PAGE_SIZE};

const PAGE: u64 = PAGE_BYTES;

/// A reader of an extent that is shared, or is not; notes what it reads from the media.
struct Media {
    is_shared: bool,
    room: usize,
    read: Vec<(u64, u64)>,
}

impl Reader for Media {
    fn is_shared(&self) -> bool {
        self.is_shared
    }

    fn plan(&mut self, from: u64, to: u64) -> bool {
        if self.room == 0 {
            return false;
        }
        self.room -= 1;
        self.read.push((from, to));
        true
    }
}

fn shared() -> Media {
    Media { is_shared: true, room: usize::MAX, read: Vec::new() }
}

fn exclusive() -> Media {
    Media { is_shared: false, ..shared() }
}

fn cache(pages: u64) -> ReadCache {
    ReadCache::new(Geometry::new(DEFAULT_EXTENT_SIZE).unwrap(), pages * PAGE)
}

fn run(extent: u64, from: u64, to: u64) -> Run {
    Run { extent: PhysicalExtent(extent), from, to, buffer_offset: 0, waits: true }
}

/// Reads, and takes in what is to come in, as bytes of this value.
fn read(cache: &ReadCache, run: Run, media: &mut Media, value: u8) -> (Reached, Vec<u8>) {
    let (mut out, mut fills) = (vec![0; index(run.to - run.from)], Vec::new());
    let reached = cache.read(run, &mut out, media, &mut fills);
    let bytes = vec![value; out.len()];
    for fill in fills {
        let _ = cache.keep(&fill, &bytes[fill.buffer_offset..]);
    }
    (reached, out)
}

#[test]
fn a_page_is_read_from_the_media_once() {
    let cache = cache(64);
    let mut media = shared();
    assert_eq!(read(&cache, run(1, 0, 2 * PAGE), &mut media, 7), (Reached::End, vec![0; 8192]));
    assert_eq!(media.read, [(0, PAGE), (PAGE, 2 * PAGE)]);
    // A part of what is there, and more than that.
    let mut again = shared();
    let (_, out) = read(&cache, run(1, 512, 3 * PAGE), &mut again, 9);
    assert_eq!(again.read, [(2 * PAGE, 3 * PAGE)]);
    assert!(out[..8192 - 512].iter().all(|byte| *byte == 7));
    let status = cache.status();
    assert_eq!((status.hits, status.misses, status.bytes), (2, 3, 3 * PAGE));
}

#[test]
fn an_extent_of_one_volume_and_a_part_of_a_page_do_not_come_in() {
    let cache = cache(64);
    read(&cache, run(1, 0, PAGE), &mut exclusive(), 7);
    read(&cache, run(1, 512, PAGE), &mut shared(), 7);
    assert_eq!(cache.status().bytes, 0);
    assert_eq!(cache.pages.of(PhysicalExtent(1)), 0);
    // What is there serves every reader.
    read(&cache, run(1, 0, PAGE), &mut shared(), 7);
    let mut media = exclusive();
    let (_, out) = read(&cache, run(1, 0, PAGE), &mut media, 0);
    assert_eq!((media.read.len(), out), (0, vec![7; PAGE_SIZE]));
}

#[test]
fn a_second_reader_waits_for_the_first_unless_it_is_in_a_hurry() {
    let cache = cache(64);
    let (mut out, mut fills) = (vec![0; PAGE_SIZE], Vec::new());
    cache.read(run(1, 0, PAGE), &mut out, &mut shared(), &mut fills);
    let mut second = shared();
    assert_eq!(read(&cache, run(1, 0, PAGE), &mut second, 0).0, Reached::Awaits(0));
    assert!(second.read.is_empty());
    let hurried = Run { waits: false, ..run(1, 0, PAGE) };
    assert_eq!(read(&cache, hurried, &mut second, 0).0, Reached::End);
    assert_eq!(second.read, [(0, PAGE)]);
    assert!(cache.keep(&fills[0], &[7; PAGE_SIZE]), "a reader waits");
    assert_eq!(read(&cache, run(1, 0, PAGE), &mut shared(), 0).1, [7; PAGE_SIZE]);
}

#[test]
fn a_read_that_failed_leaves_nothing() {
    let cache = cache(64);
    let (mut out, mut fills) = (vec![0; 2 * PAGE_SIZE], Vec::new());
    cache.read(run(1, 0, 2 * PAGE), &mut out, &mut shared(), &mut fills);
    assert_eq!(fills.len(), 1);
    assert!(!cache.give_up(&fills[0]));
    assert_eq!((cache.status().bytes, cache.pages.of(PhysicalExtent(1))), (0, 0));
    let mut media = shared();
    read(&cache, run(1, 0, PAGE), &mut media, 0);
    assert_eq!(media.read.len(), 1);
}

#[test]
fn a_dropped_extent_is_read_again_and_its_neighbours_stay() {
    let cache = cache(64);
    for extent in 1..=3 {
        read(&cache, run(extent, 0, 2 * PAGE), &mut shared(), 7);
    }
    assert!(!cache.drop_pages(PhysicalExtent(2)));
    let status = cache.status();
    assert_eq!((status.dropped, status.bytes), (2, 4 * PAGE));
    for (extent, reads) in [(1, 0), (2, 2), (3, 0)] {
        let mut media = shared();
        read(&cache, run(extent, 0, 2 * PAGE), &mut media, 8);
        assert_eq!(media.read.len(), reads, "{extent}");
    }
}

#[test]
fn a_read_whose_extent_was_dropped_brings_nothing_in() {
    let cache = cache(64);
    let (mut out, mut fills) = (vec![0; PAGE_SIZE], Vec::new());
    cache.read(run(1, 0, PAGE), &mut out, &mut shared(), &mut fills);
    read(&cache, run(1, 0, PAGE), &mut shared(), 0);
    assert!(cache.drop_pages(PhysicalExtent(1)), "a reader waits");
    // Another read of the page begins meanwhile.
    let (mut out, mut later) = (vec![0; PAGE_SIZE], Vec::new());
    cache.read(run(1, 0, PAGE), &mut out, &mut shared(), &mut later);
    let _ = cache.keep(&fills[0], &[1; PAGE_SIZE]);
    let _ = cache.keep(&later[0], &[2; PAGE_SIZE]);
    assert_eq!(read(&cache, run(1, 0, PAGE), &mut shared(), 0).1, [2; PAGE_SIZE]);
}

#[test]
fn nothing_of_a_held_extent_comes_in() {
    let cache = cache(64);
    read(&cache, run(1, 0, PAGE), &mut shared(), 7);
    assert!(!cache.hold(PhysicalExtent(1)));
    let mut media = shared();
    read(&cache, run(1, 0, PAGE), &mut media, 8);
    read(&cache, run(1, 0, PAGE), &mut media, 8);
    assert_eq!((media.read.len(), cache.status().bytes), (2, 0));
    cache.end_hold(PhysicalExtent(1));
    read(&cache, run(1, 0, PAGE), &mut media, 8);
    assert_eq!(read(&cache, run(1, 0, PAGE), &mut media, 0).1, [8; PAGE_SIZE]);
}

#[test]
fn a_full_cache_replaces_what_was_not_used() {
    // Two pages for each shard.
    let cache = cache(32);
    let (hot, cold) = (run(0, 0, PAGE), run(16, 0, PAGE));
    read(&cache, hot, &mut shared(), 1);
    read(&cache, hot, &mut shared(), 0);
    read(&cache, cold, &mut shared(), 2);
    for extent in 2..50 {
        read(&cache, run(16 * extent, 0, PAGE), &mut shared(), 3);
        assert_eq!(read(&cache, hot, &mut shared(), 0).1, [1; PAGE_SIZE]);
    }
    let status = cache.status();
    assert_eq!((status.bytes, status.evictions), (2 * PAGE, 48));
    // Counters follow: nothing is left of extents that went.
    assert_eq!(cache.pages.of(PhysicalExtent(16)), 0);
}

#[test]
fn pages_that_are_being_read_are_not_replaced() {
    let cache = cache(16);
    let (mut out, mut fills) = (vec![0; PAGE_SIZE], Vec::new());
    cache.read(run(0, 0, PAGE), &mut out, &mut shared(), &mut fills);
    read(&cache, run(16, 0, PAGE), &mut shared(), 2);
    let _ = cache.keep(&fills[0], &[1; PAGE_SIZE]);
    assert_eq!(read(&cache, run(0, 0, PAGE), &mut shared(), 0).1, [1; PAGE_SIZE]);
    assert_eq!(cache.status().evictions, 0);
}

#[test]
fn a_plan_without_room_ends_the_read_there() {
    let cache = cache(64);
    let mut media = Media { room: 1, ..shared() };
    let reached = read(&cache, run(1, 0, 3 * PAGE), &mut media, 7).0;
    assert_eq!(reached, Reached::Full(PAGE));
    assert_eq!(cache.status().bytes, PAGE);
    assert_eq!(cache.pages.of(PhysicalExtent(1)), 1);
}

#[test]
fn another_limit_empties_it_and_none_turns_it_off() {
    let cache = cache(0);
    assert!(!cache.is_on());
    read(&cache, run(1, 0, PAGE), &mut shared(), 7);
    assert_eq!(cache.status(), CacheStatus { misses: 1, ..CacheStatus::default() });
    assert!(!cache.set_limit(64 * PAGE));
    let (mut out, mut fills) = (vec![0; PAGE_SIZE], Vec::new());
    cache.read(run(1, 0, PAGE), &mut out, &mut shared(), &mut fills);
    read(&cache, run(1, 0, PAGE), &mut shared(), 0);
    assert!(cache.is_on() && cache.set_limit(0), "a reader waits");
    let _ = cache.keep(&fills[0], &[1; PAGE_SIZE]);
    assert!(!cache.is_on());
    assert_eq!((cache.status().bytes, cache.pages.of(PhysicalExtent(1))), (0, 0));
}

/// A cache of little more than a page for each shard and a plain map beside it, under everything
/// that may happen to them.
#[test]
fn it_never_has_other_bytes_than_the_media() {
    let mut random = fastrand::Rng::with_seed(7);
    let cache = cache(40);
    let mut media: Vec<[u8; 4]> = vec![[0; 4]; 40];
    let mut pending: Vec<(Vec<Fill>, Vec<u8>)> = Vec::new();
    for step in 0..20_000 {
        let extent = random.usize(..media.len());
        let physical = PhysicalExtent(extent as u64);
        match random.u8(..10) {
            0..=5 => {
                let (mut out, mut fills) = (vec![0; 4 * PAGE_SIZE], Vec::new());
                let hurried = Run { waits: false, ..run(extent as u64, 0, 4 * PAGE) };
                let mut reader = shared();
                assert_eq!(cache.read(hurried, &mut out, &mut reader, &mut fills), Reached::End);
                for (page, bytes) in out.chunks_mut(PAGE_SIZE).enumerate() {
                    let is_read = reader.read.iter().any(|(from, _)| *from == page as u64 * PAGE);
                    assert!(is_read || bytes[0] == media[extent][page], "step {step}");
                    bytes.fill(media[extent][page]);
                }
                pending.push((fills, out));
            }
            6..=7 if !pending.is_empty() => {
                let (fills, bytes) = pending.swap_remove(random.usize(..pending.len()));
                for fill in fills {
                    let _ = match random.bool() {
                        true => cache.keep(&fill, &bytes[fill.buffer_offset..]),
                        false => cache.give_up(&fill),
                    };
                }
            }
            _ => {
                let _ = cache.drop_pages(physical);
                media[extent][random.usize(..4)] = random.u8(..);
            }
        }
    }
    for (fills, _) in pending {
        for fill in fills {
            let _ = cache.give_up(&fill);
        }
    }
    let counted: u64 = (0..40).map(|one| u64::from(cache.pages.of(PhysicalExtent(one)))).sum();
    assert_eq!(counted * PAGE, cache.status().bytes);
    assert!(cache.status().evictions > 0 && cache.status().dropped > 0);
}
