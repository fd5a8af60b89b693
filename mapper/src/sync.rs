//! Atomics, fences and the mutex of the in-memory structures: from the standard library and
//! parking_lot, or from loom when the interleavings are to be explored.

#[cfg(loom)]
pub(crate) use {
    loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    model::Mutex,
};
#[cfg(not(loom))]
pub(crate) use {
    parking_lot::Mutex,
    std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
};

/// Pause instructions before a waiter gives its core away: about a microsecond, longer than any
/// section that is waited for takes unless its thread was preempted.
#[cfg(not(loom))]
const PAUSES: u32 = 64;

/// A value on cache lines of its own. 128 bytes, because the adjacent line is prefetched with it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

/// Waits for something that another thread does within microseconds.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    #[cfg(not(loom))]
    pauses: u32,
}

impl Backoff {
    /// Pauses; after a while gives the core to the thread that is waited for.
    #[cfg(not(loom))]
    pub(crate) fn wait(&mut self) {
        if self.pauses < PAUSES {
            self.pauses += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Yields to loom: nothing happens here until another thread runs.
    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        loom::thread::yield_now();
    }
}

/// Types that may be created as zeroed memory without initialisation.
#[cfg(not(loom))]
pub(crate) use zerocopy::FromZeros as Zeroed;

/// Loom's atomics are registered one by one: their default is all zeroes.
#[cfg(loom)]
pub(crate) use std::default::Default as Zeroed;

/// `count` zeroed values in one allocation. `None` when there is no memory for it.
#[cfg(not(loom))]
pub(crate) fn zeroed_slice<T: Zeroed>(count: usize) -> Option<Box<[T]>> {
    <[T]>::new_box_zeroed_with_elems(count).ok()
}

/// `count` values that are all zeroes.
#[cfg(loom)]
pub(crate) fn zeroed_slice<T: Zeroed>(count: usize) -> Option<Box<[T]>> {
    Some((0..count).map(|_| T::default()).collect())
}

#[cfg(loom)]
mod model {
    /// Loom's mutex with the interface of parking_lot's.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }

        #[allow(dead_code, reason = "kept level with parking_lot's interface")]
        pub(crate) fn try_lock(&self) -> Option<loom::sync::MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}
