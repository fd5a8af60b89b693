//! A setting of the C library's memory.

/// Gives larger pieces of memory back to the kernel when they are freed, and takes each of them
/// page by page, as it is used.
///
/// By itself the C library of GNU does so only until the first of them is freed. Afterwards a piece
/// lies among others, where it is overwritten with zeroes at once, and what is freed stays: for a
/// daemon with many pools, half of its memory. 64 KiB is the size of a commit's buffers.
pub(crate) fn return_large_pieces() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: the call takes numbers alone, and may be made at any time. No safe code has it.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10) };
    }
}
