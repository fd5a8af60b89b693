//! The memory that a ring gives to the kernel: its arena, the zeroes that are written from, and
//! areas for queues of requests.

use blockd_media::PAGE;
use io_uring::IoUring;
use memmap2::MmapMut;

use crate::backing::arena::{Arena, RUN_PAGES};
use crate::block::{Buffer, Place};

/// Bytes of zeroes that are written from.
pub(super) const ZEROES: u32 = 256 << 10;
/// Entries of the ring's table of buffers where queues are served: as many as the kernel allows.
const MAX_TABLE: u32 = 1 << 14;

/// Memory of a queue of requests: a piece for each.
#[derive(Debug)]
struct Area {
    /// `None` where the kernel puts the requests' own pages into the table.
    bytes: Option<MmapMut>,
    piece_bytes: u32,
    /// First entry in the table of buffers, and how many. Memory of our own has one entry, if any.
    table: Option<(u16, u16)>,
    /// Operations in flight on each piece.
    busy: Box<[u16]>,
}

/// Names an area of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AreaId(u16);

/// A longest run of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Run {
    Unused,
    /// In the table of buffers.
    Fixed,
    /// Not in the table: too little memory may be locked, and pages are pinned at each operation.
    Unfixed,
}

/// All memory of a ring.
#[derive(Debug)]
pub(super) struct Memory {
    arena: Arena,
    bytes: MmapMut,
    zeroes: MmapMut,
    /// The arena's longest runs, each of which becomes the entry of the table of buffers with its
    /// number when it is used first: until then it takes no memory.
    runs: Box<[Run]>,
    areas: Vec<Option<Area>>,
    /// Which entries of the table are taken; empty where there is none.
    table: Vec<bool>,
}

/// The address of an operation's memory, as an entry names it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    /// The first byte; for requests' own pages, its place among them.
    pub(super) start: *mut u8,
    /// The entry of the table of buffers that it lies in.
    pub(super) fixed: Option<u16>,
}

impl Memory {
    /// An arena of `arena_bytes` bytes. With `lends`, areas can be made.
    pub(super) fn new(ring: &IoUring, arena_bytes: usize, lends: bool) -> std::io::Result<Self> {
        let pages = u32::try_from(arena_bytes / PAGE).map_err(std::io::Error::other)?;
        let arena = Arena::new(pages);
        let bytes = MmapMut::map_anon((arena.total_pages() * PAGE).max(PAGE))?;
        let runs = arena.total_pages() / RUN_PAGES as usize;
        let fewest = u32::try_from(runs).map_err(std::io::Error::other)?.max(1);
        let entries = if lends { MAX_TABLE.max(fewest) } else { fewest };
        let has_table = ring.submitter().register_buffers_sparse(entries).is_ok();
        let mut table = vec![false; if has_table { entries as usize } else { 0 }];
        table.iter_mut().take(runs).for_each(|taken| *taken = true);
        let zeroes = MmapMut::map_anon(ZEROES as usize)?;
        let runs = vec![if has_table { Run::Unused } else { Run::Unfixed }; runs].into();
        Ok(Self { arena, bytes, zeroes, runs, areas: Vec::new(), table })
    }

    pub(super) fn allocate(&mut self, ring: &IoUring, bytes: u64) -> Option<Buffer> {
        let buffer = self.arena.allocate(bytes)?;
        if let Place::Arena { page, .. } = buffer.place()
            && self.runs[(page / RUN_PAGES) as usize] == Run::Unused
        {
            self.fix(ring, page / RUN_PAGES);
        }
        Some(buffer)
    }

