//! A file in memory, mapped: files on tmpfs are served without a system call.
//!
//! io_uring hands writes to tmpfs to a thread of the kernel each; a copy to the mapping costs a
//! fifth of that. The danger of a mapping is a page that can't be had: the kernel kills the process
//! that touches it. So the file's space is allocated before anything is written there: as much as
//! is written, and more where one write follows another.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockd_mapper::io::IoError;
use memmap2::MmapRaw;
use nix::fcntl::{FallocateFlags, fallocate};
use parking_lot::Mutex;

use super::io_error;
use super::room::{Memory, Room};

/// Bytes of a page.
const PAGE: u64 = crate::PAGE as u64;
/// Pages whose presence one word says.
const WORD_PAGES: u64 = 64;
/// Most pages that are allocated ahead of a write that follows another one: a system call for each
/// 64 KiB costs little beside copying them.
const MOST_AHEAD: u64 = 16;

/// A mapped file that no process shortens.
#[derive(Debug)]
pub struct Mapped {
    map: MmapRaw,
    file: Arc<File>,
    len: u64,
    /// A bit for each page: the file has memory for it.
    present: Box<[AtomicU64]>,
    /// Held while memory is allocated or given back and noted: a bit never says more than is so.
    room: Mutex<Room>,
}

impl Mapped {
    /// Maps a file of this length, and finds what of it is in use.
    pub(super) fn new(file: Arc<File>, len: u64) -> std::io::Result<Self> {
        Self::within(file, len, Memory::MACHINE)
    }

    /// With another view of the memory that is left.
    fn within(file: Arc<File>, len: u64, memory: Memory) -> std::io::Result<Self> {
        let bytes = usize::try_from(len).map_err(std::io::Error::other)?;
        let map = memmap2::MmapOptions::new().len(bytes).map_raw(&*file)?;
        let words = usize::try_from(len.div_ceil(PAGE * WORD_PAGES));
        let words = words.map_err(std::io::Error::other)?;
        let present: Box<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let mapped = Self { map, file, len, present, room: Mutex::new(Room::new(memory)) };
        mapped.find_present()?;
        Ok(mapped)
    }

    fn find_present(&self) -> std::io::Result<()> {
        use nix::unistd::{Whence, lseek};
        let seek = |from: u64, whence| {
            let from = i64::try_from(from).map_err(|_| nix::errno::Errno::EOVERFLOW)?;
            lseek(self.file.as_fd(), from, whence)
        };
        let mut at = 0;
        while at < self.len {
            let data = match seek(at, Whence::SeekData) {
                Ok(data) => u64::try_from(data).unwrap_or(self.len),
                Err(nix::errno::Errno::ENXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let hole = u64::try_from(seek(data, Whence::SeekHole)?).unwrap_or(self.len);
            let (first, end) = Self::pages(data, hole.min(self.len).saturating_sub(data));
            self.note(first, end, true);
            at = hole.max(at + 1);
        }
        Ok(())
    }

    /// The word of a page, and the bits of it for this page and those up to `end`.
    fn word(&self, page: u64, end: u64) -> (&AtomicU64, u64) {
        let first = page % WORD_PAGES;
        let count = (end - page).min(WORD_PAGES - first);
        let bits = (u64::MAX >> (WORD_PAGES - count)) << first;
        (&self.present[usize::try_from(page / WORD_PAGES).unwrap_or(usize::MAX)], bits)
    }

    /// Whether all of these pages have memory.
    fn are_present(&self, mut page: u64, end: u64) -> bool {
        while page < end {
            let (word, bits) = self.word(page, end);
            if word.load(Ordering::Acquire) & bits != bits {
                return false;
            }
            page += u64::from(bits.count_ones());
        }
        true
    }

    /// Notes of pages whether they have memory.
    fn note(&self, mut page: u64, end: u64, has_memory: bool) {
        while page < end {
            let (word, bits) = self.word(page, end);
            match has_memory {
                true => word.fetch_or(bits, Ordering::AcqRel),
                false => word.fetch_and(!bits, Ordering::AcqRel),
            };
            page += u64::from(bits.count_ones());
        }
    }

    fn check(&self, offset: u64, len: usize) -> Result<usize, IoError> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.len);
        end.and_then(|_| usize::try_from(offset).ok()).ok_or(IoError::Media)
    }

