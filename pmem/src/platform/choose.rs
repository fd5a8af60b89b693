//! In which region a namespace goes. It lies in one of them as a whole: memory of another node of
//! processors is slow, so none is ever made of several.

use std::fmt;

use super::key::RegionKey;
use super::region::{Region, RegionKind};

/// Which of several that have room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// Where most is free.
    #[default]
    MostFree,
    /// One near to this node of processors, and where most is free without one.
    Near(u32),
}

/// Why a region can't take it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Less is free in all.
    NotEnough,
    /// Enough is free in all, and no piece is large enough.
    NotContiguous,
    /// The namespace is to grow, and the kernel would extend it in front: more is free there than
    /// behind.
    InFront {
        /// Bytes that are free right in front of it.
        front: u64,
        /// Bytes that are free right behind it.
        behind: u64,
    },
    /// The region cannot be used for this, however much is free.
    Unsuited(&'static str),
}

/// A region that can't take it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Which.
    pub region: RegionKey,
    /// Bytes that would be taken of it.
    pub needed: u64,
    /// Bytes that are free in all.
    pub free: u64,
    /// Bytes of the largest piece.
    pub largest: u64,
    /// Why not.
    pub reason: Reason,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { region, needed, free, largest, reason } = self;
        match reason {
            Reason::NotEnough => write!(f, "region {region}: {needed} bytes needed, {free} free"),
            Reason::NotContiguous => write!(
                f,
                "region {region}: {needed} bytes needed in one piece, {free} free and the largest \
                 piece {largest}"
            ),
            Reason::InFront { front, behind } => write!(
                f,
                "region {region}: {needed} bytes needed right behind it, {behind} free there, and \
                 the kernel would take those in front of it first, of which {front} are free"
            ),
            Reason::Unsuited(why) => write!(f, "region {region} {why}"),
        }
    }
}

/// No region has room.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct NoRoom {
    /// Why, for each of them.
    pub refusals: Vec<Refusal>,
}

impl NoRoom {
    /// Whether making space would help: each region that can be used lacks it.
    #[must_use]
    pub fn is_space(&self) -> bool {
        self.refusals.iter().any(|one| !matches!(one.reason, Reason::Unsuited(_)))
    }