    /// Puts a run of the arena into the table of buffers.
    #[cold]
    fn fix(&mut self, ring: &IoUring, run: u32) {
        let at = run as usize;
        let bytes = &mut self.bytes[at * RUN_PAGES as usize * PAGE..][..RUN_PAGES as usize * PAGE];
        let vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the memory lives until the ring is gone (order of the ring's fields, and its
        // drop), and is never moved.
        let known = unsafe { ring.submitter().register_buffers_update(run, &[vector], None) };
        self.runs[at] = if known.is_ok() { Run::Fixed } else { Run::Unfixed };
    }

    pub(super) fn free(&mut self, buffer: &Buffer) {
        if let Place::Arena { page, order } = buffer.place() {
            self.arena.free(page, order);
        }
    }

    pub(super) fn free_bytes(&self) -> u64 {
        u64::from(self.arena.free_pages()) * PAGE as u64
    }

    fn area(&self, area: u16) -> Option<&Area> {
        self.areas.get(usize::from(area)).and_then(Option::as_ref)
    }

    /// Whether this process can read and write a buffer's bytes.
    pub(super) fn is_reachable(&self, buffer: &Buffer) -> bool {
        match buffer.place() {
            Place::Arena { .. } => true,
            Place::Area { area, .. } => self.area(area).is_some_and(|area| area.bytes.is_some()),
        }
    }

    pub(super) fn is_busy(&self, place: Place) -> bool {
        match place {
            Place::Arena { page, .. } => self.arena.is_busy(page),
            Place::Area { area, piece } => {
                self.area(area).is_none_or(|area| area.busy[usize::from(piece)] > 0)
            }
        }
    }

    /// An operation has this memory from now on.
    pub(super) fn begin(&mut self, place: Place) {
        match place {
            Place::Arena { page, .. } => self.arena.begin(page),
            Place::Area { area, piece } => {
                if let Some(Some(area)) = self.areas.get_mut(usize::from(area)) {
                    area.busy[usize::from(piece)] += 1;
                }
            }
        }
    }

    /// An operation has it no longer.
    pub(super) fn end(&mut self, place: Place) {
        match place {
            Place::Arena { page, .. } => self.arena.end(page),
            Place::Area { area, piece } => {
                if let Some(Some(area)) = self.areas.get_mut(usize::from(area)) {
                    let busy = &mut area.busy[usize::from(piece)];
                    *busy = busy.saturating_sub(1);
                }
            }
        }
    }

    /// The bytes of a buffer, in use or not; empty if this process cannot reach them.
    pub(super) fn slice(&self, buffer: &Buffer) -> &[u8] {
        match buffer.place() {
            Place::Arena { page, .. } => &self.bytes[page as usize * PAGE..][..buffer.bytes()],
            Place::Area { area, piece } => {
                let bytes = self.area(area).and_then(|area| area.bytes.as_ref());
                let from = usize::from(piece) * buffer.bytes();
                bytes.map_or(&[], |bytes| &bytes[from..][..buffer.bytes()])
            }
        }
    }

    /// The same, to be written.
    pub(super) fn slice_mut(&mut self, buffer: &Buffer) -> &mut [u8] {
        match buffer.place() {
            Place::Arena { page, .. } => &mut self.bytes[page as usize * PAGE..][..buffer.bytes()],
            Place::Area { area, piece } => {
                let area = self.areas.get_mut(usize::from(area)).and_then(Option::as_mut);
                let from = usize::from(piece) * buffer.bytes();
                let bytes = area.and_then(|area| area.bytes.as_mut());
                bytes.map_or(&mut [], |bytes| &mut bytes[from..][..buffer.bytes()])
            }
        }
    }

    /// The address of memory for an operation, from byte `at`; that of the zeroes without a place.
    pub(super) fn address(&mut self, place: Option<Place>, at: u32) -> Address {
        let at = at as usize;
        match place {
            None => Address { start: self.zeroes[at..].as_mut_ptr(), fixed: None },
            Some(Place::Arena { page, .. }) => {
                let start = self.bytes[page as usize * PAGE..][at..].as_mut_ptr();
                let run = page / RUN_PAGES;
                let is_fixed = self.runs[run as usize] == Run::Fixed;
                Address { start, fixed: u16::try_from(run).ok().filter(|_| is_fixed) }
            }
            Some(Place::Area { area, piece }) => {
                let area = self.areas.get_mut(usize::from(area)).and_then(Option::as_mut);
                let Some(area) = area else {
                    return Address { start: std::ptr::null_mut(), fixed: None };
                };
                let first = area.table.map(|(first, _)| first);
                match &mut area.bytes {
                    Some(bytes) => {
                        let from = usize::from(piece) * area.piece_bytes as usize + at;
                        Address { start: bytes[from..].as_mut_ptr(), fixed: first }
                    }
                    None => {
                        let start = std::ptr::without_provenance_mut(at);
                        Address { start, fixed: first.map(|first| first + piece) }
                    }
                }
            }
        }
    }

    /// Makes an area of `pieces` pieces. Without memory of its own it is a range of the table,
    /// which the kernel fills.
    pub(super) fn add_area(
        &mut self,
        ring: &IoUring,
        pieces: u16,
        piece_bytes: u32,
        own_memory: bool,
    ) -> std::io::Result<AreaId> {
        let limit = || std::io::Error::other("a ring's table of buffers is full");
        let busy = vec![0; usize::from(pieces)].into();
        let (bytes, table) = if own_memory {
            let len = usize::from(pieces) * piece_bytes as usize;
            let mut bytes = MmapMut::map_anon(len)?;
            // All of it is there from the start: a request never waits for memory.
            bytes.chunks_mut(PAGE).for_each(|page| page[0] = 0);
            let table = self.take_entries(1).filter(|&(first, count)| {
                let iov_base = bytes.as_mut_ptr().cast();
                let vector = libc::iovec { iov_base, iov_len: len };
                let submitter = ring.submitter();
                // SAFETY: the memory lives until the entry is emptied or the ring is gone, and is
                // never moved.
                let update =
                    unsafe { submitter.register_buffers_update(first.into(), &[vector], None) };
                // Refused where too little memory may be locked.
                if update.is_err() {
                    self.give_entries(first, count);
                }
                update.is_ok()
            });
            (Some(bytes), table)
        } else {
            (None, Some(self.take_entries(pieces).ok_or_else(limit)?))
        };
        let area = Area { bytes, piece_bytes, table, busy };
        let free = self.areas.iter().position(Option::is_none);
        let at = free.unwrap_or(self.areas.len());
        if at == self.areas.len() {
            self.areas.push(None);
        }
        self.areas[at] = Some(area);
        u16::try_from(at).map(AreaId).map_err(std::io::Error::other)
    }

    /// One piece of an area. Its user sees to it that it is lent once.
    pub(super) fn piece(&self, area: AreaId, piece: u16) -> Option<Buffer> {
        let bytes = self.area(area.0).filter(|one| usize::from(piece) < one.busy.len())?;
        Some(Buffer::new(Place::Area { area: area.0, piece }, bytes.piece_bytes))
    }

    /// The entry of the table that a piece of an area without memory is in.
    pub(super) fn entry(&self, place: Place) -> Option<u16> {
        let Place::Area { area, piece } = place else { return None };
        let area = self.area(area).filter(|area| area.bytes.is_none())?;
        area.table.map(|(first, _)| first + piece)
    }

    /// Gives an area back that no operation uses. One that is in use stays.
    pub(super) fn remove_area(&mut self, ring: &IoUring, id: AreaId) {
        let Some(slot) = self.areas.get_mut(usize::from(id.0)) else { return };
        let Some(area) = slot.take_if(|area| area.busy.iter().all(|&busy| busy == 0)) else {
            return;
        };
        let Some((first, count)) = area.table else { return };
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty entry has no memory.
        let emptied =
            || unsafe { ring.submitter().register_buffers_update(first.into(), &[empty], None) };
        if area.bytes.is_some() && emptied().is_err() {
            // The kernel may still know it.
            std::mem::forget(area);
            return;
        }
        self.give_entries(first, count);
    }

    fn take_entries(&mut self, count: u16) -> Option<(u16, u16)> {
        let mut run = 0;
        let wanted = usize::from(count).max(1);
        for at in 0..self.table.len() {
            run = if self.table[at] { 0 } else { run + 1 };
            if run == wanted {
                let first = at + 1 - wanted;
                self.table[first..=at].fill(true);
                return u16::try_from(first).ok().map(|first| (first, count));
            }
        }
        None
    }

    fn give_entries(&mut self, first: u16, count: u16) {
        self.table[usize::from(first)..][..usize::from(count)].fill(false);
    }

    /// Leaves everything where it is for ever: the kernel may still use it.
    pub(super) fn leak(&mut self) {
        let (Ok(bytes), Ok(zeroes)) = (MmapMut::map_anon(PAGE), MmapMut::map_anon(PAGE)) else {
            return;
        };
        std::mem::forget(std::mem::replace(&mut self.bytes, bytes));
        std::mem::forget(std::mem::replace(&mut self.zeroes, zeroes));
        std::mem::forget(std::mem::take(&mut self.areas));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_that_was_used_is_given_to_the_kernel() {
        let ring = IoUring::new(8).unwrap();
        let mut memory = Memory::new(&ring, 4 << 20, false).unwrap();
        let given = |memory: &Memory| memory.runs.iter().filter(|run| **run != Run::Unused).count();
        assert_eq!((memory.runs.len(), given(&memory)), (4, 0));
        // What is free again is used first.
        for _ in 0..100 {
            let small = memory.allocate(&ring, 4096).unwrap();
            memory.free(&small);
        }
        assert_eq!(given(&memory), 1);
        let long: Vec<_> = (0..4).map(|_| memory.allocate(&ring, 1 << 20).unwrap()).collect();
        assert_eq!(given(&memory), 4);
        assert!(memory.allocate(&ring, 1).is_none());
        let places: Vec<_> =
            long.iter().map(|buffer| memory.address(Some(buffer.place()), 4096).fixed).collect();
        assert!(
            places.iter().all(Option::is_none) || {
                let mut fixed: Vec<_> = places.into_iter().flatten().collect();
                fixed.sort_unstable();
                fixed == [0, 1, 2, 3]
            }
        );
    }
}
