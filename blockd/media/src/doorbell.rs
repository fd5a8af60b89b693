//! Wakes a thread that waits in its ring.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// An eventfd that is written only if it was not written since its thread's last look: a busy
/// thread is not rung for twice.
#[derive(Debug)]
pub struct Doorbell {
    event: EventFd,
    rung: AtomicBool,
}

impl Doorbell {
    /// A doorbell that was not rung yet.
    pub fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { event, rung: AtomicBool::new(false) })
    }

    /// Wakes the thread, now or before it sleeps next.
    #[inline]
    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            // It fails only when the counter is full, and then the thread wakes anyway.
            let _ = self.event.write(1);
        }
    }

    /// To be called by the thread before it looks at what it may have been rung for.
    #[inline]
    pub fn heard(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
