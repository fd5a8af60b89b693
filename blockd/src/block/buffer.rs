//! A piece of a worker's IO memory.

/// Names page-aligned memory of one ring's arena, and is the right to use it. Given back with
/// [`crate::backing::Ring::free`]; one that is dropped stays taken until the ring ends.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    page: u32,
    order: u8,
}

impl Buffer {
    /// A buffer of `2^order` pages from this page on. For the arena.
    pub(crate) const fn new(page: u32, order: u8) -> Self {
        Self { page, order }
    }

    /// Its first page in the arena.
    pub(crate) const fn page(&self) -> u32 {
        self.page
    }

    /// It has `2^order` pages.
    pub(crate) const fn order(&self) -> u8 {
        self.order
    }
}
