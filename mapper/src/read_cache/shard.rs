//! A part of the cache: the pages of some extents, and their memory.

use std::collections::HashMap;

use super::{CacheStatus, Counts, Fill};
use crate::geometry::{PAGE_BYTES, PAGE_SIZE};
use crate::mutation::{Mutation, Situation, active, met};
use crate::sync::zeroed_slice;
use crate::units::PhysicalExtent;

/// Pages whose memory is taken at a time: 64 KiB.
const CHUNK_PAGES: usize = 16;
/// Used pages that the hand passes by at the most before it takes one: the mutex is held.
const MOST_PASSED: usize = 64;
/// Empty tables that are kept, so that a warm cache allocates none.
const MOST_SPARES: usize = 64;
/// No frame.
const NONE: u32 = u32::MAX;

/// Memory of a page.
#[derive(Clone, Copy, Debug)]
struct Frame {
    extent: PhysicalExtent,
    page: usize,
    /// The read that brings it in; 0 once it is here, or where there is none.
    token: u64,
    /// Used since the hand came by.
    used: bool,
    /// A read waits for it.
    awaited: bool,
}

/// The frames of an extent's pages, by page.
#[derive(Debug)]
struct Table {
    frames: Box<[u32]>,
    count: u32,
}

/// The frame of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Nothing,
    /// A read brings it in.
    Awaited(usize),
    Page(usize),
}

#[derive(Debug)]
pub(super) struct Shard {
    table_len: usize,
    /// Pages at the most.
    limit: usize,
    tables: HashMap<PhysicalExtent, Table>,
    spares: Vec<Table>,
    frames: Vec<Frame>,
    chunks: Vec<Box<[u8]>>,
    free: Vec<u32>,
    hand: usize,
    last_token: u64,
    hits: u64,
    misses: u64,
    evictions: u64,
    dropped: u64,
}

impl Shard {
    pub(super) fn new(table_len: usize) -> Self {
        Self {
            table_len,
            limit: 0,
            tables: HashMap::new(),
            spares: Vec::new(),
            frames: Vec::new(),
            chunks: Vec::new(),
            free: Vec::new(),
            hand: 0,
            last_token: 0,
            hits: 0,
            misses: 0,
            evictions: 0,
            dropped: 0,
        }
    }

    /// Forgets all pages, with another limit from then on. Returns what it was, whose memory may
    /// take long to give back: not while the shard is locked.
    pub(super) fn begin_anew(&mut self, limit: usize) -> Self {
        let anew = Self {
            limit,
            last_token: self.last_token,
            hits: self.hits,
            misses: self.misses,
            evictions: self.evictions,
            dropped: self.dropped,
            ..Self::new(self.table_len)
        };
        std::mem::replace(self, anew)
    }

    /// Gives its memory back. `true`: some read waits for one of its pages.
    pub(super) fn end(self, counts: &Counts) -> bool {
        for (extent, table) in self.tables {
            counts.sub(extent, table.count);
        }
        self.frames.iter().any(|frame| frame.awaited)
    }

    pub(super) fn count(&self, status: &mut CacheStatus) {
        status.limit += self.limit as u64 * PAGE_BYTES;
        status.bytes += (self.frames.len() - self.free.len()) as u64 * PAGE_BYTES;
        status.hits += self.hits;
        status.misses += self.misses;
        status.evictions += self.evictions;
        status.dropped += self.dropped;
    }

    /// A name for the pages that a read brings in.
    pub(super) const fn next_token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    pub(super) fn find(&self, extent: PhysicalExtent, page: usize) -> Found {
        let frame = self.tables.get(&extent).and_then(|table| table.frames.get(page));
        match frame.map(|&frame| frame as usize) {
            Some(frame) if self.frames.get(frame).is_some_and(|one| one.token == 0) => {
                Found::Page(frame)
            }
            Some(frame) if frame < self.frames.len() => Found::Awaited(frame),
            _ => Found::Nothing,
        }
    }

