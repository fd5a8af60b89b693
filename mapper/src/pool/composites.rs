//! Whether the entries of a pool may be composite, and the way from one to the other.

use crate::sync::{AtomicU8, Ordering};

use super::Pool;

/// Whether the entries of a pool may be composite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Composites {
    /// All entries are plain.
    Off = 0,
    /// All entries are plain, and there are pages for composite ones: about to be on.
    Joining = 1,
    /// A redirect makes an entry composite.
    On = 2,
    /// There may be composite entries, and no redirect makes more of them.
    Leaving = 3,
}

impl Composites {
    pub(super) fn at_open(has_feature: bool) -> AtomicU8 {
        AtomicU8::new(if has_feature { Self::On } else { Self::Off } as u8)
    }
}

impl Pool {
    pub(crate) fn composites(&self) -> Composites {
        match self.composites.load(Ordering::SeqCst) {
            0 => Composites::Off,
            1 => Composites::Joining,
            2 => Composites::On,
            _ => Composites::Leaving,
        }
    }

    /// Engine only. A worker that locks a stripe after the engine did knows the new value.
    pub(crate) fn set_composites(&self, to: Composites) {
        self.composites.store(to as u8, Ordering::SeqCst);
    }

    /// Whether entries may be composite.
    #[must_use]
    pub fn has_composite(&self) -> bool {
        matches!(self.composites(), Composites::On | Composites::Leaving)
    }

    /// Whether all entries are to become plain.
    pub(crate) fn is_leaving(&self) -> bool {
        self.composites() == Composites::Leaving
    }

    /// Pages that a leaf may take: with composite entries it has an under page.
    pub(crate) fn leaf_pages(&self) -> u64 {
        if self.composites() == Composites::Off { 1 } else { 2 }
    }
}
