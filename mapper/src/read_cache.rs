//! A cache of blocks that several volumes share, by their place on the media.
//!
//! Clones of one image read the same extents. With this cache the first read of a page brings it
//! in, reads of the page that come meanwhile wait for that one, and later ones are served from
//! memory. Pages are of physical extents, so every volume that maps an extent finds them.
//!
//! A page of the cache has the bytes that the media has:
//!
//! - **C1** A write into an extent that a volume has drops its pages before it is sent.
//! - **C2** The end of an extent's last reference drops them, before the extent is free for reuse
//!   or passed down. So a write into an extent that was free finds none.
//! - **C3** A copy of the engine's, of a fold or a move, drops those of its target before it
//!   writes.
//! - **C4** Pages come in only from extents that several volumes share: these are not written in
//!   place, and no such write is in flight. A fold or a move adds a reference to an extent with
//!   such a write in flight, so nothing comes in while one of them holds the extent here too.
//! - **C5** A page that is being read is in the table already. When it is dropped, its read brings
//!   nothing in.
//!
//! Writers look at one counter before they take a mutex (`ReadCache::drop_pages`). A writer finds
//! the extent exclusive and then reads the counter; a reader counts itself and then looks whether
//! the extent is shared. These accesses and the drop of a reference are sequentially consistent, so
//! that one of the two sees the other.
//!
//! Pages are replaced by CLOCK: a hand goes round, and passes by pages that were used since it came
//! by last.

mod shard;

use crate::geometry::{Geometry, PAGE_BYTES};
use crate::mutation::{Mutation, Situation, active, met};
use crate::sync::{AtomicBool, AtomicU32, Mutex, Ordering, fence, zeroed_slice};
use crate::units::PhysicalExtent;

use shard::{Found, Shard};

/// Parts with a mutex each. Neighbouring extents are in different ones, so that the readers of an
/// image seldom meet, and an image is spread evenly.
const SHARDS: usize = 16;
/// Counters of pages by extent, of which neighbouring extents have different ones: 64 KiB. An
/// extent with the counter of a cached one costs its writers a mutex and a lookup.
const MARKS: usize = 1 << 14;
/// Pages at the most: frames have numbers of 32 bits.
const MOST_PAGES: u64 = 1 << 31;

/// Figures of a pool's read cache. Counters begin when the pool is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheStatus {
    /// Bytes that it may hold; 0: it is off.
    pub limit: u64,
    /// Bytes that it holds.
    pub bytes: u64,
    /// Pages of 4 KiB, or parts of one, that were read from it.
    pub hits: u64,
    /// The same that shared extents have, and that were read from the media.
    pub misses: u64,
    /// Pages that made room for others.
    pub evictions: u64,
    /// Pages that were dropped since their extent was about to change or to be free.
    pub dropped: u64,
}

/// Adjacent pages that a read brings in when it has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    extent: PhysicalExtent,
    first: usize,
    count: usize,
    token: u64,
    /// The place of the first of them in the plan's part of the buffer.
    pub(crate) buffer_offset: usize,
}

/// A part of a physical extent that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) extent: PhysicalExtent,
    /// Bytes of the extent, all of them valid.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The place of `from` in the plan's part of the buffer.
    pub(crate) buffer_offset: usize,
    /// Whether to wait for another read of a page.
    pub(crate) waits: bool,
}

/// The reader's side of [`ReadCache::read`].
pub(crate) trait Reader {
    /// Whether several volumes have the extent at present.
    fn is_shared(&self) -> bool;
    /// Plans a read of these bytes of the extent from the media. `false`: there is no room.
    fn plan(&mut self, from: u64, to: u64) -> bool;
}

/// How far [`ReadCache::read`] came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reached {
    /// All of the run is there or planned.
    End,
    /// Up to this byte: there is no room for another operation.
    Full(u64),
    /// Up to this byte: another read brings in the page that follows.
    Awaits(u64),
}

