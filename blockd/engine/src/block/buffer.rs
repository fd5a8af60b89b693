//! A piece of a worker's IO memory.

/// Names page-aligned memory of one ring, and is the right to use it. A buffer of the ring's arena
/// is given back with [`crate::backing::Ring::free`]; one that is dropped stays taken until the
/// ring ends.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    place: Place,
    bytes: u32,
}

/// Where a buffer's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// `2^order` pages of the arena, from this one on.
    Arena { page: u32, order: u8 },
    /// One piece of an area that was made for a queue of requests.
    Area { area: u16, piece: u16 },
}

impl Buffer {
    /// For the ring.
    pub(crate) const fn new(place: Place, bytes: u32) -> Self {
        Self { place, bytes }
    }

    /// Where it is.
    pub(crate) const fn place(&self) -> Place {
        self.place
    }

    /// How many bytes it has.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes as usize
    }
}
