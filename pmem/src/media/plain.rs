//! The same for processors whose instructions are not known here: correct, and never more durable
//! than a sync makes it.

/// Bytes of a line.
pub(super) const LINE: usize = 64;

/// The absence of a write-back instruction: see `sync`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteBack {
    /// A sync does it.
    Sync,
}

impl WriteBack {
    /// The only one.
    pub(super) fn best() -> Self {
        Self::Sync
    }
}

/// No fault is one of ours.
pub(super) fn exit_of(_at: usize) -> Option<usize> {
    None
}

/// Copies.
///
/// # Safety
/// Both ranges are this process's for as long as the call takes, and not the same.
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> usize {
    // SAFETY: as the caller promises.
    unsafe { to.copy_from_nonoverlapping(from, len) };
    0
}

/// Copies.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn stream(to: *mut u8, from: *const u8, len: usize) -> usize {
    // SAFETY: as the caller promises.
    unsafe { copy(to, from, len) }
}

/// Stores zeroes.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn zero(to: *mut u8, len: usize) -> usize {
    // SAFETY: as the caller promises.
    unsafe { to.write_bytes(0, len) };
    0
}

/// Nothing.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn write_back(_how: WriteBack, _at: *mut u8, _len: usize) -> usize {
    0
}

/// No store is seen before those that came earlier.
pub(super) fn fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