/// The cache of a pool.
#[derive(Debug)]
pub(crate) struct ReadCache {
    /// Clear only while all shards are empty and stay so.
    is_on: AtomicBool,
    /// Held while the limit changes: two changes at once could leave pages in one that is off.
    changes: Mutex<()>,
    /// By mark: pages in the tables, and readers that are about to add some.
    pages: Counts,
    /// By mark: extents that a fold or a move holds.
    holds: Counts,
    shards: Box<[Mutex<Shard>]>,
}

impl ReadCache {
    pub(crate) fn new(geometry: Geometry, limit: u64) -> Self {
        let table_len = index(geometry.pages_per_extent());
        let cache = Self {
            is_on: AtomicBool::new(false),
            changes: Mutex::new(()),
            pages: Counts::new(),
            holds: Counts::new(),
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(table_len))).collect(),
        };
        let _ = cache.set_limit(limit);
        cache
    }

    /// Whether reads are to look here.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Empties it, and lets it hold up to this many bytes from then on; with 0 it is off. `true`:
    /// some read waited for a page.
    #[must_use]
    pub(crate) fn set_limit(&self, limit: u64) -> bool {
        let _one_at_a_time = self.changes.lock();
        let has_counts = self.pages.exist() && self.holds.exist();
        let pages = if has_counts { (limit / PAGE_BYTES).min(MOST_PAGES) } else { 0 };
        let pages = index(pages.div_ceil(SHARDS as u64));
        if pages > 0 {
            // Before there is a page: a writer that finds the cache off drops nothing.
            self.is_on.store(true, Ordering::SeqCst);
        }
        let mut is_awaited = false;
        for shard in &self.shards {
            let former = shard.lock().begin_anew(pages);
            is_awaited |= former.end(&self.pages);
        }
        if pages == 0 {
            self.is_on.store(false, Ordering::SeqCst);
        }
        is_awaited
    }

    pub(crate) fn status(&self) -> CacheStatus {
        let mut status = CacheStatus::default();
        self.shards.iter().for_each(|shard| shard.lock().count(&mut status));
        status
    }

    /// Copies to `out` the part of a run that is here, and has the reader plan the rest. Pages that
    /// the read is to bring in are added to `fills`, for [`Self::keep`] or [`Self::give_up`].
    pub(crate) fn read(
        &self,
        run: Run,
        out: &mut [u8],
        reader: &mut impl Reader,
        fills: &mut Vec<Fill>,
    ) -> Reached {
        if self.pages.of(run.extent) == 0 && !reader.is_shared() {
            return if reader.plan(run.from, run.to) {
                Reached::End
            } else {
                Reached::Full(run.from)
            };
        }
        let mut shard = self.shard(run.extent).lock();
        let mut is_admitted = None;
        let token = shard.next_token();
        let (mut at, mut reached) = (run.from, Reached::End);
        while at < run.to {
            let page = at / PAGE_BYTES;
            let end = ((page + 1) * PAGE_BYTES).min(run.to);
            let part = index(at - run.from)..index(end - run.from);
            let found = shard.find(run.extent, index(page));
            match found {
                Found::Page(frame) => {
                    shard.copy(frame, index(at % PAGE_BYTES), &mut out[part]);
                    met(Situation::ReadFromCache);
                }
                Found::Awaited(frame) if run.waits => {
                    shard.await_page(frame);
                    met(Situation::ReadJoined);
                    reached = Reached::Awaits(at);
                    break;
                }
                Found::Awaited(_) | Found::Nothing => {
                    if !reader.plan(at, end) {
                        reached = Reached::Full(at);
                        break;
                    }
                    let comes_in =
                        *is_admitted.get_or_insert_with(|| self.admit(run.extent, reader));
                    let is_new = found == Found::Nothing && end - at == PAGE_BYTES;
                    let place = (run.extent, index(page));
                    if comes_in && shard.miss(place, token, is_new, &self.pages) {
                        add(fills, place, token, run.buffer_offset + part.start);
                    }
                }
            }
            at = end;
        }
        if is_admitted == Some(true) {
            self.pages.sub(run.extent, 1);
        }
        reached
    }

    /// Whether pages of an extent may come in (C4). The reader is counted from then on.
    fn admit(&self, extent: PhysicalExtent, reader: &impl Reader) -> bool {
        if !reader.is_shared() {
            return false;
        }
        self.pages.add(extent, 1);
        fence(Ordering::SeqCst);
        // In this order. A hold that has ended has taken its reference back; one that begins after
        // this look drops what the reader adds.
        let is_held = self.holds.of(extent) != 0 && !active(Mutation::CachedUnderHold);
        if !is_held && reader.is_shared() {
            return true;
        }
        self.pages.sub(extent, 1);
        false
    }

    /// Takes in the pages of a read that has ended well. `true`: some read waits for one of them.
    #[must_use]
    pub(crate) fn keep(&self, fill: &Fill, bytes: &[u8]) -> bool {
        self.shard(fill.extent).lock().keep(fill, bytes)
    }

    /// Ends a read whose pages do not come in. `true`: some read waits for one of them.
    #[must_use]
    pub(crate) fn give_up(&self, fill: &Fill) -> bool {
        self.shard(fill.extent).lock().give_up(fill, &self.pages)
    }

    /// Drops the pages of an extent that is about to change, or to be free. `true`: some read waits
    /// for one of them.
    #[inline]
    #[must_use]
    pub(crate) fn drop_pages(&self, extent: PhysicalExtent) -> bool {
        self.is_on.load(Ordering::SeqCst)
            && self.pages.of(extent) != 0
            && self.shard(extent).lock().drop_pages(extent, &self.pages)
    }

    /// Lets no page of an extent come in, and drops those that are here (C4). Before the reference
    /// that makes the extent look shared. `true`: some read waits for one of them.
    #[must_use]
    pub(crate) fn hold(&self, extent: PhysicalExtent) -> bool {
        self.holds.add(extent, 1);
        self.drop_pages(extent)
    }

    /// Ends a hold, after that reference.
    pub(crate) fn end_hold(&self, extent: PhysicalExtent) {
        self.holds.sub(extent, 1);
    }

    fn shard(&self, extent: PhysicalExtent) -> &Mutex<Shard> {
        &self.shards[low_bits(extent) % SHARDS]
    }
}

