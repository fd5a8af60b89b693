//! Hands out a worker's IO memory in powers of two of pages. What was used once stays: a request
//! waits for the kernel to find memory only when more is in use than ever before.

use crate::block::{Buffer, Place};

/// Largest order: 256 pages, 1 MiB. Longer requests are cut into pieces.
pub(super) const MAX_ORDER: u8 = 8;

/// Pages of a run of the largest order.
pub(super) const RUN_PAGES: u32 = 1 << MAX_ORDER;
/// Bytes of a page.
const PAGE_BYTES: u32 = 4096;
const NONE: u32 = u32::MAX;
/// Single pages that are kept apart from the runs. Most requests need one page, and to split a run
/// and join it again takes several times as long as to take a page from a list.
const MAX_SINGLES: usize = 32;
/// State of a page that is not the first one of a free run.
const TAKEN: u8 = u8::MAX;

/// A buddy allocator over page numbers.
#[derive(Debug)]
pub(super) struct Arena {
    /// First free run of each order.
    heads: [u32; MAX_ORDER as usize + 1],
    next: Box<[u32]>,
    previous: Box<[u32]>,
    /// Order of the free run that begins at this page.
    free_order: Box<[u8]>,
    /// Free pages that are not joined with their buddies until a longer run is needed.
    singles: Vec<u32>,
    /// Operations in flight on the buffer that begins at this page.
    busy: Box<[u16]>,
    /// The order of a buffer to be freed when it is no longer busy.
    doomed: Box<[u8]>,
    free_pages: u32,
}

impl Arena {
    /// An arena of `pages` pages, rounded down to whole runs of the largest order.
    pub(super) fn new(pages: u32) -> Self {
        let pages = pages / RUN_PAGES * RUN_PAGES;
        let count = pages as usize;
        let mut arena = Self {
            heads: [NONE; MAX_ORDER as usize + 1],
            next: vec![NONE; count].into(),
            previous: vec![NONE; count].into(),
            free_order: vec![TAKEN; count].into(),
            singles: Vec::with_capacity(MAX_SINGLES),
            busy: vec![0; count].into(),
            doomed: vec![TAKEN; count].into(),
            free_pages: pages,
        };
        for page in (0..pages).step_by(RUN_PAGES as usize).rev() {
            arena.push(page, MAX_ORDER);
        }
        arena
    }

    pub(super) const fn free_pages(&self) -> u32 {
        self.free_pages
    }

    pub(super) const fn total_pages(&self) -> usize {
        self.next.len()
    }

