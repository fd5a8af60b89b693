//! Which part of a region is ours.

use super::error::PlatformError;
use super::region::Region;
use super::step::Step;

/// The bytes of a share in percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Bytes that may be ours.
    pub allowed: u64,
    /// Bytes that are.
    pub own: u64,
    /// Bytes that a namespace can be made of now, a multiple of the step; 0 for none.
    pub to_make: u64,
}

impl Share {
    /// Ours is more than the percentage says, as after it was lowered. Nothing shrinks by that.
    #[must_use]
    pub fn is_beyond(&self) -> bool {
        self.own > self.allowed
    }
}

/// A percentage as it is configured.
///
/// # Errors
/// When it is not from 1 to 100.
pub fn checked_percentage(percent: u64) -> Result<u8, PlatformError> {
    let within = u8::try_from(percent).ok().filter(|percent| (1..=100).contains(percent));
    within.ok_or_else(|| PlatformError::Invalid {
        field: "percentage",
        value: percent.to_string(),
        allowed: "from 1 to 100".to_owned(),
    })
}

/// Returns the bytes of a percentage of a region of which pools already have `own` bytes. Foreign
/// namespaces are neither counted nor changed: they only reduce the space that is left.
#[must_use]
pub fn share(region: &Region, percent: u8, own: u64, step: Step) -> Share {
    let part = u128::from(region.size) * u128::from(percent.min(100)) / 100;
    let allowed = u64::try_from(part).unwrap_or(region.size);
    let left = allowed.saturating_sub(own);
    let room = left.min(region.available).min(region.max_available_extent);
    Share { allowed, own, to_make: step.round_down(room) }
}

#[cfg(test)]
mod tests {
    use super::super::key::RegionKey;
    use super::super::region::RegionKind;
    use super::super::step::{HUGE_PAGE, Rule};
    use super::*;
    use crate::media::Domain;

    const GIB: u64 = 1 << 30;

    fn region(available: u64, largest: u64) -> Region {
        Region {
            key: RegionKey::Cookie(1),
            name: "region0".to_owned(),
            kind: RegionKind::Pmem,
            size: 100 * GIB,
            available,
            max_available_extent: largest,
            align: Some(16 << 20),
            numa_node: None,
            domain: Domain::Unknown,
            ways: 1,
            dimms: Vec::new(),
            bad_blocks: Vec::new(),
            read_only: false,
            labelled: true,
            enabled: true,
            namespaces: Vec::new(),
        }
    }

    fn of(available: u64, largest: u64, percent: u8, own: u64) -> Share {
        let region = region(available, largest);
        share(&region, percent, own, Step::of(&region, HUGE_PAGE, Rule::Formula).unwrap())
    }

    /// Row: P9.
    #[test]
    fn percentages_are_from_1_to_100() {
        for bad in [0, 101, 256 + 50] {
            let text = checked_percentage(bad).unwrap_err().to_string();
            assert_eq!(text, format!("percentage is {bad}: must be from 1 to 100"));
        }
        assert_eq!(checked_percentage(1).unwrap(), 1);
        assert_eq!(checked_percentage(100).unwrap(), 100);
    }

    /// Row: P10.
    #[test]
    fn the_rest_is_left_for_others() {
        let half = of(100 * GIB, 100 * GIB, 50, 0);
        assert_eq!((half.allowed, half.to_make), (50 * GIB, 50 * GIB));
        // Others have much: the rest can be made.
        assert_eq!(of(20 * GIB, 20 * GIB, 50, 0).to_make, 20 * GIB);
        assert_eq!(of(20 * GIB, 7 * GIB + 1, 50, 0).to_make, 7 * GIB);
    }

    /// Row: P9.
    #[test]
    fn own_namespaces_count_and_nothing_shrinks() {
        assert_eq!(of(70 * GIB, 70 * GIB, 50, 30 * GIB).to_make, 20 * GIB);
        let lowered = of(70 * GIB, 70 * GIB, 20, 30 * GIB);
        assert!(lowered.is_beyond());
        assert_eq!(lowered.to_make, 0);
        // Raised: the difference is made.
        let raised = of(70 * GIB, 70 * GIB, 90, 30 * GIB);
        assert!(!raised.is_beyond());
        assert_eq!(raised.to_make, 60 * GIB);
        assert_eq!(of(8 << 20, 8 << 20, 100, 0).to_make, 0);
    }
}
