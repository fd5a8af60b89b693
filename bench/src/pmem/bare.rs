//! The least that a processor has to do: 16 bytes at a time past the caches, a fence, and the copy
//! routine of the system's library. No range is checked in the measured code, and bad memory ends
//! the process.

use std::fs::File;
use std::num::NonZero;
use std::ptr::NonNull;

use anyhow::{Result, ensure};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A mapped file.
#[derive(Debug)]
pub struct Bare {
    base: NonNull<u8>,
    len: usize,
}

impl Bare {
    /// Maps a file of this length.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(file: &File, len: usize) -> Result<Self> {
        let size = NonZero::new(len);
        ensure!(size.is_some(), "nothing to map");
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let size = size.unwrap_or(NonZero::<usize>::MIN);
        // SAFETY: a mapping at an address that the kernel chooses overlaps no other memory.
        let base = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { base: base.cast(), len })
    }

    fn place(&self, at: u64, len: usize) -> *mut u8 {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        debug_assert!(at.saturating_add(len) <= self.len, "outside of the mapping");
        self.base.as_ptr().wrapping_add(at)
    }

    /// Stores whole lines to a place that is aligned to a line.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub fn write(&self, at: u64, from: &[u8]) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let to = self.place(at, from.len()).cast::<__m128i>();
        for (index, part) in from.chunks_exact(16).enumerate() {
            // SAFETY: 16 bytes of a slice.
            let word = unsafe { _mm_loadu_si128(part.as_ptr().cast()) };
            // SAFETY: the benchmark keeps to the mapping, and to lines.
            unsafe { _mm_stream_si128(to.wrapping_add(index), word) };
        }
    }

    /// Stores.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn write(&self, at: u64, from: &[u8]) {
        // SAFETY: the benchmark keeps to the mapping.
        unsafe {
            self.place(at, from.len()).copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
    }

    /// Everything stored before is durable, where a fence does that.
    #[inline]
    pub fn fence(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every processor of this architecture has the instruction.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Copies out, as the system's library does it.
    #[inline]
    pub fn read(&self, at: u64, to: &mut [u8]) {
        let from = self.place(at, to.len());
        // SAFETY: the benchmark keeps to the mapping, and `to` is memory outside of it.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: the range is that of the mapping, and has no user any more.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Nanoseconds for which this thread has run. `getrusage` counts in ticks of the kernel on some
/// hosts.
///
/// # Errors
/// The kernel has no such clock.
pub fn thread_ns() -> Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes the time to a place that is this function's own.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    ensure!(done == 0, "clock of the thread: {}", std::io::Error::last_os_error());
    Ok(u64::try_from(time.tv_sec)? * 1_000_000_000 + u64::try_from(time.tv_nsec)?)
}
