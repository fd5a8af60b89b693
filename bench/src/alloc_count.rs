//! Counts heap allocations, per thread, in every binary of this package.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Allocations of the calling thread since it began. Growing a block counts as one.
#[must_use]
pub fn allocations() -> u64 {
    COUNT.with(Cell::get)
}

thread_local! {
    // Const and without a destructor: touching it neither allocates nor fails at a thread's end.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Debug)]
struct Counting;

fn count() {
    COUNT.with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator unchanged, which keeps the contract; counting
// touches a thread-local cell only and can neither allocate nor unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`: the layout's size is not zero.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller passes a block of this allocator, which is the system's, with its
        // layout and a new size that is not zero.
        unsafe { System.realloc(block, layout, new_size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller passes a block of this allocator, which is the system's, with its
        // layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::allocations;

    #[test]
    fn a_box_is_one_allocation() {
        let before = allocations();
        let boxed = std::hint::black_box(Box::new(5));
        assert_eq!(allocations() - before, 1);
        drop(boxed);
        assert_eq!(allocations() - before, 1);
    }
}