    /// The first page of a range, and that behind its last one.
    const fn pages(offset: u64, len: u64) -> (u64, u64) {
        (offset / PAGE, (offset + len).div_ceil(PAGE))
    }

    /// Fills `to` from this byte on.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), IoError> {
        let at = self.check(offset, to.len())?;
        let (first, end) = Self::pages(offset, to.len() as u64);
        if !self.are_present(first, end) {
            // Touching a hole would allocate it, and kill us where there is no memory.
            return self.file.read_exact_at(to, offset).map_err(|error| io_error(&error));
        }
        // SAFETY: `check` keeps the range inside the mapping, whose pages are all there and stay
        // there; `to` is memory of this process that doesn't lie in the mapping. Another thread may
        // be writing the same bytes, as two clients may on any disk: the result is any mix of old
        // and new, and bytes have no invalid values.
        unsafe {
            self.map.as_ptr().wrapping_add(at).copy_to_nonoverlapping(to.as_mut_ptr(), to.len())
        };
        Ok(())
    }

    /// Writes `from` to this byte on.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), IoError> {
        let at = self.allocate(offset, from.len())?;
        // SAFETY: as in `read`, the other way round.
        unsafe {
            self.map
                .as_mut_ptr()
                .wrapping_add(at)
                .copy_from_nonoverlapping(from.as_ptr(), from.len())
        };
        Ok(())
    }

    /// Writes zeroes.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let len = usize::try_from(len).map_err(|_| IoError::Media)?;
        let at = self.allocate(offset, len)?;
        // SAFETY: as in `write`.
        unsafe { self.map.as_mut_ptr().wrapping_add(at).write_bytes(0, len) };
        Ok(())
    }

    /// Makes sure that the range has memory; gives its place in the mapping.
    fn allocate(&self, offset: u64, len: usize) -> Result<usize, IoError> {
        let at = self.check(offset, len)?;
        let (first, end) = Self::pages(offset, len as u64);
        if self.are_present(first, end) {
            return Ok(at);
        }
        let more = (end + self.ahead(first)).min(self.len.div_ceil(PAGE));
        if more > end && self.allocate_pages(first, more).is_ok() {
            return Ok(at);
        }
        self.allocate_pages(first, end).map(|()| at)
    }

    /// Pages to allocate ahead of a write to this page: as many as have memory right before it.
    fn ahead(&self, page: u64) -> u64 {
        let before = page.saturating_sub(MOST_AHEAD);
        (before..page).rev().take_while(|&page| self.are_present(page, page + 1)).count() as u64
    }

    /// Allocates those of these pages that have no memory, and no others: a call that fails takes
    /// back what was allocated in its range and not written.
    fn allocate_pages(&self, mut first: u64, end: u64) -> Result<(), IoError> {
        let mut room = self.room.lock();
        while first < end {
            let run = (first..end).take_while(|&page| !self.are_present(page, page + 1)).count();
            if run == 0 {
                first += 1;
                continue;
            }
            let next = first + run as u64;
            let start = first * PAGE;
            let bytes = (next * PAGE).min(self.len).saturating_sub(start);
            let range = (i64::try_from(start), i64::try_from(bytes));
            let (Ok(start), Ok(bytes)) = range else { return Err(IoError::Media) };
            if !room.take((next - first) * PAGE) {
                return Err(IoError::NoSpace);
            }
            self.fallocate(FallocateFlags::empty(), start, bytes)?;
            self.note(first, next, true);
            first = next;
        }
        Ok(())
    }

    /// Gives the memory of whole pages in a range back. The range is not in use meanwhile: the pool
    /// names only unallocated extents.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let (first, end) = (offset.div_ceil(PAGE), offset.saturating_add(len) / PAGE);
        if first >= end {
            return Ok(());
        }
        let _room = self.room.lock();
        self.note(first, end, false);
        let (start, bytes) = (first * PAGE, (end - first) * PAGE);
        let (Ok(start), Ok(bytes)) = (i64::try_from(start), i64::try_from(bytes)) else {
            return Err(IoError::Media);
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        self.fallocate(flags, start, bytes)
    }

    /// On tmpfs, a signal to this thread ends it halfway.
    fn fallocate(&self, flags: FallocateFlags, start: i64, bytes: i64) -> Result<(), IoError> {
        loop {
            match fallocate(self.file.as_fd(), flags, start, bytes) {
                Err(nix::errno::Errno::EINTR) => {}
                other => return other.map_err(|error| io_error(&error.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(len: u64) -> (Arc<File>, Mapped) {
        let name = c"blockd-test";
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let file = Arc::new(File::from(nix::sys::memfd::memfd_create(name, flags).unwrap()));
        file.set_len(len).unwrap();
        let mapped = Mapped::new(Arc::clone(&file), len).unwrap();
        (file, mapped)
    }

    /// Pages of a file that have memory.
    fn taken(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;
        file.metadata().unwrap().blocks() * 512 / PAGE
    }

    fn present(mapped: &Mapped) -> u64 {
        mapped.present.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    #[test]
    fn written_data_is_read_and_holes_are_zeroes() {
        const PART: u64 = 256 << 10;
        let (file, mapped) = mapped(4 * PART + 4096);
        let mut page = [1; 4096];
        mapped.read(2 * PART, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        mapped.write(2 * PART - 2048, &[7; 4096]).unwrap();
        mapped.read(2 * PART - 2048, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        mapped.write(4 * PART, &[8; 4096]).unwrap();
        assert_eq!((present(&mapped), taken(&file)), (3, 3));
        // Another mapping finds what the first has left.
        let again = Mapped::new(Arc::clone(&file), 4 * PART + 4096).unwrap();
        assert_eq!(present(&again), 3);
        // A page that is not punched as a whole stays.
        again.punch(2 * PART - 4096, 6144).unwrap();
        assert_eq!((present(&again), taken(&file)), (2, 2));
        again.read(2 * PART - 2048, &mut page).unwrap();
        assert_eq!((page[..2048].to_vec(), page[2048..].to_vec()), (vec![0; 2048], vec![7; 2048]));
    }

    #[test]
    fn random_writes_take_the_memory_that_they_write() {
        let (file, mapped) = mapped(4 << 30);
        let mut random = fastrand::Rng::with_seed(1);
        let mut pages = std::collections::BTreeSet::new();
        while pages.len() < 2000 {
            let page = random.u64(..(4 << 30) / PAGE);
            mapped.write(page * PAGE, &[1; 4096]).unwrap();
            pages.insert(page);
        }
        assert!(taken(&file) <= 2000 * 6 / 5, "{} pages", taken(&file));
    }

    #[test]
    fn writes_that_follow_each_other_find_memory_allocated() {
        let (file, mapped) = mapped(1 << 20);
        let mut calls = 0;
        for page in 0..200 {
            calls += u32::from(!mapped.are_present(page, page + 1));
            mapped.write(page * PAGE, &[1; 4096]).unwrap();
        }
        assert!(calls <= 200 / 16 + 5, "{calls} calls");
        assert!(taken(&file) <= 200 + MOST_AHEAD, "{} pages", taken(&file));
    }

    #[test]
    fn writes_are_refused_before_the_machine_is_out_of_memory() {
        static LEFT: AtomicU64 = AtomicU64::new(2 * PAGE);
        let file = mapped(1 << 20).0;
        static NOW_NS: AtomicU64 = AtomicU64::new(1);
        let memory = Memory {
            left: || Some(LEFT.load(Ordering::Relaxed)),
            now_ns: || NOW_NS.load(Ordering::Relaxed),
        };
        let mapped = Mapped::within(Arc::clone(&file), 1 << 20, memory).unwrap();
        mapped.write(0, &[1; 4096]).unwrap();
        LEFT.store(0, Ordering::Relaxed);
        // The page after it may have been allocated ahead, no more.
        assert_eq!(mapped.write(8 * PAGE, &[2; 4096]), Err(IoError::NoSpace));
        assert_eq!(mapped.zero(16 * PAGE, PAGE), Err(IoError::NoSpace));
        mapped.write(0, &[3; 4096]).unwrap();
        let mut page = [1; 4096];
        mapped.read(8 * PAGE, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        LEFT.store(PAGE, Ordering::Relaxed);
        NOW_NS.fetch_add(1_000_000_000, Ordering::Relaxed);
        mapped.write(8 * PAGE, &[2; 4096]).unwrap();
    }

    #[test]
    fn nothing_beyond_the_end_is_touched() {
        let (_file, mapped) = mapped(PAGE);
        assert_eq!(mapped.write(PAGE - 1, &[1, 2]), Err(IoError::Media));
        assert_eq!(mapped.read(u64::MAX, &mut [0; 2]), Err(IoError::Media));
        assert_eq!(mapped.zero(PAGE, 1), Err(IoError::Media));
    }
}
