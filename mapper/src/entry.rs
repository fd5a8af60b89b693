//! One entry of the map of any kind, composite ones included.

use crate::mapping::Mapping;
use crate::units::PhysicalExtent;

/// An entry whose sub-blocks lie in two extents.
///
/// A sub-block is read from the overlay if `top` has its bit, else from the base if `under` has
/// it, else as zeroes. Overlay and base differ, and neither is resolved through another entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Composite {
    /// The extent that is read first.
    pub overlay: PhysicalExtent,
    /// Valid sub-blocks of the overlay, the lowest bit for the first.
    pub top: u64,
    /// The extent below it.
    pub base: PhysicalExtent,
    /// Valid sub-blocks of the base. May overlap `top`, which wins.
    pub under: u64,
}

impl Composite {
    /// The sub-blocks that hold data, in either extent.
    #[must_use]
    pub const fn valid(&self) -> u64 {
        self.top | self.under
    }
}

/// Where an extent of a volume lies, in one extent of the pool or in two.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Entry {
    /// No extent: everything reads as zeroes.
    #[default]
    Unmapped,
    /// One extent. A sub-block whose bit is clear reads as zeroes.
    Mapped {
        /// The extent that holds the data.
        physical: PhysicalExtent,
        /// Its valid sub-blocks, the lowest bit for the first. May be empty.
        valid: u64,
    },
    /// An overlay above a base.
    Composite(Composite),
}

impl Entry {
    /// The entry as a plain mapping. `None` for a composite entry.
    #[must_use]
    pub const fn plain(&self) -> Option<Mapping> {
        match *self {
            Self::Unmapped => Some(Mapping::UNMAPPED),
            Self::Mapped { physical, valid } => Some(Mapping { physical: Some(physical), valid }),
            Self::Composite(_) => None,
        }
    }

    /// An entry of these two parts: plain without a base.
    #[must_use]
    pub fn of(top: Mapping, base: Mapping) -> Self {
        match (top.physical, base.physical) {
            (Some(overlay), Some(below)) => Self::Composite(Composite {
                overlay,
                top: top.valid,
                base: below,
                under: base.valid,
            }),
            _ => Self::from(top),
        }
    }

    /// As [`Self::of`], without a base of which nothing is read: each of its sub-blocks is in the
    /// overlay too. A sub-block that the overlay has stays hidden, since a discard takes it from
    /// both.
    #[must_use]
    pub fn over(top: Mapping, base: Mapping) -> Self {
        Self::of(top, if base.valid & !top.valid == 0 { Mapping::UNMAPPED } else { base })
    }

    /// The extent that is read first, with its sub-blocks.
    #[must_use]
    pub const fn top(&self) -> Mapping {
        match *self {
            Self::Unmapped => Mapping::UNMAPPED,
            Self::Mapped { physical, valid } => Mapping { physical: Some(physical), valid },
            Self::Composite(it) => Mapping { physical: Some(it.overlay), valid: it.top },
        }
    }

    /// The extent below that, with its sub-blocks; unmapped for a plain entry.
    #[must_use]
    pub const fn base(&self) -> Mapping {
        match *self {
            Self::Composite(it) => Mapping { physical: Some(it.base), valid: it.under },
            _ => Mapping::UNMAPPED,
        }
    }

    /// The extents that this entry holds a reference to and another one does not.
    pub fn without(&self, other: &Self) -> impl Iterator<Item = PhysicalExtent> + use<> {
        let other = *other;
        self.extents().filter(move |one| !other.extents().any(|kept| kept == *one))
    }

    /// The rest of the entry when only these sub-blocks stay valid.
    #[must_use]
    pub fn keep(&self, bits: u64) -> Self {
        let (top, base) = (self.top(), self.base());
        let top = Mapping { valid: top.valid & bits, ..top };
        let base = Mapping { valid: base.valid & bits, ..base };
        Self::over(top, base)
    }

    /// Whether it lies in two extents.
    #[must_use]
    pub const fn is_composite(&self) -> bool {
        matches!(self, Self::Composite(_))
    }

    /// Whether the overlay of a composite entry has more than three quarters of the sub-blocks: the
    /// base takes a whole extent for the rest.
    #[must_use]
    pub const fn is_crowded(&self, sub_blocks: u32) -> bool {
        match *self {
            Self::Composite(it) => it.top.count_ones() * 4 > sub_blocks * 3,
            _ => false,
        }
    }

    /// Whether an extent of the pool is behind the entry, even one without valid sub-blocks.
    #[must_use]
    pub const fn is_mapped(&self) -> bool {
        !matches!(self, Self::Unmapped)
    }

    /// The sub-blocks that hold data.
    #[must_use]
    pub const fn valid(&self) -> u64 {
        match *self {
            Self::Unmapped => 0,
            Self::Mapped { valid, .. } => valid,
            Self::Composite(composite) => composite.valid(),
        }
    }

    /// The extents that the entry holds a reference to, the one that is read first in front.
    pub fn extents(&self) -> impl Iterator<Item = PhysicalExtent> + use<> {
        let (first, second) = match *self {
            Self::Unmapped => (None, None),
            Self::Mapped { physical, .. } => (Some(physical), None),
            Self::Composite(composite) => (Some(composite.overlay), Some(composite.base)),
        };
        first.into_iter().chain(second)
    }
}

impl From<Mapping> for Entry {
    fn from(mapping: Mapping) -> Self {
        match mapping.physical {
            None => Self::Unmapped,
            Some(physical) => Self::Mapped { physical, valid: mapping.valid },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPOSITE: Composite =
        Composite { overlay: PhysicalExtent(7), top: 6, base: PhysicalExtent(9), under: 3 };

    #[test]
    fn a_plain_entry_is_the_mapping_that_it_was_made_from() {
        for mapping in [
            Mapping::UNMAPPED,
            Mapping { physical: Some(PhysicalExtent(5)), valid: 0 },
            Mapping { physical: Some(PhysicalExtent(5)), valid: 6 },
        ] {
            let entry = Entry::from(mapping);
            assert_eq!(entry.plain(), Some(mapping));
            assert_eq!(entry.is_mapped(), mapping.is_mapped());
            assert_eq!(entry.valid(), mapping.valid);
            assert!(entry.extents().eq(mapping.physical));
        }
    }

    #[test]
    fn a_composite_entry_names_two_extents_and_is_no_plain_mapping() {
        let entry = Entry::Composite(COMPOSITE);
        assert_eq!(entry.plain(), None);
        assert!(entry.is_mapped());
        assert_eq!(entry.valid(), 7);
        assert_eq!(entry.base(), Mapping { physical: Some(PhysicalExtent(9)), valid: 3 });
        assert!(entry.extents().eq([PhysicalExtent(7), PhysicalExtent(9)]));
    }
}