    /// Allocates a buffer of at least this many bytes; `None` if none is free or the size exceeds a
    /// block.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<Buffer> {
        let pages = bytes.max(1).div_ceil(blockd_media::PAGE as u64).checked_next_power_of_two()?;
        let order = u8::try_from(pages.trailing_zeros()).ok()?;
        let single = if order == 0 { self.singles.pop() } else { None };
        let page = match single {
            Some(page) => page,
            None => self.split(order)?,
        };
        self.free_pages -= 1 << order;
        let bytes = PAGE_BYTES << order;
        Some(Buffer::new(Place::Arena { page, order }, bytes))
    }

    /// Takes a run of an order out of the free ones.
    fn split(&mut self, order: u8) -> Option<u32> {
        let mut from = self.shortest(order).or_else(|| {
            while let Some(page) = self.singles.pop() {
                self.join(page, 0);
            }
            self.shortest(order)
        })?;
        let page = self.heads[usize::from(from)];
        self.unlink(page, from);
        while from > order {
            from -= 1;
            self.push(page + (1 << from), from);
        }
        Some(page)
    }

    /// The order of the shortest free run that is long enough.
    fn shortest(&self, order: u8) -> Option<u8> {
        (order..=MAX_ORDER).find(|&order| self.heads[usize::from(order)] != NONE)
    }

    /// Takes a buffer back, now or when its last operation has ended.
    pub(super) fn free(&mut self, page: u32, order: u8) {
        let at = page as usize;
        if self.busy[at] > 0 {
            self.doomed[at] = order;
            return;
        }
        self.release(page, order);
    }

    pub(super) fn is_busy(&self, page: u32) -> bool {
        self.busy[page as usize] > 0
    }

    pub(super) fn begin(&mut self, page: u32) {
        self.busy[page as usize] += 1;
    }

    pub(super) fn end(&mut self, page: u32) {
        let at = page as usize;
        self.busy[at] = self.busy[at].saturating_sub(1);
        if self.busy[at] == 0 && self.doomed[at] != TAKEN {
            let order = std::mem::replace(&mut self.doomed[at], TAKEN);
            self.release(page, order);
        }
    }

    fn release(&mut self, page: u32, order: u8) {
        self.free_pages += 1 << order;
        if order == 0 && self.singles.len() < MAX_SINGLES {
            self.singles.push(page);
        } else {
            self.join(page, order);
        }
    }

    /// Adds a run to the free ones, joined with its free buddies.
    fn join(&mut self, mut page: u32, mut order: u8) {
        while order < MAX_ORDER {
            let buddy = page ^ (1 << order);
            if self.free_order.get(buddy as usize) != Some(&order) {
                break;
            }
            self.unlink(buddy, order);
            page = page.min(buddy);
            order += 1;
        }
        self.push(page, order);
    }

    fn push(&mut self, page: u32, order: u8) {
        let head = self.heads[usize::from(order)];
        let at = page as usize;
        self.next[at] = head;
        self.previous[at] = NONE;
        self.free_order[at] = order;
        if head != NONE {
            self.previous[head as usize] = page;
        }
        self.heads[usize::from(order)] = page;
    }

    fn unlink(&mut self, page: u32, order: u8) {
        let at = page as usize;
        let (next, previous) = (self.next[at], self.previous[at]);
        if previous == NONE {
            self.heads[usize::from(order)] = next;
        } else {
            self.next[previous as usize] = next;
        }
        if next != NONE {
            self.previous[next as usize] = previous;
        }
        self.free_order[at] = TAKEN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(buffer: &Buffer) -> (u32, u8) {
        match buffer.place() {
            Place::Arena { page, order } => (page, order),
            Place::Area { .. } => panic!("not of an arena"),
        }
    }

    fn free(arena: &mut Arena, buffer: &Buffer) {
        let (page, order) = pages(buffer);
        arena.free(page, order);
    }

    #[test]
    fn freed_memory_can_be_allocated_again_whole() {
        let mut arena = Arena::new(512);
        let mut random = fastrand::Rng::with_seed(1);
        let mut taken: Vec<Buffer> = Vec::new();
        let mut owner = vec![false; 512];
        for _ in 0..100_000 {
            if random.bool() {
                if let Some(buffer) = arena.allocate(random.u64(1..=1 << 20)) {
                    let (page, order) = pages(&buffer);
                    for page in page..page + (1 << order) {
                        assert!(!std::mem::replace(&mut owner[page as usize], true));
                    }
                    taken.push(buffer);
                }
            } else if !taken.is_empty() {
                let buffer = taken.swap_remove(random.usize(..taken.len()));
                let (page, order) = pages(&buffer);
                (page..page + (1 << order)).for_each(|page| owner[page as usize] = false);
                arena.free(page, order);
            }
        }
        taken.iter().for_each(|buffer| free(&mut arena, buffer));
        assert_eq!(arena.free_pages(), 512);
        let whole: Vec<_> = (0..2).map(|_| arena.allocate(1 << 20)).collect();
        assert!(whole.iter().all(Option::is_some));
        assert!(arena.allocate(1).is_none());
    }

    #[test]
    fn single_pages_are_joined_when_a_longer_run_is_needed() {
        let mut arena = Arena::new(256);
        let all: Vec<Buffer> = (0..256).map(|_| arena.allocate(4096).unwrap()).collect();
        assert!(arena.allocate(4096).is_none());
        all.iter().for_each(|buffer| free(&mut arena, buffer));
        assert_eq!((arena.free_pages(), arena.singles.len()), (256, MAX_SINGLES));
        let whole = arena.allocate(1 << 20).unwrap();
        assert!(arena.singles.is_empty() && arena.allocate(1).is_none());
        free(&mut arena, &whole);
        assert_eq!(arena.free_pages(), 256);
    }

    #[test]
    fn a_page_that_was_freed_last_is_taken_first() {
        let mut arena = Arena::new(256);
        let first = arena.allocate(4096).unwrap();
        free(&mut arena, &first);
        let heads = arena.heads;
        let second = arena.allocate(4096).unwrap();
        assert_eq!((pages(&second), arena.heads), (pages(&first), heads));
    }

    #[test]
    fn a_busy_buffer_is_freed_when_its_last_operation_has_ended() {
        let mut arena = Arena::new(256);
        let buffer = arena.allocate(4096).unwrap();
        let (page, _) = pages(&buffer);
        arena.begin(page);
        arena.begin(page);
        assert!(arena.is_busy(page));
        free(&mut arena, &buffer);
        arena.end(page);
        assert_eq!(arena.free_pages(), 255);
        arena.end(page);
        assert_eq!(arena.free_pages(), 256);
    }

    #[test]
    fn a_request_that_is_too_long_is_refused() {
        let mut arena = Arena::new(256);
        assert!(arena.allocate((1 << 20) + 1).is_none());
        assert!(arena.allocate(u64::MAX).is_none());
    }
}
