//! One entry of the map.

use crate::units::PhysicalExtent;

/// Where an extent of a volume lies and which of its sub-blocks hold data.
///
/// A sub-block whose bit is clear reads as zeroes, whatever the media holds there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mapping {
    /// The extent that holds the data. `None` means unmapped, and then `valid` is 0.
    pub physical: Option<PhysicalExtent>,
    /// One bit per sub-block, the lowest bit for the first.
    pub valid: u64,
}

impl Mapping {
    /// No extent: everything reads as zeroes.
    pub const UNMAPPED: Self = Self { physical: None, valid: 0 };

    /// Whether an extent of the pool is behind the entry, even one without valid sub-blocks.
    #[must_use]
    pub const fn is_mapped(&self) -> bool {
        self.physical.is_some()
    }
}