/// Adds a page to those that a read brings in.
fn add(
    fills: &mut Vec<Fill>,
    (extent, page): (PhysicalExtent, usize),
    token: u64,
    buffer_offset: usize,
) {
    if let Some(last) = fills.last_mut()
        && last.extent == extent
        && last.token == token
        && last.first + last.count == page
    {
        last.count += 1;
        return;
    }
    fills.push(Fill { extent, first: page, count: 1, token, buffer_offset });
}

/// A counter for each mark. Without memory for them there are none, and no cache.
#[derive(Debug)]
struct Counts(Box<[AtomicU32]>);

impl Counts {
    fn new() -> Self {
        Self(zeroed_slice(MARKS).unwrap_or_default())
    }

    fn exist(&self) -> bool {
        !self.0.is_empty()
    }

    #[inline]
    fn at(&self, extent: PhysicalExtent) -> Option<&AtomicU32> {
        self.0.get(low_bits(extent) % MARKS)
    }

    #[inline]
    fn of(&self, extent: PhysicalExtent) -> u32 {
        self.at(extent).map_or(0, |count| count.load(Ordering::SeqCst))
    }

    fn add(&self, extent: PhysicalExtent, more: u32) {
        if let Some(count) = self.at(extent) {
            count.fetch_add(more, Ordering::SeqCst);
        }
    }

    fn sub(&self, extent: PhysicalExtent, less: u32) {
        if let Some(count) = self.at(extent) {
            count.fetch_sub(less, Ordering::SeqCst);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are all that is needed")]
const fn low_bits(extent: PhysicalExtent) -> usize {
    extent.0 as usize
}

/// A position or length in memory.
fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