    /// Serves a part of a page, from this byte on.
    pub(super) fn copy(&mut self, frame: usize, from: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes(frame)[from..from + out.len()]);
        self.frames[frame].used = true;
        self.hits += 1;
    }

    pub(super) fn await_page(&mut self, frame: usize) {
        self.frames[frame].awaited = true;
    }

    /// A part of a page of a shared extent is read from the media. Gives whether that is to bring
    /// the page in, which a new one is if a frame is to be had.
    pub(super) fn miss(
        &mut self,
        (extent, page): (PhysicalExtent, usize),
        token: u64,
        is_new: bool,
        counts: &Counts,
    ) -> bool {
        self.misses += 1;
        if !is_new {
            return false;
        }
        let Some(at) = self.take_frame(counts) else { return false };
        let (spares, table_len) = (&mut self.spares, self.table_len);
        let table = self.tables.entry(extent).or_insert_with(|| {
            let empty = || Table { frames: vec![NONE; table_len].into(), count: 0 };
            spares.pop().unwrap_or_else(empty)
        });
        let Some(entry) = table.frames.get_mut(page) else {
            self.free.push(at);
            return false;
        };
        *entry = at;
        table.count += 1;
        counts.add(extent, 1);
        self.frames[at as usize] = Frame { extent, page, token, used: false, awaited: false };
        true
    }

    pub(super) fn keep(&mut self, fill: &Fill, bytes: &[u8]) -> bool {
        let mut is_awaited = false;
        let pages = bytes.chunks_exact(PAGE_SIZE).take(fill.count);
        for (page, bytes) in (fill.first..).zip(pages) {
            // It is not there any more if it was dropped meanwhile (C5).
            let Some(frame) = self.of_fill(fill, page) else { continue };
            self.bytes_mut(frame).copy_from_slice(bytes);
            let frame = &mut self.frames[frame];
            frame.token = 0;
            is_awaited |= std::mem::take(&mut frame.awaited);
        }
        is_awaited
    }

    pub(super) fn give_up(&mut self, fill: &Fill, counts: &Counts) -> bool {
        let mut is_awaited = false;
        for page in fill.first..fill.first + fill.count {
            if let Some(frame) = self.of_fill(fill, page) {
                is_awaited |= self.frames[frame].awaited;
                self.free_frame(frame, counts);
            }
        }
        is_awaited
    }

    /// The frame that a read is to bring a page into.
    fn of_fill(&self, fill: &Fill, page: usize) -> Option<usize> {
        match self.find(fill.extent, page) {
            Found::Awaited(frame) if self.frames[frame].token == fill.token => Some(frame),
            _ => None,
        }
    }

    pub(super) fn drop_pages(&mut self, extent: PhysicalExtent, counts: &Counts) -> bool {
        let Some(table) = self.tables.get(&extent) else { return false };
        let frames: Vec<usize> =
            table.frames.iter().filter(|&&at| at != NONE).map(|&at| at as usize).collect();
        let mut is_awaited = false;
        for frame in frames {
            let Frame { token, awaited, .. } = self.frames[frame];
            if token != 0 && active(Mutation::CacheFilledLate) {
                continue;
            }
            is_awaited |= awaited;
            self.dropped += 1;
            met(if token == 0 { Situation::PageDropped } else { Situation::FillDropped });
            self.free_frame(frame, counts);
        }
        is_awaited
    }

    /// A frame for a new page: a free one, a new one, or the next that was not used lately.
    fn take_frame(&mut self, counts: &Counts) -> Option<u32> {
        if self.limit == 0 {
            return None;
        }
        if let Some(frame) = self.free.pop() {
            return Some(frame);
        }
        if self.frames.len() < self.limit && self.add_frames() {
            return self.free.pop();
        }
        let mut passed = 0;
        for _ in 0..self.frames.len().min(MOST_PASSED * 2) {
            self.hand = (self.hand + 1) % self.frames.len();
            let frame = &mut self.frames[self.hand];
            // A page that is being read stays: its read names it.
            if frame.token != 0 {
                continue;
            }
            if std::mem::take(&mut frame.used) && passed < MOST_PASSED {
                passed += 1;
                continue;
            }
            self.evictions += 1;
            met(Situation::PageEvicted);
            self.free_frame(self.hand, counts);
            return self.free.pop();
        }
        None
    }

    /// Takes memory for some more pages. `false`: there is none.
    fn add_frames(&mut self) -> bool {
        let Some(chunk) = zeroed_slice(CHUNK_PAGES * PAGE_SIZE) else { return false };
        self.chunks.push(chunk);
        let first = self.frames.len();
        let count = CHUNK_PAGES.min(self.limit - first);
        let (extent, page) = (PhysicalExtent(0), 0);
        let frame = Frame { extent, page, token: 0, used: false, awaited: false };
        self.frames.resize(first + count, frame);
        let new = (first..first + count).rev().filter_map(|at| u32::try_from(at).ok());
        self.free.extend(new);
        true
    }

    /// Takes a page out of its table.
    fn free_frame(&mut self, at: usize, counts: &Counts) {
        let Frame { extent, page, .. } = self.frames[at];
        let Some(table) = self.tables.get_mut(&extent) else { return };
        if let Some(entry) = table.frames.get_mut(page) {
            *entry = NONE;
        }
        table.count -= 1;
        if table.count == 0
            && let Some(table) = self.tables.remove(&extent)
            && self.spares.len() < MOST_SPARES
        {
            self.spares.push(table);
        }
        counts.sub(extent, 1);
        self.frames[at].token = 0;
        self.free.extend(u32::try_from(at));
    }

    fn bytes(&self, frame: usize) -> &[u8] {
        &self.chunks[frame / CHUNK_PAGES][frame % CHUNK_PAGES * PAGE_SIZE..][..PAGE_SIZE]
    }

    fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        &mut self.chunks[frame / CHUNK_PAGES][frame % CHUNK_PAGES * PAGE_SIZE..][..PAGE_SIZE]
    }
}