    /// Whether somewhere enough is free, but in pieces.
    #[must_use]
    pub fn is_fragmented(&self) -> bool {
        self.refusals.iter().any(|one| one.reason == Reason::NotContiguous)
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.refusals.is_empty() {
            return f.write_str("there is no region of persistent memory");
        }
        for (at, refusal) in self.refusals.iter().enumerate() {
            write!(f, "{}{refusal}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Whether a region can take `needed` bytes in one piece.
///
/// # Errors
/// Why it can't.
pub fn fits(region: &Region, needed: u64) -> Result<(), Refusal> {
    let (free, largest) = (region.available, region.max_available_extent);
    let reason = if region.kind != RegionKind::Pmem {
        Reason::Unsuited("is volatile memory")
    } else if region.read_only {
        Reason::Unsuited("is read-only")
    } else if !region.enabled {
        Reason::Unsuited("is not enabled")
    } else if !region.labelled {
        Reason::Unsuited("has no labels, so that there can be no namespaces besides the one it has")
    } else if needed > free {
        Reason::NotEnough
    } else if needed > largest {
        Reason::NotContiguous
    } else {
        return Ok(());
    };
    Err(Refusal { region: region.key.clone(), needed, free, largest, reason })
}

/// The region that takes it. `needed` returns the bytes that it takes of each, as steps differ.
///
/// # Errors
/// When none can, for each the reason. A sufficient sum does not help.
pub fn choose<'a>(
    regions: impl IntoIterator<Item = &'a Region>,
    needed: impl Fn(&Region) -> Option<u64>,
    policy: Policy,
) -> Result<&'a Region, NoRoom> {
    let mut refusals = Vec::new();
    let mut fitting: Vec<&Region> = Vec::new();
    for region in regions {
        match fits(region, needed(region).unwrap_or(u64::MAX)) {
            Ok(()) => fitting.push(region),
            Err(refusal) => refusals.push(refusal),
        }
    }
    let is_near = |region: &Region| match policy {
        Policy::MostFree => false,
        Policy::Near(node) => region.numa_node == Some(node),
    };
    // Of equals the first by key, so that the same question has the same answer.
    let best = fitting.into_iter().rev().max_by_key(|one| (is_near(one), one.available));
    best.ok_or(NoRoom { refusals })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::Domain;

    const GIB: u64 = 1 << 30;

    fn region(cookie: u64, node: u32, available: u64, largest: u64) -> Region {
        Region {
            key: RegionKey::Cookie(cookie),
            name: format!("region{node}"),
            kind: RegionKind::Pmem,
            size: 127 * GIB,
            available,
            max_available_extent: largest,
            align: Some(16 << 20),
            numa_node: Some(node),
            domain: Domain::MemoryController,
            ways: 1,
            dimms: Vec::new(),
            bad_blocks: Vec::new(),
            read_only: false,
            labelled: true,
            enabled: true,
            namespaces: Vec::new(),
        }
    }

    fn chosen(regions: &[Region], size: u64, policy: Policy) -> Result<RegionKey, NoRoom> {
        choose(regions, |_| Some(size), policy).map(|region| region.key.clone())
    }

    /// Row: P5.
    #[test]
    fn most_free_or_near() {
        let regions = [region(1, 0, 8 * GIB, 8 * GIB), region(2, 1, 9 * GIB, 9 * GIB)];
        assert_eq!(chosen(&regions, GIB, Policy::MostFree), Ok(RegionKey::Cookie(2)));
        assert_eq!(chosen(&regions, GIB, Policy::Near(0)), Ok(RegionKey::Cookie(1)));
        // The near one has no room: a far one is better than none.
        assert_eq!(chosen(&regions, 9 * GIB, Policy::Near(0)), Ok(RegionKey::Cookie(2)));
        let equal = [region(1, 0, 8 * GIB, 8 * GIB), region(2, 1, 8 * GIB, 8 * GIB)];
        assert_eq!(chosen(&equal, GIB, Policy::MostFree), Ok(RegionKey::Cookie(1)));
    }

    /// Row: P6.
    #[test]
    fn two_half_full_regions_are_not_one() {
        let half = 64 * GIB;
        let regions = [region(1, 0, half, half), region(2, 1, half, half)];
        let refused = chosen(&regions, 96 * GIB, Policy::MostFree).unwrap_err();
        assert!(refused.is_space() && !refused.is_fragmented());
        assert_eq!(refused.refusals.len(), 2);
        let text = refused.to_string();
        assert!(text.contains("region 0x1: 103079215104 bytes needed, 68719476736 free"), "{text}");
    }

    /// 127 GB: 63 and 1 were made, and 63 deleted. 126 are free, and no more than 63 in one piece.
    ///
    /// Row: P3.
    #[test]
    fn fragmentation_is_distinguished_from_too_little_space() {
        let regions = [region(1, 0, 126 * GIB, 63 * GIB)];
        let refused = chosen(&regions, 64 * GIB, Policy::MostFree).unwrap_err();
        assert_eq!(refused.refusals[0].reason, Reason::NotContiguous);
        let text = refused.to_string();
        assert!(text.contains("135291469824 free and the largest piece 67645734912"), "{text}");
        let refused = chosen(&regions, 127 * GIB, Policy::MostFree).unwrap_err();
        assert_eq!(refused.refusals[0].reason, Reason::NotEnough);
    }

    #[test]
    fn an_unsuitable_region_is_no_lack_of_space() {
        let mut regions = [region(1, 0, GIB, GIB), region(2, 0, GIB, GIB), region(3, 0, GIB, GIB)];
        regions[0].kind = RegionKind::Volatile;
        regions[1].read_only = true;
        regions[2].labelled = false;
        let refused = chosen(&regions, 1, Policy::MostFree).unwrap_err();
        assert!(!refused.is_space());
        assert!(refused.to_string().contains("0x2 is read-only; region 0x3 has no labels"));
        let none = chosen(&[], 1, Policy::MostFree).unwrap_err();
        assert_eq!(none.to_string(), "there is no region of persistent memory");
    }
}
