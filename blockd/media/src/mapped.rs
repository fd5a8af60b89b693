//! A file in memory, mapped: files on tmpfs are served without a system call.
//!
//! io_uring hands writes to tmpfs to a thread of the kernel each; a copy to the mapping costs a
//! fifth of that. The danger of a mapping is a page that can't be had: the kernel kills the process
//! that touches it. So the file's space is allocated, run by run, before anything is written there.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockd_mapper::io::IoError;
use memmap2::MmapRaw;
use nix::fcntl::{FallocateFlags, fallocate};

use super::io_error;

/// Bytes allocated at a time: the default extent.
const RUN: u64 = 256 << 10;

/// A mapped file that no process shortens.
#[derive(Debug)]
pub struct Mapped {
    map: MmapRaw,
    file: Arc<File>,
    len: u64,
    /// By run: the file has memory for all of it.
    present: Box<[AtomicBool]>,
}

impl Mapped {
    /// Maps a file of this length, and finds what of it is in use.
    pub(super) fn new(file: Arc<File>, len: u64) -> std::io::Result<Self> {
        let bytes = usize::try_from(len).map_err(std::io::Error::other)?;
        let map = memmap2::MmapOptions::new().len(bytes).map_raw(&*file)?;
        let runs = usize::try_from(len.div_ceil(RUN)).map_err(std::io::Error::other)?;
        let present: Box<[AtomicBool]> = (0..runs).map(|_| AtomicBool::new(false)).collect();
        let mapped = Self { map, file, len, present };
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
            // A run that has some of its memory gets the rest. Allocated and never written memory
            // looks like a hole.
            for run in Self::runs(data, usize::try_from(hole - data).unwrap_or(0)) {
                let start = run * RUN;
                let bytes = usize::try_from(RUN.min(self.len - start)).unwrap_or(0);
                if self.allocate(start, bytes).is_err() {
                    // Without memory it is read and written as a file.
                    break;
                }
            }
            at = hole.max(at + 1);
        }
        Ok(())
    }

    fn run(&self, run: u64) -> &AtomicBool {
        &self.present[usize::try_from(run).unwrap_or(usize::MAX)]
    }

    fn check(&self, offset: u64, len: usize) -> Result<usize, IoError> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.len);
        end.and_then(|_| usize::try_from(offset).ok()).ok_or(IoError::Media)
    }

    fn runs(offset: u64, len: usize) -> std::ops::Range<u64> {
        offset / RUN..(offset + len as u64).div_ceil(RUN)
    }

    /// Fills `to` from this byte on.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), IoError> {
        let at = self.check(offset, to.len())?;
        if !Self::runs(offset, to.len()).all(|run| self.run(run).load(Ordering::Acquire)) {
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
        for run in Self::runs(offset, len) {
            if self.run(run).load(Ordering::Acquire) {
                continue;
            }
            let start = run * RUN;
            let bytes = RUN.min(self.len - start);
            let range = (i64::try_from(start), i64::try_from(bytes));
            let (Ok(start), Ok(bytes)) = range else { return Err(IoError::Media) };
            self.fallocate(FallocateFlags::empty(), start, bytes)?;
            self.run(run).store(true, Ordering::Release);
        }
        Ok(at)
    }

    /// Gives the memory of whole runs in a range back. The range is not in use meanwhile: the pool
    /// names only unallocated extents.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let runs = offset.div_ceil(RUN)..(offset.saturating_add(len)) / RUN;
        if runs.is_empty() {
            return Ok(());
        }
        for run in runs.clone() {
            self.run(run).store(false, Ordering::Release);
        }
        let (start, bytes) = (runs.start * RUN, (runs.end - runs.start) * RUN);
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

    #[test]
    fn written_data_is_read_and_holes_are_zeroes() {
        let (file, mapped) = mapped(4 * RUN + 4096);
        let mut page = [1; 4096];
        mapped.read(2 * RUN, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        mapped.write(2 * RUN - 2048, &[7; 4096]).unwrap();
        mapped.read(2 * RUN - 2048, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        mapped.write(4 * RUN, &[8; 4096]).unwrap();
        // Another mapping finds what the first has left.
        let again = Mapped::new(file, 4 * RUN + 4096).unwrap();
        let present: Vec<bool> = again.present.iter().map(|p| p.load(Ordering::Relaxed)).collect();
        assert_eq!(present, [false, true, true, false, true]);
        again.punch(RUN, RUN).unwrap();
        again.read(RUN, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
    }

    #[test]
    fn nothing_beyond_the_end_is_touched() {
        let (_file, mapped) = mapped(RUN);
        assert_eq!(mapped.write(RUN - 1, &[1, 2]), Err(IoError::Media));
        assert_eq!(mapped.read(u64::MAX, &mut [0; 2]), Err(IoError::Media));
        assert_eq!(mapped.zero(RUN, 1), Err(IoError::Media));
    }
}
