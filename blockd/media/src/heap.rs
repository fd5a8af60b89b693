//! A setting of the C library's memory.

/// Bytes from which a piece is large: a buffer of 16 pages for commits, with the room to align it.
/// Pieces of 64 KiB, as the cache of shared blocks and connections with TLS take them, are not.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 17 << 12;

/// Gives larger pieces of memory back to the kernel when they are freed, and takes each of them
/// page by page, as it is used.
///
/// By itself the C library of GNU does so only until the first of them is freed. Afterwards a piece
/// lies among others, where it is overwritten with zeroes at once, and what is freed stays: for a
/// daemon with many pools, a tenth of its memory and more.
pub(crate) fn return_large_pieces() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: the call takes numbers alone, and the library has a lock for it. A thread that
        // allocates meanwhile sees the former number or the new one. No safe code has this call.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
    }
}
